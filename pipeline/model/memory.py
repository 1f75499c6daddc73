"""How much memory a plan needs, per rank on its device and per node on the host, from the model's shape and the settings alone.

No weight is loaded: parameters are counted on torch's `meta` device, activations by formulas for a BERT-like layer, which
tests/pipeline/model/test_memory.py compares with what autograd really keeps. The result is bytes by item, for the worst moment of
each stage. Not counted, because only the hardware can tell: a compiler's spills, its programs, the network's pinned buffers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeline.config import ModelConfig, RunConfig
from pipeline.contract import EAGER_KINDS
from pipeline.errors import BadConfig, MissingInput
from pipeline.model.encoder import TOKENS_PER_TEXT, Encoder, family_of, new_encoder
from pipeline.model.folder import HEAD, inspect_folder, transformer_folder
from pipeline.model.inference import encode_shapes
from pipeline.model.weights import WEIGHT_SUFFIXES
from pipeline.plan import World
from pipeline.runtime import store
from pipeline.runtime.eager import PREFETCH_BATCHES, REDUCE_BUCKET_ELEMENTS

HOST_KINDS = ("cpu", "xla")
"""Kinds whose devices are the host itself: they have no memory of their own."""

Items = dict[str, int]
"""What the memory is for -> bytes."""

MIB, GIB = 1 << 20, 1 << 30
FP32, BF16, INT64, INT32 = 4, 2, 8, 4

NEURON_DEVICE_BYTES = 16 * GIB
"""Of a NeuronCore-v2: 32 GiB per chip of two cores, on Trn1 and Inf2 (Neuron docs, arch/neuron-hardware/trainium.rst)."""

NEURON_HOST_BYTES = (512 * 15 // 16 - 1) * GIB
"""What a job gets of a trn1.32xlarge's 512 GiB (trn1-arch.rst): ECS and the operating system keep a sixteenth and 1 GiB."""

NEURON_MICROCODE_BYTES = 96 * MIB
"""Per core, before any program is loaded (Neuron docs, neuron-runtime/explore/device-memory.rst, 2025-10)."""

SCRATCHPAD_PAGE_BYTES = 512 * MIB
"""The Neuron runtime's unit for what lives inside a program, activations above all (same page, `Shared scratchpad`)."""

PROCESS_BYTES = {"eager": (415 * MIB, 345 * MIB), "lazy": (485 * MIB, 425 * MIB)}
"""A rank's memory of its own, and pages of libraries that all ranks of a host share, once all that training imports is imported;
`lazy`: and torch_xla, with a first program. Measured as RssAnon and RssFile: torch 2.9.1, torch-xla 2.9.0, transformers 5.23."""

CONFIG_BYTES = MIB
"""Files of a model folder that are larger are weights or vocabularies, of which no shape is read."""

TOKEN_OBJECT_BYTES = 36
"""A token id in a Python list: a reference and an int object."""

EMBED_WINDOW_ROWS = 16_384
"""Rows that embed holds at a time, at most: pipeline/stages/embed.WINDOW_ROWS."""

FINITE_CHECK_BYTES = 5
"""Per element of a weight that is checked to be finite: its magnitude and a truth value."""

