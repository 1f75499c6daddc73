"""neuron_parallel_compile, played by a program on PATH that does and prints what its documents say, and the cache on S3."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline import store
from pipeline.contract import ATTEMPT_VARIABLE
from pipeline.errors import BadConfig, ExitCode, MissingInput, NoProgress, Transient, TrnpipeError
from pipeline.ports import free_port
from pipeline.sdk import compile_cache, neuron_launch
from pipeline.sdk.compile_cache import GraphState
from tests.trainium import COMPILER, COMPILER_WORDS, write_parallel_compile

TRIAL = f"""
import json, os, sys, time
from pipeline import store
from pipeline.sdk.compile_cache import extraction_mode
assert extraction_mode() and os.environ["NEURON_PARALLEL_COMPILE_MAX_RETRIES"] == "1"
assert os.environ["NEURON_PARALLEL_COMPILE_DUMP_RESULTS"] == "1"
plan = json.loads(os.environ["STANDIN_TOOL"])
if "pid" in plan:
    os.setsid()  # as torchrun's ranks: no signal to the tool's group reaches it
    open(plan["pid"], "w").write(str(os.getpid()))
    time.sleep(600)
for module in plan["graphs"]:
    place = f"{{os.environ['NEURON_COMPILE_CACHE_URL']}}/{COMPILER}/{{module}}"
    if store.exists(f"{{place}}/model.done"):
        print(f"INFO ||NCC_WRAPPER||: Using a cached neff at {{place}}/model.neff. Exiting with a successfully compiled graph.")
        continue
    print(f"INFO ||NCC_WRAPPER||: Extracting graphs ({{place}}/model.hlo_module.pb) for ahead-of-time parallel compilation.")
    store.write_bytes(f"{{place}}/model.hlo_module.pb", b"hlo")
    store.write_bytes(f"{{place}}/compile_flags.json", b"[]")
for line in plan.get("lines", ()):
    sys.stdout.write(f"{{line}}\\n")  # one write: where the ranks are unbuffered, print's line end is a second one
sys.exit(plan.get("trial", 0))
"""
GOOD, BETTER, BAD = "MODULE_8068656800389078395+abb26765", "MODULE_17109392703413819652+abb26765", "MODULE_bad5+abb26765"


@pytest.fixture
def compile_on_s3(compile_: Any, s3_root: str) -> Any:
    compile_.cache = f"{s3_root}/graphs/neuron-cache"
    return compile_


@pytest.fixture
def compile_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that runs a trial which meets some graphs under the tool, with a cache in a local folder."""
    monkeypatch.setenv("PATH", f"{write_parallel_compile(tmp_path / 'bin')}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "trial.py").write_text(TRIAL)
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))

    def compile_(
        *graphs: str,
        timeout: float = 60,
        flags: str = "-O1",
        on_line: Any = None,
        command: Any = None,
        half: Any = None,
        **plan: Any,
    ) -> Any:
        monkeypatch.setenv("STANDIN_TOOL", json.dumps({"graphs": graphs, **plan}))
        command = command or [sys.executable, str(tmp_path / "trial.py")]
        return compile_cache.parallel_compile(
            command, flags=flags, cache=compile_.cache, parallel=4, timeout=timeout, on_line=on_line, half=half
        )

    compile_.cache = str(tmp_path / "graphs" / "neuron-cache")  # type: ignore[attr-defined]
    return compile_


def test_graphs_are_compiled_once(compile_on_s3: Any) -> None:
    lines: list[str] = []
    compile_ = compile_on_s3
    first = compile_(GOOD, BETTER, on_line=lines.append)
    assert (first.graphs, first.compiled, first.cached, first.failed) == (2, 2, 0, ())
    assert first.seconds > 0
    assert any("by 4" in line for line in lines)
    assert compile_cache.modules(compile_.cache) == {f"{COMPILER}/{module}": GraphState.DONE for module in (BETTER, GOOD)}
    again = compile_(GOOD, BETTER)
    assert (again.graphs, again.compiled, again.cached) == (0, 0, 2)
    assert first.modules == again.modules == (BETTER, GOOD)


def test_a_trial_and_its_compilation_may_run_apart(compile_on_s3: Any) -> None:
    def state() -> set[GraphState]:
        return set(compile_cache.modules(compile_on_s3.cache).values())

    collected = compile_on_s3(GOOD, BETTER, half="collect")
    assert (collected.graphs, collected.cached, collected.modules, state()) == (0, 0, (BETTER, GOOD), {GraphState.COLLECTED})
    # This half runs no command, or it would fail.
    compiled = compile_on_s3(half="compile", command=["false"])
    assert (compiled.graphs, compiled.compiled, compiled.failed, state()) == (2, 2, (), {GraphState.DONE})
    assert compile_on_s3(half="compile", command=["false"]).graphs == 0
    both = compile_on_s3(GOOD, BETTER)
    assert (both.compiled, both.cached, both.modules) == (0, 2, (BETTER, GOOD))


