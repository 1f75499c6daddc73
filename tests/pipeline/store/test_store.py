"""The store over local folders and over a real S3 endpoint: the same behaviour, bit for bit."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import store
from pipeline.errors import BadConfig, MissingInput, Transient


@pytest.fixture(params=["local", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "bucket") if request.param == "local" else request.getfixturevalue("s3_root")


def test_bytes_come_back(root: str) -> None:
    uri = store.join(root, "a", "b.bin")
    assert store.stat(uri) is None
    store.write_bytes(uri, b"hello")
    assert store.read_bytes(uri) == b"hello"
    assert store.stat(uri).size == 5  # type: ignore[union-attr]
    with store.open_read(uri) as stream:
        assert stream.read() == b"hello"
    assert store.sha256(uri) == hashlib.sha256(b"hello").hexdigest()
    store.delete(uri)
    assert not store.exists(uri)
    store.delete(uri)


def test_compressed_names_are_not_decompressed(root: str) -> None:
    uri = store.join(root, "x.gz")
    store.write_bytes(uri, b"\x1f\x8b not really")
    with store.open_read(uri) as stream:
        assert stream.read() == b"\x1f\x8b not really"


def test_conditional_writes(root: str) -> None:
    uri = store.join(root, "pointer.json")
    store.write_bytes(uri, b"1", if_absent=True)
    with pytest.raises(store.Conflict):
        store.write_bytes(uri, b"2", if_absent=True)
    data, version = store.read_versioned(uri)
    assert data == b"1"
    store.write_bytes(uri, b"3", if_match=version)
    with pytest.raises(store.Conflict):
        store.write_bytes(uri, b"4", if_match=version)
    assert store.read_bytes(uri) == b"3"


def test_if_match_on_a_deleted_object_conflicts(root: str) -> None:
    uri = store.join(root, "pointer.json")
    store.write_bytes(uri, b"1")
    version = store.read_versioned(uri)[1]
    store.delete(uri)
    with pytest.raises(store.Conflict):
        store.write_bytes(uri, b"2", if_match=version)


def test_folders_round_trip(root: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "a.txt").write_text("a")
    (source / "deep" / "b.bin").write_bytes(os.urandom(100_000))
    written = store.upload_folder(source, store.join(root, "folder"))
    assert set(written) == {"a.txt", "deep/b.bin"}
    assert written["deep/b.bin"].sha256 == store.sha256_file(source / "deep" / "b.bin")
    assert [info.uri for info in store.list_objects(store.join(root, "folder"))] == sorted(item.uri for item in written.values())
    copy = store.download_folder(store.join(root, "folder"), tmp_path / "copy")
    assert (copy / "deep" / "b.bin").read_bytes() == (source / "deep" / "b.bin").read_bytes()
    store.delete_folder(store.join(root, "folder"))
    assert store.list_objects(store.join(root, "folder")) == []


def test_a_folder_is_not_its_namesake(root: str) -> None:
    store.write_bytes(store.join(root, "run-1", "x"), b"1")
    store.write_bytes(store.join(root, "run-10", "x"), b"2")
    assert len(store.list_objects(store.join(root, "run-1"))) == 1


def test_absent_things_are_missing_input(root: str, tmp_path: Path) -> None:
    uri = store.join(root, "absent")
    with pytest.raises(MissingInput):
        store.read_bytes(uri)
    with pytest.raises(MissingInput), store.open_read(uri) as stream:
        stream.read()
    with pytest.raises(MissingInput):
        store.download(uri, tmp_path / "x")
    with pytest.raises(MissingInput):
        store.download_folder(uri, tmp_path / "y")
    assert list(tmp_path.glob("**/.*partial")) == []


def test_processes_of_a_host_share_one_download(s3_root: str, tmp_path: Path) -> None:
    """All ranks of a host ask for the model at once."""
    for index in range(20):
        store.write_bytes(f"{s3_root}/model/{index}.bin", bytes([index]) * 50_000)
    program = (
        "import sys; from pathlib import Path; from pipeline import store; real, fetched = store.download, []\n"
        "store.download = lambda uri, path: (fetched.append(uri), real(uri, path))[1]\n"
        "folder = store.local_folder(sys.argv[1], Path(sys.argv[2])); print(len(fetched), len(list(folder.iterdir())))"
    )
    command = [sys.executable, "-c", program, f"{s3_root}/model", str(tmp_path / "scratch" / "model")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert sorted(process.communicate(timeout=60)[0].split() for process in processes) == [["0", "20"]] * 3 + [["20", "20"]]


def test_a_broken_download_is_done_again(s3_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        store.write_bytes(f"{s3_root}/model/{name}", name.encode())
    whole = store.download

    def breaks(uri: str, path: Path) -> Path:
        if uri.endswith("b"):
            raise Transient("the connection broke")
        return whole(uri, path)

    with monkeypatch.context() as patched:
        patched.setattr(store, "download", breaks)
        with pytest.raises(Transient):
            store.local_folder(f"{s3_root}/model", tmp_path / "model")
    folder = store.local_folder(f"{s3_root}/model", tmp_path / "model")
    assert sorted(path.name for path in folder.iterdir()) == ["a", "b"]
    # Another folder under the same name is not taken for it.
    store.write_bytes(f"{s3_root}/other/c", b"c")
    folder = store.local_folder(f"{s3_root}/other", tmp_path / "model")
    assert [path.name for path in folder.iterdir()] == ["c"]


def test_missing_bucket(s3_root: str) -> None:
    with pytest.raises(MissingInput):
        store.list_objects("s3://no-such-bucket-anywhere/prefix")


def test_an_upload_fails_for_the_reason_that_s3_gave(s3_root: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1")
    with pytest.raises(MissingInput, match="the object or bucket does not exist"):
        store.upload(tmp_path / "file", "s3://no-such-bucket/file")


def test_unreachable_endpoint_is_transient(monkeypatch: pytest.MonkeyPatch, s3_root: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("TRNPIPE_STORAGE_SECONDS", "1")
    store._s3_client_of.cache_clear()
    with pytest.raises(Transient):
        store.read_bytes("s3://bucket/key")


@pytest.mark.parametrize("uri", ["gs://bucket/x", "http://host/x", "s3:///x"])
def test_other_kinds_of_uri_are_refused(uri: str, s3_root: str) -> None:
    with pytest.raises(BadConfig):
        store.read_bytes(uri)
