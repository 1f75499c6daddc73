"""Inputs that are the same everywhere, and the error of a device's result against the known answer."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.backends.device import Device


def sequence(count: int, low: int, high: int, offset: int = 0) -> npt.NDArray[np.int64]:
    """Return `count` integers in [low, high) that look irregular and are the same everywhere: hashes of 0, 1, 2, ...

    A multiplicative hash, Knuth's multiplier 2654435761 modulo 2^32, of which the upper 16 bits are used; no random generator.
    """
    hashed = (np.arange(offset, offset + count, dtype=np.int64) * 2654435761) % (1 << 32)
    return low + (hashed >> 16) % (high - low)


def on_device(device: Device, integers: npt.NDArray[np.int64], dtype: torch.dtype = torch.float32, shift: int = 0) -> Tensor:
    """Put integers / 2^shift on the device, as data: a rank's number within a graph would give every rank a graph of its own."""
    return (torch.from_numpy(integers).to(torch.float32) / (1 << shift)).to(dtype).to(device.torch_device)


def largest_error(device: Device, found: Tensor, expected: npt.NDArray[np.float64], *, relative_to: str = "largest") -> float:
    """Return the largest error of the device's result, as a share of the largest expected entry, or of each; NaN if it has one.

    Args:
        relative_to: `largest` or `each`.
    """
    values = np.asarray(device.read(found.to(torch.float32)), dtype=np.float64).reshape(expected.shape)
    scale = np.abs(expected).max() if relative_to == "largest" else np.abs(expected)
    return float(np.max(np.abs(values - expected) / scale))
