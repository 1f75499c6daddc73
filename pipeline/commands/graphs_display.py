"""The output of `trnpipe graphs`."""

from __future__ import annotations

import json
import sys

from rich.console import Console
from rich.text import Text

from pipeline.commands.graphs import Findings
from pipeline.commands.graphs_lowered import Lowered
from pipeline.commands.graphs_proof import Proof
from pipeline.commands.graphs_recorded import StageGraphs
from pipeline.commands.terminal import counted, left, right, say, simple_table
from pipeline.contract import EAGER_KINDS

FINGERPRINT_SHOWN = 12
CAUSES_SHOWN = 20


def show(findings: Findings, console: Console, *, as_json: bool = False) -> None:
    """Print everything that was found, the verdict last.

    Args:
        as_json: print one JSON object, and nothing else, to standard output.
    """
    if as_json:
        sys.stdout.write(json.dumps(findings.record(), indent=1) + "\n")
        return
    say(console, f"{findings.run}: {findings.kind}, {findings.precision}, {counted(findings.ranks, 'rank')}", style="bold")
    if findings.kind in EAGER_KINDS:
        say(console, f"The device type `{findings.kind}` runs operations one by one: it has no graphs, and compiles nothing.")
    else:
        table = simple_table(left("compiled set"), left("fingerprint"), left("state"), right("graphs"))
        for one in findings.sets:
            missing = one.graphs is None
            state = Text("missing", "yellow") if missing else Text("complete", "green")
            table.add_row(one.name, one.fingerprint, state, "" if missing else str(one.graphs))
        console.print(table)
        _stages(findings.stages, console)
    if findings.lowered:
        _lowered(findings.lowered, console, other_kind=findings.lowered.kind != findings.kind)
    if findings.proof:
        _proof(findings.proof, console)
    problems = findings.problems
    for problem in problems:
        say(console, problem, style="bold red")
    if problems:
        return
    agreement = {
        "no stage met a graph that compile had not met": bool(findings.stages or findings.proof),
        "all ranks compile the same graphs": findings.lowered is not None and findings.ranks > 1,
        "compile has yet to make the missing sets": any(one.graphs is None for one in findings.sets),
    }
    agreed = [words for words, holds in agreement.items() if holds]
    say(console, "; ".join(agreed) or "nothing was compared", style="bold green")


def _stages(stages: tuple[StageGraphs, ...], console: Console) -> None:
    if not stages:
        say(console, "No stage has reported yet which graphs it met.")
        return
    table = simple_table(left("stage"), right("processes"), right("met"), right("last at step"), right("new"))
    for stage in stages:
        new = Text(str(len(stage.new)), "bold red" if stage.new else "green")
        table.add_row(stage.name, str(stage.processes), str(stage.compiled), str(stage.last_compiled_step or ""), new)
    console.print(table)
    for stage in stages:
        for graph in stage.new[:CAUSES_SHOWN]:
            say(console, f"new in {stage.name} {graph.number} at step {graph.step}: {graph.key}: {graph.cause}", style="red")
        if len(stage.new) > CAUSES_SHOWN:
            say(console, f"... and {len(stage.new) - CAUSES_SHOWN} more in {stage.name}", style="red")
        for operation, times in stage.fallbacks.items():
            say(console, f"{stage.name}: {operation} ran on the host {counted(times, 'time')}", style="yellow")


def _lowered(lowered: Lowered, console: Console, *, other_kind: bool) -> None:
    as_kind = f" as kind {lowered.kind} would compile them" if other_kind else ""
    say(console, f"Graphs of a training step{as_kind}, {lowered.precision}, {counted(lowered.ranks, 'rank')}:")
    last = [left(f"rank {lowered.ranks - 1} = 0")] if lowered.ranks > 1 else []
    counts = map(right, ("operations", "inputs"))
    table = simple_table(right("graph"), left("fingerprint"), *counts, left("collectives"), *last)
    agrees = Text("no", "bold red") if lowered.difference else Text("yes", "green")
    for number, graph in enumerate(lowered.graphs, start=1):
        collectives = ", ".join(
            f"{name}{f' ({count})' if count > 1 else ''}" for name, count in graph.description.collectives.items()
        )
        cells = [
            f"{number}{f' ({graph.times} times)' if graph.times > 1 else ''}",
            graph.fingerprint[:FINGERPRINT_SHOWN],
            str(graph.description.size),
            str(sum(graph.description.inputs.values())),
            collectives,
        ]
        table.add_row(*cells, *([agrees if number == 1 else ""] if last else []))
    console.print(table)
    if lowered.difference:
        say(console, f"rank {lowered.ranks - 1}: {lowered.difference}", style="red")


def _proof(proof: Proof, console: Console) -> None:
    say(
        console,
        f"Proof on torch-xla, {proof.precision}, 1 rank: the trial met {proof.recorded} graphs; then {proof.steps} steps, "
        f"and again from the checkpoint of step {proof.checkpoint}:",
    )
    _stages(proof.stages, console)
