"""The kind `neuron` end to end without Trainium: real supervisors and torchrun, real torch-xla, moto's S3.

What only Trainium has is played by tests/standins: torch-neuronx, neuron_parallel_compile and the runtime's use of the cache.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from pipeline import store
from pipeline.backends.device import open_device
from pipeline.config import build_config
from pipeline.config.train import MineConfig
from pipeline.contract import RunPaths, Stage, StageFailure, StageResult
from pipeline.dataset.ids import id_hash
from pipeline.dataset.ingested import DOCUMENTS, PAIRS, IngestedShard
from pipeline.dataset.tokens import TextTokenizer
from pipeline.errors import BadConfig, Defect, TrnpipeError
from pipeline.evaluation.holdout import read_holdout
from pipeline.graphs import fingerprint
from pipeline.graphs.compiled import GraphSet, read_set, traces_uri, write_set
from pipeline.graphs.fingerprint import missing_sets, plan_graphs, set_uri
from pipeline.model.encoder import prepare_for_inference
from pipeline.model.folder import inspect_folder, load_encoder, save_folder
from pipeline.model.inference import encode
from pipeline.model.shape import read_shape
from pipeline.plan import EmbedPlan, RunPlan
from pipeline.ports import free_port
from pipeline.run.context import StageContext, StageOutput
from pipeline.run.heartbeat import Heartbeat
from pipeline.run.world import World as RankWorld
from pipeline.run_inputs import GraphsPlan, MissingShards, PlannedWorld, Published, RunInputs
from pipeline.sdk import compile_cache
from pipeline.sdk.compile_cache import GraphState
from pipeline.stages import evaluate, mine
from pipeline.stages.compile import LOADING, cached_graphs, compile_on_neuron
from tests.pipeline.conftest import make_texts
from tests.pipeline.ingesting import ingest, name_shard, plan_documents, tokenizer_plan
from tests.pipeline.stages.planning import Bench, rows
from tests.pipeline.training.planned import plan_training
from tests.trainium import COMPILER, STANDINS, TrainiumHost, write_parallel_compile

pytest.importorskip("torch_xla", reason="torch-xla exists for Linux on x86-64 only")

SECTIONS: dict[str, Any] = {
    "device": {"precision": "bf16"},
    "embed": {"length": 32, "tokens_per_batch": 256},
    "compile": {"trial_steps": 2, "parallel": 3},
    "evaluate": {"bootstrap_samples": 100},
    "gate": {"undecided": "accept", "max_drop": 1},
}
TRAIN: dict[str, Any] = {"steps": 4, "rows": 40, "length": 16, "learning_rate": 2e-2, "log_every": 2}
TEXTS = make_texts(20)
HLO = bytes.fromhex("0a01661a190a016612120a01781209706172616d657465721a02100b28013001")
"""A module that returns its input, a number."""

COMMAND = """
from pipeline.cli import main
from pipeline.host import supervisor
# What a job definition allows, this machine may not; so few ranks need few.
supervisor.OPEN_FILES = 0
main()
"""
"""`trnpipe`."""


@dataclass
class Account:
    """A bucket and a Trainium host, as a job's container finds them.

    Attributes:
        root: URI of the bucket.
        environment: of processes on the host.
        records: folder in which every process that loads torch-xla leaves its environment.
    """

    root: str
    folder: Path
    environment: dict[str, str]
    records: Path

    def plan(
        self, run: str, *, nodes: int = 1, ranks: int = 1, sections: dict[str, Any] | None = None
    ) -> tuple[RunPaths, RunPlan]:
        """A run of the kind neuron, with some ranks per node, whose corpus is TEXTS."""
        paths = RunPaths(f"{self.root}/runs/{run}")
        settings = {**SECTIONS, **(sections or {})}
        plan = plan_training(paths, self.folder / run, kind="neuron", ranks=ranks, sections=settings, **TRAIN)
        world = plan.world.model_copy(update={"nodes": nodes})
        backbone, _ = inspect_folder(self.folder / run / "parent", plan.config.model)
        graphs = plan_graphs(plan.config, world, backbone, self.root)
        plan = plan.model_copy(update={"world": world, "graphs": graphs, "embed": self._corpus(run)}).sealed()
        store.write_bytes(paths.plan, plan.to_json())
        return paths, plan

    def _corpus(self, run: str) -> EmbedPlan:
        tokenizer = TextTokenizer(self.folder / run / "parent")
        shard = name_shard(f"{run}.jsonl", DOCUMENTS, tokenizer=tokenizer_plan(tokenizer))
        rows = [{"id": identifier, "text": text, "line": line} for line, (identifier, text) in enumerate(TEXTS, 1)]
        ingest(self.root, shard, rows, tokenizer)
        return plan_documents(self.root, [shard], tokenizer)

    def start(self, stage: Stage, paths: RunPaths, tool: dict[str, Any] | None = None, **extra: str) -> Job:
        """The stage's job on this host.

        Args:
            tool: what neuron_parallel_compile does.
        """
        log = self.folder / f"{paths.run_id}-{stage}-{len(list(self.folder.iterdir()))}.txt"
        environment = self.environment | {"STANDIN_TOOL": json.dumps(tool or {})} | extra
        command = [sys.executable, "-c", COMMAND, "stage", stage.value, "--run", paths.root]
        with open(log, "wb") as stream:
            return Job(subprocess.Popen(command, env=environment, stdout=stream, stderr=stream), log)

    def stage(self, stage: Stage, paths: RunPaths, **settings: Any) -> StageResult:
        """The result of a stage that must succeed."""
        job = self.start(stage, paths, **settings)
        assert job.wait() == 0, job.log.read_text()
        return StageResult.from_json(store.read_bytes(paths.result(stage)))


@dataclass
class Job:
    """One node's container, and its log."""

    process: subprocess.Popen[bytes]
    log: Path

    def wait(self) -> int:
        try:
            return self.process.wait(900)
        finally:
            self.process.kill()


