"""The examples of docs/data.md, as they are printed there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.dataset.corpus import CorpusReader
from pipeline.dataset.ingested import PAIRS, IngestedShard
from tests.pipeline.stages.planning import Bench, Config, rows

PAGE = (Path(__file__).resolve().parents[3] / "docs/data.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"^`([\w./-]+)`[^\n]*\n\n```\w*\n(.*?)```$", PAGE, re.MULTILINE | re.DOTALL))


@pytest.fixture
def folder(bench: Bench) -> Path:
    """The page's files, in a bucket with enough other rows for a run."""
    root = Path(bench.root) / "page"
    for name, text in EXAMPLES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    script = (root / "pairs.parquet").read_text(encoding="utf-8")
    subprocess.run([sys.executable, "-c", script], cwd=root, check=True)
    return root


def test_every_format_gives_the_same_rows(bench: Bench, folder: Path) -> None:
    found = {}
    for suffix in ("jsonl", "csv", "tsv", "parquet"):
        bench.config["data"]["train"] = [str(folder / f"pairs.{suffix}")]
        bench.prepare(suffix)
        bench.ingest(suffix)
        [shard] = [IngestedShard(bench.root, one) for one in bench.inputs(suffix).shards_of(PAIRS)]
        [facts], [texts] = list(shard.facts(0, 0, shard.profile.rows)), list(shard.texts(0, 0, shard.profile.rows))
        found[suffix] = (facts.to_pylist(), texts.to_pylist())
    assert len(found["jsonl"][0]) == 2
    assert all(rows == found["jsonl"] for rows in found.values())


def embedded(bench: Bench, run: str, data: Config) -> dict[str, str]:
    """Id -> text of all documents that a run would embed."""
    bench.shard("week.jsonl", rows(0, 100))
    bench.start(run, {"data": data})
    plan = bench.plan(run)
    reader = CorpusReader(bench.root, plan.embed.shards)
    tables = [reader.read_part(index, len(plan.embed.parts)) for index in range(len(plan.embed.parts))]
    return {identifier: reader.text(identifier) for table in tables for identifier in table["id"].to_pylist()}


@pytest.mark.parametrize(
    ("mode", "documents"),
    [
        ("files", {"d1": "Rain boots made of natural rubber", "d2": "Warme Socken aus Schurwolle"}),
        ("snapshots", {"d1": "Rain boots made of natural rubber", "d3": "A thin rain jacket"}),
        ("deltas", {"d1": "Rain boots made of recycled rubber", "d3": "A thin rain jacket"}),
    ],
)
def test_modes_of_the_corpus(bench: Bench, folder: Path, mode: str, documents: dict[str, str]) -> None:
    assert embedded(bench, "run", {"corpus": [str(folder / mode)], "corpus_mode": mode}) == documents


def test_what_is_gone_is_counted(bench: Bench, folder: Path) -> None:
    deltas = {"corpus": [str(folder / "deltas")], "corpus_mode": "deltas"}
    newest = folder / "deltas/2026-11-22.jsonl"
    later = newest.read_bytes()
    newest.unlink()
    bench.config["data"] |= deltas
    bench.shard("week.jsonl", rows(0, 100))
    bench.week("one")
    newest.write_bytes(later)
    bench.shard("week-2.jsonl", rows(100, 150))
    bench.start("two")
    profile = bench.plan("two").profile
    assert profile is not None
    assert (profile.documents, profile.documents_gone) == (2, 1)
    # One file in place of all deltas: what they had deleted before is not gone again, and d3 is.
    bench.week("two")
    shutil.rmtree(folder / "deltas")
    (folder / "deltas").mkdir()
    (folder / "deltas/2026-11-29.jsonl").write_text('{"id": "d1", "text": "Rain boots made of recycled rubber"}\n')
    bench.shard("week-3.jsonl", rows(150, 200))
    bench.start("three")
    profile = bench.plan("three").profile
    assert profile is not None
    assert (profile.documents, profile.documents_gone) == (1, 1)


def test_deleting(bench: Bench, folder: Path) -> None:
    data: Config = {"corpus": [str(folder / "files")], "delete": [str(folder / "delete")]}
    assert set(embedded(bench, "run", data)) == {"d1"}
