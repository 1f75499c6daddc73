"""Turn labelled reviews into training rows: `python examples/reviews/rows.py REVIEWS FOLDER`.

REVIEWS is a CSV, JSON Lines or Parquet file with the columns title, content and label. FOLDER gets `train/titles.jsonl.gz` (a
title finds its review), `train/labels.jsonl.gz` (a review belongs to its label's class) and `corpus.jsonl.gz` (the reviews to
embed).
"""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow.csv
import pyarrow.json
import pyarrow.parquet

COLUMNS = ("title", "content", "label")
TASK = "label"


def read(path: Path) -> list[dict[str, str]]:
    """Return the reviews that have all three columns, as text."""
    readers: dict[str, Any] = {
        ".csv": pyarrow.csv.read_csv,
        ".jsonl": pyarrow.json.read_json,
        ".parquet": pyarrow.parquet.read_table,
    }
    if path.suffix not in readers:
        sys.exit(f"{path}: the file must end in {', '.join(readers)}")
    table = readers[path.suffix](path)
    if missing := {*COLUMNS} - {*table.column_names}:
        sys.exit(f"{path} has no column {', '.join(sorted(missing))}; it has {', '.join(table.column_names)}")
    rows = table.select(list(COLUMNS)).to_pylist()
    found = [{name: str(row[name]).strip() for name in COLUMNS} for row in rows if None not in row.values()]
    return [row for row in found if all(row.values())]


def write(path: Path, rows: Iterable[dict[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def main(reviews: Path, folder: Path) -> None:
    rows = read(reviews)
    write(
        folder / "train" / "titles.jsonl.gz",
        ({"query": row["title"], "document": row["content"], "task": "title"} for row in rows),
    )
    write(
        folder / "train" / "labels.jsonl.gz", ({"query": row["content"], "document": row["label"], "task": TASK} for row in rows)
    )
    write(folder / "corpus.jsonl.gz", ({"id": f"review-{number}", "text": row["content"]} for number, row in enumerate(rows)))
    counts = Counter(row["label"] for row in rows)
    print(f"{len(rows)} reviews; set train.tasks to")
    print(json.dumps({TASK: {"classes": sorted(counts)}}, ensure_ascii=False))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
