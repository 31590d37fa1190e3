"""The operation alone, from the output of a qkv projection to the attention's output, and back."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from inline_attention.layers.family import POLAFORMER_POWER
from inline_attention.ops import (
    inline_attention,
    inline_attention_projected,
    linear_attention_projected,
    tangent_attention_projected,
)
from inline_attention.ops.reference import accumulation_dtype, anchor_weight
from inline_attention.printing import table

from .record import check_contenders
from .timing import Call, Effort, Timing, captured, describe_error, measure, peak_memory

# In units of the bytes of one of q, k, v. The forward pass reads them and writes the output. The backward pass reads
# them and the gradient of the output, and writes three gradients.
FLOOR_UNITS = {"forward": 4, "forward+backward": 11}


@dataclass(frozen=True)
class Case:
    """A batch of maps with prefix tokens, written as BATCH,SIDE[xSIDE][+PREFIX],HEADSxDIM"""

    batch: int
    height: int
    width: int
    prefix: int
    heads: int
    head_dim: int

    @classmethod
    def parse(cls, text: str) -> "Case":
        match = re.fullmatch(r"(\d+),(\d+)(?:x(\d+))?(?:\+(\d+))?,(\d+)x(\d+)", text)
        if not match or 0 in [int(match[i] or 1) for i in (1, 2, 3, 5, 6)]:
            raise ValueError(f"case {text!r}; expected BATCH,SIDE[xSIDE][+PREFIX],HEADSxDIM, such as 256,14+1,6x32")
        batch, height, width, prefix, heads, head_dim = match.groups()
        return cls(int(batch), int(height), int(width or height), int(prefix or 0), int(heads), int(head_dim))

    def __str__(self) -> str:
        side = f"{self.height}²" if self.height == self.width else f"{self.height}×{self.width}"
        return f"{self.batch}, {side}{f'+{self.prefix}' if self.prefix else ''}, {self.heads}×{self.head_dim}"

    @property
    def tokens(self) -> int:
        return self.prefix + self.height * self.width

    @property
    def elements(self) -> int:
        """Elements of one of q, k, v."""
        return self.batch * self.tokens * self.heads * self.head_dim


GPU_CASES = (
    "128,14,6x32", "256,14+1,6x32", "64,28,12x32", "32,40,6x32", "16,64,6x32", "4,128,6x32", "1,256,6x32", "1,512,6x32"
)  # fmt: skip
CPU_CASES = ("8,14,6x32", "8,14+1,6x32", "64,7,6x32", "4,28,6x32", "2,32,6x32", "1,56,6x32", "1,64,6x32")
QUICK_CASES = ("8,14,6x32", "64,7,6x32", "2,32,6x32")


@dataclass(frozen=True)
class Inputs:
    """The inputs of every contender: the output of a projection, and q, k, v as views of it.

    A contender is differentiated with respect to its own inputs. None has to join three gradients.
    """

    case: Case
    qkv: Tensor  # (B, N, 3, heads, d)
    q: Tensor  # (B, N, heads, d)
    k: Tensor
    v: Tensor
    local_weight: Tensor  # (B, heads, d, 9)
    anchor: Tensor  # (B, 1, heads, d)
    grad_out: Tensor  # (B, N, heads, d)

    @classmethod
    def draw(cls, case: Case, *, device: torch.device, dtype: torch.dtype) -> "Inputs":
        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, dtype=dtype)

        heads = (case.heads, case.head_dim)
        qkv = normal(case.batch, case.tokens, 3, *heads)
        q, k, v = (x.detach().requires_grad_() for x in qkv.unbind(2))
        local_weight = (normal(case.batch, *heads, 9) / 3).requires_grad_()
        anchor = (normal(case.batch, 1, *heads) / 5).requires_grad_()
        grad_out = normal(case.batch, case.tokens, *heads)
        return cls(case, qkv.detach().requires_grad_(), q, k, v, local_weight, anchor, grad_out)


def _options(x: Inputs) -> dict:
    return dict(local_weight=x.local_weight, grid=(x.case.height, x.case.width), num_prefix_tokens=x.case.prefix)


def fused(x: Inputs) -> Tensor:
    return inline_attention_projected(x.qkv, backend="triton", **_options(x))


def linear(x: Inputs) -> Tensor:
    return linear_attention_projected(x.qkv, backend="triton", **_options(x))


def linear_plain(x: Inputs) -> Tensor:
    return linear_attention_projected(x.qkv, backend="triton")


def mala(x: Inputs) -> Tensor:
    return linear_attention_projected(
        x.qkv, normalization="magnitude", feature_map="elu_plus_one", backend="triton", **_options(x)
    )


def tangent(x: Inputs) -> Tensor:
    """Called as the layer does, with the mean query from the mean token."""
    return tangent_attention_projected(x.qkv, anchor=x.anchor, backend="triton", **_options(x))


def rala(x: Inputs) -> Tensor:
    """Without its gate, which is a linear layer of the token."""
    weight = anchor_weight(x.anchor, x.qkv[:, :, 1], None, x.case.head_dim**-0.5)
    return linear_attention_projected(
        x.qkv,
        feature_map="elu_plus_one",
        token_weight=weight.permute(0, 2, 1),
        backend="triton",
        **_options(x),
    )


def polarised(x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """PolaFormer's two heads for each, of equal and of opposite signs, with the powers that its layer starts with."""
    power = 1 + POLAFORMER_POWER / 2
    parts = [F.relu(sign * y.to(accumulation_dtype(y.dtype))).pow(power) for y in (x.q, x.k) for sign in (1, -1)]
    q_positive, q_negative, k_positive, k_negative = parts
    signs = (torch.cat([q_positive, q_negative], -1), torch.cat([q_negative, q_positive], -1))
    key = torch.cat([k_positive, k_negative], -1)
    v = x.v.unflatten(3, (2, -1)).flatten(2, 3)
    return torch.stack(signs, 3).flatten(2, 3), key.repeat_interleave(2, dim=2), v


