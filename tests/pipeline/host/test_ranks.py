"""The environment that ranks are started with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pipeline.contract import Stage
from pipeline.host.launch import RankLaunch
from pipeline.run.world import NodeWorld, World

BATCH = {
    "AWS_BATCH_JOB_NUM_NODES": "2",
    "AWS_BATCH_JOB_NODE_INDEX": "1",
    "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
    "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.4",
    "AWS_BATCH_JOB_ID": "abc-def#1",
    "AWS_BATCH_JOB_ATTEMPT": "2",
}


def launch(node: NodeWorld, **changes: object) -> RankLaunch:
    made = RankLaunch(stage=Stage.TRAIN, run="r", node=node, nodes=2, ranks_per_node=4, kind="neuron", folder=Path("/node"))
    return replace(made, **changes)  # type: ignore[arg-type]


def test_a_rank_of_a_gang_finds_itself_and_its_leader() -> None:
    node = NodeWorld.from_environment(BATCH)
    assert (node.job, node.index, node.attempt, node.is_main) == ("abc-def", 1, 2, False)
    world = World.from_environment(launch(node).environment(2, 41000, BATCH))
    assert (world.rank, world.size, world.local_rank, world.local_size) == (6, 8, 2, 4)
    assert (world.leader, world.port) == ("10.0.0.4", 41000)
    assert world.node == node


def test_a_child_of_an_array_is_a_world_of_its_own() -> None:
    environment = {"AWS_BATCH_JOB_ID": "abc:7", "AWS_BATCH_JOB_ARRAY_INDEX": "7"}
    node = NodeWorld.from_environment(environment)
    assert (node.job, node.index) == ("abc", 7)
    world = World.from_environment(launch(node, nodes=1, ranks_per_node=1).environment(0, 5000, environment))
    assert (world.rank, world.size, world.leader, world.node.array_index) == (0, 1, "127.0.0.1", 7)


def test_only_kinds_with_graphs_may_load_torch_xla() -> None:
    node = NodeWorld()
    assert launch(node, kind="cpu").environment(0, 1, {})["USE_TORCH_XLA"] == "0"
    assert launch(node, kind="").environment(0, 1, {})["USE_TORCH_XLA"] == "0"
    assert "USE_TORCH_XLA" not in launch(node, kind="neuron").environment(0, 1, {})


def test_ranks_keep_to_loopback_only_where_all_of_them_are_on_this_host() -> None:
    local = {"TRNPIPE_LISTEN": "127.0.0.1"}
    for node, nodes in ((NodeWorld(), 1), *((NodeWorld.from_environment({**BATCH, **local}), 2),)):
        environment = launch(node, nodes=nodes).environment(0, 1, {})
        assert environment["GLOO_SOCKET_IFNAME"].startswith("lo")
        assert World.from_environment(environment).node.listen == "127.0.0.1"
        assert launch(node, nodes=nodes).environment(0, 1, {"GLOO_SOCKET_IFNAME": "eth1"})["GLOO_SOCKET_IFNAME"] == "eth1"
    for node in (NodeWorld.from_environment(BATCH), NodeWorld(nodes=2)):
        environment = launch(node).environment(0, 1, {})
        assert "GLOO_SOCKET_IFNAME" not in environment
        assert World.from_environment(environment).node.listen == "0.0.0.0"
