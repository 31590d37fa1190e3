"""Checks of the inputs that the operations share. Each error names the value and what was expected."""

import functools
import warnings
from collections.abc import Sequence
from itertools import pairwise
from numbers import Real

import torch
from torch import Tensor

from .local import TAPS, Grid, LocalSource
from .precision import is_autocast_on
from .tracing import is_exporting

ROWS = "(B, N, heads, d)"
PACKED_ROWS = "(T, heads, d)"


def shape_of(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def check_shape(name: str, x: Tensor, expected: tuple[int, ...], **weight: Tensor) -> None:
    """Raises if a parameter does not fit a weight, which is given by its name."""
    if x.shape != expected:
        ((of, w),) = weight.items()
        raise ValueError(f"{name} has shape {shape_of(x)}; expected {expected}, as {of} is {shape_of(w)}")


def check_linear(x: Tensor, **weight: Tensor) -> None:
    """Raises if a linear layer cannot take x (…, C). Its weight (outputs, C) is given by its name."""
    ((name, w),) = weight.items()
    if x.ndim < 1 or x.shape[-1] != w.shape[1]:
        raise ValueError(f"x has shape {shape_of(x)}; expected (…, {w.shape[1]}), as {name} is {shape_of(w)}")
    if w.dtype != x.dtype and not is_autocast_on(x.device):
        raise ValueError(f"x is {x.dtype} and {name} is {w.dtype}; cast one of them, or use torch.autocast")


def check_local_parameters(w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> None:
    """Raises if they are not those of an MLP that makes nine taps of each channel."""
    if w1.ndim != 3 or w1.shape[1] != w1.shape[2]:
        raise ValueError(f"w1 has shape {shape_of(w1)}; expected (heads, d, d)")
    heads, d, _ = w1.shape
    check_shape("b1", b1, (heads, d), w1=w1)
    check_shape("w2", w2, (heads, TAPS * d, d), w1=w1)
    check_shape("b2", b2, (heads, TAPS * d), w1=w1)


def check_rows(name: str, x: Tensor, *, layout: str) -> None:
    if x.ndim != layout.count(",") + 1:
        raise ValueError(f"{name} has shape {shape_of(x)}; expected {layout}")
    if not x.is_floating_point():
        raise ValueError(f"{name} is {x.dtype}; expected a floating-point tensor")


def check_qkv(q: Tensor, k: Tensor, v: Tensor | None, *, layout: str) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x is None:
            continue
        check_rows(name, x, layout=layout)
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{name} is {x.dtype} on {x.device} but q is {q.dtype} on {q.device}; "
                "convert them to one dtype and device"
            )
    if v is not None and v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"v has shape {shape_of(v)}; expected that of k, {shape_of(k)}, up to the last dimension")
    if q.shape[-2:] != k.shape[-2:]:
        raise ValueError(
            f"q has (heads, d) = {shape_of(q)[-2:]} but k has {shape_of(k)[-2:]}; they must be equal. Rows are "
            f"{layout}: use x.transpose(1, 2) for tensors in the order (B, heads, N, d) of scaled_dot_product_attention"
        )
    if k.ndim == 4 and q.shape[0] != k.shape[0]:
        raise ValueError(f"q is a batch of {q.shape[0]} but k of {k.shape[0]}; they must be equal")
    if k.shape[-3] == 0:
        raise ValueError(f"k has shape {shape_of(k)}: no token to attend to; expected one or more")
    for name, x in (("k", k), ("v", v)):
        if x is not None and x.shape[-1] == 0:
            raise ValueError(f"{name} has shape {shape_of(x)}: heads of no channels; expected {layout}, d at least 1")


def hint_at_order(q: Tensor, k: Tensor) -> None:
    """Warn about more heads than tokens: legal but rare, and usual for tensors in the order (B, heads, N, d)."""
    if torch.compiler.is_compiling() or is_exporting():
        return
    if q.shape[2] > q.shape[1] and k.shape[2] > k.shape[1]:
        warn_of_order()


