"""The base classes of all families: timm's contract, and the methods that the rest of the library needs."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar

import torch
from timm.layers import trunc_normal_
from timm.models import checkpoint
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from inline_attention.layers import Block
from inline_attention.layers.embed import resize_map
from inline_attention.layers.padding import Padding, own_tokens, sizes_on_map, zero_padding
from inline_attention.ops import Grid

StateDict = dict[str, Tensor]
ModuleT = TypeVar("ModuleT", bound=nn.Module)
# A step of a model for `profile`: its name, the modules and parameters it uses, and what it computes.
Part = tuple[str, list[nn.Module | nn.Parameter], Callable[[Tensor], Tensor]]


def to_pair(size: int | Sequence[int], *, name: str = "img_size") -> Grid:
    """(height, width) of a side or a pair. `name` is used in errors."""
    pair = tuple(size) if isinstance(size, Sequence) else (size, size)
    if len(pair) != 2 or any(not isinstance(n, int) or n < 1 for n in pair):
        raise ValueError(f"{name}={size!r}; expected a positive integer or a pair (height, width) of them")
    return pair[0], pair[1]


def check_positive(**arguments: float) -> None:
    """ValueError for an argument that is not positive. All but MLP ratios must be integers."""
    for name, value in arguments.items():
        kind, what = ((int, float), "number") if name.startswith("mlp_ratio") else (int, "integer")
        if not isinstance(value, kind) or value <= 0:
            raise ValueError(f"{name}={value!r}; expected a positive {what}")


def check_stages(depths: Sequence[int], **by_stage: Sequence[float]) -> None:
    """ValueError for an argument that lacks the value of a stage, or has one that is not positive."""
    if not isinstance(depths, Sequence) or not depths:
        raise ValueError(f"depths={depths!r}; expected the number of blocks of each stage")
    for name, values in {"depths": depths, **by_stage}.items():
        if not isinstance(values, Sequence) or len(values) < len(depths):
            raise ValueError(f"{name}={values!r}: expected a value for each of the {len(depths)} stages")
        check_positive(**{f"{name}[{stage}]": value for stage, value in enumerate(values)})


def ceil_grid(size: Grid, stride: int) -> Grid:
    """The size of an image's feature map. Sides that are not a multiple of the stride are padded."""
    return math.ceil(size[0] / stride), math.ceil(size[1] / stride)


def drop_path_rates(rate: float, depths: Sequence[int]) -> list[list[float]]:
    """The drop path rate of every block, by stage. It grows linearly from 0 to `rate` over all blocks."""
    if not 0 <= rate <= 1:
        raise ValueError(f"drop_path_rate={rate!r}; expected a probability in [0, 1]")
    total = sum(depths)
    rates = iter([rate * i / max(total - 1, 1) for i in range(total)])
    return [[next(rates) for _ in range(depth)] for depth in depths]


def adapt_attention(name: str, value: Tensor, own: Mapping[str, Tensor]) -> tuple[str, Tensor]:
    """Adapts a parameter of an official attention module to ours; any other is returned as it is.

    The official kernel generator is a sequence of grouped 1×1 convolutions, with parameters (out, in, 1) and (out,).
    Learned positions are resized to the model's map.

    Args:
        name: its name in our model, up to the kernel generator.
        own: the parameters of our model, by name.
    """
    name = re.sub(r"\.attns?\.(?:\d+\.)?residual\.0\.", ".attn.local.fc1.", name)
    name = re.sub(r"\.attns?\.(?:\d+\.)?residual\.2\.", ".attn.local.fc2.", name)
    parameter = own.get(name)
    if parameter is not None and ".attn.local." in name and value.numel() == parameter.numel():
        value = value.reshape(parameter.shape)
    elif parameter is not None and name.endswith(".position_map") and value.ndim == 4:
        value = resize_map(value, (parameter.shape[1], parameter.shape[2]), mode="bicubic")
    return name, value


def unflatten_positions(name: str, value: Tensor, grid: Grid) -> Tensor:
    """Positions (1, H·W, C) → (1, H, W, C)"""
    if value.shape[1] != grid[0] * grid[1]:
        raise ValueError(
            f"{name} holds {value.shape[1]} positions, but the input size it was made at gives a map of "
            f"{grid[0]}×{grid[1]}; build the model with the img_size of these weights, load, then call set_input_size"
        )
    return value.unflatten(1, grid)


