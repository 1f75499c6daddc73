"""prepare: what it plans from good input, that a resumed run keeps its plan, and every refusal with its exit code."""

from __future__ import annotations

import gzip
import hashlib
import json
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import BertConfig, BertModel, BertTokenizerFast

from pipeline import store
from pipeline.config import RunConfig
from pipeline.contract import RunPaths, Stage, StageResult
from pipeline.dataset.arrow import PUBLISHED, SCHEMAS, read_table, token_lengths
from pipeline.dataset.distinct import open_documents
from pipeline.dataset.ids import IdDigest
from pipeline.dataset.rows import DocumentReader, normalized_hash
from pipeline.dataset.sampler import Schedule
from pipeline.dataset.split import holdout_limit
from pipeline.dataset.tokens import TextTokenizer
from pipeline.errors import BadConfig, BadData, ExitCode, MissingInput, TrnpipeError
from pipeline.estimate import requirements as limits
from pipeline.plan import ExpectedCost, Published, ResumedRun, RunPlan
from pipeline.run.context import Heartbeat, StageContext, StageOutput
from pipeline.run.world import World
from pipeline.stages import prepare
from pipeline.stages.rank import write_result
from tests.tiny import make_model

POSITIONS = 48
Config = dict[str, Any]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of two layers with random weights and a tokenizer of letters and digits."""
    folder = tmp_path_factory.mktemp("model")
    characters = string.ascii_lowercase + string.digits
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters, *(f"##{one}" for one in characters)]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=POSITIONS,
    )
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    return folder


class Bench:
    """A bucket in a folder: shards, run folders and a registry, and prepare run on them."""

    def __init__(self, root: str, scratch: Path, model: Path) -> None:
        self.root = root
        self.scratch = scratch
        self.deployment: Config = {}
        self.config: Config = {
            "nodes": 2,
            "device": {"kind": "cpu", "ranks_per_node": 2, "precision": "fp32"},
            "data": {"train": [store.join(root, "data")], "holdout_fraction": 0.2, "replay_fraction": 0.5},
            "model": {"parent": str(model)},
            "train": {"batch_size": 4, "query_length": 12, "buckets": [16, 32]},
            "evaluate": {"candidates": 7},
            "gate": {"allow_small": True},
            "embed": {"children": 3, "rows_per_part": 50, "buckets": [16, 40]},
        }

    def shard(self, name: str, lines: list[Any], *, folder: str = "data") -> str:
        """Write a JSONL shard; lines that are no bytes are serialized."""
        uri = store.join(self.root, folder, name)
        data = b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
        store.write_bytes(uri, gzip.compress(data) if name.endswith(".gz") else data)
        return uri

    def paths(self, run: str) -> RunPaths:
        return RunPaths(f"{self.root}/runs/{run}")

    def start(self, run: str, execution: Config | None = None, allowed_nodes: tuple[int, ...] = (1, 2)) -> StageOutput:
        """An execution up to the end of prepare: the deployment's config is `self.config`."""
        paths = self.paths(run)
        deployment = {"config": self.config, "allowed_nodes": list(allowed_nodes), "local_paths": True, **self.deployment}
        store.write_json(paths.input, {"deployment": deployment, "execution": execution or {}, "execution_arn": "arn"})
        return self.attempt(run)

    def attempt(self, run: str) -> StageOutput:
        scratch = self.scratch / f"{run}-{len(list(self.scratch.iterdir()))}"
        scratch.mkdir()
        context = StageContext(
            stage=Stage.PREPARE, paths=self.paths(run), world=World(), scratch=scratch, heartbeat=Heartbeat(None, 0)
        )
        output = prepare.run(context)
        write_result(context, "", output)
        return output

    def plan(self, run: str) -> RunPlan:
        return RunPlan.from_json(store.read_bytes(self.paths(run).plan))

    def publish(self, run: str, model: str) -> None:
        store.write_json(store.join(self.root, "registry", "current.json"), {"model": model, "embeddings": "e", "run": run})

    def quarantine(self, run: str) -> list[dict[str, str]]:
        return [json.loads(line) for line in store.read_bytes(self.paths(run).quarantine).decode().splitlines()]


@pytest.fixture
def bench(tmp_path: Path, model: Path) -> Bench:
    (tmp_path / "scratch").mkdir()
    return Bench(str(tmp_path / "bucket"), tmp_path / "scratch", model)


def rows(start: int, stop: int, **more: Any) -> list[dict[str, Any]]:
    return [
        {"id": f"row{number}", "query": f"query {number}", "document": f"document {number} " + "and more " * (number % 5), **more}
        for number in range(start, stop)
    ]


def held_out(row: dict[str, Any], fraction: float = 0.2) -> bool:
    return normalized_hash(row["document"]) < holdout_limit(fraction)


def refusal(kind: type[TrnpipeError], call: Callable[[], object], *words: str) -> TrnpipeError:
    """The error that a call ends with; it must say all of these words, the rule or remedy, and carry its exit code."""
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert caught.value.rule or caught.value.remedy
    return caught.value


# ---- plans -----------------------------------------------------------------------------------------------------------


