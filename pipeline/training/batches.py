"""Training batches: from memory-mapped rows, in the order of the schedule, all that the device needs per step.

Each rank reads only its own rows' tokens; hashes and lengths, which are small, it knows of the whole global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from pipeline.backends.device import Batch
from pipeline.dataset.arrow import read_table, token_lengths
from pipeline.dataset.sampler import MASKED, Schedule, ScheduledBatch
from pipeline.model.inference import pad
from pipeline.model.loss import DocumentRole
from pipeline.run.world import World
from pipeline.training.digest import digest_batch

Rows = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]


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


class TokenColumn:
    """Random access to the token lists of a memory-mapped column, without a copy of it.

    Args:
        column: lists of int32, in any number of chunks.
    """

    def __init__(self, column: pa.ChunkedArray) -> None:
        chunks = [chunk for chunk in column.chunks if len(chunk)]
        self._starts = np.cumsum([0, *(len(chunk) for chunk in chunks)])
        self._offsets = [chunk.offsets.to_numpy() for chunk in chunks]
        self._values = [chunk.values.to_numpy() for chunk in chunks]

    def __getitem__(self, row: int) -> npt.NDArray[np.int32]:
        chunk = int(np.searchsorted(self._starts, row, side="right")) - 1
        first = row - int(self._starts[chunk])
        offsets = self._offsets[chunk]
        values: npt.NDArray[np.int32] = self._values[chunk][offsets[first] : offsets[first + 1]]
        return values

    def joined(self, rows: Rows) -> npt.NDArray[np.int32]:
        """The token lists of many rows one after another, fetched chunk by chunk instead of row by row."""
        chunks = np.searchsorted(self._starts, rows, side="right") - 1
        begins, lengths = np.empty_like(rows), np.empty_like(rows)
        for chunk in np.unique(chunks):
            offsets, own = self._offsets[chunk], chunks == chunk
            first = rows[own] - self._starts[chunk]
            begins[own], lengths[own] = offsets[first], offsets[first + 1] - offsets[first]
        # Of every token: its place in its list, and the chunk and position that it is read from.
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        source, position = np.repeat(chunks, lengths), np.repeat(begins, lengths) + within
        tokens = np.empty(len(position), np.int32)
        for chunk in np.unique(chunks):
            own = source == chunk
            tokens[own] = self._values[chunk][position[own]]
        return tokens


class Batches(Protocol):
    """A source of batches for the training loop."""

    def iterate(self, start: int, stop: int) -> Iterator[Batch]:
        """Batches of the steps start, ..., stop - 1, on the host: `accumulation` of them for each step."""

    def take_facts(self, step: int) -> StepFacts:
        """What is known of a step's global batch, once it has been yielded; it is forgotten then."""

    def row_ids(self, step: int) -> list[str]:
        """Ids of the rows of a step's global batch."""


