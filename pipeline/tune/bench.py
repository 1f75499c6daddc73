"""One variant: its plan, its stages as real processes, and its figures from what they leave."""

from __future__ import annotations

import json
import math
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.config import build_config
from pipeline.contract import EAGER_KINDS, RunPaths, Stage, StageResult, now
from pipeline.data.steps import count_steps, plan_schedule
from pipeline.errors import BadConfig, MissingInput, TrnpipeError
from pipeline.model.compiled import plan_graphs, read_set, set_uri
from pipeline.model.folder import inspect_folder
from pipeline.model.memory import known_limits, read_shape, require_memory, totals
from pipeline.plan import MemoryPlan, RunPlan
from pipeline.runtime import store
from pipeline.runtime.child import Ended, progress_note, read_failure, run_stage, sentence
from pipeline.tune.basis import Workshop, base_config, plan_world
from pipeline.tune.space import flattened, nested
from pipeline.tune.table import Row, Settings, Table


class Bench:
    """Runs variants one after another and enters them in the table.

    Args:
        plan: of the run that is the basis.
        steps: of each variant.
        window: steps between two lines of metrics.
        timeout_seconds: for each stage.
    """

    def __init__(
        self, table: Table, workshop: Workshop, plan: RunPlan, *, steps: int, window: int, timeout_seconds: float
    ) -> None:
        self.table = table
        self.workshop = workshop
        self._plan = plan
        self._base = base_config(plan.config).model_dump(mode="json")
        self._steps = steps
        self._timeout_seconds = timeout_seconds
        self._short = {
            "steps": steps,
            "log_every": window,
            # Once at the end, which training does in any case.
            "validate_every": steps,
            "checkpoint_every": steps,
            "keep_checkpoints": 1,
            "validation_queries": 1,
        }

    def settings_of(self, settings: Settings) -> Settings:
        """Without what the base has anyway, so that a variant has one name."""
        known = flattened(self._base)
        return {key: value for key, value in settings.items() if known.get(key, ...) != value}

    def row_of(self, settings: Settings, on_progress: Callable[[str], None]) -> Row:
        """The variant's row, from the table or by running it."""
        known = self.table.find(settings, self._timeout_seconds)
        if known is not None:
            return known
        name = self.table.name_for(settings, self._plan.run)
        paths = RunPaths(str(self.workshop.folder / "runs" / name))
        try:
            plan = self._plan_variant(settings, name)
        except TrnpipeError as error:
            row = Row(
                name=name,
                settings=settings,
                status="refused",
                exit_code=int(error.exit_code),
                what=sentence(error.what, error.value),
            )
        else:
            row = self._run(settings, plan, paths, on_progress)
        self.table.put(row)
        return row

    def _plan_variant(self, settings: Settings, name: str) -> RunPlan:
        """The base's plan with other settings and few steps.

        Raises:
            BadConfig: the settings contradict each other or the rows, or need more memory than there is.
        """
        config = build_config(self._base, nested(settings), {"train": self._short})
        planned = self._plan.config.train.buckets
        if max(config.train.buckets) != max(planned):
            raise BadConfig(
                "the longest bucket differs from the run's",
                value=f"train.buckets = {list(config.train.buckets)}",
                rule=f"the rows are tokenized for {max(planned)}",
            )
        world = plan_world(config)
        counts = count_steps(self.workshop.lengths, config, world.ranks)
        backbone, _ = inspect_folder(self.workshop.parent, config.model)
        shape = read_shape(self.workshop.parent, config.model)
        memory = totals(require_memory(shape, config, world, known_limits(config, world.kind, here=True)))
        parent = self._plan.parent.model_copy(update={"folder": str(self.workshop.parent), "registry_etag": None})
        return self._plan.model_copy(
            update={
                "run": name,
                "created": now(),
                "config": config,
                "world": world,
                "parent": parent,
                "train": self._plan.train.model_copy(update=asdict(counts)),
                "memory": MemoryPlan(**memory),
                "graphs": plan_graphs(config, world, backbone, str(self.workshop.folder)),
            }
        ).sealed()

    def _run(self, settings: Settings, plan: RunPlan, paths: RunPaths, on_progress: Callable[[str], None]) -> Row:
        folder = Path(paths.root)
        shutil.rmtree(folder, ignore_errors=True)  # of an attempt that was interrupted
        (folder / "prepare").mkdir(parents=True)
        (folder / "prepare" / "rows").symlink_to(self.workshop.rows, target_is_directory=True)
        store.write_bytes(paths.plan, plan.to_json())
        memory = 0
        stages = [*([] if plan.world.kind in EAGER_KINDS else [Stage.COMPILE]), Stage.TRAIN]
        for stage in stages:

            def report(stage: Stage = stage) -> None:
                on_progress(f"{plan.run}: {stage}: {progress_note(paths, stage)}")

            ended = run_stage(
                stage,
                paths.root,
                log=folder / f"{stage}.log",
                timeout_seconds=self._timeout_seconds,
                on_poll=report,
                keep_open=(self.workshop.lock,),
            )
            memory = max(memory, ended.memory_bytes)
            if ended.code:
                return Row(
                    name=plan.run,
                    settings=settings,
                    status="slow" if ended.timed_out else "failed",
                    host_memory_bytes=memory,
                    exit_code=ended.code,
                    what=self._explain(stage, paths, ended),
                    timeout_seconds=self._timeout_seconds if ended.timed_out else 0.0,
                )
        row = measure(paths, plan, self.workshop.lengths, memory_bytes=memory, settings=settings)
        # The largest files by far, and of no use: the folder stays small, with plan, results, metrics and logs.
        shutil.rmtree(paths.model, ignore_errors=True)
        shutil.rmtree(paths.checkpoints, ignore_errors=True)
        return row

    def _explain(self, stage: Stage, paths: RunPaths, ended: Ended) -> str:
        if ended.timed_out:
            return f"{stage} took longer than {self._timeout_seconds / 60:g} minutes"
        failed = read_failure(paths, stage)
        if failed is None:
            return f"{stage} ended without an explanation: see {paths.root}/{stage}.log"
        return f"{stage}: {sentence(failed.what, failed.value)}"


