"""Who this process is: node and gang from AWS Batch's environment, rank and leader from the launcher's. Nothing else reads them.

Batch sets AWS_BATCH_JOB_{NUM_NODES,NODE_INDEX,MAIN_NODE_INDEX,ATTEMPT,ID,ARRAY_INDEX}; the main node's address only on the
other nodes. The supervisor hands each rank torchrun's names: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
MASTER_PORT.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass

ROOT_COMM_PORT = 62182
"""Port of the Neuron root communicator, on the leader's address (torch-xla 2.9, _internal/neuron.py)."""

LEADER_PORT = 29500
"""Rendezvous port of the main node: below the ports that Linux hands to outgoing connections (32768-60999)."""

LOOPBACK = "127.0.0.1"
ALL_ADDRESSES = "0.0.0.0"  # noqa: S104 - the gang's security group decides who reaches it


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWorld:
    """This node within its Batch job.

    Attributes:
        node, nodes: index and number of nodes of the gang (0 and 1 outside a multi-node job).
        main_node: index of the main node, whose exit code is the job's.
        leader: address of the main node; on the main node itself the loopback address.
        port: rendezvous port.
        attempt: from 1.
        job_id: Batch job id, empty outside Batch.
        array_index: index of an array child, 0 outside an array job.
        host: name of the machine, for people; TRNPIPE_HOST where several stand for one (local runs).
        listen: address on which rank 0 accepts the other ranks; TRNPIPE_LISTEN names it where all nodes share a machine.
    """

    node: int = 0
    nodes: int = 1
    main_node: int = 0
    leader: str = LOOPBACK
    port: int = LEADER_PORT
    attempt: int = 1
    job_id: str = ""
    array_index: int = 0
    host: str = ""
    listen: str = ALL_ADDRESSES

    @property
    def is_main(self) -> bool:
        return self.node == self.main_node

    @property
    def job(self) -> str:
        """The id under which the job was submitted: without the suffix `#n` of a gang's node or `:n` of an array's child."""
        return re.split("[#:]", self.job_id, maxsplit=1)[0]

    @property
    def index(self) -> int:
        """The number under which this node reports in the run folder: its place in the gang, or in the array."""
        return self.node if self.nodes > 1 else self.array_index

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> NodeWorld:
        return cls(
            node=int(environment.get("AWS_BATCH_JOB_NODE_INDEX", "0")),
            nodes=int(environment.get("AWS_BATCH_JOB_NUM_NODES", "1")),
            main_node=int(environment.get("AWS_BATCH_JOB_MAIN_NODE_INDEX", "0")),
            # On the main node itself Batch leaves the address out. Loopback will do there: its rank 0 listens on all addresses.
            leader=environment.get("AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS") or LOOPBACK,
            port=int(environment.get("TRNPIPE_LEADER_PORT", str(LEADER_PORT))),
            attempt=int(environment.get("AWS_BATCH_JOB_ATTEMPT", "1")),
            job_id=environment.get("AWS_BATCH_JOB_ID", ""),
            array_index=int(environment.get("AWS_BATCH_JOB_ARRAY_INDEX", "0")),
            host=environment.get("TRNPIPE_HOST") or platform.node(),
            listen=environment.get("TRNPIPE_LISTEN", ALL_ADDRESSES),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This rank among all ranks of the stage."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    leader: str = LOOPBACK
    port: int = LEADER_PORT
    has_store: bool = False
    """Whether the store in which ranks find each other is open already: torchrun keeps one and says so."""
    node: NodeWorld = NodeWorld()

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> World:
        return cls(
            rank=int(environment.get("RANK", "0")),
            size=int(environment.get("WORLD_SIZE", "1")),
            local_rank=int(environment.get("LOCAL_RANK", "0")),
            local_size=int(environment.get("LOCAL_WORLD_SIZE", "1")),
            leader=environment.get("MASTER_ADDR", LOOPBACK),
            port=int(environment.get("MASTER_PORT", str(LEADER_PORT))),
            has_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            node=NodeWorld.from_environment(environment),
        )
