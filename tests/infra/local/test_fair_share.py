"""Turns of jobs that wait for hosts, by the rule that AWS Batch documents: the deployment of two models, and rule by rule."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from infra.cdk_context import read_context, read_settings
from infra.local.batch import BatchRunner
from infra.local.batch_jobs import Job, build_job
from infra.local.batch_nodes import BatchSettings
from infra.local.definitions import Container, FairShare, JobDefinition, JobQueue
from infra.local.fair_share import Turns
from infra.local.template import LocalStack
from pipeline.contract import Stage

UNTIL = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.02)"
GANG = JobDefinition(name="gang", containers=(Container(command=(sys.executable, "-c", UNTIL, "Ref::end")),) * 2, multinode=True)
SINGLE = JobDefinition(name="single", containers=GANG.containers[:1])
EXAMPLE = read_settings({**read_context(), "env": "example"})
POLICY = FairShare(weights=EXAMPLE.shares, decay_seconds=EXAMPLE.share_decay_seconds)
MODELS = {name: schedule.share for name, schedule in EXAMPLE.schedules.items() if schedule.mode == "train"}


class Clock:
    """Seconds that pass when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)


class OneGang:
    """Two hosts, which each gang takes both; a gang ends when the test says so."""

    def __init__(self, folder: Path, stack: LocalStack) -> None:
        self.folder, self.clock = folder, Clock()
        self.states = json.loads(stack.definition)["States"]
        settings = BatchSettings(logs=folder / "logs", grace=timedelta(seconds=2), cores=2, hosts=2, clock=self.clock)
        self.runner = BatchRunner([GANG], [JobQueue(name="train", fair_share=POLICY)], settings)

    def submit(self, name: str, share: str, stage: Stage) -> None:
        """Submit a gang with the priority that the state machine gives to its stage."""
        request = {
            "jobName": name,
            "jobQueue": "train",
            "jobDefinition": "gang",
            "shareIdentifier": share,
            "schedulingPriorityOverride": self.states[stage.value]["Parameters"]["SchedulingPriorityOverride"],
            "parameters": {"end": str(self.folder / name)},
        }
        self.runner.submit(request)

    def running(self) -> list[Job]:
        return [job for job in self.runner.jobs() if job.status == "RUNNING"]

    def end_after(self, seconds: float) -> str:
        """Let the one running gang end after this time, and return its name once the next one, if any waits, runs."""
        until(lambda: bool(self.running()))
        [job] = self.running()
        self.clock.now += seconds
        (self.folder / job.name).touch()
        assert job.done.wait(60)
        until(lambda: bool(self.running()) or all(one.done.is_set() for one in self.runner.jobs()))
        return job.name


@pytest.fixture
def one_gang(tmp_path: Path, stack: LocalStack) -> Iterator[OneGang]:
    found = OneGang(tmp_path, stack)
    yield found
    found.runner.close()


def test_two_models_weeks_and_an_experiment_compete_for_one_gang(one_gang: OneGang) -> None:
    """Weights 0.5, 0.5 and 4, a decay of an hour. The comments have each share's host-seconds times its weight."""
    weekly, products = MODELS["weekly"], MODELS["products"]
    assert [POLICY.weight(share) for share in (weekly, products, "experiments")] == [0.5, 0.5, 4]
    assert POLICY.decay_seconds == 3600
    ended = []
    one_gang.submit("experiment-check", "experiments", Stage.HEALTH_CHECK)
    until(lambda: bool(one_gang.running()))
    one_gang.submit("experiment-train", "experiments", Stage.TRAIN)
    one_gang.submit("weekly-check", weekly, Stage.HEALTH_CHECK)
    one_gang.submit("products-check", products, Stage.HEALTH_CHECK)
    # experiments 480; neither model has used anything, and weekly's was submitted first.
    ended.append(one_gang.end_after(60))
    # weekly 60, products 0. The next stage of a run is submitted when the one before has ended.
    ended.append(one_gang.end_after(60))
    one_gang.submit("weekly-train", weekly, Stage.TRAIN)
    # weekly 58: a minute older than the 60 of products, so less.
    ended.append(one_gang.end_after(60))
    one_gang.submit("products-train", products, Stage.TRAIN)
    # weekly above 1,000, products 40, experiments 300.
    ended.append(one_gang.end_after(1200))
    one_gang.submit("weekly-again-check", weekly, Stage.HEALTH_CHECK)
    # experiments 140, weekly 600, products 1,000: the models have had theirs.
    ended.append(one_gang.end_after(1200))
    # experiments 4,400, weekly 400.
    ended.append(one_gang.end_after(600))
    ended.append(one_gang.end_after(60))
    assert ended == [
        "experiment-check",
        "weekly-check",
        "products-check",
        "weekly-train",
        "products-train",
        "experiment-train",
        "weekly-again-check",
    ]


