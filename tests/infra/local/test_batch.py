"""The local Batch runner against Batch's rules, with real processes."""

from __future__ import annotations

import json
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from infra.local.batch_jobs import Job
from infra.local.batch_nodes import BatchSettings
from infra.local.definitions import ClientError, Container, JobDefinition, JobQueue, RetryStrategy
from tests.infra.faulty_batch import FaultyBatchRunner

SOON = timedelta(seconds=30)
RULES = (
    {"action": "EXIT", "onReason": "OutOfMemory*"},
    {"action": "RETRY", "onExitCode": "7*"},
    {"action": "RETRY", "onExitCode": "13*"},
    {"action": "RETRY", "onStatusReason": "Host EC2*"},
    {"action": "EXIT", "onExitCode": "*"},
)
RETRY = RetryStrategy(attempts=3, rules=RULES)
DUMP = """
import json, os
name = os.environ["AWS_BATCH_JOB_ID"].replace("#", "-") + ".json"
with open(os.path.join({folder!r}, name + ".part"), "w") as stream: json.dump(dict(os.environ), stream)
os.rename(stream.name, stream.name[:-5])
"""

Start = Callable[..., FaultyBatchRunner]


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", textwrap.dedent(code))


def single(code: str, **options: Any) -> JobDefinition:
    return JobDefinition(name="single", containers=(Container(command=python(code)),), **options)


def gang(code: str, nodes: int = 2, **options: Any) -> JobDefinition:
    return JobDefinition(name="gang", containers=(Container(command=python(code)),) * nodes, multinode=True, **options)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    runners = []

    def build(
        *definitions: JobDefinition,
        changed: Callable[[Job], None] = lambda job: None,
        **settings: Any,
    ) -> FaultyBatchRunner:
        settings = {"grace": timedelta(seconds=2), "cores": 2, **settings}
        queues = [JobQueue(name="plain"), JobQueue(name="fair", fair_share=True)]
        runner = FaultyBatchRunner(definitions, queues, BatchSettings(logs=tmp_path / "logs", **settings), changed)
        runners.append(runner)
        return runner

    yield build
    for runner in runners:
        runner.close()


def submit(runner: FaultyBatchRunner, definition: str, **request: Any) -> str:
    return str(runner.submit({"jobName": "job", "jobQueue": "plain", "jobDefinition": definition} | request)["jobId"])


def finish(runner: FaultyBatchRunner, definition: str, **request: Any) -> Job:
    return runner.wait(submit(runner, definition, **request), SOON)


def described(runner: FaultyBatchRunner, job_id: str) -> dict[str, Any]:
    return dict(runner.describe({"jobs": [job_id]})["jobs"][0])


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)


def logs(tmp_path: Path, job: Job) -> dict[str, str]:
    return {path.name: path.read_text() for path in (tmp_path / "logs" / f"{job.name}-{job.id[:8]}").iterdir()}


def said(words: str, tmp_path: Path, job: Job) -> bool:
    return bool(job.nodes) and words in "".join(logs(tmp_path, job).values())


