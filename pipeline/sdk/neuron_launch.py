"""The start of processes on Neuron hosts: their variables, torchrun's command line, addresses.

Gang stages run under the real torchrun, whose names torch-xla reads; the supervisor starts everything else process by process.
Who wins over a variable that is set already (in the job definition or the image):
- set from outside wins: CCOM_SOCKET_IFNAME, NEURON_RT_EXEC_TIMEOUT, NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS, MALLOC_ARENA_MAX,
  NEURON_PROCESS_TAG, OMP_NUM_THREADS, and all that is not named here. They tune, and an operator may know the host better;
- ours wins: the EFA variables, PJRT_DEVICE, and the plan's NEURON_CC_FLAGS, NEURON_COMPILE_CACHE_URL and graph variables (which
  prepare took from its own environment first): under these, graphs were compiled;
- removed: NEURON_RT_ROOT_COMM_ID, NEURON_RT_VISIBLE_CORES and NEURON_RT_NUM_CORES (torch-xla derives them from torchrun's names;
  a root of `localhost` copied from a sample would make every node its own gang), torchrun's own names and options, and
  XLA_USE_BF16 and XLA_DOWNCAST_BF16, which turn the fp32 weights into bf16 (migration-from-xla-downcast-bf16.rst).
NEURON_RT_STOCHASTIC_ROUNDING_EN stays unset: the scripts that set it keep their weights in bf16, here they are fp32.
Facts: AWS Neuron SDK 2.29.1 (setup-trn1-multi-node-execution.rst, nrt-configurable-parameters.rst), torch-xla 2.9 neuron.py.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pipeline.contract import TRIAL_STAGES, Queue, Shape, Stage, StageSpec
from pipeline.errors import BadConfig
from pipeline.log import log
from pipeline.sdk.graph_variables import GRAPH_VARIABLES, REDUCE_BUCKET

PROCESSES, TORCHRUN = "processes", "torchrun"

EXEC_TIMEOUT_SECONDS = 600
"""Limit of one execution of one graph; the documents name 2, 30 and 600 as the default, and AWS's BERT sample sets 600."""

INFLIGHT_REQUESTS = 3
"""Executions that a training process may have under way: about 12 % faster steps, and more than 3 may exhaust the device's memory
(nrt-configurable-parameters.rst; AWS's training scripts set 3). The runtime's own default is none."""

LAUNCHER_NAMES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"),
)
REMOVED = (
    *("NEURON_RT_ROOT_COMM_ID", "NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES", "XLA_USE_BF16", "XLA_DOWNCAST_BF16"),
    *LAUNCHER_NAMES,
)
REMOVED_PREFIXES = ("TORCHELASTIC_", "TORCH_ELASTIC_", "PET_", "NEURON_PJRT_", "PJRT_LOCAL_PROCESS_")
"""torchrun reads its options also from PET_*; TORCHELASTIC_RUN_ID alone makes torch-xla believe that it runs under torchrun."""

ELSEWHERE = ("192.0.2.1", 9)
"""An address of RFC 5737 for documents: nothing is sent there, the kernel only says which of our addresses it would send from."""

SIOCGIFADDR = 0x8915
"""From linux/sockios.h: the IPv4 address of an interface."""


def launcher(kind: str, stage: Stage, spec: StageSpec, environment: Mapping[str, str] = os.environ) -> str:
    """Return how the ranks of a stage are started: PROCESSES or TORCHRUN.

    Args:
        kind: the device kind.
        environment: TRNPIPE_LAUNCHER there overrides the choice for gangs.
    """
    if spec.shape != Shape.GANG:
        return PROCESSES
    planned = TORCHRUN if kind == "neuron" and stage not in TRIAL_STAGES else PROCESSES
    return environment.get("TRNPIPE_LAUNCHER", planned)


def kind_of(planned: str, spec: StageSpec) -> str:
    """Return the device kind that a stage's processes see: none for stages of a compiling run that have no accelerator."""
    return "" if planned in ("neuron", "xla") and spec.queue == Queue.CPU else planned


