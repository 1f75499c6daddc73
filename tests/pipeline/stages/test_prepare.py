"""prepare: what it decides and lists before a row is read, that a resumed run keeps it, and every refusal with its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import BertConfig, BertModel

from pipeline import store
from pipeline.config import RunConfig
from pipeline.contract import Stage, StageResult
from pipeline.dataset.ingested import DOCUMENTS, PAIRS, ingested_tokens_uri
from pipeline.errors import BadConfig, BadData, ExitCode, MissingInput
from pipeline.run_inputs import MissingShards, Published
from tests.pipeline.stages.planning import Bench, Config, refusal, rows
from tests.tiny import make_model

# ---- what it decides -------------------------------------------------------------------------------------------------


def test_a_first_run(bench: Bench, model: Path) -> None:
    uris = [bench.shard("a.jsonl", rows(0, 120)), bench.shard("b.jsonl.gz", rows(120, 200))]
    output = bench.prepare("first")
    inputs = bench.inputs("first")
    assert [(shard.uri, shard.kind) for shard in inputs.shards] == [
        *((uri, DOCUMENTS) for uri in uris),
        *((uri, PAIRS) for uri in uris),
    ]
    assert len({shard.rows for shard in inputs.shards}) == len({shard.tokens for shard in inputs.shards}) == 4
    assert all(shard.of_pairs and shard.size == store.stat(shard.uri).size for shard in inputs.shards)  # type: ignore[union-attr]
    assert (inputs.world.kind, inputs.world.ranks, inputs.world.precision) == ("cpu", 4, "fp32")
    assert (inputs.parent.uri, inputs.parent.folder, inputs.parent.run) == (str(model), str(model), None)
    assert inputs.parent.sha256 == store.sha256_file(model / "model.safetensors")
    assert (inputs.published, inputs.lineage, inputs.published_lineage) == (None, (), ())
    tokenizer = inputs.tokenizer
    assert (tokenizer.cap, tokenizer.prefix, tokenizer.suffix, tokenizer.side) == (48, 1, 1, "right")
    assert bench.missing("first") == MissingShards(shards=inputs.shards, children=2)
    assert output.metrics == {**inputs.summary(), "ingest_children": 2, "mine_children": 0}
    assert output.metrics["computes"] == "cpu in fp32"
    assert output.outputs["inputs"].sha256 == store.sha256(bench.paths("first").inputs)
    assert StageResult.from_json(store.read_bytes(bench.paths("first").result(Stage.PREPARE))).fingerprint == ""


def test_only_what_is_not_ingested_needs_ingesting(bench: Bench) -> None:
    for number in range(6):
        bench.shard(f"{number}.jsonl", rows(10 * number, 10 * number + 10))
    assert bench.prepare("one").metrics["ingest_children"] == 4
    assert bench.prepare("two", {"data": {"ingest_children": 9}}).metrics["ingest_children"] == 6
    bench.ingest("one")
    assert bench.prepare("one").metrics["ingest_children"] == 0
    bench.shard("6.jsonl", rows(100, 110))
    bench.shard("0.jsonl", rows(200, 211))
    assert bench.prepare("three").metrics["ingest_children"] == 2
    # A run that was listed before keeps its list.
    assert len(bench.inputs("one").shards_of(PAIRS)) == 6
    # A damaged one is ingested again.
    shard = bench.inputs("one").shards[3]
    store.delete(f"{ingested_tokens_uri(bench.root, shard.rows, shard.tokens)}/tokens-00000.arrow")
    assert bench.prepare("four").metrics["ingest_children"] == 3


def test_other_columns_and_another_hold_out_key_are_other_rows(bench: Bench) -> None:
    bench.shard("a.jsonl", rows(0, 50))
    found = {}
    for run, data in {"one": {}, "columns": {"columns": {"query": "title"}}, "by": {"holdout_by": "query"}}.items():
        bench.prepare(run, {"data": data})
        found[run] = {shard.kind: shard.rows for shard in bench.inputs(run).shards}
    assert len({names[PAIRS] for names in found.values()}) == 3
    assert found["one"][DOCUMENTS] == found["by"][DOCUMENTS] != found["columns"][DOCUMENTS]
    assert bench.inputs("one").identity == bench.inputs("by").identity != bench.inputs("columns").identity


def test_a_corpus_of_its_own(bench: Bench) -> None:
    bench.shard("a.jsonl", rows(0, 60))
    uri = bench.shard("c.jsonl", [{"id": 1, "text": "text"}], folder="corpus")
    bench.prepare("run", {"data": {"corpus": [f"{bench.root}/corpus"]}})
    inputs = bench.inputs("run")
    assert [(shard.uri, shard.of_pairs) for shard in inputs.shards_of(DOCUMENTS)] == [(uri, False)]
    assert len(inputs.shards_of(PAIRS)) == 1


def test_every_format_in_object_storage(bench: Bench, model: Path, s3_root: str, tmp_path: Path) -> None:
    bench = Bench(s3_root, bench.scratch, model)
    parent = f"{s3_root}/parent"
    store.upload_folder(model, parent)
    bench.config["model"]["parent"] = parent
    one = bench.shard("a.jsonl.gz", rows(0, 60))
    pq.write_table(pa.Table.from_pylist(rows(60, 120)), tmp_path / "b.parquet")
    store.upload(tmp_path / "b.parquet", f"{s3_root}/data/b.parquet")
    bench.config["data"]["train"] = [one, f"{s3_root}/data"]
    bench.prepare("run")
    inputs = bench.inputs("run")
    found = {info.uri: (info.etag, info.modified) for info in store.list_objects(f"{s3_root}/data")}
    assert {shard.uri: (shard.version, shard.modified) for shard in inputs.shards_of(PAIRS)} == found
    assert inputs.parent.folder == parent


@pytest.mark.parametrize(
    ("instructions", "seconds", "computes"),
    [
        (True, 1.0, "cpu in bf16"),
        (True, 3.0, "cpu in fp32: bf16 is no faster here"),
        (False, 1.0, "cpu in fp32: bf16 is no faster here"),
    ],
)
def test_the_metrics_say_which_precision_auto_chose_and_why(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, instructions: bool, seconds: float, computes: str
) -> None:
    monkeypatch.setattr("pipeline.backends.device.processor_computes_bf16", lambda: instructions)
    times = {torch.bfloat16: seconds, torch.float32: 2.0}
    monkeypatch.setattr("pipeline.backends.device.product_seconds", times.__getitem__)
    bench.shard("a.jsonl", rows(0, 130))
    bench.config["device"]["precision"] = "auto"
    assert bench.prepare("run").metrics["computes"] == computes


# ---- models ----------------------------------------------------------------------------------------------------------


def test_the_parents_runs_are_known(bench: Bench) -> None:
    bench.shard("week-1.jsonl", rows(0, 200))
    bench.week("one")
    bench.shard("week-2.jsonl", rows(200, 300))
    bench.week("two")
    bench.prepare("three")
    inputs = bench.inputs("three")
    assert (inputs.parent.run, inputs.lineage, inputs.published_lineage) == ("two", ("one", "two"), ())
    assert inputs.published == Published(run="two", folder=str(bench.model), sha256=inputs.parent.sha256, embeddings="e", epoch=0)


def test_rows_of_another_identity_are_refused_or_all_new(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.shard("week-1.jsonl", rows(0, 200))
    bench.week("one")
    columns = {"columns": {"query": "query {query}"}}
    error = refusal(
        BadConfig,
        lambda: bench.prepare("two", {"data": columns}),
        "run one",
        "data.train",
        "'query {query}'",
        "data.new_identity=true",
    )
    assert error.exit_code == ExitCode.BAD_CONFIG
    with caplog.at_level("WARNING"):
        bench.prepare("three", {"data": {**columns, "new_identity": True}})
    assert bench.inputs("three").lineage == ()
    assert "every row counts as new" in caplog.text


def test_a_parent_without_a_record_of_its_rows(bench: Bench, model: Path) -> None:
    bench.shard("a.jsonl", rows(0, 100))
    bench.publish("gone", str(model))
    bench.config["model"] = {}
    words = ("seen/gone/record.json", "data.new_identity=true")
    assert refusal(MissingInput, lambda: bench.prepare("run"), *words).exit_code == ExitCode.MISSING_INPUT
    store.write_bytes(f"{bench.root}/seen/gone/record.json", b'{"run": 3}')
    refusal(BadData, lambda: bench.prepare("run"), "seen/gone/record.json")
    bench.prepare("new", {"data": {"new_identity": True}})
    assert bench.inputs("new").lineage == ()
    store.write_bytes(f"{bench.root}/registry/current.json", b"[]")
    refusal(BadData, lambda: bench.prepare("run"), "registry/current.json")


def test_the_initial_model_is_the_first_runs_only(bench: Bench, model: Path) -> None:
    bench.config["model"] = {"initial": str(model)}
    bench.shard("week-1.jsonl", rows(0, 200))
    bench.start("one")
    assert (bench.plan("one").parent.uri, bench.plan("one").parent.run) == (str(model), None)
    store.upload_folder(model, bench.paths("one").model)
    bench.train("one")
    bench.publish("one", bench.paths("one").model)
    bench.shard("week-2.jsonl", rows(200, 280))
    bench.start("two")
    plan = bench.plan("two")
    assert (plan.parent.uri, plan.parent.run) == (bench.paths("one").model, "one")
    # Its parent is all that a run knows of it: where there is another, the initial model may be gone and changes nothing.
    gone = RunConfig.model_validate({**plan.config.model_dump(), "model": {"initial": "/gone"}})
    assert plan.model_copy(update={"config": gone}).sealed().fingerprint == plan.fingerprint
    bench.config["model"] = {"initial": "/gone"}
    bench.start("again")
    assert bench.plan("again").row_files == plan.row_files
    # An execution may say otherwise, on purpose.
    bench.prepare("three", {"model": {"parent": str(model)}})
    assert (bench.inputs("three").parent.uri, bench.inputs("three").lineage) == (str(model), ())


def test_the_published_model_is_noted_whatever_the_parent(bench: Bench, model: Path, tmp_path: Path) -> None:
    bench.shard("a.jsonl", rows(0, 100))
    bench.week("one")
    bench.config["model"] = {"parent": str(model)}
    published = f"{tmp_path}/published"
    store.upload_folder(model, published)
    bench.publish("one", published)
    bench.prepare("run")
    inputs = bench.inputs("run")
    assert inputs.published == Published(run="one", folder=published, sha256=inputs.parent.sha256, embeddings="e", epoch=0)
    assert (inputs.parent.uri, inputs.lineage, inputs.published_lineage) == (str(model), (), ("one",))
    bench.prepare("nowhere", {"registry": None})
    assert bench.inputs("nowhere").published is None
    bench.publish("one", f"{tmp_path}/gone")
    error = refusal(MissingInput, lambda: bench.prepare("refused"), "the published model is gone", f"{tmp_path}/gone", "registry")
    assert error.exit_code == ExitCode.MISSING_INPUT


def test_a_published_model_whose_graphs_are_others(bench: Bench, model: Path, tmp_path: Path) -> None:
    bench.shard("a.jsonl", rows(0, 100))
    bench.week("one")
    make_model(tmp_path / "published", head=16)
    bench.publish("one", f"{tmp_path}/published")
    bench.prepare("run", {"nodes": 1, "device": {"kind": "xla", "ranks_per_node": 1}, "model": {"parent": str(model)}})
    published = bench.inputs("run").published
    assert published is not None
    assert (published.own_tokens, published.same_graphs) == (True, False)


def test_a_bare_weight_file_is_converted_into_the_run_folder(bench: Bench, model: Path) -> None:
    bench.shard("a.jsonl", rows(0, 100))
    bench.prepare("run", {"model": {"parent": str(model / "model.safetensors"), "base": str(model)}})
    parent = bench.inputs("run").parent
    assert parent.folder == f"{bench.root}/runs/run/prepare/parent"
    assert parent.uri == str(model / "model.safetensors")
    assert store.exists(store.join(parent.folder, "modules.json"))


def test_a_tokenizer_of_another_model(bench: Bench, model: Path, tmp_path: Path) -> None:
    bench.shard("a.jsonl", rows(0, 100))
    other = store.download_folder(str(model), tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    small = BertConfig(**{**config, "vocab_size": 20})
    BertModel(small, add_pooling_layer=False).save_pretrained(other)
    refusal(BadConfig, lambda: bench.prepare("run", {"model": {"parent": str(other)}}), "20 rows in the embedding table")


# ---- a run that resumes ----------------------------------------------------------------------------------------------


def test_inputs_are_kept(bench: Bench) -> None:
    bench.shard("a.jsonl", rows(0, 100))
    first = bench.prepare("run", {"train": {"epochs": 2}})
    before = store.read_bytes(bench.paths("run").inputs)
    bench.shard("b.jsonl", rows(100, 200))
    bench.config["train"]["batch_size"] = 8  # the deployment may have moved on
    again = bench.prepare("run", {"run": "run", "share": "weekly", "train": {"epochs": 2}})
    assert store.read_bytes(bench.paths("run").inputs) == before
    assert again == first


def test_of_two_prepares_the_first_one_counts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.shard("a.jsonl", rows(0, 100))
    bench.prepare("run")
    first = store.read_bytes(bench.paths("run").inputs)
    monkeypatch.setattr("pipeline.stages.prepare.kept_inputs", lambda paths, request: None)
    bench.shard("b.jsonl", rows(100, 200))
    output = bench.stage(Stage.PREPARE, "run")
    assert output is not None
    assert store.read_bytes(bench.paths("run").inputs) == first
    assert output.metrics["shards"] == 2


def test_an_input_that_contradicts_the_plan_is_refused(bench: Bench) -> None:
    bench.shard("a.jsonl", rows(0, 100))
    bench.prepare("run")
    asked = {"nodes": 1, "train": {"epochs": 1, "batch_size": 16}, "model": {"head": {"hidden": 8}}}
    error = refusal(BadConfig, lambda: bench.prepare("run", asked), "immutable")
    assert sorted(error.value) == [
        "model.head.hidden: the plan has null, the input 8",
        "nodes: the plan has 2, the input 1",
        "train.batch_size: the plan has 4, the input 16",
    ]
    refusal(BadConfig, lambda: bench.prepare("run", {"train": {"step": 5}}), "did you mean train.steps")
    refusal(BadConfig, lambda: bench.prepare("run", allowed_nodes=(1,)), "nodes = 2")


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
        ({"train": {"length": 64}}, ["train.length: 64", "at most 48"]),
        ({"embed": {"length": 49}}, ["embed.length: 49"]),
        ({"train": {"query_length": 64, "length": 64}, "embed": {"length": 64}}, ["train.query_length: 64"]),
        ({"train": {"query_length": 32}, "embed": {"length": 24}}, ["train.query_length 32", "embed.length, 24"]),
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
        ({"model": {"pooling": "max"}}, ["model.pooling"]),
        ({"train": {"dimensions": [16, 8, 16]}}, ["train.dimensions", "stands there twice"]),
        (
            {"train": {"dimensions": [16, 32]}, "embed": {"dimensions": 40}},
            ["train.dimensions: 32", "embed.dimensions: 40", "below 32"],
        ),
        ({"train": {"dimensions": [24]}, "model": {"head": [{"out": 40}, {"out": 24}]}}, ["train.dimensions: 24", "below 24"]),
        ({"model": {"head": []}}, ["model.head", "either `hidden` or a list of layers"]),
        ({"model": {"head": {"hidden": 8, "layers": [{"out": 8}]}}}, ["model.head", "either `hidden` or a list of layers"]),
        ({"model": {"head": [{"out": 0}]}}, ["model.head.layers.0.out"]),
        ({"model": {"head": [{"out": 8, "activation": "selu"}]}}, ["model.head.layers.0.activation"]),
        ({"model": {"head_key": "mlp"}}, ["model.head_key", "exactly one {}"]),
        ({"model": {"parent": None}}, ["registry/current.json", "set model.initial"]),
        ({"model": {"parent": None}, "registry": None}, ["registry = None", "set model.initial"]),
    ],
)
def test_a_bad_configuration_is_refused(execution: Config, words: list[str], bench: Bench) -> None:
    bench.shard("a.jsonl", rows(0, 100))
    error = refusal(BadConfig, lambda: bench.prepare("run", execution), *words)
    assert error.exit_code == ExitCode.BAD_CONFIG
    assert not store.exists(bench.paths("run").inputs)


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
    error = refusal(MissingInput, lambda: bench.prepare("run", execution), *words)
    assert error.exit_code == ExitCode.MISSING_INPUT


def test_input_json(bench: Bench) -> None:
    refusal(MissingInput, lambda: bench.stage(Stage.PREPARE, "run"), "input.json")
    store.write_bytes(bench.paths("run").input, b'{"executoin": {}}')
    refusal(BadConfig, lambda: bench.stage(Stage.PREPARE, "run"), "executoin")
    store.write_bytes(bench.paths("run").input, b"{")
    refusal(BadConfig, lambda: bench.stage(Stage.PREPARE, "run"), "input.json")


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
    output = bench.prepare("run")
    memory = bench.inputs("run").memory
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
    words = ("embeddings and scores", "at most 16.00 GiB per rank's device", "train.batch_size=")
    error = refusal(BadConfig, lambda: bench.prepare("huge"), *words)
    assert error.exit_code == ExitCode.BAD_CONFIG
    assert not store.exists(bench.paths("huge").inputs)
    suggested = next(part for part in error.remedy.split("; or ") if part.startswith("train.batch_size="))
    found = dict(part.split("=") for part in suggested.removesuffix(" together fit").split(", "))
    bench.prepare("smaller", {"train": {key.removeprefix("train."): int(value) for key, value in found.items()}})
    memory = bench.inputs("smaller").memory
    assert memory is not None
    # Suggested is a divisor of the batch: the next larger one is twice as large at most.
    assert 4 * 2**30 < memory.device <= 16 * 2**30


def test_a_host_with_too_little_memory_is_refused(bench: Bench) -> None:
    bench.shard("a.jsonl", rows(0, 100))
    bench.config["device"]["host_memory_gib"] = 0.5
    refusal(BadConfig, lambda: bench.prepare("run"), "Python and its libraries", "at most 0.50 GiB per node's host")


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
    caught = refusal(BadConfig, lambda: bench.prepare("one", execution), word, "`read`")
    assert caught.exit_code == ExitCode.BAD_CONFIG
    # Nothing is read before the check, except what the run was started with.
    paths = bench.paths("one")
    assert set(asked) <= {paths.input, paths.inputs}


def test_the_registrys_model_leads_only_where_the_deployment_allows(bench: Bench) -> None:
    bench.shard("a.jsonl", rows(0, 100))
    bench.prepare("one")
    bench.deployment = {"local_paths": False}
    bench.config["model"] = {}
    bench.publish("one", "s3://elsewhere/model")
    refusal(BadData, lambda: bench.prepare("two"), "s3://elsewhere/model", "the registry's model")
    bench.publish("../../etc", "s3://elsewhere/model")
    refusal(BadData, lambda: bench.prepare("three"), "../../etc")


def test_a_kept_plan_leads_only_where_the_deployment_still_allows(bench: Bench) -> None:
    bench.shard("a.jsonl", rows(0, 100))
    bench.prepare("one")
    bench.deployment = {"local_paths": False}
    refusal(BadConfig, lambda: bench.prepare("one"), "model.parent")