def test_single_job_gets_batch_variables_and_neither_the_users_credentials_nor_node_variables(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the real one")
    monkeypatch.setenv("AWS_PROFILE", "production")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    definition = JobDefinition(
        name="single", containers=(Container(command=python(DUMP.format(folder=str(tmp_path))), environment={"KIND": "cpu"}),)
    )
    runner = start(definition, environment={"AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_SECRET_ACCESS_KEY": "dummy"})
    job = finish(runner, "single")
    assert (job.status, job.attempts[0].exit_code) == ("SUCCEEDED", 0)
    seen = json.loads((tmp_path / f"{job.id}.json").read_text())
    assert seen["AWS_BATCH_JOB_ID"] == job.id
    assert seen["AWS_BATCH_JOB_ATTEMPT"] == "1"
    assert seen["AWS_BATCH_JQ_NAME"] == "plain"
    assert seen["AWS_ENDPOINT_URL"] == "http://127.0.0.1:1"
    assert seen["AWS_SECRET_ACCESS_KEY"] == "dummy"
    assert seen["KIND"] == "cpu"
    assert (seen["OMP_NUM_THREADS"], seen["ONEDNN_MAX_CPU_ISA"]) == ("2", "AVX2")
    assert "AWS_PROFILE" not in seen
    assert not [key for key in seen if "NODE" in key or "ARRAY" in key]
    assert not Path(seen["TMPDIR"]).exists()


def test_gang_variables_differ_between_main_node_and_others(start: Start, tmp_path: Path) -> None:
    code = DUMP.format(folder=str(tmp_path)) + (
        f"import time, glob\nwhile len(glob.glob({str(tmp_path)!r} + '/*.json')) < 2: time.sleep(0.02)\ntime.sleep(0.2)"
    )
    job = finish(start(gang(code)), "gang")
    assert job.status == "SUCCEEDED"
    main, other = (json.loads((tmp_path / f"{job.id}-{node}.json").read_text()) for node in (0, 1))
    assert [seen["AWS_BATCH_JOB_ID"] for seen in (main, other)] == [f"{job.id}#0", f"{job.id}#1"]
    assert [seen["AWS_BATCH_JOB_NODE_INDEX"] for seen in (main, other)] == ["0", "1"]
    assert {seen["AWS_BATCH_JOB_NUM_NODES"] for seen in (main, other)} == {"2"}
    assert {seen["AWS_BATCH_JOB_MAIN_NODE_INDEX"] for seen in (main, other)} == {"0"}
    assert "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS" not in main
    assert other["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"] == "127.0.0.1"
    assert main["TRNPIPE_LEADER_PORT"] == other["TRNPIPE_LEADER_PORT"]
    # Outside a local run rank 0 listens on all addresses.
    assert main["TRNPIPE_LISTEN"] == other["TRNPIPE_LISTEN"] == "127.0.0.1"
    assert main["OMP_NUM_THREADS"] == "1"
    assert main["TRNPIPE_HOST"] != other["TRNPIPE_HOST"]


def test_main_node_starts_first_and_others_after_it_is_running(start: Start) -> None:
    nodes_at: list[tuple[str, list[int]]] = []
    definition = gang("import time; time.sleep(0.3)", nodes=3, main_node=1)
    runner = start(definition, changed=lambda job: nodes_at.append((job.status, [node.index for node in job.nodes])))
    assert finish(runner, "gang").status == "SUCCEEDED"
    assert ("RUNNING", [1]) in nodes_at


def test_only_the_main_nodes_exit_counts_and_the_others_end_after_it(start: Start, tmp_path: Path) -> None:
    code = f"""
        import os, sys, time
        if os.environ["AWS_BATCH_JOB_NODE_INDEX"] == "1": sys.exit(3)
        if os.environ["AWS_BATCH_JOB_NODE_INDEX"] == "2":
            open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid())); time.sleep(600)
        while not os.path.exists({str(tmp_path / "pid")!r}): time.sleep(0.02)
        time.sleep(0.5)
    """
    job = finish(start(gang(code, nodes=3)), "gang")
    assert job.status == "SUCCEEDED"
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_node_that_has_ended_is_shown_so_while_its_gang_runs(start: Start, tmp_path: Path) -> None:
    code = f"""
        import os, sys, time
        if os.environ["AWS_BATCH_JOB_NODE_INDEX"] == "1":
            sys.exit(3)
        while not os.path.exists({str(tmp_path / "seen")!r}): time.sleep(0.02)
    """
    runner = start(gang(code))
    job_id = submit(runner, "gang")
    until(lambda: described(runner, f"{job_id}#1")["status"] == "FAILED")
    assert [described(runner, one)["status"] for one in (job_id, f"{job_id}#0")] == ["RUNNING", "RUNNING"]
    (tmp_path / "seen").touch()
    assert runner.wait(job_id, SOON).status == "SUCCEEDED"


def test_a_gang_restarts_whole_and_numbers_its_attempts(start: Start, tmp_path: Path) -> None:
    # The main node's exit ends the others, which may not have begun.
    code = f"""
        import glob, os, sys, time
        attempt, node = os.environ["AWS_BATCH_JOB_ATTEMPT"], os.environ["AWS_BATCH_JOB_NODE_INDEX"]
        print("attempt", attempt, "node", node, flush=True)
        open(os.path.join({str(tmp_path)!r}, "said-" + attempt + "-" + node), "w").close()
        while len(glob.glob(os.path.join({str(tmp_path)!r}, "said-" + attempt + "-*"))) < 2: time.sleep(0.02)
        sys.exit(75 if attempt == "1" else 0)
    """
    runner = start(gang(code, retry=RETRY))
    job = finish(runner, "gang")
    assert job.status == "SUCCEEDED"
    assert [attempt.exit_code for attempt in job.attempts] == [75, 0]
    found = logs(tmp_path, job)
    assert {name: text.strip() for name, text in found.items()} == {
        f"attempt-{attempt}-node-{node:05d}.log": f"attempt {attempt} node {node}" for attempt in (1, 2) for node in (0, 1)
    }
    detail = described(runner, job.id)
    assert [attempt["container"]["exitCode"] for attempt in detail["attempts"]] == [75, 0]
    node = described(runner, f"{job.id}#1")
    assert node["nodeDetails"] == {"nodeIndex": 1, "isMainNode": False}
    assert (tmp_path / "logs" / node["container"]["logStreamName"]).is_file()


@pytest.mark.parametrize(
    ("code", "attempts"), [(64, 1), (69, 1), (75, 3), (77, 3), (137, 3), (1, 1)], ids=lambda value: str(value)
)
def test_exit_codes_decide_about_retries(start: Start, code: int, attempts: int) -> None:
    job = finish(start(single(f"import os; os._exit({code})", retry=RETRY)), "single")
    assert job.status == "FAILED"
    assert [attempt.exit_code for attempt in job.attempts] == [code] * attempts
    assert job.status_reason == "Essential container in task exited"


@pytest.mark.parametrize(
    ("exit_code", "reason", "status_reason", "again"),
    [
        (137, "OutOfMemoryError: killed", "Essential container in task exited", False),
        (137, "", "Essential container in task exited", True),
        (7, "", "", True),
        (67, "", "", False),
        (None, "", "Host EC2 (instance i-1) terminated.", True),
        (130, "", "", True),
    ],
)
def test_first_matching_rule_decides(exit_code: int | None, reason: str, status_reason: str, again: bool) -> None:
    assert RETRY.again(exit_code, reason, status_reason) is again


def test_no_matching_rule_means_retry_and_patterns_are_anded() -> None:
    rule = {"action": "EXIT", "onExitCode": "1", "onReason": "Bad*"}
    assert RetryStrategy(attempts=2, rules=(rule,)).again(1, "Good", "") is True
    assert RetryStrategy(attempts=2, rules=(rule,)).again(1, "Bad luck", "") is False
    assert RetryStrategy(attempts=2).again(64, "", "") is True


def test_each_node_of_a_gang_that_is_over_has_its_own_exit_code(start: Start) -> None:
    code = """
    import os, sys, time
    if os.environ["AWS_BATCH_JOB_NODE_INDEX"] == "1":
        sys.exit(41)
    time.sleep(600)
    """
    runner = start(gang(code))
    job_id = submit(runner, "gang")
    until(lambda: described(runner, f"{job_id}#1")["status"] == "FAILED")
    runner.kill_node(job_id, 0)
    job = runner.wait(job_id, SOON)
    assert [described(runner, f"{job_id}#{node}")["container"]["exitCode"] for node in (0, 1)] == [137, 41]
    assert job.attempts[0].exit_code == 137


def test_a_killed_node_ends_with_128_plus_the_signal(start: Start) -> None:
    runner = start(single("import time; time.sleep(600)", retry=RetryStrategy(attempts=1)))
    job_id = submit(runner, "single")
    until(lambda: bool(runner.jobs()[0].nodes))
    runner.kill_node(job_id, 0)
    assert runner.wait(job_id, SOON).attempts[0].exit_code == 137
    own = finish(start(single("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")), "single")
    assert own.attempts[0].exit_code == 139


def test_a_lost_host_is_retried_on_another_and_never_used_again(start: Start) -> None:
    code = "import os, time; time.sleep(600 if os.environ['AWS_BATCH_JOB_ATTEMPT'] == '1' else 0)"
    runner = start(single(code, retry=RETRY))
    job_id = submit(runner, "single")
    until(lambda: bool(runner.jobs()[0].nodes))
    host = runner.jobs()[0].nodes[0].host
    runner.lose_host(host)
    job = runner.wait(job_id, SOON)
    assert job.status == "SUCCEEDED"
    assert job.attempts[0].exit_code is None
    assert job.attempts[0].status_reason == f"Host EC2 (instance {host}) terminated."
    assert job.attempts[1].host != host


def test_a_fault_sticks_to_its_host_until_the_host_is_drained(start: Start) -> None:
    code = "import os, sys; sys.exit(76 if os.environ.get('SICK') else 0)"
    runner = start(single(code, retry=RETRY))
    [sick] = runner.hosts.take(1)
    runner.hosts.give_back([sick])
    runner.hosts.environment[sick] = {"SICK": "1"}
    assert [attempt.exit_code for attempt in finish(runner, "single").attempts] == [76, 76, 76]
    runner.hosts.drained.add(sick)
    assert finish(runner, "single").status == "SUCCEEDED"


def test_a_timeout_ends_the_attempt_and_is_not_retried(start: Start) -> None:
    runner = start(single("import time; time.sleep(600)", retry=RETRY, timeout_seconds=1))
    job = finish(runner, "single")
    assert (job.status, len(job.attempts)) == ("FAILED", 1)
    assert job.status_reason == "Job attempt duration exceeded timeout"


def test_array_children_are_independent_and_bounded(start: Start, tmp_path: Path) -> None:
    code = """
        import os, sys, time
        index, attempt = os.environ["AWS_BATCH_JOB_ARRAY_INDEX"], os.environ["AWS_BATCH_JOB_ATTEMPT"]
        print("threads", os.environ["OMP_NUM_THREADS"])
        time.sleep(0.3)
        sys.exit(75 if (index, attempt) == ("2", "1") else 0)
    """
    most = 0

    def count(_job: Job) -> None:
        nonlocal most
        most = max(most, sum(bool(child.nodes) for job in runner.jobs() for child in job.children))

    runner = start(single(code, retry=RETRY), changed=count)
    job = finish(runner, "single", arrayProperties={"size": 5})
    assert job.status == "SUCCEEDED"
    assert [len(child.attempts) for child in job.children] == [1, 1, 2, 1, 1]
    assert [child.id for child in job.children] == [f"{job.id}:{index}" for index in range(5)]
    assert 1 <= most <= 2
    assert described(runner, job.id)["arrayProperties"] == {"size": 5, "statusSummary": {"SUCCEEDED": 5}}
    assert described(runner, f"{job.id}:2")["attempts"][0]["container"]["exitCode"] == 75
    assert len(runner.list_jobs({"arrayJobId": job.id, "jobStatus": "SUCCEEDED"})["jobSummaryList"]) == 5


def test_an_array_job_fails_when_one_child_fails_but_runs_them_all(start: Start) -> None:
    code = "import os, sys; sys.exit(65 if os.environ['AWS_BATCH_JOB_ARRAY_INDEX'] == '0' else 0)"
    job = finish(start(single(code, retry=RETRY)), "single", arrayProperties={"size": 3})
    assert (job.status, job.status_reason) == ("FAILED", "Array Child Job failed")
    assert [child.status for child in job.children] == ["FAILED", "SUCCEEDED", "SUCCEEDED"]


def test_terminate_sends_sigterm_then_sigkill_and_does_not_retry(start: Start, tmp_path: Path) -> None:
    polite = """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: (print("asked to end", flush=True), sys.exit(75)))
        print("ready", flush=True); time.sleep(600)
    """
    stubborn = polite.replace("sys.exit(75)", "None").replace("time.sleep(600)", "[time.sleep(1) for _ in range(600)]")
    for code, exit_code in ((polite, 75), (stubborn, 137)):
        runner = start(single(code, retry=RETRY), grace=timedelta(seconds=0.6))
        job_id = submit(runner, "single")
        [job] = runner.jobs()
        until(partial(said, "ready", tmp_path, job))
        runner.terminate({"jobId": job_id, "reason": "because"})
        runner.wait(job_id, SOON)
        assert (job.status, job.status_reason, len(job.attempts)) == ("FAILED", "because", 1)
        assert job.attempts[0].exit_code == exit_code
        assert "asked to end" in "".join(logs(tmp_path, job).values())


def test_nothing_is_left_of_what_a_node_started(start: Start, tmp_path: Path) -> None:
    code = f"""
        import subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
    """
    assert finish(start(single(code)), "single").status == "SUCCEEDED"
    pid = int((tmp_path / "pid").read_text())
    until(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2])


