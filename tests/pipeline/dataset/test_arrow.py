"""Row files: what is in them, in which order, and that only selected rows get there."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from pipeline import store
from pipeline.dataset import arrow as arrow_module
from pipeline.dataset.arrow import SCHEMAS, Lengths, WrittenRows, read_table, token_lengths, write_rows
from pipeline.dataset.rows import normalized_hash
from pipeline.dataset.shards import hash_shards, scan_training
from pipeline.dataset.split import Selection
from pipeline.dataset.tokens import TextTokenizer
from pipeline.errors import BadData, MissingInput

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{number}" for number in range(40))]
CLS, SEP = 2, 3
LENGTHS = Lengths(query=4, document=6, candidate=5)


def word(number: int) -> int:
    return WORDS.index(f"w{number}")


@pytest.fixture
def tokenizer(tmp_path: Path) -> TextTokenizer:
    backend = Tokenizer(WordLevel({token: index for index, token in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = Whitespace()
    backend.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)])
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", pad_token="[PAD]").save_pretrained(tmp_path / "model")
    return TextTokenizer(tmp_path / "model")


@pytest.fixture
def selection(tmp_path: Path) -> Selection:
    """Two shards; rows 0 and 4 held out, 1 and 5 trained on, 2 and 6 distractors, 3 nothing, 7 trained on and distractor."""
    for name, start in (("one", 0), ("two", 4)):
        records = [
            {
                "id": f"id{number}",
                "query": f"w{number} w9" + " w9" * number,
                "document": f"w{number % 4 + 10 * (number == 7)} w8 w8 w8 w8 w8 w8" if number != 5 else "w5",
                "label": 0 if number == 4 else 2,
                "locale": "de" if number == 0 else None,
            }
            for number in range(start, start + 4)
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    infos = [store.ObjectInfo(str(tmp_path / f"{name}.jsonl"), 0) for name in ("one", "two")]
    files = hash_shards(infos, lambda done: None)
    scans = scan_training(files, {}, lambda row: None, lambda done: None)
    return Selection(
        scans=scans,
        new=[True, False],
        holdout=[np.array([1, 0, 0, 0], bool), np.array([1, 0, 0, 0], bool)],
        train=[np.array([0, 1, 0, 0], bool), np.array([0, 1, 0, 1], bool)],
        distractors=[np.array([0, 0, 1, 0], bool), np.array([0, 0, 1, 1], bool)],
    )


def written(tmp_path: Path, selection: Selection, tokenizer: TextTokenizer) -> WrittenRows:
    numbers = {scan.file.uri: number for number, scan in enumerate(selection.scans)}
    (tmp_path / "rows").mkdir(exist_ok=True)
    return write_rows(tmp_path / "rows", selection, numbers, {}, tokenizer, LENGTHS, lambda done: None)


@pytest.mark.parametrize("batch_rows", [1, 2, 4096])
def test_row_files(
    batch_rows: int, tmp_path: Path, selection: Selection, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrow_module, "BATCH_ROWS", batch_rows)
    result = written(tmp_path, selection, tokenizer)
    tables = {name: read_table(tmp_path / "rows" / name) for name in SCHEMAS}
    assert {name: table.schema for name, table in tables.items()} == SCHEMAS
    assert result.rows == {name: len(table) for name, table in tables.items()}
    assert result.queries == 1  # id4 is not relevant to anything

    train = tables["train.arrow"]
    assert train["id"].to_pylist() == ["id1", "id5", "id7"]
    assert train["query_tokens"].to_pylist()[0] == [CLS, word(1), word(9), SEP]
    assert train["document_tokens"].to_pylist() == [
        [CLS, word(1), word(8), word(8), word(8), SEP],
        [CLS, word(5), SEP],
        [CLS, word(13), word(8), word(8), word(8), SEP],
    ]
    assert result.document_lengths.tolist() == [6, 3, 6] == token_lengths(train["document_tokens"]).tolist()
    assert train["query_hash"].to_pylist()[0] == normalized_hash("w1 w9 w9")
    assert train["document_hash"].to_pylist()[1] == normalized_hash("w5")
    assert (train["shard"].to_pylist(), train["line"].to_pylist()) == ([0, 1, 1], [2, 2, 4])

    holdout = tables["holdout.arrow"]
    assert holdout["id"].to_pylist() == ["id0", "id4"]
    assert (holdout["label"].to_pylist(), holdout["locale"].to_pylist()) == ([2.0, 0.0], ["de", None])

    # Rows 0 and 4 have one document; so have 2 and 6.
    candidates = tables["candidates.arrow"]
    expected = [f"w{number} w8 w8 w8 w8 w8 w8" for number in (0, 2, 13)]
    assert candidates["document_hash"].to_pylist() == [normalized_hash(text) for text in expected]
    assert candidates["document_tokens"].to_pylist()[0] == [CLS, word(0), word(8), word(8), SEP]


def test_the_same_rows_make_the_same_bytes(tmp_path: Path, selection: Selection, tokenizer: TextTokenizer) -> None:
    written(tmp_path, selection, tokenizer)
    first = {name: (tmp_path / "rows" / name).read_bytes() for name in SCHEMAS}
    written(tmp_path, selection, tokenizer)
    assert first == {name: (tmp_path / "rows" / name).read_bytes() for name in SCHEMAS}


def test_a_shard_that_changes_meanwhile_is_refused(tmp_path: Path, selection: Selection, tokenizer: TextTokenizer) -> None:
    path = Path(selection.scans[1].file.uri)
    path.write_text(path.read_text() + "\n" + path.read_text().splitlines()[0])
    with pytest.raises(BadData, match="changed while it was read"):
        written(tmp_path, selection, tokenizer)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(MissingInput, match="tokenizer"):
        TextTokenizer(tmp_path / "empty")
