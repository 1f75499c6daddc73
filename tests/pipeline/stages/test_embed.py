"""embed: children that share the parts, take up where they stopped, and give what sentence-transformers gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load, save

from pipeline.contract import Stage, StageResult
from pipeline.data.ids import IdDigest
from pipeline.data.parts import PartRecord, read_part
from pipeline.errors import BadData
from pipeline.plan import World as PlannedWorld
from pipeline.runtime import store
from pipeline.stages import embed


@pytest.fixture(params=["local", "s3"])
def root(request: pytest.FixtureRequest) -> str | None:
    return None if request.param == "local" else request.getfixturevalue("s3_root")


def run_child(run: Any, child: int) -> Any:
    return embed.run(run.context(Stage.EMBED, child))


def embeddings(run: Any, folder: Path) -> dict[str, np.ndarray]:
    """All parts in their order: id -> embedding."""
    count = len(run.plan.embed.parts)
    found: dict[str, np.ndarray] = {}
    for index in range(count):
        path = store.local_file(run.paths.part(index, count), folder)
        for ids, vectors in read_part(path):
            found.update(zip(ids, vectors, strict=True))
    return found


def record(run: Any, index: int) -> PartRecord:
    return PartRecord.from_json(store.read_bytes(run.paths.part_manifest(index, len(run.plan.embed.parts))))


def test_children_share_the_parts_and_the_last_one_speaks(plan_run: Any, root: str | None, tmp_path: Path) -> None:
    run = plan_run(root)
    assert len(run.plan.embed.parts) == 4
    assert run_child(run, 0) is None
    present = {info.uri.rsplit("/", 1)[-1] for info in store.list_objects(run.paths.stage(Stage.EMBED))}
    assert present == {f"part-{index:05d}-of-00004.{kind}" for index in (0, 2) for kind in ("parquet", "json")}
    output = run_child(run, 1)
    assert output is not None
    metrics = output.metrics
    assert (metrics["documents"], metrics["parts"], metrics["dimension"], metrics["dtype"]) == (100, 4, 32, "float32")
    assert 0 <= metrics["padding"] < 1
    assert metrics["documents_per_second"] == pytest.approx(100 / metrics["seconds"])
    found = embeddings(run, tmp_path / "parts")
    assert list(found) == [identifier for identifier, _ in run.texts]
    assert np.allclose([np.linalg.norm(vector) for vector in found.values()], 1.0, atol=1e-5)


def test_records_describe_their_parts(plan_run: Any) -> None:
    run = plan_run(children=1)
    output = run_child(run, 0)
    total = IdDigest()
    for index, part in enumerate(run.plan.embed.parts):
        uri = run.paths.part(index, len(run.plan.embed.parts))
        found = record(run, index)
        assert (found.sha256, found.size) == (store.sha256(uri), store.stat(uri).size)
        assert (found.rows, found.fingerprint, found.model) == (part.rows, run.plan.fingerprint, output.inputs["model"].sha256)
        assert found.tokens <= found.padded_tokens
        total.merge(IdDigest.parse(found.ids))
    assert str(total) == run.plan.embed.ids


@pytest.mark.parametrize("head", [None, 48])
def test_equals_sentence_transformers(plan_run: Any, head: int | None, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    run = plan_run(children=1, head=head)
    run_child(run, 0)
    model = SentenceTransformer(run.paths.model, device="cpu")
    model.max_seq_length = max(run.plan.config.embed.buckets)
    expected = model.encode([text for _, text in run.texts], normalize_embeddings=False)
    found = np.stack(list(embeddings(run, tmp_path / "parts").values()))
    cosine = (found * expected).sum(axis=1) / np.linalg.norm(expected, axis=1)
    assert cosine.min() > 0.9999
    # Neither by chance: other texts, and with a head the model without it, are far away.
    assert abs(found @ expected.T - np.eye(100)).max() > 0.1
    assert np.corrcoef(found[0], expected[1])[0, 1] < 0.99


def test_float16(plan_run: Any, tmp_path: Path) -> None:
    run = plan_run(children=1, settings={"embed": {"dtype": "float16"}})
    assert run_child(run, 0).metrics["dtype"] == "float16"
    assert {vector.dtype for vector in embeddings(run, tmp_path / "parts").values()} == {np.dtype("float16")}


def test_windows_keep_the_order_and_change_nothing(plan_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = plan_run(children=1)
    run_child(run, 0)
    whole = embeddings(run, tmp_path / "whole")
    store.delete_folder(run.paths.stage(Stage.EMBED))
    monkeypatch.setattr(embed, "WINDOW_ROWS", 7)
    run_child(run, 0)
    small = embeddings(run, tmp_path / "small")
    assert list(small) == list(whole)
    assert np.allclose(np.stack(list(small.values())), np.stack(list(whole.values())), atol=1e-5)


def test_interrupted_child_loses_only_the_part_it_was_in(plan_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = plan_run(children=1)
    calls = 0
    encode = embed.encode

    def interrupted(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return encode(*arguments, **options)

    monkeypatch.setattr(embed, "encode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_child(run, 0)
    before = [record(run, index) for index in (0, 1)]
    assert not store.exists(run.paths.part_manifest(2, 4))
    output = run_child(run, 0)
    assert output.metrics["documents"] == 100
    assert calls == 5  # parts 2 and 3, once each
    assert [record(run, index) for index in (0, 1)] == before


def test_complete_parts_cost_nothing(plan_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = plan_run(children=1)
    first = run_child(run, 0)
    monkeypatch.setattr(embed, "load_encoder", lambda *_: pytest.fail("loaded the model for nothing"))
    assert run_child(run, 0).metrics == first.metrics


@pytest.mark.parametrize("damage", ["torn", "flipped", "gone", "no record", "broken record", "other model"])
def test_damaged_part_is_done_again(plan_run: Any, damage: str) -> None:
    run = plan_run(children=1)
    run_child(run, 0)
    others = [record(run, index) for index in (0, 2, 3)]
    good = record(run, 1)
    uri, record_uri = run.paths.part(1, 4), run.paths.part_manifest(1, 4)
    data = store.read_bytes(uri)
    if damage == "torn":
        store.write_bytes(uri, data[:-100])
    elif damage == "flipped":
        store.write_bytes(uri, data[:200] + bytes([data[200] ^ 1]) + data[201:])
    elif damage == "gone":
        store.delete(uri)
    elif damage == "no record":
        store.delete(record_uri)
    elif damage == "broken record":
        store.write_bytes(record_uri, b"{")
    else:
        store.write_json(record_uri, store.read_json(record_uri) | {"model": "0" * 64})
    assert run_child(run, 0) is not None
    again = record(run, 1)
    assert (again.sha256, again.ids, again.model) == (good.sha256, good.ids, good.model)
    assert again.started > good.started
    assert store.sha256(uri) == again.sha256
    assert [record(run, index) for index in (0, 2, 3)] == others


def test_changed_shard_is_bad_data(plan_run: Any) -> None:
    run = plan_run(children=1)
    uri = run.plan.embed.shards[0].uri
    store.write_bytes(uri, store.read_bytes(uri).replace(b"doc-0001", b"doc-00001"))
    with pytest.raises(BadData, match="changed"):
        run_child(run, 0)


def test_not_a_number_is_bad_data(plan_run: Any) -> None:
    run = plan_run(children=1)
    uri = store.join(run.paths.model, "model.safetensors")
    tensors = load(store.read_bytes(uri))
    tensors["embeddings.LayerNorm.weight"].fill_(3e38)  # finite, but what is computed with it is not
    store.write_bytes(uri, save(tensors, metadata={"format": "pt"}))
    with pytest.raises(BadData, match="not finite") as refusal:
        run_child(run, 0)
    assert refusal.value.value[0] == "doc-0000"
    assert not store.exists(run.paths.part(0, 4))


def test_ahead_hands_over_errors_and_order() -> None:
    def items() -> Any:
        yield from (1, 2, 3)
        raise BadData("no more")

    coming = embed.ahead(items())
    assert [next(coming), next(coming), next(coming)] == [1, 2, 3]
    with pytest.raises(BadData, match="no more"):
        next(coming)


def test_ranks_of_one_child_share_its_parts(plan_run: Any, tmp_path: Path) -> None:
    run = plan_run(children=1)
    run.replan(world=PlannedWorld(kind="cpu", precision="fp32", nodes=1, ranks_per_node=2))
    command = [sys.executable, "-m", "pipeline.cli", "stage", "embed", "--run", run.paths.root]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    for rank in range(2):
        assert f"[node 0 rank {rank}] embed: child 0 of 1: 2 of its 2 parts are to do" in result.stderr
    assert StageResult.from_json(store.read_bytes(run.paths.result(Stage.EMBED))).metrics["documents"] == 100
    assert list(embeddings(run, tmp_path / "parts")) == [identifier for identifier, _ in run.texts]
