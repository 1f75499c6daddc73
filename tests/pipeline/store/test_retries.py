"""The store against storage that throttles, breaks off, stalls, denies and changes: real connections through a faulty proxy."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import smart_open.s3
from botocore.exceptions import ClientError

from pipeline import store
from pipeline.contract import RunPaths
from pipeline.errors import BadConfig, BadData, MissingInput, StorageRefused, Transient
from pipeline.store import retries, s3
from tests.faulty_storage import Answer, Cut, End, FaultyStorage, Lose, Rule, Stall

MIB = 1 << 20
Start = Callable[..., FaultyStorage]


@pytest.fixture
def faulty(s3_root: str, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """A function that puts rules between the store and its endpoint. Requests are made once by botocore, so the store's own
    patience is what is seen. smart_open, which reconnects after 1, 2, 4, 8 and 16 seconds, does so after a tenth of that."""
    monkeypatch.setattr(s3, "REQUEST_ATTEMPTS", 1)
    monkeypatch.setattr(smart_open.s3, "time", SimpleNamespace(sleep=lambda seconds: time.sleep(seconds / 10)))
    monkeypatch.setenv("TRNPIPE_STORAGE_SECONDS", "20")
    with ExitStack() as proxies:

        def start(*rules: Rule, seed: int = 0) -> FaultyStorage:
            storage = proxies.enter_context(FaultyStorage(s3_endpoint, rules, seed=seed))
            monkeypatch.setenv("AWS_ENDPOINT_URL", storage.url)
            store._s3_client_of.cache_clear()
            return storage

        yield start
        monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
        store._s3_client_of.cache_clear()


def put(uri: str, size: int) -> bytes:
    data = os.urandom(size)
    store.write_bytes(uri, data)
    return data


def faults(storage: FaultyStorage) -> int:
    return sum(request.fault is not None for request in storage.requests)


READERS: dict[str, Callable[[str, Path], bytes]] = {
    "read_bytes": lambda uri, folder: store.read_bytes(uri),
    "open_read": lambda uri, folder: _streamed(uri),
    "download": lambda uri, folder: store.download(uri, folder / "file").read_bytes(),
}


def _streamed(uri: str) -> bytes:
    with store.open_read(uri) as stream:
        return b"".join(iter(lambda: stream.read(100_000), b""))


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("fault", [Answer(503, "SlowDown"), Answer(500, "InternalError"), Cut(0), Cut(300_000), End(300_000)])
def test_reading_outlives_throttling_and_broken_bodies(
    s3_root: str, tmp_path: Path, faulty: Start, reader: str, fault: Any
) -> None:
    data = put(f"{s3_root}/object", MIB)
    storage = faulty(Rule(fault, method="GET", times=3))
    assert READERS[reader](f"{s3_root}/object", tmp_path) == data
    assert faults(storage) == 3


@pytest.fixture
def little_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second without a byte is a broken connection, only where the fault is a silence: busy machines are silent, too."""
    monkeypatch.setattr(s3, "SILENCE_SECONDS", 0.5)


@pytest.mark.usefixtures("little_silence")
@pytest.mark.parametrize("reader", READERS)
def test_a_server_that_stalls_is_left(s3_root: str, tmp_path: Path, faulty: Start, reader: str) -> None:
    data = put(f"{s3_root}/object", MIB)
    faulty(Rule(Stall(300_000, seconds=60), method="GET", times=2))
    began = time.monotonic()
    assert READERS[reader](f"{s3_root}/object", tmp_path) == data
    assert time.monotonic() - began < 50


@pytest.mark.parametrize("reader", ["open_read", "download"])
def test_a_stream_goes_on_where_it_stood(s3_root: str, tmp_path: Path, faulty: Start, reader: str) -> None:
    """No connection ever lasts for the whole object, so from the start it would never end."""
    data = put(f"{s3_root}/object", 2 * MIB)
    storage = faulty(Rule(End(600_000), method="GET", times=None))
    assert READERS[reader](f"{s3_root}/object", tmp_path) == data
    assert 3 <= faults(storage) <= 10


