"""A rank of an orchestration run: `python -m tests.chain.light.rank STAGE RUN_URI`, which computes nothing."""

from __future__ import annotations

import runpy

from tests.chain.light import mathematics, stages

if __name__ == "__main__":
    mathematics.install()
    stages.install()
    runpy.run_module("pipeline.stages.rank", run_name="__main__")
