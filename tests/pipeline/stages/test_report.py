"""report: one page for every ending of a run, whatever is missing or broken, with everything from outside escaped."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime, timedelta, timezone
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from pipeline import store
from pipeline.contract import Stage, StageFailure, StageResult, now
from pipeline.cost import NodeAttempt
from pipeline.plan import DeletionPlan, ExpectedCost, Shard
from pipeline.run.context import StageOutput
from pipeline.run_inputs import GraphsPlan, PlannedWorld, Published
from pipeline.stages import embed, evaluate, publish, report
from pipeline.stages.pages import number

EVIL = "<script>alert('x')</script>"


class Page(HTMLParser):
    """Text of a page, its tags, and the targets it refers to."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text = ""
        self.tags: list[str] = []
        self.targets: list[str] = []
        self.attributes: set[str] = set()
        self.comments: list[str] = []
        self.policy = ""
        self.feed(html)
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        if ("http-equiv", "Content-Security-Policy") in attrs:
            self.policy = dict(attrs)["content"] or ""
        self.targets += [value or "" for name, value in attrs if name in ("src", "href", "action", "data")]

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)

    def handle_data(self, data: str) -> None:
        if self.lasttag != "style":
            self.text += data


@pytest.fixture(params=["local", "s3"])
def root(request: pytest.FixtureRequest) -> str | None:
    return None if request.param == "local" else request.getfixturevalue("s3_root")


def page_of(run: Any) -> Page:
    output = report.run(run.context(Stage.REPORT))
    assert output is None or output.outputs["report"].uri == run.paths.report
    page = Page(store.read_bytes(run.paths.report).decode())
    assert "script" not in page.tags
    assert page.policy == "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    assert all(target.startswith("../") for target in page.targets), "a page has no resources of its own"
    return page


def fail(run: Any, stage: Stage, **facts: Any) -> None:
    failure = StageFailure(stage=stage.value, run=run.plan.run, **({"exit_code": 65, "what": "it broke", "time": now()} | facts))
    store.write_bytes(run.paths.failure(stage), failure.to_json())


def log_training(run: Any, steps: int = 50) -> None:
    lines: list[dict[str, Any]] = [{"step": step, "loss": 3.0 - step / 50, "lr": 1e-5} for step in range(1, steps + 1)]
    lines += [{"step": step, "validation": {"ndcg@10": 0.4 + step / 1000}} for step in (0, 25, 50)]
    store.write_bytes(run.paths.metrics, "".join(json.dumps(line) + "\n" for line in lines).encode())


def go_on(run: Any, until: Stage) -> None:
    """The stages from prepare to `until`, those of this package for real."""
    real = {Stage.EVALUATE: evaluate.run, Stage.EMBED: embed.run, Stage.PUBLISH: publish.run}
    for stage in list(Stage)[: list(Stage).index(until) + 1]:
        run.finish(stage, real[stage](run.context(stage)) if stage in real else StageOutput())
        if stage is Stage.TRAIN:
            log_training(run)


def test_published(plan_run: Any, root: str | None) -> None:
    run = plan_run(root, children=1)
    go_on(run, Stage.PUBLISH)
    tests = [{"name": "memory", "rank": 0, "passed": True, "value": 1.0, "unit": "GB/s", "detail": ""}]
    store.write_json(run.paths.node_health(0), {"node": 0, "host": "host-17", "passed": True, "tests": tests})
    page = page_of(run)
    assert "Published" in page.text
    assert "ndcg@10 is unchanged" in page.text
    assert page.tags.count("polyline") == 2
    assert page.tags.count("rect") == 11
    for words in (
        "recall@100",
        "host-17",
        "healthy",
        "locale:de",
        "newest week",
        "too small",
        "30 held-out queries",
        "documents/s",
        "torch",
    ):
        assert words in page.text, words
    assert "data.delete" not in page.text
    assert {"../plan.json", "../model", "../embed/manifest.json", "../train/metrics.jsonl"} <= set(page.targets)
    assert "../train/tensorboard" not in page.targets


def test_a_page_names_what_was_replaced_and_measures_a_parent_that_is_a_third_model(plan_run: Any) -> None:
    run = plan_run(published=Published(run="week-00", folder="published", sha256=""))
    means = {"ndcg@10": 0.25}
    scores = {"baseline": {"ndcg@10": 0.5}, "parent": means, "new": {"ndcg@10": 0.6}, "difference": {"ndcg@10": {"value": 0.1}}}
    run.finish(Stage.EVALUATE, StageOutput(metrics={**scores, "gate": {"verdict": "accepted", "metric": "ndcg@10"}}))
    page = page_of(run)
    assert "Published when the run was planned: run week-00." in page.text
    assert "The parent, a third model: ndcg@10 0.2500." in page.text
    run.finish(Stage.PUBLISH, StageOutput(metrics={"published": True, "replaced": "week-00"}))
    assert "run week-00, which this run replaced." in page_of(run).text


