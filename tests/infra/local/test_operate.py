"""`trnpipe start`, `watch`, `stop` and `runs` as real processes, against a local endpoint with the real state machine."""

from __future__ import annotations

import io
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from infra.local.template import LocalStack
from pipeline.contract import EXECUTION_TAG
from pipeline.errors import BadConfig, MissingInput
from pipeline.operate import runs
from pipeline.operate.deployment import open_site
from pipeline.operate.executions import find
from pipeline.operate.start import start
from pipeline.operate.stop import stop
from pipeline.operate.watch import watch

Start = Callable[..., Any]
SCORES = {"baseline": {"ndcg@10": 0.5}, "new": {"ndcg@10": 0.4}}


def command(*arguments: str | Path, state: Path) -> list[str]:
    return [sys.executable, "-m", "pipeline.cli", *map(str, arguments), "--state", str(state)]


def own_settings() -> dict[str, str]:
    """An environment that would lead elsewhere if the commands took anything from it but the local run's file."""
    return {
        **os.environ,
        "AWS_PROFILE": "absent",
        "AWS_ACCESS_KEY_ID": "REAL",
        "HTTP_PROXY": "http://127.0.0.1:9",
        "COLUMNS": "80",
    }


def trnpipe(*arguments: str | Path, state: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments, state=state), capture_output=True, text=True, timeout=120, env=own_settings())


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def running(local: Any, name: str) -> Any:
    return wait_for(lambda: [job for job in local.endpoint.batch.jobs() if job.name == name and job.status == "RUNNING"])[0]


@pytest.fixture
def watching() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a command whose output can be followed; ended with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, state: Path) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command(*arguments, state=state), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=own_settings()
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def read_until(process: subprocess.Popen[str], words: str) -> str:
    assert process.stdout is not None
    seen = ""
    while words not in seen:
        line = process.stdout.readline()
        assert line, seen
        seen += line
    return seen


def test_start_checks_first_then_watches_to_the_end_and_runs_lists_it(machine: Start, tmp_path: Path) -> None:
    local = machine()
    file = tmp_path / "run.yaml"
    file.write_text("train: {epochs: 2}\nshare: weekly\n")
    refused = trnpipe("start", file, "--set", "nodes=7", state=local.state)
    assert (refused.returncode, "nodes is one of 1, 2" in refused.stderr) == (64, True), refused.stderr
    unreadable = trnpipe("start", "--set", f"data.train=[s3://{local.stack.bucket}/pairs/]", state=local.state)
    assert unreadable.returncode == 64
    assert "outside of these folders" in unreadable.stderr
    contradicts = trnpipe("start", "--refresh", "--set", "model.parent=s3://bucket/model", state=local.state)
    assert (contradicts.returncode, "mode = refresh uses the published model" in contradicts.stderr) == (64, True)
    assert local.client.list_executions(stateMachineArn=local.stack.state_machine_arn)["executions"] == []

    shown = trnpipe("start", file, "--share", "experiments", "--wait-lock", "3", "--name", "good", "--watch", state=local.state)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    lines = [" ".join(line.split()) for line in shown.stdout.splitlines()]
    assert "run good" in lines
    assert any("publish done after" in line for line in lines)
    assert any("evaluate done after" in line and line.endswith("ndcg@10 0.5000 → 0.5500") for line in lines)
    assert f"run {local.state}/bucket/runs/good" in lines
    written = json.loads((local.state / "bucket/runs/good/input.json").read_text())
    assert written["execution"] == {"train": {"epochs": 2}, "share": "experiments", "lock": {"wait_minutes": 3}}
    assert {job.tags[EXECUTION_TAG] for job in local.endpoint.batch.jobs()} == {written["execution_arn"]}

    with open_site("", local.state) as site:
        with pytest.raises(BadConfig, match="--run good"):
            start(site, {}, "good")
        with pytest.raises(MissingInput, match="no such run to resume"):
            start(site, {"run": "never"})
        with pytest.raises(BadConfig, match="outside of these folders"):
            start(site, {"data": {"train": ["s3://elsewhere/rows"]}})
    [row] = listed(local.state)
    told = {key: row[key] for key in ("run", "execution", "share", "result", "baseline", "new", "published")}
    assert told == {
        "run": "good",
        "execution": "good",
        "share": "experiments",
        "result": "succeeded",
        "baseline": 0.5,
        "new": 0.55,
        "published": False,
    }


