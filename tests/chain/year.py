"""`make year`: a year of weekly executions and refreshes of the synthesized state machine, on real text with a tiny encoder.

    python -m tests.chain.year --weeks 52 --refreshes 2 --seed 1

Shards come late, twice and rewritten, labels are wrong, models are planted that are worse by a known amount, documents are
deleted, models are held and rolled back, hosts are lost (tests/chain/year_plan). After every execution an outsider checks what is
published (tests/chain/year_checks): against the inputs (tests/chain/year_inputs), and against queries that no execution has. Ends
with a table, and with 1 if an invariant does not hold.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import comb
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
import transformers
from typer.testing import CliRunner

from infra.cdk_context import CONTEXT_KEY, read_context
from infra.local.batch_nodes import THIS_INSTALLATION
from infra.local.template import local_context
from infra.templates import Stacks
from pipeline.cli import app
from pipeline.config import merge
from tests.chain import invariants
from tests.chain.site import REAL, Depth, Execution, Site, marked, open_site, wait_until
from tests.chain.year_checks import Outsider, Truth, View, error, read_json, size_of
from tests.chain.year_inputs import HIDDEN_PAIRS, HOLDOUT_SHARE, Inputs, Row, make_initial
from tests.chain.year_plan import Delivery, Operation, Week, plan_year

DEFAULT_FOLDER = Path(".trnpipe/year")
NAME = "current"
INPUTS = "trnpipe-year-inputs"
"""Bucket of the systems that feed the pipeline."""

CONFIG: dict[str, Any] = {
    "nodes": 2,
    "device": {"kind": "cpu", "precision": "fp32", "ranks_per_node": 1, "threads_per_rank": 1},
    "data": {
        "train": [f"s3://{INPUTS}/pairs/"],
        "corpus": [f"s3://{INPUTS}/corpus/"],
        "delete": [f"s3://{INPUTS}/delete/"],
        "holdout_fraction": HOLDOUT_SHARE,
        "holdout_queries": 2500,
        "replay_fraction": 4.0,
        "ingest_children": 2,
    },
    "model": {"initial": f"s3://{INPUTS}/initial/"},
    "train": {
        "batch_size": 32,
        "query_length": 12,
        "length": 40,
        "learning_rate": 3e-4,
        "log_every": 5,
        "checkpoint_every": 20,
        "keep_checkpoints": 1,
        "validate_every": 100,
        "validation_queries": 64,
    },
    "evaluate": {"candidates": 1500, "bootstrap_samples": 500},
    "gate": {"max_drop": 0.02, "total_drop": 0.03},
    "embed": {"children": 2, "rows_per_part": 1000, "length": 40, "tokens_per_batch": 8192},
    "health_check": {"matmul_size": 48, "memory_mib": 4, "collective_bytes": [4096], "storage_mib": 1},
}
"""The deployment's run configuration."""

FIRST_WEEK = {"train": {"epochs": 2, "learning_rate": 2e-3}}
PLANTED = {"train": {"learning_rate": 1e-9}}
"""The new model is then its parent."""

YEAR = Depth(
    name="year", program=THIS_INSTALLATION, settings={}, rows=40, limit_seconds=REAL.limit_seconds, deadlines=REAL.deadlines
)

SAMPLE = 64
WHOLE_SETS = 4
"""How often in a year every published vector is computed again, not a sample."""

FALSE_ACCEPTANCES = 0.05
"""Share of the models that fell by more than `gate.max_drop` which the gate accepts, at most: see `gate.undecided`."""
CHANCE = 1e-3
"""Of a false alarm in a year, by one statistical check."""


@dataclass(kw_only=True)
class Entry:
    """One execution.

    Attributes:
        truth: nDCG@10 on the hidden queries of the model that a weekly execution trained, else of the published one.
        against: its difference from the reference's.
        embedded, copied: documents that were computed, and taken from earlier parts.
    """

    week: int
    run: str
    event: str
    verdict: str = ""
    truth: float = 0.0
    against: float = 0.0
    documents: int = 0
    embedded: int = 0
    copied: int = 0
    seconds: float = 0.0
    broken: list[str] = field(default_factory=list)


