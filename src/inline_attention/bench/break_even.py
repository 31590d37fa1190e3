"""The number of tokens from which the linear form of softmax attention is faster than softmax on a device."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from inline_attention.layers.tangent import expand_at_anchors
from inline_attention.ops import local_residual, tangent_attention_projected
from inline_attention.printing import table

from .op import Case, Contender, Inputs, bind, softmax
from .timing import Effort, Timing, measure

SIDES = (4, 7, 10, 14, 20, 28, 40, 56)  # of the token map
# Of a batch, at every size: it keeps the device busy. A single image may give another answer.
TOKENS = {"cuda": 2**18, "cpu": 2**12}


def tangent(x: Inputs, *, anchors: int = 1) -> Tensor:
    """As a converted layer computes it, with the residual, by the fastest backend of the device."""
    grid = (x.case.height, x.case.width)
    if anchors == 1:
        return tangent_attention_projected(x.qkv, anchor=x.anchor, local_weight=x.local_weight, grid=grid)
    q, _, v = x.qkv.unbind(2)
    out = expand_at_anchors(lambda a: tangent_attention_projected(x.qkv, anchor=a), q, None, count=anchors)
    return out + local_residual(v, x.local_weight, grid=grid)


@dataclass(frozen=True)
class BreakEvenResult:
    """Seconds of one forward call with this many tokens."""

    tokens: int
    batch: int
    heads: int
    head_dim: int
    softmax: float | None
    linear: float | None
    error: str | None = None
    anchors: int = 1

    @property
    def is_faster(self) -> bool:
        """Whether the linear form is the faster one."""
        return self.softmax is not None and self.linear is not None and self.linear < self.softmax


def time_sizes(
    heads: int,
    head_dim: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
    effort: Effort,
    sides: Sequence[int] = SIDES,
    anchors: int = 1,
    batch: int | None = None,
) -> list[BreakEvenResult]:
    """Time softmax attention and its tangent on square maps of these sides, in turn.

    batch: images at every size. None: as many as have `TOKENS` tokens.
    """
    results = []
    for side in sides:
        images = batch or max(1, TOKENS.get(device.type, TOKENS["cpu"]) // side**2)
        inputs = Inputs.draw(Case(images, side, side, 0, heads, head_dim), device=device, dtype=dtype)
        calls = {
            name: bind(Contender(name, call, lambda x: ()), inputs, "forward")
            for name, call in (("softmax", softmax), ("linear", partial(tangent, anchors=anchors)))
        }
        outcome = measure(calls, device=device, effort=effort)
        seconds = {name: one.median for name, one in outcome.items() if isinstance(one, Timing)}
        error = next((one for one in outcome.values() if isinstance(one, str)), None)
        times = (seconds.get("softmax"), seconds.get("linear"))
        results.append(BreakEvenResult(side**2, images, heads, head_dim, *times, error, anchors))
    return results


def measured(results: Sequence[BreakEvenResult]) -> list[BreakEvenResult]:
    """Those at which both were timed. A size at which one failed says nothing of which is faster."""
    return [result for result in results if result.error is None]


def break_even(results: Sequence[BreakEvenResult]) -> int | None:
    """The fewest tokens at which the linear form is faster, and at all larger sizes too. None: not at the largest."""
    found = None
    for result in sorted(measured(results), key=lambda result: -result.tokens):
        if not result.is_faster:
            break
        found = result.tokens
    return found


def break_even_table(results: Sequence[dict]) -> str:
    rows = []
    for r in results:
        cells = [f"{r['heads']}×{r['head_dim']}", f"{r['tokens']:,}", str(r["batch"])]
        if r["error"] is not None:
            rows.append([*cells, r["error"], "", ""])
            continue
        times = [f"{r[name] * 1e3:.3f}" for name in ("softmax", "linear")]
        rows.append([*cells, *times, f"{r['softmax'] / r['linear']:.2f}"])
    return table(["heads×d", "tokens", "batch", "softmax, ms", "tangent, ms", "softmax ÷"], rows)


def describe_break_even(results: Sequence[BreakEvenResult]) -> str:
    found, tried = break_even(results), [result.tokens for result in measured(results)]
    if not tried:
        return "no size could be timed"
    if found is None:
        return f"softmax is faster up to {max(tried):,} tokens, the most that were tried"
    if found == min(tried):
        return f"the linear form is faster from {found:,} tokens on, the fewest that were tried"
    return f"the linear form is faster from {found:,} tokens on"
