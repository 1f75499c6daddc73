"""The scale model: against what was published, what is really computed and what is really allocated; and what plan says of it."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig
from typer.testing import CliRunner

from infra import settings
from pipeline.capacity import ask
from pipeline.cli import app
from pipeline.config import ModelConfig, build_config
from pipeline.contract import ARRAY_LIMIT, RunPaths, Stage, StageResult, now
from pipeline.data.arrow import SCHEMAS
from pipeline.data.ids import IdDigest, repeated
from pipeline.data.increments import select
from pipeline.data.shards import InputFile, scan_corpus, scan_training
from pipeline.data.steps import count_steps
from pipeline.errors import BadConfig
from pipeline.model.encoder import new_encoder
from pipeline.model.memory import shape_of
from pipeline.plan import World
from pipeline.prices import INSTANCE_HOUR
from pipeline.runtime import store
from pipeline.runtime.world import World as Ranks
from pipeline.scale import limits
from pipeline.scale.answer import Question, Scale, parse_hours
from pipeline.scale.limits import Counts, Need, Room, needs, over, require_room, rows_read
from pipeline.scale.published import BERT_LARGE, CORE_FLOPS, HOSTS, INFERENCE, ONE_NODE, SIXTEEN_NODES, PublishedTraining
from pipeline.scale.work import (
    Estimator,
    Offer,
    Operations,
    Rates,
    Workload,
    bucket_of,
    cheapest,
    packed,
    published_inference_share,
    reduce_seconds,
    ring,
    times_read,
)
from pipeline.stages import publish
from pipeline.stages.evaluate import join_holdout
from pipeline.stages.prepare import plan_parts
from pipeline.training.batches import TrainingBatches
from tests.pipeline.training.planned import plan_training
from tests.tiny import make_model

MILLION = 1_000_000


def shape_like(**config: Any) -> Any:
    with torch.device("meta"):
        return shape_of(new_encoder(BertConfig(**config), ModelConfig()))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parent") / "model"
    make_model(folder)
    return folder


# ---- operations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", [None, 48])
def test_operations_are_those_that_torch_counts(head: int | None) -> None:
    config = BertConfig(hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=80, vocab_size=50)
    settings = ModelConfig(head={"hidden": head} if head else None)  # type: ignore[arg-type]
    encoder = new_encoder(config, settings)
    tokens = torch.ones(5, 24, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        encoder(tokens, torch.ones_like(tokens))
    assert 5 * Operations.of_shape(shape_of(encoder)).text(24) == counter.get_total_flops()


def test_a_published_model_has_the_operations_of_its_shape() -> None:
    large = shape_like(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    assert Operations.of_published(BERT_LARGE, pretraining=False) == Operations.of_shape(large)
    more = Operations.of_published(BERT_LARGE, pretraining=True).text(128) - Operations.of_shape(large).text(128)
    assert more == 2 * 128 * (1024 * 1024 + 1024 * 30_522)


def test_a_pair_is_two_texts_and_a_row_of_scores() -> None:
    model = Operations(multiplied=1000, layers=2, hidden=8)
    assert model.text(10) == 2 * 10 * 1000 + 2 * 2 * 10 * 10 * 8 * 2
    assert model.pair(4, {8: 0.5, 16: 0.5}, 100) == model.text(4) + (model.text(8) + model.text(16)) / 2 + 2 * 100 * 8


# ---- against published figures ---------------------------------------------------------------------------------------


def pretraining(published: PublishedTraining) -> float:
    """Sequences per second that the model gives BERT-Large's pretraining: one text a pair, no contrastive scores."""
    host, rates = HOSTS["trn1.32xlarge"], Rates.published(BERT_LARGE.hidden)
    flops = 3 * published.per_step * Operations.of_published(BERT_LARGE, pretraining=True).text(128)
    computing = flops / (published.nodes * host.flops * rates.train * rates.efficiency(published.nodes))
    return published.per_step / (computing + reduce_seconds(BERT_LARGE.parameters, host, published.nodes))


@pytest.mark.parametrize(
    ("published", "tolerance"),
    [
        # What the model is calibrated with.
        (ONE_NODE, 1e-9),
        (SIXTEEN_NODES, 1e-9),
        # The table of another release (SDK 2.27), which it has not seen.
        (PublishedTraining(nodes=1, per_second=3836.5, per_step=16_384), 0.1),
        (PublishedTraining(nodes=16, per_second=56_923.7, per_step=1_048_576), 0.1),
    ],
)
def test_training_is_as_fast_as_published(published: PublishedTraining, tolerance: float) -> None:
    assert pretraining(published) == pytest.approx(published.per_second, rel=tolerance)