def measure(paths: RunPaths, plan: RunPlan, lengths: NDArray[np.int32], *, memory_bytes: int, settings: Settings) -> Row:
    """The row of a variant whose stages are done, from what they left."""
    config = plan.config
    lines = [json.loads(line) for line in store.read_bytes(paths.metrics).splitlines()]
    lines = [line for line in lines if "loss" in line]
    warmup = math.ceil(plan.train.steps / 4)
    every = config.train.log_every
    warm = [line for line in lines if line["step"] - every >= warmup]
    tail = [line["loss"] for line in lines if line["step"] > plan.train.steps - warmup]
    compile_seconds = graphs = None
    if plan.graphs is not None:
        compile_seconds = _seconds(StageResult.from_json(store.read_bytes(paths.result(Stage.COMPILE))))
        graphs = len(read_set(set_uri(paths.bucket_root, "train", plan.graphs.train)).graphs)
    return Row(
        name=plan.run,
        settings=settings,
        status="done",
        batches={
            "batch_size": config.train.batch_size,
            "accumulation": config.train.accumulation,
            "ranks": plan.world.ranks,
            "buckets": list(config.train.buckets),
        },
        samples_per_second=rate(warm, plan, lengths),
        step_seconds=statistics.median(seconds_per_step(lines, warm)),
        compile_seconds=compile_seconds,
        graphs=graphs,
        host_memory_bytes=memory_bytes,
        device_memory_bytes=device_memory(paths),
        loss=statistics.fmean(tail),
    )


def device_memory(paths: RunPaths) -> int | None:
    """The most that neuron-monitor saw in use on this node's devices together, None where it did not look."""
    try:
        lines = store.read_bytes(paths.host_monitor(0)).splitlines()
    except MissingInput:
        return None
    return max((size for line in lines if (size := json.loads(line)["device_memory_bytes"]) is not None), default=None)


def _seconds(result: StageResult) -> float:
    """From a stage's start to its end."""
    return (datetime.fromisoformat(result.finished) - datetime.fromisoformat(result.started)).total_seconds()


def rate(lines: Sequence[Mapping[str, Any]], plan: RunPlan, lengths: NDArray[np.int32]) -> float:
    """Pairs per second of a whole run, by the median of some lines of metrics.

    A step's time depends on its bucket, and a few steps meet the buckets by chance. Where every line is of one bucket, the run's
    rows count at the median of their own bucket (buckets that no line is of are left out); else it is the median of all lines.
    """
    every = plan.config.train.log_every
    schedule = plan_schedule(lengths, plan.config, plan.world.ranks)
    buckets = [batch.bucket for batch in schedule.batches(0, 0, plan.train.steps)]
    by_bucket: dict[int, list[float]] = {}
    for line in lines:
        seen = set(buckets[line["step"] - every : line["step"]])
        if len(seen) > 1:
            return statistics.median(float(line["pairs_per_second"]) for line in lines)
        by_bucket.setdefault(seen.pop(), []).append(float(line["pairs_per_second"]))
    rows = {bucket: plan.train.bucket_rows[str(bucket)] for bucket in by_bucket}
    return sum(rows.values()) / sum(rows[bucket] / statistics.median(rates) for bucket, rates in by_bucket.items())


def seconds_per_step(lines: Sequence[Mapping[str, Any]], warm: Sequence[Mapping[str, Any]]) -> list[float]:
    """Seconds of a step in each warm line, from the line before it: nothing but steps lies between two lines of a short run."""
    found = []
    for before, line in pairwise(lines):
        if line in warm:
            found.append((line["time"] - before["time"]) / (line["step"] - before["step"]))
    return found
