"""Files by URI: `s3://bucket/key` and local paths behind one set of functions.

Guarantees: a reader never sees half an object (S3 by nature, local files by rename) or a mix of two versions, conditional writes
fail with `Conflict` instead of overwriting, and calls wait for temporary failures to pass (faults.py says how long). Errors are
ours: `MissingInput` for absent objects, `StorageRefused` for denied ones, `Transient` for failures that did not pass.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import mimetypes
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeVar, cast

from pipeline.allowed_uris import FILE, check_name, is_s3
from pipeline.contract import Artifact
from pipeline.errors import BadConfig, BadData, MissingInput, Transient
from pipeline.files import replacing
from pipeline.store import s3
from pipeline.store.retries import Conflict, persistently, translated
from pipeline.store.s3 import ObjectStream, _s3_client_of, s3_client, split

__all__ = [
    "Conflict",
    "ObjectInfo",
    "_s3_client_of",
    "content_type",
    "delete",
    "delete_folder",
    "download",
    "download_folder",
    "exists",
    "is_s3",
    "join",
    "list_objects",
    "local_file",
    "local_folder",
    "one_version",
    "open_read",
    "read_bytes",
    "read_json",
    "read_range",
    "read_versioned",
    "s3_client",
    "send_folder",
    "sha256",
    "sha256_file",
    "split",
    "stat",
    "upload",
    "upload_folder",
    "write_bytes",
    "write_json",
]

SentT = TypeVar("SentT")

CHUNK_BYTES = 1 << 20
UPLOADS_AT_ONCE = 4
"""Files of a folder in parallel uploads; large ones take s3.PARTS_AT_ONCE connections each, of s3.CONNECTIONS."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One stored object: URI, size in bytes, version tag (S3: ETag; local: empty), and the time of the last write (seconds since
    1970, by the storage's clock)."""

    uri: str
    size: int
    etag: str = ""
    modified: float = field(default=0.0, compare=False)

    @property
    def version(self) -> str:
        """Another one after every write: the ETag; of a local file the time of its last write."""
        return self.etag or f"{self.modified!r}-{self.size}"


def join(root: str, *names: str) -> str:
    """Return a URI below a folder.

    Raises:
        BadData: a name that would lead out of the folder; many names come from files.
    """
    return "/".join([root.rstrip("/"), *map(check_name, names)])


@contextmanager
def open_read(uri: str) -> Iterator[BinaryIO]:
    """Stream an object's raw bytes, without decompressing them. On S3 a broken connection continues where it stopped.

    Raises:
        MissingInput, StorageRefused.
        Transient: also if another process replaces the object meanwhile.
    """
    if is_s3(uri):
        with _one_version(uri), io.BufferedReader(ObjectStream(uri), CHUNK_BYTES) as stream:
            yield cast(BinaryIO, stream)
    else:
        with translated(uri), open(_local(uri), "rb") as stream:
            yield stream


def read_bytes(uri: str) -> bytes:
    return read_versioned(uri)[0]


def read_versioned(uri: str) -> tuple[bytes, str]:
    """Return an object's bytes and the version tag that `write_bytes(if_match=...)` takes."""
    if is_s3(uri):
        bucket, key = split(uri)

        def read() -> tuple[bytes, str]:
            answer = s3_client().get_object(Bucket=bucket, Key=key)
            return answer["Body"].read(), answer["ETag"]

        return persistently(uri, read)
    with translated(uri):
        data = _local(uri).read_bytes()
        return data, hashlib.sha256(data).hexdigest()


def read_range(uri: str, start: int, stop: int) -> bytes:
    """Return the bytes [start, stop) of an object, in one request on S3.

    Raises:
        MissingInput, StorageRefused, Transient.
        BadData: the object ends before `stop`.
    """
    if start == stop:
        return b""
    if is_s3(uri):
        bucket, key = split(uri)
        data = persistently(
            uri, lambda: s3_client().get_object(Bucket=bucket, Key=key, Range=f"bytes={start}-{stop - 1}")["Body"].read()
        )
    else:
        with translated(uri), open(_local(uri), "rb") as stream:
            stream.seek(start)
            data = stream.read(stop - start)
    if len(data) != stop - start:
        raise BadData("an object is shorter than expected", value=f"{uri}: {start + len(data)} bytes, {stop} expected")
    return bytes(data)


