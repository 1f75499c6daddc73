"""The rows of a run: every row of every shard checked, selected for training or the hold-out, and tokenized into the row files.

Reads the training and corpus shards; writes the quarantine, and the row files into a local folder.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import numpy as np

from pipeline import store
from pipeline.config import Deployment, RunConfig
from pipeline.contract import Metric, Queue
from pipeline.dataset.arrow import Lengths, WrittenRows, write_rows
from pipeline.dataset.ids import IdDigest
from pipeline.dataset.records import BadRow
from pipeline.dataset.refusals import Refusals
from pipeline.dataset.shards import (
    CorpusScan,
    InputFile,
    ShardScan,
    distinct_documents,
    find_shards,
    hash_shards,
    locate_conflicts,
    scan_corpus,
    scan_training,
)
from pipeline.dataset.split import Mask, Selection, split_new
from pipeline.dataset.tokens import TextTokenizer
from pipeline.errors import BadConfig, BadData, MissingInput
from pipeline.estimate.memory import known_capacity
from pipeline.estimate.requirements import attempt_minutes, over, refuse, requirements
from pipeline.estimate.workload import Workload
from pipeline.model.shape import ModelShape
from pipeline.plan import EmbedPlan, PlannedWorld, Shard
from pipeline.run.context import StageContext
from pipeline.stages.prepare_parent import Origin

log = logging.getLogger("trnpipe")

ScanT = TypeVar("ScanT", ShardScan, CorpusScan)

SHORTEST_TEXT = 3
"""Tokens of a text, the two that every family puts around it included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scans:
    """All rows of all shards, checked; `corpus` is None where the training rows' documents are the corpus.

    Attributes:
        distinct: of each shard in `embedded`, the rows to embed: the first of each id.
    """

    new: list[ShardScan]
    earlier: list[ShardScan]
    corpus: list[CorpusScan] | None
    distinct: list[Mask] = field(default_factory=list)

    @property
    def digest(self) -> IdDigest:
        """The ids to embed."""
        return IdDigest.of(np.concatenate([scan.ids[rows] for scan, rows in zip(self.embedded, self.distinct, strict=True)]))

    @property
    def embedded(self) -> Sequence[ShardScan | CorpusScan]:
        """The scans of what embed reads, sorted by URI so that parts hold much the same rows every week."""
        found: Sequence[ShardScan | CorpusScan] = [*self.new, *self.earlier] if self.corpus is None else self.corpus
        return sorted(found, key=lambda scan: scan.file.uri)


def training_files(context: StageContext, config: RunConfig, origin: Origin) -> tuple[list[InputFile], list[InputFile]]:
    """Return the new and the earlier training shards.

    Raises:
        BadConfig: data.train is empty.
        MissingInput: a URI names nothing, or nothing is new.
    """
    if not config.data.train:
        raise BadConfig(
            "there is nothing to train on",
            value="data.train = []",
            rule="data.train names at least one shard or folder of shards",
            remedy="set data.train",
        )
    files = hash_files(context, config.data.train, "data.train")
    new, earlier = split_new(files, origin.first_runs)
    log.info("training shards: %d new, %d that the parent was trained on", len(new), len(earlier))
    if not new and config.data.require_new:
        raise MissingInput(
            "no training shard is new",
            value=f"{len(files)} shards under {', '.join(config.data.train)}, all of them seen by run {origin.run}",
            rule="data.require_new: a run needs shards that its parent has not been trained on",
            remedy="upload new shards, or set data.require_new=false to train on earlier rows only",
        )
    return new, earlier


def hash_files(context: StageContext, uris: Sequence[str], setting: str) -> list[InputFile]:
    """Return the shards that a setting names, with their hashes."""
    shards = find_shards(uris, setting)
    total = sum(shard.size for shard in shards)
    log.info("%s: %d shards, %.1f MB", setting, len(shards), total / 1e6)
    return hash_shards(shards, lambda done: context.heartbeat.beat(done, total, unit="bytes", note=f"hashing {setting}"))


class Quarantine:
    """Lists every refused row in a local file; on exit, also after an error, the file is uploaded."""

    def __init__(self, path: Path, uri: str) -> None:
        self.refusals = Refusals()
        self._uri = uri
        self._path = path
        self._stream = path.open("w", encoding="utf-8")

    def __enter__(self) -> Quarantine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stream.close()
        if self.refusals.count:
            store.upload(self._path, self._uri)
            log.warning("refused rows are listed in %s", self._uri)
        else:
            store.delete(self._uri)  # an earlier attempt on other data may have left it

    def refuse(self, row: BadRow) -> None:
        self._stream.write(json.dumps(row._asdict(), ensure_ascii=False) + "\n")
        self.refusals.add(row)


