"""Variants of a planned run on this machine: their plans, their stages as real processes, and their figures."""

from __future__ import annotations

import fcntl
import json
import math
import shutil
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline import store
from pipeline.commands.tune_table import Row, Settings, Table
from pipeline.config import RunConfig, build_config, flattened, nested
from pipeline.contract import EAGER_KINDS, RunPaths, Stage, StageResult
from pipeline.dataset.row_files import SCHEMAS, PairLengths
from pipeline.dataset.steps import write_steps
from pipeline.errors import BadConfig, MissingInput, TrnpipeError
from pipeline.estimate.variant import plan_variant
from pipeline.graphs.compiled import read_set
from pipeline.graphs.fingerprint import set_uri
from pipeline.host.child import progress_note, read_failure, run_stage, sentence
from pipeline.plan import RunPlan
from pipeline.run.find_run import mirrored


def base_config(config: RunConfig) -> RunConfig:
    """Return the run's configuration for a single node."""
    return build_config(config.model_dump(mode="json"), {"nodes": 1, "registry": None})


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Runs variants one after another and enters them in the table.

    Attributes:
        plan: the base run's.
        table: gets the rows.
        folder: local folder for runs, with the base run's rows and parent in `rows` and `parent`.
        lengths: (rows,) document lengths in tokens.
        lock: descriptor of a lock that this process and every supervisor that it starts hold until they end.
        timeout_seconds: for each stage.
    """

    plan: RunPlan
    table: Table
    folder: Path
    rows: Path
    parent: Path
    lengths: NDArray[np.int32]
    lock: int
    timeout_seconds: float

    def variant(self, settings: Settings) -> Settings:
        """Return the settings without those that the base has already, so that a variant has one name."""
        known = flattened(base_config(self.plan.config).model_dump(mode="json"))
        return {key: value for key, value in settings.items() if known.get(key, ...) != value}

    def row_of(self, settings: Settings, on_progress: Callable[[str], None]) -> Row:
        """Return the variant's row, from the table or by running it."""
        if (known := self.table.find(settings, self.timeout_seconds)) is not None:
            return known
        name = f"{self.plan.run[:70]}-tune-{self.table.number(settings):03d}"
        try:
            plan = self._plan(settings, name)
        except TrnpipeError as error:
            row = Row(
                name=name,
                settings=settings,
                status="refused",
                exit_code=int(error.exit_code),
                what=sentence(error.what, error.value),
            )
        else:
            row = self._run(settings, plan, on_progress)
        self.table.put(row)
        return row

    def _plan(self, settings: Settings, name: str) -> RunPlan:
        """Return the base's plan with other settings and few steps.

        Raises:
            BadConfig: the settings contradict each other or the rows, or need more memory than there is.
        """
        steps = self.table.basis["steps"]
        short = {
            "steps": steps,
            "log_every": self.table.basis["window"],
            # Only at the end, as training does in any case.
            "validate_every": steps,
            "checkpoint_every": steps,
            "keep_checkpoints": 1,
            "validation_queries": 1,
        }
        config = build_config(base_config(self.plan.config).model_dump(mode="json"), nested(settings), {"train": short})
        return plan_variant(
            self.plan, config, run=name, parent=self.parent, rows=len(self.lengths), bucket_root=str(self.folder)
        ).sealed()

    def _run(self, settings: Settings, plan: RunPlan, on_progress: Callable[[str], None]) -> Row:
        folder = self.folder / "runs" / plan.run
        paths = RunPaths(str(folder))
        shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted attempt
        rows = Path(paths.rows)
        rows.mkdir(parents=True)
        for name in SCHEMAS:
            (rows / name).symlink_to(self.rows / name)
        write_steps(rows, len(self.lengths), plan.config, plan.world.ranks)
        store.write_bytes(paths.plan, plan.to_json())
        memory = 0
        for stage in (Stage.TRAIN,) if plan.world.kind in EAGER_KINDS else (Stage.COMPILE, Stage.TRAIN):

            def report(stage: Stage = stage) -> None:
                on_progress(f"{plan.run}: {stage}: {progress_note(paths, stage)}")

            log, keep = folder / f"{stage}.log", (self.lock,)
            code, used, timed_out = run_stage(
                stage, paths.root, log=log, timeout_seconds=self.timeout_seconds, on_poll=report, keep_open=keep
            )
            memory = max(memory, used)
            if code:
                failed = read_failure(paths, stage)
                why = (
                    f"{stage}: {sentence(failed.what, failed.value)}"
                    if failed
                    else f"{stage} ended without an explanation: see {log}"
                )
                return Row(
                    name=plan.run,
                    settings=settings,
                    status="slow" if timed_out else "failed",
                    host_memory_bytes=memory,
                    exit_code=code,
                    what=f"{stage} took longer than {self.timeout_seconds / 60:g} minutes" if timed_out else why,
                    timeout_seconds=self.timeout_seconds if timed_out else 0.0,
                )
        row = measure(paths, plan, memory_bytes=memory, settings=settings)
        # The largest files by far, and unused: plan, results, metrics and logs stay.
        shutil.rmtree(paths.model, ignore_errors=True)
        shutil.rmtree(paths.checkpoints, ignore_errors=True)
        return row


