"""neuron_parallel_compile and the compiler's persistent cache: the tool run and its summary read, the cache listed and unlocked.

The tool runs a command in graph extraction mode (every traced graph is written to the cache as HLO, nothing executes), then
compiles all graphs that have no result yet, several at a time, and prints a summary. Layout of the cache, a folder on S3:

    neuronxcc-VERSION+HASH/MODULE_GRAPH+FLAGS/   model.hlo_module.pb, compile_flags.json; model.neff and model.done when compiled;
                                                 model.log and no neff when that failed; *.lock while a compiler runs

Sets of all runs with the same compiler, flags and ranks share a cache, so which of its graphs a trial met is read from the
tool's log. Its two halves are also commands of their own, which need the same compiler: `collect` runs the trial and compiles
nothing, `compile` runs nothing and compiles what any trial has left.

Documents: AWS Neuron SDK 2.29.1, "PyTorch NeuronX neuron_parallel_compile CLI" and neuron-caching.rst.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Literal

from pipeline import store
from pipeline.contract import Stage, attempt_seconds, now
from pipeline.errors import BadConfig, Defect, MissingInput, NoProgress, StorageRefused, Transient, TrnpipeError, one_line
from pipeline.log import log
from pipeline.run import tether
from pipeline.run.growing_file import GrowingFile
from pipeline.run.processes import end_group
from pipeline.run.world import NodeWorld
from pipeline.sdk import known_errors

TOOL = "neuron_parallel_compile"
HLO_FILE, FLAGS_FILE, NEFF_FILE, DONE_FILE, LOG_FILE = (
    "model.hlo_module.pb",
    "compile_flags.json",
    "model.neff",
    "model.done",
    "model.log",
)
LOCK_SUFFIX = ".lock"

STOP_SECONDS = 10.0
"""From SIGTERM to SIGKILL for the tool and all it has started."""

POLL_SECONDS = 0.2
WORDS_KEPT = 12
"""Last lines of the compiler that go into a failure: it ends with the reason."""

MODULE = r"MODULE_[^/\"'.\s]+"
CACHE_KEY = re.compile(rf"(neuronxcc-[^/]+/{MODULE})/([^/]+)$")
TOTAL = re.compile(r"\|\|(?:NEURON_)?PARALLEL_COMPILE\|\|: Total (graphs|successful compilations|failed compilations): (\d+)\s*$")
NOTHING_TO_DO = re.compile(r"\|\|(?:NEURON_)?PARALLEL_COMPILE\|\|: No todo hlos found")
"""The tool's last words, in place of a summary, when every graph that the trial met is compiled already
(torch_neuronx/parallel_compile/neuron_parallel_compile.py of the package torch-neuronx)."""

CACHED = re.compile(rf"Using a cached neff at \S*?({MODULE})/")
EXTRACTED = re.compile(rf"Extracting graphs \(\S*?({MODULE})/")
REPORTED = re.compile(rf"\"\S*?({MODULE})/model\.hlo[^\"]*\": *{{")
STATUS = re.compile(r"\"status\": (true|false)")
FAILED = re.compile(rf"\|\|NEURON_CC_WRAPPER\|\|: Failed compilation with .*?({MODULE})[^\]]*\]: ?(.*)")
LOG_LINE = re.compile(r"\|\|[A-Z_]+\|\|:")


class GraphState(Enum):
    """The state of a graph in the cache.

    DONE: compiled. FAILED: the compiler gave up, and the cache will say so instead of trying again (unless
    --retry_failed_compilation). LOCKED: a compiler runs, or died. COLLECTED: no result yet.
    """

    DONE = "done"
    FAILED = "failed"
    LOCKED = "locked"
    COLLECTED = "collected"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedGraph:
    """A graph that the compiler could not compile, and its own words (log lines, then the end of model.log)."""

    module: str
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The result of one call of the tool, on this node; other nodes compile into the same cache at the same time.

    Attributes:
        graphs: graphs that had no result: compiled now, or failed.
        compiled: of these, the good ones.
        cached: graphs that the trial met and the cache had already.
        failed: of the first, the others.
        modules: names of all graphs that the trial met: those of the set, whatever else the cache holds.
        seconds: the whole call, trial and compilation.
    """

    graphs: int
    compiled: int
    cached: int
    failed: tuple[FailedGraph, ...]
    modules: tuple[str, ...]
    seconds: float


