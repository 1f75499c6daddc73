"""Encoding many texts: the order of the input, static shapes, and the same embeddings however batches are cut."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipeline.backends.device import Device, open_device
from pipeline.config import EmbedConfig
from pipeline.model.encoder import texts_per_row
from pipeline.model.inference import (
    batch_rows,
    encode,
    for_encoding,
    packed_rows,
    pad,
    plan_batches,
)
from pipeline.run.world import World
from pipeline.stages.embed import WINDOW_ROWS
from tests.tiny import make_model


@pytest.fixture(scope="module")
def device() -> Device:
    return open_device("cpu", "fp32", World(), threads=1)


def token_lists(lengths: Sequence[int]) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(5, 100, length).tolist() for length in lengths]


@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=200),
    tokens_per_batch=st.integers(1, 600),
    static=st.booleans(),
)
def test_plan_covers_every_row_once_and_fits(lengths: list[int], tokens_per_batch: int, static: bool) -> None:
    plan = plan_batches(np.array(lengths), 64, tokens_per_batch, static=static)
    assert sorted(row for batch in plan for row in batch.rows.tolist()) == list(range(len(lengths)))
    for batch in plan:
        places = np.zeros(batch.slots * batch.length, dtype=np.int64)
        for row, start in zip(batch.rows.tolist(), batch.starts.tolist(), strict=True):
            places[start : start + lengths[row]] += 1
            assert start // batch.length == (start + lengths[row] - 1) // batch.length
        assert places.sum() == sum(lengths[row] for row in batch.rows)
        assert places.max() == 1
        texts = texts_per_row(batch.length) if static else 1
        assert len(set(batch.outputs.tolist())) == len(batch.rows)
        assert (batch.outputs // texts == batch.starts // batch.length).all()
        if static:
            assert (batch.slots, batch.length) == (batch_rows(64, tokens_per_batch), 64)
        else:
            assert batch.slots == len(batch.rows)
            assert batch.slots * batch.length <= max(tokens_per_batch, batch.length)


@given(st.lists(st.integers(1, 64), min_size=1, max_size=200), st.integers(64, 600))
def test_a_row_is_begun_only_where_no_other_has_room(lengths: list[int], tokens_per_batch: int) -> None:
    plan = plan_batches(np.array(lengths), 64, tokens_per_batch, static=True)
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    for number, batch in enumerate(plan):
        longest = lengths[batch.rows[0]]
        before = set(order[: order.index(batch.rows[0])])
        for earlier in plan[:number]:
            for slot in range(earlier.slots):
                chosen = (earlier.starts // earlier.length == slot) & np.isin(earlier.rows, list(before))
                there = [lengths[row] for row in earlier.rows[chosen]]
                assert earlier.length - sum(there) < longest or len(there) == texts_per_row(earlier.length)


@pytest.mark.parametrize(("median", "spread"), [(18, 0.5), (40, 1.2), (200, 0.8)])
def test_packed_rows_hardly_pad(median: float, spread: float) -> None:
    """Short texts, mixed ones, and such that are mostly cut."""
    embed = EmbedConfig()
    drawn = np.random.default_rng(0).lognormal(np.log(median), spread, WINDOW_ROWS)
    lengths = np.clip(drawn.astype(np.int64), 3, embed.length)
    plan = plan_batches(lengths, embed.length, embed.tokens_per_batch, static=True)
    # One batch may be nearly empty.
    assert sum(batch.slots * batch.length for batch in plan) < 1.02 * lengths.sum() + embed.tokens_per_batch


def test_lengths_that_fit_no_row_are_refused() -> None:
    for lengths in ([0, 3], [9]):
        with pytest.raises(ValueError, match="do not fit"):
            plan_batches(np.array(lengths), 8, 32, static=True)


def test_pad() -> None:
    tokens, mask = pad([[5, 6], [7]], 3, 4)
    assert tokens.tolist() == [[5, 6, 0, 0], [7, 0, 0, 0], [0, 0, 0, 0]]
    assert mask.tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]


def test_packed_rows() -> None:
    lengths = np.array([2, 9, 5, 1])
    (batch,) = plan_batches(lengths, 16, 32, static=True)
    lists = [[10, 11], [20] * 9, [30] * 5, [40]]
    found = packed_rows([lists[row] for row in batch.rows], batch)
    assert list(found) == ["tokens", "segments", "positions"]
    # The longest first, each where least room is left; a row of 16 has room for two texts.
    assert found["tokens"].tolist() == [[20] * 9 + [30] * 5 + [0, 0], [10, 11, 40] + [0] * 13]
    assert found["segments"].tolist() == [[1] * 9 + [2] * 5 + [0, 0], [1, 1, 2] + [0] * 13]
    assert found["positions"].tolist() == [[*range(9), *range(5), 0, 0], [0, 1, 0] + [0] * 13]


def test_embeddings_come_in_the_order_of_the_input(tmp_path: Path, device: Device) -> None:
    encoder = make_model(tmp_path / "model").eval()
    texts = token_lists([3, 30, 8, 1, 17, 9, 16, 31, 5])
    done: list[int] = []
    shares: list[float] = []

    def on_progress(count: int, share: float) -> None:
        done.append(count)
        shares.append(share)

    embeddings = encode(encoder, device, texts, 32, 48, on_progress=on_progress).embeddings
    with torch.no_grad():
        expected = torch.cat([encoder(torch.tensor([text]), torch.ones(1, len(text), dtype=torch.long)) for text in texts])
    torch.testing.assert_close(embeddings, expected, rtol=0, atol=1e-5)
    assert embeddings.dtype == torch.float32
    assert done == sorted(done)
    assert done[-1] == len(texts)
    plan = plan_batches(np.array([len(text) for text in texts]), 32, 48, static=False)
    computed = np.cumsum([batch.slots * batch.length for batch in plan])
    assert shares == (computed / computed[-1]).tolist()
    embeddings.requires_grad_().sum().backward()  # an ordinary tensor


def test_static_shapes_on_compiling_devices(tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = make_model(tmp_path / "model").eval()
    texts = token_lists([3, 30, 8, 1, 17, 9, 16, 31, 5])
    eager = encode(encoder, device, texts, 32, 48).embeddings
    shapes: set[tuple[int, ...]] = set()

    def compiled(tokens: Tensor, segments: Tensor, positions: Tensor) -> Tensor:
        shapes.add(tuple(tokens.shape))
        return encoder.packed(tokens, segments, positions)

    monkeypatch.setattr(device, "compiles", True)
    found = encode(compiled, device, texts, 32, 48)
    assert shapes == {(1, 32)}
    torch.testing.assert_close(found.embeddings, eager, rtol=0, atol=1e-5)
    again = encode(for_encoding(encoder, compiles=device.compiles), device, texts, 32, 48)
    assert torch.equal(again.embeddings, found.embeddings)
    assert found.tokens == sum(map(len, texts))
    assert found.slots - found.tokens < 48


def test_training_mode_is_left_and_restored(tmp_path: Path, device: Device) -> None:
    encoder = make_model(tmp_path / "model").train()
    texts = token_lists([5, 5])
    first, second = (encode(encoder, device, texts, 8, 64).embeddings for _ in range(2))
    assert torch.equal(first, second)
    assert encoder.training


def test_nothing_to_encode(device: Device) -> None:
    assert encode(lambda tokens, mask: tokens, device, [], 8, 64).embeddings.shape == (0, 0)


def test_equal_token_lists_are_computed_once(tmp_path: Path, device: Device) -> None:
    encoder = make_model(tmp_path / "model").eval()
    different = token_lists([9, 3, 30])
    texts = [different[place] for place in (0, 1, 0, 2, 0, 1)]
    seen: list[int] = []

    def counting(tokens: Tensor, mask: Tensor) -> Tensor:
        seen.append(len(tokens))
        return encoder(tokens, mask)

    done: list[int] = []
    found = encode(counting, device, texts, 32, 32, on_progress=lambda count, _: done.append(count))
    assert sum(seen) == 3
    assert done[-1] == 6
    assert (found.tokens, found.slots >= found.tokens) == (42, True)
    torch.testing.assert_close(found.embeddings, encode(encoder, device, texts[::-1], 32, 512).embeddings.flip(0))


@given(lengths=st.lists(st.integers(1, 256), min_size=200, max_size=400), tokens_per_batch=st.integers(2048, 16384))
def test_free_batches_hardly_pad(lengths: list[int], tokens_per_batch: int) -> None:
    plan = plan_batches(np.array(lengths), 256, tokens_per_batch, static=False)
    for batch in plan:
        shortest = min(lengths[row] for row in batch.rows)
        small = batch.slots * batch.length <= tokens_per_batch / 8
        assert small or shortest >= batch.length * 15 / 16


def test_free_batches_have_few_shapes_however_many_windows_there_are() -> None:
    rng = np.random.default_rng(0)
    shapes: list[int] = []
    seen: set[tuple[int, int]] = set()
    for _ in range(40):
        lengths = np.clip(rng.lognormal(3.5, 1.0, 4096).astype(np.int64), 1, 250)
        seen |= {(batch.slots, batch.length) for batch in plan_batches(lengths, 250, 16384, static=False)}
        shapes.append(len(seen))
    # oneDNN keeps 1024 products, and a layer has about three of different sizes.
    assert shapes[-1] < 300
    assert shapes[-1] - shapes[19] < 25
    assert max(length for _, length in seen) == 250  # not beyond what the model may have positions for
