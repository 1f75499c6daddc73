"""A node on Neuron as its supervisor sees it: output that is read on the way, what explains what, a sick host that leaves."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pipeline import store
from pipeline.contract import Stage, StageFailure
from pipeline.errors import BadData, Defect, ExitCode, NoProgress, TrnpipeError
from pipeline.host import gang, supervisor
from pipeline.host.deadlines import Deadlines
from pipeline.host.launch import RankLaunch
from pipeline.host.output import Output
from pipeline.host.ranks import Ranks, start, unexplained_end
from pipeline.host.supervisor import PlanNumbers, Supervisor
from pipeline.run import failure
from pipeline.run.world import LEADER_PORT, NodeWorld
from pipeline.run_inputs import GraphsPlan, PlannedWorld

RX = "Timeout waiting for RX (waited 120 sec) - retrying"
CLOSED = "RX, connection closed by remote peer"
FILES = "CCOM WARN Call to accept failed : Too many open files"
DMA = "[MLA 0][NC 0] DMA TX engine 0 is in an abort state"


@pytest.fixture
def ranks(tmp_path: Path, planned_ranks: Any, scripted_stage: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function that starts two processes of kind neuron that run a piece of code as the stage `embed`."""
    started: list[Ranks] = []

    def ranks(code: str) -> Ranks:
        for name, value in (scripted_stage | {"TRNPIPE_TEST_RANK": code}).items():
            monkeypatch.setenv(name, value)
        folder = tmp_path / "node"
        folder.mkdir()
        run = planned_ranks().root
        node = NodeWorld(host="host-7")
        started.append(
            start(RankLaunch(stage=Stage.EMBED, run=run, node=node, nodes=1, ranks_per_node=2, kind="neuron", folder=folder))
        )
        return started[0]

    yield ranks
    for one in started:
        one.kill()


def test_every_process_has_its_core_and_its_output_reaches_the_log(ranks: Any, capfd: pytest.CaptureFixture[str]) -> None:
    code = "print(rank, os.environ['NEURON_RT_VISIBLE_CORES'], os.environ['PJRT_DEVICE'])\nsys.stderr.write('no end of line')"
    node = ranks(code)
    assert node.wait(30)
    node.kill()
    assert node.failures() == []
    written = capfd.readouterr()
    assert sorted(written.out.splitlines()) == ["0 0 NEURON", "1 1 NEURON"]
    assert written.err.count("no end of line\n") == 2


def test_the_line_that_explains_an_end_may_be_another_ranks(ranks: Any) -> None:
    # Rank 1 ends when rank 0 has said why: what nobody has said yet explains nothing.
    code = f"""
import pathlib, time
said = pathlib.Path(os.environ["TRNPIPE_NODE_DIR"], "said")
sys.stderr.write(({FILES!r} if rank == 0 else {RX!r}) + chr(10))
if rank == 0:
    said.touch()
while not said.exists():
    time.sleep(0.01)
os._exit(rank)
"""
    node = ranks(code)
    assert node.wait(30)
    (found,) = node.failures()
    assert (found.exit_code, found.rank, found.value) == (64, 0, [FILES])
    assert "nofile" in found.remedy


class Fixed(Ranks):
    """Ranks that have ended; only what their output says is looked at."""

    ended = succeeded = True
    running = failures = kill = _living = lambda *_: []  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("error", "line", "exit_code"),
    [
        (failure.unexpected(RuntimeError("x")), FILES, 64),
        (failure.unexpected(RuntimeError("x")), DMA, 76),
        (failure.unexpected(RuntimeError("x")), CLOSED, 75),
        # A rank that waited for another one has not lost it yet.
        (failure.unexpected(RuntimeError("x")), RX, 69),
        (failure.unexpected(RuntimeError("x")), "nothing known", 69),
        # What we say ourselves we know better than the log.
        (Defect("the graphs differ", remedy="report it"), DMA, 69),
        (BadData("rows are broken"), FILES, 65),
        (failure.lost_peer("gloo"), FILES, 64),
        (failure.lost_peer("gloo"), CLOSED, 75),
        (unexplained_end(0, -6), DMA, 76),
        (unexplained_end(0, 1), CLOSED, 75),
    ],
)
def test_what_explains_what(tmp_path: Path, error: TrnpipeError, line: str, exit_code: int) -> None:
    launch = RankLaunch(stage=Stage.TRAIN, run="r", node=NodeWorld(), nodes=2, ranks_per_node=1, kind="neuron", folder=tmp_path)
    (tmp_path / "out").write_text("")
    (tmp_path / "err").write_text(f"before\n{line}\nafter\n")
    output = Output([0], lambda _: (tmp_path / "out", tmp_path / "err"), nodes=2)
    output.pump(end=True)
    found = failure.describe(error, stage=Stage.TRAIN, run="r", node=NodeWorld(), rank=0)
    explained = Fixed(launch, output).explained(found)
    assert explained.exit_code == exit_code
    assert explained.time == found.time
    if exit_code == error.exit_code and not error.what.startswith("rank 0"):
        assert explained == found


