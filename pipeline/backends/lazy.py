"""The device of `xla` and `neuron`: torch-xla's lazy tensors. Operations are recorded; a `sync` compiles and runs them.

So the same program must record the same operations again and again: shapes are static, values that change are tensors, and
nothing is read in between. API of torch-xla 2.9 (https://docs.pytorch.org/xla/release/r2.9/learn/xla-overview.html). Importing
this module chooses the XLA device for the whole process: only `xla` and `neuron` do.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch import Tensor, nn
from torch_xla.debug import metrics as xla_metrics
from torch_xla.distributed.parallel_loader import MpDeviceLoader
from torch_xla.utils.checkpoint import checkpoint

from pipeline.backends.counts import GraphCounts, Waits
from pipeline.sdk.graph_variables import REDUCE_BUCKET, graph_environment

if TYPE_CHECKING:
    from pipeline.backends.device import Batch, EncodeFunction, ModuleT
    from pipeline.config import LoaderConfig
    from pipeline.run.world import World


class LazyDevice:
    """A `Device` that records operations and compiles them. See `pipeline.backends.device.Device`.

    Args:
        precision: `bf16`, `fp32`, or `compiler`: nothing is cast here.
        loader: how batches are put on the device.
    """

    kind = "lazy"
    compiles = True
    computes = True

    def __init__(self, precision: str, world: World, loader: LoaderConfig) -> None:
        self.torch_device = torch_xla.device()
        self.precision = precision
        self.world = world
        self.loader = loader
        self.waits = Waits()
        # Spelled out, although all ranks is the default: so the number of ranks stands in the graph, here as on a gang.
        self._all_ranks = [list(range(world.size))]

    def place(self, module: ModuleT) -> ModuleT:
        placed = module.to(self.torch_device)
        self.sync()
        return placed

    def for_inference(self, encoder: nn.Module, traces: Path | None) -> EncodeFunction:  # noqa: ARG002 - needs none
        return self.place(encoder)

    def batches(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        # The graph is cut here after every `batches_per_execution` batches, not by the loader: with more than one thread it gives
        # them out of order, and holding one back until its turn would shift where it cuts.
        loader = MpDeviceLoader(
            _numbered(batches),
            self.torch_device,
            batches_per_execution=sys.maxsize,
            loader_prefetch_size=self.loader.host_prefetch,
            device_prefetch_size=self.loader.device_prefetch,
            host_to_device_transfer_threads=self.loader.transfer_threads,
        )
        items = iter(loader)
        try:
            for number, batch in enumerate(self.waits.on(_in_order(items))):
                if number and number % self.loader.batches_per_execution == 0:
                    self.sync()
                yield batch
            self.sync()
        finally:
            # Its threads must be stopped, also where an exception leaves the loop early.
            items._loader.close()

    def autocast(self) -> AbstractContextManager[None]:
        if self.precision != "bf16":
            return nullcontext()
        # Cached casts of the weights would make a context's second batch another graph than its first.
        return torch.autocast("xla", dtype=torch.bfloat16, cache_enabled=False)

    def gather(self, rows: Tensor) -> Tensor:
        if self.world.size == 1:
            return rows
        return cast(Tensor, _Gather.apply(rows, self._all_ranks))  # type: ignore[no-untyped-call]

    def reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        if self.world.size == 1:
            return
        gradients = [parameter.grad for parameter in reversed(list(parameters)) if parameter.grad is not None]
        # What xm.reduce_gradients does, with the ranks spelled out.
        xm.all_reduce_bucketized_gradients(
            gradients,
            scale=1.0,
            groups=self._all_ranks,
            pin_layout=True,
            # In reverse order: the first travel while the backward pass still computes.
            bucket_cap_mb=int(graph_environment(1)[REDUCE_BUCKET]),
        )
        # One number for all: a scale given above would be a constant of the graph for every gradient.
        share = torch.full((), 1.0 / self.world.size, device=self.torch_device)
        for gradient in gradients:
            gradient.mul_(share)

    def checkpointed(self) -> Callable[..., Any]:
        # torch's own would compute the activations twice in one graph, where the compiler finds them equal and keeps them.
        return checkpoint  # type: ignore[no-any-return]

    def seed(self, value: int) -> None:
        xm.set_rng_state(value, str(self.torch_device))

    def random_state(self) -> Tensor:
        # A 64-bit number without a sign, which safetensors and torch keep as bytes.
        return torch.tensor(list(xm.get_rng_state(str(self.torch_device)).to_bytes(8, "little")), dtype=torch.uint8)

    def restore_random_state(self, state: Tensor) -> None:
        xm.set_rng_state(int.from_bytes(bytes(state.tolist()), "little"), str(self.torch_device))

    def sync(self, *kept: Tensor) -> None:  # noqa: ARG002 - whatever is alive is computed
        torch_xla.sync()

    def read(self, value: Tensor) -> list[float]:
        return [float(item) for item in value.detach().cpu().reshape(-1).tolist()]

    def from_host(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # Not by `to`: equal scalars would become one input of the graph, where the graph that was compiled has many.
        return cast(dict[str, Tensor], xm.send_cpu_data_to_device([dict(tensors)], self.torch_device)[0])

    def to_host(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # Unsynced, every tensor would be computed by a graph of its own.
        self.sync()
        return dict(zip(tensors, torch_xla._XLAC._xla_get_cpu_tensors([each.detach() for each in tensors.values()]), strict=True))

    def all_reduce(self, value: Tensor) -> Tensor:
        if self.world.size == 1:
            return value.clone()
        return cast(Tensor, xm.all_reduce(xm.REDUCE_SUM, value, groups=self._all_ranks))

    def reduce_scatter(self, value: Tensor) -> Tensor:
        if self.world.size == 1:
            return value.clone()
        return _reduce_scatter(value, self._all_ranks)

    def broadcast(self, value: Tensor) -> Tensor:
        if self.world.size == 1:
            return value.clone()
        # Every rank records the same graph: whose value counts is data. Not a scalar: torch-xla makes constants of 0 and 1.
        return self.all_reduce(value * torch.tensor([self.world.is_leader], dtype=value.dtype).to(self.torch_device))

    def barrier(self) -> None:
        if self.world.size > 1:
            self.read(self.all_reduce(torch.zeros(1, device=self.torch_device)))

    def graph_counts(self) -> GraphCounts:
        fallbacks = {name for name in xla_metrics.counter_names() if name.startswith("aten::")}
        return GraphCounts(
            compiled=int(xla_metrics.counter_value("UncachedCompile") or 0),
            fallbacks={name: int(xla_metrics.counter_value(name)) for name in sorted(fallbacks)},
        )

    def graphs(self) -> set[str]:
        return set()

    def graph_module(self, key: str) -> bytes | None:  # noqa: ARG002 - the protocol's
        return None

    def close(self) -> None:
        self.sync()
        xm.wait_device_ops()


def _numbered(batches: Iterable[Batch]) -> Iterator[dict[str, Any]]:
    """Yield batches with their number. The loader's thread would swallow an exception and end the iteration: pass it on."""
    number = 0
    try:
        for batch in batches:
            yield {"number": number, "batch": dict(batch)}
            number += 1
    except BaseException as error:  # noqa: BLE001 - raised again by the consumer
        # In a function, which has nothing that torch-xla would look for tensors in.
        yield {"number": number, "error": lambda error=error: error}


