"""publish: only what was accepted and is whole goes out, in one write that never overwrites another run's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline import store
from pipeline.contract import Stage, reference_uri, registry_uri
from pipeline.dataset.deletions import Deletions
from pipeline.dataset.ids import IdDigest, id_hash, id_hashes
from pipeline.dataset.parts import PartWriter
from pipeline.dataset.row_files import read_table
from pipeline.dataset.rows import normalized_hash
from pipeline.errors import BadData, Defect, GateRefused, MissingInput, Superseded
from pipeline.evaluation.reference import read_reference, write_reference
from pipeline.plan import DeletionPlan
from pipeline.run.registry import publications
from pipeline.run_inputs import Published
from pipeline.stages import embed, evaluate, publish


@pytest.fixture(params=["local", "s3"])
def root(request: pytest.FixtureRequest) -> str | None:
    return None if request.param == "local" else request.getfixturevalue("s3_root")


def finished(plan_run: Any, root: str | None = None, **options: Any) -> Any:
    """A run that is evaluated and embedded."""
    return finish(plan_run(root, children=1, **options))


def finish(run: Any) -> Any:
    run.finish(Stage.EVALUATE, evaluate.run(run.context(Stage.EVALUATE)))
    run.finish(Stage.EMBED, embed.run(run.context(Stage.EMBED)))
    return run


def run_publish(run: Any) -> Any:
    return publish.run(run.context(Stage.PUBLISH))


def pointer(run: Any, name: str = "current") -> Any:
    return store.read_json(registry_uri(run.paths.bucket_root, name))


def rewrite_part(run: Any, tmp_path: Path, ids: list[str], index: int = 1) -> None:
    """Replace a part by one with other ids, with a record that fits it."""
    path = tmp_path / "rewritten.parquet"
    with PartWriter(path, 32, "float32") as writer:
        writer.write(ids, np.ones((len(ids), 32), np.float32))
    artifact = store.upload(path, run.paths.part(index, 4))
    digest = IdDigest.of(id_hashes(ids))
    uri = run.paths.part_manifest(index, 4)
    store.write_json(uri, store.read_json(uri) | {"sha256": artifact.sha256, "size": artifact.size, "ids": str(digest)})


def test_first_run_publishes(plan_run: Any, root: str | None) -> None:
    run = finished(plan_run, root)
    output = run_publish(run)
    assert output.metrics["published"] is True
    assert output.metrics["documents"] == 100
    found = pointer(run)
    assert found["run"] == "week-01"
    assert found["model"] == run.paths.model
    assert found["embeddings"] == run.paths.embed_manifest
    assert (found["previous"], output.metrics["replaced"]) == (None, None)
    assert found["fingerprint"] == run.plan.fingerprint
    manifest = store.read_json(found["embeddings"])
    assert (manifest["rows"], manifest["dimension"], manifest["dtype"]) == (100, 32, "float32")
    assert manifest["ids"] == run.plan.embed.ids
    assert manifest["model"]["uri"] == run.paths.model
    assert manifest["model"]["sha256"] == found["model_sha256"]
    assert sum(part["rows"] for part in manifest["parts"]) == 100
    for part in manifest["parts"]:
        assert store.sha256(part["uri"]) == part["sha256"]
    assert output.outputs["embeddings"].sha256 == store.sha256(run.paths.embed_manifest)


def test_next_run_replaces_the_pointer_it_was_planned_upon(plan_run: Any, root: str | None) -> None:
    first = finished(plan_run, root)
    run_publish(first)
    # It continues from another model than the one that it replaces.
    published = Published(run="week-01", folder=first.paths.model, sha256="")
    second = finished(plan_run, first.paths.bucket_root, run="week-02", published=published)
    assert second.plan.parent.folder != published.folder
    output = run_publish(second)
    assert (pointer(second)["run"], pointer(second)["previous"]) == ("week-02", "week-01")
    assert output.metrics["replaced"] == "week-01"
    kept = {record["run"]: record["drift"] for record in publications(first.paths.bucket_root, "current")}
    assert (kept["week-01"], kept["week-02"]["cosine"]) == (None, pytest.approx(1))


def test_only_the_model_that_the_gate_compared_with_is_replaced(plan_run: Any, root: str | None) -> None:
    first = finished(plan_run, root)
    run_publish(first)
    published = Published(run="week-01", folder=first.paths.model, sha256="")
    second, third = (finished(plan_run, first.paths.bucket_root, run=run, published=published) for run in ("week-02", "week-03"))
    run_publish(third)
    with pytest.raises(Superseded, match="week-03") as refusal:
        run_publish(second)
    assert refusal.value.exit_code == 68
    assert pointer(first)["run"] == "week-03"


def test_publishing_again_changes_nothing(plan_run: Any, root: str | None) -> None:
    run = finished(plan_run, root)
    run_publish(run)
    before = pointer(run)
    # The answer to the first write was lost: the attempt that follows finds its own pointer.
    assert run_publish(run).metrics["published"] is True
    assert pointer(run) == before


def test_superseded_names_the_other_run(plan_run: Any, root: str | None) -> None:
    first = finished(plan_run, root)
    second = finished(plan_run, first.paths.bucket_root, run="week-02")
    run_publish(second)
    with pytest.raises(Superseded, match="week-02") as refusal:
        run_publish(first)
    assert refusal.value.exit_code == 68
    assert pointer(first)["run"] == "week-02"
    assert store.exists(first.paths.embed_manifest)


def test_pointer_that_was_removed_is_not_written_again(plan_run: Any) -> None:
    earlier = plan_run(run="earlier")
    published = Published(run="earlier", folder=earlier.paths.model, sha256="")
    run = finished(plan_run, published=published)
    with pytest.raises(Superseded, match="removed"):
        run_publish(run)
    assert not store.exists(registry_uri(run.paths.bucket_root, "current"))


def test_registry_null_publishes_nowhere(plan_run: Any) -> None:
    run = finished(plan_run, settings={"registry": None})
    output = run_publish(run)
    assert output.metrics["published"] is False
    assert store.exists(run.paths.embed_manifest)
    assert store.list_objects(store.join(run.paths.bucket_root, "registry")) == []


def test_manifest_is_there_before_the_pointer(plan_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = finished(plan_run)
    written: list[str] = []
    write_bytes = store.write_bytes

    def note(uri: str, data: bytes, **condition: Any) -> str:
        written.append(uri)
        return write_bytes(uri, data, **condition)

    monkeypatch.setattr(store, "write_bytes", note)
    run_publish(run)
    root = run.paths.bucket_root
    [kept] = store.list_objects(store.join(root, "registry", "current"))
    assert written == [run.paths.embed_manifest, registry_uri(root, "current"), kept.uri, reference_uri(root, "current")]


def test_the_first_published_run_becomes_the_reference(plan_run: Any) -> None:
    run = finished(plan_run)
    root = run.paths.bucket_root
    run_publish(run)
    assert read_reference(root, "current") == run.plan.run
    # Later ones leave it, and so does one after it was taken away.
    for kept in ("week-00", None):
        write_reference(root, "current", kept)
        store.delete(registry_uri(root, "current"))
        run_publish(run)
        assert read_reference(root, "current") == kept


def rewrite_embeddings(run: Any, tmp_path: Path, change: Any) -> None:
    """Replace all parts by ones with other embeddings, with records that fit them."""
    for index in range(4):
        uri, path = run.paths.part(index, 4), tmp_path / "rewritten.parquet"
        table = pq.read_table(store.local_file(uri, tmp_path / "parts"))
        vectors = change(np.stack(table["embedding"].to_numpy()))
        with PartWriter(path, 32, "float32") as writer:
            writer.write(table["id"].to_pylist(), vectors, None, table["document_hash"].to_numpy())
        artifact = store.upload(path, uri)
        record = run.paths.part_manifest(index, 4)
        store.write_json(record, store.read_json(record) | {"sha256": artifact.sha256, "size": artifact.size})


def test_what_is_published_is_measured(plan_run: Any, root: str | None, tmp_path: Path) -> None:
    run = finished(plan_run, root)
    assert run_publish(run).metrics["proof"] == {"documents": 100, "difference": pytest.approx(0, abs=1e-6)}
    # Rounded a little, all is well.
    rewrite_embeddings(run, tmp_path, lambda vectors: vectors.astype(np.float16).astype(np.float32))
    store.delete(registry_uri(run.paths.bucket_root, "current"))
    assert abs(run_publish(run).metrics["proof"]["difference"]) < 1e-3


def test_embeddings_next_to_other_ids_are_not_published(plan_run: Any, tmp_path: Path) -> None:
    run = finished(plan_run)
    rewrite_embeddings(run, tmp_path, lambda vectors: np.roll(vectors, 1, axis=0))
    with pytest.raises(Defect, match="not those that evaluate judged") as refusal:
        run_publish(run)
    assert refusal.value.exit_code == 69
    assert unpublished(run)


def test_documents_that_are_not_embedded_keep_their_vectors(plan_run: Any, tmp_path: Path) -> None:
    run = finished(plan_run)
    candidates = read_table(Path(run.paths.rows) / "candidates.arrow")
    other = candidates.set_column(2, "id", pa.array([f"pair-{row}" for row in range(len(candidates))]))
    with pa.ipc.new_file(f"{tmp_path}/candidates.arrow", other.schema) as writer:
        writer.write_table(other)
    store.upload(tmp_path / "candidates.arrow", f"{run.paths.rows}/candidates.arrow")
    assert run_publish(run).metrics["proof"] == {"documents": 0, "difference": pytest.approx(0, abs=1e-6)}


def test_a_text_without_a_vector_is_said(plan_run: Any) -> None:
    run = finished(plan_run)
    kept = np.lib.format.open_memmap(run.paths.vectors, mode="r+")
    kept["key"][3] = b"another"
    kept.flush()
    with pytest.raises(MissingInput, match="has no vector"):
        run_publish(run)


def ids_of(run: Any, index: int) -> list[str]:
    return sorted((key for key, _ in run.texts if id_hash(key) >> 62 == index), key=id_hash)


def unpublished(run: Any) -> bool:
    return not store.exists(run.paths.embed_manifest) and not store.exists(registry_uri(run.paths.bucket_root, "current"))


def test_missing_id_is_named(plan_run: Any, tmp_path: Path) -> None:
    run = finished(plan_run)
    *others, last = ids_of(run, 1)
    rewrite_part(run, tmp_path, [*others, "stranger"])
    with pytest.raises(BadData, match="exactly once") as refusal:
        run_publish(run)
    assert refusal.value.value[1:] == [f"missing: {last}", "of no document of this part: stranger"]
    assert unpublished(run)


def test_repeated_id_is_named(plan_run: Any, tmp_path: Path) -> None:
    run = finished(plan_run)
    first, *others, last = ids_of(run, 1)
    rewrite_part(run, tmp_path, [first, *others, first])
    with pytest.raises(BadData) as refusal:
        run_publish(run)
    count = len(others) + 2
    assert refusal.value.value == [f"part 1: {count} ids, {count} documents", f"missing: {last}", f"repeated: {first}"]
    assert unpublished(run)


def test_an_id_of_another_part_is_refused(plan_run: Any, tmp_path: Path) -> None:
    run = finished(plan_run)
    *others, last = ids_of(run, 1)
    strange = ids_of(run, 0)[0]
    rewrite_part(run, tmp_path, [*others, strange])
    with pytest.raises(BadData) as refusal:
        run_publish(run)
    assert refusal.value.value[1:] == [f"missing: {last}", f"of no document of this part: {strange}"]
    assert unpublished(run)


def test_the_right_ids_in_the_wrong_part_are_refused(plan_run: Any) -> None:
    run = plan_run(children=1)
    first, second, *others = run.plan.embed.parts
    run.replan(embed=run.plan.embed.model_copy(update={"parts": (second, first, *others)}))
    with pytest.raises(BadData, match="exactly once") as refusal:
        publish.check_ids(run.context(Stage.PUBLISH), 0, ids_of(run, 1))
    assert f"of no document of this part: {ids_of(run, 1)[0]}" in refusal.value.value


def test_parts_that_do_not_add_up_to_the_corpus_are_a_defect(plan_run: Any) -> None:
    run = plan_run(children=1)
    run.replan(embed=run.plan.embed.model_copy(update={"ids": str(IdDigest(100, 1))}))
    with pytest.raises(Defect, match="do not add up"):
        run_publish(finish(run))
    assert unpublished(run)


@pytest.mark.parametrize("damage", ["torn", "gone", "no record"])
def test_damaged_part_is_refused(plan_run: Any, damage: str) -> None:
    run = finished(plan_run)
    uri = run.paths.part(2, 4)
    if damage == "torn":
        store.write_bytes(uri, store.read_bytes(uri)[:-10])
    else:
        store.delete(uri if damage == "gone" else run.paths.part_manifest(2, 4))
    with pytest.raises(BadData if damage == "torn" else MissingInput):
        run_publish(run)
    assert unpublished(run)


def test_parts_of_another_model_are_refused(plan_run: Any) -> None:
    run = finished(plan_run)
    uri = run.paths.part_manifest(0, 4)
    store.write_json(uri, store.read_json(uri) | {"model": "0" * 64})
    with pytest.raises(BadData) as refusal:
        run_publish(run)
    assert "model" in refusal.value.value[0]


def test_model_that_was_not_judged_is_refused(plan_run: Any) -> None:
    run = finished(plan_run)
    weights = store.join(run.paths.model, publish.WEIGHTS)
    store.write_bytes(weights, store.read_bytes(weights) + b" ")
    with pytest.raises(GateRefused, match="another model"):
        run_publish(run)
    assert unpublished(run)


def test_verdict_of_another_plan_is_refused(plan_run: Any) -> None:
    run = finished(plan_run)
    uri = run.paths.result(Stage.EVALUATE)
    store.write_json(uri, store.read_json(uri) | {"fingerprint": "0" * 64})
    with pytest.raises(GateRefused) as refusal:
        run_publish(run)
    assert refusal.value.exit_code == 67


def test_refused_verdict_is_refused(plan_run: Any) -> None:
    run = finished(plan_run)
    uri = run.paths.result(Stage.EVALUATE)
    result = store.read_json(uri)
    result["metrics"]["gate"]["verdict"] = "refused"
    store.write_json(uri, result)
    with pytest.raises(GateRefused, match="not accepted"):
        run_publish(run)
    store.delete(uri)
    with pytest.raises(MissingInput):
        run_publish(run)
    assert unpublished(run)


@pytest.mark.parametrize("by", ["id", "hash"])
def test_what_must_not_be_used_is_not_published(plan_run: Any, by: str) -> None:
    run = plan_run(children=1)
    identifier, text = run.texts[7]
    named = Deletions((identifier,)) if by == "id" else Deletions((), (normalized_hash(text),))
    run.replan(deletions=DeletionPlan(digest=named.digest, entries=1, rows=0))
    store.write_bytes(run.paths.deletions(named.digest), named.to_json())
    finish(run)
    with pytest.raises(BadData, match="has an embedding of what") as refusal:
        run_publish(run)
    assert identifier in str(refusal.value)
    assert unpublished(run)
    # Entries that name nothing are in no one's way.
    other = Deletions(("another",), (1,))
    store.write_bytes(run.paths.deletions(named.digest), other.to_json())
    assert run_publish(run).metrics["published"] is True


def test_needs_no_framework() -> None:
    import subprocess
    import sys

    stages = ", ".join(f"pipeline.stages.{name}" for name in ("ingest", "plan", "publish", "report"))
    script = f"import {stages}, sys; sys.exit(not {{'torch', 'transformers'}}.isdisjoint(sys.modules))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
