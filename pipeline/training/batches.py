"""Training batches: from memory-mapped rows, in the stored order, all that the device needs per step.

Each rank reads only its own rows' tokens; hashes and lengths, which are small, of the whole global batch. No array of all rows is
in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from pipeline.backends.device import Batch
from pipeline.config import TrainConfig
from pipeline.dataset.classes import NO_CLASS
from pipeline.dataset.ingested import Hashes
from pipeline.dataset.row_files import read_table
from pipeline.dataset.sampler import MASKED, Bin, read_order
from pipeline.dataset.steps import ORDER
from pipeline.model.inference import pad
from pipeline.model.loss import DocumentRole
from pipeline.packing import BinShape, texts_per_row
from pipeline.run.world import World
from pipeline.training.digest import digest_batch
from pipeline.training.micro_batches import CLASSES_OF, TOWERS

Rows = npt.NDArray[np.int32]
Tokens = npt.NDArray[Any]
EMPTY: Tokens = np.empty(0, np.uint16)

GROUPS, LEAST_TEXTS = 6, 8
"""Groups of similar lengths at most, and texts of one, about: where each is a few operations of its own."""


class Padding(Enum):
    """The padding of a batch of rows of different lengths."""

    PACKED = auto()
    """Texts share rows, in the shapes that are set, for devices that compile a graph per shape."""

    LONGEST = auto()
    """Texts of similar lengths are as long as the longest of them."""

    NONE = auto()
    """As LONGEST on the host; the batch also says where its tokens are, and the encoder computes nothing else."""


@dataclass(frozen=True, slots=True)
class StepFacts:
    """The host's facts about a global batch.

    Attributes:
        pairs: valid rows.
        tokens: of queries and documents, without padding.
        slots: tokens computed, padding included.
        digest: of the global batch (pipeline/training/digest); the leader's, empty on other ranks.
    """

    pairs: int
    tokens: int
    slots: int
    digest: str = ""


class Column:
    """Random access to the rows of a memory-mapped column in any number of chunks, without a copy of it."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        self._chunks = [chunk for chunk in column.chunks if len(chunk)]
        self._starts = np.cumsum([0, *(len(chunk) for chunk in self._chunks)])

    def _places(self, rows: Rows) -> Iterator[tuple[int, npt.NDArray[np.intp], npt.NDArray[np.int64]]]:
        """Yield the number of each chunk that has some of the rows, their places among these, and in the chunk."""
        chunks = np.searchsorted(self._starts, rows, side="right") - 1
        for chunk in np.unique(chunks).tolist():
            places = np.flatnonzero(chunks == chunk)
            yield chunk, places, rows[places] - self._starts[chunk]


class NumberColumn(Column):
    """A column of numbers."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        super().__init__(column)
        self._type = column.type.to_pandas_dtype()

    def __getitem__(self, rows: Rows) -> npt.NDArray[Any]:
        found = np.empty(len(rows), self._type)
        for chunk, places, inside in self._places(rows):
            found[places] = self._chunks[chunk].to_numpy()[inside]
        return found


class TokenColumn(Column):
    """A column of token lists, of any integer type."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        super().__init__(column)
        self._offsets = [chunk.offsets.to_numpy() for chunk in self._chunks]
        self._values = [chunk.values.to_numpy() for chunk in self._chunks]

    def lists(self, rows: Rows) -> list[Tokens]:
        """The token lists of some rows."""
        found = [EMPTY] * len(rows)
        for chunk, places, inside in self._places(rows):
            offsets, values = self._offsets[chunk], self._values[chunk]
            for place, row in zip(places.tolist(), inside.tolist(), strict=True):
                found[place] = values[offsets[row] : offsets[row + 1]]
        return found

    def lengths(self, rows: Rows) -> npt.NDArray[np.int32]:
        """The number of tokens of some rows."""
        found = np.empty(len(rows), np.int32)
        for chunk, places, inside in self._places(rows):
            found[places] = self._offsets[chunk][inside + 1] - self._offsets[chunk][inside]
        return found

    def joined(self, rows: Rows) -> npt.NDArray[np.int32]:
        """The token lists of many rows one after another."""
        return np.concatenate([EMPTY, *self.lists(rows)]).astype(np.int32)


