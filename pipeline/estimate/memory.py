"""The memory that a run requires on each rank's device and each node's host, from the model's shape and the settings alone.

Training keeps 16 bytes per parameter (fp32 weights and gradients, AdamW's two moments; 8 and a share of 16 where ranks share the
optimizer's state) and the activations of one micro-batch: the tensors that Korthikanti et al. 2022 count for a transformer layer
("Reducing Activation Recomputation in Large Transformer Models", section 4.1), in the widths that fp32 and torch's autocast give
them. tests/pipeline/estimate/test_memory.py compares both with what torch allocates (to 3 %, ModernBERT to 8 %). Not counted,
because only the hardware can tell: a compiler's spills and programs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.config import RunConfig
from pipeline.config.sections import PREFETCH_BATCHES
from pipeline.contract import EAGER_KINDS, HOST_KINDS
from pipeline.cost import HARDWARE
from pipeline.errors import BadConfig
from pipeline.run_inputs import ModelShape, PlannedWorld

Items = dict[str, int]
"""Purpose of the memory -> bytes."""

MIB, GIB = 1 << 20, 1 << 30
FP32, BF16 = 4, 2

TRAIN_HOST = "trn1.32xlarge"
NEURON_DEVICE_BYTES = 16 * GIB
"""Memory of a NeuronCore-v2: 32 GiB per chip of two cores, on Trn1 and Inf2 (Neuron docs, arch/neuron-hardware/trainium.rst)."""

NEURON_RESERVED_BYTES = 1 * GIB
"""Reserved on a NeuronCore: microcode, the unused end of the last 512 MiB scratchpad page (Neuron docs, neuron-runtime/explore/
device-memory.rst), and gradient buckets of at most 512 MiB in an all-reduce."""

PROCESS_BYTES, LIBRARY_BYTES = 485 * MIB, 425 * MIB
"""A rank's own memory before it loads a model, and the libraries that a host's ranks share: RssAnon and RssFile of torch-xla
2.9.0 after a first program (torch 2.9.1 alone: 415 and 345 MiB)."""

EMBED_WINDOW_BYTES = 512 * MIB
"""An allowance for what a rank of embed holds at a time: 16,384 texts of 256 tokens as Python integers, with embeddings of 1,024
dimensions, take 0.47 GiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The memory that one stage requires in one place at its worst moment.

    Attributes:
        stage: `train` or `embed` (evaluate is like embed).
        place: `device` (of a rank) or `host` (of a node).
        moment: when the most is required.
        items: what the memory is for.
        limit: the capacity in bytes; None: unknown, and not judged.
    """

    stage: str
    place: str
    moment: str
    items: Items
    limit: int | None

    @property
    def total(self) -> int:
        return sum(self.items.values())

    @property
    def fits(self) -> bool:
        return self.limit is None or self.total <= self.limit

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "total": self.total, "fits": self.fits}


@dataclass(frozen=True, slots=True)
class MemoryCapacity:
    """Bytes of a rank's device and of a node's host; None: unknown."""

    device: int | None
    host: int | None


def known_capacity(config: RunConfig, kind: str, *, here: bool) -> MemoryCapacity:
    """Return the memory that there is: as configured, else the device type's, else unknown.

    Args:
        here: the ranks run on this host, whose memory is the capacity.
    """
    device, host = (None if gib is None else int(gib * GIB) for gib in (config.device.memory_gib, config.device.host_memory_gib))
    if kind == "neuron":
        return MemoryCapacity(device or NEURON_DEVICE_BYTES, host or HARDWARE[TRAIN_HOST].job_memory_mib * MIB)
    if kind == "cuda" and device is None:
        import torch

        device = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    return MemoryCapacity(None if kind in HOST_KINDS else device, host or (this_host_bytes() if here else None))


def this_host_bytes() -> int:
    """Return the memory of this machine, or of its container if that has less."""
    paths = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")
    limits = [path.read_text().strip() for path in paths if path.is_file()]
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *(int(limit) for limit in limits if limit.isdigit())])


def decide_sharding(config: RunConfig, shape: ModelShape, world: PlannedWorld, capacity: MemoryCapacity) -> RunConfig:
    """Return the configuration with `train.shard_optimizer` decided where it is `auto`: weights, gradients and moments of every
    parameter would take more than a quarter of a device."""
    bf16 = config.train.bf16_weights
    if bf16 and (world.ranks == 1 or world.precision != "bf16" or config.train.shard_optimizer is False):
        raise BadConfig(
            "the plan cannot keep weights in bf16",
            value=f"{world.ranks} ranks, precision {world.precision}, train.shard_optimizer = {config.train.shard_optimizer}",
            rule="train.bf16_weights: several ranks share the fp32 weights, and products are in bf16",
            remedy="set device.precision=bf16, several ranks, and no train.shard_optimizer; or leave train.bf16_weights out",
        )
    if config.train.shard_optimizer != "auto":
        return config
    # A share has weights and gradients besides the moments: half of 16 bytes saves nothing.
    sharded = bf16 or (world.ranks > 2 and capacity.device is not None and 4 * FP32 * shape.parameters > capacity.device // 4)
    return config.model_copy(update={"train": config.train.model_copy(update={"shard_optimizer": sharded})})


# ---- requirements ----------------------------------------------------------------------------------------------------


def estimate_memory(shape: ModelShape, config: RunConfig, world: PlannedWorld, capacity: MemoryCapacity) -> list[Budget]:
    """Return the budgets of each device and each node; on `cpu` and `xla` the devices' memory is the node's."""
    budgets = []
    for stage in ("train", "embed"):
        ranks = (config.embed.ranks_per_child if stage == "embed" else None) or world.ranks_per_node
        model = Footprint(shape, config, world)
        moment = "in a training step" if stage == "train" else "in a batch"
        device = model.training() if stage == "train" else model.embedding()
        process = {"Python and its libraries": ranks * PROCESS_BYTES + LIBRARY_BYTES}
        working = {
            **process,
            **(model.train_host(ranks) if stage == "train" else {"rows that are embedded": ranks * EMBED_WINDOW_BYTES}),
        }
        on_host = {item: ranks * size for item, size in device.items()}
        host = {moment: working | on_host} if world.kind in HOST_KINDS else {"at work": working}
        host["while the model is loaded"] = {**process, **model.loading(ranks)}
        budgets += [_worst(stage, "device", {moment: device}, capacity.device), _worst(stage, "host", host, capacity.host)]
    return budgets


def _worst(stage: str, place: str, moments: Mapping[str, Items], limit: int | None) -> Budget:
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    return Budget(
        stage=stage,
        place=place,
        moment=moment,
        items={name: size for name, size in moments[moment].items() if size},
        limit=limit,
    )


def totals(budgets: Sequence[Budget]) -> dict[str, int]:
    """Return the most that any stage requires of a rank's `device` and of a node's `host`, in bytes."""
    return {place: max(budget.total for budget in budgets if budget.place == place) for place in ("device", "host")}


@dataclass(frozen=True, slots=True)
class Footprint:
    """The formulas. Methods return bytes of one rank's device, or of a node's host."""

    shape: ModelShape
    config: RunConfig
    world: PlannedWorld

    def training(self) -> Items:
        """Return the requirement of a training step."""
        train, width = self.config.train, self.training_width()
        kept = BF16 if train.bf16_weights else FP32
        gradients, frozen = kept * self.trained, self.shape.parameters - self.trained
        name = "bf16" if train.bf16_weights else "fp32"
        recomputed = self.layer() if train.activation_checkpointing else 0
        largest = self.shape.hidden * self.shape.intermediate if train.freeze_word_embeddings else self.shape.largest
        return {
            f"weights ({name})": kept * self.trained + FP32 * frozen,
            **self.optimizer_state(),
            # Several backward passes of a step add up their gradients. Later a checkpoint of a sharded optimizer uses the same
            # memory: it gathers one moment after the other.
            f"gradients ({name})": gradients * (2 if self.config.adds_up(self.world.kind) else 1),
            # Of a bucket, which a larger tensor has for itself.
            "work space of the optimizer": FP32 * largest if self.lazy else 0,
            "weights cast for products": width * self.shape.multiplied if width < kept else 0,
            "activations": self.activations(),
            # Gradients of at most half of what a layer keeps exist at a time.
            "work space of a layer": self.layer() // 2 + recomputed,
            "embeddings and scores": self.scores(),
            "batches": self.batches(1 + (self.config.device.loader.device_prefetch if self.lazy else 0)),
            **self.reserved(),
        }

    def optimizer_state(self) -> Items:
        """Return the requirement of AdamW's moments; sharded, the share also has weights and gradients of its own."""
        if self.config.train.shard_optimizer is True and self.world.ranks > 1:
            return {"share of the optimizer state (AdamW, 4 x fp32)": 4 * FP32 * -(-self.trained // self.world.ranks)}
        return {"optimizer state (AdamW, 2 x fp32)": 2 * FP32 * self.trained}

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        train = self.config.train
        return train.bin_shape.tokens * (1 if self.config.cuts_batches(self.world.kind) else train.bins)

    def activations(self) -> int:
        """Return what the forward pass over a micro-batch keeps for the backward pass."""
        # The embeddings' sum and its dropout; with checkpointing, the input of every layer.
        ends = 2 * self.tokens * self.shape.hidden * FP32
        kept = self.tokens * self.shape.hidden * FP32 if self.config.train.activation_checkpointing else self.layer()
        return ends + self.shape.layers * kept

    def layer(self) -> int:
        """Return what one layer keeps of a micro-batch.

        In the hidden width: inputs of both normalizations (fp32), then in the products' width the layer's input, query, key,
        value, context and the inner product's input; autocast casts the layer's input for query, key and value anew, and rotary
        positions make a query and a key of their own. In the inner width: the activation function's input and output (gelu,
        silu; functions that are written as several operations, such as gelu_new, keep up to five). Unless attention is fused:
        the probabilities, which autocast keeps in fp32 and casts.
        """
        shape, width = self.shape, self.training_width()
        cast = width < FP32
        per_token = shape.hidden * (2 * FP32 + (8 if cast or shape.gated else 6) * width) + 2 * shape.intermediate * width
        per_token += self.dropped * (shape.intermediate // 2 if shape.gated else 2 * shape.hidden)
        per_token += shape.heads * (FP32 if self.fused else self.config.train.length * (FP32 + (width if cast else 0)))
        return self.tokens * per_token

    def scores(self) -> int:
        """Return the embeddings of all ranks' texts, this rank's scores with all documents, both gradients, the scores' masks,
        and what every Matryoshka size keeps of them."""
        pairs, documents = self.config.train.batch_size, self.config.train.bin_shape.documents + self.config.train.symmetric
        everyone = pairs * documents * self.world.ranks
        own = pairs * (1 + documents)
        sizes = self.config.train.dimensions
        embeddings = (own + 2 * everyone) * (self.shape.dimension + sum(sizes))
        return FP32 * embeddings + pairs * everyone * (4 * FP32 + 2 + len(sizes) * (FP32 + 2))

    def batches(self, count: int) -> int:
        """Return tokens, segments and positions in int64, and an int32 for every query and document of the batch."""
        train = self.config.train
        roles = train.batch_size**2 * (train.bin_shape.documents + train.symmetric) * self.world.ranks
        return count * (3 * 8 * train.bins * train.bin_shape.tokens + 4 * roles)

    def embedding(self) -> Items:
        """Return the requirement of a batch of embed, at the widest moment of a layer that keeps nothing."""
        shape, width, length = self.shape, self.inference_width(), self.config.embed.length
        attention = shape.hidden * width + (2 * shape.heads * length * FP32 if self.lazy or not shape.fused else 0)
        per_token = shape.hidden * (3 * FP32 + 3 * width) + max(attention, 2 * shape.intermediate * width)
        return {
            "weights (fp32)": FP32 * shape.parameters,
            "weights cast for products": width * shape.multiplied if width < FP32 else 0,
            "work space of a layer": max(self.config.embed.tokens_per_batch, length) * per_token,
            **self.reserved(),
        }

    def train_host(self, ranks: int) -> Items:
        """Return the requirement of a node's ranks, devices aside. A checkpoint may be in progress at any moment."""
        ahead = self.config.device.loader.host_prefetch if self.lazy else PREFETCH_BATCHES + 1
        return {
            "batches ahead": ranks * self.batches(ahead),
            "weights and optimizer state on their way to the disk": FP32 * (self.shape.parameters + 2 * self.trained),
        }

    def loading(self, ranks: int) -> Items:
        """Return the requirement of loading: every rank loads the model, at the same time; they share the file's pages."""
        shape = self.shape
        copies = FP32 if shape.stored_bytes == FP32 else FP32 + shape.stored_bytes
        return {
            "models being loaded": ranks * copies * shape.parameters,
            "the weight file": shape.stored_bytes * shape.parameters,
        }

    def reserved(self) -> Items:
        return {"Neuron runtime and buffers": NEURON_RESERVED_BYTES} if self.world.kind == "neuron" else {}

    @property
    def trained(self) -> int:
        """Weights with a gradient."""
        return self.shape.parameters - (self.shape.words if self.config.train.freeze_word_embeddings else 0)

    @property
    def lazy(self) -> bool:
        """Whether graphs are compiled: XLA takes fused attention apart into products."""
        return self.world.kind not in EAGER_KINDS

    @property
    def fused(self) -> bool:
        """Whether attention is fused in training: on CUDA alone (`prepare_for_training`)."""
        return self.world.kind == "cuda" and self.shape.fused

    @property
    def dropped(self) -> int:
        """Bytes that dropout keeps per element: a truth value on CUDA, the factor itself elsewhere."""
        dropout = self.shape.dropout if self.config.train.dropout is None else self.config.train.dropout
        return 0 if not dropout else 1 if self.world.kind == "cuda" else self.training_width()

    def training_width(self) -> int:
        """Bytes of a number in training's matrix products."""
        if self.world.precision == "compiler":
            return _cast_width(self.config.compile.training_cast("compiler"), self.config.compile.auto_cast_type)
        return FP32 if self.world.precision == "fp32" else BF16

    def inference_width(self) -> int:
        """Bytes of a number in the matrix products of evaluate and embed."""
        if self.world.kind != "neuron":
            return self.training_width()
        return _cast_width(self.config.compile.inference_cast(self.world.precision), self.config.compile.infer_auto_cast_type)


def _cast_width(cast: str, cast_type: str) -> int:
    """Return the bytes of a number that neuronx-cc casts; fp8 counts like bf16, to be on the safe side."""
    return FP32 if cast == "none" or cast_type == "tf32" else BF16


# ---- refusals --------------------------------------------------------------------------------------------------------


def require_memory(shape: ModelShape, config: RunConfig, world: PlannedWorld, capacity: MemoryCapacity) -> list[Budget]:
    """Return the budgets of a plan that fits.

    Raises:
        BadConfig: the plan cannot fit; names the largest items and changes with which it does.
    """
    budgets = estimate_memory(shape, config, world, capacity)
    if not (refused := [budget for budget in budgets if not budget.fits]):
        return budgets
    source = f"a job gets of a {TRAIN_HOST}" if world.kind == "neuron" else "this host has"
    places = {
        "device": ("rank's device", f"device.memory_gib, or what {world.kind} has"),
        "host": ("node's host", f"device.host_memory_gib, or what {source}"),
    }
    lines, rules = [], []
    for budget in refused:
        place, origin = places[budget.place]
        rules.append(f"at most {gib(budget.limit)} per {place} ({origin})")
        lines.append(f"{budget.stage}, per {place} {budget.moment}: {gib(budget.total)}")
        lines += (f"  {name}: {gib(size)}" for name, size in sorted(budget.items.items(), key=lambda item: -item[1])[:4])
    raise BadConfig(
        "the plan needs more memory than there is",
        value=lines,
        rule="; ".join(dict.fromkeys(rules)),
        remedy="; or ".join(remedies(shape, config, world, capacity))
        or "none of the settings makes it fit: use a smaller model, or hosts with more memory",
    )


def remedies(shape: ModelShape, config: RunConfig, world: PlannedWorld, capacity: MemoryCapacity) -> list[str]:
    """Return changes of settings with which the plan fits, the least harmful ones first; each of them is enough."""

    def fits(train: Mapping[str, Any] | None = None, embed: Mapping[str, Any] | None = None, ranks: int | None = None) -> bool:
        sections = {"train": config.train.model_copy(update=train or {}), "embed": config.embed.model_copy(update=embed or {})}
        here = world.model_copy(update={"ranks_per_node": ranks or world.ranks_per_node})
        return all(budget.fits for budget in estimate_memory(shape, config.model_copy(update=sections), here, capacity))

    found = []
    checkpointing = {"activation_checkpointing": True}
    if fits(checkpointing):
        found.append("train.activation_checkpointing=true fits")
    whole, bins, tokens = config.train.batch_size, config.train.bins, config.train.bins * config.train.bin_shape.tokens
    divisors, apart = [count for count in range(1, whole + 1) if whole % count == 0], config.cuts_batches(world.kind)
    for more, words in (({}, ""), (checkpointing, " with train.activation_checkpointing=true")):
        # The same negatives in less memory; only if that is not enough, fewer of them.
        smaller = (count for count in divisors if count > (bins if apart else max(1, bins - 1)))
        if count := next((count for count in smaller if fits({"micro_batches": count, **more})), 0):
            found.append(f"train.micro_batches={count}{words} fits")
            break
        sizes = [size for size in reversed(divisors) if size < whole]
        less = ({"batch_size": size, "batch_tokens": tokens * size // whole, "micro_batches": size} for size in sizes)
        if changed := next((each for each in less if fits({**each, **more})), None):
            found.append(f"{', '.join(f'train.{key}={value}' for key, value in changed.items())}{words} together fit")
            break
    if tokens := _largest(config.embed.tokens_per_batch, lambda count: fits(embed={"tokens_per_batch": count})):
        found.append(f"embed.tokens_per_batch={tokens} fits")
    row = config.embed.length
    smallest = {"batch_size": 1, "batch_tokens": None, "micro_batches": 1, **checkpointing}
    if not found and fits(smallest, {"tokens_per_batch": row}):
        found.append(f"train.batch_size=1, train.activation_checkpointing=true and embed.tokens_per_batch={row} together fit")
    if not found and (ranks := _largest(world.ranks_per_node, lambda count: fits(ranks=count))):
        found.append(f"device.ranks_per_node={ranks} fits")
    return found


def _largest(below: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number under `below` that fits, a multiple of 8 from 16 on, or 0. Requirements grow with it."""
    low, high = 0, below
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low if low < 16 else low // 8 * 8


def gib(size: int | None) -> str:
    """Return `12.30 GiB`, `?` if unknown."""
    return "?" if size is None else f"{size / GIB:.2f} GiB"
