"""Dropout from random bits: what torch's own does, with other random numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipeline.model.dropout import BitDropout, use_bit_dropout


@pytest.mark.parametrize("probability", [0.1, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drops_that_share_and_keeps_the_mean(probability: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.ones(401, 999, dtype=dtype, requires_grad=True)
    result = BitDropout(probability)(x)
    assert result.dtype == dtype
    values = result.detach().float().unique()
    assert values.tolist() == pytest.approx([0.0, 1 / (1 - probability)], rel=5e-3)
    # Six standard deviations of so many independent draws, along every axis as well as in all.
    kept = (result != 0).float()
    for found in (kept.mean(), kept.mean(0), kept.mean(1)):
        bound = 6 * (probability * (1 - probability) / (kept.numel() / found.numel())) ** 0.5
        assert float((found - (1 - probability)).abs().max()) < bound
    # Neighbours, of which four come from one number, know nothing of each other.
    flat = kept.flatten() - kept.mean()
    for distance in (1, 2, 3, 4):
        correlation = float((flat[distance:] * flat[:-distance]).mean() / flat.var())
        assert abs(correlation) < 6 / kept.numel() ** 0.5
    result.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, result.detach())


def test_follows_the_seed_and_rests_in_evaluation() -> None:
    dropout = BitDropout(0.3)
    x = torch.randn(50, 7)
    torch.manual_seed(1)
    first, second = dropout(x), dropout(x)
    torch.manual_seed(1)
    assert torch.equal(dropout(x), first)
    assert not torch.equal(first, second)
    assert dropout.eval()(x) is x
    assert BitDropout(0.0).train()(x) is x
    assert torch.equal(BitDropout(1.0).train()(x), torch.zeros_like(x))


@pytest.mark.parametrize("training", [True, False])
def test_takes_the_place_of_every_dropout(training: bool) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.2), nn.Sequential(nn.Dropout(0.4))).train(training)
    use_bit_dropout(module)
    found = [one for one in module.modules() if isinstance(one, nn.Dropout)]
    assert [(type(one), one.p, one.training) for one in found] == [(BitDropout, 0.2, training), (BitDropout, 0.4, training)]