@pytest.mark.parametrize(
    ("family", "layers", "hidden", "published"),
    [
        # The same tables' models that the model is not calibrated with: distilbert-base, roberta-base, roberta-large.
        ("trn1", 6, 768, 6281.1),
        ("trn1", 12, 768, 3377.8),
        ("trn1", 24, 1024, 1123.9),
        ("inf2", 6, 768, 5307.9),
        ("inf2", 12, 768, 2920.4),
        ("inf2", 24, 1024, 962.7),
    ],
)
def test_inference_is_as_fast_as_published(family: str, layers: int, hidden: int, published: float) -> None:
    model = Operations(multiplied=layers * 12 * hidden**2, layers=layers, hidden=hidden)
    rate = 2 * CORE_FLOPS * published_inference_share(family, hidden) / model.text(128)
    assert rate == pytest.approx(published, rel=0.1)


def test_widths_between_the_published_ones_are_between_them() -> None:
    for family in INFERENCE:
        low, middle, high = (published_inference_share(family, width) for width in (768, 896, 1024))
        assert middle == pytest.approx((low + high) / 2)
        assert published_inference_share(family, 384) == low
    assert Rates.published(768).train < Rates.published(1024).train


def test_a_ring_moves_nearly_twice_the_bytes() -> None:
    assert ring(100, 1, 10) == 0
    assert ring(100, 4, 10) == pytest.approx(15)
    one, two = (reduce_seconds(1000, HOSTS["trn1.32xlarge"], nodes) for nodes in (1, 2))
    assert two - one == pytest.approx(4 * 1000 / 100e9)


# ---- hosts, hours, dollars -------------------------------------------------------------------------------------------


RATES = Rates(train=0.5, train_source="", train_nodes=1, embed={"trn1": 0.5, "inf2": 0.25}, embed_source={})
WORK = Workload(
    train_rows=10 * MILLION,
    corpus_rows=6_400_000,
    query_tokens=10,
    document_tokens=100,
    shard_rows=100_000,
    train_lengths={128: 1.0},
    embed_lengths={128: 1.0},
)
BERT = Operations(multiplied=85_000_000, layers=12, hidden=768)


def estimator(rates: Rates = RATES, **train: Any) -> Estimator:
    return Estimator(
        operations=BERT, parameters=110 * MILLION, config=build_config({"train": train}), rates=rates, prices=INSTANCE_HOUR
    )


