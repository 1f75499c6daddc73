"""What 64 ranks would compile, without one: collectives with their real size, the same on every rank, and what changes them."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.backends.hlo import GraphDescription, difference
from tests.pipeline.training.conftest import Lowering

pytestmark = pytest.mark.long

ACROSS_64 = {"all-gather x64": 1, "all-reduce x64": 2, "reduce-scatter x64": 1}
"""Embeddings are gathered, and scattered again by the backward pass; gradients are reduced, and beside them the loss."""

SCATTERS = 3
"""Of the embeddings of words, positions and token types."""


def fingerprints(lowering: Lowering, name: str) -> list[str]:
    return [graph["fingerprint"] for graph in lowering["lowered"][name]]


def collectives(lowering: Lowering, name: str) -> list[dict[str, int]]:
    return [graph["collectives"] for graph in lowering["lowered"][name]]


def described(graph: dict[str, Any]) -> GraphDescription:
    return GraphDescription(**{name: graph[name] for name in GraphDescription.__dataclass_fields__})


def test_collectives_span_all_ranks(lowering: Lowering) -> None:
    assert collectives(lowering, "rank 0") == [ACROSS_64, {}]
    assert collectives(lowering, "32 ranks")[0] == {name.replace("64", "32"): count for name, count in ACROSS_64.items()}
    assert collectives(lowering, "alone") == [{}, {}]


@pytest.mark.parametrize(
    ("rank", "zero"),
    [("rank 5", "rank 0"), ("rank 63", "rank 0"), ("checkpointed, rank 63", "checkpointed"), ("cut, rank 63", "cut")],
)
def test_every_rank_compiles_the_same(rank: str, zero: str, lowering: Lowering) -> None:
    assert fingerprints(lowering, rank) == fingerprints(lowering, zero)


def test_a_rank_in_the_graph_would_be_seen(lowering: Lowering) -> None:
    (backward, update), (other, same) = lowering["planted"]
    assert backward["fingerprint"] != other["fingerprint"]
    assert update["fingerprint"] == same["fingerprint"]
    assert "slice" in difference(described(other), [described(backward)])


@pytest.mark.parametrize("name", ["32 ranks", "alone", "batch", "length", "checkpointed", "bf16"])
def test_what_is_in_the_backward_graph_only(name: str, lowering: Lowering) -> None:
    """Ranks, shapes and precision; the optimizer's graph is one and the same for all of them."""
    backward, update = fingerprints(lowering, "rank 0")
    other_backward, other_update = fingerprints(lowering, name)
    assert backward != other_backward
    assert update == other_update


def test_autocast_leaves_the_optimizer_alone(lowering: Lowering) -> None:
    """Weights, moments and all of their arithmetic are fp32, whatever products are computed in."""
    backward, update = lowering["lowered"]["bf16"]
    assert "bf16" in backward["types"]
    assert update["types"] == ["f32"]


def test_only_word_embeddings_are_gathered_and_scattered(lowering: Lowering) -> None:
    """Which text is whose is a product with ones and zeros, so its gradient is one too."""
    backward, update = lowering["lowered"]["rank 0"]
    assert backward["operations"]["scatter"] <= SCATTERS
    assert "scatter" not in update["operations"]


def test_the_learning_rate_is_data(lowering: Lowering) -> None:
    assert fingerprints(lowering, "rate") == fingerprints(lowering, "rank 0")


def test_sync_points_cut_a_step(lowering: Lowering) -> None:
    assert collectives(lowering, "one sync") == [ACROSS_64]
    assert len(collectives(lowering, "rank 0")) == 2


def test_accumulation_has_three_graphs_and_reduces_once(lowering: Lowering) -> None:
    first, second, last, update = fingerprints(lowering, "accumulation")
    assert first == second
    assert len({first, last, update}) == 3
    without = {name: count for name, count in ACROSS_64.items() if not name.startswith("all-reduce")}
    assert collectives(lowering, "accumulation") == [without, without, ACROSS_64, {}]


def test_micro_batches_share_two_graphs(lowering: Lowering) -> None:
    """Embed; the loss, where ranks meet; backward; and the update, which reduces the gradients first."""
    loss = {name: count for name, count in ACROSS_64.items() if not name.startswith("all-reduce")}
    update = {name: count for name, count in ACROSS_64.items() if name.startswith("all-reduce")}
    embed, again, _, backward, twice, _ = found = fingerprints(lowering, "cut")
    assert (embed, backward) == (again, twice)
    assert len(set(found)) == 4
    assert collectives(lowering, "cut") == [{}, {}, loss, {}, {}, update]


def test_accumulation_in_micro_batches_has_no_graph_more(lowering: Lowering) -> None:
    found = fingerprints(lowering, "cut, accumulation")
    assert len(found) == 11
    assert found[5:10] == found[:5]
    assert len(set(found)) == 4


def test_micro_batches_are_cut_whatever_the_sync_points_are(lowering: Lowering) -> None:
    assert len(collectives(lowering, "cut, one sync")) == 6


def test_descriptions_count_what_the_text_says(lowering: Lowering) -> None:
    graphs = [graph for found in lowering["lowered"].values() for graph in found]
    assert all(graph["lines"] == sum(graph["operations"].values()) for graph in graphs)
    assert max(graph["lines"] for graph in graphs) > 1000
