"""An exponential moving average (EMA) of the weights."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


class WeightAverage:
    """average ← decay · average + (1 − decay) · weights, for parameters and floating-point buffers.

    The average is sharded like the weights. With `warmup` the decay begins at 0 and grows to `decay`, as in timm's
    ModelEmaV3: the first weights are soon forgotten.
    """

    def __init__(self, model: nn.Module, *, decay: float, warmup: bool = False) -> None:
        self.decay, self.warmup = decay, warmup
        self.shards = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self.live = {name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
        self.average = {name: tensor.detach().clone() for name, tensor in self.live.items()}

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """updates: number of updates before the latest one."""
        decay = min(self.decay, 1 - (updates + 1) ** (-2 / 3)) if self.warmup else self.decay
        average = [_local(tensor) for tensor in self.average.values()]
        torch._foreach_lerp_(average, [_local(tensor) for tensor in self.live.values()], 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the average into the model. At the end of the block its own weights are restored, bit for bit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, tensor in self.live.items():
            average = self.average[name]
            weights = tensor.clone()
            tensor.copy_(average)
            average.copy_(weights)
        # FSDP keeps the root's weights gathered after an evaluation: the next pass would use those before the swap.
        for module in self.shards:
            module.reshard()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
