"""Tokenizers that come with a model folder, and texts that one of them cannot take."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from pipeline.dataset.tokens import TextTokenizer, cut
from pipeline.errors import BadData
from tests.pipeline.conftest import make_texts
from tests.tiny import make_model

COSTLY = "(a+)+$"
"""Backtracks 2^N times over N times `a` that another letter ends."""


def test_a_pattern_that_backtracks_without_end_costs_one_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer(WordLevel({"aaa": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Split(Regex(COSTLY), "isolated")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    began = time.monotonic()
    good, refused = TextTokenizer(tmp_path).encode_each(["aaa", "a" * 60 + "b"], 64)
    # The regular expression library gives up after ten million steps; without its limit, 2^60 would take centuries.
    assert time.monotonic() - began < 300
    assert list(good) == [0]
    assert isinstance(refused, str)
    assert "retry-limit" in refused


def test_a_planned_tokenizer_is_the_same_and_needs_no_torch(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    own = TextTokenizer(tmp_path / "model")
    texts = [text for _, text in make_texts(20)]
    program = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "from pipeline.dataset.tokens import TextTokenizer\n"
        "from pipeline.plan import TokenizerPlan\n"
        "plan = TokenizerPlan.model_validate_json(sys.argv[2])\n"
        "found = TextTokenizer.planned(Path(sys.argv[1]), plan).encode(json.loads(sys.argv[3]), 16)\n"
        "print(json.dumps([[tokens.tolist() for tokens in found], 'torch' in sys.modules]))"
    )
    arguments = [str(tmp_path / "model"), own.plan(64).model_dump_json(), json.dumps(texts)]
    out = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True).stdout
    assert json.loads(out) == [[tokens.tolist() for tokens in own.encode(texts, 16)], False]


def test_a_planned_tokenizer_without_a_file_of_its_own_and_another_one(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    (tmp_path / "model" / "vocab.txt").write_bytes((tmp_path / "model-tokenizer" / "vocab.txt").read_bytes())
    plan = TextTokenizer(tmp_path / "model").plan(64)
    assert TextTokenizer.planned(tmp_path / "model", plan).digest == plan.digest
    with pytest.raises(BadData, match="has changed"):
        TextTokenizer.planned(tmp_path / "model", plan.model_copy(update={"digest": "another"}))


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("special", [True, False])
def test_stored_tokens_are_cut_as_the_tokenizer_cuts(tmp_path: Path, side: str, special: bool) -> None:
    make_model(tmp_path / "model")
    changes = {"tokenizer_config.json": {"truncation_side": side}}
    if not special:  # BERT's own class would put them in
        changes["tokenizer_config.json"]["tokenizer_class"] = "PreTrainedTokenizerFast"
        changes["tokenizer.json"] = {"post_processor": None}
    for name, change in changes.items():
        path = tmp_path / "model" / name
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    tokenizer = TextTokenizer(tmp_path / "model")
    plan = tokenizer.plan(64)
    assert (plan.prefix, plan.suffix, plan.side, plan.cap) == (int(special), int(special), side, 64)
    texts = [text for _, text in make_texts(200)]
    lost = np.arange(len(texts)) % 7 == 0
    stored = pa.array(tokenizer.encode(texts, 64), pa.list_(pa.uint16()), mask=lost)
    for length in (3, 8, 41, 64):
        expected = [None if gone else tokens.tolist() for gone, tokens in zip(lost, tokenizer.encode(texts, length), strict=True)]
        assert cut(stored, length, plan).to_pylist() == expected
        assert cut(stored.slice(50, 20), length, plan).to_pylist() == expected[50:70]
    # Or each text at a length of its own.
    lengths = np.resize([3, 8, 64, 41, 5], len(texts))
    own = [tokenizer.encode([text], int(length))[0].tolist() for text, length in zip(texts, lengths, strict=True)]
    expected = [None if gone else tokens for gone, tokens in zip(lost, own, strict=True)]
    assert cut(stored, lengths, plan).to_pylist() == expected


def test_prompts_and_lower_casing_are_in_the_digest_and_in_the_tokens(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    folder = tmp_path / "model"
    prompts = {"query": "ba ", "document": "ke "}
    plain, prompted = TextTokenizer(folder), TextTokenizer(folder, prompts)
    swapped, lower = TextTokenizer(folder, {"query": "ke ", "document": "ba "}), TextTokenizer(folder, lower=True)
    assert len({one.digest for one in (plain, prompted, swapped, lower)}) == 4
    [found], [expected] = prompted.encode(["li mo"], 4, prompted.prompts["document"]), plain.encode(["ke li mo"], 4)
    assert found.tolist() == expected.tolist()
    assert TextTokenizer.planned(folder, prompted.plan(64), prompts).digest == prompted.digest
    assert TextTokenizer.planned(folder, lower.plan(64), lower=True).digest == lower.digest
    with pytest.raises(BadData, match="tokenizer has changed"):
        TextTokenizer.planned(folder, prompted.plan(64), {"query": "ba ", "document": "li "})
