"""The evaluation inside training: which queries it takes, and its numbers."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from pipeline.backends.device import open_device
from pipeline.config import EmbedConfig
from pipeline.dataset.row_files import SCHEMAS
from pipeline.evaluation.holdout import read_holdout
from pipeline.evaluation.query_values import QueryValues
from pipeline.evaluation.retrieval import retrieve
from pipeline.evaluation.retrieval_metrics import DEPTH
from pipeline.evaluation.validation import GATHER_ROWS, validate
from pipeline.run.world import World
from tests.gangs import on_xla, run_gang
from tests.tiny import make_model


def write(folder: Path, holdout: list[tuple[int, int, float, str | None]], candidates: list[int]) -> Path:
    """Rows (query, document, label, locale), hashes for texts; the tokens of a text are its hash, twice for a document."""
    folder.mkdir(exist_ok=True)
    tables = {
        "holdout.arrow": {
            "id": [str(index) for index in range(len(holdout))],
            "query_tokens": [[query] for query, *_ in holdout],
            "query_hash": [query for query, *_ in holdout],
            "document_hash": [document for _, document, *_ in holdout],
            "label": [label for _, _, label, _ in holdout],
            "locale": [locale for *_, locale in holdout],
            "task": [None] * len(holdout),
            "key": [document for _, document, *_ in holdout],
            "new": [False] * len(holdout),
        },
        "candidates.arrow": {
            "document_tokens": [[value, value] for value in candidates],
            "document_hash": candidates,
            "id": [str(value) for value in candidates],
        },
        "known.arrow": {name: [] for name in SCHEMAS["known.arrow"].names},
    }
    for name, columns in tables.items():
        with pa.ipc.new_file(str(folder / name), SCHEMAS[name]) as writer:
            writer.write_table(pa.table(columns, schema=SCHEMAS[name]))
    return folder


def test_equals_evaluation_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(query, 50 + query % 7, 1.0, None) for query in range(10, 40)]
    data = read_holdout(write(tmp_path / "rows", rows, list(range(50, 57))), most=30)
    encoder = make_model(tmp_path / "model")
    device = open_device("cpu", "fp32", World(), threads=1)
    monkeypatch.setattr(device, "gather", lambda _: pytest.fail("one rank has no peer to share with"))
    found = validate(encoder, device, data, EmbedConfig(length=8, tokens_per_batch=24), lambda *_: None)
    assert found is not None
    with torch.no_grad():
        queries, candidates = (
            encoder(tokens, torch.ones_like(tokens))
            for tokens in (torch.tensor([text.tolist() for text in texts]) for texts in (data.queries, data.candidates))
        )
    expected = retrieve(queries, [(np.arange(7), candidates)], data.relevant)
    assert found.queries == data.keys
    for name, values in found.values.items():
        assert values.tolist() == pytest.approx(expected[name].tolist())
    assert found.means() == pytest.approx({name: float(values.mean()) for name, values in expected.items()})
    assert 0 < found.means()["mrr@10"] < 1


RANK_PROGRAM = """
import json, sys
from importlib.util import find_spec
from pathlib import Path
from pipeline.config import EmbedConfig, ModelConfig
from pipeline.model.folder import load_encoder
from pipeline.backends.device import open_device
from pipeline.run.world import World
from pipeline.evaluation.holdout import read_holdout
from pipeline.evaluation.validation import validate

rank, port, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
device = open_device("cpu", "fp32", World(rank=rank, size=2, port=port), threads=1, timeout_seconds=60)
encoder = load_encoder(folder / "model", ModelConfig())
gather, shapes = device.gather, []
device.gather = lambda rows: (shapes.append(list(rows.shape)), gather(rows))[1]
for name in ("one", "many"):
    data = read_holdout(folder / name, most=1000)
    found = validate(encoder, device, data, EmbedConfig(length=8, tokens_per_batch=96), lambda *_: None)
    assert (found is None) == (rank == 1)
    if found is not None:
        found.write(folder / f"{name}.parquet")
(folder / f"shapes-{rank}.json").write_text(json.dumps(shapes))
device.barrier()
device.close()
"""


def test_two_ranks_share_blocks_of_one_shape_whatever_the_data(tmp_path: Path) -> None:
    """One query with one document, and 171 with 130: the odd numbers leave the ranks unequal shares and a last block in part."""
    rows = {
        "one": [(10, 50, 1.0, None)],
        "many": [(10 + query % 90, 10 + query * 7 % 65, 1.0 + query % 2, ("de", "en")[query // 90]) for query in range(171)],
    }
    encoder = make_model(tmp_path / "model")
    for name, found in rows.items():
        write(tmp_path / name, found, sorted({document for _, document, *_ in found}))
    run_gang(RANK_PROGRAM, 2, tmp_path)

    alone = open_device("cpu", "fp32", World(), threads=1)
    for name in rows:
        data = read_holdout(tmp_path / name, most=1000)
        expected = validate(encoder, alone, data, EmbedConfig(length=8, tokens_per_batch=96), lambda *_: None)
        assert expected is not None
        found = QueryValues.read(tmp_path / f"{name}.parquet")
        assert found.queries == expected.queries
        for metric, values in expected.values.items():
            assert found.values[metric].tolist() == pytest.approx(values.tolist())
    # Documents, then rankings of both: two blocks, and one of 33 documents per rank with two of 86 queries.
    for rank in range(2):
        shapes = json.loads((tmp_path / f"shapes-{rank}.json").read_text())
        documents, rankings = [GATHER_ROWS, 32], [GATHER_ROWS, DEPTH]
        assert shapes == [documents, rankings, documents, rankings, rankings]


LAZY_PROGRAM = """
import json, sys
from importlib.util import find_spec
from pathlib import Path
from pipeline.config import EmbedConfig, ModelConfig
from pipeline.model.folder import load_encoder
from pipeline.backends.device import open_device
from pipeline.run.world import World
from pipeline.evaluation.holdout import read_holdout
from pipeline.evaluation.validation import validate

folder = Path(sys.argv[3])
device = open_device("xla", "fp32", World(), threads=1)
encoder = device.place(load_encoder(folder / "model", ModelConfig()))
compiled = []
for name in ("few", "few", "many"):
    data = read_holdout(folder / name, most=1000)
    found = validate(encoder, device, data, EmbedConfig(length=8, tokens_per_batch=96), lambda *_: None)
    found.write(folder / f"{name}.parquet")
    compiled.append(device.graph_counts().compiled)
print(json.dumps({"compiled": compiled}))
"""


@pytest.mark.skipif(find_spec("torch_xla") is None, reason="torch-xla exists for Linux on x86-64 only")
def test_more_data_compiles_nothing_on_a_lazy_device(tmp_path: Path) -> None:
    rows = {
        name: [(10 + query, 10 + query % 65, 1.0, None) for query in range(count)] for name, count in (("few", 5), ("many", 90))
    }
    encoder = make_model(tmp_path / "model")
    for name, found in rows.items():
        write(tmp_path / name, found, sorted({document for _, document, *_ in found}))
    first, again, more = on_xla(LAZY_PROGRAM, tmp_path)["compiled"]
    assert first == again == more > 0
    device = open_device("cpu", "fp32", World(), threads=1)
    for name in rows:
        data = read_holdout(tmp_path / name, most=1000)
        expected = validate(encoder, device, data, EmbedConfig(length=8, tokens_per_batch=96), lambda *_: None)
        assert expected is not None
        found_values = QueryValues.read(tmp_path / f"{name}.parquet").values
        for metric, values in expected.values.items():
            assert found_values[metric].tolist() == pytest.approx(values.tolist())
