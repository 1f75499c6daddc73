"""The launch of one node's ranks: their program, numbers and environment, which leaves the frameworks nothing to guess."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.contract import TRIAL_STAGES, Stage
from pipeline.run import tether
from pipeline.run.world import LOOPBACK, NodeWorld
from pipeline.sdk import neuron_launch


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLaunch:
    """The launch of this node's ranks.

    Attributes:
        ranks_per_node: processes to start; a gang's nodes all start as many.
        nodes: nodes whose ranks form one world: the gang's, or 1.
        kind: the device kind, empty where there is no plan yet, or no accelerator.
        folder: the node folder.
        launcher: neuron_launch.PROCESSES or neuron_launch.TORCHRUN.
        compiler_flags: NEURON_CC_FLAGS (kind `neuron`).
        cache: URI of the compiler's persistent cache (kind `neuron`).
        graph_environment: the plan's graph variables, for gangs (kind `neuron`).
        join_seconds: for the torchruns of a gang to find each other.
    """

    stage: Stage
    run: str
    node: NodeWorld
    nodes: int
    ranks_per_node: int
    kind: str
    folder: Path
    launcher: str = neuron_launch.PROCESSES
    compiler_flags: str = ""
    cache: str = ""
    graph_environment: Mapping[str, str] = field(default_factory=dict)
    join_seconds: float = 900

    @property
    def leader(self) -> str:
        return LOOPBACK if self.nodes == 1 else self.node.leader

    @property
    def listen(self) -> str:
        """The address on which rank 0 accepts the other ranks."""
        return LOOPBACK if self.nodes == 1 else self.node.listen

    def rank(self, local_rank: int) -> int:
        return (self.node.node if self.nodes > 1 else 0) * self.ranks_per_node + local_rank

    @property
    def ranks(self) -> list[int]:
        """The node's ranks, its first one first."""
        return [self.rank(local_rank) for local_rank in range(self.ranks_per_node)]

    def program(self) -> list[str]:
        """Return the module that a rank runs, and its arguments."""
        return ["pipeline.stages.rank", self.stage.value, self.run]

    def common_environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Return `base` with the variables that all ranks of the node share, which keep the frameworks from guessing."""
        if self.kind == "neuron":
            base = neuron_launch.environment(
                base,
                nodes=self.nodes,
                leader=self.leader,
                flags=self.compiler_flags,
                cache=self.cache,
                graphs=self.graph_environment,
                tag=f"{self.run.rstrip('/').rsplit('/', 1)[-1]}-{self.stage}",
            )
        environment = {
            "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",
            **base,
            "TRNPIPE_NODE_DIR": str(self.folder),
            tether.PARENT: str(os.getpid()),
            # On SIGABRT and on crashes every thread's Python stack goes to the log.
            "PYTHONFAULTHANDLER": "1",
        }
        if self.kind not in ("neuron", "xla"):
            # With torch-xla installed, Hugging Face libraries choose the XLA device by themselves.
            environment["USE_TORCH_XLA"] = "0"
        if self.kind in ("cpu", "xla"):
            # glibc gives every large block back to the kernel and faults its pages in again at the next step: keep them. What it
            # saves is measured by tests/benchmarks/train_step.py and xla_step.py.
            environment |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(8 << 30), "MALLOC_TOP_PAD_": str(64 << 20)}
        if self.kind == "xla":
            # XLA takes a graph's memory for every execution: from one arena, which keeps it for the next, and in huge pages.
            environment["MALLOC_ARENA_MAX"] = "1"
            environment.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
            # torch-xla executes on a thread of its own already; one more in XLA gained no time and took 1.2 GB more (MiniLM).
            environment.setdefault("PJRT_CPU_ASYNC_CLIENT", "0")
        if self.listen == LOOPBACK:
            # gloo takes the interface that the host name resolves to, which on laptops and in bare containers may be none.
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        return environment

    def environment(self, local_rank: int, port: int, base: Mapping[str, str]) -> dict[str, str]:
        """Return `base` with the variables of one rank that the supervisor starts itself: under torchrun's names."""
        environment = self.common_environment(base) | {
            "RANK": str(self.rank(local_rank)),
            "WORLD_SIZE": str(self.nodes * self.ranks_per_node),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_node),
            "MASTER_ADDR": self.leader,
            "MASTER_PORT": str(port),
            "TRNPIPE_LISTEN": self.listen,
        }
        if self.kind == "neuron" and self.stage not in TRIAL_STAGES:
            # A process takes all cores that it is not denied. (The own processes of collect and compile compute nothing.)
            environment["NEURON_RT_VISIBLE_CORES"] = str(local_rank)
        return environment
