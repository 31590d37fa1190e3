"""The whole forward pass of short sequences in one launch, the local residual's weight included. For inference.

`forward.forward_kernel` is one launch too, but with one program for a sample and block of heads, for large batches.
Here several programs share the queries of a sample, for one image at a time. Each sums all keys and values again, so
that no program waits for another. Vocabulary and shapes as in `blocks.py`.
"""

import triton
import triton.language as tl

from .blocks import (
    SIZES,
    add_product,
    channels,
    divisor_of,
    full_mean,
    gelu,
    load_offset,
    load_rows,
    locate,
    offset_product,
    operand,
    present,
    same_head,
    store_rows,
    widened,
)
from .forward import EPS, bases_of, outputs_of, sum_state
from .local import load_local_weight, weigh


@triton.jit
def count_tokens(p_mask, N, BN: tl.constexpr, HAS_MASK: tl.constexpr):
    """Tokens present in a sample. One without any counts one, so that its sums of zeros stay zero."""
    count = tl.cast(N, tl.float32)
    if HAS_MASK:
        o_t = tl.arange(0, BN)
        b_count = tl.zeros([BN], tl.float32)
        for t in range(0, N, BN):
            b_count += present(p_mask, t, o_t, t + o_t < N, HAS_MASK).to(tl.float32)
        count = tl.maximum(tl.sum(b_count, 0), 1.0)
    return count