def test_a_page_says_what_was_deleted_and_that_weights_are_exempt(plan_run: Any) -> None:
    run = plan_run(children=1)
    run.replan(deletions=DeletionPlan(digest="d", entries=1234, rows=56))
    page = page_of(run)
    assert "data.delete names 1,234 ids and texts; 56 rows" in page.text
    assert "The weights are exempt" in page.text


def test_result_of_the_page_itself(plan_run: Any) -> None:
    run = plan_run(children=1)
    go_on(run, Stage.EVALUATE)
    fail(run, Stage.EMBED, what="no host")
    output = report.run(run.context(Stage.REPORT))
    assert output is not None
    cost = {"currency": "USD", "usd": 0, "node_hours": 0, "at_most": False, "stages": {}}
    assert output.metrics == {
        "verdict": "failed",
        "headline": "Failed in embed",
        "missing": [],
        "cost": cost,
        "registry": "current",
    }
    assert output.outputs["report"].sha256 == store.sha256(run.paths.report)


def test_registry_null(plan_run: Any) -> None:
    run = plan_run(children=1, settings={"registry": None})
    go_on(run, Stage.PUBLISH)
    page = page_of(run)
    assert "Finished" in page.text
    assert "publishes nowhere" in page.text


def test_refused(plan_run: Any) -> None:
    run = plan_run()
    go_on(run, Stage.EVALUATE)
    result = store.read_json(run.paths.result(Stage.EVALUATE))
    result["metrics"]["gate"] |= {"verdict": "refused", "reason": "ndcg@10 fell by 0.02, from 0.5 to 0.48"}
    store.write_json(run.paths.result(Stage.EVALUATE), result)
    page = page_of(run)
    assert "Refused" in page.text
    assert "ndcg@10 fell by 0.02, from 0.5 to 0.48" in page.text
    assert "evaluate refused" in page.text
    assert "embed not reached" in page.text


def test_failed_shows_the_four_parts(plan_run: Any) -> None:
    run = plan_run()
    go_on(run, Stage.COMPILE)
    log_training(run, steps=7)
    fail(
        run,
        Stage.TRAIN,
        what="the loss is not finite",
        value=["step 8", "row 5"],
        rule="loss is a number",
        remedy="lower the rate",
        node=2,
        rank=71,
        host="host-3",
    )
    page = page_of(run)
    for words in (
        "Failed in train",
        "the loss is not finite",
        "step 8",
        "row 5",
        "loss is a number",
        "lower the rate",
        "rank 71",
    ):
        assert words in page.text, words
    assert "train failed" in page.text
    assert "The model was not evaluated" in page.text
    assert "polyline" in page.tags


def test_superseded(plan_run: Any) -> None:
    run = plan_run(children=1)
    go_on(run, Stage.EMBED)
    fail(run, Stage.PUBLISH, exit_code=68, what="run week-02 published first")
    page = page_of(run)
    assert "Superseded" in page.text
    assert "run week-02 published first" in page.text


def test_failure_that_was_overcome_does_not_count(plan_run: Any) -> None:
    run = plan_run(children=1)
    fail(run, Stage.HEALTH_CHECK, what="a sick host", exit_code=76)
    go_on(run, Stage.PUBLISH)
    assert "Published" in page_of(run).text


def test_stage_that_left_nothing(plan_run: Any) -> None:
    run = plan_run()
    go_on(run, Stage.COMPILE)
    page = page_of(run)
    assert "Not finished" in page.text
    assert "train left neither a result nor a failure" in page.text


