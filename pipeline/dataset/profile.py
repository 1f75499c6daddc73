"""Compare this week's data with last week's, before a gang starts: a broken export is cheaper to refuse than to train on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from pipeline.config import DataLimits
from pipeline.dataset.ingested import Profile
from pipeline.errors import BadData
from pipeline.log import log
from pipeline.plan import DataProfile

WARNED = DataLimits(
    rows=3.0,
    locale_share=0.1,
    task_share=0.1,
    mean_label=0.1,
    median_length=1.5,
    duplicates=0.1,
    documents_gone=0.1,
)
"""Differences beyond which a limit that is not set is reported."""

LISTED_SHARDS = 3


def profile_of(shards: Sequence[Profile], documents: int, documents_gone: int | None) -> DataProfile:
    """Return what is compared between weeks.

    Args:
        shards: profiles of the new training shards.
        documents: to embed.
        documents_gone: of last week's that are not among them; None: unknown.
    """
    rows = sum(shard.rows for shard in shards)
    found: dict[str, Counter[str]] = {name: Counter() for name in ("locales", "tasks", "query_tokens", "document_tokens")}
    for shard in shards:
        for name, counts in found.items():
            counts.update(shard.statistics.get(name, {}))
    whole = max(rows, 1)
    return DataProfile(
        rows=rows,
        locales={name: count / whole for name, count in sorted(found["locales"].items())},
        tasks={name: count / whole for name, count in sorted(found["tasks"].items())},
        mean_label=sum(shard.statistics.get("labels", 0.0) for shard in shards) / whole,
        median_query=_median(found["query_tokens"]),
        median_document=_median(found["document_tokens"]),
        duplicates=sum(shard.statistics.get("repeated", 0) for shard in shards) / whole,
        documents=documents,
        documents_gone=documents_gone,
    )


def _median(counts: Mapping[str, int]) -> float:
    """Return the median of a histogram whose keys are the upper bounds of powers of two, evenly spread inside of each."""
    half, below = sum(counts.values()) / 2, 0
    for bound, count in sorted((int(bound), count) for bound, count in counts.items()):
        if below + count >= half > 0:
            return bound / 2 * (1 + (half - below) / count)
        below += count
    return 0.0


def check_limits(profile: DataProfile, last: DataProfile | None, limits: DataLimits, shards: Sequence[Profile]) -> None:
    """Report what differs from last week, and refuse what exceeds a limit that is set.

    Args:
        last: None: there is nothing to compare with.
        shards: profiles of the new training shards, for examples.

    Raises:
        BadData: naming every figure, its limit, and examples.
    """
    refused = []
    for name, figure, difference in _differences(profile, last) if last else ():
        limit = getattr(limits, name)
        if difference > (getattr(WARNED, name) if limit is None else limit):
            if limit is None:
                log.warning("the data differs from last week's: %s; data.limits.%s can refuse that", figure, name)
            else:
                refused.append(f"{figure}: data.limits.{name} = {limit:g}")
    if refused:
        raise BadData(
            "the data differs too much from last week's",
            value=[*refused, *(f"new shard: {shard.uri}, {shard.rows:,} rows" for shard in shards[:LISTED_SHARDS])],
            rule="data.limits bounds the change from the parent's run to this one",
            remedy="correct the data; or, if it is right, raise the limit for this run: --set data.limits.NAME=NUMBER",
        )


def _differences(profile: DataProfile, last: DataProfile) -> Iterator[tuple[str, str, float]]:
    """Yield the limit, the figure in words, and the difference of everything that is compared."""
    if profile.documents_gone is not None:
        gone = profile.documents_gone
        yield "documents_gone", f"documents gone: {gone:,} of {last.documents:,}", gone / max(last.documents, 1)
    if not profile.rows:
        return
    for name, what, now, before in (
        ("rows", "rows of new shards", profile.rows, last.rows),
        ("median_length", "median tokens of queries", profile.median_query, last.median_query),
        ("median_length", "median tokens of documents", profile.median_document, last.median_document),
    ):
        yield name, f"{what}: {now:,.0f}, {before:,.0f} last week", max(now, before) / max(min(now, before), 1e-9)
    for name, what, shares, earlier in (
        ("locale_share", "locale", profile.locales, last.locales),
        ("task_share", "task", profile.tasks, last.tasks),
    ):
        for key in sorted({*shares, *earlier}):
            share, other = shares.get(key, 0.0), earlier.get(key, 0.0)
            yield name, f"share of {what} {key or '(none)'}: {share:.1%}, {other:.1%} last week", abs(share - other)
    for name, what, value, previous in (
        ("mean_label", "mean label", profile.mean_label, last.mean_label),
        ("duplicates", "share of repeated rows", profile.duplicates, last.duplicates),
    ):
        yield name, f"{what}: {value:.3f}, {previous:.3f} last week", abs(value - previous)
