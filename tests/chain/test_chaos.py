"""A sample of `make chaos`, and the proof that it sees what it is there to see."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.contract import Stage, registry_uri
from tests.chain import chaos, faults, invariants
from tests.chain.site import MARKER, ORCHESTRATION, Site, marked, open_site

pytestmark = pytest.mark.slow


def sample(tmp_path: Path, templates: Path, *arguments: str) -> tuple[int, list[chaos.Outcome], str]:
    """One sitting in a process of its own: exit code, outcomes, output."""
    results = tmp_path / "results.jsonl"
    shutil.copytree(templates, tmp_path / "cdk.out")  # where a sitting keeps the synthesized app
    command = [sys.executable, "-m", "tests.chain.chaos", "--results", str(results), *arguments]
    process = subprocess.run(command, capture_output=True, text=True, timeout=2300)
    return process.returncode, chaos.read_results(results), process.stdout + process.stderr


REAL_ELSEWHERE = ("kill-rank", "kill-supervisor", "kill-node", "lose-host", "sick-host")
"""Kinds of faults that are planted in real runs: by the test of a killed node, test_weekly_run (supervisors), test_xla_run (a
rank), test_year (a host that is lost) and test_sick_host."""


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_every_other_kind_of_fault_once(tmp_path: Path, templates: Path) -> None:
    possible = [kind.kind for kind in faults.KINDS if kind is not faults.FullDisk or faults.FullDisk.possible()]
    kinds = [kind for kind in possible if kind not in REAL_ELSEWHERE]
    arguments = "--runs", str(len(kinds)), "--workers", "2", "--kinds", ",".join(kinds)
    code, outcomes, output = sample(tmp_path, templates, *arguments)
    assert code == 0, output
    assert sorted(outcome.kind for outcome in outcomes) == sorted(kinds)


@pytest.mark.long
def test_a_real_run_with_a_killed_node_ends_with_the_same_weights(tmp_path: Path, templates: Path) -> None:
    code, outcomes, output = sample(tmp_path, templates, "--depth", "real", "--runs", "1", "--kinds", "kill-node")
    assert code == 0, output
    assert [(outcome.status, outcome.broken) for outcome in outcomes] == [("SUCCEEDED", [])]


# ---- the measure itself ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, templates: Path) -> Iterator[Site]:
    with open_site(ORCHESTRATION, tmp_path_factory.mktemp("site"), templates) as site:
        yield site


@pytest.fixture(scope="module")
def finished(site: Site) -> SimpleNamespace:
    """A run without a fault."""
    with marked(site, "finished"):
        execution = site.start("finished", "finished")
        assert site.finish(execution, ORCHESTRATION.limit_seconds)
    return SimpleNamespace(paths=site.paths("finished"), published=invariants.read_published(site, "finished"))


@pytest.fixture
def changed(site: Site, finished: SimpleNamespace) -> Iterator[Any]:
    """Changes a file of the finished run, which is put back afterwards."""
    before: dict[Path, bytes] = {}

    def change(uri: str, data: bytes) -> None:
        path = site.file(uri)
        before[path] = path.read_bytes()
        path.write_bytes(data)

    yield change
    for path, data in before.items():
        path.write_bytes(data)


def broken(site: Site, finished: SimpleNamespace) -> str:
    return " | ".join(invariants.broken_after_success(site, "finished", "finished", finished.published))


def test_nothing_is_broken_after_a_run_without_a_fault(site: Site, finished: SimpleNamespace) -> None:
    assert broken(site, finished) == ""
    assert invariants.broken_lock(site, "finished") == []


def test_another_runs_pointer_is_seen(site: Site, finished: SimpleNamespace, changed: Any) -> None:
    uri = registry_uri(f"s3://{site.stack.bucket}", "finished")
    pointer = json.loads(site.file(uri).read_bytes())
    changed(uri, json.dumps({**pointer, "embeddings": "elsewhere"}).encode())
    assert "the registry points elsewhere" in broken(site, finished)


def test_changed_weights_are_seen(site: Site, finished: SimpleNamespace, changed: Any) -> None:
    changed(f"{finished.paths.model}/model.safetensors", b"others")
    assert "the weights are not those of the faultless run" in broken(site, finished)
    assert "registry names weights" in broken(site, finished)


def test_a_part_that_is_not_whole_is_seen(site: Site, finished: SimpleNamespace, changed: Any) -> None:
    one, two = finished.paths.part(0, 8), finished.paths.part(1, 8)
    changed(one, site.file(two).read_bytes())
    found = broken(site, finished)
    assert "part-00000-of-00008.parquet is not what manifest and record say" in found
    assert "ids embedded more than once" in found
    assert "ids not embedded" in found


def test_an_incomplete_quarantine_is_seen(site: Site, finished: SimpleNamespace, changed: Any) -> None:
    changed(finished.paths.quarantine, b"".join(site.file(finished.paths.quarantine).read_bytes().splitlines(True)[1:]))
    assert "quarantine holds lines" in broken(site, finished)


def test_other_embeddings_are_seen(site: Site, finished: SimpleNamespace) -> None:
    other = invariants.Published(finished.published.weights, finished.published.parts[::-1])
    assert invariants.broken_after_success(site, "finished", "finished", other) == [
        "the embeddings are not those of the faultless run"
    ]


def test_a_lock_that_is_held_is_seen(site: Site) -> None:
    item = {"name": {"S": "held/train"}, "owner": {"S": "somebody"}}
    site.table.put_item(TableName=site.stack.table["TableName"], Item=item)
    assert "the lock is held" in invariants.broken_lock(site, "held")[0]


def test_what_a_run_leaves_behind_is_seen(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariants, "END_SECONDS", 0.2)
    environment = {**os.environ, MARKER: "left"}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment) as process:
        (tmp_path / "file").touch()
        found = invariants.broken_remains(site, "left", tmp_path)
        assert found == [f"processes left: [{process.pid}]", "temporary files left: ['file']"]
        process.communicate(b"\n")
    (tmp_path / "file").unlink()
    assert invariants.broken_remains(site, "left", tmp_path) == []


def test_a_light_run_loads_no_framework() -> None:
    program = (
        "import sys; from importlib import import_module; "
        "from tests.chain import nursery; from tests.chain.light import mathematics, stages; "
        "mathematics.install(); stages.install(); [import_module(name) for name in nursery.PRELOADED]; "
        "assert not {'torch', 'torch_xla', 'tokenizers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# ---- sittings --------------------------------------------------------------------------------------------------------


def outcome(number: int, **changes: Any) -> chaos.Outcome:
    record = {
        "kind": "kill-rank",
        "depth": "orchestration",
        "seed": "s",
        "plan": "",
        "retryable": True,
        "expected": True,
        "hits": ["hit"],
    }
    return chaos.Outcome(number=number, **{**record, **changes})


def test_a_run_number_means_the_same_fault_in_every_sitting() -> None:
    kinds = [kind.kind for kind in faults.KINDS]
    runs = [next(runs) for runs in [chaos.sequence("orchestration", "s", kinds)] for _ in range(3 * len(kinds))]
    assert runs == [next(runs) for runs in [chaos.sequence("orchestration", "s", kinds)] for _ in range(3 * len(kinds))]
    assert [run.number for run in runs] == list(range(3 * len(kinds)))
    assert all(sum(run.kind == kind for run in runs) == 3 for kind in kinds)
    only = next(chaos.sequence("orchestration", "s", ["clock-jump"]))
    assert runs[only.number] == only
    plans = {faults.BY_NAME[run.kind](random.Random(run.seed)).plan for run in runs}
    assert len(plans) > len(runs) / 2


def test_done_runs_are_not_done_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results.jsonl"
    for run in range(3):
        chaos.append(results, outcome(run))
    with results.open("a") as stream:
        stream.write('{"number": 7, "dep')
    assert chaos.main(["--runs", "3", "--results", str(results)]) == 0
    printed = capsys.readouterr().out
    assert "0 runs to do, 3 of 3 are done" in printed
    assert "| kill-rank | 3 | 3 |" in printed


@pytest.mark.parametrize(
    ("others", "good"),
    [
        ([], True),
        ([outcome(1000, expected=False)], True),
        ([outcome(1000, expected=False), outcome(1001, expected=False)], False),
        ([outcome(1000, expected=False, hits=[]), outcome(1001, expected=False)], False),
        ([outcome(1000, broken=["ids not embedded"])], False),
        ([outcome(1000, retryable=False, kind="superseded", expected=False)], False),
    ],
)
def test_the_targets(others: list[chaos.Outcome], good: bool) -> None:
    assert chaos.reached([*map(outcome, range(1000)), *others]) is good


def test_the_moment_of_a_fault_is_within_its_stage() -> None:
    assert (
        tuple(stage for stage in Stage if stage not in (Stage.MINE, Stage.COLLECT, Stage.PRECOMPILE, Stage.COMPILE))
        == faults.STAGES
    )
    for kind in faults.KINDS:
        fault = kind(random.Random("s"))
        assert set(fault.order) <= set(kind.stages)
        assert 0 <= fault.share <= kind.latest
