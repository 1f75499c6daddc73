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
    registry_uri,
    stage_command,
)


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


def test_every_stage_has_a_spec_and_a_command() -> None:
    assert list(STAGES) == list(Stage)
    assert {stage for stage in Stage if STAGES[stage].shape is Shape.GANG} == {Stage.HEALTH_CHECK, Stage.COMPILE, Stage.TRAIN}
    assert all(STAGES[stage].queue is Queue.TRAIN for stage in Stage if STAGES[stage].shape is Shape.GANG)
    assert stage_command(Stage.EMBED) == ["trnpipe", "stage", "embed", "--run", "Ref::run"]
