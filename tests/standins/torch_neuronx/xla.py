"""What torch-neuronx does to torch-xla, which calls `init` while it is loaded: here the CPU computes in the NeuronCore's place.

Documents of AWS Neuron SDK 2.29.1: neuron-caching.rst, torch-neuron-envvars.rst, "PyTorch NeuronX neuron_parallel_compile CLI". A
graph that is met for the first time is looked for in the persistent cache (NEURON_COMPILE_CACHE_URL) by its own key and the
flags'; one that is not there is compiled and stored. In graph extraction mode (NEURON_EXTRACT_GRAPHS_ONLY=1) only its HLO is
written, and an empty stub with zero outputs runs in its place: what a graph computes reads as zero, and a tensor that only went
to the device and back reads as it was sent. The HLO modules are those that XLA's CPU client compiled.

The ranks of a torchrun form a world as Neuron's client sees it (torch_xla/_internal/neuron.py, NEURON_PJRT_WORLD_SIZE), in graph
extraction mode only: its collectives have the right shapes and meet no other process, because nothing computes.

A program whose graphs do not fit the device fails when the first of them is loaded.

Variables: STANDIN_TOOL, see neuron_parallel_compile: where it has no trial, ranks of a trial end at once, because several cannot
meet here; its `load` is what the runtime says of the first graph that is loaded. STANDIN_RECORDS, a folder to which every process
writes its environment as it came; STANDIN_HOST, the folder that is in the place of / for the checks at the start of training.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import _XLAC
import torch

VERSION = "neuronxcc-2.24.8799.0+6f62ff7c"
WRAPPER_FLAGS = ("--retry_failed_compilation", "--cache_dir", "--no_cache", "--log_level")
"""The cache's own, which never reach the compiler (libneuronxla's neuron_cc_wrapper)."""


LOADING = "TRNPIPE_TRIAL_LOADS"
"""Set in the ranks of a trial with compiled graphs."""


def init() -> None:
    _record()
    plan = json.loads(os.environ.get("STANDIN_TOOL", "{}")) if LOADING in os.environ else {}
    if not plan.get("trial", True):
        os._exit(0)
    if "pipeline.health.quick" in sys.modules and "STANDIN_HOST" in os.environ:
        check = sys.modules["pipeline.health.quick"].quick_check
        check.__kwdefaults__["root"] = Path(os.environ["STANDIN_HOST"])
    os.environ["PJRT_DEVICE"] = "CPU"
    compiled = Path(tempfile.mkdtemp(prefix="standin-"))
    os.environ["XLA_PERSISTENT_CACHE_PATH"] = str(compiled)
    runtime = _Runtime(compiled)
    names = ("_xla_step_marker", "_xla_counter_value", "_xla_wait_device_ops", "_xla_get_cpu_tensors")
    for owner, name in (*((_XLAC, name) for name in names), (torch.Tensor, "cpu")):
        setattr(owner, name, runtime.storing_after(getattr(owner, name)))
    joined = "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ["WORLD_SIZE"]) > 1
    if os.environ.get("NEURON_EXTRACT_GRAPHS_ONLY") == "1":
        _run_stubs()
    elif joined:
        # Collectives without the other ranks give what no device would, so nothing that is read may be compared.
        _run_stubs(inputs=True)
    if joined:
        _join_world(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    if "load" in plan:
        _XLAC._xla_step_marker = partial(_refuse, plan["load"])


def _refuse(words: str, *_: Any, **__: Any) -> None:
    raise RuntimeError(words)


def _record() -> None:
    folder = os.environ.get("STANDIN_RECORDS")
    if folder:
        (Path(folder) / f"{os.getpid()}.json").write_text(json.dumps(dict(os.environ)))


def _run_stubs(*, inputs: bool = False) -> None:
    """Let every tensor that a graph puts out read as zero. A graph's outputs have numbers of their own, for good.

    Args:
        inputs: whatever the host sent to the device reads as zero as well.
    """
    cpu, tensors, sync = torch.Tensor.cpu, _XLAC._xla_get_cpu_tensors, _XLAC._xla_step_marker
    computed: set[int] = set()

    def execute(pending: Iterable[torch.Tensor]) -> None:
        on_device = [tensor for tensor in pending if tensor.device.type == "xla"]
        due = _XLAC._check_tensor_need_materialization(on_device)
        computed.update(_XLAC._xla_get_tensor_id(tensor) for tensor, is_due in zip(on_device, due, strict=True) if is_due)

    def stub(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(value) if inputs or _XLAC._xla_get_tensor_id(tensor) in computed else value

    def read(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "xla":
            return cpu(tensor)
        execute([tensor])
        return stub(tensor, cpu(tensor))

    def read_all(given: list[torch.Tensor]) -> list[torch.Tensor]:
        execute(given)
        return [stub(tensor, value) for tensor, value in zip(given, tensors(given), strict=True)]

    def step(*arguments: Any, **named: Any) -> None:
        known = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
        execute([*known, *(tensor.grad for tensor in known if tensor.is_leaf and tensor.grad is not None)])
        sync(*arguments, **named)

    torch.Tensor.cpu = read
    _XLAC._xla_get_cpu_tensors, _XLAC._xla_step_marker = read_all, step


def _join_world(rank: int, size: int) -> None:
    """Be one device of `size`, which torch-xla counts only after a rendezvous that says so (`xla://`)."""
    if os.environ.get("NEURON_EXTRACT_GRAPHS_ONLY") != "1" and LOADING not in os.environ:
        raise RuntimeError("processes on a CPU cannot meet: several ranks exist in trials only, whose numbers mean nothing")
    every = [f"CPU:{device}" for device in range(size)]
    _XLAC._xla_get_all_devices = lambda: every
    _XLAC._xla_get_default_device_ordinal = _XLAC._xla_get_process_index = lambda: rank
    _XLAC._xla_get_num_processes = lambda: size
    _XLAC._xla_all_reduce = lambda _, value, scale, *others: value * scale
    _XLAC._xla_all_reduce_inplace = lambda _, values, scale, *others: [value.mul_(scale) for value in values]
    _XLAC._xla_all_gather = lambda value, dim, count, *others: torch.cat([value] * count, dim)
    _XLAC._xla_reduce_scatter = lambda _, value, token, scale, dim, count, *others: (
        value.tensor_split(count, dim)[0] * scale,
        token,
    )


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
        from pipeline import store
        from pipeline.backends.hlo import module_of_executable

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
        if os.environ.get("NEURON_EXTRACT_GRAPHS_ONLY") == "1":
            print(
                f"INFO ||NEURON_CC_WRAPPER||: Extracting graphs ({place}/model.hlo_module.pb) for ahead-of-time parallel "
                "compilation. No compilation was done.",
                flush=True,
            )
        else:
            print(f"INFO ||NEURON_CC_WRAPPER||: Call compiler with cmd: neuronx-cc compile {place}", flush=True)
            store.write_bytes(f"{place}/model.neff", b"neff")
            store.write_bytes(f"{place}/model.done", b"")
