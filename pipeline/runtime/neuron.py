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
from typing import Any

import torch
import torch.distributed as dist
import torch_xla.runtime as xr
from torch import Tensor, nn

from pipeline.config import LoaderConfig
from pipeline.errors import BadConfig, Defect, MissingInput
from pipeline.runtime.device import EncodeFunction, ModuleT, resolve_precision
from pipeline.runtime.eager import EagerDevice
from pipeline.runtime.lazy import LazyDevice
from pipeline.runtime.neuron_compile import HLO_FILE, modules
from pipeline.runtime.store import join, read_bytes
from pipeline.runtime.world import World

CACHE_VARIABLE = "NEURON_COMPILE_CACHE_URL"


class NeuronDevice(LazyDevice):
    kind = "neuron"

    def graphs(self) -> set[str]:
        cache = os.environ.get(CACHE_VARIABLE)
        return set(modules(cache)) if cache else set()

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

    def autocast(self) -> AbstractContextManager[None]:
        return nullcontext()  # what is cast was decided when the encoder was traced

    def place(self, module: ModuleT) -> ModuleT:
        return module

    def for_inference(self, encoder: nn.Module, traces: Path | None) -> EncodeFunction:
        if traces is None:
            raise Defect("evaluation and embedding on neuron need traced encoders", value="none given")
        return TracedEncoder(traces, all_weights(encoder))


class TracedEncoder:
    """Traced forms of an encoder, one per shape, with this week's weights.

    Args:
        folder: holds what `trace_encoder` wrote.
        weights: see `all_weights`.

    Raises:
        MissingInput: no traced form in the folder.
    """

    def __init__(self, folder: Path, weights: dict[str, Tensor]) -> None:
        import torch_neuronx

        self._forms: dict[tuple[int, ...], Callable[..., Tensor]] = {}
        for path in sorted(folder.glob("encode-*.pt")):
            rows, length = path.stem.removeprefix("encode-").split("x")
            form = torch.jit.load(str(path))  # type: ignore[no-untyped-call]
            torch_neuronx.replace_weights(form, weights)
            # With weights outside the graph nothing is on the core yet (PyTorch NeuronX Tracing API).
            torch_neuronx.move_trace_to_device(form, 0)
            self._forms[int(rows), int(length)] = form
        if not self._forms:
            raise MissingInput(
                "there are no traced encoders", value=folder, remedy="delete the compiled set: compile makes it again"
            )

    def __call__(self, tokens: Tensor, *others: Tensor) -> Tensor:
        form = self._forms.get(tuple(tokens.shape))
        if form is None:
            raise Defect(
                "no encoder was traced for this shape",
                value=f"{tuple(tokens.shape)}",
                rule="one of " + ", ".join(f"{rows} x {length}" for rows, length in sorted(self._forms)),
                remedy="report it: shapes follow from the plan alone",
            )
        return form(tokens, *others)


def all_weights(encoder: nn.Module) -> dict[str, Tensor]:
    """All that a trace may hold beside its graph, by name: also buffers that are no part of the encoder's state (positions)."""
    return {**dict(encoder.named_buffers()), **encoder.state_dict()}


def trace_encoder(
    encoder: nn.Module, shapes: Sequence[tuple[int, int]], folder: Path, *, flags: Sequence[str], precision: str
) -> list[Path]:
    """Trace an encoder once for every shape, with weights outside the graph; one file per shape.

    Args:
        encoder: on the host, in evaluation mode; takes tokens, segments and positions (pipeline.model.encoder.PackedEncoder).
        shapes: (rows, tokens) of batches.
        flags: neuronx-cc's.
        precision: `bf16` casts with torch's autocast while tracing; otherwise nothing is cast here.
    """
    import torch_neuronx

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    cast: AbstractContextManager[Any] = (
        torch.autocast("xla", dtype=torch.bfloat16, cache_enabled=False) if precision == "bf16" else nullcontext()
    )
    for rows, length in shapes:
        zeros = torch.zeros((rows, length), dtype=torch.int64)
        example = (zeros, torch.ones_like(zeros), zeros.clone())
        with torch.no_grad(), cast:
            # On the host's processor: compiling needs no core, and the target may be another machine's.
            form = torch_neuronx.trace(
                encoder, example, compiler_args=list(flags), inline_weights_to_neff=False, cpu_backend=True
            )
        path = folder / f"encode-{rows}x{length}.pt"
        torch.jit.save(form, str(path))  # type: ignore[no-untyped-call]
        written.append(path)
    return written


def open_device(
    precision: str,
    world: World,
    *,
    threads: int | None,
    timeout_seconds: int,  # noqa: ARG001 - the runtime waits for ever; the supervisor does not
    loader: LoaderConfig,
) -> NeuronDevice:
    """Join the gang: torchrun's environment says which core is this rank's and where the others are.

    Raises:
        BadConfig: torch-neuronx is not installed.
        Defect: the runtime sees another number of ranks.
    """
    require_neuron()
    if threads is not None:
        torch.set_num_threads(threads)
    if world.size > 1:
        # Registers the backend `xla`, which takes its addresses from torchrun's environment.
        import torch_xla.distributed.xla_backend  # noqa: F401

        dist.init_process_group("xla")
    if xr.world_size() != world.size:
        raise Defect("the Neuron runtime sees another number of ranks", value=xr.world_size(), rule=f"{world.size} ranks")
    return NeuronDevice(resolve_precision("neuron", precision), world, loader)


def open_inference_device(precision: str, world: World, *, threads: int | None, timeout_seconds: int) -> NeuronInference:
    """One core for traced encoders.

    Raises:
        BadConfig: torch-neuronx is not installed.
    """
    require_neuron()
    if threads is not None:
        torch.set_num_threads(threads)
    precision = resolve_precision("neuron", precision)
    return NeuronInference(torch.device("cpu"), precision, world, backend="gloo", timeout_seconds=timeout_seconds)


def require_neuron() -> None:
    """
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
