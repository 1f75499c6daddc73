"""`trnpipe init` as people type it, and the settings that it chooses for data of various kinds."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from infra.local.demo import initial_folder, named_model
from infra.local.run import LocalRequest
from pipeline.commands import first_rows
from pipeline.commands.first_rows import check_first_rows
from pipeline.commands.init import DataFacts, ModelFacts, choose, columns_of, describe, read_data, read_model
from pipeline.config import RunConfig, build_config, load_config_file
from pipeline.dataset.records import estimate_rows
from pipeline.errors import BadConfig, MissingInput


@pytest.fixture(scope="module")
def model() -> ModelFacts:
    return read_model("demo", named_model("demo"))


def write(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


def pairs(count: int, words: int = 5, **more: Any) -> list[dict[str, Any]]:
    return [{"query": f"query {number}", "document": f"{number} " + "word " * words, **more} for number in range(count)]


def read(path: str, model: ModelFacts, **columns: str) -> tuple[DataFacts, RunConfig]:
    data = read_data([path], columns, model)
    return data, build_config(choose(data, model, [path], ()))


def trnpipe(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pipeline.cli", *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_file_that_it_writes_is_what_the_next_commands_take(tmp_path: Path) -> None:
    lines = ["question,answer,language,shelf", *(f"query {number},answer number {number},de,x" for number in range(300))]
    (tmp_path / "pairs.csv").write_text("\n".join(lines) + "\n")
    made = trnpipe(tmp_path, "init", "--input", "pairs.csv")
    assert made.returncode == 0, made.stderr
    for words in ("question", "not used: shelf", "300 read; 0 are bad", "de 100%", "no id", "bert, 384 dimensions"):
        assert words in made.stdout
    assert "trnpipe config check run.yaml --read" in made.stdout
    assert "trnpipe local --config run.yaml" in made.stdout
    given = load_config_file(tmp_path / "run.yaml")
    assert given["data"]["columns"] == {"query": "question", "document": "answer", "locale": "language"}
    assert sum(map(len, given.values())) == 11
    settings = [line for line in (tmp_path / "run.yaml").read_text().splitlines() if line.startswith("  ")]
    assert all("  # " in line for line in settings)
    assert trnpipe(tmp_path, "config", "check", "run.yaml", "--read").returncode == 0
    again = trnpipe(tmp_path, "init", "--input", "pairs.csv")
    assert (again.returncode, "--out" in again.stderr) == (64, True)
    assert trnpipe(tmp_path, "init", "--input", "pairs.csv", "--out", "other.yaml").returncode == 0
    assert (tmp_path / "other.yaml").read_bytes() == (tmp_path / "run.yaml").read_bytes()


def test_the_readme_shows_what_it_writes(tmp_path: Path) -> None:
    """Up to the figures, which are those of other data."""
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    shown = readme.partition("```yaml\n# run.yaml\n")[2].partition("```")[0]
    rows = [{"question": f"query {number}", "answer": f"answer number {number}"} for number in range(4000)]
    write(tmp_path / "pairs.jsonl", rows)
    assert trnpipe(tmp_path, "init", "--input", "pairs.jsonl", "--parent", "demo").returncode == 0
    written = (tmp_path / "run.yaml").read_text().partition("\n")[2]

    def lines(text: str) -> list[tuple[str, str]]:
        halves = [line.partition("  # ") for line in text.splitlines()]
        return [(key.partition(": ")[0], re.sub(r"[\d,.]+", "", reason)) for key, _, reason in halves]

    assert lines(shown) == lines(written)


def test_a_column_that_cannot_be_told_is_named_by_the_setting_it_suggests(tmp_path: Path) -> None:
    write(tmp_path / "pairs.jsonl", [{"query": f"q {number}", "body": f"text {number}"} for number in range(200)])
    refused = trnpipe(tmp_path, "init", "--input", "pairs.jsonl")
    assert refused.returncode == 65
    assert "--set data.columns.document=body" in refused.stderr
    assert not (tmp_path / "run.yaml").exists()
    made = trnpipe(tmp_path, "init", "--input", "pairs.jsonl", "--set", "data.columns.document=body")
    assert made.returncode == 0, made.stderr
    assert load_config_file(tmp_path / "run.yaml")["data"]["columns"] == {"document": "body"}


def test_a_template_stays_one(tmp_path: Path, model: ModelFacts) -> None:
    rows = [{"query": f"q {number}", "title": "shoe", "brand": f"b {number}", "size": 4} for number in range(100)]
    data, config = read(write(tmp_path / "pairs.jsonl", rows), model, document="{title}. {brand}")
    assert config.data.columns == {"document": "{title}. {brand}"}
    assert data.unused == ("size",)


def test_only_columns_can_be_set() -> None:
    assert columns_of({"data": {"columns": {"query": "q"}}}) == {"query": "q"}
    with pytest.raises(BadConfig, match=r"only data\.columns"):
        columns_of({"train": {"steps": 3}})


def test_the_hold_out_is_as_large_as_the_gate_needs_and_no_larger(
    tmp_path: Path, model: ModelFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "many.jsonl", pairs(30_000))
    _, config = read(path, model)
    assert (config.gate.undecided, config.gate.max_drop) == ("refuse", 0.01)
    assert 0.08 <= config.data.holdout_fraction <= 0.1
    check_first_rows(config, [path], ())  # which refuses a hold-out that is too small
    _, small = read(write(tmp_path / "few.jsonl", pairs(2_000)), model)
    assert (small.gate.undecided, small.data.holdout_fraction) == ("accept", 0.25)
    monkeypatch.setattr(first_rows, "LOOK_ROWS", 5_000)
    data, estimated = read(path, model)
    assert data.rows == 30_000
    assert not data.first.complete
    assert estimated.gate == config.gate
    check_first_rows(estimated, [path], ())


def test_lengths_hold_the_texts_and_fit_the_model(tmp_path: Path, model: ModelFacts) -> None:
    short, long = pairs(95, words=20), pairs(5, words=3000)
    data, config = read(write(tmp_path / "pairs.jsonl", short + long), model)
    assert config.embed.length == 512
    assert config.train.length == 512
    assert data.documents.max() > 3000
    assert config.train.query_length == 16
    assert int(data.queries.max()) == 4  # the two special tokens included


def test_queries_may_be_longer_than_documents(tmp_path: Path, model: ModelFacts) -> None:
    lines = [{"query": f"{number} " + "word " * 100, "document": f"answer {number}"} for number in range(400)]
    _, config = read(write(tmp_path / "pairs.jsonl", lines), model)
    assert (config.train.query_length, config.train.length) == (104, 128)


def test_few_rows_get_small_batches_and_more_passes(tmp_path: Path, model: ModelFacts) -> None:
    _, few = read(write(tmp_path / "few.jsonl", pairs(400)), model)
    assert (few.train.batch_size, few.train.epochs) == (32, 5)
    _, many = read(write(tmp_path / "many.jsonl", pairs(20_000)), model)
    assert (many.train.batch_size, many.train.epochs) == (128, 1)


def test_what_it_says_about_the_data(tmp_path: Path, model: ModelFacts) -> None:
    rows = [{"query": "как вернуть обувь", "document": "в коробке, в течение месяца"}] * 3 + pairs(1)
    data, _ = read(write(tmp_path / "pairs.jsonl.gz", rows), model)
    told = dict(describe(data, model))
    assert told["duplicates"] == "2 rows repeat an earlier pair, 2 an earlier document"
    assert told["languages"].startswith("no locale; script Cyrillic 7")
    assert told["rows"] == "4 read; 0 are bad"


def test_a_model_is_found_named_and_read_without_its_weights(tmp_path: Path) -> None:
    outer = tmp_path / "download"
    shutil.copytree(initial_folder(), outer / "model")
    with pytest.raises(MissingInput, match=r"name the model's own folder: .*download/model"):
        read_model("download", str(outer))
    for weights in (outer / "model").glob("*.safetensors"):
        weights.write_bytes(b"")
    facts = read_model("download/model", str(outer / "model"))
    assert (facts.name, facts.model_type, facts.dimension, facts.longest, facts.counted) == (
        "download/model",
        "bert",
        384,
        512,
        True,
    )
    (outer / "model/tokenizer.json").unlink()
    guessed = read_model("download/model", str(outer / "model"))
    assert (guessed.counted, guessed.count(["a" * 40]).tolist()) == (False, [12])
    config = json.loads((outer / "model/config.json").read_text())
    (outer / "model/config.json").write_text(
        json.dumps({**config, "model_type": "xlm-roberta", "pad_token_id": 1, "max_position_embeddings": 514})
    )
    assert read_model("x", str(outer / "model")).longest == 512


def test_demo_names_the_demos_model_wherever_a_local_run_takes_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    inputs = (Path(write(tmp_path / "pairs.jsonl", pairs(3))),)
    for options in ({"parent": "demo"}, {"settings": ("model.parent=demo",)}):
        request = LocalRequest.of(tmp_path / "state", inputs=inputs, **options)
        assert request.config.model.parent == str(initial_folder())
    request = LocalRequest.of(tmp_path / "state", inputs=inputs, settings=("model.initial=./demo",))
    assert request.config.model.initial == str(tmp_path / "demo")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.csv", "rows.parquet"])
def test_rows_are_counted_without_reading_them(tmp_path: Path, name: str) -> None:
    import pyarrow as pa
    import pyarrow.csv as csv
    import pyarrow.parquet as pq

    path = tmp_path / name
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(pairs(1000)), path)
    elif name.endswith(".csv"):
        csv.write_csv(pa.Table.from_pylist(pairs(1000)), path)
    else:
        write(path, pairs(1000))
    assert estimate_rows(str(path), path.stat().st_size) == 1000


def test_a_long_file_is_estimated_from_its_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.dataset.records.ESTIMATE_BYTES", 1 << 20)
    path = tmp_path / "rows.jsonl"
    write(path, pairs(60_000, words=8))
    assert estimate_rows(str(path), path.stat().st_size) == pytest.approx(60_000, rel=0.02)
