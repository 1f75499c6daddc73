"""Files between the stages, damaged in every way: read as what they are, or refused as bad data; never anything else."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline import store
from pipeline.commands.search import read_manifest
from pipeline.config import ModelConfig
from pipeline.contract import Artifact, RunPaths, Stage, StageFailure, StageResult, now
from pipeline.cost import NodeAttempt
from pipeline.dataset.parts import PartRecord
from pipeline.errors import BadConfig, BadData, MissingInput, TrnpipeError
from pipeline.host.supervisor import PlanNumbers
from pipeline.model.folder import inspect_folder
from pipeline.model.inventory import weight_files
from pipeline.plan import RunPlan
from pipeline.run.registry import read_pointer
from pipeline.stages import report
from pipeline.stages.history import EndedRun
from pipeline.training.checkpoint import _read_manifest
from pipeline.training.state import Progress
from tests.pipeline.fuzz.mutations import documents, files, values
from tests.tiny import make_model

RESULT = asdict(
    StageResult(
        stage="train",
        run="week-01",
        status="done",
        started=now(),
        finished=now(),
        fingerprint="f",
        inputs={"rows": Artifact("s3://b/k", "0" * 64, 3)},
        metrics={"loss": 0.5},
        versions={"torch": "2.9"},
    )
)
FAILURE = asdict(StageFailure(stage="train", run="week-01", exit_code=65, what="it broke", value=["a"], time=now()))
PART = asdict(
    PartRecord(
        sha256="0" * 64,
        size=10,
        rows=2,
        ids="1",
        dimension=4,
        dtype="float32",
        model="m",
        fingerprint="f",
        tokens=5,
        padded_tokens=8,
        started=now(),
        finished=now(),
        seconds=1.5,
        documents_per_second=2.0,
    )
)
ATTEMPT = asdict(NodeAttempt(node=0, attempt=1, job="j", host="h", started=now(), seen=now()))
ENDED = asdict(
    EndedRun(run="r", time=now(), mode="train", outcome="refused", headline="Refused", reason="it fell", figures={"new": 0.5})
)
INPUT = {"deployment": {"prices": {"train": 21.5, "currency": "USD"}, "hosts": {"train": "trn1.32xlarge"}}, "execution": {}}
PROGRESS = json.loads(Progress(step=3, loss=0.5, last_validation={"ndcg@10": 0.5}).to_json())
MANIFEST = {"step": 1, "fingerprint": "f", "files": {"model.safetensors": {"sha256": "0" * 64, "size": 3}}}
POINTER = {"model": "s3://b/m", "embeddings": "s3://b/e", "run": "week-01", "fingerprint": "f"}
PARTS = {"run": "week-01", "parts": [{"uri": "s3://b/p", "sha256": "0", "rows": 3}]}

RECORDS: dict[str, tuple[Any, Callable[[bytes], Any]]] = {
    "result": (RESULT, StageResult.from_json),
    "failure": (FAILURE, StageFailure.from_json),
    "part": (PART, PartRecord.from_json),
    "progress": (PROGRESS, Progress.from_json),
    "attempt": (ATTEMPT, NodeAttempt.from_json),
    "ended run": (ENDED, EndedRun.from_json),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.mark.parametrize("name", RECORDS)
def test_valid_records_are_read(name: str) -> None:
    valid, read = RECORDS[name]
    assert json.loads(read(json.dumps(valid).encode()).to_json()) == valid


@pytest.mark.parametrize("name", RECORDS)
@given(data=st.data())
def test_records_are_whole_or_refused(name: str, data: st.DataObject) -> None:
    valid, read = RECORDS[name]
    try:
        record = json.loads(read(data.draw(files(valid))).to_json())
    except BadData as error:
        require_words(error)
        return
    # Every value has the type of its field, so that what is read can be computed with and written again.
    for key in ("stage", "run", "rows", "step", "sha256"):
        assert type(record.get(key)) is type(valid.get(key))
    assert json.dumps(record)


def require_words(error: TrnpipeError) -> None:
    assert error.what
    assert error.value
    assert error.rule
    assert error.remedy


@given(files(MANIFEST))
@example(json.dumps({**MANIFEST, "files": {"../../outside": {"sha256": "0", "size": 3}}}).encode())
@example(json.dumps({**MANIFEST, "files": {"/etc/passwd": {"sha256": "0", "size": 3}}}).encode())
@example(json.dumps({**MANIFEST, "files": {"a": {"sha256": "0", "size": float("inf")}}}).encode())
def test_manifests_of_checkpoints(folder: Path, data: bytes) -> None:
    (folder / "manifest.json").write_bytes(data)
    try:
        _, found = _read_manifest(str(folder / "manifest.json"))
    except BadData:
        return
    for name in found:
        assert (folder / name).resolve().is_relative_to(folder.resolve()), name


@given(files(POINTER))
@example(json.dumps({**POINTER, "run": "../../elsewhere"}).encode())
def test_pointers_of_the_registry(folder: Path, data: bytes) -> None:
    (folder / "registry").mkdir(exist_ok=True)
    (folder / "registry" / "current.json").write_bytes(data)
    try:
        pointer = read_pointer(str(folder), "current")
    except BadData:
        return
    assert pointer is not None
    assert "/" not in pointer.run


@given(files(PARTS))
def test_manifests_of_embeddings(folder: Path, data: bytes) -> None:
    (folder / "parts.json").write_bytes(data)
    try:
        assert all(isinstance(uri, str) for uri in read_manifest(str(folder / "parts.json"), None).parts)
    except BadData:
        return


def test_plans(plan_run: Any, tmp_path: Path) -> None:
    run = plan_run()
    valid = json.loads(run.plan.to_json())

    @given(files(valid))
    def check(data: bytes) -> None:
        try:
            plan = RunPlan.from_json(data)
        except BadData as error:
            require_words(error)
        else:
            assert RunPlan.from_json(plan.to_json()) == plan
        store.write_bytes(run.paths.plan, data)
        try:
            PlanNumbers.read(Stage.TRAIN, run.paths)
        except BadData:
            return

    check()


def test_model_folders(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    names = ("config.json", "modules.json", "sentence_bert_config.json", "1_Pooling/config.json")
    good = {name: (tmp_path / "model" / name).read_bytes() for name in names}
    good["model.safetensors.index.json"] = b'{"weight_map": {"a": "model-00001.safetensors"}}'

    @given(st.data())
    def check(data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(good)))
        (tmp_path / "model" / name).write_bytes(data.draw(files(json.loads(good[name]))))
        try:
            inspect_folder(tmp_path / "model", ModelConfig())
            if name.endswith("index.json"):
                (tmp_path / "model" / "model.safetensors").rename(tmp_path / "away")
                try:
                    found = weight_files(tmp_path / "model")
                finally:
                    (tmp_path / "away").rename(tmp_path / "model" / "model.safetensors")
                assert all(path.resolve().is_relative_to((tmp_path / "model").resolve()) for path in found)
        except (BadData, BadConfig, MissingInput):
            pass
        finally:
            (tmp_path / "model" / name).write_bytes(good[name])

    check()


SCORES = {
    "queries": 5,
    "candidates": 9,
    "baseline": {"ndcg@10": 0.5},
    "parent": {"ndcg@10": 0.5},
    "new": {"ndcg@10": 0.6},
    "difference": {"ndcg@10": {"value": 0.1, "low": 0.05, "high": 0.2}},
}
TEST = {"name": "memory", "rank": 0, "passed": False, "value": 1.0, "unit": "GB/s", "detail": ""}
HEALTH = {"node": 0, "host": "host-1", "passed": False, "tests": [TEST]}
MONITOR = {
    "time": 1.7e9,
    "attempt": 1,
    "host": "host-1",
    "utilization": {"mean": 50.0, "min": 1.0, "max": 99.0},
    "cores": {"0": 50.0},
    "device_memory_bytes": 1 << 30,
    "host_memory_bytes": 1 << 30,
    "ecc": {"mem_ecc_corrected": 1},
    "errors": {"numerical": 1},
}


def test_the_page_is_written_whatever_it_is_made_of(plan_run: Any) -> None:
    run = plan_run()
    paths: RunPaths = run.paths
    gate = {"gate": {"verdict": "refused", "reason": "worse", "metric": "ndcg@10"}}
    pieces = {
        paths.result(Stage.EVALUATE): {**RESULT, "stage": "evaluate", "fingerprint": run.plan.fingerprint, "metrics": gate},
        paths.result(Stage.PREPARE): {**RESULT, "stage": "prepare", "fingerprint": run.plan.fingerprint, "metrics": {}},
        paths.failure(Stage.EMBED): FAILURE,
        paths.scorecard: {**SCORES, "locales": {"de": SCORES}},
        paths.metrics: {"step": 1, "loss": 0.5, "validation": {"ndcg@10": 0.5}},
        paths.node_health(0): HEALTH,
        paths.host_monitor(0): MONITOR,
        paths.node_attempt(Stage.TRAIN, "j", 1, 0): ATTEMPT,
        paths.node_attempt(Stage.TRAIN, "j", 2, 0): {**ATTEMPT, "attempt": 2, "exit_code": 0},
        paths.input: INPUT,
    }
    for uri, record in pieces.items():
        store.write_json(uri, record)
    changed = st.sampled_from(sorted(pieces)).flatmap(
        lambda uri: st.tuples(st.just(uri), files(pieces[uri]) | documents(pieces[uri]).map(json.dumps).map(str.encode))
    )

    @given(st.lists(changed, min_size=1, max_size=3))
    def check(changes: list[tuple[str, bytes]]) -> None:
        for uri, data in changes:
            store.write_bytes(uri, data)
        report.run(run.context(Stage.REPORT))
        for uri, _ in changes:
            store.write_json(uri, pieces[uri])

    check()


@given(values)
def test_what_is_shown_is_short_and_harmless(value: object) -> None:
    for line in TrnpipeError("x", value=value, rule=str(value), remedy=str(value)).lines():
        assert "\x1b" not in line
        assert len(line) < 20_000
        line.encode()
