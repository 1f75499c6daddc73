"""The local endpoint: the real synthesized state machine through its ways out, and a state folder that survives the process."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from infra.local.template import machine_arn
from pipeline.contract import STAGES, Shape, Stage

Start = Callable[..., Any]
STAGES_IN_ORDER = [stage.value for stage in STAGES if stage is not Stage.MINE]


def until(stage: str) -> list[str]:
    return STAGES_IN_ORDER[: STAGES_IN_ORDER.index(stage) + 1]


def stages(entered: list[str]) -> list[str]:
    return [name for name in entered if name in STAGES_IN_ORDER]


VISITS = [*until("evaluate"), *until("plan"), "embed", "publish", "report"]
"""The corpus is listed and planned once the gate has decided."""


def test_a_run_goes_through_all_stages_and_gives_its_lock_back(machine: Start) -> None:
    local = machine()
    arn = local.start("good", {"share": "weekly"})
    assert local.finish(arn)["status"] == "SUCCEEDED"
    assert stages(local.entered(arn)) == VISITS
    assert local.lock_items() == []
    jobs = local.endpoint.batch.jobs()
    assert [job.name for job in jobs] == [f"{stage}-good" for stage in VISITS]
    assert {job.share for job in jobs} == {"weekly"}
    assert [job.definition.multinode for job in jobs] == [STAGES[Stage(stage)].shape is Shape.GANG for stage in VISITS]
    assert [len(job.children) for job in jobs] == [2 * (STAGES[Stage(stage)].shape is Shape.ARRAY) for stage in VISITS]
    written = json.loads((local.state / "bucket/runs/good/input.json").read_text())
    assert written["execution"] == {"share": "weekly"}
    assert written["execution_arn"] == arn
    assert written["deployment"]["allowed_nodes"] == [1, 2]


def test_the_plan_chooses_the_gang(machine: Start) -> None:
    local = machine({"plan": {"metrics": {"nodes": 2, "embed_children": 1}}})
    arn = local.start("pair")
    assert local.finish(arn)["status"] == "SUCCEEDED"
    assert "embed (single)" in local.entered(arn)
    by_name = {job.name: job for job in local.endpoint.batch.jobs()}
    assert len(by_name["train-pair"].definition.containers) == 2
    assert (local.state / "bucket/runs/pair/train/progress-00001.json").is_file()


def test_a_failed_stage_ends_the_run_with_its_own_words(machine: Start) -> None:
    local = machine({"train": {"exit": [75, 64]}})
    arn = local.start("bad")
    execution = local.finish(arn)
    assert execution["status"] == "FAILED"
    assert "train cannot go on" in execution["cause"]
    assert stages(local.entered(arn)) == [*until("train"), "report"]
    train = next(job for job in local.endpoint.batch.jobs() if job.name == "train-bad")
    assert [attempt.exit_code for attempt in train.attempts] == [75, 64]
    assert local.lock_items() == []


def test_a_refused_model_publishes_nothing(machine: Start) -> None:
    local = machine({"evaluate": {"metrics": {"gate": {"verdict": "refused", "reason": "worse"}}}})
    arn = local.start("worse")
    execution = local.finish(arn)
    assert (execution["status"], execution["error"], execution["cause"]) == ("FAILED", "GateRefused", "worse")
    assert stages(local.entered(arn)) == [*until("evaluate"), "report"]
    assert local.lock_items() == []


@pytest.mark.parametrize(
    "refused",
    [
        [1, 2],
        "text",
        5,
        {"share": 5},
        {"lock": {"wait_minutes": "long"}},
        {"run": "a/b"},
        {"run": ".."},
        {"run": "../../registry"},
    ],
    ids=json.dumps,
)
def test_input_that_is_no_usable_object_is_refused_before_anything_runs(machine: Start, refused: Any) -> None:
    local = machine()
    execution = local.run("odd", refused)
    assert (execution["status"], execution["error"]) == ("FAILED", "InputRefused")
    assert local.endpoint.batch.jobs() == []
    assert local.lock_items() == []


def test_a_second_run_is_refused_while_the_first_holds_the_lock(machine: Start) -> None:
    local = machine({"prepare": {"seconds": 5}})
    first = local.start("first")
    while not local.lock_items():
        time.sleep(0.05)
    execution = local.run("second")
    assert (execution["status"], execution["error"]) == ("FAILED", "LockHeld")
    assert "run first" in execution["cause"]
    elsewhere = local.run("third", {"registry": None})
    assert elsewhere["status"] == "SUCCEEDED"
    assert local.finish(first)["status"] == "SUCCEEDED"


def test_the_lock_of_a_killed_run_survives_in_the_state_folder_and_is_taken_over(machine: Start) -> None:
    first = machine({"prepare": {"seconds": 60}})
    arn = first.start("killed")
    while not any(job.nodes for job in first.endpoint.batch.jobs()):
        time.sleep(0.05)
    second = machine()
    assert [item["owner"]["S"] for item in second.lock_items()] == [arn]
    following = second.start("following")
    assert second.finish(following)["status"] == "SUCCEEDED"
    assert "TakeOverLock" in second.entered(following)
    assert second.lock_items() == []
    assert json.loads((second.state / "lock.json").read_text()) == []


def test_stopping_an_execution_terminates_its_job(machine: Start) -> None:
    local = machine({"train": {"seconds": 600}})
    arn = local.start("stopped")
    while not any(job.name == "train-stopped" and job.status == "RUNNING" for job in local.endpoint.batch.jobs()):
        time.sleep(0.05)
    local.client.stop_execution(executionArn=arn)
    job = local.endpoint.batch.jobs()[-1]
    assert job.done.wait(20)
    assert (job.status, job.attempts[0].exit_code) == ("FAILED", 143)
    assert local.finish(arn)["status"] == "ABORTED"


def test_an_abort_starts_the_watch_that_looks_for_left_jobs(machine: Start) -> None:
    """The synthesized one, through the queues of the job runner, up to its wait before it looks again."""
    local = machine({"prepare": {"seconds": 600}})
    [watch] = local.stack.watches
    assert watch == "trnpipe-cleanup"
    arn = local.start("stopped")
    while not any(job.status == "RUNNING" for job in local.endpoint.batch.jobs()):
        time.sleep(0.05)
    local.client.stop_execution(executionArn=arn)
    [started] = local.client.list_executions(stateMachineArn=machine_arn(watch))["executions"]
    assert json.loads(local.client.describe_execution(executionArn=started["executionArn"])["input"]) == {"execution": arn}
    deadline = time.monotonic() + 60
    while "Wait" not in local.entered(started["executionArn"]):
        assert time.monotonic() < deadline, local.entered(started["executionArn"])
        time.sleep(0.1)


def s3_of(local: Any) -> tuple[Any, str]:
    return local.endpoint.client("s3"), local.stack.bucket


def test_objects_are_files_when_the_answer_arrives_and_are_there_again_next_time(machine: Start) -> None:
    local = machine()
    s3, bucket = s3_of(local)
    large = os.urandom(40 << 20)
    (local.state / "large").write_bytes(large)
    s3.put_object(Bucket=bucket, Key="runs/a/small.json", Body=b"{}")
    transfer = boto3.s3.transfer.TransferConfig(multipart_threshold=8 << 20, multipart_chunksize=8 << 20)
    s3.upload_file(str(local.state / "large"), bucket, "runs/a/model/large.bin", Config=transfer)
    s3.put_object(Bucket=bucket, Key="gone/soon", Body=b"x")
    s3.delete_object(Bucket=bucket, Key="gone/soon")
    folder = local.state / "bucket"
    assert (folder / "runs/a/small.json").read_bytes() == b"{}"
    assert (folder / "runs/a/model/large.bin").read_bytes() == large
    assert not (folder / "gone").exists()
    (folder / "data").mkdir()
    (folder / "data/put-by-hand.jsonl").write_text("{}\n")
    again = machine()
    s3, bucket = s3_of(again)
    keys = [item["Key"] for item in s3.list_objects_v2(Bucket=bucket)["Contents"]]
    assert keys == ["data/put-by-hand.jsonl", "runs/a/model/large.bin", "runs/a/small.json"]
    answer = s3.get_object(Bucket=bucket, Key="runs/a/model/large.bin")
    assert answer["Body"].read() == large
    assert s3.head_object(Bucket=bucket, Key="runs/a/model/large.bin")["ContentLength"] == len(large)
    ranged = s3.get_object(Bucket=bucket, Key="runs/a/model/large.bin", Range="bytes=1000000-1000099")["Body"].read()
    assert ranged == large[1000000:1000100]
    s3.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": key} for key in keys]})
    assert [path for path in folder.rglob("*") if path.is_file()] == []


def test_conditional_writes_hold_under_contention(machine: Start) -> None:
    local = machine()
    s3, bucket = s3_of(local)
    s3.put_object(Bucket=bucket, Key="registry/current.json", Body=b"0", IfNoneMatch="*")
    with pytest.raises(ClientError) as refused:
        s3.put_object(Bucket=bucket, Key="registry/current.json", Body=b"1", IfNoneMatch="*")
    assert refused.value.response["ResponseMetadata"]["HTTPStatusCode"] == 412
    with pytest.raises(ClientError) as refused:
        s3.put_object(Bucket=bucket, Key="registry/current.json", Body=b"1", IfMatch='"0123"')
    assert refused.value.response["ResponseMetadata"]["HTTPStatusCode"] == 412
    assert (local.state / "bucket/registry/current.json").read_bytes() == b"0"
    etag = s3.head_object(Bucket=bucket, Key="registry/current.json")["ETag"]
    won: list[int] = []

    def attempt(number: int) -> None:
        try:
            s3.put_object(Bucket=bucket, Key="registry/current.json", Body=f"from {number}".encode(), IfMatch=etag)
        except ClientError:
            return
        won.append(number)

    threads = [threading.Thread(target=attempt, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert (local.state / "bucket/registry/current.json").read_text() == f"from {won[0]}"


@pytest.mark.parametrize("key", ["../outside", "a//b", "a/./b", "there/below", "folder"])
def test_keys_that_cannot_be_files_are_refused(machine: Start, key: str) -> None:
    local = machine()
    s3, bucket = s3_of(local)
    s3.put_object(Bucket=bucket, Key="there", Body=b"x")
    s3.put_object(Bucket=bucket, Key="folder/inside", Body=b"x")
    with pytest.raises(ClientError, match="InvalidRequest"):
        s3.put_object(Bucket=bucket, Key=key, Body=b"x")
    assert sorted(path.name for path in (local.state / "bucket").rglob("*") if path.is_file()) == ["inside", "there"]


def test_batch_refusals_arrive_as_client_exceptions(machine: Start) -> None:
    local = machine()
    batch = local.endpoint.client("batch")
    with pytest.raises(ClientError) as refused:
        batch.submit_job(jobName="x", jobQueue="trnpipe-cpu", jobDefinition="trnpipe-prepare", parameters={"run": "s3://b/r"})
    assert refused.value.response["Error"]["Code"] == "ClientException"
    assert "shareIdentifier must be specified" in refused.value.response["Error"]["Message"]
    with pytest.raises(ClientError, match="does not answer"):
        batch.describe_job_queues()


def test_listens_on_loopback_and_hides_the_users_aws_settings(machine: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "production")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the real one")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "the real one")
    local = machine()
    assert local.endpoint.url.startswith("http://127.0.0.1:")
    assert "the real one" not in os.environ.values()
    assert "AWS_PROFILE" not in os.environ
    assert local.run("hidden")["status"] == "SUCCEEDED"
    local.close()
    assert os.environ["AWS_PROFILE"] == "production"


def test_an_object_is_a_file_whatever_characters_its_key_has(machine: Start) -> None:
    local, key = machine(), "data/p\u00e4irs \u00fc+%20.jsonl"
    local.endpoint.client("s3").put_object(Bucket=local.stack.bucket, Key=key, Body=b"rows")
    assert (local.state / "bucket" / key).read_bytes() == b"rows"


def ask(local: Any, path: str, **headers: str) -> int:
    """The status of one request that is good but for the headers given; None leaves one out."""
    port = local.endpoint.url.rpartition(":")[2]
    good = {
        "Host": f"127.0.0.1:{port}",
        "Authorization": f"AWS4-HMAC-SHA256 Credential={os.environ['AWS_ACCESS_KEY_ID']}/20250101/us-east-1/batch/aws4_request",
    }
    sent = {name.replace("_", "-"): value for name, value in {**good, **headers}.items() if value}
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=30)
    connection.putrequest("POST", path, skip_host=True)
    for name, value in {**sent, "Content-Length": "2"}.items():
        connection.putheader(name, value.replace("PORT", port))
    connection.endheaders(b"{}")
    return connection.getresponse().status


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "attacker.example:PORT"},
        {"Host": "127.0.0.1.attacker.example:PORT"},
        {"Host": "127.0.0.1"},
        {"Host": ""},
        {"Origin": "http://attacker.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:PORT"},
        {"Authorization": ""},
        {"Authorization": "AWS4-HMAC-SHA256 Credential=local/20250101/us-east-1/batch/aws4_request"},
        {"Authorization": "AWS4-HMAC-SHA256 Credential=/20250101/us-east-1/batch/aws4_request"},
    ],
    ids=str,
)
def test_only_its_own_clients_are_answered(machine: Start, headers: dict[str, str]) -> None:
    local = machine()
    assert ask(local, "/v1/listjobs", **headers) == 403
    assert ask(local, "/moto-api/reset", **headers) == 403
    # Understood, and refused for what it lacks.
    assert ask(local, "/v1/listjobs") == 400
    assert ask(local, "/v1/listjobs", Host="localhost:PORT") == 400


def test_every_endpoint_has_a_key_of_its_own(machine: Start) -> None:
    machine()
    first = os.environ["AWS_ACCESS_KEY_ID"]
    machine()
    assert first != os.environ["AWS_ACCESS_KEY_ID"]
    assert len(first) == 32


def test_jobs_see_nothing_of_the_users_credentials(machine: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    (home / ".aws").mkdir(parents=True)
    process = f"[default]\ncredential_process = /bin/sh -c 'touch {tmp_path}/asked'\n[profile production]\nregion = eu-west-1\n"
    (home / ".aws/config").write_text(process)
    (home / ".aws/credentials").write_text("[default]\naws_access_key_id = REAL\naws_secret_access_key = REAL\n")
    real = {
        "HOME": str(home),
        "AWS_PROFILE": "production",
        "AWS_CONFIG_FILE": str(home / ".aws/config"),
        "AWS_ACCESS_KEY_ID": "REAL",
        "AWS_SECRET_ACCESS_KEY": "REAL",
        "AWS_SESSION_TOKEN": "REAL",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://127.0.0.1:1/REAL",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "/REAL",
        "AWS_WEB_IDENTITY_TOKEN_FILE": str(home / "REAL"),
        "AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:1/REAL",
    }
    for name, value in real.items():
        monkeypatch.setenv(name, value)
    local = machine()
    program = (
        "import boto3, json, os, sys; found = boto3.session.Session().get_credentials().get_frozen_credentials();"
        "json.dump([dict(os.environ), found], open(sys.argv[1], 'w'))"
    )
    runner = local.endpoint.batch
    runner.settings = replace(runner.settings, program=(sys.executable, "-c", program, str(tmp_path / "seen.json")))
    job = local.endpoint.client("batch").submit_job(
        jobName="look",
        jobQueue="trnpipe-cpu",
        jobDefinition="trnpipe-prepare",
        shareIdentifier="manual",
        schedulingPriorityOverride=1,
        parameters={"run": "s3://bucket/runs/look"},
    )
    assert runner.wait(job["jobId"], timedelta(seconds=60)).status == "SUCCEEDED"
    environment, credentials = json.loads((tmp_path / "seen.json").read_text())
    assert credentials[:2] == [os.environ["AWS_ACCESS_KEY_ID"], "local"]
    assert [name for name, value in environment.items() if "REAL" in value or value == "production"] == []
    assert environment["AWS_CONFIG_FILE"] == environment["AWS_SHARED_CREDENTIALS_FILE"] == os.devnull
    assert not (tmp_path / "asked").exists()


def test_a_killed_process_leaves_whole_objects_and_no_job_processes(templates: Path, tmp_path: Path) -> None:
    program = tmp_path / "endpoint.py"
    program.write_text(
        textwrap.dedent(
            f"""
            import json, sys, time
            from pathlib import Path
            sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[3])]!r}
            from conftest import Machine, runner_of
            from infra.local.server import local_endpoint
            from infra.local.template import read_stack
            stack, state = read_stack(Path({str(templates)!r})), Path({str(tmp_path / "state")!r})
            with local_endpoint(stack, state, runner_of(stack, state)) as endpoint:
                machine = Machine(endpoint, stack, state)
                machine.start("killed")
                while not (jobs := endpoint.batch.jobs()) or not jobs[-1].nodes or "train" not in jobs[-1].name:
                    time.sleep(0.05)
                time.sleep(1)
                print(json.dumps([node.process.pid for node in jobs[-1].nodes]), flush=True)
                time.sleep(600)
            """
        )
    )
    environment = {**os.environ, "TRNPIPE_TEST_SCRIPT": json.dumps({"train": {"seconds": 600}})}
    process = subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    pids = json.loads(process.stdout.readline())
    assert pids
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "job processes outlive the runner"
        time.sleep(0.05)
    run = tmp_path / "state/bucket/runs/killed"
    assert json.loads((run / "prepare/result.json").read_text())["status"] == "done"
    assert json.loads((tmp_path / "state/lock.json").read_text())[0]["run"]["S"] == "killed"


def alive(pid: int) -> bool:
    """Whether a process group still runs anything; a zombie whose parent has not waited for it does not count."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[2]) == pid and fields[0] != "Z":
            return True
    return False
