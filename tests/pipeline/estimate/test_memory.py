"""Memory by formula against what torch really holds, limits, refusals, and known runs that must be judged as they went."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import BertConfig, ModernBertConfig, MPNetConfig, PreTrainedConfig, XLMRobertaConfig

from pipeline.backends.device import Device, open_device
from pipeline.config import ModelConfig, RunConfig, build_config
from pipeline.errors import BadConfig
from pipeline.estimate import memory
from pipeline.estimate.memory import FP32, GIB, Budget, Footprint, MemoryCapacity
from pipeline.model.encoder import Encoder, checkpoint_activations, new_encoder, prepare_for_training
from pipeline.model.folder import load_encoder
from pipeline.model.shape import read_shape, shape_of
from pipeline.run.world import World
from pipeline.run_inputs import ModelShape, PlannedWorld
from pipeline.training.batches import packed_texts
from pipeline.training.step import RecentLosses, build_optimizer, train_step
from tests.tiny import Head, head_form, make_model

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
LARGER = {"hidden_size": 96, "num_hidden_layers": 5, "num_attention_heads": 6, "intermediate_size": 384}
UNKNOWN = MemoryCapacity(None, None)


def backbone(kind: type[PreTrainedConfig] = BertConfig, **changes: Any) -> PreTrainedConfig:
    return kind(**{"vocab_size": 300, "max_position_embeddings": 80, "pad_token_id": 0, **SMALL, **changes})


def settings(
    kind: str = "cpu", *, device: dict[str, Any] | None = None, embed: dict[str, Any] | None = None, **train: Any
) -> RunConfig:
    return build_config(
        {
            "device": {"kind": kind, **(device or {})},
            "train": {"batch_size": 8, "query_length": 16, "length": 64, **train},
            "embed": {"length": 64, "tokens_per_batch": 256, **(embed or {})},
        }
    )


def planned(kind: str = "cpu", precision: str = "fp32", ranks: int = 1, nodes: int = 1) -> PlannedWorld:
    return PlannedWorld(kind=kind, precision=precision, nodes=nodes, ranks_per_node=ranks)


def budget(budgets: list[Budget], stage: str, place: str) -> Budget:
    return next(found for found in budgets if (found.stage, found.place) == (stage, place))


def cast(precision: str) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16) if precision == "bf16" else nullcontext()


def kept_by_autograd(encoder: Encoder, rows: int, length: int, precision: str) -> int:
    """Bytes that a forward pass of some rows keeps for the backward pass, weights aside."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in encoder.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in weights:
            kept[place] = tensor
        return tensor

    tokens = torch.randint(5, 300, (rows, length))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), cast(precision):
        embeddings = encoder(tokens, torch.ones_like(tokens))
    assert embeddings.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("sizes", [SMALL, LARGER], ids=["small", "larger"])