def test_hours_of_training_follow_from_operations_and_peak() -> None:
    offer = estimator().train(WORK, 1)
    steps = -(-WORK.train_rows // 2048)
    work = 3 * steps * 2048 * BERT.pair(32, {128: 1.0}, 2048)
    assert offer.items["computing"] * 3600 == pytest.approx(work / (32 * 95e12 * 0.5))
    assert offer.items["all-reduce of gradients"] * 3600 == pytest.approx(
        steps * reduce_seconds(110 * MILLION, HOSTS[offer.host], 1)
    )
    assert offer.usd == pytest.approx(offer.hours * 21.5)
    twice = estimator(activation_checkpointing=True).train(WORK, 1)
    assert twice.items["computing"] == pytest.approx(offer.items["computing"] * 4 / 3)
    assert estimator(epochs=2).train(WORK, 1).hours == pytest.approx(2 * offer.hours, rel=0.01)
    # Few steps are trained however many rows there are.
    assert estimator(steps=10).train(WORK, 1).hours == pytest.approx(offer.hours * 10 / steps)


def test_more_nodes_are_faster_and_dearer() -> None:
    offers = [estimator().train(WORK, nodes) for nodes in (1, 2, 4, 16)]
    assert [offer.hours for offer in offers] == sorted((offer.hours for offer in offers), reverse=True)
    assert [offer.usd for offer in offers] == sorted(offer.usd or 0.0 for offer in offers)


def test_checkpoints_cost_what_a_run_says() -> None:
    offer = estimator(replace(RATES, stall=3.6), checkpoint_every=1000).train(WORK, 1)
    assert offer.items["standing still for checkpoints"] == pytest.approx(5 * 3.6 / 3600)


def test_the_rank_with_most_parts_decides_how_long_embedding_takes() -> None:
    # 64 parts of 100,000 rows: on 32 ranks two each, on 64 one, and on 3 hosts of 32 ranks still two parts of 96 are one.
    hours = [estimator().embed(WORK, "trn1.32xlarge", children).hours for children in (1, 2)]
    assert hours[0] == pytest.approx(2 * hours[1])
    uneven = estimator().embed(replace(WORK, corpus_rows=6_500_000), "trn1.32xlarge", 2)
    assert uneven.hours == pytest.approx(hours[1] * 2, rel=0.01)
    few = estimator().embed(replace(WORK, corpus_rows=5), "inf2.xlarge", 64)
    assert few.count == 5


def test_embedding_waits_for_what_it_reads() -> None:
    small = replace(BERT, multiplied=1000)
    starved = Estimator(operations=small, parameters=1, config=build_config(), rates=RATES, prices=INSTANCE_HOUR)
    offer = starved.embed(WORK, "inf2.xlarge", 1)
    assert offer.items["waiting for rows and tokens"] > offer.items["computing"]
    # One file for everything is read from its beginning by every rank, which hardly matters to two of them.
    single = replace(WORK, shard_rows=WORK.corpus_rows)
    assert starved.embed(single, "inf2.xlarge", 1).hours < 1.1 * offer.hours
    assert starved.embed(single, "inf2.48xlarge", 1).hours > 1.2 * starved.embed(WORK, "inf2.48xlarge", 1).hours
    measured = replace(starved, rates=replace(RATES, with_input=frozenset({"inf2"}))).embed(WORK, "inf2.xlarge", 1)
    assert measured.items["waiting for rows and tokens"] == 0


def test_a_corpus_is_cut_and_read_as_prepare_plans_it() -> None:
    for shards, shard_rows, rows_per_part, ranks in ((4, 1000, 100, 1), (10, 100, 100, 6), (1, 5000, 100, 8), (3, 700, 90, 40)):
        parts = plan_parts([shard_rows] * shards, rows_per_part, 1)
        total = shards * shard_rows
        assert rows_read(parts, ranks) / total == pytest.approx(times_read(total, shard_rows, len(parts), ranks))
    one_file = plan_parts([5000], 100, 1)
    assert rows_read(one_file, 1) == 5000  # however many parts
    assert rows_read(one_file, 2) == 7500


def offers(stage: Stage, *values: tuple[float, float | None]) -> list[Offer]:
    return [Offer(stage=stage, host="h", count=index, hours=hours, usd=usd) for index, (hours, usd) in enumerate(values)]


@pytest.mark.parametrize(("deadline", "expected"), [(None, (0, 0)), (12.0, (0, 0)), (8.0, (1, 0)), (3.5, (2, 1)), (2.0, None)])
def test_the_cheapest_that_keeps_the_deadline(deadline: float | None, expected: tuple[int, int] | None) -> None:
    trains = offers(Stage.TRAIN, (8.0, 10.0), (4.0, 11.0), (2.0, 14.0), (30.0, 1.0), (0.1, None))
    embeds = offers(Stage.EMBED, (2.0, 5.0), (1.0, 6.0), (13.0, 1.0))
    found = cheapest(trains, embeds, deadline)
    assert (found and (found[0].count, found[1].count)) == expected


def test_a_text_is_computed_at_the_next_length() -> None:
    assert [bucket_of(tokens, (32, 64)) for tokens in (1, 32, 32.5, 100)] == [32, 32, 64, 64]
    assert packed(20, (32, 64), 0.2) == {32: pytest.approx(25 / 32)}
    assert packed(100, (32, 64), 0.0) == {64: 1.0}


@pytest.mark.parametrize(("text", "hours"), [("90m", 1.5), ("12h", 12), ("1.5d", 36)])
def test_a_deadline_is_a_number_and_a_unit(text: str, hours: float) -> None:
    assert parse_hours(text) == hours


@pytest.mark.parametrize("text", ["12", "h", "-1h", "0h", "1e3h", "12 hours", "9" * 400 + "d"])
def test_other_deadlines_are_refused(text: str) -> None:
    with pytest.raises(BadConfig, match="deadline"):
        parse_hours(text)


# ---- what grows ------------------------------------------------------------------------------------------------------


def traced(make: Callable[[], Any]) -> tuple[Any, float, float]:
    """A result, the bytes that it keeps, and those at the worst moment."""
    tracemalloc.start()
    try:
        found = make()
        return (found, *map(float, tracemalloc.get_traced_memory()))
    finally:
        tracemalloc.stop()


def per_row(make: Callable[[int], Any], few: int, many: int) -> tuple[float, float]:
    """Bytes of a row, kept and at the worst moment: what does not grow falls away between two sizes."""
    (_, kept, worst), (_, more, worse) = (traced(lambda rows=rows: make(rows)) for rows in (few, many))
    return (more - kept) / (many - few), (worse - worst) / (many - few)


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> InputFile:
    path = tmp_path_factory.mktemp("shards") / "rows.jsonl"
    with path.open("w") as stream:
        for row in range(20_000):
            stream.write(json.dumps({"id": f"row-{row}", "query": f"q {row}", "document": f"d {row}", "text": "t"}) + "\n")
    return InputFile(uri=str(path), sha256="0" * 64, size=path.stat().st_size)


def test_prepare_holds_of_a_row_what_is_said(shard: InputFile) -> None:
    def ignore(_: object) -> None: ...

    scans, kept, _ = traced(lambda: scan_training([shard], {}, IdDigest(), ignore, ignore))
    assert kept / 20_000 == pytest.approx(limits.SCAN_BYTES, rel=0.1)
    _, kept, _ = traced(lambda: scan_corpus([shard], {}, IdDigest(), ignore, ignore))
    assert kept / 20_000 == pytest.approx(limits.CORPUS_SCAN_BYTES, rel=0.15)
    _, _, worst = traced(lambda: repeated([scan.ids for scan in scans]))
    assert worst / 20_000 == pytest.approx(limits.REPEATED_BYTES, rel=0.1)

    def chosen() -> Any:
        return select([], scans, holdout_fraction=0.02, replay_fraction=0.1, distractors=1000, seed=0)

    selection, kept, worst = traced(chosen)
    assert kept / 20_000 == pytest.approx(limits.MASK_BYTES, rel=0.1)
    assert worst / 20_000 == pytest.approx(limits.MASK_BYTES + limits.SELECT_BYTES, rel=0.15)
    masks = (selection.holdout[0], selection.train[0], selection.distractors[0])
    _, _, worst = traced(lambda: [mask.tolist() for mask in (*masks, scans[0].documents)])
    assert worst / 20_000 == pytest.approx(limits.MARK_BYTES, rel=0.1)


def test_sets_and_schedules_hold_of_a_row_what_is_said() -> None:
    rng = np.random.default_rng(0)

    def hashes(rows: int) -> list[int]:
        return [int(value) for value in rng.integers(1 << 62, 1 << 63, rows)]

    # Sets grow by leaps: just after one they are as empty as can be, and that is what is taken.
    kept, _ = per_row(lambda rows: set(hashes(rows)), 1, 200_000)
    assert kept == pytest.approx(limits.KNOWN_BYTES, rel=0.1)
    kept, _ = per_row(lambda rows: {(value, None) for value in hashes(rows)}, 1, 200_000)
    assert kept == pytest.approx(limits.QUERY_SET_BYTES, rel=0.1)
    lengths = np.full(100_000, 60, np.int32)
    _, worst = per_row(lambda rows: count_steps(lengths[:rows], build_config(), 32), 10_000, 100_000)
    assert worst == pytest.approx(limits.SCHEDULE_BYTES - 4, rel=0.1)


def train_file(folder: Path, rows: int, batch: int = 4096) -> Path:
    """A train.arrow as prepare writes it, in batches."""
    path = folder / f"train-{rows}.arrow"
    rng = np.random.default_rng(0)
    with pa.ipc.new_file(str(path), SCHEMAS["train.arrow"]) as writer:
        for start in range(0, rows, batch):
            count = min(batch, rows - start)
            columns: dict[str, Any] = {
                "id": [f"{'i' * (limits.ID_BYTES - 8)}{start + row:08d}" for row in range(count)],
                "query_tokens": [[1] * 4] * count,
                "document_tokens": [[1] * 6] * count,
                **{name: rng.integers(0, 1 << 63, count).astype(np.uint64) for name in ("query_hash", "document_hash")},
                "shard": [0] * count,
                "line": range(count),
            }
            writer.write_table(pa.table(columns, schema=SCHEMAS["train.arrow"]))
    return path


def test_training_holds_of_a_row_what_is_said(tmp_path: Path) -> None:
    files = {rows: train_file(tmp_path, rows) for rows in (8192, 65_536)}

    def first_batch(rows: int) -> Any:
        arguments: Any = {"batch_size": 32, "query_length": 8, "buckets": (8,), "seed": 0, "learning_rate": lambda _: 1e-3}
        batches = TrainingBatches(files[rows], Ranks(), **arguments)
        return batches, next(batches.iterate(0, 4))

    before = pa.total_allocated_bytes()
    held, _, _ = traced(lambda: first_batch(65_536))
    # Arrow's own memory is not traced: two hashes, copied out of the file's batches into one piece.
    arrow = (pa.total_allocated_bytes() - before) / 65_536
    _, worst = per_row(first_batch, 8192, 65_536)
    assert held
    assert worst + arrow == pytest.approx(limits.TRAIN_ROW_BYTES, rel=0.1)
    size = files[65_536].stat().st_size - files[8192].stat().st_size
    assert size / (65_536 - 8192) == pytest.approx(limits.ROW_FIELDS_BYTES + limits.ID_BYTES + 4 * (4 + 6), rel=0.02)


def test_evaluate_holds_of_a_query_and_its_document_what_is_said() -> None:
    def joined(rows: int) -> Any:
        documents = np.arange(rows).astype(np.uint64) + (1 << 40)
        holdout: dict[str, Any] = {
            "id": ["i"] * rows,
            "query_tokens": [[1000 + token for token in range(4)]] * rows,
            "query_hash": documents * 3,
            "document_hash": documents,
            "label": [1.0] * rows,
            "locale": [None] * rows,
        }
        candidates = {"document_tokens": [[2000 + token for token in range(8)]] * rows, "document_hash": documents}
        tables = (pa.table(holdout, SCHEMAS["holdout.arrow"]), pa.table(candidates, SCHEMAS["candidates.arrow"]))
        return join_holdout(*tables)

    # Dicts grow by leaps, too.
    kept, _ = per_row(joined, 1, 20_000)
    assert kept == pytest.approx(limits.CANDIDATE_BYTES + limits.HOLDOUT_QUERY_BYTES + limits.LISTED_TOKEN_BYTES * 12, rel=0.1)


def test_figures_that_stand_elsewhere_too_are_the_same() -> None:
    assert limits.READERS == publish.READERS
    assert (store.s3.PIECE_BYTES, store.s3.PART_BYTES) == (limits.S3_GET_BYTES, limits.S3_PUT_BYTES)
    for name, host in HOSTS.items():
        known = settings.HARDWARE[name]
        assert (host.cores, host.job_vcpus, host.job_memory) == (known.cores, known.job_vcpus, known.job_memory_mib << 20)


COUNTS = Counts(
    train_rows=MILLION,
    trained_rows=MILLION,
    holdout=20_000,
    queries=20_000,
    candidates=20_000,
    train_shards=10,
    corpus_shards=0,
    largest_shard=100_000,
    corpus_rows=MILLION,
    parts=128,
    children=4,
    rows_read=MILLION,
    uri_bytes=100,
    query_tokens=12,
    document_tokens=96,
    dimension=384,
)
SHAPE = shape_like(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
NEURON = World(kind="neuron", precision="compiler", nodes=4, ranks_per_node=32)
ROOM = Room.deployed(limits.Limits(16 << 30, 479 << 30), "inf2.xlarge")


def found(**changes: Any) -> list[Need]:
    return over(needs(replace(COUNTS, **changes), SHAPE, build_config(), NEURON, ROOM))


@pytest.mark.parametrize(
    ("changes", "first", "breaks"),
    [
        ({}, None, False),
        ({"train_rows": 800 * MILLION}, "prepare, memory", True),
        ({"trained_rows": 195 * MILLION, "document_tokens": 256}, "prepare, disk", True),
        ({"trained_rows": 300 * MILLION}, "train, memory of a node", True),
        ({"queries": 2 * MILLION, "candidates": 2 * MILLION}, "evaluate, memory", True),
        ({"queries": 500_000, "candidates": 500_000}, "evaluate, ranking", False),
        ({"corpus_rows": 3000 * MILLION, "parts": 30_000}, "publish, memory", True),
        ({"corpus_rows": 100 * MILLION, "parts": 2}, "publish, disk", True),
        ({"children": ARRAY_LIMIT + 1}, "embed, children", True),
        ({"rows_read": 11 * MILLION}, "embed, how often", False),
        ({"uri_bytes": 1060, "train_shards": 50}, "prepare, result.json", True),
    ],
)
def test_what_is_too_much_is_named_with_what_helps(changes: dict[str, int], first: str | None, breaks: bool) -> None:
    wrong = found(**changes)
    assert [need.what.startswith(str(first)) for need in wrong[:1]] == [True] * (first is not None)
    assert all(need.remedy for need in wrong)
    if not breaks:
        require_room(replace(COUNTS, **changes), SHAPE, build_config(), NEURON, ROOM)
        return
    with pytest.raises(BadConfig, match="more data than a stage can hold") as refused:
        require_room(replace(COUNTS, **changes), SHAPE, build_config(), NEURON, ROOM)
    assert str(refused.value.value).count(str(first)) == 1
    assert wrong[0].remedy in refused.value.remedy
    # Nothing is judged where nobody knows what there is, but for limits that are everywhere.
    everywhere = first in ("embed, children", "prepare, result.json")
    unjudged = [need for need in needs(replace(COUNTS, **changes), SHAPE, build_config(), NEURON, Room()) if need.over]
    assert bool(unjudged) == everywhere


def test_the_hold_out_that_is_proposed_is_enough_and_fits() -> None:
    [memory, *_] = found(train_rows=100 * MILLION, queries=2 * MILLION, candidates=2 * MILLION)
    assert "data.holdout_fraction=0.0002" in memory.remedy
    assert not found(train_rows=100 * MILLION, queries=20_000, candidates=20_000)


# ---- what plan says --------------------------------------------------------------------------------------------------


SETTINGS = ["--set", "device.kind=neuron", "--set", "train.buckets=[32,60]", "--set", "embed.buckets=[32,60]"]
SHORT = ["--set", "train.query_length=16", "--nodes", "2"]


def plan(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *SETTINGS, *SHORT, *arguments])


def test_hosts_hours_and_dollars_are_printed_with_all_that_is_assumed(model: Path) -> None:
    asked = ("--parent", str(model), "--train-rows", "5000000", "--corpus-rows", "8000000", "--deadline", "12h")
    shown = plan(*asked)
    assert shown.exit_code == 0, shown.output
    words = " ".join(shown.output.split())
    for expected in (
        "5,000,000 pairs to train on, 8,000,000 documents to embed",
        "16 x trn1.32xlarge",
        "x inf2.48xlarge",
        "Cheapest within 12 h: ",
        "Nothing that is known of breaks at this size.",
        "a document has 96 tokens on average; say --document-tokens",
        "embed cuts every document at 60 tokens",
        "3,827 sequences/s",
        "as narrow as 32",
        "It fits.",
    ):
        assert expected in words, expected
    result = plan(*asked, "--json")
    record = json.loads(result.stdout)["scale"]
    assert {offer["host"] for offer in record["embed"]} == set(HOSTS)
    assert [offer["count"] for offer in record["train"]] == [1, 2, 4, 8, 16]
    assert sum(offer["cheapest"] for offer in (*record["train"], *record["embed"])) == 2
    assert record["findings"] == []
    assert all(line in " ".join(record["assumptions"]) for line in ("published", "on demand", "not counted"))
    usd = record["unit_costs"]["documents embedded, inf2.xlarge"]
    [alone] = [offer for offer in record["embed"] if (offer["host"], offer["count"]) == ("inf2.xlarge", 1)]
    assert usd["million_rows"] == pytest.approx(alone["usd"] / 8, rel=0.01)
    assert usd["billion_tokens"] == pytest.approx(1000 * usd["million_rows"] / 60)


def test_a_workload_that_no_stage_can_hold_ends_with_64(model: Path) -> None:
    asked = plan("--parent", str(model), "--train-rows", "400000000")
    assert isinstance(asked.exception, BadConfig)
    assert "train, memory of a node" in str(asked.exception)
    assert "Breaks: train, memory of a node" in " ".join(asked.output.split())


def test_a_deadline_that_nothing_keeps_is_said(model: Path) -> None:
    scale = ask(
        parent=str(model),
        run=None,
        layers=[{"device": {"kind": "neuron"}, "train": {"query_length": 16, "buckets": [60]}, "embed": {"buckets": [60]}}],
        question=Question(train_rows=10**9, corpus_rows=10**9, deadline_hours=1e-6),
    ).scale
    assert scale is not None
    assert scale.best is None
    assert "None of these keeps" in str(scale._verdict()[0])


def test_no_rows_are_no_workload(model: Path) -> None:
    with pytest.raises(BadConfig, match="how much there is to do"):
        ask(parent=str(model), run=None, layers=[{"device": {"kind": "cpu"}}], question=Question(deadline_hours=1.0))


# ---- what a run measured ---------------------------------------------------------------------------------------------


def measured_run(tmp_path: Path, kind: str) -> str:
    """A run of 2 nodes whose results say how fast it was."""
    paths = RunPaths(f"{tmp_path}/bucket/runs/week-01")
    made = plan_training(paths, tmp_path / "local", ranks=64, nodes=2, rows=1500)
    world = made.world.model_copy(update={"kind": kind})
    embed = made.embed.model_copy(update={"rows": 9000, "children": 2})
    store.write_bytes(paths.plan, made.model_copy(update={"world": world, "embed": embed}).sealed().to_json())
    metrics: dict[Stage, dict[str, Any]] = {
        Stage.TRAIN: {"pairs_per_second": 4000.0, "checkpoints": 4, "checkpoint_stall_seconds": 6.0},
        Stage.EMBED: {"documents_per_second": 900.0, "documents": 9000, "tokens": 180_000, "padding": 0.2},
    }
    for stage, values in metrics.items():
        times = {"started": now(), "finished": now()}
        result = StageResult(stage=stage.value, run="week-01", status="done", fingerprint="", metrics=values, **times)
        store.write_bytes(paths.result(stage), result.to_json())
    lines = [{"step": 1, "data_wait_share": 0.02}, {"step": 2, "validation": {}}, {"step": 3, "data_wait_share": 0.04}]
    store.write_bytes(paths.metrics, "".join(json.dumps(line) + "\n" for line in lines).encode())
    deployment = {"allowed_nodes": [2, 6], "hosts": {"train": "trn1.32xlarge"}, "prices": {"train": 10.0}}
    store.write_json(paths.input, {"deployment": deployment, "execution": {}, "execution_arn": "arn"})
    return paths.root


def scale_of(run: str, **question: Any) -> Scale:
    scale = ask(parent=None, run=run, layers=[], question=Question(**question)).scale
    assert scale is not None
    return scale


def test_a_run_on_neuron_is_as_fast_again_as_it_was(tmp_path: Path) -> None:
    scale = scale_of(measured_run(tmp_path, "neuron"), train_rows=51_200_000, corpus_rows=6_400_000)
    assert [offer.count for offer in scale.trains] == [2, 6]
    again = scale.trains[0]
    # 512 pairs a step on 64 ranks: as many per second as measured, and a stop of 1.5 s after every sixth step.
    stalls = -(-100_000 // 6) * 1.5
    assert again.hours * 3600 - stalls == pytest.approx(51_200_000 / 4000, rel=0.01)
    assert again.usd == pytest.approx(again.hours * 2 * 10.0)
    # 64 ranks embedded 900 documents of 25 tokens with padding per second: on 32 it takes twice as long.
    embeds = {(offer.host, offer.count): offer for offer in scale.embeds}
    assert embeds["trn1.32xlarge", 1].hours * 3600 == pytest.approx(6_400_000 / 450, rel=0.01)
    words = " ".join(scale.assumptions)
    for expected in ("measured: run week-01, 4,000 pairs/s on 2 nodes", "900 documents/s on 64 cores", "for data 3.0%", "1.50 s"):
        assert expected in words, expected
    assert "embedding on inf2: 31.5% of the peak (published" in words


def test_a_run_on_another_kind_says_nothing_of_neuron(tmp_path: Path) -> None:
    scale = scale_of(measured_run(tmp_path, "cpu"), deadline_hours=12.0)
    words = " ".join(scale.assumptions)
    assert "the run was on cpu" in words
    assert "measured: run" not in words
    # Its rows and lengths count all the same.
    assert (scale.work.train_rows, scale.work.corpus_rows) == (1500, 9000)
    assert scale.work.document_tokens == 20
    # 20 tokens a document and a fifth of padding, in rows of the shortest length that holds one.
    assert scale.work.embed_lengths == {32: pytest.approx(25 / 32)}
