"""The report's sections about the gate, the weeks and the texts; the history of a registry name; both pages in a browser."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import store
from pipeline.commands import prune
from pipeline.config import build_config
from pipeline.contract import RunPaths, Stage, history_uri
from pipeline.errors import Transient
from pipeline.evaluation.changes import largest_changes
from pipeline.evaluation.gate import judge_model
from pipeline.evaluation.holdout import Holdout
from pipeline.evaluation.retrieval_metrics import Relevant
from pipeline.evaluation.statistics import Units
from pipeline.plan import DataProfile
from pipeline.run.context import StageOutput
from pipeline.run.registry import keep_publication, publications
from pipeline.stages import evaluate, history, report
from pipeline.stages.history import EndedRun, keep_history
from tests.pipeline.stages.test_report import EVIL, PRICES, Page, fail, log_training, page_of, put_attempt, put_input

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
VOID = {"meta", "link", "br", "img", "hr", "input"}


class Spaced(Page):
    """A page whose text has a space wherever an element begins."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.text += " "
        super().handle_starttag(tag, attrs)


def report_of(run: Any) -> Spaced:
    page_of(run)
    return Spaced(store.read_bytes(run.paths.report).decode())


class Balanced(HTMLParser):
    """Asserts that every element ends where it must."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, self.getpos()


def change(value: float, width: float = 0.004) -> dict[str, float]:
    bounds = {"low": -width, "high": width, "at_least": -0.8 * width, "at_most": 0.8 * width}
    return {"value": value, "error": width / 2, **{name: value + offset for name, offset in bounds.items()}}


def scores_of(value: float, *, queries: int = 2400, baseline: float = 0.612, width: float = 0.004) -> dict[str, Any]:
    names = ("ndcg@10", "mrr@10", "recall@1", "recall@10", "recall@100")
    return {
        "queries": queries,
        "units": queries // 2,
        "baseline": {name: baseline + number / 20 for number, name in enumerate(names)},
        "new": {name: baseline + number / 20 + value for number, name in enumerate(names)},
        "difference": {name: change(value, width) for name in names},
    }


SLICES = {
    "locale:de": scores_of(0.006, queries=800),
    "locale:fr": scores_of(-0.041, queries=640, width=0.009),
    f"locale:{EVIL}": scores_of(0.001, queries=900),
    "task:search": scores_of(0.004),
    "fresh": scores_of(-0.012, queries=120, width=0.02),
}
DRIFT = {"documents": 5000, "cosine": 0.9731, "cosine_p1": 0.9012, "overlap@10": 0.874, "new_on_old": -0.0123}


def judged(run: Any, **more: Any) -> dict[str, Any]:
    """Give a run a scorecard and the verdict of the real gate on it."""
    config = build_config(
        {"gate": {"undecided": "refuse", "guardrails": [{"slice": name, "max_drop": 0.005} for name in ("locale:*", "fresh")]}}
    )
    scores = {**scores_of(0.0042), "candidates": 50_000, "slices": SLICES, "reference": scores_of(-0.003, width=0.002), **more}
    scorecard = {**scores, "gate": judge_model(scores, config.gate, None)}
    store.write_json(run.paths.scorecard, scorecard)
    run.finish(Stage.EVALUATE, StageOutput(metrics={key: value for key, value in scorecard.items() if key != "slices"}))
    return scorecard


PROFILE = DataProfile(
    rows=120_000,
    locales={"de": 0.5, "en": 0.3, EVIL: 0.2},
    tasks={"": 1.0},
    mean_label=0.81,
    median_query=7.0,
    median_document=64.0,
    duplicates=0.02,
    documents=50_000,
    documents_gone=120,
)


def weeks(plan_run: Any, root: str | None = None, **settings: Any) -> Any:
    """A run, and the plan of the one a week before."""
    before = plan_run(root, run="week-00", settings={"train": {"learning_rate": 1e-5}})
    before.replan(profile=PROFILE.model_copy(update={"rows": 100_000, "locales": {"de": 0.75, "en": 0.25}}))
    run = plan_run(root, settings={"train": {"learning_rate": 2e-5}, **settings})
    run.replan(lineage=("week-00",), reference="week-00", profile=PROFILE)
    return run


def cells(page: Page, first: str, count: int) -> list[str]:
    """The words that follow in the page's text."""
    return page.text[page.text.index(first) + len(first) :].split()[:count]


