"""Batch norm over the global batch, on any device."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce


class BatchNorm(nn.SyncBatchNorm):
    """torch's SyncBatchNorm, which refuses CPU tensors on more than one rank: there the sums are reduced here.

    On a single rank it is plain batch norm.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → the same"""
        on_ranks = self.training and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        return self._forward_on_cpu_ranks(x) if on_ranks and x.device.type == "cpu" else super().forward(x)

    def _forward_on_cpu_ranks(self, x: Tensor) -> Tensor:
        wide = x.float()
        count = x.numel() / x.shape[1] * dist.get_world_size()  # every rank has as many images of the same size
        mean = all_reduce(wide.sum((0, 2, 3))) / count
        centred = wide - mean[:, None, None]
        variance = all_reduce(centred.square().sum((0, 2, 3))) / count
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum or 0.0)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum or 0.0)
        scale = self.weight * (variance + self.eps).rsqrt()
        return (centred * scale[:, None, None] + self.bias[:, None, None]).to(x.dtype)
