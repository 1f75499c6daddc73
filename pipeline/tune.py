"""`trnpipe tune`: which settings of device, compiler and batch train fastest, found by short runs of the real stages here.

A run that has been planned is the basis: its plan, its tokenized rows, its parent. Every variant is a run of its own with another
plan, whose compile and train stages are started as a container would start them. One setting is varied at a time, from the base
on; the best value stays before the next setting is varied.

    STATE/tune/RUN-FINGERPRINT/      rows and parent, once; runs/RUN-tune-003/ has plan, results, metrics and logs of a variant
    RUN FOLDER/tune/steps-0020-DIGEST.json    the table, one per number of steps and machine; what stands in it is not run again

Faster is not enough: a variant counts only if its loss on the very batches of the base is not worse. Where the batches differ
(batch size), losses cannot be compared, because a contrastive loss depends on how many documents compete; the table says so.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
import os
import platform
import shutil
import signal
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from rich.console import Console
from rich.live import Live
from rich.table import Table as Grid

from pipeline.config import RunConfig, build_config, merge
from pipeline.contract import EAGER_KINDS, RunPaths, Stage, StageFailure, StageResult, now
from pipeline.data.arrow import read_table, token_lengths
from pipeline.data.steps import count_steps, plan_schedule
from pipeline.errors import BadConfig, BadData, ExitCode, MissingInput, TrnpipeError
from pipeline.model.compiled import plan_graphs, read_set, set_uri
from pipeline.model.folder import inspect_folder
from pipeline.model.memory import known_limits, read_shape, require_memory, totals
from pipeline.plan import MemoryPlan, RunPlan, World
from pipeline.runtime import store
from pipeline.runtime.child import Ended, run_stage
from pipeline.runtime.cpu import available_cores
from pipeline.runtime.device import (
    default_ranks_per_node,
    require_available,
    require_world,
    resolve_kind,
    resolve_precision,
)

log = logging.getLogger("trnpipe")

OBJECTIVES: dict[str, Callable[[float], float]] = {
    "samples_per_second": lambda value: value,
    "compile_seconds": lambda value: -value,
    "host_memory_bytes": lambda value: -value,
}
"""What can be tuned for -> its sign: higher or lower is better."""

TUNABLE = ("device", "compile", "train.batch_size", "train.accumulation", "train.activation_checkpointing", "train.buckets")
"""Sections and keys that say how the run's rows are trained on. Others say which rows, or what is learnt from them."""

LEAST_WINDOWS = 4
"""Lines of metrics of a variant: a quarter of its steps is warm-up, and a median of less than three says little."""
LAZY_WINDOW = 4
"""Steps between two readings on kinds that compile: reading after each would stop the device that works ahead of the host."""

PACKAGES = ("trnpipe", "torch", "torch-xla", "torch-neuronx", "neuronx-cc", "transformers")
FORMAT = 1

