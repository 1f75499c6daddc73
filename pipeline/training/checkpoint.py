"""Checkpoints: model folders (config, tokenizer, model.safetensors) with the state of training beside the weights.

    step-00001200/  the files of a model folder; optimizer.safetensors, progress.json, metrics.jsonl; manifest.json

`manifest.json` is written last and names every file with its size and sha256: without it a checkpoint does not exist, and one
that is not what its manifest says is passed over. Nothing in a checkpoint is ever unpickled.
"""

from __future__ import annotations

import logging
import re
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from pipeline.contract import RunPaths, is_inside, now
from pipeline.errors import BadData, MissingInput
from pipeline.model.encoder import Encoder
from pipeline.model.folder import save_folder
from pipeline.runtime import store
from pipeline.runtime.device import Device
from pipeline.training.metrics import EVENTS_FOLDER, METRICS_FILE, VALIDATION_FOLDER, MetricsLog
from pipeline.training.state import Progress

log = logging.getLogger("trnpipe")

OPTIMIZER_FILE = "optimizer.safetensors"
PROGRESS_FILE = "progress.json"
MANIFEST_FILE = "manifest.json"
FOLDER_PATTERN = re.compile(r"/step-(\d{8})/")


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


class CheckpointWriter:
    """Writes checkpoints of one run: to local files at once, to the run folder in the background, one at a time.

    Args:
        paths: of the run.
        scratch: local folder for what is on its way.
        model_source: a model folder with the tokenizer.
        fingerprint: of the plan.
        keep: newest checkpoints that are left.

    Use as a context manager: leaving it waits for the last upload, whose error comes out then or at the next call.
    """

    def __init__(self, paths: RunPaths, scratch: Path, model_source: Path, fingerprint: str, keep: int) -> None:
        self._paths = paths
        self._scratch = scratch
        self._model_source = model_source
        self._fingerprint = fingerprint
        self._keep = keep
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._running: Future[None] | None = None

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            self._thread.shutdown(wait=True)

    def save(
        self, encoder: Encoder, optimizer: torch.optim.Optimizer, device: Device, progress: Progress, metrics: MetricsLog
    ) -> None:
        """Write a checkpoint of this moment; returns as soon as it stands in local files."""
        self.wait()
        folder = self._scratch / f"step-{progress.step:08d}"
        state = host_state(encoder, optimizer, device)
        save_folder(encoder, folder, self._model_source, state.weights)
        save_file(state.optimizer, folder / OPTIMIZER_FILE)
        (folder / PROGRESS_FILE).write_text(progress.to_json())
        metrics.snapshot(folder)
        self._running = self._thread.submit(self._upload, folder, progress.step)

    def wait(self) -> None:
        """Until the checkpoint on its way has arrived.

        Raises:
            TrnpipeError: it did not.
        """
        if self._running is not None:
            running, self._running = self._running, None
            running.result()

    def _upload(self, folder: Path, step: int) -> None:
        store.upload_folder(folder / EVENTS_FOLDER, self._paths.tensorboard)
        store.upload(folder / METRICS_FILE, self._paths.metrics)
        store.upload_folder(folder / VALIDATION_FOLDER, self._paths.validations)
        for name in (EVENTS_FOLDER, VALIDATION_FOLDER):
            shutil.rmtree(folder / name)
        artifacts = store.upload_folder(folder, self._paths.checkpoint(step))
        files = {name: {"sha256": artifact.sha256, "size": artifact.size} for name, artifact in artifacts.items()}
        manifest = {"step": step, "fingerprint": self._fingerprint, "time": now(), "files": files}
        store.write_json(store.join(self._paths.checkpoint(step), MANIFEST_FILE), manifest)
        shutil.rmtree(folder)
        log.info("checkpoint of step %d is written", step)
        self._remove_old()

    def _remove_old(self) -> None:
        steps = _list_checkpoints(self._paths)
        complete = [step for step, manifest in steps.items() if manifest]
        if len(complete) <= self._keep:
            return
        oldest_kept = sorted(complete)[-self._keep]
        for step in steps:
            if step < oldest_kept:
                # The manifest first: what is left of an interrupted removal is no checkpoint.
                store.delete(store.join(self._paths.checkpoint(step), MANIFEST_FILE))
                store.delete_folder(self._paths.checkpoint(step))


def find_checkpoint(paths: RunPaths, fingerprint: str, scratch: Path) -> Checkpoint | None:
    """The newest whole checkpoint of this plan, fetched into `scratch`; None if training has none yet.

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

    Raises:
        BadData: truncated, changed or of another plan.
        MissingInput: files are missing.
    """
    uri, folder = paths.checkpoint(step), scratch / f"step-{step:08d}"
    owner, files = _read_manifest(store.join(uri, MANIFEST_FILE))
    if owner != fingerprint:
        raise BadData("the checkpoint belongs to another plan", value=uri)
    for name, (size, sha256) in files.items():
        path = store.download(store.join(uri, name), folder / name)
        if path.stat().st_size != size or store.sha256_file(path) != sha256:
            raise BadData("a file of the checkpoint is not what its manifest says", value=store.join(uri, name))
    return open_checkpoint(folder)


def open_checkpoint(folder: Path) -> Checkpoint:
    """A checkpoint that stands in a local folder and has been checked.

    Raises:
        BadData: its progress cannot be read.
    """
    return Checkpoint(folder, Progress.from_json((folder / PROGRESS_FILE).read_bytes()))


@dataclass(frozen=True, slots=True)
class HostState:
    """What a checkpoint keeps of a model in training, in host memory.

    Attributes:
        weights: the encoder's state.
        optimizer: the optimizer's tensors as `NAME/KIND`, e.g. `head.inner.weight/exp_avg`.
    """

    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]


def host_state(encoder: nn.Module, optimizer: torch.optim.Optimizer, device: Device) -> HostState:
    """Copy weights and optimizer to the host, in one go."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in encoder.named_parameters()}
    state = {f"{names[parameter]}/{kind}": value for parameter, kinds in optimizer.state.items() for kind, value in kinds.items()}
    weights = encoder.state_dict()
    copies = device.to_host({**{f"w:{name}": tensor for name, tensor in weights.items()}, **state})
    return HostState({name: copies[f"w:{name}"] for name in weights}, {name: copies[name].contiguous() for name in state})


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, device: Device, path: Path) -> None:
    """Put the optimizer's tensors back. Hyper-parameters are the configuration's, not the checkpoint's."""
    parameters = dict(model.named_parameters())
    with safe_open(path, framework="pt") as file:
        tensors = device.from_host({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118 - not a mapping
    states: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, kind = key.rsplit("/", 1)
        states.setdefault(name, {})[kind] = tensor
    for name, state in states.items():
        optimizer.state[parameters[name]] = state


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
