"""Checkpoints: model folders (config, tokenizer, model.safetensors) with the state of training next to the weights.

    step-00001200/  the files of a model folder; optimizer.safetensors, random.safetensors; progress.json, metrics.jsonl;
                    manifest.json

`manifest.json` is written last and names every file with its size and sha256: without it a checkpoint does not exist, and one
that is not what its manifest says is passed over. Nothing in a checkpoint is ever unpickled. What the files hold is the business
of pipeline/training/host_state; nothing here loads a framework.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from pipeline import store
from pipeline.allowed_uris import is_inside
from pipeline.contract import RunPaths, now
from pipeline.errors import BadData, MissingInput
from pipeline.log import log
from pipeline.training.metrics import EVENTS_FOLDER, METRICS_FILE, VALIDATION_FOLDER
from pipeline.training.state import Progress

PROGRESS_FILE = "progress.json"
MANIFEST_FILE = "manifest.json"
FILES_AT_ONCE = 4
FOLDER_PATTERN = re.compile(r"/step-(\d{8})/")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRetention:
    """Which checkpoints of a run are left; all others are removed.

    Attributes:
        newest: this many of the newest.
        every: those of steps that are multiples of this; None: no others.
        best: also the one with the best validation, of those that were made together with one.
    """

    newest: int
    every: int | None = None
    best: bool = False

    def kept(self, scores: Mapping[int, float | None]) -> set[int]:
        """The steps to keep, of step -> score (higher is better; None: not validated)."""
        kept = set(sorted(scores)[-self.newest :])
        if self.every:
            kept |= {step for step in scores if step % self.every == 0}
        validated = {step: score for step, score in scores.items() if score is not None}
        if self.best and validated:
            kept.add(max(validated, key=lambda step: (validated[step], step)))
        return kept


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was fetched and found whole.

    Attributes:
        folder: local.
        progress: as it was when the checkpoint was made.
    """

    folder: Path
    progress: Progress

    @property
    def metrics(self) -> Path:
        """The metrics file up to this step."""
        return self.folder / METRICS_FILE


class CheckpointWriter(AbstractContextManager["CheckpointWriter"]):
    """Writes checkpoints of one run in the background, one at a time: training waits only for the copy that it makes itself.

    Args:
        paths: of the run.
        scratch: local folder for what is on its way.
        fingerprint: of the plan.
        graphs: fingerprint of the graphs that training runs, empty on kinds without graphs.
        retention: which checkpoints are left.
        resumed: step of the checkpoint that training resumes from; it is kept for as long as this object lives.

    Use as a context manager: leaving it waits for the last upload, whose error comes out then or at the next call.
    """

    def __init__(
        self,
        paths: RunPaths,
        scratch: Path,
        fingerprint: str,
        retention: CheckpointRetention,
        *,
        graphs: str = "",
        resumed: int | None = None,
    ) -> None:
        self._paths = paths
        self._scratch = scratch
        self._fingerprint = fingerprint
        self._graphs = graphs
        self._retention = retention
        self._resumed = resumed
        self._scores: dict[int, float | None] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._running: Future[None] | None = None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            self._thread.shutdown(wait=True)

    def folder(self, step: int) -> Path:
        """Where the files of a checkpoint are put before `save`, once the one before it has arrived.

        Waiting here bounds memory: there is never more than one copy of the weights on its way.

        Raises:
            TrnpipeError: the one before did not arrive.
        """
        self.wait()
        folder = self._scratch / f"step-{step:08d}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def save(self, progress: Progress, write: Callable[[Path], None], *, score: float | None = None) -> None:
        """Write the checkpoint of this moment in the background.

        Args:
            progress: its values now; later changes are not written.
            write: puts the files that take long into the folder; called in the background, so it must hold copies.
            score: of the validation at this step, higher is better; None: there was none.
        """
        folder = self._scratch / f"step-{progress.step:08d}"
        (folder / PROGRESS_FILE).write_bytes(progress.to_json())
        self._running = self._thread.submit(self._write, folder, progress.step, write, score)

    def check(self) -> None:
        """Raise what went wrong in the background, if something has; costs nothing."""
        if self._running is not None and self._running.done():
            self.wait()

    def wait(self) -> None:
        """Until the checkpoint on its way has arrived.

        Raises:
            TrnpipeError: it did not.
        """
        if self._running is not None:
            running, self._running = self._running, None
            running.result()

    def _write(self, folder: Path, step: int, write: Callable[[Path], None], score: float | None) -> None:
        write(folder)
        self._upload_beside(folder)
        # An earlier attempt's, refused since: its manifest must not vouch for half of the new files.
        store.delete(store.join(self._paths.checkpoint(step), MANIFEST_FILE))
        artifacts = store.upload_folder(folder, self._paths.checkpoint(step))
        store.write_json(
            store.join(self._paths.checkpoint(step), MANIFEST_FILE),
            {
                "step": step,
                "fingerprint": self._fingerprint,
                "graphs": self._graphs,
                "score": score,
                "time": now(),
                "files": {name: {"sha256": artifact.sha256, "size": artifact.size} for name, artifact in artifacts.items()},
            },
        )
        shutil.rmtree(folder)
        log.info("checkpoint of step %d is written", step)
        self._scores[step] = score
        self._remove_old(step)

    def _upload_beside(self, folder: Path) -> None:
        """Move what people look at while training runs to its own place in the run folder; metrics stay in the checkpoint too."""
        for name, uri in ((EVENTS_FOLDER, self._paths.tensorboard), (VALIDATION_FOLDER, self._paths.validations)):
            if (folder / name).is_dir():
                store.upload_folder(folder / name, uri)
                shutil.rmtree(folder / name)
        store.upload(folder / METRICS_FILE, self._paths.metrics)

    def _remove_old(self, newest: int) -> None:
        """Leave what the retention keeps, now that the checkpoint of step `newest` is whole."""
        steps = _list_checkpoints(self._paths)
        for step, complete in steps.items():
            if complete and step not in self._scores:
                self._scores[step] = _read_score(store.join(self._paths.checkpoint(step), MANIFEST_FILE))
        # Beyond the newest stand those that were refused when this attempt looked for one to go on from.
        kept = self._retention.kept({step: self._scores[step] for step, complete in steps.items() if complete and step <= newest})
        for step in steps.keys() - kept - {self._resumed}:
            # The manifest first: what is left of an interrupted removal is no checkpoint.
            store.delete(store.join(self._paths.checkpoint(step), MANIFEST_FILE))
            store.delete_folder(self._paths.checkpoint(step))


