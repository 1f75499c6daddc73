"""Batches from memory-mapped rows: every row once, the same bins for any number of ranks, static shapes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from pipeline.backends.device import Batch
from pipeline.config import build_config
from pipeline.dataset.row_files import read_table
from pipeline.dataset.steps import step_bins, write_steps
from pipeline.model.loss import DocumentRole
from pipeline.packing import texts_per_row
from pipeline.run.world import World
from pipeline.training.batches import Padding, TokenColumn, TrainingBatches, length_groups
from pipeline.training.micro_batches import micro_batches
from tests.pipeline.training.planned import write_rows
from tests.tiny import make_model


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("batches")
    make_model(folder / "model")
    write_rows(folder / "rows", folder / "model", 8, 32, rows=101, held=5)
    return folder / "rows"


def open_batches(
    folder: Path,
    rank: int = 0,
    size: int = 1,
    *,
    bins: int = 2,
    accumulation: int = 1,
    padding: Padding = Padding.PACKED,
    apart: bool = False,
) -> TrainingBatches:
    """Batches of bins of 4 pairs at most, in two rows of 32 tokens."""
    train = {
        "batch_size": 4 * bins,
        "batch_tokens": 64 * bins,
        "micro_batches": bins,
        "length": 32,
        "query_length": 8,
        "epochs": 2,
    }
    config = build_config({"seed": 3, "train": {**train, "accumulation": accumulation}})
    ordered = folder / str(step_bins(config, size))
    if not ordered.exists():
        ordered.mkdir()
        (ordered / "train.arrow").symlink_to(folder / "train.arrow")
        write_steps(ordered, 101, config, size)
    return TrainingBatches(
        ordered,
        World(rank=rank, size=size),
        config.train,
        padding=padding,
        apart=apart,
        learning_rate=lambda step: step / 10,
    )


def texts_of(part: Batch, tower: str) -> list[list[int]]:
    """The tokens of each text of a micro-batch of packed rows, found as the encoder finds its embeddings."""
    each = texts_per_row(part["tokens"].shape[1])
    found = []
    for number in part[f"{tower}_texts"].tolist():
        row, text = divmod(number, each)
        there = part["segments"][row] == text + 1
        assert part["positions"][row][there].tolist() == list(range(int(there.sum())))
        found.append(part["tokens"][row][there].tolist())
    return found


def grouped(part: Batch, tower: str) -> list[list[int]]:
    """The same of a micro-batch of groups."""
    groups = [name for name in part if name.startswith("tokens:")]
    texts = [
        row[: int(count)].tolist()
        for name in groups
        for row, count in zip(part[name], part[name.replace("tokens", "mask")].sum(1), strict=True)
    ]
    return [texts[number] for number in part[f"{tower}_texts"].tolist()]


def places_of(mask: torch.Tensor) -> list[int]:
    found: list[int] = mask.nonzero().flatten().tolist()
    return found


def test_token_column_across_chunks() -> None:
    lists = [[1, 2], [], [3], [4, 5, 6], [7]]
    column = pa.chunked_array(
        [pa.array(lists[:2], pa.list_(pa.int32())), pa.array([], pa.list_(pa.int32())), pa.array(lists[2:], pa.list_(pa.int32()))]
    )
    sliced = column.slice(1, 3)
    for rows in ([], [3], [1], [4, 0, 3, 3, 1, 2]):
        wanted = np.array(rows, np.int32)
        assert [tokens.tolist() for tokens in TokenColumn(column).lists(wanted)] == [lists[row] for row in rows]
        assert TokenColumn(column).lengths(wanted).tolist() == [len(lists[row]) for row in rows]
        assert TokenColumn(column).joined(wanted).tolist() == [token for row in rows for token in lists[row]]
        assert TokenColumn(column).joined(wanted).dtype == np.int32
    assert [tokens.tolist() for tokens in TokenColumn(sliced).lists(np.arange(3, dtype=np.int32))] == lists[1:4]


def test_two_epochs_have_every_row_twice(rows: Path) -> None:
    batches = open_batches(rows)
    table = read_table(rows / "train.arrow")
    names = [f"0:{line}" for line in table["line"].to_pylist()]
    wanted = {
        name: tuple(both)
        for name, *both in zip(names, table["query_tokens"].to_pylist(), table["document_tokens"].to_pylist(), strict=True)
    }
    seen = []
    pairs = tokens = 0
    for step, batch in enumerate(batches.iterate(0, batches.steps)):
        ids = batches.row_ids(step)
        [part] = micro_batches(batch)
        assert part["tokens"].shape == part["segments"].shape == (4, 32)
        valid = batch["weights"] > 0
        found = list(zip(texts_of(part, "query"), texts_of(part, "document"), strict=True))
        assert [both for both, counts in zip(found, valid.tolist(), strict=True) if counts] == [wanted[name] for name in ids]
        assert batch["learning_rate"].item() == pytest.approx(step / 10)
        assert batch["weights"].sum().item() == pytest.approx(1.0)
        facts = batches.take_facts(step)
        assert facts.pairs == len(ids) == int(valid.sum())
        assert facts.tokens == int((part["segments"] > 0).sum())
        assert facts.slots == 4 * 32
        seen += ids
        pairs, tokens = pairs + facts.pairs, tokens + facts.tokens
    assert sorted(seen) == sorted(names * 2)
    assert pairs == 2 * 101
    assert tokens == 2 * sum(len(query) + len(document) for query, document in wanted.values())


def test_ranks_share_a_step(rows: Path) -> None:
    whole = open_batches(rows)
    halves = [open_batches(rows, rank, 2, bins=1) for rank in range(2)]
    assert halves[0].steps == whole.steps
    for one, *both in zip(whole.iterate(0, whole.steps), *(half.iterate(0, whole.steps) for half in halves), strict=True):
        [part], parts = micro_batches(one), [micro_batches(half)[0] for half in both]
        for name in ("tokens", "segments", "positions"):
            assert torch.equal(torch.cat([half[name] for half in parts]), part[name]), name
        for tower in ("query", "document"):
            assert texts_of(parts[0], tower) + texts_of(parts[1], tower) == texts_of(part, tower)
        assert torch.equal(torch.cat([half["roles"] for half in both]), one["roles"])
        torch.testing.assert_close(torch.cat([half["weights"] for half in both]) / 2, one["weights"])


def test_a_step_of_several_batches_is_the_same_bins(rows: Path) -> None:
    """Accumulation changes who competes with whom, not which rows are in a step nor what each weighs."""
    whole = open_batches(rows)
    parts = open_batches(rows, bins=1, accumulation=2)
    assert parts.steps == whole.steps
    cut = parts.iterate(0, whole.steps)
    for step, one in enumerate(whole.iterate(0, whole.steps)):
        both = [next(cut), next(cut)]
        [part] = micro_batches(one)
        assert torch.equal(torch.cat([micro_batches(half)[0]["tokens"] for half in both]), part["tokens"])
        assert torch.equal(torch.cat([half["weights"] for half in both]), one["weights"])
        for half, own in zip(both, (slice(4), slice(4, 8)), strict=True):
            assert torch.equal(half["roles"], one["roles"][own, own])
        counted, expected = parts.take_facts(step), whole.take_facts(step)
        assert (counted.pairs, counted.tokens, counted.slots) == (expected.pairs, expected.tokens, expected.slots)
        assert counted.digest != expected.digest
        assert parts.row_ids(step) == whole.row_ids(step)
    assert next(cut, None) is None


@pytest.mark.parametrize("padding", list(Padding))
def test_bins_apart_are_the_batch_cut_up(rows: Path, padding: Padding) -> None:
    whole, parts = (open_batches(rows, bins=3, padding=padding, apart=apart) for apart in (False, True))
    for step, (one, other) in enumerate(zip(whole.iterate(0, whole.steps), parts.iterate(0, whole.steps), strict=True)):
        [part], pieces = micro_batches(one), micro_batches(other)
        assert len(pieces) == 3
        for name in ("roles", "weights", "learning_rate"):
            assert torch.equal(one[name], other[name])
        if padding is Padding.PACKED:
            assert torch.equal(torch.cat([piece["tokens"] for piece in pieces]), part["tokens"])
            texts = [text for piece in pieces for text in texts_of(piece, "document")]
            assert texts == texts_of(part, "document")
        else:
            valid = (one["weights"] > 0).reshape(3, 4)
            counts = [sum(len(piece[name]) for name in piece if name.startswith("tokens")) for piece in pieces]
            # Where a bin is empty, there is one made-up text.
            assert counts == [max(1, 2 * count) for count in valid.sum(1).tolist()]
            for tower in ("query", "document"):
                texts = [
                    grouped(piece, tower)[place] for piece, own in zip(pieces, valid, strict=True) for place in places_of(own)
                ]
                assert texts == [grouped(part, tower)[place] for place in places_of(valid.flatten())]
        assert whole.take_facts(step).tokens == parts.take_facts(step).tokens


@pytest.mark.parametrize("padding", [Padding.LONGEST, Padding.NONE])
def test_without_static_shapes_pairs_are_as_long_as_their_longest(rows: Path, padding: Padding) -> None:
    packed, other = open_batches(rows), open_batches(rows, padding=padding)
    for step, (one, two) in enumerate(zip(packed.iterate(0, packed.steps), other.iterate(0, packed.steps), strict=True)):
        [rows_], [groups] = micro_batches(one), micro_batches(two)
        valid = places_of(one["weights"] > 0)
        for tower in ("query", "document"):
            there, found = texts_of(rows_, tower), grouped(groups, tower)
            assert [found[place] for place in valid] == [there[place] for place in valid]
        slots = 0
        for name in [name for name in groups if name.startswith("tokens:")]:
            tokens, mask = groups[name], groups[name.replace("tokens", "mask")]
            assert tokens.shape[1] == int(mask.sum(1).max())
            if padding is Padding.NONE:
                places = groups[name.replace("tokens", "places")]
                assert torch.equal(tokens.flatten()[places], tokens[mask.bool()])
            slots += int(mask.sum()) if padding is Padding.NONE else tokens.numel()
        assert torch.equal(one["roles"], two["roles"])
        facts = other.take_facts(step)
        assert facts.slots == slots
        assert facts.digest == packed.take_facts(step).digest


def test_groups_have_texts_of_similar_lengths() -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(4.2, 0.8, 160), 8, 256).astype(int)
    groups = length_groups(lengths)
    assert np.concatenate(groups).tolist() == sorted(lengths.tolist(), reverse=True)
    assert len(groups) == 6
    # Attention in squares of a group's longest text, against one group of all texts.
    assert sum(len(group) * int(group[0]) ** 2 for group in groups) < 0.4 * len(lengths) * lengths.max() ** 2
    assert [len(group) for group in length_groups(lengths[:9])] == [5, 4]
    assert [len(group) for group in length_groups(lengths[:1])] == [1]
    assert length_groups(lengths[:0]) == []


def test_starting_late_gives_the_same_batches(rows: Path) -> None:
    batches = open_batches(rows)
    everything = list(batches.iterate(0, batches.steps))
    for step, batch in enumerate(batches.iterate(9, batches.steps), start=9):
        assert all(torch.equal(batch[name], everything[step][name]) for name in batch)


def test_fillers_never_count(rows: Path) -> None:
    batches = open_batches(rows)
    filled = [batch for batch in batches.iterate(0, batches.steps) if bool((batch["weights"] == 0).any())]
    assert filled
    for batch in filled:
        fillers = batch["weights"] == 0
        roles = batch["roles"].numpy()
        others = roles[:, fillers.numpy()][~fillers.numpy()]
        assert others.size
        assert (others == DocumentRole.IGNORED).all()
        assert (np.diag(roles) == DocumentRole.POSITIVE).all()


def test_digest_is_that_of_the_global_batch_for_any_number_of_ranks(rows: Path) -> None:
    def digests(folder: Path, rank: int, size: int, bins: int) -> list[str]:
        batches = open_batches(folder, rank, size, bins=bins)
        for _ in batches.iterate(0, batches.steps):
            pass
        return [batches.take_facts(step).digest for step in range(batches.steps)]

    single = digests(rows, 0, 1, 2)
    assert digests(rows, 0, 2, 1) == single
    assert set(digests(rows, 1, 2, 1)) == {""}
    assert len(set(single)) == len(single)


def test_digest_sees_one_other_token(rows: Path, tmp_path: Path) -> None:
    table = read_table(rows / "train.arrow")
    tokens = table["document_tokens"].to_pylist()
    tokens[17][-1] += 1
    place, kind = table.schema.get_field_index("document_tokens"), pa.list_(pa.uint32())
    table = table.set_column(place, "document_tokens", pa.array(tokens, kind))
    with pa.ipc.new_file(str(tmp_path / "train.arrow"), table.schema) as writer:
        writer.write_table(table)
    differ = []
    for folder in (rows, tmp_path):
        batches = open_batches(folder)
        for _ in batches.iterate(0, batches.steps):
            pass
        differ.append([batches.take_facts(step).digest for step in range(batches.steps)])
    # Once an epoch.
    assert sum(one != other for one, other in zip(*differ, strict=True)) == 2
