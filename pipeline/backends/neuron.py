"""The `neuron` kind: NeuronCores through torch-xla and torch-neuronx, one core per rank (Neuron SDK 2.29.1).

Training records graphs like `xla`; the compiler, neuronx-cc, is called by the runtime underneath, unless a graph is in the
persistent cache (NEURON_COMPILE_CACHE_URL) already. Evaluation and embedding run traced forms instead, whose weights are not in
the graph: one compilation per shape serves every week's model. Written against the documentation, not run on Trainium.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch_xla.runtime as xr
from torch import Tensor, nn

from pipeline.backends.device import EncodeFunction, ModuleT, resolve_precision
from pipeline.backends.eager import EagerDevice
from pipeline.backends.lazy import LazyDevice
from pipeline.backends.traced import TracedEncoder
from pipeline.config import LoaderConfig
from pipeline.errors import BadConfig, Defect, MissingInput
from pipeline.run.world import World
from pipeline.sdk.compile_cache import HLO_FILE, GraphState, extraction_mode, modules
from pipeline.store import join, read_bytes

CACHE_VARIABLE = "NEURON_COMPILE_CACHE_URL"


class NeuronDevice(LazyDevice):
    kind = "neuron"

    def __init__(self, precision: str, world: World, loader: LoaderConfig) -> None:
        super().__init__(precision, world, loader)
        self.computes = not extraction_mode()

    def graphs(self) -> set[str]:
        cache = os.environ.get(CACHE_VARIABLE)
        return {key for key, state in modules(cache).items() if state is GraphState.DONE} if cache else set()

    def graph_module(self, key: str) -> bytes | None:
        try:
            return read_bytes(join(os.environ[CACHE_VARIABLE], key, HLO_FILE))
        except MissingInput:
            return None

    def close(self) -> None:
        super().close()
        if dist.is_initialized():
            dist.destroy_process_group()


class NeuronInference(EagerDevice):
    """One NeuronCore that runs traced encoders: tensors go in and come out on the host."""

    kind = "neuron"
    compiles = True

    def autocast(self) -> AbstractContextManager[None]:
        return nullcontext()  # what is cast was decided when the encoder was traced

    def place(self, module: ModuleT) -> ModuleT:
        return module

    def for_inference(self, encoder: nn.Module, traces: Path | None) -> EncodeFunction:
        if traces is None:
            raise Defect("evaluation and embedding on neuron need traced encoders", value="none given")
        return TracedEncoder(traces, encoder.state_dict())


def open_device(
    precision: str,
    world: World,
    *,
    timeout_seconds: int,  # noqa: ARG001 - the runtime has no timeout; the supervisor has
    loader: LoaderConfig,
) -> NeuronDevice:
    """Join the gang: torchrun's environment says which core is this rank's and where the others are.

    Raises:
        BadConfig: torch-neuronx is not installed.
        Defect: the runtime sees another number of ranks.
    """
    require_neuron()
    if world.size > 1:
        # Registers the backend `xla` and its rendezvous, which takes the address from torchrun's MASTER_ADDR and MASTER_PORT, as
        # `env://` does, and alone tells torch-xla which devices are the world's (torch-xla 2.9, _internal/rendezvous.py).
        import torch_xla.distributed.xla_backend  # noqa: F401

        dist.init_process_group("xla", init_method="xla://")
    if xr.world_size() != world.size:
        raise Defect("the Neuron runtime sees another number of ranks", value=xr.world_size(), rule=f"{world.size} ranks")
    return NeuronDevice(resolve_precision("neuron", precision), world, loader)


def open_inference_device(precision: str, world: World, *, timeout_seconds: int) -> NeuronInference:
    """Open one core for traced encoders.

    Raises:
        BadConfig: torch-neuronx is not installed.
    """
    require_neuron()
    precision = resolve_precision("neuron", precision)
    return NeuronInference(torch.device("cpu"), precision, world, backend="gloo", timeout_seconds=timeout_seconds)


def traced_function(
    function: Callable[..., Any], example: tuple[Tensor, ...], path: Path, *, flags: Sequence[str]
) -> Callable[..., Any]:
    """Compile a function without weights and load it onto this process's core.

    Args:
        example: its inputs on the host: other shapes are refused.
        path: of a new file for the traced form.
        flags: neuronx-cc's.
    """
    import torch_neuronx

    # On the host's processor, and then from the file: what is loaded goes to a core.
    torch.jit.save(torch_neuronx.trace(function, example, compiler_args=list(flags), cpu_backend=True), str(path))  # type: ignore[no-untyped-call]
    return cast(Callable[..., Any], torch.jit.load(str(path)))  # type: ignore[no-untyped-call]


def require_neuron() -> None:
    """Refuse the kind without torch-neuronx.

    Raises:
        BadConfig: torch-neuronx is not installed, or is the empty placeholder of that name.
    """
    try:
        import torch_neuronx

        complete = hasattr(torch_neuronx, "trace")
    except ImportError:
        complete = False
    if not complete:
        raise BadConfig(
            "the kind neuron needs torch-neuronx, which is not installed",
            value="device.kind = neuron",
            rule="it comes with the Neuron image or the Neuron pip repository; elsewhere the name is an empty placeholder",
            remedy="use the image of containers/neuron, or another device.kind",
        )
