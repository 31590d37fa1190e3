"""Mixup and cutmix with randomness from (seed, epoch, step)."""

import torch
from timm.data.mixup import Mixup as TimmMixup
from timm.data.mixup import mixup_target
from torch import Tensor

from inline_attention.data.config import DataConfig
from inline_attention.data.seeding import derive_seed, restored_generators, seed_generators


class Mixup:
    """timm's batch-wise mixup and cutmix.

    At each step every rank draws the same mixing weight and the same box. Together with the division of batches into
    ranks (`sampler.rank_positions`), R ranks mix the same pairs as one rank. If both are off, targets become one-hot.
    Targets of several labels are mixed by the same weights.
    """

    def __init__(self, config: DataConfig, *, num_classes: int, seed: int = 0) -> None:
        self._num_classes, self._seed = num_classes, seed
        self._mix = None
        if config.mixes:
            self._mix = TimmMixup(
                mixup_alpha=config.mixup,
                cutmix_alpha=config.cutmix,
                prob=config.mixup_prob,
                switch_prob=config.mixup_switch,
                label_smoothing=0.0,  # the loss has it
                num_classes=num_classes,
            )

    def __call__(self, images: Tensor, targets: Tensor, *, epoch: int, step: int) -> tuple[Tensor, Tensor]:
        """Mix images (B, C, H, W) in place.

        Returns them and soft targets (B, num_classes) of the targets: (B,) labels, or (B, num_classes) zeros and ones.
        """
        several = targets.ndim == 2
        if self._mix is None:
            return images, targets if several else mixup_target(targets, self._num_classes)
        with restored_generators():
            seed_generators(derive_seed("mixup", self._seed, epoch, step))
            if not several:
                return self._mix(images, targets)
            # Mixing the numbers of the images gives the share of each image in each of the mixed ones.
            self._mix.num_classes = len(images)
            images, shares = self._mix(images, torch.arange(len(images), device=images.device))
            return images, shares @ targets