def test_a_first_run(bench: Bench, model: Path) -> None:
    one, two = rows(0, 120), rows(120, 200, locale="fr")
    uris = [bench.shard("a.jsonl", one), bench.shard("b.jsonl.gz", two)]
    output = bench.start("first")
    plan = bench.plan("first")

    trained = [row for row in one + two if not held_out(row)]
    assert plan.run == "first"
    assert plan.fingerprint == plan.sealed().fingerprint != ""
    assert [shard.uri for shard in plan.train.new] == uris
    assert (plan.train.replay, plan.train.replay_rows) == ((), 0)
    assert plan.train.rows == plan.train.new_rows == len(trained)
    assert plan.holdout.rows == plan.holdout.queries == 200 - len(trained)
    assert [(shard.rows, shard.bad_rows, shard.first_run) for shard in plan.train.new] == [(120, 0, "first"), (80, 0, "first")]
    assert sum(shard.holdout_rows for shard in plan.train.new) == plan.holdout.rows
    assert (plan.world.kind, plan.world.ranks, plan.world.precision) == ("cpu", 4, "fp32")
    assert (plan.parent.uri, plan.parent.folder, plan.parent.run) == (str(model), str(model), None)
    assert plan.published is None
    assert plan.parent.sha256 == store.sha256_file(model / "model.safetensors")
    assert list(plan.seen) == sorted(store.sha256(uri) for uri in uris)

    train = read_table(Path(bench.paths("first").rows) / "train.arrow")
    assert sorted(train["id"].to_pylist()) == sorted(row["id"] for row in trained)
    # Every rank computes the schedule anew from this file and must come to the plan's numbers.
    schedule = Schedule(token_lengths(train["document_tokens"]), (16, 32), 4, 4, plan.config.seed)
    assert plan.train.steps_per_epoch == plan.train.steps == schedule.steps_per_epoch
    assert plan.train.bucket_rows == {str(bucket): count for bucket, count in schedule.bucket_rows.items()}
    assert plan.train.warmup_steps == round(0.1 * plan.train.steps)
    holdout = read_table(Path(bench.paths("first").rows) / "holdout.arrow")
    assert sorted(holdout["id"].to_pylist()) == sorted(row["id"] for row in one + two if held_out(row))
    candidates = read_table(Path(bench.paths("first").rows) / "candidates.arrow")
    assert len(candidates) == plan.holdout.candidates == plan.holdout.rows + 7
    assert set(holdout["document_hash"].to_pylist()) <= set(candidates["document_hash"].to_pylist())
    assert max(token_lengths(candidates["document_tokens"])) <= 40

    for name, file in plan.row_files.items():
        assert store.sha256(store.join(bench.paths("first").rows, name)) == file.sha256
    assert output.metrics == {**plan.summary(), "compile": False}
    assert output.metrics["computes"] == "cpu in fp32"
    assert output.outputs["plan"].sha256 == store.sha256(bench.paths("first").plan)
    result = StageResult.from_json(store.read_bytes(bench.paths("first").result(Stage.PREPARE)))
    assert result.fingerprint == plan.fingerprint
    assert not store.exists(bench.paths("first").quarantine)


@pytest.mark.parametrize(
    ("bf16", "computes"), [(True, "cpu in bf16"), (False, "cpu in fp32: no bf16 instructions, so about half as fast")]
)
def test_the_metrics_say_which_precision_auto_chose_and_why(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, bf16: bool, computes: str
) -> None:
    monkeypatch.setattr("pipeline.backends.device.processor_computes_bf16", lambda: bf16)
    bench.shard("a.jsonl", rows(0, 130))
    bench.config["device"]["precision"] = "auto"
    assert bench.start("run").metrics["computes"] == computes


def test_there_is_a_part_for_every_rank_of_the_hosts_that_embed(bench: Bench) -> None:
    bench.shard("a.jsonl", rows(0, 130))
    bench.config["embed"]["ranks_per_child"] = 4
    bench.start("run")
    assert len(bench.plan("run").embed.parts) == 12  # three children of four ranks, though training has two


def test_the_parts_hold_every_document_once(bench: Bench) -> None:
    data = rows(0, 130)
    bench.shard("a.jsonl", [*data[:70], b"bad"])
    bench.shard("b.jsonl", data[70:])
    bench.config["data"]["max_bad_fraction"] = 0.1
    bench.start("run")
    embed = bench.plan("run").embed
    assert (embed.source, embed.rows, embed.bad_rows, embed.children) == ("documents", 130, 1, 3)
    assert [part.rows for part in embed.parts] == [21, 22, 22, 21, 22, 22]  # three children of two ranks
    digest, seen = IdDigest(), []
    for part in embed.parts:
        found = [
            document
            for span in part.spans
            for document in DocumentReader(embed.source, {}).read(embed.shards[span.shard], span.start, span.stop)
        ]
        assert len(found) == part.rows
        seen += found
    assert sorted((document.id, document.text) for document in seen) == sorted(
        (row["id"], row["document"].strip()) for row in data
    )
    for identifier, *_ in seen:
        digest.add(identifier)
    assert str(digest) == embed.ids


def test_a_corpus_of_its_own_with_mapped_columns(bench: Bench) -> None:
    bench.config["data"] |= {
        "train": [store.join(bench.root, "pairs")],
        "corpus": [store.join(bench.root, "corpus")],
        "columns": {"id": "key", "text": "body"},
    }
    # One document may be in several pairs, so the pairs' ids need not be unique when they are not what is embedded.
    pairs = [{**row, "key": "same"} for row in rows(0, 60)]
    bench.shard("a.jsonl", pairs, folder="pairs")
    bench.shard("c.jsonl", [{"key": number, "body": f"text {number}"} for number in range(2)], folder="corpus")
    bench.start("run")
    embed = bench.plan("run").embed
    assert (embed.source, embed.rows, embed.children, len(embed.parts)) == ("corpus", 2, 2, 2)
    assert [shard.uri for shard in embed.shards] == [f"{bench.root}/corpus/c.jsonl"]


