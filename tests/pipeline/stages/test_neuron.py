"""The kind `neuron` end to end without Trainium: real supervisors and torchrun, real torch-xla, moto's S3.

What only Trainium has is played by tests/standins: torch-neuronx, neuron_parallel_compile and the runtime's use of the cache.
"""

from __future__ import annotations

import hashlib
import json
import os
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

from pipeline.config import build_config
from pipeline.contract import RunPaths, Stage, StageFailure, StageResult
from pipeline.data.ids import IdDigest
from pipeline.data.tokens import TextTokenizer
from pipeline.errors import BadConfig, Defect, TrnpipeError
from pipeline.model import compiled
from pipeline.model.compiled import GraphSet, missing_sets, plan_graphs, read_set, set_uri, traces_uri, write_set
from pipeline.model.encoder import prepare_for_inference
from pipeline.model.folder import inspect_folder, load_encoder, save_folder
from pipeline.model.inference import encode, encode_shapes
from pipeline.plan import EmbedPlan, GraphsPlan, PartPlan, RunPlan, Shard, Span, World
from pipeline.runtime import neuron_compile, store
from pipeline.runtime.context import StageContext, StageOutput
from pipeline.runtime.device import open_device
from pipeline.runtime.heartbeat import Heartbeat
from pipeline.runtime.neuron_compile import State
from pipeline.runtime.ranks import free_port
from pipeline.runtime.world import World as RankWorld
from pipeline.stages import evaluate
from pipeline.stages.compile import compile_on_neuron
from tests.pipeline.conftest import make_texts
from tests.pipeline.stages.test_prepare import Bench, bench, model, rows
from tests.pipeline.training.planned import plan_training
from tests.trainium import COMPILER, STANDINS, TrainiumHost, write_parallel_compile

__all__ = ["bench", "model"]

pytest.importorskip("torch_xla", reason="torch-xla exists for Linux on x86-64 only")

SECTIONS: dict[str, Any] = {
    "device": {"precision": "compiler"},
    "embed": {"buckets": [16, 32], "tokens_per_batch": 256},
    "compile": {"trial_steps": 2, "parallel": 3},
    "evaluate": {"bootstrap_samples": 100},
    "gate": {"allow_small": True, "max_drop": 1},
}
TRAIN: dict[str, Any] = {"steps": 4, "rows": 40, "buckets": [16], "learning_rate": 2e-2, "log_every": 2}
TEXTS = make_texts(20)
HLO = bytes.fromhex("0a01661a190a016612120a01781209706172616d657465721a02100b28013001")
"""A module that returns its input, a number."""

