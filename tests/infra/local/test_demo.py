"""The demo's text: real docstrings, the same weeks everywhere, released one run after another."""

from __future__ import annotations

import ast
import gzip
import json
from pathlib import Path

import pytest
import yaml

from infra.cdk_context import ENVIRONMENTS
from infra.local import demo
from infra.local.demo import FIRST_RUN_WEEKS, WEEKS, initial_folder, next_weeks, read_pairs, weekly_shards
from pipeline.config import build_config, merge
from pipeline.errors import BadConfig, MissingInput

PACKAGE = {
    "alpha.py": '''
def resize(image, *, width, height=None):
    """Change the size of an image without cutting anything off.

    Args:
        image: what to change, as a file name or as an array of pixels.
        width: in pixels.
    """

class Crop:
    """Cut the borders off an image until nothing is left to cut off."""

    def apply(self, image):
        """Apply the cut to one image, or to every image of a list.

        The result has the same type as the argument, and the argument is left as it was.
        """

def short():
    """Do it.

    Now.
    """
''',
    "broken.py": "def (",
    "inner/__init__.py": '''
def again(image):
    """Apply the cut to one image, or to every image of a list.

    Not quite a duplicate: the document has another signature than the first one has.
    """
''',
    "tests/test_alpha.py": '''
def test_nothing():
    """A test's docstring is not documentation, so it is left out.

    However long it is, and however many words it has.
    """
''',
}


def test_the_first_deployment_runs_the_demo_in_size_m() -> None:
    config = yaml.safe_load((ENVIRONMENTS / "smoke.yaml").read_text())["config"]
    for section, values in demo.SIZES["M"].config.items():
        assert values.items() <= config[section].items(), section


@pytest.mark.parametrize(("gflops", "size"), [(0.5, "S"), (399.9, "S"), (400, "M"), (1199, "M"), (1200, "L"), (1e6, "L")])
def test_a_faster_machine_gets_a_larger_demo(gflops: float, size: str) -> None:
    assert demo.suggest_size(gflops) == size


def test_the_size_is_measured_once_said_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(demo, "measure_gflops", lambda: 500.0)
    assert demo.choose_size(tmp_path, [], None, lines.append) is demo.SIZES["M"]
    # The next week comes on a machine that is busy.
    monkeypatch.setattr(demo, "measure_gflops", lambda: pytest.fail("measured again"))
    for wanted in (None, "M"):
        assert demo.choose_size(tmp_path, ["week-01.jsonl.gz"], wanted, lines.append) is demo.SIZES["M"]
    minutes = round((demo.FIXED_SECONDS + demo.SIZES["M"].gflop / 500) / 60)
    assert lines[0] == (
        f"demo size M, because this machine computes 500 GFLOP/s in fp32; a first run takes about {minutes} minutes; "
        '--demo S, M or L chooses (make local ARGS="--demo L")'
    )
    assert lines[1:] == ["demo size M, as in earlier weeks", "demo size M, as asked for"]


def test_another_size_is_refused_once_a_week_is_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "measure_gflops", lambda: 500.0)
    demo.choose_size(tmp_path, [], None, str)
    assert demo.choose_size(tmp_path, [], "S", str) is demo.SIZES["S"]
    with pytest.raises(BadConfig) as refused:
        demo.choose_size(tmp_path, ["week-01.jsonl.gz"], "L", str)
    assert refused.value.value == "--demo L, but its weeks have size S"
    assert "--state" in refused.value.remedy
    assert demo.choose_size(tmp_path, ["week-01.jsonl.gz"], None, str) is demo.SIZES["S"]


