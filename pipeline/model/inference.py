"""Encoding many token lists with one encoder: equal ones once, sorted by length, cut into batches, results in input order.

Devices that run operations one by one get batches of similar lengths, in whatever shape they have. Devices that compile get the
one shape that the configuration names, and packed rows: several token lists one behind the other, until the row is full.

The same function serves the evaluation inside training, the evaluate stage and the embed stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from pipeline.model.encoder import Encoder, PackedEncoder, prepare_for_inference
from pipeline.packing import texts_per_row

if TYPE_CHECKING:
    from pipeline.backends.device import Batch, Device, EncodeFunction

TokenList = Sequence[int] | npt.NDArray[np.integer]
"""A text's token ids."""

LONGEST_PADDING = 1 / 16
"""A batch whose shape is free ends where a row would be shorter than the longest one by more than this share of it."""

LEAST_OF_BATCH = 1 / 8
"""But not before it has this share of the tokens that it may have: calls for a few rows cost more than their padding."""

LENGTHS_PER_OCTAVE = 32
"""A batch whose shape is free is as long as one of so many numbers from each power of two to the next (32, 33, ... 64, 66, ...),
and has a power of two of rows. oneDNN, and torch in front of it, keep what they made for the latest 1024 shapes: with shapes as
the data gives them, a few MB more every window (883 shapes after 24 windows of mixed texts, of these 215), and what is freed
between is too scattered to be used again. Padding grows by 0.1 to 0.7 %; no processor time that could be measured."""


PROBE_SEED = 0x9B0B
"""Probe rows are the same in every process."""


class Encoded(NamedTuple):
    """
    Attributes:
        embeddings: (N, D) fp32 on the host, row i for token list i; (0, 0) when there are none.
        tokens: that were computed, without padding: equal token lists are computed once.
        slots: the same with padding.
    """

    embeddings: Tensor
    tokens: int
    slots: int


@dataclass(frozen=True, slots=True)
class EncodeBatch:
    """Which token lists are encoded together, how large the batch is with its padding, and where each of them stands in it.

    Attributes:
        rows: indices into the token lists.
        slots: rows of the batch, padding rows included.
        length: tokens of a row, padding included.
        starts: of each token list its first place among the batch's slots * length.
        outputs: of each token list its row among the embeddings.
    """

    rows: npt.NDArray[np.int64]
    slots: int
    length: int
    starts: npt.NDArray[np.int64]
    outputs: npt.NDArray[np.int64]


def encode(
    encoder: EncodeFunction,
    device: Device,
    token_lists: Sequence[TokenList],
    length: int,
    tokens_per_batch: int,
    *,
    on_progress: Callable[[int, float], None] | None = None,
) -> Encoded:
    """Embeddings of all token lists.

    Args:
        encoder: already on the device, see `for_encoding`; a module is switched to evaluation mode meanwhile.
        token_lists: token ids with special tokens, each at least 1 and at most `length` long.
        length: of a row, in tokens.
        tokens_per_batch: a batch has this / its length rows, at least 1.
        on_progress: called after every batch with the number of token lists done, and the share of the padded tokens computed.
    """
    first, place, copies = _distinct(token_lists)
    lengths = np.fromiter((len(token_lists[index]) for index in first.tolist()), dtype=np.int64, count=len(first))
    static = device.compiles
    plan = plan_batches(lengths, length, tokens_per_batch, static=static)
    if not plan:
        return Encoded(torch.empty((0, 0)), 0, 0)
    result: Tensor | None = None
    padded = sum(batch.slots * batch.length for batch in plan)
    done = computed = 0
    # torch-xla's tensors cannot be inference tensors (torch-xla 2.9).
    without_gradients = torch.no_grad() if device.compiles else torch.inference_mode()
    with _evaluation(encoder), without_gradients, device.autocast():
        # One batch stays in flight: the host fetches a batch's embeddings while the device computes the next.
        waiting: tuple[EncodeBatch, Tensor] | None = None
        for batch, tensors in zip(plan, device.batches(_batches(token_lists, first, plan, static=static)), strict=True):
            embeddings = encoder(*tensors.values())
            device.sync()
            if result is None:
                result = torch.empty((len(first), embeddings.shape[1]), dtype=torch.float32)
            if waiting is not None:
                _store(result, *waiting)
            waiting = batch, embeddings
            done += int(copies[batch.rows].sum())
            computed += batch.slots * batch.length
            if on_progress:
                on_progress(done, computed / padded)
        assert result is not None
        assert waiting is not None
        _store(result, *waiting)
    # An ordinary tensor again: inference tensors are refused by autograd.
    return Encoded(result[torch.from_numpy(place)], int(lengths.sum()), padded)


