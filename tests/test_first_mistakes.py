"""Likely first mistakes, as people type them: each is refused with its remedy, before anything is loaded or written."""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from infra.local import demo
from infra.local.inputs import SHARD_SUFFIXES
from infra.local.state_folder import owned
from pipeline.dataset.records import SUFFIXES
from pipeline.model.families import FAMILIES
from pipeline.model.inventory import MODEL_TYPES

ROOT = Path(__file__).resolve().parents[1]
ROW = b'{"id": "a", "query": "one", "document": "two"}\n'
ROWS = b"".join(b'{"id": "a%d", "query": "one %d", "document": "two %d"}\n' % (n, n, n) for n in range(50))
LATIN = b"caf\xe9".decode(errors="surrogateescape")

HEAVY = {"torch", "transformers", "moto", "aws_cdk"}
"""Packages that take seconds to load."""
LONGEST_REFUSAL = 25
"""Lines."""
USERS_AWS = {"AWS_PROFILE": "nope", "AWS_CONFIG_FILE": "/nope", "AWS_SHARED_CREDENTIALS_FILE": "/nope", "AWS_CA_BUNDLE": "/nope"}
"""A user's AWS settings, all of them wrong. A local run uses none."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with everything that the table names, good and bad."""
    files = {
        "good.jsonl": ROWS,
        "anchors.jsonl": ROWS.replace(b"query", b"text1"),
        "both.jsonl": ROWS.replace(b"query", b"anchor").replace(b"id", b"question"),
        "labels.jsonl": ROWS.replace(b'"id"', b'"locale": 7, "id"'),
        "pretty.jsonl": json.dumps([{"query": "one", "document": "two"}], indent=2).encode(),
        "ends.jsonl.gz": gzip.compress(ROWS)[:-9],
        "columns.csv": b"query,answer,passage\na,b,c\n",
        "header.csv": b"query,document\n",
        "missing.csv": b"query,body\na,b\n",
        "ends.parquet": b"PAR1 but nothing else",
        "good.jsonl.gz": gzip.compress(ROW),
        "list.json": b"[]",
        "notes.txt": b"text",
        "run.csv.bz2": b"BZh9",
        "empty.jsonl": b"",
        "empty.jsonl.gz": b"",
        "nothing.csv.gz": gzip.compress(b""),
        "plain.jsonl.gz": ROW,
        "plain.csv.zst": ROW,
        "plain.parquet": ROW,
        "packed.jsonl": gzip.compress(ROW),
        "sheet.csv": b"PK\x03\x04",
        "cut.jsonl.gz": gzip.compress(ROW)[:5],
        "nulls/one.csv": b"",
        "lists/one.json": b"[]",
        "drafts/_part.jsonl": ROW,
        f"{LATIN}/rows.jsonl": ROW,
        f"{LATIN}.jsonl": ROW,
        "old/bucket/registry/current.json": b"{}",
        "newer/layout.txt": b"99\n",
        "missing-model.yaml": b"model: {initial: absent}\n",
        "missing-data.yaml": b"data: {train: [absent.jsonl]}\n",
        "alone/weights.pt": b"x",
        "gpt2/config.json": json.dumps({"model_type": "gpt2"}).encode(),
        "gpt2/model.safetensors": b"x",
    }
    for name, content in files.items():
        path = tmp_path / "work" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    link_model(tmp_path / "work/above/minilm")
    link_model(tmp_path / "work/weightless", without="model.safetensors")
    link_model(tmp_path / "work/tokenless", without="tokenizer|vocab")
    return tmp_path / "work"


def link_model(folder: Path, *, without: str = "$.") -> None:
    """Make a model folder of links to the demo's model, without the files whose names begin with a pattern."""
    folder.mkdir(parents=True)
    for path in demo.initial_folder().iterdir():
        if not re.match(without, path.name):
            (folder / path.name).symlink_to(path)


def run(command: list[str], folder: Path, **environment: str) -> tuple[int, str, set[str]]:
    """Run `trnpipe`; return its exit code, what it printed, and the packages that it loaded."""
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "pipeline.cli", *command],
        cwd=folder,
        env={**os.environ, **USERS_AWS, **environment},
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=300,
    )
    lines = (result.stdout + result.stderr).splitlines()
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines if line.startswith("import time:")}
    return result.returncode, "\n".join(line for line in lines if not line.startswith("import time:")), loaded


