"""The `xla` kind: torch-xla on host cores, one rank. The same lazy tensors and graphs as on an accelerator, really compiled.

XLA's CPU client compiles every graph into native code for all cores. It cannot load a compiled graph back, so every process
compiles its own; what it does leave is one file per graph, named by the graph's key (tried with torch-xla 2.9), from which the
graphs that a process met can be told.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path

os.environ["PJRT_DEVICE"] = "CPU"
# Barriers stay until the last passes, see pipeline.backends.xla_layers. Flags given from outside come later, and win.
os.environ["XLA_FLAGS"] = f"--xla_disable_hlo_passes=cse_barrier_expander {os.environ.get('XLA_FLAGS', '')}".strip()

import torch_xla.runtime as xr

from pipeline.backends.device import ModuleT, require_world, resolve_precision
from pipeline.backends.hlo import module_of_executable
from pipeline.backends.lazy import LazyDevice
from pipeline.backends.xla_layers import adapt
from pipeline.config import LoaderConfig
from pipeline.run.context import NODE_FOLDER
from pipeline.run.world import World


@lru_cache
def _executables() -> Path:
    """Return the folder in which XLA leaves one file per graph; a process can choose it only once."""
    # In the node folder the supervisor removes it; a rank ends without cleaning up.
    folder = Path(tempfile.mkdtemp(prefix="trnpipe-graphs-", dir=os.environ.get(NODE_FOLDER)))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    xr.initialize_cache(str(folder))
    return folder


class XlaDevice(LazyDevice):
    kind = "xla"

    def place(self, module: ModuleT) -> ModuleT:
        adapt(module, self.precision)
        return super().place(module)

    def graphs(self) -> set[str]:
        return {path.name for path in _executables().iterdir()}

    def graph_module(self, key: str) -> bytes | None:
        return module_of_executable((_executables() / key).read_bytes())


def open_device(
    precision: str,
    world: World,
    *,
    timeout_seconds: int,  # noqa: ARG001 - one rank waits for no other
    loader: LoaderConfig,
) -> XlaDevice:
    """Start XLA's CPU client. It uses all cores that the process may run on; torch's threads only do the host's own work.

    Raises:
        BadConfig: more than one rank.
    """
    require_world("xla", world.size)
    _executables()
    return XlaDevice(resolve_precision("xla", precision), world, loader)
