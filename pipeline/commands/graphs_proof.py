"""The proof for any plan: compile's trial, then the real stages on a few of the run's own rows, on torch-xla with one rank.

A copy of the plan gets a run folder of its own, with device type `xla`: the same model, settings and program, and graphs that XLA
really compiles, on this host's processor. The lowered graphs cover what one host does not have: collectives, and the compiler's
own cast, which is fp32 here. The rows are few, but a short run meets what a long one meets: bins of different pairs, the rise and
the fall of the learning rate, validation, a checkpoint, and a process that resumes from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from pipeline import store
from pipeline.backends.device import require_available
from pipeline.commands.graphs_recorded import StageGraphs, read_sets, read_stage
from pipeline.config import RunConfig, build_config
from pipeline.contract import RunPaths, Stage, StageResult
from pipeline.dataset.corpus import DOCUMENT_TOKENS, CorpusReader
from pipeline.dataset.ids import IdDigest
from pipeline.dataset.ingested import TEXTS, ingested_rows_uri, ingested_tokens_uri, write_batches, write_file, write_profile
from pipeline.dataset.row_files import KNOWN, PairLengths, read_table
from pipeline.dataset.steps import write_steps
from pipeline.errors import BadConfig, BadData, Defect, ExitCode, TrnpipeError
from pipeline.estimate.variant import plan_variant
from pipeline.host.child import progress_note, read_failure, run_stage, sentence
from pipeline.plan import EmbedPlan, PartPlan, RunPlan
from pipeline.run.find_run import mirrored

LEAST_STEPS = 8
"""Enough for a rise of the learning rate, a peak and a fall, with a checkpoint in the middle."""

HOLDOUT_ROWS = 48
DOCUMENTS = 256
"""Documents of the corpus that embed gets."""

STAGE_MINUTES = 120.0
"""Limit of one stage; compiling a large model takes minutes on a processor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The graphs of a short real run.

    Attributes:
        run: its folder.
        recorded: number of graphs that its trial met.
        steps: optimizer steps that it trained.
        checkpoint: step from which a second process resumed.
        stages: in their order; train comes twice.
    """

    run: str
    precision: str
    recorded: int
    steps: int
    checkpoint: int
    stages: tuple[StageGraphs, ...]


def prove_graphs(
    base: RunPaths, plan: RunPlan, root: str | None, folder: Path, steps: int | None, on_progress: Callable[[str], None]
) -> Proof:
    """Run everything in `folder` and compare the graphs that compile recorded with those that the stages met.

    Args:
        base: the run whose plan is copied; it stays unchanged.
        root: local bucket that stands for the one the plan names, see `find_run`.
        folder: gets a bucket with the run, and logs.
        steps: to train; None: as few as meet everything.

    Raises:
        BadConfig: torch-xla is not installed, too few steps, or the model needs more memory than there is.
        MissingInput: rows or parent are gone.
        TrnpipeError: a stage fails, with its exit code.
    """
    require_available("xla")
    on_progress("choosing rows")
    rows = store.local_folder(base.rows, folder / "planned-rows")
    config = proof_config(plan, steps)
    proof = _copy(plan, base.bucket_root, root, folder, config, rows)
    paths = RunPaths(str(folder / "bucket" / "runs" / proof.run))

    _run(Stage.COMPILE, "compile", paths, folder, on_progress)
    assert proof.graphs is not None
    _, known = read_sets(paths, proof.graphs)
    if known is None:
        raise Defect("compile left no complete sets", value=paths.root)
    stages: list[StageGraphs] = []

    def meet(stage: Stage, name: str) -> None:
        _run(stage, name, paths, folder, on_progress)
        if (found := read_stage(paths, stage, known, name=name)) is not None:
            stages.append(found)

    meet(Stage.TRAIN, "train")
    checkpoint = config.train.checkpoint_every
    _forget_after(paths, checkpoint)
    name = f"train from step {checkpoint}"
    meet(Stage.TRAIN, name)
    resumed = StageResult.from_json(store.read_bytes(paths.result(Stage.TRAIN))).metrics["resumed_from"]
    if resumed != checkpoint:
        raise Defect("training did not resume from its checkpoint", value=f"step {resumed}", rule=f"step {checkpoint}")
    meet(Stage.EVALUATE, "evaluate")
    if proof.embed.parts:
        meet(Stage.EMBED, "embed")
    if len(stages) != (4 if proof.embed.parts else 3):
        raise Defect("a stage has not reported which graphs it met", value=", ".join(stage.name for stage in stages))
    return Proof(
        run=paths.root,
        precision=proof.world.precision,
        recorded=len(known),
        steps=proof.train.steps,
        checkpoint=checkpoint,
        stages=tuple(stages),
    )


def proof_config(plan: RunPlan, steps: int | None) -> RunConfig:
    """Return the plan's configuration for a short run of one xla rank, with one checkpoint and one validation in the middle.

    Raises:
        BadConfig: too few steps to meet everything.
    """
    config = plan.config
    joined = config.device.loader.batches_per_execution
    least = max(LEAST_STEPS, 2 * joined + 1)
    if steps is not None and steps < least:
        raise BadConfig(
            "too few steps to meet every graph of a run",
            value=f"--steps {steps}",
            rule=f"{least} steps meet a checkpoint and the steps after it",
            remedy=f"--steps {least}, or leave it out",
        )
    total = steps or least
    middle = -(-total // (2 * joined)) * joined
    precision = "fp32" if plan.world.precision == "compiler" else plan.world.precision
    here = {
        "nodes": 1,
        "registry": None,
        "device": {
            "kind": "xla",
            "precision": precision,
            "ranks_per_node": 1,
            "threads_per_rank": None,
            "memory_gib": None,
            "host_memory_gib": None,
        },
        "compile": {"enabled": True, "new_graphs": "report", "auto_cast": None},
        "train": {
            "steps": total,
            "warmup_fraction": 0.25,
            "validate_every": middle,
            "checkpoint_every": middle,
            "keep_checkpoints": 3,
            "validation_queries": min(config.train.validation_queries, HOLDOUT_ROWS),
        },
        "evaluate": {"bootstrap_samples": 1},
        "gate": {"undecided": "accept"},
    }
    return build_config(config.model_dump(mode="json"), here)


def _copy(
    plan: RunPlan,
    base: str,
    root: str | None,
    folder: Path,
    config: RunConfig,
    rows: Path,
) -> RunPlan:
    """Write the copy's rows and plan."""
    # As many rows as the steps have room for.
    train = read_table(rows / "train.arrow")[: config.train.batch_size * config.train.accumulation * LEAST_STEPS]
    name = f"{plan.run[:74]}-proof"
    paths = RunPaths(str(folder / "bucket" / "runs" / name))
    parent = store.local_folder(mirrored(plan.parent.folder, root), folder / "parent").absolute()
    proof = plan_variant(plan, config, run=name, parent=parent, rows=len(train), bucket_root=paths.bucket_root)
    holdout, candidates = choose_holdout(rows)
    target = Path(paths.rows)
    target.mkdir(parents=True)
    known = read_table(rows / KNOWN)
    for file, table in (("train.arrow", train), ("holdout.arrow", holdout), ("candidates.arrow", candidates), (KNOWN, known)):
        with pa.ipc.new_file(str(target / file), table.schema) as writer:
            writer.write_table(table)
    write_steps(target, PairLengths(target / "train.arrow"), len(train), config, 1)
    embed = one_part(plan.embed, base, paths.bucket_root, folder / "documents")
    proof = proof.model_copy(update={"embed": embed, "row_files": {}}).sealed()
    store.write_bytes(paths.plan, proof.to_json())
    return proof