def test_this_machine_has_a_speed() -> None:
    assert 0 < demo.measure_gflops() < float("inf")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small package in place of the installed ones."""
    root = tmp_path / "site" / "small"
    for name, text in {"__init__.py": "", **PACKAGE}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(demo, "_modules", lambda: _only(root))
    return root


def _only(root: Path) -> list[tuple[str, Path]]:
    found = sorted(root.rglob("*.py"))
    return [(".".join(path.relative_to(root.parent).with_suffix("").parts), path) for path in found if "tests" not in path.parts]


def test_first_line_is_the_query_and_signature_with_the_rest_the_document(package: Path) -> None:
    pairs = {pair.id: pair for pair in read_pairs()}
    assert sorted(pairs) == ["small.alpha.Crop.apply", "small.alpha.resize", "small.inner.__init__.again"]
    resize = pairs["small.alpha.resize"]
    assert resize.query == "Change the size of an image without cutting anything off."
    assert resize.document.startswith("def resize(image, width, height)\nArgs:\n    image: what to change")
    assert pairs["small.alpha.Crop.apply"].document.startswith("def apply(image)\n")


def test_the_installed_packages_give_enough_text() -> None:
    modules = dict(demo._modules())
    assert modules["json.decoder"].name == "decoder.py"
    assert modules["torch.nn.functional"].name == "functional.py"
    assert not any("test" in path.parts or "tests" in path.parts for path in modules.values())
    pairs = [pair for name in ("json", "textwrap") for pair in demo._pairs_in(ast.parse(modules[name].read_bytes()), name)]
    assert {pair.id for pair in pairs} >= {"json.dump", "json.loads", "textwrap.wrap"}


def test_shards_are_the_same_bytes_every_time_and_hold_every_row_once(package: Path, tmp_path: Path) -> None:
    first, second = weekly_shards(tmp_path / "a"), weekly_shards(tmp_path / "b")
    assert [shard.read_bytes() for shard in first] == [shard.read_bytes() for shard in second]
    rows = [json.loads(line) for shard in first for line in gzip.decompress(shard.read_bytes()).splitlines()]
    assert sorted(row["id"] for row in rows) == [pair.id for pair in read_pairs()]
    assert all(set(row) == {"id", "query", "document", "package", "labelled"} for row in rows)
    assert [shard.name for shard in first] == [f"week-{week:02d}.jsonl.gz" for week in range(1, WEEKS + 1)]


def test_every_row_names_its_package_and_one_in_some_has_a_label() -> None:
    packages = build_config(demo.two_tasks("rows/", "corpus/")).train.classes["package"]
    modules = [demo._row(demo.Pair(name, "query", "document")) for name, _ in demo._modules()]
    for package in packages:
        # Labels of texts to train on, and of held-out ones.
        assert len({row["labelled"] for row in modules if row["package"] == package}) == 2, package
    assert {row["package"] for row in modules} == {*packages}
    assert {row["id"]: row["package"] for row in modules}["torch.nn.functional"] == "torch"
    assert 0.8 < demo.LABELLED * sum(row["labelled"] for row in modules) / len(modules) < 1.2


def test_shards_without_packages_are_cut_again(package: Path, tmp_path: Path) -> None:
    [shard, *_] = weekly_shards(tmp_path)
    before = shard.read_bytes()
    shard.write_bytes(b"")
    (tmp_path / "rows.txt").write_text(f"None of {WEEKS} weeks, with a corpus")
    assert weekly_shards(tmp_path)[0].read_bytes() == before


def test_fewer_rows_are_cut_again_and_the_same_rows_are_kept(package: Path, tmp_path: Path) -> None:
    weekly_shards(tmp_path)
    shards = weekly_shards(tmp_path, rows=2)
    assert sum(len(gzip.decompress(shard.read_bytes()).splitlines()) for shard in shards) == 2
    written = shards[0].stat().st_mtime_ns
    assert weekly_shards(tmp_path, rows=2)[0].stat().st_mtime_ns == written


def test_the_first_run_releases_many_weeks_and_each_later_one_another(tmp_path: Path) -> None:
    shards = [tmp_path / f"week-{week:02d}.jsonl.gz" for week in range(1, WEEKS + 1)]
    released = next_weeks(shards, [])
    assert released == shards[:FIRST_RUN_WEEKS]
    for week in range(FIRST_RUN_WEEKS, WEEKS):
        assert next_weeks(shards, [shard.name for shard in shards[:week]]) == [shards[week]]
    with pytest.raises(MissingInput, match="no further week"):
        next_weeks(shards, [shard.name for shard in shards])


def test_the_model_is_a_real_one_and_the_configuration_valid() -> None:
    assert json.loads((initial_folder() / "config.json").read_text())["model_type"] == "bert"
    assert (initial_folder() / "model.safetensors").stat().st_size > 50 << 20
    for size in demo.SIZES.values():
        both = build_config(merge(size.config, demo.two_tasks("rows/", "corpus/")))
        assert both.data.training_uris == ("rows/", "rows/")
        # A step of the search has as many tokens for each of its pairs in every size, or more.
        assert both.train.batch_tokens is not None
        assert both.train.batch_tokens >= 64 * both.train.batch_size
