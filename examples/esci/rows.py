"""Turn the Shopping Queries data set into training rows, a corpus and a golden set: `python examples/esci/rows.py DATA FOLDER`.

DATA has the data set's own two files (https://github.com/amazon-science/esci-data): `shopping_queries_dataset_examples.parquet`
and `shopping_queries_dataset_products.parquet`. FOLDER gets

- `train/search.jsonl.gz`: of the split `train`, products that are exact matches, and as negatives (label 0) complements and
  irrelevant ones; substitutes are neither,
- `train/esci.jsonl.gz`: of the same, query and title as one text, with the judgement as its class,
- `corpus.jsonl.gz`: all products that are judged,
- `test/queries.jsonl`, `test/corpus.jsonl`, `test/qrels.tsv`: the split `test` as a golden set, with the data set's own gains.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

CLASSES = {"E": "exact", "S": "substitute", "C": "complement", "I": "irrelevant"}
GAINS = {"E": 1.0, "S": 0.1, "C": 0.01, "I": 0.0}
"""Of nDCG, from Reddy et al. 2022, "Shopping Queries Dataset: A Large-Scale ESCI Benchmark for Improving Product Search"."""

PAIR_LABELS = {"E": 1, "C": 0, "I": 0}
TEXT_COLUMNS = ("product_title", "product_brand", "product_color", "product_bullet_point")
KEYS = ["product", "product_locale"]
LONGEST = 2000
"""Characters of a product's text."""


def main(data: Path, folder: Path) -> None:
    examples = read(data / "shopping_queries_dataset_examples.parquet", ["query", "query_id", "esci_label", "split"])
    products = read(data / "shopping_queries_dataset_products.parquet", [*TEXT_COLUMNS])
    place = pc.index_in(examples["product"], value_set=products["product"].combine_chunks())
    examples = examples.append_column("place", place).filter(pc.is_valid(place))
    judged = pc.unique(examples["place"])
    with ExitStack() as stack:
        search, esci, corpus = (
            stack.enter_context(open_text(folder / f"{name}.jsonl.gz")) for name in ("train/search", "train/esci", "corpus")
        )
        queries, documents, qrels = (
            stack.enter_context(open_text(folder / "test" / name)) for name in ("queries.jsonl", "corpus.jsonl", "qrels.tsv")
        )
        for row in rows_of(examples.filter(pc.field("split") == "train"), products):
            common = {"query": row["query"], "locale": row["product_locale"], "group": str(row["query_id"])}
            if (label := PAIR_LABELS.get(row["esci_label"])) is not None:
                write(search, {**common, "document": text_of(row), "label": label, "task": "search"})
            text = f"{row['query']} | {row['product_title']}"
            write(esci, {**common, "query": text, "document": CLASSES[row["esci_label"]], "task": "esci"})
        for product in rows_of(products.select(KEYS).take(judged).append_column("place", judged), products):
            write(corpus, {"id": product["product"], "text": text_of(product), "locale": product["product_locale"]})
        qrels.write("query\tdocument\tscore\n")
        seen: set[str] = set()
        for row in rows_of(examples.filter(pc.field("split") == "test"), products):
            query = f"q{row['query_id']}"
            qrels.write(f"{query}\t{row['product']}\t{GAINS[row['esci_label']]}\n")
            for name, file, text in ((query, queries, row["query"]), (row["product"], documents, text_of(row))):
                if name not in seen:
                    seen.add(name)
                    write(file, {"_id": name, "text": text})
    print(f"{len(examples)} judgements of {len(judged)} products")


def read(path: Path, columns: list[str]) -> pa.Table:
    """Return columns of one of the files, with `product`: a product's locale and id, as ids are of one locale."""
    try:
        table = pq.read_table(path, columns=["product_id", "product_locale", *columns])
    except (OSError, pa.ArrowException) as error:
        sys.exit(f"{path}: {error}\nDownload it from https://github.com/amazon-science/esci-data")
    table = table.append_column("product", pc.binary_join_element_wise(table["product_locale"], table["product_id"], "-"))
    # All products' texts are more than the 2 GiB that offsets of 32 bits reach.
    return table.cast(
        pa.schema([(each.name, pa.large_string() if each.type == pa.string() else each.type) for each in table.schema])
    )


def rows_of(table: pa.Table, products: pa.Table) -> Iterator[dict[str, Any]]:
    """Yield rows with their products' texts, some thousand at a time in memory."""
    for batch in table.to_batches(max_chunksize=10_000):
        texts = products.select(list(TEXT_COLUMNS)).take(batch.column("place"))
        yield from ({**row, **text} for row, text in zip(batch.to_pylist(), texts.to_pylist(), strict=True))


def text_of(product: dict[str, Any]) -> str:
    """Return a product's title, brand, color and bullet points, as far as it has them."""
    return "\n".join(str(product[name]) for name in TEXT_COLUMNS if product[name])[:LONGEST]


def open_text(path: Path) -> Any:
    path.parent.mkdir(parents=True, exist_ok=True)
    return gzip.open(path, "wt", encoding="utf-8") if path.suffix == ".gz" else path.open("w", encoding="utf-8")


def write(file: Any, row: dict[str, Any]) -> None:
    file.write(json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