@pytest.mark.parametrize("kind", [BertConfig, XLMRobertaConfig, MPNetConfig, ModernBertConfig])
@pytest.mark.parametrize("length", [16, 64])
def test_activations_are_what_autograd_keeps(
    kind: type[PreTrainedConfig], sizes: dict[str, int], fused: bool, precision: str, length: int
) -> None:
    # Dropout keeps less on CUDA, the only kind with fused attention, than it does here.
    dropout = 0.0 if fused else 0.1
    encoder = new_encoder(backbone(kind, **sizes), ModelConfig()).train()
    prepare_for_training(encoder, fused_attention=fused, dropout=dropout)
    config, world = settings(length=length, dropout=dropout), planned("cuda" if fused else "cpu", precision)
    shape = shape_of(encoder)
    footprint = Footprint(shape, config, world)
    predicted = footprint.activations() + (2 * shape.multiplied if precision == "bf16" else 0)
    # Whether a copy of ModernBERT's value is kept depends on the kernel.
    accuracy = 0.08 if kind is ModernBertConfig else 0.03
    assert predicted == pytest.approx(kept_by_autograd(encoder, footprint.tokens // length, length, precision), rel=accuracy)


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_activation_functions(activation: str) -> None:
    encoder = new_encoder(backbone(hidden_act=activation, intermediate_size=512), ModelConfig()).train()
    prepare_for_training(encoder, fused_attention=False)
    footprint = Footprint(shape_of(encoder), settings(), planned())
    assert footprint.activations() == pytest.approx(kept_by_autograd(encoder, 8, 64, "fp32"), rel=0.03)


@pytest.mark.parametrize("head", [None, 24, [{"out": 24, "activation": "relu"}, {"out": 8}]])
def test_parameters_and_optimizer_state_are_exact(tmp_path: Path, head: Head | None) -> None:
    make_model(tmp_path / "model", head=head)
    model = ModelConfig.model_validate({"head": head_form(head)})
    encoder, config = load_encoder(tmp_path / "model", model), settings()
    shape = read_shape(tmp_path / "model", model)
    assert shape == shape_of(encoder)
    assert shape.parameters == sum(parameter.numel() for parameter in encoder.parameters())
    device = open_device("cpu", "fp32", World(), threads=1)
    optimizer = build_optimizer(encoder.train(), config.train, device, adds_up=config.adds_up("cpu"))
    one_step(encoder, optimizer, device, config)
    state = [value for values in optimizer.state.values() for name, value in values.items() if name != "step"]
    items = Footprint(shape, config, planned()).training()
    assert items["optimizer state (AdamW, 2 x fp32)"] == sum(value.nbytes for value in state)
    assert items["weights (fp32)"] == items["gradients (fp32)"] == sum(parameter.nbytes for parameter in encoder.parameters())


def one_step(encoder: Encoder, optimizer: torch.optim.AdamW, device: Device, config: RunConfig) -> None:
    """A step of train.accumulation batches."""
    train, losses = config.train, RecentLosses(1, device)
    size, vocabulary, shape = train.batch_size, int(encoder.config.vocab_size), train.bin_shape
    rng = np.random.default_rng(0)
    # A query of 16 tokens and a document fill a row.
    pair = [rng.integers(5, vocabulary, length) for length in (train.query_length, train.length - train.query_length)]
    parts = train.bins if config.cuts_batches("cpu") else 1
    texts = packed_texts([[tuple(pair)] * shape.pairs] * (train.bins // parts), shape)
    batch = {
        **{f"{name}/{number}": tensor for number in range(parts) for name, tensor in texts.items()},
        "roles": torch.zeros(size, size, dtype=torch.int32).fill_diagonal_(1),
        "weights": torch.full((size,), 1 / size),
        "learning_rate": torch.tensor([1e-4]),
    }
    for number in range(train.accumulation):
        train_step(encoder, optimizer, device, batch, train, losses, seed_of=int, last=number == train.accumulation - 1)


@contextmanager
def allocations(before: int) -> Iterator[list[int]]:
    """Bytes that torch holds on the host after each allocation and release, in their order; `before` at first."""
    held = [before]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        yield held
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held.append(held[-1] + event.nbytes())


def peak_of_a_step(sizes: dict[str, int], changes: dict[str, Any]) -> tuple[int, int]:
    """The most bytes that torch holds in a step, and the estimate."""
    config, world = settings(**changes), planned()
    encoder = new_encoder(backbone(**sizes), ModelConfig()).train()
    prepare_for_training(encoder, fused_attention=False)
    device = open_device("cpu", "fp32", World(), threads=1)
    if config.train.activation_checkpointing:
        checkpoint_activations(encoder, device.checkpointed())
    optimizer = build_optimizer(encoder, config.train, device, adds_up=config.adds_up("cpu"))
    one_step(encoder, optimizer, device, config)
    weights = sum(parameter.nbytes for parameter in encoder.parameters())
    with allocations(weights * (4 if config.adds_up("cpu") else 3)) as held:
        one_step(encoder, optimizer, device, config)
    found = budget(memory.estimate_memory(shape_of(encoder), config, world, UNKNOWN), "train", "device")
    return max(held), found.total


@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        (SMALL, {}),
        (LARGER, {}),
        (LARGER, {"accumulation": 2}),
        (LARGER, {"micro_batches": 4}),
        (LARGER, {"micro_batches": 8, "activation_checkpointing": True, "batch_size": 32}),
        (LARGER, {"activation_checkpointing": True}),
        ({**SMALL, "num_hidden_layers": 24, "hidden_size": 48}, {"activation_checkpointing": True, "batch_size": 32}),
        # Weights outweigh activations, and the word embeddings all other weights.
        ({**SMALL, "vocab_size": 30_000}, {"batch_size": 2}),
        ({**SMALL, "vocab_size": 30_000}, {"batch_size": 2, "accumulation": 2}),
    ],
)
def test_the_peak_of_a_step(sizes: dict[str, int], changes: dict[str, Any]) -> None:
    held, estimated = peak_of_a_step(sizes, changes)
    # Gradients grow as activations go, but the estimate adds them up.
    assert held < estimated < 1.25 * held


def test_what_matryoshka_sizes_keep() -> None:
    """A large batch of short texts, whose scores outweigh what the encoder keeps."""
    sizes = {**SMALL, "num_hidden_layers": 1}
    changes = {"batch_size": 512, "length": 24, "query_length": 8, "batch_tokens": 512 * 24}
    (held, estimated), (more, estimated_more) = (
        peak_of_a_step(sizes, {**changes, "dimensions": dimensions}) for dimensions in ((), (24, 16, 8))
    )
    assert more - held < estimated_more - estimated < 1.25 * (more - held)


@pytest.mark.parametrize("length", [16, 64])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_peak_of_inference(length: int, precision: str) -> None:
    config = settings(embed={"length": length, "tokens_per_batch": 2048}, query_length=8)
    encoder = new_encoder(backbone(**LARGER), ModelConfig()).eval()
    found = budget(memory.estimate_memory(shape_of(encoder), config, planned(precision=precision), UNKNOWN), "embed", "device")
    tokens = torch.randint(5, 300, (2048 // length, length))
    with (
        allocations(sum(parameter.nbytes for parameter in encoder.parameters())) as held,
        torch.inference_mode(),
        cast(precision),
    ):
        encoder(tokens, torch.ones_like(tokens))
    assert max(held) < found.total < 1.25 * max(held)


# ---- judging ---------------------------------------------------------------------------------------------------------


def large(kind: type[PreTrainedConfig] = XLMRobertaConfig, **changes: Any) -> ModelShape:
    """XLM-R large (config.json of FacebookAI/xlm-roberta-large), 560M parameters."""
    config = kind(
        **{
            "vocab_size": 250_002,
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
            "max_position_embeddings": 514,
            "type_vocab_size": 1,
            "pad_token_id": 1,
            **changes,
        }
    )
    with torch.device("meta"):
        return shape_of(new_encoder(config, ModelConfig()))


def on_trainium(**train: Any) -> tuple[RunConfig, PlannedWorld, MemoryCapacity]:
    config = settings("neuron", embed={"tokens_per_batch": 4096, "length": 256}, **train)
    return config, planned("neuron", "bf16", ranks=32, nodes=2), memory.known_capacity(config, "neuron", here=False)


def test_a_small_batch_of_a_large_model_fits_a_neuron_core() -> None:
    config, world, limits = on_trainium(batch_size=8, length=128)
    budgets = memory.require_memory(large(), config, world, limits)
    assert {(found.stage, found.place): found.limit for found in budgets} == {
        (stage, place): limit for stage in ("train", "embed") for place, limit in (("device", 16 * GIB), ("host", 479 * GIB))
    }
    # Weights, gradients and AdamW's state alone: 16 bytes per parameter.
    assert budget(budgets, "train", "device").total > 16 * large().parameters


@pytest.mark.parametrize(("batch", "length"), [(16, 128), (2, 512)])
def test_bert_large_as_the_neuron_samples_train_it_fits(batch: int, length: int) -> None:
    """run_dp_bert_large_hf_pretrain_bf16_s128.sh and ..._s512_phase2.sh of aws-neuron-samples, `amp`: fp32 weights, autocast."""
    shape = large(BertConfig, vocab_size=30_522, max_position_embeddings=512, type_vocab_size=2, pad_token_id=0)
    config, _, limits = on_trainium(batch_size=batch, batch_tokens=batch * length, query_length=4, length=length, accumulation=32)
    memory.require_memory(shape, config, planned("neuron", "bf16", ranks=32), limits)


def with_train(config: RunConfig, **changes: Any) -> RunConfig:
    return config.model_copy(update={"train": config.train.model_copy(update=changes)})


def test_a_huge_micro_batch_is_refused_and_what_is_suggested_fits() -> None:
    shape = large()
    config, world, limits = on_trainium(batch_size=512, micro_batches=1, query_length=32, length=256)
    with pytest.raises(BadConfig) as caught:
        memory.require_memory(shape, config, world, limits)
    error = caught.value
    assert any("activations" in line for line in error.value)
    assert "16.00 GiB per rank's device" in error.rule
    (count,) = (int(part.split("=")[1].split()[0]) for part in error.remedy.split("; or ") if "train.micro_batches=" in part)
    memory.require_memory(shape, with_train(config, micro_batches=count), world, limits)
    with pytest.raises(BadConfig):
        memory.require_memory(shape, with_train(config, micro_batches=count // 2), world, limits)


@pytest.mark.parametrize("micro_batches", [None, 512])
def test_a_batch_whose_scores_are_too_large_is_refused(micro_batches: int | None) -> None:
    """No micro-batch helps: every rank has the scores of its queries with the documents of all ranks."""
    shape = large()
    config, world, limits = on_trainium(batch_size=4096, micro_batches=micro_batches, query_length=32, length=256)
    with pytest.raises(BadConfig) as caught:
        memory.require_memory(shape, config, world, limits)
    found = re.search(
        r"train\.batch_size=(\d+), train\.batch_tokens=(\d+), train\.micro_batches=(\d+) together fit", caught.value.remedy
    )
    assert found is not None, caught.value.remedy
    batch, tokens, count = map(int, found.groups())
    assert 1 < batch < 4096
    assert tokens == 64 * batch
    suggested = with_train(config, batch_size=batch, batch_tokens=tokens, micro_batches=count)
    memory.require_memory(shape, suggested, world, limits)
    with pytest.raises(BadConfig):
        memory.require_memory(shape, with_train(suggested, batch_size=2 * batch, batch_tokens=2 * tokens), world, limits)


def test_every_remedy_is_enough_by_itself() -> None:
    shape = large()
    config, world, limits = on_trainium(batch_size=96, micro_batches=1, length=256)
    found = memory.remedies(shape, config, world, limits)
    assert found == ["train.activation_checkpointing=true fits", "train.micro_batches=4 fits"]
    for changes in ({"activation_checkpointing": True}, {"micro_batches": 4}):
        memory.require_memory(shape, with_train(config, **changes), world, limits)


def test_batches_of_embedding_are_judged_too() -> None:
    config, world, limits = on_trainium(batch_size=1, length=64)
    config = config.model_copy(update={"embed": config.embed.model_copy(update={"tokens_per_batch": 1 << 20})})
    with pytest.raises(BadConfig) as caught:
        memory.require_memory(large(), config, world, limits)
    assert "embed.tokens_per_batch=" in caught.value.remedy


@pytest.mark.parametrize("batch", [512, 4096])
def test_both_may_have_to_shrink(batch: int) -> None:
    config, world, limits = on_trainium(batch_size=batch, length=256)
    config = config.model_copy(update={"embed": config.embed.model_copy(update={"tokens_per_batch": 1 << 20})})
    (remedy,) = memory.remedies(large(), config, world, limits)
    assert "together fit" in remedy
    assert remedy.startswith("train.batch_size=1, ")
    config = config.model_copy(update={"embed": config.embed.model_copy(update={"tokens_per_batch": 256})})
    changes = {"batch_size": 1, "activation_checkpointing": True}
    memory.require_memory(large(), with_train(config, **changes), world, limits)


def test_ranks_that_load_at_once_exhaust_a_host() -> None:
    config, world, _ = on_trainium(batch_size=1, length=64)
    with pytest.raises(BadConfig) as caught:
        memory.require_memory(large(), config, world, MemoryCapacity(16 * GIB, 64 * GIB))
    assert "while the model is loaded" in caught.value.value[0]
    assert "64.00 GiB per node's host" in caught.value.rule
    assert caught.value.remedy.startswith("device.ranks_per_node=")
    ranks = int(caught.value.remedy.split("=")[1].split()[0])
    memory.require_memory(large(), config, world.model_copy(update={"ranks_per_node": ranks}), MemoryCapacity(16 * GIB, 64 * GIB))


def test_hosts_that_embed_have_ranks_of_their_own() -> None:
    as_training, fewer = (
        memory.estimate_memory(large(), settings(embed={"ranks_per_child": ranks}), planned(ranks=8), UNKNOWN)
        for ranks in (None, 2)
    )
    assert budget(fewer, "train", "host") == budget(as_training, "train", "host")
    two = memory.estimate_memory(large(), settings(), planned(ranks=2), UNKNOWN)
    assert budget(fewer, "embed", "host") == budget(two, "embed", "host") != budget(as_training, "embed", "host")


def test_nothing_makes_a_giant_fit() -> None:
    config, world, limits = on_trainium(batch_size=8)
    with pytest.raises(BadConfig) as caught:
        memory.require_memory(large(num_hidden_layers=100), config, world, limits)
    assert "smaller model" in caught.value.remedy


@pytest.mark.parametrize(
    ("change", "grows"),
    [
        ({"batch_size": 32}, False),
        ({"batch_tokens": 6144}, True),
        ({"accumulation": 2}, True),
        ({"activation_checkpointing": True}, False),
        ({"dropout": 0.0}, False),
        ({"freeze_word_embeddings": True}, False),
        ({"micro_batches": 2}, False),
    ],
)
@pytest.mark.parametrize("kind", ["cpu", "cuda", "xla", "neuron"])
def test_what_settings_do(kind: str, change: dict[str, Any], grows: bool) -> None:
    shape, world = large(num_hidden_layers=4, vocab_size=1000), planned(kind, "bf16", ranks=2)
    common: dict[str, Any] = {"length": 64, "batch_size": 64, "micro_batches": 1, "query_length": 16}
    before, after = (
        sum(Footprint(shape, settings(kind, **changed), world).training().values()) for changed in (common, {**common, **change})
    )
    assert (after > before) == grows
    assert after != before


@pytest.mark.parametrize("kind", ["cpu", "cuda", "xla", "neuron"])
def test_activations_are_those_of_a_micro_batch(kind: str) -> None:
    shape, world = large(num_hidden_layers=4, vocab_size=1000), planned(kind, "bf16", ranks=2)
    eight, whole, cut = (
        Footprint(shape, settings(kind, length=64, **changes), world)
        for changes in ({"batch_size": 8}, {"batch_size": 64, "micro_batches": 1}, {"batch_size": 64, "micro_batches": 8})
    )
    assert cut.activations() == eight.activations() == whole.activations() // 8
    # The loss is still over the whole batch.
    assert cut.scores() == whole.scores()
    assert cut.batches(1) == whole.batches(1)


HALF_A_BILLION = replace(large(), parameters=500_000_000)


@pytest.mark.parametrize(("bf16", "least", "most"), [(False, 4.0e9, 4.3e9), (True, 2.2e9, 2.4e9)])
def test_a_large_model_shares_its_optimizer_state(bf16: bool, least: float, most: float) -> None:
    """On one node of 32 cores, in fp32: 2 GB of weights, as many gradients, and a share of the rest. In bf16, half of both."""
    config, _, limits = on_trainium(batch_size=8, length=64, bf16_weights=bf16)
    world, kept = planned("neuron", "bf16", ranks=32), "bf16" if bf16 else "fp32"
    decided = memory.decide_sharding(config, HALF_A_BILLION, world, limits)
    assert decided.train.shard_optimizer is True
    items = Footprint(HALF_A_BILLION, decided, world).training()
    counted = (f"weights ({kept})", "share of", f"gradients ({kept})")
    assert least < sum(size for name, size in items.items() if name.startswith(counted)) < most
    memory.require_memory(HALF_A_BILLION, decided, world, limits)


@pytest.mark.parametrize(("sharded", "precision", "ranks"), [("auto", "bf16", 1), ("auto", "fp32", 32), (False, "bf16", 32)])
def test_what_bf16_weights_need(sharded: str | bool, precision: str, ranks: int) -> None:
    config, _, limits = on_trainium(bf16_weights=True, shard_optimizer=sharded)
    with pytest.raises(BadConfig, match="cannot keep weights in bf16"):
        memory.decide_sharding(config, HALF_A_BILLION, planned("neuron", precision, ranks=ranks), limits)


@pytest.mark.parametrize(
    ("changes", "ranks", "capacity", "sharded"),
    [
        ({}, 32, 16 * GIB, True),
        ({}, 32, 64 * GIB, False),
        ({}, 2, 16 * GIB, False),
        ({}, 3, 16 * GIB, True),
        ({}, 32, None, False),
        ({"shard_optimizer": False}, 32, 16 * GIB, False),
        ({"shard_optimizer": True}, 32, None, True),
    ],
)
def test_when_the_state_is_shared(changes: dict[str, Any], ranks: int, capacity: int | None, sharded: bool) -> None:
    config = settings("neuron", **changes)
    found = memory.decide_sharding(config, large(), planned("neuron", ranks=ranks), MemoryCapacity(capacity, None))
    assert found.train.shard_optimizer is sharded
    assert found.model_copy(update={"train": config.train}) == config


def test_a_share_is_what_a_rank_holds() -> None:
    """The same of two ranks: the second one's moments and weights, and its gradients between two graphs."""
    config = settings(shard_optimizer=True)
    encoder = new_encoder(backbone(**LARGER), ModelConfig())
    device = open_device("cpu", "fp32", World(), threads=1)
    device.world = World(rank=1, size=2)
    optimizer = build_optimizer(encoder, config.train, device)
    held = sum(vector.nbytes for vectors in optimizer.state.values() for vector in vectors.values())
    items = Footprint(shape_of(encoder), config, planned(ranks=2)).training()
    assert items["share of the optimizer state (AdamW, 4 x fp32)"] == pytest.approx(held * 4 / 3, rel=1e-4)


def test_frozen_words_have_weights_alone() -> None:
    shape, world = large(), planned("neuron", "bf16", ranks=32)
    before, after = (
        Footprint(shape, settings("neuron", freeze_word_embeddings=frozen), world).training() for frozen in (False, True)
    )
    words = FP32 * 250_002 * 1024
    assert shape.words == words // FP32
    changed = {name: before[name] - after[name] for name in before if before[name] != after[name]}
    assert changed == {
        "optimizer state (AdamW, 2 x fp32)": 2 * words,
        "gradients (fp32)": words,
        "work space of the optimizer": words - FP32 * 4096 * 1024,
    }


# ---- capacity --------------------------------------------------------------------------------------------------------


def test_limits_are_the_settings_or_the_kinds() -> None:
    assert memory.known_capacity(settings("neuron"), "neuron", here=False) == MemoryCapacity(16 * GIB, 479 * GIB)
    assert memory.known_capacity(settings("cpu"), "cpu", here=False) == UNKNOWN
    given = settings("cpu", device={"host_memory_gib": 2.5})
    assert memory.known_capacity(given, "cpu", here=False) == MemoryCapacity(None, int(2.5 * GIB))
    assert memory.known_capacity(given, "cpu", here=True) == MemoryCapacity(None, int(2.5 * GIB))
    given = settings("neuron", device={"memory_gib": 24})
    assert memory.known_capacity(given, "neuron", here=False).device == 24 * GIB
    assert memory.known_capacity(settings("cuda", device={"memory_gib": 80}), "cuda", here=False) == MemoryCapacity(
        80 * GIB, None
    )


def test_here_is_at_most_what_the_machine_has() -> None:
    here = memory.known_capacity(settings("cpu"), "cpu", here=True).host
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    assert here is not None
    assert 0 < here <= int(total.split()[1]) * 1024