@pytest.fixture(scope="module")
def account(s3_endpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Account]:
    folder = tmp_path_factory.mktemp("neuron")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
            patch.delenv(name, raising=False)
        patch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
        patch.setenv("AWS_ACCESS_KEY_ID", "testing")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        store._s3_client_of.cache_clear()
        host = TrainiumHost(folder / "host", patch)
        write_parallel_compile(host.tools)
        (folder / "records").mkdir()
        boto3.resource("s3").create_bucket(Bucket="trnpipe-neuron")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_BATCH", "TRNPIPE"))}
        environment |= {
            "PYTHONPATH": f"{STANDINS}{os.pathsep}{Path.cwd()}",
            "STANDIN_RECORDS": str(folder / "records"),
            "STANDIN_HOST": str(host.root),
            "OMP_NUM_THREADS": "1",
            # Unoptimized code compiles in half the time, and the graphs are the same.
            "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
            "TRNPIPE_PUBLISH_SECONDS": "0.2",
            "TRNPIPE_SETTLE_SECONDS": "2",
            "TRNPIPE_PEER_GRACE_SECONDS": "2",
            # What samples set, and no gang survives.
            "NEURON_RT_ROOT_COMM_ID": "localhost:48620",
        }
        yield Account("s3://trnpipe-neuron", folder, environment, folder / "records")
    store._s3_client_of.cache_clear()


Run = tuple[RunPaths, RunPlan]


def graphs_of(plan: RunPlan) -> GraphsPlan:
    assert plan.graphs is not None
    return plan.graphs


@pytest.fixture(scope="module")
def compiled_run(account: Account) -> tuple[Account, RunPaths, RunPlan, StageResult]:
    """A run after compile, whose cache a killed compiler had left locked."""
    paths, plan = account.plan("week-1")
    store.write_bytes(f"{graphs_of(plan).cache}/{COMPILER}/MODULE_1+1/model.hlo_module.pb.lock", b"")
    return account, paths, plan, account.stage(Stage.COMPILE, paths)


@pytest.mark.long
def test_compile_fills_the_cache_and_stores_traces(compiled_run: Any) -> None:
    account, _, plan, result = compiled_run
    graphs = graphs_of(plan)
    assert missing_sets(account.root, graphs) == []
    trained = read_set(set_uri(account.root, "train", graphs.train)).graphs
    states = compile_cache.modules(graphs.cache)
    assert set(trained) == set(states)
    assert set(states.values()) == {GraphState.DONE}
    assert all(graph is not None and graph.size > 0 for graph in trained.values())
    # A training step is among them, with its packed rows.
    assert any("s64[32,16]" in graph.inputs for graph in trained.values() if graph)

    traces = {info.uri.rsplit("/", 1)[-1] for info in store.list_objects(traces_uri(account.root, graphs.infer))}
    assert traces == {"encode.pt"}
    assert set(read_set(set_uri(account.root, "infer", graphs.infer)).graphs) == traces

    metrics = result.metrics
    assert metrics["compiles"] is True
    assert (metrics["graphs"], metrics["infer_graphs"]) == (len(trained), 1)
    assert (metrics["train_compiled"], metrics["train_cached"]) == (len(trained), 0)
    assert 0 < metrics["train_seconds"] <= metrics["seconds"]
    # With every graph run once, which met none that was not compiled.
    assert 0 < metrics["loading_seconds"] <= metrics["seconds"]
    assert (metrics["train"], metrics["infer"]) == (graphs.train, graphs.infer)


@pytest.mark.long
def test_the_flags_that_were_planned_reach_the_compilers(compiled_run: Any, tmp_path: Path) -> None:
    account, _, plan, _ = compiled_run
    graphs = graphs_of(plan)
    planned = graphs.compiler_flags.split()
    assert planned[-1] == "--retry_failed_compilation"
    # The optimizer's graph is one of these: nothing casts its arithmetic.
    assert {"--target=trn1", "--auto-cast=none"} < set(planned)
    assert {"--auto-cast=matmult", "--auto-cast-type=bf16"} < set(graphs.infer_compiler_flags.split())
    for key in compile_cache.modules(graphs.cache):
        assert store.read_json(f"{graphs.cache}/{key}/compile_flags.json") == planned[:-1]
    for info in store.list_objects(traces_uri(account.root, graphs.infer)):
        form = torch.jit.load(str(store.download(info.uri, tmp_path / "form.pt")))
        assert form.compiler_args == graphs.infer_compiler_flags.split()