CLASSES = {"batch_by": "task", "tasks": {"color": {"classes": ["warm", "cold"]}}}


def test_where_macro_f1_decides_the_budget_is_accuracys(plan_run: Any) -> None:
    """On the page, and in the figures that the history keeps."""
    run = weeks(plan_run)
    values = {"baseline": {"accuracy": 0.8, "macro-f1": 0.6}, "new": {"accuracy": 0.81, "macro-f1": 0.63}}
    scores = {"queries": 300, "units": 300, "candidates": 0, **values}
    scores |= {"difference": {"accuracy": change(0.01), "macro-f1": change(0.03)}}
    before = {"baseline": {"accuracy": 0.75}, "new": {"accuracy": 0.77}, "difference": {"accuracy": change(0.02)}}
    scores["reference"] = {"queries": 250, "units": 250, **before}
    gate = judge_model(
        scores, build_config({"gate": {"metric": "macro-f1"}, "train": CLASSES, "data": {"holdout_by": "query"}}).gate, None
    )
    store.write_json(run.paths.scorecard, {**scores, "gate": gate})
    run.finish(Stage.EVALUATE, StageOutput(metrics={**scores, "gate": gate}))
    text = report_of(run).text
    assert "run week-00, accuracy was 0.7500 with its model and is 0.7700 with the new one" in text
    assert "all weeks accuracy passed +0.0200" in text
    root = run.paths.root.rpartition("/runs/")[0]
    [kept] = [store.read_json(info.uri) for info in store.list_objects(f"{root}/registry") if "/runs/" in info.uri]
    assert (kept["metric"], kept["figures"]["new"], kept["figures"]["difference"]) == ("macro-f1", 0.63, 0.03)
    assert [kept["figures"][f"reference{end}"] for end in ("", "_low", "_high")] == pytest.approx([0.02, 0.016, 0.024])


def test_classified_texts_have_a_table_of_their_own(plan_run: Any) -> None:
    known = {
        "queries": 310,
        "units": 300,
        "baseline": {"accuracy": 0.91, "macro-f1": 0.87},
        "new": {"accuracy": 0.85, "macro-f1": 0.8},
        "difference": {"accuracy": change(-0.06, 0.02), "macro-f1": change(-0.07, 0.03)},
    }
    new = {"queries": 90, "units": 90, "new": {"accuracy": 0.71, "macro-f1": 0.65}}
    run = weeks(plan_run)
    scores = {**scores_of(0.0042), "candidates": 50_000, "slices": {**SLICES, "task:department": known, "task:color": new}}
    gate = judge_model(scores, build_config({}).gate, None)
    assert [rule["slice"] for rule in gate["guardrails"] if rule["metric"] == "accuracy"] == ["task:department"]
    assert "accuracy of task:department fell by 0.06000, surely by more than 0.02" in gate["reason"]
    store.write_json(run.paths.scorecard, {**scores, "gate": gate})
    run.finish(Stage.EVALUATE, StageOutput(metrics={**scores_of(0.0042), "gate": gate}))
    page = report_of(run)
    rules, _, rest = page.text.partition("By slice")
    slices, _, classified = rest.partition("Classified texts")
    assert "task:department accuracy refused −0.0600" in rules
    assert "task:department" not in slices
    assert "task:search" not in classified
    f1 = "0.8700 0.8000 −0.0700 −0.1000 … −0.0400"
    assert f"task:department 310 {f1} 0.9100 0.8500 −0.0600 −0.0800 … −0.0400" in classified
    assert "task:color 90 – 0.6500 – – … – – 0.7100" in classified
    Balanced(store.read_bytes(run.paths.report).decode())