def read_json(uri: str) -> Any:
    return json.loads(read_bytes(uri))


def write_bytes(uri: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None) -> str:
    """Write a small object whole; return its version tag.

    Args:
        if_absent: only if nothing is there.
        if_match: only over exactly this version.

    Raises:
        Conflict: the condition did not hold. Also if it held, but the answer was lost and the write repeated.
    """
    if is_s3(uri):
        bucket, key = split(uri)
        condition = {"IfNoneMatch": "*"} if if_absent else {"IfMatch": if_match} if if_match else {}
        arguments = {"ContentType": content_type(uri), **s3.tagging(key), **condition}

        try:
            return str(persistently(uri, lambda: s3_client().put_object(Bucket=bucket, Key=key, Body=data, **arguments))["ETag"])
        except MissingInput as error:
            if if_match:
                raise Conflict(uri) from error
            raise
    with translated(uri):
        path = _local(uri)
        if if_match and (not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != if_match):
            raise Conflict(uri)
        try:
            with replacing(path, if_absent=if_absent) as stream:
                stream.write(data)
        except FileExistsError as error:
            raise Conflict(uri) from error
        return hashlib.sha256(data).hexdigest()


def write_json(uri: str, record: Any, **condition: Any) -> str:
    return write_bytes(uri, json.dumps(record, indent=1, sort_keys=True).encode(), **condition)


def stat(uri: str) -> ObjectInfo | None:
    """Return size and version of an object, None if there is none.

    Raises:
        StorageRefused: access is denied.
    """
    if is_s3(uri):
        bucket, key = split(uri)
        try:
            answer = persistently(uri, lambda: s3_client().head_object(Bucket=bucket, Key=key))
        except MissingInput:
            return None
        return ObjectInfo(uri, answer["ContentLength"], answer["ETag"], answer["LastModified"].timestamp())
    with translated(uri):
        path = _local(uri)
        return ObjectInfo(uri, path.stat().st_size, modified=path.stat().st_mtime) if path.is_file() else None


def exists(uri: str) -> bool:
    return stat(uri) is not None


def list_objects(uri: str) -> list[ObjectInfo]:
    """Return every object under a folder, recursively, sorted by URI; empty if there is none."""
    if is_s3(uri):
        bucket, prefix = split(uri)
        prefix = prefix.rstrip("/") + "/" if prefix else ""

        def listing() -> list[ObjectInfo]:
            pages = s3_client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
            return [
                ObjectInfo(f"s3://{bucket}/{item['Key']}", item["Size"], item["ETag"], item["LastModified"].timestamp())
                for page in pages
                for item in page.get("Contents", ())
                if not item["Key"].endswith("/")
            ]

        return sorted(persistently(uri, listing), key=lambda info: info.uri)
    with translated(uri):
        root = _local(uri)
        paths = [path for path in root.rglob("*") if path.is_file() and not path.name.startswith(".")] if root.is_dir() else []
        return [ObjectInfo(str(path), path.stat().st_size, modified=path.stat().st_mtime) for path in sorted(paths, key=str)]


def delete(uri: str) -> None:
    """Remove one object, if it exists."""
    if is_s3(uri):
        bucket, key = split(uri)
        persistently(uri, lambda: s3_client().delete_object(Bucket=bucket, Key=key))
    else:
        with translated(uri):
            _local(uri).unlink(missing_ok=True)


