"""The section `train` of the run configuration: what training learns from, and how it computes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from pipeline.config.sections import Fraction, KeyRole, PositiveInt, RunId, Section, TaskName, normalized, refuse_if
from pipeline.packing import MICRO_BATCH_TOKENS, PAIR_TOKENS, BinShape, bins_of, largest_divisor

PositiveFloat = Annotated[float, Field(gt=0)]


class TaskConfig(Section):
    """A task, by the name that its rows have in column `task`. With `classes` its texts are classified, else they are pairs."""

    classes: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=2)] | None = Field(
        None, description="Classes of its texts: the document of each row names one. None: rows are pairs."
    )
    class_weights: dict[str, PositiveFloat] = Field(
        default_factory=dict,
        description="Factors of texts' losses by class, 1 where there is none: {CLASS: FACTOR}. A step's loss is the weighted "
        "mean.",
    )
    weight: PositiveFloat = Field(1.0, description="Factor of the number of its steps.")
    query_length: Annotated[int | None, Field(ge=4)] = Field(
        None, description="Tokens at which its queries, or the texts that are classified, are cut. None: as `train.query_length`."
    )

    @model_validator(mode="after")
    def _each_class_once(self) -> TaskConfig:
        names = self.classes or ()
        refuse_if(len({normalized(name) for name in names}) < len(names), "a class is there twice")
        unknown = sorted({*self.class_weights} - {*names})
        refuse_if(unknown, f"class_weights: {', '.join(unknown)} is not in classes")
        return self


class MineConfig(Section):
    """Hard negatives: documents that the published model ranks high for a row's query and that no row calls relevant to it."""

    count: PositiveInt = Field(4, description="Negatives of a row, at most. Those that it names itself come first.")
    first: PositiveInt = Field(1, description="First rank among the documents that are not relevant.")
    last: Annotated[int, Field(ge=1, le=1000)] = Field(100, description="Last rank.")
    margin: Fraction = Field(
        0.05, description="A negative's score is at most that of the row's own document, less this share of it."
    )

    @model_validator(mode="after")
    def _ranks_in_order(self) -> MineConfig:
        refuse_if(self.last < self.first, f"first = {self.first} is behind last = {self.last}")
        return self


