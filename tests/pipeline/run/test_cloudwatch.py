"""Metrics in the embedded metric format: against the format's rules, and out of real processes in a container's environment."""

from __future__ import annotations

import io
import json
import math
import select
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pipeline.contract import DEPLOYMENT_VARIABLE, METRICS, METRICS_NAMESPACE, STAGES, Metric, Shape, Stage
from pipeline.errors import ExitCode
from pipeline.host.output import Output
from pipeline.run.cloudwatch import EXECUTION_VARIABLE, EmbeddedMetrics, is_record
from pipeline.run.world import NodeWorld

IN_A_CONTAINER = {EXECUTION_VARIABLE: "AWS_ECS_EC2", DEPLOYMENT_VARIABLE: "search"}
NOWHERE = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_EC2_METADATA_DISABLED": "true"}
"""No server listens there: no test asks a real account."""

NODE = NodeWorld(node=3, nodes=4, attempt=2, job_id="4c7599ae-0a82-49aa-ba5a-4727fcce14a8#3", host="ip-10-0-0-1.ec2.internal")

NAME = {"type": "string", "minLength": 1, "maxLength": 1024}
FORMAT = {
    "type": "object",
    "required": ["_aws"],
    "properties": {
        "_aws": {
            "type": "object",
            "required": ["Timestamp", "CloudWatchMetrics"],
            "properties": {
                "Timestamp": {"type": "integer", "minimum": 1_600_000_000_000},
                "CloudWatchMetrics": {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["Namespace", "Dimensions", "Metrics"],
                        "properties": {
                            "Namespace": NAME,
                            "Dimensions": {
                                "type": "array",
                                "minItems": 1,
                                "items": {
                                    "type": "array",
                                    "maxItems": 30,
                                    "items": {"type": "string", "minLength": 1, "maxLength": 250},
                                },
                            },
                            "Metrics": {
                                "type": "array",
                                "minItems": 1,
                                "maxItems": 100,
                                "items": {
                                    "type": "object",
                                    "additionalProperties": False,
                                    "required": ["Name"],
                                    "properties": {
                                        "Name": NAME,
                                        # StandardUnit in CloudWatch's API reference, as far as anything here has one of them.
                                        "Unit": {"enum": ["Seconds", "Percent", "Count", "Count/Second", "None"]},
                                        "StorageResolution": {"enum": [1, 60]},
                                    },
                                },
                            },
                        },
                    },
                },
            },
        }
    },
}
"""The specification's schema ("Embedded metric format document structure"), as far as a document can break it."""


def read(line: str) -> dict[str, Any]:
    """A line as CloudWatch reads it: the whole of it is one document whose references lead somewhere.

    Raises:
        ValueError: CloudWatch would take no metrics out of it.
    """
    document: dict[str, Any] = json.loads(line)
    try:
        jsonschema.validate(document, FORMAT)
    except jsonschema.ValidationError as error:
        raise ValueError(error.message) from error
    for directive in document["_aws"]["CloudWatchMetrics"]:
        for name in {name for names in directive["Dimensions"] for name in names}:
            if not isinstance(document.get(name), str) or not 1 <= len(document[name]) <= 1024:
                raise ValueError(f"dimension {name} has no text")
        for metric in directive["Metrics"]:
            value = document.get(metric["Name"])
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ValueError(f"metric {metric['Name']} has no number")
    return document


def records(output: str) -> list[dict[str, Any]]:
    return [read(line) for line in output.splitlines() if is_record(line)]


def metrics_of(document: Mapping[str, Any]) -> dict[str, float]:
    names = [metric["Name"] for directive in document["_aws"]["CloudWatchMetrics"] for metric in directive["Metrics"]]
    return {name: document[name] for name in names}


