"""The row files: batches of many rows however they come, the smallest integers, and lengths without the tokens."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from pipeline.config import build_config
from pipeline.dataset import row_files
from pipeline.dataset.row_files import SCHEMAS, Lengths, PairLengths, RowWriter, read_table


def test_a_tasks_length_that_is_everyones_is_no_other_hold_out() -> None:
    tasks = {name: {"query_length": length} for name, length in (("same", 12), ("own", 20))}
    made = [
        Lengths.of(
            build_config({"train": {"query_length": 12, "batch_by": "task", "tasks": {name: tasks[name] for name in names}}})
        )
        for names in ((), ("same",), ("same", "own"))
    ]
    assert made[0] == made[1] != made[2]
    rows = pa.table({"task": ["own", "same", None]})
    assert np.asarray(made[2].of_column("query_tokens", rows)).tolist() == [20, 12, 12]
    assert made[2].within(15).queries_of == {"own": 15}


def candidates(first: int, count: int) -> pa.Table:
    numbers = range(first, first + count)
    return pa.table(
        {
            "more": list(numbers),
            "id": [str(number) for number in numbers],
            "document_hash": pa.array(numbers, pa.uint64()),
            "document_tokens": [list(range(number % 5)) for number in numbers],
        }
    )


def test_rows_come_in_any_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "WRITTEN_ROWS", 100)
    with RowWriter(tmp_path, 1 << 16, ["candidates.arrow"]) as writer:
        for start in range(0, 230, 23):
            writer.add("candidates.arrow", candidates(start, 23))
    assert writer.rows == {"candidates.arrow": 230}
    table = read_table(tmp_path / "candidates.arrow")
    assert table.schema == SCHEMAS["candidates.arrow"]
    assert table.to_pylist() == candidates(0, 230).select(table.schema.names).to_pylist()
    assert [len(chunk) for chunk in table["id"].chunks] == [100, 15, 100, 15]
    assert pc.list_value_length(table["document_tokens"]).to_pylist() == [number % 5 for number in range(230)]


def test_a_large_vocabulary_takes_larger_integers(tmp_path: Path) -> None:
    with RowWriter(tmp_path / "new", (1 << 16) + 1, ["candidates.arrow", "train.arrow"]) as writer:
        writer.add("candidates.arrow", candidates(0, 3))
    assert read_table(tmp_path / "new" / "candidates.arrow").schema.field("document_tokens").type.value_type == pa.uint32()
    assert read_table(tmp_path / "new" / "train.arrow").num_rows == 0
    assert list(PairLengths(tmp_path / "new" / "train.arrow")) == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_lengths_of_many_rows_take_the_memory_of_few(tmp_path: Path) -> None:
    kind, offsets = pa.list_(pa.uint16()), pa.array(np.arange((1 << 16) + 1, dtype=np.int32))
    texts = pa.ListArray.from_arrays(offsets, pa.array(np.zeros(1 << 16, np.uint16)))
    batch = pa.record_batch([texts, texts], schema=pa.schema([("query_tokens", kind), ("document_tokens", kind)]))
    with pa.ipc.new_file(str(tmp_path / "train.arrow"), batch.schema) as writer:
        for _ in range(40):
            writer.write_batch(batch)

    def resident() -> int:
        status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
        return int(status["RssFile"].split()[0])  # pages of files, in KiB

    before, most = resident(), 0
    for piece in PairLengths(tmp_path / "train.arrow"):
        assert (piece == 1).all()
        most = max(most, resident() - before)
    # All offsets are 20 MiB.
    assert most < 4 << 10
