"""`trnpipe tune`: find the settings of device, compiler and batch that train fastest, by short runs of the real stages here.

The base is a planned run: its plan, its tokenized rows, its parent. Every variant is a run of its own with another plan; tune
starts its compile and train stages as a container would. It varies one setting at a time, beginning with the base, and keeps the
best value before it varies the next.

    STATE/tune/RUN-FINGERPRINT/      rows and parent, once; runs/RUN-tune-003/ has plan, results, metrics and logs of a variant
    RUN FOLDER/tune/steps-0020-DIGEST.json    the table, one per number of steps and machine; tune does not repeat its rows

A faster variant counts only if its loss on the base's batches is not worse. Where the batches differ (batch size), losses are not
comparable, because a contrastive loss depends on how many documents compete; the table says so.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import yaml
from rich.console import Console
from rich.text import Text

from pipeline.commands.terminal import say
from pipeline.commands.tune_space import Factor, common_window, default_space, parse_vary
from pipeline.commands.tune_table import Row, Table, describe_basis, describe_best, describe_settings, grid
from pipeline.commands.tune_trials import Bench, base_config, open_bench
from pipeline.config import nested
from pipeline.errors import ExitCode, TrnpipeError
from pipeline.estimate.variant import plan_world
from pipeline.run.find_run import find_run, read_plan

OBJECTIVES = {"samples_per_second": 1, "compile_seconds": -1, "host_memory_bytes": -1}
"""Objective, as the command line has it -> its sign: higher or lower is better."""

LEAST_WINDOWS = 4
"""Lines of metrics of a variant: a quarter of its steps is warm-up, and a median needs three values."""


def search(
    run: str,
    console: Console,
    *,
    bucket: str | None,
    state: Path,
    steps: int,
    vary: Sequence[str],
    limit: int | None,
    objective: str,
    tolerance: float,
    gain: float,
    timeout_minutes: float,
) -> tuple[Table, Row]:
    """Run the base and the variants that the table does not have yet.

    Args:
        run: id of a run, or URI of its folder.
        bucket: `s3://BUCKET` of a deployment that has the run; None: the local run's bucket, as files in `state`.
        state: folder of the local run; variants run below it in any case.
        steps: fewest optimizer steps of each variant; rounded up to whole lines of metrics.
        vary: `KEY=V1,V2,...` items, which replace the default space.
        limit: variants to run besides the base; None: all.
        objective: one of OBJECTIVES.
        tolerance: how much worse a loss may be, as a share of the base's.
        gain: the share by which a value must beat the best so far: smaller differences are noise.
        timeout_minutes: for each stage of a variant.

    Returns:
        The table, and its best row.

    Raises:
        BadConfig: options that cannot work, before anything runs.
        MissingInput: there is no such run, or its rows or parent are gone.
        TrnpipeError: the base fails, with the exit code of its stage.
    """
    base, root = find_run(run, bucket, state)
    plan = read_plan(base)
    config = base_config(plan.config)
    world = plan_world(config)
    factors = parse_vary(vary, config) if vary else default_space(config, world)
    window = common_window(config, factors, world)
    steps = max(LEAST_WINDOWS, -(-steps // window)) * window
    table = Table.open(base, describe_basis(plan, world, steps=steps, window=window))
    with (
        open_bench(state, base, plan, root, table, timeout_seconds=60 * timeout_minutes) as bench,
        _display(console, table, tolerance) as on_progress,
    ):

        def better(row: Row, than: Row) -> bool:
            new, old = (OBJECTIVES[objective] * float(getattr(each, objective) or 0.0) for each in (row, than))
            return table.counts(row, tolerance) and new > old + gain * abs(old)

        try:
            return table, climb(factors, bench, better, limit, on_progress)
        except KeyboardInterrupt:
            console.print("interrupted; the same command runs the missing variants")
            raise


def climb(
    factors: Sequence[Factor],
    bench: Bench,
    better: Callable[[Row, Row], bool],
    limit: int | None,
    on_progress: Callable[[str], None],
) -> Row:
    """Vary one factor at a time, from the base on; the best value of each stays.

    Raises:
        TrnpipeError: the base fails, with the exit code of its stage.
    """
    best = bench.row_of({}, on_progress)
    if best.status != "done":
        raise TrnpipeError(
            "the run's own settings do not train here",
            value=f"exit code {best.exit_code}: {best.what}",
            rule="variants are compared with the run's own settings",
            remedy=f"see the logs in {bench.folder / 'runs' / best.name}",
            exit_code=ExitCode.TRANSIENT if best.status == "slow" else ExitCode.of(best.exit_code),
        )
    left = math.inf if limit is None else limit
    for factor in factors:
        found = best
        variants = [bench.variant({**best.settings, **change}) for change in factor]
        for settings in [settings for settings in variants if settings != best.settings]:
            if left <= 0:
                return found
            left -= 1
            row = bench.row_of(settings, on_progress)
            found = row if better(row, found) else found
        best = found
    return best


def show(table: Table, best: Row, console: Console, *, objective: str, tolerance: float, out: Path | None, as_json: bool) -> None:
    """Print the table and the best settings.

    Args:
        out: file for the best settings.
        as_json: print the table as JSON, and nothing else, to standard output.
    """
    section = nested(best.settings)
    text = describe_best(table, best, objective, tolerance) + yaml.safe_dump(section, sort_keys=False)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    if as_json:
        sys.stdout.write(
            json.dumps({**table.record(), "table": table.uri, "best": asdict(best), "config": section}, indent=1) + "\n"
        )
        return
    console.print(grid(table, tolerance, best))
    console.print(f"table: {table.uri}", soft_wrap=True, highlight=False)
    console.print(text, markup=False, highlight=False, soft_wrap=True, end="")
    if out:
        console.print(f"written to {out}", soft_wrap=True, highlight=False)


@contextmanager
def _display(console: Console, table: Table, tolerance: float) -> Iterator[Callable[[str], None]]:
    """Print a line per new variant, on a terminal also the progress of the one that runs; yields a function to call often."""
    if shown := len(table.rows):
        console.print(f"the table has {shown} variants already: {table.uri}", soft_wrap=True)
    with console.status("") as status:

        def show_progress(doing: str) -> None:
            nonlocal shown
            for row in table.rows[shown:]:
                rate = "" if row.samples_per_second is None else f"{row.samples_per_second:.1f} samples/s, "
                say(console, f"{row.name}: {describe_settings(row.settings)} {rate}{table.verdict(row, tolerance)}")
            shown = len(table.rows)
            status.update(Text(doing))

        try:
            yield show_progress
        finally:
            show_progress("")
