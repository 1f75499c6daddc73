"""Traced forms of an encoder on `neuron`: one compiled program per shape, with weights outside the graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from pipeline.errors import Defect, MissingInput


class TracedEncoder:
    """Traced forms of an encoder, one per shape, with this week's weights.

    Args:
        folder: holds what `trace_encoder` wrote.
        weights: the encoder's state_dict, which is what the Weight Replacement API takes.

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
            # torch.jit.load puts the graph on a core, but not weights outside it. One core is visible, so both are on the same
            # one (github.com/huggingface/optimum-neuron/pull/725: inference fails where they are not).
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


def trace_encoder(encoder: nn.Module, shapes: Sequence[tuple[int, int]], folder: Path, *, flags: Sequence[str]) -> list[Path]:
    """Trace an encoder once for every shape, with weights outside the graph; one file per shape.

    The traced forms hold NaN as weights: a form with a weight that `replace_weights` missed, or that the compiler folded into the
    graph, returns NaN instead of another model's embeddings.

    Args:
        encoder: on the host, in evaluation mode; takes tokens, segments and positions (pipeline.model.encoder.PackedEncoder). Its
            weights become NaN.
        shapes: (rows, tokens) of batches.
        flags: neuronx-cc's, which alone decide what is cast.
    """
    import torch_neuronx

    with torch.no_grad():
        for weight in encoder.parameters():
            weight.fill_(torch.nan)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for rows, length in shapes:
        zeros = torch.zeros((rows, length), dtype=torch.int64)
        example = (zeros, torch.ones_like(zeros), zeros.clone())
        with torch.no_grad():
            # On the host's processor: compiling needs no core, and the target may be another machine's.
            form = torch_neuronx.trace(
                encoder, example, compiler_args=list(flags), inline_weights_to_neff=False, cpu_backend=True
            )
        path = folder / f"encode-{rows}x{length}.pt"
        torch.jit.save(form, str(path))  # type: ignore[no-untyped-call]
        written.append(path)
    return written