class TrainingBatches:
    """This rank's batches of all steps.

    Args:
        path: `train.arrow`.
        world: this rank among all.
        batch_size: pairs per rank and batch.
        accumulation: batches per step, all of one bucket.
        query_length: length of queries in tokens, at most.
        buckets: lengths of documents; which rows meet in a batch depends on them.
        padding: see Padding.
        seed: of the schedule.
        learning_rate: step from 0 -> learning rate; it travels with the batch (as a constant it would make a graph per step).

    Attributes:
        steps_per_epoch: global batches of an epoch.
    """

    def __init__(
        self,
        path: Path,
        world: World,
        *,
        batch_size: int,
        accumulation: int = 1,
        query_length: int,
        buckets: tuple[int, ...],
        padding: Padding = Padding.STATIC,
        seed: int,
        learning_rate: Callable[[int], float],
    ) -> None:
        table = read_table(path)
        self._ids = table["id"]
        self._queries, self._documents = TokenColumn(table["query_tokens"]), TokenColumn(table["document_tokens"])
        self._query_hash: Hashes = table["query_hash"].to_numpy()
        self._document_hash: Hashes = table["document_hash"].to_numpy()
        self._query_lengths = token_lengths(table["query_tokens"])
        self._document_lengths = token_lengths(table["document_tokens"])
        self._world = world
        self._batch_size = batch_size
        self._accumulation = accumulation
        self._query_length = query_length
        self._padding = padding
        self._learning_rate = learning_rate
        # One scheduled "rank" that takes whole global batches: the order depends on the global batch alone.
        self._schedule = Schedule(self._document_lengths, buckets, batch_size * world.size * accumulation, 1, seed)
        self._facts: dict[int, StepFacts] = {}
        self.steps_per_epoch = self._schedule.steps_per_epoch

    def iterate(self, start: int, stop: int) -> Iterator[Batch]:
        """Batches of the steps start, ..., stop - 1, on the host.

        Yields:
            query_tokens, query_mask (B, query length) and document_tokens, document_mask (B, bucket): int64, shorter unless
            padding is STATIC; with Padding.NONE query_places and document_places (T,): int64, where the flattened masks are 1;
            roles (B, N): int32, see DocumentRole; weights (B,) and learning_rate (1,): fp32.
        """
        for step in self._schedule.batches(0, start, stop):
            self._facts[step.step] = self._count(step)
            # Each query weighs the same in its step, in whichever of the step's batches it is.
            weight = self._world.size / (step.rows != MASKED).sum()
            for rows in np.split(step.rows, self._accumulation):
                yield self._batch(rows, step.bucket, weight, self._learning_rate(step.step))

    def _batch(self, rows: Rows, bucket: int, weight: float, learning_rate: float) -> Batch:
        """This rank's share of the `rows` of all ranks."""
        own = slice(self._world.rank * self._batch_size, (self._world.rank + 1) * self._batch_size)
        valid = rows != MASKED
        return {
            **self._tokens("query", self._queries, rows[own], self._query_length),
            **self._tokens("document", self._documents, rows[own], bucket),
            "roles": torch.from_numpy(
                roles(self._query_hash[rows], self._document_hash[rows], valid, own.start, self._batch_size)
            ),
            "weights": torch.from_numpy(np.where(valid[own], weight, 0.0).astype(np.float32)),
            # Not a scalar: torch-xla shares equal scalars, so a rate that equals another constant would change the graph.
            "learning_rate": torch.tensor([learning_rate], dtype=torch.float32),
        }

    def take_facts(self, step: int) -> StepFacts:
        """What is known of a step's global batch, once it has been yielded; it is forgotten then."""
        return self._facts.pop(step)

    def row_ids(self, step: int) -> list[str]:
        """Ids of the rows of a step's global batch."""
        batch = next(self._schedule.batches(0, step, step + 1))
        return [self._ids[row].as_py() for row in batch.rows.tolist() if row != MASKED]

    def _tokens(self, tower: str, column: TokenColumn, rows: Rows, length: int) -> dict[str, torch.Tensor]:
        # Fillers stand at the end of a batch, so the lists that are there keep their places.
        lists = [column[row] for row in rows.tolist() if row != MASKED]
        static = self._padding is Padding.STATIC
        tokens, mask = pad(lists, len(rows), length if static else max(map(len, lists), default=1))
        made = {f"{tower}_tokens": tokens, f"{tower}_mask": mask}
        if self._padding is Padding.NONE:
            made[f"{tower}_places"] = mask.flatten().nonzero().flatten()
        return made

    def _count(self, batch: ScheduledBatch) -> StepFacts:
        rows = batch.rows[batch.rows != MASKED]
        tokens = int(self._query_lengths[rows].sum() + self._document_lengths[rows].sum())
        slots = len(batch.rows) * (self._query_length + batch.bucket)
        if self._padding is Padding.NONE:
            # A filler is one token of each tower.
            slots = tokens + 2 * int((batch.rows == MASKED).sum())
        if self._padding is Padding.LONGEST:
            # Every rank's batches have lengths of their own.
            shares = batch.rows.reshape(-1, self._batch_size)
            valid = shares != MASKED
            slots = sum(
                self._batch_size * int(np.where(valid, lengths[shares], 1).max(axis=1).sum())
                for lengths in (self._query_lengths, self._document_lengths)
            )
        return StepFacts(len(rows), tokens, slots, self._digest(batch, rows) if self._world.is_leader else "")

    def _digest(self, batch: ScheduledBatch, rows: Rows) -> str:
        return digest_batch(
            {
                "shape": np.array([self._accumulation, self._query_length, batch.bucket]),
                "valid": batch.rows != MASKED,
                "query_hash": self._query_hash[rows],
                "document_hash": self._document_hash[rows],
                "query_lengths": self._query_lengths[rows],
                "document_lengths": self._document_lengths[rows],
                "query_tokens": self._queries.joined(rows),
                "document_tokens": self._documents.joined(rows),
            }
        )


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
