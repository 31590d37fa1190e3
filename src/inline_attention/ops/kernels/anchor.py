"""The scores of one query, the anchor of tangent attention, and their backward. Vocabulary as in `blocks.py`."""

import triton
import triton.language as tl

from .blocks import SIZES, head_sums, load_rows, load_scalars, present, store_scalars

# The score of an absent token. Not −∞, because the softmax of a sample without tokens would be NaN.
LEAST = tl.constexpr(-3.0e38)


@triton.jit(do_not_specialize=SIZES)
def scores_kernel(
    p_k, p_a, p_mask, p_score, p_part, N, scale, blocks, heads, stride_kb, stride_k,
    D: tl.constexpr, HEADS: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """s·a·k for every token, and log Σ exp of each tile. Grid (B·blocks, tiles of BN tokens)

    a (B, heads, d) float32 → scores (B, heads, N) and parts (B, heads, tiles), float32
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
    b_score = tl.where(m_here[:, None], b_score, LEAST)
    store_scalars(p_score, b_score, N, t, o_t, m_t, o_c, m_c, D, HEADS)
    b_max = tl.max(b_score, 0)
    b_lse = b_max + tl.log(tl.sum(tl.where(m_t[:, None], tl.exp(b_score - b_max[None, :]), 0.0), 0))
    tiles = tl.num_programs(1)
    p_part += (i_b * heads + h) * tiles + tl.program_id(1)
    if HEADS == 1:
        tl.store(p_part, tl.sum(b_lse, 0))
    else:
        tl.store(p_part + o_c // D * tiles, b_lse, mask=m_c & (o_c % D == 0))


@triton.jit(do_not_specialize=("tiles",))
def logsumexp_kernel(p_part, p_lse, tiles, BN: tl.constexpr):
    """log Σ exp of rows. Grid (rows,); parts (rows, tiles) → (rows,)"""
    i = tl.cast(tl.program_id(0), tl.int64)
    p_part += i * tiles
    o = tl.arange(0, BN)
    b_max = tl.full([BN], LEAST, tl.float32)
    b_sum = tl.zeros([BN], tl.float32)
    for t in range(0, tiles, BN):
        b_x = tl.load(p_part + t + o, mask=t + o < tiles, other=LEAST)
        b_new = tl.maximum(b_max, b_x)
        b_sum = b_sum * tl.exp(b_max - b_new) + tl.where(t + o < tiles, tl.exp(b_x - b_new), 0.0)
        b_max = b_new
    most = tl.max(b_max, 0)
    tl.store(p_lse + i, most + tl.log(tl.sum(b_sum * tl.exp(b_max - most), 0)))


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
        b_sum += b_k * load_scalars(p_x, N, t, o_t, m_t, o_c, m_c, D, HEADS)
    samples = tl.cast(tl.num_programs(0) // blocks, tl.int64)
    p = p_part + ((tl.program_id(1) * samples + i_b) * heads + h) * D + o_c
    tl.store(p, tl.sum(b_sum, 0), mask=m_c)
