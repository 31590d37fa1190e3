"""The models that are compared: InLine models in several forms, and the softmax models that they are measured against.

A model is either a classifier, named as in the registry or by its weights file, or a dense model. The name of a dense
model is HEAD-BACKBONE, such as upernet-swin_tiny. Its backbone is InLine or softmax, depending on the contender.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inline_attention.layers import Attention, InLineAttention
from inline_attention.linearize.convert import linearize, restore
from inline_attention.linearize.files import KEY as CONVERSION
from inline_attention.models import create_model, list_models
from inline_attention.models.base import resize_input
from inline_attention.models.registry import suggest_names
from inline_attention.models.weights import WeightsError, open_model, read_metadata
from inline_attention.ops import Backend, Grid, LocalSource
from inline_attention.ops.projections import unstack
from inline_attention.tasks.detection import published as detectors
from inline_attention.tasks.detection.model import HEADS as DETECTION_HEADS
from inline_attention.tasks.detection.model import create_detector
from inline_attention.tasks.segmentation import published as segmenters
from inline_attention.tasks.segmentation.losses import pixel_loss
from inline_attention.tasks.segmentation.model import HEADS, Segmenter, create_segmenter

from .op import textbook_attention
from .record import check_contenders

Size = int | tuple[int, int]  # a side, or (height, width)
Loss = Callable[[nn.Module], Tensor]

# The softmax model nearest to each of ours, from timm if it has one.
COUNTERPARTS = {
    "inline_deit_tiny": "deit_tiny_patch16_224",
    "inline_deit_small": "deit_small_patch16_224",
    "inline_deit_base": "deit_base_patch16_224",
    "inline_pvt_tiny": "pvt_v2_b1",
    "inline_pvt_small": "pvt_v2_b2",
    "inline_swin_tiny": "swin_tiny_patch4_window7_224",
    "inline_swin_small": "swin_small_patch4_window7_224",
    "inline_swin_base": "swin_base_patch4_window7_224",
    "inline_cswin_tiny": "softmax_cswin_tiny",
    "inline_cswin_small": "softmax_cswin_small",
    "inline_cswin_base": "softmax_cswin_base",
}


@dataclass(frozen=True)
class DenseHead:
    """A head for any backbone, and the training loss that is timed."""

    title: str
    size: tuple[int, int]  # (height, width) of the published cost
    build: Callable[[str], nn.Module]  # backbone's name → model
    loss: Callable[[nn.Module, Tensor], Tensor]  # images (B, 3, H, W) → ()


def _segmentation_loss(model: nn.Module, images: Tensor) -> Tensor:
    assert isinstance(model, Segmenter)
    masks = torch.randint(model.num_classes, (len(images), *images.shape[2:]), device=images.device)
    logits = model(images)
    loss = pixel_loss(logits.main, masks)
    return loss if logits.auxiliary is None else loss + 0.4 * pixel_loss(logits.auxiliary, masks)


def _build_detector(backbone: str, *, head: str) -> nn.Module:
    """A detector that finds an object of the first class in every region.

    With random weights alone it would find nothing, and its mask heads would have no work.
    """
    model = create_detector(backbone, head, num_classes=detectors.COST_CLASSES)
    for stage in model.heads.in_order():
        nn.init.constant_(stage.box_predictor.cls_score.bias[1:2], 5.0)
    return model


def _detection_loss(model: nn.Module, images: Tensor) -> Tensor:
    """The loss on seven objects an image, as COCO has on average: filled squares of 32 to 320 pixels, side by side."""
    height, width = images.shape[2:]
    sides = torch.linspace(32, 320, 7, device=images.device).clamp(max=min(height, width))
    corners = torch.linspace(0, width, 8, device=images.device)[:7].clamp(max=width - sides)
    boxes = torch.stack([corners, torch.zeros_like(sides), corners + sides, sides], dim=1)
    columns = torch.arange(width, device=images.device)
    rows = torch.arange(height, device=images.device)
    inside = (columns >= boxes[:, :1]) & (columns < boxes[:, 2:3])
    masks = (rows < boxes[:, 3:]).unsqueeze(2) & inside.unsqueeze(1)
    target = {"boxes": boxes, "labels": torch.arange(1, 8, device=images.device), "masks": masks.to(torch.uint8)}
    losses = model(images, None, [target] * len(images), torch.arange(len(images), device=images.device))
    return sum(losses.values(), start=images.new_zeros(()))


DENSE_HEADS: dict[str, DenseHead] = {
    name: DenseHead(
        title,
        segmenters.COST_SIZE,
        build=partial(create_segmenter, head=name, num_classes=segmenters.COST_CLASSES),
        loss=_segmentation_loss,
    )
    for name, (title, _, _) in HEADS.items()
} | {
    name: DenseHead(
        title,
        detectors.COST_SIZE,
        build=partial(_build_detector, head=name),
        loss=_detection_loss,
    )
    for name, (title, *_) in DETECTION_HEADS.items()
}


class FreeAttention(nn.Module):
    """q + k + v instead of attention. It moves the bytes that any attention must move, and computes almost nothing."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.qkv = attention.get_submodule("qkv")
        self.proj = attention.get_submodule("proj")

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """(B, N, C) → (B, N, C)"""
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.proj(q + k + v)


