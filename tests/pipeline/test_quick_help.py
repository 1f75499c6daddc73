"""Help without what it never shows: the same text, and the real classes for everybody else."""

from __future__ import annotations

import subprocess
import sys

UNUSED = ("rich.markdown", "rich.syntax", "rich.traceback", "pygments", "markdown_it")
HELP = """
import sys
from pipeline import cli, quick_help
if {theirs}:
    quick_help.install = lambda: None
sys.argv[1:] = ["local", "--help"]
try:
    cli.main()
finally:
    sys.stderr.write(" ".join(sorted({unused!r} & sys.modules.keys())))
"""


def python(program: str) -> tuple[str, str]:
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    return result.stdout, result.stderr


def test_help_is_typer_s_own_and_loads_less() -> None:
    theirs, loaded = python(HELP.format(theirs=True, unused=set(UNUSED)))
    assert loaded.split() == sorted(UNUSED)
    ours, loaded = python(HELP.format(theirs=False, unused=set(UNUSED)))
    assert loaded == ""
    assert ours == theirs


def test_the_real_classes_are_there_for_who_asks() -> None:
    program = """
from pipeline import quick_help
quick_help.install()
from typer import rich_utils
given = rich_utils.Markdown("*word*")
from rich.markdown import Markdown
from rich.traceback import Traceback
print(isinstance(given, Markdown), Traceback.from_exception is not None)
"""
    assert python(program)[0].split() == ["True", "True"]