SAVED_PER_ACTIVATION = {"relu": 1, "gelu": 2, "silu": 2, "swish": 2}
"""Tensors of the inner width that autograd keeps for an activation function and the product behind it."""
SAVED_PER_COMPOSITE_ACTIVATION = 5
"""For functions that are written as several operations (gelu_new, ...)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What of an encoder decides over memory.

    Attributes:
        parameters: elements of all weights.
        largest: elements of the largest weight, the word embeddings.
        multiplied: elements of the matrices that inputs are multiplied with; autocast keeps a copy of them.
        layers, hidden, heads, intermediate: of the backbone.
        head: width of the residual head, 0 without.
        activation: name of the activation function.
        dropout: of hidden states, as the model is configured.
        fused: the library computes attention with torch's fused function where the device has it.
        stored_bytes: per element of the weight file.
    """

    parameters: int
    largest: int
    multiplied: int
    layers: int
    hidden: int
    heads: int
    intermediate: int
    head: int
    activation: str
    dropout: float
    fused: bool
    stored_bytes: int

    @property
    def weights(self) -> int:
        """Bytes in fp32."""
        return FP32 * self.parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Memory of one place at its worst moment.

    Attributes:
        stage: `train` or `embed` (which evaluate is like).
        place: `device` (of a rank) or `host` (of a node).
        moment: when it is worst.
        items: what it is for.
        limit: bytes there are; None: unknown, and not judged.
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
class Limits:
    """Bytes of a rank's device and of a node's host, None where nobody knows."""

    device: int | None
    host: int | None


# ---- the shape of a model --------------------------------------------------------------------------------------------


def read_shape(folder: Path, config: ModelConfig) -> ModelShape:
    """The shape of a model folder, of which only the configuration is read.

    Raises:
        MissingInput, BadConfig, BadData: as `load_encoder`, weights aside.
    """
    backbone, _ = inspect_folder(folder, config)
    with torch.device("meta"):
        encoder = new_encoder(backbone, config)
    return shape_of(encoder)


def shape_of(encoder: Encoder) -> ModelShape:
    """The shape of an encoder, whose weights may be on `meta`."""
    config: Any = encoder.config
    stored = getattr(config, "dtype", None)
    return ModelShape(
        parameters=sum(parameter.numel() for parameter in encoder.parameters()),
        largest=max(parameter.numel() for parameter in encoder.parameters()),
        multiplied=sum(module.weight.numel() for module in encoder.backbone.modules() if isinstance(module, nn.Linear)),
        layers=int(config.num_hidden_layers),
        hidden=int(config.hidden_size),
        heads=int(config.num_attention_heads),
        intermediate=int(config.intermediate_size),
        head=encoder.head.inner.out_features if encoder.head else 0,
        activation=str(config.hidden_act),
        dropout=float(config.hidden_dropout_prob),
        fused=family_of(config).attention == "sdpa",
        stored_bytes=stored.itemsize if isinstance(stored, torch.dtype) else FP32,
    )


def fetch_shape(uri: str, config: ModelConfig, scratch: Path) -> ModelShape:
    """The shape of a parent wherever it is, without fetching its weights.

    Args:
        uri: as model.parent: a folder, or a weight file with `config.base` or with config.json beside it.
        scratch: local folder for what is fetched.

    Raises:
        MissingInput: nothing there, or no config.json.
        BadConfig, BadData: as `read_shape`.
    """
    is_file = store.exists(uri)
    folder = fetch_without_weights(uri.rsplit("/", 1)[0] if is_file else uri, scratch / "shape")
    if config.base and (is_file or not (transformer_folder(folder) / "config.json").is_file()):
        folder = fetch_without_weights(config.base, scratch / "base")
    return read_shape(folder, config)


def fetch_without_weights(uri: str, cache: Path) -> Path:
    """A local folder with the small files that stand under `uri`."""
    if not store.is_s3(uri):
        return store.local_folder(uri, cache)
    root = uri.rstrip("/")
    files = {info.uri.removeprefix(f"{root}/"): info for info in store.list_objects(root)}
    if not files:
        raise MissingInput("there is no model here", value=uri, remedy="check the URI")
    for name, info in files.items():
        if name == HEAD or (info.size < CONFIG_BYTES and not name.endswith(WEIGHT_SUFFIXES)):
            store.download(info.uri, cache / name)
    return cache


# ---- limits ----------------------------------------------------------------------------------------------------------


