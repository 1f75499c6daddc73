"""Result files, run folder names and stage specs."""

from __future__ import annotations

import pytest

from pipeline.contract import (
    RESULT_LIMIT_BYTES,
    STAGES,
    Artifact,
    Queue,
    RunPaths,
    Shape,
    Stage,
    StageFailure,
    StageResult,
    check_registry,
    check_run_folder,
    check_run_id,
    registry_uri,
    retention_tags,
    stage_command,
)
from pipeline.errors import BadConfig


def result(**changes: object) -> StageResult:
    values = {
        "stage": "train",
        "run": "r1",
        "status": "done",
        "started": "2026-01-01T00:00:00+00:00",
        "finished": "2026-01-01T00:00:01+00:00",
        "fingerprint": "f",
        "outputs": {"model": Artifact("s3://b/runs/r1/model/model.safetensors", "00", 5)},
        "metrics": {"steps": 3},
    }
    return StageResult(**{**values, **changes})  # type: ignore[arg-type]


def test_result_survives_the_round_trip() -> None:
    assert StageResult.from_json(result().to_json()) == result()


def test_result_larger_than_the_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="limit"):
        result(metrics={"list": "x" * RESULT_LIMIT_BYTES}).to_json()


def test_failure_survives_the_round_trip() -> None:
    failure = StageFailure(stage="train", run="r1", exit_code=65, what="bad", value=["a", "b"], node=3)
    assert StageFailure.from_json(failure.to_json()) == failure


def test_run_folder_names() -> None:
    paths = RunPaths("s3://bucket/runs/week-1/")
    assert (paths.run_id, paths.bucket_root) == ("week-1", "s3://bucket")
    assert paths.result(Stage.TRAIN) == "s3://bucket/runs/week-1/train/result.json"
    assert paths.checkpoint(1200) == "s3://bucket/runs/week-1/train/checkpoints/step-00001200"
    assert paths.part(17, 64) == "s3://bucket/runs/week-1/embed/part-00017-of-00064.parquet"
    assert registry_uri(paths.bucket_root, "current") == "s3://bucket/registry/current.json"


def test_checkpoints_alone_are_tagged_to_expire() -> None:
    paths = RunPaths("runs/week-1")
    expiring = {"trnpipe:retention": "resume"}
    assert retention_tags(f"{paths.checkpoint(100)}/model.safetensors") == expiring
    assert retention_tags(f"{paths.checkpoint(100)}/state/rank-00000.pt") == expiring
    kept = [
        f"{paths.model}/model.safetensors",
        paths.plan,
        paths.metrics,
        paths.result(Stage.TRAIN),
        paths.part(1, 2),
        paths.rows,
    ]
    # Nor what is only called so: another stage's folder, another bucket's layout.
    kept += ["runs/week-1/embed/train/checkpoints/x", "backup/runs/week-1/train/checkpoints/x", "registry/train/checkpoints/x"]
    assert [key for key in kept if retention_tags(key)] == []


def test_every_stage_has_a_spec_and_a_command() -> None:
    assert list(STAGES) == list(Stage)
    gangs = {stage for stage in Stage if STAGES[stage].shape is Shape.GANG}
    assert gangs == {Stage.COLLECT, Stage.HEALTH_CHECK, Stage.COMPILE, Stage.TRAIN}
    assert all(STAGES[stage].queue is Queue.TRAIN for stage in Stage if STAGES[stage].shape is Shape.GANG)
    assert stage_command(Stage.EMBED) == ["trnpipe", "stage", "embed", "--run", "Ref::run"]


OUTSIDE = ("../x", "..", ".", "", "a b", "rún", "\u0430", "٣", "run\n", "run\0", "---", "a" * 500, "run\u202e", "a.b", "a/b/..")


@pytest.mark.parametrize("name", OUTSIDE, ids=ascii)
def test_names_that_lead_elsewhere_are_refused(name: str) -> None:
    for check in (check_run_id, check_registry):
        with pytest.raises(BadConfig, match="matches"):
            check(name)
    with pytest.raises(BadConfig, match="RUN_ID"):
        check_run_folder(f"s3://bucket/{name}/x/{name}")
    with pytest.raises(BadConfig, match="invalid run id"):
        check_run_id(5)


@pytest.mark.parametrize(
    "uri", ["s3://b/runs/../run", "s3://b//run", "s3://b/./run", "s3:///run", "s3://b/a\nb/run", "/", "", "x/.."]
)
def test_folders_that_lead_elsewhere_are_refused(uri: str) -> None:
    with pytest.raises(BadConfig, match="RUN_ID"):
        check_run_folder(uri)


def test_names_of_runs_are_taken_as_they_are() -> None:
    assert check_run_id("week-01_b") == "week-01_b"
    assert check_registry("current") == "current"
    assert check_run_folder("s3://bucket/runs/week-01/") == "s3://bucket/runs/week-01"
    assert check_run_folder("../state/bucket/runs/week-01") == "../state/bucket/runs/week-01"
