"""Text to token ids by the tokenizer that comes with a model folder, many texts at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from pipeline.errors import BadConfig, MissingInput


class TextTokenizer:
    """The fast tokenizer of a model folder.

    Args:
        folder: where tokenizer files and config.json are.

    Attributes:
        vocabulary: every token id is below this.

    Raises:
        MissingInput: the folder has no tokenizer.
        BadConfig: it has only a slow one.
    """

    def __init__(self, folder: Path) -> None:
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise MissingInput(
                "the model's tokenizer cannot be loaded",
                value=f"{folder}: {str(error).splitlines()[0]}",
                rule="a model folder holds its tokenizer: tokenizer.json, or a vocabulary and tokenizer_config.json",
                remedy="add the tokenizer files, or name a folder that has them as model.base",
            ) from error
        if not tokenizer.is_fast:
            raise BadConfig(
                "the model has no fast tokenizer",
                value=type(tokenizer).__name__,
                rule="texts are tokenized by the tokenizers library",
                remedy="convert it once, so that the folder has a tokenizer.json",
            )
        self._backend: Any = tokenizer.backend_tokenizer
        self._backend.no_padding()
        self._direction = str(tokenizer.truncation_side)
        self.vocabulary = 1 + max(tokenizer.get_vocab().values())

    def encode(self, texts: Sequence[str], max_length: int) -> list[list[int]]:
        """Token ids of each text, special tokens included, at most `max_length` of them."""
        self._backend.enable_truncation(max_length, direction=self._direction)
        return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=True)]
