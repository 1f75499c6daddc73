"""plan: which rows a run trains on and is evaluated with, over many weeks; its files; and every refusal with its exit code."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest

from pipeline import store
from pipeline.contract import Stage, StageResult, reference_uri
from pipeline.dataset.corpus import CorpusReader
from pipeline.dataset.ids import IdDigest
from pipeline.dataset.ingested import SLICES, part_range
from pipeline.dataset.row_files import PUBLISHED, SCHEMAS, read_table
from pipeline.dataset.rows import normalized_hash
from pipeline.dataset.sampler import MASKED, read_order
from pipeline.dataset.selection import holdout_slices
from pipeline.dataset.steps import ORDER, step_bins
from pipeline.dataset.tokens import TextTokenizer
from pipeline.errors import BadConfig, BadData, ExitCode, MissingInput
from pipeline.estimate import requirements as limits
from pipeline.evaluation.query_values import QueryValues
from pipeline.evaluation.reference import write_reference
from pipeline.plan import ExpectedCost, ResumedRun, RunPlan
from pipeline.stages import plan as plan_stage
from pipeline.training.checkpoint import MANIFEST_FILE
from tests.pipeline.stages.planning import Bench, held_out, refusal, rows
from tests.tiny import make_model


def names(plan: RunPlan, which: str = "new") -> list[str]:
    return [shard.uri.rsplit("/")[-1] for shard in getattr(plan.train, which)]


def trained(bench: Bench, run: str) -> set[int]:
    return {row["document_hash"] for row in bench.rows(run)}


# ---- what a plan has -------------------------------------------------------------------------------------------------


def test_a_first_run(bench: Bench, model: Path) -> None:
    one, two = rows(0, 120), rows(120, 200, locale="fr")
    uris = [bench.shard("a.jsonl", one), bench.shard("b.jsonl.gz", two)]
    output = bench.start("first")
    plan = bench.plan("first")

    kept = [row for row in one + two if not held_out(row)]
    assert plan.run == "first"
    assert plan.fingerprint == plan.sealed().fingerprint != ""
    assert [shard.uri for shard in plan.train.new] == uris
    assert (plan.train.replay, plan.train.replay_rows) == ((), 0)
    assert plan.train.rows == plan.train.new_rows == len(kept)
    assert plan.holdout.rows == plan.holdout.queries == 200 - len(kept)
    assert [(shard.rows, shard.bad_rows, shard.sha256) for shard in plan.train.new] == [
        (120, 0, store.sha256(uris[0])),
        (80, 0, store.sha256(uris[1])),
    ]
    assert sum(shard.holdout_rows for shard in plan.train.new) == plan.holdout.rows
    assert sum(shard.new_rows for shard in plan.train.new) == plan.train.new_rows
    assert (plan.lineage, plan.published) == ((), None)
    assert plan.parent == bench.inputs("first").parent

    folder = Path(bench.paths("first").rows)
    train = read_table(folder / "train.arrow")
    assert sorted(train["document_hash"].to_pylist()) == sorted(normalized_hash(row["document"]) for row in kept)
    lines = {(uri, line): row for uri, found in zip(uris, (one, two), strict=True) for line, row in enumerate(found, 1)}
    tokenizer = TextTokenizer(model)
    for found in train.to_pylist():
        row = lines[plan.train.new[found["shard"]].uri, found["line"]]
        assert found["query_hash"] == normalized_hash(row["query"])
        for name, longest in (("query", 12), ("document", 32)):
            assert found[f"{name}_tokens"] == tokenizer.encode([row[name]], longest)[0].tolist()
    # The stored order has the plan's numbers, and every row once.
    order = read_order(folder / ORDER, plan.world.ranks, 4)
    assert plan.train.steps == len(order)
    assert sorted(order[order != MASKED].tolist()) == list(range(len(kept)))
    assert plan.train.warmup_steps == round(0.1 * plan.train.steps)
    holdout = read_table(folder / "holdout.arrow")
    assert sorted(holdout["id"].to_pylist()) == sorted(row["id"] for row in one + two if held_out(row))
    candidates = read_table(folder / "candidates.arrow")
    assert len(candidates) == plan.holdout.candidates == plan.holdout.rows + 7
    assert set(holdout["document_hash"].to_pylist()) <= set(candidates["document_hash"].to_pylist())
    texts = {row["id"]: row["document"] for row in one + two}
    assert [normalized_hash(texts[one]) for one in candidates["id"].to_pylist()] == candidates["document_hash"].to_pylist()
    assert pc.max(pc.list_value_length(candidates["document_tokens"])).as_py() <= 40

    assert set(plan.row_files) == {*SCHEMAS, ORDER}
    for name, file in plan.row_files.items():
        assert store.sha256(store.join(bench.paths("first").rows, name)) == file.sha256
    assert output.metrics == {**plan.summary(), "compile": False, "precompile": False, "next": "health_check"}
    assert output.outputs["plan"].sha256 == store.sha256(bench.paths("first").plan)
    result = StageResult.from_json(store.read_bytes(bench.paths("first").result(Stage.PLAN)))
    assert result.fingerprint == plan.fingerprint
    assert not store.exists(bench.paths("first").quarantine)


def test_in_object_storage(bench: Bench, model: Path, s3_root: str) -> None:
    bench = Bench(s3_root, bench.scratch, model)
    store.upload_folder(model, f"{s3_root}/parent")
    bench.config["model"]["parent"] = f"{s3_root}/parent"
    bench.shard("a.jsonl.gz", rows(0, 120))
    bench.start("run")
    assert bench.plan("run").embed.rows == 120
    assert store.exists(f"{s3_root}/runs/run/plan/rows/train.arrow")


def test_a_text_that_cannot_be_tokenized_is_left_out(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    data = rows(0, 100)
    bench.shard("a.jsonl", data)
    bench.prepare("run", {"data": {"max_bad_fraction": 0.1}, "evaluate": {"candidates": 1000}})
    lost = {next(row["document"].strip() for row in data if held_out(row) is held) for held in (True, False)}
    real = TextTokenizer.encode_each

    def encode_each(tokenizer: TextTokenizer, texts: Sequence[str], *more: Any) -> list[Any]:
        return [tokens if text not in lost else "no" for text, tokens in zip(texts, real(tokenizer, texts, *more), strict=True)]

    monkeypatch.setattr(TextTokenizer, "encode_each", encode_each)
    bench.ingest("run")
    bench.stage(Stage.PLAN, "run")
    plan = bench.plan("run")
    kept = [row for row in data if row["document"].strip() not in lost]
    assert (plan.train.rows, plan.train.new_rows) == (sum(not held_out(row) for row in kept),) * 2
    assert plan.holdout.rows == sum(held_out(row) for row in kept)
    assert plan.train.new[0].bad_rows == plan.train.bad_rows == 2
    assert {row["id"] for row in bench.rows("run", "candidates.arrow")} == {row["id"] for row in kept}


def test_rows_with_a_label_of_zero(bench: Bench) -> None:
    positive, negative = rows(0, 100), rows(100, 150, label=0)
    bench.shard("a.jsonl", positive + negative)
    output = bench.start("run")
    plan = bench.plan("run")
    assert plan.train.rows == sum(not held_out(row) for row in positive)
    assert plan.train.not_positive == output.metrics["not_positive_rows"] == 50
    assert plan.holdout.rows == sum(held_out(row) for row in positive + negative)
    assert plan.holdout.queries == sum(held_out(row) for row in positive)


def test_a_hold_out_has_at_most_so_many_queries(bench: Bench) -> None:
    bench.shard("a.jsonl", rows(0, 400))
    bench.start("run", {"data": {"holdout_queries": 9}})
    plan = bench.plan("run")
    held = sorted(normalized_hash(row["document"]) for row in rows(0, 400) if held_out(row))
    assert [row["document_hash"] for row in bench.rows("run", "holdout.arrow")] == held[:9]
    assert (plan.holdout.queries, plan.holdout.rows, plan.holdout.candidates) == (9, 9, 9 + 7)
    # What is not used is still held out.
    assert not trained(bench, "run") & set(held)


def test_what_is_held_out_together(bench: Bench) -> None:
    data = [{**row, "query": f"query {number % 40}"} for number, row in enumerate(rows(0, 400))]
    bench.shard("a.jsonl", data)
    bench.start("run", {"data": {"holdout_by": "query"}})
    held, kept = ({row["query_hash"] for row in bench.rows("run", name)} for name in ("holdout.arrow", "train.arrow"))
    assert held
    assert not held & kept
    assert held | kept == {normalized_hash(row["query"]) for row in data}


def test_configured_steps_win_over_epochs(bench: Bench) -> None:
    bench.shard("a.jsonl", rows(0, 100))
    bench.start("steps", {"train": {"steps": 50, "epochs": 3}})
    assert (bench.plan("steps").train.steps, bench.plan("steps").train.warmup_steps) == (50, 5)
    bench.start("epochs", {"train": {"epochs": 3}})
    plan = bench.plan("epochs")
    order = np.fromfile(Path(bench.paths("epochs").rows) / ORDER, np.int32)
    assert (np.bincount(order[order != MASKED]) == 3).all()
    assert plan.train.steps * plan.world.ranks * 4 == len(order)


def test_steps_of_one_task_and_locale(bench: Bench) -> None:
    bench.shard(
        "search.jsonl", [row | {"locale": ("de", "en")[number % 2]} for number, row in enumerate(rows(0, 90, task="search"))]
    )
    bench.shard("browse.jsonl", rows(90, 120, task="browse", locale="en"))
    bench.config["train"] |= {"batch_by": "locale"}
    bench.start("run")
    plan, found = bench.plan("run"), bench.rows("run")
    assert sorted(plan.train.strata) == ["browse/en", "search/de", "search/en"]
    assert sum(plan.train.strata.values()) == plan.train.steps
    order = read_order(
        Path(bench.paths("run").rows) / ORDER, step_bins(plan.config, plan.world.ranks), plan.config.train.bin_shape.pairs
    )
    assert sorted(order[order != MASKED].tolist()) == sorted([*range(len(found))] * plan.config.train.epochs)
    strata = [{f"{found[row]['task']}/{found[row]['locale']}" for row in step[step != MASKED].tolist()} for step in order]
    assert Counter(name for step in strata for name in step) == plan.train.strata
    assert all(len(step) == 1 for step in strata)


def test_training_of_another_run_is_gone_on_with_on_fewer_nodes(bench: Bench) -> None:
    bench.shard("a.jsonl", rows(0, 200))
    bench.start("first")
    store.write_json(f"{bench.paths('first').checkpoint(4)}/{MANIFEST_FILE}", {})
    bench.start("second", {"nodes": 1, "train": {"resume": "first", "batch_size": 8, "micro_batches": 2}})
    first, second = bench.plan("first"), bench.plan("second")
    assert (first.world.ranks, second.world.ranks) == (4, 2)
    assert second.train.resumed == ResumedRun(run="first", fingerprint=first.fingerprint)
    assert second.train.steps == first.train.steps
    assert second.row_files == first.row_files
    error = refusal(
        BadConfig, lambda: bench.start("third", {"nodes": 1, "train": {"resume": "first"}}), "bins of a step: 4 there, 2 here"
    )
    assert error.exit_code == 64


def test_what_a_run_may_cost_is_said_of_the_last_one_and_of_the_time_budget(bench: Bench) -> None:
    bench.deployment = {"prices": {"train": 20.0, "embed": 10.0, "cpu": 0.5, "currency": "USD"}, "embed_hosts": 2}
    bench.config |= {"time_budget": "PT3H"}
    bench.shard("week-1.jsonl", rows(0, 200))
    # Two nodes at 20 for three hours; three children have two hosts.
    assert bench.week("one").expected_cost == ExpectedCost(at_most=3 * 2 * 20)
    bench.shard("week-2.jsonl", rows(200, 280))
    bench.start("no-report")
    assert bench.plan("no-report").expected_cost.run is None

    stages = {"prepare": {"node_hours": 1.0}, "train": {"node_hours": 4.0}, "embed": {"node_hours": 2.5}}
    result = store.read_json(bench.paths("one").result(Stage.PLAN)) | {"stage": "report", "metrics": {"cost": {"stages": stages}}}
    store.write_json(bench.paths("one").result(Stage.REPORT), result)
    output = bench.start("two")
    expected = ExpectedCost(run="one", node_hours=7.5, as_before=0.5 + 4 * 20 + 2.5 * 10, at_most=120)
    assert bench.plan("two").expected_cost == expected
    assert output.metrics["expected_cost"] == expected.model_dump()

    # It is no part of what is computed: another price is no other plan. On one machine nothing has a price.
    bench.deployment = {}
    bench.start("unpriced")
    assert bench.plan("unpriced").expected_cost == ExpectedCost(run="one", node_hours=7.5)
    plan = bench.plan("two")
    assert plan.model_copy(update={"expected_cost": ExpectedCost()}).sealed().fingerprint == plan.fingerprint


@pytest.mark.parametrize("metrics", [{}, {"cost": None}, {"cost": {"stages": {"tain": {"node_hours": 1}}}}])
def test_a_report_that_counts_nothing_is_no_expectation(metrics: dict[str, Any], bench: Bench) -> None:
    paths = bench.paths("one")
    record = StageResult(stage="report", run="one", status="done", started="", finished="", fingerprint="", metrics=metrics)
    store.write_bytes(paths.result(Stage.REPORT), record.to_json())
    assert plan_stage.used_by(bench.paths("two"), "one") == {}


def test_result_stays_small_with_many_shards(bench: Bench) -> None:
    for number in range(60):
        bench.shard(f"{'long-name-' * 10}{number}.jsonl", rows(number * 3, number * 3 + 3))
    output = bench.start("run")
    assert len(bench.plan("run").train.new) == 60
    assert len(output.inputs) == 20


def test_what_must_not_be_used_is_in_nothing_that_is_planned(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.shard("week-1.jsonl", rows(0, 100))
    bench.week("one")
    first, held = bench.plan("one"), bench.rows("one", "holdout.arrow")[0]["id"]
    assert first.deletions is None
    bench.shard("week-2.jsonl", rows(100, 160))
    gone = [held, next(row["id"] for row in rows(0, 100) if not held_out(row)), "row150"]
    lists = store.join(bench.root, "delete.txt")
    store.write_bytes(lists, "\n".join(gone).encode())
    bench.start("two", {"data": {"delete": [lists]}})
    plan = bench.plan("two")
    assert plan.deletions is not None
    assert (plan.deletions.entries, plan.deletions.rows) == (3, 3)
    assert plan.summary()["deleted_rows"] == 3
    assert plan.embed.rows == 157
    hashes = {normalized_hash(row["document"]) for row in rows(0, 160) if row["id"] in gone}
    for name in ("train.arrow", "holdout.arrow", "candidates.arrow"):
        assert not hashes & {row["document_hash"] for row in bench.rows("two", name)}
    assert "no row of any listed file" not in caplog.text

    store.write_bytes(lists, b"nobody")
    bench.start("three", {"data": {"delete": [lists]}})
    assert "no row of any listed file has one of its 1 ids and hashes" not in caplog.text  # earlier lists named some


def test_a_deletion_list_that_names_nothing_is_said(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.shard("week-1.jsonl", rows(0, 100))
    lists = store.join(bench.root, "delete.txt")
    store.write_bytes(lists, b"\n\n")
    bench.prepare("empty", {"data": {"delete": [lists]}})
    assert "data.delete names nothing" in caplog.text
    store.write_bytes(lists, b"nobody")
    bench.start("run", {"data": {"delete": [lists]}})
    assert "no row of any listed file has one of its 1 ids and hashes" in caplog.text


def test_old_versions_that_are_kept_too_long(bench: Bench) -> None:
    bench.shard("week-1.jsonl", rows(0, 100))
    lists = store.join(bench.root, "delete.txt")
    store.write_bytes(lists, b"row1")
    bench.deployment["noncurrent_days"] = 30
    execution = {"data": {"delete": [lists], "delete_days": 7}}
    refusal(
        BadConfig, lambda: bench.prepare("run", execution), "old versions: 30 days", "data.delete_days = 7", "noncurrent_days"
    )
    assert not store.list_objects(bench.paths("run").stage(Stage.PREPARE))
    bench.deployment["noncurrent_days"] = 7
    bench.prepare("run", execution)


def test_the_newest_week_is_marked_in_the_hold_out(bench: Bench) -> None:
    bench.shard("week-1.jsonl", rows(0, 100))
    bench.week("one")
    assert all(row["new"] for row in bench.rows("one", "holdout.arrow"))
    bench.shard("week-2.jsonl", rows(100, 160))
    bench.start("two")
    fresh = {row["id"] for row in bench.rows("two", "holdout.arrow") if row["new"]}
    assert fresh == {row["id"] for row in rows(100, 160) if held_out(row)}


# ---- weeks -----------------------------------------------------------------------------------------------------------


def test_the_second_week(bench: Bench) -> None:
    bench.shard("week-1.jsonl", rows(0, 200))
    bench.week("one")
    bench.shard("week-2.jsonl", rows(200, 280))
    bench.start("two")
    second = bench.plan("two")

    assert (names(second), names(second, "replay")) == (["week-2.jsonl"], ["week-1.jsonl"])
    assert second.train.new_rows == sum(not held_out(row) for row in rows(200, 280))
    assert second.train.replay_rows == -(-second.train.new_rows // 2)
    assert (second.parent.run, second.lineage) == ("one", ("one",))
    assert second.embed.rows == 280
    assert second.holdout.rows == sum(held_out(row) for row in rows(0, 280))
    found = bench.rows("two")
    assert [row["new"] for row in found].count(False) == second.train.replay_rows
    assert {row["shard"] for row in found if row["new"]} == {0}
    assert {row["shard"] for row in found if not row["new"]} == {1}
    week_one = {row["document_hash"] for row in bench.rows("one", "holdout.arrow")}
    assert not week_one & trained(bench, "two")

    # The same week again, in another run: the same rows. Another week replays others.
    bench.start("two-again")
    assert bench.plan("two-again").row_files == second.row_files
    assert bench.train("two").rows == second.train.new_rows
    bench.publish("two", str(bench.model))
    bench.shard("week-3.jsonl", rows(280, 360))
    bench.start("three")
    assert bench.plan("three").lineage == ("one", "two")
    again = {row["document_hash"] for row in bench.rows("three") if not row["new"]}
    assert len(again) == bench.plan("three").train.replay_rows
    assert again != {row["document_hash"] for row in found if not row["new"]}


def test_a_shard_that_is_written_again_brings_nothing_new(bench: Bench) -> None:
    bench.shard("week-1.jsonl", rows(0, 100))
    bench.shard("week-2.jsonl", rows(100, 200))
    bench.week("one")
    store.delete(f"{bench.root}/data/week-2.jsonl")
    # Compacted, in another order, with other ids and one row that comes twice; and one row is new.
    bench.shard("week-1.jsonl", [{**row, "id": f"other {row['id']}"} for row in reversed(rows(0, 200))])
    bench.shard("week-3.jsonl", rows(150, 200))
    refusal(MissingInput, lambda: bench.start("nothing"), "no training row is new", "run one", "data.require_new")
    new = next(row for row in rows(200, 300) if not held_out(row))
    bench.shard("week-4.jsonl", [new])
    bench.start("two")
    plan = bench.plan("two")
    assert (plan.train.new_rows, plan.train.replay_rows) == (1, 1)
    assert [(shard.uri.rsplit("/")[-1], shard.new_rows) for shard in plan.train.new] == [
        ("week-1.jsonl", 0),
        ("week-3.jsonl", 0),
        ("week-4.jsonl", 1),
    ]


def test_rows_that_training_did_not_come_to_are_new_again(bench: Bench) -> None:
    bench.shard("week-1.jsonl", rows(0, 200))
    bench.start("one", {"train": {"steps": 4}})
    order = np.fromfile(Path(bench.paths("one").rows) / ORDER, np.int32)
    hashes = [row["document_hash"] for row in bench.rows("one")]
    seen = {hashes[row] for row in order[order != MASKED]}
    record = bench.train("one")
    assert (record.steps, record.rows) == (4, len(seen))
    bench.publish("one", str(bench.model))
    bench.start("two", {"model": {"parent": None}})
    plan = bench.plan("two")
    assert (names(plan), names(plan, "replay")) == ([], ["week-1.jsonl"])
    assert {row["document_hash"] for row in bench.rows("two") if row["new"]} == set(hashes) - seen
    assert {row["document_hash"] for row in bench.rows("two") if not row["new"]} <= seen


def test_of_rows_that_contradict_each_other_the_newest_counts(bench: Bench) -> None:
    row, same, *others = [row for row in rows(0, 200) if not held_out(row)]
    first = bench.shard("b.jsonl", [{**row, "label": 0.5}, {**same, "label": 1}, *rows(0, 200)[190:]])
    second = bench.shard("a.jsonl", [{**row, "label": 0.25}, {**same, "label": 1}, {**others[0], "label": 1}])
    os.utime(first, (1000, 1000))
    os.utime(second, (2000, 2000))
    bench.week("one")
    found = bench.rows("one")
    of_row = [each for each in found if each["document_hash"] == normalized_hash(row["document"])]
    assert [(each["shard"], each["line"]) for each in of_row] == [(0, 1)]
    assert sum(each["document_hash"] == normalized_hash(same["document"]) for each in found) == 1

    # Another label is another row; 0 takes it back.
    third = bench.shard("c.jsonl", [{**row, "label": 0.75}, {**others[0], "label": 0}])
    os.utime(third, (3000, 3000))
    bench.start("two", {"data": {"replay_fraction": 100}})
    found = bench.rows("two")
    of_row = [(each["new"], each["line"]) for each in found if each["document_hash"] == normalized_hash(row["document"])]
    assert of_row == [(True, 1)]
    assert normalized_hash(others[0]["document"]) not in {each["document_hash"] for each in found}


def test_equal_rows_are_trained_on_as_often_as_allowed(bench: Bench) -> None:
    data = rows(0, 100)
    for name in ("a.jsonl", "b.jsonl", "c.jsonl"):
        bench.shard(name, data)
    kept = sum(not held_out(row) for row in data)
    bench.start("once")
    assert (bench.plan("once").train.rows, bench.plan("once").holdout.rows) == (kept, 100 - kept)
    bench.start("twice", {"data": {"max_repeats": 2}})
    assert (bench.plan("twice").train.rows, bench.plan("twice").holdout.rows) == (2 * kept, 100 - kept)


def test_only_what_was_published_counts_as_seen(bench: Bench) -> None:
    bench.shard("week-1.jsonl", rows(0, 100))
    bench.week("one")
    bench.shard("week-2.jsonl", rows(100, 200))
    bench.start("refused")
    bench.train("refused")  # but the gate refuses it: `one` stays published
    bench.shard("week-3.jsonl", rows(200, 300))
    bench.start("two")
    assert names(bench.plan("two")) == ["week-2.jsonl", "week-3.jsonl"]
    assert bench.plan("two").train.new_rows == sum(not held_out(row) for row in rows(100, 300))


def test_a_run_folder_that_was_removed_is_still_known(bench: Bench) -> None:
    bench.shard("week-1.jsonl", rows(0, 100))
    bench.week("one")
    shutil.rmtree(bench.paths("one").root)
    bench.shard("week-2.jsonl", rows(100, 200))
    bench.start("two")
    assert bench.plan("two").train.new_rows == sum(not held_out(row) for row in rows(100, 200))


def test_nothing_new(bench: Bench) -> None:
    bench.shard("week-1.jsonl", rows(0, 200))
    one = bench.week("one")
    error = refusal(MissingInput, lambda: bench.start("two"), "no training row is new", "run one", "data.require_new")
    assert error.exit_code == ExitCode.MISSING_INPUT
    bench.start("three", {"data": {"require_new": False}})
    plan = bench.plan("three")
    assert plan.train.new == ()
    assert plan.train.rows == plan.train.replay_rows == -(-one.train.rows // 2)
    refusal(BadData, lambda: bench.start("four", {"data": {"require_new": False, "replay_fraction": 0}}), "no row to train on")


def test_an_explicit_parent_from_this_bucket_knows_its_rows(bench: Bench, model: Path) -> None:
    bench.shard("week-1.jsonl", rows(0, 100))
    bench.start("one")
    bench.train("one")
    store.upload_folder(model, bench.paths("one").model)
    bench.shard("week-2.jsonl", rows(100, 200))
    bench.start("two", {"model": {"parent": bench.paths("one").model}})
    assert (names(bench.plan("two")), bench.plan("two").lineage) == (["week-2.jsonl"], ("one",))


def test_another_hold_out_key_still_knows_the_rows(bench: Bench) -> None:
    bench.shard("week-1.jsonl", rows(0, 300))
    bench.week("one")
    seen = trained(bench, "one")
    bench.shard("week-2.jsonl", rows(300, 400))
    bench.start("two", {"data": {"holdout_by": "query"}})
    assert not {row["document_hash"] for row in bench.rows("two") if row["new"]} & seen
    assert not {row["document_hash"] for row in bench.rows("two", "holdout.arrow")} & seen


def test_a_new_query_for_a_document_that_was_trained_on_is_not_held_out(bench: Bench) -> None:
    bench.shard("week-1.jsonl", rows(0, 200))
    bench.week("one", {"data": {"holdout_fraction": 0.1}})
    bench.shard("week-2.jsonl", [{**row, "query": f"again {row['query']}"} for row in rows(0, 200)])
    bench.start("two")
    held = {row["document_hash"] for row in bench.rows("two", "holdout.arrow")}
    assert held == {normalized_hash(row["document"]) for row in rows(0, 200) if held_out(row, 0.1)}
    assert bench.plan("two").train.new_rows == sum(not held_out(row) for row in rows(0, 200))


def test_thirteen_weeks_never_evaluate_with_what_was_trained_on(bench: Bench) -> None:
    """The hold-out's share rises, falls and rises; shards are rewritten; models are refused, rolled back to, and retrained."""
    fractions = [0.1, 0.1, 0.3, 0.3, 0.05, 0.05, 0.2, 0.2, 0.2, 0.4, 0.02, 0.15, 0.15]
    documents: dict[tuple[str, ...], set[int]] = {(): set()}
    published: dict[int, tuple[str, ...]] = {}
    lineage: tuple[str, ...] = ()
    for week, fraction in enumerate(fractions):
        run, start = f"week-{week}", 150 * week
        bench.shard(f"{run}.jsonl", rows(start, start + 150))
        if week % 3 == 2:  # all of it, rewritten into two files
            store.delete_folder(f"{bench.root}/data")
            everything = list(reversed(rows(0, start + 150)))
            bench.shard("even.jsonl", everything[::2])
            bench.shard("odd.jsonl", everything[1::2])
        if week == 8:  # back to an earlier model
            lineage = published[4]
            bench.publish(lineage[-1], str(bench.model))
        bench.start(run, {"data": {"holdout_fraction": fraction}, "train": {"steps": 7} if week % 4 == 1 else {}})
        plan = bench.plan(run)
        assert plan.lineage == lineage
        held = {row["document_hash"] for row in bench.rows(run, "holdout.arrow")}
        found = bench.rows(run)
        assert held
        assert not held & documents[lineage]
        assert not held & {row["document_hash"] for row in found}
        assert not {row["document_hash"] for row in found if row["new"]} & documents[lineage]
        assert {row["document_hash"] for row in found if not row["new"]} <= documents[lineage]
        known = {normalized_hash(row["document"]) for row in rows(0, start + 150) if not held_out(row, fraction)}
        assert {row["document_hash"] for row in found if row["new"]} == known - documents[lineage]
        bench.train(run)
        order = np.fromfile(Path(bench.paths(run).rows) / ORDER, np.int32)
        taken = {found[row]["document_hash"] for row in order[order != MASKED]}
        documents[(*lineage, run)] = documents[lineage] | taken
        if week % 5 != 3:  # the gate refuses the others
            lineage = (*lineage, run)
            bench.publish(run, str(bench.model))
            bench.config["model"] = {}
        published[week] = lineage


