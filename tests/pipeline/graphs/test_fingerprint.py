"""Which differences between two backbones name other compiled sets, and which do not."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import BertConfig, ModernBertConfig, PreTrainedConfig

from pipeline.config import build_config
from pipeline.graphs.fingerprint import plan_graphs
from pipeline.run_inputs import GraphsPlan, PlannedWorld

WORLD = PlannedWorld(nodes=1, ranks_per_node=1, kind="xla", precision="fp32")


def graphs_of(kind: type[PreTrainedConfig], **changes: Any) -> GraphsPlan | None:
    backbone = kind(vocab_size=100, pad_token_id=0, num_hidden_layers=4, **changes)
    return plan_graphs(build_config({"train": {"batch_size": 4}}), WORLD, backbone, "file:///bucket")


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (BertConfig, {"hidden_size": 24}),
        (BertConfig, {"layer_norm_eps": 1e-3}),
        (ModernBertConfig, {"local_attention": 64}),
        (ModernBertConfig, {"layer_types": ["full_attention"] * 4}),
        (ModernBertConfig, {"global_rope_theta": 10_000.0}),
        (ModernBertConfig, {"norm_eps": 1e-3}),
        (ModernBertConfig, {"norm_bias": True}),
        (ModernBertConfig, {"mlp_dropout": 0.1}),
        (ModernBertConfig, {"hidden_activation": "silu"}),
    ],
)
def test_what_shapes_a_graph_names_another_set(kind: type[PreTrainedConfig], changes: dict[str, Any]) -> None:
    before, after = graphs_of(kind), graphs_of(kind, **changes)
    assert before
    assert after
    assert before.train != after.train
    assert before.infer != after.infer


@pytest.mark.parametrize("kind", [BertConfig, ModernBertConfig])
def test_what_changes_every_week_does_not(kind: type[PreTrainedConfig]) -> None:
    assert graphs_of(kind) == graphs_of(kind, name_or_path="week-2", id2label={0: "a", 1: "b", 2: "c"})
