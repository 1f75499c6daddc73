"""The model card of a finished model: README.md in its folder, with the front matter that the Hugging Face Hub reads."""

from __future__ import annotations

import json
from pathlib import Path

from pipeline import store
from pipeline.host.host import versions
from pipeline.model.folder import WEIGHTS
from pipeline.model.inventory import read_max_length, read_prompts
from pipeline.plan import RunPlan

CARD = "README.md"


def model_card(plan: RunPlan, folder: Path, steps: int, pairs: int) -> str:
    """Return the card of a model that a run has trained.

    Args:
        folder: of the model, complete but for its card.
        steps, pairs: optimizer steps, and pairs that they were computed from.
    """
    config, head = plan.config, plan.config.model.head
    numbers = f"the first {config.embed.dimensions}" if config.embed.dimensions else "all"
    metadata = {
        "library_name": "sentence-transformers",
        "pipeline_tag": "sentence-similarity",
        "tags": ["sentence-transformers", "feature-extraction", "trnpipe"],
        "base_model": plan.parent.uri,
    }
    facts = {
        "Run": plan.run,
        "Lineage": " > ".join((*plan.lineage, plan.run)),
        "Parent": f"{plan.parent.uri}, weights sha256 {plan.parent.sha256}",
        "Weights": f"{WEIGHTS}, sha256 {store.sha256_file(folder / WEIGHTS)}, fp32",
        "Trained on": f"{plan.train.rows} rows ({plan.train.new_rows} new, {plan.train.replay_rows} seen before): "
        f"{steps} steps, {pairs} pairs, computed in {plan.world.precision} on {plan.world.kind}",
        "Evaluation": f"runs/{plan.run}/evaluate/scorecard.json and runs/{plan.run}/report/index.html compare the "
        "model with its baseline",
        "Longest text": f"{read_max_length(folder)} tokens, special ones included; in training {config.train.longest_query} of a "
        f"query and {config.train.length} of a document",
        "Prompts": ", ".join(f"{side} {json.dumps(text)}" for side, text in read_prompts(folder).items()),
        "Pooling": config.model.pooling,
        "Normalized": "yes, to length 1" if config.model.normalize else "no",
        "Head": f"model.head: {json.dumps(head.model_dump())}, as Dense modules" if head else "none",
        "Matryoshka sizes": ", ".join(map(str, config.train.dimensions)) or "none",
        "Published vectors": f"{numbers} numbers, {config.embed.dtype}",
        "Versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
    }
    front = "\n".join(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in metadata.items())
    rows = "\n".join(f"- **{name}**: {fact}" for name, fact in facts.items())
    return f"""---
{front}
---

# {plan.run}

A text encoder that trnpipe trained. `SentenceTransformer(FOLDER)` gives the vectors that the run published: `encode_document` for
documents, `encode_query` for queries.

{rows}
"""