def test_every_rule_of_the_gate_with_its_interval_and_verdict(plan_run: Any) -> None:
    run = weeks(plan_run)
    scorecard = judged(run)
    page = report_of(run)
    rules = page.text.partition("Rules of the gate")[2]
    for words in (
        "all queries passed +0.0042 at least +0.0010 −0.0050 2,400 1,200",
        "all weeks passed −0.0030 at least −0.0046 −0.0100 2,400 1,200",
        "locale:de passed +0.0060 at most +0.0092 −0.0050 800 400",
        "locale:fr refused −0.0410 at most −0.0338 −0.0050 640 320",
        "newest week too small −0.0120 at most +0.0040 −0.0050 120 60",
        "run week-00, ndcg@10 was 0.6120 with its model and is 0.6090 with the new one",
    ):
        assert words in rules, words
    assert "task:search" in rules.partition("By slice")[2], "no guardrail, but a slice"
    assert "task:search" not in rules.partition("By slice")[0]
    html_text = store.read_bytes(run.paths.report).decode()
    assert html_text.count('class="whisker"') == 5 + 2 + len(scorecard["gate"]["guardrails"])
    assert 'aria-label="from −0.0500 to −0.0320"' in html_text
    Balanced(html_text)


@pytest.mark.parametrize(("value", "verdict"), [(0.0, "passed"), (-0.02, "refused")])
def test_the_primary_rule_has_a_verdict_of_its_own(plan_run: Any, value: float, verdict: str) -> None:
    run = weeks(plan_run)
    assert judged(run, **scores_of(value))["gate"]["verdict"] == "refused", "a locale fell"
    assert cells(report_of(run), "all queries", 1)[0] == verdict


def test_whiskers_share_a_scale_with_zero_in_the_middle_and_the_allowed_drop() -> None:
    places = report.whiskers({"a": {"low": -0.02, "value": 0.0, "high": 0.01, "allowed": -0.01}, "b": {"value": 0.5}})
    assert places == {"a": {"zero": 50.0, "low": 4.0, "value": 50.0, "high": 73.0, "allowed": 27.0}}


def test_the_data_against_last_week(plan_run: Any) -> None:
    run = weeks(plan_run)
    page = report_of(run)
    assert "Against last week, run week-00" in page.text
    data = page.text.partition("Against last week")[2]
    for words in (
        "rows of new shards 120,000 100,000 +20,000",
        "mean label 0.810 0.810 +0.000",
        "share of locale de, % 50.0 75.0 −25.0",
        f"share of locale {EVIL}, % 20.0 0.0 +20.0",
        "documents gone 120 120 +0",
    ):
        assert words in data, words
    assert data.index("locale de,") < data.index(f"locale {EVIL},") < data.index("locale en,"), "the largest change first"
    assert "task" not in data.partition("Settings")[0], "rows have no tasks"
    assert "<script" not in store.read_bytes(run.paths.report).decode()

    store.delete(RunPaths(f"{run.paths.bucket_root}/runs/week-00").plan)
    page = report_of(run)
    assert "Profile This week rows of new shards 120,000 median" in page.text
    assert "Settings that changed" not in page.text


def test_settings_that_changed_since_last_week(plan_run: Any) -> None:
    run = weeks(plan_run)
    changed = report_of(run).text.partition("Settings that changed")[2].partition("Hosts")[0]
    assert changed.split() == ["Setting", "Run", "week-00", "This", "run", "train.learning_rate", "1e-05", "2e-05"]
    run.replan(config=run.plan.config.model_copy(update={"train": build_config({"train": {}}).train}))
    last = RunPaths(f"{run.paths.bucket_root}/runs/week-00")
    store.write_bytes(last.plan, run.plan.model_copy(update={"run": "week-00"}).to_json())
    assert "None since run week-00." in report_of(run).text


def test_last_week_may_be_unreadable(plan_run: Any) -> None:
    run = weeks(plan_run)
    last = RunPaths(f"{run.paths.bucket_root}/runs/week-00").plan
    store.write_bytes(last, b"{}")
    page = report_of(run)
    assert f"{last}: the run's plan cannot be read" in page.text


SIZES = [
    {"size": 384, "bytes": 1536, "published": False, "ndcg@10": 0.6201},
    {"size": 128, "bytes": 512, "published": True, "ndcg@10": 0.6162},
    {"size": 64, "bytes": 256, "published": False, "ndcg@10": "none"},
]


