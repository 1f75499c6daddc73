"""The shape of packed rows, which several texts share: plan fills them, and the encoder reads them."""

from __future__ import annotations

from typing import NamedTuple

TOKENS_PER_TEXT = 8
"""A packed row has room for one text per so many tokens. More room costs little: a row more in the matrix that pools. With less,
rows are full of texts before they are full of tokens: at 16, texts of 21 tokens leave 7 % padding instead of 2 %."""


MICRO_BATCH_TOKENS = 2048
"""Tokens of a micro-batch at most, where nothing else is set. A graph grows with its tokens, and neuronx-cc refuses one of more
than 5,000,000 instructions (aws-neuron-sdk issue 819); AWS's scripts train BERT-Large on a NeuronCore with as many at a time
(aws-neuron-samples, run_dp_bert_large_hf_pretrain_bf16_s128.sh)."""

PAIR_TOKENS = 64
"""Tokens of a batch for each document of its pairs at most, where nothing else is set: batches of longer ones are full of tokens.
"""


def texts_per_row(length: int) -> int:
    """Return the texts that a packed row of so many tokens has room for."""
    return max(1, length // TOKENS_PER_TEXT)


class BinShape(NamedTuple):
    """The shape of a bin: packed rows, which the texts of some pairs fill.

    Attributes:
        rows, length: rows, and tokens of each.
        pairs: room for so many.
        documents: of a pair at most: its own, and its negatives.
    """

    rows: int
    length: int
    pairs: int
    documents: int = 1

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def texts(self) -> int:
        """Embeddings that a bin's rows give, those without a text included."""
        return self.rows * texts_per_row(self.length)


def bins_of(pairs: int, tokens: int, length: int, count: int | None, documents: int = 1) -> tuple[int, BinShape]:
    """Cut a rank's batch into bins: return how many, and the shape of each. The longest query and documents fit into one.

    Args:
        pairs, tokens: that the batch has room for.
        length: of a row, and at most of a query or a document.
        count: how many bins, a divisor of `pairs`; None: as few as have at most MICRO_BATCH_TOKENS.
        documents: of a pair, at most.
    """
    rows, most = -(-tokens // length), max(1, MICRO_BATCH_TOKENS // length)
    if count is None:
        count = next(
            number for number in range(1, pairs + 1) if pairs % number == 0 and (rows <= number * most or number == pairs)
        )
    return count, BinShape(max(-(-rows // count), 1 + documents), length, pairs // count, documents)


def largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of a positive number up to `limit`; at least 1."""
    return next(size for size in range(min(number, limit), 0, -1) if number % size == 0)
