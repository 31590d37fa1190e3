"""The size of tensors that a computation makes."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """Notes the largest tensor that is made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.numel = max(self.numel, made.numel() if isinstance(made, torch.Tensor) else 0)
        return made
