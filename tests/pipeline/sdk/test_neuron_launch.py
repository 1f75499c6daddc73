"""What processes on Neuron hosts are started with: variables, torchrun's command line, addresses, limits."""

from __future__ import annotations

import logging
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.run import config_from_args, parse_args

from pipeline.contract import STAGES, Stage
from pipeline.host.launch import RankLaunch
from pipeline.run.world import LEADER_PORT, NodeWorld
from pipeline.sdk import graph_variables, neuron_launch
from pipeline.sdk.neuron_launch import PROCESSES, TORCHRUN

FLAGS, CACHE = "--model-type transformer --auto-cast none", "s3://bucket/graphs/neuron-cache"


def environment(
    base: dict[str, str],
    nodes: int = 2,
    leader: str = "127.0.0.1",
    planned: dict[str, str] | None = None,
) -> dict[str, str]:
    graphs = graph_variables.graph_environment(nodes, {}) if planned is None else planned
    return neuron_launch.environment(base, nodes=nodes, leader=leader, flags=FLAGS, cache=CACHE, tag="week-1", graphs=graphs)


def test_the_documented_variables_of_a_gang() -> None:
    assert environment({"PATH": "/bin"}) == {
        "PATH": "/bin",
        "FI_PROVIDER": "efa",
        "FI_EFA_USE_DEVICE_RDMA": "1",
        "CCOM_SOCKET_IFNAME": "lo",
        "PJRT_DEVICE": "NEURON",
        "NEURON_RT_EXEC_TIMEOUT": "600",
        "MALLOC_ARENA_MAX": "64",
        "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "3",
        "NEURON_FUSE_SOFTMAX": "1",
        "ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB": "512",
        "NEURON_CC_FLAGS": FLAGS,
        "NEURON_COMPILE_CACHE_URL": CACHE,
        "NEURON_PROCESS_TAG": "week-1",
    }


def test_one_node_reduces_in_smaller_pieces_and_inference_has_no_variables_of_training() -> None:
    assert environment({}, nodes=1)["ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB"] == "50"
    inference = environment({}, nodes=1, planned={})
    training = {"NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS", "NEURON_FUSE_SOFTMAX", "ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB"}
    assert not training & set(inference)


def test_what_changes_graphs_is_the_plans(caplog: pytest.LogCaptureFixture) -> None:
    # A deployment's variables reach prepare, which plans with them: set ones win, empty ones are not set.
    given = {"NEURON_FUSE_SOFTMAX": "0", "NEURON_CUSTOM_SILU": "1", "XLA_USE_32BIT_LONG": "", "OTHER": "x"}
    planned = graph_variables.graph_environment(2, given)
    assert planned == {"NEURON_FUSE_SOFTMAX": "0", "ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB": "512", "NEURON_CUSTOM_SILU": "1"}
    stray = {"NEURON_FUSE_SOFTMAX": "1", "XLA_USE_32BIT_LONG": "1", "XLA_USE_BF16": "1", "XLA_DOWNCAST_BF16": "1"}
    with caplog.at_level(logging.WARNING):
        found = environment(given | stray, planned=planned)
    assert planned.items() <= found.items()
    assert found["OTHER"] == "x"
    absent = {"XLA_USE_32BIT_LONG", "XLA_USE_BF16", "XLA_DOWNCAST_BF16", "NEURON_RT_STOCHASTIC_ROUNDING_EN"}
    assert not absent & set(found)
    assert "NEURON_FUSE_SOFTMAX=1 gives way to the plan's 0" in caplog.text
    assert "NEURON_CUSTOM_SILU" not in caplog.text


def test_efa_belongs_to_more_than_one_node() -> None:
    alone = environment({"FI_PROVIDER": "efa", "FI_EFA_FORK_SAFE": "1"}, nodes=1)
    assert not [name for name in alone if name.startswith(("FI_", "CCOM_"))]


def test_operators_tune_what_is_theirs_and_nothing_that_a_graph_hangs_on() -> None:
    tuned = {
        "NEURON_RT_EXEC_TIMEOUT": "1200",
        "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "1",
        "MALLOC_ARENA_MAX": "128",
        "CCOM_SOCKET_IFNAME": "eth1",
        "NEURON_PROCESS_TAG": "me",
        "FI_EFA_USE_DEVICE_RDMA": "0",
    }
    lost = {"PJRT_DEVICE": "CPU", "NEURON_CC_FLAGS": "-O3", "NEURON_COMPILE_CACHE_URL": "/tmp/cache"}
    found = environment(tuned | lost | {"NEURON_RT_LOG_LEVEL": "INFO"})
    assert tuned.items() <= found.items()
    assert found["NEURON_RT_LOG_LEVEL"] == "INFO"
    assert (found["PJRT_DEVICE"], found["NEURON_CC_FLAGS"], found["NEURON_COMPILE_CACHE_URL"]) == ("NEURON", FLAGS, CACHE)
    assert found["FI_PROVIDER"] == "efa"
    # Empty in a job definition means not set.
    assert (
        environment({"NEURON_RT_EXEC_TIMEOUT": "", "FI_PROVIDER": ""}).items()
        >= {
            "NEURON_RT_EXEC_TIMEOUT": "600",
            "FI_PROVIDER": "efa",
        }.items()
    )


