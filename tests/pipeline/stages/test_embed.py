"""embed: children that share the parts and take up where they stopped. test_model_folder compares their vectors."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load, save

from pipeline import store
from pipeline.contract import Stage, StageResult
from pipeline.dataset.ids import IdDigest, id_hash, id_hashes
from pipeline.dataset.parts import PartRecord, PartWriter, QuarantinedDocument, quarantine_from_json, read_part
from pipeline.errors import BadData, ExitCode, MissingInput, Transient
from pipeline.plan import own_parts
from pipeline.run_inputs import PlannedWorld
from pipeline.stages import embed, evaluate, publish
from tests.pipeline.conftest import Text, make_texts
from tests.tiny import WORDS


@pytest.fixture(params=["local", "s3"])
def root(request: pytest.FixtureRequest) -> str | None:
    return None if request.param == "local" else request.getfixturevalue("s3_root")


def run_child(run: Any, child: int) -> Any:
    return embed.run(run.context(Stage.EMBED, child))


def in_order(texts: list[Text]) -> list[str]:
    """Ids as the parts have them."""
    return sorted((identifier for identifier, _ in texts), key=id_hash)


def place(run: Any, identifier: str) -> tuple[int, int]:
    """The part of a document, and its place in it."""
    index = id_hash(identifier) * len(run.plan.embed.parts) >> 64
    return index, in_order(run.texts).index(identifier) - sum(part.rows for part in run.plan.embed.parts[:index])


def embeddings(run: Any, folder: Path) -> dict[str, np.ndarray]:
    """All parts in their order: id -> embedding."""
    count = len(run.plan.embed.parts)
    found: dict[str, np.ndarray] = {}
    for index in range(count):
        path = store.local_file(run.paths.part(index, count), folder)
        for ids, vectors, _ in read_part(path):
            found.update(zip(ids, vectors, strict=True))
    return found


def quarantine(run: Any, index: int) -> list[QuarantinedDocument]:
    return quarantine_from_json(store.read_bytes(run.paths.part_quarantine(index, len(run.plan.embed.parts))))


def record(run: Any, index: int) -> PartRecord:
    return PartRecord.from_json(store.read_bytes(run.paths.part_manifest(index, len(run.plan.embed.parts))))


def test_children_share_the_parts_and_the_last_one_speaks(
    plan_run: Any, root: str | None, tmp_path: Path, cloudwatch: Any
) -> None:
    run = plan_run(root)
    assert len(run.plan.embed.parts) == 4
    assert run_child(run, 0) is None
    present = {info.uri.rsplit("/", 1)[-1] for info in store.list_objects(run.paths.stage(Stage.EMBED))}
    assert present == {f"part-{index:05d}-of-00004.{kind}" for index in (0, 1) for kind in ("parquet", "json")}
    output = run_child(run, 1)
    assert output is not None
    metrics = output.metrics
    assert (metrics["documents"], metrics["parts"], metrics["dimension"], metrics["dtype"]) == (100, 4, 32, "float32")
    assert 0 <= metrics["padding"] < 1
    assert metrics["documents_per_second"] == pytest.approx(100 / metrics["seconds"])
    [told] = cloudwatch()
    assert (told["DocumentsPerSecond"], told["QuarantinedDocuments"]) == (metrics["documents_per_second"], 0)
    found = embeddings(run, tmp_path / "parts")
    assert list(found) == in_order(run.texts)
    assert np.allclose([np.linalg.norm(vector) for vector in found.values()], 1.0, atol=1e-5)


def test_a_part_reads_only_its_documents(plan_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = plan_run(texts=make_texts(4096), shard_rows=4096, part_rows=1024, children=1)
    read_range = store.read_range
    taken: dict[str, int] = {}

    def counting(uri: str, start: int, stop: int) -> bytes:
        taken[uri] = taken.get(uri, 0) + stop - start
        return read_range(uri, start, stop)

    monkeypatch.setattr(store, "read_range", counting)
    next(embed.documents_of(run.context(Stage.EMBED), [1]))
    whole = {uri: store.stat(uri).size for uri in taken}
    assert sorted(uri.rsplit("/", 1)[-1] for uri in taken) == ["facts-00000.arrow", "tokens-00000.arrow"]
    # A quarter of sixteen batches, and those that it shares with the parts beside it.
    assert all(taken[uri] < 0.45 * whole[uri] for uri in taken)


@pytest.mark.parametrize(("parts", "ranks"), [(1, 1), (7, 3), (64, 10), (3, 8), (100, 1)])
def test_every_part_is_one_ranks_and_ranks_have_as_many(parts: int, ranks: int) -> None:
    own = [own_parts(parts, ranks, rank) for rank in range(ranks)]
    assert [part for indices in own for part in indices] == list(range(parts))
    assert max(map(len, own)) - min(map(len, own)) <= 1


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
        total = IdDigest.joined([total, IdDigest.parse(found.ids)])
    assert str(total) == run.plan.embed.ids


def test_a_part_may_have_no_document(plan_run: Any, tmp_path: Path) -> None:
    run = plan_run(texts=make_texts(40), part_rows=2, children=1)
    assert 0 in [part.rows for part in run.plan.embed.parts]
    run.finish(Stage.EVALUATE, evaluate.run(run.context(Stage.EVALUATE)))
    run.finish(Stage.EMBED, embed.run(run.context(Stage.EMBED)))
    assert publish.run(run.context(Stage.PUBLISH)).metrics["documents"] == 40
    assert sorted(embeddings(run, tmp_path)) == sorted(identifier for identifier, _ in run.texts)


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


def test_other_documents_than_planned_are_bad_data(plan_run: Any) -> None:
    run = plan_run(children=1)
    run.replan(embed=run.plan.embed.model_copy(update={"shards": run.plan.embed.shards[1:]}))
    with pytest.raises(BadData, match="changed") as refusal:
        run_child(run, 0)
    assert str(refusal.value.value).startswith("part 0: ids ")
    assert store.list_objects(run.paths.stage(Stage.EMBED)) == []


def test_not_a_number_is_bad_data(plan_run: Any) -> None:
    run = plan_run(children=1)
    uri = store.join(run.paths.model, "model.safetensors")
    tensors = load(store.read_bytes(uri))
    tensors["embeddings.LayerNorm.weight"].fill_(3e38)  # finite, but what is computed with it is not
    store.write_bytes(uri, save(tensors, metadata={"format": "pt"}))
    with pytest.raises(BadData, match="not finite") as refusal:
        run_child(run, 0)
    assert refusal.value.value[0] == f"{in_order(run.texts)[0]}: its embedding is not finite in float32"
    assert not store.exists(run.paths.part(0, 4))
    assert len(quarantine(run, 0)) == run.plan.embed.parts[0].rows


def test_ahead_hands_over_errors_and_order() -> None:
    def items() -> Any:
        yield from (1, 2, 3)
        raise BadData("no more")

    coming = embed.ahead(items(), 1)
    assert [next(coming), next(coming), next(coming)] == [1, 2, 3]
    with pytest.raises(BadData, match="no more"):
        next(coming)


def test_ranks_of_one_child_share_its_parts(plan_run: Any, tmp_path: Path) -> None:
    run = plan_run(children=1)
    run.replan(world=PlannedWorld(kind="cpu", precision="fp32", nodes=1, ranks_per_node=2))
    command = [sys.executable, "-m", "pipeline.cli", "stage", "embed", "--run", run.paths.root]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stderr
    for rank in range(2):
        assert f"node 0 rank {rank}] embed: child 0 of 1: 2 of its 2 parts are to do" in result.stderr
    assert StageResult.from_json(store.read_bytes(run.paths.result(Stage.EMBED))).metrics["documents"] == 100
    assert list(embeddings(run, tmp_path / "parts")) == in_order(run.texts)


# ---- documents that cannot be embedded -------------------------------------------------------------------------------

POISON = WORDS[-1]
LENIENT = {"embed": {"max_bad_fraction": 0.03}}


def texts_with(poisoned: dict[int, str]) -> list[tuple[str, str]]:
    """A hundred documents; those named have another text, and no other has the poisonous word in it."""
    texts = [(identifier, text.replace(POISON, WORDS[0])) for identifier, text in make_texts(100)]
    return [(identifier, poisoned.get(row, text)) for row, (identifier, text) in enumerate(texts)]


def poison(run: Any) -> None:
    """Make the model's embedding of one word such that no text with it in it has a finite embedding."""
    uri = store.join(run.paths.model, "model.safetensors")
    tensors = load(store.read_bytes(uri))
    row = 5 + WORDS.index(POISON)  # behind the special tokens
    # Finite, as weights must be; their differences are not.
    tensors["embeddings.word_embeddings.weight"][row, 0::2] = 3.4e38
    tensors["embeddings.word_embeddings.weight"][row, 1::2] = -3.4e38
    store.write_bytes(uri, save(tensors, metadata={"format": "pt"}))