def test_a_stage_that_was_left_out_is_not_missing(plan_run: Any) -> None:
    run = plan_run()
    nothing = {"compile": False, "precompile": False}
    said = {Stage.PREPARE: {"ingest_children": 0}, Stage.PLAN: nothing, Stage.HEALTH_CHECK: {}}
    for stage, metrics in said.items():
        run.finish(stage, StageOutput(metrics=metrics))
    page = page_of(run)
    assert "ingest skipped" in page.text
    assert "compile skipped" in page.text
    assert "collect skipped" not in page.text
    assert "train left neither a result nor a failure" in page.text
    run.finish(Stage.PREPARE, StageOutput(metrics={"ingest_children": 2}))
    assert "ingest left neither a result nor a failure" in page_of(run).text
    run.finish(Stage.INGEST, StageOutput())
    run.finish(Stage.PLAN, StageOutput(metrics={"compile": True, "precompile": True}))
    assert "collect left neither a result nor a failure" in page_of(run).text
    run.finish(Stage.PLAN, StageOutput(metrics={"compile": True, "precompile": False}))
    page = page_of(run)
    assert "compile not finished" in page.text
    assert "compile left neither a result nor a failure" in page.text


def test_graphs_are_counted_on_devices_that_compile(plan_run: Any) -> None:
    run = plan_run()
    assert "Graphs:" not in page_of(run).text
    run.replan(graphs=GraphsPlan(train="one", infer="other"))
    run.finish(Stage.COMPILE, StageOutput(metrics={"graphs": 11}))
    run.finish(Stage.TRAIN, StageOutput(metrics={"graphs": {"compiled": 10, "new": 0}}))
    run.finish(Stage.EVALUATE, StageOutput(metrics={"graphs": {"compiled": 4, "new": 2}}))
    text = " ".join(page_of(run).text.split())
    assert "11 compiled ahead of time in this run; train met 10, none of them new; evaluate met 4, 2 of them new" in text
    run.finish(Stage.COMPILE, StageOutput(metrics={"graphs": 0}))
    assert "all were compiled by an earlier run" in page_of(run).text


def test_what_checkpoints_cost_training(plan_run: Any) -> None:
    run = plan_run(None)
    stalled = {"checkpoints": 4, "checkpoint_stall_seconds": 1.5, "checkpoint_stall_share": 0.0021}
    run.finish(Stage.TRAIN, StageOutput(metrics=stalled))
    text = page_of(run).text
    assert "Checkpoints: 4. Training stalled for them for" in text
    assert "1.50 s, 0.21 % of its time" in text


def put_attempt(run: Any, stage: Stage, minutes: tuple[int, int], *, exit_code: int | None = 0, **facts: Any) -> None:
    start = datetime(2026, 1, 4, 3, tzinfo=timezone.utc)
    started, seen = ((start + timedelta(minutes=minute)).isoformat() for minute in minutes)
    record = NodeAttempt(
        **{"node": 0, "attempt": 1, "job": "job-1", "host": "a"} | facts, started=started, seen=seen, exit_code=exit_code
    )
    store.write_json(run.paths.node_attempt(stage, record.job, record.attempt, record.node), asdict(record))


def put_input(run: Any, **deployment: Any) -> None:
    store.write_json(run.paths.input, {"deployment": deployment, "execution": {}, "execution_arn": "arn"})


PRICES = {"train": 20.0, "embed": 10.0, "cpu": 0.5, "currency": "USD"}


def test_cost_of_all_attempts_beside_what_was_expected(plan_run: Any, root: str | None) -> None:
    run = plan_run(root)
    expected = ExpectedCost(run="week-00", node_hours=4.5, as_before=61.25, at_most=480.0)
    run.replan(expected_cost=expected)
    put_input(run, prices=PRICES, hosts={"train": "trn1.32xlarge", "embed": "inf2.xlarge"})
    put_attempt(run, Stage.PREPARE, (0, 30))
    for node in range(2):
        put_attempt(run, Stage.TRAIN, (40, 70), node=node, host=f"h{node}", exit_code=75)
        put_attempt(run, Stage.TRAIN, (75, 135), node=node, host=f"h{node}", attempt=2)
    put_attempt(run, Stage.EMBED, (140, 200), exit_code=None)
    put_attempt(run, Stage.EMBED, (140, 170), node=1, host="b", attempt=3)
    output = report.run(run.context(Stage.REPORT))
    text = Page(store.read_bytes(run.paths.report).decode()).text
    assert output is not None
    cost = output.metrics["cost"]
    hours = {"prepare": 0.5, "train": 3.0, "embed": round((61 + 30) / 60, 4)}
    assert {stage: found["node_hours"] for stage, found in cost["stages"].items()} == hours
    assert (cost["usd"], cost["at_most"]) == (round(0.25 + 60 + 10 * 91 / 60, 2), True)
    for words in (
        "prepare 1 1 0.50 0.50 0.25",
        "train 2 × trn1.32xlarge 2 3.00 20.00 60.00",
        "embed 2 × inf2.xlarge 1 ≤ 1.52 10.00 ≤ 15.17",
        "all ≤ 5.02 ≤ 75.42",
        "Cost≤ 75.42 USD",
        "61.25 USD, 4.50 node-hours as run week-00 used; at most 480.00 USD within the time budget of 12 h 00 min.",
        "killed without a last word",
    ):
        assert words in text, (words, text)
    assert "No sum in dollars" not in text