# ---- negatives -------------------------------------------------------------------------------------------------------


def with_negatives(start: int, stop: int) -> list[dict[str, Any]]:
    """Rows whose negatives are their own document, another one as its row has it, and two of a text of their own."""
    return [
        {**row, "negatives": [row["document"].upper(), other["document"], f"wrong {number}", f"bad {number} " + "far " * 60]}
        for number, (row, other) in enumerate(zip(rows(start, stop), rows(start + 7, stop + 7), strict=True), start)
    ]


def negatives_of(row: dict[str, Any]) -> list[int]:
    names = [name for name in row if name.startswith("negative_") and name.endswith("_hash")]
    return [row[name] for name in names if row[name]]


def test_negatives_of_a_row_are_trained_on_but_for_held_out_ones(
    bench: Bench, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = with_negatives(0, 200)
    bench.shard("a.jsonl", [*data, *rows(200, 210)])
    bench.start("two", {"train": {"negatives": 2}})
    tokenizer, by_document = TextTokenizer(model), {normalized_hash(row["document"]): row for row in data}
    found = bench.rows("two")
    usual = 0
    for row in found:
        texts = by_document.get(row["document_hash"], {"negatives": []})["negatives"][1:]
        wanted = [text for text in texts if not held_out({"document": text})][:2]
        usual += wanted == texts[:2] != []
        assert negatives_of(row) == [normalized_hash(text) for text in wanted]
        tokens = [each.tolist() for each in tokenizer.encode([*wanted, "", ""], 32)[: len(wanted)]]
        assert [row[f"negative_{number}_tokens"] for number in range(2)] == [*tokens, [], []][:2]
    assert 0 < usual < len(found)
    warned = [record for record in caplog.records if "have negatives" in record.message]
    assert warned == []
    # Without the setting, they are not there, and plan says so.
    bench.start("none")
    [warned] = [record for record in caplog.records if "have negatives" in record.message]
    assert warned.levelname == "WARNING"
    assert not [name for name in bench.rows("none")[0] if name.startswith("negative")]


def test_a_trained_negative_never_enters_the_hold_out(bench: Bench) -> None:
    bench.shard("a.jsonl", with_negatives(0, 200))
    bench.week("one", {"train": {"negatives": 3}, "data": {"holdout_fraction": 0.05}})
    trained_negatives = {text for row in bench.rows("one") for text in negatives_of(row)}
    # Documents that were negatives only until now.
    bench.shard("b.jsonl", [{**row, "id": f"w{row['id']}", "document": row["negatives"][2]} for row in with_negatives(0, 200)])
    bench.start("two", {"data": {"holdout_fraction": 0.5}})
    held = {row["document_hash"] for row in bench.rows("two", "holdout.arrow")}
    assert held
    assert {text for text in trained_negatives if text * SLICES >> 64 < holdout_slices(0.5)}
    assert not held & trained_negatives


# ---- the published model ---------------------------------------------------------------------------------------------


def test_the_published_model_is_no_judge_of_what_it_was_trained_on(bench: Bench, model: Path, tmp_path: Path) -> None:
    bench.shard("a.jsonl", rows(0, 300))
    bench.week("one", {"data": {"holdout_fraction": 0.1}})
    published = trained(bench, "one")
    bench.start("two", {"model": {"parent": str(shutil.copytree(model, tmp_path / "another"))}})
    plan = bench.plan("two")
    assert plan.lineage == ()
    assert bench.inputs("two").published_lineage == ("one",)
    # The parent knows nothing, so it is trained on the rows again; the hold-out has none of what the published model knows.
    assert plan.train.new_rows == sum(not held_out(row) for row in rows(0, 300))
    held = {row["document_hash"] for row in bench.rows("two", "holdout.arrow")}
    assert held == {normalized_hash(row["document"]) for row in rows(0, 300) if held_out(row, 0.1)}
    assert not held & published


def test_a_published_model_with_another_tokenizer_gets_the_hold_out_in_its_own_tokens(bench: Bench, tmp_path: Path) -> None:
    bench.shard("a.jsonl", rows(0, 100))
    bench.week("one")
    bench.config["model"] = {"parent": str(bench.model)}
    make_model(tmp_path / "published", head=16)
    prompts = {"query": "ba ke ", "document": "li "}
    store.write_json(f"{tmp_path}/published/config_sentence_transformers.json", {"prompts": prompts})
    bench.publish("one", f"{tmp_path}/published")
    bench.start("two", {"data": {"new_identity": True}})
    plan, folder = bench.plan("two"), Path(bench.paths("two").rows)
    assert plan.published is not None
    assert (plan.published.own_tokens, plan.published.same_graphs) == (True, True)  # a processor has no graphs
    tokenizer = TextTokenizer(tmp_path / "published")
    texts = {normalized_hash(row[name]): row[name] for row in rows(0, 100) for name in ("query", "document")}
    for name, column, longest in (("holdout.arrow", "query", 12), ("candidates.arrow", "document", 40)):
        parents, own = read_table(folder / name), read_table(folder / PUBLISHED / name)
        assert own.drop_columns(f"{column}_tokens").equals(parents.drop_columns(f"{column}_tokens"))
        assert plan.row_files[f"{PUBLISHED}/{name}"].sha256 == store.sha256_file(folder / PUBLISHED / name)
        for row in own.to_pylist():
            [expected] = tokenizer.encode([prompts[column] + texts[row[f"{column}_hash"]]], longest)
            assert row[f"{column}_tokens"] == expected.tolist()
    assert not (folder / PUBLISHED / "train.arrow").exists()


# ---- what is embedded ------------------------------------------------------------------------------------------------


def test_the_parts_hold_every_document_once(bench: Bench) -> None:
    data = rows(0, 130)
    bench.shard("a.jsonl", [*data[:70], b"bad"])
    bench.shard("b.jsonl", data[70:])
    bench.start("run", {"data": {"max_bad_fraction": 0.1}})
    plan = bench.plan("run")
    embed = plan.embed
    assert (embed.source, embed.rows, embed.bad_rows, plan.train.bad_rows, embed.children) == ("documents", 130, 0, 1, 3)
    assert len(embed.parts) == 8  # for three children of two ranks
    reader, seen, whole = CorpusReader(bench.root, embed.shards), [], IdDigest()
    for index, part in enumerate(embed.parts):
        found = reader.read_part(index, 8)
        assert len(found) == part.rows
        assert str(IdDigest.of(found["key"].to_numpy())) == part.ids
        first, last = part_range(index, 8)
        assert all(first <= key <= last for key in found["key"].to_pylist())
        whole = IdDigest.joined([whole, IdDigest.parse(part.ids)])
        seen += found["id"].to_pylist()
    assert sorted(seen) == sorted(row["id"] for row in data)
    assert str(whole) == embed.ids


def test_there_is_a_part_for_every_rank_of_the_hosts_that_embed(bench: Bench) -> None:
    bench.shard("a.jsonl", rows(0, 130))
    bench.start("run", {"embed": {"ranks_per_child": 4}})
    assert len(bench.plan("run").embed.parts) == 16  # three children of four ranks, though training has two


def test_a_corpus_of_its_own(bench: Bench) -> None:
    bench.config["data"] |= {
        "train": [store.join(bench.root, "pairs")],
        "corpus": [store.join(bench.root, "corpus")],
        "columns": {"id": "key", "text": "body"},
    }
    # One document may be in several pairs, so the pairs' ids need not be unique when they are not what is embedded.
    bench.shard("a.jsonl", [{**row, "key": "same"} for row in rows(0, 60)], folder="pairs")
    bench.shard("c.jsonl", [{"key": number, "body": f"text {number}"} for number in range(2)], folder="corpus")
    bench.start("run")
    embed = bench.plan("run").embed
    assert (embed.source, embed.rows, embed.children, len(embed.parts)) == ("corpus", 2, 2, 2)
    assert [shard.uri for shard in embed.shards] == [f"{bench.root}/corpus/c.jsonl"]


def test_an_id_with_two_documents_is_quarantined_with_both_places(bench: Bench) -> None:
    one = bench.shard("a.jsonl", rows(0, 100))
    two = bench.shard("b.jsonl", [*rows(200, 210), *({**row, "document": f"other {row['id']}"} for row in rows(40, 70))])
    error = refusal(BadData, lambda: bench.start("run"), f"{two}:", f"has another document at {one}:", "30 rows: id has another")
    assert error.exit_code == ExitCode.BAD_DATA
    bench.start("again", {"data": {"max_bad_fraction": 0.5}})
    plan = bench.plan("again")
    found = {row["at"]: row["reason"] for row in bench.quarantine("again")}
    assert found == {
        f"{two}:{11 + number}": f"id 'row{40 + number}' has another document at {one}:{41 + number}" for number in range(30)
    }
    assert (plan.embed.rows, plan.embed.bad_rows, plan.train.bad_rows) == (110, 30, 0)
    assert plan.summary()["bad_rows"] == 30


def test_several_queries_for_one_document(bench: Bench) -> None:
    bench.shard("a.jsonl", rows(0, 100))
    bench.shard("b.jsonl", [{**row, "query": f"again {row['id']}"} for row in rows(40, 150)])
    bench.start("run")
    plan = bench.plan("run")
    assert (plan.embed.rows, plan.embed.bad_rows) == (150, 0)
    assert plan.train.rows + plan.holdout.rows == 210


# ---- a run that resumes ----------------------------------------------------------------------------------------------


def test_a_plan_is_kept(bench: Bench) -> None:
    bench.shard("a.jsonl", rows(0, 100))
    first = bench.start("run")
    before = store.read_bytes(bench.paths("run").plan)
    bench.shard("b.jsonl", rows(100, 200))
    assert bench.start("run") == first
    assert store.read_bytes(bench.paths("run").plan) == before


def test_a_kept_plan_needs_its_row_files(bench: Bench) -> None:
    bench.shard("a.jsonl", rows(0, 100))
    bench.start("run")
    store.delete(store.join(bench.paths("run").rows, ORDER))
    refusal(MissingInput, lambda: bench.stage(Stage.PLAN, "run"), ORDER, "start a new run")


def test_of_two_plans_the_first_one_counts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.shard("a.jsonl", rows(0, 100))
    bench.start("run")
    plan = store.read_bytes(bench.paths("run").plan)
    monkeypatch.setattr(plan_stage, "kept_plan", lambda paths: None)
    output = bench.stage(Stage.PLAN, "run")
    assert output is not None
    assert store.read_bytes(bench.paths("run").plan) == plan
    assert output.outputs["plan"].sha256 == hashlib.sha256(plan).hexdigest()


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_a_shard_that_is_not_ingested(bench: Bench) -> None:
    bench.shard("a.jsonl", rows(0, 100))
    bench.prepare("run")
    error = refusal(MissingInput, lambda: bench.stage(Stage.PLAN, "run"), "/ingested/")
    assert error.exit_code == ExitCode.MISSING_INPUT


def test_a_few_bad_rows_are_quarantined(bench: Bench, cloudwatch: Any) -> None:
    data = [*rows(0, 50), b"not json", *rows(50, 99), {"id": "x", "query": "q"}]
    uri = bench.shard("a.jsonl", data)
    output = bench.start("run", {"data": {"max_bad_fraction": 0.02}})
    assert output.metrics["bad_rows"] == 2
    assert [row["at"] for row in bench.quarantine("run")] == [f"{uri}:51", f"{uri}:101"]
    assert bench.plan("run").train.new[0].bad_rows == 2
    assert [told["QuarantinedRows"] for told in cloudwatch()] == [2]


def test_too_many_bad_rows(bench: Bench) -> None:
    uri = bench.shard("a.jsonl", [*rows(0, 100), b"not json", b"not json"])
    words = (f"{uri}:101", "2 of 102", "quarantine.jsonl", "max_bad_fraction = 0.001")
    error = refusal(BadData, lambda: bench.start("run"), *words)
    assert error.exit_code == ExitCode.BAD_DATA
    assert [row["at"] for row in bench.quarantine("run")] == [f"{uri}:101", f"{uri}:102"]
    assert not store.exists(bench.paths("run").plan)
    # Of a run that goes through nothing stays behind.
    bench.shard("a.jsonl", rows(0, 100))
    store.delete(bench.paths("run").inputs)
    bench.start("run")
    assert not store.exists(bench.paths("run").quarantine)


def test_a_long_history_does_not_hide_a_spoilt_week(bench: Bench) -> None:
    bench.config["data"]["max_bad_fraction"] = 0.1
    bench.shard("week-1.jsonl", rows(0, 500))
    bench.week("one")
    bench.shard("week-2.jsonl", [*rows(500, 510), *[b"bad"] * 10])
    refusal(BadData, lambda: bench.start("two"), "new training shards", "10 of 20")


def test_bad_rows_of_a_corpus(bench: Bench) -> None:
    bench.shard("a.jsonl", rows(0, 100))
    bench.shard("c.jsonl", [{"id": 1, "text": "t"}, {"id": 2}], folder="corpus")
    refusal(BadData, lambda: bench.start("run", {"data": {"corpus": [f"{bench.root}/corpus"]}}), "corpus", "c.jsonl:2")


def test_data_without_rows(bench: Bench) -> None:
    bench.shard("a.jsonl", [])
    refusal(BadData, lambda: bench.start("run"), "no row to train on", "0 good rows")
    bench.shard("a.jsonl", rows(0, 100, label=0))
    refusal(BadData, lambda: bench.start("again"), "no row to train on", "100 good rows")


def test_a_hold_out_without_rows(bench: Bench) -> None:
    bench.shard("a.jsonl", [row for row in rows(0, 100) if not held_out(row)])
    refusal(BadData, lambda: bench.start("run"), "the hold-out is empty", "data.holdout_fraction = 0.2")


def test_a_small_hold_out(bench: Bench) -> None:
    bench.shard("a.jsonl", rows(0, 100))
    refusal(BadConfig, lambda: bench.start("run", {"gate": {"undecided": "refuse"}}), "gate.max_drop = 0.005", "hold out 9,740")


def test_a_guardrail_of_a_slice_that_is_not_there(bench: Bench) -> None:
    bench.shard("a.jsonl", rows(0, 100, locale="de"))
    gate = {"undecided": "accept", "guardrails": [{"slice": "locale:*"}, {"slice": "fresh"}, {"slice": "locale:fr"}]}
    refusal(BadConfig, lambda: bench.start("run", {"gate": gate}), "locale:fr", "one of drift, fresh, locale:de, mixed")
    bench.start("next", {"gate": {**gate, "guardrails": [{"slice": "locale:de"}]}})
    assert "which is assumed, as nothing is measured yet" in bench.plan("next").holdout.decides


def test_the_last_evaluation_says_how_far_queries_differ(bench: Bench) -> None:
    bench.shard("a.jsonl", rows(0, 100))
    bench.week("one")
    scorecard = {"queries": 400, "difference": {"ndcg@10": {"error": 0.01}}}
    store.write_json(bench.paths("one").scorecard, scorecard)
    bench.shard("b.jsonl", rows(100, 200))
    bench.start("two")
    assert "deviate by 0.20, as in the last evaluation" in bench.plan("two").holdout.decides


@pytest.mark.parametrize("by", ["document", "query", "group"])
def test_relevant_documents_that_are_trained_on_are_known(bench: Bench, by: str) -> None:
    """Queries with 20 relevant documents, as in ESCI."""
    numbers = [(query, one) for query in range(30) for one in range(20)]
    words = [
        {"id": f"{query}-{one}", "query": f"query {query}", "document": f"{query} {one}", "group": one} for query, one in numbers
    ]
    bench.shard("a.jsonl", words)
    bench.start("run", {"data": {"holdout_by": by, "holdout_fraction": 0.2}, "evaluate": {"candidates": 10_000}})
    held, candidates, known = (bench.rows("run", name) for name in ("holdout.arrow", "candidates.arrow", "known.arrow"))
    hashes = {normalized_hash(row["document"]): normalized_hash(row["query"]) for row in words}
    queries = {row["query_hash"] for row in held}
    found = {(row["query_hash"], row["document_hash"]) for row in (*held, *known)}
    assert found == {(query, document) for document, query in hashes.items() if query in queries}
    assert len(candidates) == len(words)
    assert (len(known) > 0) == (by != "query")


def test_a_corpus_may_have_no_document_in_the_slices_of_the_candidates(bench: Bench) -> None:
    bench.shard("a.jsonl", rows(0, 200))
    [text, *_] = (text for text in map(str, range(1000)) if normalized_hash(text) * SLICES >> 64 == 0)
    bench.shard("c.jsonl", [{"id": "one", "text": text}], folder="corpus")
    bench.start("run", {"data": {"corpus": [f"{bench.root}/corpus"]}, "evaluate": {"candidates": 10}})
    held, candidates = (bench.rows("run", name) for name in ("holdout.arrow", "candidates.arrow"))
    assert {row["document_hash"] for row in held} <= {row["document_hash"] for row in candidates}


def test_relevant_documents_of_any_group_are_known(bench: Bench) -> None:
    """Whatever slices the candidates are from: those of a corpus are found by their texts, and rows by their groups."""
    words = [
        {"id": f"{query}-{one}", "query": f"query {query}", "document": f"{query} {one}", "group": one}
        for query in range(30)
        for one in range(20)
    ]
    bench.shard("a.jsonl", words)
    bench.shard("c.jsonl", [{"id": row["id"], "text": row["document"]} for row in words], folder="corpus")
    data = {"holdout_by": "group", "holdout_fraction": 0.2, "corpus": [f"{bench.root}/corpus"]}
    bench.start("run", {"data": data, "evaluate": {"candidates": 100}})
    held, candidates, known = (bench.rows("run", name) for name in ("holdout.arrow", "candidates.arrow", "known.arrow"))
    queries, documents = {row["query_hash"] for row in held}, {row["document_hash"] for row in candidates}
    pairs = {(normalized_hash(row["query"]), normalized_hash(row["document"])) for row in words}
    wanted = {pair for pair in pairs if pair[0] in queries and pair[1] in documents}
    assert wanted <= {(row["query_hash"], row["document_hash"]) for row in (*held, *known)}
    assert len(wanted) > len(held)


def test_candidates_are_documents_of_the_corpus(bench: Bench) -> None:
    """Those of some slices of text hashes: the same in every week, and with the training rows that have the same texts."""
    words = [
        {"id": f"{query}-{one}", "query": f"query {query}", "document": f"{query} {one}"}
        for query in range(30)
        for one in range(20)
    ]
    documents = [{"id": f"doc-{number}", "text": row["document"]} for number, row in enumerate(words)]
    others = [{"id": f"other-{number}", "text": f"other {number}"} for number in range(600)]
    bench.shard("a.jsonl", words)
    bench.shard("c.jsonl", [*documents, *others[:300], {"id": "other-300", "text": "an earlier text"}], folder="corpus")
    bench.shard("d.jsonl", others[301:], folder="corpus")
    more = {"data": {"corpus": [f"{bench.root}/corpus"], "holdout_fraction": 0.1}}

    def exam(run: str, candidates: int) -> tuple[set[str], set[str]]:
        """Ids of candidates that are documents of the corpus, and of the hold-out's rows."""
        bench.start(run, {**more, "evaluate": {"candidates": candidates}})
        held, found = (bench.rows(run, name) for name in ("holdout.arrow", "candidates.arrow"))
        own = {row["document_hash"] for row in held}
        assert own == {row["document_hash"] for row in found[: len(own)]}
        return {row["id"] for row in found[len(own) :]}, {row["id"] for row in held}

    texts = {row["id"]: row["text"] for row in (*documents, *others)}
    place = {name: normalized_hash(text) * SLICES >> 64 for name, text in texts.items()}
    first = holdout_slices(0.1)
    some, _ = exam("some", 400)
    last = first + 400 * SLICES // 1200
    assert some == {name for name in texts if first <= place[name] < last and name != "other-300"}
    assert 300 < len(some) < 500
    # Of the rows with these documents, those that are relevant to a held-out query are known.
    queries = {row["query_hash"] for row in bench.rows("some", "holdout.arrow")}
    known = {(row["query_hash"], row["document_hash"]) for row in bench.rows("some", "known.arrow")}
    pairs = [(normalized_hash(row["query"]), normalized_hash(row["document"])) for row in words]
    assert known == {pair for pair in pairs if pair[0] in queries and first <= pair[1] * SLICES >> 64 < last}
    assert known

    bench.shard(
        "d.jsonl", [*others[301:], *({"id": f"new-{number}", "text": f"new {number}"} for number in range(12))], folder="corpus"
    )
    again, _ = exam("again", 404)
    assert some <= again
    every, _ = exam("every", 100_000)
    assert {name for name in texts if place[name] >= first and name != "other-300"} <= every


def test_golden_sets_are_row_files_of_the_run(bench: Bench) -> None:
    bench.shard("a.jsonl", rows(0, 100))
    uri = f"{bench.root}/golden"
    store.write_bytes(f"{uri}/queries.jsonl", b'{"_id": "q", "text": "query 1"}')
    store.write_bytes(f"{uri}/corpus.jsonl", b'{"_id": "d", "text": "document 1"}\n{"_id": "e", "text": "document 2"}')
    store.write_bytes(f"{uri}/test.tsv", b"query-id\tcorpus-id\tscore\nq\td\t1\n")
    golden = {"name": "shop", "queries": f"{uri}/queries.jsonl", "qrels": f"{uri}/test.tsv", "corpus": f"{uri}/corpus.jsonl"}
    settings = {"evaluate": {"sets": [golden]}, "gate": {"guardrails": [{"slice": "golden:shop"}]}}
    bench.start("run", settings)
    assert [row["id"] for row in bench.rows("run", "golden/shop/candidates.arrow")] == ["d", "e"]
    file = bench.plan("run").row_files["golden/shop/holdout.arrow"]
    assert (file.rows, file.sha256) == (1, store.sha256(store.join(bench.paths("run").rows, "golden/shop/holdout.arrow")))

    unknown = {**settings, "gate": {"guardrails": [{"slice": "golden:shoes"}]}}
    refusal(BadConfig, lambda: bench.start("typo", unknown), "golden:shoes", "golden:shop", "fresh")
    store.write_bytes(f"{uri}/test.tsv", b"query-id\tcorpus-id\tscore\nq\tx\t1\n")
    refusal(BadData, lambda: bench.start("gone", settings), "unknown documents", "100.0% of 1 documents", "x")
    settings["evaluate"] = {"sets": [{**golden, "corpus": "s3://elsewhere/corpus.jsonl"}]}
    bench.deployment = {"local_paths": False}
    refusal(BadConfig, lambda: bench.prepare("foreign", settings), "evaluate.sets: shop", "s3://elsewhere/corpus.jsonl")


def test_a_corpus_without_rows(bench: Bench) -> None:
    bench.shard("a.jsonl", rows(0, 100))
    bench.shard("c.jsonl", [], folder="corpus")
    refusal(BadData, lambda: bench.start("run", {"data": {"corpus": [f"{bench.root}/corpus"]}}), "the corpus is empty")


# ---- more data than a stage can hold ---------------------------------------------------------------------------------


@pytest.fixture
def deployed(bench: Bench, model: Path) -> Bench:
    """The same with hosts of its own for each stage: the parent is in the bucket."""
    store.upload_folder(model, store.join(bench.root, "parent"))
    bench.config["model"]["parent"] = store.join(bench.root, "parent")
    bench.deployment = {"local_paths": False, "hosts": {"embed": "inf2.xlarge"}}
    bench.shard("a.jsonl", rows(0, 200))
    return bench


def test_more_rows_than_a_disk_can_hold_are_refused_before_they_are_written(
    deployed: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ROW_FILE_BYTES", 1 << 40)
    with monkeypatch.context() as before:
        before.delattr(plan_stage.PlannedRows, "write_holdout")
        refusal(BadConfig, lambda: deployed.start("run"), "plan, disk", "data.train")
    # Where all stages share a machine, it is unknown what else it holds.
    deployed.deployment = {}
    deployed.start("local")


def test_a_hold_out_that_evaluate_cannot_hold_is_refused(deployed: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    # How many queries there are is known once they are read.
    monkeypatch.setattr(limits, "QUERY_BYTES", 1 << 40)
    refusal(BadConfig, lambda: deployed.start("run"), "evaluate, memory", "data.holdout_fraction")
    assert not store.exists(deployed.paths("run").plan)


def test_what_only_takes_long_is_a_warning(
    deployed: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "RANKED_SCORES", 0.01)
    with caplog.at_level("WARNING"):
        deployed.start("run")
    warned = [record.getMessage() for record in caplog.records if "evaluate, ranking" in record.getMessage()]
    assert len(warned) == 1
    assert "data.holdout_fraction" in warned[0]
    # The deployment's own limit of an attempt counts.
    caplog.clear()
    deployed.deployment = {**deployed.deployment, "timeouts": {"evaluate": 10_000_000}}
    with caplog.at_level("WARNING"):
        deployed.start("patient")
    assert not [record for record in caplog.records if "evaluate, ranking" in record.getMessage()]


# ---- the reference ---------------------------------------------------------------------------------------------------


def test_the_reference_is_copied_without_what_must_not_be_used(bench: Bench) -> None:
    bench.shard("a.jsonl", rows(0, 200))
    bench.week("one")
    write_reference(bench.root, "current", "one")
    QueryValues(((1, None),), {"ndcg@10": np.array([0.5])}).write(Path(bench.paths("one").query_values))
    held = bench.rows("one", "holdout.arrow")
    bench.shard("b.jsonl", rows(200, 300))
    deleted = store.join(bench.root, "deleted.txt")
    store.write_bytes(deleted, held[0]["id"].encode())
    plan = bench.week("two", {"data": {"delete": [deleted]}})
    assert plan.reference == "one"
    assert bench.rows("two", "reference/holdout.arrow") == held[1:]
    gone = {row["id"] for row in bench.rows("one", "candidates.arrow")} - {
        row["id"] for row in bench.rows("two", "reference/candidates.arrow")
    }
    assert gone == {held[0]["id"]}
    assert plan.row_files["reference/queries.parquet"].rows == len(held) - 1
    # A smaller hold-out: some of its documents are trained on, and are no exam any more.
    bench.shard("c.jsonl", rows(300, 400))
    bench.week("three", {"data": {"holdout_fraction": 0.1}})
    bench.shard("d.jsonl", rows(400, 500))
    bench.start("four")
    for run in ("three", "four"):
        left = {row["id"] for row in bench.rows(run, "reference/holdout.arrow")}
        assert left == {row["id"] for row in rows(0, 200) if held_out(row, 0.1)}


def test_a_deleted_id_leaves_the_reference_the_text_of_another_one(bench: Bench) -> None:
    twins = [{"id": f"twin{row['id']}", "query": f"twin {row['query']}", "document": row["document"]} for row in rows(0, 200)]
    bench.shard("a.jsonl", [*rows(0, 200), *twins])
    bench.week("one")
    write_reference(bench.root, "current", "one")
    QueryValues(((1, None),), {"ndcg@10": np.array([0.5])}).write(Path(bench.paths("one").query_values))
    # Of the twins, a candidate has the id of either.
    held, candidates = ({row["id"] for row in bench.rows("one", name)} for name in ("holdout.arrow", "candidates.arrow"))
    chosen = sorted(held & candidates)
    deleted = store.join(bench.root, "deleted.txt")
    store.write_bytes(deleted, "\n".join(chosen).encode())
    bench.shard("b.jsonl", rows(200, 300))
    bench.start("two", {"data": {"delete": [deleted]}})
    left, there = (bench.rows("two", f"reference/{name}") for name in ("holdout.arrow", "candidates.arrow"))
    assert {row["id"] for row in left} == held - {*chosen}
    assert left
    assert {row["document_hash"] for row in left} <= {row["document_hash"] for row in there}
    distractors = candidates - held
    assert {row["id"] for row in there} == candidates
    assert distractors


def test_a_reference_that_cannot_be_compared_with(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.shard("a.jsonl", rows(0, 200))
    bench.week("one")
    bench.shard("b.jsonl", rows(200, 300))
    assert bench.week("none").reference is None
    write_reference(bench.root, "current", "one")
    bench.shard("c.jsonl", rows(300, 400))
    refusal(MissingInput, lambda: bench.start("gone"), "files of the reference are gone", "one", "pin another run")
    QueryValues(((1, None),), {"ndcg@10": np.array([0.5])}).write(Path(bench.paths("one").query_values))
    bench.start("by", {"data": {"holdout_by": "query"}})
    assert bench.plan("by").reference is None
    assert bench.week("other", {"train": {"query_length": 10}}).reference is None
    assert caplog.text.count("has another kind of hold-out, other tokens, lengths or classes") == 2
    store.write_bytes(bench.paths("one").plan, b'{"run": "of another version"}')
    bench.shard("d.jsonl", rows(400, 500))
    bench.start("old")
    assert bench.plan("old").reference is None
    assert "is of another version" in caplog.text
    store.write_bytes(reference_uri(bench.root, "current"), b'{"run": "../x"}')
    refusal(BadData, lambda: bench.prepare("bad"), "the registry's reference cannot be read")