def _in_order(items: Iterator[dict[str, Any]]) -> Iterator[Batch]:
    waiting: dict[int, dict[str, Any]] = {}
    for number in itertools.count():
        while number not in waiting:
            item = next(items, None)
            if item is None:
                return
            waiting[item["number"]] = item
        item = waiting.pop(number)
        if "error" in item:
            raise item["error"]()
        yield item["batch"]


class _Gather(torch.autograd.Function):
    """All-gather of rows whose backward adds up what every rank's loss says about this rank's rows.

    torch-xla's own differentiable gather cuts out this rank's share at a constant position: another graph on every rank.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, all_ranks: list[list[int]]) -> Tensor:
        ctx.all_ranks = all_ranks
        # With a pinned layout torch-xla gathers by adding up padded shares, whose padding differs between ranks.
        return cast(Tensor, xm.all_gather(rows, dim=0, groups=all_ranks, pin_layout=False))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter(gradients[0], ctx.all_ranks), None


def _reduce_scatter(value: Tensor, all_ranks: list[list[int]]) -> Tensor:
    return cast(
        Tensor,
        xm.reduce_scatter(
            xm.REDUCE_SUM, value, scale=1.0, scatter_dim=0, shard_count=len(all_ranks[0]), groups=all_ranks, pin_layout=False
        ),
    )
