"""Find the run that an operator names: by its id, in a local state folder or a deployment's bucket, or by its folder's URI."""

from __future__ import annotations

from pathlib import Path

from pipeline import store
from pipeline.contract import RunPaths, check_run_folder, check_run_id
from pipeline.errors import BadData, MissingInput
from pipeline.plan import RunPlan


def find_run(run: str, bucket: str | None, state: Path) -> tuple[RunPaths, str | None]:
    """Return the run's folder, and the local bucket that stands for the one its plan names, None if that is on S3.

    Args:
        run: id of the run, or URI of its folder (with a slash).
        bucket: `s3://BUCKET`; None: the local run's bucket, as files in `state`.

    Raises:
        BadConfig: neither an id nor a folder of a run.
        MissingInput: there is no plan.
    """
    root = bucket.rstrip("/") if bucket else str(state / "bucket")
    paths = RunPaths(check_run_folder(run) if "/" in run else store.join(root, "runs", check_run_id(run)))
    if not store.exists(paths.plan):
        raise MissingInput(
            "there is no such run, or it has no plan yet",
            value=paths.plan,
            rule="a run is named by its id, looked up in --bucket or --state, or by its folder's URI, which has a slash",
            remedy="check the name; prepare writes the plan, so a run has one from its first stage on",
        )
    return paths, None if store.is_s3(paths.root) else paths.bucket_root


def read_plan(paths: RunPaths) -> RunPlan:
    """Return the run's plan.

    Raises:
        MissingInput: there is no plan.
        BadData: it cannot be read.
    """
    try:
        return RunPlan.from_json(store.read_bytes(paths.plan))
    except BadData as error:
        error.value = f"{paths.plan}: {error.value}"
        raise


def mirrored(uri: str, root: str | None) -> str:
    """Return the URI to read an object from: plans of local runs name the bucket that stood for their state folder.

    Args:
        root: that folder; None: the bucket is a real one.
    """
    if root is None or not store.is_s3(uri):
        return uri
    local = store.join(root, store.split(uri)[1])
    return local if Path(local).exists() else uri
