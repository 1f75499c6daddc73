"""A file that another process writes, read line by line while it grows."""

from __future__ import annotations

from pathlib import Path

CHUNK_BYTES = 1 << 16


class GrowingFile:
    """One growing file, from its beginning on."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "rb")  # noqa: SIM115 - as long as its writer lives
        self._rest = b""

    def read(self, *, end: bool = False) -> list[bytes]:
        """Return the lines completed since the last call.

        Args:
            end: nothing more is written: a last line without an end counts, too.
        """
        lines = []
        while chunk := self._file.read(CHUNK_BYTES):
            *whole, self._rest = (self._rest + chunk).split(b"\n")
            lines += whole
            # Progress bars and binary data may have no end of line.
            if len(self._rest) > CHUNK_BYTES:
                lines.append(self._rest)
                self._rest = b""
        if end and self._rest:
            lines.append(self._rest)
            self._rest = b""
        return lines
