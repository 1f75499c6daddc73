"""Typer's help without the parts of rich that it loads and never shows: Markdown, highlighted code, tracebacks.

They are most of the time that `trnpipe --help` takes. Help here is written in rich's own markup (`rich_markup_mode="rich"`) and
tracebacks stay Python's (`pretty_exceptions_enable=False`), so that Typer's module for help gets by with stand-ins for the two
classes, which become the real ones should they be called after all.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

HELP = "typer.rich_utils"
UNUSED = {"rich.markdown": "Markdown", "rich.traceback": "Traceback"}
"""Module -> the class in it that HELP imports."""


def install() -> None:
    """From now on HELP is loaded so, if it is not loaded yet."""
    if HELP not in sys.modules:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != HELP:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Loads a module while stand-ins are where it finds UNUSED.

    Args:
        real: what loads it otherwise.
    """

    def __init__(self, real: Loader) -> None:
        self._real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        stand_ins = {name: _stand_in(name, wanted) for name, wanted in UNUSED.items() if name not in sys.modules}
        sys.modules.update(stand_ins)
        try:
            self._real.exec_module(module)
        finally:
            for name in stand_ins:
                del sys.modules[name]


def _stand_in(name: str, wanted: str) -> ModuleType:
    """A module with one class, whose making is the real one's."""

    def make(_class: type, *arguments: Any, **options: Any) -> Any:
        return getattr(import_module(name), wanted)(*arguments, **options)

    module = ModuleType(name)
    setattr(module, wanted, type(wanted, (), {"__new__": make}))
    return module
