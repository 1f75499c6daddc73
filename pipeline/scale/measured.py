"""Rates of this project's own code on the host, where nobody publishes any: each measured once on one core of an AMD EPYC.

Another processor has others, and a vCPU is half a core: what rests on them is said with them, and never refuses a run.
"""

from __future__ import annotations

READ_ROWS = 200_000
"""Rows per second that pipeline/data/rows.read_documents gives: 100,000 of JSON Lines with 355 bytes each, from a local disk."""

TOKENIZED_TOKENS = 590_000
"""Tokens per second and thread of pipeline/data/tokens.TextTokenizer: 10,000 English texts of 86 tokens with the tokenizer of
all-MiniLM-L6-v2 (tokenizers 0.22)."""

RANKED_SCORES = 4_000_000
"""Scores per second and thread that pipeline/model/retrieval.rank computes and ranks: 64 queries against 200,000 candidates of
384 dimensions (torch 2.9). With more candidates they are fewer."""

PADDING = 0.02
"""Share of packed rows that is padding: 1.3 % for mixed texts, 2.3 % for short ones (tests/benchmarks/padding.py)."""

SOURCE = "measured on one core of an AMD EPYC, see pipeline/scale/measured.py"
