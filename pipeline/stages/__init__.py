"""The stages of a run, by name. A stage never imports another; they meet only through the files that the contract names."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from pipeline.contract import Stage
from pipeline.run.context import StageContext, StageOutput

StageFunction = Callable[[StageContext], StageOutput | None]


def stage_function(stage: Stage) -> StageFunction:
    """The `run` function of a stage; its module, with whatever framework it needs, is loaded only now."""
    return import_module(f"pipeline.stages.{stage.value}").run  # type: ignore[no-any-return]
