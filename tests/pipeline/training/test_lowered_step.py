"""What 64 ranks would compile, without one: collectives with their real size, the same on every rank, and what changes them."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.backends.hlo import GraphDescription, difference
from tests.pipeline.training.conftest import Lowering

pytestmark = pytest.mark.long

FAMILIES, LAYERS = ("bert", "xlm-roberta", "mpnet", "modernbert"), (2, 5)
"""As tests.pipeline.training.lowered has them, which loads torch-xla."""

ACROSS_64 = {"all-gather x64": 1, "all-reduce x64": 2, "reduce-scatter x64": 1}
"""Embeddings are gathered, and scattered again by the backward pass; gradients are reduced, and beside them the loss."""


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
    [
        ("rank 5", "rank 0"),
        ("rank 63", "rank 0"),
        ("checkpointed, rank 63", "checkpointed"),
        ("cut, rank 63", "cut"),
        ("sharded, rank 63", "sharded"),
        ("bf16 weights, rank 63", "bf16 weights"),
        ("sizes, rank 63", "sizes"),
        ("classes, rank 63", "classes"),
    ],
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


def test_the_learning_rate_is_data(lowering: Lowering) -> None:
    assert fingerprints(lowering, "rate") == fingerprints(lowering, "rank 0")


def test_matryoshka_sizes_share_one_gather(lowering: Lowering) -> None:
    """Prefixes are taken of what all ranks have gathered, and nothing is updated in place."""
    assert collectives(lowering, "sizes") == collectives(lowering, "rank 0")
    (backward, update), (plain, same) = (lowering["lowered"][name] for name in ("sizes", "rank 0"))
    # The scores of each size, and their gradients with respect to queries and documents.
    assert backward["operations"]["dot"] == plain["operations"]["dot"] + 2 * 3
    assert backward["operations"]["scatter"] == 1
    assert "dynamic-update-slice" not in backward["operations"]
    assert update["fingerprint"] == same["fingerprint"]


@pytest.mark.parametrize("name", ["classes", "classes, sharded"])
def test_a_task_with_classes_has_one_graph_more(name: str, lowering: Lowering) -> None:
    """A backward graph for pairs and one for each task, which meets no other rank's embeddings; all share the update."""
    pairs, update, color, again, size, third = fingerprints(lowering, name)
    assert update == again == third
    assert len({pairs, color, size}) == 3
    of_pairs, _, of_color, _, of_size, _ = collectives(lowering, name)
    assert of_pairs["all-gather x64"] == 1
    assert "all-gather x64" not in of_color
    assert of_color == of_size


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


def test_sharded_gradients_are_scattered_and_weights_gathered(lowering: Lowering) -> None:
    """Two vectors, of weights with decay and without; besides, the embeddings and the loss, and the norm of all shares."""
    backward = {**ACROSS_64, "all-reduce x64": 1, "reduce-scatter x64": 3}
    update = {"all-gather x64": 2, "all-reduce x64": 1}
    assert collectives(lowering, "sharded") == [backward, update]
    without = {name: count for name, count in ACROSS_64.items() if not name.startswith("all-reduce")}
    assert collectives(lowering, "sharded, accumulation") == [without, backward, update]


def test_sharded_graphs_put_out_a_share_of_the_state(lowering: Lowering) -> None:
    """Of 21,856 weights with decay and 768 without, 64 ranks have 342 and 12 each: both moments, and the weights themselves."""
    outputs = lowering["lowered"]["sharded"][1]["outputs"]
    assert (outputs["f32[342]"], outputs["f32[12]"]) == (3, 3)
    whole = lowering["lowered"]["rank 0"][1]["outputs"]
    assert (whole["f32[21856]"], whole["f32[768]"]) == (2, 2)


def test_bf16_weights_and_their_gradients_travel_in_bf16(lowering: Lowering) -> None:
    """Both vectors; what the optimizer computes with is a share in fp32."""
    backward, update = lowering["lowered"]["bf16 weights"]

    assert sorted(backward["vectors"]) == [["reduce-scatter", "bf16", size] for size in (12, 342)]
    assert sorted(update["vectors"]) == [["all-gather", "bf16", 64 * size] for size in (12, 342)]
    assert (update["outputs"]["f32[342]"], update["outputs"]["f32[12]"]) == (3, 3)


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sharded", ["", ", sharded"])
def test_only_word_embeddings_scatter(family: str, layers: int, sharded: str, lowering: Lowering) -> None:
    """Queries and documents share one forward pass, and which text is whose is a product, too."""
    backward, update = lowering["lowered"][f"{family}, {layers} layers{sharded}"]
    assert backward["operations"]["scatter"] == 1
    assert not {"scatter", "dynamic-update-slice"} & update["operations"].keys()
    assert "dynamic-update-slice" not in backward["operations"]


def test_frozen_words_leave_nothing_to_scatter(lowering: Lowering) -> None:
    backward, update = lowering["lowered"]["frozen words"]
    assert "scatter" not in backward["operations"] | update["operations"]
    assert "f32[105,32]" not in update["outputs"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sharded", ["", ", sharded"])
def test_the_optimizer_does_not_grow_with_the_layers(family: str, sharded: str, lowering: Lowering) -> None:
    """Of a parameter, the update has what cuts and shapes it; arithmetic is that of whole vectors."""
    few, many = (lowering["lowered"][f"{family}, {layers} layers{sharded}"][1]["operations"] for layers in LAYERS)
    moved = {"slice", "reshape", "get-tuple-element", "tuple"}
    assert {name: count for name, count in few.items() if name not in moved} == {
        name: count for name, count in many.items() if name not in moved
    }
    assert many.get("power", 0) <= 4
    assert many["constant"] <= 30


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sharded", ["", ", sharded"])
def test_gradients_that_add_up_bring_no_constants_of_their_own(family: str, sharded: str, lowering: Lowering) -> None:
    """A scale and a zero for each would be two of a parameter: hundreds of a large encoder."""
    few, many = (lowering["lowered"][f"{family}, {layers} layers, cut{sharded}"][-1]["operations"] for layers in LAYERS)
    assert few["constant"] == many["constant"] <= 31


def test_every_gradient_of_several_ranks_is_scaled_to_a_mean(lowering: Lowering) -> None:
    gang, alone = (lowering["lowered"][name][-1]["operations"]["multiply"] for name in ("cut", "cut, alone"))
    assert gang - alone == 37  # parameters of the tiny model


def test_descriptions_count_what_the_text_says(lowering: Lowering) -> None:
    graphs = [graph for found in lowering["lowered"].values() for graph in found]
    assert all(graph["lines"] == sum(graph["operations"].values()) for graph in graphs)
    assert max(graph["lines"] for graph in graphs) > 1000