def polaformer(x: Inputs) -> Tensor:
    """Without its gate, which is a linear layer of the token."""
    q, k, v = polarised(x)
    options = _options(x) | dict(local_weight=x.local_weight.unflatten(2, (2, -1)).flatten(1, 2))
    projections = (y.to(q.dtype).unsqueeze(2) for y in (q, k, v))
    out = linear_attention_projected(*projections, feature_map="identity", backend="triton", **options)
    return out.to(x.v.dtype).reshape(x.v.shape)


def reference(x: Inputs) -> Tensor:
    return inline_attention(x.q, x.k, x.v, backend="reference", **_options(x))


def convolve(rows: Tensor, v: Tensor, *, local_weight: Tensor, grid: tuple[int, int], num_prefix_tokens: int) -> Tensor:
    """rows (B, N, heads, d) plus the local residual of v, as a convolution with as many groups as there are channels in
    the batch"""
    batch, tokens, heads, head_dim = v.shape
    v_map = v[:, num_prefix_tokens:].unflatten(1, grid).flatten(3).permute(0, 3, 1, 2)  # (B, C, height, width)
    channels = batch * heads * head_dim
    taps = local_weight.reshape(channels, 1, 3, 3)
    local = F.conv2d(v_map.reshape(1, channels, *grid), taps, padding=1, groups=channels)
    local = local.reshape(batch, heads, head_dim, -1).permute(0, 3, 1, 2)
    prefix, rest = rows.split([num_prefix_tokens, tokens - num_prefix_tokens], dim=1)
    return torch.cat([prefix, rest + local], dim=1)


