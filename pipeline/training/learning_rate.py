"""The learning rate of every step: a linear rise, then cosine, linear or constant."""

from __future__ import annotations

import math

from pipeline.config import TrainConfig


def learning_rate(config: TrainConfig, step: int, steps: int, warmup_steps: int) -> float:
    """Learning rate of one optimizer step.

    Args:
        config: peak, shape and final fraction of the peak.
        step: from 0.
        steps: of the whole run. A schedule that falls reaches its final fraction right after the last one.
        warmup_steps: steps of the rise; the peak is reached with the last of them.
    """
    if step < warmup_steps:
        return config.learning_rate * (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, steps - warmup_steps)
    shape = {"cosine": 0.5 * (1.0 + math.cos(math.pi * done)), "linear": 1.0 - done, "constant": 1.0}[config.schedule]
    final = 1.0 if config.schedule == "constant" else config.final_lr_fraction
    return config.learning_rate * (final + (1.0 - final) * shape)
