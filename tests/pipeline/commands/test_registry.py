"""`trnpipe registry`: what was published, and the reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pipeline import store
from pipeline.cli import app
from pipeline.contract import Stage
from pipeline.errors import BadConfig, BadData, MissingInput
from pipeline.evaluation.reference import read_reference
from pipeline.run.context import StageOutput


def trnpipe(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["registry", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


@pytest.fixture
def state(plan_run: Any, tmp_path: Path) -> Path:
    """Two weeks that were published."""
    root = str(tmp_path / "bucket")
    for run, replaced, value, change in (("week-01", None, 0.5, None), ("week-02", "week-01", 0.6, {"difference": 0.02})):
        planned = plan_run(root, run=run)
        gate = {"metric": "ndcg@10", "new": value, "reference": change}
        planned.finish(Stage.EVALUATE, StageOutput(metrics={"gate": gate}))
        planned.finish(Stage.PUBLISH, StageOutput(metrics={"replaced": replaced, "documents": 1234}))
        store.write_bytes(planned.paths.query_values, b"values")
    store.write_json(f"{root}/registry/current.json", {"model": "m", "embeddings": "e", "run": "week-02"})
    return tmp_path


def test_what_was_published_is_listed(state: Path) -> None:
    given = "--state", str(state)
    first, second = json.loads(trnpipe("show", *given, "--json"))
    assert (first["run"], first["current"], first["value"], first["against_reference"]) == ("week-02", True, 0.6, 0.02)
    assert (second["run"], second["current"], second["documents"]) == ("week-01", False, 1234)
    assert trnpipe("pin", "week-01", *given) == "run week-01 is the reference of current\n"
    rows = [line.split() for line in trnpipe("show", *given).splitlines()]
    assert next(row for row in rows if row[:1] == ["week-01"])[-4:] == ["reference", "0.5000", "–", "1,234"]
    assert next(row for row in rows if row[:1] == ["week-02"])[-4:] == ["current", "0.6000", "+0.0200", "1,234"]
    # A run whose folder was removed ends the list.
    store.delete_folder(f"{state}/bucket/runs/week-01")
    assert [row["run"] for row in json.loads(trnpipe("show", *given, "--json"))] == ["week-02", "week-01"]


def test_a_pin_is_set_and_taken_away(state: Path) -> None:
    given, root = ("--state", str(state)), f"{state}/bucket"
    trnpipe("pin", "week-02", *given)
    assert read_reference(root, "current") == "week-02"
    trnpipe("unpin", *given)
    assert read_reference(root, "current") is None
    trnpipe("pin", "week-01", *given, "--name", "other")
    assert (read_reference(root, "current"), read_reference(root, "other")) == (None, "week-01")


def test_what_cannot_be_pinned_or_shown(state: Path) -> None:
    given = "--state", str(state)
    for arguments, error in (
        (("pin", "week-03"), MissingInput),
        (("pin", "../week-01"), BadConfig),
        (("show", "--name", "other"), MissingInput),
    ):
        with pytest.raises(error):
            trnpipe(*arguments, *given)
    store.delete(f"{state}/bucket/runs/week-01/evaluate/queries.parquet")
    with pytest.raises(MissingInput, match="cannot be the reference"):
        trnpipe("pin", "week-01", *given)
    store.write_bytes(f"{state}/bucket/registry/current.reference.json", b"[]")
    with pytest.raises(BadData):
        trnpipe("show", *given)
