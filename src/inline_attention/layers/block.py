"""The pre-norm transformer block that all four families share."""

import torch
from timm.layers import DropPath
from timm.layers import Mlp as TimmMlp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .attention import Attention
from .padding import Grid, Padding


class Mlp(TimmMlp):
    """timm's perceptron, whose hidden activations compiled training does not keep: the backward reads what they are
    made from anyway, and makes them again for one write more. That is a fifth of what a block keeps.

    (…, C) → (…, C)
    """

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        if self.training and torch.compiler.is_dynamo_compiling() and torch.is_grad_enabled():
            return checkpoint(self.activate_and_project, x, use_reentrant=False)
        return self.activate_and_project(x)

    def activate_and_project(self, x: Tensor) -> Tensor:
        return self.drop2(self.fc2(self.norm(self.drop1(self.act(x)))))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), each branch with stochastic depth. Subclasses change `attend`."""

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

    def attend(self, x: Tensor, grid: Grid, padding: Padding | None = None) -> Tensor:
        return self.attn(self.norm1(x), grid, token_mask=None if padding is None else padding.token_mask)

    def attend_each(self, x: Tensor, grid: Grid, padding: Padding | None = None) -> Tensor:
        """`attend`, where every image of a padded batch gets what it would get alone."""
        if padding is None or self.attn.masks_padding:
            return self.attend(x, grid, padding)
        out = torch.zeros_like(x)
        for image, ((rows, columns), own) in enumerate(zip(padding.sizes.tolist(), padding.token_mask, strict=True)):
            out[image, own] = self.attend(x[image, own][None], (rows, columns))[0].to(out.dtype)
        return out

    def forward(self, x: Tensor, grid: Grid, padding: Padding | None = None) -> Tensor:
        """x (B, N, C) with a map of grid (height, width) behind any prefix tokens → the same shape

        With `padding`, tokens beyond an image's border change nothing inside it; what they hold afterwards is not
        defined.
        """
        x = x + self.drop_path1(self.attend_each(x, grid, padding))
        return x + self.drop_path2(self.mlp(self.norm2(x)))