def test_a_poisonous_document_is_quarantined_and_its_neighbours_are_not(plan_run: Any, tmp_path: Path) -> None:
    texts = texts_with({7: f"{WORDS[3]} {POISON}", 45: POISON})
    clean = plan_run(texts=texts, children=1, run="clean", settings=LENIENT)
    run_child(clean, 0)
    expected = embeddings(clean, tmp_path / "clean")
    run = plan_run(texts=texts, children=1, settings=LENIENT)
    poison(run)
    metrics = run_child(run, 0).metrics
    assert (metrics["documents"], metrics["quarantined"]) == (98, 2)
    found = embeddings(run, tmp_path / "parts")
    bad = ("doc-0007", "doc-0045")
    assert list(found) == [identifier for identifier in in_order(texts) if identifier not in bad]
    assert all(np.array_equal(vector, expected[identifier]) for identifier, vector in found.items())
    places = dict(place(run, identifier) for identifier in bad)
    assert len(places) == 2
    for identifier, (index, row) in zip(bad, (place(run, identifier) for identifier in bad), strict=True):
        assert quarantine(run, index) == [QuarantinedDocument(row, identifier, "its embedding is not finite in float32")]
    for index, part in enumerate(run.plan.embed.parts):
        assert store.exists(run.paths.part_quarantine(index, 4)) == (index in places)
        assert record(run, index).quarantined == (index in places)
        assert record(run, index).rows == part.rows - (index in places)
    # Complete as they are: nothing is done again.
    before = [record(run, index) for index in range(4)]
    run_child(run, 0)
    assert [record(run, index) for index in range(4)] == before


