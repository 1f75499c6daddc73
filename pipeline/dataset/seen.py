"""Rows that runs were trained on: `seen/RUN/`, which train writes at its end and the plans of later runs read.

    versions.bin    u64 of each row (pipeline/dataset/ingested.row_versions)
    keys.bin        u64 of each row: its key, of which a hold-out has no row; where keys are of documents, also of its negatives
    record.json     SeenRecord, written last

Only rows that no ancestor was trained on, and negatives, whose versions are 0, sorted by key. The folder is outside the run's, so
it stays when the run is removed. What counts for a new run are the folders of its parent's lineage, so it follows what was
published.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from pipeline import store
from pipeline.contract import seen_uri
from pipeline.dataset.external_sort import ExternalSort
from pipeline.dataset.ingested import SLICES, Hashes, slice_rows
from pipeline.dataset.reading import in_threads, read_records
from pipeline.dataset.row_files import read_table
from pipeline.dataset.sampler import MASKED
from pipeline.dataset.steps import ORDER
from pipeline.errors import BadData, MissingInput
from pipeline.plan import RunPlan
from pipeline.run_inputs import PlanSection

VERSIONS, KEYS, RECORD = "versions.bin", "keys.bin", "record.json"
ROW = np.dtype([("key", np.uint64), ("version", np.uint64)])
ROWS_AT_ONCE = 1 << 20


class SeenRecord(PlanSection):
    """The content of a `seen/RUN` folder.

    Attributes:
        run: that was trained.
        lineage: its ancestors' runs, the oldest first, itself last.
        identity: see `RunPlan`; versions of another one cannot be compared.
        holdout_by: `data.holdout_by`, which decides what the keys are.
        shards: names of all ingested training shards that its plan listed.
        slices: see `pipeline.dataset.ingested.IngestedFile`.
        rows: in the files.
        steps: that it was trained for.
    """

    run: str
    lineage: tuple[str, ...]
    identity: dict[str, str]
    holdout_by: str
    shards: tuple[str, ...]
    slices: tuple[int, ...]
    rows: int
    steps: int


def read_record(bucket_root: str, run: str) -> SeenRecord:
    """
    Raises:
        MissingInput: the run left no record.
        BadData: it cannot be read.
    """
    uri = store.join(seen_uri(bucket_root, run), RECORD)
    try:
        return SeenRecord.model_validate_json(store.read_bytes(uri))
    except MissingInput as error:
        raise MissingInput(
            f"what run {run} was trained on is not known, so the new rows are not",
            value=uri,
            rule="train writes it at its end, and it stays when the run's folder is removed",
            remedy="restore it, or set data.new_identity=true: every row then counts as new",
        ) from error
    except ValidationError as error:
        raise BadData(
            "the record of the rows that a run was trained on cannot be read",
            value=f"{uri}: {error.errors()[0]['msg']}",
            rule="it never changes",
            remedy="restore it",
        ) from error


@dataclass(frozen=True)
class SeenRows:
    """The rows that some runs were trained on.

    Args:
        holdout_by: of the run that asks. Keys of a run that held out by something else tell nothing, and its versions are sorted
            by other keys, so that all of them are in memory.
        cache: local folder for the versions, which are fetched once.
    """

    bucket_root: str
    runs: Sequence[str]
    holdout_by: str
    cache: Path | None = None

    @cached_property
    def records(self) -> list[SeenRecord]:
        return list(in_threads(lambda run: read_record(self.bucket_root, run), self.runs))

    @cached_property
    def shards(self) -> set[str]:
        """Names of the training shards of all runs."""
        return {name for record in self.records for name in record.shards}

    def versions(self, first: int, last: int) -> Hashes:
        """Return the versions of rows in the slices [first, last); perhaps others, too."""
        return np.concatenate([self._elsewhere, *self._read(VERSIONS, first, last)])

    def keys(self, first: int, last: int) -> Hashes:
        """Return the keys in the slices [first, last)."""
        return np.concatenate([np.empty(0, np.uint64), *self._read(KEYS, first, last)])

    @cached_property
    def _elsewhere(self) -> Hashes:
        others = [record for record in self.records if record.holdout_by != self.holdout_by]
        return np.concatenate([np.empty(0, np.uint64), *(self._range(VERSIONS, record, 0, SLICES) for record in others)])

    def _read(self, name: str, first: int, last: int) -> list[Hashes]:
        own = [record for record in self.records if record.holdout_by == self.holdout_by]
        return list(in_threads(lambda record: self._range(name, record, first, last), own))

    def _range(self, name: str, record: SeenRecord, first: int, last: int) -> Hashes:
        uri, cache = store.join(seen_uri(self.bucket_root, record.run), name), self.cache if name == VERSIONS else None
        return read_records(uri, np.dtype(np.uint64), record.slices[first], record.slices[last], record.rows, cache)


def write_seen(bucket_root: str, plan: RunPlan, rows: Path, steps: int, scratch: Path) -> SeenRecord:
    """Record the rows that a run was trained on first: those of the stored order up to its last step.

    Args:
        rows: local folder of the run's row files.
        steps: optimizer steps that were done.
        scratch: local folder for temporary files.
    """
    table = read_table(rows / "train.arrow")
    by_document = plan.config.data.holdout_by == "document"
    negatives = [name for name in table.column_names if name.startswith("negative_") and name.endswith("_hash") and by_document]
    table = table.select(["key", "version", "new", *negatives])
    trained = trained_rows(rows / ORDER, table.num_rows, steps / plan.train.steps)
    folder = scratch / "seen"
    sort = ExternalSort(folder / "sort", table.num_rows, ROW)
    start = 0
    for batch in table.to_batches():
        chosen = np.asarray(batch["new"]) & trained[start : start + len(batch)]
        sort.add(key=batch["key"].to_numpy()[chosen], version=batch["version"].to_numpy()[chosen])
        for name in negatives:
            hashes = batch[name].to_numpy()[trained[start : start + len(batch)]]
            sort.add(key=hashes[hashes > 0], version=0)
        start += len(batch)
    slices = np.zeros(SLICES + 1, np.int64)
    with open(folder / VERSIONS, "wb") as versions, open(folder / KEYS, "wb") as keys:
        for records in sort:
            versions.write(records["version"].tobytes())
            keys.write(records["key"].tobytes())
            # Of all rows together as many come before a slice as of all partitions.
            slices += slice_rows(records["key"])
    uri = seen_uri(bucket_root, plan.run)
    store.upload_folder(folder, uri)
    record = SeenRecord(
        run=plan.run,
        lineage=(*plan.lineage, plan.run),
        identity=plan.identity,
        holdout_by=plan.config.data.holdout_by,
        shards=plan.pairs,
        slices=slices.tolist(),
        rows=int(slices[-1]),
        steps=steps,
    )
    store.write_bytes(store.join(uri, RECORD), record.model_dump_json().encode())
    return record


def trained_rows(order: Path, rows: int, share: float) -> NDArray[np.bool_]:
    """Return which of the training rows the first steps took, (rows,).

    Args:
        order: the file with the rows of all steps.
        share: of its steps.
    """
    trained = np.zeros(rows, np.bool_)
    taken = np.memmap(order, np.int32, mode="r")
    for start in range(0, stop := round(share * len(taken)), ROWS_AT_ONCE):
        chosen = taken[start : min(start + ROWS_AT_ONCE, stop)]
        trained[chosen[chosen != MASKED]] = True
    return trained