def test_what_shorter_embeddings_lose(plan_run: Any) -> None:
    run = weeks(plan_run)
    judged(run, sizes=SIZES)
    shown = " ".join(cells(report_of(run), "By size, ndcg@10", 25))
    assert shown == (
        "Numbers of an embedding New Difference to all Bytes of a document "
        "384 0.6201 +0.0000 1,536 128 published 0.6162 −0.0039 512 64 – – 256"
    )
    judged(run, sizes=SIZES[:1])
    assert "By size" not in report_of(run).text


def test_drift(plan_run: Any) -> None:
    run = weeks(plan_run)
    judged(run)
    assert "Drift" not in report_of(run).text
    judged(run, drift=None)
    assert "Drift" not in report_of(run).text
    judged(run, drift=DRIFT)
    drift = report_of(run).text.partition("Drift of the embeddings")[2]
    for words in (
        "before and after 0.9731",
        "1st percentile 0.9012",
        "nearest 0.874",
        "old documents −0.0123",
        "5,000 documents",
    ):
        assert words in drift, words


# ------------------------------------------------------------------------------------------------------------- changed queries


def without_words(run: Any) -> None:
    """Let the new model know only one word."""
    from safetensors.torch import load, save

    uri = store.join(run.paths.model, "model.safetensors")
    tensors = load(store.read_bytes(uri))
    name = "embeddings.word_embeddings.weight"
    tensors[name] = tensors[name][:1].expand_as(tensors[name]).clone()
    store.write_bytes(uri, save(tensors, metadata={"format": "pt"}))


def test_the_texts_of_the_queries_that_changed_most(plan_run: Any) -> None:
    run = plan_run(settings={"report": {"texts": True}})
    without_words(run)
    run.finish(Stage.EVALUATE, evaluate.run(run.context(Stage.EVALUATE)))
    found = store.read_json(run.paths.query_changes)
    values = store.read_json(run.paths.scorecard)
    assert values["difference"]["ndcg@10"]["value"] < 0
    texts = {text for _, text in run.texts}
    assert len(found["fell"]) == 10
    drops = [query["after"] - query["before"] for query in found["fell"]]
    assert drops == sorted(drops)
    assert max(drops) < 0
    assert all(query["after"] > query["before"] for query in found["rose"])
    for query in found["fell"]:
        # Documents are cut at 32 tokens.
        relevant = next(text for text in texts if " ".join(text.split()[:4]) == query["query"])
        assert query["relevant"] == " ".join(relevant.split()[:30])
        assert any(text.startswith(query["best_after"]) for text in texts)
        assert query["locale"] in ("de", "en", None)
    # A metric of 1 means that the relevant document was the first one.
    assert any(query["before"] == 1.0 for query in found["fell"])
    assert all(query["best_before"] == query["relevant"] for query in found["fell"] if query["before"] == 1.0)
    assert all(query["best_after"] != query["relevant"] for query in found["fell"])
    page = report_of(run)
    assert "Queries that fell most, ndcg@10" in page.text
    assert found["fell"][0]["query"] in page.text
    assert "the relevant one" in page.text


def test_the_first_document_is_none_that_is_known_from_other_weeks() -> None:
    documents = [[number] for number in range(4)]
    pairs = {0: {0: 1.0}, 1: {1: 1.0, 3: 2.0}, 2: {2: 1.0}}
    holdout = Holdout(
        keys=((7, "de"), (8, None), (9, None)),
        queries=[[10], [11], [12]],
        candidates=documents,
        relevant=Relevant.of([pairs[query] for query in range(3)]),
        known=Relevant.of([{2: 1.0}, {}, {}]),
        units=Units.of(np.arange(3), np.arange(3)),
        tasks=[None] * 3,
    )
    # Document 2 is the nearest one of query 0 with both models, and known.
    vectors = np.eye(4, dtype=np.float32)[[0, 1, 2, 3, 2, 1, 2]]
    vectors[4, 1] = 0.5
    models = {"before": (np.array([0.2, 0.9, 0.5]), vectors), "after": (np.array([0.1, 1.0, 0.5]), vectors)}
    found = largest_changes(holdout, models, lambda tokens: f"text {tokens[0]}")
    [fell], [rose] = found["fell"], found["rose"]
    assert (fell["query"], fell["best_after"], fell["locale"], fell["relevant"]) == ("text 10", "text 1", "de", "text 0")
    assert (rose["query"], rose["before"], rose["after"]) == ("text 11", 0.9, 1.0)
    assert rose["relevant"] == "text 3", "the largest gain"