def test_a_trial_that_fails_fails_collecting(compile_: Any) -> None:
    with pytest.raises(TrnpipeError, match="without a summary"):
        compile_(GOOD, half="collect", trial=1)


def test_sets_that_share_a_cache_keep_their_graphs_apart(compile_: Any) -> None:
    assert len(compile_(GOOD, BAD).failed) == 1
    # Another set shares one graph, compiles one, and has nothing to do with the one that failed.
    other = compile_(GOOD, BETTER)
    assert (other.graphs, other.compiled, other.cached, other.failed) == (1, 1, 1, ())
    assert other.modules == (BETTER, GOOD)


def test_the_trial_may_be_a_gang_under_torchrun(compile_: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{Path.cwd()}{os.pathsep}{tmp_path}")
    command = neuron_launch.torchrun_command(
        ["trial"], nodes=1, node=0, ranks_per_node=2, leader="127.0.0.1", port=free_port(), join_seconds=60
    )
    summary = compile_(GOOD, lines=["a rank is here"], command=command, on_line=(lines := []).append)
    assert (summary.graphs, summary.compiled) == (1, 1)
    assert lines.count("a rank is here") == 2


def test_a_failed_graph_comes_with_the_compilers_own_words(compile_: Any) -> None:
    summary = compile_(GOOD, BAD)
    assert (summary.graphs, summary.compiled) == (2, 1)
    (failed,) = summary.failed
    assert failed.module == BAD
    assert any(COMPILER_WORDS in line for line in failed.words)
    assert failed.words[-1] == "ERROR 5521 [CommandDriver]: Internal details"
    assert not any("Total" in line for line in failed.words)
    assert compile_cache.modules(compile_.cache)[f"{COMPILER}/{BAD}"] is GraphState.FAILED


@pytest.mark.parametrize(
    ("plan", "exit_code", "says"),
    [
        ({"silent": True}, ExitCode.DEFECT, "without a summary"),
        ({"lie": -1}, ExitCode.DEFECT, "contradicts itself"),
        ({"trial": 3, "lines": ["ValueError: no such bucket"]}, ExitCode.DEFECT, "without a summary"),
        (
            {"trial": 1, "lines": ["TDRV:dmem_alloc Failed to alloc DEVICE memory: 180355072"]},
            ExitCode.BAD_CONFIG,
            "device memory",
        ),
    ],
)
def test_without_a_clear_summary_nothing_counts_as_compiled(
    compile_: Any, plan: dict[str, Any], exit_code: ExitCode, says: str
) -> None:
    with pytest.raises(TrnpipeError, match=says) as caught:
        compile_(GOOD, **plan)
    assert caught.value.exit_code == exit_code
    assert all(any(line in str(value) for value in [caught.value.value]) for line in plan.get("lines", ()))


def test_a_compilation_that_takes_too_long_is_ended_with_all_it_started(compile_: Any, tmp_path: Path) -> None:
    beats: list[str] = []
    with pytest.raises(NoProgress, match="too long"):
        compile_(GOOD, timeout=4, pid=str(tmp_path / "pid"), on_line=beats.append)
    # There is a sign of life even while the tool says nothing.
    assert beats.count("") >= 1
    trial = int((tmp_path / "pid").read_text())
    for _ in range(50):
        state = Path(f"/proc/{trial}/stat")
        if not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("the trial outlived the tool")


@pytest.mark.parametrize(
    ("program", "code", "value"),
    [
        ("print('Failed to alloc DEVICE memory: 2147483648'); raise SystemExit(1)", ExitCode.BAD_CONFIG, "DEVICE memory"),
        ("print('no words for it'); raise SystemExit(3)", ExitCode.DEFECT, "exit status 3"),
    ],
)
def test_a_run_with_compiled_graphs_fails_for_what_its_log_says(program: str, code: ExitCode, value: str) -> None:
    with pytest.raises(TrnpipeError) as caught:
        compile_cache.run_command([sys.executable, "-c", program], timeout=60, on_line=lambda _: None)
    assert caught.value.exit_code == code
    assert value in str(caught.value.value)


def test_a_run_with_compiled_graphs_ends() -> None:
    lines: list[str] = []
    compile_cache.run_command([sys.executable, "-c", "print('step 1')"], timeout=60, on_line=lines.append)
    assert "step 1" in lines
    with pytest.raises(NoProgress, match="too long"):
        compile_cache.run_command([sys.executable, "-c", "import time; time.sleep(60)"], timeout=2, on_line=lines.append)


def test_flags_with_a_cache_of_their_own_and_a_missing_tool_are_refused(compile_: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadConfig, match="cache of their own"):
        compile_(GOOD, flags="-O1 --cache_dir=/var/tmp/other")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BadConfig, match="no neuron_parallel_compile"):
        compile_(GOOD)