class TextbookAttention(InLineAttention):
    """InLine attention as the paper's matrix products, the residual as a grouped convolution. φ is the identity."""

    def attend(
        self,
        projections: Sequence[Tensor],
        *,
        grid: Grid,
        token_mask: Tensor | None,
        local_weight: Tensor | LocalSource | None,
    ) -> Tensor:
        assert self.feature_map == "identity"
        assert token_mask is None  # windows are not padded at the size that a model was built for
        assert isinstance(local_weight, Tensor)
        prefix = self.num_prefix_tokens
        return textbook_attention(*unstack(projections), local_weight=local_weight, grid=grid, num_prefix_tokens=prefix)


def set_backend(model: nn.Module, backend: Backend) -> nn.Module:
    """Fix the backend of all attentions, so that a benchmark does not depend on the choice of "auto"."""
    for module in model.modules():
        if isinstance(module, Attention):
            module.backend = backend
    return model


def split_dense(name: str) -> tuple[DenseHead, str] | None:
    """The head of a dense model and its backbone, without "inline_" or "softmax_". None for any other name."""
    head, _, backbone = name.partition("-")
    if head not in DENSE_HEADS or any(f"{kind}_{backbone}" not in list_models() for kind in ("inline", "softmax")):
        return None
    return DENSE_HEADS[head], backbone


def is_dense(name: str) -> bool:
    return split_dense(name) is not None


def classification_loss(images: Tensor) -> Loss:
    """The loss of a classifier on the images (B, C, H, W)."""
    labels = torch.zeros(len(images), dtype=torch.int64, device=images.device)  # every classifier has a class 0
    return lambda model: F.cross_entropy(model(images), labels)


def training_loss(name: str, images: Tensor) -> Loss:
    """The loss of a model's training step on the images (B, C, H, W)."""
    dense = split_dense(name)
    return classification_loss(images) if dense is None else lambda model: dense[0].loss(model, images)


def build_model(name: str, img_size: Size) -> nn.Module:
    """A registered model, the model of a weights file, or a dense model with an InLine backbone."""
    if dense := split_dense(name):
        head, backbone = dense
        return head.build(f"inline_{backbone}")
    if not Path(name).is_file():
        return create_model(name, img_size=img_size)
    model = open_model(None, name)
    resize_input(model, img_size)
    return model


def build_fused(name: str, img_size: Size) -> nn.Module:
    return set_backend(build_model(name, img_size), "triton")


def build_reference(name: str, img_size: Size) -> nn.Module:
    return set_backend(build_model(name, img_size), "reference")


def build_textbook(name: str, img_size: Size) -> nn.Module:
    model = build_reference(name, img_size)
    for module in model.modules():
        if isinstance(module, InLineAttention):
            module.__class__ = TextbookAttention  # the same parameters, another computation
    return model


def is_student(name: str) -> bool:
    """Whether a name is a weights file of a linearised model."""
    with suppress(WeightsError):  # a file of torch.save, which has no metadata
        return Path(name).is_file() and CONVERSION in read_metadata(name)
    return False


def is_softmax(name: str) -> bool:
    """Whether a name is that of timm's models or of this library's softmax ones: they are timed beside linear forms."""
    return name.startswith("softmax_") or (timm.is_model(name) and name not in list_models())


def counterpart(name: str) -> str | None:
    """The softmax model that a model is compared with. A softmax model is its own, beside its linearised forms."""
    if is_student(name):
        return "its softmax form"
    return COUNTERPARTS.get(name, name if is_softmax(name) else None)


def build_linearized(name: str, img_size: Size, *, attention: str) -> nn.Module:
    """The counterpart with linear attention and the local residual, as `linearize` makes it."""
    model = build_peer(name, img_size)
    linearize(model, attention=attention)
    return model


def build_peer(name: str, img_size: Size) -> nn.Module:
    """The counterpart. That of a student is its teacher's architecture."""
    if is_student(name):
        model = build_model(name, img_size)
        restore(model)
        return model
    peer = counterpart(name)
    if peer is None:
        raise ValueError(f"{name} has no counterpart; models with one: {', '.join(COUNTERPARTS)}, and those of timm")
    # Nothing in PVT v2 depends on the input size, and it has no such argument.
    return create_model(peer) if peer.startswith("pvt_v2") else create_model(peer, img_size=img_size)


def build_peer_sdpa(name: str, img_size: Size) -> nn.Module:
    """The peer with SDPA everywhere. By default timm does not use it in Swin's windows, whose bias is a mask."""
    return _build_peer(name, img_size, fused=True)


def build_peer_math(name: str, img_size: Size) -> nn.Module:
    """The peer with softmax written out, the N×N matrix in memory: the baseline of the paper's speeds."""
    return _build_peer(name, img_size, fused=False)


