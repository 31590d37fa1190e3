"""The scores of one query, the anchor of tangent attention, and their backward. Vocabulary as in `blocks.py`."""

import triton
import triton.language as tl

from .blocks import SIZES, head_sums, load_rows, load_shares, present, store_shares


@triton.jit(do_not_specialize=SIZES)
def scores_kernel(
    p_k, p_a, p_mask, p_score, N, scale, blocks, heads, stride_kb, stride_k,
    D: tl.constexpr, HEADS: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """s·a·k for every token, the least float32 for an absent one. Grid (B·blocks, tiles of BN tokens)

    a (B, heads, d) float32 → scores (B, heads, N) float32
    """
    i_b = tl.cast(tl.program_id(0) // blocks, tl.int64)
    h = (tl.program_id(0) % blocks) * HEADS
    o_c = tl.arange(0, BC)
    m_c = (o_c < HEADS * D) & (h * D + o_c < heads * D)
    p_k += i_b * stride_kb + h * D
    p_score += (i_b * heads + h) * N
    if HAS_MASK:
        p_mask += i_b * N
    b_a = tl.load(p_a + (i_b * heads + h) * D + o_c, mask=m_c, other=0.0) * tl.cast(scale, tl.float32)
    t = tl.program_id(1) * BN
    o_t = tl.arange(0, BN)
    m_t = t + o_t < N
    m_here = present(p_mask, t, o_t, m_t, HAS_MASK)
    b_k = load_rows(p_k, stride_k, t, o_t, m_here, o_c, m_c).to(tl.float32)
    b_score = head_sums(b_k * b_a[None, :], o_c, o_c, D, D, HEADS)
    if HAS_MASK:
        b_score = tl.where(m_here[:, None], b_score, -3.4028234663852886e38)
    store_shares(p_score, b_score, N, t, o_t, m_t, o_c, m_c, D, HEADS)


@triton.jit(do_not_specialize=SIZES)
def weighted_sum_kernel(
    p_k, p_x, p_mask, p_part, N, blocks, heads, stride_kb, stride_k,
    D: tl.constexpr, HEADS: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Σ x·k over a part of the tokens. Grid (B·blocks, parts); x (B, heads, N) → parts (parts, B, heads, d) float32"""
    i_b = tl.cast(tl.program_id(0) // blocks, tl.int64)
    h = (tl.program_id(0) % blocks) * HEADS
    parts = tl.num_programs(1)
    o_c = tl.arange(0, BC)
    m_c = (o_c < HEADS * D) & (h * D + o_c < heads * D)
    p_k += i_b * stride_kb + h * D
    p_x += (i_b * heads + h) * N
    if HAS_MASK:
        p_mask += i_b * N
    length = tl.cdiv(tl.cdiv(N, parts), BN) * BN
    t_begin = tl.minimum(tl.program_id(1) * length, N)
    t_end = tl.minimum(t_begin + length, N)
    o_t = tl.arange(0, BN)
    b_sum = tl.zeros([BN, BC], tl.float32)
    for t in range(t_begin, t_end, BN):
        m_t = present(p_mask, t, o_t, t + o_t < t_end, HAS_MASK)
        b_k = load_rows(p_k, stride_k, t, o_t, m_t, o_c, m_c).to(tl.float32)
        b_sum += b_k * load_shares(p_x, N, t, o_t, m_t, o_c, m_c, D, HEADS)
    samples = tl.cast(tl.num_programs(0) // blocks, tl.int64)
    p = p_part + ((tl.program_id(1) * samples + i_b) * heads + h) * D + o_c
    tl.store(p, tl.sum(b_sum, 0), mask=m_c)