def test_a_refused_and_a_failed_run_end_with_their_codes_and_reasons(machine: Start) -> None:
    local = machine({"evaluate": {"metrics": {**SCORES, "gate": {"verdict": "refused", "reason": "it fell"}}}})
    refused = trnpipe("start", "--name", "worse", "--watch", state=local.state)
    assert refused.returncode == 67
    assert "gate: refused: it fell" in refused.stdout
    assert "refused: the published model stays" in refused.stdout
    os.environ["TRNPIPE_TEST_SCRIPT"] = json.dumps({"train": {"exit": [75, 65]}})
    failed = trnpipe("start", "--name", "bad", "--watch", state=local.state)
    assert failed.returncode == 65
    lines = failed.stdout.splitlines()
    assert lines[-5:-1] == ["error:  train cannot go on", "value:  seen", "rule:   it should", "remedy: help it"]
    assert "train attempt 2 node 0" in Path(lines[-1].removeprefix("log:    ")).read_text()
    # Watched afterwards, it says the same.
    with open_site("", local.state) as site:
        console = Console(file=io.StringIO(), width=200)
        assert watch(site, find(site, "bad"), console) == 65
        assert console.file.getvalue().splitlines()[-5:] == lines[-5:]  # type: ignore[attr-defined]

    up = [(row["run"], row["result"], row["stage"], row["reason"]) for row in listed(local.state)]
    assert up == [("bad", "failed", "train", "train cannot go on"), ("worse", "refused", "", "it fell")]
    local.close()
    assert [(row["run"], row["result"], row["stage"], row["reason"]) for row in listed(local.state)] == up
    # As wide as its content where there is no terminal.
    table = trnpipe("runs", "--limit", "1", state=local.state).stdout
    assert "failed in train: train cannot go on" in table
    assert "worse" not in table


def listed(state: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(runs.as_json(runs.runs("", state, 10)))
    return found


@pytest.mark.parametrize("stage", ["train", "evaluate"])
def test_stop_leaves_no_job_behind(machine: Start, stack: LocalStack, stage: str) -> None:
    # Without the watch that ends the jobs of an aborted execution as well: it may come first.
    local = machine({stage: {"seconds": 600}}, stack=replace(stack, watches={}))
    mine = local.start("mine", {"registry": None})
    job = running(local, f"{stage}-mine")
    local.start("other", {"registry": None})
    theirs = running(local, f"{stage}-other")
    stopped = trnpipe("stop", "mine", "--reason", "wrong data", state=local.state)
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert "execution mine stopped" in stopped.stdout
    assert "nothing of execution mine runs any more" in stopped.stdout
    assert job.done.is_set()
    assert {one.status for one in local.endpoint.batch.jobs() if one.name.endswith("-mine")} == {"SUCCEEDED", "FAILED"}
    assert local.finish(mine)["status"] == "ABORTED"
    if stage == "train":
        assert f"job train-mine ({job.id}) terminated, was RUNNING" in stopped.stdout
        assert job.status_reason == "wrong data"
    # What is another execution's is left alone.
    assert theirs.status == "RUNNING"
    with open_site("", local.state) as site:
        console = Console(file=io.StringIO(), width=200)
        stop(site, find(site, "mine"), "again", console)
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert ("is ABORTED already" in text, "terminated" in text) == (True, False)
        assert watch(site, find(site, "mine"), console) == 130
        assert f"{stage} was stopped (run mine)" in console.file.getvalue()  # type: ignore[attr-defined]


def test_ctrl_c_ends_only_the_watching_and_a_run_that_takes_its_endpoint_along_is_judged_by_its_files(
    machine: Start, watching: Callable[..., subprocess.Popen[str]]
) -> None:
    local = machine({"report": {"seconds": 600}})
    arn = local.start("on")
    process = watching("watch", state=local.state)
    read_until(process, "report        started")
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "run on continues" in rest
    assert f"trnpipe stop on --state {local.state}" in rest
    assert local.client.describe_execution(executionArn=arn)["status"] == "RUNNING"
    [row] = listed(local.state)
    assert (row["result"], row["stage"]) == ("running", "report")

    process = watching("watch", "on", state=local.state)
    read_until(process, "report        started")
    # Stopped while the endpoint closes, whose last answers would be of the execution that it aborts.
    process.send_signal(signal.SIGSTOP)
    time.sleep(1)  # A request under way is answered before.
    local.close()
    process.send_signal(signal.SIGCONT)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0, rest
    assert f"run         {local.state}/bucket/runs/on" in rest


def test_the_key_of_a_local_run_is_its_owner_s_and_goes_with_it(machine: Start) -> None:
    local = machine()
    path = local.state / "endpoint.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    kept = path.read_bytes()
    assert json.loads(kept)["environment"]["AWS_ENDPOINT_URL"] == local.endpoint.url
    with open_site("", local.state) as site:
        with pytest.raises(MissingInput, match="nothing is running"):
            find(site, None)
        for absent in ("absent", site.execution_arn("absent")):
            with pytest.raises(MissingInput, match="there is no such run"):
                find(site, absent)
        with pytest.raises(BadConfig, match="belongs to another state machine"):
            find(site, "arn:aws:states:us-east-1:123456789012:execution:another:absent")
    local.close()
    assert not path.exists()
    with pytest.raises(MissingInput, match="no local run is in progress"), open_site("", local.state):
        pass
    # A killed run leaves its file.
    path.write_bytes(kept)
    killed = trnpipe("watch", state=local.state)
    assert (killed.returncode, "does not answer" in killed.stderr) == (75, True), killed.stderr
    assert listed(local.state) == []