@pytest.mark.parametrize("multinode", [True, False])
def test_references_are_replaced(start: Start, tmp_path: Path, multinode: bool) -> None:
    words = (sys.executable, "-c", "import sys; print(sys.argv[1:])", "Ref::run", "at=Ref::place")
    definition = JobDefinition(
        name="said", containers=(Container(command=words),), multinode=multinode, parameters={"place": "here"}
    )
    runner = start(definition)
    job = finish(runner, "said", parameters={"run": "s3://b/r"})
    assert "".join(logs(tmp_path, job).values()).strip() == "['s3://b/r', 'at=here']"
    assert described(runner, job.id)["parameters"] == {"run": "s3://b/r", "place": "here"}


def test_trnpipe_in_a_command_is_this_installation(start: Start, tmp_path: Path) -> None:
    program = (sys.executable, "-c", "import sys; print(sys.argv[1:])")
    definition = JobDefinition(name="stage", containers=(Container(command=("trnpipe", "stage", "train")),))
    job = finish(start(definition, program=program), "stage")
    assert "".join(logs(tmp_path, job).values()).strip() == "['stage', 'train']"


BY_SYNC = {"name": "MANAGED_BY_AWS", "value": "STARTED_BY_STEP_FUNCTIONS"}
"""The variable that `batch:submitJob.sync` adds to the environment of every job."""
REFERRING = JobDefinition(name="referring", containers=(Container(command=("echo", "Ref::run")),), timeout_seconds=60)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"jobQueue": "fair"}, "shareIdentifier must be specified"),
        ({"jobQueue": "fair", "shareIdentifier": "weekly"}, "schedulingPriority must be"),
        ({"jobQueue": "fair", "shareIdentifier": "week-ly", "schedulingPriorityOverride": 1}, "alphanumeric"),
        ({"jobQueue": "fair", "shareIdentifier": "weekly", "schedulingPriorityOverride": 10_000}, "0 to 9999"),
        ({"shareIdentifier": "weekly"}, "no scheduling policy"),
        ({"schedulingPriorityOverride": 1}, "no scheduling policy"),
        ({"jobQueue": "nowhere"}, "job queue 'nowhere' does not exist"),
        ({"jobDefinition": "nothing"}, "job definition 'nothing' does not exist"),
        ({"jobName": "with space"}, "jobName must match"),
        ({"arrayProperties": {"size": 1}}, "2 to 10,000"),
        ({"jobDefinition": "gang", "arrayProperties": {"size": 2}}, "cannot be an array"),
        ({"parameters": {"runn": "x"}}, "parameters unknown"),
        ({"parameters": {"run": 5}}, "must be a string"),
        ({"jobDefinition": "referring"}, "no value for Ref::run"),
        ({"nodeOverride": {}}, "unknown or unsupported parameters: nodeOverride"),
        ({"containerOverrides": {"environment": [{"name": "AWS_BATCH_X", "value": "1"}]}}, "reserved"),
        ({"jobDefinition": "gang", "containerOverrides": {"command": ["x"]}}, "should not be set for multinode jobs"),
        ({"jobDefinition": "gang", "containerOverrides": {"environment": [BY_SYNC]}}, "should not be set for multinode jobs"),
        ({"tags": {str(number): "" for number in range(51)}}, "at most 50 tags"),
        ({"timeout": {"attemptDurationSeconds": 60}}, "unknown or unsupported parameters: timeout"),
        ({"retryStrategy": {"attempts": 1}}, "unknown or unsupported parameters: retryStrategy"),
    ],
)
def test_refuses_what_batch_refuses(start: Start, request_: dict[str, Any], words: str) -> None:
    runner = start(single("pass"), gang("pass"), REFERRING)
    with pytest.raises(ClientError, match=words):
        submit(runner, **{"definition": "single", **request_})
    assert runner.jobs() == []


