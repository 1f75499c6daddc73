"""Inputs that are the same everywhere, and how far what a device makes of them is from the known answer."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.backends.device import Device


def sequence(count: int, low: int, high: int, offset: int = 0) -> npt.NDArray[np.int64]:
    """`count` integers in [low, high) that look irregular and are the same everywhere: a multiplicative hash of 0, 1, 2, ...

    Knuth's multiplier 2654435761 modulo 2^32, of which the upper 16 bits are used; no random generator is involved.
    """
    hashed = (np.arange(offset, offset + count, dtype=np.int64) * 2654435761) % (1 << 32)
    return low + (hashed >> 16) % (high - low)


def on_device(device: Device, integers: npt.NDArray[np.int64], dtype: torch.dtype, shift: int = 0) -> Tensor:
    """integers / 2^shift on the device; they go there as data, so that no graph depends on them."""
    return (torch.from_numpy(integers).to(torch.float32) / (1 << shift)).to(dtype).to(device.torch_device)


def largest_error(device: Device, found: Tensor, expected: npt.NDArray[np.float64], *, relative_to: str = "largest") -> float:
    """Largest error of what the device found, as a share of the largest expected entry, or of each; NaN if it found any.

    Args:
        relative_to: `largest` or `each`.
    """
    values = np.asarray(device.read(found.to(torch.float32)), dtype=np.float64).reshape(expected.shape)
    scale = np.abs(expected).max() if relative_to == "largest" else np.abs(expected)
    return float(np.max(np.abs(values - expected) / scale))
