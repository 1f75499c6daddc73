"""The look at the first rows: what it refuses, what it leaves to prepare, and what the user reads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.commands import first_rows
from pipeline.commands.first_rows import check_first_rows
from pipeline.config import RunConfig, build_config
from pipeline.errors import BadConfig, BadData, MissingInput

GOOD = {"query": "how to return shoes", "document": "in their box"}
BAD = {"query": "how to return shoes", "body": "in their box"}


def config(**sections: Any) -> RunConfig:
    return build_config({"gate": {"undecided": "accept"}, "data": {"holdout_fraction": 0.5}}, sections)


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def numbered(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"query": f"query {number}", "document": f"document {number}", **more} for number in range(count)]


def test_a_wrong_column_is_said_once_with_the_setting_that_helps(tmp_path: Path) -> None:
    with pytest.raises(BadData) as refused:
        check_first_rows(config(), [write(tmp_path / "pairs.jsonl", *[BAD] * 50)], ())
    said = str(refused.value)
    assert "too many rows are bad: 50 of 50" in said
    assert "the file's columns are query, body: add --set data.columns.document=body" in said
    assert said.count("lacks the field") == 1
    assert "pairs.jsonl:3" in said
    assert "pairs.jsonl:4" not in said


def test_the_hold_out_of_groups_is_left_to_plan(tmp_path: Path) -> None:
    """It is by keys that the rows do not show: by document, none of these is held out."""
    lines = [{"query": f"query {number}", "document": "an answer", "group": f"{number // 4}"} for number in range(400)]
    path = write(tmp_path / "pairs.jsonl", *lines)
    data = {"holdout_fraction": 0.01}
    check_first_rows(config(data={**data, "holdout_by": "group"}), [path], ())
    with pytest.raises(BadConfig, match="too small"):
        check_first_rows(config(data=data), [path], ())


def test_all_rows_are_judged_as_prepare_does_and_a_part_only_when_half_of_it_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "pairs.jsonl", *numbered(98), BAD, BAD)
    check_first_rows(config(data={"max_bad_fraction": 0.02}), [path], ())
    with pytest.raises(BadData, match="2 of 100"):
        check_first_rows(config(data={"max_bad_fraction": 0.01}), [path], ())
    monkeypatch.setattr(first_rows, "LOOK_ROWS", 10)
    half = write(tmp_path / "half.jsonl", *[GOOD] * 5, *[BAD] * 5, *[GOOD] * 90)
    check_first_rows(config(), [half], ())
    most = write(tmp_path / "most.jsonl", *[GOOD] * 4, *[BAD] * 6, *[GOOD] * 90)
    with pytest.raises(BadData, match="6 of the first 10"):
        check_first_rows(config(), [most], ())


def test_a_look_at_many_files_reaches_the_last_ones(tmp_path: Path) -> None:
    for number in range(40):
        write(tmp_path / f"week-{number:02d}.jsonl", GOOD if number < 10 else BAD)
    with pytest.raises(BadData, match="7 of the first 10"):
        check_first_rows(config(), [str(tmp_path)], ())


def test_a_long_text_ends_the_look_at_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_rows, "LOOK_CHARACTERS", 100)
    path = write(tmp_path / "pairs.jsonl", {"query": "q", "document": "long " * 100}, *[BAD] * 50)
    check_first_rows(config(), [path], ())


def test_a_hold_out_that_is_too_small_is_refused_when_all_rows_were_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strict = config(gate={"undecided": "refuse", "max_drop": 0.08})
    first = write(tmp_path / "first.jsonl", *numbered(60))
    with pytest.raises(BadConfig, match="too small"):
        check_first_rows(strict, [first], ())
    # Rows of earlier weeks have their share of it; rows that nobody has seen may have.
    check_first_rows(strict, [first], (), [write(tmp_path / "second.jsonl", *numbered(120)[60:])])
    check_first_rows(strict, [first], (), None)
    monkeypatch.setattr(first_rows, "LOOK_ROWS", 10)
    check_first_rows(strict, [first], ())


def test_queries_are_counted_as_prepare_counts_them(tmp_path: Path) -> None:
    same = [{"query": "one query", "document": f"document {number}"} for number in range(60)]
    with pytest.raises(BadConfig, match="1 distinct"):
        check_first_rows(config(gate={"undecided": "refuse"}), [write(tmp_path / "same.jsonl", *same)], ())
    # Without a positive row nothing can be held out: prepare names that cause.
    check_first_rows(config(gate={"undecided": "refuse"}), [write(tmp_path / "none.jsonl", *numbered(60, label=0))], ())


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_a_file_without_a_row_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(text)
    with pytest.raises(BadData, match="there is no row"):
        check_first_rows(config(), [str(path)], ())


def test_the_corpus_is_looked_at_by_its_own_columns(tmp_path: Path) -> None:
    pairs = write(tmp_path / "pairs.jsonl", *numbered(10))
    check_first_rows(config(), [pairs], [write(tmp_path / "corpus.jsonl", {"text": "a text"})])
    with pytest.raises(BadData, match=r"data\.columns\.text=title"):
        check_first_rows(config(), [pairs], [write(tmp_path / "titles.jsonl", {"title": "a text"})])


def test_a_setting_of_an_unknown_column_and_a_folder_without_shards_are_refused(tmp_path: Path) -> None:
    pairs = write(tmp_path / "pairs.jsonl", *numbered(10))
    with pytest.raises(BadConfig, match=r"data\.columns\.positive"):
        check_first_rows(config(data={"columns": {"positive": "document"}}), [pairs], ())
    (tmp_path / "empty").mkdir()
    with pytest.raises(MissingInput, match="no shard"):
        check_first_rows(config(), [str(tmp_path / "empty")], ())


def test_config_check_reads_files_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({"data": {"train": [write(tmp_path / "pairs.jsonl", BAD)]}}))
    check = [sys.executable, "-m", "pipeline.cli", "config", "check", str(path)]
    assert subprocess.run(check, capture_output=True, check=False).returncode == 0
    read = subprocess.run([*check, "--read"], capture_output=True, text=True, check=False)
    assert read.returncode == 65
    assert "data.columns.document=body" in read.stderr


def test_local_answers_without_a_state_folder_or_a_framework(tmp_path: Path) -> None:
    write(tmp_path / "pairs.jsonl", BAD)
    command = ["-X", "importtime", "-m", "pipeline.cli", "local", "--input", "pairs.jsonl", "--state", "state"]
    told = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert told.returncode == 65
    assert "(first: pairs.jsonl:1)" in told.stderr
    assert not (tmp_path / "state").exists()
    loaded = {line.rpartition("|")[2].strip() for line in told.stderr.splitlines() if line.startswith("import time:")}
    assert "pyarrow" in loaded
    assert not loaded & {"torch", "transformers", "aws_cdk", "moto"}