def require_refusal(typed: str, code: int, words: tuple[str, ...], folder: Path) -> str:
    before = sorted(os.walk(folder))
    found, text, loaded = run(shlex.split(typed), folder)
    assert found == code, text
    assert [word for word in words if word not in text] == [], text
    assert "Traceback" not in text
    assert len(text.splitlines()) <= LONGEST_REFUSAL
    assert not HEAVY & loaded
    assert sorted(os.walk(folder)) == before, "a refused command leaves nothing behind"
    return text


GOOD = "local --input good.jsonl --set gate.undecided=accept --set data.holdout_fraction=0.5"
DOWNLOAD = "hf download NAME --local-dir DIR"
CONVERT = "jq -c '.[]' FILE.json > FILE.jsonl"

MISTAKES: list[tuple[str, int, tuple[str, ...]]] = [
    # The state folder.
    (f"{GOOD} --state /proc/x", 64, ("the state folder cannot be used", "/proc/x", "another folder with --state")),
    (f"{GOOD} --state good.jsonl", 64, ("the state folder cannot be used", "good.jsonl: Not a directory", "--state")),
    (f"{GOOD} --state good.jsonl/x", 64, ("the state folder cannot be used", "good.jsonl/x", "--state")),
    (f"{GOOD} --state {'x' * 300}", 64, ("the state folder cannot be used", "File name too long", "--state")),
    (f"{GOOD} --state old", 64, ("another version", "layout without a number", "trnpipe local --state OTHER", "make clean")),
    (f"{GOOD} --state newer", 64, ("another version", "layout 99", "reads layout 2", "trnpipe local --state OTHER")),
    (f"{GOOD} --state {LATIN}/state", 64, ("the path is not UTF-8", r"caf\udce9/state", "rename")),
    ("local --run absent", 66, ("there is no such run", "absent", "--state")),
    ("local --run ../x", 64, ("invalid run id", "../x")),
    # Inputs, by their names and first bytes.
    ("local --input absent.jsonl", 66, ("the input file does not exist", "absent.jsonl", "check the path")),
    ("local --input list.json", 64, ("the input file is no shard", "list.json", ".jsonl.gz", ".parquet", CONVERT)),
    ("local --input notes.txt", 64, ("the input file is no shard", "notes.txt", ".csv", "saved as CSV")),
    ("local --input run.csv.bz2", 64, ("the input file is no shard", "run.csv.bz2", "unpacked")),
    ("local --input lists", 66, ("holds no shards", "lists", ".jsonl", CONVERT)),
    ("local --input drafts", 66, ("holds no shards", "drafts")),
    ("local --input empty.jsonl", 65, ("the input is empty", "empty.jsonl", "at least one row", "write the file again")),
    ("local --input empty.jsonl.gz", 65, ("the input is empty", "empty.jsonl.gz")),
    ("local --input nothing.csv.gz", 65, ("the input is empty", "nothing.csv.gz")),
    ("local --input nulls", 65, ("the input is empty", "nulls")),
    (f"{GOOD} --corpus empty.jsonl", 65, ("the input is empty", "empty.jsonl")),
    ("local --input plain.jsonl.gz", 65, ("not what its name says", "plain.jsonl.gz: text instead of .gz", "suffix")),
    ("local --input plain.csv.zst", 65, ("not what its name says", "plain.csv.zst: text instead of .zst", "suffix")),
    ("local --input plain.parquet", 65, ("not what its name says", "plain.parquet: text instead of .parquet", "suffix")),
    ("local --input packed.jsonl", 65, ("not what its name says", "packed.jsonl: .gz instead of text", "suffix")),
    ("local --input sheet.csv", 65, ("not what its name says", "sheet.csv: .zip instead of text", "saved as CSV")),
    ("local --input cut.jsonl.gz", 65, ("cut off or damaged", "cut.jsonl.gz", "download it again")),
    (f"local --input {LATIN}/rows.jsonl", 64, ("the path is not UTF-8", r"caf\udce9/rows.jsonl", "rename")),
    ("local --input .", 64, ("the path is not UTF-8", r"caf\udce9", "symbolic link")),
    ("local --config missing-data.yaml", 66, ("the input file does not exist", "absent.jsonl", "check the path")),
    # Inputs, by their first rows.
    (
        "local --input anchors.jsonl",
        65,
        ("too many rows are bad: 50 of 50", "the file's columns are id, text1, document: add --set data.columns.query=text1"),
    ),
    ("local --input missing.csv", 65, ("lacks a column", "missing.csv", "add --set data.columns.document=body")),
    ("local --input columns.csv", 65, ("more than one column may be the document", "--set data.columns.document=answer")),
    ("local --input both.jsonl", 65, ("more than one column may be the query", "--set data.columns.query=")),
    ("local --input labels.jsonl", 65, ("50 of 50", "'locale' is not text", "labels.jsonl:3")),
    ("local --input pretty.jsonl", 65, ("too many rows are bad", "is not JSON", "pretty.jsonl:1")),
    ("local --input header.csv", 65, ("there is no row", "header.csv")),
    ("local --input ends.jsonl.gz", 65, ("cut off or damaged", "ends.jsonl.gz")),
    ("local --input ends.parquet", 65, ("cut off or damaged", "ends.parquet")),
    (
        "local --input good.jsonl",
        64,
        ("too small to judge", "gate.max_drop = 0.005", "holdout_fraction", "gate.undecided=accept"),
    ),
    (f"{GOOD} --corpus good.jsonl --set data.columns.positive=document", 64, ("unknown column", "data.columns.positive")),
    (f"{GOOD} --corpus missing.csv", 65, ("lacks a column", "missing.csv: text", "add --set data.columns.text=")),
    ("init --input absent.csv", 66, ("the input file does not exist", "absent.csv", "check the path")),
    ("init --input list.json", 64, ("the input file is no shard", "list.json", CONVERT)),
    ("init --input missing.csv", 65, ("lacks a column", "missing.csv", "add --set data.columns.document=body")),
    ("init --input good.jsonl --parent intfloat/e5-small-v2", 66, ("the model does not exist", DOWNLOAD)),
    ("init --input good.jsonl --set train.steps=3", 64, ("init takes only data.columns", "in the file that init writes")),
    ("init --input good.jsonl --out good.jsonl", 64, ("the file exists", "good.jsonl", "--out")),
    ("init", 64, ("--input",)),
    # Models.
    (f"{GOOD} --parent /nope/model", 66, ("the model does not exist", "/nope/model", "check the path", DOWNLOAD)),
    (f"{GOOD} --parent intfloat/e5-small-v2", 66, ("the model does not exist", "intfloat/e5-small-v2", "a folder", DOWNLOAD)),
    (f"{GOOD} --initial bert-base-uncased", 66, ("the model does not exist", "bert-base-uncased", DOWNLOAD)),
    (f"{GOOD} --set model.parent=absent", 66, ("the model does not exist", "absent", DOWNLOAD)),
    (f"{GOOD} --config missing-model.yaml", 66, ("the model does not exist", "absent", DOWNLOAD)),
    (f"{GOOD} --parent alone/weights.pt --set model.base=absent", 66, ("the model does not exist", "absent", DOWNLOAD)),
    (f"{GOOD} --parent alone/weights.pt", 66, ("no config.json", "alone", "model.base")),
    (f"{GOOD} --parent alone", 66, ("no config.json", "alone", "model.base")),
    (f"{GOOD} --parent weightless", 66, ("no weight file", "weightless", "model.safetensors", DOWNLOAD)),
    (f"{GOOD} --parent above", 66, ("no weight file", "name the model's own folder", "above/minilm")),
    (f"{GOOD} --parent tokenless", 64, ("no tokenizer", "tokenless", "vocab.txt", "model.base")),
    (f"{GOOD} --parent gpt2", 64, ("not supported", "model_type gpt2", "bert, roberta, xlm-roberta, mpnet", "continue from")),
    ("plan --parent intfloat/e5-small-v2", 66, ("the model does not exist", "intfloat/e5-small-v2", DOWNLOAD)),
    ("plan --parent /nope", 66, ("the model does not exist", "/nope", "check the path")),
    # Settings.
    (f"{GOOD} --set trian.steps=3", 64, ("unknown configuration key", "did you mean train?", "correct the spelling")),
    (f"{GOOD} --set steps=3", 64, ("unknown configuration key", "did you mean train.steps?")),
    (f"{GOOD} --set lr=1e-5", 64, ("unknown configuration key", "lr", "correct the spelling")),
    (f"{GOOD} --set train.steps", 64, ("cannot read the setting", "KEY=VALUE")),
    (f"{GOOD} --set train.steps=two", 64, ("train.steps = 'two'", "valid integer", "correct the values")),
    (f"{GOOD} --set train.steps=0", 64, ("train.steps = 0", "greater than or equal to 1")),
    (f"{GOOD} --set train.schedule=cosin", 64, ("train.schedule = 'cosin'", "'cosine'")),
    (f"{GOOD} --set data.holdout_fraction=20", 64, ("data.holdout_fraction = 20", "less than 1")),
    (f"{GOOD} --nodes 9", 64, ("too many nodes", "nodes = 9", "at most 8")),
    (f"{GOOD} --nodes 0", 64, ("--nodes",)),
    (f"{GOOD} --device gpu", 64, ("device.kind = 'gpu'", "'cuda'")),
    ("local --config absent.yaml", 66, ("the configuration file does not exist", "absent.yaml", "check the path")),
    (f"{GOOD} --demo S", 64, ("the demo brings its own data", "--demo S and --input", "leave one of them out")),
    ("local --demo S --set data.train=[good.jsonl]", 64, ("the demo brings its own data", "--demo S and data.train")),
    ("local --demo XL", 64, ("--demo", "S")),
    ("local --inputs good.jsonl", 64, ("--inputs", "--input")),
    ("locale", 64, ("No such command", "local")),
]


