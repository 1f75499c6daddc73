"""`prepare/inputs.json`, what a run begins with, and what else prepare writes for ingest and plan. Each is written once."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from pydantic import Field, ValidationError

from pipeline.config import RunConfig
from pipeline.config.sections import Section
from pipeline.contract import EAGER_KINDS
from pipeline.errors import BadData


class PlanSection(Section):
    def to_json(self) -> bytes:
        return self.model_dump_json(indent=1).encode()


FileT = TypeVar("FileT", bound="PlanFile")


class PlanFile(PlanSection):
    """A section that is a file of the run folder.

    Attributes:
        named: its name in messages, and the file's.
    """

    named: ClassVar[tuple[str, str]]

    @classmethod
    def from_json(cls: type[FileT], data: bytes) -> FileT:
        """Return what a file holds.

        Raises:
            BadData: it holds something else, or was written by another version of trnpipe.
        """
        what, name = cls.named
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            found = [f"{'.'.join(map(str, item['loc'])) or name}: {item['msg']}" for item in error.errors(include_input=False)]
            raise BadData(
                f"{what} cannot be read",
                value=found,
                rule="it is read by the version of trnpipe that wrote it, and never changed",
                remedy=f"restore {name} as it was written, or start a new run",
            ) from error


class InputShard(PlanSection):
    """One version of an input file in one use, and the names of what ingest makes of it (pipeline/dataset/ingested).

    Attributes:
        uri: its URI.
        version: the ETag on S3, elsewhere a stamp of the last write; another version is another shard.
        size: in bytes.
        modified: seconds since 1970 of the last write. Of rows that contradict each other, those of the newest shard count.
        kind: `pairs` (training rows) or `documents` (what is embedded: corpus rows, or the documents of training rows).
        of_pairs: the file holds training rows; so without a corpus of its own the same file comes as both kinds.
        setting: the one whose columns it has, in `DataConfig.training`; `data.train` also for the corpus.
        generation: of documents; a later one replaces the documents of earlier ones. 0 in `data.corpus_mode: files`.
        rows, tokens, mined: names of the ingested rows, of their tokens, and of their mined negatives (empty without train.mine).
        deletions: digest of what `data.delete` names (pipeline/dataset/deletions): none of it may be in the ingested rows.
    """

    uri: str
    version: str
    size: int
    modified: float = 0.0
    kind: str
    of_pairs: bool = True
    setting: str = "data.train"
    generation: int = 0
    rows: str
    tokens: str
    mined: str = ""
    deletions: str = ""


class TokenizerPlan(PlanSection):
    """The tokenizer of the ingested tokens.

    Attributes:
        digest: of the tokenizer and its prompts.
        vocabulary: every token id is below this; decides the integer type.
        cap: tokens of a stored text at most, special ones included: as many as the model has positions for.
        prefix, suffix: special tokens before and behind a text, which a cut keeps.
        side: the end at which texts are cut, `right` or `left`.
    """

    digest: str
    vocabulary: int
    cap: int
    prefix: int
    suffix: int
    side: str = "right"


class Parent(PlanSection):
    """The model that the run continues from.

    Attributes:
        uri: as configured, or the registry's model.
        folder: a model folder that every stage can load (the URI itself, or a conversion under `prepare/parent`).
        sha256: of its weight file.
        run: the run of this bucket that made it, if any.
    """

    uri: str
    folder: str
    sha256: str
    run: str | None = None


class Published(PlanSection):
    """The model that the registry named when the run was planned: the gate's baseline, and the one that publish replaces.

    Attributes:
        run: the run that made it.
        folder: its model folder.
        sha256: of its weight file.
        embeddings: URI of the manifest of the published embeddings.
        epoch: of the registry's pointer (pipeline/run/registry); publish replaces this run's model in this epoch, and no other.
        own_tokens: whether its tokens differ from the parent's; `plan/rows/published` then has the hold-out in them.
        positions: tokens of its longest text, where its tokens are its own.
        same_graphs: whether the run's graphs fit it. Where they do not, evaluate encodes with it on the host's processor.
    """

    run: str
    folder: str
    sha256: str
    embeddings: str = ""
    epoch: int = 0
    own_tokens: bool = False
    positions: int = 0
    same_graphs: bool = True


class PlannedWorld(PlanSection):
    """The ranks of a run: nodes x ranks per node, their device type and precision."""

    kind: str
    precision: str
    nodes: int
    ranks_per_node: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


class MemoryPlan(PlanSection):
    """Estimated peak memory in bytes (pipeline/estimate/memory).

    Attributes:
        device: of a rank's device.
        host: of a node's host.
    """

    device: int
    host: int


class GraphsPlan(PlanSection):
    """The compiled sets that the run needs, and the compiler's flags.

    Attributes:
        train: fingerprint of the set that training uses; the number of ranks is in its graphs.
        infer: fingerprint of the set that evaluate and embed use; the same for any number of ranks.
        compiler_flags: NEURON_CC_FLAGS of training, empty on other device types.
        infer_compiler_flags: neuronx-cc's flags of evaluate's and embed's graphs.
        cache: URI of the compiler's persistent cache, empty on other device types.
        environment: variables of the process that change training's graphs, none on other device types.
    """

    train: str
    infer: str
    compiler_flags: str = ""
    infer_compiler_flags: str = ""
    cache: str = ""
    environment: dict[str, str] = Field({})


class EmbedModel(PlanSection):
    """A model that embeds: the run that made it, its folder, and the sha256 of its weights."""

    run: str
    folder: str
    sha256: str


class Corpus(PlanFile):
    """`prepare/corpus.json`: what is to be embedded. A run that trained lists the corpus again: days may have passed.

    Attributes:
        model: embeds it.
        listed: when, ISO 8601 in UTC.
        round: how often the run has listed it to embed it.
        shards, deletions: as in `RunInputs`.
        earlier: manifests of embeddings, perhaps of the same form; their unchanged documents are not embedded again.
    """

    named: ClassVar = ("the run's corpus", "prepare/corpus.json")

    model: EmbedModel
    listed: str
    round: int
    shards: tuple[InputShard, ...]
    deletions: str
    earlier: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of an encoder (pipeline/model/shape).

    Attributes:
        parameters: elements of all weights.
        largest: elements of the largest weight.
        words: elements of the word embeddings.
        multiplied: elements of the matrices that every token is multiplied with; autocast keeps a copy of them.
        layers, hidden, heads, intermediate: of the backbone.
        head: elements of the head's matrices, 0 without.
        dimension: of the embeddings.
        dropout: of hidden states, as the model is configured.
        fused: the library computes attention with torch's fused function where the device has it.
        gated: layers have a gated inner product and rotary positions (ModernBERT).
        stored_bytes: per element of the weight file.
    """

    parameters: int
    largest: int
    words: int
    multiplied: int
    layers: int
    hidden: int
    heads: int
    intermediate: int
    head: int
    dimension: int
    dropout: float
    fused: bool
    gated: bool
    stored_bytes: int

    def flops(self, length: int) -> float:
        """Floating-point operations of one forward pass over a text of `length` tokens, padding included.

        Two for each element of a matrix and token; in attention every token meets every other twice, as a score and as a value
        (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", appendix). Lookups are none.
        """
        attention = 2 * length * self.hidden * self.layers
        return 2.0 * (length * (self.multiplied + attention) + self.head)


