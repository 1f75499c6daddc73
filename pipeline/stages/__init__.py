"""The stages of a run, by name. A stage never imports another; they meet only through the files that the contract names."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from pipeline.contract import COMPILED_APART, Stage
from pipeline.run.context import StageContext, StageOutput

StageFunction = Callable[[StageContext], StageOutput | None]


def stage_function(stage: Stage) -> StageFunction:
    """The `run` function of a stage; its module, with whatever framework it needs, is loaded only now."""
    # compile's module also has the two stages that do parts of its work elsewhere.
    module = Stage.COMPILE if stage in COMPILED_APART else stage
    return import_module(f"pipeline.stages.{module.value}").run  # type: ignore[no-any-return]
