"""Eager devices: collectives and their gradients between two real gloo processes, and batches prepared ahead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pipeline.backends import eager
from pipeline.backends.device import EMULATED_BF16, open_device, resolve_precision
from pipeline.run.world import World
from tests.gangs import run_gang

RANKS = 2
ROWS = 3

RANK_PROGRAM = """
import json, os, sys
from contextlib import suppress
import torch
from pipeline.backends import eager
from pipeline.backends.device import open_device
from pipeline.run.world import NodeWorld, World


def listening():
    # Local addresses, in hexadecimal, on which this process accepts connections: proc(5), /proc/net/tcp.
    sockets = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor that lists them
            sockets.add(os.readlink(f"/proc/self/fd/{name}").removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/self/net/{name}")]
    return [row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in sockets]


rank, port = int(sys.argv[1]), int(sys.argv[2])
eager.REDUCE_BUCKET_ELEMENTS = 10  # several pieces, one tensor larger than a piece
node = NodeWorld(listen="127.0.0.1")
device = open_device("cpu", "fp32", World(rank=rank, size=2, port=port, node=node), threads=1, timeout_seconds=60)
weights, inputs = (tensor.requires_grad_() for tensor in torch.load(sys.argv[3]))
bias = torch.zeros(4, requires_grad=True)

rows = torch.nn.functional.normalize(inputs[rank * 3 : rank * 3 + 3] @ weights + bias)
scores = rows @ device.gather(rows).T / 0.1
loss = torch.nn.functional.cross_entropy(scores, (torch.arange(3) + rank * 3 + 1) % 6)
loss.backward()
device.reduce_gradients([weights, bias])

mine = torch.arange(4.0) + 10 * rank
found = {
    "weights": weights.grad.tolist(),
    "bias": bias.grad.tolist(),
    "inputs": inputs.grad.tolist(),
    "gathered": device.gather(mine).tolist(),
    "all_reduce": device.all_reduce(mine).tolist(),
    "reduce_scatter": device.reduce_scatter(mine).tolist(),
    "broadcast": device.broadcast(mine).tolist(),
    "untouched": mine.tolist(),
    "listening": listening(),
}
device.barrier()
device.close()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def tensors() -> tuple[Tensor, Tensor]:
    """Weights (5, 4) and the inputs (6, 5) of both ranks."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(5, 4, generator=generator), torch.randn(RANKS * ROWS, 5, generator=generator)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, tensors: tuple[Tensor, Tensor]) -> list[dict[str, list[float]]]:
    """What each of two gloo processes computed."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    torch.save(tensors, folder / "tensors.pt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        said = run_gang(RANK_PROGRAM, RANKS, folder / "tensors.pt")
    return [json.loads(one.splitlines()[-1]) for one in said]


def test_gathered_gradients_are_those_of_one_process_over_all_rows(
    tensors: tuple[Tensor, Tensor], found: list[dict[str, list[float]]]
) -> None:
    weights, inputs = (tensor.clone().requires_grad_() for tensor in tensors)
    bias = torch.zeros(4, requires_grad=True)
    rows = torch.nn.functional.normalize(inputs @ weights + bias)
    # Equal numbers of rows: the mean over ranks of the ranks' means is the mean over all rows.
    targets = (torch.arange(RANKS * ROWS) + 1) % (RANKS * ROWS)
    torch.nn.functional.cross_entropy(rows @ rows.T / 0.1, targets).backward()

    assert weights.grad is not None
    assert inputs.grad is not None
    for rank in range(RANKS):
        torch.testing.assert_close(torch.tensor(found[rank]["weights"]), weights.grad)
        torch.testing.assert_close(torch.tensor(found[rank]["bias"]), bias.grad)
        # A rank's own rows get what both ranks' losses say about them; these gradients were summed, not averaged.
        own = slice(rank * ROWS, (rank + 1) * ROWS)
        torch.testing.assert_close(torch.tensor(found[rank]["inputs"])[own] / RANKS, inputs.grad[own])


def test_collectives_give_their_definitions_and_leave_their_input_alone(found: list[dict[str, list[float]]]) -> None:
    for rank in range(RANKS):
        assert found[rank]["gathered"] == [0, 1, 2, 3, 10, 11, 12, 13]
        assert found[rank]["all_reduce"] == [10, 12, 14, 16]
        assert found[rank]["reduce_scatter"] == ([10, 12], [14, 16])[rank]
        assert found[rank]["broadcast"] == [0, 1, 2, 3]
        assert found[rank]["untouched"] == [10 * rank + value for value in range(4)]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_of_one_machine_are_out_of_the_networks_reach(found: list[dict[str, list[str]]]) -> None:
    assert found[0]["listening"]
    # 127.0.0.1, in IPv4 or mapped into IPv6, as the kernel writes it (little endian).
    assert {address[-8:] for rank in found for address in rank["listening"]} == {"0100007F"}


def test_one_rank_needs_no_peers() -> None:
    device = open_device("cpu", "fp32", World(), threads=1)
    rows = torch.arange(6.0).reshape(3, 2)
    for collective in (device.gather, device.all_reduce, device.reduce_scatter, device.broadcast):
        torch.testing.assert_close(collective(rows), rows)
    device.barrier()
    device.close()


def batches(count: int, made: list[int]) -> Iterator[dict[str, Tensor]]:
    for index in range(count):
        made.append(index)
        yield {"index": torch.tensor(index)}


def test_batches_come_in_order_and_are_made_a_bounded_way_ahead() -> None:
    device = open_device("cpu", "fp32", World(), threads=1)
    made: list[int] = []
    stream = device.batches(batches(50, made))
    assert int(next(stream)["index"]) == 0
    deadline = time.monotonic() + 5
    while len(made) < eager.PREFETCH_BATCHES and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    # One taken, the queue full, one in the thread's hands.
    assert eager.PREFETCH_BATCHES <= len(made) <= eager.PREFETCH_BATCHES + 2
    assert [int(batch["index"]) for batch in stream] == list(range(1, 50))


def test_an_exception_in_the_background_surfaces_after_the_batches_before_it() -> None:
    def broken() -> Iterator[dict[str, Tensor]]:
        yield from batches(2, [])
        raise ValueError("shard 3 is broken")

    stream = open_device("cpu", "fp32", World(), threads=1).batches(broken())
    assert [int(next(stream)["index"]) for _ in range(2)] == [0, 1]
    with pytest.raises(ValueError, match="shard 3 is broken"):
        next(stream)


def test_leaving_early_ends_the_background_thread() -> None:
    stream = open_device("cpu", "fp32", World(), threads=1).batches(batches(10**9, []))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    deadline = time.monotonic() + 5
    while any(thread.name.startswith("batches") for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batches")]


@pytest.mark.parametrize("isa", EMULATED_BF16)
def test_emulated_bf16_is_not_chosen(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", isa)
    assert resolve_precision("cpu", "auto") == "fp32"
    assert resolve_precision("cpu", "bf16") == "bf16"


def test_bf16_that_onednn_refuses_is_not_chosen() -> None:
    """In a process of its own: oneDNN reads the variable once."""
    program = "from pipeline.backends.device import resolve_precision; print(resolve_precision('cpu', 'auto'))"
    printed = subprocess.check_output(
        [sys.executable, "-c", program], env=os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}, text=True, timeout=300
    )
    assert printed.split() == ["fp32"]