def test_pieces_of_a_large_download_arrive_in_order(
    s3_root: str, tmp_path: Path, faulty: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "PIECE_BYTES", 100_000)
    data = put(f"{s3_root}/object", 3 * MIB + 1)
    storage = faulty(Rule(Cut(30_000), method="GET", times=None, share=0.3), seed=1)
    digest = hashlib.sha256(data).hexdigest()
    path = store.download(f"{s3_root}/object", tmp_path / "file", sha256=digest, size=len(data))
    assert path.read_bytes() == data
    assert faults(storage) >= 5


def test_parquet_is_read_through_broken_connections(s3_root: str, tmp_path: Path, faulty: Start) -> None:
    table = pa.table({"id": [str(number) for number in range(200_000)]})
    pq.write_table(table, tmp_path / "table.parquet", row_group_size=20_000)
    store.upload(tmp_path / "table.parquet", f"{s3_root}/table.parquet")
    storage = faulty(Rule(Cut(200_000), method="GET", times=None, share=0.5))
    with store.open_read(f"{s3_root}/table.parquet") as stream:
        assert pq.ParquetFile(stream, pre_buffer=False).read() == table
    assert faults(storage)


@pytest.mark.parametrize("reader", READERS)
def test_patience_ends_as_transient_and_leaves_nothing(
    s3_root: str, tmp_path: Path, faulty: Start, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    put(f"{s3_root}/object", MIB)
    monkeypatch.setenv("TRNPIPE_STORAGE_SECONDS", "4")
    storage = faulty(Rule(Cut(0), method="GET", times=None))
    # A clock that only pauses move: the first request makes a client, which alone takes a slow machine longer than 4 seconds.
    pauses: list[float] = []
    monkeypatch.setattr(retries, "time", SimpleNamespace(monotonic=lambda: sum(pauses), sleep=pauses.append))
    with pytest.raises(Transient) as caught:
        READERS[reader](f"{s3_root}/object", tmp_path)
    assert 0 < sum(pauses) <= 4
    assert f"{s3_root}/object" in str(caught.value)
    assert "attempts" in str(caught.value)
    assert faults(storage) >= 2
    assert list(tmp_path.iterdir()) == []


def test_the_longest_call_is_shorter_than_the_wait_for_a_heartbeat() -> None:
    from pipeline.host.deadlines import Deadlines
    from pipeline.store.retries import PATIENCE_SECONDS

    longest = PATIENCE_SECONDS + s3.REQUEST_SECONDS
    assert longest < Deadlines().progress_seconds / 2


def test_an_object_that_is_replaced_while_it_is_read_is_never_mixed(s3_root: str) -> None:
    put(f"{s3_root}/object", 3 * MIB)

    def read() -> None:
        with store.open_read(f"{s3_root}/object") as stream:
            stream.read(MIB)
            put(f"{s3_root}/object", 3 * MIB)
            # Elsewhere in the object, and so by another connection.
            stream.seek(2 * MIB)
            stream.read(1)

    with pytest.raises(Transient, match="replaced"):
        read()


# ---- writing ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("little_silence")
@pytest.mark.parametrize("fault", [Answer(503, "SlowDown"), Answer(500, "InternalError"), Lose(), Lose(seconds=60)])
def test_writing_outlives_faults(s3_root: str, tmp_path: Path, faulty: Start, fault: Any) -> None:
    storage = faulty(Rule(fault, method="PUT", times=2))
    data = put(f"{s3_root}/small", 1000)
    assert faults(storage) == 2
    storage.add(Rule(fault, method="PUT", times=2))
    (tmp_path / "file").write_bytes(data)
    artifact = store.upload(tmp_path / "file", f"{s3_root}/file")
    assert faults(storage) == 4
    assert artifact.sha256 == hashlib.sha256(data).hexdigest() == store.sha256(f"{s3_root}/file")
    assert store.read_bytes(f"{s3_root}/small") == data


def unfinished(s3_endpoint: str) -> list[Any]:
    client = boto3.client("s3", endpoint_url=s3_endpoint)
    return list(client.list_multipart_uploads(Bucket="trnpipe-tests").get("Uploads", []))


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is uploaded in six parts."""
    monkeypatch.setattr(s3, "MULTIPART_BYTES", 5 * MIB)
    monkeypatch.setattr(s3, "PART_BYTES", 5 * MIB)
    path = tmp_path / "large"
    path.write_bytes(os.urandom(27 * MIB))
    return path


def test_what_only_serves_resuming_is_written_with_its_tag(s3_root: str, s3_endpoint: str, large: Path, tmp_path: Path) -> None:
    """Also in parts, where the tag goes with the request that begins them."""
    (tmp_path / "small").write_bytes(b"state")
    checkpoint, model = RunPaths(f"{s3_root}/runs/week-1").checkpoint(100), RunPaths(f"{s3_root}/runs/week-1").model
    for folder in (checkpoint, model):
        store.upload(large, store.join(folder, "model.safetensors"))
        store.upload(tmp_path / "small", store.join(folder, "state"))
        store.write_json(store.join(folder, "manifest.json"), {})
    client = boto3.client("s3", endpoint_url=s3_endpoint)
    tags = {
        item.uri.removeprefix(s3_root): client.get_object_tagging(
            Bucket="trnpipe-tests", Key=item.uri.removeprefix(f"{s3_root}/")
        )["TagSet"]
        for item in store.list_objects(s3_root)
    }
    assert len(tags) == 6
    for key, found in tags.items():
        assert found == ([{"Key": "trnpipe:retention", "Value": "resume"}] if "/checkpoints/" in key else []), key


def test_parts_that_fail_are_sent_again_and_none_stays(s3_root: str, s3_endpoint: str, large: Path, faulty: Start) -> None:
    storage = faulty(Rule(Answer(503, "SlowDown"), method="PUT", path="partNumber=3"), Rule(Cut(0), path="partNumber=5"))
    artifact = store.upload(large, f"{s3_root}/large")
    assert faults(storage) == 2
    assert (artifact.size, artifact.sha256) == (27 * MIB, store.sha256_file(large))
    assert store.sha256(f"{s3_root}/large") == artifact.sha256
    assert unfinished(s3_endpoint) == []


@pytest.mark.parametrize(
    ("fault", "error"), [(Answer(503, "SlowDown"), Transient), (Answer(403, "AccessDenied"), StorageRefused)]
)
def test_an_upload_that_fails_leaves_no_parts(
    s3_root: str, s3_endpoint: str, large: Path, faulty: Start, monkeypatch: pytest.MonkeyPatch, fault: Any, error: Any
) -> None:
    monkeypatch.setenv("TRNPIPE_STORAGE_SECONDS", "0.5")
    storage = faulty(Rule(fault, method="PUT", path="partNumber=4", times=None))
    with pytest.raises(error):
        store.upload(large, f"{s3_root}/large")
    assert any("partNumber" in request.path and request.fault is None for request in storage.requests)
    assert unfinished(s3_endpoint) == []
    assert not store.exists(f"{s3_root}/large")


def test_hashing_goes_on_beside_the_transfer(s3_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the other to have begun: one after the other, neither would end."""
    path = tmp_path / "file"
    path.write_bytes(b"content")
    both = threading.Barrier(2, timeout=10)
    hashed, sent = store.sha256_file, s3.send_file
    monkeypatch.setattr(store, "sha256_file", lambda path: (both.wait(), hashed(path))[1])
    monkeypatch.setattr(s3, "send_file", lambda *arguments: (both.wait(), sent(*arguments))[1])
    assert store.upload(path, f"{s3_root}/file").sha256 == hashed(path)


def test_files_of_a_folder_are_uploaded_side_by_side(s3_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(2 * store.UPLOADS_AT_ONCE):
        (tmp_path / f"{number}").write_text(str(number))
    together = threading.Barrier(store.UPLOADS_AT_ONCE, timeout=10)
    sent = s3.send_file
    monkeypatch.setattr(s3, "send_file", lambda *arguments: (together.wait(), sent(*arguments))[1])
    written = store.upload_folder(tmp_path, f"{s3_root}/folder")
    assert list(written) == sorted(written)
    assert len(written) == len(store.list_objects(f"{s3_root}/folder")) == 2 * store.UPLOADS_AT_ONCE


def test_a_file_that_fails_keeps_the_others_from_beginning(s3_root: str, tmp_path: Path, faulty: Start) -> None:
    for number in range(100):
        (tmp_path / f"{number:03d}").write_text(str(number))
    faulty(Rule(Answer(403, "AccessDenied"), method="PUT", times=None))
    with pytest.raises(StorageRefused):
        store.upload_folder(tmp_path, f"{s3_root}/folder")
    assert len(store.list_objects(f"{s3_root}/folder")) == 0


# ---- refusals --------------------------------------------------------------------------------------------------------

CALLS: dict[str, Callable[[str, Path], object]] = {
    **READERS,
    "stat": lambda uri, folder: store.stat(uri),
    "exists": lambda uri, folder: store.exists(uri),
    "list_objects": lambda uri, folder: store.list_objects(uri),
    "write_bytes": lambda uri, folder: store.write_bytes(uri, b"x"),
    "write_if_absent": lambda uri, folder: store.write_bytes(uri, b"x", if_absent=True),
    "upload": lambda uri, folder: store.upload(Path(__file__), uri),
    "delete": lambda uri, folder: store.delete(uri),
    "download_folder": lambda uri, folder: store.download_folder(uri, folder / "copy"),
}


@pytest.mark.parametrize("call", CALLS)
def test_denied_is_a_clear_stop_and_never_absent(s3_root: str, tmp_path: Path, faulty: Start, call: str) -> None:
    storage = faulty(Rule(Answer(403, "AccessDenied"), times=None))
    with pytest.raises(StorageRefused, match="denied") as caught:
        CALLS[call](f"{s3_root}/object", tmp_path)
    assert not isinstance(caught.value, MissingInput)
    assert caught.value.exit_code == 66
    assert "grant" in caught.value.remedy
    assert len(storage.requests) == 1  # no retry


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidAccessKeyId", "SignatureDoesNotMatch"])
def test_credentials_that_do_not_work_are_a_clear_stop(s3_root: str, tmp_path: Path, faulty: Start, call: str, code: str) -> None:
    storage = faulty(Rule(Answer(400 if code == "ExpiredToken" else 403, code), times=None))
    with pytest.raises((BadConfig, StorageRefused)) as caught:
        CALLS[call](f"{s3_root}/object", tmp_path)
    # Answers to HEAD name no code; the remedy does what it can.
    assert "credentials" in str(caught.value) or "denied" in str(caught.value)
    assert len(storage.requests) <= 2  # after a bare 400 botocore asks for the bucket's region


def test_denied_in_the_middle_of_a_download_is_denied(
    s3_root: str, tmp_path: Path, faulty: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "PIECE_BYTES", 100_000)
    put(f"{s3_root}/object", MIB)
    faulty(Rule(Answer(403, "AccessDenied"), method="GET", after=4, times=None))
    with pytest.raises(StorageRefused):
        store.download(f"{s3_root}/object", tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_denied_while_a_stream_reconnects(s3_root: str, faulty: Start) -> None:
    put(f"{s3_root}/object", 3 * MIB)
    faulty(Rule(Cut(MIB + 1), method="GET"), Rule(Answer(403, "AccessDenied"), times=None))
    with pytest.raises(StorageRefused), store.open_read(f"{s3_root}/object") as stream:
        stream.read()


def test_absent_is_still_absent(s3_root: str, faulty: Start) -> None:
    faulty()
    assert store.stat(f"{s3_root}/absent") is None
    assert store.list_objects(f"{s3_root}/absent") == []


def test_a_denied_run_folder_ends_the_stage_with_its_code_and_remedy(
    s3_root: str, tmp_path: Path, faulty: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    """prepare may be without a plan, so absent would be fine here: denied must not pass for it."""
    import subprocess
    import sys

    paths = RunPaths(f"{s3_root}/runs/one")
    store.write_json(paths.input, {})
    faulty(Rule(Answer(403, "AccessDenied"), method="GET", times=None))
    command = [sys.executable, "-m", "pipeline.cli", "stage", "prepare", "--run", paths.root]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 66
    last = ended.stderr.splitlines()[-4:]
    assert "denied" in last[0]
    assert "AccessDenied" in last[1]
    assert "remedy: grant" in last[-1]


# ---- content and names -----------------------------------------------------------------------------------------------


@pytest.fixture(params=["local", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "bucket") if request.param == "local" else request.getfixturevalue("s3_root")


@pytest.mark.parametrize("expected", [{"sha256": "0" * 64}, {"size": 999}])
def test_a_download_of_something_else_is_bad_data_and_leaves_nothing(root: str, tmp_path: Path, expected: dict[str, Any]) -> None:
    put(f"{root}/object", 1000)
    with pytest.raises(BadData, match="other content than expected"):
        store.download(f"{root}/object", tmp_path / "copy" / "file", **expected)
    assert list((tmp_path / "copy").iterdir()) == []


def test_an_empty_object_is_downloaded(root: str, tmp_path: Path) -> None:
    store.write_bytes(f"{root}/empty", b"")
    assert store.download(f"{root}/empty", tmp_path / "file", size=0).read_bytes() == b""
    with store.open_read(f"{root}/empty") as stream:
        assert stream.read() == b""


@pytest.mark.parametrize("key", ["../escaped", "a/../../escaped", "a//b", "./a"])
def test_names_never_leave_the_folder(s3_root: str, s3_endpoint: str, tmp_path: Path, key: str) -> None:
    boto3.client("s3", endpoint_url=s3_endpoint).put_object(Bucket="trnpipe-tests", Key=f"folder/{key}", Body=b"x")
    with pytest.raises(BadData, match="leads out"):
        store.download_folder(f"{s3_root}/folder", tmp_path / "deep" / "copy")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "a\0b", "", "a//b", "."])
def test_names_from_manifests_never_leave_the_folder(name: str) -> None:
    with pytest.raises(BadData, match="leads out"):
        store.join("s3://bucket/folder", name)


def test_a_disk_that_fills_up_leaves_nothing_half_written(full_disk: Path, s3_root: str, tmp_path: Path) -> None:
    put(f"{s3_root}/large", 3 * MIB)
    (tmp_path / "large").write_bytes(bytes(3 * MIB))
    for write in (
        lambda: store.download(f"{s3_root}/large", full_disk / "file"),
        lambda: store.upload(tmp_path / "large", str(full_disk / "copy")),
        lambda: store.write_bytes(str(full_disk / "bytes"), bytes(3 * MIB)),
    ):
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            write()
        assert list(full_disk.iterdir()) == []


def test_the_proxy_reports_what_it_did(s3_root: str, faulty: Start) -> None:
    storage = faulty(Rule(Answer(403, "AccessDenied"), method="PUT", path="/second"))
    store.write_bytes(f"{s3_root}/first", b"1")
    with pytest.raises(ClientError):
        store.s3_client().put_object(Bucket="trnpipe-tests", Key="second", Body=b"2")
    assert [(request.method, request.fault) for request in storage.requests] == [
        ("PUT", None),
        ("PUT", Answer(403, "AccessDenied")),
    ]


def test_the_proxys_draws_are_the_seeds() -> None:
    rule = Rule(Cut(0), share=0.5, times=None)
    drawn = []
    for seed in (1, 1, 2):
        storage = FaultyStorage("http://127.0.0.1:1", [rule], seed=seed)
        drawn.append([storage.judge("GET", "/x", "") for _ in range(50)])
        storage._server.server_close()
    assert drawn[0] == drawn[1] != drawn[2]
