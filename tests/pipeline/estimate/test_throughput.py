"""Hours and dollars: against published rates, and as arithmetic."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import BertConfig

from pipeline.config import ModelConfig, build_config
from pipeline.contract import Stage
from pipeline.cost import INSTANCE_HOUR
from pipeline.estimate.requirements import attempt_minutes
from pipeline.estimate.throughput import (
    CORE_FLOPS,
    EMBED_MFU,
    TRAIN_MFU,
    Estimator,
    Option,
    Rates,
    all_reduce_seconds,
    batch_flops,
    batch_pairs,
    cheapest,
    embed_mfu,
)
from pipeline.estimate.workload import Workload, rows_of
from pipeline.model.encoder import new_encoder
from pipeline.model.shape import shape_of
from pipeline.run_inputs import ModelShape

LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
RATES = Rates(train=0.5, train_source="", embed={"trn1": 0.5, "inf2": 0.25}, embed_source={})
WORK = Workload(
    train_rows=10_000_000,
    known_rows=10_000_000,
    corpus_rows=6_400_000,
    queries=0,
    candidates=0,
    query_tokens=10,
    document_tokens=100,
    embed_rows=1.0,
)


def bert(**config: Any) -> ModelShape:
    with torch.device("meta"):
        return shape_of(new_encoder(BertConfig(**config), ModelConfig()))


BASE = bert()


def estimator(rates: Rates = RATES, shape: ModelShape = BASE, **train: Any) -> Estimator:
    config = build_config({"train": train})
    return Estimator(shape=shape, config=config, rates=rates, prices=INSTANCE_HOUR, minutes=attempt_minutes({}))


@pytest.mark.parametrize(("nodes", "per_second"), [(1, 3827.0), (1, 3836.5), (16, 57_408.0), (16, 56_923.7)])
def test_training_is_as_fast_as_published(nodes: int, per_second: float) -> None:
    """BERT-Large, phase 1, of SDK 2.28 and 2.27, with the head of masked-language pretraining at all positions."""
    head = 2.0 * 128 * (1024 * 1024 + 1024 * 30_522)
    flops = 3 * (bert(**LARGE).flops(128) + head)
    assert nodes * 32 * CORE_FLOPS * TRAIN_MFU / flops == pytest.approx(per_second, rel=0.01 if nodes == 1 else 0.1)


@pytest.mark.parametrize(
    ("family", "layers", "hidden", "published", "tolerance"),
    [
        ("trn1", 12, 768, 3421.6, 0.02),
        ("trn1", 24, 1024, 1104.4, 0.02),
        ("inf2", 12, 768, 2674.2, 0.02),
        ("inf2", 24, 1024, 950.0, 0.02),
        # The same tables' distilbert-base, roberta-base, roberta-large.
        ("trn1", 6, 768, 6281.1, 0.1),
        ("trn1", 12, 768, 3377.8, 0.1),
        ("trn1", 24, 1024, 1123.9, 0.1),
        ("inf2", 6, 768, 5307.9, 0.1),
        ("inf2", 12, 768, 2920.4, 0.1),
        ("inf2", 24, 1024, 962.7, 0.1),
    ],
)
def test_inference_is_as_fast_as_published(family: str, layers: int, hidden: int, published: float, tolerance: float) -> None:
    model = replace(BASE, multiplied=layers * 12 * hidden**2, layers=layers, hidden=hidden)
    assert 2 * CORE_FLOPS * embed_mfu(family, hidden) / model.flops(128) == pytest.approx(published, rel=tolerance)


def test_a_narrower_model_has_the_rate_of_the_next_narrower_published_one() -> None:
    assert [embed_mfu("inf2", width) for width in (384, 768, 1000, 1024, 4096)] == [0.31, 0.31, 0.31, 0.39, 0.39]
    assert EMBED_MFU.keys() == Rates.published(384).embed.keys()
    assert Rates.published(768).train < Rates.published(1024).train == TRAIN_MFU


def test_a_batch_has_room_for_fewer_pairs_where_a_task_has_longer_queries() -> None:
    long = replace(WORK, query_tokens=120)
    tasks = {"batch_by": "task", "tasks": {"label": {"classes": ["a", "b"], "query_length": 128}}}
    trains = (tasks, {"query_length": 128}, {})
    pairs = [batch_pairs(build_config({"train": train, "data": {"holdout_by": "query"}}), long) for train in trains]
    assert pairs[0] == pairs[1] < pairs[2]


def test_hours_of_training_follow_from_operations_and_peak() -> None:
    option = estimator().train(WORK, 2)
    pairs = batch_pairs(build_config(), WORK)
    # Room for 8,192 tokens, of which two in a hundred are padding.
    assert pairs == pytest.approx(min(128, 8192 * 0.98 / (WORK.query_tokens + WORK.document_tokens)))
    steps = math.ceil(WORK.train_rows / (64 * pairs))
    flops = batch_flops(BASE, build_config(), 64)
    forward = 32 * BASE.flops(256) + 2 * 128 * 128 * 64 * 768
    # In micro-batches, each of which is embedded once more.
    assert flops == 4 * forward
    assert option.items["computing"] * 3600 == pytest.approx(steps * 64 * flops / (64 * 95e12 * 0.5))
    shorter = batch_flops(BASE, build_config({"train": {"dimensions": [256, 64]}}), 64)
    assert shorter - flops == pytest.approx(4 * 2 * 128 * 128 * 64 * (256 + 64))
    # 109M gradients of 4 bytes, once around a ring of two nodes at 100 GB/s.
    assert all_reduce_seconds(BASE.parameters, 2) == pytest.approx(4 * BASE.parameters / 100e9)
    assert option.items["all-reduce of gradients"] * 3600 == pytest.approx(steps * 4 * BASE.parameters / 100e9)
    assert option.usd == pytest.approx(option.node_hours * 21.5) == pytest.approx(option.hours * 2 * 21.5)
    computing = [
        estimator(**train).train(WORK, 2).items["computing"]
        for train in ({"activation_checkpointing": True}, {"micro_batches": 1})
    ]
    assert computing == pytest.approx([option.items["computing"] * 5 / 4, option.items["computing"] * 3 / 4])
    assert estimator(epochs=2).train(WORK, 2).hours == pytest.approx(2 * option.hours)
    # So many steps are trained, however many rows there are.
    assert estimator(steps=10).train(WORK, 2).hours == pytest.approx(option.hours * 10 / steps)
    stalled = estimator(replace(RATES, stall=3.6), checkpoint_every=1000).train(WORK, 2)
    assert stalled.items["checkpoints"] == pytest.approx(3 * 3.6 / 3600)


def test_more_nodes_are_faster_and_more_expensive() -> None:
    options = [estimator().train(WORK, nodes) for nodes in (1, 2, 4, 16)]
    assert [option.hours for option in options] == sorted((option.hours for option in options), reverse=True)
    assert [option.usd for option in options] == sorted(option.usd or 0.0 for option in options)


def test_the_rank_with_most_parts_decides_how_long_embedding_takes() -> None:
    # 64 parts of 100,000 rows: two for each of 32 ranks, one for each of 64.
    hours = [estimator().embed(WORK, "trn1.32xlarge", children).hours for children in (1, 2)]
    assert hours[0] == pytest.approx(2 * hours[1])
    # 128 parts of half as many, two for some of 96.
    assert estimator().embed(WORK, "trn1.32xlarge", 3).hours == pytest.approx(hours[1])
    assert estimator().embed(replace(WORK, corpus_rows=5), "inf2.xlarge", 64).count == 8


def test_embedding_waits_for_what_it_reads() -> None:
    small = replace(BASE, multiplied=1, layers=1, hidden=1)
    option = estimator(shape=small).embed(WORK, "inf2.xlarge", 1)
    assert option.items["waiting for tokens"] > option.items["computing"]
    measured = replace(RATES, with_input=frozenset({"inf2"}))
    assert estimator(measured, small).embed(WORK, "inf2.xlarge", 1).items["waiting for tokens"] == 0


def options(stage: Stage, *values: tuple[float, float | None]) -> list[Option]:
    return [
        Option(stage=stage, host="h", count=index, hours=hours, limit_hours=12 if stage is Stage.EMBED else 24, usd=usd, items={})
        for index, (hours, usd) in enumerate(values)
    ]


@pytest.mark.parametrize(("deadline", "expected"), [(None, (0, 0)), (12.0, (0, 0)), (8.0, (1, 0)), (3.5, (2, 1)), (2.0, None)])
def test_the_cheapest_that_meets_the_deadline(deadline: float | None, expected: tuple[int, int] | None) -> None:
    trains = options(Stage.TRAIN, (8.0, 10.0), (4.0, 11.0), (2.0, 14.0), (30.0, 1.0), (0.1, None))
    embeds = options(Stage.EMBED, (2.0, 5.0), (1.0, 6.0), (13.0, 1.0))
    found = cheapest(trains, embeds, deadline)
    assert (found and (found[0].count, found[1].count)) == expected


def test_an_attempt_ends_when_the_deployment_says() -> None:
    minutes = attempt_minutes({Stage.TRAIN: 30})
    assert (minutes[Stage.TRAIN], minutes[Stage.EMBED]) == (30, 12 * 60)
    option = replace(estimator(), minutes=minutes).train(WORK, 1)
    assert option.limit_hours == 0.5
    assert option.within_limit == (option.hours <= 0.5)


def test_a_text_takes_a_share_of_a_row() -> None:
    assert rows_of(20, 64, 0.2) == pytest.approx(25 / 64)
    assert rows_of(100, 64, 0.0) == 1.0
