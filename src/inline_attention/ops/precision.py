"""What autocast says."""

import torch
from torch import Tensor

# torch.amp.is_autocast_available says so too, but torch.compile cannot trace it in every supported version.
WITH_AUTOCAST = ("cpu", "cuda", "mps", "xpu")


def is_autocast_on(device: torch.device) -> bool:
    return device.type in WITH_AUTOCAST and torch.is_autocast_enabled(device.type)


def product_dtype(x: Tensor) -> torch.dtype:
    """In what a linear layer takes x: autocast's dtype where it is on, which leaves float64 alone, else that of x."""
    if is_autocast_on(x.device) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype
