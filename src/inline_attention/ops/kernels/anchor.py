"""The gradient of an anchor, whose scores weigh the tokens. Vocabulary as in `blocks.py`."""

import triton
import triton.language as tl

from .blocks import (
    SIZES,
    channels,
    load_origin,
    load_rows,
    load_scalars,
    present,
    same_head,
    state_offsets,
    tokens_of_part,
    widened,
)


@triton.jit(do_not_specialize=SIZES)
def anchor_grad_kernel(
    p_k, p_x, p_mask, p_s, p_g_mean, p_part, N, scale, blocks, heads, stride_kb, stride_k,
    D: tl.constexpr, DV: tl.constexpr, HEADS: tl.constexpr, BC: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr, HAS_MASK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """s·Σ x·(k − origin) over a part of the tokens, and −dv̄·Sᵀ in the first part. Grid (B·blocks, parts)

    x (B, heads, N), the gradient of the scores, whose sum is zero → parts (parts, B, heads, d). The anchor is also the
    offset of the queries, and −Σ dq over them is −dv̄·Sᵀ.
    """
    i_b = tl.cast(tl.program_id(0) // blocks, tl.int64)
    h = (tl.program_id(0) % blocks) * HEADS
    parts = tl.num_programs(1)
    o_c, m_c = channels(h, heads, D, HEADS, BC)
    p_k += i_b * stride_kb + h * D
    p_x += (i_b * heads + h) * N
    if HAS_MASK:
        p_mask += i_b * N
    b_origin = load_origin(p_k, p_mask, o_c, m_c, HAS_MASK, PRECISION)
    t_begin, t_end = tokens_of_part(widened(tl.program_id(1), WIDE), parts, N, BN)
    o_t = tl.arange(0, BN)
    b_sum = tl.zeros([BN, BC], tl.float32)
    for t in range(t_begin, t_end, BN):
        m_t = present(p_mask, t, o_t, t + o_t < t_end, HAS_MASK)
        b_k = load_rows(p_k, stride_k, t, o_t, m_t, o_c, m_c).to(tl.float32) - b_origin[None, :]
        b_sum += b_k * load_scalars(p_x, N, t, o_t, m_t, o_c, m_c, D, HEADS)
    b_grad = tl.sum(b_sum, 0) * tl.cast(scale, tl.float32)
    if tl.program_id(1) == 0:
        o_v, m_v = channels(h, heads, DV, HEADS, BV)
        p_s += (i_b * heads + h) * D * DV
        m_head = same_head(o_c, m_c, o_v, m_v, D, DV)
        b_s = tl.load(p_s + state_offsets(o_c, o_v, DV), mask=m_head, other=0.0).to(tl.float32)
        b_g_mean = tl.load(p_g_mean + (i_b * heads + h) * DV + o_v, mask=m_v, other=0.0)
        b_grad -= tl.sum(b_s * b_g_mean[None, :], 1)
    samples = tl.cast(tl.num_programs(0) // blocks, tl.int64)
    p = p_part + ((tl.program_id(1) * samples + i_b) * heads + h) * D + o_c
    tl.store(p, b_grad.to(p_part.dtype.element_ty), mask=m_c)