COMMAND = """
import resource
from pipeline.cli import main
from pipeline.runtime import neuron_launch
# What a job definition allows, this machine may not; so few ranks need few.
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
if hard != resource.RLIM_INFINITY and hard < neuron_launch.OPEN_FILES:
    neuron_launch.raise_open_files = lambda: None
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

    def plan(self, run: str, *, nodes: int = 1, sections: dict[str, Any] | None = None) -> tuple[RunPaths, RunPlan]:
        """A run of the kind neuron, with one rank per node, whose corpus is TEXTS."""
        paths = RunPaths(f"{self.root}/runs/{run}")
        plan = plan_training(paths, self.folder / run, kind="neuron", sections={**SECTIONS, **(sections or {})}, **TRAIN)
        world = plan.world.model_copy(update={"nodes": nodes})
        backbone, _ = inspect_folder(self.folder / run / "parent", plan.config.model)
        graphs = plan_graphs(plan.config, world, backbone, self.root)
        plan = plan.model_copy(update={"world": world, "graphs": graphs, "embed": self._corpus(run)}).sealed()
        store.write_bytes(paths.plan, plan.to_json())
        return paths, plan

    def _corpus(self, run: str) -> EmbedPlan:
        uri = f"{self.root}/corpus/{run}.jsonl"
        data = "".join(json.dumps({"id": identifier, "text": text}) + "\n" for identifier, text in TEXTS).encode()
        store.write_bytes(uri, data)
        digest = IdDigest()
        for identifier, _ in TEXTS:
            digest.add(identifier)
        shard = Shard(uri=uri, sha256=hashlib.sha256(data).hexdigest(), size=len(data), rows=len(TEXTS))
        part = PartPlan(spans=(Span(shard=0, start=0, stop=len(TEXTS)),), rows=len(TEXTS))
        return EmbedPlan(source="corpus", shards=(shard,), rows=len(TEXTS), ids=str(digest), parts=(part,), children=1)

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
            return self.process.wait(300)
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
    states = neuron_compile.modules(graphs.cache)
    assert set(trained) == set(states)
    assert set(states.values()) == {State.DONE}
    assert all(graph is not None and graph.size > 0 for graph in trained.values())
    # A training step is among them, with its batch.
    assert any("s64[8,16]" in graph.inputs for graph in trained.values() if graph)

    shapes = encode_shapes([16, 32], 256)
    traces = {info.uri.rsplit("/", 1)[-1] for info in store.list_objects(traces_uri(account.root, graphs.infer))}
    assert traces == {f"encode-{rows}x{length}.pt" for rows, length in shapes}
    assert set(read_set(set_uri(account.root, "infer", graphs.infer)).graphs) == traces

    metrics = result.metrics
    assert metrics["compiles"] is True
    assert (metrics["graphs"], metrics["infer_graphs"]) == (len(trained), 2)
    assert (metrics["train_compiled"], metrics["train_cached"]) == (len(trained), 0)
    assert 0 < metrics["train_seconds"] <= metrics["seconds"]
    assert (metrics["train"], metrics["infer"]) == (graphs.train, graphs.infer)


@pytest.mark.long
def test_the_flags_that_were_planned_reach_the_compilers(compiled_run: Any, tmp_path: Path) -> None:
    account, _, plan, _ = compiled_run
    graphs = graphs_of(plan)
    planned = graphs.compiler_flags.split()
    assert planned[-1] == "--retry_failed_compilation"
    assert {"--target=trn1", "--auto-cast=all", "--auto-cast-type=bf16"} < set(planned)
    for key in neuron_compile.modules(graphs.cache):
        assert store.read_json(f"{graphs.cache}/{key}/compile_flags.json") == planned[:-1]
    for info in store.list_objects(traces_uri(account.root, graphs.infer)):
        form = torch.jit.load(str(store.download(info.uri, tmp_path / "form.pt")))
        assert form.compiler_args == graphs.infer_compiler_flags.split()


@pytest.mark.long
def test_compile_leaves_nothing_behind_but_what_it_made(compiled_run: Any) -> None:
    account, paths, _, _ = compiled_run
    # The trial's ranks trained, validated and made a checkpoint; nothing of that is in the run folder.
    left = {info.uri.removeprefix(f"{paths.root}/") for info in store.list_objects(paths.root)}
    written = {name for name in left if not name.startswith(("prepare/rows/", "compile/attempts/"))}
    assert written == {"plan.json", "compile/result.json", "compile/node-00000.json", "compile/progress-00000.json"}
    assert not [info for info in store.list_objects(f"{account.root}/graphs") if "in-use" in info.uri or ".lock" in info.uri]


@pytest.mark.long
def test_a_second_call_does_nothing(compiled_run: Any) -> None:
    account, paths, plan, first = compiled_run
    result = account.stage(Stage.COMPILE, paths, tool={"trial": False, "fail": "nobody should call this"})
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
    assert (result.metrics["device"], result.metrics["precision"], result.metrics["steps"]) == ("neuron", "compiler", 4)
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
    own, trial = sorted(environments(account, "week-1-compile"), key=lambda one: "NEURON_EXTRACT_GRAPHS_ONLY" in one)
    assert "NEURON_EXTRACT_GRAPHS_ONLY" not in own
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
    holdout, device = evaluate.read_holdout(context), open_device("cpu", "fp32", RankWorld())
    for name, folder in (("parent", plan.parent.folder), ("new", paths.model)):
        expected = evaluate.measure(context, device, holdout, name, folder)
        assert metrics[name]["mrr@10"] == pytest.approx(expected["mrr@10"].mean(), abs=1e-6)
    assert metrics["new"]["mrr@10"] != metrics["parent"]["mrr@10"]


@pytest.mark.long
def test_embeddings_are_the_new_models(trained_run: Any, tmp_path: Path) -> None:
    account, paths, plan, _ = trained_run
    metrics = account.stage(Stage.EMBED, paths).metrics
    assert (metrics["documents"], metrics["dimension"]) == (len(TEXTS), 32)
    table = pq.read_table(store.download(paths.part(0, 1), tmp_path / "part.parquet"))
    assert table["id"].to_pylist() == [identifier for identifier, _ in TEXTS]
    found = np.stack(table["embedding"].to_numpy())
    expected = [
        embeddings(store.local_folder(uri, tmp_path / name))
        for name, uri in (("new", paths.model), ("parent", plan.parent.folder))
    ]
    np.testing.assert_allclose(found, expected[0], rtol=0, atol=1e-5)
    assert np.abs(found - expected[1]).max() > 1e-2


def embeddings(folder: Path) -> np.ndarray:
    """Of TEXTS, on kind cpu in fp32."""
    encoder = load_encoder(folder, build_config(SECTIONS).model)
    prepare_for_inference(encoder, fused_attention=True)
    texts = TextTokenizer(folder).encode([text for _, text in TEXTS], 32)
    device = open_device("cpu", "fp32", RankWorld())
    return encode(encoder.eval(), device, texts, [16, 32], 256).embeddings.numpy()


UNKNOWN_SHAPES = """
import sys, torch
from pathlib import Path
from pipeline.config import ModelConfig
from pipeline.errors import TrnpipeError
from pipeline.model.encoder import PackedEncoder
from pipeline.model.folder import load_encoder
from pipeline.runtime.neuron import TracedEncoder, all_weights, trace_encoder
traces, model, empty = map(Path, sys.argv[1:])
loaded = PackedEncoder(load_encoder(model, ModelConfig())).eval()
weights = all_weights(loaded)
encoder = TracedEncoder(traces, weights)
tokens = torch.ones((8, 32), dtype=torch.int64)
print(encoder(tokens, tokens, tokens).shape)
fewer, shorter = (tokens[:7],) * 3, (tokens[:, :31],) * 3
for call in (lambda: encoder(*fewer), lambda: encoder(*shorter), lambda: TracedEncoder(empty, weights)):
    try:
        call()
    except TrnpipeError as error:
        print(int(error.exit_code), error.what, error.rule)
