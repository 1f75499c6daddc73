"""The state of a training run besides weights and optimizer: progress and measurements. Stored in checkpoints as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.contract import Record


@dataclass(kw_only=True)
class Counts(Record):
    """Sums over steps.

    Attributes:
        pairs: valid pairs trained on, over all ranks.
        tokens, slots: tokens trained on, and with padding.
        seconds: time spent training, without validation, checkpoints and start.
        stalled: seconds that training waited for checkpoints.
    """

    pairs: int = 0
    tokens: int = 0
    slots: int = 0
    seconds: float = 0.0
    stalled: float = 0.0


@dataclass(kw_only=True)
class MetricsWindow(Counts):
    """Sums since the last line of metrics.

    Attributes:
        losses, norms: of each step.
        waited: seconds among those spent training in which this rank had no data.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    waited: float = 0.0


@dataclass(kw_only=True)
class Progress(Counts):
    """The progress of a run. Data position and dropout follow from `step` alone.

    Attributes:
        step: optimizer steps done.
        checkpoints: checkpoints written.
        first_validation, last_validation: metrics before the first step, and the newest.
        loss: mean of the newest line of metrics.
        data_digest: of all batches so far (pipeline/training/digest).
        window: what has happened since that line.
    """

    step: int = 0
    checkpoints: int = 0
    first_validation: dict[str, float] = field(default_factory=dict)
    last_validation: dict[str, float] = field(default_factory=dict)
    loss: float | None = None
    data_digest: str = ""
    window: MetricsWindow = field(default_factory=MetricsWindow)
