"""Decompress input files in pieces of bounded size, however far they expand, and turn the errors of a damaged one into ours."""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import pyarrow as pa

from pipeline.errors import BadData, first_line

READ_BYTES = 1 << 20
COMPRESSED_READ_BYTES = 64 << 10
"""Size of a piece of compressed input, which may expand a thousandfold."""


def pieces(uri: str, stream: BinaryIO) -> Iterator[bytes]:
    """Yield the stream's content, decompressed.

    Raises:
        BadData: it ends before it is complete, or is damaged.
    """
    if uri.endswith(".gz"):
        yield from _gunzipped(uri, stream)
    elif uri.endswith(".zst"):
        yield from _unzstd(uri, stream)
    else:
        while piece := stream.read(READ_BYTES):
            yield piece


def _gunzipped(uri: str, stream: BinaryIO) -> Iterator[bytes]:
    # Hand-written because the library's own reader does not limit how far a piece may expand.
    member = None
    finished = False
    while chunk := stream.read(COMPRESSED_READ_BYTES):
        more = True
        while chunk or (member is not None and more):
            if member is None:
                # gzip files may be padded with zeros after the last member.
                chunk = chunk.lstrip(b"\0") if finished else chunk
                if not chunk:
                    break
                member, finished = zlib.decompressobj(wbits=31), False
            try:
                piece = member.decompress(chunk, READ_BYTES)
            except zlib.error as error:
                raise damaged(uri, str(error)) from error
            if piece:
                yield piece
            # The rest waits in the decompressor, even if that has consumed all input.
            chunk, more = member.unconsumed_tail, len(piece) == READ_BYTES
            if member.eof:
                chunk, member, finished = member.unused_data, None, True
    if not finished:
        raise damaged(uri, "the file ends in the middle of its compressed data")


def _unzstd(uri: str, stream: BinaryIO) -> Iterator[bytes]:
    # Arrow's reader: a few bytes may expand to gigabytes, which come in pieces, and the end of a cut-off file is an error.
    unpacked = pa.CompressedInputStream(pa.PythonFile(stream, mode="r"), "zstd")
    with arrow_errors(uri):
        while piece := unpacked.read(READ_BYTES):
            yield piece
    if stream.tell() == 0:
        raise damaged(uri, "the file is empty")


class Unpacked(io.RawIOBase):
    """A file object over pieces of bytes."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            try:
                self._rest = next(self._pieces)
            except StopIteration:
                return 0
        taken = self._rest[: len(buffer)]
        buffer[: len(taken)] = taken
        self._rest = self._rest[len(taken) :]
        return len(taken)


@contextmanager
def arrow_errors(uri: str) -> Iterator[None]:
    """Turn Arrow's errors about a file into bad data."""
    try:
        yield
    except (pa.ArrowException, EOFError, UnicodeDecodeError) as error:
        raise damaged(uri, first_line(error)) from error
    except OSError as error:
        # Storage errors have a cause (the store translates them); Arrow's errors about a file have none.
        if error.__cause__ or error.errno:
            raise
        raise damaged(uri, first_line(error)) from error


def damaged(uri: str, detail: str) -> BadData:
    return BadData(
        "an input file is cut off or damaged",
        value=f"{uri}: {detail}",
        rule="every file must be readable to its end",
        remedy="upload it again, or remove it, and start the run again",
    )