def scan(
    context: StageContext,
    config: RunConfig,
    new: Sequence[InputFile],
    earlier: Sequence[InputFile],
    corpus: Sequence[InputFile] | None,
) -> Scans:
    """Check every row of every shard.

    Raises:
        BadData: a damaged file, or more bad rows than allowed.
    """
    columns = config.data.columns
    beat = partial(_beat_rows, context, "checking rows")
    with Quarantine(context.scratch / "quarantine.jsonl", context.paths.quarantine) as quarantine:
        scans = Scans(
            new=scan_training(new, columns, quarantine.refuse, beat),
            earlier=scan_training(earlier, columns, quarantine.refuse, beat),
            corpus=None if corpus is None else scan_corpus(corpus, columns, quarantine.refuse, beat),
        )
        scans = without_conflicts(context, scans, columns, quarantine)
        scanned = (*scans.new, *scans.earlier, *(scans.corpus or ()))
        context.cloudwatch.write({Metric.QUARANTINED_ROWS: sum(scan.bad_rows for scan in scanned)})
        # Each on its own, or a long history would hide one bad week.
        limit = config.data.max_bad_fraction
        check_bad_rows("new training shards", scans.new, limit, quarantine)
        check_bad_rows("earlier training shards", scans.earlier, limit, quarantine)
        check_bad_rows("corpus", scans.corpus or [], limit, quarantine)
    return scans


def _beat_rows(context: StageContext, note: str, done: int) -> None:
    context.heartbeat.beat(done, unit="rows", note=note)


def check_bad_rows(name: str, scans: Sequence[ShardScan | CorpusScan], limit: float, quarantine: Quarantine) -> None:
    """Refuse data of which more than `limit` (a fraction) is bad."""
    bad = sum(scan.bad_rows for scan in scans)
    total = bad + sum(scan.rows - (0 if scan.conflicts is None else int(scan.conflicts.sum())) for scan in scans)
    log.info("%s: %d rows, %d of them refused", name, total, bad)
    if bad > limit * total:
        raise BadData(
            f"too many rows of the {name} are bad: {bad:,} of {total:,}",
            value=quarantine.refusals.reasons(),
            rule=f"data.max_bad_fraction = {limit:g}",
            remedy="correct the rows, all of which are listed in prepare/quarantine.jsonl, or raise data.max_bad_fraction",
        )


def without_conflicts(context: StageContext, scans: Scans, columns: Mapping[str, str], quarantine: Quarantine) -> Scans:
    """Return the scans with the rows to embed: one for each id. An id's later rows with another document are refused."""
    embedded = scans.embedded
    if not embedded:
        return scans
    distinct, conflicts = distinct_documents(embedded)
    if any(rows.any() for rows in conflicts):
        source = "documents" if scans.corpus is None else "corpus"
        hashes = np.concatenate([scan.ids[rows] for scan, rows in zip(embedded, conflicts, strict=True)])
        beat = partial(_beat_rows, context, "locating ids with two documents")
        for shard, row, bad in locate_conflicts([scan.file for scan in embedded], source, columns, conflicts, hashes, beat):
            if bad is None:
                conflicts[shard][row], distinct[shard][row] = False, True
            else:
                quarantine.refuse(bad)
    found = {scan.file.uri: rows for scan, rows in zip(embedded, conflicts, strict=True)}
    if scans.corpus is not None:
        return replace(scans, corpus=[_with_conflicts(scan, found) for scan in scans.corpus], distinct=distinct)
    new, earlier = ([_with_conflicts(scan, found) for scan in group] for group in (scans.new, scans.earlier))
    return replace(scans, new=new, earlier=earlier, distinct=distinct)


def _with_conflicts(scan: ScanT, found: Mapping[str, Mask]) -> ScanT:
    rows = found[scan.file.uri]
    return replace(scan, conflicts=rows, bad_rows=scan.bad_rows + int(rows.sum()))


