"""The reference: the published run whose hold-out and values stay as they are, so that small drops cannot add up unnoticed.

`registry/NAME.reference.json` names it: the first run that is published under a name, unless another one is pinned. plan copies
the run's hold-out, without what must not be used any more, into `plan/rows/reference`; evaluate compares every new model with
the values that the reference's model had.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline import store
from pipeline.contract import RUN_ID_PATTERN, RunPaths, now, reference_uri
from pipeline.dataset.row_files import CLASSES, HOLDOUT_FILES, KNOWN, read_table
from pipeline.errors import BadData, MissingInput

REFERENCE = "reference"
"""Folder of the hold-out's files among the row files."""

VALUES = "queries.parquet"


def read_reference(bucket_root: str, registry: str) -> str | None:
    """Return the run that is the reference under a registry name, None without one.

    Raises:
        BadData: the file cannot be read.
    """
    uri = reference_uri(bucket_root, registry)
    if not store.exists(uri):
        return None
    try:
        run = json.loads(store.read_bytes(uri))["run"]
        if run is None or RUN_ID_PATTERN.fullmatch(run):
            return run  # type: ignore[no-any-return]
        raise ValueError(f"run = {run!r}")
    except (ValueError, KeyError, TypeError) as error:
        raise BadData(
            "the registry's reference cannot be read",
            value=f"{uri}: {error!r}",
            rule="{run}: a run id, or null where none is wanted",
            remedy="restore an earlier version of it, or pin a run",
        ) from error


def write_reference(bucket_root: str, registry: str, run: str | None, **condition: bool) -> None:
    """Make a run the reference; None: no run is, until one is pinned.

    Args:
        condition: of `store.write_bytes`.
    """
    store.write_json(reference_uri(bucket_root, registry), {"run": run, "pinned": now()}, **condition)


def copy_reference(
    source: RunPaths, rows: Path, unusable: Callable[[pa.Table], NDArray[np.bool_]], cache: Path, *, classified: bool
) -> dict[str, int]:
    """Copy the hold-out of the reference into a local folder of row files, and what each query got with its model.

    Args:
        unusable: which rows of a table are left out.
        cache: local folder for downloads.
        classified: whether its hold-out is classified texts.

    Returns:
        File -> rows in it.

    Raises:
        MissingInput: a file is gone.
    """
    found, kept = dict[str, int](), np.empty(0, np.uint64)
    names = (CLASSES,) if classified else (*HOLDOUT_FILES, KNOWN)
    (rows / REFERENCE).mkdir()
    try:
        for name in names:
            table = read_table(store.local_file(store.join(source.rows, name), cache))
            # One of several ids of a text may be deleted: it stays where a row that is left has it.
            table = table.filter(pa.array(~unusable(table) | np.isin(table["document_hash"].to_numpy(), kept)))
            kept = table["document_hash"].to_numpy() if name == HOLDOUT_FILES[0] else kept[:0]
            with pa.ipc.new_file(str(rows / REFERENCE / name), table.schema) as writer:
                writer.write_table(table)
            found[f"{REFERENCE}/{name}"] = table.num_rows
        store.download(source.query_values, rows / REFERENCE / VALUES)
    except MissingInput as error:
        raise MissingInput(
            "files of the reference are gone",
            value=error.value,
            rule=f"run {source.run_id} is the reference: every new model is compared with it on its hold-out",
            remedy="restore them from the bucket's versions, or pin another run",
        ) from error
    found[f"{REFERENCE}/{VALUES}"] = found[f"{REFERENCE}/{names[0]}"]
    return found