@pytest.mark.long
def test_compile_leaves_nothing_behind_but_what_it_made(compiled_run: Any) -> None:
    account, paths, _, _ = compiled_run
    # The trial's ranks trained, validated and made a checkpoint; nothing of that is in the run folder.
    left = {info.uri.removeprefix(f"{paths.root}/") for info in store.list_objects(paths.root)}
    written = {name for name in left if not name.startswith(("plan/rows/", "compile/attempts/"))}
    assert written == {"plan.json", "compile/result.json", "compile/node-00000.json", "compile/progress-00000.json"}
    assert not [info for info in store.list_objects(f"{account.root}/graphs") if "in-use" in info.uri or ".lock" in info.uri]


@pytest.mark.long
def test_a_second_call_does_nothing(compiled_run: Any) -> None:
    account, paths, plan, first = compiled_run
    result = account.stage(Stage.COMPILE, paths, tool={"trial": False, "fail": "must not be called"})
    assert result.metrics == {"compiles": False, "graphs": 0, "reason": "both compiled sets are there"}
    # Nor does the next run, of another parent.
    _, later = account.plan("week-2", sections={"seed": 6})
    assert later.graphs == plan.graphs
    store.write_bytes(paths.result(Stage.COMPILE), first.to_json())


def environments(account: Account, tag: str) -> list[dict[str, str]]:
    """Of the processes under this tag that loaded torch-xla."""
    found = [json.loads(path.read_text()) for path in account.records.iterdir()]
    return [environment for environment in found if environment.get("NEURON_PROCESS_TAG") == tag]


@pytest.fixture(scope="module")
def trained_run(compiled_run: Any) -> tuple[Account, RunPaths, RunPlan, StageResult]:
    account, paths, plan, _ = compiled_run
    return account, paths, plan, account.stage(Stage.TRAIN, paths)


@pytest.mark.long
def test_training_compiles_nothing(trained_run: Any) -> None:
    _, paths, _, result = trained_run
    graphs = result.metrics["graphs"]
    assert (graphs["new"], graphs["fallbacks"]) == (0, {})
    assert graphs["compiled"] > 0
    assert store.read_json(paths.graphs(Stage.TRAIN))["new"] == []
    assert (result.metrics["device"], result.metrics["precision"], result.metrics["steps"]) == ("neuron", "bf16", 4)
    assert result.metrics["resumed_from"] is None


@pytest.mark.long
def test_a_rank_has_the_variables_of_its_node(trained_run: Any) -> None:
    account, _, plan, _ = trained_run
    (environment,) = environments(account, "week-1-train")
    expected = {
        "PJRT_DEVICE": "NEURON",
        "NEURON_CC_FLAGS": graphs_of(plan).compiler_flags,
        "NEURON_COMPILE_CACHE_URL": graphs_of(plan).cache,
        "NEURON_PROCESS_TAG": "week-1-train",
        "NEURON_RT_EXEC_TIMEOUT": "600",
        "WORLD_SIZE": "1",
    }
    assert {name: environment.get(name) for name in expected} == expected
    # torch-xla derives these from torchrun's names.
    assert not {"NEURON_RT_ROOT_COMM_ID", "NEURON_RT_VISIBLE_CORES", "NEURON_EXTRACT_GRAPHS_ONLY"} & set(environment)
    # The stage's own process, the one that compares traced encoders, the ranks that run what is compiled, those that extract it.
    names = ("NEURON_EXTRACT_GRAPHS_ONLY", "TRNPIPE_TRIAL_LOADS", "NEURON_RT_VISIBLE_CORES")
    of_compile = sorted(environments(account, "week-1-compile"), key=lambda one: [name in one for name in names])
    marks = [[name in one for name in names] for one in of_compile]
    assert marks == [[False, False, False], [False, False, True], [False, True, False], [True, False, False]]
    assert of_compile[1]["NEURON_RT_VISIBLE_CORES"] == "0"
    trial = of_compile[-1]
    assert {name: trial[name] for name in ("NEURON_CC_FLAGS", "NEURON_COMPILE_CACHE_URL")} == {
        name: expected[name] for name in ("NEURON_CC_FLAGS", "NEURON_COMPILE_CACHE_URL")
    }


@pytest.mark.long
def test_evaluate_compares_both_models_through_traces(trained_run: Any, tmp_path: Path) -> None:
    account, paths, plan, _ = trained_run
    metrics = account.stage(Stage.EVALUATE, paths).metrics
    assert metrics["queries"] == 40
    assert metrics["graphs"] == {"compiled": 0, "new": 0, "last_compiled_step": 0, "fallbacks": {}}
    context = context_of(paths, Stage.EVALUATE, tmp_path)
    holdout = read_holdout(store.local_folder(paths.rows, context.scratch / "rows"))
    device = open_device("cpu", "bf16", RankWorld())
    one_swap = 0.5 / metrics["queries"]
    for measured, name, folder in (("parent", "baseline", plan.parent.folder), ("new", "new", paths.model)):
        model = evaluate.prepare(context, device, holdout, measured, folder)
        vectors = evaluate.encode_texts(context, model, 0, model.tokens)
        expected = evaluate.measure(context, model, evaluate.share_vectors(context, model, vectors))
        # Two compilers round products of bf16 differently: enough to swap the first two candidates of one query.
        assert metrics[name]["mrr@10"] == pytest.approx(expected["mrr@10"].mean(), abs=one_swap)
    assert abs(metrics["new"]["mrr@10"] - metrics["baseline"]["mrr@10"]) > 2 * one_swap