def known_limits(config: RunConfig, kind: str, *, here: bool) -> Limits:
    """How much memory there is: as configured, else the kind's, else unknown.

    Args:
        here: the ranks certainly run on this host, as in a run whose folder is local; what is found here counts then.
    """
    device = _bytes(config.device.memory_gib)
    host = _bytes(config.device.host_memory_gib)
    if kind == "neuron":
        return Limits(device or NEURON_DEVICE_BYTES, host or NEURON_HOST_BYTES)
    if kind == "cuda" and device is None and torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0).total_memory
    return Limits(None if kind in HOST_KINDS else device, host or (this_host_bytes() if here else None))


def this_host_bytes() -> int:
    """Memory of this machine, or less where a container is allowed less."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            found.append(int(text))
    return min(found)


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * GIB)


# ---- what a plan needs -----------------------------------------------------------------------------------------------


def estimate(shape: ModelShape, config: RunConfig, world: World, limits: Limits) -> list[Budget]:
    """Training's and embedding's memory on each device and on each node, whose memory is the devices' on `cpu` and `xla`."""
    on_host = world.kind in HOST_KINDS
    budgets = []
    for stage in ("train", "embed"):
        ranks = world.ranks_per_node
        if stage == "embed":
            ranks = config.embed.ranks_per_child or ranks
        need = Need(shape, config, world.model_copy(update={"ranks_per_node": ranks}))
        device = need.train_device() if stage == "train" else need.embed_device()
        working = need.train_host() if stage == "train" else need.embed_host()
        if stage == "train":
            # A checkpoint is on its way at any moment of training.
            working |= need.checkpoint()
        host = {"while the model is loaded": need.loading()}
        if on_host:
            host |= {name: {**working, **_times(ranks, items)} for name, items in device.items()}
        else:
            host["at work"] = working
        budgets.append(_worst(stage, "device", device, limits.device))
        budgets.append(_worst(stage, "host", host, limits.host))
    return budgets


def _times(ranks: int, items: Items) -> Items:
    return {name: ranks * size for name, size in items.items()}


def totals(budgets: list[Budget]) -> dict[str, int]:
    """The largest need of a rank's `device` and of a node's `host`, in bytes."""
    return {place: max(budget.total for budget in budgets if budget.place == place) for place in ("device", "host")}


def require_memory(shape: ModelShape, config: RunConfig, world: World, limits: Limits) -> list[Budget]:
    """The budgets of a plan that fits.

    Raises:
        BadConfig: one that cannot fit, with its largest items and a change with which it does.
    """
    budgets = estimate(shape, config, world, limits)
    refused = [budget for budget in budgets if not budget.fits]
    if not refused:
        return budgets
    raise BadConfig(
        "the plan needs more memory than there is",
        value=[line for budget in refused for line in _breakdown(budget)],
        rule="; ".join(
            f"at most {gib(budget.limit)} per {_unit(budget)} ({_setting(budget, world.kind)})" for budget in _places(refused)
        ),
        remedy="; or ".join(remedies(shape, config, world, limits))
        or "none of the settings makes it fit: use a smaller model, or hosts with more memory",
    )


