"""The table of a search: what every variant was and did, kept with the run, and what the rows say of each other."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any

from pipeline.contract import RunPaths
from pipeline.errors import BadData
from pipeline.runtime import store

FORMAT = 1

Settings = dict[str, Any]
"""Key -> value, e.g. {"train.batch_size": 128}: what a variant changes of the base."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One variant and what became of it.

    Attributes:
        name: id of its run.
        settings: what it changes of the base.
        status: done; failed (a stage did); slow (a stage took too long); refused (the configuration contradicts itself).
        batches: what its batches follow from: losses of rows that have the same can be compared.
        samples_per_second: pairs that all ranks train on per second, see `rate`.
        step_seconds: median over steps after the warm-up.
        compile_seconds, graphs: of the compile stage (graphs that an earlier variant compiled are there already), None on kinds
            that compile nothing.
        host_memory_bytes: most that the processes of a stage had.
        device_memory_bytes: most that all devices of the node had, where something watched them.
        loss: mean of the last quarter of the steps.
        exit_code, what: of the stage that failed; of a refusal.
        timeout_seconds: that a slow stage had.
    """

    name: str
    settings: Settings
    status: str
    batches: dict[str, Any] = field(default_factory=dict)
    samples_per_second: float | None = None
    step_seconds: float | None = None
    compile_seconds: float | None = None
    graphs: int | None = None
    host_memory_bytes: int | None = None
    device_memory_bytes: int | None = None
    loss: float | None = None
    exit_code: int = 0
    what: str = ""
    timeout_seconds: float = 0.0

    def may_change(self, timeout_seconds: float) -> bool:
        """Whether a new attempt may end otherwise: after trouble that Batch would retry too, or with more time."""
        if self.status == "slow":
            return timeout_seconds > self.timeout_seconds
        return self.status == "failed" and (self.exit_code < 0 or str(self.exit_code).startswith("7"))


@dataclass(slots=True, kw_only=True)
class Table:
    """All variants so far, kept in the run's folder.

    Attributes:
        uri: of the file.
        basis: what the rows have in common: run, plan, steps, lines of metrics, machine.
    """

    uri: str
    basis: dict[str, Any]
    rows: list[Row] = field(default_factory=list)

    @classmethod
    def open(cls, base: RunPaths, basis: dict[str, Any]) -> Table:
        """The table of this basis, with the rows that an earlier search left.

        Raises:
            BadData: the file cannot be read.
        """
        digest = hashlib.sha256(json.dumps(basis, sort_keys=True).encode()).hexdigest()[:8]
        uri = store.join(base.root, "tune", f"steps-{basis['steps']:04d}-{digest}.json")
        if not store.exists(uri):
            return cls(uri=uri, basis=basis)
        try:
            record = store.read_json(uri)
            if record["format"] != FORMAT:
                raise ValueError(f"format {record['format']}")
            return cls(uri=uri, basis=basis, rows=[Row(**row) for row in record["rows"]])
        except (ValueError, KeyError, TypeError) as error:
            raise BadData(
                "the table of an earlier search cannot be read",
                value=f"{uri}: {error!r}",
                rule=f"format {FORMAT}, as this version of trnpipe writes it",
                remedy="remove it to measure again",
            ) from error

    def find(self, settings: Settings, timeout_seconds: float) -> Row | None:
        """The row of these settings, unless a new attempt, with that much time, may change it."""
        row = next((row for row in self.rows if row.settings == settings), None)
        if row is None or row.may_change(timeout_seconds):
            return None
        return row

    def name_for(self, settings: Settings, run_id: str) -> str:
        """Id of the variant's run: the same again for an attempt that is made again."""
        number = next((number for number, row in enumerate(self.rows) if row.settings == settings), len(self.rows))
        return f"{run_id[:70]}-tune-{number:03d}"

    def put(self, row: Row) -> None:
        """Add a row, or replace the one of the same settings, and write the file."""
        known = [number for number, other in enumerate(self.rows) if other.settings == row.settings]
        if known:
            self.rows[known[0]] = row
        else:
            self.rows.append(row)
        store.write_json(self.uri, self.record())

    def record(self) -> dict[str, Any]:
        return {"format": FORMAT, "basis": self.basis, "rows": [asdict(row) for row in self.rows]}

    # What the rows say.

    def reference(self, row: Row) -> Row | None:
        """The first row that trained on the same batches, None if that is this one."""
        first = next(other for other in self.rows if other.status == "done" and other.batches == row.batches)
        return None if first is row else first

    def worse_by(self, row: Row) -> float | None:
        """By which share a row's loss is above its reference's (below: negative), None where there is nothing to compare."""
        reference = self.reference(row)
        if reference is None:
            return None
        assert row.loss is not None
        assert reference.loss is not None
        return (row.loss - reference.loss) / max(abs(reference.loss), 1e-12)

    def verdict(self, row: Row, tolerance: float) -> str:
        """What the loss says, for people."""
        if row.status != "done":
            return f"{row.status}, {row.exit_code}: {row.what}"
        worse = self.worse_by(row)
        if worse is None:
            return "base" if row is self.rows[0] else "loss not judged: other batches than the base's"
        return f"loss {worse:+.1%}" + (" WORSE" if worse > tolerance else "")

    def counts(self, row: Row, tolerance: float) -> bool:
        """Whether a row may win."""
        return row.status == "done" and (self.worse_by(row) or 0.0) <= tolerance
