"""The loss and its gradients beside sentence-transformers' own: MultipleNegativesRankingLoss, on the same made-up embeddings.

    make bench ARGS=--help                         (sets up .bench, the peers' environment)
    python -m tests.benchmarks.peers.losses

Printed are relative differences: of the loss, and of the gradient by its norm. Ends with 1 if one exceeds its bound: 1e-10 in
float64, 1e-6 (loss) and 1e-5 (gradient) in float32.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[3]
PEERS = ROOT / ".bench" / "bin" / "python"
ROWS, WIDTH = 48, 96
SCALE = 20.0
CASES = [
    (negatives, symmetric, kind) for kind in ("float64", "float32") for symmetric in (False, True) for negatives in (0, 1, 4)
]
BOUNDS = {"float64": (1e-10, 1e-10), "float32": (1e-6, 1e-5)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        torch.save(results(theirs), options.peer)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "theirs.pt"
        subprocess.run([PEERS, "-m", "tests.benchmarks.peers.losses", "--peer", str(path)], check=True, cwd=ROOT)
        expected, found = torch.load(path, weights_only=True), results(ours)
        worst = 0
        print(f"{'negatives':>9}  {'symmetric':<9}  {'type':<8}  {'loss':>8}  {'gradient':>8}")
        for number, (negatives, symmetric, kind) in enumerate(CASES):
            loss, gradient = (
                float((found[name] - expected[name]).norm() / expected[name].norm())
                for name in (f"loss-{number}", f"gradient-{number}")
            )
            beyond = loss > BOUNDS[kind][0] or gradient > BOUNDS[kind][1]
            worst = max(worst, int(beyond))
            print(
                f"{negatives:>9}  {symmetric!s:<9}  {kind:<8}  {loss:>8.1e}  {gradient:>8.1e}",
                "beyond its bound" if beyond else "",
            )
    return worst


def results(loss_of: Any) -> dict[str, torch.Tensor]:
    """Return the loss and the gradient of every case."""
    found: dict[str, torch.Tensor] = {}
    for number, (negatives, symmetric, kind) in enumerate(CASES):
        generator = torch.Generator().manual_seed(number)
        made = torch.randn(2 + negatives, ROWS, WIDTH, generator=generator, dtype=torch.float64)
        texts = torch.nn.functional.normalize(made, dim=-1).to(getattr(torch, kind)).requires_grad_()
        loss = loss_of(texts, symmetric=symmetric)
        loss.backward()
        found |= {f"loss-{number}": loss.detach().double(), f"gradient-{number}": texts.grad.double()}
    return found


def theirs(texts: torch.Tensor, *, symmetric: bool) -> torch.Tensor:
    """The peer's loss of queries, documents and negatives, (texts, rows, width)."""
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from sentence_transformers.util import dot_score

    directions = ("query_to_doc", "doc_to_query") if symmetric else ("query_to_doc",)
    loss = MultipleNegativesRankingLoss(
        torch.nn.Identity(), scale=SCALE, similarity_fct=dot_score, directions=directions, partition_mode="per_direction"
    )
    found: torch.Tensor = loss.compute_loss_from_embeddings(list(texts), torch.empty(0))
    return found


def ours(texts: torch.Tensor, *, symmetric: bool) -> torch.Tensor:
    """This project's loss of the same."""
    from pipeline.backends.device import open_device
    from pipeline.config import build_config
    from pipeline.run.world import World
    from pipeline.training.batches import roles
    from pipeline.training.step import batch_loss

    hashes = np.arange(1, 1 + len(texts) * ROWS, dtype=np.uint64).reshape(len(texts), ROWS)
    query, documents, there = hashes[0], hashes[1:].T, np.ones((ROWS, len(texts) - 1), np.bool_)
    batch = {
        "roles": torch.from_numpy(roles(query, documents, there, 0, ROWS)),
        "query_roles": torch.from_numpy(roles(documents[:, 0], query[:, None], there[:, :1], 0, ROWS)),
        "weights": torch.full((ROWS,), 1 / ROWS, dtype=texts.dtype),
    }
    config = build_config({"train": {"temperature": 1 / SCALE, "symmetric": symmetric}}).train
    plain = torch.Tensor.float
    try:
        # Embeddings are fp32 otherwise.
        torch.Tensor.float = lambda tensor: tensor  # type: ignore[method-assign]
        device = open_device("cpu", "fp32", World(), threads=1)
        return batch_loss(texts[0], texts[1:].transpose(0, 1).flatten(0, 1), batch, config, device, normalize=True)
    finally:
        torch.Tensor.float = plain  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main())
