"""Dtypes: whether autocast is on, what it gives to products, and the widest of a device."""

import torch
from torch import Tensor

# torch.amp.is_autocast_available knows them too, but torch.compile cannot trace it in every supported version.
WITH_AUTOCAST = ("cpu", "cuda", "mps", "xpu")


def is_autocast_on(device: torch.device) -> bool:
    return device.type in WITH_AUTOCAST and torch.is_autocast_enabled(device.type)


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype that a linear layer computes in: autocast's if it is on, else x's. Autocast does not touch float64."""
    if is_autocast_on(x.device) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def widest_float(device: torch.device) -> torch.dtype:
    """The dtype for sums over many values."""
    return torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