def test_a_document_without_tokens_is_quarantined(plan_run: Any, tmp_path: Path) -> None:
    run = plan_run(children=1, settings=LENIENT, without_tokens=("doc-0007", "doc-0045"))
    assert run_child(run, 0).metrics["quarantined"] == 2
    found = embeddings(run, tmp_path / "parts")
    assert list(found) == [identifier for identifier in in_order(run.texts) if identifier not in ("doc-0007", "doc-0045")]
    index, row = place(run, "doc-0045")
    assert quarantine(run, index) == [QuarantinedDocument(row, "doc-0045", "the tokenizer cannot take its text")]


def test_more_poisonous_documents_than_allowed_end_with_65(plan_run: Any) -> None:
    """No part has too many by itself; all of them together do."""
    run = plan_run(texts=texts_with(dict.fromkeys((1, 31, 61, 91), POISON)), children=1, settings=LENIENT)
    bad = sorted({place(run, f"doc-00{number}")[0] for number in ("01", "31", "61", "91")})
    assert len(bad) > 1
    poison(run)
    with pytest.raises(BadData, match="4 of 100") as caught:
        run_child(run, 0)
    assert caught.value.exit_code == ExitCode.BAD_DATA
    assert caught.value.rule == "embed.max_bad_fraction = 0.03"
    assert caught.value.value == [run.paths.part_quarantine(index, 4) for index in bad]