@pytest.mark.parametrize(("metric", "published"), [("accuracy", True), ("ndcg@10", False)])
def test_price_and_performance_of_training(plan_run: Any, metric: str, published: bool) -> None:
    run = plan_run()
    put_input(run, prices=PRICES, hosts={"train": "trn1.32xlarge"})
    for node in range(2):
        put_attempt(run, Stage.TRAIN, (0, 90), node=node, host=f"h{node}")
    run.finish(Stage.TRAIN, StageOutput(metrics={"steps": 5000, "seconds": 2000.0}))
    run.finish(Stage.EVALUATE, StageOutput(metrics={"new": {metric: 0.9712}, "gate": {"verdict": "accepted", "metric": metric}}))
    text = page_of(run).text
    assert "this run 2 × trn1.32xlarge 20.00 2.50 0.971 10,800 60.00" in text
    assert ("BERT on Amazon reviews, published by AWS 1 × trn1.32xlarge 24.75 6.64 0.984 6,033 41.47" in text) == published


def test_node_hours_without_dollars_where_nothing_has_a_price(plan_run: Any) -> None:
    run = plan_run()
    put_attempt(run, Stage.TRAIN, (0, 90))
    text = page_of(run).text
    assert "train 1 1 1.50 – –" in text
    assert text.count("Cost") == 1, "no figure in dollars at the top"
    assert "No sum in dollars" in text
    assert "Expected when it was planned" not in text
    assert "≤" not in text


def test_a_record_of_an_attempt_that_cannot_be_read_is_named_and_the_others_count(plan_run: Any) -> None:
    run = plan_run()
    put_attempt(run, Stage.TRAIN, (0, 60))
    store.write_bytes(run.paths.node_attempt(Stage.TRAIN, "job-2", 1, 0), b'{"node": 0}')
    put_input(run, prices={"train": "much"})
    text = page_of(run).text
    assert "train/attempts/job-2/attempt-1-node-00000.json: " in text
    assert "input.json: " in text
    assert "train 1 1 1.00 – –" in text


def test_run_without_a_plan(plan_run: Any) -> None:
    run = plan_run()
    store.delete(run.paths.plan)
    moment = now()
    before = StageResult(stage="prepare", run="r", status="done", started=moment, finished=moment, fingerprint="")
    store.write_bytes(run.paths.result(Stage.PREPARE), before.to_json())
    fail(run, Stage.INGEST, exit_code=65, what="too many rows were refused")
    page = page_of(run)
    assert "Failed in ingest" in page.text
    assert "prepare done" in page.text
    assert "ended before it had a plan" in page.text


def test_empty_run_folder(plan_run: Any) -> None:
    run = plan_run()
    store.delete_folder(run.paths.root)
    page = page_of(run)
    assert "Not finished" in page.text
    assert "prepare left neither" in page.text


def test_results_of_another_plan_do_not_count(plan_run: Any) -> None:
    run = plan_run()
    go_on(run, Stage.COMPILE)
    run.replan(lineage=("another",))
    assert "prepare left neither" in page_of(run).text


BROKEN = [b"", b"{", b"[]", b"null", b'{"stage": 3}', b"\xff\xfe"]


@pytest.mark.parametrize("data", BROKEN)
def test_broken_pieces_are_listed_and_harmless(plan_run: Any, data: bytes) -> None:
    run = plan_run()
    pieces = {
        "train/result.json": run.paths.result(Stage.TRAIN),
        "compile/failure.json": run.paths.failure(Stage.COMPILE),
        "train/metrics.jsonl": run.paths.metrics,
        "evaluate/scorecard.json": run.paths.scorecard,
        "health_check/node-00000.json": run.paths.node_health(0),
        "plan.json": run.paths.plan,
    }
    for name, uri in pieces.items():
        if name != "plan.json" or data != b'{"stage": 3}':
            store.write_bytes(uri, data)
    page = page_of(run)
    assert "Not finished" in page.text
    assert "train/result.json:" in page.text


