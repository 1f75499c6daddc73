"""The supervisor with real rank processes: how nodes and gangs end, and what they leave in the run folder."""

from __future__ import annotations

import errno
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from pipeline import store
from pipeline.contract import RunPaths, Stage, StageFailure, StageResult, now
from pipeline.cost import NodeAttempt
from pipeline.errors import ExitCode
from pipeline.host import gang
from pipeline.host.deadlines import Deadlines
from pipeline.host.ranks import ProcessRanks
from pipeline.host.supervisor import Supervisor
from pipeline.run.world import NodeWorld
from pipeline.run_inputs import PlannedWorld
from tests.pipeline.training.conftest import training_run

__all__ = ["training_run"]

QUICK = {"health_check": {"matmul_size": 64, "memory_mib": 8, "collective_bytes": [4096, 65536], "storage_mib": 1}}
LONG = {"health_check": {"matmul_size": 64, "memory_mib": 8, "collective_bytes": [16 << 20] * 400, "storage_mib": 1}}


MEET = """
open(os.path.join(os.environ["MEETING"], str(rank)), "w").close()
while len(os.listdir(os.environ["MEETING"])) < int(os.environ["EXPECTED"]):
    context.heartbeat.beat(note="meeting")
    time.sleep(0.05)
"""
"""A rank goes on when the expected ones are there, however long a busy machine takes to start them."""


@pytest.fixture
def meeting(tmp_path: Path, scripted_stage: dict[str, str]) -> Callable[[int, str], dict[str, str]]:
    """A function that returns variables with which so many ranks meet in MEETING, and then run some code."""
    folder = tmp_path / "meeting"
    folder.mkdir()

    def meeting(ranks: int, code: str) -> dict[str, str]:
        return {**scripted_stage, "TRNPIPE_TEST_RANK": MEET + code, "MEETING": str(folder), "EXPECTED": str(ranks)}

    return meeting


@pytest.fixture
def planned(plan_run: Callable[..., Any]) -> Callable[..., Any]:
    """A function that plans a run on some nodes and returns the run folder's paths."""

    def planned(nodes: int = 1, ranks_per_node: int = 1, settings: dict[str, Any] = QUICK, root: str | None = None) -> Any:
        run = plan_run(root, settings=settings)
        run.replan(world=PlannedWorld(kind="cpu", precision="fp32", nodes=nodes, ranks_per_node=ranks_per_node))
        return run.paths

    return planned


def failure_of(paths: Any, stage: Stage = Stage.HEALTH_CHECK) -> StageFailure:
    return StageFailure.from_json(store.read_bytes(paths.failure(stage)))


def last_lines(log: str, count: int = 4) -> list[str]:
    return [line.split("] ", 1)[-1].split(":")[0] for line in log.strip().splitlines()[-count:]]