@pytest.mark.parametrize("stage", list(STAGES))
def test_a_record_is_one_line_of_the_format_with_everything_a_stage_may_say(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {metric: 0.5 for metric, spec in METRICS.items() if stage in spec.stages}
    EmbeddedMetrics.from_environment(stage, "r" * 80, NODE, IN_A_CONTAINER).write(values, Step=1200)
    printed = capsys.readouterr().out
    # POSIX: up to here a pipe takes a line as a whole, whoever else writes to it.
    assert len(printed.encode()) <= select.PIPE_BUF
    [document] = records(printed)
    assert metrics_of(document) == {metric.value: 0.5 for metric in values}
    assert (document["Deployment"], document["Stage"], document["Run"]) == ("search", stage.value, "r" * 80)
    assert (document["Node"], document["Attempt"], document["Step"]) == (3, 2, 1200)
    for directive in document["_aws"]["CloudWatchMetrics"]:
        assert directive["Namespace"] == METRICS_NAMESPACE
        # Each set of values of these is paid for: what is new in every run or job must not be among them.
        assert {name for names in directive["Dimensions"] for name in names} <= {"Deployment", "Stage"}
        for metric in directive["Metrics"]:
            spec = METRICS[Metric(metric["Name"])]
            assert ["Deployment"] in directive["Dimensions"]
            assert (["Deployment", "Stage"] in directive["Dimensions"]) == (len(spec.stages) > 1)


def test_the_rules_of_the_format_can_be_broken() -> None:
    """What the tests here hold records against tells good ones from bad ones."""
    good = {
        "_aws": {
            "Timestamp": 1_700_000_000_000,
            "CloudWatchMetrics": [{"Namespace": "n", "Dimensions": [["D"]], "Metrics": [{"Name": "m", "Unit": "Count"}]}],
        },
        "D": "d",
        "m": 1,
    }
    read(json.dumps(good))
    for change in ({"m": "1"}, {"m": None}, {"D": ""}, {"_aws": {}}, {"_aws": {"Timestamp": 1.5, "CloudWatchMetrics": []}}):
        with pytest.raises(ValueError, match=r".+"):
            read(json.dumps({**good, **change}))
    with pytest.raises(ValueError, match=r".+"):
        read("12:00:00 " + json.dumps(good))


def test_what_is_no_number_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    writer = EmbeddedMetrics.from_environment(Stage.TRAIN, "week-1", NODE, IN_A_CONTAINER)
    writer.write({Metric.LOSS: math.nan, Metric.STEP_SECONDS: 0.5})
    writer.write({Metric.LOSS: math.inf})
    [document] = records(capsys.readouterr().out)
    assert metrics_of(document) == {"StepSeconds": 0.5}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {DEPLOYMENT_VARIABLE: "search"},
        {EXECUTION_VARIABLE: "AWS_ECS_FARGATE"},
        {**IN_A_CONTAINER, EXECUTION_VARIABLE: "AWS_X"},
    ],
)
def test_nothing_is_printed_elsewhere(environment: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """A local run's jobs have the job definition's variables, but no container around them."""
    writer = EmbeddedMetrics.from_environment(Stage.TRAIN, "week-1", NODE, environment)
    writer.write({Metric.LOSS: 1.0})
    assert not writer.enabled
    assert capsys.readouterr().out == ""


def test_metrics_of_single_stages_are_kept_once() -> None:
    for metric, spec in METRICS.items():
        assert spec.stages, metric
        assert len(spec.dimensions) == (1 if len(spec.stages) == 1 else 2), metric
    assert {stage for stage in STAGES if stage in METRICS[Metric.QUEUE_WAIT_SECONDS].stages} == {
        stage for stage, spec in STAGES.items() if spec.shape is Shape.GANG
    }


SAY = """
from pipeline.contract import Metric
for step in range(200):
    context.cloudwatch.write({Metric.LOSS: 0.25, Metric.ECC_UNCORRECTED: 0}, Step=step)
    # In one piece, as logging writes: without buffers, print would write every argument by itself, and any line may come between.
    print(f"rank {rank} continues\\n", end="", file=sys.stderr)
"""


@pytest.mark.parametrize("launcher", ["processes", "torchrun"])
def test_a_container_s_log_has_every_rank_s_records_whole(
    planned_ranks: Any, supervise: Callable[..., Any], scripted_stage: dict[str, str], launcher: str
) -> None:
    """Two ranks and their supervisor write at the same time."""
    paths = planned_ranks(ranks_per_node=2)
    extra = IN_A_CONTAINER | NOWHERE | scripted_stage | {"TRNPIPE_TEST_RANK": SAY, "TRNPIPE_LAUNCHER": launcher}
    node = supervise(Stage.HEALTH_CHECK, paths.root, AWS_BATCH_JOB_ATTEMPT="2", **extra)
    assert node.wait() == ExitCode.DONE, node.log
    found = records(node.log)
    steps = [record["Step"] for record in found if "Loss" in record and record["Run"] == paths.run_id]
    assert sorted(steps) == sorted([*range(200), *range(200)])
    assert sum(metrics_of(record) == {"Retries": 1} for record in found) == 1


def test_how_numbers_are_called_explains_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = tmp_path / "0.out", tmp_path / "0.err"
    EmbeddedMetrics.from_environment(Stage.TRAIN, "week-1", NODE, IN_A_CONTAINER).write({Metric.ECC_UNCORRECTED: 1})
    printed = capsys.readouterr().out
    paths[0].write_text(printed)
    paths[1].write_text("the rank's own last words\n")
    passed_on = io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr(sys, "stdout", passed_on)
    output = Output([0], lambda _: paths, nodes=1)
    output.pump(end=True)
    assert output.last_lines(0) == ["the rank's own last words"]
    assert passed_on.buffer.getvalue().decode() == printed  # type: ignore[attr-defined]


def test_a_sick_host_is_counted(planned_ranks: Any, supervise: Callable[..., Any], scripted_stage: dict[str, str]) -> None:
    sick = "from pipeline.errors import UnhealthyHost\nraise UnhealthyHost('a core does not compute')"
    paths = planned_ranks(ranks_per_node=1)
    node = supervise(Stage.HEALTH_CHECK, paths.root, **IN_A_CONTAINER, **NOWHERE, **scripted_stage, TRNPIPE_TEST_RANK=sick)
    assert node.wait() == ExitCode.UNHEALTHY_HOST, node.log
    assert [metrics_of(record) for record in records(node.log)] == [{"UnhealthyHosts": 1}]