def test_numbers_of_the_wrong_kind_are_dashes(plan_run: Any) -> None:
    run = plan_run()
    go_on(run, Stage.EVALUATE)
    store.write_json(
        run.paths.scorecard,
        {
            "queries": "many",
            "baseline": {"ndcg@10": None},
            "parent": 3,
            "new": 3,
            "difference": {"ndcg@10": {"value": "x"}, "mrr@10": 5},
        },
    )
    page = page_of(run)
    assert "– held-out queries" in page.text


def test_everything_from_outside_is_escaped(plan_run: Any) -> None:
    run = plan_run(settings={"report": {"title": EVIL}, "data": {"train": [EVIL]}})
    shard = Shard(uri=f"s3://b/{EVIL}.jsonl", sha256="0" * 64, size=1, rows=1, new_rows=4321)
    parent = run.plan.parent.model_copy(update={"uri": EVIL, "run": EVIL})
    run.replan(train=run.plan.train.model_copy(update={"new": (shard,), "replay": (shard,)}), parent=parent)
    go_on_output = StageOutput(metrics={"gate": {"verdict": "refused", "reason": EVIL, "metric": "ndcg@10"}})
    run.finish(Stage.EVALUATE, go_on_output)
    change = {"value": -0.1, "low": -0.2, "high": -0.05}
    scores = {"baseline": {"ndcg@10": 0.5}, "new": {"ndcg@10": 0.4}, "difference": {"ndcg@10": change}, "queries": 1}
    store.write_json(run.paths.scorecard, {**scores, "slices": {EVIL: scores}})
    test = {"name": EVIL, "rank": EVIL, "passed": False, "value": 1.0, "unit": EVIL, "detail": EVIL}
    store.write_json(run.paths.node_health(0), {"node": 0, "host": EVIL, "passed": False, "tests": [test]})
    store.write_bytes(run.paths.result(Stage.COMPILE), f'{{"{EVIL}": 1}}'.encode())
    fail(run, Stage.EMBED, what=EVIL, value=[EVIL], rule=EVIL, remedy=EVIL, host=EVIL)
    page = page_of(run)
    assert page.text.count(EVIL) >= 12
    html = store.read_bytes(run.paths.report).decode()
    assert "<script" not in html
    assert "&lt;script&gt;" in html


HOSTILE = (
    '"><img src=x onerror=alert(1)>',
    "'><svg/onload=alert(1)>",
    "</script></style></title><script>alert(1)</script>",
    "<!--",
    "--><b>",
    "]]><b>",
    "javascript:alert(1)",
    "{{ 7 * 7 }}{% include 'x' %}",
    "\x00\x1b[2J\ud800",
)


@pytest.mark.parametrize("evil", HOSTILE)
def test_no_element_and_no_attribute_comes_from_data(plan_run: Any, tmp_path: Path, evil: str) -> None:
    def make(text: str, week: str) -> Page:
        whole = text.encode(errors="ignore").decode()  # a plan cannot hold half of a character
        run = plan_run(str(tmp_path / week), run=week, settings={"report": {"title": whole}})
        shard = Shard(uri=f"s3://b/{whole}", sha256="0" * 64, size=1, rows=1)
        run.replan(train=run.plan.train.model_copy(update={"new": (shard,)}))
        go_on(run, Stage.TRAIN)
        gate = {"verdict": text, "reason": text, "metric": "ndcg@10"}
        run.finish(Stage.EVALUATE, StageOutput(metrics={"gate": gate, "graphs": text}))
        change = {"value": -0.1, "low": -0.2, "high": -0.05}
        scores = {
            "baseline": {"ndcg@10": text},
            "parent": {"ndcg@10": text},
            "new": {text: 0.4},
            "difference": {"ndcg@10": change, text: change},
            "queries": text,
        }
        store.write_json(run.paths.scorecard, {**scores, "slices": {text: scores}})
        test = {"name": text, "rank": text, "passed": False, "value": text, "unit": text, "detail": text}
        health = {"node": text, "host": text, "instance": f"{text}2", "passed": False, "tests": [test]}
        store.write_json(run.paths.node_health(0), health)
        write_monitor(run, 0, monitor_lines(2, host=text, errors={text: 1}, ecc={text: 1}))
        fail(run, Stage.EMBED, what=text, value=[text], rule=text, remedy=text, host=text)
        return page_of(run)

    harmless, page = make("harmless", "good"), make(evil, "evil")
    assert harmless.text.count("harmless") > 15
    assert page.tags == harmless.tags
    assert page.attributes == harmless.attributes
    assert page.comments == harmless.comments == []
    assert page.targets == harmless.targets


