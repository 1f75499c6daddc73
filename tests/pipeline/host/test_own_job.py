"""Asking Batch for the job's own parameters, over HTTP with the real client."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from pipeline.contract import Stage
from pipeline.errors import BadConfig, ExitCode, Transient
from pipeline.host import own_job
from pipeline.run.world import NodeWorld

RUN = "s3://bucket/runs/week-01"


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, tuple[int, dict[str, Any]]]]:
    """An endpoint that answers DescribeJobs for the one job id asked for with what the test puts in: id -> (status, body)."""
    table: dict[str, tuple[int, dict[str, Any]]] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/v1/describejobs"
            status, body = table.get(asked["jobs"][0], (200, {"jobs": []}))
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            if status != 200:
                self.send_header("x-amzn-errortype", body["code"])
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    yield table
    server.shutdown()
    server.server_close()


def describe(parameters: dict[str, str]) -> tuple[int, dict[str, Any]]:
    return 200, {"jobs": [{"jobId": "abc", "jobName": "n", "jobQueue": "q", "status": "RUNNING", "parameters": parameters}]}


@pytest.mark.parametrize("job_id", ["abc", "abc#1", "abc:12"])
def test_the_run_is_the_jobs_own_parameter_whatever_the_ids_suffix(
    answers: dict[str, tuple[int, dict[str, Any]]], job_id: str
) -> None:
    answers["abc"] = describe({"run": RUN})
    assert own_job.run_uri_of_job(NodeWorld(job_id=job_id).job) == RUN


def test_what_cannot_be_found_out_is_64(answers: dict[str, tuple[int, dict[str, Any]]]) -> None:
    answers["abc"] = describe({})
    answers["secret"] = (403, {"code": "AccessDeniedException", "message": "not authorized"})
    for job, what in (
        ("abc", "without the parameter"),
        ("gone", "does not know"),
        ("secret", "did not describe"),
        ("", "no Batch job"),
    ):
        with pytest.raises(BadConfig, match=what):
            own_job.run_uri_of_job(job)


def test_trouble_of_batchs_own_is_transient(
    answers: dict[str, tuple[int, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_job, "ATTEMPTS", 1)
    answers["abc"] = (500, {"code": "ServerException", "message": "try later"})
    with pytest.raises(Transient):
        own_job.run_uri_of_job("abc")


def test_a_literal_ref_run_is_resolved_by_the_stage_itself(
    answers: dict[str, tuple[int, dict[str, Any]]], supervise: Any, plan_run: Any
) -> None:
    paths = plan_run().paths
    answers["job-1"] = describe({"run": paths.root})
    node = supervise(Stage.COMPILE, "Ref::run")
    assert node.wait() == 0, node.log
    assert paths.root in node.log

    unknown = supervise(Stage.COMPILE, "Ref::run", job="job-2")
    assert unknown.wait() == ExitCode.BAD_CONFIG
    assert "error:  AWS Batch does not know this job" in unknown.log


def test_how_long_an_attempt_has_waited(answers: dict[str, tuple[int, dict[str, Any]]]) -> None:
    """The first since the submission, a later one since the attempt before it ended."""
    job = {"jobId": "abc", "jobName": "n", "jobQueue": "q", "jobDefinition": "d", "status": "RUNNING", "startedAt": 0}
    answers["abc"] = (200, {"jobs": [{**job, "createdAt": 1_000_000}]})
    answers["again"] = (200, {"jobs": [{**job, "createdAt": 1_000_000, "attempts": [{"stoppedAt": 1_400_000}, {}]}]})
    assert own_job.queue_wait_seconds("abc", now=1_090.5) == 90.5
    assert own_job.queue_wait_seconds("again", now=1_430.0) == 30.0
    # Clocks of two machines.
    assert own_job.queue_wait_seconds("abc", now=999.0) == 0.0
    answers["secret"] = (403, {"code": "AccessDeniedException", "message": "not authorized"})
    answers["odd"] = (200, {"jobs": [{"jobId": "odd"}]})
    assert [own_job.queue_wait_seconds(name, now=1_090.5) for name in ("gone", "secret", "odd")] == [None, None, None]


def test_a_gang_in_a_container_says_how_long_it_has_waited(
    answers: dict[str, tuple[int, dict[str, Any]]], supervise: Any, planned_ranks: Any, scripted_stage: dict[str, str]
) -> None:
    answers["job-1"] = (200, {"jobs": [{"jobId": "job-1", "createdAt": int(time.time() * 1000) - 3_600_000}]})
    container = {"AWS_EXECUTION_ENV": "AWS_ECS_EC2", "TRNPIPE_DEPLOYMENT": "search", "TRNPIPE_TEST_RANK": "time.sleep(2)"}
    node = supervise(Stage.HEALTH_CHECK, planned_ranks(ranks_per_node=1).root, **scripted_stage, **container)
    assert node.wait() == 0, node.log
    [record] = [json.loads(line) for line in node.log.splitlines() if "QueueWaitSeconds" in line]
    assert 3_600 <= record["QueueWaitSeconds"] < 3_660


# The host in ECS.

CLUSTER = "arn:aws:ecs:us-east-1:123456789012:cluster/AWSBatch-train-0"
TASK = "arn:aws:ecs:us-east-1:123456789012:task/AWSBatch-train-0/158d1c8083dd49d6b527399fd6414f5c"
INSTANCE = "arn:aws:ecs:us-east-1:123456789012:container-instance/AWSBatch-train-0/1f73d099b914411c9a9ff81633b7741d"
TARGET = "AmazonEC2ContainerServiceV20141113."


class Ecs:
    """An ECS of one task on one instance, and the container's metadata endpoint.

    Attributes:
        asked: operations with their requests.
        answers: operation -> (status, body) in the place of the good answer; `task` is the metadata's.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.answers: dict[str, tuple[int, Any]] = {
            # Task metadata version 4, "Example task metadata response" (Amazon ECS developer guide), cut short.
            "task": (200, {"Cluster": CLUSTER, "TaskARN": TASK, "Family": "train", "LaunchType": "EC2", "Containers": []}),
            "DescribeTasks": (200, {"tasks": [{"taskArn": TASK, "containerInstanceArn": INSTANCE}], "failures": []}),
            "DescribeContainerInstances": (
                200,
                {"containerInstances": [{"containerInstanceArn": INSTANCE, "ec2InstanceId": "i-0abc"}], "failures": []},
            ),
            "UpdateContainerInstancesState": (
                200,
                {"containerInstances": [{"containerInstanceArn": INSTANCE, "status": "DRAINING"}], "failures": []},
            ),
        }