def test_every_format_in_object_storage(bench: Bench, model: Path, s3_root: str, tmp_path: Path) -> None:
    bench = Bench(s3_root, bench.scratch, model)
    parent = f"{s3_root}/parent"
    store.upload_folder(model, parent)
    bench.config["model"]["parent"] = parent
    bench.shard("a.jsonl.gz", rows(0, 60))
    pq.write_table(pa.Table.from_pylist(rows(60, 120)), tmp_path / "b.parquet")
    store.upload(tmp_path / "b.parquet", f"{s3_root}/data/b.parquet")
    bench.start("run")
    plan = bench.plan("run")
    assert plan.embed.rows == 120
    assert plan.parent.folder == parent
    assert store.exists(f"{s3_root}/runs/run/prepare/rows/train.arrow")


def test_the_second_week(bench: Bench, model: Path) -> None:
    bench.shard("week-1.jsonl", rows(0, 200))
    bench.start("one")
    first = bench.plan("one")
    bench.publish("one", str(model))
    del bench.config["model"]
    bench.shard("week-2.jsonl", rows(200, 280))
    bench.start("two")
    second = bench.plan("two")

    assert [shard.uri.rsplit("/")[-1] for shard in second.train.new] == ["week-2.jsonl"]
    assert [(shard.uri.rsplit("/")[-1], shard.first_run) for shard in second.train.replay] == [("week-1.jsonl", "one")]
    assert second.train.new_rows == sum(not held_out(row) for row in rows(200, 280))
    assert second.train.replay_rows == -(-second.train.new_rows // 2)
    assert second.parent.run == "one"
    etag = store.read_versioned(f"{bench.root}/registry/current.json")[1]
    assert second.published == Published(run="one", folder=str(model), sha256=second.parent.sha256, registry_etag=etag)
    assert set(second.seen) == {*first.seen, second.train.new[0].sha256}
    assert second.embed.rows == 280
    assert second.holdout.rows == sum(held_out(row) for row in rows(0, 280))

    train = read_table(Path(bench.paths("two").rows) / "train.arrow")
    assert set(train["shard"].to_pylist()) == {0, 1}
    assert train["shard"].to_pylist().count(1) == second.train.replay_rows
    week_one = read_table(Path(bench.paths("one").rows) / "holdout.arrow")["document_hash"].to_pylist()
    assert not set(week_one) & set(train["document_hash"].to_pylist())

    # The same week again, in another run: the same rows.
    bench.start("two-again")
    assert bench.plan("two-again").row_files == second.row_files


def test_what_a_run_may_cost_is_said_of_the_last_one_and_of_the_time_budget(bench: Bench, model: Path) -> None:
    bench.deployment = {"prices": {"train": 20.0, "embed": 10.0, "cpu": 0.5, "currency": "USD"}, "embed_hosts": 2}
    bench.config |= {"time_budget": "PT3H"}
    bench.shard("week-1.jsonl", rows(0, 200))
    bench.start("one")
    # Two nodes at 20 for three hours; three children have two hosts.
    assert bench.plan("one").expected_cost == ExpectedCost(at_most=3 * 2 * 20)
    bench.publish("one", str(model))
    bench.shard("week-2.jsonl", rows(200, 280))
    bench.start("no-report")
    assert bench.plan("no-report").expected_cost.run is None

    stages = {"prepare": {"node_hours": 1.0}, "train": {"node_hours": 4.0}, "embed": {"node_hours": 2.5}}
    result = store.read_json(bench.paths("one").result(Stage.PREPARE)) | {
        "stage": "report",
        "metrics": {"cost": {"stages": stages}},
    }
    store.write_json(bench.paths("one").result(Stage.REPORT), result)
    output = bench.start("two")
    expected = ExpectedCost(run="one", node_hours=7.5, as_before=0.5 + 4 * 20 + 2.5 * 10, at_most=120)
    assert bench.plan("two").expected_cost == expected
    assert output.metrics["expected_cost"] == expected.model_dump()

    # It is no part of what is computed: another price is no other plan. On one machine nothing has a price.
    bench.deployment = {}
    bench.start("unpriced")
    assert bench.plan("unpriced").expected_cost == ExpectedCost(run="one", node_hours=7.5)
    plan = bench.plan("two")
    assert plan.model_copy(update={"expected_cost": ExpectedCost()}).sealed().fingerprint == plan.fingerprint


@pytest.mark.parametrize("metrics", [{}, {"cost": None}, {"cost": {"stages": {"tain": {"node_hours": 1}}}}])
def test_a_report_that_counts_nothing_is_no_expectation(metrics: dict[str, Any], bench: Bench) -> None:
    paths = bench.paths("one")
    record = StageResult(stage="report", run="one", status="done", started="", finished="", fingerprint="", metrics=metrics)
    store.write_bytes(paths.result(Stage.REPORT), record.to_json())
    assert prepare.used_by(bench.paths("two"), "one") == {}


def test_nothing_new(bench: Bench, model: Path) -> None:
    bench.shard("week-1.jsonl", rows(0, 200))
    bench.start("one")
    bench.publish("one", str(model))
    del bench.config["model"]
    store.delete(f"{bench.root}/data/week-1.jsonl")
    bench.shard("renamed.jsonl", rows(0, 200))  # by another name it is still the same
    error = refusal(MissingInput, lambda: bench.start("two"), "no training shard is new", "run one", "data.require_new")
    assert error.exit_code == ExitCode.MISSING_INPUT

    bench.start("three", {"data": {"require_new": False}})
    plan = bench.plan("three")
    assert plan.train.new == ()
    assert plan.train.rows == plan.train.replay_rows == -(-bench.plan("one").train.rows // 2)
    assert plan.seen == bench.plan("one").seen
    refusal(BadData, lambda: bench.start("four", {"data": {"require_new": False, "replay_fraction": 0}}), "no row to train on")


def test_an_explicit_parent_from_this_bucket_knows_its_shards(bench: Bench, model: Path) -> None:
    bench.shard("week-1.jsonl", rows(0, 100))
    bench.start("one")
    store.upload_folder(model, bench.paths("one").model)
    bench.shard("week-2.jsonl", rows(100, 200))
    bench.start("two", {"model": {"parent": bench.paths("one").model}})
    plan = bench.plan("two")
    assert [shard.uri.rsplit("/")[-1] for shard in plan.train.new] == ["week-2.jsonl"]
    assert plan.parent.run == "one"


def test_the_initial_model_is_the_first_runs_only(bench: Bench, model: Path) -> None:
    bench.config["model"] = {"initial": str(model)}
    bench.shard("week-1.jsonl", rows(0, 200))
    bench.start("one")
    assert (bench.plan("one").parent.uri, bench.plan("one").parent.run) == (str(model), None)
    store.upload_folder(model, bench.paths("one").model)
    bench.publish("one", bench.paths("one").model)
    bench.shard("week-2.jsonl", rows(200, 280))
    bench.start("two")
    plan = bench.plan("two")
    assert (plan.parent.uri, plan.parent.run) == (bench.paths("one").model, "one")
    assert [shard.uri.rsplit("/")[-1] for shard in plan.train.new] == ["week-2.jsonl"]
    # Its parent is all that a run knows of it: where there is another, the initial model may be gone and changes nothing.
    gone = RunConfig.model_validate({**plan.config.model_dump(), "model": {"initial": "/gone"}})
    assert plan.model_copy(update={"config": gone}).sealed().fingerprint == plan.fingerprint
    bench.config["model"] = {"initial": "/gone"}
    bench.start("again")
    assert bench.plan("again").row_files == plan.row_files
    # An execution may say otherwise, on purpose.
    bench.start("three", {"model": {"parent": str(model)}})
    assert (bench.plan("three").parent.uri, len(bench.plan("three").train.new)) == (str(model), 2)


def test_the_published_model_is_noted_whatever_the_parent(bench: Bench, model: Path, tmp_path: Path) -> None:
    bench.shard("a.jsonl", rows(0, 100))
    bench.start("one")
    published = f"{tmp_path}/published"
    store.upload_folder(model, published)
    bench.publish("one", published)
    etag = store.read_versioned(f"{bench.root}/registry/current.json")[1]
    bench.start("run")
    plan = bench.plan("run")
    assert plan.published == Published(run="one", folder=published, sha256=plan.parent.sha256, registry_etag=etag)
    assert plan.parent.uri == str(model)
    assert set(plan.row_files) == set(SCHEMAS)
    bench.start("nowhere", {"registry": None})
    assert bench.plan("nowhere").published is None
    bench.publish("one", f"{tmp_path}/gone")
    error = refusal(MissingInput, lambda: bench.start("refused"), "the published model is gone", f"{tmp_path}/gone", "registry")
    assert error.exit_code == ExitCode.MISSING_INPUT


def test_a_published_model_with_another_tokenizer_gets_the_hold_out_in_its_own_tokens(bench: Bench, tmp_path: Path) -> None:
    bench.shard("a.jsonl", rows(0, 100))
    bench.start("one")
    make_model(tmp_path / "published", head=16)
    bench.publish("one", f"{tmp_path}/published")
    bench.start("two")
    plan, folder = bench.plan("two"), Path(bench.paths("two").rows)
    assert plan.published is not None
    assert (plan.published.own_tokens, plan.published.same_graphs) == (True, True)  # a processor has no graphs
    tokenizer = TextTokenizer(tmp_path / "published")
    for name, column in (("holdout.arrow", "query"), ("candidates.arrow", "document")):
        parents, own = read_table(folder / name), read_table(folder / PUBLISHED / name)
        assert own.drop_columns(f"{column}_tokens").equals(parents.drop_columns(f"{column}_tokens"))
        assert plan.row_files[f"{PUBLISHED}/{name}"].sha256 == store.sha256_file(folder / PUBLISHED / name)
    texts = {normalized_hash(row["document"]): row["document"] for row in rows(0, 100)}
    for row in own.to_pylist():
        [expected] = tokenizer.encode([texts[row["document_hash"]]], 40)
        assert row["document_tokens"] == expected.tolist()
    assert not (folder / PUBLISHED / "train.arrow").exists()

    bench.start("compiled", {"nodes": 1, "device": {"kind": "xla", "ranks_per_node": 1}})
    published = bench.plan("compiled").published
    assert published is not None
    assert not published.same_graphs


def test_a_bare_weight_file_is_converted_into_the_run_folder(bench: Bench, model: Path) -> None:
    bench.shard("a.jsonl", rows(0, 100))
    bench.start("run", {"model": {"parent": str(model / "model.safetensors"), "base": str(model)}})
    parent = bench.plan("run").parent
    assert parent.folder == f"{bench.root}/runs/run/prepare/parent"
    assert parent.uri == str(model / "model.safetensors")
    assert store.exists(store.join(parent.folder, "modules.json"))


def test_rows_with_a_label_of_zero(bench: Bench) -> None:
    positive, negative = rows(0, 100), rows(100, 150, label=0)
    bench.shard("a.jsonl", positive + negative)
    output = bench.start("run")
    plan = bench.plan("run")
    assert plan.train.rows == sum(not held_out(row) for row in positive)
    assert plan.train.not_positive == output.metrics["not_positive_rows"] == 50
    assert plan.holdout.rows == sum(held_out(row) for row in positive + negative)
    assert plan.holdout.queries == sum(held_out(row) for row in positive)


def test_configured_steps_win_over_epochs(bench: Bench) -> None:
    bench.shard("a.jsonl", rows(0, 100))
    bench.start("steps", {"train": {"steps": 500, "epochs": 3}})
    assert (bench.plan("steps").train.steps, bench.plan("steps").train.warmup_steps) == (500, 50)
    bench.start("epochs", {"train": {"epochs": 3}})
    train = bench.plan("epochs").train
    assert train.steps == 3 * train.steps_per_epoch


def test_training_of_another_run_is_gone_on_with_on_fewer_nodes(bench: Bench) -> None:
    bench.shard("a.jsonl", rows(0, 200))
    bench.start("first")
    more = {"nodes": 1, "train": {"resume": "first", "batch_size": 8}}
    bench.start("second", more)
    first, second = bench.plan("first"), bench.plan("second")
    assert (first.world.ranks, second.world.ranks) == (4, 2)
    assert second.train.resumed == ResumedRun(run="first", fingerprint=first.fingerprint)
    assert (second.train.steps, second.train.bucket_rows) == (first.train.steps, first.train.bucket_rows)
    error = refusal(
        BadConfig, lambda: bench.start("third", {"nodes": 1, "train": {"resume": "first"}}), "global batch: 16 there, 8 here"
    )
    assert error.exit_code == 64


def test_a_few_bad_rows_are_quarantined(bench: Bench, cloudwatch: Any) -> None:
    data = [*rows(0, 50), b"not json", *rows(50, 99), {"id": "x", "query": "q"}]
    uri = bench.shard("a.jsonl", data)
    output = bench.start("run", {"data": {"max_bad_fraction": 0.02}})
    assert output.metrics["bad_rows"] == 2
    assert [row["at"] for row in bench.quarantine("run")] == [f"{uri}:51", f"{uri}:101"]
    assert bench.plan("run").train.new[0].bad_rows == 2
    assert [told["QuarantinedRows"] for told in cloudwatch()] == [2]


def test_result_stays_small_with_many_shards(bench: Bench) -> None:
    for number in range(60):
        bench.shard(f"{'long-name-' * 10}{number}.jsonl", rows(number * 3, number * 3 + 3))
    output = bench.start("run")
    assert len(bench.plan("run").train.new) == 60
    assert len(output.inputs) == 21


# ---- a run that resumes ------------------------------------------------------------------------------------


def test_a_plan_is_kept(bench: Bench) -> None:
    bench.shard("a.jsonl", rows(0, 100))
    first = bench.start("run", {"train": {"epochs": 2}})
    before = store.read_bytes(bench.paths("run").plan)
    bench.shard("b.jsonl", rows(100, 200))
    bench.config["train"]["batch_size"] = 8  # the deployment may have moved on
    again = bench.start("run", {"run": "run", "share": "weekly", "train": {"epochs": 2}})
    assert store.read_bytes(bench.paths("run").plan) == before
    assert again == first


def test_an_input_that_contradicts_the_plan_is_refused(bench: Bench) -> None:
    bench.shard("a.jsonl", rows(0, 100))
    bench.start("run")
    asked = {"nodes": 1, "train": {"epochs": 1, "batch_size": 16}, "model": {"head": {"hidden": 8}}}
    error = refusal(BadConfig, lambda: bench.start("run", asked), "immutable")
    assert sorted(error.value) == [
        "model.head.hidden: the plan has null, the input 8",
        "nodes: the plan has 2, the input 1",
        "train.batch_size: the plan has 4, the input 16",
    ]
    refusal(BadConfig, lambda: bench.start("run", {"train": {"step": 5}}), "did you mean train.steps")
    refusal(BadConfig, lambda: bench.start("run", allowed_nodes=(1,)), "nodes = 2")


def test_a_kept_plan_needs_its_row_files(bench: Bench) -> None:
    bench.shard("a.jsonl", rows(0, 100))
    bench.start("run")
    store.delete(store.join(bench.paths("run").rows, "train.arrow"))
    refusal(MissingInput, lambda: bench.attempt("run"), "train.arrow", "start a new run")


def test_of_two_prepares_the_first_plan_counts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.shard("a.jsonl", rows(0, 100))
    bench.start("run")
    plan = store.read_bytes(bench.paths("run").plan)

    def planned_meanwhile(paths: RunPaths, request: object) -> None:
        return None

    monkeypatch.setattr(prepare, "kept_plan", planned_meanwhile)
    output = bench.attempt("run")
    assert store.read_bytes(bench.paths("run").plan) == plan
    assert output.outputs["plan"].sha256 == hashlib.sha256(plan).hexdigest()
    # On other data the second one has overwritten the first one's rows: neither may go on.
    bench.shard("b.jsonl", rows(100, 200))
    refusal(MissingInput, lambda: bench.attempt("run"), "row files", "start a new run")


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("execution", "words"),
    [
        ({"trian": {"steps": 5}}, ["trian", "did you mean train"]),
        ({"train": {"lerning_rate": 1}}, ["did you mean train.learning_rate"]),
        ({"train": {"steps": "many"}}, ["train.steps"]),
        ({"nodes": 4}, ["nodes = 4", "1, 2"]),
        ({"data": {"columns": {"querry": "q"}}}, ["data.columns.querry"]),
        ({"data": {"train": []}}, ["data.train"]),
        ({"train": {"buckets": [16, 64]}}, ["train.buckets: 64", "at most 48"]),
        ({"embed": {"buckets": [49]}}, ["embed.buckets: 49"]),
        ({"train": {"query_length": 64, "buckets": [64]}, "embed": {"buckets": [64]}}, ["train.query_length: 64"]),
        ({"train": {"query_length": 32}, "embed": {"buckets": [24]}}, ["train.query_length 32", "embed.buckets, 24"]),
        ({"device": {"kind": "xla"}}, ["4 ranks", "one node, one rank"]),
        (
            {"nodes": 1, "device": {"kind": "xla", "ranks_per_node": 1}, "compile": {"enabled": False}},
            ["/graphs/train/", "/graphs/infer/", "compile.enabled = true"],
        ),
        ({"device": {"precision": "compiler"}}, ["device.precision = compiler"]),
        ({"device": {"precision": "bf16"}, "compile": {"auto_cast": "all"}}, ["compile.auto_cast = all", "bf16"]),
        ({"device": {"kind": "neuron"}, "compile": {"auto_cast": "matmult"}}, ["compile.auto_cast = matmult", "compiler"]),
        ({"compile": {"auto_cast_type": "fp8_e4m3"}}, ["fp8_e4m3", "compile.infer_auto_cast_type = fp8_e4m3"]),
        ({"compile": {"auto_cast_type": "fp16"}}, ["fp16", "compile.infer_auto_cast_type = fp16"]),
        ({"compile": {"target": "trn2"}}, ["compile.target", "trn2"]),
        ({"compile": {"infer_target": "trn2"}}, ["compile.infer_target", "trn2"]),
        ({"compile": {"optlevel": 4}}, ["compile.optlevel"]),
        ({"compile": {"cache": "local/cache"}}, ["compile.cache", "s3://"]),
        ({"device": {"loader": {"batches_per_execution": 2}}}, ["batches_per_execution = 2", "sync_points"]),
        ({"gate": {"allow_small": False}}, ["gate.min_queries = 2000"]),
        ({"model": {"pooling": "max"}}, ["model.pooling"]),
        ({"model": {"parent": None}}, ["registry/current.json", "set model.initial"]),
        ({"model": {"parent": None}, "registry": None}, ["registry = None", "set model.initial"]),
    ],
)
def test_a_bad_configuration_is_refused(execution: Config, words: list[str], bench: Bench) -> None:
    bench.shard("a.jsonl", rows(0, 100))
    error = refusal(BadConfig, lambda: bench.start("run", execution), *words)
    assert error.exit_code == ExitCode.BAD_CONFIG
    assert not store.exists(bench.paths("run").plan)


@pytest.mark.parametrize(
    ("execution", "words"),
    [
        ({"data": {"train": ["s3://no-such-bucket-of-ours/data"]}}, ["no-such-bucket-of-ours"]),
        ({"data": {"train": ["absent.jsonl"]}}, ["data.train: absent.jsonl"]),
        ({"data": {"corpus": ["absent/"]}}, ["data.corpus: absent/"]),
        ({"model": {"parent": "absent"}}, ["absent"]),
    ],
)
def test_a_missing_input_is_named(execution: Config, words: list[str], bench: Bench, s3_root: str) -> None:
    bench.deployment = {"read": ["s3://no-such-bucket-of-ours"]}
    bench.shard("a.jsonl", rows(0, 100))
    error = refusal(MissingInput, lambda: bench.start("run", execution), *words)
    assert error.exit_code == ExitCode.MISSING_INPUT


def test_input_json(bench: Bench) -> None:
    refusal(MissingInput, lambda: bench.attempt("run"), "input.json")
    store.write_bytes(bench.paths("run").input, b'{"executoin": {}}')
    refusal(BadConfig, lambda: bench.attempt("run"), "executoin")
    store.write_bytes(bench.paths("run").input, b"{")
    refusal(BadConfig, lambda: bench.attempt("run"), "input.json")


def test_a_registry_that_leads_nowhere(bench: Bench, model: Path) -> None:
    bench.shard("a.jsonl", rows(0, 100))
    bench.publish("gone", str(model))
    refusal(MissingInput, lambda: bench.start("run", {"model": {"parent": None}}), "runs/gone/plan.json", "model.parent")
    store.write_bytes(bench.paths("gone").plan, b'{"seen": 3}')
    refusal(BadData, lambda: bench.start("run", {"model": {"parent": None}}), "runs/gone/plan.json")
    store.write_bytes(f"{bench.root}/registry/current.json", b"[]")
    refusal(BadData, lambda: bench.start("run"), "registry/current.json")


@pytest.mark.parametrize(
    "line", [b"not json", b"[]", b'{"id": 1}', b'{"id": 1, "query": "q", "document": " "}', b'{"id": "\xff"}', b"{" * 5000]
)
def test_too_many_bad_rows(line: bytes, bench: Bench) -> None:
    uri = bench.shard("a.jsonl", [*rows(0, 100), line, line])
    error = refusal(BadData, lambda: bench.start("run"), f"{uri}:101", "2 of 102", "quarantine.jsonl", "max_bad_fraction = 0.001")
    assert error.exit_code == ExitCode.BAD_DATA
    assert [row["at"] for row in bench.quarantine("run")] == [f"{uri}:101", f"{uri}:102"]
    assert not store.exists(bench.paths("run").plan)
    # Once the data is corrected the run goes through and nothing stays behind.
    bench.shard("a.jsonl", rows(0, 100))
    bench.start("run")
    assert not store.exists(bench.paths("run").quarantine)


def test_a_long_history_does_not_hide_a_spoilt_week(bench: Bench, model: Path) -> None:
    bench.config["data"]["max_bad_fraction"] = 0.1
    bench.shard("week-1.jsonl", rows(0, 500))
    bench.start("one")
    bench.publish("one", str(model))
    bench.shard("week-2.jsonl", [*rows(500, 510), *[b"bad"] * 10])
    refusal(BadData, lambda: bench.start("two", {"model": {"parent": None}}), "new training shards", "10 of 20")


def test_bad_rows_of_a_corpus(bench: Bench) -> None:
    bench.shard("a.jsonl", rows(0, 100))
    bench.shard("c.jsonl", [{"id": 1, "text": "t"}, {"id": 2}], folder="corpus")
    refusal(BadData, lambda: bench.start("run", {"data": {"corpus": [f"{bench.root}/corpus"]}}), "corpus", "c.jsonl:2")


def test_an_id_with_two_documents_is_quarantined_with_both_places(bench: Bench) -> None:
    one = bench.shard("a.jsonl", rows(0, 100))
    two = bench.shard("b.jsonl", [*rows(200, 210), *({**row, "document": f"other {row['id']}"} for row in rows(40, 70))])
    error = refusal(
        BadData, lambda: bench.start("run"), f"{two}:11: id 'row40' has another document at {one}:41", "30 rows: id has another"
    )
    assert error.exit_code == ExitCode.BAD_DATA
    bench.start("run", {"data": {"max_bad_fraction": 0.5}})
    plan = RunPlan.from_json(store.read_bytes(bench.paths("run").plan))
    assert len(bench.quarantine("run")) == 30
    assert (plan.embed.rows, plan.embed.bad_rows, plan.train.bad_rows) == (110, 30, 30)
    assert plan.train.rows + plan.holdout.rows == 110


def test_several_queries_for_one_document(bench: Bench) -> None:
    one = bench.shard("a.jsonl", rows(0, 100))
    two = bench.shard("b.jsonl", [{**row, "query": f"again {row['id']}"} for row in rows(40, 150)])
    bench.start("run")
    plan = RunPlan.from_json(store.read_bytes(bench.paths("run").plan))
    assert plan.embed.rows == 150
    assert plan.train.rows + plan.holdout.rows == 210
    paths = bench.paths("run")
    reader, found = open_documents(plan, paths.rows, Path()), []
    for part in plan.embed.parts:
        for span in part.spans:
            found += reader.read(plan.embed.shards[span.shard], span.start, span.stop)
    assert [identifier for identifier, *_ in found] == [f"row{number}" for number in range(150)]
    digest = IdDigest()
    for identifier, *_ in found:
        digest.add(identifier)
    assert plan.embed.ids == str(digest)
    assert [shard.uri for shard in plan.embed.shards] == [one, two]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.parquet"])
def test_a_truncated_shard(name: str, bench: Bench, tmp_path: Path) -> None:
    data = rows(0, 1000)
    if name.endswith(".gz"):
        whole = gzip.compress(b"\n".join([b"bad", *(json.dumps(row).encode() for row in data)]))
    else:
        pq.write_table(pa.Table.from_pylist(data), tmp_path / name)
        whole = (tmp_path / name).read_bytes()
    store.write_bytes(f"{bench.root}/data/{name}", whole[: len(whole) // 2])
    refusal(BadData, lambda: bench.start("run"), name, "cut off", "upload it again")
    if name.endswith(".gz"):  # what was found until then is kept
        assert [row["at"] for row in bench.quarantine("run")] == [f"{bench.root}/data/{name}:1"]


def test_data_without_rows(bench: Bench) -> None:
    bench.shard("a.jsonl", [])
    refusal(BadData, lambda: bench.start("run"), "no row to train on", "0 good rows")
    bench.shard("a.jsonl", rows(0, 100, label=0))
    refusal(BadData, lambda: bench.start("run"), "no row to train on", "100 good rows")


def test_a_hold_out_without_rows(bench: Bench) -> None:
    kept = [row for row in rows(0, 100) if not held_out(row)]
    bench.shard("a.jsonl", kept)
    refusal(BadData, lambda: bench.start("run"), "the hold-out is empty", "data.holdout_fraction = 0.2")


def test_a_corpus_without_rows(bench: Bench) -> None:
    bench.shard("a.jsonl", rows(0, 100))
    bench.shard("c.jsonl", [], folder="corpus")
    refusal(BadData, lambda: bench.start("run", {"data": {"corpus": [f"{bench.root}/corpus"]}}), "the corpus is empty")


def test_a_tokenizer_of_another_model(bench: Bench, model: Path, tmp_path: Path) -> None:
    bench.shard("a.jsonl", rows(0, 100))
    other = store.download_folder(str(model), tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    small = BertConfig(**{**config, "vocab_size": 20})
    BertModel(small, add_pooling_layer=False).save_pretrained(other)
    refusal(BadConfig, lambda: bench.start("run", {"model": {"parent": str(other)}}), "20 rows in the embedding table")


# ---- parts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "rows_per_part", "children", "expected"),
    [
        ([10], 4, 1, [3, 3, 4]),
        ([3, 0, 5], 100, 2, [4, 4]),
        ([2], 100, 5, [1, 1]),
        ([7, 7, 7], 7, 1, [7, 7, 7]),
    ],
)
def test_plan_parts(counts: list[int], rows_per_part: int, children: int, expected: list[int]) -> None:
    parts = prepare.plan_parts(counts, rows_per_part, children)
    assert [part.rows for part in parts] == expected
    covered = [(span.shard, row) for part in parts for span in part.spans for row in range(span.start, span.stop)]
    assert covered == [(shard, row) for shard, count in enumerate(counts) for row in range(count)]


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def wide_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layer of XLM-R large's width and vocabulary of letters: few bytes to write, many activations."""
    folder = tmp_path_factory.mktemp("wide")
    for name in ("vocab.txt", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((model / name).read_bytes())
    config = BertConfig(
        vocab_size=len((model / "vocab.txt").read_text().split()),
        hidden_size=1024,
        num_hidden_layers=1,
        num_attention_heads=16,
        intermediate_size=4096,
        max_position_embeddings=64,
    )
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    return folder


def test_the_plan_says_what_it_needs(bench: Bench) -> None:
    bench.shard("a.jsonl", rows(0, 100))
    output = bench.start("run")
    memory = bench.plan("run").memory
    assert memory is not None
    # Two ranks of a node, each a Python process of its own beside what its tensors need.
    assert memory.host > 2 * memory.device
    assert output.metrics["device_gib"] == round(memory.device / 2**30, 2)
    assert output.metrics["host_gib"] == round(memory.host / 2**30, 2) > 1


def test_a_batch_that_no_neuron_core_can_hold_is_refused_with_one_that_fits(bench: Bench, wide_model: Path) -> None:
    bench.shard("a.jsonl", rows(0, 100))
    bench.config["model"]["parent"] = str(wide_model)
    bench.config["device"] = {"kind": "neuron"}
    bench.config["train"]["batch_size"] = 50_000
    words = ("activations of documents", "at most 16.00 GiB per rank's device", "train.batch_size=")
    error = refusal(BadConfig, lambda: bench.start("huge"), *words)
    assert error.exit_code == ExitCode.BAD_CONFIG
    assert not store.exists(bench.paths("huge").plan)
    suggested = next(part for part in error.remedy.split("; or ") if part.startswith("train.batch_size="))
    batch = int(suggested.removeprefix("train.batch_size=").split()[0])
    bench.start("smaller", {"train": {"batch_size": batch}})
    memory = bench.plan("smaller").memory
    assert memory is not None
    assert 8 * 2**30 < memory.device <= 16 * 2**30


def test_a_host_with_too_little_memory_is_refused(bench: Bench) -> None:
    bench.shard("a.jsonl", rows(0, 100))
    bench.config["device"]["host_memory_gib"] = 0.5
    refusal(BadConfig, lambda: bench.start("run"), "Python and its libraries", "at most 0.50 GiB per node's host")


# ---- more data than a stage can hold ---------------------------------------------------------------------------------


@pytest.fixture
def deployed(bench: Bench, model: Path) -> Bench:
    """The same with hosts of its own for each stage: the parent is in the bucket."""
    store.upload_folder(model, store.join(bench.root, "parent"))
    bench.config["model"]["parent"] = store.join(bench.root, "parent")
    bench.deployment = {"local_paths": False, "hosts": {"embed": "inf2.xlarge"}}
    bench.shard("a.jsonl", rows(0, 200))
    return bench


def test_more_rows_than_a_task_can_hold_are_refused_before_they_are_tokenized(
    deployed: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "FARGATE_MEMORY_MIB", 100)
    with monkeypatch.context() as before:
        before.delattr(prepare, "tokenize")
        refusal(BadConfig, lambda: deployed.start("run"), "prepare, memory", "100.00 MiB", "data.train")
    # Where all stages share a machine, it is unknown what else it holds.
    deployed.deployment = {}
    deployed.start("run")


def test_a_hold_out_that_evaluate_cannot_hold_is_refused(deployed: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    # How many queries there are is known once they are read.
    monkeypatch.setattr(limits, "QUERY_BYTES", 1 << 40)
    refusal(BadConfig, lambda: deployed.start("run"), "evaluate, memory", "data.holdout_fraction")
    assert not store.exists(deployed.paths("run").plan)


def test_what_only_takes_long_is_a_warning(
    deployed: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "RANKED_SCORES", 0.01)
    with caplog.at_level("WARNING"):
        deployed.start("run")
    warned = [record.getMessage() for record in caplog.records if "evaluate, ranking" in record.getMessage()]
    assert len(warned) == 1
    assert "data.holdout_fraction" in warned[0]
    # The deployment's own limit of an attempt counts.
    caplog.clear()
    deployed.deployment = {**deployed.deployment, "timeouts": {"evaluate": 10_000_000}}
    with caplog.at_level("WARNING"):
        deployed.start("patient")
    assert not [record for record in caplog.records if "evaluate, ranking" in record.getMessage()]


# ---- where URIs lead -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("execution", "word"),
    [
        ({"data": {"train": ["/etc"]}}, "data.train"),
        ({"data": {"train": ["s3://elsewhere/x"]}}, "data.train"),
        ({"data": {"corpus": ["s3://elsewhere/x"]}}, "data.corpus"),
        ({"model": {"parent": "/etc"}}, "model.parent"),
        ({"model": {"initial": "/etc"}}, "model.initial"),
        ({"model": {"base": "s3://elsewhere/x"}}, "model.base"),
        ({"compile": {"cache": "s3://elsewhere/x"}}, "compile.cache"),
    ],
)
def test_uris_lead_only_where_the_deployment_allows(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, execution: Config, word: str
) -> None:
    bench.shard("a.jsonl", rows(0, 100))
    bench.deployment = {"local_paths": False, "read": ["s3://lake/clicks"]}
    bench.config["model"] = {"parent": store.join(bench.root, "models", "first")}
    asked: list[str] = []
    for name in ("stat", "list_objects", "read_versioned"):
        real = getattr(store, name)
        monkeypatch.setattr(store, name, lambda uri, real=real: (asked.append(uri), real(uri))[1])
    caught = refusal(BadConfig, lambda: bench.start("one", execution), word, "`read`")
    assert caught.exit_code == ExitCode.BAD_CONFIG
    # Nothing is read before the check, except what the run was started with.
    paths = bench.paths("one")
    assert set(asked) <= {paths.input, paths.plan}


def test_the_registrys_model_leads_only_where_the_deployment_allows(bench: Bench) -> None:
    bench.shard("a.jsonl", rows(0, 100))
    bench.start("one")
    bench.deployment = {"local_paths": False}
    bench.config["model"] = {}
    bench.publish("one", "s3://elsewhere/model")
    refusal(BadData, lambda: bench.start("two"), "s3://elsewhere/model", "the registry's model")
    bench.publish("../../etc", "s3://elsewhere/model")
    refusal(BadData, lambda: bench.start("three"), "../../etc")


def test_a_kept_plan_leads_only_where_the_deployment_still_allows(bench: Bench) -> None:
    bench.shard("a.jsonl", rows(0, 100))
    bench.start("one")
    bench.deployment = {"local_paths": False}
    refusal(BadConfig, lambda: bench.start("one"), "model.parent")