@functools.cache  # one warning a process
def warn_of_order() -> None:
    warnings.warn(
        "q and k have more heads than tokens. Rows are (B, N, heads, d) here; if yours are (B, heads, N, d), as "
        "scaled_dot_product_attention takes them, pass x.transpose(1, 2), which copies nothing",
        UserWarning,
        stacklevel=5,
    )


def check_device(name: str, x: Tensor, device: torch.device) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is a {type(x).__name__}; expected a torch.Tensor")
    if x.device != device:
        raise ValueError(f"{name} is on {x.device} but the tokens are on {device}; move it there")


def check_mask(name: str, mask: Tensor | None, x: Tensor) -> None:
    """Raises if a mask is not one over the tokens of x (B, N, …)."""
    if mask is None:
        return
    check_device(name, mask, x.device)
    expected = shape_of(x)[:2]
    if mask.shape == expected and mask.dtype == torch.bool:
        return
    what = f"{name} has shape {shape_of(mask)} and dtype {mask.dtype}"
    if mask.ndim > 2 or (mask.ndim == 2 and mask.shape[-2] == mask.shape[-1] != expected[0]):
        raise ValueError(
            f"{what}; a mask over pairs of tokens is impossible for linear attention, whose queries share one state. "
            f"Pass a bool mask over tokens, (B, N) = {expected}, True where a token is present"
        )
    raise ValueError(f"{what}; expected bool (B, N) = {expected}, True where a token is present")


def check_token_weight(token_weight: Tensor | None, k: Tensor) -> None:
    if token_weight is None:
        return
    check_device("token_weight", token_weight, k.device)
    expected = shape_of(k)[:3]
    if token_weight.shape != expected or not token_weight.is_floating_point():
        raise ValueError(
            f"token_weight has shape {shape_of(token_weight)} and dtype {token_weight.dtype}; "
            f"expected (B, N, heads) = {expected}, non-negative, in floating point"
        )


def check_one_query(name: str, x: Tensor | None, q: Tensor) -> None:
    """Raises if x is not one query for each sample and head of q (B, Nq, heads, d)."""
    if x is None:
        return
    check_device(name, x, q.device)
    expected = (q.shape[0], 1, *shape_of(q)[2:])
    if x.shape != expected or not x.is_floating_point():
        raise ValueError(
            f"{name} has shape {shape_of(x)} and dtype {x.dtype}; expected (B, 1, heads, d) = {expected}, "
            "one query for each head, in floating point"
        )


def check_local_weight(local_weight: Tensor, v: Tensor, *, images: int) -> None:
    check_device("local_weight", local_weight, v.device)
    expected = (images, *shape_of(v)[-2:], TAPS)
    if local_weight.shape != expected or not local_weight.is_floating_point():
        raise ValueError(
            f"local_weight has shape {shape_of(local_weight)} and dtype {local_weight.dtype}; "
            f"expected (B, heads, d, 9) = {expected}, one 3×3 kernel per channel, in floating point"
        )


def check_prefix(num_prefix_tokens: int) -> None:
    if num_prefix_tokens < 0:
        raise ValueError(f"num_prefix_tokens={num_prefix_tokens}; expected 0 or more")


def check_grid(grid: Grid, *, tokens: int, num_prefix_tokens: int) -> None:
    try:
        height, width = grid
    except (TypeError, ValueError):
        raise ValueError(f"grid={grid!r}; expected (height, width)") from None
    if isinstance(height, float) or isinstance(width, float):
        raise ValueError(f"grid={grid!r}; expected (height, width) as integers")
    if height < 1 or width < 1 or num_prefix_tokens + height * width != tokens:
        raise ValueError(
            f"grid {height}×{width} with {num_prefix_tokens} prefix tokens makes "
            f"{num_prefix_tokens + height * width} tokens, but there are {tokens}; "
            "pass the (height, width) of the token map"
        )