class RunInputs(PlanFile):
    """`prepare/inputs.json`: what prepare decided, before any row was read. Written once; ingest and plan read it.

    Attributes:
        shards: the input files, sorted by kind and URI. What arrives later is the next run's.
        shape: of the model.
        tokenizer: of the parent, and so of the ingested tokens.
        lineage, identity: as in `RunPlan`.
        published_lineage: the runs whose rows the published model was trained on, where it is not the parent.
        deletions: as in `InputShard`.
        reference: the run that is the reference (pipeline/evaluation/reference), if there is one.
    """

    named: ClassVar = ("the run's inputs", "prepare/inputs.json")

    run: str
    created: str
    config: RunConfig
    parent: Parent
    published: Published | None = None
    world: PlannedWorld
    graphs: GraphsPlan | None = None
    memory: MemoryPlan | None = None
    shape: ModelShape
    tokenizer: TokenizerPlan
    shards: tuple[InputShard, ...]
    lineage: tuple[str, ...] = ()
    published_lineage: tuple[str, ...] = ()
    identity: dict[str, str]
    deletions: str = ""
    reference: str | None = None

    def shards_of(self, kind: str) -> tuple[InputShard, ...]:
        """Return the shards of one kind."""
        return tuple(shard for shard in self.shards if shard.kind == kind)

    def summary(self) -> dict[str, Any]:
        """Return the numbers for people (prepare's metrics)."""
        chosen = f"{self.world.kind} in {self.world.precision}"
        in_fp32 = self.world.kind in EAGER_KINDS and self.world.precision == "fp32" and self.config.device.precision == "auto"
        return {
            "nodes": self.world.nodes,
            "device": self.world.kind,
            "precision": self.world.precision,
            "computes": f"{chosen}: bf16 is no faster here" if in_fp32 else chosen,
            "ranks": self.world.ranks,
            "shards": len(self.shards),
            "device_gib": round(self.memory.device / (1 << 30), 2) if self.memory else None,
            "host_gib": round(self.memory.host / (1 << 30), 2) if self.memory else None,
        }


class MissingShards(PlanSection):
    """`prepare/missing.json`: what ingest and mine have to make. Every prepare of a run writes it anew.

    Attributes:
        shards: those that are not ingested.
        children: jobs that share the files.
        to_mine: shards for whose rows negatives are to be mined.
        mine_children: jobs that share them.
    """

    shards: tuple[InputShard, ...]
    children: int
    to_mine: tuple[InputShard, ...] = ()
    mine_children: int = 0


def digest_of(record: Any) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