@contextmanager
def open_bench(
    state: Path, base: RunPaths, plan: RunPlan, root: str | None, table: Table, *, timeout_seconds: float
) -> Iterator[Bench]:
    """Lock the folder of this run's searches, and fetch the run's rows and parent if they are missing.

    Args:
        state: folder of the local run.
        base, root: as from `find_run`.

    Raises:
        BadConfig: another search of this run is in progress.
        MissingInput: rows or parent are gone.
    """
    folder = (state / "tune" / f"{base.run_id}-{plan.fingerprint[:8]}").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BadConfig(
                "another search of this run, or a stage that it started, is in progress here",
                value=folder,
                rule="two at a time would measure each other",
                remedy="wait until it has ended",
            ) from error
        rows = store.local_folder(base.rows, folder / "rows").absolute()
        for name, file in plan.row_files.items():
            if not (rows / name).is_file() or (rows / name).stat().st_size != file.size:
                raise MissingInput(
                    "row files of the run are gone or have changed",
                    value=rows / name,
                    rule="they never change once the run is planned",
                    remedy="start a new run",
                )
        yield Bench(
            plan=plan,
            table=table,
            folder=folder,
            rows=rows,
            parent=store.local_folder(mirrored(plan.parent.folder, root), folder / "parent").absolute(),
            lengths=np.concatenate(list(PairLengths(rows / "train.arrow"))),
            lock=lock.fileno(),
            timeout_seconds=timeout_seconds,
        )


def measure(paths: RunPaths, plan: RunPlan, *, memory_bytes: int, settings: Settings) -> Row:
    """Return the row of a variant whose stages have ended, from the files that they wrote."""
    train, steps = plan.config.train, plan.train.steps
    lines = [line for line in map(json.loads, store.read_bytes(paths.metrics).splitlines()) if "loss" in line]
    warmup = math.ceil(steps / 4)
    warm = [line for line in lines if line["step"] - train.log_every >= warmup]
    # Only steps lie between two lines of a short run.
    step_seconds = [
        (line["time"] - before["time"]) / (line["step"] - before["step"]) for before, line in pairwise(lines) if line in warm
    ]
    compile_seconds = graphs = None
    if plan.graphs is not None:
        result = StageResult.from_json(store.read_bytes(paths.result(Stage.COMPILE)))
        compile_seconds = (datetime.fromisoformat(result.finished) - datetime.fromisoformat(result.started)).total_seconds()
        graphs = len(read_set(set_uri(paths.bucket_root, "train", plan.graphs.train)).graphs)
    return Row(
        name=plan.run,
        settings=settings,
        status="done",
        batches={
            "batch_size": train.batch_size,
            "accumulation": train.accumulation,
            "ranks": plan.world.ranks,
            "tokens": train.bins * train.bin_shape.tokens,
        },
        samples_per_second=statistics.median(line["pairs_per_second"] for line in warm),
        step_seconds=statistics.median(step_seconds),
        compile_seconds=compile_seconds,
        graphs=graphs,
        host_memory_bytes=memory_bytes,
        device_memory_bytes=device_memory(paths),
        loss=statistics.fmean(line["loss"] for line in lines if line["step"] > steps - warmup),
    )


def device_memory(paths: RunPaths) -> int | None:
    """Return the most that neuron-monitor saw in use on this node's devices together, None where it did not run."""
    try:
        lines = store.read_bytes(paths.host_monitor(0)).splitlines()
    except MissingInput:
        return None
    return max((size for line in lines if (size := json.loads(line)["device_memory_bytes"]) is not None), default=None)
