"""Input files of a local run: those that the user names, and a first look at the bytes with which they begin."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import zstandard

from infra.local.state_folder import require_utf8
from pipeline.errors import BadConfig, BadData, MissingInput

SHARD_SUFFIXES = (*(kind + packed for kind in (".jsonl", ".csv", ".tsv") for packed in ("", ".gz", ".zst")), ".parquet")
SHARD_RULE = f"shards end in {', '.join(SHARD_SUFFIXES)}"
CONVERSION = (
    "convert it: `jq -c '.[]' FILE.json > FILE.jsonl` writes a JSON list as JSON Lines, spreadsheets can be saved as CSV, "
    "archives must be unpacked"
)

MAGIC = {
    ".gz": (b"\x1f\x8b",),
    # A frame, or one that readers skip, with which files of several threads begin.
    ".zst": (b"\x28\xb5\x2f\xfd", b"\x50\x2a\x4d\x18"),
    ".parquet": (b"PAR1",),
    ".zip": (b"PK\x03\x04",),
}
"""Suffix -> the bytes with which such a file begins. Spreadsheets are ZIP files."""


def find_inputs(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield the shards among the paths, and in the folders among them, without files in progress (`_NAME`, `.NAME`).

    Raises:
        MissingInput: a path does not exist or cannot be read, or a folder without shards.
        BadConfig: a file that is no shard, or a path that is not UTF-8.
        BadData: no row in any file of a path, or a file whose content is not what its name says.
    """
    for path in paths:
        require_utf8(path)
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.name.endswith(SHARD_SUFFIXES) and not _hidden(file, path))
            if not files:
                raise MissingInput("the input folder holds no shards", value=path, rule=SHARD_RULE, remedy=CONVERSION)
        elif not path.is_file():
            raise MissingInput("the input file does not exist", value=path, remedy="check the path")
        elif not path.name.endswith(SHARD_SUFFIXES):
            raise BadConfig("the input file is no shard", value=path, rule=SHARD_RULE, remedy=CONVERSION)
        else:
            files = [path]
        # A folder may hold some files without rows.
        if not sum(map(_has_content, files)):
            raise BadData(
                "the input is empty",
                value=path,
                rule="at least one row",
                remedy="write the file again; the program that wrote it may have failed",
            )
        yield from files


def _hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(("_", ".")) for part in file.relative_to(folder).parts)


def _has_content(path: Path) -> bool:
    """Whether there is a first byte, decompressed.

    Raises:
        MissingInput, BadConfig, BadData: as `find_inputs`.
    """
    require_utf8(path)
    try:
        with path.open("rb") as stream:
            start = stream.read(4)
        if not start:
            return False
        named = path.suffix if path.suffix in MAGIC else "text"
        found = next((kind for kind, magic in MAGIC.items() if start.startswith(magic)), "text")
        if found != named:
            raise BadData(
                "the content of the input file is not what its name says",
                value=f"{path}: {found} instead of {named}",
                rule=SHARD_RULE,
                remedy=CONVERSION if found == ".zip" else "give the file the suffix of its content, or write it again",
            )
        opened: Any = gzip if named == ".gz" else zstandard if named == ".zst" else io
        with opened.open(path, "rb") as stream:
            return bool(stream.read(1))
    except (gzip.BadGzipFile, EOFError, zlib.error, zstandard.ZstdError) as error:
        raise BadData(
            "the input file is cut off or damaged", value=f"{path}: {error}", remedy="write or download it again"
        ) from error
    except OSError as error:
        raise MissingInput(
            "the input file cannot be read", value=f"{path}: {error.strerror}", remedy="check its permissions"
        ) from error
