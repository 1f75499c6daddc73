"""`trnpipe graphs`: did compile meet every graph ahead of time, and do all ranks compile the same ones?

It looks at the compiled sets of a run and the graphs that its stages met beyond them, and at the graphs of a training step at the
plan's real number of ranks, lowered to HLO without a gang (their collectives contain the number of ranks).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeline.commands.graphs_lowered import Lowered, lower_plan
from pipeline.commands.graphs_recorded import STAGES_THAT_MEET, CompiledSet, StageGraphs, read_sets, read_stage
from pipeline.commands.terminal import counted, say
from pipeline.errors import ExitCode
from pipeline.run.find_run import find_run, read_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The results of the command.

    Attributes:
        sets: both compiled sets; none on device types that run operations one by one.
        stages: those that have reported which graphs they met.
        lowered: None if not requested.
    """

    run: str
    uri: str
    kind: str
    precision: str
    ranks: int
    sets: tuple[CompiledSet, ...]
    stages: tuple[StageGraphs, ...]
    lowered: Lowered | None

    @property
    def problems(self) -> list[str]:
        """The reasons to end with 69; empty: end with 0."""
        found = [
            f"{stage.name} met {counted(len(stage.new), 'graph')} that compile did not" for stage in self.stages if stage.new
        ]
        if self.lowered and any(bucket.difference for bucket in self.lowered.buckets):
            found.append(f"rank {self.lowered.ranks - 1} would compile other graphs than rank 0")
        return found

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.DEFECT if self.problems else ExitCode.DONE

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "problems": self.problems}


def find(run: str, console: Console, *, bucket: str | None = None, state: Path, lower: bool = True) -> Findings:
    """Find everything that was requested.

    Args:
        run: id of a run, or URI of its folder.
        console: shows the progress.
        bucket: `s3://BUCKET` of a deployment that has the run; None: the local run's bucket, as files in `state`.
        state: folder of the local run.
        lower: lower the graphs of a training step at the plan's number of ranks.

    Raises:
        BadConfig: torch-xla is not installed here.
        MissingInput: there is no such run, or its parent is gone.
        BadData: a file of it cannot be read.
        Defect: the graphs could not be lowered.
    """
    paths, root = find_run(run, bucket, state)
    plan = read_plan(paths)
    sets, known = read_sets(paths, plan.graphs) if plan.graphs else ([], None)
    met = [read_stage(paths, stage, known) for stage in STAGES_THAT_MEET] if plan.graphs else []
    lowered = None
    if lower:
        if not console.is_terminal:
            say(console, "lowering ...")
        with console.status("lowering") as status:
            lowered = lower_plan(plan, root, status.update)
    world = plan.world
    return Findings(
        run=plan.run,
        uri=paths.root,
        kind=world.kind,
        precision=world.precision,
        ranks=world.ranks,
        sets=tuple(sets),
        stages=tuple(stage for stage in met if stage is not None),
        lowered=lowered,
    )