@dataclass
class Year:
    """The year so far.

    Attributes:
        trained: run -> the rows that its model and the models before it were trained on.
        worse: per model that surely fell by more than `gate.max_drop`, whether the gate accepted it.
        entries: executions in order.
        forgotten: ids and texts that were deleted before the last weekly execution.
        late, mixed_up: shards that are still to come, and those that are to be repaired.
    """

    site: Site
    inputs: Inputs
    truth: Truth
    starts: Mapping[str, dict[str, Any]]
    plan: Sequence[Week]
    refreshes: int
    draw: random.Random
    scratch: Path
    trained: dict[str | None, set[tuple[str, str, str]]] = field(default_factory=lambda: {None: set()})
    worse: list[bool] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    late: dict[str, list[Row]] = field(default_factory=dict)
    mixed_up: dict[str, list[Row]] = field(default_factory=dict)

    @property
    def root(self) -> str:
        return f"s3://{self.site.stack.bucket}"

    def view(self) -> View:
        return View.now(self.root, NAME, self.site.file)

    def live(self) -> None:
        """Carry out the plan."""
        for week in self.plan:
            following = self.plan[week.number : week.number + 1]
            self.deliver(week)
            if week.operation is Operation.HOLD:
                self.operate("hold")
            if week.operation is Operation.PIN:
                self.operate("pin", self.view().pointer["run"])
            before = self.view()
            self.weekly(week)
            if week.delete:
                self.inputs.delete(f"week-{week.number:02d}", 6)
            for number in range(1, self.refreshes + 1):
                self.inputs.change_corpus()
                # Where the week's model was refused, there is nothing to take back.
                replaced = self.view().pointer["run"] != before.pointer.get("run")
                back = number == 1 and week.operation is Operation.ROLL_BACK and replaced
                self.refresh(week, number, before.pointer["run"] if back else None)
            if self.view().pointer.get("held") and not (following and following[0].operation is Operation.HOLD):
                self.operate("release")
                if self.view().pointer["held"]:
                    self.broken.append(f"week {week.number}: models are held after their release")
            if week.prunes:
                self.prune(week)
        accepted, most = sum(self.worse), binomial_limit(len(self.worse), FALSE_ACCEPTANCES)
        if accepted > most:
            self.broken.append(f"the gate accepted {accepted} of {len(self.worse)} worse models; {most} may pass by chance")

    def deliver(self, week: Week) -> None:
        """Write the week's shards."""
        if week.number == 1:
            return
        name = f"week-{week.number:02d}"
        for late, rows in self.late.items():
            self.inputs.deliver(late, rows)
        self.late.clear()
        without = self.inputs.smallest_locale if week.delivery is Delivery.ONE_LOCALE_LESS else ""
        first, second = (self.inputs.take(self.inputs.weekly_rows // 2, without) for _ in range(2))
        if week.delivery is Delivery.MIXED_UP:
            self.mixed_up[f"{name}-a"] = first
            self.inputs.deliver_mixed_up(f"{name}-a", first)
        else:
            self.inputs.deliver(f"{name}-a", first)
        if week.delivery is Delivery.LATE:
            self.late[f"{name}-b"] = second
        else:
            self.inputs.deliver(f"{name}-b", second)
        if week.delivery is Delivery.TWICE:
            self.inputs.deliver(f"{name}-b-again", second)
        if week.delivery is Delivery.REWRITTEN:
            self.inputs.rewrite(f"week-{week.number - 1:02d}-a")
        if week.delivery is Delivery.REPAIRED:
            for repaired, rows in self.mixed_up.items():
                self.inputs.deliver(repaired, rows)
            self.mixed_up.clear()

    def operate(self, *words: str) -> str:
        """Run `trnpipe registry ...` as an operator does."""
        result = CliRunner().invoke(app, ["registry", *words, "--bucket", self.root], catch_exceptions=False)
        if result.exit_code:
            raise RuntimeError(f"trnpipe registry {' '.join(words)} ends with {result.exit_code}: {result.output}")
        return result.output

    # ---- executions --------------------------------------------------------------------------------------------------

    def weekly(self, week: Week) -> None:
        """Carry out the weekly execution and check it."""
        before, run = self.view(), f"week-{week.number:02d}"
        entry = Entry(week=week.number, run=run, event=week.event)
        settings = merge(self.starts["weekly"], FIRST_WEEK if week.number == 1 else {})
        if week.operation is Operation.PLANT:
            settings = merge(settings, {**PLANTED, "model": {"parent": self.plant(week, before)}})
        during = {
            Operation.LOSE_HOST: self.lose_host,
            Operation.HOLD_WHILE_TRAINING: lambda _: self.operate("hold"),
            Operation.CHANGE_CORPUS: lambda _: self.inputs.change_corpus(),
        }.get(week.operation)
        code = self.execute(entry, settings, during)
        after = self.view()
        if week.operation is Operation.LOSE_HOST:
            attempts = [len(job.attempts) for job in self.training_jobs(run)]
            self.expect(entry, max(attempts) > 1, f"a host was lost, and training took {attempts} attempts")
        held = week.operation in (Operation.HOLD, Operation.HOLD_WHILE_TRAINING)
        gate = read_json(self.site.file(f"{self.root}/runs/{run}/evaluate/scorecard.json")).get("gate", {})
        entry.verdict = "superseded" if held else gate.get("verdict", "")
        if held:
            self.expect(entry, code == 68, f"an execution while models are held ends with {code}")
            self.expect(entry, same(before, after, but=("held", "epoch")), "the pointer has changed while models are held")
            self.expect(entry, bool(after.pointer["held"]), "models are not held any more")
        elif entry.verdict == "refused":
            self.expect(entry, code == 67, f"a refused model's execution ends with {code}")
            self.expect(entry, after.pointer["run"] == before.pointer["run"], "a refused model is published")
            self.expect(entry, after.pointer["embeddings_run"] == run, "the refused week has not refreshed the embeddings")
        else:
            self.expect(entry, code == 0, f"the execution ends with {code}")
            published = after.pointer.get("run"), after.pointer.get("embeddings_run")
            self.expect(entry, published == (run, run), f"published are {published}")
            self.expect(entry, after.pointer.get("epoch") == before.pointer.get("epoch", 0), "the epoch has changed")
        if week.operation is not Operation.HOLD:
            self.forgotten = [*self.inputs.deleted, *self.inputs.deleted_texts]
            self.check_rows(entry, before)
            self.check_candidate(entry, before, gate)
        self.check_published(entry, embedded=not held)
        self.end(entry)

    def refresh(self, week: Week, number: int, back_to: str | None) -> None:
        """Carry out a refresh, which may publish an earlier model, and check it."""
        before = self.view()
        run = f"week-{week.number:02d}-refresh-{number}"
        entry = Entry(week=week.number, run=run, event=f"rollback to {back_to}" if back_to else "")
        code = self.execute(entry, merge(self.starts["refresh"], {"rollback": back_to} if back_to else {}))
        after = self.view()
        entry.verdict = "rolled back" if back_to else "refreshed"
        epoch = before.pointer.get("epoch", 0) + bool(back_to)
        model = back_to or before.pointer["run"]
        self.expect(entry, code == 0, f"the refresh ends with {code}")
        published = after.pointer["run"], after.pointer["embeddings_run"]
        self.expect(entry, published == (model, run), f"published are {published}")
        self.expect(entry, after.pointer.get("epoch", 0) == epoch, f"the epoch is {after.pointer.get('epoch')}, not {epoch}")
        held = bool(back_to or before.pointer.get("held"))
        self.expect(entry, bool(after.pointer.get("held")) == held, f"models {'are not' if held else 'are'} held")
        self.check_published(entry, embedded=True)
        self.end(entry)

    def execute(self, entry: Entry, given: Mapping[str, Any], during: Callable[[str], object] | None = None) -> int:
        """Carry out an execution; return the exit code that it ends with, 0 where it succeeds.

        Args:
            during: is called with the run while its gang trains.
        """
        with marked(self.site, entry.run) as temporary:
            execution = self.site.begin(entry.run, given, NAME)
            if during:
                self.act(entry, execution, during)
            if not self.site.finish(execution, YEAR.limit_seconds):
                raise TimeoutError(f"{entry.run} still runs after {YEAR.limit_seconds:g} s")
            entry.seconds = time.monotonic() - execution.started
            entry.broken += invariants.broken_lock(self.site, NAME) + invariants.broken_remains(self.site, entry.run, temporary)
        ended = execution.ended or {}
        if ended["status"] == "SUCCEEDED":
            return 0
        if ended.get("error") == "GateRefused":
            return 67
        failures = [read_json(path) for path in self.site.file(f"{self.root}/runs/{entry.run}").glob("*/failure.json")]
        codes = [int(failure["exit_code"]) for failure in failures if "exit_code" in failure]
        entry.broken += [] if codes == [68] else [f"{ended.get('error')}: {ended.get('cause')}"]
        return codes[-1] if codes else 1

    def act(self, entry: Entry, execution: Execution, deed: Callable[[str], object]) -> None:
        """Do something as soon as the gang trains."""

        def training() -> bool:
            return self.site.look(execution) or any(job.nodes for job in self.training_jobs(entry.run))

        if not wait_until(training, YEAR.limit_seconds) or execution.ended:
            entry.broken.append("the execution has ended before it trained")
        else:
            deed(entry.run)

    def training_jobs(self, run: str) -> list[Any]:
        return [job for job in self.site.jobs(run) if job.name.startswith("train-")]

    def lose_host(self, run: str) -> None:
        [job, *_] = self.training_jobs(run)
        self.site.runner.lose_host(job.nodes[-1].host)

    def plant(self, week: Week, before: View) -> str:
        """Write a model that is worse than the published one into that one's run; return its URI."""
        folder = self.scratch / f"planted-{week.number:02d}"
        self.truth.make_worse(before.model, folder, week.fall * CONFIG["gate"]["max_drop"], seed=week.number)
        uri = f"{self.root}/runs/{before.pointer['run']}/{folder.name}"
        for path in folder.rglob("*"):
            if path.is_file():
                self.site.put(f"{uri}/{path.relative_to(folder)}", path.read_bytes())
        shutil.rmtree(folder)
        return uri

    # ---- checks ------------------------------------------------------------------------------------------------------

    def expect(self, entry: Entry, holds: bool, otherwise: str) -> None:
        if not holds:
            entry.broken.append(otherwise)

    def check_rows(self, entry: Entry, before: View) -> None:
        """Exactly the rows are new that neither the published model nor those before it were trained on."""
        rows, parent = self.inputs.rows(), before.pointer.get("run")
        planned = read_json(self.site.file(f"{self.root}/runs/{entry.run}/plan.json")).get("train", {}).get("new_rows")
        new = len(rows - self.trained[parent])
        self.expect(entry, planned == new, f"{planned} rows count as new, {new} are")
        self.trained[entry.run] = self.trained[parent] | rows

    def check_candidate(self, entry: Entry, before: View, gate: Mapping[str, Any]) -> None:
        """Remember what the gate said of a model that is worse than it may be."""
        values = self.truth.of(before.model_of(entry.run))
        entry.truth = float(values.mean())
        if before.pointer:
            falls = self.truth.of(before.model) - values
            if falls.mean() - NormalDist().inv_cdf(1 - CHANCE) * error(falls) > CONFIG["gate"]["max_drop"]:
                self.worse.append(gate.get("verdict") == "accepted")

    def check_published(self, entry: Entry, *, embedded: bool) -> None:
        """What is published is complete and right, and its model within the budget.

        Args:
            embedded: the execution has embedded the corpus as it is now.
        """
        view = self.view()
        values = self.truth.of(view.model)
        entry.truth = entry.truth or float(values.mean())
        if view.reference:
            differences = values - self.truth.of(view.model_of(view.reference))
            entry.against = float(differences.mean())
            scorecard = read_json(self.site.file(f"{self.root}/runs/{view.pointer['run']}/evaluate/scorecard.json"))
            queries = scorecard.get("reference", {}).get("queries")
            limit = CONFIG["gate"]["total_drop"] + (slack(differences, queries, len(self.plan)) if queries else 0)
            self.expect(entry, entry.against >= -limit, f"the published model is {-entry.against:.4f} below the reference")
        if embedded:
            documents = self.inputs.documents()
            whole = entry.week % max(1, len(self.plan) // WHOLE_SETS) == 0
            sample = list(documents) if whole else self.draw.sample(sorted(documents), SAMPLE)
            outsider = Outsider(view.model, CONFIG["train"]["query_length"], CONFIG["embed"]["length"])
            entry.broken += view.broken_set(documents, outsider, sample)
            metrics = read_json(self.site.file(f"{self.root}/runs/{entry.run}/embed/result.json"))["metrics"]
            entry.copied = metrics["copied"]
            unchanged = sum(part["rows"] for part in view.manifest["parts"] if f"/runs/{entry.run}/" not in part["uri"])
            entry.embedded = len(documents) - entry.copied - unchanged
        entry.documents = len(view.vectors)

    def prune(self, week: Week) -> None:
        """Remove old runs as an operator does: what is needed stays, and nothing else, nor anything of deleted documents."""
        view = self.view()
        before, needed = view.runs, view.needed
        self.operate("prune", "--keep-days", "0", "--yes")
        after = view.runs
        if after.keys() != needed:
            self.broken.append(f"week {week.number}: prune has left {sorted(after)}, needed are {sorted(needed)}")
        files = [path.read_bytes() for path in self.site.file(f"{self.root}/ingested").rglob("*") if path.is_file()]
        if found := [one for one in self.forgotten if any(one.encode() in content for content in files)]:
            self.broken.append(f"week {week.number}: ingested files still have deleted documents: {found[:3]}")
        say(f"prune: {size(before)} before, {size(after)} after, {sum(map(len, files)) / 1e6:.1f} MB ingested")

    def end(self, entry: Entry) -> None:
        self.entries.append(entry)
        self.broken += [f"week {entry.week}, {entry.run}: {one}" for one in entry.broken]
        say(" | ".join(cells(entry)) + "".join(f"\n    BROKEN: {one}" for one in entry.broken))


def size(runs: Mapping[str, int]) -> str:
    return f"{len(runs)} runs, {sum(runs.values()) / 1e6:.1f} MB"


def same(before: View, after: View, *, but: Sequence[str]) -> bool:
    """Return whether the pointers agree in all but some keys."""
    first, second = ({key: value for key, value in view.pointer.items() if key not in but} for view in (before, after))
    return first == second


def slack(differences: np.ndarray, queries: int, weeks: int) -> float:
    """Return how far the true drop against the reference may exceed `gate.total_drop`, with a chance of CHANCE in all weeks.

    The gate accepts a model if the lower bound of the drop that its queries show, 5 % one-sided, is within the budget. So a model
    with a larger true drop needs an error of its mean above 1.64 standard errors; the rest is the error of the hidden queries.

    Args:
        differences: of the hidden queries' values from the reference's.
        queries: those of the reference's hold-out.
    """
    deviation, normal = float(differences.std()), NormalDist()
    by_chance = normal.inv_cdf(1 - CHANCE / weeks)
    return (by_chance - normal.inv_cdf(0.95)) * deviation / queries**0.5 + by_chance * error(differences)


def binomial_limit(count: int, share: float) -> int:
    """Return the number that so many draws with this chance exceed only with a chance of CHANCE."""
    likely, total = 0, 0.0
    while True:
        total += comb(count, likely) * share**likely * (1 - share) ** (count - likely)
        if total >= 1 - CHANCE:
            return likely
        likely += 1


# ---- the table -------------------------------------------------------------------------------------------------------

FIGURES = ("hidden nDCG@10", "against reference", "documents", "embedded", "copied", "seconds")
COLUMNS = ("week", "execution", "event", "verdict", *FIGURES)


def cells(entry: Entry) -> list[str]:
    return [
        str(entry.week),
        entry.run,
        entry.event,
        entry.verdict,
        f"{entry.truth:.4f}",
        f"{entry.against:+.4f}",
        f"{entry.documents:,}",
        f"{entry.embedded:,}",
        f"{entry.copied:,}",
        f"{entry.seconds:.1f}",
    ]


def table(entries: Sequence[Entry]) -> str:
    """Return Markdown, a line per execution."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *map(cells, entries)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def say(words: str) -> None:
    print(words, flush=True)


@contextmanager
def open_year(
    folder: Path, templates: Path, *, weeks: int, refreshes: int, seed: int, hidden: int = HIDDEN_PAIRS
) -> Iterator[Year]:
    """A year before its first week, in an empty folder.

    Args:
        templates: where the synthesized app is kept.
        hidden: pairs that no execution has.
    """
    context = local_context((1, 2), CONFIG, schedules=read_context()[CONTEXT_KEY]["schedules"])
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    with open_site(YEAR, folder, templates, context) as site:
        site.s3.create_bucket(Bucket=INPUTS)

        def put(key: str, content: bytes) -> None:
            site.s3.put_object(Bucket=INPUTS, Key=key, Body=content)

        inputs = Inputs.first(put, seed, weeks, hidden)
        make_initial(folder / "initial", inputs.pool, seed)
        for path in (folder / "initial").rglob("*"):
            if path.is_file():
                put(f"initial/{path.relative_to(folder / 'initial')}", path.read_bytes())
        schedules = Stacks.read(templates).of_type("AWS::Scheduler::Schedule")
        given = [json.loads(schedule.properties["Target"]["Input"]) for schedule in schedules]
        starts = {"refresh" if start["mode"] == "refresh" else "weekly": start for start in given}
        truth = Truth(inputs.hidden, CONFIG["train"]["query_length"], CONFIG["embed"]["length"])
        yield Year(site, inputs, truth, starts, plan_year(weeks, seed), refreshes, random.Random(seed), folder)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chain.year", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--weeks", type=int, default=52)
    parser.add_argument("--refreshes", type=int, default=2, help="after every weekly execution")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="for the state, the table and the registry's page")
    options = parser.parse_args(arguments)
    # Unwinds what is open: the endpoint, and the processes of jobs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    folder = options.folder.absolute()
    shutil.rmtree(folder / "state", ignore_errors=True)
    started = time.monotonic()
    asked = {"weeks": options.weeks, "refreshes": options.refreshes, "seed": options.seed}
    with open_year(folder / "state", folder / "cdk.out", **asked) as year:
        try:
            year.live()
        except BaseException as error:
            year.broken.append(f"the year has ended early, after {len(year.entries)} executions: {error!r}")
            raise
        finally:
            seconds = time.monotonic() - started
            summary = table(year.entries) + summed_up(year, seconds)
            (folder / "table.md").write_text(summary)
            say(f"\n{summary}")
            page = year.site.file(f"{year.root}/registry/{NAME}/index.html")
            if page.is_file():
                shutil.copy(page, folder / "history.html")
                say(f"the registry's page: {folder / 'history.html'}")
    if not year.broken:
        shutil.rmtree(folder / "state")
    return 1 if year.broken else 0


def summed_up(year: Year, seconds: float) -> str:
    """Return the figures of the year in a few lines, and the invariants that do not hold."""
    bucket = year.site.endpoint.mirror_folder
    sizes = ", ".join(f"{name}/ {size_of(bucket / name) / 1e6:.1f} MB" for name in ("runs", "ingested", "seen", "registry"))
    lines = [
        f"{len(year.entries)} executions in {seconds / 60:.1f} minutes; bucket: {sizes}",
        f"models that fell by more than gate.max_drop: {len(year.worse)}, accepted: {sum(year.worse)}",
        *([f"{len(year.broken)} invariants do not hold:", *year.broken] if year.broken else ["all invariants hold"]),
    ]
    return "\n" + "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