class Batches(Protocol):
    """A source of batches for the training loop."""

    def iterate(self, start: int, stop: int) -> Iterator[Batch]:
        """Batches of the steps start, ..., stop - 1, on the host: `accumulation` of them for each step."""

    def take_facts(self, step: int) -> StepFacts:
        """What is known of a step's global batch, once it has been yielded; it is forgotten then."""

    def row_ids(self, step: int) -> list[str]:
        """Names of the rows of a step's global batch."""


class TrainingBatches:
    """This rank's batches of all steps.

    Args:
        folder: with `train.arrow` and the order of its rows, which has so many bins a step as all ranks' batches have.
        world: this rank among all.
        train: the bins of a batch, and the batches of a step.
        padding: see Padding.
        apart: whether each bin is a micro-batch; else all of a batch's bins are one.
        learning_rate: step from 0 -> learning rate; it travels with the batch (as a constant it would make a graph per step).
        shards: URIs of the shards, by the numbers that rows have.
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        train: TrainConfig,
        *,
        padding: Padding = Padding.PACKED,
        apart: bool = False,
        learning_rate: Callable[[int], float],
        shards: Sequence[str] = (),
    ) -> None:
        self._table = read_table(folder / "train.arrow")
        shape = train.bin_shape
        towers = (*TOWERS, *(f"negative_{number}" for number in range(shape.documents - 1)))
        self._tokens = {tower: TokenColumn(self._table[f"{tower}_tokens"]) for tower in towers}
        self._hash = {tower: NumberColumn(self._table[f"{tower}_hash"]) for tower in towers}
        self._class = NumberColumn(self._table["class"])
        self._world = world
        self._train = train
        self._shape = shape
        self._padding = padding
        self._apart = apart
        self._learning_rate = learning_rate
        self._shards = shards
        self._facts: dict[int, StepFacts] = {}
        self._order = read_order(folder / ORDER, train.bins * train.accumulation * world.size, self._shape.pairs)
        self.steps = len(self._order)

    def iterate(self, start: int, stop: int) -> Iterator[Batch]:
        """Batches of the steps start, ..., stop - 1, on the host.

        Yields:
            roles (B, N * documents): int32, see DocumentRole; query_roles (B, N): those of queries for each pair's document, if
            the loss is symmetric; or instead of both, under CLASSES_OF and the task's name, the classes of queries (B,): int32;
            weights (B,) and learning_rate (1,): fp32. And of each micro-batch, under the name, `/` and its number, what
            `packed_texts` or `grouped_texts` returns.
        """
        for step in range(start, stop):
            rows = np.array(self._order[step])
            self._facts[step] = self._count(rows)
            task, weights = self._classified(rows), (rows != MASKED).astype(np.float64)
            if task and (by_class := self._train.tasks[task].class_weights):
                weights *= np.array([by_class.get(name, 1.0) for name in self._train.classes[task]])[
                    self._class[np.maximum(rows, 0)]
                ]
            # Each query weighs the same in its step, but for its class, in whichever of the step's batches it is.
            weights *= self._world.size / weights.sum()
            for share, own in zip(*(np.split(each, self._train.accumulation) for each in (rows, weights)), strict=True):
                yield self._batch(share, task, own, self._learning_rate(step))

    def _batch(self, rows: Rows, task: str | None, weights: npt.NDArray[np.float64], learning_rate: float) -> Batch:
        """This rank's share of the `rows` of all ranks and their weights, which are classified for a task, or None."""
        size = self._train.batch_size
        own, valid = slice(self._world.rank * size, (self._world.rank + 1) * size), rows != MASKED
        bins = np.split(rows[own], self._train.bins if self._apart else 1)
        texts = self._packed if self._padding is Padding.PACKED else self._unpacked
        if task:
            found = {f"{CLASSES_OF}{task}": np.where(valid, self._class[np.maximum(rows, 0)], 0)[own]}
        else:
            query, document, there = self._hashes(rows)
            found = {"roles": roles(query, document, there, own.start, size)}
            if self._train.symmetric:
                found["query_roles"] = roles(document[:, 0], query[:, None], there[:, :1], own.start, size)
        return {
            **{f"{name}/{number}": tensor for number, part in enumerate(bins) for name, tensor in texts(part).items()},
            **{name: torch.from_numpy(values) for name, values in found.items()},
            "weights": torch.from_numpy(weights[own].astype(np.float32)),
            # Not a scalar: torch-xla shares equal scalars, so a rate that equals another constant would change the graph.
            "learning_rate": torch.tensor([learning_rate], dtype=torch.float32),
        }

    def take_facts(self, step: int) -> StepFacts:
        """What is known of a step's global batch, once it has been yielded; it is forgotten then."""
        return self._facts.pop(step)

    def row_ids(self, step: int) -> list[str]:
        """Names of the rows of a step's global batch: SHARD:LINE."""
        batch = self._order[step]
        rows = self._table.select(["shard", "line"]).take(pa.array(batch[batch != MASKED])).to_pylist()
        named = dict(enumerate(self._shards))
        return [f"{named.get(row['shard'], row['shard'])}:{row['line']}" for row in rows]

    def _classified(self, rows: Rows) -> str | None:
        """The task of a step's rows if they are classified, else None."""
        first = int(rows[rows != MASKED][0])
        task: str = self._table["task"][first].as_py()
        return None if self._table["class"][first].as_py() == NO_CLASS else task

    def _hashes(self, rows: Rows) -> tuple[Hashes, Hashes, npt.NDArray[np.bool_]]:
        """The hashes of queries (N,) and documents (N, documents), and whether there is one; any hash where there is none."""
        known = np.maximum(rows, 0)
        query, *documents = (column[known] for column in self._hash.values())
        lengths = [self._tokens[tower].lengths(known) for tower in self._tokens if tower not in TOWERS]
        there = np.stack([rows != MASKED, *((rows != MASKED) & (each > 0) for each in lengths)], axis=1)
        return query, np.stack(documents, axis=1), there

    def _packed(self, rows: Rows) -> Batch:
        lists = [
            [column.lists(each[each != MASKED]) for column in self._tokens.values()]
            for each in rows.reshape(-1, self._shape.pairs)
        ]
        return packed_texts([list(zip(*towers, strict=True)) for towers in lists], self._shape)

    def _unpacked(self, rows: Rows) -> Batch:
        places = np.flatnonzero(rows != MASKED)
        lists = [column.lists(rows[places]) for column in self._tokens.values()]
        there = np.array([[len(tokens) > 0 for tokens in each] for each in lists], np.bool_).reshape(len(lists), -1)
        texts = np.zeros((len(lists), len(rows)), np.int64)
        texts[:, places] = np.where(there, np.cumsum(there).reshape(there.shape) - 1, 0)
        return grouped_texts(
            [tokens for each in lists for tokens in each if len(tokens)], texts, places=self._padding is Padding.NONE
        )

    def _count(self, batch: Rows) -> StepFacts:
        rows = batch[batch != MASKED]
        lengths = np.zeros((len(self._tokens), len(batch)), np.int32)
        for column, counted in zip(self._tokens.values(), lengths, strict=True):
            counted[batch != MASKED] = column.lengths(rows)
        tokens = slots = int(lengths.sum())
        if self._padding is Padding.PACKED:
            slots = len(batch) // self._shape.pairs * self._shape.tokens
        if self._padding is Padding.LONGEST:
            # Every micro-batch has groups of its own.
            size = self._shape.pairs if self._apart else self._train.batch_size
            pieces = np.split(lengths, lengths.shape[1] // size, axis=1)
            slots = sum(len(group) * int(group[0]) for piece in pieces for group in length_groups(piece[piece > 0]))
        if not self._world.is_leader:
            return StepFacts(len(rows), tokens, slots)
        digest = digest_batch(
            {
                "shape": np.array([self._train.accumulation, *self._shape]),
                "valid": batch != MASKED,
                **{f"{tower}_hash": column[rows] for tower, column in self._hash.items()},
                **{f"{tower}_lengths": column.lengths(rows) for tower, column in self._tokens.items()},
                **{f"{tower}_tokens": column.joined(rows) for tower, column in self._tokens.items()},
            }
        )
        return StepFacts(len(rows), tokens, slots, digest)


def packed_texts(bins: Sequence[Sequence[Sequence[Tokens]]], shape: BinShape) -> dict[str, torch.Tensor]:
    """Return the packed rows of some bins.

    Args:
        bins: the tokens of query, document and negatives of each pair, which fit in this order (pipeline/dataset/sampler).

    Returns:
        tokens, segments, positions: (bins * rows, length) int64, see `Encoder.packed`; query_texts (bins * pairs,) and
        document_texts (bins * pairs * documents,): int64, of each pair the numbers of its texts among the rows' embeddings; where
        there is no text, that of the bin's first.
    """
    rows = np.zeros((3, len(bins), shape.rows, shape.length), np.int64)
    texts = np.tile(shape.texts * np.arange(len(bins))[:, None], (1 + shape.documents, 1, shape.pairs))
    for number, pairs in enumerate(bins):
        bin_ = Bin(shape)
        for pair, lists in enumerate(pairs):
            present = [(tower, tokens) for tower, tokens in enumerate(lists) if len(tokens)]
            places = bin_.add(*(len(tokens) for _, tokens in present))
            assert places is not None
            for (tower, tokens), (row, start, text) in zip(present, places, strict=True):
                rows[:, number, row, slice(start, start + len(tokens))] = (
                    tokens,
                    np.full(len(tokens), text + 1),
                    np.arange(len(tokens)),
                )
                texts[tower, number, pair] += row * texts_per_row(shape.length) + text
    named = zip(("tokens", "segments", "positions"), rows.reshape(3, -1, shape.length), strict=True)
    return {name: torch.from_numpy(values) for name, values in named} | _of_towers(texts.reshape(1 + shape.documents, -1))


def grouped_texts(lists: Sequence[Tokens], texts: npt.NDArray[np.int64], *, places: bool) -> dict[str, torch.Tensor]:
    """Return texts in groups of similar lengths, each padded to its longest text.

    Args:
        lists: the tokens of each text.
        texts: (1 + documents, pairs) numbers of the queries, the documents and the negatives among them; any where there is none.
        places: whether to say where the tokens are.

    Returns:
        Of each group, under the name, `:` and its number, tokens and mask (n, L) int64, and places (T,) int64, where the
        flattened mask is 1; query_texts (pairs,), document_texts (pairs * documents,): int64, numbers of the pairs' texts in the
        order of groups.
    """
    # Where there is no pair, a text whose gradient is 0: all ranks reduce the same gradients.
    lists = lists or [np.zeros(1, np.uint16)]
    lengths = np.array([len(tokens) for tokens in lists])
    order = np.argsort(-lengths, kind="stable")
    made, done = dict[str, torch.Tensor](), 0
    for number, group in enumerate(length_groups(lengths)):
        chosen = [lists[text] for text in order[done : done + len(group)].tolist()]
        tokens, mask = pad(chosen, len(chosen), int(group[0]))
        made |= {f"tokens:{number}": tokens, f"mask:{number}": mask}
        if places:
            made[f"places:{number}"] = mask.flatten().nonzero().flatten()
        done += len(group)
    return made | _of_towers(np.argsort(order, kind="stable")[texts])


def _of_towers(texts: npt.NDArray[np.int64]) -> dict[str, torch.Tensor]:
    """Return numbers of texts, (1 + documents, pairs), as the towers take them: the documents of a pair behind each other."""
    return {"query_texts": torch.from_numpy(texts[0].copy()), "document_texts": torch.from_numpy(texts[1:].T.flatten())}


def length_groups(lengths: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """Cut lengths, the longest first, into groups of similar ones: attention takes a square of a group's longest text of each."""
    falling = np.sort(lengths)[::-1]
    # A rank's last batch may have no pair at all.
    return np.array_split(falling, min(GROUPS, -(-len(falling) // LEAST_TEXTS))) if len(falling) else []


def roles(
    query_hash: Hashes, document_hash: Hashes, there: npt.NDArray[np.bool_], start: int, count: int
) -> npt.NDArray[np.int32]:
    """Return the role of every document of a global batch for some of its queries.

    A query ignores what is padding, and the same text as any document that a row of the batch gives for this query. With both in
    each other's place, the roles of queries for documents.

    Args:
        query_hash: (N,) of the global batch; anything in padding rows.
        document_hash: (N, documents): of each row its document, then its negatives.
        there: (N, documents) False for padding.
        start, count: the queries asked for.

    Returns:
        (count, N * documents), see DocumentRole.
    """
    own, documents = np.arange(start, start + count), document_hash.ravel()
    relevant = document_hash[:, 0]
    found = np.where(relevant[own, None] == documents[None, :], DocumentRole.IGNORED, DocumentRole.NEGATIVE).astype(np.int32)
    # Few queries are in several rows of a batch.
    same = (query_hash[own, None] == query_hash[None, :]) & there[None, :, 0]
    for row in np.flatnonzero(same.sum(axis=1) > 1).tolist():
        found[row, np.isin(documents, relevant[same[row]])] = DocumentRole.IGNORED
    found[:, ~there.ravel()] = DocumentRole.IGNORED
    found[np.arange(count), own * document_hash.shape[1]] = DocumentRole.POSITIVE
    return found