def textbook_attention(
    q: Tensor, k: Tensor, v: Tensor, *, local_weight: Tensor, grid: tuple[int, int], num_prefix_tokens: int
) -> Tensor:
    """InLine attention as the paper writes it, in the inputs' dtype: products of matrices, and the local residual as a
    convolution. (B, N, heads, d) → the same"""
    tokens, scale = q.shape[1], q.shape[-1] ** -0.5
    q_, k_, v_ = (x.transpose(1, 2) for x in (q, k, v))  # (B, heads, N, d)
    k_mean, v_mean = (x.mean(2, keepdim=True) for x in (k_, v_))
    state = (k_.mT * (scale / tokens)) @ v_
    out = q_ @ state + (1 - scale * (q_ @ k_mean.mT)) * v_mean
    return convolve(out.transpose(1, 2), v, local_weight=local_weight, grid=grid, num_prefix_tokens=num_prefix_tokens)


def textbook(x: Inputs) -> Tensor:
    return textbook_attention(x.q, x.k, x.v, **_options(x))


def linear_textbook(x: Inputs) -> Tensor:
    q, k, v = (y.transpose(1, 2) for y in (F.relu(x.q), F.relu(x.k), x.v))
    out = q @ (k.mT @ v) / (q @ k.sum(2, keepdim=True).mT + 1e-6)
    return convolve(out.transpose(1, 2), x.v, **_options(x))


def mala_textbook(x: Inputs) -> Tensor:
    share = x.case.head_dim**-0.5 / x.case.tokens
    q, k, v = (y.transpose(1, 2) for y in (F.elu(x.q) + 1, F.elu(x.k) + 1, x.v))
    z = share * (q @ k.sum(2, keepdim=True).mT)
    out = (1 + 1 / z) * (q @ (k.mT * share @ v)) - z * v.mean(2, keepdim=True)
    return convolve(out.transpose(1, 2), x.v, **_options(x))


def tangent_textbook(x: Inputs) -> Tensor:
    scale = x.case.head_dim**-0.5
    q, k, v = (y.transpose(1, 2) for y in (x.q, x.k, x.v))
    anchor = x.anchor.transpose(1, 2).to(q.dtype)
    share = (scale * (anchor @ k.mT)).softmax(-1)  # (B, heads, 1, N)
    k_mean, v_mean = share @ k, share @ v
    out = (q - anchor) @ ((k - k_mean).mT * share @ (v - v_mean) * scale) + v_mean
    return convolve(out.transpose(1, 2), x.v, **_options(x))


def rala_textbook(x: Inputs) -> Tensor:
    q, k, v = (y.transpose(1, 2) for y in (F.elu(x.q) + 1, F.elu(x.k) + 1, x.v))
    scores = x.case.head_dim**-0.5 * (x.anchor.transpose(1, 2).to(q.dtype) @ x.k.transpose(1, 2).mT)
    k = k * (x.case.tokens * scores.softmax(-1)).mT
    out = q @ (k.mT @ v) / (q @ k.sum(2, keepdim=True).mT + 1e-6)
    return convolve(out.transpose(1, 2), x.v, **_options(x))


def polaformer_textbook(x: Inputs) -> Tensor:
    q, k, v = (y.transpose(1, 2) for y in polarised(x))
    out = q @ (k.mT @ v.to(q.dtype)) / (q @ k.sum(2, keepdim=True).mT + 1e-6)
    return convolve(out.to(v.dtype).transpose(1, 2).reshape(x.v.shape), x.v, **_options(x))


def flash_bla(x: Inputs) -> Tensor:
    """The package flash-bidirectional-linear-attention, if it is installed. φ is applied before its kernels."""
    from flash_bla.ops.linear_attn.fused import linear_attention

    q, k, v = (y.transpose(1, 2) for y in (F.relu(x.q), F.relu(x.k), x.v))
    return linear_attention(q, k, v).transpose(1, 2)


def _softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def softmax(x: Inputs) -> Tensor:
    return _softmax(x.q, x.k, x.v)


def softmax_math(x: Inputs) -> Tensor:
    """Softmax written out, the N×N matrix in memory. FlashAttention and the other fused kernels are not used."""
    with sdpa_kernel(SDPBackend.MATH):
        return _softmax(x.q, x.k, x.v)


