"""Objects on S3: the client, a stream of one version of an object that outlives its connections, and large transfers in pieces.

botocore retries requests a few times. It does not retry a body that breaks off during a read, nor longer failures:
`persistently` handles both.
"""

from __future__ import annotations

import io
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from botocore.exceptions import BotoCoreError, ClientError, IncompleteReadError, ReadTimeoutError

from pipeline.allowed_uris import S3
from pipeline.contract import retention_tags
from pipeline.errors import BadConfig
from pipeline.store.retries import persistently

CONNECT_SECONDS = 10
SILENCE_SECONDS = 30
"""Without a byte from storage for this long, a connection counts as broken. S3 answers within seconds, and keeps a long
completion of a multipart upload alive with white space."""
REQUEST_ATTEMPTS = 4
REQUEST_SECONDS = REQUEST_ATTEMPTS * (CONNECT_SECONDS + SILENCE_SECONDS) + 7
"""The longest time of one request in botocore: every attempt stalls, with pauses of up to 1, 2 and 4 seconds between them."""

READ_BYTES = 256 << 10
"""Bytes of one read from a connection: the most that a broken one loses."""

PIECE_BYTES = 8 << 20
PIECES_AT_ONCE = 4
PIECES_AHEAD = 2 * PIECES_AT_ONCE
"""Pieces of a download in memory, fetched or waiting for the disk: at most 64 MiB."""

PART_BYTES = 32 << 20
MULTIPART_BYTES = 64 << 20
"""Files from this size on are uploaded in parts, PARTS_AT_ONCE of them in parallel."""
PARTS_AT_ONCE = 4
CONNECTIONS = 32


@lru_cache(maxsize=1)
def _s3_client_of(_process: int) -> Any:
    import boto3
    from botocore.config import Config

    return boto3.session.Session().client(
        "s3",
        config=Config(
            retries={"mode": "standard", "total_max_attempts": REQUEST_ATTEMPTS},
            connect_timeout=CONNECT_SECONDS,
            read_timeout=SILENCE_SECONDS,
            max_pool_connections=CONNECTIONS,
        ),
    )


def s3_client() -> Any:
    """This process's S3 client (region, credentials and endpoint from the environment). Never shared over a fork."""
    return _s3_client_of(os.getpid())


def split(uri: str) -> tuple[str, str]:
    """Return bucket and key of an s3:// URI.

    Raises:
        BadConfig: no bucket name in it.
    """
    bucket, _, key = uri.removeprefix(S3).partition("/")
    if not bucket:
        raise BadConfig("the URI names no bucket", value=uri, rule="s3://BUCKET/KEY")
    return bucket, key


def tagging(key: str) -> dict[str, str]:
    """Return the argument of a write that tags an object that expires, else nothing."""
    tags = retention_tags(key)
    return {"Tagging": urlencode(tags)} if tags else {}


class ObjectStream(io.RawIOBase):
    """A span of one version of an object as a seekable stream, which continues on a new connection after one breaks.

    smart_open reads, and reconnects a few times; this class handles longer failures.

    Args:
        start, stop: bytes; None: to the end.
        etag: of the version; empty: the current one.

    Raises:
        MissingInput, StorageRefused, Transient: also from reading.
        Conflict: from reading, if another process has replaced the object.
    """

    def __init__(self, uri: str, start: int = 0, stop: int | None = None, etag: str = "") -> None:
        super().__init__()
        self._uri = uri
        self._bucket, self._key = split(uri)
        self._position = start
        # One request for a short span; a whole object comes over one connection.
        self._request_bytes = stop - start if stop else None
        self._body: Any = None
        if stop is None or not etag:
            found = persistently(uri, lambda: s3_client().head_object(Bucket=self._bucket, Key=self._key))
            stop, etag = stop if stop is not None else int(found["ContentLength"]), etag or found["ETag"]
        self._stop, self._etag = stop, etag

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._stop}[whence]
        if base + offset != self._position:
            self._drop()
            self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), READ_BYTES, self._stop - self._position)
        if wanted <= 0:
            return 0
        data = persistently(self._uri, lambda: self._read(wanted))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        self._drop()
        super().close()

    def _read(self, wanted: int) -> bytes:
        try:
            if self._body is None:
                self._body = self._open()
            data: bytes = self._body.read(wanted)
            if not data:
                raise IncompleteReadError(actual_bytes=self._position, expected_bytes=self._stop)
        except OSError as error:
            self._drop()
            # smart_open's own: it holds S3's answer, or says that smart_open gave up reconnecting.
            answer = getattr(error, "backend_error", None)
            if answer is None and error.errno is None:
                answer = ReadTimeoutError(endpoint_url=self._uri, error=error)
            raise answer or error from error
        except BaseException:
            self._drop()
            raise
        return data

    def _open(self) -> Any:
        import smart_open.s3  # here: it takes a third of a second to load, and a supervisor starts without it

        body = smart_open.s3.open(
            self._bucket,
            self._key,
            "rb",
            defer_seek=True,
            client=s3_client(),
            client_kwargs={"S3.Client.get_object": {"IfMatch": self._etag}},
            range_chunk_size=self._request_bytes,
        )
        body.seek(self._position)
        return body

    def _drop(self) -> None:
        body, self._body = self._body, None
        if body is not None:
            body.close()


def pieces(uri: str, size: int, etag: str) -> Iterator[bytes]:
    """Yield an object's bytes in order, fetching several pieces in parallel.

    Raises:
        MissingInput, StorageRefused, Transient, Conflict: as ObjectStream.
    """

    def fetch(start: int) -> bytes:
        stop = min(start + PIECE_BYTES, size)
        try:
            # One read of a whole piece takes a third of the processor's time.
            return bytes(
                s3_client().get_object(Bucket=bucket, Key=key, Range=f"bytes={start}-{stop - 1}", IfMatch=etag)["Body"].read()
            )
        except (BotoCoreError, ClientError, OSError):
            with ObjectStream(uri, start, stop, etag) as stream:
                return stream.readall()

    bucket, key = split(uri)
    starts = iter(range(0, size, PIECE_BYTES))
    with ThreadPoolExecutor(PIECES_AT_ONCE, "download") as pool:
        waiting = deque(pool.submit(fetch, start) for start in islice(starts, PIECES_AHEAD))
        try:
            while waiting:
                yield waiting.popleft().result()
                waiting.extend(pool.submit(fetch, start) for start in islice(starts, 1))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def send_file(path: Path, uri: str, content_type: str) -> None:
    """Upload a local file, a large one in parallel parts. A failed upload removes its parts, best effort.

    If that request fails too, the bucket's lifecycle rule removes them days later (infra/constructs/storage.py).
    """
    from boto3.s3.transfer import TransferConfig

    bucket, key = split(uri)
    config = TransferConfig(multipart_threshold=MULTIPART_BYTES, multipart_chunksize=PART_BYTES, max_concurrency=PARTS_AT_ONCE)
    persistently(
        uri,
        lambda: s3_client().upload_file(
            str(path), bucket, key, Config=config, ExtraArgs={"ContentType": content_type, **tagging(key)}
        ),
    )
