"""The metrics of every query of an evaluation: a small Parquet file, to compare two models or two runs query by query.

Columns: `query_hash` (pipeline/dataset/rows.normalized_hash), `locale` (null where rows have none), then one float64 column per
metric. A query is a text and a locale, each once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import BadData

QueryKey = tuple[int, str | None]
"""Normalized hash of the query's text, and its locale."""

KEY_COLUMNS = (pa.field("query_hash", pa.uint64()), pa.field("locale", pa.string()))


@dataclass(frozen=True, slots=True)
class QueryValues:
    """Every metric of every query.

    Attributes:
        queries: distinct, in any order.
        values: metric -> (Q,) float64, in the order of `queries`.
    """

    queries: tuple[QueryKey, ...]
    values: dict[str, npt.NDArray[np.float64]]

    def means(self) -> dict[str, float]:
        return {metric: float(values.mean()) for metric, values in self.values.items()}

    def of(self, queries: Sequence[QueryKey]) -> dict[str, npt.NDArray[np.float64]]:
        """Return the values of some of the queries, in their order.

        Raises:
            KeyError: one is not there.
        """
        places = {query: place for place, query in enumerate(self.queries)}
        chosen = [places[query] for query in queries]
        return {metric: values[chosen] for metric, values in self.values.items()}

    def write(self, path: Path) -> None:
        """Write them to a local file; create its folder if it is missing."""
        columns = [
            pa.array([query for query, _ in self.queries], pa.uint64()),
            pa.array([locale for _, locale in self.queries], pa.string()),
            *(pa.array(values, pa.float64()) for values in self.values.values()),
        ]
        schema = pa.schema([*KEY_COLUMNS, *(pa.field(metric, pa.float64()) for metric in self.values)])
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns, schema=schema), path, compression="zstd")

    @classmethod
    def read(cls, path: Path) -> QueryValues:
        """Read them back.

        Raises:
            BadData: another kind of file, a query that comes twice, or a value that is not finite.
        """
        try:
            table = pq.read_table(path)
        except (pa.ArrowException, OSError) as error:
            raise BadData("the values of an evaluation cannot be read", value=f"{path}: {error}") from error
        fields = list(table.schema)
        kinds = [(field.name, field.type) for field in KEY_COLUMNS]
        if [(field.name, field.type) for field in fields[:2]] != kinds or {field.type for field in fields[2:]} != {pa.float64()}:
            raise BadData(
                "the file does not hold the values of an evaluation",
                value=f"{path}: {[f'{field.name}: {field.type}' for field in fields]}",
                rule="columns query_hash: uint64, locale: string, then float64 per metric",
            )
        queries = tuple(zip(table["query_hash"].to_pylist(), table["locale"].to_pylist(), strict=True))
        values = {field.name: table[field.name].to_numpy() for field in fields[2:]}
        if not queries or len(set(queries)) != len(queries) or not all(np.isfinite(column).all() for column in values.values()):
            raise BadData("the values of an evaluation are not whole", value=path, rule="each query once, every value a number")
        return cls(queries, values)