def test_a_failed_node_is_shown(plan_run: Any) -> None:
    run = plan_run()
    bad = {"name": "memory", "rank": 3, "passed": False, "value": 0.5, "unit": "GB/s", "detail": "7 of 8 words read back wrong"}
    store.write_json(run.paths.node_health(0), {"node": 0, "host": "host-9", "passed": False, "tests": [bad]})
    fail(run, Stage.HEALTH_CHECK, exit_code=76, what="node 0 (host-9) failed its health check")
    page = page_of(run)
    assert "memory on rank 3: 0.5000 GB/s (7 of 8 words read back wrong)" in page.text


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (1234.5, 0, "1,234"),
        (0.12345, 4, "0.1235"),
        (-2, 1, "−2.0"),
        (None, 2, "–"),
        ("7", 0, "–"),
        (True, 0, "–"),
        (float("nan"), 0, "–"),
    ],
)
def test_numbers(value: Any, digits: int, text: str) -> None:
    assert number(value, digits) == text


def monitor_lines(count: int, *, host: str = "host-7", **changes: Any) -> list[dict[str, Any]]:
    """Lines as pipeline/sdk/monitor.py writes them, a minute apart."""
    return [
        {
            "time": 1_700_000_000.0 + 60 * minute,
            "attempt": 1,
            "host": host,
            "utilization": {"mean": 50.0 + minute, "min": 40.0, "max": 90.0 + minute},
            "cores": {"0": 50.0},
            "device_memory_bytes": (100 + minute) << 30,
            "host_memory_bytes": 64 << 30,
            "ecc": {"mem_ecc_corrected": minute, "sram_ecc_uncorrected": 0},
            "errors": {"numerical": 1, "hardware": 0},
            **changes,
        }
        for minute in range(count)
    ]


def write_monitor(run: Any, node: int, lines: list[dict[str, Any]]) -> None:
    store.write_bytes(run.paths.host_monitor(node), "".join(json.dumps(line) + "\n" for line in lines).encode())


def test_what_the_hosts_did_while_training(plan_run: Any) -> None:
    run = plan_run()
    run.replan(world=PlannedWorld(kind="neuron", precision="compiler", nodes=2, ranks_per_node=32))
    go_on(run, Stage.TRAIN)
    charts = page_of(run).tags.count("figure")
    write_monitor(run, 0, monitor_lines(3))
    broken = monitor_lines(1, host=EVIL, ecc={"mem_ecc_uncorrected": 2}, errors={})
    write_monitor(run, 1, [*broken, {"time": 1_700_000_060.0, "host": "host-8", "errors": {}, "ecc": {}, **UNKNOWN}])
    page = page_of(run)
    assert "While training" in page.text
    cells = page.text.replace(" ", "")
    assert "0host-751.040.0…92.0102.064.0203numerical" in cells
    assert f"1{EVIL},host-850.040.0…90.0100.064.002none".replace(" ", "") in cells
    assert page.tags.count("figure") == charts + 1
    assert "Utilization of the cores, percent" in page.text
    assert "node 0" in page.text
    assert "../train/monitor" in page.targets


UNKNOWN = {"device_memory_bytes": None, "host_memory_bytes": None, "cores": {}}


def test_many_hosts_are_drawn_as_lowest_mean_and_highest() -> None:
    hosts = []
    for node in range(5):
        lines = monitor_lines(4, utilization={"mean": 10.0 * node, "min": 0.0, "max": 100.0})
        hosts.append(report.host_use(node, "".join(json.dumps(line) + "\n" for line in lines).encode()))
    chart = report.utilization_chart(hosts)
    assert chart is not None
    assert [line["name"] for line in chart["lines"]] == ["lowest node", "mean", "highest node"]
    # Down is up in SVG.
    lowest, mean, highest = (line["end"][1] for line in chart["lines"])
    assert lowest > mean > highest
    assert report.utilization_chart([]) is None


@pytest.mark.parametrize("line", ["{}", "[]", '{"time": 1, "host": "h", "errors": 3, "ecc": {}}', "nonsense"])
def test_a_monitor_that_cannot_be_read_is_a_problem_of_the_page(plan_run: Any, line: str) -> None:
    run = plan_run()
    go_on(run, Stage.TRAIN)
    store.write_bytes(run.paths.host_monitor(0), line.encode())
    page = page_of(run)
    assert "While training" not in page.text
    assert "train/monitor/node-00000.jsonl:" in page.text
