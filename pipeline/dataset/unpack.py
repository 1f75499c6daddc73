"""Decompress input files in pieces of bounded size, however far they expand, and turn the errors of a damaged one into ours."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import pyarrow as pa

from pipeline.errors import BadData, first_line

READ_BYTES = 1 << 20


def pieces(uri: str, stream: BinaryIO) -> Iterator[bytes]:
    """Yield the stream's content, decompressed.

    Both readers give no more than they are asked for, however far a few bytes expand, and know a file that is cut off.

    Raises:
        BadData: it ends before it is complete, or is damaged.
    """
    unpacked: Any = stream
    if uri.endswith(".gz"):
        unpacked = gzip.GzipFile(fileobj=stream, mode="rb")
    elif uri.endswith(".zst"):
        unpacked = pa.CompressedInputStream(pa.PythonFile(stream, mode="r"), "zstd")
    with arrow_errors(uri):
        while piece := unpacked.read(READ_BYTES):
            yield piece
    if unpacked is not stream and stream.tell() == 0:
        raise damaged(uri, "the file is empty")


class Unpacked(io.RawIOBase):
    """A file object over pieces of bytes."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = filter(None, pieces)
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        rest = self._rest or next(self._pieces, b"")
        taken, self._rest = rest[: len(buffer)], rest[len(buffer) :]
        buffer[: len(taken)] = taken
        return len(taken)


@contextmanager
def arrow_errors(uri: str) -> Iterator[None]:
    """Turn the libraries' errors about a file into bad data."""
    try:
        yield
    except (pa.ArrowException, zlib.error, EOFError, UnicodeDecodeError, OSError) as error:
        # Storage errors have a cause (the store translates them); the libraries' errors about a file have none.
        if isinstance(error, OSError) and (error.__cause__ or error.errno):
            raise
        raise damaged(uri, first_line(error)) from error


def damaged(uri: str, detail: str) -> BadData:
    return BadData(
        "an input file is cut off or damaged",
        value=f"{uri}: {detail}",
        rule="every file must be readable to its end",
        remedy="upload it again, or remove it, and start the run again",
    )