def softmax_wide(x: Inputs) -> Tensor:
    """Half as many heads of twice the width, as in softmax models of the same width."""
    if x.case.heads % 2:
        raise ValueError(f"{x.case.heads} heads cannot be halved")
    heads = (x.case.heads // 2, 2 * x.case.head_dim)
    return _softmax(*(y.flatten(2).unflatten(2, heads) for y in (x.q, x.k, x.v))).reshape(x.q.shape)


@dataclass(frozen=True)
class Contender:
    title: str
    call: Callable[[Inputs], Tensor]
    leaves: Callable[[Inputs], tuple[Tensor, ...]]
    textbook: str | None = "textbook"  # the contender that its time is compared with


def _separate(x: Inputs) -> tuple[Tensor, ...]:
    return x.q, x.k, x.v, x.local_weight


def _projected(x: Inputs) -> tuple[Tensor, ...]:
    return x.qkv, x.local_weight


def _plain(x: Inputs) -> tuple[Tensor, ...]:
    return x.q, x.k, x.v


def anchored(leaves: Callable[[Inputs], tuple[Tensor, ...]]) -> Callable[[Inputs], tuple[Tensor, ...]]:
    return lambda x: (*leaves(x), x.anchor)


CONTENDERS = {
    "fused": Contender("InLine, fused", fused, _projected),
    "reference": Contender("InLine, reference", reference, _separate),
    "textbook": Contender("InLine, textbook", textbook, _separate),
    "softmax": Contender("softmax (SDPA)", softmax, _plain),
    "softmax_math": Contender("softmax (SDPA, written out)", softmax_math, _plain),
    "softmax_wide": Contender("softmax, half the heads", softmax_wide, _plain),
    "linear": Contender("linear, fused", linear, _projected, "linear_textbook"),
    "linear_textbook": Contender("linear, textbook", linear_textbook, _separate, "linear_textbook"),
    "mala": Contender("MALA, fused", mala, _projected, "mala_textbook"),
    "mala_textbook": Contender("MALA, textbook", mala_textbook, _separate, "mala_textbook"),
    "tangent": Contender("tangent, fused", tangent, anchored(_projected), "tangent_textbook"),
    "tangent_textbook": Contender("tangent, textbook", tangent_textbook, anchored(_separate), "tangent_textbook"),
    "rala": Contender("RALA, fused", rala, anchored(_projected), "rala_textbook"),
    "rala_textbook": Contender("RALA, textbook", rala_textbook, anchored(_separate), "rala_textbook"),
    "polaformer": Contender("PolaFormer, fused", polaformer, _separate, "polaformer_textbook"),
    "polaformer_textbook": Contender("PolaFormer, textbook", polaformer_textbook, _separate, "polaformer_textbook"),
    "linear_plain": Contender("linear without residual, fused", linear_plain, lambda x: (x.qkv,), None),
    "flash_bla": Contender("linear without residual, flash_bla", flash_bla, _plain, None),
}
DEFAULT = ("fused", "reference", "textbook", "softmax", "softmax_wide")
ON_GPU_ONLY = ("fused", "linear", "mala", "tangent", "rala", "polaformer", "linear_plain", "flash_bla")


@dataclass(frozen=True)
class OpResult:
    case: str
    direction: str
    contender: str
    timing: Timing | None
    floor_seconds: float
    peak_bytes: int | None
    captured: bool  # in a CUDA graph; otherwise the time includes calling the kernels and launching them
    error: str | None = None


def choose_contenders(names: Sequence[str] | None, device: torch.device) -> list[str]:
    names = list(names or [name for name in DEFAULT if device.type == "cuda" or name not in ON_GPU_ONLY])
    check_contenders(names, CONTENDERS)
    return names


def draw_sets(case: Case, *, device: torch.device, dtype: torch.dtype) -> list[Inputs]:
    """Several inputs on a GPU, so that none is still in the cache when it is used again."""
    sets = 1
    if device.type == "cuda":
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        sets = max(2, math.ceil(4 * cache / (3 * case.elements * dtype.itemsize)))
    return [Inputs.draw(case, device=device, dtype=dtype) for _ in range(sets)]


def run_case(
    case: Case,
    *,
    contenders: Sequence[str],
    directions: Sequence[str],
    device: torch.device,
    dtype: torch.dtype,
    bandwidth: float,
    effort: Effort,
) -> Iterator[list[OpResult]]:
    """Yields the results of one direction after the other."""
    inputs = draw_sets(case, device=device, dtype=dtype)
    for direction in directions:
        calls: dict[str, Call] = {}
        peaks: dict[str, int | None] = {}
        in_graph: dict[str, bool] = {}
        errors: dict[str, str] = {}
        for name in contenders:
            each = [bind(CONTENDERS[name], x, direction) for x in inputs]
            try:
                each[0]()
                peaks[name] = peak_memory(each[0], device)
                calls[name], in_graph[name] = in_turn(each, device)
            except Exception as error:  # the other contenders go on
                errors[name] = describe_error(error)
        outcome = measure(calls, device=device, effort=effort)
        results = []
        for name in contenders:
            timing = outcome.get(name, errors.get(name))
            if isinstance(timing, Timing):
                timing = timing.shared(len(inputs))
            results.append(
                OpResult(
                    case=str(case),
                    direction=direction,
                    contender=name,
                    timing=timing if isinstance(timing, Timing) else None,
                    floor_seconds=FLOOR_UNITS[direction] * case.elements * dtype.itemsize / bandwidth,
                    peak_bytes=peaks.get(name),
                    captured=in_graph.get(name, False),
                    error=timing if isinstance(timing, str) else None,
                )
            )
        yield results


def bind(contender: Contender, x: Inputs, direction: str) -> Call:
    """The contender's call on these inputs, forward or forward and backward. It returns the output or the gradients."""
    if direction == "forward":

        def forward() -> Tensor:
            with torch.no_grad():
                return contender.call(x)

        return forward

    leaves = contender.leaves(x)

    def forward_backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(contender.call(x), leaves, x.grad_out)

    return forward_backward


def in_turn(calls: Sequence[Call], device: torch.device) -> tuple[Call, bool]:
    """All calls as one call, and whether that is a CUDA graph."""
    if device.type == "cuda":
        try:
            return captured(calls), True
        except RuntimeError:  # it cannot be captured, so its launches are timed as well
            torch.cuda.synchronize()

    def run() -> None:
        for call in calls:
            call()

    return run, False


def op_table(results: Sequence[dict]) -> str:
    """A row for each case, direction and contender. "timed" says what was timed: kernels in a CUDA graph, or calls.

    "textbook ÷" is relative to the attention's own textbook form, with the residual; for softmax it is InLine's.
    """
    seconds = {(r["case"], r["direction"], r["contender"]): r["timing"]["median"] for r in results if r["timing"]}
    rows = []
    for r in results:
        timing = r["timing"]
        cells = [r["case"], r["direction"], CONTENDERS[r["contender"]].title]
        if timing is None:
            rows.append([*cells, r["error"], *[""] * 5])
            continue
        base = seconds.get((r["case"], r["direction"], CONTENDERS[r["contender"]].textbook))
        cells.append(f"{timing['median'] * 1e3:.3f}")
        cells.append(f"{timing['low'] * 1e3:.3f}–{timing['high'] * 1e3:.3f}")
        cells.append("graph" if r["captured"] else "calls")
        cells.append(f"{timing['median'] / r['floor_seconds']:.1f}")
        cells.append("" if base is None else f"{base / timing['median']:.2f}")
        cells.append("" if r["peak_bytes"] is None else f"{r['peak_bytes'] / 1e6:.1f}")
        rows.append(cells)
    header = [
        "batch, map, heads×d", "", "contender", "ms", "quartiles", "timed", "× floor", "textbook ÷", "peak MB"
    ]  # fmt: skip
    return table(header, rows)
