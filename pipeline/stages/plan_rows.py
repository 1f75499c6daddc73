"""The rows of a run: selected from the ingested shards by their hashes, and written into the run's own row files.

Reads ingested shards and the rows that the lineage was trained on; writes the row files into a local folder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial, reduce
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.contract import RunPaths
from pipeline.dataset.classes import NO_CLASS, class_numbers, without_documents
from pipeline.dataset.corpus_plan import Places, sample_documents
from pipeline.dataset.deletions import Deletions
from pipeline.dataset.ingested import SLICES, Hashes, IngestedShard
from pipeline.dataset.negatives import joined, negative_columns
from pipeline.dataset.reading import in_threads
from pipeline.dataset.row_files import CLASSES, HOLDOUT_FILES, KNOWN, PUBLISHED, Lengths, PairLengths, RowWriter
from pipeline.dataset.seen import SeenRows
from pipeline.dataset.selection import Group, HashedRows, Mask, Numbers, Selection, groups, holdout_slices, pieces, select
from pipeline.dataset.steps import ORDER, StepCounts, write_steps
from pipeline.dataset.tokens import TextTokenizer, cut
from pipeline.evaluation.reference import copy_reference
from pipeline.run_inputs import RunInputs, TokenizerPlan

HOLDOUT_GROUP = 1 << 16
"""Rows of a group of which facts and tokens are in memory."""

Query = tuple[int, str | None, str | None]
"""Hash of its text, its locale, and its task."""

Beat = Callable[[str, int], None]
"""Called with what is done and the rows so far."""

OWN = {"query_tokens": "own_query_tokens", "document_tokens": "own_document_tokens"}
"""Columns of the parent's tokens -> those of the published model's."""


class PlannedRows:
    """Selects the rows of a run, and writes them: first the hold-out, then those to train on.

    Args:
        inputs: of the run.
        shards: ingested training shards, as they were listed.
        bucket_root: the folder that holds `seen/`.
        folder: local folder for the row files.
        corpus: ingested shards of a corpus of its own; none where the documents of training rows are embedded.
        published: tokenizer and lengths of a published model with other tokens; None: it has the parent's, or there is none.
        beat: see Beat.

    Attributes:
        folder: as given.
        rows: file -> rows in it.
        queries: distinct held-out queries that have a relevant document.
        held_texts: distinct classified texts of the hold-out.
        held_documents: distinct documents of the hold-out.
        slices: `locale:NAME` and `task:NAME` of its rows.
        held_classes: tasks and numbers of the classes of its texts.
        held, new, replayed: number of a shard -> its rows in the files.
        numbers: number of a shard -> its number in `train.arrow`; those that the lineage did not have come first.
    """

    def __init__(
        self,
        inputs: RunInputs,
        shards: Sequence[IngestedShard],
        corpus: Sequence[IngestedShard],
        bucket_root: str,
        folder: Path,
        published: tuple[TextTokenizer, Lengths] | None,
        beat: Beat,
    ) -> None:
        self._inputs = inputs
        self._config = inputs.config
        self._shards = shards
        self._corpus = corpus
        self.folder = folder
        self._published = published
        self._beat = beat
        compared = tuple(dict.fromkeys((*inputs.lineage, *inputs.published_lineage)))
        cache = folder.with_name("hashes")
        seen = SeenRows(bucket_root, inputs.lineage, self._config.data.holdout_by, cache)
        self._compared = SeenRows(bucket_root, compared, self._config.data.holdout_by, cache)
        self._source = HashedRows(shards, seen, self._config.data.max_repeats, cache)
        self._lengths = Lengths.of(self._config)
        # The keys of shards that are held out as a whole: those of their texts, divided by SLICES.
        own = [(one, file) for one in shards if one.shard.setting.endswith(".holdout") for file in range(len(one.profile.files))]
        tables = (table for one, file in own for table in one.facts(file, 0, one.profile.files[file].rows))
        self._held_keys = np.concatenate([np.empty(0, np.uint64), *(table["key"].to_numpy() for table in tables)])
        self.new_shards = [number for number, one in enumerate(shards) if one.shard.rows not in seen.shards]
        self.numbers = {number: place for place, number in enumerate(self.new_shards)}
        self.rows: dict[str, int] = {}
        self.queries = self.held_texts = self.held_documents = 0
        self.slices: set[str] = set()
        self.held_classes: set[tuple[str, int]] = set()
        self.held: Counter[int] = Counter()
        self.new: Counter[int] = Counter()
        self.replayed: Counter[int] = Counter()

    @property
    def judged(self) -> int:
        """What the gate's primary rule judges: distinct queries, or classified texts if there is nothing else."""
        return self.held_texts if self._config.classifies_only else self.queries

    @cached_property
    def selection(self) -> Selection:
        """The rows to train on."""
        return select(
            self._source,
            holdout_fraction=self._config.data.holdout_fraction,
            replay_fraction=self._config.data.replay_fraction,
            seed=self._config.seed,
            new_shards=[self._shards[number].shard.rows for number in self.new_shards],
            beat=partial(self._beat, "selecting rows"),
        )

    def write_holdout(self) -> None:
        """Write queries to evaluate, their documents, and distractors: the next slices' documents, of the corpus if there is one.

        Rows that a compared model was trained on are left out, and so are others with their key. Which distractors are relevant
        to a query is written too: most of them are trained on, and no wrong answers.
        """
        held, most = holdout_slices(self._config.data.holdout_fraction), self._config.data.holdout_queries
        known: set[Query] = set()
        texts: set[Query] = set()
        documents: set[int] = set()
        # Texts of shards that are held out as a whole may have been trained on with a key of any slice.
        everywhere = (self._compared.keys(0, SLICES) if len(self._held_keys) else self._held_keys) // np.uint64(SLICES)
        searched = not self._config.classifies_only
        with ExitStack() as stack:
            writer = RowWriter(self.folder, self._inputs.tokenizer.vocabulary, [*HOLDOUT_FILES, KNOWN, CLASSES])
            writers = {"": stack.enter_context(writer)}
            if self._published:
                other = RowWriter(self.folder / PUBLISHED, self._published[0].vocabulary, [*HOLDOUT_FILES, CLASSES])
                writers[f"{PUBLISHED}/"] = stack.enter_context(other)
            for first, last, table in self._tables(0, held, most, self._untrained):
                trained = np.concatenate([self._compared.keys(first, last), everywhere])
                table = table.filter(pa.array(~np.isin(table["key"].to_numpy(), trained)))
                table = table.append_column("new", pa.array(np.isin(table["shard"].to_numpy(), self.new_shards)))
                classified = table.filter((pc.field("class") != NO_CLASS) & (pc.field("label") > 0))
                classified = classified.filter(pa.array(_within(classified, texts, most)))
                _add(writers, CLASSES, classified)
                self.held_classes |= {*zip(classified["task"].to_pylist(), classified["class"].to_pylist(), strict=True)}
                self.slices |= {f"task:{name}" for name in classified["task"].unique().to_pylist()}
                table = table.filter(pc.field("class") == NO_CLASS)
                table = table.filter(pa.array(_within(table, known, most)))
                self.held.update([*classified["shard"].to_pylist(), *table["shard"].to_pylist()])
                for kind in ("locale", "task"):
                    self.slices |= {
                        f"{kind}:{name}" for name in (table if searched else classified)[kind].unique().to_pylist() if name
                    }
                _add(writers, "holdout.arrow", table)
                _add(writers, "candidates.arrow", _documents(table, documents))
                self._beat("writing the hold-out", writer.rows["holdout.arrow"])
                if len(known if searched else texts) == most:
                    break
            self.queries, self.held_texts, self.held_documents = len(known), len(texts), len(documents)
            distractors, last = self._config.evaluate.candidates, SLICES if searched else held
            if self._corpus and searched:
                places, last = sample_documents(self._corpus, held, distractors, self.folder.with_name("hashes"))
                if len(places[0]):
                    table = self._read(self._corpus, places, ["document_tokens"], ["document_hash"])
                    _add(writers, "candidates.arrow", _documents(table, documents))
            asked = {query[:2] for query in known}
            # The rows of a document are in the same slices as it is, or those of a query are; rows of groups may be anywhere, and
            # so may those of texts that are held out as a whole.
            anywhere = (self._config.data.holdout_by == "group" or len(self._held_keys) > 0) and searched
            last = SLICES if anywhere else last
            for _, _, table in self._tables(held, last, distractors, lambda group, *_: group.repeat == 1):
                if not self._corpus:
                    missing = self.held_documents + distractors - writer.rows["candidates.arrow"]
                    if not missing and not anywhere:
                        break
                    table = table.filter(pc.field("class") == NO_CLASS)
                    _add(writers, "candidates.arrow", _documents(table, documents)[:missing])
                writer.add(KNOWN, table.filter(pa.array(_positive_for(table, asked))))
        for prefix, each in writers.items():
            self.rows |= {f"{prefix}{name}": rows for name, rows in each.rows.items()}

    def _untrained(self, group: Group, first: int, last: int) -> Mask:
        unknown: Mask = ~np.isin(group.versions, self._compared.versions(first, last))
        unknown &= group.repeat == 1
        return unknown

    def _tables(
        self, begin: int, end: int, enough: int, wanted: Callable[[Group, int, int], Mask]
    ) -> Iterator[tuple[int, int, pa.Table]]:
        """Yield the wanted rows of the slices [begin, end) in the order of their keys, as ranges of slices with their rows, and
        the numbers of their classes.

        Args:
            enough: rows after which the caller may stop.
        """
        # Rather more: some rows are left out, and the pieces of another group have two ends in every file.
        per_slice = self._source.per_slice
        for first, last in groups(per_slice, begin, end, min(HOLDOUT_GROUP, enough + enough // 8 + int(per_slice.max()))):
            group = self._source.read(first, last)
            group = group.take(wanted(group, first, last))
            if len(group):
                table = self._read(self._shards, (group.shard, group.file, group.row), list(OWN), ["version", "key"])
                numbers = class_numbers(table, table["shard"].to_numpy(), self._shards, self._config.train.classes)
                yield first, last, table.append_column("class", pa.array(numbers))

    def _read(self, shards: Sequence[IngestedShard], rows: Places, columns: Sequence[str], order: Sequence[str]) -> pa.Table:
        """Return facts, tokens and the number of the shard of rows; without rows that lack tokens.

        Args:
            columns: of tokens, in the order of `texts`.
            order: columns of hashes by which the rows are sorted, the last one first.
        """
        sorted_rows = np.stack(rows)[:, np.lexsort(rows[::-1])]
        found = read_rows(shards, sorted_rows, self._inputs.tokenizer, columns, self._lengths, texts=self._published is not None)
        table = pa.concat_tables([table.append_column("shard", pa.array(sorted_rows[0][places])) for table, places in found])
        table = table.take(pa.array(np.lexsort([table[name].to_numpy() for name in order])))
        if self._published:
            tokenizer, own_lengths = self._published
            for place, name in enumerate(columns):
                texts, length = pc.list_element(table["texts"], place), own_lengths.of_column(name, table)
                tokens = (
                    tokenizer.encode_each(
                        tokenizer.with_prompts(texts, table["task"]).to_pylist(), int(np.max(length, initial=1))
                    )
                    if name == "query_tokens"
                    else tokenizer.encode_each(texts.to_pylist(), int(np.max(length)), tokenizer.prompts["document"])
                )
                values = pa.array([None if isinstance(one, str) else one for one in tokens], pa.list_(pa.uint32()))
                table = table.append_column(OWN[name], cut(values, length, tokenizer.plan(0)))
            table = _whole(table, [OWN[name] for name in columns])
        return table

    def write_reference(self, source: RunPaths, deletions: Deletions) -> None:
        """Copy the hold-out of the reference, without what is deleted and what a compared model, or this run, is trained on.

        Raises:
            MissingInput: see `copy_reference`.
        """

        def unusable(table: pa.Table) -> Mask:
            found = deletions.named(table)
            if "key" in table.column_names and table.num_rows:
                keys = table["key"].to_numpy()
                found |= np.isin(keys, self._compared.keys(0, 1 + int(keys.max()) * SLICES // (1 << 64)))
                found |= keys // np.uint64((1 << 64) // SLICES) >= holdout_slices(self._config.data.holdout_fraction)
                found |= table["label"].to_numpy() <= 0
            return found

        self.rows |= copy_reference(
            source,
            self.folder,
            unusable,
            self.folder.with_name("reference"),
            classified=self._config.classifies_only,
        )

    def write_training(self, ranks: int) -> tuple[StepCounts, float]:
        """Write the rows to train on and the order of their batches.

        Returns:
            The counts of the plan, and the mean tokens of a document.
        """
        selection = self.selection
        held, negatives = holdout_slices(self._config.data.holdout_fraction), self._config.train.negatives
        with RowWriter(self.folder, self._inputs.tokenizer.vocabulary, ["train.arrow"], negatives) as writer:
            for first, last in groups(self._source.per_slice, held, SLICES):
                if not (selection.new + selection.replay)[first:last].any():
                    continue
                group = selection.choose(self._source.read(first, last))
                rows = np.stack((group.shard, group.file, group.row))
                # Where keys are of queries or groups, documents are in both parts anyway.
                within = (held, self._held_keys) if self._config.data.holdout_by == "document" else (0, self._held_keys[:0])
                for table, places in read_rows(
                    self._shards,
                    rows,
                    self._inputs.tokenizer,
                    list(OWN),
                    replace(self._lengths, candidate=self._lengths.document),
                    negatives=negatives,
                    held=within,
                ):
                    kept = ~np.isin(table["key"].to_numpy() // np.uint64(SLICES), self._held_keys)
                    table, places = table.filter(pa.array(kept)), places[kept]
                    new, shards = ~group.seen[places], group.shard[places]
                    self.new.update(shards[new].tolist())
                    self.replayed.update(shards[~new].tolist())
                    classes = class_numbers(table, shards, self._shards, self._config.train.classes)
                    table = without_documents(table.append_column("class", pa.array(classes)), classes != NO_CLASS)
                    numbers = [self.numbers.setdefault(number, len(self.numbers)) for number in shards.tolist()]
                    table = table.append_column("new", pa.array(new)).append_column("shard", pa.array(numbers, pa.int32()))
                    writer.add("train.arrow", table)
                    self._beat("writing training rows", writer.rows["train.arrow"])
        self.rows |= writer.rows
        lengths, count = PairLengths(self.folder / "train.arrow"), self.rows["train.arrow"]
        counts = write_steps(self.folder, count, self._config, ranks)
        self.rows[ORDER] = counts.steps
        return counts, sum(int(piece[:, 1].sum()) for piece in lengths) / count


def read_rows(
    shards: Sequence[IngestedShard],
    rows: Numbers,
    tokenizer: TokenizerPlan,
    columns: Sequence[str],
    lengths: Lengths,
    *,
    texts: bool = False,
    negatives: int = 0,
    held: tuple[int, Hashes] = (0, np.empty(0, np.uint64)),
) -> Iterator[tuple[pa.Table, Numbers]]:
    """Yield rows of ingested shards some thousand at a time, without those that have no tokens.

    Args:
        rows: numbers of shard and file, and the row in the file: (3, rows), in this order.
        columns: of tokens.
        lengths: of theirs.
        texts: whether to read the texts, too.
        negatives: of a row, at most.
        held: slices and keys, see `negative_columns`.

    Returns:
        Tables of facts and tokens, perhaps with `texts`; and the place of each row among the given ones.
    """

    def read(piece: tuple[int, int, Numbers, Numbers]) -> tuple[pa.Table, Numbers]:
        number, file, wanted, places = piece
        shard, (first, last) = shards[number], (int(wanted[0]), int(wanted[-1]) + 1)
        own = pa.array(wanted - first)
        # A piece is one request of each file.
        [table] = (facts.take(own) for facts in shard.facts(file, first, last))
        [tokens] = (found.take(own) for found in shard.tokens(file, first, last))
        for name in columns:
            table = table.append_column(name, cut(tokens[name].combine_chunks(), lengths.of_column(name, table), tokenizer))
        if negatives:
            lists = [tokens["negative_tokens"].combine_chunks(), table["negative_hashes"].combine_chunks()]
            if shard.mined_profile:
                [mined] = (found.take(own) for found in shard.mined(file, first, last))
                lists = [joined(each, more.combine_chunks()) for each, more in zip(lists, mined.columns, strict=True)]
            found = negative_columns(
                lists[0], lists[1], table["document_hash"].to_numpy(), negatives, lengths.candidate, tokenizer, *held
            )
            for name, column in found.items():
                table = table.append_column(name, column)
        if texts:
            [found] = (found.take(own) for found in shard.texts(file, first, last))
            table = table.append_column("texts", found["texts"])
        table = table.append_column("place", pa.array(places))
        table = _whole(table, columns)
        return table.drop_columns("place"), table["place"].to_numpy()

    return in_threads(read, list(pieces(*rows)))


def _whole(table: pa.Table, columns: Sequence[str]) -> pa.Table:
    """Return the rows without a null in some columns."""
    return table.filter(reduce(pc.and_, (pc.is_valid(table[name]) for name in columns)))


def _within(table: pa.Table, known: set[Query], most: int) -> Mask:
    """Return the rows that the hold-out keeps; add their queries to the known ones, of which there may be `most`.

    Until there are as many, rows of any query: those that have no relevant document yet may get one from a later row.
    """
    queries = list(zip(*(table[name].to_pylist() for name in ("query_hash", "locale", "task")), strict=True))
    for query, label in zip(queries, table["label"].to_pylist(), strict=True):
        if label > 0 and len(known) < most:
            known.add(query)
    return np.array([len(known) < most or query in known for query in queries], np.bool_)


def _positive_for(table: pa.Table, queries: set[tuple[int, str | None]]) -> Mask:
    """Return the rows whose document is relevant to one of these texts in their locales."""
    pairs = zip(table["query_hash"].to_pylist(), table["locale"].to_pylist(), strict=True)
    found: Mask = np.array([pair in queries for pair in pairs], np.bool_) & (table["label"].to_numpy() > 0)
    return found


def _documents(table: pa.Table, known: set[int]) -> pa.Table:
    """Return the first row of each document that is not known yet; add them to the known ones."""
    hashes = table["document_hash"].to_numpy()
    rows = [row for row in np.sort(np.unique(hashes, return_index=True)[1]).tolist() if int(hashes[row]) not in known]
    known.update(hashes[rows].tolist())
    return table.take(pa.array(rows, pa.int64()))


def _add(writers: dict[str, RowWriter], name: str, table: pa.Table) -> None:
    for prefix, writer in writers.items():
        if prefix:
            own = {theirs: ours for ours, theirs in OWN.items() if ours in table.column_names}
            table = table.drop_columns(list(own.values())).rename_columns(own)
        writer.add(name, table)
