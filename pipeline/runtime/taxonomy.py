"""What the Neuron runtime, its collectives, the compiler and the kernel print when something breaks, and what to do about it.

The status codes are no process exit codes: torchrun ends with 1 whatever happened, so the log is all there is. The table's
order is its judgement: a line further up explains those further down, whichever came first. Fact source, unless a row says
otherwise: documentation of AWS Neuron SDK 2.29.1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from pipeline.errors import BadConfig, BadData, Defect, ExitCode, Transient, TrnpipeError, UnhealthyHost
from pipeline.runtime import failure
from pipeline.runtime.world import NodeWorld

LINE_CHARACTERS = 500
"""Of a line as it stands in a failure; an input dump's line has thousands."""

LOOKED_AT_CHARACTERS = 4096
"""Of a line: what the table knows stands near the beginning, and some patterns take the square of a line's length."""


class Action(Enum):
    """What a line means for the attempt that printed it.

    RETRY: again, on any host. REPLACE: again, without this host. STOP: not again before somebody changes something. FOLLOW:
    another rank is gone, which has its own line somewhere. WAIT: nothing by itself; what a rank that stands still waits for.
    """

    RETRY = "retry here"
    REPLACE = "replace host"
    STOP = "stop"
    FOLLOW = "follow-up"
    WAIT = "waiting"


