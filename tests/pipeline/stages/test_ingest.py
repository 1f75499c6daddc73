"""ingest: each new file read once, its rows and tokens whole and sorted; interrupted, changed, damaged, another tokenizer."""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline import store
from pipeline.contract import Stage
from pipeline.dataset.ids import id_hash
from pipeline.dataset.ingested import DOCUMENTS, PAIRS, SLICES, IngestedShard, identities, positive
from pipeline.dataset.records import MAX_ROW_BYTES
from pipeline.dataset.rows import normalized_hash
from pipeline.dataset.tokens import TextTokenizer
from pipeline.errors import BadData, ExitCode, MissingInput, Transient
from pipeline.run.context import StageOutput
from pipeline.run.world import NodeWorld, World
from pipeline.stages import ingest
from tests.faulty_storage import FaultyStorage
from tests.pipeline.stages.conftest import POSITIONS
from tests.pipeline.stages.planning import Bench, Config, rows


@pytest.fixture(params=["local", "s3"])
def bucket(request: pytest.FixtureRequest, bench: Bench, model: Path) -> Bench:
    """A bucket in a folder, or on S3."""
    if request.param == "local":
        return bench
    return on_s3(bench, model, request.getfixturevalue("s3_root"))


def on_s3(bench: Bench, model: Path, root: str) -> Bench:
    found = Bench(root, bench.scratch, model)
    store.upload_folder(model, f"{root}/parent")
    found.config["model"]["parent"] = f"{root}/parent"
    return found


def shards(bench: Bench, kind: str, run: str = "run") -> list[IngestedShard]:
    return [IngestedShard(bench.root, shard) for shard in bench.inputs(run).shards_of(kind)]


def table(shard: IngestedShard, what: str) -> pa.Table:
    """All rows of a shard, file after file."""
    files = range(len(shard.profile.files))
    read = getattr(shard, what)
    return pa.concat_tables([piece for file in files for piece in read(file, 0, shard.profile.files[file].rows)])


def content(bench: Bench) -> dict[str, bytes]:
    """Everything that is ingested: name -> bytes."""
    return {info.uri: store.read_bytes(info.uri) for info in store.list_objects(store.join(bench.root, "ingested"))}