def test_no_text_is_written_unless_it_is_wanted(plan_run: Any) -> None:
    run = plan_run()
    without_words(run)
    run.finish(Stage.EVALUATE, evaluate.run(run.context(Stage.EVALUATE)))
    assert not store.exists(run.paths.query_changes)
    page = report_of(run)
    assert "Queries that fell" not in page.text
    assert not any(" ".join(text.split()[:4]) in page.text for _, text in run.texts[:30])


def test_texts_are_escaped_and_cut(plan_run: Any) -> None:
    run = weeks(plan_run)
    judged(run)
    query = {"query": EVIL, "before": 1.0, "after": 0.2, "locale": EVIL, "relevant": "word " * 100, "best_before": 3}
    store.write_json(run.paths.query_changes, {"fell": [query], "rose": "nothing"})
    page = report_of(run)
    assert EVIL in page.text
    assert page.text.count("word ") + page.text.count("word…") == 32
    Balanced(store.read_bytes(run.paths.report).decode())


# --------------------------------------------------------------------------------------------------------------- the history


def ended(number: int, **changes: Any) -> EndedRun:
    """A run of a made-up history of weeks with daily refreshes."""
    outcome = "accepted" if number % 6 == 0 else "refresh"
    outcome = {12: "refused", 20: "failed", 30: "refused", 41: "rollback"}.get(number, outcome)
    trained = number % 6 == 0
    figures: dict[str, float] = {"documents": 50_000 + 37.0 * number, "usd": 3.5, "node_hours": 1.2, "seconds": 4000}
    if trained:
        value = 0.6 + number / 2000
        figures |= {"baseline": value - 0.002, "new": value, "usd": 310.0 + number, "node_hours": 14.0}
        for name, centre in (("difference", 0.002), ("reference", number / 3000 - 0.004)):
            figures |= {name: centre, f"{name}_low": centre - 0.004, f"{name}_high": centre + 0.004}
        figures |= {"cosine": 0.98, "cosine_p1": 0.91, "overlap@10": 0.86 + number / 1000}
    if outcome == "failed":
        figures = {"usd": 0.7, "node_hours": 0.3}
    facts: dict[str, Any] = {
        "run": f"{'week' if trained else 'daily'}-{number:03d}",
        "time": f"2026-{3 + number // 25:02d}-{1 + number % 25:02d}T03:00:00+00:00",
        "mode": "train" if trained else "rollback" if outcome == "rollback" else "refresh",
        "outcome": outcome,
        "headline": {"refused": "Refused", "failed": "Failed in embed"}.get(outcome, "Published"),
        "reason": "ndcg@10 fell by 0.02" if outcome == "refused" else "",
        "metric": "ndcg@10" if trained else "",
        "reference": ("week-000" if number < 36 else "week-036") if trained else "",
        "figures": figures,
    }
    return EndedRun(**{**facts, **changes})


def fill(root: str, count: int = 60) -> list[EndedRun]:
    """Keep a history whose runs have reports."""
    runs = [ended(number) for number in range(count)]
    for run in runs[:-1]:
        store.write_json(f"{root}/registry/current/runs/{run.run}.json", json.loads(run.to_json()))
    for run in runs:
        store.write_bytes(RunPaths(f"{root}/runs/{run.run}").report, b"<p>a report")
    keep_history(root, "current", runs[-1])
    return runs


def history_page(root: str) -> Spaced:
    data = store.read_bytes(history_uri(root, "current")).decode()
    Balanced(data)
    page = Spaced(data)
    assert "script" not in page.tags
    assert page.policy == "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    return page


