"""Ranks under the real torchrun, as gangs on Neuron start them, on CPU: how they end in each way and what is left."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline import store
from pipeline.contract import Stage, StageFailure, StageResult
from pipeline.errors import ExitCode
from pipeline.host.ranks import torchrun_end

UNDER_TORCHRUN = {"TRNPIPE_LAUNCHER": "torchrun"}


@pytest.fixture
def scripted(planned_ranks: Any, supervise: Any, scripted_stage: dict[str, str]) -> Callable[..., Any]:
    """A function that starts one node whose ranks run a piece of code in place of the stage."""

    def scripted(code: str, *, ranks: int = 2, **extra: str) -> Any:
        paths = planned_ranks(ranks_per_node=ranks)
        variables = UNDER_TORCHRUN | scripted_stage | {"TRNPIPE_TEST_RANK": code} | extra
        node = supervise(Stage.HEALTH_CHECK, paths.root, **variables)
        node.paths = paths
        return node

    return scripted


def pids(node: Any, count: int = 2) -> dict[int, int]:
    """The processes of the ranks, once all have started."""
    node.wait_until(lambda: len(re.findall(r"rank \d+ is process", node.log)) == count, 60)
    return {int(rank): int(pid) for rank, pid in re.findall(r"rank (\d+) is process (\d+)", node.log)}


def torchrun(node: Any) -> int:
    found = re.search(r"torchrun is process (\d+)", node.log)
    assert found
    return int(found.group(1))


def failure_of(node: Any) -> StageFailure:
    return StageFailure.from_json(store.read_bytes(node.paths.failure(Stage.HEALTH_CHECK)))


def are_gone(processes: Any) -> bool:
    for process in processes:
        state = Path(f"/proc/{process}/stat")
        if state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] != "Z":
            return False
    return True


def test_a_gang_of_two_nodes_meets_under_torchrun(planned_ranks: Any, supervise: Any) -> None:
    paths = planned_ranks(nodes=2)
    # Names and options that a container might bring along reach neither torchrun nor its ranks.
    stray = {"RANK": "7", "PET_MAX_RESTARTS": "3", "PET_NNODES": "9", "TORCHELASTIC_RUN_ID": "another"}
    main, child = (supervise(Stage.HEALTH_CHECK, paths.root, node=node, nodes=2, **UNDER_TORCHRUN, **stray) for node in range(2))
    assert (main.wait(120), child.wait(120)) == (0, 0), main.log + child.log
    result = StageResult.from_json(store.read_bytes(paths.result(Stage.HEALTH_CHECK)))
    assert result.metrics["nodes"] == 2
    # What ranks log reaches their node's log.
    assert "node 0 rank 0] " in main.log
    assert set(re.findall(r"rank (\d) is process", child.log)) == {"2", "3"}


def test_a_killed_rank_is_75_and_names_the_signal(scripted: Any) -> None:
    node = scripted("time.sleep(60)")
    ranks = pids(node)
    os.kill(ranks[1], signal.SIGKILL)
    assert node.wait() == ExitCode.TRANSIENT
    assert failure_of(node).what == "rank 1 was killed by SIGKILL"
    assert failure_of(node).rank == 1
    assert are_gone(ranks.values())


def test_the_first_failing_ranks_failure_is_the_nodes(scripted: Any) -> None:
    node = scripted(
        "if rank == 1:\n from pipeline.errors import BadData\n raise BadData('rows are broken', value='a:1')\ntime.sleep(60)"
    )
    assert node.wait() == ExitCode.BAD_DATA
    assert (failure_of(node).what, failure_of(node).rank) == ("rows are broken", 1)


def test_a_killed_torchrun_takes_its_ranks_along(scripted: Any) -> None:
    node = scripted("time.sleep(60)")
    ranks = pids(node)
    os.kill(torchrun(node), signal.SIGKILL)
    assert node.wait() == ExitCode.TRANSIENT
    assert failure_of(node).what == "torchrun was killed by SIGKILL"
    assert are_gone(ranks.values())


def test_a_killed_supervisor_takes_torchrun_and_ranks_along(scripted: Any) -> None:
    node = scripted("time.sleep(60)")
    everybody = [*pids(node).values(), torchrun(node)]
    node.process.kill()
    node.wait()
    node.wait_until(lambda: are_gone(everybody), 10)


def test_a_node_that_vanishes_ends_the_others(planned_ranks: Any, supervise: Any, scripted_stage: dict[str, str]) -> None:
    paths = planned_ranks(nodes=2, ranks_per_node=1)
    variables = UNDER_TORCHRUN | scripted_stage | {"TRNPIPE_TEST_RANK": "time.sleep(60)", "TRNPIPE_STALE_SECONDS": "2"}
    main, child = (supervise(Stage.HEALTH_CHECK, paths.root, node=node, nodes=2, **variables) for node in range(2))
    for node in (main, child):
        node.wait_until(lambda node=node: "is process" in node.log.replace("torchrun is process", ""))
    child.process.kill()
    assert main.wait() == ExitCode.TRANSIENT
    assert StageFailure.from_json(store.read_bytes(paths.failure(Stage.HEALTH_CHECK))).what == "no sign of life from node 1"


def test_what_torchrun_says_of_itself() -> None:
    assert torchrun_end(-9, [], started=True).exit_code == ExitCode.TRANSIENT
    lost = torchrun_end(1, ["torch.distributed.DistNetworkError: The client socket has timed out"], started=False)
    assert lost.exit_code == ExitCode.TRANSIENT
    assert "DistNetworkError" in lost.value[1]
    assert [torchrun_end(code, [], started=code == 1).exit_code for code in (1, 2)] == [ExitCode.DEFECT] * 2


def test_sigterm_reaches_ranks_through_torchrun(scripted: Any) -> None:
    node = scripted(
        "def end(*_, rank=rank):\n sys.stderr.write(f'rank {rank} ends\\n')\n os._exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\nsys.stderr.write('listening\\n')\ntime.sleep(60)"
    )
    ranks = pids(node)
    node.wait_until(lambda: node.log.count("listening") == 2)
    node.process.send_signal(signal.SIGTERM)
    assert node.wait(30) == ExitCode.TRANSIENT
    assert "SIGTERM" in failure_of(node).what
    assert {"rank 0 ends", "rank 1 ends"} <= set(node.log.splitlines())
    assert are_gone(ranks.values())


def test_ranks_that_stand_still_show_all_their_stacks(scripted: Any) -> None:
    # The first one dies of showing its stacks, the second one never does: torchrun must not end the third one meanwhile.
    node = scripted(
        "def stand_still():\n  time.sleep(600)\n"
        "time.sleep(0.5 * rank)\ncontext.heartbeat.beat(note='working')\n"
        "if rank == 1: signal.signal(signal.SIGABRT, signal.SIG_IGN)\n"
        "stand_still()",
        ranks=3,
        TRNPIPE_PROGRESS_SECONDS="2",
    )
    ranks = pids(node, 3)
    assert node.wait() == ExitCode.NO_PROGRESS
    for number in (0, 2):
        assert "stand_still" in node.log.split(f"stacks of rank {number}:")[1].split("stacks of rank")[0]
    assert "rank 1 does not react to signals" in node.log
    assert are_gone([*ranks.values(), torchrun(node)])


def test_a_rank_that_is_done_owes_no_heartbeat_while_others_work(scripted: Any) -> None:
    code = "for _ in range(6 if rank == 1 else 0):\n time.sleep(0.5)\n context.heartbeat.beat(1, 2)"
    node = scripted(code, TRNPIPE_PROGRESS_SECONDS="1.5")
    assert node.wait() == 0, node.log


def test_a_line_of_the_runtime_explains_an_unexpected_exception(scripted: Any) -> None:
    line = "[MLA 0][NC 0] DMA TX engine 0 is in an abort state"  # nrt-troubleshoot.rst, SDK 2.29.1
    # The other rank is the first to fail, however late the one that the runtime spoke to has started.
    code = f"""
said = os.path.join(os.environ["TRNPIPE_NODE_DIR"], "said")
if rank == 0:
    print({line!r}, file=sys.stderr, flush=True)
    open(said, "w").close()
    time.sleep(1)
while not os.path.exists(said):
    time.sleep(0.05)
raise ValueError("execution failed")
"""
    node = scripted(code)
    assert node.wait() == ExitCode.UNHEALTHY_HOST
    found = failure_of(node)
    assert found.value == [line]
    assert found.rank == 0
    assert found.what.startswith(f"node 0 ({found.host})")
    assert "replace host" in found.rule