def find_checkpoint(paths: RunPaths, fingerprint: str, scratch: Path) -> Checkpoint | None:
    """The newest whole checkpoint of this plan, fetched into `scratch`; None if training has none yet.

    Args:
        fingerprint: see `fetch_checkpoint`.

    Raises:
        MissingInput: there are checkpoints, and none of them is whole.
    """
    refused = []
    for step, has_manifest in sorted(_list_checkpoints(paths).items(), reverse=True):
        if not has_manifest:
            log.info("the checkpoint of step %d was never finished; passed over", step)
            continue
        try:
            return fetch_checkpoint(paths, step, fingerprint, scratch)
        except (BadData, MissingInput) as error:
            log.warning("the checkpoint of step %d is passed over: %s: %s", step, error.what, error.value)
            refused.append(f"{paths.checkpoint(step)}: {error.what}: {error.value}")
            shutil.rmtree(scratch / f"step-{step:08d}", ignore_errors=True)
    if refused:
        raise MissingInput(
            "none of the run's checkpoints can be used",
            value=refused,
            rule="every file is what the manifest says",
            remedy="restore an earlier version of one of them, or delete train/checkpoints to begin again",
        )
    return None


def fetch_checkpoint(paths: RunPaths, step: int, fingerprint: str, scratch: Path) -> Checkpoint:
    """Fetch one checkpoint and check every file.

    Args:
        fingerprint: of the plan that it must belong to; empty: of any.

    Raises:
        BadData: truncated, changed or of another plan.
        MissingInput: files are missing.
    """
    uri, folder = paths.checkpoint(step), scratch / f"step-{step:08d}"
    owner, files = _read_manifest(store.join(uri, MANIFEST_FILE))
    if fingerprint and owner != fingerprint:
        raise BadData("the checkpoint belongs to another plan", value=uri)
    with ThreadPoolExecutor(FILES_AT_ONCE, "checkpoint") as pool:
        fetched = [
            pool.submit(store.download, store.join(uri, name), folder / name, sha256=sha256, size=size)
            for name, (size, sha256) in files.items()
        ]
        for one in fetched:
            one.result()
    return open_checkpoint(folder)


def open_checkpoint(folder: Path) -> Checkpoint:
    """A checkpoint that stands in a local folder and has been checked.

    Raises:
        BadData: its progress cannot be read.
    """
    return Checkpoint(folder, Progress.from_json((folder / PROGRESS_FILE).read_bytes()))


def _list_checkpoints(paths: RunPaths) -> dict[int, bool]:
    """Step -> whether there is a manifest."""
    found: dict[int, bool] = {}
    for info in store.list_objects(paths.checkpoints):
        if match := FOLDER_PATTERN.search(info.uri):
            step = int(match[1])
            found[step] = found.get(step, False) or info.uri.endswith(f"/step-{step:08d}/{MANIFEST_FILE}")
    return found


def _read_manifest(uri: str) -> tuple[str, dict[str, tuple[int, str]]]:
    """Fingerprint of the plan, and file name -> (size, sha256)."""
    try:
        manifest = store.read_json(uri)
        files = {str(name): (int(entry["size"]), str(entry["sha256"])) for name, entry in manifest["files"].items()}
        if outside := [name for name in files if not is_inside(name)]:
            raise ValueError(f"files outside of the checkpoint: {outside}")
        return str(manifest["fingerprint"]), files
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
        raise BadData("the checkpoint's manifest cannot be read", value=f"{uri}: {error!r}") from error


def _read_score(uri: str) -> float | None:
    """The score of an earlier attempt's checkpoint; one that cannot be read is no reason to end a training."""
    try:
        score = store.read_json(uri)["score"]
        return None if score is None else float(score)
    except (ValueError, TypeError, KeyError, MissingInput):
        return None
