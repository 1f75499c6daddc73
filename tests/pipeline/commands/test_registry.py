"""`trnpipe registry`: what was published, and the reference."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pipeline import cli, store
from pipeline.cli import app
from pipeline.config import parse_settings
from pipeline.contract import now
from pipeline.errors import BadConfig, BadData, MissingInput
from pipeline.evaluation.reference import read_reference
from pipeline.run.registry import keep_publication, read_pointer


def trnpipe(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["registry", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


@pytest.fixture
def state(plan_run: Any, tmp_path: Path) -> Path:
    """Two weeks that were published, and a refresh."""
    root = str(tmp_path / "bucket")
    pointer = {"epoch": 0}
    for hour, (run, by, value, change) in enumerate(
        (
            ("week-01", "week-01", 0.5, None),
            ("week-02", "week-02", 0.6, {"difference": 0.02}),
            ("week-02", "daily", None, None),
        )
    ):
        planned = plan_run(root, run=by)
        store.write_bytes(planned.paths.query_values, b"values")
        manifest = planned.paths.embed_manifest
        # The refresh has left a part where it is.
        store.write_json(manifest, {"parts": [{"uri": f"s3://bucket/runs/{run}/embed/part-00000-of-00001.parquet"}]})
        moment = f"2026-01-01T0{hour}:00:00.000000+00:00"
        pointer |= {"run": run, "embeddings_run": by, "model": "m", "embeddings": f"s3://bucket/runs/{by}/embed/manifest.json"}
        pointer |= {"published": moment}
        gate = {"metric": "ndcg@10", "new": value, "reference": change}
        kind = "model" if run == by else "refresh"
        drift = {"cosine": 0.98765} if change else None
        keep_publication(root, "current", {**pointer, "kind": kind, "documents": 1234, "gate": gate, "drift": drift})
    store.write_json(f"{root}/registry/current.json", pointer)
    return tmp_path


def test_what_was_published_is_listed(state: Path) -> None:
    given = "--state", str(state)
    daily, second, first = json.loads(trnpipe("show", *given, "--json"))
    assert (daily["run"], daily["embeddings_run"], daily["kind"], daily["current"]) == ("week-02", "daily", "refresh", True)
    assert (second["run"], second["current"], second["value"], second["against_reference"]) == ("week-02", False, 0.6, 0.02)
    assert (first["run"], first["kind"], first["documents"]) == ("week-01", "model", 1234)
    assert trnpipe("pin", "week-01", *given) == "run week-01 is the reference of current\n"
    rows = [line.split() for line in trnpipe("show", *given).splitlines()]
    assert ["week-01", "model", "itself", "2026-01-01", "00:00", "reference", "0.5000", "–", "–", "1,234"] in rows
    assert ["week-02", "model", "itself", "2026-01-01", "01:00", "0.6000", "+0.0200", "0.988", "1,234"] in rows
    assert ["week-02", "refresh", "daily", "2026-01-01", "02:00", "current", "–", "–", "–", "1,234"] in rows
    # It does not depend on the runs' folders.
    store.delete_folder(f"{state}/bucket/runs/week-01")
    assert len(json.loads(trnpipe("show", *given, "--json"))) == 3


def test_models_are_held_and_released(state: Path) -> None:
    given, root = ("--state", str(state)), f"{state}/bucket"
    assert trnpipe("hold", *given).startswith("models of current are held since 20")
    held = read_pointer(root, "current")
    assert held is not None
    assert (bool(held.held), held.epoch) == (True, 1)
    trnpipe("hold", *given)
    assert read_pointer(root, "current") == held
    assert trnpipe("release", *given) == "models of current are released\n"
    released = read_pointer(root, "current")
    assert released is not None
    assert (released.held, released.epoch, released.run) == ("", 1, "week-02")
    with pytest.raises(MissingInput, match="nothing is published"):
        trnpipe("hold", *given, "--name", "other")


def age(folder: Path, days: float) -> None:
    for path in folder.rglob("*"):
        os.utime(path, (time.time() - days * 86_400,) * 2)


def test_what_nothing_needs_is_pruned(state: Path) -> None:
    given, runs = ("--state", str(state)), state / "bucket" / "runs"
    (runs / "trial").mkdir()
    (runs / "trial" / "file").write_text("x")
    assert "0 folders would be removed" in trnpipe("prune", *given)
    age(runs, 40)
    # week-02 has the model, and the refresh's part; week-01 was replaced long ago.
    assert "2 folders would be removed; --yes removes them" in (listed := trnpipe("prune", *given))
    assert [line.split()[0] for line in listed.splitlines() if line.strip().startswith("runs/")] == [
        "runs/trial",
        "runs/week-01",
    ]
    trnpipe("pin", "week-01", *given)
    assert "1 folders would" in trnpipe("prune", *given)
    trnpipe("unpin", *given)
    assert "0 folders would" in trnpipe("prune", *given, "--keep-days", "60")
    assert "2 folders removed" in trnpipe("prune", *given, "--yes")
    # A local folder stays when its last file goes.
    assert {path.relative_to(runs).parts[0] for path in runs.rglob("*") if path.is_file()} == {"daily", "week-02"}


def test_what_was_ingested_of_rewritten_files_is_pruned(state: Path) -> None:
    given, bucket = ("--state", str(state)), state / "bucket"
    store.delete_folder(f"{bucket}/ingested")
    trnpipe("pin", "week-01", *given)
    # The last weekly run was refused: it goes, but the next one lists what it has listed.
    listings = (
        ("week-01", "train", "inputs", "before it was rewritten"),
        ("week-03", "train", "inputs", "after"),
        ("daily", "refresh", "inputs", "a first listing of the corpus"),
        ("daily", "refresh", "corpus", "the corpus"),
        ("other", "train", "inputs", "of another name"),
        ("", "", "", "of no run"),
    )

    def inputs(run: str, mode: str, rows: str) -> dict[str, Any]:
        return {"config": {"registry": run if run == "other" else "current", "mode": mode}, "shards": [{"rows": rows}]}

    for run, mode, file, rows in listings:
        for folder in ("rows", f"tokens/{rows}"):
            store.write_json(f"{bucket}/ingested/{folder}/{rows}/profile.json.gz", {})
        if run:
            store.write_json(f"{bucket}/runs/{run}/prepare/{file}.json", inputs(run, mode, rows))
    age(bucket / "runs", 40)
    for run in ("week-01", "other"):
        age(bucket / "runs" / run, 50)
    trnpipe("prune", *given, "--yes")
    # They are young.
    assert len([*(bucket / "ingested").rglob("profile.json.gz")]) == 2 * len(listings)
    for run, mode, file, rows in listings[1::3]:  # week-03 and other, which the first prune has removed
        store.write_json(f"{bucket}/runs/{run}/prepare/{file}.json", inputs(run, mode, rows))
    age(bucket, 40)
    for run in ("week-01", "other"):
        age(bucket / "runs" / run, 50)
    trnpipe("prune", *given, "--yes")
    left = [path.relative_to(bucket / "ingested").parts[1] for path in (bucket / "ingested").rglob("profile.json.gz")]
    assert sorted(left) == sorted(2 * ["after", "a first listing of the corpus", "the corpus", "of another name"])
    assert not list((bucket / "runs" / "week-03").rglob("*.json"))
    # What only the reference has listed is gone, and the reference is there.
    assert list((bucket / "runs" / "week-01").rglob("inputs.json"))


def test_what_was_replaced_a_short_time_ago_stays_readable(state: Path) -> None:
    given, root = ("--state", str(state)), f"{state}/bucket"
    age(state / "bucket" / "runs", 40)
    found = read_pointer(root, "current")
    assert found is not None
    # Replaced today: the refresh's set, and so its run and week-02's parts.
    pointer = {**found.content, "run": "week-03", "embeddings_run": "week-03", "published": now()}
    store.write_json(f"{root}/runs/week-03/embed/manifest.json", {"parts": []})
    keep_publication(root, "current", pointer)
    store.write_json(f"{root}/registry/current.json", {**pointer, "embeddings": "s3://bucket/runs/week-03/embed/manifest.json"})
    store.delete_folder(f"{root}/ingested")
    assert "1 folders would" in trnpipe("prune", *given)
    assert "3 folders would" in trnpipe("prune", *given, "--keep-days", "0")


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


@pytest.mark.parametrize("run", ["week-01", "2026-11-29", "20261129", "1e5"])
def test_a_rollback_takes_any_id_of_a_run(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that YAML reads as a date or a number."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(cli, "local", lambda **settings: given.update(settings))
    trnpipe("rollback", run, "--state", "state", "--config", "run.yaml")
    assert parse_settings(given["settings"]) == {"rollback": run}
    assert (given["state"], given["config"], given["refresh"]) == (Path("state"), Path("run.yaml"), True)