def test_all_runs_are_on_one_page_with_links_to_their_reports(tmp_path: Path) -> None:
    runs = fill(str(tmp_path))
    page = history_page(str(tmp_path))
    folder = tmp_path / "registry/current"
    assert {(folder / target).resolve() for target in page.targets} == {
        tmp_path / f"runs/{run.run}/report/index.html" for run in runs
    }
    assert all((folder / target).is_file() for target in page.targets)
    for words in ("8 accepted", "2 refused", "1 failed", "48 refresh", "1 rollback"):
        assert words in page.text, words
    for words in (
        "Change against the reference, 95 % interval run week-000 run week-036",
        "ndcg@10 on the week's hold-out new baseline",
        "Published documents",
        "Cost of a run, USD weekly run refresh",
        "Drift: documents before and after mean cosine 1st percentile overlap@10",
    ):
        assert words in page.text, words
    table = page.text.partition("Overlap@10")[2]
    assert "2026-04-30" not in table
    assert "week-048 accepted 0.6240 0.6220 +0.0020 −0.0020 … +0.0060 +0.0120 +0.0080 … +0.0160 51,776 14.00 358.00" in table
    assert "daily-020 Failed in embed (refresh) – – – – – 0.30 0.70" in table
    assert "week-012 refused" in table
    assert table.index("week-048") < table.index("week-042"), "the newest first"
    assert "Published model week-054 Planned 2026-05-05 03:00 UTC ndcg@10 0.6270" in page.text


def test_a_point_per_figure_links_to_its_run_and_has_its_interval(tmp_path: Path) -> None:
    runs = fill(str(tmp_path))
    charts = {chart["y_label"]: chart for chart in history.history_charts(runs)}
    reference = charts["Change against the reference, 95 % interval"]
    assert [dot["run"].run for dot in reference["dots"]] == [run.run for run in runs if "reference" in run.figures]
    assert {dot["line"] for dot in reference["dots"]} == {1, 2}
    for dot in reference["dots"]:
        at, low, high = dot["at"]
        assert low[0] == at[0] == high[0]
        assert high[1] < at[1] < low[1], "down is up in SVG"
        assert reference["top"] <= high[1]
        assert low[1] <= reference["bottom"]
    drift = charts["Drift: documents before and after"]
    cost = charts["Cost of a run, USD"]
    assert drift["x_ticks"] == cost["x_ticks"] == reference["x_ticks"], "one axis for all"
    assert {dot["run"].mode for dot in cost["dots"] if dot["line"] == 1} == {"train"}
    assert len(cost["dots"]) == 60
    assert [tick["label"] for tick in cost["x_ticks"]] == ["2026-03-01", "2026-03-21", "2026-04-16"]
    afternoon = [ended(6 * number, time=f"2026-03-01T1{number}:30:00+00:00") for number in range(3)]
    assert [tick["label"] for tick in history.history_charts(afternoon)[0]["x_ticks"]] == ["10:30", "11:30", "12:30"]
    assert "Overlap@10" in Spaced(history.render_history("current", runs, 60).decode()).text
    dear = [replace(run, figures={"node_hours": 2.0}) for run in afternoon]
    assert [chart["y_label"] for chart in history.history_charts(dear)] == ["Cost of a run, node-hours"]
    assert "Overlap@10" not in Spaced(history.render_history("current", dear, 3).decode()).text, "no run has drift"


def test_a_report_that_is_gone_is_not_linked_and_broken_records_are_left_out(tmp_path: Path) -> None:
    root = str(tmp_path)
    fill(root, 3)
    store.delete_folder(f"{root}/runs/daily-001")
    for name, data in (("broken", b"{"), ("other", b'{"run": "x"}'), ("list", b"[]")):
        store.write_bytes(f"{root}/registry/current/runs/{name}.json", data)
    endless = ended(
        2, run="endless", figures={"documents": float("inf"), "usd": float("nan"), "reference": 0.1, "reference_low": 1e300}
    )
    store.write_bytes(f"{root}/registry/current/runs/endless.json", endless.to_json())
    up = ended(2, run="../up")
    store.write_bytes(f"{root}/registry/current/runs/up.json", up.to_json())
    keep_history(root, "current", ended(3, run="late", reason=EVIL, headline=EVIL, outcome="failed"))
    page = history_page(root)
    assert "daily-001" in page.text
    assert {target.split("/")[3] for target in page.targets} == {"week-000", "daily-002"}
    assert EVIL in page.text
    assert "<script" not in store.read_bytes(history_uri(root, "current")).decode()