ERRORS: dict[ExitCode, type[TrnpipeError]] = {
    ExitCode.BAD_CONFIG: BadConfig,
    ExitCode.BAD_DATA: BadData,
    ExitCode.DEFECT: Defect,
    ExitCode.TRANSIENT: Transient,
    ExitCode.UNHEALTHY_HOST: UnhealthyHost,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One kind of trouble.

    Attributes:
        name: for tests and tables.
        patterns: regular expressions; one of them found in a line is enough.
        meaning: what is wrong, the end of a sentence that names the node.
        exit_code: which error the finding becomes.
        remedy: what a person does about it.
        source: where the lines are documented.
        gang_only: harmless on one node.
    """

    name: str
    patterns: tuple[str, ...]
    meaning: str
    action: Action
    exit_code: ExitCode
    remedy: str
    source: str
    gang_only: bool = False


def _status(name: str, number: int) -> tuple[str, str]:
    """How an NRT_STATUS shows: by name, or by number in the runtime's two ways of printing it."""
    return rf"\b{name}\b", rf"(?:completed with err:|\bstatus ?[=:]) ?{number}\b"


TROUBLESHOOT = "neuron-runtime/nrt-troubleshoot.rst"
TRAINING = "frameworks/torch/torch-neuronx/training-troubleshooting.rst"
STATUS = "neuron-runtime/api/nrt_status.rst"
NPD = "tools: neuron problem detector, kernel messages"

AGAIN_ELSEWHERE = "the run is retried on another host; terminate this one"


def _sick(name: str, patterns: tuple[str, ...], meaning: str, source: str, remedy: str = AGAIN_ELSEWHERE) -> Row:
    return Row(
        name=name,
        patterns=patterns,
        meaning=meaning,
        action=Action.REPLACE,
        exit_code=ExitCode.UNHEALTHY_HOST,
        remedy=remedy,
        source=source,
    )


def _stop(
    name: str,
    patterns: tuple[str, ...],
    meaning: str,
    exit_code: ExitCode,
    remedy: str,
    source: str,
    gang_only: bool = False,
) -> Row:
    return Row(
        name=name,
        patterns=patterns,
        meaning=meaning,
        action=Action.STOP,
        exit_code=exit_code,
        remedy=remedy,
        source=source,
        gang_only=gang_only,
    )


def _follow(name: str, patterns: tuple[str, ...], meaning: str, action: Action, source: str) -> Row:
    return Row(
        name=name,
        patterns=patterns,
        meaning=meaning,
        action=action,
        exit_code=ExitCode.TRANSIENT,
        remedy="see the log of the node that failed first; the run is retried",
        source=source,
    )


TABLE: tuple[Row, ...] = (
    # Broken hardware explains everything else.
    _sick(
        "on-chip memory",
        (*_status("NRT_EXEC_HW_ERR_NC_UE", 1202), "Uncorrectable memory error is detected", "(?:SRAM|NC)_UNCORRECTABLE_ERROR"),
        "on-chip memory of a NeuronCore has an uncorrectable error",
        f"{TROUBLESHOOT}, hardware errors",
        "the run is retried on another host; terminate this one: EC2 sends a retirement notice within 15 minutes",
    ),
    _sick(
        "repairable device memory",
        (*_status("NRT_EXEC_HW_ERR_REPAIRABLE_HBM_UE", 1205), "Please reload the neuron driver or reboot your EC2 instance"),
        "device memory (HBM) has a repairable uncorrectable error",
        f"{TROUBLESHOOT}, hardware errors",
        "the run is retried on another host; reboot this one, or terminate it",
    ),
    _sick(
        "device memory",
        (*_status("NRT_EXEC_HW_ERR_HBM_UE", 1201), "Uncorrectable HBM memory error is detected", "HBM_UNCORRECTABLE_ERROR"),
        "device memory (HBM) has an uncorrectable error",
        f"{TROUBLESHOOT}, hardware errors",
        "the run is retried on another host; terminate this one: EC2 sends a retirement notice within 15 minutes",
    ),
    _sick(
        "dma",
        (*_status("NRT_EXEC_HW_ERR_DMA_ABORT", 1203), r"DMA [TR]X engine \d+ is in an abort state", "NEURON_HW_ERR=DMA_ERROR"),
        "a DMA engine has aborted",
        f"{TROUBLESHOOT}, hardware errors",
    ),
    # What the host was not given.
    _stop(
        "open files",
        ("Too many open files",),
        "processes ran out of file descriptors",
        ExitCode.BAD_CONFIG,
        "raise the ulimit `nofile` of the job definition to 65535 or more",
        TRAINING,
    ),
    _stop(
        "host memory",
        (r"Out of memory: Killed process \d+", r"\bNRT_FAIL_HOST_MEM_ALLOC\b"),
        "the host's memory was exhausted",
        ExitCode.BAD_CONFIG,
        "give the job more memory, or run fewer ranks per node or compilers at a time (compile.parallel)",
        f"{TRAINING}; {STATUS}",
    ),
    _stop(
        "device memory exhausted",
        (
            r"Failed to alloc DEVICE memory",
            r"Failed to allocate [\d.]+[KMG]?B \(.*\) on ND \d+:NC \d+",
            r"Number of ONE TMPBUF pages requested exceeded",
            r"\bNCC_EOOM00[12]\b",
            r"neuron:mc_alloc: device mempool .* needed \d+ available \d+",
            r"status=4 message=\"Allocation Failure\"",
        ),
        "the model does not fit into device memory",
        ExitCode.BAD_CONFIG,
        "use a smaller train.batch_size with more train.accumulation, train.activation_checkpointing, or shorter buckets",
        f"{TRAINING}; neuron-runtime/explore/device-memory.rst; compiler/error-codes/EOOM001.rst; {TROUBLESHOOT}",
    ),
    # What the program does wrong.
    _stop(
        "out of bounds",
        (*_status("NRT_EXEC_OOB", 1006), r"\bNRT_OOB\b", r"due to out-of-bound access"),
        "an index lies outside its table: a token id, or a position",
        ExitCode.BAD_DATA,
        "check that the tokenizer belongs to the model; NEURON_RT_DBG_DUMP_INPUTS_ON_ERR=1006 dumps the inputs",
        f"{TROUBLESHOOT}, out-of-bound access",
    ),
    _stop(
        "not a number",
        (*_status("NRT_EXEC_COMPLETED_WITH_NUM_ERR", 1003), "INFER_ERROR_SUBTYPE_NUMERICAL"),
        "the device computed NaN",
        ExitCode.BAD_DATA,
        "look at the loss and gradient norm in train/metrics.jsonl; try device.precision = fp32 or a smaller learning rate",
        f"{TROUBLESHOOT}, numerical error",
    ),
    _stop(
        "different graphs",
        (r"mismatching number of cc ops", r"Check if ranks \d+ and \d+ are using the same neff"),
        "ranks run different graphs",
        ExitCode.DEFECT,
        "report it with the log: the graph of a rank must not depend on its number",
        "aws-neuron-sdk issue 779 (SDK 2.14)",
    ),
    # What does not fit together.
    _stop(
        "neff version",
        (
            r"NEFF version mismatch",
            r"Attempting to load an incompatible model",
            r"Unsupported hardware operator code \d+ found in neff",
            r"\bNRT_UNSUPPORTED_NEFF_VERSION\b",
        ),
        "compiled graphs and the Neuron runtime do not fit",
        ExitCode.BAD_CONFIG,
        "build the image with one SDK's packages (2.29.1), and start with an empty compile.cache",
        f"{TROUBLESHOOT}; {TRAINING}; {STATUS}",
    ),
    _stop(
        "driver version",
        (
            r"This runtime requires Neuron Driver version",
            r"is not compatible with the installed aws-neuronx?-dkms package",
            r"failed programming the engine",
        ),
        "the host's Neuron driver and the image's Neuron runtime do not fit",
        ExitCode.BAD_CONFIG,
        "use an AMI with driver 2.27.x for SDK 2.29.1 (setting `ami`)",
        TROUBLESHOOT,
    ),
    _stop(
        "collectives library",
        (r"Error opening libnccom\.so",),
        "the image has no aws-neuronx-collectives",
        ExitCode.BAD_CONFIG,
        "install aws-neuronx-collectives in the image",
        TROUBLESHOOT,
    ),
    _stop(
        "notification queue",
        (*_status("NRT_EXEC_SW_NQ_OVERFLOW", 1204), "potentially caused by DGE notifications enabled"),
        "the runtime's notification queue overflowed",
        ExitCode.BAD_CONFIG,
        "set NEURON_RT_ENABLE_DGE_NOTIFICATIONS=0 in the job definition",
        f"{TROUBLESHOOT}, DGE notification queue overflow",
    ),
    _stop(
        "bootstrap interface",
        (
            r"No interface found in the same subnet as remote address",
            r"No usable listening interface found",
            "Invalid NCCL_COMM_ID",
        ),
        "the collectives found no network interface to the main node",
        ExitCode.BAD_CONFIG,
        "set CCOM_SOCKET_IFNAME in the job definition to the interface of the task's IPv4 address",
        TROUBLESHOOT,
    ),
    # A host that is not as it should be.
    Row(
        name="core in use",
        patterns=(
            r"(?:Logical Neuron Core|NeuronCore)\(s\) not available",
            *_status("NRT_EXEC_NC_BUSY", 1005),
            r"\bNRT_LOAD_NOT_ENOUGH_NC\b",
        ),
        meaning="another process holds a NeuronCore",
        action=Action.RETRY,
        exit_code=ExitCode.TRANSIENT,
        remedy="the run is retried; if it happens again, end the process that `neuron-ls` shows on the host",
        source=f"{TROUBLESHOOT}; {STATUS}",
    ),
    _sick(
        "dirty device",
        (r"One or more engines are running", r"Timestamp program stop timeout"),
        "an earlier program left a Neuron device running",
        f"{TRAINING}; {TROUBLESHOOT}",
        "the run is retried on another host; reload the driver of this one, or terminate it",
    ),
    _sick(
        "device missing",
        (r"Could not open the nd\d+", r"Unable to determine Neuron Driver version"),
        "a Neuron device or the driver is missing",
        f"{TRAINING}; {TROUBLESHOOT}",
        "the run is retried on another host; if all do, check the job definition's devices and the AMI's driver",
    ),
    _sick(
        "compute hang",
        (r"(?<!Ignoring\) )(?:execution|inference) timeout \(\d+ ms\) on .*waiting for execution completion notification",),
        "a NeuronCore did not finish an execution in NEURON_RT_EXEC_TIMEOUT",
        f"{TROUBLESHOOT}, hardware errors",
        "the run is retried on another host; if steps are that long, raise NEURON_RT_EXEC_TIMEOUT (seconds)",
    ),
    _sick(
        "execution unit",
        (*_status("NRT_EXEC_UNIT_UNRECOVERABLE", 101), r"\bNRT_HW_ERROR\b"),
        "a NeuronCore cannot go on after a fatal error",
        STATUS,
    ),
    _sick(
        "network proxy",
        _status("NRT_NETWORK_PROXY_FAILURE", 1206),
        "the EFA network failed",
        STATUS,
        "the run is retried on another host",
    ),
    _stop(
        "efa",
        (
            r"Unable to run multi-instance workload",
            r"OFI plugin initNet\(\) failed is EFA enabled\?",
            r"requires setting FI_EFA_FORK_SAFE=1",
        ),
        "the collectives cannot use EFA",
        ExitCode.BAD_CONFIG,
        "check the launch template's EFA interfaces, the job definition's /dev/infiniband devices and libfabric in the image",
        TROUBLESHOOT,
        gang_only=True,
    ),
    _stop(
        "cached failure",
        (r"Got a cached failed neff",),
        "a graph failed to compile in an earlier run, and the cache says so",
        ExitCode.BAD_CONFIG,
        "set compile.retry_failed=true and run the compile stage again",
        "PyTorch NeuronX neuron_parallel_compile CLI",
    ),
    _stop(
        "bad input",
        (*_status("NRT_EXEC_BAD_INPUT", 1002), r"\bNRT_INVALID(?:_HANDLE)?\b"),
        "the runtime refused a graph or its inputs",
        ExitCode.DEFECT,
        "report it with the log; if graphs came from another SDK, start with an empty compile.cache",
        STATUS,
    ),
    _stop(
        "resource",
        (r"\bNRT_RESOURCE\b",),
        "the runtime could not allocate what a graph needs",
        ExitCode.BAD_CONFIG,
        "use a smaller batch; see the lines of the log before this one",
        STATUS,
    ),
    _sick(
        "initialization",
        (r"\bnrt_init failed", r"Failed to initialize devices, error:\d+"),
        "the Neuron runtime did not start",
        TRAINING,
    ),
    # What the others see when a rank is gone.
    _follow(
        "collectives hang",
        (*_status("NRT_EXEC_HW_ERR_COLLECTIVES", 1200), r"suspected hang in collectives"),
        "a collective did not end",
        Action.FOLLOW,
        f"{TROUBLESHOOT}, hardware errors",
    ),
    _follow(
        "peer closed",
        (
            r"connection closed by remote peer",
            r"UNAVAILABLE: (?:Socket closed|Connection reset by peer)",
        ),
        "another rank closed its connection",
        Action.FOLLOW,
        f"{TROUBLESHOOT}; {TRAINING}",
    ),
    _follow(
        "peer awaited",
        (
            r"Timeout waiting for RX \(waited \d+ sec\)",
            r"Timeout waiting for incoming connection",
            r"Connect to \S+ failed - retrying",
        ),
        "a rank waits for another one",
        Action.WAIT,
        f"{TROUBLESHOOT}, communication timeout",
    ),
)

BENIGN = re.compile(
    r"DEREG_MR \(opcode 8\) comp_status 7"  # a process that ends deregisters what the driver has deregistered
    r"|OpKernel \('op: \"T[Pp][Uu]"
    r"|\(NON-FATAL, Ignoring\)"
)
"""Lines that look like trouble and are none (nrt-troubleshoot.rst, training-troubleshooting.rst)."""

_ROWS = tuple(re.compile("|".join(row.patterns)) for row in TABLE)
_ANY = re.compile("|".join(f"(?:{pattern})" for row in TABLE for pattern in row.patterns))
"""One look at each line; nearly all have nothing."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A line of the log that explains something, and its row of the table."""

    row: Row
    line: str

    @property
    def is_cause(self) -> bool:
        return self.row.action not in (Action.FOLLOW, Action.WAIT)

    @property
    def place(self) -> int:
        """Where in the table; the smaller explains the greater."""
        return TABLE.index(self.row)

    def error(self, node: NodeWorld) -> TrnpipeError:
        """The finding as the failure of this node.

        Args:
            node: the node in whose log the line stands.
        """
        if not self.is_cause:
            return failure.lost_peer(self.line)
        return ERRORS[self.row.exit_code](
            f"node {node.index} ({node.host}): {self.row.meaning}",
            value=self.line,
            rule=f"{self.row.action.value} ({self.row.name}: {self.row.source})",
            remedy=self.row.remedy,
        )


def match(line: str, *, nodes: int = 1) -> Finding | None:
    """What one line says.

    Args:
        nodes: nodes of the gang; some lines are harmless on one.
    """
    line = line[:LOOKED_AT_CHARACTERS]
    if not _ANY.search(line) or BENIGN.search(line):
        return None
    for row, pattern in zip(TABLE, _ROWS, strict=True):
        if pattern.search(line) and not (row.gang_only and nodes == 1):
            return Finding(row, line.strip()[:LINE_CHARACTERS])
    return None


def better(first: Finding | None, second: Finding | None) -> Finding | None:
    """The one that explains the other; the first one of two equals."""
    if first is None or second is None:
        return first or second
    return second if second.place < first.place else first


def classify(lines: Iterable[str], *, nodes: int = 1) -> Finding | None:
    """The line that explains the others, or None where there is nothing known."""
    found = None
    for line in lines:
        found = better(found, match(line, nodes=nodes))
    return found
