"""`trnpipe init`: look at training files and write a configuration with the settings that matter, each with its reason."""

from __future__ import annotations

import json
import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from tokenizers import Tokenizer

from pipeline.commands.first_rows import FirstRows, distinct, held_out_queries, read_first_rows
from pipeline.config import DataConfig, GateConfig, RunConfig, build_config
from pipeline.dataset.columns import TRAINING_COLUMNS, check_columns, fields_of, resolve
from pipeline.dataset.records import estimate_rows, file_columns
from pipeline.dataset.shards import find_shards
from pipeline.errors import BadConfig
from pipeline.evaluation.gate import needed_queries
from pipeline.files import write_atomically
from pipeline.model.inventory import local_model, model_files, read_json, transformer_folder

SAMPLED_ROWS = 2000
"""Rows whose tokens are counted."""

LONGEST_SAMPLED = 20_000
"""Characters of a text that are tokenized: more fill the longest bucket anyway."""

CHARACTERS_PER_TOKEN = 4
"""Assumed where the model has no tokenizer.json: English text in WordPiece."""

LONGEST_ROW = 512
QUERY_STEP, ROW_STEP = 8, 32
"""Lengths are multiples of these, so that a few rows more or less change no shape."""

UNCUT = 0.99
"""Share of the queries, and of the documents, that a row holds uncut."""

LARGEST_HOLDOUT = 0.25
MAX_DROPS = (0.005, 0.01, 0.02)
"""Settings of gate.max_drop, the first of which that the data allows is taken."""
SPARE_QUERIES = 1.1
"""Times the queries that the gate needs, where they are estimated."""

FEW_STEPS = 100
"""Optimizer steps below which a run makes more passes over its rows, up to MOST_EPOCHS."""
MOST_EPOCHS = 5
LEAST_STEPS = 20
"""Steps of a pass below which batches are smaller."""
BATCH_SIZES = (64, 32, 16)

