"""Five weeks of `make year`, and the proof that its checks see what they are there to see."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.chain import year_inputs
from tests.chain.year import CONFIG, Entry, Year, binomial_limit, open_year, slack
from tests.chain.year_checks import Outsider, View
from tests.chain.year_plan import DELIVERIES, OPERATIONS, Operation, plan_year

# Ten executions with their processes, on a machine that may be busy.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def test_a_year_has_everything_and_the_same_seed_the_same_year() -> None:
    weeks = plan_year(52, 1)
    assert [week.number for week in weeks] == list(range(1, 53))
    deliveries = [delivery for block in DELIVERIES for delivery in block]
    operations = [operation for block in OPERATIONS for operation in block]
    assert sorted(week.delivery for week in weeks if week.delivery) == sorted(deliveries)
    assert sorted((week.operation, week.fall) for week in weeks if week.operation) == sorted(operations)
    assert any(week.delete for week in weeks)
    assert plan_year(52, 1) == weeks != plan_year(52, 2)
    assert {week.operation for week in plan_year(5, 1)} >= {Operation.PLANT, Operation.ROLL_BACK, Operation.LOSE_HOST}


def test_chance_is_told_from_failure() -> None:
    # Of ten models that the gate accepts with a chance of 5 %: 4 or fewer in 99.9 % of years, 3 or fewer in 99.897 %.
    assert binomial_limit(0, 0.05) == 0
    assert binomial_limit(10, 0.05) == 4
    deviations = np.random.default_rng(0).normal(0, 0.1, 20_000)
    assert 0.003 < slack(deviations, 2000, 52) < slack(deviations, 500, 52) < 0.02


@pytest.mark.long
def test_docstrings_take_the_place_of_glosses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(year_inputs, "WORDNET", tmp_path)
    objects: dict[str, bytes] = {}
    inputs = year_inputs.Inputs.first(objects.__setitem__, seed=1, weeks=52, hidden=20_000)
    assert inputs.weekly_rows * 53 <= len(inputs.pool)
    assert inputs.weekly_rows > 100
    assert len(inputs.hidden) > 4000
    given = b"".join(objects.values()).decode()
    assert not [row.id for row in inputs.hidden[:100] if json.dumps(row.document) in given]
    assert len(inputs.documents()) == given.count('"text":')


@pytest.fixture(scope="module")
def year(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Year]:
    """Five weeks with a refresh each; the fourth ends with a prune."""
    templates = request.config.cache.mkdir("cdk-out-year")
    with open_year(tmp_path_factory.mktemp("year"), templates, weeks=5, refreshes=1, seed=1, hidden=6000) as year:
        year.live()
        yield year


@pytest.mark.long
def test_five_weeks_keep_every_invariant(year: Year) -> None:
    assert year.broken == []
    verdicts = {entry.run: entry.verdict for entry in year.entries}
    assert verdicts["week-05"] == "refused", "three times gate.max_drop"
    assert verdicts["week-03-refresh-1"] == "rolled back"
    assert year.worse == [False]
    assert len(year.inputs.deleted) == 5
    # Week 3's model was taken back, so its rows, with the shard that came late, are new in week 4.
    new = {number: _plan(year, f"week-{number:02d}")["train"]["new_rows"] for number in (4, 5)}
    assert new[4] > 2 * new[5]


def _plan(year: Year, run: str) -> Any:
    return json.loads(year.site.file(f"{year.root}/runs/{run}/plan.json").read_text())


def forget_a_part(view: View) -> None:
    _change(view, lambda table: table.slice(1))


def move_a_vector(view: View) -> None:
    def moved(table: pa.Table) -> pa.Table:
        vectors = np.stack(table["embedding"].to_numpy())
        vectors[:, 0] += 1e-4
        column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])
        return table.set_column(table.schema.get_field_index("embedding"), "embedding", column)

    _change(view, moved)


def _change(view: View, change: Callable[[pa.Table], pa.Table]) -> None:
    path = view.locate(view.manifest["parts"][0]["uri"])
    pq.write_table(change(pq.read_table(path)), path)


def keep_what_is_gone(documents: dict[str, str]) -> None:
    del documents[min(documents)]


def lack_what_is_new(documents: dict[str, str]) -> None:
    documents["new"] = "a document that came just now"


@pytest.mark.long
@pytest.mark.parametrize(("damage", "words"), [(forget_a_part, "documents have no embedding"), (move_a_vector, "vectors differ")])
def test_an_outsider_sees_damaged_files(year: Year, tmp_path: Path, damage: Callable[[View], None], words: str) -> None:
    view = _copied(year, tmp_path).view()
    damage(view)
    broken = _broken(year, view, year.inputs.documents())
    assert words in str(broken)
    assert "has not the hash of the manifest" in str(broken)


@pytest.mark.long
def test_an_outsider_sees_a_model_below_the_budget(year: Year, tmp_path: Path) -> None:
    copy = _copied(year, tmp_path)
    view = copy.view()
    year.truth.make_worse(view.model, tmp_path / "worse", fall=0.1, seed=0)
    shutil.copy(tmp_path / "worse" / "model.safetensors", view.model)
    entry = Entry(week=5, run=view.pointer["embeddings_run"], event="")
    copy.check_published(entry, embedded=True)
    assert "below the reference" in str(entry.broken)
    assert "do not agree about the weights" in str(entry.broken)
    assert "vectors differ" in str(entry.broken)


@pytest.mark.long
def test_an_outsider_counts_the_new_rows(year: Year) -> None:
    right, wrong = (Entry(week=5, run="week-05", event="") for _ in range(2))
    # Week 5's model was refused: its parent is still the published one.
    year.check_rows(right, year.view())
    replace(year, trained={**year.trained, "week-04": year.trained["week-02"]}).check_rows(wrong, year.view())
    assert (right.broken, len(wrong.broken)) == ([], 1)


def _copied(year: Year, folder: Path) -> Year:
    """The year with a copy of its bucket."""
    shutil.copytree(year.site.endpoint.mirror_folder, folder / "bucket")

    def locate(uri: str) -> Path:
        return folder / "bucket" / uri.removeprefix(f"{year.root}/")

    return replace(year, site=SimpleNamespace(file=locate, stack=year.site.stack))  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "words"), [(keep_what_is_gone, "are of no document"), (lack_what_is_new, "have no embedding")]
)
def test_an_outsider_sees_another_corpus(year: Year, change: Callable[[dict[str, str]], None], words: str) -> None:
    documents = year.inputs.documents()
    assert _broken(year, year.view(), documents) == []
    change(documents)
    assert words in str(_broken(year, year.view(), documents))


def _broken(year: Year, view: View, documents: dict[str, str]) -> list[str]:
    outsider = Outsider(view.model, CONFIG["train"]["query_length"], CONFIG["embed"]["length"])
    return view.broken_set(documents, outsider, sorted(documents))