@pytest.fixture
def ecs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ecs]:
    cluster = Ecs()

    class Handler(BaseHTTPRequestHandler):
        def answer(self, name: str) -> None:
            status, body = cluster.answers[name]
            data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self.answer("task" if self.path == "/v4/abc/task" else "nothing")

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            operation = self.headers["X-Amz-Target"].removeprefix(TARGET)
            cluster.asked.append((operation, request))
            self.answer(operation)

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("ECS_CONTAINER_METADATA_URI_V4", f"http://127.0.0.1:{server.server_port}/v4/abc")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    # The metadata is the host's own: no proxy may stand between.
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield cluster
    server.shutdown()
    server.server_close()


def test_a_host_leaves_its_own_cluster(ecs: Ecs) -> None:
    assert own_job.leave_cluster()
    assert ecs.asked == [
        ("DescribeTasks", {"cluster": CLUSTER, "tasks": [TASK]}),
        ("UpdateContainerInstancesState", {"cluster": CLUSTER, "containerInstances": [INSTANCE], "status": "DRAINING"}),
    ]


def test_a_host_knows_its_ec2_id(ecs: Ecs) -> None:
    assert own_job.instance_id() == "i-0abc"
    assert ecs.asked[1:] == [("DescribeContainerInstances", {"cluster": CLUSTER, "containerInstances": [INSTANCE]})]


def test_outside_ecs_nothing_is_asked(ecs: Ecs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ECS_CONTAINER_METADATA_URI_V4")
    assert not own_job.leave_cluster()
    assert own_job.instance_id() == ""
    assert ecs.asked == []


def test_on_fargate_there_is_no_instance(ecs: Ecs) -> None:
    ecs.answers["DescribeTasks"] = (200, {"tasks": [{"taskArn": TASK, "launchType": "FARGATE"}]})
    assert not own_job.leave_cluster()
    assert own_job.instance_id() == ""
    assert [operation for operation, _ in ecs.asked] == ["DescribeTasks"] * 2


DENIED = (400, {"__type": "AccessDeniedException", "message": "not allowed"})


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("task", (500, "oops")),
        ("task", (200, "<html>")),
        ("task", (200, [])),
        ("task", (200, {"Cluster": CLUSTER})),
        ("DescribeTasks", DENIED),
        ("DescribeTasks", (200, {"tasks": [], "failures": [{"arn": TASK, "reason": "MISSING"}]})),
        ("UpdateContainerInstancesState", DENIED),
        (
            "UpdateContainerInstancesState",
            (200, {"containerInstances": [], "failures": [{"arn": INSTANCE, "reason": "INACTIVE"}]}),
        ),
    ],
)
def test_a_host_that_cannot_leave_says_so_and_goes_on(
    ecs: Ecs, caplog: pytest.LogCaptureFixture, name: str, answer: tuple[int, Any]
) -> None:
    ecs.answers[name] = answer
    assert not own_job.leave_cluster()
    assert [record.message[:54] for record in caplog.records] == ["this host could not be taken out of its cluster, a ret"]


def test_a_host_without_an_answer_says_so(ecs: Ecs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("ECS_CONTAINER_METADATA_URI_V4", "http://127.0.0.1:9/v4/abc")
    assert not own_job.leave_cluster()
    assert "Connection refused" in caplog.text


def test_nodes_that_have_ended_are_told_from_those_that_run(answers: dict[str, tuple[int, dict[str, Any]]]) -> None:
    job = {"jobName": "n", "jobQueue": "q"}
    nodes = [{"jobId": "abc#1", "status": "RUNNING"}, {"jobId": "abc#2", "status": "FAILED", "statusReason": "no such image"}]
    answers["abc#1"] = 200, {"jobs": [job | node for node in nodes]}
    assert own_job.ended_nodes("abc", [1, 2]) == {2: "no such image"}


def test_who_cannot_ask_knows_of_no_ended_node(answers: dict[str, tuple[int, dict[str, Any]]]) -> None:
    answers["abc#1"] = 403, {"code": "AccessDeniedException", "message": "not authorized"}
    assert own_job.ended_nodes("abc", [1]) == {}