@pytest.mark.parametrize(
    ("names", "state"),
    [
        (("model.hlo_module.pb", "compile_flags.json"), GraphState.COLLECTED),
        (("model.hlo_module.pb", "model.hlo_module.pb.lock"), GraphState.LOCKED),
        (("model.hlo_module.pb", "model.log"), GraphState.FAILED),
        (("model.hlo_module.pb", "model.log", "model.hlo_module.pb.lock"), GraphState.LOCKED),
        (("model.hlo_module.pb", "model.neff", "model.done"), GraphState.DONE),
        (("model.hlo_module.pb", "model.neff", "model.done", "model.hlo_module.pb.lock"), GraphState.DONE),
        (("model.hlo_module.pb", "model.neff"), GraphState.COLLECTED),
    ],
)
def test_the_state_of_a_graph(tmp_path: Path, names: tuple[str, ...], state: GraphState) -> None:
    for name in names:
        store.write_bytes(str(tmp_path / COMPILER / GOOD / name), b"")
    store.write_bytes(str(tmp_path / "somebody" / "else.txt"), b"")
    assert compile_cache.modules(str(tmp_path)) == {f"{COMPILER}/{GOOD}": state}


def test_a_cache_that_is_not_there_is_no_empty_cache(s3_root: str) -> None:
    assert compile_cache.modules(f"{s3_root}/graphs/neuron-cache") == {}
    with pytest.raises(MissingInput):
        compile_cache.modules("s3://no-such-bucket-anywhere/graphs")


def test_locks_go_only_when_no_other_run_is_there(s3_root: str) -> None:
    cache = f"{s3_root}/graphs/neuron-cache"
    lock = f"{cache}/{COMPILER}/{GOOD}/model.hlo_module.pb.lock"
    for uri in (lock, f"{cache}/{COMPILER}/{GOOD}/model.hlo_module.pb", f"{cache}/other.lock"):
        store.write_bytes(uri, b"")
    assert compile_cache.clear_locks(cache, in_use=True) == []
    assert store.exists(lock)
    assert compile_cache.clear_locks(cache, in_use=False) == [lock]
    assert compile_cache.modules(cache) == {f"{COMPILER}/{GOOD}": GraphState.COLLECTED}
    assert store.exists(f"{cache}/other.lock")


def test_runs_see_each_other_at_the_cache(s3_root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = f"{s3_root}/graphs/neuron-cache"
    for run in ("week-1", "week-2"):
        compile_cache.register(cache, run)
    assert store.exists(f"{s3_root}/graphs/in-use/week-1.json")
    assert compile_cache.others(cache, "week-1") == ["week-2"]
    # A run that was killed cannot take its note away.
    with monkeypatch.context() as later:
        later.setenv(ATTEMPT_VARIABLE, "-5")
        assert compile_cache.others(cache, "week-1") == []
    compile_cache.unregister(cache, "week-2")
    assert compile_cache.others(cache, "week-1") == []
    # A bucket that is one cache keeps its notes inside.
    compile_cache.register(s3_root, "week-3")
    assert store.exists(f"{s3_root}/in-use/week-3.json")


def test_a_copy_of_a_cache_has_the_mark_of_a_compiled_graph_last(
    tmp_path: Path, s3_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, graph = f"{s3_root}/graphs/health", tmp_path / "cache" / COMPILER / GOOD
    compile_cache.fetch(kept, tmp_path / "cache")
    for name in ("model.done", "model.hlo_module.pb", "model.neff", "model.neff.lock"):
        store.write_bytes(str(graph / name), b"")
    order: list[str] = []

    def upload(path: Path, uri: str) -> None:
        order.append(path.name)
        if path.name == "model.neff" and len(order) == 2:
            raise Transient("the connection ended")
        store.write_bytes(uri, path.read_bytes())

    monkeypatch.setattr(compile_cache.store, "upload", upload)
    with pytest.raises(Transient):
        compile_cache.keep(tmp_path / "cache", kept)
    compile_cache.fetch(kept, tmp_path / "broken-off")
    assert set(compile_cache.modules(str(tmp_path / "broken-off")).values()) == {GraphState.COLLECTED}
    compile_cache.keep(tmp_path / "cache", kept)
    assert order == ["model.hlo_module.pb", "model.neff", "model.neff", "model.done"]
    compile_cache.fetch(kept, tmp_path / "next")
    assert set(compile_cache.modules(str(tmp_path / "next")).values()) == {GraphState.DONE}