def check_image(x: Tensor, in_chans: int) -> None:
    if x.ndim != 4 or x.shape[1] != in_chans:
        raise ValueError(f"the image has shape {tuple(x.shape)}; expected (B, {in_chans}, H, W)")


torch.fx.wrap("check_image")  # torch.fx records a call: it cannot branch on shapes


class RunsBlocks(nn.Module):
    """A module that runs blocks, with gradient checkpointing if `set_grad_checkpointing` of the model asks for it."""

    grad_checkpointing: bool = False

    def run_block(self, block: nn.Module, x: Tensor, grid: Grid, padding: Padding | None = None) -> Tensor:
        args = (x, grid) if padding is None else (x, grid, padding)
        if self.grad_checkpointing and self.training and torch.is_grad_enabled():
            return checkpoint(block, *args)
        return block(*args)


class VisionModel(RunsBlocks):
    """The base of every family.

    A family is a subclass in a file of its own. It sets the attributes declared here and implements the methods that
    raise NotImplementedError. Weights, export, profile and the commands need nothing else from it.
    """

    checkpoint_names: ClassVar[str]  # regular expression of names that only this family's weights have, official or own
    layers_name: ClassVar[str]  # the attribute with the layers that `prune_intermediate_layers` removes
    pools: ClassVar[tuple[str, ...]]  # values of `global_pool`
    out_indices: ClassVar[int | None] = None  # features of `features_only=True`: the last n, or None for all
    num_classes: int
    in_chans: int
    img_size: Grid
    num_features: int
    head_hidden_size: int
    global_pool: str
    feature_info: list[dict[str, Any]]
    attention: list[list[str]]  # the attention of every block, by stage
    patch_embed: nn.Module
    norm: nn.Module
    head_drop: nn.Module
    head: nn.Module
    config: dict[str, Any]  # the constructor's arguments, set by the registry

    def __init__(self, num_features: int, *, img_size: int | Sequence[int], in_chans: int, global_pool: str) -> None:
        super().__init__()
        check_positive(in_chans=in_chans)
        self.check_global_pool(global_pool)
        self.global_pool = global_pool
        self.in_chans = in_chans
        self.img_size = to_pair(img_size)
        self.num_features = self.head_hidden_size = num_features

    def init_weights(self) -> None:
        """Draws linear layers from a truncated normal of std 0.02, with zero biases. Others have their own defaults."""
        if next(self.parameters()).is_meta:
            return  # there is nothing to draw, and on the meta device a truncated normal is slow Python
        for module in self.modules():
            if isinstance(module, nn.Linear):
                trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif callable(reset := getattr(module, "reset_parameters", None)):
                reset()
        for name, parameter in self.named_parameters():
            if name.rpartition(".")[2] in ("pos_embed", "cls_token", "relative_position_bias_table"):
                trunc_normal_(parameter, std=0.02)

    def build_head(self, num_classes: int, drop_rate: float) -> None:
        if not isinstance(num_classes, int) or num_classes < 0:
            raise ValueError(f"num_classes={num_classes!r}; expected a number of classes, or 0 for no head")
        self.num_classes = num_classes
        self.head_drop = nn.Dropout(drop_rate).train(self.training)
        head = nn.Linear(self.num_features, num_classes) if num_classes > 0 else nn.Identity()
        self.head = head.train(self.training)

    def embed_images(self, x: Tensor, sizes: Tensor | None) -> Tensor:
        """Embeds the patches of images (B, in_chans, H, W). Pixels beyond the border of a padded image are zero."""
        check_image(x, self.in_chans)
        if sizes is not None and sizes.shape != (x.shape[0], 2):
            raise ValueError(f"sizes has shape {tuple(sizes.shape)}; expected (height, width) of {x.shape[0]} images")
        return self.patch_embed(zero_padding(x, sizes, channels="first"))

    def adapt_state_dict(self, state_dict: Mapping[str, Tensor], *, img_size: Grid | None = None) -> StateDict:
        """Renames official weights to our own names and resizes position parameters. Unknown names are kept.

        `img_size` is the input size that the weights were trained at; None stands for the published one.
        """
        raise NotImplementedError

    def set_input_size(self, img_size: int | Sequence[int]) -> None:
        """Permanently resizes what depends on the input size. Other sizes also run without this call."""
        raise NotImplementedError

    def no_weight_decay(self) -> set[str]:
        """The names of parameters that are not decayed, besides biases and norms."""
        return set()

    def minimum_size(self) -> int:
        """The smallest side of an image that one exported graph with dynamic sizes serves.

        A graph has one path. A family whose blocks take another path on small maps returns the first size above those.
        """
        return 32

    def parts(self) -> Iterator[Part]:
        """The steps of the forward pass in order, for `profile`. Run one after another they compute the logits."""
        raise NotImplementedError

    def source_size(self, img_size: Grid | None) -> Grid:
        """The input size of weights: `img_size`, or else the published one, or else that of the model."""
        if img_size is not None:
            return img_size
        cfg = getattr(self, "pretrained_cfg", None)  # the registry sets it
        return to_pair(cfg["input_size"][1:]) if cfg else self.img_size

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        for module in self.modules():
            if isinstance(module, RunsBlocks):
                module.grad_checkpointing = enable

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replaces the head with a new one for another number of classes; 0 removes it."""
        if global_pool is not None:
            self.check_global_pool(global_pool)
            self.global_pool = global_pool
        reference = next(self.parameters())
        self.build_head(num_classes, self.head_drop.p if isinstance(self.head_drop, nn.Dropout) else 0.0)
        if isinstance(self.head, nn.Linear):
            trunc_normal_(self.head.weight, std=0.02)
            nn.init.zeros_(self.head.bias)
        self.head.to(device=reference.device, dtype=reference.dtype)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drops the layers after the last one wanted, and optionally the final norm and the head."""
        layers = getattr(self, self.layers_name)
        take, last = feature_take_indices(len(layers), indices)
        kept = layers[: last + 1]
        kept.training = self.training  # not `train()`: single layers may be in another mode
        setattr(self, self.layers_name, kept)
        if prune_norm:
            self.norm = nn.Identity().train(self.training)
        if prune_head:
            self.reset_classifier(0, "")
        return take

    def changes(self) -> dict[str, Any]:
        """Changes since the model was built. `apply_changes` repeats them on a new model."""
        return dict(
            img_size=list(self.img_size),
            num_classes=self.num_classes,
            global_pool=self.global_pool,
            layers=len(getattr(self, self.layers_name)),
            norm=not isinstance(self.norm, nn.Identity),
        )

    def apply_changes(
        self, *, img_size: Sequence[int], num_classes: int, global_pool: str, layers: int, norm: bool
    ) -> None:
        """Apply `changes` to a newly built model."""
        present = len(getattr(self, self.layers_name))
        if not 1 <= layers <= present:
            raise ValueError(f"layers={layers}; expected 1 to {present}, the layers that the model is built with")
        if layers < present or norm != self.changes()["norm"]:
            self.prune_intermediate_layers([layers - 1], prune_norm=not norm, prune_head=False)
        if to_pair(img_size) != self.img_size:
            self.set_input_size(img_size)
        if (num_classes, global_pool) != (self.num_classes, self.global_pool):
            self.reset_classifier(num_classes, global_pool)

    def check_global_pool(self, global_pool: str) -> None:
        if global_pool not in self.pools:
            raise ValueError(f"global_pool={global_pool!r}; expected {' or '.join(map(repr, self.pools))}")

    def forward_features(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def pool(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = self.head_drop(self.pool(x))
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, in_chans, H, W) of any size → logits (B, num_classes)"""
        return self.forward_head(self.forward_features(x))


def input_shape(model: nn.Module) -> tuple[int, int, int]:
    """(channels, height, width) of the images that a model of this library or of timm was built for."""
    if isinstance(model, VisionModel):
        return model.in_chans, *model.img_size
    described: Any = model
    channels, *size = described.pretrained_cfg["input_size"]
    size = getattr(getattr(model, "patch_embed", None), "img_size", None) or size  # PVT's embedding takes any size
    height, width = to_pair(tuple(size))
    return getattr(model, "in_chans", channels), height, width


def resize_input(model: nn.Module, img_size: int | Sequence[int]) -> None:
    """Resizes what depends on the input size in a model of this library or of timm."""
    if hasattr(model, "set_input_size"):  # nothing in PVT v2 depends on it
        model.set_input_size(to_pair(img_size))  # type: ignore[operator]  # timm's contract


class Stage(RunsBlocks):
    """A downsampling and the blocks after it. Subclasses may add something in between."""

    def __init__(self, downsample: nn.Module, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.downsample = downsample
        self.blocks = nn.ModuleList(blocks)

    def embed(self, x: Tensor, sizes: Tensor | None = None) -> Tensor:
        """The map (B, H, W, C) of the previous stage → (B, H', W', C') of this one

        `sizes` (B, 2) are the sizes of padded images on this stage's map.
        """
        return self.downsample(x)

    def forward(self, x: Tensor, sizes: Tensor | None = None) -> Tensor:
        """`embed`, then the blocks. Beyond the border of padded images the map is zero."""
        x = self.embed(x, sizes)
        grid = (x.shape[1], x.shape[2])
        tokens = x.flatten(1, 2)
        padding = None if sizes is None else own_tokens(sizes, grid)
        for block in self.blocks:
            tokens = self.run_block(block, tokens, grid, padding)
        return zero_padding(tokens.unflatten(1, grid), sizes, channels="last")


class PyramidModel(VisionModel):
    """Stages on maps (B, H, W, C) at strides 4, 8, 16, …, then a norm and a head on the mean token."""

    output_fmt = "NHWC"
    layers_name = "stages"
    pools = ("avg", "")
    stages: nn.ModuleList

    def __init__(self, dims: Sequence[int], **kwargs: Any) -> None:
        """`dims` are the channels, by stage; the other arguments are those of `VisionModel`."""
        super().__init__(dims[-1], **kwargs)
        self.feature_info = [dict(num_chs=dim, reduction=4 * 2**i, module=f"stages.{i}") for i, dim in enumerate(dims)]

    def stage_grid(self, stage: int) -> Grid:
        """The size of a stage's map at the input size of the model."""
        return ceil_grid(self.img_size, 4 * 2**stage)

    def modules_by_stage(self, kind: type[ModuleT]) -> Iterator[tuple[int, ModuleT]]:
        """All modules of a class in the stages, each with the index of its stage."""
        for i, stage in enumerate(self.stages):
            for module in stage.modules():
                if isinstance(module, kind):
                    yield i, module

    def set_input_size(self, img_size: int | Sequence[int]) -> None:
        """Resizes the learned positions of attentions that have them."""
        self.img_size = to_pair(img_size)
        for stage, block in self.modules_by_stage(Block):
            block.attn.set_grid(self.stage_grid(stage))

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        blocks = [(r"^stages\.(\d+)\.(?:downsample|pos_embed)", (0,)), (r"^stages\.(\d+)\.blocks\.(\d+)", None)]
        return dict(
            stem=r"^patch_embed|^stages\.0\.pos_embed",
            blocks=r"^stages\.(\d+)" if coarse else [*blocks, (r"^norm", (99999,))],
        )

    def parts(self) -> Iterator[Part]:
        yield "stem", [self.patch_embed], self.patch_embed
        for i, stage in enumerate(self.stages):
            yield f"stage {i + 1}", [stage], stage
        yield "head", [self.norm, self.head], lambda x: self.forward_head(self.norm(x))

    def forward_features(self, x: Tensor) -> Tensor:
        """Images (B, in_chans, H, W) → normed features (B, ceil(H/32), ceil(W/32), C)"""
        x = self.embed_images(x, None)
        for stage in self.stages:
            x = stage(x)
        return self.norm(x)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: Literal["NCHW", "NHWC"] = "NCHW",
        intermediates_only: bool = False,
        sizes: Tensor | None = None,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Returns the maps of chosen stages (all, the last n, or by index) and, by default, the final features.

        The final norm fits the last stage's map alone. `norm` applies it to that map, and with `stop_early` the final
        features are those of the last stage that ran, without it if that is another one. `sizes` (B, 2) are the true
        heights and widths of images that were padded at the bottom and right. The top left part of each map then equals
        the map of the image alone.
        """
        if output_fmt not in ("NCHW", "NHWC"):
            raise ValueError(f"output_fmt={output_fmt!r}; expected 'NCHW' or 'NHWC'")
        take, last = feature_take_indices(len(self.stages), indices)
        x = self.embed_images(x, sizes)
        maps = []
        for index, stage in enumerate(self.stages[: last + 1] if stop_early else self.stages):
            x = stage(x, None if sizes is None else sizes_on_map(sizes, 4 * 2**index))
            fits = index == len(self.feature_info) - 1
            if index in take:
                taken = self.norm(x) if norm and fits else x
                maps.append(taken.permute(0, 3, 1, 2) if output_fmt == "NCHW" else taken)
        if intermediates_only:
            return maps
        return self.norm(x) if fits else x, maps

    def pool(self, x: Tensor) -> Tensor:
        return x.mean((1, 2)) if self.global_pool == "avg" else x