@pytest.mark.long
def test_embeddings_are_the_new_models(trained_run: Any, tmp_path: Path) -> None:
    account, paths, plan, _ = trained_run
    metrics = account.stage(Stage.EMBED, paths).metrics
    assert (metrics["documents"], metrics["dimension"]) == (len(TEXTS), 32)
    table = pq.read_table(store.download(paths.part(0, 1), tmp_path / "part.parquet"))
    ids = [identifier for identifier, _ in TEXTS]
    assert table["id"].to_pylist() == sorted(ids, key=id_hash)
    found = np.stack(table["embedding"].to_numpy())[[table["id"].to_pylist().index(identifier) for identifier in ids]]
    expected = [
        embeddings(store.local_folder(uri, tmp_path / name))
        for name, uri in (("new", paths.model), ("parent", plan.parent.folder))
    ]
    # In fp32 here, in bf16 there.
    assert 0.999 < (found * expected[0]).sum(axis=1).min() < 1 - 1e-6
    assert (found * expected[1]).sum(axis=1).min() < 0.99


@pytest.mark.long
def test_mined_negatives_are_those_of_the_processor(trained_run: Any, tmp_path: Path) -> None:
    account, paths, plan, _ = trained_run
    account.stage(Stage.EMBED, paths)
    manifest, folder = f"{account.root}/published.json", store.local_folder(paths.model, tmp_path / "model")
    store.write_json(manifest, {"parts": [{"uri": paths.part(0, 1)}], "dimension": 32})
    tokenizer = TextTokenizer(folder)
    shard = name_shard("pairs.jsonl", PAIRS, tokenizer=tokenizer_plan(tokenizer))
    rows = [{"query": " ".join(text.split()[:2]), "document": text, "line": line} for line, (_, text) in enumerate(TEXTS, 1)]
    ingest(account.root, shard, rows, tokenizer)

    def mined(kind: str, precision: str) -> list[set[int]]:
        own, mining = shard.model_copy(update={"mined": kind}), RunPaths(f"{account.root}/runs/mine-{kind}")
        train = plan.config.train.model_copy(update={"negatives": 3, "mine": MineConfig(count=3, last=6, margin=0)})
        inputs = RunInputs(
            run=mining.run_id,
            created=plan.created,
            config=plan.config.model_copy(update={"train": train}),
            parent=plan.parent,
            published=Published(run=paths.run_id, folder=paths.model, sha256="", embeddings=manifest),
            world=plan.world.model_copy(update={"kind": kind, "precision": precision}),
            graphs=plan.graphs,
            shape=read_shape(folder, plan.config.model),
            tokenizer=tokenizer_plan(tokenizer),
            shards=(own, *plan.embed.shards),
            identity={},
        )
        store.write_bytes(mining.inputs, inputs.to_json())
        missing = MissingShards(shards=(), children=1, to_mine=(own,), mine_children=1)
        store.write_bytes(mining.missing, missing.model_dump_json().encode())
        if kind == "neuron":
            job = account.start(Stage.MINE, mining)
            assert job.wait() == 0, job.log.read_text()
            # faiss logs each build of its library that is not installed.
            assert "faiss" not in job.log.read_text()
            # The search is the core's: it was traced.
            assert "Compiler status PASS" in job.log.read_text()
        else:
            mine.run(context_of(mining, Stage.MINE, tmp_path))
        found = IngestedShard(account.root, own).mined(0, 0, len(rows))
        return [set(negatives) for batch in found for negatives in batch["negative_hashes"].to_pylist()]

    found, expected = mined("neuron", "bf16"), mined("cpu", "fp32")
    assert sum(map(len, expected)) > len(rows)
    # In bf16 there: documents that are about as near may change their order.
    assert np.mean([len(one & other) / len(other) for one, other in zip(found, expected, strict=True) if other]) > 0.9


def embeddings(folder: Path) -> np.ndarray:
    """Of TEXTS, on kind cpu in fp32."""
    encoder = load_encoder(folder, build_config(SECTIONS).model)
    prepare_for_inference(encoder, fused_attention=True)
    texts = TextTokenizer(folder).encode([text for _, text in TEXTS], 32)
    device = open_device("cpu", "fp32", RankWorld())
    return encode(encoder.eval(), device, texts, 32, 256).embeddings.numpy()


STALE = """
import os, sys
from pathlib import Path
from pipeline.contract import RunPaths, Stage
from pipeline.errors import TrnpipeError
from pipeline import store
from pipeline.run.context import StageContext
from pipeline.run.heartbeat import Heartbeat
from pipeline.run.world import World
from pipeline.stages import embed, evaluate
from pipeline.stages.compile import trace

RUNS = {Stage.EVALUATE: evaluate.run, Stage.EMBED: embed.run}
RUNS[Stage.COMPILE] = lambda context: trace(context, context.plan.graphs)

def run(stage, root):
    scratch = Path(sys.argv[3]) / str(len(os.listdir(sys.argv[3])))
    scratch.mkdir()
    context = StageContext(stage=stage, paths=RunPaths(root), world=World(), scratch=scratch, heartbeat=Heartbeat(None, 0))
    try:
        RUNS[stage](context)
        print(stage.value, "succeeds")
    except TrnpipeError as error:
        print(stage.value, int(error.exit_code), error.what, error.value, sep="; ")

def main():
    run(Stage.COMPILE, sys.argv[1])
    os.environ["STANDIN_UNREPLACED"] = "layer.1.attention.self.key.bias"
    run(Stage.COMPILE, sys.argv[2])
    run(Stage.EVALUATE, sys.argv[1])
    run(Stage.EMBED, sys.argv[1])
    del os.environ["STANDIN_UNREPLACED"]
    run(Stage.EMBED, sys.argv[1])

if __name__ == "__main__":
    main()
"""
"""Stages in one process, with and without a weight that `replace_weights` forgets. In a file of its own: the process in which
compile tries the form loads the program again."""


