"""Batches from memory-mapped rows: every row once, the same global batch for any number of ranks, static shapes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from pipeline.config import build_config
from pipeline.dataset.row_files import DocumentLengths, read_table
from pipeline.dataset.steps import write_orders
from pipeline.model.loss import DocumentRole
from pipeline.run.world import World
from pipeline.training.batches import Padding, TokenColumn, TrainingBatches
from tests.pipeline.training.planned import write_rows
from tests.tiny import make_model


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("batches")
    make_model(folder / "model")
    write_rows(folder / "rows", folder / "model", 8, 32, rows=101, held=5)
    return folder / "rows"


def open_batches(
    folder: Path, rank: int, size: int, batch_size: int, accumulation: int = 1, *, padding: Padding = Padding.STATIC
) -> TrainingBatches:
    """Batches of the rows, whose order is written for this number of rows a step."""
    ordered = folder / str(size * batch_size * accumulation)
    if not ordered.exists():
        ordered.mkdir()
        (ordered / "train.arrow").symlink_to(folder / "train.arrow")
        train = {"batch_size": batch_size, "accumulation": accumulation, "buckets": [16, 32], "epochs": 2}
        lengths = DocumentLengths(folder / "train.arrow")
        write_orders(ordered, lengths, build_config({"seed": 3, "train": train}), size)
    return TrainingBatches(
        ordered,
        World(rank=rank, size=size),
        batch_size=batch_size,
        accumulation=accumulation,
        query_length=8,
        padding=padding,
        learning_rate=lambda step: step / 10,
    )


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


def test_an_epoch_has_every_row_once(rows: Path) -> None:
    batches = open_batches(rows, 0, 1, 8)
    table = read_table(rows / "train.arrow")
    documents = dict(zip((f"0:{line}" for line in table["line"].to_pylist()), table["document_tokens"].to_pylist(), strict=True))
    seen = []
    pairs = tokens = 0
    for step, batch in enumerate(batches.iterate(0, batches.steps_per_epoch)):
        ids = batches.row_ids(step)
        lengths = batch["document_mask"].sum(1).tolist()
        for place, row in enumerate(ids):
            assert batch["document_tokens"][place, : lengths[place]].tolist() == documents[row]
        assert batch["query_tokens"].shape == (8, 8)
        assert batch["document_tokens"].shape in ((8, 16), (8, 32))
        assert batch["learning_rate"].item() == pytest.approx(step / 10)
        assert batch["weights"].sum().item() == pytest.approx(1.0)
        facts = batches.take_facts(step)
        assert facts.pairs == len(ids) == int((batch["weights"] > 0).sum())
        assert facts.slots == 8 * (8 + batch["document_tokens"].shape[1])
        seen += ids
        pairs, tokens = pairs + facts.pairs, tokens + facts.tokens
    assert sorted(seen) == sorted(documents)
    assert pairs == 101
    assert tokens == sum(map(len, documents.values())) + sum(map(len, table["query_tokens"].to_pylist()))


def test_ranks_share_the_global_batch(rows: Path) -> None:
    whole = open_batches(rows, 0, 1, 8)
    halves = [open_batches(rows, rank, 2, 4) for rank in range(2)]
    steps = whole.steps_per_epoch
    assert halves[0].steps_per_epoch == steps
    for one, first, second in zip(whole.iterate(0, steps), *(half.iterate(0, steps) for half in halves), strict=True):
        for name in ("query_tokens", "query_mask", "document_tokens", "document_mask", "roles"):
            assert torch.equal(torch.cat([first[name], second[name]]), one[name]), name
        torch.testing.assert_close(torch.cat([first["weights"], second["weights"]]) / 2, one["weights"])


def test_a_step_of_several_batches_is_the_same_rows_cut_up(rows: Path) -> None:
    """Accumulation changes who competes with whom, not which rows are in a step nor what each weighs."""
    whole = open_batches(rows, 0, 1, 8)
    parts = open_batches(rows, 0, 1, 4, accumulation=2)
    steps = whole.steps_per_epoch
    assert parts.steps_per_epoch == steps
    cut = parts.iterate(0, steps)
    for step, one in enumerate(whole.iterate(0, steps)):
        first, second = next(cut), next(cut)
        for name in ("query_tokens", "query_mask", "document_tokens", "document_mask", "weights"):
            assert torch.equal(torch.cat([first[name], second[name]]), one[name]), name
        assert torch.equal(torch.block_diag(first["roles"], second["roles"])[:4, :4], one["roles"][:4, :4])
        assert first["roles"].shape == (4, 4)
        counted, expected = parts.take_facts(step), whole.take_facts(step)
        assert (counted.pairs, counted.tokens, counted.slots) == (expected.pairs, expected.tokens, expected.slots)
        assert counted.digest != expected.digest
        assert parts.row_ids(step) == whole.row_ids(step)
    assert next(cut, None) is None


@pytest.mark.parametrize("padding", [Padding.LONGEST, Padding.NONE])
def test_without_static_shapes_batches_are_as_long_as_their_longest_rows(rows: Path, padding: Padding) -> None:
    size, accumulation = 2, 2
    padded = [open_batches(rows, rank, size, 4, accumulation) for rank in range(size)]
    cut = [open_batches(rows, rank, size, 4, accumulation, padding=padding) for rank in range(size)]
    steps = cut[0].steps_per_epoch
    streams = [batches.iterate(0, steps) for batches in (*padded, *cut)]
    shorter = 0
    for step in range(steps):
        slots = 0
        for _ in range(accumulation):
            whole, short = [next(stream) for stream in streams[:size]], [next(stream) for stream in streams[size:]]
            for one, other in zip(whole, short, strict=True):
                for name in ("query", "document"):
                    tokens, mask = other[f"{name}_tokens"], other[f"{name}_mask"]
                    length = tokens.shape[1]
                    assert length == max(1, int(one[f"{name}_mask"].sum(1).max()))
                    assert torch.equal(one[f"{name}_tokens"][:, :length], tokens)
                    assert torch.equal(one[f"{name}_mask"][:, :length], mask)
                    shorter += length < one[f"{name}_tokens"].shape[1]
                    if padding is Padding.NONE:
                        places = other[f"{name}_places"]
                        assert torch.equal(tokens.flatten()[places], tokens[mask.bool()])
                        slots += len(places)
                    else:
                        slots += tokens.numel()
                assert torch.equal(one["roles"], other["roles"])
        facts = [batches.take_facts(step) for batches in cut]
        assert {found.slots for found in facts} == {slots}
        assert facts[0].digest == padded[0].take_facts(step).digest
    assert shorter > 0


def test_starting_late_gives_the_same_batches(rows: Path) -> None:
    batches = open_batches(rows, 0, 1, 8)
    stop = 2 * batches.steps_per_epoch
    everything = list(batches.iterate(0, stop))
    for step, batch in enumerate(batches.iterate(9, stop), start=9):
        assert all(torch.equal(batch[name], everything[step][name]) for name in batch)


def test_fillers_never_count(rows: Path) -> None:
    batches = open_batches(rows, 0, 1, 8)
    filled = [batch for batch in batches.iterate(0, batches.steps_per_epoch) if bool((batch["weights"] == 0).any())]
    assert len(filled) == 1
    (batch,) = filled
    fillers = batch["weights"] == 0
    assert bool((batch["document_mask"][fillers].sum(1) == 1).all())
    roles = batch["roles"].numpy()
    others = roles[:, fillers.numpy()][~fillers.numpy()]
    assert others.size
    assert (others == DocumentRole.IGNORED).all()
    assert (np.diag(roles) == DocumentRole.POSITIVE).all()


def test_digest_is_that_of_the_global_batch_for_any_number_of_ranks(rows: Path) -> None:
    def digests(folder: Path, rank: int, size: int, batch_size: int) -> list[str]:
        batches = open_batches(folder, rank, size, batch_size)
        for _ in batches.iterate(0, batches.steps_per_epoch):
            pass
        return [batches.take_facts(step).digest for step in range(batches.steps_per_epoch)]

    single = digests(rows, 0, 1, 8)
    assert digests(rows, 0, 2, 4) == single
    assert set(digests(rows, 1, 2, 4)) == {""}
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
        batches = open_batches(folder, 0, 1, 8)
        for _ in batches.iterate(0, batches.steps_per_epoch):
            pass
        differ.append([batches.take_facts(step).digest for step in range(batches.steps_per_epoch)])
    assert sum(one != other for one, other in zip(*differ, strict=True)) == 1
