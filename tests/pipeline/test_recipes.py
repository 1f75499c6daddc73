"""The scripts of docs/data-formats.md that load embeddings into other systems, run as printed there on published parts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import store
from pipeline.contract import Stage
from pipeline.dataset.parts import read_part
from pipeline.stages import embed, evaluate, publish
from tests.pipeline.conftest import make_texts

PAGE = (Path(__file__).resolve().parents[2] / "docs/data-formats.md").read_text(encoding="utf-8")
ODD_IDS = ["back\\slash", '"quoted" ü', "\\N", "a\\tb", "C:\\new\\"]


@pytest.fixture(params=["float32", "float16"])
def run(plan_run: Any, request: pytest.FixtureRequest) -> Any:
    """A published run, two parts and more, with ids and locales that formats must escape."""
    texts = [(ODD_IDS[index] if index < len(ODD_IDS) else key, text) for index, (key, text) in enumerate(make_texts(70))]
    run = plan_run(texts=texts, children=1, locales=["de", None, "tab\there"], settings={"embed": {"dtype": request.param}})
    run.finish(Stage.EVALUATE, evaluate.run(run.context(Stage.EVALUATE)))
    run.finish(Stage.EMBED, embed.run(run.context(Stage.EMBED)))
    publish.run(run.context(Stage.PUBLISH))
    return run


def recipe(heading: str) -> str:
    """The section's script."""
    section = PAGE.partition(f"\n### {heading}\n")[2].partition("\n#")[0]
    [script] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return str(script)


def run_script(script: str, folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def embeddings(run: Any) -> dict[str, tuple[str | None, list[float]]]:
    """The id of every published document -> its locale and embedding."""
    found = {}
    for part in store.read_json(run.paths.embed_manifest)["parts"]:
        for ids, vectors, locales in read_part(Path(part["uri"])):
            found.update(dict(zip(ids, zip(locales, vectors.astype(np.float32).tolist(), strict=True), strict=True)))
    assert set(ODD_IDS) < set(found)
    assert {locale for locale, _ in found.values()} == {"de", None, "tab\there"}
    return found


def folder_of(run: Any) -> str:
    return str(Path(run.paths.embed_manifest).parent.resolve())


def test_faiss(run: Any, tmp_path: Path) -> None:
    told = "\nnp.savez('found.npz', ids=ids, vectors=vectors, query=query)\n"
    lines = run_script(recipe("FAISS") + told, tmp_path, folder_of(run), run.paths.model, run.texts[20][1]).splitlines()
    found = np.load(tmp_path / "found.npz")
    expected = embeddings(run)
    assert found["ids"].tolist() == list(expected)
    assert found["vectors"].dtype == np.float32
    assert found["vectors"].tolist() == [vector for _, vector in expected.values()]
    scores = found["vectors"] @ found["query"][0]
    best = found["ids"][np.argsort(-scores)[:10]].tolist()
    assert best[0] == run.texts[20][0]
    assert [line.partition(" ")[2] for line in lines] == best
    assert (tmp_path / "embeddings.faiss").exists()


def test_opensearch(run: Any, tmp_path: Path) -> None:
    run_script(recipe("OpenSearch"), tmp_path, folder_of(run))
    mapping = json.loads((tmp_path / "mapping.json").read_text())
    assert mapping["settings"]["index.knn"] is True
    assert mapping["mappings"]["properties"]["embedding"]["type"] == "knn_vector"
    assert mapping["mappings"]["properties"]["embedding"]["dimension"] == 32
    found = {}
    for path in sorted(tmp_path.glob("bulk-*.ndjson")):
        data = path.read_text()
        assert data.endswith("\n")  # or _bulk refuses its last line
        lines = [json.loads(line) for line in data.splitlines()]
        for action, document in zip(lines[::2], lines[1::2], strict=True):
            assert set(action) == {"index"}
            assert action["index"]["_index"] == "documents"
            assert set(document) == set(mapping["mappings"]["properties"])
            found[action["index"]["_id"]] = document["locale"], document["embedding"]
    assert found == embeddings(run)


def from_copy(field: str) -> str | None:
    """Read a field of COPY's text format as PostgreSQL does: \\N is null, and a backslash takes the next character."""
    if field == r"\N":
        return None
    letters = {"t": "\t", "n": "\n", "r": "\r"}
    return re.sub(r"\\(.)", lambda found: letters.get(found[1], found[1]), field)


def test_pgvector(run: Any, tmp_path: Path) -> None:
    found = {}
    for line in run_script(recipe("pgvector"), tmp_path, folder_of(run)).removesuffix("\n").split("\n"):
        key, locale, embedding = line.split("\t")
        assert re.fullmatch(r"\[[-0-9.e, ]+\]", embedding)
        found[from_copy(key)] = from_copy(locale), json.loads(embedding)
    assert found == embeddings(run)