@pytest.mark.parametrize(("typed", "code", "words"), MISTAKES, ids=[ascii(typed)[1:-1][:60] for typed, *_ in MISTAKES])
def test_a_first_mistake_is_refused_with_its_remedy(typed: str, code: int, words: tuple[str, ...], folder: Path) -> None:
    require_refusal(typed, code, words, folder)


@pytest.mark.skipif(any(Path("/dev").glob("nvidia*")), reason="this machine has a GPU")
def test_cuda_without_a_gpu(folder: Path) -> None:
    require_refusal(f"{GOOD} --device cuda", 64, ("no NVIDIA GPU", "device.kind = cuda", "leave --device out"), folder)


def test_a_full_disk(folder: Path, full_disk: Path) -> None:
    words = ("not enough space", "0.0 GB free, at least 0.4 GB needed", "--state")
    require_refusal(f"{GOOD} --state {full_disk}/state", 64, words, folder)
    assert list(full_disk.iterdir()) == []


def test_a_second_run_in_one_state_folder_names_the_first(folder: Path) -> None:
    state = folder / "my state"
    with owned(state):
        earlier, current = state / "bucket/runs/earlier/input.json", state / "bucket/runs/current/input.json"
        for path in (earlier, current):
            path.parent.mkdir(parents=True)
            path.write_text("{}")
        os.utime(earlier, (0, 0))
        words = (f"process {os.getpid()}, run current", f"trnpipe watch --state '{state}'", "another folder with --state")
        text = require_refusal(f"{GOOD} --state 'my state'", 64, ("another local run has this state folder open", *words), folder)
    assert "earlier" not in text
    # The lock has ended, and the stamp stays: what is wrong is now the model.
    assert run(shlex.split(f"{GOOD} --state 'my state' --parent absent"), folder)[0] == 66