def extraction_mode(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is a trial under the tool: graphs are written down, and empty stubs with zero outputs run instead."""
    return environment.get("NEURON_EXTRACT_GRAPHS_ONLY") == "1"


# The tool.


def parallel_compile(
    command: Sequence[str],
    *,
    flags: str,
    cache: str,
    parallel: int,
    timeout: float,
    on_line: Callable[[str], None] | None = None,
    retries: int = 1,
    environment: Mapping[str, str] = os.environ,
    half: Literal["collect", "compile"] | None = None,
) -> Summary:
    """Run a trial command under neuron_parallel_compile.

    Args:
        command: the trial run, e.g. torchrun around a module. It ends when the tool does.
        flags: NEURON_CC_FLAGS, the same as in training.
        cache: URI of the persistent cache.
        parallel: compilers at a time.
        timeout: seconds for everything.
        on_line: called with every line of output, and often with "" while there is none.
        retries: further attempts of each graph whose compilation failed, e.g. because memory ran out while others compiled.
        half: the one command of the tool to run, None for both. `compile` does not run `command`.

    Returns:
        The summary, also where graphs failed.

    Raises:
        BadConfig: the tool is missing, the flags name a cache of their own, or the log shows that the job cannot work.
        Defect: the trial failed, or the tool ended without a summary, or with one that contradicts itself.
        NoProgress: it took longer than `timeout`; what is compiled stays in the cache.
    """
    if "--cache_dir" in flags:
        raise BadConfig(
            "the compiler's flags name a cache of their own",
            value=flags,
            rule="--cache_dir beats the cache that training and all nodes read",
            remedy="set compile.cache instead",
        )
    started = time.monotonic()
    path = environment.get("PATH", "")
    if shutil.which(TOOL, path=path) is None:
        raise BadConfig(f"there is no {TOOL} on PATH", value=path, remedy="use the image with torch-neuronx")
    tool = [TOOL, "--command", half] if half else [TOOL]
    code, lines = _run(
        # The command is tied to the tool, which does not do that itself, and the tool to this process.
        tether.tied([*tool, "--num_parallel", str(parallel), *tether.tied(command, any_parent=True)]),
        {
            **environment,
            "NEURON_CC_FLAGS": flags,
            "NEURON_COMPILE_CACHE_URL": cache,
            "NEURON_PARALLEL_COMPILE_MAX_RETRIES": str(retries),
            "NEURON_PARALLEL_COMPILE_DUMP_RESULTS": "1",
            tether.PARENT: str(os.getpid()),
        },
        timeout,
        on_line or (lambda _: None),
    )
    return _summary(code, lines, cache, time.monotonic() - started, collects=half == "collect")


def run_command(
    command: Sequence[str], *, timeout: float, on_line: Callable[[str], None], environment: Mapping[str, str] = os.environ
) -> None:
    """Run a trial with the compiled graphs.

    Args:
        command, timeout, on_line: as for `parallel_compile`.

    Raises:
        TrnpipeError: it failed; the known error of its log, if there is one.
        NoProgress: it took longer than `timeout`.
    """
    code, lines = _run(tether.tied(command), {**environment, tether.PARENT: str(os.getpid())}, timeout, on_line)
    if code:
        raise _classified(lines) or Defect(
            "a step with the compiled graphs failed",
            value=[f"exit status {code}", *lines[-WORDS_KEPT:]],
            rule="every graph that was compiled loads and runs, on all ranks at once",
            remedy="see the log above for what stopped it",
        )


def _run(
    command: list[str], environment: dict[str, str], timeout: float, on_line: Callable[[str], None]
) -> tuple[int, list[str]]:
    """Return the exit status and the output's lines, without the compiler's dots."""
    kept: list[str] = []

    def take(lines: list[bytes]) -> None:
        for line in [raw.decode("utf-8", "replace").rstrip("\r") for raw in lines] or [""]:
            on_line(line)
            if line.strip(". "):
                kept.append(line[: 4 * known_errors.LINE_CHARACTERS])

    deadline = time.monotonic() + timeout
    # A file, because a pipe stays open as long as a compiler that was left behind holds it.
    with tempfile.NamedTemporaryFile(prefix="trnpipe-compile-") as stream:
        output = GrowingFile(Path(stream.name))
        process = subprocess.Popen(command, env=environment, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            while process.poll() is None:
                if time.monotonic() > deadline:
                    raise NoProgress(
                        "compilation, or a step with the compiled graphs, took too long",
                        value=f"{timeout:g} seconds; last line: {kept[-1] if kept else ''}",
                        rule="all graphs are compiled before the stage's time is over, and then run once in seconds",
                        remedy="the run is retried and continues from the compiled graphs; raise compile.parallel",
                    )
                take(output.read())
                time.sleep(POLL_SECONDS)
        finally:
            end_group(process, grace_seconds=STOP_SECONDS)
            take(output.read(end=True))
    return process.returncode, kept


def _summary(code: int, lines: list[str], cache: str, seconds: float, *, collects: bool = False) -> Summary:
    names = ("graphs", "successful compilations", "failed compilations")
    totals = {found.group(1): int(found.group(2)) for line in lines if (found := TOTAL.search(line))}
    if (collects and code == 0) or any(NOTHING_TO_DO.search(line) for line in lines):
        totals = dict.fromkeys(names, 0)
    if len(totals) < 3:
        raise _classified(lines) or Defect(
            f"{TOOL} ended without a summary",
            value=[f"exit status {code}", *lines[-WORDS_KEPT:]],
            rule="the trial run ends with 0, and then all its graphs are compiled",
            remedy="see the log above for what stopped the trial run",
        )
    graphs, compiled, failed = (totals[name] for name in names)
    if graphs != compiled + failed or (code != 0 and failed == 0):
        raise Defect(
            f"{TOOL} contradicts itself",
            value=[f"exit status {code}", f"graphs {graphs}, successful {compiled}, failed {failed}"],
            rule="graphs are successful or failed, and without a failed one it ends with 0",
            remedy="report it with the log above",
        )
    reported = set(_reported(lines))
    cached, extracted = ({found.group(1) for line in lines if (found := pattern.search(line))} for pattern in (CACHED, EXTRACTED))
    return Summary(
        graphs=graphs,
        compiled=compiled,
        cached=len(cached - reported),
        failed=_failed_graphs(lines, cache, failed),
        modules=tuple(sorted(cached | extracted | reported)),
        seconds=round(seconds, 1),
    )


def _classified(lines: Sequence[str]) -> TrnpipeError | None:
    """Return the known error that explains why a log's program failed, None without one."""
    finding = known_errors.classify(lines)
    return finding.error(NodeWorld.from_environment()) if finding is not None and finding.is_cause else None


def _reported(lines: Sequence[str]) -> dict[str, bool]:
    """Module -> compiled, from the JSON report, whose lines may each have a prefix of the log's."""
    found: dict[str, bool] = {}
    module = None
    for line in lines:
        if named := REPORTED.search(line):
            module = named.group(1)
        if module and (status := STATUS.search(line)):
            found[module] = status.group(1) == "true"
            module = None
    return found


def _failed_graphs(lines: Sequence[str], cache: str, count: int) -> tuple[FailedGraph, ...]:
    """Return the failed graphs with the compiler's words; at least `count`, unnamed ones where the log does not name them."""
    if not count:
        return ()
    words: dict[str, list[str]] = {module: [] for module, good in _reported(lines).items() if not good}
    current: list[str] | None = None
    for line in lines:
        if found := FAILED.search(line):
            current = words.setdefault(found.group(1), [])
            current.append(found.group(2))
        elif LOG_LINE.search(line):
            current = None
        elif current is not None:
            current.append(line)
    failed = [(key.rsplit("/", 1)[-1], key) for key, state in modules(cache).items() if state is GraphState.FAILED]
    words = words or {module: [] for module, _ in failed}
    for module, key in failed:
        if module in words:
            words[module] += compiler_log(cache, key)
    graphs = [
        FailedGraph(
            module=module,
            words=tuple(line.strip()[: known_errors.LINE_CHARACTERS] for line in said if line.strip())[-WORDS_KEPT:],
        )
        for module, said in sorted(words.items())
    ]
    unnamed = FailedGraph(module="", words=("neither the log nor the cache names this graph",))
    return tuple(graphs + [unnamed] * (count - len(graphs)))


# The cache.


def modules(cache: str) -> dict[str, GraphState]:
    """Return every graph in the cache, of every compiler version: key (its folder below `cache`) -> state.

    Raises:
        MissingInput: the bucket is not there, or may not be listed.
    """
    files: dict[str, set[str]] = {}
    for info in store.list_objects(cache):
        if found := CACHE_KEY.search(info.uri):
            files.setdefault(found.group(1), set()).add(found.group(2))
    return {key: _state(names) for key, names in sorted(files.items())}


def _state(names: set[str]) -> GraphState:
    if {NEFF_FILE, DONE_FILE} <= names:
        return GraphState.DONE
    if any(name.endswith(LOCK_SUFFIX) for name in names):
        return GraphState.LOCKED
    # A neff without the mark of completion is half an upload, which the tool compiles again.
    return GraphState.FAILED if LOG_FILE in names and NEFF_FILE not in names else GraphState.COLLECTED


def compiler_log(cache: str, key: str) -> list[str]:
    """Return the compiler's lines about a failed graph, empty where it left none."""
    try:
        return store.read_bytes(store.join(cache, key, LOG_FILE)).decode("utf-8", "replace").splitlines()
    except MissingInput:
        return []


def clear_locks(cache: str, *, in_use: bool) -> list[str]:
    """Remove locks that a killed node left behind, or every later run waits for a compiler that does not exist.

    Args:
        in_use: another run uses the cache, and a lock may be its own: nothing is removed.

    Returns:
        The URIs removed.
    """
    locks = [info.uri for info in store.list_objects(cache) if info.uri.endswith(LOCK_SUFFIX) and CACHE_KEY.search(info.uri)]
    if locks:
        fate = "other runs use it, so they stay" if in_use else "an earlier attempt left them, so they are removed"
        log.warning("%d locks in %s: %s", len(locks), cache, fate)
    removed = [] if in_use else locks
    for uri in removed:
        store.delete(uri)
    return removed


# The runs that use the cache: one small object per run, in a folder next to it.


def register(cache: str, run: str) -> None:
    """Record that this run uses the cache, from now until `unregister`."""
    store.write_json(_note(cache, run), {"run": run, "time": now()})


def unregister(cache: str, run: str) -> None:
    """Remove the record, best effort: one that stays counts as old when an attempt to compile would have ended."""
    try:
        store.delete(_note(cache, run))
    except (Transient, MissingInput, StorageRefused) as error:
        log.warning("the record of use stays: %s", one_line(error))


def others(cache: str, run: str) -> list[str]:
    """Return the other runs that use the cache. Of two that begin together each sees the other, if both register first.

    A note that is older than an attempt is left over from a run that was killed: every compiler ends with its stage.
    """
    oldest = time.time() - attempt_seconds(Stage.COMPILE)
    notes = [info.uri for info in store.list_objects(_note(cache, run).rsplit("/", 1)[0]) if info.modified >= oldest]
    return sorted({uri.rsplit("/", 1)[-1].removesuffix(".json") for uri in notes} - {run})


def _note(cache: str, run: str) -> str:
    parent, slash, name = cache.rstrip("/").rpartition("/")
    # A cache that is a whole bucket keeps its notes in itself.
    root = parent if slash and name and not parent.endswith(":/") else cache
    return store.join(root, "in-use", f"{run}.json")


# Small graphs that every gang needs anew: a copy of a local cache, which no compiler at work on S3 can lock.


def fetch(uri: str, cache: Path) -> None:
    """Copy what `keep` left into a local cache; nothing where there is none yet."""
    with suppress(MissingInput):
        store.download_folder(uri, cache)


def keep(cache: Path, uri: str) -> None:
    """Copy what a local cache has beyond the last `fetch`, of each graph the mark that it is compiled last."""
    known = {info.uri for info in store.list_objects(uri)}
    files = [path for path in cache.rglob("*") if path.is_file() and path.suffix != LOCK_SUFFIX]
    for path in sorted(files, key=lambda path: path.name == DONE_FILE):
        target = store.join(uri, path.relative_to(cache).as_posix())
        if target not in known:
            store.upload(path, target)