def is_gone(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    # An orphan in a container whose first process reaps no children stays as a zombie.
    state = Path(f"/proc/{process}/stat")
    return state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def used(paths: Any, node: int = 0) -> NodeAttempt:
    """What the node's first attempt has left for the bill."""
    record = NodeAttempt.from_json(store.read_bytes(paths.node_attempt(Stage.HEALTH_CHECK, "job-1", 1, node)))
    assert (record.node, record.host) == (node, platform.node())
    return record


def note(paths: Any, node: int = 0) -> str:
    """What the node said last that it was doing."""
    uri = paths.progress(Stage.HEALTH_CHECK, node)
    return str(store.read_json(uri)["note"]) if store.exists(uri) else ""


def test_a_gang_passes_its_health_check_and_runs_it_again_when_asked_again(planned: Any, supervise: Any) -> None:
    paths = planned(nodes=2)
    # What an earlier execution of this run left behind says nothing about this one.
    earlier = StageFailure(stage="health_check", run="week-01", exit_code=76, what="a sick host", node=1)
    store.write_bytes(paths.failure(Stage.HEALTH_CHECK), earlier.to_json())
    record = {"exit_code": 76, "time": "", "failure": asdict(earlier), "node": 1, "attempt": 1, "job": "another", "host": ""}
    store.write_json(paths.node_exit(Stage.HEALTH_CHECK, 1, 1), record)

    main, child = (supervise(Stage.HEALTH_CHECK, paths.root, node=node, nodes=2) for node in range(2))

    assert (main.wait(), child.wait()) == (0, 0), main.log + child.log
    result = StageResult.from_json(store.read_bytes(paths.result(Stage.HEALTH_CHECK)))
    assert result.metrics["nodes"] == 2
    assert all(gbps > 0 for name in ("memory_gbps", "collective_gbps") for gbps in result.metrics[name])
    for node in range(2):
        report = store.read_json(paths.node_health(node))
        assert report["passed"]
        assert {"matmul_fp32", "memory", "storage", "all_reduce_65536"} <= {test["name"] for test in report["tests"]}
        assert store.read_json(paths.node_exit(Stage.HEALTH_CHECK, 1, node))["exit_code"] == 0
        assert store.read_json(paths.progress(Stage.HEALTH_CHECK, node))["job"] == "job-1"
        assert used(paths, node=node).exit_code == 0
    assert not store.exists(paths.failure(Stage.HEALTH_CHECK))


def test_a_stage_that_is_done_does_nothing_again_unless_the_plan_is_another(planned: Any, supervise: Any) -> None:
    paths = planned()
    plan = store.read_json(paths.plan)
    done = StageResult(
        stage="evaluate", run=paths.run_id, status="done", started=now(), finished=now(), fingerprint=plan["fingerprint"]
    ).to_json()
    store.write_bytes(paths.result(Stage.EVALUATE), done)
    again = supervise(Stage.EVALUATE, paths.root)
    assert again.wait() == 0
    assert "done already" in again.log
    assert "is process" not in again.log
    assert store.read_bytes(paths.result(Stage.EVALUATE)) == done

    store.write_json(paths.plan, plan | {"fingerprint": "another"})
    anew = supervise(Stage.EVALUATE, paths.root)
    assert anew.wait() == 0
    assert "is process" in anew.log
    assert StageResult.from_json(store.read_bytes(paths.result(Stage.EVALUATE))).fingerprint == "another"


def test_compile_looks_again_because_compiled_sets_may_be_gone(planned: Any, supervise: Any) -> None:
    paths = planned()
    for _ in range(2):
        node = supervise(Stage.COMPILE, paths.root)
        assert node.wait() == 0
        assert "is process" in node.log
    assert StageResult.from_json(store.read_bytes(paths.result(Stage.COMPILE))).metrics["compiles"] is False


def test_a_run_without_a_plan_ends_with_66_and_four_parts(tmp_path: Path, supervise: Any) -> None:
    node = supervise(Stage.COMPILE, str(tmp_path / "runs" / "nothing"))
    assert node.wait() == ExitCode.MISSING_INPUT
    assert last_lines(node.log, 3) == ["error", "value", "remedy"]
    failure = failure_of(RunPaths(str(tmp_path / "runs" / "nothing")), Stage.COMPILE)
    assert failure.exit_code == 66
    assert "plan.json" in failure.value[0]


def test_a_killed_rank_is_75_and_names_the_signal(planned: Any, supervise: Any) -> None:
    paths = planned()
    node = supervise(Stage.HEALTH_CHECK, paths.root)
    os.kill(node.rank_process(), signal.SIGKILL)
    assert node.wait() == ExitCode.TRANSIENT
    assert last_lines(node.log) == ["error", "value", "rule", "remedy"]
    assert "rank 0 was killed by SIGKILL" in failure_of(paths).what
    assert used(paths).exit_code == ExitCode.TRANSIENT
    assert used(paths).seen > used(paths).started


def test_sigterm_ends_the_ranks_and_is_75(planned: Any, supervise: Any) -> None:
    paths = planned()
    node = supervise(Stage.HEALTH_CHECK, paths.root)
    rank = node.rank_process()
    node.process.send_signal(signal.SIGTERM)
    assert node.wait(25) == ExitCode.TRANSIENT
    assert "SIGTERM" in failure_of(paths).what
    assert is_gone(rank)


@pytest.mark.parametrize(
    ("stage", "ranks_per_child", "started"),
    [(Stage.EMBED, None, 2), (Stage.EMBED, 1, 1), (Stage.EMBED, 3, 3), (Stage.EVALUATE, None, 2), (Stage.EVALUATE, 3, 3)],
)
def test_evaluate_and_embed_have_as_many_ranks_as_their_own_host(
    plan_run: Any, supervise: Any, meeting: Any, stage: Stage, ranks_per_child: int | None, started: int
) -> None:
    """Those who embed may be other hosts than those who train, with fewer cores or more."""
    run = plan_run(settings={"embed": {"ranks_per_child": ranks_per_child}})
    run.replan(world=PlannedWorld(kind="cpu", precision="fp32", nodes=1, ranks_per_node=2))
    node = supervise(stage, run.paths.root, **meeting(started, "print('rank', os.environ['RANK'])"))
    node.wait()
    assert sorted(re.findall(r"^.*rank (\d)$", node.log, re.M)) == [str(rank) for rank in range(started)]


def test_ranks_that_stand_still_are_77_with_all_their_stacks_in_the_log(planned: Any, supervise: Any, meeting: Any) -> None:
    paths = planned(ranks_per_node=2)
    there = meeting(2, "time.sleep(600)")
    node = supervise(Stage.HEALTH_CHECK, paths.root, **there, TRNPIPE_PROGRESS_SECONDS="5")
    rank = node.rank_process()
    node.wait_until(lambda: len([*Path(there["MEETING"]).iterdir()]) == 2)
    # It shows its stack all the same, as the other one, which sleeps.
    os.kill(rank, signal.SIGSTOP)
    assert node.wait() == ExitCode.NO_PROGRESS
    for number in range(2):
        assert "run_stage" in node.log.split(f"stacks of rank {number}:")[1].split("stacks of rank")[0]
    assert "no heartbeat for 5 seconds" in failure_of(paths).value[0]
    assert last_lines(node.log) == ["error", "value", "rule", "remedy"]
    assert is_gone(rank)


def test_a_node_that_never_comes_is_named(planned: Any, supervise: Any) -> None:
    paths = planned(nodes=2)
    main = supervise(Stage.HEALTH_CHECK, paths.root, nodes=2, TRNPIPE_PEER_START_SECONDS="1", TRNPIPE_SETTLE_SECONDS="0")
    assert main.wait() == ExitCode.TRANSIENT
    assert "node 1" in failure_of(paths).what


def test_a_child_that_vanishes_ends_the_main_node_within_a_minute(planned: Any, supervise: Any) -> None:
    paths = planned(nodes=2, settings=LONG)
    main, child = (supervise(Stage.HEALTH_CHECK, paths.root, node=node, nodes=2) for node in range(2))
    main.wait_until(lambda: note(paths).startswith("collectives"))
    rank = child.rank_process()
    child.process.send_signal(signal.SIGKILL)
    began = time.monotonic()
    assert main.wait(60) == ExitCode.TRANSIENT
    assert time.monotonic() - began < 60
    assert "node 1" in failure_of(paths).what
    assert "node 1" in main.log.splitlines()[-4]
    main.wait_until(lambda: is_gone(rank), 5)
    # It could not say how it ended, but when it had begun.
    assert (used(paths, node=0).exit_code, used(paths, node=1).exit_code) == (75, None)


def test_a_silent_child_is_noticed_while_the_main_nodes_ranks_run_on(planned: Any, supervise: Any) -> None:
    paths = planned(nodes=2)
    main = supervise(Stage.HEALTH_CHECK, paths.root, nodes=2, TRNPIPE_STALE_SECONDS="2", TRNPIPE_SETTLE_SECONDS="0")
    # One sign of life of a node whose ranks never reach the rendezvous, so that no collective tells.
    gang.write_progress(paths, Stage.HEALTH_CHECK, NodeWorld(node=1, nodes=2, job_id="job-1#1"), {})
    assert main.wait() == ExitCode.TRANSIENT
    assert failure_of(paths).what == "no sign of life from node 1"
    assert failure_of(paths).value == ["silent for 2 seconds"]


def test_the_first_failing_nodes_code_is_the_gangs_over_s3(planned: Any, supervise: Any, s3_root: str) -> None:
    paths = planned(nodes=2, root=s3_root)
    main = supervise(Stage.HEALTH_CHECK, paths.root, nodes=2)
    child = supervise(Stage.HEALTH_CHECK, paths.root, node=1, nodes=2, AWS_BATCH_JOB_NUM_NODES="3")
    assert child.wait() == ExitCode.BAD_CONFIG
    assert main.wait() == ExitCode.BAD_CONFIG
    failure = failure_of(paths)
    assert (failure.node, failure.exit_code) == (1, 64)
    assert "3 nodes in the job, 2 in the plan" in main.log
    assert last_lines(main.log) == ["error", "value", "rule", "remedy"]


def test_the_supervisor_loads_no_framework() -> None:
    program = "import sys, pipeline.host.supervisor; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "pydantic", "numpy", "pyarrow"} & set(loaded)


def test_deadlines_come_from_the_environment() -> None:
    deadlines = Deadlines.from_environment({"TRNPIPE_PROGRESS_SECONDS": "3600", "TRNPIPE_STOP_SECONDS": ""})
    assert deadlines == replace(Deadlines(), progress_seconds=3600)
    day = Deadlines.from_environment({"TRNPIPE_ATTEMPT_SECONDS": "86400"})
    # A deployment that lets compiling take a day must not lose it to a watchdog that allows four hours.
    assert (day.lead_seconds, day.patience_seconds) == (600, 86400)
    assert Deadlines.from_environment({"TRNPIPE_ATTEMPT_SECONDS": "600"}).lead_seconds == 150


GIVES_UP = """
def end(*_):
    from pipeline.errors import BadData
    raise BadData('a row is too long')
signal.signal(signal.SIGTERM, end)
time.sleep(600)
"""

FINISHES = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\ntime.sleep(600)"


@pytest.mark.parametrize("text", ["soon", "-1", "nan"])
def test_a_deadline_that_is_no_time_ends_the_node_with_64(planned: Any, supervise: Any, text: str) -> None:
    node = supervise(Stage.HEALTH_CHECK, planned().root, TRNPIPE_STALE_SECONDS=text)
    assert node.wait() == ExitCode.BAD_CONFIG
    assert f"TRNPIPE_STALE_SECONDS={text}" in node.log


@pytest.mark.parametrize(
    ("code", "expected", "what"),
    [
        ("time.sleep(600)", 75, "the attempt's time is over before embed is done"),
        # It says in time that a further attempt is in vain.
        (GIVES_UP, 65, "a row is too long"),
    ],
)
def test_a_stage_that_resumes_ends_before_batch_ends_it(
    plan_run: Any, supervise: Any, scripted_stage: dict[str, str], code: str, expected: int, what: str
) -> None:
    paths = plan_run().paths
    began = time.monotonic()
    node = supervise(Stage.EMBED, paths.root, **scripted_stage, TRNPIPE_TEST_RANK=code, TRNPIPE_ATTEMPT_SECONDS="40")
    assert node.wait() == expected
    assert time.monotonic() - began >= 30
    assert failure_of(paths, Stage.EMBED).what == what


def test_a_stage_that_finishes_in_its_last_minutes_needs_no_other_attempt(
    plan_run: Any, supervise: Any, scripted_stage: dict[str, str]
) -> None:
    paths = plan_run().paths
    node = supervise(Stage.EMBED, paths.root, **scripted_stage, TRNPIPE_TEST_RANK=FINISHES, TRNPIPE_ATTEMPT_SECONDS="40")
    node.wait()
    assert "the attempt's time is over" not in node.log


@pytest.mark.long
def test_training_ends_before_its_limit_and_the_next_attempt_resumes(training_run: Any, supervise: Any) -> None:
    # More steps than any attempt takes, and few enough for their order to be written at once.
    paths = training_run(steps=30_000, log_every=10**6, validate_every=10**6, checkpoint_every=10**6).paths
    seconds = 20
    written = None
    # As long as this machine takes to start training at all; every attempt ends itself in time.
    while written is None:
        seconds *= 3
        node = supervise(Stage.TRAIN, paths.root, TRNPIPE_ATTEMPT_SECONDS=str(seconds))
        # The limit counts from the supervisor's start; before that a busy machine loads Python.
        assert node.wait(seconds + 60) == ExitCode.TRANSIENT
        written = re.search(r"checkpoint of step (\d+) is written", node.log)
        assert written or seconds < 1000, node.log
    assert failure_of(paths, Stage.TRAIN).what == "the attempt's time is over before train is done"
    again = supervise(Stage.TRAIN, paths.root, AWS_BATCH_JOB_ATTEMPT="2")
    again.wait_until(lambda: f"resuming from the checkpoint of step {written[1]}" in again.log, seconds)


def test_a_stage_that_keeps_nothing_is_left_to_batch_s_own_limit(
    planned: Any, supervise: Any, scripted_stage: dict[str, str]
) -> None:
    code = "time.sleep(4)"
    node = supervise(Stage.HEALTH_CHECK, planned().root, **scripted_stage, TRNPIPE_TEST_RANK=code, TRNPIPE_ATTEMPT_SECONDS="1")
    node.wait()
    assert "the attempt's time is over" not in node.log


@pytest.mark.parametrize(
    ("number", "code", "what"), [(errno.ENOSPC, 75, "the disk is full"), (errno.EIO, 69, "Input/output error")]
)
def test_a_supervisor_whose_own_files_fail_says_so(
    planned: Any, monkeypatch: pytest.MonkeyPatch, number: int, code: int, what: str
) -> None:
    paths = planned()

    def fail(**_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "TemporaryDirectory", fail)
    # This process is the test's.
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert Supervisor(Stage.HEALTH_CHECK, paths, NodeWorld(), Deadlines()).run() == code
    assert what in failure_of(paths).what


def test_a_rank_that_fails_between_two_questions_is_no_success(
    planned: Any, scripted_stage: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that asks for failures, hears of none, and then finds all ranks ended."""
    failures = ProcessRanks.failures

    def then_it_ends(ranks: ProcessRanks) -> list[StageFailure]:
        found = failures(ranks)
        for process in ranks._processes.values():
            process.wait()
        return found

    monkeypatch.setattr(ProcessRanks, "failures", then_it_ends)
    # This process is the test's.
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for name, value in {**scripted_stage, "TRNPIPE_TEST_RANK": "time.sleep(1); raise ValueError('a late one')"}.items():
        monkeypatch.setenv(name, value)
    paths = planned()
    assert Supervisor(Stage.HEALTH_CHECK, paths, NodeWorld(), Deadlines()).run() == ExitCode.DEFECT
    assert "a late one" in failure_of(paths).what


def test_a_child_of_an_array_leaves_its_sisters_failure(tmp_path: Path) -> None:
    paths = RunPaths(str(tmp_path / "runs" / "run"))
    failure = StageFailure(stage="embed", run="run", exit_code=65, what="bad rows", node=3)
    store.write_bytes(paths.failure(Stage.EMBED), failure.to_json())
    for child, left in ((2, True), (3, False)):
        supervisor = Supervisor(Stage.EMBED, paths, NodeWorld(array_index=child), Deadlines())
        supervisor._publish_failure(None, done=False)
        assert store.exists(paths.failure(Stage.EMBED)) is left


def test_a_child_of_an_array_notes_its_use_now_and_then_and_nothing_after_its_last_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = RunPaths(str(tmp_path / "runs" / "run"))
    supervisor = Supervisor(Stage.EMBED, paths, NodeWorld(array_index=3, attempt=2, job_id="job-9:3", host="host-7"), Deadlines())
    uri = paths.node_attempt(Stage.EMBED, "job-9", 2, 3)
    seen = []
    for exit_code in (None, None, 0, None):
        if seen and seen[-1].exit_code == 0:
            monkeypatch.setattr("pipeline.host.supervisor.NOTE_SECONDS", -1.0)  # a sign of life would be due at once
        supervisor._note(exit_code)
        seen.append(NodeAttempt.from_json(store.read_bytes(uri)))
    first, again, last, after = seen
    assert (first.node, first.attempt, first.job, first.host, first.exit_code) == (3, 2, "job-9", "host-7", None)
    assert again == first, "the next sign of life is not due yet"
    assert (last.exit_code, last.started) == (0, first.started)
    assert last.seen > first.seen
    assert after == last, "a thread that comes late takes nothing back"
