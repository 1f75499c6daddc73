"""What is compared between weeks, what is reported, and what is refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from pipeline.config import DataLimits
from pipeline.dataset.ingested import PAIRS, Profile
from pipeline.dataset.profile import check_limits, profile_of
from pipeline.errors import BadData, ExitCode
from pipeline.plan import DataProfile


def shard(rows: int = 100, **statistics: Any) -> Profile:
    found = {
        "locales": {"de": rows // 2, "en": rows - rows // 2},
        "tasks": {"": rows},
        "labels": float(rows),
        "query_tokens": {"8": rows},
        "document_tokens": {"128": rows // 2, "256": rows - rows // 2},
        "repeated": 0,
        **statistics,
    }
    return Profile(
        schema_version=1, kind=PAIRS, uri="s3://b/week.jsonl", version="v", size=1, sha256="0", rows=rows, bad_rows=0, files=(),
        sizes={}, statistics=found,
    )  # fmt: skip


LAST = profile_of([shard(), shard()], 1000, None)


def test_profile() -> None:
    found = profile_of([shard(100), shard(300, labels=0.0, repeated=40)], 10, 3)
    assert (found.rows, found.documents, found.documents_gone) == (400, 10, 3)
    assert found.locales == {"de": 0.5, "en": 0.5}
    assert (found.mean_label, found.duplicates) == (0.25, 0.1)
    assert found.median_document == 128
    assert 4 < found.median_query < 8
    assert profile_of([], 0, None).median_query == 0


CHANGES: dict[str, tuple[DataProfile, str]] = {
    "rows": (profile_of([shard(20)], 1000, None), "rows of new shards: 20, 200 last week"),
    "locale_share": (profile_of([shard(200, locales={"en": 200})], 1000, None), "share of locale de: 0.0%, 50.0% last week"),
    "task_share": (profile_of([shard(200, tasks={"qa": 200})], 1000, None), "share of task qa: 100.0%, 0.0% last week"),
    "mean_label": (profile_of([shard(200, labels=20.0)], 1000, None), "mean label: 0.100, 1.000 last week"),
    "median_length": (profile_of([shard(200, document_tokens={"16": 200})], 1000, None), "median tokens of documents: 12, 128"),
    "duplicates": (profile_of([shard(200, repeated=100)], 1000, None), "share of repeated rows: 0.500, 0.000 last week"),
    "documents_gone": (profile_of([shard(200)], 500, 600), "documents gone: 600 of 1,000"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_large_change_is_reported_and_refused_where_a_limit_is_set(name: str, caplog: pytest.LogCaptureFixture) -> None:
    profile, words = CHANGES[name]
    with caplog.at_level(logging.WARNING):
        check_limits(profile, LAST, DataLimits(), [shard()])
    assert words in caplog.text
    assert f"data.limits.{name}" in caplog.text
    smallest = 1 if name in ("rows", "median_length") else 0
    with pytest.raises(BadData) as caught:
        check_limits(profile, LAST, DataLimits(**{name: smallest}), [shard()])
    assert caught.value.exit_code is ExitCode.BAD_DATA
    assert any(words in value and f"data.limits.{name} = {smallest}" in value for value in caught.value.value)
    assert any("s3://b/week.jsonl, 100 rows" in value for value in caught.value.value)


def test_what_stays_as_it_was_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    check_limits(LAST, LAST, DataLimits(rows=1, locale_share=0, mean_label=0), [])
    check_limits(LAST, None, DataLimits(rows=1), [])
    assert not caplog.records


def test_every_limit_is_compared() -> None:
    assert set(CHANGES) == set(DataLimits.model_fields)
