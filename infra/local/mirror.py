"""The bucket as plain files: every object that the local endpoint has acknowledged is a file under one folder, named by its key.

Loaded into moto at the start and written before a PUT, a completed multipart upload or a DELETE is answered, by rename, so
that a killed run loses no finished object and people can look inside. Objects above a threshold live only here: moto holds
their names and reads their bytes from the file when asked.
"""

from __future__ import annotations

import os
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from moto.s3.models import FakeKey, s3_backends

from infra.local.definitions import ACCOUNT

KEEP_IN_MEMORY_BYTES = 1 << 20


class Mirror:
    """One bucket's folder.

    Args:
        bucket: name of the bucket; it exists in moto.
        folder: the objects as files.
        temporary: where they are written first; on the same file system.
    """

    def __init__(self, bucket: str, folder: Path, temporary: Path) -> None:
        self.bucket = bucket
        self.folder = folder
        self._temporary = temporary
        self._tree = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        temporary.mkdir(parents=True, exist_ok=True)
        for leftover in temporary.iterdir():
            leftover.unlink()

    def load(self) -> None:
        """Put every file under the folder into moto."""
        backend = s3_backends[ACCOUNT]["aws"]
        for path in sorted(filter(Path.is_file, self.folder.rglob("*"))):
            key = path.relative_to(self.folder).as_posix()
            if path.stat().st_size < KEEP_IN_MEMORY_BYTES:
                backend.put_object(self.bucket, key, path.read_bytes())
            else:
                _read_from(backend.put_object(self.bucket, key, b""), path)

    def objection(self, key: str) -> str | None:
        """Why no object can have this key here, None when it can: objects are files."""
        parts = key.split("/")
        if any(part in ("", ".", "..") for part in parts) or "\0" in key:
            return "every part of a key must be a file name"
        path = self.folder.joinpath(*parts)
        taken = path.is_dir() or any(parent.is_file() for parent in path.parents[: len(parts) - 1])
        return "a key cannot be both an object and a folder of objects" if taken else None

    def store(self, key: str) -> None:
        """Make the file what moto's object is now: written, or removed when there is no such object."""
        stored = s3_backends[ACCOUNT]["aws"].get_object(self.bucket, key)
        path = self.folder / key
        if stored is None:
            self._remove(path)
            return
        descriptor, temporary = tempfile.mkstemp(dir=self._temporary)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(stored.value)
        with self._tree:
            path.parent.mkdir(parents=True, exist_ok=True)
            Path(temporary).replace(path)
        if stored.size >= KEEP_IN_MEMORY_BYTES:
            _read_from(stored, path)

    def store_all(self) -> None:
        """After a request that names many keys: remove the files of all objects that are gone."""
        keys = set(s3_backends[ACCOUNT]["aws"].get_bucket(self.bucket).keys)
        for path in list(self.folder.rglob("*")):
            if path.is_file() and path.relative_to(self.folder).as_posix() not in keys:
                self._remove(path)

    def _remove(self, path: Path) -> None:
        with self._tree:
            path.unlink(missing_ok=True)
            # Up to the first folder that is not empty.
            with suppress(OSError):
                for parent in path.relative_to(self.folder).parents[:-1]:
                    (self.folder / parent).rmdir()


@dataclass(slots=True)
class _FileContent:
    """Replaces a moto object's buffer and reads the mirror's file. Objects of this size are written once."""

    path: Path
    position: int = 0

    def seek(self, position: int) -> None:
        self.position = position

    def read(self, size: int = -1) -> bytes:
        with open(self.path, "rb") as stream:
            stream.seek(self.position)
            data = stream.read(size)
        self.position += len(data)
        return data

    def close(self) -> None:
        """Nothing is held open."""


def _read_from(stored: FakeKey, path: Path) -> None:
    size = path.stat().st_size
    # Computed from the buffer at first use, without a lock: before the buffer changes. A file's own is computed when asked for.
    if stored.size == size:
        _ = stored.etag
    else:
        stored._etag = None
    with stored.lock:
        buffer: BinaryIO | Any = stored._value_buffer
        stored._value_buffer = _FileContent(path)
        stored.contentsize = size
    buffer.close()
    if stored.multipart is not None:
        stored.multipart.dispose()