def check_local(
    local_weight: Tensor | LocalSource | None,
    q: Tensor,
    v: Tensor,
    *,
    grids: Sequence[Grid] | None,
    lengths: Sequence[int],
    num_prefix_tokens: int,
    packed: bool,
) -> None:
    """The maps of all images, and the local weight on them. `lengths` are their numbers of tokens."""
    check_prefix(num_prefix_tokens)
    if grids is not None:
        if len(grids) != len(lengths):
            raise ValueError(f"there are {len(grids)} grids for {len(lengths)} images in cu_seqlens")
        for grid, tokens in zip(grids, lengths, strict=True):
            check_grid(grid, tokens=tokens, num_prefix_tokens=num_prefix_tokens)
    if local_weight is None:
        return
    if grids is None:
        needed = "grids, a (height, width) for each image" if packed else "grid=(height, width)"
        raise ValueError(f"local_weight needs {needed}: the token count does not say how the map is shaped")
    if q.shape[1] != v.shape[1]:
        raise ValueError(
            f"local_weight needs queries on the map of v, but there are {q.shape[1]} queries and {v.shape[1]} keys"
        )
    if isinstance(local_weight, LocalSource):
        expected = (*shape_of(v)[:2], v.shape[2] * v.shape[3])
        if packed or shape_of(local_weight.x) != expected:
            shape = shape_of(local_weight.x)
            raise ValueError(
                f"the LocalSource has tokens of shape {shape}; expected (B, N, heads·e) = {expected}, "
                "and images that are not packed"
            )
        check_local_parameters(*local_weight[1:])
        if local_weight.w1.shape[:2] != v.shape[2:]:
            raise ValueError(
                f"w1 of the LocalSource has shape {shape_of(local_weight.w1)}; expected (heads, e, e) for values of "
                f"(heads, e) = {shape_of(v)[2:]}"
            )
        return
    check_local_weight(local_weight, v, images=len(lengths) if packed else v.shape[0])


def check_over_pairs(name: str, x: Tensor, q: Tensor, k: Tensor) -> None:
    """Raises if x, a value for each pair of tokens, does not broadcast to (B, heads, Nq, N)."""
    check_device(name, x, q.device)
    expected = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    sizes = zip(reversed(shape_of(x)), reversed(expected), strict=False)
    if x.ndim > 4 or any(size not in (1, whole) for size, whole in sizes):
        raise ValueError(
            f"{name} has shape {shape_of(x)}; expected one that broadcasts to (B, heads, Nq, N) = {expected}"
        )


def check_cu_seqlens(cu_seqlens: Tensor | Sequence[int], *, total: int) -> list[int]:
    if isinstance(cu_seqlens, Tensor):
        if cu_seqlens.ndim != 1 or cu_seqlens.is_floating_point():
            raise ValueError(
                f"cu_seqlens has shape {shape_of(cu_seqlens)} and dtype {cu_seqlens.dtype}; "
                "expected (images + 1,) integers"
            )
        bounds: list[int] = cu_seqlens.tolist()
    else:
        bounds = list(cu_seqlens)
    if len(bounds) < 2 or any(isinstance(bound, float) for bound in bounds):
        raise ValueError(f"cu_seqlens={bounds}; expected (images + 1,) integers")
    if bounds[0] != 0 or bounds[-1] != total or any(a >= b for a, b in pairwise(bounds)):
        raise ValueError(
            f"cu_seqlens={bounds} must rise from 0 to the token count {total}, every image at least one token"
        )
    return bounds


def default_scale(q: Tensor, scale: float | None) -> float:
    if isinstance(scale, Tensor):  # it would get no gradient, silently
        raise ValueError("scale is a tensor; expected a number. Multiply q by a scale that is learned")
    if scale is None:
        return q.shape[-1] ** -0.5
    if not isinstance(scale, (Real, torch.SymInt, torch.SymFloat)):
        raise ValueError(f"scale={scale!r}; expected a number")
    return scale
