"""What stands for `trnpipe` in the jobs of an orchestration run: the real command line and supervisor, whose ranks are light."""

from __future__ import annotations

from pipeline.cli import main
from pipeline.host.launch import RankLaunch

real_program = RankLaunch.program


def program(launch: RankLaunch) -> list[str]:
    """The same arguments for another module."""
    return ["tests.chain.light.rank", *real_program(launch)[1:]]


RankLaunch.program = program  # type: ignore[method-assign]

if __name__ == "__main__":
    main()