Count = Callable[[Sequence[str]], NDArray[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a model's files say, without its weights.

    Attributes:
        name: as the user names it.
        model_type: of config.json.
        dimension: of its embeddings.
        longest: tokens of the longest text it takes.
        count: texts -> tokens of each, special ones included.
        counted: whether they are counted with the model's own tokenizer; otherwise they are estimated.
    """

    name: str
    model_type: str
    dimension: int
    longest: int
    count: Count
    counted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """What the first rows of the training files say.

    Attributes:
        files: shards, and their size in bytes.
        rows: how many they have in all, estimated unless all were read.
        first: those that were read.
        columns: ours -> those of the first file that are read for them.
        unused: its other columns.
        queries, documents: lengths of a sample in tokens.
    """

    files: int
    size: int
    rows: int
    first: FirstRows
    columns: dict[str, str]
    unused: tuple[str, ...]
    queries: NDArray[np.int64]
    documents: NDArray[np.int64]


def read_model(name: str, folder: str) -> ModelFacts:
    """Read what a local model's configuration and tokenizer say.

    Args:
        name: as the user names it.
        folder: its folder or weight file.

    Raises:
        MissingInput, BadConfig, BadData: as `local_model` and `model_files`.
    """
    _, source = model_files(local_model(folder), folder, None)
    inner = transformer_folder(source)
    config = read_json(inner / "config.json")
    # The families of RoBERTa and MPNet number positions from the one after that of padding.
    offset = 0 if config["model_type"] in ("bert", "modernbert") else int(config.get("pad_token_id") or 0) + 1
    vocabulary = inner / "tokenizer.json"
    return ModelFacts(
        name=name,
        model_type=config["model_type"],
        dimension=int(config["hidden_size"]),
        longest=int(config["max_position_embeddings"]) - offset,
        count=_token_counter(vocabulary)
        if vocabulary.is_file()
        else lambda texts: np.array([2 + math.ceil(len(text) / CHARACTERS_PER_TOKEN) for text in texts], np.int64),
        counted=vocabulary.is_file(),
    )


def read_data(inputs: Sequence[str], columns: dict[str, str], model: ModelFacts) -> DataFacts:
    """Read the first rows of the training files.

    Raises:
        BadData: too many of them are bad, or a file is damaged.
        MissingInput, BadConfig: a path names no shard.
    """
    check_columns(columns)
    shards = find_shards(inputs, "--input")
    first = read_first_rows(shards, columns, RunConfig().data.max_bad_fraction)
    present = file_columns(first.shards[0].uri)
    chosen = resolve(first.shards[0].uri, TRAINING_COLUMNS, columns, present)
    size = sum(shard.size for shard in shards)
    rows = len(first.rows) + first.refusals.count
    if not first.complete:
        known = sum(shard.size for shard in first.shards)
        rows = max(rows, round(sum(estimate_rows(shard.uri, shard.size) for shard in first.shards) * size / known))
    sample = first.rows.take(pa.array(np.arange(0, len(first.rows), max(1, len(first.rows) // SAMPLED_ROWS))))
    return DataFacts(
        files=len(shards),
        size=size,
        rows=rows,
        first=first,
        columns={ours: name for ours, name in chosen.names.items() if set(fields_of(name)) <= set(present)},
        unused=tuple(column for column in present if column not in chosen.wanted),
        queries=model.count([text[:LONGEST_SAMPLED] for text in sample["query"].to_pylist()]),
        documents=model.count([text[:LONGEST_SAMPLED] for text in sample["document"].to_pylist()]),
    )


def choose(data: DataFacts, model: ModelFacts, inputs: Sequence[str], corpus: Sequence[str]) -> dict[str, Any]:
    """Return the settings for this data, in the form of a configuration file."""
    fraction, gate = _holdout(data)
    longest = min(LONGEST_ROW, model.longest // ROW_STEP * ROW_STEP)
    length = min(longest, _up(max(np.quantile(texts, UNCUT) for texts in (data.documents, data.queries)), ROW_STEP))
    trained = data.rows * (1 - fraction)
    mean = np.minimum(data.documents, length).mean() + data.queries.mean()
    batch = next((size for size in BATCH_SIZES if trained / size >= LEAST_STEPS), BATCH_SIZES[-1])
    return {
        "data": {
            "train": list(inputs),
            **({"corpus": list(corpus)} if corpus else {}),
            "columns": {ours: column for ours, column in data.columns.items() if ours != column},
            "holdout_fraction": fraction,
        },
        "model": {"initial": model.name},
        "train": {
            "epochs": max(1, min(MOST_EPOCHS, math.ceil(FEW_STEPS * batch / trained))),
            "batch_size": 2 * batch,
            "batch_tokens": _up(batch * mean, ROW_STEP),
            "query_length": min(longest, max(16, _up(np.quantile(data.queries, UNCUT), QUERY_STEP))),
            "length": length,
        },
        "embed": {"length": length},
        "gate": gate,
    }


def describe(data: DataFacts, model: ModelFacts) -> Iterator[tuple[str, str]]:
    """Yield what was found, a name and a text each."""
    yield "files", f"{data.files:,}, {data.size / 1e6:,.1f} MB"
    about = "" if data.first.complete else f", about {data.rows:,} in all"
    yield "rows", f"{len(data.first.rows) + data.first.refusals.count:,} read{about}; {data.first.refusals.count:,} are bad"
    yield from (("", reason) for reason in data.first.refusals.reasons())
    columns = ", ".join(f"{ours} = {column}" for ours, column in data.columns.items())
    yield "columns", columns + (f"; not used: {', '.join(data.unused)}" if data.unused else "")
    if "id" not in data.columns:
        yield "", "no id: documents with the same text are one"
    yield "languages", _languages(data)
    rows = data.first.rows
    pairs, documents = (len(rows) - distinct(rows, *columns) for columns in (("document_hash", "query_hash"), ("document_hash",)))
    yield "duplicates", f"{pairs:,} rows repeat an earlier pair, {documents:,} an earlier document"
    how = "" if model.counted else f", at {CHARACTERS_PER_TOKEN} characters a token: the model has no tokenizer.json"
    for name, lengths in (("queries", data.queries), ("documents", data.documents)):
        half, most, longest = (round(np.quantile(lengths, share)) for share in (0.5, 0.95, 1.0))
        yield name, f"{half:,} tokens in the median, {most:,} at 95 %, {longest:,} at most{how}"
    yield "model", f"{model.name}: {model.model_type}, {model.dimension} dimensions, texts of up to {model.longest} tokens"


def write_config(path: Path, chosen: dict[str, Any], data: DataFacts) -> None:
    """Write the settings with their reasons as YAML.

    Raises:
        BadConfig: the file is there already.
    """
    config = build_config(chosen)
    fraction, train = config.data.holdout_fraction, config.train
    steps = round(data.rows * (1 - fraction) / (train.batch_size // 2) * train.epochs)
    queries = held_out_queries(data.first.rows, config.data) * data.rows / max(1, len(data.first.rows))
    cut = (data.documents > train.length).mean(), (data.queries > train.query_length).mean()
    reasons = {
        "data.train": "files, or folders of them; later files go here, into the folder, or after --input",
        "data.corpus": "rows {id, text} to embed",
        "data.columns": 'our name: the file\'s, or a template such as "{title}. {brand}"',
        "data.holdout_fraction": f"kept from training to measure quality: about {queries:,.0f} queries",
        "model.initial": "of the first run; later runs continue from the published model",
        "train.epochs": f"passes over the rows: about {steps:,} steps of one rank",
        "train.batch_size": "pairs of a rank whose documents compete, at most",
        "train.batch_tokens": f"tokens of a rank's batch: about {train.batch_size // 2} pairs; halve both if memory is short",
        "train.query_length": f"tokens; {cut[1]:.1%} of the queries are longer and are cut",
        "train.length": f"tokens of a packed row; {cut[0]:.1%} of the documents are longer and are cut",
        "embed.length": "the same for embedding",
        "gate.max_drop": "the drop in nDCG that a new model must not have; fewer queries cannot exclude a smaller one",
        "gate.undecided": "refuse only what is surely worse: too few queries to exclude a drop",
    }
    lines = ["# Every other setting has a default; docs/configuration.md lists them all."]
    for section, settings in chosen.items():
        lines.append(f"{section}:")
        lines += (
            f"  {f'{key}: {json.dumps(value, ensure_ascii=False)}':<40}  # {reasons[f'{section}.{key}']}"
            for key, value in settings.items()
        )
    if path.exists():
        raise BadConfig("the file exists", value=path, rule="init overwrites nothing", remedy="remove it, or name another: --out")
    write_atomically(path, ("\n".join(lines) + "\n").encode())


def columns_of(settings: dict[str, Any]) -> dict[str, str]:
    """Return `data.columns` of the command's settings.

    Raises:
        BadConfig: another setting, which belongs into the file that init writes.
    """
    columns = build_config(settings).data.columns
    if settings and settings != {"data": {"columns": columns}}:
        raise BadConfig(
            "init takes only data.columns", value=json.dumps(settings), remedy="set the others in the file that init writes"
        )
    return dict(columns)


def _token_counter(vocabulary: Path) -> Count:
    tokenizer = Tokenizer.from_file(str(vocabulary))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda texts: np.array([len(found) for found in tokenizer.encode_batch_fast(texts)], np.int64)


def _holdout(data: DataFacts) -> tuple[float, dict[str, Any]]:
    """Return the smallest fraction that holds out enough queries for the smallest drop that the gate can then exclude, and the
    gate's settings."""
    spare = 1 if data.first.complete else SPARE_QUERIES * len(data.first.rows) / max(data.rows, 1)
    found = {
        hundredths / 100: held_out_queries(data.first.rows, DataConfig(holdout_fraction=hundredths / 100))
        for hundredths in range(2, round(100 * LARGEST_HOLDOUT) + 1)
    }
    for drop in MAX_DROPS:
        needed = needed_queries(GateConfig(max_drop=drop)) * spare
        if enough := [fraction for fraction, queries in found.items() if queries >= needed]:
            return enough[0], {"max_drop": drop}
    return LARGEST_HOLDOUT, {"undecided": "accept"}


def _languages(data: DataFacts) -> str:
    """The rows' locales, or the scripts of their letters if no row has a locale."""
    if locales := Counter(data.first.rows["locale"].drop_null().to_pylist()):
        return ", ".join(f"{locale} {count / len(data.first.rows):.0%}" for locale, count in locales.most_common(10))
    documents = data.first.rows["document"][:SAMPLED_ROWS].to_pylist()
    letters = (letter for document in documents for letter in document[:200] if letter.isalpha())
    scripts = Counter(unicodedata.name(letter, "?").partition(" ")[0].capitalize() for letter in letters)
    found = ", ".join(f"{script} {count / scripts.total():.0%}" for script, count in scripts.most_common(5))
    return f"no locale; script {found}"


def _up(length: float, step: int) -> int:
    return max(1, math.ceil(length / step)) * step