def test_runs_that_end_at_the_same_time_are_all_on_the_page(s3_root: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: keep_history(s3_root, "current", ended(number)), range(16)))
    page = history_page(s3_root)
    assert all(ended(number).run in page.text for number in range(16))


def test_a_run_that_ends_between_the_look_and_the_page_is_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, real, late = str(tmp_path), history.render_history, [ended(1)]

    def render(*arguments: Any) -> bytes:
        page = real(*arguments)
        if late:
            other = late.pop()
            store.write_bytes(f"{root}/registry/current/runs/{other.run}.json", other.to_json())
        return page

    monkeypatch.setattr(history, "render_history", render)
    keep_history(root, "current", ended(0))
    assert "daily-001" in history_page(root).text


def test_the_oldest_of_many_runs_are_only_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MOST_RUNS", 4)
    fill(str(tmp_path), 6)
    assert "2 more are in runs/, next to this page." in history_page(str(tmp_path)).text


def test_every_ending_of_a_run_is_kept(plan_run: Any, tmp_path: Path) -> None:
    root = str(tmp_path / "bucket")

    def kept(run: Any) -> EndedRun:
        page_of(run)
        return EndedRun.from_json(store.read_bytes(f"{root}/registry/current/runs/{run.plan.run}.json"))

    run = weeks(plan_run, root)
    judged(run, drift=DRIFT)
    put_input(run, prices=PRICES)
    put_attempt(run, Stage.TRAIN, (0, 30))
    refused = kept(run)
    assert (refused.outcome, refused.mode, refused.metric, refused.reference) == ("refused", "train", "ndcg@10", "week-00")
    assert "locale:fr fell" in refused.reason
    figures = {"baseline": 0.612, "new": 0.6162, "difference": 0.0042, "difference_low": 0.0002, "reference": -0.003}
    figures |= {"reference_high": -0.001, "usd": 10.0, "node_hours": 0.5, "cosine": 0.9731, "new_on_old": -0.0123}
    assert {name: refused.figures[name] for name in figures} == pytest.approx(figures)
    assert "documents" not in refused.figures

    # The same run again, now accepted and published.
    judged(run, slices={})
    run.finish(Stage.PUBLISH, StageOutput(metrics={"published": True, "documents": 1234}))
    accepted = kept(run)
    assert (accepted.outcome, accepted.figures["documents"], accepted.time) == ("accepted", 1234, run.plan.created)
    assert "locale:fr" not in history_page(root).text

    daily = plan_run(root, run="daily", settings={"mode": "refresh"})
    daily.finish(Stage.PUBLISH, StageOutput(metrics={"published": True, "documents": 5}))
    assert (kept(daily).outcome, kept(daily).figures["documents"]) == ("refresh", 5)
    back = plan_run(root, run="back", settings={"mode": "refresh", "rollback": "week-00"})
    back.finish(Stage.PUBLISH, StageOutput(metrics={"published": True}))
    assert kept(back).outcome == "rollback"
    broken = plan_run(root, run="broken")
    fail(broken, Stage.TRAIN, what=EVIL)
    assert (kept(broken).outcome, kept(broken).headline, kept(broken).reason) == ("failed", "Failed in train", EVIL)
    early = plan_run(root, run="early")
    store.delete(early.paths.plan)
    put_input(early, config={"registry": "current"})
    fail(early, Stage.PREPARE, what="no data", time="2026-01-04T03:00:00+00:00")
    assert (kept(early).outcome, kept(early).time) == ("failed", "2026-01-04T03:00:00+00:00")
    nowhere = plan_run(root, run="nowhere", settings={"registry": None})
    page_of(nowhere)
    lost = plan_run(root, run="lost")
    store.delete_folder(lost.paths.root)
    page_of(lost)
    names = sorted(path.stem for path in Path(root, "registry/current/runs").iterdir())
    assert names == ["back", "broken", "daily", "early", "week-01"]
    page = history_page(root)
    assert [(Path(root, "registry/current") / target).is_file() for target in page.targets].count(False) == 0
    link = next(target for target in Page(store.read_bytes(run.paths.report).decode()).targets if "registry" in target)
    assert (Path(run.paths.report).parent / link).resolve() == Path(history_uri(root, "current"))


