"""plan: decide everything that depends on rows. Reads prepare/inputs.json and the ingested shards; writes plan/ and plan.json.

It works with hashes and profiles, and reads of the rows only those that the run uses. The row files are in place before the plan,
and the plan is written only if there is none: a run that resumes keeps the plan it has. What is embedded is planned
again once prepare has listed it anew: embed/plan.json.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

from pipeline import store
from pipeline.config import Deployment
from pipeline.contract import Artifact, Metric, Queue, RunPaths, Stage, StageResult, now
from pipeline.cost import cost_of, most
from pipeline.dataset.deletions import Deletions
from pipeline.dataset.golden import GOLDEN, write_golden
from pipeline.dataset.ingested import DOCUMENTS, PAIRS, IngestedShard, Profile
from pipeline.dataset.profile import check_limits, profile_of
from pipeline.dataset.reading import return_memory
from pipeline.dataset.row_files import CLASSES, PUBLISHED, Lengths
from pipeline.dataset.tokens import TextTokenizer
from pipeline.errors import BadConfig, BadData, MissingInput
from pipeline.estimate.requirements import attempt_minutes, over, refuse, requirements
from pipeline.estimate.workload import Workload
from pipeline.evaluation.gate import check_holdout
from pipeline.evaluation.reference import REFERENCE
from pipeline.evaluation.reference import VALUES as REFERENCE_VALUES
from pipeline.graphs.fingerprint import missing_sets
from pipeline.log import log
from pipeline.model.inventory import fetch_without_weights, load_tokenizer
from pipeline.plan import DataProfile, DeletionPlan, EmbedPlan, ExpectedCost, HoldoutPlan, RowFile, RunPlan, Shard, TrainPlan
from pipeline.run.context import StageContext, StageOutput
from pipeline.run.request import read_request
from pipeline.run_inputs import Corpus, MissingShards, RunInputs
from pipeline.stages.plan_corpus import (
    Quarantine,
    check_bad_rows,
    count,
    count_corpus,
    count_gone,
    ingested,
    last_plan,
    plan_embedding,
    refused,
    write_embed_plan,
)
from pipeline.stages.plan_rows import PlannedRows
from pipeline.training.resumption import resumed_run

LISTED_SHARDS = 20
"""Shards named in result.json, which must stay small; all of them are in the plan."""

SHORTEST_TEXT = 3
"""Tokens of a text, the two that every family puts around it included."""


def run(context: StageContext) -> StageOutput:
    """Plan the run, or keep the plan that is there."""
    return_memory()
    inputs = RunInputs.from_json(store.read_bytes(context.paths.inputs))
    corpus = Corpus.from_json(store.read_bytes(context.paths.corpus)) if store.exists(context.paths.corpus) else None
    plan = kept_plan(context.paths) or (
        new_plan(context, inputs) if inputs.config.mode == "train" else refresh_plan(context, inputs)
    )
    if corpus:
        plan = plan.model_copy(update={"embed": write_embed_plan(context, inputs, plan, corpus)})
    for name, value in plan.summary().items():
        log.info("plan: %s = %s", name, value)
    return output(context.paths, plan)


def kept_plan(paths: RunPaths) -> RunPlan | None:
    """Return the plan that an earlier execution made, if there is one.

    Raises:
        MissingInput: the row files are gone.
    """
    if not store.exists(paths.plan):
        return None
    plan = RunPlan.from_json(store.read_bytes(paths.plan))
    check_row_files(paths, plan)
    log.info("keeping the plan of %s", plan.created)
    return plan


def check_row_files(paths: RunPaths, plan: RunPlan, *, content: bool = False) -> None:
    """Refuse to continue without the row files that the plan names.

    Args:
        content: compare their hashes too, not only their sizes.
    """
    gone = []
    for name, file in plan.row_files.items():
        uri = store.join(paths.rows, name)
        info = store.stat(uri)
        if info is None or info.size != file.size or (content and store.sha256(uri) != file.sha256):
            gone.append(uri)
    if gone:
        raise MissingInput(
            "row files of the run are gone or have changed",
            value=gone,
            rule="they stay as plan wrote them for as long as the run lasts",
            remedy="start a new run",
        )


def refresh_plan(context: StageContext, inputs: RunInputs) -> RunPlan:
    """Plan a refresh: there is a corpus to embed, and nothing else.

    Raises:
        BadData: see `count_corpus`.
    """
    plan = RunPlan(
        run=context.paths.run_id,
        created=now(),
        config=inputs.config,
        parent=inputs.parent,
        published=inputs.published,
        world=inputs.world,
        train=TrainPlan(),
        holdout=HoldoutPlan(),
        embed=count_corpus(context, inputs, inputs.shards),
        graphs=inputs.graphs,
        memory=inputs.memory,
        lineage=inputs.lineage,
        identity=inputs.identity,
    )
    return write_plan(context.paths, plan.sealed())


def new_plan(context: StageContext, inputs: RunInputs) -> RunPlan:
    """Decide everything, write the row files, then the plan.

    Raises:
        BadConfig, BadData, MissingInput: see the functions below.
    """
    paths, scratch = context.paths, context.scratch
    deployment = read_request(paths).deployment
    config, world = inputs.config, inputs.world
    pairs, documents = (ingested(paths, inputs.shards_of(kind)) for kind in (PAIRS, DOCUMENTS))

    def beat(note: str, done: int) -> None:
        context.heartbeat.beat(done, unit="rows", note=note)

    with Quarantine(scratch / "quarantine.jsonl", paths.quarantine) as quarantine:
        own = [shard for shard in documents if not shard.shard.of_pairs]
        quarantine.join([*pairs, *own])
        counted = count(context, inputs, documents, quarantine)
        context.cloudwatch.write({Metric.QUARANTINED_ROWS: quarantine.count})
        rows = PlannedRows(inputs, pairs, own, paths.bucket_root, scratch / "rows", _published(context, inputs), beat)
        check_bad_rows(inputs, pairs, documents, counted, rows.new_shards, quarantine)
    check_selection(inputs, rows, pairs)
    embed = plan_embedding(inputs, inputs.shards_of(DOCUMENTS), documents, counted)
    profile = check_profile(context, inputs, [pairs[number].profile for number in rows.new_shards], embed)
    check_data = partial(check_amounts, inputs, deployment)
    check_data(rows, pairs, embed)
    rows.write_holdout()
    decides = check_queries(paths, inputs, rows)
    write_golden_sets(context, inputs, rows)
    reference = plan_reference(paths, inputs, rows)
    counts, mean_tokens = rows.write_training(world.ranks)
    check_data(rows, pairs, embed, mean_tokens)

    shards = {number: _shard(number, pairs[number], rows) for number in rows.numbers}
    first = len(rows.new_shards)
    planned = sorted(rows.numbers, key=rows.numbers.__getitem__)
    plan = RunPlan(
        run=paths.run_id,
        created=now(),
        config=config,
        parent=inputs.parent,
        published=inputs.published,
        world=world,
        train=TrainPlan(
            new=tuple(shards[number] for number in planned[:first]),
            replay=tuple(shards[number] for number in planned[first:]),
            rows=rows.rows["train.arrow"],
            new_rows=rows.new.total(),
            replay_rows=rows.replayed.total(),
            bad_rows=sum(map(refused, pairs)),
            not_positive=sum(shard.profile.rows - shard.profile.positive_rows for shard in pairs),
            **asdict(counts),
        ),
        holdout=HoldoutPlan(
            rows=rows.rows["holdout.arrow"] + rows.rows[CLASSES],
            queries=rows.judged,
            candidates=rows.rows["candidates.arrow"],
            decides=decides,
        ),
        embed=embed,
        graphs=inputs.graphs,
        memory=inputs.memory,
        expected_cost=expect_cost(inputs, paths, embed.children, deployment),
        profile=profile,
        deletions=plan_deletions(paths, inputs, [*pairs, *documents]),
        reference=reference,
        row_files=upload_rows(paths, scratch / "rows", rows.rows),
        lineage=inputs.lineage,
        pairs=tuple(shard.shard.rows for shard in pairs),
        identity=inputs.identity,
    )
    resumed = {"resumed": resumed_run(plan, paths)}
    return write_plan(paths, plan.model_copy(update={"train": plan.train.model_copy(update=resumed)}).sealed())


def write_golden_sets(context: StageContext, inputs: RunInputs, rows: PlannedRows) -> None:
    """Write the golden sets' row files.

    Raises:
        MissingInput, BadData: see `write_golden`.
    """
    if not inputs.config.evaluate.sets:
        return
    folder = fetch_without_weights(inputs.parent.folder, context.scratch / "parent")
    own = load_tokenizer(folder, inputs.tokenizer), Lengths.of(inputs.config)
    published = _published(context, inputs)
    for golden in inputs.config.evaluate.sets:
        below = f"{GOLDEN}/{golden.name}"
        found = write_golden(rows.folder / below, golden, {"": own, **({PUBLISHED: published} if published else {})})
        rows.rows |= {f"{below}/{name}": count for name, count in found.items()}


def plan_reference(paths: RunPaths, inputs: RunInputs, rows: PlannedRows) -> str | None:
    """Copy the hold-out of the reference; return its run, None where there is none or new models cannot be compared with it.

    Raises:
        MissingInput: its files are gone.
    """
    if inputs.reference is None:
        return None
    source = RunPaths(f"{paths.bucket_root}/runs/{inputs.reference}")
    try:
        plan = RunPlan.from_json(store.read_bytes(source.plan))
        listed = RunInputs.from_json(store.read_bytes(source.inputs)).shards
    except BadData as error:
        log.warning("the reference, run %s, is of another version; no budget is kept: %s", source.run_id, error.what)
        return None
    own, other = (
        (Lengths.of(config), config.data.holdout_by, config.classifies_only and config.train.classes)
        for config in (inputs.config, plan.config)
    )
    # The rows of a test file that is no longer one may be trained on.
    held, kept = (
        {(one.uri, one.version) for one in shards if one.setting.endswith(".holdout")} for shards in (listed, inputs.shards)
    )
    if (inputs.tokenizer, own) != (plan.embed.tokenizer, other) or held - kept:
        log.warning(
            "the reference, run %s, has another kind of hold-out, other tokens, lengths or classes, or test files (data.holdout) "
            "that are not listed any more; no budget is kept until another one is pinned",
            source.run_id,
        )
        return None
    rows.write_reference(source, read_kept(paths, inputs))
    if not rows.rows[f"{REFERENCE}/{REFERENCE_VALUES}"]:
        log.warning(
            "nothing is left of the hold-out of the reference, run %s; no budget is kept until another one is pinned",
            source.run_id,
        )
        return None
    return source.run_id


def read_kept(paths: RunPaths, inputs: RunInputs) -> Deletions:
    """Return what `data.delete` named when the run began."""
    return Deletions.from_json(store.read_bytes(paths.deletions(inputs.deletions))) if inputs.deletions else Deletions()


def plan_deletions(paths: RunPaths, inputs: RunInputs, shards: Sequence[IngestedShard]) -> DeletionPlan | None:
    """Return what `data.delete` names; say if that is nothing of any listed file."""
    if not inputs.deletions:
        return None
    entries = len(read_kept(paths, inputs))
    rows = sum(shard.profile.deleted for shard in shards if (shard.shard.kind == PAIRS) == shard.shard.of_pairs)
    if not rows:
        log.warning("data.delete: no row of any listed file has one of its %d ids and hashes", entries)
    return DeletionPlan(digest=inputs.deletions, entries=entries, rows=rows)


def check_profile(context: StageContext, inputs: RunInputs, new: Sequence[Profile], embed: EmbedPlan) -> DataProfile:
    """Compare the data with that of the parent's run, as far as its plan is still there.

    Raises:
        BadData: a limit of `data.limits` is exceeded.
    """
    last = last_plan(context.paths, inputs.lineage[-1]) if inputs.lineage else None
    profile = profile_of(new, embed.rows, count_gone(context, last.embed, embed) if last else None)
    check_limits(profile, last.profile if last else None, inputs.config.data.limits, new)
    if not inputs.config.train.negatives and any(shard.statistics.get("negative_tokens") for shard in new):
        log.warning("rows have negatives, and none is trained on: train.negatives says how many of a row are")
    return profile


def check_selection(inputs: RunInputs, rows: PlannedRows, pairs: Sequence[IngestedShard]) -> None:
    """Refuse a run without rows to train on, or without new ones.

    Raises:
        MissingInput: no row is new, and data.require_new is set.
        BadData: there is none at all.
    """
    data, new = inputs.config.data, int(rows.selection.new.sum())
    if inputs.lineage and data.require_new and not new:
        raise MissingInput(
            "no training row is new",
            value=f"{len(pairs)} shards under {', '.join(data.training_uris)}, all of their rows seen by run {inputs.parent.run}",
            rule="data.require_new: a run needs rows that its parent has not been trained on",
            remedy="upload new rows, or set data.require_new=false to train on earlier rows only",
        )
    if not rows.selection.rows:
        good, positive = (sum(getattr(shard.profile, name) for shard in pairs) for name in ("rows", "positive_rows"))
        raise BadData(
            "there is no row to train on",
            value=[
                f"{good} good rows, {positive} positive ones, {new} of them new and not held out",
                f"data.replay_fraction = {data.replay_fraction:g}",
            ],
            rule="a row is trained on if its label is above 0 and its document is not held out",
            remedy="add rows; without new ones, data.replay_fraction says which share of the earlier rows is used",
        )


def check_queries(paths: RunPaths, inputs: RunInputs, rows: PlannedRows) -> str:
    """Refuse a run without rows to evaluate with, or with too few; return in words what the hold-out can decide.

    Raises:
        BadData: no row, or a guardrail of a slice that no row is of.
        BadConfig: see `check_holdout`.
    """
    config, deviation = inputs.config, None
    if config.classifies_only and rows.queries:
        raise BadConfig(
            f"rows of tasks without classes are held out, which gate.metric = {config.gate.metric} does not judge",
            value=f"{rows.queries} queries; tasks with classes: {', '.join(config.train.classes)}",
            rule=f"with gate.metric = {config.gate.metric} every row has a task with classes (train.tasks)",
            remedy="set gate.metric=ndcg@10; guardrails then judge the accuracy of each task",
        )
    if not rows.judged:
        raise BadData(
            "the hold-out is empty",
            value=f"data.holdout_fraction = {config.data.holdout_fraction:g}",
            rule="rows with a label above 0 are held out by hash (data.holdout_by), unless a compared model was trained on them",
            remedy="add rows or raise data.holdout_fraction",
        )
    for rule in config.gate.guardrails:
        known = {*rows.slices, *(f"{GOLDEN}:{one.name}" for one in config.evaluate.sets), "fresh", "drift", "mixed"}
        if not rule.slice.endswith(":*") and rule.slice not in known:
            raise BadConfig(
                "a guardrail is about a slice that the hold-out does not have",
                value=f"gate.guardrails: {rule.slice}",
                rule=f"one of {', '.join(sorted(known))}",
                remedy="correct its name, or leave it out",
            )
    for task, names in config.train.classes.items():
        if absent := [name for number, name in enumerate(names) if (task, number) not in rows.held_classes]:
            log.warning("task %s: no text of the class %s is held out, so nothing is measured of it", task, ", ".join(absent))
    if inputs.lineage:
        with suppress(MissingInput, BadData, KeyError, TypeError):  # removed, or of another version
            last = store.read_json(RunPaths(f"{paths.bucket_root}/runs/{inputs.lineage[-1]}").scorecard)
            # A baseline without a classifier has every text wrong, so it differs more than a week's model does.
            if not config.classifies_only or all("difference" in one for one in last["slices"].values()):
                deviation = last["difference"][config.gate.metric]["error"] * last["queries"] ** 0.5
    words = check_holdout(rows.judged, config.gate, deviation)
    log.info("the gate: %s", words)
    return words


def check_amounts(
    inputs: RunInputs,
    deployment: Deployment,
    rows: PlannedRows,
    pairs: Sequence[IngestedShard],
    embed: EmbedPlan,
    mean_tokens: float | None = None,
) -> None:
    """Refuse more data than a stage can hold, before days are spent on it; warn of what would take too long.

    Args:
        mean_tokens: of a document to train on; None: no rows are written yet. Texts then count as short as they can be, and the
            hold-out not at all, so that what is refused is certain.

    Raises:
        BadConfig: names everything that is too much and what helps.
    """
    if deployment.local_paths:
        return  # All stages share a machine, whose other uses are unknown.
    config = inputs.config
    work = Workload(
        train_rows=rows.selection.rows,
        known_rows=sum(shard.profile.rows for shard in pairs),
        corpus_rows=embed.rows,
        queries=rows.queries + rows.held_texts,
        candidates=rows.held_documents,
        query_tokens=SHORTEST_TEXT,
        document_tokens=mean_tokens or SHORTEST_TEXT,
    )
    another = inputs.published is not None and inputs.published.folder != inputs.parent.folder
    found = list(
        requirements(
            work,
            inputs.shape,
            config,
            parts=len(embed.parts),
            ranks=config.embed.ranks_per_child or inputs.world.ranks_per_node,
            embed_host=deployment.hosts.get(Queue.EMBED),
            minutes=attempt_minutes(deployment.timeouts),
            models=3 if another else 2,
        )
    )
    refuse(found)
    for one in over(found):
        if mean_tokens is not None:
            log.warning("%s: %s of %s; %s", one.what, one.shown(one.amount), one.shown(one.limit), one.remedy)


def _published(context: StageContext, inputs: RunInputs) -> tuple[TextTokenizer, Lengths] | None:
    """Return how the published model's texts are tokenized, None where they are as the parent's."""
    if inputs.published is None or not inputs.published.own_tokens:
        return None
    folder = fetch_without_weights(inputs.published.folder, context.scratch / PUBLISHED)
    return load_tokenizer(folder), Lengths.of(inputs.config).within(inputs.published.positions)


def _shard(number: int, shard: IngestedShard, rows: PlannedRows) -> Shard:
    profile = shard.profile
    return Shard(
        uri=profile.uri,
        sha256=profile.sha256,
        size=profile.size,
        rows=profile.rows,
        bad_rows=refused(shard),
        holdout_rows=rows.held[number],
        new_rows=rows.new[number],
        replay_rows=rows.replayed[number],
    )


def expect_cost(inputs: RunInputs, paths: RunPaths, children: int, deployment: Deployment) -> ExpectedCost:
    """Estimate the run's cost: as much as the one published last, and at most what its time budget allows."""
    prices = deployment.prices.by_queue()
    ingesting = MissingShards.model_validate_json(store.read_bytes(paths.missing)).children
    at_once = {
        Stage.INGEST: ingesting,
        **dict.fromkeys((Stage.MINE, Stage.EMBED), min(children, deployment.embed_hosts or children)),
    }
    at_most = most(prices, nodes=inputs.config.nodes, children=at_once, time_budget=inputs.config.time_budget)
    last = inputs.published.run if inputs.published else None
    used = used_by(paths, last) if last else {}
    if not used:
        return ExpectedCost(at_most=at_most)
    return ExpectedCost(run=last, node_hours=sum(used.values()), as_before=cost_of(used, prices), at_most=at_most)