def _distinct(
    token_lists: Sequence[TokenList],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return where each distinct token list comes first; for each list its index among those; and how often each occurs."""
    places: dict[bytes, int] = {}
    place = np.fromiter(
        (places.setdefault(np.asarray(tokens, dtype=np.int32).tobytes(), len(places)) for tokens in token_lists),
        dtype=np.int64,
        count=len(token_lists),
    )
    _, first = np.unique(place, return_index=True)
    return first, place, np.bincount(place, minlength=len(places))


def for_encoding(encoder: Encoder, *, compiles: bool) -> nn.Module:
    """Return an encoder as `encode` calls it on a device that compiles graphs, or on one that does not."""
    return PackedEncoder(encoder) if compiles else encoder


def inference_form(encoder: Encoder, *, compiles: bool, bf16: bool) -> nn.Module:
    """Return an encoder as evaluate and embed call it; it trains no more.

    Args:
        bf16: keep and compute all layers in bf16: autocast would turn activations into fp32 and back. Pooling and head stay fp32.
    """
    if bf16:
        encoder.backbone.to(torch.bfloat16)
    prepare_for_inference(encoder, fused_attention=not compiles)
    return for_encoding(encoder, compiles=compiles).eval()


def plan_batches(lengths: npt.NDArray[np.int64], longest: int, tokens_per_batch: int, *, static: bool) -> list[EncodeBatch]:
    """Cut token lists of these lengths into batches, longest first (a batch too large for the memory shows at once).

    Args:
        static: rows of `longest` tokens, as many in every batch: several token lists are packed into a row.
            False: batches hardly longer than their longest row, without padding rows, and of a few hundred shapes in all
            (LENGTHS_PER_OCTAVE).

    Raises:
        ValueError: a length of 0, or one above `longest`.
    """
    if len(lengths) == 0:
        return []
    if lengths.min() < 1 or lengths.max() > longest:
        raise ValueError(f"lengths from {lengths.min()} to {lengths.max()} do not fit rows of {longest} tokens")
    order = np.argsort(-lengths, kind="stable")
    return list((_packed_batches if static else _free_batches)(lengths, order, longest, tokens_per_batch))


def _packed_batches(
    lengths: npt.NDArray[np.int64], order: npt.NDArray[np.int64], row_length: int, tokens_per_batch: int
) -> Iterator[EncodeBatch]:
    """Pack token lists into rows, each into the fullest row that still has room (best fit), the longest first.

    Args:
        order: the token lists by falling length.
    """
    most, slots = texts_per_row(row_length), batch_rows(row_length, tokens_per_batch)
    texts = list[int]()  # in each row
    # By the tokens that are left in them: rows, and one bit for each number of tokens of which there are some.
    rows_with: list[list[int]] = [[] for _ in range(row_length + 1)]
    there = 0
    places = np.empty((3, len(order)), np.int64)
    for place, length in enumerate(lengths[order].tolist()):
        if roomy := there >> length:
            left = length + (roomy & -roomy).bit_length() - 1
            row = rows_with[left].pop()
            if not rows_with[left]:
                there ^= 1 << left
        else:
            row, left = len(texts), row_length
            texts.append(0)
        places[:, place] = row, row_length - left, texts[row]
        texts[row] += 1
        left -= length
        if left and texts[row] < most:
            rows_with[left].append(row)
            there |= 1 << left
    rows, starts, numbers = places
    batches = rows // slots
    by_batch = np.argsort(batches, kind="stable")
    for chosen in np.split(by_batch, np.flatnonzero(np.diff(batches[by_batch])) + 1):
        within = rows[chosen] % slots
        yield EncodeBatch(order[chosen], slots, row_length, within * row_length + starts[chosen], within * most + numbers[chosen])


def _free_batches(
    lengths: npt.NDArray[np.int64], order: npt.NDArray[np.int64], longest: int, tokens_per_batch: int
) -> Iterator[EncodeBatch]:
    falling = -lengths[order]
    start = 0
    while start < len(order):
        length = min(_rounded_up(-int(falling[start])), longest)
        most = max(1, tokens_per_batch // length)
        least = min(most, max(1, int(LEAST_OF_BATCH * tokens_per_batch) // length))
        near = int(np.searchsorted(falling, -length * (1 - LONGEST_PADDING), side="right"))
        slots = 1 << min(most, max(least, near - start), len(order) - start).bit_length() - 1
        places = np.arange(slots)
        yield EncodeBatch(order[start : start + slots], slots, length, places * length, places)
        start += slots


def _rounded_up(length: int) -> int:
    """The next of the lengths that LENGTHS_PER_OCTAVE allows."""
    step = max(1, (1 << (length - 1).bit_length()) // (2 * LENGTHS_PER_OCTAVE))
    return -(-length // step) * step


def batch_rows(length: int, tokens_per_batch: int) -> int:
    """Return the rows of a batch of rows of so many tokens, on devices that compile."""
    return max(1, tokens_per_batch // length)


def probe_rows(slots: int, length: int, vocabulary: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Fixed packed rows that fill every place: short texts, and where there are several rows one text as long as the last row.

    Args:
        slots, length: rows and tokens per row.
        vocabulary: number of token ids.

    Returns:
        tokens, segments and positions, each (slots, length) int64, see `Encoder.packed`; and the indices (N,) of the embeddings
        that belong to a text.
    """
    tokens = torch.randint(vocabulary, (slots, length), generator=torch.Generator().manual_seed(PROBE_SEED))
    places = torch.arange(length).repeat(slots, 1)
    each = length // texts_per_row(length)
    segments, positions = places // each + 1, places % each
    if slots > 1:
        segments[-1], positions[-1] = 1, places[-1]
    # What is left of a row after its last text is padding.
    segments[segments > texts_per_row(length)] = 0
    texts = (segments[:, :, None] == (torch.arange(texts_per_row(length)) + 1)).any(dim=1).flatten().nonzero().flatten()
    return (tokens, segments, positions), texts


def pad(token_lists: Sequence[TokenList], slots: int, length: int) -> tuple[Tensor, Tensor]:
    """Token lists as tokens and mask, both (slots, length) int64.

    The padding token is 0 in every family: masked positions reach nothing. Padding rows keep one token, because a softmax over
    nothing is not a number.
    """
    tokens = np.zeros((slots, length), dtype=np.int64)
    mask = np.zeros((slots, length), dtype=np.int64)
    for row, values in enumerate(token_lists):
        tokens[row, : len(values)] = values
        mask[row, : len(values)] = 1
    mask[len(token_lists) :, 0] = 1
    return torch.from_numpy(tokens), torch.from_numpy(mask)


def packed_rows(token_lists: Sequence[TokenList], batch: EncodeBatch) -> Batch:
    """Token lists, those of the batch in its order, as tokens, segments and positions, see `Encoder.packed`."""
    filled = np.zeros((3, batch.slots * batch.length), dtype=np.int64)
    tokens, segments, positions = filled
    counted = np.arange(batch.length)
    numbers = batch.outputs % texts_per_row(batch.length) + 1
    for values, start, number in zip(token_lists, batch.starts.tolist(), numbers.tolist(), strict=True):
        stop = start + len(values)
        tokens[start:stop] = values
        segments[start:stop] = number
        positions[start:stop] = counted[: len(values)]
    return {
        name: torch.from_numpy(row.reshape(batch.slots, batch.length))
        for name, row in zip(("tokens", "segments", "positions"), filled, strict=True)
    }


def _batches(
    token_lists: Sequence[TokenList], first: npt.NDArray[np.int64], plan: Sequence[EncodeBatch], *, static: bool
) -> Iterator[Batch]:
    for batch in plan:
        own = [token_lists[index] for index in first[batch.rows].tolist()]
        if static:
            yield packed_rows(own, batch)
        else:
            tokens, mask = pad(own, batch.slots, batch.length)
            yield {"tokens": tokens, "mask": mask}


def _store(result: Tensor, batch: EncodeBatch, embeddings: Tensor) -> None:
    result[torch.from_numpy(batch.rows)] = embeddings.cpu()[torch.from_numpy(batch.outputs)].float()


@contextmanager
def _evaluation(encoder: EncodeFunction) -> Iterator[None]:
    training = isinstance(encoder, nn.Module) and encoder.training
    if training:
        encoder.eval()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if training:
            encoder.train()  # type: ignore[attr-defined]
