"""plan's part about documents: the corpus, its parts, `embed/plan.json`, and the rows that are refused on the way."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType

from pipeline import store
from pipeline.contract import RunPaths
from pipeline.dataset.corpus_plan import CountedDocuments, count_documents, documents_gone
from pipeline.dataset.ingested import IngestedShard
from pipeline.dataset.profile import check_limits, profile_of
from pipeline.dataset.reading import in_threads
from pipeline.dataset.records import BadRow
from pipeline.dataset.refusals import LISTED_REASONS, Refusals
from pipeline.errors import BadData, MissingInput
from pipeline.log import log
from pipeline.plan import EmbedPlan, RunPlan
from pipeline.run.context import StageContext
from pipeline.run.registry import read_pointer
from pipeline.run_inputs import Corpus, InputShard, RunInputs


def ingested(paths: RunPaths, shards: Sequence[InputShard]) -> list[IngestedShard]:
    """Return ingested shards, with their profiles.

    Raises:
        MissingInput: one is not ingested.
    """
    found = [IngestedShard(paths.bucket_root, shard) for shard in shards]
    list(in_threads(lambda shard: (shard.profile, shard.token_profile), found))
    return found


def write_embed_plan(context: StageContext, inputs: RunInputs, plan: RunPlan, corpus: Corpus) -> EmbedPlan:
    """Write what embed and publish follow: the corpus as it was listed last, and the model that embeds it.

    Raises:
        BadData: see `count_corpus`; or too many documents are gone.
    """
    same = corpus.shards == plan.embed.shards
    embed = plan.embed if same else count_corpus(context, inputs, corpus.shards)
    if inputs.published and not (same and plan.train.rows):
        check_gone(context, inputs, embed)
    asked = corpus.model_dump(include={"model", "listed", "round", "deletions", "earlier"})
    embed = EmbedPlan.model_validate({**embed.model_dump(), **asked})
    embed = embed.sealed(plan.fingerprint)
    store.write_bytes(context.paths.embed_plan, embed.to_json())
    return embed


def count_corpus(context: StageContext, inputs: RunInputs, shards: Sequence[InputShard]) -> EmbedPlan:
    """Count the documents of ingested shards, and divide them into parts.

    Raises:
        BadData: too many bad rows, no document, or too many of those that are published are gone.
    """
    paths = context.paths
    documents = ingested(paths, shards)
    with Quarantine(context.scratch / "quarantine.jsonl", paths.corpus_quarantine) as quarantine:
        quarantine.join([shard for shard in documents if not shard.shard.of_pairs])
        counted = count(context, inputs, documents, quarantine)
        check_bad_rows(inputs, [], documents, counted, [], quarantine)
    return plan_embedding(inputs, shards, documents, counted)


def count(
    context: StageContext, inputs: RunInputs, documents: Sequence[IngestedShard], quarantine: Quarantine
) -> CountedDocuments:
    """Count documents; refuse rows that contradict each other."""
    config = inputs.config.embed
    return count_documents(
        documents,
        config.rows_per_part,
        config.children * (config.ranks_per_child or inputs.world.ranks_per_node),
        context.scratch / "hashes",
        quarantine.refuse,
        lambda done: context.heartbeat.beat(done, unit="rows", note="counting documents"),
    )


def plan_embedding(
    inputs: RunInputs, shards: Sequence[InputShard], documents: Sequence[IngestedShard], counted: CountedDocuments
) -> EmbedPlan:
    """Plan the corpus and its parts.

    Raises:
        BadData: the corpus is empty.
    """
    config = inputs.config
    if not counted.digest.count:
        raise BadData("the corpus is empty", value=list(config.data.corpus), rule="there is at least one document to embed")
    own = [shard for shard in documents if not shard.shard.of_pairs]
    return EmbedPlan(
        source="corpus" if own else "documents",
        shards=tuple(shards),
        tokenizer=inputs.tokenizer,
        rows=counted.digest.count,
        bad_rows=counted.conflicts.total() + sum(map(refused, own)),
        removed=counted.removed,
        ids=str(counted.digest),
        parts=counted.parts,
        children=min(config.embed.children, len(counted.parts)),
    )


def check_gone(context: StageContext, inputs: RunInputs, embed: EmbedPlan) -> None:
    """Compare the documents with those that are published.

    Raises:
        BadData: `data.limits.documents_gone` is exceeded.
    """
    pointer = read_pointer(context.paths.bucket_root, inputs.config.registry) if inputs.config.registry else None
    last = last_plan(context.paths, pointer.embeddings_run) if pointer else None
    if last:
        now, before = profile_of([], embed.rows, count_gone(context, last.embed, embed)), profile_of([], last.embed.rows, None)
        check_limits(now, before, inputs.config.data.limits, [])


def last_plan(paths: RunPaths, run: str) -> RunPlan | None:
    """Return the plan of an earlier run with what it embedded last, None if it is removed or of another version."""
    earlier = RunPaths(f"{paths.bucket_root}/runs/{run}")
    with suppress(MissingInput, BadData):
        plan = RunPlan.from_json(store.read_bytes(earlier.plan))
        if not store.exists(earlier.embed_plan):
            return plan
        return plan.model_copy(update={"embed": EmbedPlan.from_json(store.read_bytes(earlier.embed_plan))})
    return None


def count_gone(context: StageContext, last: EmbedPlan, embed: EmbedPlan) -> int | None:
    """Return how many documents of an earlier corpus are gone, None if that is not known any more."""
    gone = documents_gone(context.paths.bucket_root, last.shards, embed.shards, context.scratch / "hashes")
    # Ids that were deleted before are gone from files that lack their deletion by now.
    return None if gone is None else max(gone + embed.removed - last.removed, 0)


def check_bad_rows(
    inputs: RunInputs,
    pairs: Sequence[IngestedShard],
    documents: Sequence[IngestedShard],
    counted: CountedDocuments,
    new: Sequence[int],
    quarantine: Quarantine,
) -> None:
    """Refuse data of which more than `data.max_bad_fraction` is bad. Each group on its own, or a long history hides a bad week.

    Args:
        new: numbers of the training shards that the lineage did not have.
    """
    # A file may be of several tasks.
    conflicts = {
        (documents[number].shard.uri, documents[number].shard.setting): count for number, count in counted.conflicts.items()
    }
    groups = {
        "new training shards": [pairs[number] for number in new],
        "earlier training shards": [shard for number, shard in enumerate(pairs) if number not in set(new)],
        "corpus": [shard for shard in documents if not shard.shard.of_pairs],
    }
    limit, own_corpus = inputs.config.data.max_bad_fraction, bool(groups["corpus"])
    for name, shards in groups.items():
        differ = (
            sum(conflicts.get((shard.shard.uri, shard.shard.setting), 0) for shard in shards)
            if (name == "corpus") == own_corpus
            else 0
        )
        bad = differ + sum(map(refused, shards))
        total = sum(shard.profile.rows + shard.profile.bad_rows for shard in shards)
        log.info("%s: %d rows, %d of them refused", name, total, bad)
        if bad > limit * total:
            reasons = [reason for shard in shards for reason in shard.profile.reasons]
            raise BadData(
                f"too many rows of the {name} are bad: {bad:,} of {total:,}",
                value=[*reasons, *(quarantine.refusals.reasons() if differ else ())][:LISTED_REASONS],
                rule=f"data.max_bad_fraction = {limit:g}",
                remedy="correct the rows, all of which are listed in plan/quarantine.jsonl, or raise data.max_bad_fraction",
            )


def refused(shard: IngestedShard) -> int:
    """Return the rows of a shard that ingest refused, or of which the tokenizer refused a text."""
    return shard.profile.bad_rows + shard.token_profile.without_tokens


class Quarantine(AbstractContextManager["Quarantine"]):
    """Lists every refused row in a local file; on exit, also after an error, the file is uploaded.

    Attributes:
        count: refused rows.
    """

    def __init__(self, path: Path, uri: str) -> None:
        self.count = 0
        self.refusals = Refusals()
        self._uri = uri
        self._path = path
        self._stream = path.open("wb")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stream.close()
        if self.count:
            store.upload(self._path, self._uri)
            log.warning("refused rows are listed in %s", self._uri)
        else:
            store.delete(self._uri)  # an earlier attempt on other data may have left it

    def join(self, shards: Sequence[IngestedShard]) -> None:
        """Add the rows that ingest refused."""
        for shard in shards:
            self.count += refused(shard)
            if shard.profile.bad_rows:
                with store.open_read(store.join(shard.rows_uri, "quarantine.jsonl")) as stream:
                    shutil.copyfileobj(stream, self._stream)

    def refuse(self, row: BadRow) -> None:
        self.count += 1
        self._stream.write(json.dumps(row._asdict(), ensure_ascii=False).encode() + b"\n")
        self.refusals.add(row)
