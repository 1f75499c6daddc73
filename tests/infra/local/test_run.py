"""`run_local` from options to exit code: mistakes before anything starts, then whole executions of the real state machine."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.local import demo
from infra.local.run import DEMO, DEPLOYMENT_CONFIG, LocalRequest, run_local
from infra.local.state_folder import LAYOUT
from infra.local.template import read_stack
from pipeline.config import build_config
from pipeline.errors import BadConfig, MissingInput

PROGRAM = (sys.executable, str(Path(__file__).with_name("stage_program.py")))


@pytest.fixture
def state(tmp_path: Path, templates: Path) -> Path:
    """A state folder with the app synthesized already."""
    shutil.copytree(templates, tmp_path / "state/cdk.out")
    return tmp_path / "state"


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"id": "a", "query": "one", "document": "two"}\n')
    return path


def run(state: Path, monkeypatch: pytest.MonkeyPatch, script: dict[str, Any] | None = None, **options: Any) -> int:
    monkeypatch.setenv("TRNPIPE_TEST_SCRIPT", json.dumps(script or {}))
    return run_local(LocalRequest.of(state, **options), program=PROGRAM, plain=True)


def execution_input(state: Path) -> dict[str, Any]:
    [path] = (state / "bucket/runs").glob("*/input.json")
    return dict(json.loads(path.read_text())["execution"])


def test_own_data_goes_into_the_bucket_and_the_outcome_is_printed(
    state: Path, shard: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(state.parent)
    code = run(state, monkeypatch, inputs=(shard,), corpus=(shard,), initial="model", nodes=1, settings=("train.steps=3",))
    assert code == 0
    given = execution_input(state)
    bucket = given["data"]["train"][0].removesuffix("/data/input/")
    assert given == {
        "data": {"train": [f"{bucket}/data/input/"], "corpus": [f"{bucket}/data/corpus/"]},
        "model": {"initial": str(state.parent / "model")},
        "nodes": 1,
        "train": {"steps": 3},
    }
    [stored] = (state / "bucket/data/input").iterdir()
    assert stored.name.endswith("-pairs.jsonl")
    assert stored.read_bytes() == shard.read_bytes()
    text = capsys.readouterr().out
    assert "ndcg@10     0.5000  0.5500     +0.0500" in text
    assert "10 steps, 123.4 pairs/s" in text
    assert "1,000 documents, 600 of them copied, 500.0 documents/s" in text
    assert str(next((state / "bucket/runs").iterdir()) / "embed") in text


@pytest.mark.parametrize(
    ("options", "nodes"),
    [
        ({"device": "xla"}, 1),
        ({"settings": ("device.kind=xla",)}, 1),
        ({"device": "xla", "nodes": 2}, 2),
        ({"device": "xla", "settings": ("nodes=2",)}, 2),
        ({"device": "cpu"}, None),
        ({}, None),
    ],
)
def test_xla_has_one_node_unless_another_number_is_asked_for(
    tmp_path: Path, shard: Path, options: dict[str, Any], nodes: int | None
) -> None:
    request = LocalRequest.of(tmp_path / "state", inputs=(shard,), **options)
    assert request.given.get("nodes") == nodes
    assert request.config.nodes == (nodes or DEPLOYMENT_CONFIG["nodes"])


def test_paths_in_settings_are_below_the_folder_of_the_command(
    tmp_path: Path, shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    golden = {"name": "shop", "queries": "q.jsonl", "qrels": "s3://bucket/qrels.tsv", "corpus": "sets/c.jsonl"}
    settings = (f"evaluate.sets=[{json.dumps(golden)}]", "data.delete=[gone.txt]")
    request = LocalRequest.of(tmp_path / "state", inputs=(shard,), settings=settings)
    made = {"queries": str(tmp_path / "q.jsonl"), "corpus": str(tmp_path / "sets/c.jsonl")}
    assert request.given["evaluate"]["sets"] == [{**golden, **made}]
    assert request.given["data"]["delete"] == [str(tmp_path / "gone.txt")]


def test_a_run_that_has_nothing_to_ingest_or_to_compile_says_so(
    state: Path, shard: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = {
        "prepare": {"metrics": {"ingest_children": 0, "mine_children": 0}},
        "plan": {"metrics": {"nodes": 1, "embed_children": 2, "compile": False}},
    }
    assert run(state, monkeypatch, script, inputs=(shard,)) == 0
    lines = [" ".join(line.split()[1:]) for line in capsys.readouterr().out.splitlines()]
    for stage, reason, after in (("ingest", "no new shard", "plan"), ("compile", "nothing to compile", "train")):
        at = lines.index(f"{stage} skipped: {reason}")
        assert lines[at + 1] == f"{after} started"
        assert not any(line.startswith((f"{stage} started", f"{stage} done")) for line in lines)
        assert not list((state / "bucket/runs").glob(f"*/{stage}/*"))


def test_the_gate_s_refusal_is_67_and_shows_the_numbers(
    state: Path, shard: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gate = {"baseline": {"ndcg@10": 0.5}, "new": {"ndcg@10": 0.4}, "gate": {"verdict": "refused", "reason": "it fell"}}
    assert run(state, monkeypatch, {"evaluate": {"metrics": gate}}, inputs=(shard,)) == 67
    text = capsys.readouterr().out
    assert "gate: refused: it fell" in text
    assert "-0.1000" in text
    assert "refused: the published model stays" in text


def test_a_failure_ends_with_the_stage_s_code_its_words_and_its_log(
    state: Path, shard: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(state, monkeypatch, {"train": {"exit": [75, 65]}}, inputs=(shard,)) == 65
    lines = capsys.readouterr().out.splitlines()
    assert lines[-5:-1] == ["error:  train cannot go on", "value:  seen", "rule:   it should", "remedy: help it"]
    log = Path(lines[-1].removeprefix("log:    "))
    assert log.name == "attempt-2-node-00000.log"
    assert "train attempt 2 node 0" in log.read_text()


def test_a_failure_names_input_files_as_they_were_typed(
    state: Path, shard: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(shard.parent)
    digest = hashlib.sha256(shard.read_bytes()).hexdigest()[:12]
    copy = f"s3://{read_stack(state / 'cdk.out').bucket}/data/input/{digest}-pairs.jsonl"
    failing = {"prepare": {"exit": [65], "value": [f"{copy}:7: is odd", "s3://elsewhere/a"]}}
    assert run(state, monkeypatch, failing, inputs=(Path("pairs.jsonl"),)) == 65
    values = [line for line in capsys.readouterr().out.splitlines() if line.startswith("value:")]
    assert values == ["value:  pairs.jsonl:7: is odd", "value:  s3://elsewhere/a"]


def test_options_are_beside_what_the_configuration_names(state: Path, shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = shard.with_name("more.jsonl")
    more.write_text('{"id": "b", "query": "three", "document": "four"}\n')
    settings = (f'data.train=["{more}"]', f'data.corpus=["{more}"]')
    assert run(state, monkeypatch, inputs=(shard,), corpus=(shard,), settings=settings) == 0
    data = execution_input(state)["data"]
    assert data["train"][0] == data["corpus"][0] == str(more)
    assert [uri.rpartition("/data/")[2] for key in ("train", "corpus") for uri in data[key][1:]] == ["input/", "corpus/"]


def test_a_run_resumes_with_the_input_that_it_had(state: Path, shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(state, monkeypatch, {"prepare": {"exit": [64]}}, inputs=(shard,), nodes=1) == 64
    [folder] = (state / "bucket/runs").iterdir()
    before = execution_input(state)
    assert before["nodes"] == 1
    assert run(state, monkeypatch, run=folder.name, nodes=2, device="cpu", settings=("share=experiments",)) == 0
    assert execution_input(state) == {**before, "run": folder.name, "share": "experiments"}
    assert (folder / "publish/result.json").is_file()
    with pytest.raises(MissingInput, match=folder.name):
        run(state, monkeypatch, run="another")


def test_the_published_model_is_the_next_parent(state: Path, shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = state / "bucket/registry/current.json"
    registry.parent.mkdir(parents=True)
    registry.write_text("{}")
    (state / "layout.txt").write_text(LAYOUT)
    assert run(state, monkeypatch, inputs=(shard,)) == 0
    assert "model" not in execution_input(state)


def test_the_demo_does_not_take_the_place_of_what_is_published(state: Path, shard: Path) -> None:
    registry = state / "bucket/registry/current.json"
    registry.parent.mkdir(parents=True)
    registry.write_text("{}")
    (state / "layout.txt").write_text(LAYOUT)
    for refresh in (False, True):
        with pytest.raises(BadConfig, match="no data is named") as caught:
            LocalRequest.of(state, refresh=refresh)
        assert "--config" in str(caught.value)
        assert not LocalRequest.of(state, refresh=refresh, settings=(f"data.train=[{shard}]",)).demo
    (state / "bucket" / DEMO).mkdir(parents=True)
    assert LocalRequest.of(state, refresh=True).demo


@pytest.mark.parametrize("mode", ["snapshots", "deltas"])
def test_files_of_a_corpus_have_no_order(state: Path, shard: Path, mode: str) -> None:
    """Those of folders have, which --corpus does not keep."""
    with pytest.raises(BadConfig, match="--corpus gives files") as caught:
        LocalRequest.of(state, inputs=(shard,), corpus=(shard.parent,), settings=(f"data.corpus_mode={mode}",))
    assert f"--set data.corpus=[{shard.parent}]" in str(caught.value)


def test_the_demos_model_is_the_initial_one(state: Path, shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "initial_folder", lambda: Path("/demo"))
    assert run(state, monkeypatch, inputs=(shard,)) == 0
    assert execution_input(state)["model"] == {"initial": "/demo"}


def test_the_demo_s_second_week_has_the_size_of_the_first(
    state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = [demo.Pair(f"id{number}", f"query {number}", f"document {number}") for number in range(200)]
    monkeypatch.setattr(demo, "read_pairs", lambda: pairs)
    monkeypatch.setattr(demo, "measure_gflops", lambda: 500.0)
    monkeypatch.setitem(demo.SIZES, "M", replace(demo.SIZES["M"], rows=130))
    assert run(state, monkeypatch) == 0
    released = sorted((state / "bucket/data/docstrings").iterdir())
    assert len(released) == demo.FIRST_RUN_WEEKS
    monkeypatch.setattr(demo, "measure_gflops", lambda: 1.0)
    with pytest.raises(BadConfig, match="another size"):
        run(state, monkeypatch, demo_size="S")
    assert run(state, monkeypatch) == 0
    assert sorted((state / "bucket/data/docstrings").iterdir()) == [*released, state / "bucket/data/docstrings/week-14.jsonl.gz"]
    assert sum(len(gzip.decompress(path.read_bytes()).splitlines()) for path in (state / "demo").glob("week-*.jsonl.gz")) == 130
    for path in (state / "bucket/runs").glob("*/input.json"):
        given = json.loads(path.read_text())["execution"]
        assert given.keys() == {*demo.SIZES["M"].config, "model"}
        uri = f"s3://{read_stack(state / 'cdk.out').bucket}/data/docstrings/"
        assert {name: task["train"] for name, task in given["data"]["tasks"].items()} == {"search": [uri], "package": [uri]}
        assert given["train"] == {**demo.SIZES["M"].config["train"], "batch_by": "task", "tasks": given["train"]["tasks"]}
        assert build_config(given).train.classes == {"package": ("python", *demo.PACKAGES)}
    text = capsys.readouterr().out
    assert "demo size M, because this machine computes 500 GFLOP/s" in text
    assert "demo size M, as in earlier weeks" in text


def test_the_demo_with_a_corpus_of_one_s_own(state: Path, shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [demo.Pair(f"id{number}", f"query {number}", f"document {number}") for number in range(200)]
    monkeypatch.setattr(demo, "read_pairs", lambda: pairs)
    monkeypatch.setitem(demo.SIZES, "M", replace(demo.SIZES["M"], rows=130))
    assert run(state, monkeypatch, demo_size="M", corpus=(shard,)) == 0
    data = execution_input(state)["data"]
    assert [uri.partition("/data/")[2] for uri in data["corpus"]] == ["corpus/"]
    [stored] = (state / "bucket/data/corpus").iterdir()
    assert stored.read_bytes() == shard.read_bytes()


def start(state: Path, shard: Path, script: dict[str, Any], **environment: str) -> subprocess.Popen[str]:
    """Start a run in a process of its own, and return it once health_check runs."""
    program = textwrap.dedent(
        f"""
        import sys
        from pathlib import Path
        from infra.local.run import LocalRequest, run_local
        state, shard = Path({str(state)!r}), Path({str(shard)!r})
        sys.exit(run_local(LocalRequest.of(state, inputs=(shard,)), program={PROGRAM!r}, plain=True))
        """
    )
    environment = {**os.environ, "TRNPIPE_TEST_SCRIPT": json.dumps(script), **environment}
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    while "health_check  started" not in (line := process.stdout.readline()):
        assert line, "the run ended before it could be stopped"
    return process


def test_sigterm_stops_everything_whatever_the_users_aws_settings(state: Path, shard: Path, tmp_path: Path) -> None:
    (tmp_path / "config").write_text("[default]\nendpoint_url = http://127.0.0.1:9\n[broken")
    # Whatever the user has configured for AWS is not the local run's: a profile that does not exist must not end it.
    settings = {
        **dict.fromkeys(("AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_CA_BUNDLE", "AWS_ACCESS_KEY_ID"), "missing"),
        **{name: str(tmp_path / "config") for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE")},
        **dict.fromkeys(("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9"),
    }
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        process = start(state, shard, {"health_check": {"seconds": 600}}, **settings)
        process.send_signal(number)
        rest, _ = process.communicate(timeout=60)
        assert process.returncode == code
        assert "resume it with --run local-" in rest
        assert json.loads((state / "lock.json").read_text()) != []


def test_runs_in_two_state_folders_do_not_meet(state: Path, shard: Path, tmp_path: Path, templates: Path) -> None:
    """Endpoint and rendezvous take ports that are free, so no port can be taken."""
    shutil.copytree(templates, tmp_path / "other/cdk.out")
    long = start(state, shard, {"health_check": {"seconds": 600}})
    try:
        short = start(tmp_path / "other", shard, {})
        rest, _ = short.communicate(timeout=300)
        assert short.returncode == 0, rest
        assert long.poll() is None
    finally:
        long.send_signal(signal.SIGTERM)
        long.communicate(timeout=60)
    assert long.returncode == 143
    assert len(list((tmp_path / "other/bucket/runs").glob("*/publish/result.json"))) == 1
    assert not list((state / "bucket/runs").glob("*/publish/result.json"))