def choose_holdout(rows: Path) -> tuple[pa.Table, pa.Table]:
    """Choose some held-out queries and their candidates: their documents.

    Raises:
        BadData: no query has a relevant document.
    """
    holdout, candidates = read_table(rows / "holdout.arrow"), read_table(rows / "candidates.arrow")
    relevant = np.flatnonzero(np.asarray(holdout["label"]) > 0)[:HOLDOUT_ROWS]
    if not relevant.size:
        raise BadData("the hold-out has no query with a relevant document", value=rows, remedy="raise data.holdout_fraction")
    held = holdout.take(pa.array(relevant))
    own = np.flatnonzero(np.isin(np.asarray(candidates["document_hash"]), np.asarray(held["document_hash"])))
    return held, candidates.take(pa.array(own))


def one_part(plan: EmbedPlan, base: str, bucket_root: str, folder: Path) -> EmbedPlan:
    """Return a plan with some documents of the corpus as its only part, or without parts.

    Args:
        base: holds the plan's ingested shards.
        bucket_root: gets one of the same name, with these documents and without their texts.
        folder: for its files.
    """
    if (index := next((index for index, part in enumerate(plan.parts) if part.rows), None)) is None:
        return plan.model_copy(update={"parts": (), "rows": 0, "children": 1})
    reader = CorpusReader(base, plan.shards)
    documents = reader.read_part(index, len(plan.parts), lambda tokens: tokens).slice(0, DOCUMENTS)
    shard, rows, tokens = reader.files[0][0], folder / "rows", folder / "tokens"
    for each in (rows, tokens):
        each.mkdir(parents=True)
    offsets = write_batches(tokens / "tokens-00000.arrow", documents.select([DOCUMENT_TOKENS]))
    write_profile(
        tokens,
        ingested_tokens_uri(bucket_root, shard.shard.rows, shard.shard.tokens),
        shard.token_profile.model_copy(update={"files": (offsets,)}),
    )
    for column in TEXTS:
        documents = documents.append_column(column, pa.nulls(documents.num_rows, column.type))
    file, _ = write_file(rows, 0, shard.profile.kind, documents)
    write_profile(
        rows,
        ingested_rows_uri(bucket_root, shard.shard.rows),
        shard.profile.model_copy(update={"files": (file,), "rows": file.rows, "folder": ""}),
    )
    ids = str(IdDigest.of(documents["key"].to_numpy()))
    return plan.model_copy(
        update={
            "shards": (shard.shard,),
            "parts": (PartPlan(rows=file.rows, ids=ids),),
            "rows": file.rows,
            "ids": ids,
            "children": 1,
        }
    )


