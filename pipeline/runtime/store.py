"""Files by URI: `s3://bucket/key` and local paths behind one set of functions. The only place that imports boto3 or smart_open.

Guarantees: a reader never sees half an object (S3 by nature, local files by rename), and conditional writes fail with
`Conflict` instead of overwriting. Failures come out as our errors: absent or forbidden is `MissingInput`, throttling and
connection trouble is `Transient` (after botocore's own retries).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import mimetypes
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, NoCredentialsError

from pipeline.contract import Artifact
from pipeline.errors import BadConfig, MissingInput, Transient

CHUNK_BYTES = 1 << 20


class Conflict(Exception):
    """A conditional write found another version than it was told to replace."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One stored object: URI, size in bytes, version tag (S3: ETag; local: content hash, empty in listings), and in listings when
    it was written last (seconds since 1970, by the storage's clock)."""

    uri: str
    size: int
    etag: str = ""
    modified: float = field(default=0.0, compare=False)


def is_s3(uri: str) -> bool:
    return uri.startswith("s3://")


def join(root: str, *names: str) -> str:
    return "/".join([root.rstrip("/"), *names])


@contextmanager
def open_read(uri: str) -> Iterator[BinaryIO]:
    """Stream an object's raw bytes; nothing is decompressed.

    Raises:
        MissingInput, Transient.
    """
    with _translated(uri):
        if is_s3(uri):
            import smart_open  # here, because it loads for a third of a second and a supervisor starts without it

            with smart_open.open(uri, "rb", compression="disable", transport_params={"client": s3_client()}) as stream:
                yield cast(BinaryIO, stream)
        else:
            with open(_local(uri), "rb") as stream:
                yield stream


def read_bytes(uri: str) -> bytes:
    return read_versioned(uri)[0]


def read_versioned(uri: str) -> tuple[bytes, str]:
    """An object's bytes together with the version tag that `write_bytes(if_match=...)` takes."""
    with _translated(uri):
        if is_s3(uri):
            bucket, key = split(uri)
            response = s3_client().get_object(Bucket=bucket, Key=key)
            return response["Body"].read(), response["ETag"]
        data = _local(uri).read_bytes()
        return data, hashlib.sha256(data).hexdigest()


def read_json(uri: str) -> Any:
    return json.loads(read_bytes(uri))


def write_bytes(uri: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None) -> str:
    """Write a small object whole; returns its version tag.

    Args:
        if_absent: only if nothing is there.
        if_match: only over exactly this version.

    Raises:
        Conflict: the condition did not hold.
    """
    with _translated(uri):
        if is_s3(uri):
            bucket, key = split(uri)
            condition = {"IfNoneMatch": "*"} if if_absent else {"IfMatch": if_match} if if_match else {}
            try:
                return str(
                    s3_client().put_object(Bucket=bucket, Key=key, Body=data, ContentType=content_type(uri), **condition)["ETag"]
                )
            except ClientError as error:
                if error.response["Error"]["Code"] in ("PreconditionFailed", "ConditionalRequestConflict", "412", "409") or (
                    if_match and error.response["Error"]["Code"] in ("NoSuchKey", "404")
                ):
                    raise Conflict(uri) from error
                raise
        path = _local(uri)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as stream:
            stream.write(data)
        temporary = Path(stream.name)
        if if_absent:
            try:
                os.link(temporary, path)
            except FileExistsError as error:
                raise Conflict(uri) from error
            finally:
                temporary.unlink()
        else:
            if if_match and (not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != if_match):
                temporary.unlink()
                raise Conflict(uri)
            temporary.replace(path)
        return hashlib.sha256(data).hexdigest()


def write_json(uri: str, record: Any, **condition: Any) -> str:
    return write_bytes(uri, json.dumps(record, indent=1, sort_keys=True).encode(), **condition)


def stat(uri: str) -> ObjectInfo | None:
    """Size and version of an object, None if it is not there."""
    try:
        with _translated(uri):
            if is_s3(uri):
                bucket, key = split(uri)
                response = s3_client().head_object(Bucket=bucket, Key=key)
                return ObjectInfo(uri, response["ContentLength"], response["ETag"])
            path = _local(uri)
            return ObjectInfo(uri, path.stat().st_size) if path.is_file() else None
    except MissingInput as error:
        if isinstance(error.__cause__, ClientError) and error.__cause__.response["Error"]["Code"] in ("403", "AccessDenied"):
            raise
        return None


def exists(uri: str) -> bool:
    return stat(uri) is not None


def list_objects(uri: str) -> list[ObjectInfo]:
    """Every object under a folder, recursively, sorted by URI; empty when there is none."""
    with _translated(uri):
        if is_s3(uri):
            bucket, prefix = split(uri)
            prefix = prefix.rstrip("/") + "/" if prefix else ""
            pages = s3_client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
            found = [
                ObjectInfo(f"s3://{bucket}/{item['Key']}", item["Size"], item["ETag"], item["LastModified"].timestamp())
                for page in pages
                for item in page.get("Contents", ())
                if not item["Key"].endswith("/")
            ]
        else:
            root = _local(uri)
            paths = (
                [path for path in root.rglob("*") if path.is_file() and not path.name.startswith(".")] if root.is_dir() else []
            )
            found = [ObjectInfo(str(path), path.stat().st_size, modified=path.stat().st_mtime) for path in paths]
        return sorted(found, key=lambda info: info.uri)


def delete(uri: str) -> None:
    """Remove one object; absent is fine."""
    with _translated(uri):
        if is_s3(uri):
            bucket, key = split(uri)
            s3_client().delete_object(Bucket=bucket, Key=key)
        else:
            _local(uri).unlink(missing_ok=True)


def delete_folder(uri: str) -> None:
    """Remove every object under a folder."""
    for info in list_objects(uri):
        delete(info.uri)


def upload(path: Path, uri: str) -> Artifact:
    """Copy a local file to `uri` (multipart, parallel parts on S3) and say what was written."""
    artifact = Artifact(uri, sha256_file(path), path.stat().st_size)
    with _translated(uri):
        if is_s3(uri):
            bucket, key = split(uri)
            from boto3.exceptions import S3UploadFailedError

            try:
                s3_client().upload_file(
                    str(path), bucket, key, Config=_transfer_config(), ExtraArgs={"ContentType": content_type(uri)}
                )
            except S3UploadFailedError as error:
                # boto3 hides what S3 answered behind an exception of its own, a denial and a SlowDown alike.
                raise error.__context__ or error from None
        else:
            target = _local(uri)
            target.parent.mkdir(parents=True, exist_ok=True)
            with (
                tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as stream,
                open(path, "rb") as source,
            ):
                shutil.copyfileobj(source, stream, CHUNK_BYTES)
            Path(stream.name).replace(target)
    return artifact


def download(uri: str, path: Path) -> Path:
    """Copy an object to a local file; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with _translated(uri):
            if is_s3(uri):
                bucket, key = split(uri)
                s3_client().download_file(bucket, key, str(temporary), Config=_transfer_config())
            else:
                shutil.copyfile(_local(uri), temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def upload_folder(folder: Path, uri: str) -> dict[str, Artifact]:
    """Copy a local folder's files under `uri`; relative name -> what was written."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): upload(path, join(uri, path.relative_to(folder).as_posix())) for path in paths}


def download_folder(uri: str, folder: Path) -> Path:
    """Copy every object under `uri` into a local folder.

    Raises:
        MissingInput: there is nothing under `uri`.
    """
    infos = list_objects(uri)
    if not infos:
        raise MissingInput("the folder does not exist or is empty", value=uri, remedy="check the URI")
    root = uri.rstrip("/") if is_s3(uri) else str(_local(uri))
    for info in infos:
        download(info.uri, folder / info.uri[len(root) + 1 :])
    return folder


def local_folder(uri: str, cache: Path) -> Path:
    """A folder of local files with what stands under `uri`: the folder itself when it is local, else a download into `cache`.

    All processes of a host that ask for the same are served by one download; what is there under `uri` must not change meanwhile.
    """
    if is_s3(uri):
        cache.parent.mkdir(parents=True, exist_ok=True)
        complete = cache.with_name(f"{cache.name}.complete")
        # The system gives the lock back when a process ends, however it ends.
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
    """A local file with the content of `uri`: the file itself when it is local, else a download into the folder `cache`."""
    if is_s3(uri):
        return download(uri, cache / uri.rsplit("/", 1)[-1])
    if not _local(uri).is_file():
        raise MissingInput("the file does not exist", value=uri, remedy="check the path")
    return _local(uri)


def sha256(uri: str) -> str:
    """Hex digest of an object, streamed."""
    with open_read(uri) as stream:
        return _digest(stream)


def sha256_file(path: Path) -> str:
    with open(path, "rb") as stream:
        return _digest(stream)


def content_type(uri: str) -> str:
    """Media type by name, so that a browser shows a report instead of saving it."""
    return mimetypes.guess_type(uri)[0] or "application/octet-stream"


def split(uri: str) -> tuple[str, str]:
    """Bucket and key of an s3:// URI.

    Raises:
        BadConfig: no bucket name in it.
    """
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    if not bucket:
        raise BadConfig("the URI names no bucket", value=uri, rule="s3://BUCKET/KEY")
    return bucket, key


@lru_cache(maxsize=1)
def _s3_client_of(_process: int) -> Any:
    import boto3
    from botocore.config import Config

    config = Config(retries={"mode": "standard", "max_attempts": 8}, connect_timeout=10, read_timeout=60, max_pool_connections=32)
    return boto3.session.Session().client("s3", config=config)


def s3_client() -> Any:
    """This process's S3 client (region, credentials and endpoint from the environment). Never shared over a fork."""
    return _s3_client_of(os.getpid())


def _transfer_config() -> Any:
    from boto3.s3.transfer import TransferConfig

    return TransferConfig(multipart_threshold=64 << 20, multipart_chunksize=32 << 20, max_concurrency=4)


def _local(uri: str) -> Path:
    if "://" in uri and not uri.startswith("file://"):
        raise BadConfig("unknown kind of URI", value=uri, rule="s3://BUCKET/KEY or a local path")
    return Path(uri.removeprefix("file://"))


def _digest(stream: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := stream.read(CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()


ABSENT_CODES = {"NoSuchKey", "NoSuchBucket", "404"}
FORBIDDEN_CODES = {"AccessDenied", "403", "AllAccessDisabled"}


@contextmanager
def _translated(uri: str) -> Iterator[None]:
    """Turn botocore's and the file system's exceptions into ours."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise MissingInput("the file does not exist", value=uri, remedy="check the path") from error
    except PermissionError as error:
        raise MissingInput("the file may not be read or written", value=uri, remedy="check its permissions") from error
    except ClientError as error:
        raise _translate_client_error(uri, error) from error
    except NoCredentialsError as error:
        raise BadConfig("no AWS credentials were found", value=uri, remedy="run `aws configure` or use a role") from error
    except (BotoCoreError, HTTPClientError) as error:
        raise Transient("storage could not be reached", value=f"{uri}: {error}", remedy="a new attempt may succeed") from error
    except OSError as error:
        # smart_open wraps client errors in OSError; look underneath before believing it.
        inner: BaseException | None = error
        while inner is not None and not isinstance(inner, ClientError):
            inner = inner.__cause__ or getattr(inner, "backend_error", None)
        if isinstance(inner, ClientError):
            raise _translate_client_error(uri, inner) from inner
        raise


def _translate_client_error(uri: str, error: ClientError) -> Exception:
    code = error.response["Error"]["Code"]
    if code in ABSENT_CODES:
        return MissingInput("the object or bucket does not exist", value=uri, remedy="check the URI and that it was uploaded")
    if code in FORBIDDEN_CODES:
        return MissingInput("access to the object is denied", value=uri, remedy="grant this stage's role access to it")
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if status >= 500 or code in ("SlowDown", "Throttling", "RequestTimeout", "InternalError"):
        return Transient("storage answered with an error", value=f"{uri}: {code}", remedy="a new attempt may succeed")
    return MissingInput("storage refused the request", value=f"{uri}: {code}: {error.response['Error'].get('Message', '')}")