def test_a_fair_queue_takes_share_and_priority_and_a_single_job_step_functions_variable(start: Start) -> None:
    runner = start(single("import os; assert os.environ['MANAGED_BY_AWS'] == 'STARTED_BY_STEP_FUNCTIONS'"))
    fair = {"jobQueue": "fair", "shareIdentifier": "weekly", "schedulingPriorityOverride": 10}
    job = finish(runner, "single", **fair, containerOverrides={"environment": [BY_SYNC]})
    assert job.status == "SUCCEEDED"
    assert described(runner, job.id)["shareIdentifier"] == "weekly"
    assert described(runner, job.id)["schedulingPriority"] == 10


@pytest.mark.parametrize(
    ("operation", "request_", "words"),
    [
        ("terminatejob", {"jobId": "JOB"}, "1 to 1024"),
        ("terminatejob", {"jobId": "JOB", "reason": "x" * 1025}, "1 to 1024"),
        ("describejobs", {"jobs": []}, "1 to 100 ids"),
        ("describejobs", {"jobs": ["JOB"] * 101}, "1 to 100 ids"),
        ("listjobs", {}, "exactly one of"),
        ("listjobs", {"jobQueue": "queue", "arrayJobId": "JOB"}, "exactly one of"),
    ],
)
def test_refuses_questions_that_batch_refuses(start: Start, operation: str, request_: dict[str, Any], words: str) -> None:
    runner = start(single("pass"))
    job = finish(runner, "single")
    asked = {key: job.id if value == "JOB" else value for key, value in request_.items()}
    with pytest.raises(ClientError, match=words):
        runner.call(operation, asked)


def test_jobs_are_listed_by_name_in_any_state(start: Start) -> None:
    """As ListJobs does with the filter JOB_NAME: of either case, a prefix with an asterisk, newest first."""
    runner = start(single("pass"))
    ids = [finish(runner, "single", jobName=name).id for name in ("train-week-1", "Train-Week-1", "train-week-10")]

    def listed(value: str) -> list[str]:
        filters = [{"name": "JOB_NAME", "values": [value]}]
        found = runner.list_jobs({"jobQueue": "plain", "filters": filters, "jobStatus": "RUNNING"})
        return [job["jobId"] for job in found["jobSummaryList"]]

    assert listed("train-week-1") == ids[1::-1]
    assert listed("train-week-1*") == ids[::-1]
    assert listed("week-1") == []


def test_unknown_operations_are_refused(start: Start) -> None:
    with pytest.raises(ClientError, match="does not answer createjobqueue"):
        start().call("createjobqueue", {})
