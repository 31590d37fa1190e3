"""The pre-norm transformer block that all families share."""

from typing import Any

import torch
from timm.layers import DropPath, register_notrace_module
from timm.layers import Mlp as TimmMlp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from inline_attention.ops import Grid, OutputProjection, add_mlp, norm_linear
from inline_attention.ops.mlp import pays_for

from .activation import is_exact_gelu
from .attention import Attention
from .mode import asked_once, is_changed, is_plain
from .padding import Padding
from .windows import WindowPlan


def has_parameters(*layers: nn.Module) -> bool:
    """Whether all have a weight and a bias, which the kernels take for granted."""
    return all(layer.weight is not None and layer.bias is not None for layer in layers)


class Mlp(TimmMlp):
    """timm's Mlp, except that compiled training does not keep its hidden activations.

    The backward pass reads the inputs of the activation anyway, and computes it again at the cost of one write. Hidden
    activations are a fifth of what a block keeps. (…, C) → (…, C)
    """

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        if self.training and torch.compiler.is_dynamo_compiling() and torch.is_grad_enabled():
            return checkpoint(self.activate_and_project, x, use_reentrant=False)
        return self.activate_and_project(x)

    def activate_and_project(self, x: Tensor) -> Tensor:
        return self.drop2(self.fc2(self.norm(self.drop1(self.act(x)))))


@register_notrace_module  # torch.fx records a call: what a block computes depends on sizes
class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), each branch with stochastic depth.

    Subclasses override `attention_branch`.
    """

    def __init__(
        self,
        dim: int,
        attn: Attention,
        *,
        mlp_ratio: float,
        norm_eps: float,
        proj_drop: float = 0.0,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps)
        self.attn = attn
        self.drop_path1 = DropPath(drop_path)
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), drop=proj_drop)
        self.drop_path2 = DropPath(drop_path)

        # What `optimize` gives to the kernel of `add_mlp`: "inference", "projected" (inference, with the projection of
        # the attention), "training". "normed": it gives norm1 and qkv to the kernel of `norm_linear`.
        self.fused: tuple[str, ...] = ()

    @asked_once
    def has_plain_mlp(self) -> bool:
        """Whether `add_mlp` computes the second half, as long as nothing in it is dropped.

        No module in it was replaced, and no call was changed.
        """
        return (
            is_plain(self.norm2, nn.LayerNorm)
            and is_plain(self.mlp, Mlp)
            and is_plain(self.mlp.fc1, nn.Linear)
            and is_plain(self.mlp.fc2, nn.Linear)
            and is_exact_gelu(self.mlp.act)
            and is_plain(self.mlp.norm, nn.Identity)
            and not any(is_changed(module) for module in (self.mlp.drop1, self.mlp.drop2, self.drop_path2))
            and has_parameters(self.norm2, self.mlp.fc1, self.mlp.fc2)
        )

    def drops_mlp(self) -> bool:
        """Whether training drops any of the second half. A module that does not say its rate may do so."""
        drops = ((self.mlp.drop1, "p"), (self.mlp.drop2, "p"), (self.drop_path2, "drop_prob"))
        return any(getattr(module, rate, 1.0) != 0 for module, rate in drops)

    def window_plan(self, grid: Grid) -> WindowPlan | None:
        """How `attention_branch` cuts a map into windows. None: it attends to the whole map."""
        return None

    def attention_branch(self, x: Tensor, grid: Grid, padding: Padding | None = None, **options: Any) -> Tensor:
        """`options`: further arguments of the attention"""
        if padding is None and self.fuses_norm(x):
            norm, linear = self.norm1, self.attn.qkv
            x, qkv = norm_linear(x, norm.weight, norm.bias, linear.weight, linear.bias, eps=norm.eps)
            return self.attn(x, grid, qkv=qkv, **options)
        token_mask = None if padding is None else padding.token_mask
        return self.attn(self.norm1(x), grid, token_mask=token_mask, **options)

    def fuses_norm(self, x: Tensor) -> bool:
        """Whether the norm and `qkv` are one kernel, as `pays` says of the MLP."""
        return (
            "normed" in self.fused
            and not self.training
            and self.has_plain_norm()
            and pays_for(x, self.attn.qkv.weight.shape[0], "normed")
        )

    @asked_once
    def has_plain_norm(self) -> bool:
        """Whether `norm_linear` computes the norm and `qkv`. No module was replaced, and no call was changed."""
        return is_plain(self.norm1, nn.LayerNorm) and has_parameters(self.norm1) and self.attn.has_plain_qkv()

    def attention_branch_of_each(self, x: Tensor, grid: Grid, padding: Padding | None = None) -> Tensor:
        """`attention_branch`, with the result of each image of a padded batch as if it were alone."""
        if padding is None or self.attn.masks_padding:
            return self.attention_branch(x, grid, padding)
        out = torch.zeros_like(x)
        for image, ((rows, columns), own) in enumerate(zip(padding.sizes.tolist(), padding.token_mask, strict=True)):
            out[image, own] = self.attention_branch(x[image, own][None], (rows, columns))[0].to(out.dtype)
        return out

    def forward(self, x: Tensor, grid: Grid, padding: Padding | None = None) -> Tensor:
        """x (B, N, C), prefix tokens and then a map of grid (height, width) → the same shape

        With `padding`, tokens beyond an image's border change nothing inside it. What they hold afterwards is not
        defined.
        """
        if not self.training and padding is None and self.pays("projected", x):
            assert self.attn.proj.bias is not None
            attended = self.attention_branch(x, grid, project=False)
            return self.add_mlp(x, OutputProjection(attended, self.attn.proj.weight, self.attn.proj.bias))
        x = x + self.drop_path1(self.attention_branch_of_each(x, grid, padding))
        if self.pays("training" if self.training else "inference", x):
            return self.add_mlp(x)
        return x + self.drop_path2(self.mlp(self.norm2(x)))

    @asked_once
    def has_plain_projection(self) -> bool:
        """Whether the projection is all that stands between the attention's heads and the sum, in inference."""
        return self.attn.has_plain_projection() and not is_changed(self.drop_path1)

    def pays(self, use: str, x: Tensor) -> bool:
        """Whether `optimize` allows the kernel, and it was measured to be faster for so many tokens.

        Hooks and adapters may have come after `optimize`.
        """
        return (
            use in self.fused
            and self.has_plain_mlp()
            and not (self.training and self.drops_mlp())
            and (use != "projected" or self.has_plain_projection())
            and pays_for(x, self.mlp.fc1.weight.shape[0], use)
        )

    def add_mlp(self, x: Tensor, projection: OutputProjection | None = None) -> Tensor:
        """The second half of the block, and before it the end of the attention, if it is given."""
        norm, fc1, fc2 = self.norm2, self.mlp.fc1, self.mlp.fc2
        assert fc1.bias is not None
        assert fc2.bias is not None
        tensors = (norm.weight, norm.bias, fc1.weight, fc1.bias, fc2.weight, fc2.bias)
        return add_mlp(x, *tensors, projection=projection, eps=norm.eps)