def delete_folder(uri: str) -> None:
    """Remove every object under a folder."""
    for info in list_objects(uri):
        delete(info.uri)
    if not is_s3(uri):
        for folder in (*sorted(_local(uri).rglob("*"), reverse=True), _local(uri)):
            with suppress(OSError):  # not empty: others write there
                folder.rmdir()


def upload(path: Path, uri: str) -> Artifact:
    """Copy a local file to `uri` (on S3 in parallel parts), hashing it meanwhile; return the object."""
    with ThreadPoolExecutor(1, "hash") as hashing:
        digest = hashing.submit(sha256_file, path)
        return Artifact(uri, size=_send(path, uri), sha256=digest.result())


def _send(path: Path, uri: str) -> int:
    """Copy a local file to `uri` without hashing it; return its size in bytes."""
    if is_s3(uri):
        s3.send_file(path, uri, content_type(uri))
    else:
        with translated(uri), replacing(_local(uri)) as stream, open(path, "rb") as source:
            shutil.copyfileobj(source, stream, CHUNK_BYTES)
    return path.stat().st_size


def download(uri: str, path: Path, *, sha256: str | None = None, size: int | None = None) -> Path:
    """Copy an object to a local file, hashing it meanwhile; the file appears whole or not at all.

    Args:
        sha256, size: the expected content.

    Raises:
        BadData: other content.
        Transient: also if another process replaces the object meanwhile.
    """
    with replacing(path) as stream:
        if is_s3(uri) and size is not None and size <= s3.PIECE_BYTES:
            digest = _copy(iter([read_bytes(uri)]), stream)
        elif is_s3(uri):
            if (info := stat(uri)) is None:
                raise MissingInput("the object or bucket does not exist", value=uri, remedy="check the URI")
            with _one_version(uri):
                digest = _copy(s3.pieces(uri, info.size, info.etag), stream)
        else:
            with translated(uri), open(_local(uri), "rb") as source:
                digest = _copy(_chunks(source), stream)
        expected = {"bytes": (stream.tell(), size), "sha256": (digest, sha256)}
        wrong = [f"{name} {found}, expected {named}" for name, (found, named) in expected.items() if named not in (None, found)]
        if wrong:
            raise BadData(
                "the object has other content than expected",
                value=[f"{uri}: {fact}" for fact in wrong],
                rule="an object that is named with its hash never changes",
                remedy="restore the named version, or name the new one",
            )
    return path


@contextmanager
def one_version(uri: str, version: str, size: int, cache: Path, beat: Callable[[int], None]) -> Iterator[tuple[Path, str]]:
    """Yield a local file with one version of an object, and its SHA-256; on S3 a download, which is removed afterwards.

    Args:
        version, size: as `ObjectInfo` has them.
        cache: path of the download.
        beat: called with the bytes read so far.

    Raises:
        MissingInput, StorageRefused, Transient.
        Conflict: the object has another version, or got one inside the block.
    """
    if is_s3(uri):
        try:
            with open(cache, "wb") as stream:
                digest = _copy(_counted(s3.pieces(uri, size, version), beat), stream)
            yield cache, digest
        finally:
            cache.unlink(missing_ok=True)
        return
    path = _local(uri)
    try:
        with translated(uri), open(path, "rb") as source:
            digest = _copy(_counted(_chunks(source), beat))
        yield path, digest
    finally:
        if (found := stat(uri)) and found.version != version:
            raise Conflict(uri)


def upload_folder(folder: Path, uri: str) -> dict[str, Artifact]:
    """Copy a local folder's files under `uri`, see `send_folder`; return relative name -> object."""
    return _each_file(folder, uri, upload)


def send_folder(folder: Path, uri: str) -> dict[str, int]:
    """Copy a local folder's files under `uri` without hashing them; return relative name -> bytes.

    Uploads run in parallel and end in any order: the caller writes the manifest that completes the folder afterwards. After a
    failure no further upload begins.
    """
    return _each_file(folder, uri, _send)


