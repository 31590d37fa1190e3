"""Compares the outputs of a linearised model with those of its teacher."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inline_attention.data import EvalLoader
from inline_attention.layers.mode import evaluation_mode
from inline_attention.ops.precision import widest_float
from inline_attention.tasks.classification.evaluation import padded_batches
from inline_attention.tasks.evaluation import check_readable
from inline_attention.training.distributed import current_ranks


@dataclass(frozen=True)
class Nearness:
    """A model beside its teacher, over the images of all ranks, in per cent."""

    images: int
    cosine: float  # of logits or features, averaged over the images (and over their tokens, if outputs have any)
    agreement: float | None = None  # share of images with the teacher's most probable class; None without a head
    top1: float | None = None  # None without a head or without labels

    def figures(self) -> dict[str, float]:
        named = {"cosine": self.cosine, "agreement": self.agreement, "top1": self.top1, "images": self.images}
        return {name: value for name, value in named.items() if value is not None}


@torch.no_grad()
def compare_outputs(
    model: nn.Module,
    teacher: nn.Module,
    loader: EvalLoader,
    *,
    device: torch.device,
    amp_dtype: torch.dtype | None = None,
    labelled: bool,
) -> Nearness:
    """Run both models over the loader. In a process group every rank calls this and gets the same result.

    labelled: whether the loader's labels are classes of the teacher.
    """
    loader.to(device)
    has_head = bool(teacher.num_classes)  # timm's contract
    sums = torch.zeros(4, dtype=widest_float(device), device=device)
    with evaluation_mode(model), evaluation_mode(teacher):
        for images, batch in padded_batches(loader, device=device):
            count = len(batch.images)
            with torch.autocast(device.type, dtype=amp_dtype, enabled=amp_dtype is not None):
                ours, theirs = (network(images)[:count].float() for network in (model, teacher))
            cosine = F.cosine_similarity(ours, theirs, dim=-1).view(count, -1).mean(1) if count else ours.new_zeros(0)
            added = [cosine.sum(), ours.new_tensor(count)]
            if has_head:
                best = ours.argmax(-1)
                added += [(best == theirs.argmax(-1)).sum(), (best == batch.targets).sum()]
            sums[: len(added)] += torch.stack(added).to(sums)
    ranks = current_ranks()
    total, images_seen, agreed, correct = ranks.sum(sums).tolist()
    check_readable(loader, images=int(images_seen), skipped=sum(ranks.gather(len(loader.skipped))))
    return Nearness(
        images=int(images_seen),
        cosine=100 * total / images_seen,
        agreement=100 * agreed / images_seen if has_head else None,
        top1=100 * correct / images_seen if has_head and labelled else None,
    )


def relative_error(out: Tensor, expected: Tensor) -> Tensor:
    """Squared error relative to the squared norm of the expected output, per sample, averaged over the batch: ()"""
    out, expected = out.float(), expected.float()
    error, size = (x.square().flatten(1).sum(1) for x in (out - expected, expected))
    return (error / size.clamp(min=torch.finfo(torch.float32).tiny)).mean()
