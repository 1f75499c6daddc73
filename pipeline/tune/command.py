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

import json
import math
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml
from rich.console import Console

from pipeline.errors import BadConfig, ExitCode, TrnpipeError
from pipeline.runtime.child import Terminated, terminable
from pipeline.runtime.runs import find_run, read_plan
from pipeline.tune.basis import Workshop, base_config, describe_basis, plan_world
from pipeline.tune.bench import Bench
from pipeline.tune.display import Display, describe_best, grid
from pipeline.tune.space import Factor, common_window, default_space, nested, parse_vary
from pipeline.tune.table import Row, Table

OBJECTIVES: dict[str, Callable[[float], float]] = {
    "samples_per_second": lambda value: value,
    "compile_seconds": lambda value: -value,
    "host_memory_bytes": lambda value: -value,
}
"""What can be tuned for -> its sign: higher or lower is better."""

LEAST_WINDOWS = 4
"""Lines of metrics of a variant: a quarter of its steps is warm-up, and a median of less than three says little."""


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
    with terminable():
        try:
            table, best = search(options, console)
        except KeyboardInterrupt:
            console.print("interrupted; the same command goes on with what is missing")
            return 128 + signal.SIGINT
        except Terminated:
            return 128 + signal.SIGTERM
    section = nested(best.settings)
    text = describe_best(table, best, options.objective, options.tolerance) + yaml.safe_dump(section, sort_keys=False)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text, encoding="utf-8")
    if options.as_json:
        record = {**table.record(), "table": table.uri, "best": asdict(best), "config": section}
        sys.stdout.write(json.dumps(record, indent=1) + "\n")
        return ExitCode.DONE
    console.print(grid(table, options.tolerance, best))
    console.print(f"table: {table.uri}", soft_wrap=True, highlight=False)
    console.print(text, markup=False, highlight=False, soft_wrap=True, end="")
    if options.out:
        console.print(f"written to {options.out}", soft_wrap=True, highlight=False)
    return ExitCode.DONE


def search(options: TuneOptions, console: Console) -> tuple[Table, Row]:
    """Run the base and the variants that are not in the table yet; the table, and the best row of it."""
    if options.objective not in OBJECTIVES:
        raise BadConfig("there is no such objective", value=options.objective, rule=f"one of {', '.join(OBJECTIVES)}")
    base, root = find_run(options.run, options.bucket, options.state)
    plan = read_plan(base)
    config = base_config(plan.config)
    world = plan_world(config)
    factors = parse_vary(options.vary, config) if options.vary else default_space(config, world)
    with Workshop.open(options.state, base, plan, root) as workshop:
        window = common_window(config, factors, world)
        steps = max(LEAST_WINDOWS, -(-options.steps // window)) * window
        table = Table.open(base, describe_basis(plan, world, steps=steps, window=window))
        bench = Bench(table, workshop, plan, steps=steps, window=window, timeout_seconds=60 * options.timeout_minutes)
        with Display(console, table, options.tolerance) as display:
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
