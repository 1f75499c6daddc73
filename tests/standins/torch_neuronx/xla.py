"""What torch-neuronx does to torch-xla, which calls `init` while it is loaded: here the CPU computes in the NeuronCore's place.

Documents: neuron-caching.rst and "PyTorch NeuronX neuron_parallel_compile CLI" of AWS Neuron SDK 2.29.1. A graph that is met for
the first time is looked for in the persistent cache (NEURON_COMPILE_CACHE_URL) by its own key and the flags'; one that is not
there is compiled and stored. In graph extraction mode (NEURON_EXTRACT_GRAPHS_ONLY=1) only its HLO is written, and every value
that the program reads is zero. The HLO modules are those that XLA's CPU client compiled.

Variables: STANDIN_RECORDS, a folder to which every process writes its environment as it came; STANDIN_HOST, the folder that is
in the place of / for the checks at the start of training.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _XLAC
import torch

VERSION = "neuronxcc-2.24.8799.0+6f62ff7c"
WRAPPER_FLAGS = ("--retry_failed_compilation", "--cache_dir", "--no_cache", "--log_level")
"""The cache's own, which never reach the compiler (libneuronxla's neuron_cc_wrapper)."""


def init() -> None:
    _record()
    if "pipeline.runtime.health.quick" in sys.modules and "STANDIN_HOST" in os.environ:
        check = sys.modules["pipeline.runtime.health.quick"].quick_check
        check.__kwdefaults__["root"] = Path(os.environ["STANDIN_HOST"])
    os.environ["PJRT_DEVICE"] = "CPU"
    compiled = Path(tempfile.mkdtemp(prefix="standin-"))
    os.environ["XLA_PERSISTENT_CACHE_PATH"] = str(compiled)
    runtime = _Runtime(compiled)
    for name in ("_xla_step_marker", "_xla_counter_value", "_xla_wait_device_ops", "_xla_get_cpu_tensors"):
        setattr(_XLAC, name, runtime.storing_after(getattr(_XLAC, name)))
    if os.environ.get("NEURON_EXTRACT_GRAPHS_ONLY") == "1":
        _read_zeros()


def _record() -> None:
    folder = os.environ.get("STANDIN_RECORDS")
    if folder:
        (Path(folder) / f"{os.getpid()}.json").write_text(json.dumps(dict(os.environ)))


def _read_zeros() -> None:
    cpu, tensors = torch.Tensor.cpu, _XLAC._xla_get_cpu_tensors
    torch.Tensor.cpu = lambda self: torch.zeros_like(cpu(self)) if self.device.type == "xla" else cpu(self)
    _XLAC._xla_get_cpu_tensors = lambda *given: [torch.zeros_like(tensor) for tensor in tensors(*given)]


class _Runtime:
    """Brings every graph that XLA has compiled into the persistent cache.

    Args:
        compiled: where XLA's CPU client leaves one file per graph, named by its key.
    """

    def __init__(self, compiled: Path) -> None:
        self._compiled = compiled
        self._seen: set[str] = set()

    def storing_after(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            result = function(*arguments, **named)
            for path in sorted(self._compiled.iterdir()):
                if path.name not in self._seen:
                    self._seen.add(path.name)
                    self._store(path)
            return result

        return call

    def _store(self, path: Path) -> None:
        from pipeline.runtime import store
        from pipeline.runtime.hlo import module_of_executable

        flags = [flag for flag in os.environ.get("NEURON_CC_FLAGS", "").split() if not flag.startswith(WRAPPER_FLAGS)]
        digest = hashlib.sha256(" ".join(flags).encode()).hexdigest()[:8]
        place = f"{os.environ['NEURON_COMPILE_CACHE_URL']}/{VERSION}/MODULE_{path.name}+{digest}"
        if store.exists(f"{place}/model.done"):
            print(f"INFO ||NEURON_CC_WRAPPER||: Using a cached neff at {place}/model.neff", flush=True)
            return
        module = module_of_executable(path.read_bytes())
        assert module is not None
        store.write_bytes(f"{place}/model.hlo_module.pb", module)
        store.write_json(f"{place}/compile_flags.json", flags)
        if os.environ.get("NEURON_EXTRACT_GRAPHS_ONLY") != "1":
            print(f"INFO ||NEURON_CC_WRAPPER||: Call compiler with cmd: neuronx-cc compile {place}", flush=True)
            store.write_bytes(f"{place}/model.neff", b"neff")
            store.write_bytes(f"{place}/model.done", b"")