def test_what_torch_xla_derives_is_not_brought_along() -> None:
    stray = (
        "NEURON_RT_ROOT_COMM_ID",
        "NEURON_RT_VISIBLE_CORES",
        "NEURON_RT_NUM_CORES",
        "RANK",
        "MASTER_ADDR",
        "TORCHELASTIC_RUN_ID",
    )
    found = environment(dict.fromkeys((*stray, "PET_MAX_RESTARTS", "NEURON_PJRT_PROCESS_INDEX"), "localhost:1"))
    assert "localhost:1" not in found.values()


def test_an_unreachable_main_node_leaves_the_interface_open(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert "CCOM_SOCKET_IFNAME" not in environment({}, leader="no-address")
    assert "no-address" in caplog.text


def launch(stage: Stage, **changes: object) -> RankLaunch:
    node = NodeWorld(node=1, nodes=2, leader="10.0.0.4")
    made = RankLaunch(
        stage=stage, run="s3://b/runs/week-1", node=node, nodes=2, ranks_per_node=4, kind="neuron", folder=Path("/node")
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_single_processes_get_one_core_each_and_those_around_a_trial_none() -> None:
    for local_rank in range(4):
        found = launch(Stage.EMBED, nodes=1).environment(local_rank, 1, {"NEURON_RT_VISIBLE_CORES": "0-31"})
        assert found["NEURON_RT_VISIBLE_CORES"] == str(local_rank)
    for stage in (Stage.COLLECT, Stage.COMPILE):
        compiling = launch(stage, ranks_per_node=1, compiler_flags=FLAGS, cache=CACHE).environment(0, 29500, {})
        assert "NEURON_RT_VISIBLE_CORES" not in compiling
        assert (compiling["RANK"], compiling["WORLD_SIZE"], compiling["MASTER_ADDR"]) == ("1", "2", "10.0.0.4")
        assert (compiling["NEURON_CC_FLAGS"], compiling["NEURON_PROCESS_TAG"]) == (FLAGS, f"week-1-{stage}")


def test_gangs_on_neuron_run_under_torchrun_except_those_around_a_trial() -> None:
    found = {stage: neuron_launch.launcher("neuron", stage, spec, {}) for stage, spec in STAGES.items()}
    assert {stage for stage, form in found.items() if form == TORCHRUN} == {Stage.HEALTH_CHECK, Stage.TRAIN}
    assert neuron_launch.launcher("cpu", Stage.TRAIN, STAGES[Stage.TRAIN], {}) == PROCESSES
    forced = {"TRNPIPE_LAUNCHER": TORCHRUN}
    assert neuron_launch.launcher("cpu", Stage.TRAIN, STAGES[Stage.TRAIN], forced) == TORCHRUN
    assert neuron_launch.launcher("cpu", Stage.EMBED, STAGES[Stage.EMBED], forced) == PROCESSES


def test_stages_without_an_accelerator_have_no_device_kind() -> None:
    assert [neuron_launch.kind_of("neuron", STAGES[stage]) for stage in (Stage.PUBLISH, Stage.EVALUATE)] == ["", "neuron"]
    assert neuron_launch.kind_of("neuron", STAGES[Stage.PRECOMPILE]) == ""
    assert neuron_launch.kind_of("cpu", STAGES[Stage.PUBLISH]) == "cpu"


def test_torchrun_itself_understands_its_command_line(tmp_path: Path) -> None:
    command = neuron_launch.torchrun_command(
        ["pipeline.stages.rank", "train", "s3://b/runs/week-1"],
        nodes=2,
        node=1,
        ranks_per_node=32,
        leader="10.0.0.4",
        port=LEADER_PORT,
        join_seconds=1320,
        log_dir=tmp_path,
    )
    assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
    config, program, arguments = config_from_args(parse_args(command[3:]))
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node, config.max_restarts) == (2, 2, 32, 0)
    assert (config.rdzv_backend, config.rdzv_endpoint) == ("static", f"10.0.0.4:{LEADER_PORT}")
    assert (int(config.rdzv_configs["rank"]), int(config.rdzv_configs["timeout"])) == (1, 1320)
    assert config.logs_specs.root_log_dir == str(tmp_path)
    assert [program, *arguments] == [sys.executable, "-u", "-m", "pipeline.stages.rank", "train", "s3://b/runs/week-1"]


def test_the_main_node_knows_its_own_address() -> None:
    by_route = neuron_launch.own_address()
    assert not by_route.startswith("127.")
    # The address is an interface's, and the way to it is that interface.
    interface = neuron_launch.interface_to(by_route)
    assert interface in {name for _, name in socket.if_nameindex()} - {"lo"}