@pytest.mark.parametrize("damage", ["gone", "changed"])
def test_a_part_without_its_list_is_done_again(plan_run: Any, damage: str) -> None:
    run = plan_run(texts=texts_with({7: POISON}), children=1, settings=LENIENT)
    poison(run)
    run_child(run, 0)
    uri = run.paths.part_quarantine(place(run, "doc-0007")[0], 4)
    whole = store.read_bytes(uri)
    if damage == "gone":
        store.delete(uri)
    else:
        store.write_bytes(uri, whole.replace(b"doc-0007", b"doc-0008"))
    run_child(run, 0)
    assert store.read_bytes(uri) == whole


def publishable(plan_run: Any) -> Any:
    run = plan_run(texts=texts_with({7: POISON, 45: POISON}), children=1, settings=LENIENT)
    run.finish(Stage.EVALUATE, evaluate.run(run.context(Stage.EVALUATE)))
    # The judged model: poisoned before it is evaluated, it would embed no query of those documents.
    result = store.read_json(run.paths.result(Stage.EVALUATE))
    poison(run)
    result["inputs"]["model"]["sha256"] = store.sha256(store.join(run.paths.model, "model.safetensors"))
    store.write_json(run.paths.result(Stage.EVALUATE), result)
    run.finish(Stage.EMBED, embed.run(run.context(Stage.EMBED)))
    return run


def test_publish_proves_that_embedded_and_quarantined_are_the_corpus(plan_run: Any) -> None:
    run = publishable(plan_run)
    output = publish.run(run.context(Stage.PUBLISH))
    assert (output.metrics["documents"], output.metrics["quarantined"]) == (98, 2)
    manifest = store.read_json(run.paths.embed_manifest)
    assert manifest["rows"] == 98
    assert manifest["ids"].startswith("98:")
    bad = sorted(place(run, identifier)[0] for identifier in ("doc-0007", "doc-0045"))
    assert manifest["quarantined"] == {"documents": 2, "lists": [run.paths.part_quarantine(index, 4) for index in bad]}
    assert [part["quarantined"] for part in manifest["parts"]] == [int(index in bad) for index in range(4)]


@pytest.mark.parametrize("damage", ["gone", "changed", "forged"])
def test_publish_refuses_a_list_that_is_not_the_records(plan_run: Any, damage: str) -> None:
    run = publishable(plan_run)
    index, _ = place(run, "doc-0007")
    uri = run.paths.part_quarantine(index, 4)
    if damage == "gone":
        store.delete(uri)
    else:
        forged = store.read_bytes(uri).replace(b"doc-0007", b"doc-0008")
        store.write_bytes(uri, forged)
    if damage == "forged":
        # A list and a record that fit each other, of a document that has an embedding.
        digest = IdDigest.of(id_hashes(["doc-0008"]))
        changed = {"quarantined_ids": str(digest), "quarantine_sha256": store.sha256(uri)}
        manifest = run.paths.part_manifest(index, 4)
        store.write_json(manifest, store.read_json(manifest) | changed)
    with pytest.raises((BadData, MissingInput)) as caught:
        publish.run(run.context(Stage.PUBLISH))
    if damage == "changed":
        assert "list of quarantined documents" in caught.value.what
    if damage == "forged":
        assert "missing: doc-0007" in caught.value.value
    assert not store.exists(run.paths.embed_manifest)


def test_texts_of_hits_are_found_behind_documents_without_an_embedding(plan_run: Any, tmp_path: Path) -> None:
    from pipeline.commands.search import open_search

    run = publishable(plan_run)
    publish.run(run.context(Stage.PUBLISH))
    hits = open_search(state=tmp_path)("baba keke", 98)
    assert len(hits) == 98
    assert all(dict(run.texts)[hit.id] == hit.text for hit in hits)


