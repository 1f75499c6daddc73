"""prepare's checks of every execution, whether it begins a run or goes on with one."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline import store
from pipeline.allowed_uris import AllowedUris
from pipeline.config import RunConfig, RunInput
from pipeline.contract import RunPaths
from pipeline.dataset.deletions import Deletions, read_deletions
from pipeline.errors import BadConfig
from pipeline.graphs.fingerprint import missing_sets
from pipeline.log import log
from pipeline.run_inputs import GraphsPlan


def check_nodes(nodes: int, allowed: Sequence[int]) -> None:
    """Refuse a node count without job definitions: Batch cannot change a gang's size when it submits it."""
    if nodes not in allowed:
        raise BadConfig(
            "this number of nodes is not deployed",
            value=f"nodes = {nodes}",
            rule=f"one of {', '.join(map(str, sorted(allowed)))}",
            remedy="choose one of these, or add it to the deployment's node counts and deploy",
        )


def check_corpus(config: RunConfig) -> None:
    """Refuse to embed names of classes: without a corpus, the documents of training rows are embedded."""
    if config.train.classes and not config.data.corpus:
        raise BadConfig(
            "the documents of rows whose task has classes are names of classes",
            value="data.corpus is empty",
            rule="without data.corpus the documents of training rows are embedded",
            remedy="set data.corpus",
        )


def places_of(paths: RunPaths, request: RunInput) -> AllowedUris:
    """Return the URIs that this run may use."""
    deployment = request.deployment
    return AllowedUris(own=paths.bucket_root, read=deployment.read, local_paths=deployment.local_paths)


def check_compiled(paths: RunPaths, graphs: GraphsPlan | None, config: RunConfig) -> None:
    """Refuse a run whose graphs are not compiled where nothing may be compiled.

    Raises:
        BadConfig: a compiled set is missing, and the run may not compile it.
    """
    refresh = config.mode == "refresh"
    missing = missing_sets(paths.bucket_root, graphs, ["infer"] if refresh else ["train", "infer"])
    if missing and (refresh or not config.compile.enabled):
        raise BadConfig(
            "the run's graphs are not compiled, and it compiles none",
            value=missing,
            rule="compile.enabled = false, or mode = refresh: only a run whose compiled sets are complete may start",
            remedy="set compile.enabled = true for one weekly run with the same model form, shapes, ranks and versions",
        )


def keep_deletions(paths: RunPaths, config: RunConfig, noncurrent_days: int | None) -> Deletions:
    """Read what the run must not use, and keep it with the run.

    Args:
        noncurrent_days: how long the bucket keeps old versions; None: it keeps none.

    Raises:
        BadConfig: longer than `data.delete_days`.
        MissingInput, BadData: see `read_deletions`.
    """
    data = config.data
    deletions = read_deletions(data.delete)
    if data.delete and not len(deletions):
        log.warning("data.delete names nothing: its lists are empty")
    if len(deletions):
        if (noncurrent_days or 0) > data.delete_days:
            raise BadConfig(
                "the bucket keeps deleted rows longer than they may be kept",
                value=f"old versions: {noncurrent_days} days",
                rule=f"data.delete_days = {data.delete_days}",
                remedy="deploy with retention.noncurrent_days at most that, or raise data.delete_days",
            )
        store.write_bytes(paths.deletions(deletions.digest), deletions.to_json())
    return deletions