def _build_peer(name: str, img_size: Size, *, fused: bool) -> nn.Module:
    """The peer with timm's switch for SDPA set, which its modules read when they are built."""
    before = timm.layers.use_fused_attn(), timm.layers.use_fused_attn(experimental=True)
    timm.layers.set_fused_attn(fused, experimental=fused)
    try:
        return build_peer(name, img_size)
    finally:
        timm.layers.set_fused_attn(*before)


def build_free(name: str, img_size: Size) -> nn.Module:
    model = build_peer(name, img_size)
    for module in list(model.modules()):
        for child_name, child in module.named_children():
            if isinstance(getattr(child, "qkv", None), nn.Linear):
                setattr(module, child_name, FreeAttention(child))
    if not any(isinstance(module, FreeAttention) for module in model.modules()):
        raise ValueError(f"{counterpart(name)} has no attention with one qkv projection to replace")
    return model


def build_softmax(name: str, img_size: Size) -> nn.Module:
    """A dense model with a softmax backbone."""
    dense = split_dense(name)
    assert dense is not None
    head, backbone = dense
    return head.build(f"softmax_{backbone}")


@dataclass(frozen=True)
class Contender:
    title: str
    build: Callable[[str, Size], nn.Module]
    optimized: bool = True  # by `optimize`; otherwise by torch.compile alone


CONTENDERS = {
    "fused": Contender("InLine, fused", build_fused),
    "reference": Contender("InLine, reference", build_reference),
    "textbook": Contender("InLine, textbook", build_textbook),
    "peer": Contender("counterpart", build_peer, optimized=False),
    "peer_optimized": Contender("counterpart, by `optimize`", build_peer),
    "peer_sdpa": Contender("counterpart, SDPA forced", build_peer_sdpa, optimized=False),
    "peer_math": Contender("counterpart, softmax written out", build_peer_math, optimized=False),
    "tangent": Contender("counterpart, linearised: tangent", partial(build_linearized, attention="tangent")),
    "inline": Contender("counterpart, linearised: InLine", partial(build_linearized, attention="inline")),
    "student": Contender("student", build_model),
    "free": Contender("counterpart, free attention", build_free, optimized=False),
    "softmax": Contender("softmax", build_softmax),
}
PEERS = ("peer", "peer_sdpa", "softmax")  # all ratios are over the fastest of them
LINEARIZED = ("tangent", "inline")  # forms of a softmax model
OF_INLINE = ("fused", "reference", "textbook")
OF_STUDENTS = ("peer", "peer_optimized", "student")
OF_DENSE_MODELS = ("fused", "reference", "softmax")
OF_CLASSIFIERS = tuple(name for name in CONTENDERS if name != "softmax")


def default_contenders(models: Sequence[str], device: torch.device, *, dense: bool = False) -> list[str]:
    if not dense and all(map(is_softmax, models)):
        return ["peer", "peer_optimized", *LINEARIZED]
    if not dense and all(map(is_student, models)):
        return list(OF_STUDENTS)
    everywhere = ["reference", "softmax"] if dense else ["reference", "textbook", "peer", "free"]
    return ["fused", *everywhere] if device.type == "cuda" else everywhere


def check_classifiers(models: Sequence[str], contenders: Sequence[str]) -> None:
    """Raise ValueError for a model that does not exist, or a contender that one of the models does not have."""
    if unknown := [name for name in models if not timm.is_model(name) and not Path(name).is_file()]:
        raise ValueError(f"there is no model or file {', '.join(unknown)}; {suggest_names(unknown[0])}")
    check_contenders(contenders, OF_CLASSIFIERS)
    for model in models:
        if wrong := [n for n in contenders if n in (OF_INLINE if is_student(model) else ("student",))]:
            kind = "is a linearised model" if is_student(model) else "is no file of a linearised model"
            ours = ",".join(OF_STUDENTS if is_student(model) else default_contenders([model], torch.device("cpu")))
            raise ValueError(f"--contenders {','.join(wrong)}: {model} {kind}; use --contenders {ours}")
    if {*contenders} - {*OF_INLINE} and (without := [n for n in models if counterpart(n) is None]):
        raise ValueError(f"{', '.join(without)} has no counterpart; use --contenders {','.join(OF_INLINE)}")
    if wrong := [name for name in contenders if name in OF_INLINE]:
        for model in filter(is_softmax, models):
            ours = ",".join(["peer", *LINEARIZED])
            raise ValueError(f"--contenders {','.join(wrong)}: {model} is a softmax model; use --contenders {ours}")


def check_dense_models(models: Sequence[str], contenders: Sequence[str]) -> None:
    """Raise ValueError for a dense model or a contender that does not exist."""
    for name in models:
        if not is_dense(name):
            raise ValueError(
                f"there is no dense model {name!r}; expected HEAD-BACKBONE such as fpn-pvt_tiny or upernet-swin_tiny, "
                f"with a head of {', '.join(DENSE_HEADS)}"
            )
    check_contenders(contenders, OF_DENSE_MODELS)