trace_encoder(loaded, [(2, 8)], empty, flags=["--target=trn1"], precision="bf16")
print(TracedEncoder(empty, weights)(*(tokens[:2, :8],) * 3).shape)
"""


@pytest.mark.long
def test_a_shape_without_a_trace_is_a_defect(trained_run: Any, tmp_path: Path) -> None:
    account, paths, plan, _ = trained_run
    traces = store.local_folder(traces_uri(account.root, graphs_of(plan).infer), tmp_path / "traces")
    model = store.local_folder(paths.model, tmp_path / "model")
    (tmp_path / "empty").mkdir()
    ended = subprocess.run(
        [sys.executable, "-c", UNKNOWN_SHAPES, traces, model, tmp_path / "empty"],
        env=account.environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.stdout.splitlines() == [
        "torch.Size([32, 32])",
        *2 * ["69 no encoder was traced for this shape one of 8 x 32, 16 x 16"],
        "66 there are no traced encoders ",
        "torch.Size([2, 32])",
    ], ended.stderr


# ---- how compile fails, and gangs ------------------------------------------------------------------------------------


def left_by_a_trial(plan: RunPlan, *modules: str) -> None:
    """What a trial would write down: these graphs, not compiled."""
    for module in modules:
        store.write_bytes(f"{graphs_of(plan).cache}/{COMPILER}/{module}/{neuron_compile.HLO_FILE}", HLO)


def context_of(paths: RunPaths, stage: Stage, scratch: Path) -> StageContext:
    """Of a stage in this process, alone."""
    return StageContext(stage=stage, paths=paths, world=RankWorld(), scratch=scratch, heartbeat=Heartbeat(None, 0))


@pytest.fixture
def compile_here(account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., StageOutput | None]:
    """A function that runs compile in this process, without the trial."""

    def compile_here(paths: RunPaths, **tool: Any) -> StageOutput | None:
        monkeypatch.setenv("STANDIN_TOOL", json.dumps({"trial": False, **tool}))
        monkeypatch.setenv("PYTHONPATH", account.environment["PYTHONPATH"])
        return compile_on_neuron(context_of(paths, Stage.COMPILE, tmp_path))

    return compile_here


@pytest.mark.parametrize(
    ("words", "cast", "error", "remedy"),
    [
        ("[NCC_ITIN902] TensorInitialization error: BIR verification failed", "fp16", Defect, "compile.optlevel = 1"),
        ("[NCC_EOOM001] allocated memory exceeds the device memory capacity", "tf32", BadConfig, "lower train.batch_size"),
    ],
)
def test_a_graph_that_cannot_be_compiled(
    account: Account, compile_here: Any, words: str, cast: str, error: type[TrnpipeError], remedy: str
) -> None:
    paths, plan = account.plan(f"fails-{cast}", sections={"compile": {"auto_cast_type": cast}})
    cache = graphs_of(plan).cache
    left_by_a_trial(plan, "MODULE_1+1", "MODULE_2+1")
    with pytest.raises(error) as failure:
        compile_here(paths, fail=words)
    assert any(words in value for value in failure.value.value)
    assert all(value.startswith("MODULE_1+1: ") for value in failure.value.value)
    assert failure.value.rule == "1 of 2 graphs failed"
    assert remedy in failure.value.remedy
    assert len(missing_sets(account.root, plan.graphs)) == 2
    # What was good stays, and nobody waits for this run.
    assert neuron_compile.modules(cache)[f"{COMPILER}/MODULE_2+1"] is State.DONE
    assert neuron_compile.others(cache, "somebody") == []


def test_locks_stay_while_another_run_compiles(account: Account, compile_here: Any) -> None:
    paths, plan = account.plan("beside", sections={"compile": {"model_type": "generic"}})
    cache = graphs_of(plan).cache
    lock = f"{cache}/{COMPILER}/MODULE_1+1/model.hlo_module.pb.lock"
    store.write_bytes(lock, b"")
    neuron_compile.register(cache, "another")
    # No graph has a result then, which the summary leaves out.
    with pytest.raises(Defect, match="without a compiled form"):
        compile_here(paths)
    assert store.exists(lock)
    assert neuron_compile.others(cache, "somebody") == ["another"]


def test_a_trial_that_used_another_cache_is_noticed(account: Account, compile_here: Any) -> None:
    paths, plan = account.plan("elsewhere", sections={"compile": {"optlevel": 3}})
    with pytest.raises(Defect, match="left no graph in the cache"):
        compile_here(paths)
    assert len(missing_sets(account.root, plan.graphs)) == 2


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
    assert bench.plan("week-1").world == World(kind="neuron", precision="compiler", nodes=1, ranks_per_node=2)
    assert plan.cache == f"{bench.root}/graphs/neuron-cache/{plan.train}"
    assert plan.compiler_flags == f"{plan.infer_compiler_flags} --retry_failed_compilation"
    assert bench.start("again").metrics["compile"] is True

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
    ("changes", "train_changes", "infer_changes"),
    [
        ({"compile": {"optlevel": 2}}, True, True),
        ({"compile": {"infer_target": "inf2"}}, False, True),
        ({"train": {"batch_size": 8}}, True, False),
        ({"nodes": 2}, True, False),
        ({"device": {"precision": "bf16"}}, True, True),
        ({"embed": {"tokens_per_batch": 2048}}, True, True),
        ({"compile": {"retry_failed": False}}, False, False),
    ],
)
def test_what_changes_the_fingerprints(bench: Bench, changes: dict[str, Any], train_changes: bool, infer_changes: bool) -> None:
    bench.shard("week-1.jsonl", rows(0, 60))
    plan, other = planned_graphs(bench, "one"), planned_graphs(bench, "other", **changes)
    assert (plan.train != other.train, plan.infer != other.infer) == (train_changes, infer_changes)


def test_pinned_versions_are_in_the_fingerprints(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.shard("week-1.jsonl", rows(0, 60))
    plan = planned_graphs(bench, "one")
    pins = compiled.neuron_pins()
    assert set(pins) == {"torch-neuronx", "libneuronxla", "neuronx-cc"}
    monkeypatch.setattr(compiled, "neuron_pins", lambda: {**pins, "neuronx-cc": "2.25"})
    other = planned_graphs(bench, "other")
    assert plan.train != other.train
    assert plan.infer != other.infer
