"""The traced form of an encoder on `neuron`: one compiled program of one shape, with weights outside the graph."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

FORM = "encode.pt"


class TracedEncoder:
    """The traced form of an encoder, with this week's weights. It refuses any other shape than its own.

    Args:
        folder: holds what `trace_encoder` wrote.
        weights: the encoder's state_dict, which is what the Weight Replacement API takes.
    """

    def __init__(self, folder: Path, weights: dict[str, Tensor]) -> None:
        import torch_neuronx

        self._form = torch.jit.load(str(folder / FORM))  # type: ignore[no-untyped-call]
        torch_neuronx.replace_weights(self._form, weights)
        # torch.jit.load puts the graph on a core, but not weights outside it. One core is visible, so both are on the same
        # one (github.com/huggingface/optimum-neuron/pull/725: inference fails where they are not).
        torch_neuronx.move_trace_to_device(self._form, 0)

    def __call__(self, *inputs: Tensor) -> Tensor:
        return cast(Tensor, self._form(*inputs))


def trace_encoder(encoder: nn.Module, shape: tuple[int, int], folder: Path, *, flags: Sequence[str]) -> None:
    """Trace an encoder with its weights outside the graph, into FORM in a new folder.

    The traced form holds NaN as weights: a form with a weight that `replace_weights` missed, or that the compiler folded into the
    graph, returns NaN instead of another model's embeddings.

    Args:
        encoder: on the host, in evaluation mode; takes tokens, segments and positions (pipeline.model.encoder.PackedEncoder). Its
            weights become NaN.
        shape: (rows, tokens) of a batch.
        flags: neuronx-cc's, which alone decide what is cast.
    """
    import torch_neuronx

    with torch.no_grad():
        for weight in encoder.parameters():
            weight.fill_(torch.nan)
    folder.mkdir(parents=True)
    zeros = torch.zeros(shape, dtype=torch.int64)
    example = (zeros, torch.ones_like(zeros), zeros.clone())
    with torch.no_grad():
        # On the host's processor: compiling needs no core, and the target may be another machine's.
        form = torch_neuronx.trace(encoder, example, compiler_args=list(flags), inline_weights_to_neff=False, cpu_backend=True)
    torch.jit.save(form, str(folder / FORM))  # type: ignore[no-untyped-call]