def _forget_after(paths: RunPaths, step: int) -> None:
    """Remove everything after this step's checkpoint, as if the process had died there."""
    store.delete(paths.result(Stage.TRAIN))
    store.delete(paths.graphs(Stage.TRAIN))
    store.delete_folder(paths.model)
    keep = f"{paths.checkpoint(step)}/"
    for info in store.list_objects(paths.checkpoints):
        if not info.uri.startswith(keep):
            store.delete(info.uri)


def _run(stage: Stage, name: str, paths: RunPaths, folder: Path, on_progress: Callable[[str], None]) -> None:
    """Run one stage as its container would.

    Args:
        name: of its log in the folder, and in the progress.

    Raises:
        TrnpipeError: it failed.
    """
    log = folder / f"{name.replace(' ', '-')}.log"
    ended = run_stage(
        stage,
        paths.root,
        log=log,
        timeout_seconds=60 * STAGE_MINUTES,
        on_poll=lambda: on_progress(f"{name}: {progress_note(paths, stage)}"),
    )
    if not ended.code:
        return
    failed = read_failure(paths, stage)
    said = log.read_text(encoding="utf-8", errors="replace").splitlines()[-8:]
    raise TrnpipeError(
        f"{stage} failed on torch-xla",
        value=[
            f"exit code {ended.code}",
            *([f"longer than {STAGE_MINUTES:g} minutes"] if ended.timed_out else []),
            *([sentence(failed.what, failed.value)] if failed else said),
        ],
        rule="the real stages run on the plan's own model, settings and rows, with one rank",
        remedy=f"with --keep FOLDER the run and its logs stay ({log.name})",
        exit_code=ExitCode.TRANSIENT if ended.timed_out else ExitCode.of(ended.code),
    )
