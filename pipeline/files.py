"""Write local files whole or not at all. Standard library only."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast


@contextmanager
def replacing(path: Path, *, if_absent: bool = False) -> Iterator[BinaryIO]:
    """Yield a new file that replaces `path` when the block ends without an exception, and else disappears.

    Only its owner may read it.

    Args:
        if_absent: keep an existing file.

    Raises:
        FileExistsError: the file exists, and `if_absent` is set.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", suffix=".partial", delete=False) as stream:
        temporary = Path(stream.name)
        try:
            yield cast(BinaryIO, stream)
            stream.close()  # where a full disk may show only now
            if if_absent:
                os.link(temporary, path)
            else:
                temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file, or replace it; a reader finds the old content or the new one."""
    with replacing(path) as stream:
        stream.write(data)
