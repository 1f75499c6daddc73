"""The device protocol: all that training, evaluation and embedding may ask of an accelerator, the same for every kind.

Kinds: `neuron` (torch-xla + torch-neuronx on trn1), `xla` (torch-xla on CPU, one rank), `cuda` (NCCL), `cpu` (gloo). Each lives
in a module of its own, loaded on demand. Loops are written against this protocol once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from pipeline.backends.counts import GraphCounts, Waits
from pipeline.config import LoaderConfig
from pipeline.contract import EAGER_KINDS
from pipeline.errors import BadConfig
from pipeline.host.host import available_cores
from pipeline.run.world import World

ModuleT = TypeVar("ModuleT", bound=nn.Module)
Batch = Mapping[str, Tensor]
EncodeFunction = Callable[..., Tensor]
"""An encoder, or a compiled form of one: `Encoder.forward` on eager kinds, `Encoder.packed` on those that compile."""

KINDS = (*EAGER_KINDS, "xla", "neuron")
"""Kinds that have a module here."""

EMULATED_BF16 = ("AVX512_CORE", "AVX512_CORE_VNNI")
"""Values of ONEDNN_MAX_CPU_ISA with which oneDNN accepts bf16 but computes without instructions for it; with lower ones it does
not accept it (https://uxlfoundation.github.io/oneDNN/dev_guide_cpu_dispatcher_control.html)."""

PRODUCTS = 12
"""Of which the fastest counts: other processes may run meanwhile. The first ones also choose oneDNN's code."""


class Device(Protocol):
    """One rank's device. Collectives must be called by all ranks in the same order.

    Attributes:
        kind: one of KINDS.
        compiles: whether operations are recorded into graphs, one per shape; False where each runs at once.
        world: this rank among all ranks.
        torch_device: where tensors live.
        precision: `bf16` or `fp32`: what matrix products are computed in; weights stay fp32. `compiler`: as neuronx-cc was told.
        waits: how long consumers of `batches` have waited for data.
        computes: False where graphs are written down and not run: no value that is read means anything.
    """

    kind: str
    compiles: bool
    world: World
    torch_device: torch.device
    precision: str
    waits: Waits
    computes: bool

    def place(self, module: ModuleT) -> ModuleT:
        """Move a module to the device."""

    def for_inference(self, encoder: nn.Module, traces: Path | None) -> EncodeFunction:
        """Return the encoder in the form for evaluation and embedding.

        Args:
            encoder: as `pipeline.model.inference.for_encoding` gives it for the kind.
            traces: folder with its traced forms, on kinds that need them (neuron).
        """

    def batches(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches on the device, prepared ahead in the background."""

    def autocast(self) -> AbstractContextManager[None]:
        """Context in which forward passes run in `precision`."""

    def gather(self, rows: Tensor) -> Tensor:
        """All ranks' rows, (n, d) -> (world size * n, d), in rank order; gradients flow back to the rank that owns a row."""

    def reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace every gradient by its mean over all ranks."""

    def checkpointed(self) -> Callable[..., Any]:
        """`checkpoint(function, *arguments)`: call it now, keep only its inputs, and call it again in the backward pass."""

    def seed(self, value: int) -> None:
        """Seed the random numbers that modules draw on the device (dropout)."""

    def random_state(self) -> Tensor:
        """Return the state of the device's random numbers, on the host."""

    def restore_random_state(self, state: Tensor) -> None:
        """Restore a state that `random_state` returned."""

    def sync(self, *kept: Tensor) -> None:
        """Mark the end of a piece of work: cuts the graph on lazy devices, nothing elsewhere.

        Args:
            kept: results that later pieces need, besides what training keeps from step to step.
        """

    def read(self, value: Tensor) -> list[float]:
        """Wait for a tensor of any shape and return it flat. The only place where the host waits for the device."""

    def from_host(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same tensors on the device, each with memory of its own."""

    def to_host(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of whole tensors in host memory, which later steps do not change; cuts the graph on lazy devices."""

    def graph_counts(self) -> GraphCounts:
        """Return how much has been compiled so far. Cheap enough to call after every step."""

    def graphs(self) -> set[str]:
        """Keys of the compiled graphs there are: this process's own (`xla`), or all in the compiler's shared cache (`neuron`)."""

    def graph_module(self, key: str) -> bytes | None:
        """A graph's HLO module as a protobuf message, None where it is not kept."""

    def all_reduce(self, value: Tensor) -> Tensor:
        """Sum over all ranks."""

    def reduce_scatter(self, value: Tensor) -> Tensor:
        """Sum over all ranks, of which this rank keeps its share: (world size * n, ...) -> (n, ...)."""

    def broadcast(self, value: Tensor) -> Tensor:
        """Rank 0's value on every rank."""

    def barrier(self) -> None:
        """Wait until all ranks are here."""

    def close(self) -> None:
        """Leave the gang."""


def open_device(
    kind: str,
    precision: str,
    world: World,
    *,
    threads: int | None = None,
    timeout_seconds: int = 1800,
    loader: LoaderConfig | None = None,
    inference: bool = False,
) -> Device:
    """Join the gang on a device of this kind.

    Args:
        kind: a resolved kind, not `auto`.
        precision: resolved, see `resolve_precision`.
        threads: host threads of this rank; None: OMP_NUM_THREADS, else the host's cores shared among its ranks, where there are
            several or the host itself computes.
        timeout_seconds: how long a collective may wait for another rank.
        loader: how batches are put on a device that compiles.
        inference: only for encoding: without collectives.

    Raises:
        BadConfig: an unknown or unavailable kind, or one that cannot do what is asked.
    """
    require_available(kind)
    module = import_module(f"pipeline.backends.{kind}")
    if threads is None and (kind == "cpu" or world.local_size > 1) and "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, available_cores() // world.local_size)
    if threads is not None:
        torch.set_num_threads(threads)
    options: dict[str, Any] = {"timeout_seconds": timeout_seconds}
    world = replace(world, rank=0, size=1) if inference else world
    if inference and kind == "neuron":
        return cast(Device, module.open_inference_device(precision, world, **options))
    if kind not in EAGER_KINDS:
        options["loader"] = loader or LoaderConfig()
    return cast(Device, module.open_device(precision, world, **options))


def require_available(kind: str) -> None:
    """Refuse a kind of device that cannot be here, before hosts are started for it.

    `neuron` is always accepted: prepare plans on hosts without Trainium.

    Raises:
        BadConfig: not one of KINDS, or `xla` without torch-xla.
    """
    if kind not in KINDS:
        raise BadConfig(
            "unknown kind of device",
            value=f"device.kind = {kind}",
            rule=f"one of {', '.join(KINDS)}",
            remedy="set device.kind to one of these",
        )
    if kind == "xla" and find_spec("torch_xla") is None:
        raise BadConfig(
            "this kind of device needs torch-xla, which is not installed",
            value="device.kind = xla",
            rule="torch-xla 2.9 exists for Linux on x86-64 only",
            remedy="run it there, or set device.kind = cpu",
        )


def require_world(kind: str, ranks: int) -> None:
    """Refuse more ranks than a kind can have.

    Raises:
        BadConfig: more than one rank on `xla`.
    """
    if kind == "xla" and ranks > 1:
        raise BadConfig(
            "more than one rank on xla",
            value=f"{ranks} ranks",
            rule="torch-xla's processes on a CPU cannot communicate: one node, one rank",
            remedy="set nodes = 1 and device.ranks_per_node = 1, or device.kind = cpu",
        )


def resolve_kind(kind: str) -> str:
    """`auto` as the best kind on this host: neuron, else cuda, else cpu."""
    if kind != "auto":
        return kind
    return "neuron" if find_spec("torch_neuronx") else "cuda" if torch.cuda.is_available() else "cpu"


def resolve_precision(kind: str, precision: str) -> str:
    """`auto` as bf16 on devices that compute faster in it, else fp32. The compiler's own cast is chosen by name only.

    Raises:
        BadConfig: the compiler's cast on a kind without that compiler.
    """
    if precision == "compiler" and kind != "neuron":
        raise BadConfig(
            "only neuron's compiler casts",
            value=f"device.precision = compiler, device.kind = {kind}",
            rule="compiler is a precision of the kind neuron",
            remedy="set device.precision to bf16, fp32 or auto",
        )
    if precision != "auto":
        return precision
    computes_bf16 = (
        kind == "neuron"
        or (kind == "cpu" and processor_computes_bf16() and product_seconds(torch.bfloat16) < product_seconds(torch.float32))
        or (kind == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False))
    )
    return "bf16" if computes_bf16 else "fp32"


def processor_computes_bf16() -> bool:
    """Whether matrix products in bf16 use the processor's instructions for them: it has some, and oneDNN may use them."""
    instructions = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    allowed = os.environ.get("ONEDNN_MAX_CPU_ISA", "") not in EMULATED_BF16
    return bool(instructions and allowed and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def product_seconds(dtype: torch.dtype) -> float:
    """Return the least time of some matrix products; processors without AMX exist that take longer in bf16 than in fp32."""
    left, right = (torch.ones(*shape, dtype=dtype) for shape in ((1024, 512), (512, 512)))

    def seconds() -> float:
        begun = time.perf_counter()
        torch.nn.functional.linear(left, right)
        return time.perf_counter() - begun

    return min(seconds() for _ in range(PRODUCTS))


def default_ranks_per_node(kind: str) -> int:
    """Ranks that use all of a host: 32 NeuronCores of a trn1.32xlarge, every GPU, one CPU process."""
    return {"neuron": 32, "cuda": max(1, torch.cuda.device_count())}.get(kind, 1)