class TrainConfig(Section):
    """Training of the encoder: contrastive on pairs, and of a classifier for each task with classes."""

    steps: Annotated[PositiveInt | None, KeyRole.BOOKKEEPING, KeyRole.RESUMABLE] = Field(
        None, description="Optimizer steps; None: `epochs` over the run's rows."
    )
    epochs: Annotated[PositiveInt, KeyRole.BOOKKEEPING, KeyRole.RESUMABLE] = Field(
        1, description="Passes over the run's training rows, unless `steps` is set."
    )
    batch_size: Annotated[PositiveInt, KeyRole.BOOKKEEPING, KeyRole.GRAPH, KeyRole.RESUMABLE, KeyRole.TUNABLE] = Field(
        128,
        description="Pairs per rank whose documents compete, at most: as many as their tokens leave room for.",
    )
    batch_tokens: Annotated[PositiveInt | None, KeyRole.BOOKKEEPING, KeyRole.GRAPH, KeyRole.RESUMABLE, KeyRole.TUNABLE] = Field(
        None, description=f"Tokens per rank of a batch's packed rows. None: {PAIR_TOKENS} x batch_size x (1 + negatives)."
    )
    negatives: Annotated[int, Field(ge=0, le=64), KeyRole.LEARNED, KeyRole.GRAPH] = Field(
        0, description="Negatives of a row, the first ones, that compete for the queries of its batch, too."
    )
    mine: Annotated[MineConfig | None, KeyRole.LEARNED] = Field(
        None, description="Negatives that are mined for new rows among the published documents; null: none. Needs `negatives`."
    )
    symmetric: Annotated[bool, KeyRole.LEARNED, KeyRole.GRAPH] = Field(
        False, description="Also let the batch's queries compete for each document: the mean of both losses."
    )
    batch_by: Annotated[Literal["any", "task", "locale"], KeyRole.LEARNED] = Field(
        "any",
        description="Which pairs share a step, and compete: any; those of one task; or those of one task and locale.",
    )
    sampling_temperature: Annotated[float, KeyRole.LEARNED] = Field(
        1.0,
        ge=1,
        description="With batch_by: steps of each task, or task and locale, in the ratio of rows ** (1 / this). 1: every pair "
        "comes once an epoch; the larger, the more alike are their numbers of steps.",
    )
    tasks: Annotated[dict[TaskName, TaskConfig], KeyRole.LEARNED] = Field(
        default_factory=dict,
        description="Tasks with classes, or with another number of steps than their rows would bring: {TASK: SECTION}. Needs a "
        "batch_by other than any.",
    )
    accumulation: Annotated[PositiveInt, KeyRole.LEARNED, KeyRole.GRAPH, KeyRole.RESUMABLE, KeyRole.TUNABLE] = Field(
        1, description="Batches whose gradients are added up before an optimizer step: a larger batch in the same memory."
    )
    micro_batches: Annotated[PositiveInt | None, KeyRole.BOOKKEEPING, KeyRole.GRAPH, KeyRole.RESUMABLE, KeyRole.TUNABLE] = Field(
        None,
        description="Equal pieces of a batch, a divisor of batch_size, that pass through the encoder one at a time: less memory, "
        f"the same loss, two forward passes. None: as few as have {MICRO_BATCH_TOKENS} tokens; cpu and cuda take all at once.",
    )
    activation_checkpointing: Annotated[bool, KeyRole.BOOKKEEPING, KeyRole.GRAPH, KeyRole.RESUMABLE, KeyRole.TUNABLE] = Field(
        False, description="Compute each layer's activations again in the backward pass instead of keeping them."
    )
    shard_optimizer: Annotated[Literal["auto"] | bool, KeyRole.BOOKKEEPING, KeyRole.GRAPH, KeyRole.RESUMABLE] = Field(
        "auto",
        description="Each rank keeps one share of the optimizer's state instead of all of it, and ranks gather the weights after "
        "each step. auto: where 16 bytes per parameter exceed a quarter of a device's memory (neuron, cuda).",
    )
    bf16_weights: Annotated[bool, KeyRole.LEARNED, KeyRole.GRAPH] = Field(
        False, description="Keep weights and gradients in bf16, and fp32 weights, which AdamW updates, only in the ranks' shares."
    )
    freeze_word_embeddings: Annotated[bool, KeyRole.LEARNED, KeyRole.GRAPH] = Field(
        False, description="Leave the word embeddings as they are: no gradient, no optimizer state. For large vocabularies."
    )
    query_length: Annotated[int, Field(ge=4), KeyRole.LEARNED, KeyRole.GRAPH] = Field(
        32, description="Tokens at which queries are cut."
    )
    length: Annotated[int, Field(ge=4), KeyRole.LEARNED, KeyRole.GRAPH] = Field(
        256, description="Tokens of a packed row, and those at which documents are cut."
    )
    learning_rate: Annotated[float, KeyRole.LEARNED] = Field(2e-5, gt=0, description="Peak learning rate of AdamW.")
    schedule: Annotated[Literal["cosine", "linear", "constant"], KeyRole.LEARNED] = Field(
        "cosine", description="After the warmup."
    )
    warmup_fraction: Annotated[Fraction, KeyRole.LEARNED] = Field(
        0.1, description="Share of the steps in which the learning rate rises linearly to its peak."
    )
    final_lr_fraction: Annotated[Fraction, KeyRole.LEARNED] = Field(0.0, description="The last rate, as a share of the peak.")
    weight_decay: Annotated[float, KeyRole.LEARNED, KeyRole.GRAPH] = Field(0.01, ge=0, description="Decoupled weight decay.")
    beta1: Annotated[float, KeyRole.LEARNED, KeyRole.GRAPH] = Field(
        0.9, ge=0, lt=1, description="AdamW's decay rate of the first moment."
    )
    beta2: Annotated[float, KeyRole.LEARNED, KeyRole.GRAPH] = Field(
        0.999, ge=0, lt=1, description="AdamW's decay rate of the second moment."
    )
    continue_optimizer: Annotated[bool, KeyRole.LEARNED] = Field(
        False, description="Begin with AdamW's state at the end of the parent's run, from its last checkpoint, not without any."
    )
    epsilon: Annotated[float, KeyRole.LEARNED, KeyRole.GRAPH] = Field(1e-8, gt=0, description="AdamW's epsilon.")
    clip_norm: Annotated[float | None, KeyRole.LEARNED, KeyRole.GRAPH] = Field(
        1.0, gt=0, description="Largest norm of the gradient of a step; None: no clipping."
    )
    dimensions: Annotated[tuple[PositiveInt, ...], KeyRole.LEARNED, KeyRole.GRAPH] = Field(
        (),
        description="Matryoshka sizes: train the first so many numbers of an embedding to be one, too. The loss is the sum over "
        "these sizes and the full one, each with weight 1.",
    )
    temperature: Annotated[float, KeyRole.LEARNED, KeyRole.GRAPH] = Field(
        0.05, gt=0, description="Divisor of the similarities in the contrastive loss."
    )
    dropout: Annotated[Annotated[float, Field(ge=0.0, lt=1.0)] | None, KeyRole.LEARNED, KeyRole.GRAPH] = Field(
        None, description="Dropout of hidden states in training; None: the model's own. Attention probabilities have none."
    )
    resume: Annotated[RunId | None, KeyRole.LEARNED, KeyRole.RESUMABLE] = Field(
        None, description="Id of a run whose training this run resumes, on other nodes or ranks. None: begin with the parent."
    )
    log_every: Annotated[PositiveInt, KeyRole.BOOKKEEPING, KeyRole.GRAPH, KeyRole.RESUMABLE] = Field(
        10, description="Steps between two lines of training metrics."
    )
    validate_every: Annotated[PositiveInt, KeyRole.LEARNED, KeyRole.RESUMABLE] = Field(
        100, description="Steps between two evaluations on hold-out queries."
    )
    validation_queries: Annotated[PositiveInt, KeyRole.LEARNED, KeyRole.RESUMABLE] = Field(
        512, description="Hold-out queries of the evaluation inside training."
    )
    checkpoint_every: Annotated[PositiveInt, KeyRole.BOOKKEEPING, KeyRole.RESUMABLE] = Field(
        200, description="Steps between two checkpoints."
    )
    keep_checkpoints: Annotated[PositiveInt, KeyRole.BOOKKEEPING, KeyRole.RESUMABLE] = Field(
        3, description="Newest checkpoints to keep; training removes older ones, except those of keep_every and keep_best."
    )
    keep_every: Annotated[PositiveInt | None, KeyRole.BOOKKEEPING, KeyRole.RESUMABLE] = Field(
        None, description="Also keep the checkpoints of steps that are multiples of this; None: no others."
    )
    keep_best: Annotated[bool, KeyRole.BOOKKEEPING, KeyRole.RESUMABLE] = Field(
        True, description="Also keep the checkpoint with the best validation of gate.metric (macro-f1: of accuracy)."
    )

    @model_validator(mode="after")
    def _fits_together(self) -> TrainConfig:
        refuse_if(self.mine and not self.negatives, "mine finds negatives, and negatives = 0 trains on none: set negatives")
        refuse_if(
            self.batch_by == "any" and (self.sampling_temperature != 1 or self.tasks),
            "sampling_temperature and tasks are about steps of one task, and batch_by = any mixes tasks: set batch_by to task or "
            "locale",
        )
        return self

    @model_validator(mode="after")
    def _whole_micro_batches(self) -> TrainConfig:
        count = self.micro_batches or 1
        refuse_if(
            self.batch_size % count,
            f"micro_batches = {count} does not divide batch_size = {self.batch_size}, but all micro-batches "
            f"have the same size: set micro_batches = {largest_divisor(self.batch_size, count)}, or leave it out",
        )
        return self

    @field_validator("dimensions")
    @classmethod
    def _each_size_once(cls, dimensions: tuple[int, ...]) -> tuple[int, ...]:
        refuse_if(len({*dimensions}) < len(dimensions), "a size stands there twice: its loss would count twice")
        return tuple(sorted(dimensions, reverse=True))  # the graph does not depend on the order in which they are written

    @property
    def classes(self) -> dict[str, tuple[str, ...]]:
        """The classes of each task that has any, in the order of the tasks' names."""
        return {name: task.classes for name, task in sorted(self.tasks.items()) if task.classes}

    @property
    def longest_query(self) -> int:
        """Tokens of a query of any task, at most."""
        return max([self.query_length, *(task.query_length or 0 for task in self.tasks.values())])

    @property
    def bins(self) -> int:
        """Micro-batches into which a rank's batch is packed, also where they are computed at once."""
        return self._packed[0]

    @property
    def bin_shape(self) -> BinShape:
        """The shape of each."""
        return self._packed[1]

    @property
    def _packed(self) -> tuple[int, BinShape]:
        documents = 1 + self.negatives
        tokens = self.batch_tokens or PAIR_TOKENS * documents * self.batch_size
        return bins_of(self.batch_size, tokens, self.length, self.micro_batches, documents)