def test_rows_and_tokens_of_a_file(bucket: Bench, model: Path) -> None:
    data = [
        *rows(0, 300, locale="de", negatives=["no", " never "]),
        *rows(290, 310, task="qa", label=0.5, group=7),
        {"id": "bad", "query": "", "document": "d"},
        *rows(300, 320, label=0),
    ]
    uri = bucket.shard("a.jsonl.gz", data)
    bucket.prepare("run", {"data": {"max_bad_fraction": 0.5}})
    bucket.ingest("run")
    [pairs], [documents] = shards(bucket, PAIRS), shards(bucket, DOCUMENTS)
    assert pairs.is_ingested()
    assert documents.is_ingested()

    facts, texts, tokens = (table(pairs, what) for what in ("facts", "texts", "tokens"))
    good = {line: row for line, row in enumerate(data, 1) if row["id"] != "bad"}
    assert sorted(facts["line"].to_pylist()) == sorted(good)
    keys = facts["key"].to_numpy()
    assert (keys[:-1] <= keys[1:]).all()
    tokenizer = TextTokenizer(model)
    for fact, text, token in zip(facts.to_pylist(), texts.to_pylist(), tokens.to_pylist(), strict=True):
        row = good[fact["line"]]
        query, document = row["query"], row["document"].strip()
        assert (fact["id"], fact["locale"], fact["task"]) == (row["id"], row.get("locale"), row.get("task"))
        assert (fact["label"], fact["query_hash"]) == (row.get("label", 1), normalized_hash(query))
        assert fact["key"] == fact["document_hash"] == normalized_hash(document)
        wanted = ["no", "never"] if "negatives" in row else []
        assert text == {"texts": [query, document], "negatives": wanted, "group": "7" if "group" in row else None}
        encoded = tokenizer.encode([query, document], POSITIONS)
        assert [token["query_tokens"], token["document_tokens"]] == [each.tolist() for each in encoded]
        assert fact["negative_hashes"] == [normalized_hash(text) for text in wanted]
        assert token["negative_tokens"] == [each.tolist() for each in tokenizer.encode(wanted, POSITIONS)]
    versions = facts["version"].to_numpy()
    assert (positive(versions) == (facts["label"].to_numpy() > 0)).all()
    # Ten documents are there with three labels, tasks or locales, of which the identity has the last two.
    assert len(set(versions.tolist())) == len(good)
    assert len(set(identities(versions).tolist())) == len(good)
    stored = np.concatenate([pairs.hashes(number, 0, file.rows)["version"] for number, file in enumerate(pairs.profile.files)])
    assert (stored == versions).all()

    profile = pairs.profile
    assert (profile.rows, profile.bad_rows, profile.positive_rows) == (340, 1, 320)
    assert profile.reasons == (f"1 rows: 'query' is empty (first: {uri}:321)",)
    assert profile.sha256 == hashlib.sha256(store.read_bytes(uri)).hexdigest()
    assert (profile.uri, profile.size) == (uri, len(store.read_bytes(uri)))
    assert profile.columns == {name: name for name in profile.columns}
    assert profile.statistics["locales"] == {"de": 300, "": 40}
    assert profile.statistics["tasks"] == {"": 320, "qa": 20}
    assert profile.statistics["labels"] == 310
    assert profile.statistics["repeated"] == 0
    lengths = [len(each) for name in ("query_tokens", "document_tokens") for each in tokens[name].to_pylist()]
    assert profile.statistics["tokens"] == sum(lengths) + sum(
        len(text) for each in tokens["negative_tokens"].to_pylist() for text in each
    )
    counted = Counter(profile.statistics["query_tokens"]) + Counter(profile.statistics["document_tokens"])
    assert counted == Counter(str(1 << (length - 1).bit_length()) for length in lengths)
    [refused] = store.read_bytes(f"{pairs.rows_uri}/quarantine.jsonl").decode().splitlines()
    assert json.loads(refused)["at"] == f"{uri}:321"

    facts, texts, tokens = (table(documents, what) for what in ("facts", "texts", "tokens"))
    assert documents.profile.rows == 340
    for fact, text, token in zip(facts.to_pylist(), texts.to_pylist(), tokens.to_pylist(), strict=True):
        row = good[fact["line"]]
        assert (fact["id"], fact["locale"], fact["key"]) == (row["id"], row.get("locale"), id_hash(row["id"]))
        assert text["texts"] == [row["document"].strip()]
        assert token["document_tokens"] == tokenizer.encode([row["document"].strip()], POSITIONS)[0].tolist()


def test_parquet_and_csv_of_a_corpus(bench: Bench) -> None:
    bench.shard("a.jsonl", rows(0, 10))
    corpus = Path(bench.root) / "corpus"
    corpus.mkdir()
    pq.write_table(
        pa.table({"id": [1, 2, 3], "text": ["one", " two ", None], "locale": ["de", None, "de"]}), corpus / "a.parquet"
    )
    (corpus / "b.csv").write_text('id,text\n4,"four, and more"\n5,five,6\n')
    bench.config["data"] |= {"corpus": [str(corpus)], "max_bad_fraction": 0.9}
    bench.prepare("run")
    bench.ingest("run")
    one, two = shards(bench, DOCUMENTS)
    found = table(one, "facts").append_column("texts", table(one, "texts")["texts"]).sort_by("line")
    assert [(row["id"], row["locale"], row["texts"]) for row in found.to_pylist()] == [("1", "de", ["one"]), ("2", None, ["two"])]
    assert (one.profile.bad_rows, two.profile.bad_rows) == (1, 1)
    assert table(two, "texts")["texts"].to_pylist() == [["four, and more"]]
    assert store.exists(f"{two.rows_uri}/quarantine.jsonl")
    assert one.profile.columns == {name: name for name in ("id", "text", "locale", "deleted")}


@pytest.mark.parametrize("by", ["query", "group"])
def test_the_key_is_of_what_is_held_out_together(bench: Bench, by: str) -> None:
    bench.shard("a.jsonl", [*rows(0, 10, group=" Big  One"), *rows(10, 20)])
    bench.config["data"]["holdout_by"] = by
    bench.prepare("run")
    bench.ingest("run")
    [pairs] = shards(bench, PAIRS)
    for fact in table(pairs, "facts").to_pylist():
        # Rows without a group are held out with those of their document.
        group = normalized_hash("big one") if fact["line"] <= 10 else fact["document_hash"]
        assert fact["key"] == (fact["query_hash"] if by == "query" else group)


