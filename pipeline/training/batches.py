"""Training batches: from memory-mapped rows, in the stored order, all that the device needs per step.

Each rank reads only its own rows' tokens; hashes and lengths, which are small, of the whole global batch. No array of all rows is
in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from pipeline.backends.device import Batch
from pipeline.dataset.row_files import read_table
from pipeline.dataset.sampler import MASKED
from pipeline.dataset.steps import order_file
from pipeline.model.inference import pad
from pipeline.model.loss import DocumentRole
from pipeline.run.world import World
from pipeline.training.digest import digest_batch

Rows = npt.NDArray[np.int32]
Hashes = npt.NDArray[np.uint64]
Tokens = npt.NDArray[Any]
EMPTY: Tokens = np.empty(0, np.uint16)


class Padding(Enum):
    """The padding of a batch of rows of different lengths."""

    STATIC = auto()
    """Every batch has the lengths that are set, for devices that compile a graph per shape."""

    LONGEST = auto()
    """A batch is as long as its longest row."""

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


class HashColumn(Column):
    """A column of hashes."""

    def __getitem__(self, rows: Rows) -> Hashes:
        found = np.empty(len(rows), np.uint64)
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
        folder: with `train.arrow` and the orders of epochs, whose batches are `world.size x batch_size x accumulation` rows.
        world: this rank among all.
        batch_size: pairs per rank and batch.
        accumulation: batches per step, all of one bucket.
        query_length: length of queries in tokens, at most.
        padding: see Padding.
        learning_rate: step from 0 -> learning rate; it travels with the batch (as a constant it would make a graph per step).
        shards: URIs of the shards, by the numbers that rows have.
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        *,
        batch_size: int,
        accumulation: int = 1,
        query_length: int,
        padding: Padding = Padding.STATIC,
        learning_rate: Callable[[int], float],
        shards: Sequence[str] = (),
    ) -> None:
        self._folder = folder
        self._table = read_table(folder / "train.arrow")
        self._queries, self._documents = (TokenColumn(self._table[f"{tower}_tokens"]) for tower in ("query", "document"))
        self._query_hash, self._document_hash = (HashColumn(self._table[f"{tower}_hash"]) for tower in ("query", "document"))
        self._world = world
        self._batch_size = batch_size
        self._accumulation = accumulation
        self._query_length = query_length
        self._padding = padding
        self._learning_rate = learning_rate
        self._shards = shards
        self._facts: dict[int, StepFacts] = {}
        self.steps_per_epoch = len(self._order(0))

    def _order(self, epoch: int) -> npt.NDArray[np.int32]:
        return cast(npt.NDArray[np.int32], np.lib.format.open_memmap(self._folder / order_file(epoch), mode="r"))

    def _batches(self, start: int, stop: int) -> Iterator[tuple[int, int, Rows]]:
        """Yield the number, the bucket and the rows of the global batch of each of the steps start, ..., stop - 1."""
        while start < stop:
            epoch, first = divmod(start, self.steps_per_epoch)
            last = min(self.steps_per_epoch, first + stop - start)
            for step, batch in enumerate(self._order(epoch)[first:last], start):
                yield step, int(batch[0]), np.array(batch[1:])
            start += last - first

    def iterate(self, start: int, stop: int) -> Iterator[Batch]:
        """Batches of the steps start, ..., stop - 1, on the host.

        Yields:
            query_tokens, query_mask (B, query length) and document_tokens, document_mask (B, bucket): int64, shorter unless
            padding is STATIC; with Padding.NONE query_places and document_places (T,): int64, where the flattened masks are 1;
            roles (B, N): int32, see DocumentRole; weights (B,) and learning_rate (1,): fp32.
        """
        for step, bucket, rows in self._batches(start, stop):
            self._facts[step] = self._count(bucket, rows)
            # Each query weighs the same in its step, in whichever of the step's batches it is.
            weight = self._world.size / (rows != MASKED).sum()
            for share in np.split(rows, self._accumulation):
                yield self._batch(share, bucket, weight, self._learning_rate(step))

    def _batch(self, rows: Rows, bucket: int, weight: float, learning_rate: float) -> Batch:
        """This rank's share of the `rows` of all ranks."""
        own = slice(self._world.rank * self._batch_size, (self._world.rank + 1) * self._batch_size)
        valid = rows != MASKED
        return {
            **self._tokens("query", self._queries, rows[own], self._query_length),
            **self._tokens("document", self._documents, rows[own], bucket),
            "roles": torch.from_numpy(roles(*self._hashes(rows), valid, own.start, self._batch_size)),
            "weights": torch.from_numpy(np.where(valid[own], weight, 0.0).astype(np.float32)),
            # Not a scalar: torch-xla shares equal scalars, so a rate that equals another constant would change the graph.
            "learning_rate": torch.tensor([learning_rate], dtype=torch.float32),
        }

    def take_facts(self, step: int) -> StepFacts:
        """What is known of a step's global batch, once it has been yielded; it is forgotten then."""
        return self._facts.pop(step)

    def row_ids(self, step: int) -> list[str]:
        """Names of the rows of a step's global batch: SHARD:LINE."""
        [(_, _, batch)] = self._batches(step, step + 1)
        rows = self._table.select(["shard", "line"]).take(pa.array(batch[batch != MASKED])).to_pylist()
        named = dict(enumerate(self._shards))
        return [f"{named.get(row['shard'], row['shard'])}:{row['line']}" for row in rows]

    def _hashes(self, rows: Rows) -> tuple[Hashes, Hashes]:
        """The hashes of queries and documents; anything for fillers."""
        known = np.maximum(rows, 0)
        return self._query_hash[known], self._document_hash[known]

    def _tokens(self, tower: str, column: TokenColumn, rows: Rows, length: int) -> dict[str, torch.Tensor]:
        # Fillers stand at the end of a batch, so the lists that are there keep their places.
        lists = column.lists(rows[rows != MASKED])
        tokens, mask = pad(lists, len(rows), length if self._padding is Padding.STATIC else max(map(len, lists), default=1))
        made = {f"{tower}_tokens": tokens, f"{tower}_mask": mask}
        if self._padding is Padding.NONE:
            made[f"{tower}_places"] = mask.flatten().nonzero().flatten()
        return made

    def _count(self, bucket: int, batch: Rows) -> StepFacts:
        rows = batch[batch != MASKED]
        query_lengths, document_lengths = self._queries.lengths(rows), self._documents.lengths(rows)
        tokens = int(query_lengths.sum() + document_lengths.sum())
        slots = len(batch) * (self._query_length + bucket)
        if self._padding is Padding.NONE:
            # A filler is one token of each tower.
            slots = tokens + 2 * (len(batch) - len(rows))
        if self._padding is Padding.LONGEST:
            # Every rank's batches have lengths of their own. Fillers stand at the end.
            towers = np.stack([query_lengths, document_lengths])
            shares = np.pad(towers, ((0, 0), (0, len(batch) - len(rows))), constant_values=1).reshape(2, -1, self._batch_size)
            slots = self._batch_size * int(shares.max(axis=2).sum())
        if not self._world.is_leader:
            return StepFacts(len(rows), tokens, slots)
        query_hash, document_hash = self._hashes(rows)
        digest = digest_batch(
            {
                "shape": np.array([self._accumulation, self._query_length, bucket]),
                "valid": batch != MASKED,
                "query_hash": query_hash,
                "document_hash": document_hash,
                "query_lengths": query_lengths,
                "document_lengths": document_lengths,
                "query_tokens": self._queries.joined(rows),
                "document_tokens": self._documents.joined(rows),
            }
        )
        return StepFacts(len(rows), tokens, slots, digest)


def roles(
    query_hash: Hashes, document_hash: Hashes, valid: npt.NDArray[np.bool_], start: int, count: int
) -> npt.NDArray[np.int32]:
    """Return the role of every document of a global batch for some of its queries.

    A query ignores a document that is padding, that is the same text as its own document, or that belongs to the same query.

    Args:
        query_hash, document_hash: (N,) of the global batch; anything in padding rows.
        valid: (N,) False for padding rows.
        start, count: the queries asked for.

    Returns:
        (count, N), see DocumentRole.
    """
    own = slice(start, start + count)
    same = (query_hash[own, None] == query_hash[None, :]) | (document_hash[own, None] == document_hash[None, :])
    found = np.where(same | ~valid[None, :], DocumentRole.IGNORED, DocumentRole.NEGATIVE).astype(np.int32)
    found[np.arange(count), np.arange(start, start + count)] = DocumentRole.POSITIVE
    return found
