"""Turn texts into token ids with a model folder's tokenizer, many texts at a time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from tokenizers import Tokenizer, normalizers

from pipeline.errors import BadConfig, BadData, MissingInput, first_line
from pipeline.run_inputs import TokenizerPlan

SIDES = ("query", "document")
"""What a text is: each may have a prompt of its own."""

NO_PROMPTS = dict.fromkeys(SIDES, "")

Tokens = npt.NDArray[np.int32]
"""A text's token ids: 4 bytes each, where a list of Python's integers takes ten times as much."""

TEXTS_AT_ONCE = 1024
"""Texts per call of the tokenizers library, enough for its threads. It holds over 100 bytes a token, truncated ones too, until it
returns."""


def refuse_code(path: Path) -> None:
    """Refuse a configuration file that names Python code to load with the model.

    Raises:
        BadConfig: it names code.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return  # not there, or not readable: its reader says so
    if isinstance(record, dict) and record.get("auto_map"):
        raise BadConfig(
            "the model folder asks to run its own code",
            value=f"{path}: auto_map = {record['auto_map']}",
            rule="models and tokenizers are data; only the library's own classes are loaded",
            remedy="remove auto_map, if the library's class of this model_type gives the same embeddings",
        )


class TextTokenizer:
    """The fast tokenizer of a model folder.

    Args:
        folder: with tokenizer files and config.json.
        prompts: text that precedes every text of one of SIDES, or every query of a task (pipeline/model/inventory.read_prompts).
        lower: put texts into lower case, which the tokenizer need not do itself.

    Attributes:
        prompts: as given.
        vocabulary: every token id is below this.
        digest: SHA-256 of the whole tokenizer and its prompts; equal ones give equal tokens.

    Raises:
        MissingInput: the folder has no tokenizer, or one that cannot be loaded.
        BadConfig: it has only a slow one, or one with its own code.
    """

    def __init__(self, folder: Path, prompts: Mapping[str, str] = NO_PROMPTS, *, lower: bool = False) -> None:
        from transformers import AutoTokenizer  # here: it loads torch, for which ingest has no use

        for name in ("tokenizer_config.json", "config.json"):
            refuse_code(folder / name)
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:
            raise MissingInput(
                "the model's tokenizer cannot be loaded",
                value=f"{folder}: {first_line(error)}",
                rule="a model folder holds its tokenizer: tokenizer.json, or a vocabulary and tokenizer_config.json",
                remedy="add the tokenizer files, or name a folder that has them as model.base",
            ) from error
        if not tokenizer.is_fast:
            raise BadConfig(
                "the model has no fast tokenizer",
                value=type(tokenizer).__name__,
                rule="the tokenizers library tokenizes texts",
                remedy="convert it once, so that the folder has a tokenizer.json",
            )
        self._use(tokenizer.backend_tokenizer, str(tokenizer.truncation_side), prompts, lower)

    @classmethod
    def planned(
        cls, folder: Path, plan: TokenizerPlan, prompts: Mapping[str, str] = NO_PROMPTS, *, lower: bool = False
    ) -> TextTokenizer:
        """Return the tokenizer that a run began with, from tokenizer.json alone where that is all of it.

        Raises:
            BadData: the folder has another one.
            MissingInput, BadConfig: see the class.
        """
        found = cls.__new__(cls)
        with suppress(Exception):  # the library raises nothing more special
            found._use(Tokenizer.from_file(str(folder / "tokenizer.json")), plan.side, prompts, lower)
            if found.digest == plan.digest:
                return found
        found = cls(folder, prompts, lower=lower)
        if found.digest != plan.digest:
            raise BadData(
                "the parent's tokenizer has changed since the run began",
                value=folder,
                rule="all texts of a run are tokenized alike",
                remedy="put the old tokenizer back, or start a new run",
            )
        return found

    def _use(self, backend: Any, direction: str, prompts: Mapping[str, str], lower: bool) -> None:
        self._backend = backend
        self._backend.no_padding()
        self._backend.no_truncation()
        if lower:
            own = [backend.normalizer] if backend.normalizer else []
            self._backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])
        self._direction = direction
        self.prompts = prompts
        self.vocabulary = 1 + max(self._backend.get_vocab(with_added_tokens=True).values())
        named = json.dumps(prompts) if any(prompts.values()) else ""
        self.digest = hashlib.sha256(f"{self._direction} {self._backend.to_str()}{named}".encode()).hexdigest()

    def plan(self, cap: int) -> TokenizerPlan:
        """Return what the tokens of stored texts depend on, for texts of at most `cap` tokens."""
        special = self._backend.encode("a", add_special_tokens=True).special_tokens_mask
        prefix = special.index(0) if 0 in special else len(special)
        return TokenizerPlan(
            digest=self.digest,
            vocabulary=self.vocabulary,
            cap=cap,
            prefix=prefix,
            suffix=len(special) - special.count(0) - prefix,
            side=self._direction,
        )

    def encode(self, texts: Sequence[str], max_length: int, prompt: str = "") -> list[Tokens]:
        """Return the token ids of each text, special tokens and the prompt before it included, at most `max_length` of them."""
        self._backend.enable_truncation(max_length, direction=self._direction)
        found: list[Tokens] = []
        for start in range(0, len(texts), TEXTS_AT_ONCE):
            some = [prompt + text for text in texts[start : start + TEXTS_AT_ONCE]]
            found += (np.array(each.ids, np.int32) for each in self._backend.encode_batch_fast(some, add_special_tokens=True))
        return found

    def with_prompts(self, queries: pa.ChunkedArray, tasks: pa.ChunkedArray) -> pa.ChunkedArray:
        """Return queries behind the prompts of their tasks, or of all queries: `encode` then takes them without a prompt."""
        # A task may have the name of a side, whose prompt is not the task's.
        prompts = [self.prompts.get("query" if task in SIDES else task, self.prompts["query"]) for task in tasks.to_pylist()]
        return pc.binary_join_element_wise(pa.array(prompts, pa.string()), queries, "")

    def decode(self, tokens: Iterable[int]) -> str:
        """Return a text with these token ids, without the special ones; the tokenizer may have normalized it."""
        return str(self._backend.decode([int(token) for token in tokens]))

    def encode_each(self, texts: Sequence[str], max_length: int, prompt: str = "") -> list[Tokens | str]:
        """Encode texts like `encode`, but a failing or empty text does not affect the others.

        Returns:
            For each text its token ids, or the reason why there are none.
        """
        try:
            encoded = self.encode(texts, max_length, prompt)
        except BaseException as error:
            # One text may have caused it. A panic inside the tokenizers library is not an Exception.
            if isinstance(error, MemoryError) or not (isinstance(error, Exception) or type(error).__name__ == "PanicException"):
                raise
            if len(texts) == 1:
                return [f"the tokenizer cannot take it: {type(error).__name__}: {error}"]
            return [found for text in texts for found in self.encode_each([text], max_length, prompt)]
        return [tokens if len(tokens) else "the tokenizer returns no token" for tokens in encoded]


def cut(tokens: pa.ListArray, length: int | npt.NDArray[np.int64], plan: TokenizerPlan) -> pa.ListArray:
    """Return token ids that were stored long as the tokenizer would have cut them.

    Args:
        length: of a text at most, special tokens included; or of each, (texts,).
    """
    lengths = pc.fill_null(pc.list_value_length(tokens), 0).to_numpy()
    over = np.maximum(lengths.astype(np.int64) - length, 0)
    if not over.any():
        return tokens
    begins = np.cumsum(lengths) - lengths + (plan.prefix if plan.side == "left" else length - plan.suffix)
    dropped = np.zeros(lengths.sum() + 1, np.int8)
    dropped[begins[over > 0]] += 1
    dropped[(begins + over)[over > 0]] -= 1
    values = pc.list_flatten(tokens).filter(pa.array(np.cumsum(dropped[:-1], dtype=np.int8) == 0))
    offsets = np.concatenate([[0], np.cumsum(np.minimum(lengths, length))]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), values, mask=tokens.is_null())