def test_large_files_are_divided(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest, "FILE_ROWS", 100)
    data = rows(0, 250)
    bench.shard("a.jsonl", data)
    bench.prepare("run")
    bench.ingest("run")
    [pairs] = shards(bench, PAIRS)
    assert [file.rows for file in pairs.profile.files] == [100, 100, 50]
    assert sorted(table(pairs, "facts")["line"].to_pylist()) == list(range(1, 251))
    for number, file in enumerate(pairs.profile.files):
        assert file.slices[-1] == file.rows
        found = pa.concat_tables(pairs.facts(number, *pairs.rows_in(number, 0, SLICES // 2)))["key"].to_pylist()
        assert all(key < 1 << 63 for key in found)
    monkeypatch.setattr(ingest, "FILE_ROWS", 1 << 18)
    monkeypatch.setattr(ingest, "FILE_BYTES", 1)
    tables = [pa.table({"id": ["a"]})] * 3
    assert [len(found) for found in ingest.files_of(iter(tables))] == [1, 1, 1]


def test_children_share_the_files_and_the_last_one_speaks(bucket: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for number in range(5):
        bucket.shard(f"{number}.jsonl", rows(20 * number, 20 * number + 20))
    bucket.config["data"]["ingest_children"] = 3
    bucket.prepare("run")
    assert bucket.missing("run").children == 3
    assert bucket.stage(Stage.INGEST, "run", 2) is None
    assert bucket.stage(Stage.INGEST, "run", 0) is None
    assert "child 0 of 3: 2 of its 2 files are to do" in caplog.text
    output = bucket.stage(Stage.INGEST, "run", 1)
    assert output is not None
    tokens = sum(shard.profile.statistics["tokens"] for shard in shards(bucket, PAIRS))
    seconds = output.metrics["seconds"]
    assert output.metrics == {"shards": 5, "rows": 100, "bad_rows": 0, "tokens": tokens, "seconds": seconds}
    assert "0.jsonl: 20 rows, 0 refused" in caplog.text
    # Next week: only what is new, and the same files under the same names.
    before = content(bucket)
    bucket.shard("5.jsonl", rows(100, 120))
    caplog.clear()
    bucket.prepare("next")
    bucket.ingest("next")
    assert caplog.text.count("files are to do") == bucket.missing("next").children == 1
    assert "child 0 of 1: 1 of its 1 files are to do" in caplog.text
    assert before.items() < content(bucket).items()


def test_a_file_is_read_once(bench: Bench, model: Path, s3_root: str, s3_endpoint: str) -> None:
    bucket = on_s3(bench, model, s3_root)
    uris = [bucket.shard("a.jsonl", rows(0, 100)), bucket.shard("b.jsonl.gz", rows(100, 200))]
    path = bench.scratch.parent / "c.parquet"
    pq.write_table(pa.Table.from_pylist(rows(200, 300)), path)
    uris.append(store.upload(path, f"{s3_root}/data/c.parquet").uri)
    bucket.prepare("run")
    with FaultyStorage(s3_endpoint, []) as storage, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", storage.url)
        store._s3_client_of.cache_clear()
        bucket.ingest("run")
        bucket.ingest("run")
        asked = [(request.method, request.path.partition("?")[0]) for request in storage.requests]
    store._s3_client_of.cache_clear()
    for uri in uris:
        path_of = "/" + uri.removeprefix("s3://")
        assert asked.count(("GET", path_of)) == 1
        assert asked.count(("HEAD", path_of)) == 0
    assert not [path for _, path in asked if path.endswith(".safetensors")]
    assert sum(shard.profile.rows for shard in shards(bucket, PAIRS)) == 300


def test_a_killed_child_repeats_no_finished_file(bench: Bench, model: Path, s3_root: str) -> None:
    bucket = on_s3(bench, model, s3_root)
    for number in range(6):
        bucket.shard(f"{number}.jsonl", rows(400 * number, 400 * number + 400))
    bucket.config["data"]["ingest_children"] = 1
    bucket.prepare("run")
    # The process kills itself when it is about to write the tokens of its third file, rows first.
    program = (
        "import os, sys\n"
        "from pipeline.dataset import ingested\n"
        "from pipeline.stages import ingest, rank\n"
        "write, calls = ingest.write_profile, []\n"
        "def killed(folder, uri, profile):\n"
        "    calls.append(uri)\n"
        "    if len(calls) == 10: os.kill(os.getpid(), 9)\n"
        "    write(folder, uri, profile)\n"
        "ingest.write_profile = killed\n"
        "rank.main(['ingest', sys.argv[1]])\n"
    )
    killed = subprocess.run([sys.executable, "-c", program, bucket.paths("run").root], capture_output=True, text=True)
    assert killed.returncode == -9, killed.stderr
    before = written(bucket)
    complete = [shard for kind in (PAIRS, DOCUMENTS) for shard in shards(bucket, kind) if shard.is_ingested()]
    assert len(complete) == 4
    done = {
        uri: moment for uri, moment in before.items() if any(uri.startswith((one.rows_uri, one.tokens_uri)) for one in complete)
    }
    again = subprocess.run(
        [sys.executable, "-m", "pipeline.stages.rank", "ingest", bucket.paths("run").root], capture_output=True, text=True
    )
    assert again.returncode == 0, again.stderr
    assert done.items() <= written(bucket).items()
    assert all(shard.is_ingested() for kind in (PAIRS, DOCUMENTS) for shard in shards(bucket, kind))
    assert store.exists(bucket.paths("run").result(Stage.INGEST))


def written(bench: Bench) -> dict[str, float]:
    return {info.uri: info.modified for info in store.list_objects(store.join(bench.root, "ingested"))}


def test_a_file_that_changes_is_tried_again_and_then_refused(bucket: Bench) -> None:
    uri = bucket.shard("a.jsonl", rows(0, 50))
    bucket.prepare("run")
    bucket.shard("a.jsonl", rows(0, 60))
    for attempt, kind, code in ((1, Transient, ExitCode.TRANSIENT), (2, BadData, ExitCode.BAD_DATA)):
        with pytest.raises(kind) as caught:
            attempted(bucket, attempt)
        assert caught.value.exit_code == code
        assert uri in str(caught.value)
    assert not content(bucket)
    # The next run reads the new version, under other names.
    bucket.prepare("next")
    bucket.ingest("next")
    assert shards(bucket, PAIRS, "next")[0].profile.rows == 60


def attempted(bench: Bench, attempt: int, scratch: str = "attempt") -> StageOutput | None:
    folder = bench.scratch / f"{scratch}-{attempt}"
    folder.mkdir()
    context = ingest.StageContext(
        stage=Stage.INGEST,
        paths=bench.paths("run"),
        world=World(node=NodeWorld(attempt=attempt)),
        scratch=folder,
        heartbeat=ingest_heartbeat(),
    )
    return ingest.run(context)


def ingest_heartbeat() -> Any:
    from pipeline.run.heartbeat import Heartbeat

    return Heartbeat(None, 0)


def test_a_local_file_that_changes_while_it_is_read(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = bench.shard("a.jsonl", rows(0, 50))
    bench.prepare("run")
    read = ingest.read_blocks

    def changing(*arguments: Any) -> Iterator[Any]:
        yield from read(*arguments)
        bench.shard("a.jsonl", rows(0, 51))

    monkeypatch.setattr(ingest, "read_blocks", changing)
    with pytest.raises(Transient, match="has changed"):
        attempted(bench, 1)
    assert not content(bench)
    Path(uri).unlink()
    with pytest.raises(MissingInput):
        attempted(bench, 2)


def test_a_damaged_file_is_named(bucket: Bench) -> None:
    store.write_bytes(store.join(bucket.root, "data", "a.jsonl.gz"), gzip.compress(b'{"id": "a"}' * 100)[:-9])
    bucket.prepare("run")
    with pytest.raises(BadData, match=r"data/a\.jsonl\.gz"):
        bucket.ingest("run")


def test_another_tokenizer_needs_no_input_file(bench: Bench, model: Path, tmp_path: Path) -> None:
    uri = bench.shard("a.jsonl", rows(0, 100, negatives=["one", "and another"]))
    bench.prepare("run")
    bench.ingest("run")
    other = tmp_path / "other"
    other.mkdir()
    for path in model.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    changed = json.loads((other / "tokenizer.json").read_text())
    changed["post_processor"] = None
    (other / "tokenizer.json").write_text(json.dumps(changed))
    (other / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    bench.config["model"]["parent"] = str(other)
    before = content(bench)
    bench.prepare("next")
    Path(uri).write_bytes(b"")
    output = bench.stage(Stage.INGEST, "next")
    assert output is not None
    assert before.items() < content(bench).items()
    for kind, names in ((PAIRS, 3), (DOCUMENTS, 1)):
        [old], [new] = shards(bench, kind), shards(bench, kind, "next")
        assert old.rows_uri == new.rows_uri
        tokenizer = TextTokenizer(other)
        texts, tokens = table(new, "texts")["texts"].to_pylist(), table(new, "tokens")
        assert tokens.num_columns == names
        for place, column in enumerate(tokens.columns[:2]):
            wanted = tokenizer.encode([text[place] for text in texts], POSITIONS)
            assert column.to_pylist() == [each.tolist() for each in wanted]
        if kind == PAIRS:
            negatives = table(new, "texts")["negatives"].to_pylist()
            assert negatives[0]
            found = [[each.tolist() for each in tokenizer.encode(texts, POSITIONS)] for texts in negatives]
            assert tokens["negative_tokens"].to_pylist() == found
        assert not tokens.equals(table(old, "tokens"))


@pytest.mark.parametrize("name", ["texts-00000.arrow", "profile.json.gz", "tokens-00000.arrow"])
def test_what_is_damaged_is_made_again(bucket: Bench, name: str, caplog: pytest.LogCaptureFixture) -> None:
    bucket.shard("a.jsonl", rows(0, 100))
    bucket.shard("b.jsonl", rows(100, 200))
    bucket.prepare("run")
    bucket.ingest("run")
    before = content(bucket)
    cut = shards(bucket, PAIRS)[0]
    uri = store.join(cut.tokens_uri if name.startswith("tokens") else cut.rows_uri, name)
    store.write_bytes(uri, before[uri][:-7])
    bucket.prepare("run")
    bucket.ingest("run")
    assert "ingesting" in caplog.text
    # Every byte is as it was.
    assert content(bucket) == before


def with_deletions(bench: Bench, *entries: str) -> Config:
    uri = store.join(bench.root, "delete", "list.txt")
    store.write_bytes(uri, "\n".join(entries).encode())
    return {"data": {"delete": [store.join(bench.root, "delete")]}}


def traces(bench: Bench, *texts: str) -> set[str]:
    """Which of some texts are anywhere in what is ingested."""
    whole = b"".join(content(bench).values())
    return {text for text in texts if text.encode() in whole}


def test_what_must_not_be_used_is_left_out(bucket: Bench) -> None:
    data = [*rows(0, 40), {"id": "more", "query": "Query  7", "document": "something else"}]
    bucket.shard("a.jsonl", data)
    by_hash = f"hash:{normalized_hash('query 7'):016x}"
    bucket.prepare("run", with_deletions(bucket, "row31", by_hash))
    bucket.ingest("run")
    for kind in (PAIRS, DOCUMENTS):
        [shard] = shards(bucket, kind)
        assert set(table(shard, "facts")["id"].to_pylist()) == {row["id"] for row in data} - {"row31", "row7", "more"}
        assert (shard.profile.rows, shard.profile.deleted) == (38, 3)
        assert table(shard, "tokens").num_rows == 38
    assert traces(bucket, "row31", "query 7", "something else", "query 8") == {"query 8"}


def test_rows_without_relevance_are_negatives_of_their_query(bucket: Bench, model: Path) -> None:
    wrong = [{**row, "query": "query 7", "label": 0, "id": f"w{row['id']}"} for row in rows(20, 27)]
    elsewhere = [{**rows(30, 31)[0], "query": "query 8", "label": -1, "locale": "de"}]
    data = [*rows(0, 3), *wrong[:2], *rows(7, 9, negatives="my own"), *wrong[2:], *elsewhere]
    data.append({**rows(40, 41)[0], "query": "Query  7"})
    bucket.shard("a.jsonl", data)
    bucket.prepare("run")
    bucket.ingest("run")
    [pairs] = shards(bucket, PAIRS)
    facts, texts, tokens = (table(pairs, what) for what in ("facts", "texts", "tokens"))
    judged, tokenizer = [row["document"].strip() for row in wrong[:4]], TextTokenizer(model)
    wanted = {"row7": ["my own", *judged], "row40": judged, "row8": ["my own"]}
    for fact, text, token in zip(facts.to_pylist(), texts.to_pylist(), tokens.to_pylist(), strict=True):
        negatives = wanted.get(fact["id"], [])
        assert text["negatives"] == negatives
        assert fact["negative_hashes"] == [normalized_hash(each) for each in negatives]
        assert token["negative_tokens"] == [each.tolist() for each in tokenizer.encode(negatives, POSITIONS)]
    # Who deletes such a row deletes it everywhere.
    bucket.prepare("next", with_deletions(bucket, "wrow21"))
    bucket.ingest("next")
    [pairs] = shards(bucket, PAIRS, "next")
    assert set(table(pairs, "facts")["id"].to_pylist()) == {row["id"] for row in data} - {"wrow21", "row7", "row40"}
    assert "document 21" not in {text for each in table(pairs, "texts")["negatives"].to_pylist() for text in each}


def test_a_row_with_a_negative_that_must_not_be_used_is_left_out(bucket: Bench) -> None:
    bucket.shard("a.jsonl", [*rows(0, 3), *rows(3, 5, negatives=["harmless", "To  forget"]), *rows(5, 9, negatives="harmless")])
    bucket.prepare("run", with_deletions(bucket, f"hash:{normalized_hash('to forget'):016x}"))
    bucket.ingest("run")
    [pairs] = shards(bucket, PAIRS)
    assert set(table(pairs, "facts")["id"].to_pylist()) == {row["id"] for row in (*rows(0, 3), *rows(5, 9))}
    assert traces(bucket, "To  forget", "harmless") == {"harmless"}


def test_what_must_not_be_used_is_removed_from_what_is_ingested(bucket: Bench, model: Path) -> None:
    bucket.shard("a.jsonl", [*rows(0, 40), {"id": "bad", "query": ""}])
    bucket.shard("b.jsonl", rows(40, 80))
    bucket.config["data"]["max_bad_fraction"] = 0.5
    bucket.prepare("one")
    bucket.ingest("one")
    before = content(bucket)
    output = bucket.prepare("two", with_deletions(bucket, "row31", "row5"))
    assert output.metrics["ingest_children"] == 2
    bucket.ingest("two")
    after = content(bucket)
    changed, same = shards(bucket, PAIRS, "two")
    kept = {row["id"] for row in rows(0, 40)} - {"row31", "row5"}
    for kind in (PAIRS, DOCUMENTS):
        shard = shards(bucket, kind, "two")[0]
        ids = table(shard, "facts")["id"].to_pylist()
        assert set(ids) == kept
        place = ids.index("row8")
        assert table(shard, "texts")["texts"][place].as_py()[-1] == rows(8, 9)[0]["document"].strip()
        tokens = TextTokenizer(model).encode([rows(8, 9)[0]["document"].strip()], POSITIONS)
        assert table(shard, "tokens")["document_tokens"][place].as_py() == tokens[0].tolist()
        assert len(shard.hashes(0, 0, shard.profile.rows)) == 38
    assert changed.profile.deleted == 2
    assert changed.profile.bad_rows == 1
    assert store.exists(f"{changed.rows_uri}/quarantine.jsonl")
    assert changed.is_ingested()
    assert traces(bucket, "row31", "query 31", "query 8") == {"query 8"}
    # The other file's rows and tokens stay as they are: only its profile says that they were looked through.
    assert [uri for uri in before if same.shard.rows in uri and before[uri] != after.get(uri)] == [
        f"{same.rows_uri}/profile.json.gz"
    ]
    assert bucket.prepare("three", with_deletions(bucket, "row5", "row31")).metrics["ingest_children"] == 0


@pytest.mark.parametrize("broken", ["write_bytes", "delete", "delete_folder", "send_folder"])
def test_an_interrupted_deletion_is_done_again(bench: Bench, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.shard("a.jsonl", rows(0, 40))
    bench.prepare("one")
    bench.ingest("one")
    bench.prepare("two", with_deletions(bench, "row31"))

    def fails(*_: Any, **__: Any) -> None:
        raise Transient("the storage is away")

    with monkeypatch.context() as patch:
        patch.setattr(ingest.store, broken, fails)
        with pytest.raises(Transient):
            bench.ingest("two")
    # What is there is whole: the rows of before or those of after.
    assert table(shards(bench, PAIRS, "two")[0], "facts").num_rows in (39, 40)
    bench.ingest("two")
    assert all(shard.is_ingested() for kind in (PAIRS, DOCUMENTS) for shard in shards(bench, kind, "two"))
    assert traces(bench, "row31", "row32") == {"row32"}


def test_a_file_without_a_row_that_may_be_used(bench: Bench) -> None:
    bench.shard("a.jsonl", rows(0, 3))
    bench.shard("b.jsonl", rows(3, 40))
    bench.prepare("one")
    bench.ingest("one")
    bench.start("two", with_deletions(bench, "row0", "row1", "row2"))
    [gone, left] = shards(bench, PAIRS, "two")
    assert (gone.profile.rows, gone.profile.files, left.profile.rows) == (0, (), 37)


def test_the_same_bytes_in_every_place(bench: Bench, tmp_path: Path) -> None:
    data = rows(0, 500)
    bench.shard("a.jsonl", data)
    bench.prepare("run")
    bench.ingest("run")
    first = content(bench)
    store.delete_folder(store.join(bench.root, "ingested"))
    bench.ingest("run")
    assert content(bench) == first


def test_a_text_without_tokens_is_counted(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.shard("a.jsonl", rows(0, 20))
    bench.prepare("run", {"data": {"max_bad_fraction": 0.5}})
    real = TextTokenizer.encode_each
    monkeypatch.setattr(
        TextTokenizer,
        "encode_each",
        lambda self, texts, *more: [
            "no" if text in ("query 3", "query 4") else tokens
            for text, tokens in zip(texts, real(self, texts, *more), strict=True)
        ],
    )
    bench.ingest("run")
    [pairs], [documents] = shards(bench, PAIRS), shards(bench, DOCUMENTS)
    assert (pairs.token_profile.without_tokens, documents.token_profile.without_tokens) == (2, 0)
    lost = table(pairs, "tokens")["query_tokens"].is_null().to_pylist()
    assert [line for line, gone in zip(table(pairs, "facts")["line"].to_pylist(), lost, strict=True) if gone] in ([4, 5], [5, 4])


def test_files_without_rows(bench: Bench) -> None:
    bench.shard("a.jsonl", rows(0, 20))
    bench.shard("b.jsonl", [])
    bench.shard("c.jsonl", [b"{}"])
    bench.prepare("run")
    bench.ingest("run")
    assert [(shard.profile.rows, shard.profile.bad_rows, shard.profile.files) for shard in shards(bench, PAIRS)[1:]] == [
        (0, 0, ()),
        (0, 1, ()),
    ]


def test_counts_of_very_many_values_are_cut(bench: Bench) -> None:
    bench.shard("a.jsonl", [{**row, "locale": f"l{number}"} for number, row in enumerate(rows(0, 1500))])
    bench.prepare("run")
    bench.ingest("run")
    found = shards(bench, PAIRS)[0].profile.statistics["locales"]
    assert len(found) == ingest.NAMED_VALUES + 1
    assert found[ingest.OTHERS] == 500


def test_progress_is_reported(bench: Bench, heartbeats: Any) -> None:
    bench.shard("a.jsonl", rows(0, 50))
    bench.prepare("run")
    folder = bench.scratch / "beats"
    folder.mkdir()
    context = ingest.StageContext(
        stage=Stage.INGEST, paths=bench.paths("run"), world=World(), scratch=folder, heartbeat=ingest_heartbeat()
    )
    found = heartbeats(context)
    ingest.run(context)
    notes = [beat["note"] for beat in found]
    assert [note for number, note in enumerate(notes) if note not in notes[:number]] == [
        "loading the tokenizer",
        "reading an input file",
        "checking rows",
        "tokenizing",
        "looking at the other children's files",
    ]
    assert max(beat["done"] for beat in found if beat["unit"] == "rows") == 50


def test_one_huge_row_does_not_fill_the_memory(bench: Bench) -> None:
    """Rows of 16 MiB, one as JSON and one of a dictionary, between small ones."""
    large = "word " * (MAX_ROW_BYTES // 5 - 100)
    uri = bench.shard("a.jsonl", [*rows(0, 10), {"id": "large", "query": "q", "document": large}, *rows(10, 20)])
    bench.prepare("run")
    program = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from pipeline.stages.ingest import PAIRS, files_of, read_blocks\n"
        "from pipeline.stages import ingest\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak()\n"
        "tables = list(files_of(block.rows for block in read_blocks(sys.argv[1], PAIRS, {})))\n"
        "made = [ingest._pairs(table, 'document')[0] for table in tables]\n"
        "print(sum(map(len, made)), (peak() - before) >> 20)"
    )
    out = subprocess.run([sys.executable, "-c", program, uri], capture_output=True, text=True, check=True).stdout
    count, grown = map(int, out.split())
    assert count == 21
    # In kibibytes: a dozen copies of the row at the most.
    assert grown < 12 * MAX_ROW_BYTES >> 10
