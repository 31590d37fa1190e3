"""Batch norm over all ranks that ignores the padding of images."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from inline_attention.training.distributed import is_distributed


class SumOverRanks(torch.autograd.Function):
    """The sum of all ranks' tensors. Its gradient is the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        total = own.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return SumOverRanks.apply(gradient)


class BatchNorm(nn.BatchNorm2d):
    """Batch norm with statistics over the batches of all ranks, without the padding of images.

    Unlike torch's SyncBatchNorm, it also runs on CPUs.
    """

    def forward(self, x: Tensor, present: Tensor | None = None) -> Tensor:
        """(B, C, H, W) → the same; present (B, 1, H, W) bool, False on padding. None: no padding"""
        ranks = dist.get_world_size() if is_distributed() else 1
        if not self.training or (ranks == 1 and present is None):
            return super().forward(x)
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        wide = x.float() if x.dtype.itemsize < 4 else x
        kept = wide if present is None else wide.masked_fill(~present, 0)
        own = wide.new_ones(()).mul(x.numel() // x.shape[1]) if present is None else present.sum().to(wide.dtype)
        sums = torch.cat([kept.sum((0, 2, 3)), own[None]])
        if ranks > 1:  # they may have different amounts of padding
            sums = SumOverRanks.apply(sums)
        mean, count = sums[:-1] / sums[-1], sums[-1]
        centred = wide - mean[:, None, None]
        squares = (centred if present is None else centred.masked_fill(~present, 0)).square().sum((0, 2, 3))
        variance = (SumOverRanks.apply(squares) if ranks > 1 else squares) / count
        with torch.no_grad():
            self.num_batches_tracked += 1
            unbiased = variance * count / (count - 1).clamp(min=1)
            for running, found in ((self.running_mean, mean), (self.running_var, unbiased)):
                running.lerp_(found.to(running.dtype), self.momentum)
        scale = self.weight * (variance + self.eps).rsqrt()
        return (centred * scale[:, None, None] + self.bias[:, None, None]).to(x.dtype)
