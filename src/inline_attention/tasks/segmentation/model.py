"""A backbone and a segmentation head."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from inline_attention.models.registry import check_argument_names
from inline_attention.tasks.dense.backbone import STRIDES, Backbone, HeadedModel, create_backbone
from inline_attention.tasks.segmentation.heads import FCNHead, SemanticFPN, UperNet, own_levels, to_pixels

# name → (title, builder, channels of the auxiliary head or None)
HEADS: dict[str, tuple[str, Callable[..., nn.Module], int | None]] = {
    "upernet": ("UperNet", UperNet, 256),
    "fpn": ("Semantic FPN", SemanticFPN, None),
}
AUXILIARY_STRIDE = 16


class Logits(NamedTuple):
    """The output of a segmenter for images (B, 3, H, W)."""

    main: Tensor  # (B, classes, H / 4, W / 4)
    auxiliary: Tensor | None  # (B, classes, H / 16, W / 16), in training with an auxiliary head


class Segmenter(HeadedModel):
    """Images (B, 3, H, W) of any size → class scores at a quarter of the size; `segment` gives those of every pixel."""

    def __init__(self, backbone: Backbone, head: nn.Module, *, auxiliary: nn.Module | None, num_classes: int) -> None:
        super().__init__(backbone)
        self.head, self.auxiliary = head, auxiliary
        self.num_classes = num_classes

    def forward(self, images: Tensor, sizes: Tensor | None = None) -> Logits:
        """Images (B, 3, H, W) → logits at a quarter of their size

        sizes: (B, 2) integers, the true (height, width) of images that are padded at the bottom and right; None: no
        image is padded. The logits of each image's own part equal those of the image alone.
        """
        maps = self.backbone(images, sizes)
        auxiliary = None
        if self.training and self.auxiliary is not None:
            (own,) = own_levels(sizes, [AUXILIARY_STRIDE])
            auxiliary = self.auxiliary(maps[STRIDES.index(AUXILIARY_STRIDE)], own)
        return Logits(self.head(maps, sizes), auxiliary)

    def segment(self, images: Tensor, sizes: Tensor | None = None) -> Tensor:
        """(B, 3, H, W) → logits (B, classes, H, W) float32; zero beyond images of these sizes"""
        return to_pixels(self(images, sizes).main, images.shape[2:], sizes=sizes)


def create_segmenter(
    backbone: str,
    head: str = "upernet",
    *,
    num_classes: int,
    weights: str | None = None,
    drop_path: float | None = None,
    kwargs: dict[str, Any] | None = None,
    head_kwargs: dict[str, Any] | None = None,
) -> Segmenter:
    """Build a segmenter on a registered backbone.

    Args:
        head: "upernet" (with its auxiliary FCN head on stride 16) or "fpn" (Semantic FPN).
        head_kwargs: arguments of the head, such as dim.

    `weights`, `drop_path` and `kwargs` are those of `create_backbone`.
    """
    if head not in HEADS:
        raise ValueError(f"head={head!r}; expected one of {', '.join(HEADS)}")
    if num_classes < 1:
        raise ValueError(f"num_classes={num_classes}; expected 1 or more")
    _, build_head, auxiliary_dim = HEADS[head]
    features = create_backbone(backbone, weights=weights, drop_path=drop_path, kwargs=kwargs)
    check_argument_names(build_head, head_kwargs or {})
    auxiliary = None
    if auxiliary_dim is not None:
        auxiliary = FCNHead(features.channels[STRIDES.index(AUXILIARY_STRIDE)], num_classes, dim=auxiliary_dim)
    main = build_head(features.channels, num_classes, **(head_kwargs or {}))
    return Segmenter(features, main, auxiliary=auxiliary, num_classes=num_classes)
