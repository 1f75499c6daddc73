"""Adding up what a run has used: retries, shared hosts, killed attempts, unknown prices."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from pipeline.contract import STAGES, Queue, Stage
from pipeline.cost import NOTE_SECONDS, Bill, NodeAttempt, StageUse, cost_of, most, stage_use
from pipeline.errors import BadData

START = datetime(2026, 1, 4, 3, tzinfo=timezone.utc)
PRICES = {Queue.TRAIN: 20.0, Queue.EMBED: 10.0, Queue.CPU: 0.5}


def at(minutes: float) -> datetime:
    return START + timedelta(minutes=minutes)


def attempt(start: float, seen: float, *, host: str = "a", exit_code: int | None = 0, **facts: Any) -> NodeAttempt:
    """An attempt from one minute to another."""
    known = {"node": 0, "attempt": 1, "job": "job-1", **facts}
    return NodeAttempt(host=host, started=at(start), seen=at(seen), exit_code=exit_code, **known)


def use(*records: NodeAttempt, stage: Stage = Stage.TRAIN, now: float = 10_000) -> StageUse:
    found = stage_use(stage, records, at(now))
    assert found is not None
    return found


def test_retries_of_a_gang_all_count() -> None:
    gang = [attempt(0, 30, host=f"h{node}", node=node, exit_code=75) for node in range(2)]
    again = [attempt(40, 100, host=f"h{node + 1}", node=node, attempt=2) for node in range(2)]
    found = use(*gang, *again)
    assert (found.nodes, found.attempts, found.at_most) == (2, 2, False)
    assert found.node_hours == 3.0  # 2 x 30 min and 2 x 60 min, though one host served in both


def test_another_execution_of_the_run_adds_its_attempts() -> None:
    found = use(attempt(0, 60, exit_code=69), attempt(600, 660, job="job-2"))
    assert (found.attempts, found.node_hours) == (2, 2.0)


def test_children_that_share_a_host_pay_for_it_once() -> None:
    children = [attempt(0, 60, node=0), attempt(30, 90, node=1), attempt(45, 50, node=2), attempt(120, 150, node=3)]
    assert use(*children, stage=Stage.EMBED).node_hours == 2.0  # 0-90 and 120-150
    apart = [attempt(0, 60, node=0, host="a"), attempt(30, 90, node=1, host="b")]
    assert use(*apart, stage=Stage.EMBED).node_hours == 2.0


def test_a_killed_attempt_counts_until_shortly_after_its_last_sign_of_life() -> None:
    found = use(attempt(0, 59, exit_code=None), attempt(90, 100, attempt=2))
    assert found.at_most
    assert found.node_hours == pytest.approx((59 + NOTE_SECONDS / 60 + 10) / 60)


def test_a_killed_attempt_ends_before_the_next_one_begins() -> None:
    found = use(attempt(0, 30, exit_code=None), attempt(30.25, 60, attempt=2, host="b"))
    assert found.at_most
    assert found.node_hours == pytest.approx(1.0)


def test_another_nodes_start_says_nothing_of_a_killed_one() -> None:
    found = use(attempt(0, 30, exit_code=None), attempt(30.25, 60, node=1, host="b"))
    assert found.node_hours == pytest.approx((31 + 29.75) / 60)


def test_an_attempt_that_still_runs_counts_until_now() -> None:
    found = use(attempt(0, 9.5, exit_code=None), stage=Stage.REPORT, now=10)
    assert not found.at_most
    assert found.node_hours == pytest.approx(10 / 60)


def test_a_stage_that_never_began_has_used_nothing() -> None:
    assert stage_use(Stage.TRAIN, [], at(0)) is None


def test_a_job_of_four_times_the_size_counts_as_four_nodes() -> None:
    found = use(attempt(0, 30), stage=Stage.PRECOMPILE)
    assert (found.nodes, found.node_hours) == (4, pytest.approx(2.0))


def test_the_bill_adds_stages_at_their_queues_prices() -> None:
    bill = Bill(
        uses=(use(attempt(0, 60), stage=Stage.PREPARE), use(attempt(0, 90, exit_code=None), attempt(200, 290, attempt=2))),
        prices=PRICES,
    )
    hours = 1 + (90 + 1 + 90) / 60
    assert bill.usd == pytest.approx(0.5 + 20 * (hours - 1))
    metrics = bill.metrics()
    assert metrics["usd"] == round(0.5 + 20 * (hours - 1), 2)
    assert metrics["node_hours"] == round(hours, 4)
    assert (metrics["at_most"], metrics["currency"]) == (True, "USD")
    assert metrics["stages"]["prepare"] == {"nodes": 1, "attempts": 1, "node_hours": 1.0, "usd": 0.5}
    json.dumps(metrics)


def test_without_a_price_there_are_node_hours_and_no_dollars() -> None:
    uses = (use(attempt(0, 60), stage=Stage.PREPARE), use(attempt(0, 60)))
    some = Bill(uses=uses, prices={Queue.CPU: 0.5})
    assert (some.usd, some.node_hours) == (None, 2.0)
    assert [stage["usd"] for stage in some.metrics()["stages"].values()] == [0.5, None]
    nothing = Bill(uses=uses, prices={}).metrics()
    assert nothing["usd"] is None
    assert [stage["usd"] for stage in nothing["stages"].values()] == [None, None]
    assert cost_of({}, {}) == 0


def test_at_most_is_the_dearest_stage_for_the_whole_time_budget() -> None:
    budget = timedelta(hours=6)
    assert most(PRICES, nodes=1, children={Stage.EMBED: 4}, time_budget=budget) == 6 * 4 * 10
    assert most(PRICES, nodes=4, children={Stage.EMBED: 4}, time_budget=budget) == 6 * 4 * 20
    assert most(PRICES, nodes=1, children={Stage.INGEST: 500}, time_budget=budget) == 6 * 500 * PRICES[Queue.CPU]
    assert most({Queue.TRAIN: 20.0}, nodes=1, children={}, time_budget=budget) is None
    # No order of stages within the budget costs more: each moment has one stage.
    dearest = max(PRICES[spec.queue] for spec in STAGES.values())
    assert most(PRICES, nodes=1, children={}, time_budget=budget) == 6 * dearest


@pytest.mark.parametrize(
    "changes", [{"started": "yesterday"}, {"seen": "2026-01-04T03:00:00"}, {"node": "0"}, {"node": None}, {"more": 1}]
)
def test_a_record_is_read_with_its_types_and_times(changes: dict[str, Any]) -> None:
    record = json.loads(attempt(0, 1).to_json())
    assert NodeAttempt.from_json(json.dumps(record).encode()) == attempt(0, 1)
    with pytest.raises(BadData):
        NodeAttempt.from_json(json.dumps(record | changes).encode())