def remedies(shape: ModelShape, config: RunConfig, world: World, limits: Limits) -> list[str]:
    """Changes of settings with which the plan fits, the least harmful ones first; each of them is enough."""

    def fits(train: Mapping[str, Any] | None = None, embed: Mapping[str, Any] | None = None, ranks: int | None = None) -> bool:
        changed = config.model_copy(
            update={
                "train": config.train.model_copy(update=train or {}),
                "embed": config.embed.model_copy(update=embed or {}),
            }
        )
        here = world if ranks is None else world.model_copy(update={"ranks_per_node": ranks})
        return all(budget.fits for budget in estimate(shape, changed, here, limits))

    found = []
    checkpointing = {"activation_checkpointing": True}
    if fits(checkpointing):
        found.append("train.activation_checkpointing=true fits")
    if batch := _largest(config.train.batch_size, lambda size: fits({"batch_size": size})):
        found.append(f"train.batch_size={batch} fits")
        parts = -(-config.train.batch_size * config.train.accumulation // batch)
        if fits({"batch_size": batch, "accumulation": parts}):
            found[-1] += f" (with train.accumulation={parts} for as many pairs per step)"
    elif batch := _largest(config.train.batch_size, lambda size: fits({"batch_size": size, **checkpointing})):
        found.append(f"train.batch_size={batch} with train.activation_checkpointing=true fits")
    if tokens := _largest(config.embed.tokens_per_batch, lambda count: fits(embed={"tokens_per_batch": count})):
        found.append(f"embed.tokens_per_batch={tokens} fits")
    lengths = config.embed.buckets
    if kept := _largest(len(lengths), lambda count: fits(embed={"buckets": _thinned(lengths, count)})):
        found.append(f"embed.buckets=[{','.join(map(str, _thinned(lengths, kept)))}] fits")
    if not found:
        batch, tokens = _largest_pair(config, fits, checkpointing)
        if batch and tokens:
            found.append(
                f"train.batch_size={batch}, train.activation_checkpointing=true and embed.tokens_per_batch={tokens} together fit"
            )
    if not found and (ranks := _largest(world.ranks_per_node, lambda count: fits(ranks=count))):
        found.append(f"device.ranks_per_node={ranks} fits")
    return found


def _thinned(lengths: tuple[int, ...], count: int) -> tuple[int, ...]:
    """So many of the lengths, evenly spread, the longest among them."""
    return tuple(lengths[-1 - index * len(lengths) // count] for index in reversed(range(count)))


def _largest_pair(config: RunConfig, fits: Callable[..., bool], checkpointing: Mapping[str, Any]) -> tuple[int, int]:
    shortest = max(config.embed.buckets)
    batch = _largest(
        config.train.batch_size, lambda size: fits({"batch_size": size, **checkpointing}, {"tokens_per_batch": shortest})
    )
    if not batch:
        return 0, 0
    train = {"batch_size": batch, **checkpointing}
    return batch, _largest(config.embed.tokens_per_batch, lambda count: fits(train, {"tokens_per_batch": count}))


def _largest(below: int, fits: Callable[[int], bool]) -> int:
    """The largest number under `below` that fits, a multiple of 8 from 16 on; 0 if none does. Needs grow with the number."""
    low, high = 0, below
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low if low < 16 else low // 8 * 8


def _worst(stage: str, place: str, moments: Mapping[str, Items], limit: int | None) -> Budget:
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    return Budget(
        stage=stage, place=place, moment=moment, items={name: size for name, size in moments[moment].items() if size}, limit=limit
    )


def _breakdown(budget: Budget) -> Iterator[str]:
    largest = sorted(budget.items.items(), key=lambda item: -item[1])[:4]
    yield f"{budget.stage}, per {_unit(budget)} {budget.moment}: {gib(budget.total)}"
    yield from (f"  {name}: {gib(size)}" for name, size in largest)


def _places(refused: list[Budget]) -> list[Budget]:
    return list({budget.place: budget for budget in refused}.values())


def _unit(budget: Budget) -> str:
    return "rank's device" if budget.place == "device" else "node's host"


def _setting(budget: Budget, kind: str) -> str:
    if budget.place == "device":
        return f"device.memory_gib, or what {kind} has"
    return "device.host_memory_gib, or what " + ("a job gets of a trn1.32xlarge" if kind == "neuron" else "this host has")


def gib(size: int | None) -> str:
    """For people: `12.3 GiB`, `?` if unknown."""
    return "?" if size is None else f"{size / GIB:.2f} GiB"


@dataclass(frozen=True, slots=True)
class _Casts:
    """Bytes of what a layer keeps, by the form that matrix products are computed in.

    Attributes:
        hidden: per token and element of the hidden width, dropout aside.
        inner: per token and element of the inner width and tensor kept.
        probabilities: per attention probability.
        weights: per element of the matrices, for copies.
        compute: of a number in a product.
    """

    hidden: int
    inner: int
    probabilities: int
    weights: int
    compute: int


# A layer keeps in fp32: its input, query, key, value, what attention gives, the sum before and the output of the first
# normalization, and the sum before the second: 8 of the hidden width.
_FP32 = _Casts(hidden=8 * FP32, inner=FP32, probabilities=FP32, weights=0, compute=FP32)
# Under autocast the input is cast for each of the three projections anew, sums stay fp32, and probabilities are kept twice.
_AUTOCAST = _Casts(hidden=8 * BF16 + 2 * FP32, inner=BF16, probabilities=FP32 + BF16, weights=BF16, compute=BF16)
# A compiler that casts everything keeps what fp32 keeps, in half the bytes.
_ALL_CAST = _Casts(hidden=8 * BF16, inner=BF16, probabilities=BF16, weights=BF16, compute=BF16)


class Need:
    """The formulas. Every method gives bytes: of one rank's device, or of a node's host."""

    def __init__(self, shape: ModelShape, config: RunConfig, world: World) -> None:
        self.shape = shape
        self.config = config
        self.world = world
        self.lazy = world.kind not in EAGER_KINDS
        self.casts = _casts(config, world)
        # Only CUDA has fused attention in training: eager torch on processors is told not to, XLA takes it apart into products.
        self.plain = world.kind != "cuda" or not shape.fused
        dropout = shape.dropout if config.train.dropout is None else config.train.dropout
        # What dropout keeps per element: a truth value on CUDA, the factors themselves elsewhere.
        self.dropped = 0 if not dropout else 1 if world.kind == "cuda" else self.casts.compute

    # -- training

    def train_device(self) -> dict[str, Items]:
        """A step's moments, and the validation between steps."""
        shape, train, always = self.shape, self.config.train, self.lasting()
        forward = {
            "weights cast for products": self.casts.weights * shape.multiplied,
            "activations of queries": self.kept(train.query_length),
            "activations of documents": self.kept(max(train.buckets)),
            "work space of a layer": self.working(),
            "embeddings and scores": self.scores(),
        }
        gradients = {"gradients (fp32)": shape.weights}
        # Each tower gives a whole gradient of the word embeddings; for a moment there are both.
        both = {"second gradient of the largest weight": FP32 * shape.largest}
        reduced = FP32 * max(REDUCE_BUCKET_ELEMENTS, shape.largest) if self.world.ranks > 1 else 0
        validation = {
            **always,
            **self.paged({**self.inference(), "work space of a layer": self.inference_space(plain=self.plain)}),
        }
        if self.lazy:
            # One program for forward and backward: what it gives and what lives in it is allocated before it starts.
            step = {**always, **gradients, **both, "reduced gradients": reduced, **self.paged(forward)}
            # Its own state is there before the checkpoint's takes its place.
            resumed = {**always, "optimizer state of the checkpoint": 2 * shape.weights}
            return {"in a training step": step, "in validation": validation, "while training is resumed": resumed}
        middle = {
            name: size for name, size in forward.items() if name not in ("activations of documents", "embeddings and scores")
        }
        return {
            "at the end of the forward pass": {**always, **forward},
            "between the backward passes of both towers": {**always, **gradients, **middle},
            "at the end of the backward pass": {**always, **gradients, **both},
            "in the update": {**always, **(gradients if train.accumulation == 1 else {}), "reduced gradients": reduced},
            "in validation": validation,
        }

    def lasting(self) -> Items:
        """What is there from the first step on."""
        return {
            "weights (fp32)": self.shape.weights,
            "optimizer state (AdamW, 2 x fp32)": 2 * self.shape.weights,
            "batches": self.batch() * (1 + (self.config.device.loader.device_prefetch if self.lazy else 0)),
            # Where several batches add up: they stay, and each batch's own gradients come beside them.
            "sum of gradients (fp32)": self.shape.weights if self.config.train.accumulation > 1 else 0,
            **self.runtime(),
        }

    def kept(self, length: int) -> int:
        """Activations of one tower that wait for the backward pass."""
        shape, tokens = self.shape, self.config.train.batch_size * length
        # The embeddings are not cast.
        embedding_dropout = self.dropped if self.dropped < BF16 else FP32
        # Token ids and token types, which index the embeddings; the sum before their normalization; the pooled rows.
        ends = tokens * (2 * INT64 + shape.hidden * (FP32 + embedding_dropout) + 3 * FP32)
        ends += self.config.train.batch_size * FP32 * (2 * shape.hidden + 2 * shape.head)
        if self.config.train.activation_checkpointing:
            return ends + shape.layers * tokens * shape.hidden * FP32
        return ends + shape.layers * self.layer(length)

    def layer(self, length: int) -> int:
        """What one layer keeps of a batch."""
        shape, casts = self.shape, self.casts
        per_token = shape.hidden * (casts.hidden + 2 * self.dropped)
        per_token += self.inner()
        # Mean and deviation of two normalizations.
        per_token += 4 * FP32
        per_token += shape.heads * (length * casts.probabilities if self.plain else FP32)
        return self.config.train.batch_size * length * per_token

    def inner(self) -> int:
        """What the products of the inner width keep of a token."""
        kept = SAVED_PER_ACTIVATION.get(self.shape.activation, SAVED_PER_COMPOSITE_ACTIVATION)
        return kept * self.shape.intermediate * self.casts.inner

    def working(self) -> int:
        """What the backward pass of a layer of documents needs beside what was kept."""
        shape, length = self.shape, max(self.config.train.buckets)
        tokens = self.config.train.batch_size * length
        inner = 2 * shape.intermediate * self.casts.compute
        # When attention's turn comes, what the inner products kept is gone already.
        attention = 2 * shape.heads * length * FP32 - self.inner() - 3 * shape.hidden * FP32 if self.plain else 0
        space = tokens * (2 * shape.hidden * FP32 + max(inner, attention))
        return space + (self.layer(length) if self.config.train.activation_checkpointing else 0)

    def scores(self) -> int:
        """Embeddings of this rank and of all, scores of its queries with all documents, and the gradients of both."""
        rows = self.config.train.batch_size
        everyone = rows * self.world.ranks
        return FP32 * (4 * rows + 2 * everyone) * self.shape.hidden + rows * everyone * (4 * FP32 + 2)

    def batch(self) -> int:
        """Tokens and masks of both towers, and what every document is to every query."""
        train = self.config.train
        return train.batch_size * (
            2 * INT64 * (train.query_length + max(train.buckets)) + INT32 * train.batch_size * self.world.ranks
        )

    def train_host(self) -> Items:
        """Of a node's ranks, devices aside."""
        ranks, shape, train = self.world.ranks_per_node, self.shape, self.config.train
        ahead = self.config.device.loader.host_prefetch if self.lazy else PREFETCH_BATCHES + 1
        queries = train.validation_queries
        tokens = queries * (train.query_length + max(self.config.embed.buckets)) * TOKEN_OBJECT_BYTES
        return {
            **self.processes(),
            "batches ahead": ranks * ahead * self.batch(),
            # Of queries and of as many documents: shares, all ranks' shares, and both in order.
            "validation": ranks * (tokens + 3 * 2 * queries * shape.hidden * FP32),
        }

    def checkpoint(self) -> Items:
        """Rank 0 copies what training goes on to change, and writes it in the background."""
        return {"weights and optimizer state on their way to the disk": 3 * self.shape.weights}

    # -- embedding and evaluation

    def embed_device(self) -> dict[str, Items]:
        # Fused attention everywhere but on XLA; a model that evaluates is never prepared for training.
        plain = self.lazy or not self.shape.fused
        space = {"work space of a layer": self.inference_space(plain=plain)}
        # On Neuron every traced form has weights of its own on the core (runtime/neuron.TracedEncoder).
        settings, forms = self.config.embed, 1
        if self.world.kind == "neuron":
            forms = len(encode_shapes(settings.buckets, settings.tokens_per_batch))
        weights = (
            {"weights (fp32), of every shape": forms * self.shape.weights}
            if forms > 1
            else {"weights (fp32)": self.shape.weights}
        )
        return {"in a batch": {**weights, **self.runtime(), **self.paged({**self.inference(), **space})}}

    def inference(self) -> Items:
        # Packed rows have room for so many texts, others are hardly shorter; of a packed token it is also said where it is.
        tokens = self.config.embed.tokens_per_batch
        texts = max(1, tokens // TOKENS_PER_TEXT)
        values, ahead = (3, 1 + self.config.device.loader.device_prefetch) if self.lazy else (2, 1)
        return {
            "weights cast for products": self.casts.weights * self.shape.multiplied,
            "batches of texts": ahead * values * INT64 * tokens,
            "embeddings": 2 * texts * self.shape.hidden * FP32,
        }

    def inference_space(self, *, plain: bool) -> int:
        """The widest moment of a layer that keeps nothing, and the mask of packed rows beside it."""
        shape, casts = self.shape, self.casts
        longest = max(self.config.embed.buckets)
        tokens = max(self.config.embed.tokens_per_batch, longest)
        attention = shape.hidden * (3 * FP32 + 4 * casts.compute) + (2 * shape.heads * longest * FP32 if plain else 0)
        inner = shape.hidden * (3 * FP32 + casts.compute) + 2 * shape.intermediate * casts.compute
        return tokens * (max(attention, inner) + (longest * FP32 if self.lazy else 0))

    def embed_host(self) -> Items:
        """Of a node's ranks, devices aside."""
        ranks, embed, hidden = self.world.ranks_per_node, self.config.embed, self.shape.hidden
        rows = min(EMBED_WINDOW_ROWS, embed.rows_per_part)
        # One window is encoded while the next one is read; its embeddings are computed, converted and written.
        window = rows * (2 * max(embed.buckets) * TOKEN_OBJECT_BYTES + 3 * hidden * FP32)
        return {**self.processes(), "rows that are embedded": ranks * window}

    # -- both

    def processes(self) -> Items:
        own, shared = PROCESS_BYTES["lazy" if self.lazy else "eager"]
        return {"Python and its libraries": self.world.ranks_per_node * own + shared}

    def loading(self) -> Items:
        """Every rank loads the model by itself, all at once; the file's pages they share."""
        ranks, shape = self.world.ranks_per_node, self.shape
        converted = shape.weights if shape.stored_bytes != FP32 else 0
        return {
            **self.processes(),
            "models being loaded": ranks * (shape.weights + converted),
            "largest weight being checked": ranks * FINITE_CHECK_BYTES * shape.largest,
            "the weight file": shape.stored_bytes * shape.parameters,
        }

    def runtime(self) -> Items:
        return {"Neuron runtime": NEURON_MICROCODE_BYTES} if self.world.kind == "neuron" else {}

    def paged(self, inside: Items) -> Items:
        """On Neuron what lives inside a program is allocated in pages."""
        if self.world.kind != "neuron":
            return inside
        return {**inside, "rest of the last scratchpad page": -sum(inside.values()) % SCRATCHPAD_PAGE_BYTES}


def _casts(config: RunConfig, world: World) -> _Casts:
    if world.precision == "fp32":
        return _FP32
    if world.precision != "compiler":
        return _AUTOCAST
    if config.compile.auto_cast_type == "tf32":
        return _FP32
    return _AUTOCAST if config.compile.auto_cast == "matmult" else _ALL_CAST
