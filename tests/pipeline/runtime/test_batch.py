"""Asking Batch for the job's own parameters, over HTTP with the real client."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from pipeline.contract import Stage
from pipeline.errors import BadConfig, ExitCode, Transient
from pipeline.runtime import batch
from pipeline.runtime.world import NodeWorld

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
    assert batch.run_uri_of_job(NodeWorld(job_id=job_id).job) == RUN


def test_what_cannot_be_found_out_is_64(answers: dict[str, tuple[int, dict[str, Any]]]) -> None:
    answers["abc"] = describe({})
    answers["secret"] = (403, {"code": "AccessDeniedException", "message": "not authorized"})
    for job, what in (("abc", "without the parameter"), ("gone", "does not know"), ("secret", "refused"), ("", "no Batch job")):
        with pytest.raises(BadConfig, match=what):
            batch.run_uri_of_job(job)


def test_trouble_of_batchs_own_is_transient(
    answers: dict[str, tuple[int, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "ATTEMPTS", 1)
    answers["abc"] = (500, {"code": "ServerException", "message": "try later"})
    with pytest.raises(Transient):
        batch.run_uri_of_job("abc")


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