def test_a_standstill_is_explained_or_says_what_it_waits_for(planned_ranks: Any, supervise: Any, scripted_stage: Any) -> None:
    paths = planned_ranks(ranks_per_node=1)
    variables = scripted_stage | {"TRNPIPE_LAUNCHER": "torchrun", "TRNPIPE_PROGRESS_SECONDS": "1"}
    for line, exit_code in ((RX, NoProgress.exit_code), (DMA, ExitCode.UNHEALTHY_HOST)):
        code = f"print({line!r})\ntime.sleep(60)"
        node = supervise(Stage.HEALTH_CHECK, paths.root, **variables, TRNPIPE_TEST_RANK=code)
        assert node.wait() == exit_code
        assert line in StageFailure.from_json(store.read_bytes(paths.failure(Stage.HEALTH_CHECK))).value


def test_too_few_open_files_name_the_job_definition(planned_ranks: Any) -> None:
    paths = planned_ranks(kind="neuron")
    program = (
        "import resource, sys\nfrom pipeline.contract import Stage\nfrom pipeline.host.supervisor import run\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 4096))\nsys.exit(run(Stage.TRAIN, sys.argv[1]))"
    )
    ended = subprocess.run([sys.executable, "-c", program, paths.root], capture_output=True, text=True, timeout=60)
    assert ended.returncode == ExitCode.BAD_CONFIG
    assert "set the ulimit `nofile` of the job definition to 65535" in ended.stderr


def test_gangs_alone_get_the_variables_that_their_graphs_were_planned_with(
    plan_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "OPEN_FILES", 0)
    run = plan_run()
    planned = {"NEURON_FUSE_SOFTMAX": "0", "ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB": "200"}
    run.replan(
        world=PlannedWorld(kind="neuron", precision="bf16", nodes=1, ranks_per_node=2),
        graphs=GraphsPlan(train="one", infer="other", environment=planned),
    )
    for stage in (Stage.COMPILE, Stage.TRAIN, Stage.EMBED):
        numbers = PlanNumbers.read(stage, run.paths)
        launch = Supervisor(stage, run.paths, NodeWorld(), Deadlines())._launch(numbers, tmp_path)
        found = launch.environment(0, LEADER_PORT, {}).items()
        assert found & planned.items() == (set() if stage is Stage.EMBED else planned.items())


def test_ranks_may_open_as_many_files_as_the_job_allows(plan_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "OPEN_FILES", 0)
    run = plan_run()
    run.replan(world=PlannedWorld(kind="neuron", precision="bf16", nodes=1, ranks_per_node=2))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1] // 2, before[1]))
    numbers = PlanNumbers.read(Stage.HEALTH_CHECK, run.paths)
    Supervisor(Stage.HEALTH_CHECK, run.paths, NodeWorld(), Deadlines())._launch(numbers, tmp_path)
    after = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert after == (before[1], before[1])


@pytest.fixture
def ecs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """ECS as a container sees it (task metadata version 4 and the service); counts the calls by name."""
    calls: Counter[str] = Counter()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({"Cluster": "train", "TaskARN": "arn:aws:ecs:us-east-1:1:task/train/t"})

        def do_POST(self) -> None:
            name = self.headers["X-Amz-Target"].rsplit(".", 1)[1]
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            calls[name] += 1
            if name == "UpdateContainerInstancesState":
                assert (asked["status"], asked["containerInstances"]) == ("DRAINING", ["arn:instance"])
            self._answer({"tasks": [{"containerInstanceArn": "arn:instance"}], "containerInstances": [], "failures": []})

        def _answer(self, record: dict[str, Any]) -> None:
            body = json.dumps(record).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("ECS_CONTAINER_METADATA_URI_V4", f"http://127.0.0.1:{server.server_port}/v4/c")
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "testing")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        yield calls
        server.shutdown()


SICK = "from pipeline.errors import UnhealthyHost\nraise UnhealthyHost('a device computes wrongly')"


def test_a_sick_host_leaves_its_cluster_once(planned_ranks: Any, supervise: Any, scripted_stage: Any, ecs: Counter[str]) -> None:
    paths = planned_ranks()
    assert supervise(Stage.HEALTH_CHECK, paths.root, **scripted_stage, TRNPIPE_TEST_RANK=SICK).wait() == ExitCode.UNHEALTHY_HOST
    assert ecs["UpdateContainerInstancesState"] == 1


def test_the_main_node_stays_when_another_host_is_sick(
    planned_ranks: Any, supervise: Any, scripted_stage: Any, ecs: Counter[str]
) -> None:
    paths = planned_ranks(nodes=2, ranks_per_node=1)
    child = NodeWorld(node=1, nodes=2, job_id="job-1#1")
    sick = StageFailure(stage="health_check", run="week-01", exit_code=76, what="a sick host", node=1, time="2026-01-01")
    main = supervise(Stage.HEALTH_CHECK, paths.root, nodes=2, **scripted_stage, TRNPIPE_TEST_RANK="time.sleep(60)")
    gang.write_exit(paths, Stage.HEALTH_CHECK, child, sick)
    assert main.wait() == ExitCode.UNHEALTHY_HOST
    assert ecs["UpdateContainerInstancesState"] == 0