def _each_file(folder: Path, uri: str, send: Callable[[Path, str], SentT]) -> dict[str, SentT]:
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor(UPLOADS_AT_ONCE, "upload") as pool:
        futures = {name: pool.submit(send, folder / name, join(uri, name)) for name in names}
        done, _ = wait(futures.values(), return_when=FIRST_EXCEPTION)
        pool.shutdown(wait=False, cancel_futures=True)
        for failed in filter(Future.exception, done):
            failed.result()
        return {name: future.result() for name, future in futures.items()}


def download_folder(uri: str, folder: Path) -> Path:
    """Copy every object under `uri` into a local folder.

    Raises:
        MissingInput: there is nothing under `uri`.
        BadData: an object's name would lead out of the folder.
    """
    if not (infos := list_objects(uri)):
        raise MissingInput("the folder does not exist or is empty", value=uri, remedy="check the URI")
    root = uri.rstrip("/") if is_s3(uri) else str(_local(uri))
    names = [check_name(info.uri[len(root) + 1 :]) for info in infos]
    for info, name in zip(infos, names, strict=True):
        download(info.uri, folder / name)
    return folder


def local_folder(uri: str, cache: Path) -> Path:
    """Return a local folder with the objects under `uri`: the folder itself if it is local, else a download into `cache`.

    All processes of a host share one download; the objects under `uri` must not change meanwhile.
    """
    if is_s3(uri):
        cache.parent.mkdir(parents=True, exist_ok=True)
        complete = cache.with_name(f"{cache.name}.complete")
        # The kernel releases the lock when the process ends, in any way.
        with open(cache.with_name(f"{cache.name}.lock"), "w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not complete.is_file() or complete.read_text(encoding="utf-8") != uri:
                complete.unlink(missing_ok=True)
                shutil.rmtree(cache, ignore_errors=True)
                download_folder(uri, cache)
                complete.write_text(uri, encoding="utf-8")
        return cache
    if not _local(uri).is_dir():
        raise MissingInput("the folder does not exist", value=uri, remedy="check the path")
    return _local(uri)


def local_file(uri: str, cache: Path) -> Path:
    """Return a local file with the content of `uri`: the file itself if it is local, else a download into the folder `cache`."""
    if is_s3(uri):
        return download(uri, cache / check_name(uri.rsplit("/", 1)[-1]))
    if not _local(uri).is_file():
        raise MissingInput("the file does not exist", value=uri, remedy="check the path")
    return _local(uri)


def sha256(uri: str) -> str:
    """Return the SHA-256 of an object in hex, streamed."""
    with open_read(uri) as stream:
        return _copy(_chunks(stream))


def sha256_file(path: Path) -> str:
    with open(path, "rb") as stream:
        return _copy(_chunks(stream))


def content_type(uri: str) -> str:
    """Return the media type by the name, so that a browser shows a report instead of saving it."""
    return mimetypes.guess_type(uri)[0] or "application/octet-stream"


def _local(uri: str) -> Path:
    path = uri.removeprefix(FILE)
    if "://" in path or "\0" in path:
        raise BadConfig("unknown form of URI", value=uri, rule="s3://BUCKET/KEY or a local path")
    return Path(path)


@contextmanager
def _one_version(uri: str) -> Iterator[None]:
    try:
        yield
    except Conflict as error:
        raise Transient(
            "the object was replaced while it was read", value=uri, remedy="a new attempt reads the new one whole"
        ) from error


def _chunks(stream: IO[bytes]) -> Iterator[bytes]:
    return iter(partial(stream.read, CHUNK_BYTES), b"")


def _counted(chunks: Iterator[bytes], beat: Callable[[int], None]) -> Iterator[bytes]:
    done = 0
    for chunk in chunks:
        yield chunk
        done += len(chunk)
        beat(done)


def _copy(chunks: Iterator[bytes], target: BinaryIO | None = None) -> str:
    """Write the chunks, if there is a target; return their SHA-256 in hex."""
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
        if target:
            target.write(chunk)
    return digest.hexdigest()
