"""`make chaos`: whole local executions with one fault each, and what became of them: is nothing lost, and nothing half-done?

    python -m tests.chain.chaos --depth orchestration --runs 1000
    python -m tests.chain.chaos --table

Run number n of a depth always has the same fault, drawn from the seed. Every run appends one line to the results file, and
numbers that stand there are not done again: a sitting may be ended at any time, and the table sums over all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any

from tests.chain import faults, invariants
from tests.chain.site import (
    DEPTHS,
    LOOK_SECONDS,
    REPOSITORY,
    Depth,
    Execution,
    Site,
    marked,
    open_site,
    processes,
    send,
    wait_until,
)

DEFAULT_RESULTS = Path(".trnpipe/chaos/results.jsonl")
DEFAULT_SEED = "trnpipe"
CHUNK_RUNS = 20
"""Runs of one worker process: what its endpoint remembers of them stays small."""
TARGET_SUCCESS = 0.999
TARGET_SECONDS = 60.0


@dataclass(frozen=True)
class Assignment:
    """A run that is to be done."""

    number: int
    kind: str
    seed: str


@dataclass
class Outcome:
    """One line of the results file.

    Attributes:
        plan, hits: what the fault was to do, and what it did; without hits the run was over before its fault.
        expected: whether it ended as it must.
        broken: invariants that did not hold.
        retried: attempts and jobs beyond the first ones.
        seconds: from start to end; `lost`: beyond the faultless run's.
        ended_after: seconds from the fault to the end, of those that cannot be retried.
    """

    number: int
    depth: str
    kind: str
    seed: str
    plan: str
    retryable: bool
    hits: list[str] = field(default_factory=list)
    status: str = ""
    cause: str = ""
    expected: bool = False
    broken: list[str] = field(default_factory=list)
    retried: int = 0
    seconds: float = 0.0
    lost: float = 0.0
    ended_after: float | None = None
    problem: str = ""


@dataclass(frozen=True)
class Reference:
    """The faultless run."""

    seconds: float
    durations: dict[str, float]
    published: invariants.Published


def sequence(depth: str, seed: str, kinds: Sequence[str]) -> Iterator[Assignment]:
    """All runs of a depth, round after round of every kind in an order of its own; only those of the kinds."""
    names = [kind.kind for kind in faults.KINDS]
    for start in count(0, len(names)):
        order = random.Random(f"{seed}/{depth}/{start}").sample(names, len(names))
        for number, kind in enumerate(order, start):
            if kind in kinds:
                yield Assignment(number, kind, f"{seed}/{depth}/{number}")


# ---- one run ---------------------------------------------------------------------------------------------------------


def faultless(site: Site) -> Reference:
    """Carry out a run without a fault.

    Raises:
        RuntimeError: even that does not succeed.
    """
    run = f"faultless-{time.monotonic_ns()}"
    with marked(site, run) as temporary:
        execution = site.start(run, run)
        if not site.finish(execution, site.depth.limit_seconds) or (execution.ended or {}).get("status") != "SUCCEEDED":
            raise RuntimeError(f"a run without a fault does not succeed: {execution.ended}")
        seconds = time.monotonic() - execution.started
        broken = invariants.broken_after_success(site, run, run, None) + invariants.broken_remains(site, run, temporary)
    if broken:
        raise RuntimeError(f"a run without a fault breaks invariants: {broken}")
    durations = {job.name.partition("-")[0]: stage_seconds(job) for job in site.jobs(run)}
    return Reference(seconds, durations, invariants.read_published(site, run))


def stage_seconds(job: Any) -> float:
    started = min(one.attempts[0].started for one in job.children or [job])
    return float((job.stopped - started) / 1000)


def perform(site: Site, assignment: Assignment, reference: Reference) -> Outcome:
    """Carry out one run with its fault."""
    fault = faults.BY_NAME[assignment.kind](random.Random(assignment.seed))
    outcome = Outcome(
        number=assignment.number,
        depth=site.depth.name,
        kind=fault.kind,
        seed=assignment.seed,
        plan=fault.plan,
        retryable=fault.retryable,
    )
    run = f"chaos-{assignment.number:05d}"
    folder = site.folder / "runs" / run
    folder.mkdir(parents=True)
    with marked(site, run) as temporary, fault.around(site, folder):
        execution = site.start(run, run, shard=fault.shard(site))
        scene = faults.Scene(site, execution, folder, reference.durations)
        deed = threading.Thread(target=fault.act, args=(scene,), name=fault.kind, daemon=True)
        deed.start()
        in_time = _watch(site, scene, deed)
        ended = time.monotonic()
        site.front.disturb(None)
        outcome.hits, outcome.seconds = scene.hits, round(ended - execution.started, 2)
        outcome.lost = round(max(0.0, outcome.seconds - reference.seconds), 2)
        if not in_time:
            outcome.problem = f"still running after {site.depth.limit_seconds:g} s"
            _end(site, run, scene.execution)
        last = scene.execution
        # What was delivered twice comes to its own end.
        jobs = lambda: [job for name in {run, last.run} for job in site.jobs(name)]  # noqa: E731
        if not wait_until(lambda: all(job.done.is_set() for job in jobs()), site.depth.limit_seconds):
            outcome.problem = outcome.problem or "jobs left running"
            _end(site, run, last)
        outcome.retried = sum(len(one.attempts) - 1 for job in jobs() for one in job.children or [job] if one.attempts)
        outcome.status, outcome.cause = str((last.ended or {}).get("status")), str((last.ended or {}).get("cause") or "")
        if not outcome.problem:
            outcome.problem = _judge(site, fault, scene, last, ended, outcome)
        outcome.broken += scene.broken + _broken(site, fault, last, outcome, reference)
        outcome.broken += invariants.broken_remains(site, run, temporary)
    outcome.expected = not outcome.problem
    if outcome.expected and not outcome.broken:
        for name in {run, last.run}:
            site.forget(name, last.registry)
        shutil.rmtree(folder, ignore_errors=True)
    return outcome


def _watch(site: Site, scene: faults.Scene, deed: threading.Thread) -> bool:
    """Until the execution has ended, and the one that a fault has put in its place; whether it came in time."""
    deadline = time.monotonic() + site.depth.limit_seconds
    while time.monotonic() < deadline:
        current = scene.execution
        if site.look(current):
            scene.over.set()
            deed.join(30)
            if scene.execution is current:
                return True
        time.sleep(LOOK_SECONDS)
    scene.over.set()
    deed.join(30)
    return False


def _judge(site: Site, fault: faults.Fault, scene: faults.Scene, last: Execution, ended: float, outcome: Outcome) -> str:
    """What is wrong with how the run has ended, empty if nothing."""
    if fault.retryable or not scene.hits:
        return "" if outcome.status == "SUCCEEDED" else f"the execution ended with {outcome.status}"
    outcome.ended_after = round(ended - (scene.struck or ended), 2)
    if outcome.status != "FAILED":
        return f"the execution ended with {outcome.status}"
    found = [invariants.load(path) for path in site.file(site.paths(last.run).root).glob("*/failure.json")]
    if [failure.get("exit_code") for failure in found] != [fault.code] or fault.words not in str(found[0]):
        return f"failure.json says {found}"
    if f"exit code {fault.code}" not in outcome.cause or fault.words not in outcome.cause:
        return "the execution's cause says something else"
    if outcome.ended_after > TARGET_SECONDS:
        return f"ended {outcome.ended_after:g} s after the fault"
    return ""


def _broken(site: Site, fault: faults.Fault, last: Execution, outcome: Outcome, reference: Reference) -> list[str]:
    broken = invariants.broken_lock(site, last.registry)
    if outcome.status == "SUCCEEDED":
        # Its own shard is the same data under another name.
        broken += invariants.broken_after_success(site, last.run, last.registry, reference.published)
    elif not isinstance(fault, faults.Superseded):
        broken += invariants.broken_registry(site, last.registry, None)
    return broken


def _end(site: Site, run: str, execution: Execution) -> None:
    with suppress(Exception):
        site.stop(execution)
    for job in site.runner.jobs():
        if not job.done.is_set():
            site.runner.terminate({"jobId": job.id, "reason": "chaos"})
    send(processes(run), signal.SIGCONT)
    site.finish(execution, 30)


# ---- workers ---------------------------------------------------------------------------------------------------------


def work(depth: Depth, assignments: Iterable[Assignment], results: Path, templates: Path) -> int:
    """Carry out runs one after another and append their outcomes."""
    folder = Path(tempfile.mkdtemp(prefix=f"trnpipe-chaos-{depth.name}-"))
    kept = False
    try:
        with open_site(depth, folder, templates) as site:
            reference = faultless(site)
            for assignment in assignments:
                outcome = perform(site, assignment, reference)
                append(results, outcome)
                kept = kept or not outcome.expected or bool(outcome.broken)
    except Exception:
        kept = True
        raise
    finally:
        if kept:
            sys.stderr.write(f"state and logs of failed runs: {folder}\n")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return 0


def append(results: Path, outcome: Outcome) -> None:
    results.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(results, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, (json.dumps(asdict(outcome)) + "\n").encode())
    finally:
        os.close(descriptor)


def read_results(results: Path) -> list[Outcome]:
    """All outcomes, the newest of every number."""
    if not results.is_file():
        return []
    found = (Outcome(**json.loads(line)) for line in results.read_text().splitlines() if line.endswith("}"))
    return list({(outcome.depth, outcome.number): outcome for outcome in found}.values())


def sitting(depth: Depth, assignments: list[Assignment], results: Path, workers: int) -> None:
    """Do the runs in worker processes, and say what comes of each."""
    templates = results.parent / "cdk.out"
    templates.parent.mkdir(parents=True, exist_ok=True)
    chunks = iter([assignments[start : start + CHUNK_RUNS] for start in range(0, len(assignments), CHUNK_RUNS)])
    running: list[tuple[subprocess.Popen[bytes], float]] = []
    told = {(outcome.depth, outcome.number) for outcome in read_results(results)}
    try:
        while True:
            while len(running) < workers and (chunk := next(chunks, None)):
                limit = 2 * depth.limit_seconds * (len(chunk) + 2)
                running.append((_start_worker(depth, chunk, results, templates), time.monotonic() + limit))
            if not running:
                return
            time.sleep(1)
            for process, deadline in list(running):
                if process.poll() is not None or time.monotonic() > deadline:
                    process.kill()
                    process.wait()
                    running.remove((process, deadline))
            for outcome in read_results(results):
                if (outcome.depth, outcome.number) not in told:
                    told.add((outcome.depth, outcome.number))
                    _say(outcome)
    finally:
        for process, _ in running:
            process.terminate()
        for process, _ in running:
            process.wait()


def _start_worker(depth: Depth, chunk: list[Assignment], results: Path, templates: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.chain.chaos", "--depth", depth.name, "--results", str(results.absolute())]
    command += ["--templates", str(templates.absolute()), "--worker", json.dumps([asdict(one) for one in chunk])]
    return subprocess.Popen(command, cwd=REPOSITORY, env={**os.environ, "OMP_NUM_THREADS": "1"})


def _say(outcome: Outcome) -> None:
    good = outcome.expected and not outcome.broken
    words = "" if good else f" {outcome.problem} {outcome.broken} {outcome.cause[:300]}"
    print(
        f"{outcome.depth} {outcome.number:4d} {outcome.kind:<21} {'ok' if good else 'FAILED':<6} {outcome.seconds:6.1f} s, "
        f"{outcome.retried} retried: {'; '.join(outcome.hits) or 'not met'} ({outcome.plan}){words}",
        flush=True,
    )


# ---- the table -------------------------------------------------------------------------------------------------------

COLUMNS = ("fault", "runs", "as expected", "met", "retried", "time lost (median)", "time lost (max)", "invariants broken")


def table(outcomes: Sequence[Outcome], depth: str) -> str:
    """Markdown, a line per kind of fault and one for all."""
    rows = []
    mine = [outcome for outcome in outcomes if outcome.depth == depth]
    for kind in faults.KINDS:
        if found := [outcome for outcome in mine if outcome.kind == kind.kind]:
            rows.append(_row(kind.kind if kind.retryable else f"{kind.kind} ({kind.code})", found))
    if mine:
        rows.append(_row("all", mine))
    lines = [COLUMNS, ["---", *["---:"] * (len(COLUMNS) - 1)], *rows]
    return f"{depth}\n\n" + "".join(f"| {' | '.join(row)} |\n" for row in lines)


def _row(name: str, found: Sequence[Outcome]) -> list[str]:
    lost = [outcome.lost for outcome in found if outcome.retryable] or [0.0]
    return [
        name,
        str(len(found)),
        str(sum(outcome.expected for outcome in found)),
        str(sum(bool(outcome.hits) for outcome in found)),
        str(sum(outcome.retried > 0 for outcome in found)),
        f"{statistics.median(lost):.1f} s",
        f"{max(lost):.1f} s",
        str(sum(len(outcome.broken) for outcome in found)),
    ]


def reached(outcomes: Sequence[Outcome]) -> bool:
    """Whether the targets hold."""
    retryable = [outcome for outcome in outcomes if outcome.retryable]
    # A run that was over before its fault proves nothing, unless it failed.
    met = sum(bool(outcome.hits) for outcome in retryable)
    good = sum(not outcome.expected for outcome in retryable) <= (1 - TARGET_SUCCESS) * met
    others = all(outcome.expected for outcome in outcomes if not outcome.retryable)
    return good and others and not any(outcome.broken for outcome in outcomes)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chain.chaos", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--depth", choices=[*DEPTHS], default="orchestration")
    parser.add_argument("--runs", type=int, default=1000, help="in all, over all sittings")
    parser.add_argument("--seed", default=DEFAULT_SEED)
    parser.add_argument("--kinds", default="", help="comma-separated; all without it")
    parser.add_argument("--results", type=Path, default=DEFAULT_RESULTS)
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--table", action="store_true", help="print the tables of the results file and nothing else")
    parser.add_argument("--templates", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    # Unwinds what is open: workers, and in them mounts, processes, the endpoint.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    depth = DEPTHS[options.depth]
    if options.worker:
        return work(depth, [Assignment(**one) for one in json.loads(options.worker)], options.results, options.templates)
    missing: list[int] = []
    depths = [name for name in DEPTHS if options.table or name == depth.name]
    if not options.table:
        kinds = options.kinds.split(",") if options.kinds else [kind.kind for kind in faults.KINDS]
        if unknown := sorted({*kinds} - faults.BY_NAME.keys()):
            parser.error(f"unknown kinds {', '.join(unknown)}; there are {', '.join(faults.BY_NAME)}")
        if not faults.FullDisk.possible():
            print("full-disk is left out: file systems cannot be mounted without root")
            kinds = [kind for kind in kinds if kind != faults.FullDisk.kind]
        done = {outcome.number for outcome in read_results(options.results) if outcome.depth == depth.name}
        wanted = list(islice(sequence(depth.name, options.seed, kinds), options.runs))
        todo = [assignment for assignment in wanted if assignment.number not in done]
        print(f"{depth.name}: {len(todo)} runs to do, {len(wanted) - len(todo)} of {len(wanted)} are done", flush=True)
        with suppress(KeyboardInterrupt):
            sitting(depth, todo, options.results, options.workers)
        done = {outcome.number for outcome in read_results(options.results) if outcome.depth == depth.name}
        missing = [assignment.number for assignment in wanted if assignment.number not in done]
    outcomes = [outcome for outcome in read_results(options.results) if outcome.depth in depths]
    for name in depths:
        print(f"\n{table(outcomes, name)}")
    if missing:
        print(f"{len(missing)} of {len(wanted)} runs have not been done; the same command goes on with them")
    return 0 if outcomes and reached(outcomes) and not missing else 1


if __name__ == "__main__":
    sys.exit(main())