def test_a_published_model_makes_the_initial_one_unnecessary(folder: Path) -> None:
    """The file of a weekly run may go on naming a model that was deleted after the first one."""
    registry = folder / "state/bucket/registry/current.json"
    registry.parent.mkdir(parents=True)
    registry.write_text("{}")
    (folder / "state/layout.txt").write_text("2\n")
    with owned(folder / "state"):
        require_refusal(f"{GOOD} --state state --initial absent", 64, ("another local run has this state folder open",), folder)


def test_what_is_checked_before_a_run_is_what_its_stages_check() -> None:
    assert tuple(FAMILIES) == MODEL_TYPES
    assert sorted(SHARD_SUFFIXES) == sorted(SUFFIXES)


@pytest.mark.parametrize("given", [[], ["PYTHON=python3.13"]], ids=["found", "given"])
def test_make_refuses_python_3_13(tmp_path: Path, given: list[str]) -> None:
    """`make` itself ends with 2 whatever its commands end with; it prints their code."""
    fake = f'#!/bin/sh\nexec {sys.executable} -c "import sys; sys.version_info = (3, 13, 0); exec(sys.argv[1])" "$2"\n'
    for name in ("python3", "python3.13"):
        (tmp_path / name).write_text(fake)
        (tmp_path / name).chmod(0o755)
    make = shutil.which("make")
    assert make is not None
    result = subprocess.run(
        [make, "setup", f"VENV={tmp_path}/venv", *given], cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert result.returncode == 2
    assert result.stdout == "trnpipe needs Python 3.10, 3.11 or 3.12 with venv; set PYTHON=/path/to/python\n"
    assert result.stderr.splitlines()[-1].endswith("Error 64")
    assert not (tmp_path / "venv").exists()


def test_make_and_pip_refuse_the_same_versions_of_python() -> None:
    [first, last] = re.search(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', (ROOT / "pyproject.toml").read_text()).groups()  # type: ignore[union-attr]
    assert f"(3, {first}) <= sys.version_info < (3, {last})" in (ROOT / "Makefile").read_text()