def test_a_job_that_is_terminated_while_it_waits_leaves_its_place(one_gang: OneGang) -> None:
    for name in ("runs", "waits", "follows"):
        one_gang.submit(name, "manual", Stage.TRAIN)
    until(lambda: bool(one_gang.running()))
    waiting = one_gang.runner.jobs()[1]
    one_gang.runner.terminate({"jobId": waiting.id, "reason": "not needed"})
    assert waiting.done.wait(60)
    assert (waiting.status, waiting.attempts) == ("FAILED", [])
    assert [one_gang.end_after(1), one_gang.end_after(1)] == ["runs", "follows"]


# Rule by rule, without processes.


def job(share: str | None = None, priority: int | None = 10, definition: JobDefinition = GANG) -> Job:
    request = {"jobName": "job", "shareIdentifier": share, "schedulingPriorityOverride": priority, "parameters": {"end": "-"}}
    return build_job(request, definition, JobQueue(name="train"))


def turns(policy: FairShare | None, *waiting: Job, clock: Clock | None = None, hosts: int | None = 2) -> Turns:
    found = Turns(policy, hosts, clock or Clock())
    for one in waiting:
        found.join(one)
    return found


def whose_turn(found: Turns, *waiting: Job) -> Job:
    [first] = [one for one in waiting if found.take(one)]
    return first


def use(found: Turns, clock: Clock, share: str, seconds: float) -> None:
    one = job(share)
    found.join(one)
    assert found.take(one)
    clock.now += seconds
    found.leave(one)


def test_a_higher_priority_goes_first_within_its_share_only() -> None:
    check, train, other = job("a", 40), job("a", 60), job("b", 10)
    clock = Clock()
    found = turns(FairShare(), clock=clock)
    use(found, clock, "a", 60)
    for one in (check, train, other):
        found.join(one)
    assert whose_turn(found, check, train, other) is other
    found.leave(other)
    assert whose_turn(found, check, train) is train


@pytest.mark.parametrize(("seconds", "expected"), [(1000, "b"), (3600, "a")])
def test_what_is_older_than_the_decay_is_forgotten(seconds: float, expected: str) -> None:
    clock = Clock()
    found = turns(FairShare(decay_seconds=3600), clock=clock)
    use(found, clock, "a", 60)
    clock.now += seconds
    first, second = job("a"), job("b")
    found.join(first)
    found.join(second)
    assert whose_turn(found, first, second).share == expected


def test_what_runs_counts_too() -> None:
    clock = Clock()
    running, first, second = job("a", definition=SINGLE), job("a", definition=SINGLE), job("b", definition=SINGLE)
    found = turns(FairShare(), running, clock=clock)
    assert found.take(running)
    clock.now += 60
    found.join(first)
    found.join(second)
    assert whose_turn(found, first, second) is second


@pytest.mark.parametrize(("weight", "expected"), [(0.5, "teamA"), (4, "other")])
def test_a_prefix_stands_for_every_share_that_begins_so(weight: float, expected: str) -> None:
    clock = Clock()
    found = turns(FairShare(weights={"team*": weight}), clock=clock)
    use(found, clock, "teamA", 60)
    use(found, clock, "other", 60)
    first, second = job("other"), job("teamA")
    found.join(first)
    found.join(second)
    assert whose_turn(found, first, second).share == expected


def test_a_gang_that_does_not_fit_keeps_its_place() -> None:
    running, gang, small = job(definition=SINGLE), job(), job(definition=SINGLE)
    found = turns(None, running, gang, small)
    assert found.take(running)
    assert not found.take(gang)
    assert not found.take(small)
    found.leave(running)
    assert whose_turn(found, small, gang) is gang


def test_without_a_limit_of_hosts_every_job_starts() -> None:
    waiting = [job("a", 10), job("b", 20), job("a", 30)]
    found = turns(FairShare(), *waiting, hosts=None)
    assert all(found.take(one) for one in waiting)
