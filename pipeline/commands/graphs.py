"""`trnpipe graphs`: did compile meet every graph ahead of time, and do all ranks compile the same ones?

It looks at the compiled sets of a run and the graphs that its stages met beyond them; at the graphs of a training step at the
plan's real number of ranks, lowered to HLO without a gang (their collectives contain the number of ranks); and with `--prove`,
for a plan that never ran, at a short run of the real stages on torch-xla.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeline.commands.graphs_lowered import Lowered, lower_plan
from pipeline.commands.graphs_proof import Proof, prove_graphs
from pipeline.commands.graphs_recorded import STAGES_THAT_MEET, CompiledSet, StageGraphs, read_sets, read_stage
from pipeline.commands.terminal import counted, say
from pipeline.errors import BadConfig, ExitCode
from pipeline.plan import RunPlan
from pipeline.run.find_run import find_run, read_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The results of the command.

    Attributes:
        sets: both compiled sets; none on device types that run operations one by one.
        stages: those that have reported which graphs they met.
        lowered, proof: None if not requested.
    """

    run: str
    uri: str
    kind: str
    precision: str
    ranks: int
    sets: tuple[CompiledSet, ...]
    stages: tuple[StageGraphs, ...]
    lowered: Lowered | None
    proof: Proof | None

    @property
    def problems(self) -> list[str]:
        """The reasons to end with 69; empty: end with 0."""
        found = [
            f"{stage.name} met {counted(len(stage.new), 'graph')} that compile did not" for stage in self.stages if stage.new
        ]
        if self.lowered and self.lowered.difference:
            found.append(f"rank {self.lowered.ranks - 1} would compile other graphs than rank 0")
        return found + [
            f"on torch-xla {stage.name} met {counted(len(stage.new), 'graph')} that the trial did not"
            for stage in (self.proof.stages if self.proof else ())
            if stage.new
        ]

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.DEFECT if self.problems else ExitCode.DONE

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "problems": self.problems}


def find(
    run: str,
    console: Console,
    *,
    bucket: str | None = None,
    state: Path,
    lower: bool = True,
    prove: bool = False,
    steps: int | None = None,
    keep: Path | None = None,
) -> Findings:
    """Find everything that was requested.

    Args:
        run: id of a run, or URI of its folder.
        console: shows the progress.
        bucket: `s3://BUCKET` of a deployment that has the run; None: the local run's bucket, as files in `state`.
        state: folder of the local run.
        lower: lower the graphs of a training step at the plan's number of ranks.
        prove: run the real stages on torch-xla.
        steps: to train for the proof; None: as few as meet everything.
        keep: folder in which the proof's run stays; None: it is removed.

    Raises:
        BadConfig: options that do not fit each other or this machine.
        MissingInput: there is no such run, or its parent or rows are gone.
        BadData: a file of it cannot be read.
        TrnpipeError: a stage of the proof fails, with its exit code.
    """
    if not prove and (steps is not None or keep is not None):
        raise BadConfig("--steps and --keep belong to the proof", rule="they say how --prove runs", remedy="add --prove")
    paths, root = find_run(run, bucket, state)
    plan = read_plan(paths)
    sets, known = read_sets(paths, plan.graphs) if plan.graphs else ([], None)
    met = [read_stage(paths, stage, known) for stage in STAGES_THAT_MEET] if plan.graphs else []
    lowered = proof = None
    with _progress(console) as on_progress:
        if lower:
            on_progress("lowering")
            lowered = lower_plan(plan, root, on_progress)
        if prove:
            with _folder(keep, plan) as folder:
                proof = prove_graphs(paths, plan, root, folder, steps, on_progress)
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
        proof=proof,
    )


@contextmanager
def _folder(keep: Path | None, plan: RunPlan) -> Iterator[Path]:
    """Yield the folder of the proof.

    Raises:
        BadConfig: the named folder is not empty.
    """
    if keep is None:
        with tempfile.TemporaryDirectory(prefix=f"trnpipe-proof-{plan.run}-") as name:
            yield Path(name)
        return
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise BadConfig("the folder for the proof is not empty", value=keep, rule="what is in it would be part of the run")
    keep.mkdir(parents=True, exist_ok=True)
    yield keep.absolute()


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[str], None]]:
    """Show the progress: one line that changes on a terminal; elsewhere a line whenever another part begins."""
    if console.is_terminal:
        with console.status("") as status:
            yield lambda words: status.update(words)
        return
    said = ""

    def tell(words: str) -> None:
        nonlocal said
        part = words.split(":", 1)[0]
        if part != said:
            said = part
            say(console, f"{part} ...")

    yield tell
