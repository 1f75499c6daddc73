"""The state of training in host memory: copied there for a checkpoint, written to its files, and put back from them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pipeline.backends.device import Device
from pipeline.model.encoder import Encoder
from pipeline.model.folder import save_folder
from pipeline.training.optimizer import AdamW

OPTIMIZER_FILE = "optimizer.safetensors"
RANDOM_FILE = "random.safetensors"

Tensors = dict[str, Tensor]


def host_weights(encoder: nn.Module, optimizer: AdamW, device: Device) -> Tensors:
    """Copy an encoder's state to the host, in fp32; the other ranks call `optimizer.masters` meanwhile."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in encoder.named_parameters()}
    return device.to_host(encoder.state_dict()) | {names[one]: value for one, value in optimizer.masters().items()}


def host_state(encoder: nn.Module, optimizer: AdamW, device: Device) -> tuple[Tensors, Tensors]:
    """Copy a model in training to the host. Where the optimizer is sharded, the other ranks call its `masters` and
    `host_state` meanwhile.

    Returns:
        The encoder's state, and the optimizer's tensors as `NAME/KIND`, e.g. `head.inner.weight/exp_avg`.
    """
    names: dict[Tensor, str] = {parameter: name for name, parameter in encoder.named_parameters()}
    weights, state = host_weights(encoder, optimizer, device), optimizer.host_state()
    moments = {f"{names[one]}/{kind}": value.contiguous() for one, kinds in state.items() for kind, value in kinds.items()}
    return weights, moments


def checkpoint_files(encoder: Encoder, optimizer: AdamW, device: Device, model_source: Path) -> Callable[[Path], None]:
    """Copy everything to the host now; the function that is returned writes it to files, at any later time and in any thread.

    Args:
        model_source: a model folder with the tokenizer.
    """
    weights, moments = host_state(encoder, optimizer, device)
    drawn = random_states(device)

    def write(folder: Path) -> None:
        save_folder(encoder, folder, model_source, weights)
        save_file(moments, folder / OPTIMIZER_FILE)
        save_file(drawn, folder / RANDOM_FILE)

    return write


def load_optimizer(model: nn.Module, optimizer: AdamW, path: Path, *, of_another_run: bool = False) -> bool:
    """Put the optimizer's tensors back. Hyper-parameters are the configuration's, not the checkpoint's.

    Args:
        of_another_run: whose model may have lacked parameters; then nothing is put back.

    Returns:
        Whether it was.
    """
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    with safe_open(path, framework="pt") as file:
        if whole := not of_another_run or {f"{name}/step" for name in names.values()} <= {*file.keys()}:
            optimizer.load(lambda parameter, kind: file.get_tensor(f"{names[parameter]}/{kind}"))
    return whole


def random_states(device: Device) -> dict[str, Tensor]:
    """Return the states of Python's, NumPy's, torch's and the device's random numbers, as tensors: nothing to unpickle.

    Dropout is seeded anew in every step (pipeline/training/step) and batches follow from the step alone, so these decide nothing
    in our own code; they are kept for a model's code that draws by itself.
    """
    _, numbers, gauss = random.getstate()
    _, key, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": torch.tensor(numbers, dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(np.asarray(key, dtype=np.int64)),
        "numpy_position": torch.tensor([position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
        "device": device.random_state(),
    }


def restore_random_states(device: Device, path: Path) -> None:
    """Put back what `random_states` gave, from the file that a checkpoint holds."""
    states = load_file(path)
    gauss = states["python_gauss"].tolist()
    random.setstate((3, tuple(states["python"].tolist()), gauss[0] if gauss else None))
    position, has_gauss = states["numpy_position"].tolist()
    np.random.set_state(("MT19937", states["numpy"].numpy().astype(np.uint32), position, has_gauss, states["numpy_gauss"].item()))
    torch.set_rng_state(states["torch"])
    device.restore_random_state(states["device"])