@pytest.mark.slow
def test_forms_that_keep_weights_are_refused_by_compile_evaluate_and_embed(account: Account, tmp_path: Path) -> None:
    paths, plan = account.plan("stale")
    refused, other = account.plan("stale-forms", sections={"compile": {"infer_target": "inf2"}})
    graphs = graphs_of(plan)
    for kind, name in (("train", graphs.train), ("infer", graphs.infer)):
        write_set(set_uri(account.root, kind, name), GraphSet(fingerprint=name, run="stale", graphs={}))
    store.upload_folder(store.local_folder(plan.parent.folder, tmp_path / "parent"), paths.model)
    (tmp_path / "scratch").mkdir()
    (tmp_path / "stale.py").write_text(STALE)
    ended = subprocess.run(
        [sys.executable, tmp_path / "stale.py", paths.root, refused.root, tmp_path / "scratch"],
        env=account.environment | {"NEURON_RT_VISIBLE_CORES": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    found = "the traced encoder gives other embeddings than the encoder on the host"
    values = "8 x 32 tokens: least cosine nan"
    assert ended.stdout.splitlines() == [
        "compile succeeds",
        *(f"{stage}; 69; {found}; {values}" for stage in ("compile", "evaluate", "embed")),
        "embed succeeds",
    ], ended.stderr
    # What compile refuses is not stored, and what evaluate refuses has no scorecard.
    assert list(store.list_objects(traces_uri(account.root, graphs_of(other).infer))) == []
    assert not store.exists(paths.scorecard)
    assert store.exists(paths.part(0, 1))


# ---- how compile fails, and gangs ------------------------------------------------------------------------------------


def left_by_a_trial(plan: RunPlan, *modules: str) -> None:
    """What a trial would write down: these graphs, not compiled."""
    for module in modules:
        store.write_bytes(f"{graphs_of(plan).cache}/{COMPILER}/{module}/{compile_cache.HLO_FILE}", HLO)


def context_of(paths: RunPaths, stage: Stage, scratch: Path) -> StageContext:
    """Of a stage in this process, alone."""
    return StageContext(stage=stage, paths=paths, world=RankWorld(), scratch=scratch, heartbeat=Heartbeat(None, 0))


@pytest.fixture
def compile_here(account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., StageOutput | None]:
    """A function that runs compile in this process, without the trial."""

    def compile_here(paths: RunPaths, **tool: Any) -> StageOutput | None:
        monkeypatch.setenv("STANDIN_TOOL", json.dumps({"trial": False, **tool}))
        monkeypatch.setenv("PYTHONPATH", account.environment["PYTHONPATH"])
        context = context_of(paths, Stage.COMPILE, tmp_path)
        return compile_on_neuron(context, graphs_of(context.plan))

    return compile_here


@pytest.mark.parametrize(
    ("words", "temperature", "error", "remedy"),
    [
        ("[NCC_ITIN902] TensorInitialization error: BIR verification failed", 0.1, Defect, "report it"),
        ("[NCC_EOOM001] allocated memory exceeds the device memory capacity", 0.2, BadConfig, "raise train.micro_batches"),
        ("[NCC_EXTP004] The number of instructions generated exceeds the limit.", 0.3, BadConfig, "raise train.micro_batches"),
    ],
)
def test_a_graph_that_cannot_be_compiled(
    account: Account, compile_here: Any, words: str, temperature: float, error: type[TrnpipeError], remedy: str
) -> None:
    # A set and a cache of its own.
    sections = {"train": {"temperature": temperature}, "compile": {"cache": f"{account.root}/caches/{temperature}"}}
    paths, plan = account.plan(f"fails-{temperature}", sections=sections)
    cache = graphs_of(plan).cache
    left_by_a_trial(plan, "MODULE_1+1", "MODULE_2+1")
    with pytest.raises(error) as failure:
        compile_here(paths, fail=words)
    assert any(words in value for value in failure.value.value)
    assert all(value.startswith("MODULE_1+1: ") for value in failure.value.value)
    assert failure.value.rule == "1 of 2 graphs failed"
    assert remedy in failure.value.remedy
    # The forms for inference do not depend on the temperature: another test may have compiled them.
    assert set_uri(account.root, "train", graphs_of(plan).train) in missing_sets(account.root, plan.graphs)
    # What was good stays, and no other host waits for this run.
    assert compile_cache.modules(cache)[f"{COMPILER}/MODULE_2+1"] is GraphState.DONE
    assert compile_cache.others(cache, "somebody") == []


def test_locks_stay_while_another_run_compiles(account: Account, compile_here: Any) -> None:
    paths, plan = account.plan(
        "beside", sections={"compile": {"model_type": "generic", "cache": f"{account.root}/caches/beside"}}
    )
    cache = graphs_of(plan).cache
    lock = f"{cache}/{COMPILER}/MODULE_1+1/model.hlo_module.pb.lock"
    store.write_bytes(lock, b"")
    left_by_a_trial(plan, "MODULE_2+1")
    compile_cache.register(cache, "another")
    # No graph has a result then, which the summary leaves out.
    with pytest.raises(Defect, match="without a compiled form"):
        compile_here(paths)
    assert store.exists(lock)
    assert compile_cache.others(cache, "somebody") == ["another"]


def test_a_trial_that_used_another_cache_is_noticed(account: Account, compile_here: Any) -> None:
    paths, plan = account.plan("elsewhere", sections={"compile": {"optlevel": 3}})
    with pytest.raises(Defect, match="left no graph in the cache"):
        compile_here(paths)
    assert len(missing_sets(account.root, plan.graphs)) == 2


def test_a_set_is_the_graphs_that_its_trial_met(account: Account) -> None:
    """Whatever else is in the cache: graphs of other sets, some of them not compiled."""
    cache = f"{account.root}/caches/shared"
    done, left = "MODULE_1+1", "MODULE_2+1"
    for module, names in ((done, (compile_cache.HLO_FILE, "model.neff", "model.done")), (left, (compile_cache.HLO_FILE,))):
        for name in names:
            store.write_bytes(f"{cache}/{COMPILER}/{module}/{name}", HLO)
    assert set(cached_graphs(cache, [done])) == {f"{COMPILER}/{done}"}
    with pytest.raises(Defect, match="without a compiled form"):
        cached_graphs(cache, [done, left])
    with pytest.raises(Defect, match="left no graph in the cache"):
        cached_graphs(cache, ["MODULE_3+1"])


@pytest.mark.long
def test_graphs_that_do_not_fit_the_device_together_are_found_before_training(account: Account) -> None:
    """They compile, on hosts of any size; loading them takes the device's memory. (nrt_status.rst: NRT_RESOURCE)"""
    paths, plan = account.plan("too-large", sections={"compile": {"trial_steps": 2, "model_type": "unet-inference"}})
    words = "Failed to alloc DEVICE memory: 2147483648"
    job = account.start(Stage.COMPILE, paths, tool={"load": words})
    assert job.wait() == 64, job.log.read_text()
    failure = StageFailure.from_json(store.read_bytes(paths.failure(Stage.COMPILE)))
    assert any(words in value for value in failure.value)
    assert set(compile_cache.modules(graphs_of(plan).cache).values()) == {GraphState.DONE}
    # The next run meets the same.
    assert set_uri(account.root, "train", graphs_of(plan).train) in missing_sets(account.root, plan.graphs)
    assert compile_cache.others(graphs_of(plan).cache, "somebody") == []


@pytest.mark.long
def test_a_rank_of_the_trial_says_why_it_failed(account: Account) -> None:
    paths, plan = account.plan("no-parent", sections={"compile": {"optlevel": 2}})
    plan = plan.model_copy(update={"parent": plan.parent.model_copy(update={"folder": f"{account.root}/gone"})}).sealed()
    store.write_bytes(paths.plan, plan.to_json())
    job = account.start(Stage.COMPILE, paths)
    assert job.wait() == 66
    failure = StageFailure.from_json(store.read_bytes(paths.failure(Stage.COMPILE)))
    assert (failure.exit_code, failure.value) == (66, [f"{account.root}/gone"])
    # The tool's own words, and the rank's, are in the log all the same.
    assert "||NEURON_PARALLEL_COMPILE||: Command" in job.log.read_text()


@pytest.mark.long
@pytest.mark.parametrize("sharded", [False, True])
def test_a_gang_compiles(account: Account, sharded: bool) -> None:
    """Two ranks under torchrun, each with its own weights on the device, and graphs that put out zeros."""
    run = f"two-ranks{'-sharded' * sharded}"
    sections = {
        "embed": {"length": 16, "tokens_per_batch": 256},
        "train": {"shard_optimizer": sharded},
        "compile": {**SECTIONS["compile"], "cache": f"{account.root}/graphs/{run}"},
    }
    paths, plan = account.plan(run, ranks=2, sections=sections)
    metrics = account.stage(Stage.COMPILE, paths).metrics
    assert missing_sets(account.root, plan.graphs) == []
    assert metrics["graphs"] == len(compile_cache.modules(graphs_of(plan).cache))
    trial = [one for one in environments(account, f"{run}-compile") if "NEURON_EXTRACT_GRAPHS_ONLY" in one]
    loaded = [one for one in environments(account, f"{run}-compile") if LOADING in one]
    assert sorted(one["RANK"] for one in trial) == sorted(one["RANK"] for one in loaded) == ["0", "1"]


@pytest.mark.long
def test_the_leader_waits_for_the_other_node(account: Account) -> None:
    """Two ranks cannot meet on XLA's CPU client, so their trial's graph is there already."""
    paths, plan = account.plan("gang", nodes=2, sections={"compile": {"infer_target": "inf2"}})
    graphs = graphs_of(plan)
    left_by_a_trial(plan, "MODULE_1+1")
    # Nothing else is left to do for the leader.
    infer = GraphSet(fingerprint=graphs.infer, run="earlier", graphs={})
    write_set(set_uri(account.root, "infer", graphs.infer), infer)
    # An earlier attempt of the other node says nothing about this one.
    store.write_json(paths.compiled_node(1), {"attempt": 1, "job": "an-earlier-job"})
    gang = {"AWS_BATCH_JOB_NUM_NODES": "2", "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0", "TRNPIPE_LEADER_PORT": str(free_port())}
    leader = account.start(
        Stage.COMPILE, paths, tool={"trial": False}, **gang, AWS_BATCH_JOB_ID="j#0", AWS_BATCH_JOB_NODE_INDEX="0"
    )
    other = account.start(
        Stage.COMPILE,
        paths,
        tool={"trial": False, "seconds": 4},
        **gang,
        AWS_BATCH_JOB_ID="j#1",
        AWS_BATCH_JOB_NODE_INDEX="1",
        AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS="127.0.0.1",
    )
    assert (leader.wait(), other.wait()) == (0, 0), leader.log.read_text() + other.log.read_text()
    assert missing_sets(account.root, plan.graphs) == []
    modified = {info.uri: info.modified for info in store.list_objects(account.root)}
    assert modified[paths.compiled_node(1)] <= modified[set_uri(account.root, "train", graphs.train)]
    assert store.read_json(paths.compiled_node(1))["job"] == "j"


@pytest.mark.long
def test_a_gang_finds_what_a_host_without_a_device_has_compiled(account: Account) -> None:
    sections = {"embed": {"length": 16, "tokens_per_batch": 128}, "compile": {**SECTIONS["compile"], "where": "cpu"}}
    paths, plan = account.plan("beforehand", sections={**sections, "seed": 7, "train": {"temperature": 0.11}})
    cache, root = graphs_of(plan).cache, account.root
    before = set(compile_cache.modules(cache))

    def states() -> set[GraphState]:
        return {state for key, state in compile_cache.modules(cache).items() if key not in before}

    def own() -> set[str]:
        return {info.uri.removeprefix(f"{paths.root}/") for info in store.list_objects(paths.traces)}

    collected = account.stage(Stage.COLLECT, paths).metrics
    assert states() == {GraphState.COLLECTED}
    graphs = collected["graphs"] - collected["train_cached"]
    assert graphs > 0

    # Another run's graph, which the compiler refuses, is not this run's failure.
    store.write_bytes(f"{cache}/{COMPILER}/MODULE_bad7+1/{compile_cache.HLO_FILE}", HLO)
    # Nor is a form that an earlier execution left taken over.
    store.write_bytes(f"{paths.traces}/encode.pt", b"refused")
    compiled = account.stage(Stage.PRECOMPILE, paths, STANDIN_NO_DEVICE="1").metrics
    assert states() == {GraphState.DONE, GraphState.FAILED}
    assert (compiled["train_compiled"], compiled["traced"]) == (graphs, True)
    assert own() == {"precompile/traces/encode.pt"}
    assert missing_sets(root, plan.graphs) == [set_uri(root, kind, getattr(plan.graphs, kind)) for kind in ("train", "infer")]
    assert compile_cache.others(cache, "somebody") == []

    metrics = account.stage(Stage.COMPILE, paths, tool={"fail": "must not be called"}, STANDIN_NO_TRACE="1").metrics
    assert (metrics["train_compiled"], metrics["train_cached"]) == (0, collected["graphs"])
    assert metrics["graphs"] == collected["graphs"]
    assert missing_sets(root, plan.graphs) == []
    made = store.read_bytes(f"{traces_uri(root, graphs_of(plan).infer)}/encode.pt")
    assert made == store.read_bytes(f"{paths.traces}/encode.pt")


@pytest.mark.slow
def test_what_the_compiler_refuses_ends_precompile_before_a_gang_starts(account: Account) -> None:
    paths, plan = account.plan(
        "refused-early", sections={"compile": {"where": "cpu", "optlevel": 2, "cache": f"{account.root}/early"}}
    )
    left_by_a_trial(plan, "MODULE_bad7+1")
    store.write_json(paths.collected, ["MODULE_bad7+1"])
    job = account.start(Stage.PRECOMPILE, paths, STANDIN_NO_DEVICE="1")
    assert job.wait() == 69, job.log.read_text()
    failure = StageFailure.from_json(store.read_bytes(paths.failure(Stage.PRECOMPILE)))
    assert failure.what == "the compiler could not compile every graph"


# ---- planning, on a host without torch-neuronx -----------------------------------------------------------------------


def planned_graphs(bench: Bench, run: str, **changes: Any) -> GraphsPlan:
    bench.config = {**bench.config, "nodes": 1, "device": {"kind": "neuron", "ranks_per_node": 2}}
    for section, values in changes.items():
        bench.config[section] = {**bench.config.get(section, {}), **values} if isinstance(values, dict) else values
    bench.start(run)
    return graphs_of(bench.plan(run))


def test_prepare_plans_for_neuron_where_there_is_none(bench: Bench, tmp_path: Path) -> None:
    bench.shard("week-1.jsonl", rows(0, 60))
    plan = planned_graphs(bench, "week-1")
    assert bench.plan("week-1").world == PlannedWorld(kind="neuron", precision="bf16", nodes=1, ranks_per_node=2)
    assert re.fullmatch(rf"{bench.root}/graphs/neuron-cache/[0-9a-f]{{32}}", plan.cache)
    common = "--target=trn1 --model-type=transformer --optlevel=1"
    assert plan.compiler_flags == f"{common} --auto-cast=none --retry_failed_compilation"
    assert plan.infer_compiler_flags == f"{common} --auto-cast=matmult --auto-cast-type=bf16"
    assert plan.environment == {"NEURON_FUSE_SOFTMAX": "1", "ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB": "50"}
    again = bench.start("again").metrics
    assert (again["compile"], again["precompile"]) == (True, False)
    bench.config["compile"] = {"where": "cpu"}
    assert bench.start("apart").metrics["precompile"] is True
    assert bench.plan("apart").graphs == plan
    del bench.config["compile"]

    # Another week's parent of the same form, and the learning rate, are data.
    other = tmp_path / "other"
    make = load_encoder(Path(bench.config["model"]["parent"]), build_config({}).model)
    for parameter in make.parameters():
        parameter.data += 0.01
    save_folder(make, other, Path(bench.config["model"]["parent"]))
    same = planned_graphs(bench, "other-parent", model={"parent": str(other)}, train={"learning_rate": 1e-3})
    assert bench.plan("other-parent").parent.sha256 != bench.plan("week-1").parent.sha256
    assert same == plan


@pytest.mark.parametrize(
    ("changes", "train_changes", "infer_changes", "cache_changes"),
    [
        ({"compile": {"optlevel": 2}}, True, True, True),
        ({"compile": {"infer_target": "inf2"}}, False, True, False),
        ({"train": {"batch_size": 8}}, True, False, False),
        ({"nodes": 2}, True, False, True),
        ({"device": {"precision": "compiler"}}, True, True, True),
        ({"compile": {"infer_auto_cast": "all"}}, False, True, False),
        ({"compile": {"infer_auto_cast_type": "fp8_e4m3"}}, False, True, False),
        ({"embed": {"tokens_per_batch": 2048}}, True, True, False),
        ({"compile": {"retry_failed": False}}, False, False, False),
    ],
)
def test_what_changes_the_fingerprints(
    bench: Bench, changes: dict[str, Any], train_changes: bool, infer_changes: bool, cache_changes: bool
) -> None:
    bench.shard("week-1.jsonl", rows(0, 60))
    plan, other = planned_graphs(bench, "one"), planned_graphs(bench, "other", **changes)
    assert (plan.train != other.train, plan.infer != other.infer) == (train_changes, infer_changes)
    assert (plan.cache != other.cache) == cache_changes


def test_other_code_is_another_set_in_the_same_cache(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.shard("week-1.jsonl", rows(0, 60))
    plan = planned_graphs(bench, "one")
    monkeypatch.setattr(fingerprint, "sources_digest", lambda roots: "of other code")
    other = planned_graphs(bench, "other")
    assert plan.train != other.train
    assert plan.infer != other.infer
    assert plan.cache == other.cache


def test_variables_that_change_graphs_are_in_the_fingerprints(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.shard("week-1.jsonl", rows(0, 60))
    plan = planned_graphs(bench, "one")
    monkeypatch.setenv("ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB", "200")
    buckets = planned_graphs(bench, "buckets")
    assert (plan.train != buckets.train, plan.infer != buckets.infer) == (True, False)
    assert buckets.environment["ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB"] == "200"
    assert plan.cache != buckets.cache
    monkeypatch.setenv("NEURON_FUSE_SOFTMAX", "0")
    softmax = planned_graphs(bench, "softmax")
    assert (buckets.train != softmax.train, buckets.infer != softmax.infer) == (True, True)


@pytest.mark.parametrize(("cast", "flag"), [(None, "all"), ("matmult", "matmult")])
def test_the_compilers_cast_trains_by_name_and_says_its_risk(
    bench: Bench, caplog: pytest.LogCaptureFixture, cast: str | None, flag: str
) -> None:
    bench.shard("week-1.jsonl", rows(0, 60))
    bench.config = {**bench.config, "nodes": 1, "device": {"kind": "neuron", "ranks_per_node": 2, "precision": "compiler"}}
    bench.config["compile"] = {"auto_cast": cast}
    bench.start("week-1")
    assert f"--auto-cast={flag} --auto-cast-type=bf16" in graphs_of(bench.plan("week-1")).compiler_flags
    (warning,) = [record.getMessage() for record in caplog.records if "device.precision = compiler" in record.getMessage()]
    assert "trnpipe parity" in warning


def test_pinned_versions_are_in_the_fingerprints(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.shard("week-1.jsonl", rows(0, 60))
    plan = planned_graphs(bench, "one")
    pins = fingerprint.neuron_pins()
    assert set(pins) == {"torch-neuronx", "libneuronxla", "neuronx-cc"}
    monkeypatch.setattr(fingerprint, "neuron_pins", lambda: {**pins, "neuronx-cc": "2.25"})
    other = planned_graphs(bench, "other")
    assert plan.cache != other.cache
    assert plan.train != other.train
    assert plan.infer != other.infer