@triton.jit
def mean_token(
    p_x, stride, p_mask, N, count, o_c, m_c,
    BN: tl.constexpr, BC: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """The mean of the tokens present: (BC,) float32. The sum is a product with ones, as in `blocks.accumulate`."""
    o_t = tl.arange(0, BN)
    b_ones = tl.full([16, BN], 1.0, DOT)
    b_sum = tl.zeros([16, BC], tl.float32)
    for t in range(0, N, BN):
        b_x = load_rows(p_x, stride, t, o_t, present(p_mask, t, o_t, t + o_t < N, HAS_MASK), o_c, m_c)
        b_sum = add_product(b_sum, b_ones, operand(b_x, DOT, PRECISION), PRECISION)
    return tl.div_rn(tl.max(b_sum, 0), count)


@triton.jit
def linear(p_w, p_b, b_x, o_r, m_r, o_x, m_head, D: tl.constexpr):
    """Rows o_r of a linear layer for each head, W (…, d) and b (…): (R,) float32. b_x (BC,) is all heads' input.

    A sum of products and not a matrix product, which would take sixteen samples.
    """
    b_w = tl.load(p_w + o_r[:, None] * D + (o_x % D)[None, :], mask=m_head, other=0.0).to(tl.float32)
    return tl.sum(b_w * b_x[None, :], 1) + tl.load(p_b + o_r, mask=m_r, other=0.0).to(tl.float32)


@triton.jit
def make_tap(p_w, p_b, b_x, tap, o_c, m_c, m_head, D: tl.constexpr):
    """One tap of each channel's 3×3 kernel, as `local.load_tap` loads it: (1, BC) float32"""
    return linear(p_w, p_b, b_x, o_c * 9 + tap, m_c, o_c, m_head, D)[None, :]


@triton.jit
def make_local_weight(p_w1, p_b1, p_w2, p_b2, b_x, h, o_c, m_c, D: tl.constexpr, PRECISION: tl.constexpr):
    """W2·gelu(W1·x + b1) + b2 of each head, x the mean token: nine taps, as `local.load_local_weight` loads them"""
    m_head = same_head(o_c, m_c, o_c, m_c, D, D)
    b_x = linear(p_w1 + h * D * D, p_b1 + h * D, b_x, o_c, m_c, o_c, m_head, D)
    b_x = tl.where(m_c, gelu(b_x, PRECISION), 0.0)
    p_w2 += h * 9 * D * D
    p_b2 += h * 9 * D
    w0 = make_tap(p_w2, p_b2, b_x, 0, o_c, m_c, m_head, D)
    w1 = make_tap(p_w2, p_b2, b_x, 1, o_c, m_c, m_head, D)
    w2 = make_tap(p_w2, p_b2, b_x, 2, o_c, m_c, m_head, D)
    w3 = make_tap(p_w2, p_b2, b_x, 3, o_c, m_c, m_head, D)
    w4 = make_tap(p_w2, p_b2, b_x, 4, o_c, m_c, m_head, D)
    w5 = make_tap(p_w2, p_b2, b_x, 5, o_c, m_c, m_head, D)
    w6 = make_tap(p_w2, p_b2, b_x, 6, o_c, m_c, m_head, D)
    w7 = make_tap(p_w2, p_b2, b_x, 7, o_c, m_c, m_head, D)
    w8 = make_tap(p_w2, p_b2, b_x, 8, o_c, m_c, m_head, D)
    return w0, w1, w2, w3, w4, w5, w6, w7, w8


@triton.jit
def load_neighbour(
    p_x, stride, p_mask, t, o_t, m_t, o_y, o_x, dy, dx, H, W, o_c, m_c, HAS_MASK: tl.constexpr
):  # fmt: skip
    """The tokens dy rows below and dx columns right of tokens t + o_t, zeros beyond the map: (BN, BC)"""
    m_t = m_t & (o_y + dy >= 0) & (o_y + dy < H) & (o_x + dx >= 0) & (o_x + dx < W)
    t += dy * W + dx
    return load_rows(p_x, stride, t, o_t, present(p_mask, t, o_t, m_t, HAS_MASK), o_c, m_c)


@triton.jit
def add_row(
    b_sum, w0, w1, w2, p_x, stride, p_mask, t, o_t, m_t, o_y, o_x, dy, H, W, o_c, m_c, HAS_MASK: tl.constexpr
):  # fmt: skip
    """b_sum plus three taps times the neighbours dy rows below: (BN, BC) float32"""
    left = load_neighbour(p_x, stride, p_mask, t, o_t, m_t, o_y, o_x, dy, -1, H, W, o_c, m_c, HAS_MASK)
    here = load_neighbour(p_x, stride, p_mask, t, o_t, m_t, o_y, o_x, dy, 0, H, W, o_c, m_c, HAS_MASK)
    right = load_neighbour(p_x, stride, p_mask, t, o_t, m_t, o_y, o_x, dy, 1, H, W, o_c, m_c, HAS_MASK)
    return weigh(b_sum, w0, w1, w2, left, here, right)


@triton.jit
def local_sums(
    p_x, stride, p_mask, t, o_t, m_t, prefix, H, W, o_c, m_c, b_sum, w0, w1, w2, w3, w4, w5, w6, w7, w8,
    HAS_MASK: tl.constexpr,
):  # fmt: skip
    """b_sum (1, BC) plus the 3×3 sums at tokens t + o_t where m_t; prefix tokens have none: (BN, BC) float32

    Nine loads, all in flight at once. `local.next_sums` loads a row of the map once for three rows of outputs, but
    one row after the other.
    """
    o = t + o_t - prefix
    m_t = m_t & (o >= 0)
    o_y = o // W
    o_x = o % W
    b_sum = add_row(b_sum, w0, w1, w2, p_x, stride, p_mask, t, o_t, m_t, o_y, o_x, -1, H, W, o_c, m_c, HAS_MASK)
    b_sum = add_row(b_sum, w3, w4, w5, p_x, stride, p_mask, t, o_t, m_t, o_y, o_x, 0, H, W, o_c, m_c, HAS_MASK)
    return add_row(b_sum, w6, w7, w8, p_x, stride, p_mask, t, o_t, m_t, o_y, o_x, 1, H, W, o_c, m_c, HAS_MASK)


@triton.jit(do_not_specialize=SIZES)
def short_kernel(
    p_q, p_k, p_v, p_w, p_x, p_w1, p_b1, p_w2, p_b2, p_mask, p_mask_q, p_seq, p_share, p_offset, p_out,
    Nq, N, H, W, prefix, scale, blocks, heads,
    stride_qb, stride_q, stride_kb, stride_k, stride_vb, stride_v, stride_xb, stride_x, stride_ob, stride_o,
    MAP: tl.constexpr, NORM: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HEADS: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    CENTRE: tl.constexpr, LOCAL: tl.constexpr, MADE: tl.constexpr, HAS_MASK: tl.constexpr, MASK_Q: tl.constexpr,
    PACKED: tl.constexpr, WEIGHTED: tl.constexpr, ANCHORED: tl.constexpr, OFFSET: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Outputs of one part of the queries. Grid (B·blocks, parts)

    Keys are read BN at a time, queries BM. If MADE, the local weight is made here from x, the tokens that q, k and v
    are projections of, (B, N, heads·e). A program takes its heads' channels.
    """
    i_b = tl.cast(tl.program_id(0) // blocks, tl.int64)
    h = (tl.program_id(0) % blocks) * HEADS
    start, N, H, W = locate(p_seq, i_b, N, H, W, PACKED)
    N = widened(N, WIDE)
    if PACKED:
        Nq = N
    length = tl.cdiv(tl.cdiv(Nq, tl.num_programs(1)), BM) * BM
    t_begin = widened(tl.program_id(1), WIDE) * length
    t_end = tl.minimum(t_begin + length, Nq)
    if t_begin >= Nq:
        return
    o_k, m_k = channels(h, heads, DK, HEADS, BK)
    o_v, m_v = channels(h, heads, DV, HEADS, BV)
    p_q += i_b * stride_qb + start * stride_q + h * DK
    p_k += i_b * stride_kb + start * stride_k + h * DK
    p_v += i_b * stride_vb + start * stride_v + h * DV
    p_out += i_b * stride_ob + start * stride_o + h * DV
    if HAS_MASK:
        p_mask += i_b * N
    if MASK_Q:
        p_mask_q += i_b * Nq
    if WEIGHTED and not ANCHORED:
        p_share += (i_b * heads + h) * N
    b_offset = load_offset(p_offset, i_b, h, heads, o_k, m_k, DK, OFFSET)
    tokens = count_tokens(p_mask, N, BN, HAS_MASK)

    count = divisor_of(tokens, WEIGHTED)
    b_s, b_k_mean, b_v_mean = sum_state(
        p_k, p_v, p_mask, p_share, None, stride_k, stride_v, N, o_k, m_k, o_v, m_v, b_offset, count, scale,
        MAP, DK, DV, HEADS, BN, BK, BV, DOT, PRECISION, CENTRE, HAS_MASK, WEIGHTED, ANCHORED, False,
    )  # fmt: skip
    b_base, b_rest = bases_of(b_s, b_v_mean, MAP, NORM)
    b_k_mean = full_mean(b_k_mean, m_k, MAP) * tl.cast(scale, tl.float32)
    b_s = operand(b_s, DOT, PRECISION)
    b_rest = (b_rest - offset_product(b_s, b_offset, MAP, PRECISION, OFFSET))[None, :]
    eps = tl.div_rn(EPS, tokens)
    if LOCAL:
        if MADE:
            p_x += i_b * stride_xb + start * stride_x + h * DV
            b_x = mean_token(p_x, stride_x, p_mask, N, tokens, o_v, m_v, BN, BV, DOT, PRECISION, HAS_MASK)
            w0, w1, w2, w3, w4, w5, w6, w7, w8 = make_local_weight(
                p_w1, p_b1, p_w2, p_b2, b_x, h, o_v, m_v, DV, PRECISION
            )  # fmt: skip
        else:
            p_w += (i_b * heads + h) * DV * 9
            w0, w1, w2, w3, w4, w5, w6, w7, w8 = load_local_weight(p_w, o_v, m_v, False)

    o_t = tl.arange(0, BM)
    for t in range(t_begin, t_end, BM):
        m_t = t + o_t < t_end
        m_here = present(p_mask_q, t, o_t, m_t, MASK_Q)
        b_sum = b_rest
        if LOCAL:
            b_sum = local_sums(
                p_v, stride_v, p_mask, t, o_t, m_here, prefix, H, W, o_v, m_v, b_rest,
                w0, w1, w2, w3, w4, w5, w6, w7, w8, HAS_MASK,
            )  # fmt: skip
        b_out = outputs_of(
            p_q, stride_q, t, o_t, m_here, o_k, m_k, o_v, b_s, b_base, b_sum, b_k_mean, b_v_mean, b_offset, eps,
            MAP, NORM, DK, DV, HEADS, DOT, PRECISION, OFFSET,
        )  # fmt: skip
        if MASK_Q:
            b_out = tl.where(m_here[:, None], b_out, 0.0)
        store_rows(p_out, b_out, stride_o, t, o_t, m_t, o_v, m_v)