def test_progress_counts_tokens_as_the_longest_texts_go_first(plan_run: Any, heartbeats: Any) -> None:
    run = plan_run(children=1, part_rows=50)
    context = run.context(Stage.EMBED)
    found = heartbeats(context)
    output = embed.run(context)
    beats = [beat for beat in found if beat["note"] == "embedding"]
    assert [beat["work"] for beat in beats] == sorted(beat["work"] for beat in beats)
    assert beats[-1]["done"] == beats[-1]["total"] == 100
    assert beats[-1]["work"] == beats[-1]["total_work"] == output.metrics["tokens"]
    # The first window knows its own texts and takes them for the mean of all.
    rows = run.plan.embed.parts[0].rows
    first = [beat for beat in beats if beat["done"] <= rows]
    assert first[-1]["work"] == pytest.approx(first[-1]["total_work"] * rows / 100)
    assert first[0]["work"] / first[0]["total_work"] > first[0]["done"] / 100


# ---- the same child, more than once ----------------------------------------------------------------------------------


def write_other_part(run: Any, index: int, folder: Path) -> None:
    """What another process of the same child does, on a host that rounds differently: part, then record."""
    ids = [identifier for identifier in in_order(run.texts) if place(run, identifier)[0] == index]
    path = folder / "other.parquet"
    with PartWriter(path, 32, "float32") as writer:
        writer.write(ids, np.full((len(ids), 32), 0.5, np.float32))
    store.upload(path, run.paths.part(index, len(run.plan.embed.parts)))


def test_the_file_of_one_never_stays_with_the_record_of_the_other(
    plan_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = plan_run(children=1)
    write_bytes = store.write_bytes
    between: list[str] = []

    def interrupted(uri: str, data: bytes, **condition: Any) -> str:
        if uri == run.paths.part_manifest(0, 4) and not between:
            between.append(uri)
            write_other_part(run, 0, tmp_path)
        return write_bytes(uri, data, **condition)

    monkeypatch.setattr(store, "write_bytes", interrupted)
    run_child(run, 0)
    assert between
    assert record(run, 0).sha256 == store.sha256(run.paths.part(0, 4))
    assert list(embeddings(run, tmp_path / "parts")) == in_order(run.texts)


def test_one_that_always_comes_between_is_transient(plan_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = plan_run(children=1)
    write_bytes = store.write_bytes

    def interrupted(uri: str, data: bytes, **condition: Any) -> str:
        if uri == run.paths.part_manifest(0, 4):
            write_other_part(run, 0, tmp_path)
        return write_bytes(uri, data, **condition)

    monkeypatch.setattr(store, "write_bytes", interrupted)
    with pytest.raises(Transient, match="same part"):
        run_child(run, 0)


@pytest.mark.long
def test_a_child_that_runs_twice_and_is_killed_gives_every_id_once(plan_run: Any, s3_root: str, tmp_path: Path) -> None:
    run = plan_run(s3_root, texts=make_texts(400), part_rows=5, children=1)
    run.finish(Stage.EVALUATE, evaluate.run(run.context(Stage.EVALUATE)))
    count = len(run.plan.embed.parts)
    command = [sys.executable, "-m", "pipeline.stages.rank", "embed", run.paths.root]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def wait_for(parts: int) -> None:
        deadline = time.monotonic() + 120
        while sum(store.exists(run.paths.part_manifest(index, count)) for index in range(count)) < parts:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    both = [start(), start()]
    try:
        wait_for(3)
        both[0].kill()
        both[0].wait()
        both[0] = start()  # its next attempt, beside the other one
        codes = [process.wait(timeout=900) for process in both]
    finally:
        for process in both:
            process.kill()
            process.wait()
    assert set(codes) <= {ExitCode.DONE, ExitCode.TRANSIENT}
    assert ExitCode.DONE in codes
    for index in range(count):
        assert record(run, index).sha256 == store.sha256(run.paths.part(index, count))
    output = publish.run(run.context(Stage.PUBLISH))
    assert output.metrics["documents"] == 400
    assert sorted(embeddings(run, tmp_path / "parts")) == [identifier for identifier, _ in run.texts]