def used_by(paths: RunPaths, run_id: str) -> dict[Stage, float]:
    """Return the node-hours that a run's report counted, stage by stage; empty where no report counts them."""
    try:
        uri = RunPaths(f"{paths.bucket_root}/runs/{run_id}").result(Stage.REPORT)
        return {
            Stage(name): float(stage["node_hours"])
            for name, stage in StageResult.from_json(store.read_bytes(uri)).metrics["cost"]["stages"].items()
        }
    except (MissingInput, BadData, ValueError, KeyError, TypeError, AttributeError):
        return {}  # a report never fails a run, and neither does a missing one


def upload_rows(paths: RunPaths, folder: Path, rows: dict[str, int]) -> dict[str, RowFile]:
    """Copy the row files into the run folder."""
    written = store.upload_folder(folder, paths.rows)
    return {name: RowFile(sha256=written[name].sha256, size=written[name].size, rows=rows[name]) for name in rows}


def write_plan(paths: RunPaths, plan: RunPlan) -> RunPlan:
    """Write the plan unless there is one by now; returns the one that is there.

    Raises:
        MissingInput: another plan stage of this run wrote other row files at the same time.
    """
    try:
        store.write_bytes(paths.plan, plan.to_json(), if_absent=True)
    except store.Conflict:
        log.warning("this run was planned meanwhile; keeping that plan")
        plan = RunPlan.from_json(store.read_bytes(paths.plan))
        check_row_files(paths, plan, content=True)
    return plan


def output(paths: RunPaths, plan: RunPlan) -> StageOutput:
    """Return the content of result.json. The state machine goes on with the stage `next`, skips the compile stage where no
    compiled set is missing, and runs collect and precompile where compile.where wants it."""
    missing = bool(missing_sets(paths.bucket_root, plan.graphs))
    shards = (*plan.train.new, *plan.train.replay)[:LISTED_SHARDS]
    data = store.read_bytes(paths.plan)
    outputs = {"plan": Artifact(paths.plan, hashlib.sha256(data).hexdigest(), len(data))}
    for name, file in list(plan.row_files.items())[:LISTED_SHARDS]:
        outputs[name] = Artifact(store.join(paths.rows, name), file.sha256, file.size)
    return StageOutput(
        inputs={f"train-{number:05d}": Artifact(one.uri, one.sha256, one.size) for number, one in enumerate(shards)},
        outputs=outputs,
        metrics={
            **plan.summary(),
            "compile": missing,
            "precompile": missing and plan.world.kind == "neuron" and plan.config.compile.where == "cpu",
            "next": (Stage.EMBED if plan.embed.model else Stage.HEALTH_CHECK).value,
        },
    )
