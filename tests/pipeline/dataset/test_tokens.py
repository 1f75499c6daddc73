"""Tokenizers that come with a model folder, and texts that one of them cannot take."""

from __future__ import annotations

import json
import time
from pathlib import Path

from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from pipeline.dataset.tokens import TextTokenizer

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