def test_a_registry_that_cannot_be_written_never_fails_the_run(plan_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = plan_run()

    def refuse(*_: Any) -> None:
        raise Transient("the storage is away")

    monkeypatch.setattr(report, "keep_history", refuse)
    output = report.run(run.context(Stage.REPORT))
    assert output is not None
    assert output.metrics["missing"] == ["history: the storage is away"]
    assert store.exists(run.paths.report)


def test_publications_and_pruning_know_nothing_of_the_history(tmp_path: Path) -> None:
    root = str(tmp_path)
    fill(root, 3)
    pointer = {"run": "week-000", "model": "m", "embeddings": f"{root}/runs/week-000/embed/manifest.json", "published": "2026"}
    store.write_json(f"{root}/registry/current.json", pointer)
    keep_publication(root, "current", {**pointer, "embeddings_run": "week-000"})
    assert [record["run"] for record in publications(root, "current")] == ["week-000"]
    assert [Path(old.folder).name for old in prune.find(root, keep_days=0)] == ["daily-001", "daily-002"]


# --------------------------------------------------------------------------------------------------------------- in a browser


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")
@pytest.mark.parametrize("width", [400, 1300])
def test_no_page_is_wider_than_the_window(plan_run: Any, tmp_path: Path, width: int) -> None:
    root = str(tmp_path / "bucket")
    pages = [full_report(plan_run, root), history_uri(root, "current")]
    for number, page in enumerate(pages):
        text = html.escape(store.read_bytes(page).decode(), quote=True)
        frame = tmp_path / f"frame-{number}.html"
        frame.write_text(
            f'<!doctype html><meta charset="utf-8"><iframe id="f" width="{width}" height="900" srcdoc="{text}"></iframe>'
            '<script>onload = () => { const page = document.getElementById("f").contentDocument.documentElement;'
            ' document.body.innerHTML = "<p id=found>" + page.scrollWidth + " " + page.scrollHeight + "</p>" }</script>',
            encoding="utf-8",
        )
        flags = (
            "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update "
            "--disable-sync --virtual-time-budget=5000 --dump-dom"
        )
        command = [str(CHROMIUM), *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", frame.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        found = re.search(r'<p id="found">(\d+) (\d+)</p>', done.stdout)
        assert found, done.stdout[-2000:]
        assert int(found[1]) <= width
        assert int(found[2]) > 900, "the page was there"


def full_report(plan_run: Any, root: str) -> str:
    """Write a report with every section, and a history; return the report's URI."""
    fill(root)
    run = weeks(plan_run, root, report={"texts": True})
    for stage in (Stage.PREPARE, Stage.INGEST, Stage.PLAN, Stage.HEALTH_CHECK, Stage.COMPILE, Stage.TRAIN):
        run.finish(stage, StageOutput())
    log_training(run)
    put_input(run, prices=PRICES, hosts={"train": "trn1.32xlarge"})
    put_attempt(run, Stage.TRAIN, (0, 90))
    query = {"query": "return shoes that were worn once", "before": 1.0, "after": 0.31, "locale": "de"}
    query |= {"relevant": "worn shoes can be returned within " * 9, "best_before": "worn shoes can be returned within " * 9}
    query |= {"best_after": "averyveryverylongwordwithoutanyspace" * 4}
    store.write_json(run.paths.query_changes, {"fell": [query] * 10, "rose": [{**query, "before": 0.2, "after": 0.9}] * 3})
    judged(run, drift=DRIFT)
    page_of(run)
    return run.paths.report  # type: ignore[no-any-return]