def check_selection(selection: Selection, config: RunConfig) -> None:
    """Refuse a run without rows to train on or to evaluate with.

    Raises:
        BadData: naming the counts that led there.
    """
    good = sum(scan.rows for scan in selection.scans)
    held = sum(int((mask & scan.positive).sum()) for mask, scan in zip(selection.holdout, selection.scans, strict=True))
    trained = selection.train_rows(new=True) + selection.train_rows(new=False)
    if not trained:
        raise BadData(
            "there is no row to train on",
            value=[
                f"{good} good rows, {held} positive ones held out, {sum(selection.new)} new shards",
                f"data.replay_fraction = {config.data.replay_fraction:g}",
            ],
            rule="a row is trained on if its label is above 0 and its document is not held out",
            remedy="add rows; without new shards, data.replay_fraction says which share of the earlier rows is used",
        )
    if not held:
        raise BadData(
            "the hold-out is empty",
            value=f"{good} good rows, data.holdout_fraction = {config.data.holdout_fraction:g}",
            rule="rows with a label above 0 are held out by hash of their document",
            remedy="add rows or raise data.holdout_fraction",
        )


def check_amounts(
    selection: Selection,
    embed: EmbedPlan,
    written: WrittenRows | None = None,
    *,
    config: RunConfig,
    deployment: Deployment,
    shape: ModelShape,
    world: PlannedWorld,
    models: int,
) -> None:
    """Refuse more data than a stage can hold, before days are spent on it; warn of what would take too long.

    Args:
        written: the row files; None: before there are any. Texts then count as short as they can be, and the hold-out's queries
            not at all, so that what is refused is certain.
        models: how many evaluate measures.

    Raises:
        BadConfig: names everything that is too much and what helps.
    """
    if deployment.local_paths:
        return  # All stages share a machine, whose other uses are unknown.
    scans = selection.scans
    held = [scan.documents[mask] for scan, mask in zip(scans, selection.holdout, strict=True)]
    work = Workload(
        train_rows=selection.train_rows(new=True) + selection.train_rows(new=False),
        scanned_rows=sum(scan.rows for scan in scans),
        corpus_rows=embed.rows,
        own_corpus=embed.source == "corpus",
        queries=written.queries if written else 0,
        candidates=len(np.unique(np.concatenate(held))),
        shard_rows=max(shard.rows for shard in embed.shards),
        query_tokens=SHORTEST_TEXT,
        document_tokens=float(written.document_lengths.mean()) if written else SHORTEST_TEXT,
    )
    found = list(
        requirements(
            work,
            shape,
            config,
            world,
            parts=len(embed.parts),
            ranks=embed.children * (config.embed.ranks_per_child or world.ranks_per_node),
            node_memory=known_capacity(config, world.kind, here=False).host,
            embed_host=deployment.hosts.get(Queue.EMBED),
            minutes=attempt_minutes(deployment.timeouts),
            models=models,
        )
    )
    refuse(found)
    for one in over(found):
        if written:
            log.warning("%s: %s of %s; %s", one.what, one.shown(one.amount), one.shown(one.limit), one.remedy)


def plan_shards(selection: Selection, origin: Origin, run_id: str) -> dict[str, Shard]:
    """Return the plan's training shards by URI, new ones first."""
    return {
        scan.file.uri: Shard(
            uri=scan.file.uri,
            sha256=scan.file.sha256,
            size=scan.file.size,
            rows=scan.rows,
            bad_rows=scan.bad_rows,
            holdout_rows=int(held.sum()),
            first_run=run_id if is_new else origin.first_runs[scan.file.sha256],
        )
        for scan, held, is_new in zip(selection.scans, selection.holdout, selection.new, strict=True)
    }


def trained_shards(selection: Selection, shards: Mapping[str, Shard], *, new: bool) -> tuple[Shard, ...]:
    """Return all new shards, or the earlier ones that have replayed rows."""
    return tuple(
        shards[scan.file.uri]
        for scan, train, is_new in zip(selection.scans, selection.train, selection.new, strict=True)
        if is_new == new and (is_new or train.any())
    )


def tokenize(
    context: StageContext,
    config: RunConfig,
    selection: Selection,
    shards: Mapping[str, Shard],
    tokenizer: TextTokenizer,
    lengths: Lengths,
    folder: Path,
    published: tuple[TextTokenizer, Lengths] | None,
) -> WrittenRows:
    """Write the row files into a local folder.

    Args:
        published: how the published model's texts are tokenized; None: as the parent's.
    """
    folder.mkdir(exist_ok=True)
    trained = [*trained_shards(selection, shards, new=True), *trained_shards(selection, shards, new=False)]
    written = write_rows(
        folder,
        selection,
        {shard.uri: number for number, shard in enumerate(trained)},
        config.data.columns,
        tokenizer,
        lengths,
        partial(_beat_rows, context, "tokenizing"),
        published,
    )
    log.info("tokenized: %s", ", ".join(f"{rows} rows in {name}" for name, rows in written.rows.items()))
    return written