Settings = dict[str, Any]
"""Key -> value, e.g. {"train.batch_size": 128}: what a variant changes of the base."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """What can be asked of a search.

    Attributes:
        run: id of a run, or URI of its folder.
        bucket: `s3://BUCKET` of a deployment that has the run; None: the local run's bucket, as files in `state`.
        state: folder of the local run; variants run below it in any case.
        steps: optimizer steps of each variant, at least; more where lines of metrics have to be filled.
        vary: `KEY=V1,V2,...` items, in the place of the default space.
        limit: variants to run besides the base; None: all.
        objective: one of OBJECTIVES.
        tolerance: how much worse a loss may be, as a share of the base's.
        gain: by which share a value must be better than the best so far to replace it: smaller differences are noise.
        timeout_minutes: for each stage of a variant.
        out: file for the best settings.
        as_json: print the table as JSON, and nothing else, to standard output.
    """

    run: str
    bucket: str | None = None
    state: Path = Path(".trnpipe")
    steps: int = 20
    vary: tuple[str, ...] = ()
    limit: int | None = None
    objective: str = "samples_per_second"
    tolerance: float = 0.02
    gain: float = 0.02
    timeout_minutes: float = 120
    out: Path | None = None
    as_json: bool = False


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
        basis: what the rows have in common: run, plan, steps, machine.
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


# ---- the command -----------------------------------------------------------------------------------------------------


class _Terminated(Exception):
    """SIGTERM arrived."""


def run_tune(options: TuneOptions) -> int:
    """Search, print the table and the best settings; an interrupted search goes on when it is started again.

    Returns:
        0, or 130 and 143 after Ctrl-C and SIGTERM.

    Raises:
        BadConfig: options that cannot work, before anything runs.
        MissingInput: there is no such run, or its rows or parent are gone.
        TrnpipeError: the base itself fails, with the exit code of its stage.
    """
    console = Console(stderr=options.as_json)
    with _terminable():
        try:
            table, best = search(options, console)
        except KeyboardInterrupt:
            console.print("interrupted; the same command goes on with what is missing")
            return 128 + signal.SIGINT
        except _Terminated:
            return 128 + signal.SIGTERM
    section = nested(best.settings)
    text = describe_best(table, best, options) + yaml.safe_dump(section, sort_keys=False)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text, encoding="utf-8")
    if options.as_json:
        record = {**table.record(), "table": table.uri, "best": asdict(best), "config": section}
        sys.stdout.write(json.dumps(record, indent=1) + "\n")
        return ExitCode.DONE
    console.print(grid(table, options, best))
    console.print(f"table: {table.uri}", soft_wrap=True, highlight=False)
    console.print(text, markup=False, highlight=False, soft_wrap=True, end="")
    if options.out:
        console.print(f"written to {options.out}", soft_wrap=True, highlight=False)
    return ExitCode.DONE


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM as an exception, so that a running stage is ended too."""

    def terminate(_number: int, _frame: FrameType | None) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def search(options: TuneOptions, console: Console) -> tuple[Table, Row]:
    """Run the base and the variants that are not in the table yet; the table, and the best row of it."""
    if options.objective not in OBJECTIVES:
        raise BadConfig("there is no such objective", value=options.objective, rule=f"one of {', '.join(OBJECTIVES)}")
    base, root = find_run(options)
    plan = RunPlan.from_json(store.read_bytes(base.plan))
    config = base_config(plan.config)
    world = plan_world(config)
    factors = parse_vary(options.vary, config) if options.vary else default_space(config, world)
    with Workshop.open(options, base, plan, root) as workshop:
        window = common_window(config, factors, world)
        steps = max(LEAST_WINDOWS, -(-options.steps // window)) * window
        table = Table.open(base, describe_basis(plan, world, steps))
        bench = Bench(table, workshop, plan, steps=steps, window=window, timeout_seconds=60 * options.timeout_minutes)
        with Display(console, table, options) as display:
            best = climb(factors, options, bench, display.update)
    return table, best


def climb(factors: Sequence[Factor], options: TuneOptions, bench: Bench, on_progress: Callable[[str], None]) -> Row:
    """One factor at a time, from the base on; the best value of each stays.

    Raises:
        TrnpipeError: the base fails.
    """
    table, value_of = bench.table, OBJECTIVES[options.objective]
    best = bench.row_of({}, on_progress)
    if best.status != "done":
        raise base_failed(best, bench)
    left = math.inf if options.limit is None else options.limit
    for factor in factors:
        found = best
        for change in factor:
            settings = bench.settings_of({**best.settings, **change})
            if settings == best.settings:
                continue
            if left <= 0:
                return found
            left -= 1
            row = bench.row_of(settings, on_progress)
            if table.counts(row, options.tolerance):
                new, old = (value_of(float(getattr(each, options.objective) or 0.0)) for each in (row, found))
                if new > old + options.gain * abs(old):
                    found = row
        best = found
    return best


def base_failed(row: Row, bench: Bench) -> TrnpipeError:
    """What to say when there is nothing to compare with; ends with the stage's own exit code."""
    error = TrnpipeError(
        "the run's own settings do not train here",
        value=f"exit code {row.exit_code}: {row.what}",
        rule="variants are compared with the run's own settings",
        remedy=f"see the logs in {bench.workshop.folder / 'runs' / row.name}",
    )
    known = [code for code in ExitCode if code == row.exit_code]
    error.exit_code = ExitCode.TRANSIENT if row.status == "slow" else known[0] if known else ExitCode.DEFECT
    return error


# ---- the basis -------------------------------------------------------------------------------------------------------


def find_run(options: TuneOptions) -> tuple[RunPaths, str | None]:
    """The run's folder; and the local bucket that stands for the one its plan names, None if that is on S3.

    Raises:
        MissingInput: there is no plan.
    """
    if "/" in options.run:
        paths = RunPaths(options.run)
    else:
        bucket = options.bucket.rstrip("/") if options.bucket else str(options.state / "bucket")
        paths = RunPaths(store.join(bucket, "runs", options.run))
    if not store.exists(paths.plan):
        raise MissingInput(
            "there is no such run, or it has no plan yet",
            value=paths.plan,
            rule="tune starts from a run that prepare has planned",
            remedy="name a run by its id with --state or --bucket, or by the URI of its folder",
        )
    return paths, None if store.is_s3(paths.root) else paths.bucket_root


def base_config(config: RunConfig) -> RunConfig:
    """The run's configuration as one node of it: how many nodes there are is the deployment's matter."""
    return build_config(config.model_dump(mode="json"), {"nodes": 1, "registry": None})


def plan_world(config: RunConfig) -> World:
    """Who computes a variant.

    Raises:
        BadConfig: a kind of device, a precision or a number of ranks that it does not have.
    """
    kind = resolve_kind(config.device.kind)
    require_available(kind)
    ranks = config.device.ranks_per_node or default_ranks_per_node(kind)
    require_world(kind, ranks)
    return World(kind=kind, precision=resolve_precision(kind, config.device.precision), nodes=1, ranks_per_node=ranks)


def describe_basis(plan: RunPlan, world: World, steps: int) -> dict[str, Any]:
    """What rows of one table have in common: figures of another plan or machine are no measure for each other."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    machine = {
        "kind": world.kind,
        "ranks": world.ranks,
        "processor": processor(),
        "cores": available_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "versions": versions,
    }
    return {"run": plan.run, "fingerprint": plan.fingerprint, "steps": steps, "machine": machine}


def processor() -> str:
    """The host processor's name, as Linux knows it, else the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


@dataclass(frozen=True, slots=True, kw_only=True)
class Workshop:
    """The local folder in which variants run, with what all of them need.

    Attributes:
        folder: gets `runs/`.
        rows, parent: local folders.
        lengths: (rows,) document lengths in tokens.
        lock: descriptor of a lock that this process, and every supervisor that it starts, holds until it ends.
    """

    folder: Path
    rows: Path
    parent: Path
    lengths: NDArray[np.int32]
    lock: int

    @classmethod
    @contextmanager
    def open(cls, options: TuneOptions, base: RunPaths, plan: RunPlan, root: str | None) -> Iterator[Workshop]:
        """Fetch what is not here yet.

        Raises:
            BadConfig: another search of this run is at work.
            MissingInput: rows or parent are gone.
        """
        folder = (options.state / "tune" / f"{base.run_id}-{plan.fingerprint[:8]}").absolute()
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise BadConfig(
                    "another search of this run is at work here, or a stage that it started",
                    value=folder,
                    rule="two at a time would measure each other",
                    remedy="wait until it has ended",
                ) from error
            rows = _fetched(base.rows, folder / "rows")
            for name, file in plan.row_files.items():
                if not (rows / name).is_file() or (rows / name).stat().st_size != file.size:
                    raise MissingInput(
                        "row files of the run are gone or have changed",
                        value=rows / name,
                        rule="they stay as prepare wrote them",
                        remedy="start a new run",
                    )
            parent = _fetched(mirrored(plan.parent.folder, root), folder / "parent")
            lengths = token_lengths(read_table(rows / "train.arrow")["document_tokens"])
            yield cls(folder=folder, rows=rows, parent=parent, lengths=lengths, lock=lock.fileno())


def mirrored(uri: str, root: str | None) -> str:
    """Where an object is to be read: plans of local runs name the bucket that stood for their state folder."""
    if root is None or not store.is_s3(uri):
        return uri
    local = store.join(root, store.split(uri)[1])
    return local if Path(local).exists() else uri


def _fetched(uri: str, folder: Path) -> Path:
    """The local folder with what stands under `uri`; downloaded whole or not at all, and only once."""
    if not store.is_s3(uri):
        return store.local_folder(uri, folder).absolute()
    if not folder.is_dir():
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        store.download_folder(uri, partial).rename(folder)
    return folder


# ---- the space -------------------------------------------------------------------------------------------------------

Factor = list[Settings]
"""The values to try for one key, each with what else it needs."""


def default_space(config: RunConfig, world: World) -> list[Factor]:
    """What is worth trying on this kind of device, most effective first. Values that the base has already are passed over."""
    batch = config.train.batch_size
    factors = [_factor("train.batch_size", [2 * batch, 4 * batch, *([batch // 2] if batch > 1 else [])])]
    precisions = ["bf16", "fp32", *(["compiler"] if world.kind == "neuron" else [])]
    factors.append(_factor("device.precision", [precision for precision in precisions if precision != world.precision]))
    if world.kind == "cpu":
        share = max(1, available_cores() // world.ranks_per_node)
        factors.append(_factor("device.threads_per_rank", sorted({1, *(1 << bit for bit in range(share.bit_length())), share})))
    if world.kind not in EAGER_KINDS:
        loader = config.device.loader
        factors += [
            _factor("device.sync_points", [1, 2]),
            _factor("device.loader.batches_per_execution", [2, 4]),
            _factor("device.loader.transfer_threads", [2 * loader.transfer_threads, 4 * loader.transfer_threads]),
            _factor("device.loader.host_prefetch", [2 * loader.host_prefetch]),
            _factor("device.loader.device_prefetch", [2 * loader.device_prefetch]),
        ]
    if world.kind == "neuron":
        factors += [_factor("compile.auto_cast_type", ["fp8_e4m3"]), _factor("compile.optlevel", [1, 2, 3])]
    return factors


def parse_vary(items: Sequence[str], config: RunConfig) -> list[Factor]:
    """`KEY=V1,V2,...` items as factors; values are YAML.

    Raises:
        BadConfig: an unknown key (with the nearest name), one that tune does not vary, or one without values.
    """
    factors: dict[str, Factor] = {}
    known = config.model_dump(mode="json")
    for item in items:
        key, separator, text = (part.strip() for part in item.partition("="))
        try:
            values = yaml.safe_load(f"[{text}]")
        except yaml.YAMLError as error:
            raise BadConfig("the values cannot be read", value=item, rule="KEY=V1,V2,...; values are YAML") from error
        if not separator or not values:
            raise BadConfig("cannot read what to vary", value=item, rule="KEY=V1,V2,..., e.g. train.batch_size=64,128")
        if key in factors:
            raise BadConfig("a key is varied twice", value=key, rule="one --vary per key, with all of its values")
        if key not in flattened(known):
            build_config(known, nested({key: values[0]}))  # refuses an unknown key with the nearest name
        if not any(key == name or key.startswith(f"{name}.") for name in TUNABLE) or key not in flattened(known):
            raise BadConfig(
                "this is not a setting that tune varies",
                value=key,
                rule=f"one setting of {', '.join(TUNABLE)}: how the run's rows are trained on, not which rows or what is learnt",
            )
        factors[key] = _factor(key, values)
    return list(factors.values())


def _factor(key: str, values: Sequence[Any]) -> Factor:
    """Settings for each value, with what it cannot be without."""
    factor = []
    for value in values:
        settings: Settings = {key: value}
        if key == "device.loader.batches_per_execution" and value != 1:
            settings["device.sync_points"] = 1
        if key == "compile.auto_cast_type":
            settings["device.precision"] = "compiler"
        factor.append(settings)
    return factor


def common_window(config: RunConfig, factors: Sequence[Factor], world: World) -> int:
    """Steps between two lines of metrics, the same for all variants: losses are compared over the same steps.

    A multiple of every number of joined steps, which must not be cut.
    """
    key = "device.loader.batches_per_execution"
    joined = {change[key] for factor in factors for change in factor if isinstance(change.get(key), int) and change[key] > 0}
    window = math.lcm(config.device.loader.batches_per_execution, *joined)
    return window if world.kind in EAGER_KINDS else math.lcm(window, LAZY_WINDOW)


def nested(settings: Settings) -> dict[str, Any]:
    """Settings as a partial configuration."""
    merged: dict[str, Any] = {}
    for key, value in settings.items():
        section: Any = value
        for name in reversed(key.split(".")):
            section = {name: section}
        merged = merge(merged, section)
    return merged


def flattened(record: Mapping[str, Any], prefix: str = "") -> Settings:
    """A configuration's values by key."""
    found: Settings = {}
    for name, value in record.items():
        if isinstance(value, Mapping) and value:
            found |= flattened(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


# ---- one variant -----------------------------------------------------------------------------------------------------


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
                what=_sentence(error.what, error.value),
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
                on_progress(f"{plan.run}: {stage}: {_doing(paths, stage)}")

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
        try:
            failed = StageFailure.from_json(store.read_bytes(paths.failure(stage)))
        except MissingInput:
            return f"{stage} ended without an explanation: see {paths.root}/{stage}.log"
        return f"{stage}: {_sentence(failed.what, failed.value)}"


def _sentence(what: str, value: Any) -> str:
    """A failure in one line."""
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    return f"{what}: {first}" if first else what


def _doing(paths: RunPaths, stage: Stage) -> str:
    """What a running stage says of its progress."""
    try:
        record = store.read_json(paths.progress(stage, 0))
    except (MissingInput, ValueError):
        return "starting"
    done = f" {record['done']:.0f} of {record['total']:.0f}" if record.get("total") else ""
    return f"{record.get('note') or 'starting'}{done}"


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


# ---- what people see -------------------------------------------------------------------------------------------------


class Display:
    """The table while it grows: redrawn on a terminal, one line per variant elsewhere; use as a context manager."""

    def __init__(self, console: Console, table: Table, options: TuneOptions) -> None:
        self._console = console
        self._table = table
        self._options = options
        self._shown = len(table.rows)
        self._live = Live(console=console, transient=True, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> Display:
        if self._shown:
            self._console.print(f"{self._shown} variants are in the table already: {self._table.uri}", soft_wrap=True)
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()
        else:
            self._print_new()

    def update(self, doing: str) -> None:
        """Called several times a second while a variant runs."""
        if self._live:
            shown = grid(self._table, self._options, None)
            shown.caption = doing
            self._live.update(shown, refresh=True)
        else:
            self._print_new()

    def _print_new(self) -> None:
        for row in self._table.rows[self._shown :]:
            words = [f"{row.name}:", describe_settings(row.settings)]
            if row.samples_per_second is not None:
                words.append(f"{row.samples_per_second:.1f} samples/s,")
            words.append(self._table.verdict(row, self._options.tolerance))
            self._console.print(" ".join(words), markup=False, highlight=False, soft_wrap=True)
        self._shown = len(self._table.rows)


def grid(table: Table, options: TuneOptions, best: Row | None) -> Grid:
    """The table as people read it."""
    basis = table.basis
    machine = basis["machine"]
    title = f"{basis['run']}: {basis['steps']} steps each, {machine['kind']}, {machine['cores']} cores of {machine['processor']}"
    shown = Grid(title=title, title_justify="left", caption_justify="left")
    shown.add_column("settings", overflow="fold")
    for name in ("samples/s", "x base", "step ms", "compile s", "graphs", "host MiB", "device MiB", "loss"):
        shown.add_column(name, justify="right")
    shown.add_column("", overflow="fold")
    base = table.rows[0] if table.rows else None
    for row in table.rows:
        relative = row.samples_per_second / base.samples_per_second if _measured(row) and base and _measured(base) else None  # type: ignore[operator]
        verdict = table.verdict(row, options.tolerance)
        style = "bold green" if row is best else "" if table.counts(row, options.tolerance) else "dim"
        shown.add_row(
            describe_settings(row.settings),
            _number(row.samples_per_second, ".1f"),
            _number(relative, ".2f"),
            _number(row.step_seconds and 1000 * row.step_seconds, ".1f"),
            _number(row.compile_seconds, ".1f"),
            _number(row.graphs, "d"),
            _number(row.host_memory_bytes and row.host_memory_bytes / 2**20, ".0f"),
            _number(row.device_memory_bytes and row.device_memory_bytes / 2**20, ".0f"),
            _number(row.loss, ".4f"),
            f"best; {verdict}" if row is best else verdict,
            style=style,
        )
    return shown


def _measured(row: Row) -> bool:
    return bool(row.samples_per_second)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def describe_settings(settings: Settings) -> str:
    return ", ".join(f"{key}={json.dumps(value)}" for key, value in settings.items()) or "as the run is"


def describe_best(table: Table, best: Row, options: TuneOptions) -> str:
    """Comment lines that stand above the best settings."""
    base = table.rows[0]
    machine = table.basis["machine"]
    where = f"{machine['kind']}, {machine['cores']} cores of {machine['processor']}"
    gained = f"{best.samples_per_second:.1f} samples/s, the base {base.samples_per_second:.1f}"
    lines = [
        f"Best of {len(table.rows)} variants by {options.objective}, {table.basis['steps']} steps each on {where}.",
        f"{gained}; {table.verdict(best, options.tolerance)}.",
    ]
    if best.batches != base.batches:
        lines.append("Other batches than the base's: whether they teach as much shows in a whole run only.")
    refused = [row for row in table.rows if row.status == "done" and not table.counts(row, options.tolerance)]
    lines += [
        f"Not chosen, loss worse: {describe_settings(row.settings)} ({row.samples_per_second:.1f} samples/s)" for row in refused
    ]
    return "".join(f"# {line}\n" for line in lines)