def environment(
    base: Mapping[str, str],
    *,
    nodes: int,
    leader: str,
    flags: str,
    cache: str,
    tag: str,
    graphs: Mapping[str, str],
) -> dict[str, str]:
    """Return the variables of all processes of a Neuron node: `base`, changed by the rules above.

    Args:
        nodes: nodes whose ranks form one world. EFA carries what goes between nodes only, and asking for it where it is absent is
            an error of its own, so its variables are set for more than one.
        leader: the main node's address.
        flags: NEURON_CC_FLAGS, may be empty.
        cache: URI of the compiler's persistent cache, may be empty.
        tag: under which neuron-monitor shows the processes.
        graphs: the plan's graph variables; none for processes that train nothing.
    """
    compiler = {"NEURON_CC_FLAGS": flags, "NEURON_COMPILE_CACHE_URL": cache}
    removed = (*REMOVED, *compiler)
    found = {name: value for name, value in base.items() if name not in removed and not name.startswith(REMOVED_PREFIXES)}
    defaults = {"NEURON_RT_EXEC_TIMEOUT": str(EXEC_TIMEOUT_SECONDS), "MALLOC_ARENA_MAX": "64", "NEURON_PROCESS_TAG": tag}
    if graphs:
        defaults["NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS"] = str(INFLIGHT_REQUESTS)
        for name in (REDUCE_BUCKET, "NEURON_FUSE_SOFTMAX", *GRAPH_VARIABLES):
            if found.get(name) and found[name] != graphs.get(name):
                log.warning("%s=%s gives way to the plan's %s", name, found[name], graphs.get(name) or "none")
            found.pop(name, None)
    # Empty in a job definition means not set.
    found = {**defaults, **{name: value for name, value in found.items() if value or name not in defaults}}
    found |= {**graphs, "PJRT_DEVICE": "NEURON", **{name: value for name, value in compiler.items() if value}}
    if nodes == 1:
        return {name: value for name, value in found.items() if not name.startswith("FI_")}
    # Not FI_EFA_FORK_SAFE, which kernels before 5.15 need (nrt-troubleshoot.rst): hosts run Amazon Linux 2023.
    ours = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "CCOM_SOCKET_IFNAME": interface_to(leader)}
    found |= {name: value for name, value in ours.items() if value and not found.get(name)}
    if not found.get("CCOM_SOCKET_IFNAME"):
        log.warning("no interface leads to the main node %s: CCOM_SOCKET_IFNAME is left to the collectives", leader)
    return found


def torchrun_command(
    program: Sequence[str],
    *,
    nodes: int,
    node: int,
    ranks_per_node: int,
    leader: str,
    port: int,
    join_seconds: float,
    log_dir: Path | None = None,
) -> list[str]:
    """Return the command line of this node's torchrun around a Python module.

    Static rendezvous without restarts: the gang is what Batch started, and Batch repeats it as a whole.

    Args:
        program: a module and its arguments, e.g. `["pipeline.stages.rank", "train", URI]`. Positional ones: torchrun's parser
            takes an option of the program (`--run`) for an abbreviation of its own.
        leader, port: of the main node, which is node 0 and holds rank 0.
        join_seconds: for the other nodes' torchruns to come.
        log_dir: an existing folder for the ranks' output, in files per rank; None: it stays on torchrun's own.
    """
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        f"--nproc_per_node={ranks_per_node}",
        f"--nnodes={nodes}",
        f"--node_rank={node}",
        f"--master_addr={leader}",
        f"--master_port={port}",
        "--rdzv_backend=static",
        "--rdzv_id=trnpipe",
        f"--rdzv_conf=timeout={int(join_seconds)}",
        "--max_restarts=0",
        "--monitor_interval=0.1",
        *([f"--log_dir={log_dir}", "--redirects=3"] if log_dir else ["--redirects=0", "--tee=0"]),
        "-m",
        *program,
    ]


def rank_output(log_dir: Path, local_rank: int) -> tuple[Path, Path] | None:
    """Return torchrun's files (torch 2.9, DefaultLogsSpecs) of a rank's stdout and stderr; None before it starts ranks."""
    folders = (attempt / str(local_rank) for attempt in log_dir.glob("*/attempt_0"))
    return next(((folder / "stdout.log", folder / "stderr.log") for folder in folders), None)


FAILED_RANK = re.compile(r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<rank>\d+) \(pid: \d+\)")
"""Line of torchrun (torch 2.9, elastic/multiprocessing/api.py) about the first of its ranks that failed; a signal's code is
negative."""


# Addresses.


def own_address() -> str:
    """Return this node's IPv4 address as the gang's other nodes reach it; Batch leaves it out on the main node.

    The address of the default route: of the container's own interface (awsvpc), or of the host's first one.

    Raises:
        BadConfig: there is only the loopback.
    """
    address = _source_address(ELSEWHERE)
    if address is None or address.startswith(("127.", "0.")):
        raise BadConfig(
            "this node has no address that other nodes can reach",
            value=address,
            rule="the main node of a gang is reached at its own address, never at localhost",
            remedy="run the gang with network mode awsvpc, or set AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS",
        )
    return address


def _source_address(destination: tuple[str, int]) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(destination)
        except OSError:
            return None
        return str(probe.getsockname()[0])


def interface_to(address: str) -> str | None:
    """Return the network interface whose address this host uses towards `address`, None without a route."""
    source = _source_address((address, ELSEWHERE[1]))
    if source is None or not sys.platform.startswith("linux"):
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == source:
                    return name
    return None
