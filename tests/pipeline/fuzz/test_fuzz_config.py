"""Configuration from anybody: accepted, or refused in our own words; never a traceback, a hang, or a full memory."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.config import RunConfig, RunInput, build_config, load_config_file, parse_settings
from pipeline.errors import BadConfig, TrnpipeError
from tests.pipeline.fuzz.mutations import documents, files, texts

VALID = RunConfig().model_dump(mode="json")
LAUGHS = "data:\n  columns:\n    a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"    {chr(98 + n)}: &{chr(98 + n)} [{', '.join([f'*{chr(97 + n)}'] * 9)}]\n" for n in range(9)
)
"""A few hundred bytes of YAML that are 9 ** 10 values when they are written out."""


def speaks(error: TrnpipeError) -> None:
    """The message has its parts, and a terminal shows all of it."""
    assert error.what
    assert not any(unicodedata.category(character) in ("Cc", "Cs") for character in str(error) if character not in "\n\t")
    assert len(str(error)) < 100_000


@given(documents(VALID))
def test_any_document_is_a_configuration_or_a_refusal(document: object) -> None:
    if not isinstance(document, dict):
        return
    try:
        config = build_config(document)
    except BadConfig as error:
        speaks(error)
    else:
        assert RunConfig.model_validate_json(config.model_dump_json()) == config


@given(files(VALID), st.sampled_from([".json", ".yaml"]))
@example(b"a: 2001-99-99", ".yaml")
@example(b"!!timestamp x", ".yaml")
@example(b"!!bool x", ".yaml")
@example(b'!!int ""', ".yaml")
@example(b"!!python/object/apply:os.system [exit]", ".yaml")
@example(b"&a [*a]", ".yaml")
@example(b"a: &a {b: *a}", ".yaml")
@example(b"9" * 10_000, ".json")
@example(b"\xff\xfe", ".yaml")
def test_any_file_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes, suffix: str) -> None:
    path = tmp_path_factory.getbasetemp() / f"fuzzed{suffix}"
    path.write_bytes(data)
    try:
        build_config(load_config_file(path))
    except BadConfig as error:
        speaks(error)


@given(st.lists(st.builds("{}={}".format, st.sampled_from(["train.steps", "run", "data.train", "x", "share"]) | texts, texts)))
@example(["train.steps=" + "[" * 100_000])
@example(["nodes=!!timestamp x"])
@example(["k" * 1_000_000 + "=1"])
@example(["train" + ".a" * 100_000 + "=1", "train" + ".a" * 100_000 + "=2"])
@example(["time_budget=1e300"])
@example(["time_budget=P99999999999D"])
def test_any_setting_is_read_or_refused(settings: list[str]) -> None:
    try:
        build_config(parse_settings(settings))
    except BadConfig as error:
        speaks(error)


@given(files({"deployment": {"config": {}, "allowed_nodes": [1, 2]}, "execution": {"train": {"steps": 3}}, "execution_arn": "a"}))
def test_any_input_of_an_execution(data: bytes) -> None:
    try:
        request = RunInput.model_validate_json(data)
    except ValueError:
        return  # what prepare catches
    try:
        build_config(request.deployment.config, request.execution)
    except BadConfig as error:
        speaks(error)


@pytest.mark.parametrize("where", ["train: {steps: *j}", "embed: {length: *j}", "nodes: *j", "{}: *j"])
def test_yaml_that_grows_does_not_fill_the_memory(tmp_path: Path, where: str) -> None:
    (tmp_path / "run.yaml").write_text(f"{LAUGHS}{where}\n")
    command = [sys.executable, "-m", "pipeline.cli", "config", "check", str(tmp_path / "run.yaml")]
    limit = 2 << 30
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert ended.returncode == 64, ended.stderr[-2000:]
    assert "Traceback" not in ended.stderr


NAMES = [
    "../x",
    "a/b",
    "",
    ".",
    "..",
    "a\0b",
    "a" * 81,
    "rún",
    "а",
    "run\n",
    "run ",
    "-run",
    "run\u2028",
    "٣",
    "a.b",
    "*",
    "a\\b",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("key", ["run", "registry", "share"])
def test_names_that_lead_elsewhere_are_refused(key: str, name: str) -> None:
    if (key, name) == ("share", "a" * 81):
        return  # Batch's share identifiers are longer
    with pytest.raises(BadConfig) as refusal:
        build_config(json.loads(json.dumps({key: name})))
    assert key in str(refusal.value)
