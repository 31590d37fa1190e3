"""Batch norm over the global batch, on any device."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce


class BatchNorm(nn.BatchNorm2d):
    """Batch norm whose statistics are those of the batches of all ranks, which are equally large.

    torch's own SyncBatchNorm knows no CPU, where two ranks shall train as one does, too.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → the same"""
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if not self.training or ranks == 1:
            return super().forward(x)
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        wide = x.float()
        count = ranks * x.numel() / x.shape[1]
        mean = all_reduce(wide.sum((0, 2, 3))) / count
        centred = wide - mean[:, None, None]
        variance = all_reduce(centred.square().sum((0, 2, 3))) / count
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        scale = self.weight * (variance + self.eps).rsqrt()
        return (centred * scale[:, None, None] + self.bias[:, None, None]).to(x.dtype)
