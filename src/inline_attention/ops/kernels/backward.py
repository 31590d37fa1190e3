"""The kernels of the backward pass. Vocabulary and shapes as in `blocks.py`; g is the gradient of the output."""

import triton
import triton.language as tl

from ..feature_maps import add_map_at_zero, feature_map, feature_map_backward
from .blocks import (
    SIZES,
    accumulate,
    add_local,
    add_product,
    channels,
    divisor_of,
    factors,
    full_mean,
    gradient_pointers,
    head_sums,
    load_map_row,
    load_neighbours,
    load_offset,
    load_queries,
    load_rows,
    load_shares,
    locate,
    operand,
    present,
    product_plus,
    same_head,
    state_offsets,
    store_rows,
    store_scalars,
    sum_parts,
    tile_index,
    tile_tokens,
    tokens_of,
)
from .forward import EPS


@triton.jit
def accumulate_local_grad(
    p_g, p_v, p_mask, p_mask_q, stride_g, stride_v, x, y_begin, y_end, H, W, prefix, o_c, m_c,
    a0, a1, a2, a3, a4, a5, a6, a7, a8,
    BW: tl.constexpr, BC: tl.constexpr, HAS_MASK: tl.constexpr, MASK_Q: tl.constexpr,
):  # fmt: skip
    """Adds the gradient of the nine taps from rows y_begin … y_end − 1 and columns x … x + BW − 1 of g to nine sums
    (BW, BC)"""
    g_above = tl.zeros([BW, BC], tl.float32)
    g_here = tl.zeros([BW, BC], tl.float32)
    # Row y of v is the upper neighbour of row y + 1 of the outputs. Rows are loaded one turn before they are used.
    g_next = load_map_row(p_g, stride_g, p_mask_q, y_begin, x, y_end, W, prefix, o_c, m_c, BW, MASK_Q)
    left, here, right = load_neighbours(p_v, stride_v, p_mask, y_begin - 1, x, H, W, prefix, o_c, m_c, BW, HAS_MASK)
    for y in range(y_begin - 1, y_end + 1):
        g_next1 = load_map_row(p_g, stride_g, p_mask_q, y + 2, x, y_end, W, prefix, o_c, m_c, BW, MASK_Q)
        left1, here1, right1 = load_neighbours(p_v, stride_v, p_mask, y + 1, x, H, W, prefix, o_c, m_c, BW, HAS_MASK)
        g_below = g_next.to(tl.float32)
        left, here, right = left.to(tl.float32), here.to(tl.float32), right.to(tl.float32)
        a0 += g_below * left
        a1 += g_below * here
        a2 += g_below * right
        a3 += g_here * left
        a4 += g_here * here
        a5 += g_here * right
        a6 += g_above * left
        a7 += g_above * here
        a8 += g_above * right
        g_above, g_here, g_next = g_here, g_below, g_next1
        left, here, right = left1, here1, right1
    return a0, a1, a2, a3, a4, a5, a6, a7, a8


@triton.jit
def sum_local_grad(
    p_g, p_v, p_mask, p_mask_q, stride_g, stride_v, x_begin, x_end, y_begin, y_end, H, W, prefix, o_c, m_c,
    BW: tl.constexpr, BC: tl.constexpr, HAS_MASK: tl.constexpr, MASK_Q: tl.constexpr,
):  # fmt: skip
    """The gradient of the nine taps from columns x_begin … x_end − 1 of rows y_begin … y_end − 1 of g

    x_begin is a multiple of BW, and x_end is one too or is W. Returns nine blocks (BC,).
    """
    a0 = tl.zeros([BW, BC], tl.float32)
    a1, a2, a3, a4, a5, a6, a7, a8 = a0, a0, a0, a0, a0, a0, a0, a0
    for x in range(x_begin, x_end, BW):
        a0, a1, a2, a3, a4, a5, a6, a7, a8 = accumulate_local_grad(
            p_g, p_v, p_mask, p_mask_q, stride_g, stride_v, x, y_begin, y_end, H, W, prefix, o_c, m_c,
            a0, a1, a2, a3, a4, a5, a6, a7, a8, BW, BC, HAS_MASK, MASK_Q,
        )  # fmt: skip
    return (
        tl.sum(a0, 0), tl.sum(a1, 0), tl.sum(a2, 0), tl.sum(a3, 0), tl.sum(a4, 0), tl.sum(a5, 0), tl.sum(a6, 0),
        tl.sum(a7, 0), tl.sum(a8, 0),
    )  # fmt: skip


@triton.jit
def store_local_grad(p, step, m_c, a0, a1, a2, a3, a4, a5, a6, a7, a8):
    """Stores nine blocks (BC,), `step` elements apart, from pointers p (BC,) on"""
    dtype: tl.constexpr = p.dtype.element_ty
    tl.store(p, a0.to(dtype), mask=m_c)
    tl.store(p + step, a1.to(dtype), mask=m_c)
    tl.store(p + 2 * step, a2.to(dtype), mask=m_c)
    tl.store(p + 3 * step, a3.to(dtype), mask=m_c)
    tl.store(p + 4 * step, a4.to(dtype), mask=m_c)
    tl.store(p + 5 * step, a5.to(dtype), mask=m_c)
    tl.store(p + 6 * step, a6.to(dtype), mask=m_c)
    tl.store(p + 7 * step, a7.to(dtype), mask=m_c)
    tl.store(p + 8 * step, a8.to(dtype), mask=m_c)


@triton.jit
def accumulate_normalised(
    p_q, p_g, p_dq, p_mask, stride_q, stride_g, stride_dq, t_begin, t_end, o_k, m_k, o_v, m_v,
    b_st, b_k_mean, b_v_mean, eps,
    MAP: tl.constexpr, NORM: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HEADS: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, MASK_Q: tl.constexpr,
):  # fmt: skip
    """Sums over queries where NORM scales the outputs: dS = Σ (g(z)·φ(q))ᵀg (BK, BV), Σ dz·φ(q), Σ f(z)·g

    Writes dq = φ'(q)·(g(z)·g·Sᵀ + dz·s·k̄) too, zeros for absent queries: all that it takes is at hand. b_k_mean holds
    s·k̄. The outputs without their scale are not needed, as g·(φ(q)·S) = (g·Sᵀ)·φ(q).
    """
    o_t = tl.arange(0, BN)
    b_ds = tl.zeros([BK, BV], tl.float32)
    b_ones = tl.full([16, BN], 1.0, DOT)
    b_q_sum = tl.zeros([16, BK], tl.float32)
    b_g_sum = tl.zeros([16, BV], tl.float32)
    for t in range(t_begin, t_end, BN):
        m_t = t + o_t < t_end
        m_here = present(p_mask, t, o_t, m_t, MASK_Q)
        b_q = load_rows(p_q, stride_q, t, o_t, m_here, o_k, m_k).to(tl.float32)
        b_phi = add_map_at_zero(feature_map(b_q, MAP), (m_here[:, None] & m_k[None, :]).to(tl.float32), MAP)
        b_g = load_rows(p_g, stride_g, t, o_t, m_here, o_v, m_v)
        b_u = tl.dot(operand(b_g, DOT, PRECISION), b_st, input_precision=PRECISION)
        b_terms = b_phi * b_k_mean[None, :]
        b_scale, _, b_slope = factors(head_sums(b_terms, o_k, o_k, DK, DK, HEADS), eps, NORM, PRECISION)
        b_along = head_sums(b_u * b_phi, o_k, o_k, DK, DK, HEADS)
        if NORM == "divide":
            b_along -= eps * head_sums(b_g.to(tl.float32) * b_v_mean[None, :], o_v, o_k, DV, DK, HEADS)
        b_dz = -b_slope * b_along
        b_dq = feature_map_backward(b_q, b_scale * b_u + b_dz * b_k_mean[None, :], MAP)
        if MASK_Q:
            b_dq = tl.where(m_here[:, None], b_dq, 0.0)
        store_rows(p_dq, b_dq, stride_dq, t, o_t, m_t, o_k, m_k)
        b_q_sum = add_product(b_q_sum, b_ones, operand(b_dz * b_phi, DOT, PRECISION), PRECISION)
        b_ds = add_product(
            b_ds, tl.trans(operand(b_scale * b_phi, DOT, PRECISION)), operand(b_g, DOT, PRECISION), PRECISION
        )
        if NORM == "divide":
            _, b_f, _ = factors(head_sums(b_terms, o_k, o_v, DK, DV, HEADS), eps, NORM, PRECISION)
            b_g = b_f * b_g.to(tl.float32)
        b_g_sum = add_product(b_g_sum, b_ones, operand(b_g, DOT, PRECISION), PRECISION)
    return b_ds, tl.max(b_q_sum, 0), tl.max(b_g_sum, 0)


@triton.jit
def write_query_grads(
    p_q, p_g, p_dq, p_mask, stride_q, stride_g, stride_dq, t, o_t, m_t, o_k, m_k, o_v, m_v, b_st, b_offset,
    MAP: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, MASK_Q: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """dq = φ'(q)·(g·Sᵀ) for queries t + o_t where m_t; zeros for absent ones. For "subtract" """
    m_here = present(p_mask, t, o_t, m_t, MASK_Q)
    b_g = load_rows(p_g, stride_g, t, o_t, m_here, o_v, m_v)
    b_dq = tl.dot(operand(b_g, DOT, PRECISION), b_st, input_precision=PRECISION)
    if MAP != "identity":
        b_q = load_queries(p_q, stride_q, t, o_t, m_here, o_k, m_k, b_offset, OFFSET)
        b_dq = feature_map_backward(b_q.to(tl.float32), b_dq, MAP)
    store_rows(p_dq, b_dq, stride_dq, t, o_t, m_t, o_k, m_k)


@triton.jit
def write_key_grads(
    p_k, p_v, p_dk, p_dv, p_mask, p_share, p_lse, p_dshare, stride_k, stride_v, stride_dk, stride_dv,
    t, o_t, m_t, N, o_k, m_k, o_v, m_v, b_ds, b_dst, b_q_mean, b_g_mean, b_k_mean, b_v_mean, b_anchor, b_overlap,
    MAP: tl.constexpr, NORM: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HEADS: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr, HAS_MASK: tl.constexpr, WEIGHTED: tl.constexpr, ANCHORED: tl.constexpr,
):  # fmt: skip
    """dk = φ'(k)·((v − v̄)·dSᵀ + dk̄), dv = (φ(k) − k̄)·dS + dv̄ for tokens t + o_t where m_t; zeros for absent ones

    b_k_mean is the mean of φ(k) − φ(0). If WEIGHTED, dk and dv are multiplied by the token's share p, and
    dp = ((v − v̄)·dSᵀ + dk̄)·(φ(k) − k̄) + dv̄·(v − v̄). If ANCHORED, p is the softmax of s·a·k: its scores have the
    gradient p·(dp − Σ p·dp), which is stored instead of dp and adds its product with s·a to dk. b_overlap is the sum.
    """
    m_here = present(p_mask, t, o_t, m_t, HAS_MASK)
    b_k = load_rows(p_k, stride_k, t, o_t, m_here, o_k, m_k).to(tl.float32)
    b_v = load_rows(p_v, stride_v, t, o_t, m_here, o_v, m_v).to(tl.float32) - b_v_mean[None, :]
    if NORM == "subtract":
        b_dk = tl.dot(operand(b_v, DOT, PRECISION), b_dst, input_precision=PRECISION)
    else:
        b_dk = product_plus(operand(b_v, DOT, PRECISION), b_dst, b_q_mean[None, :], PRECISION)
    b_centred = feature_map(b_k, MAP) - b_k_mean[None, :]
    b_dv = product_plus(operand(b_centred, DOT, PRECISION), b_ds, b_g_mean[None, :], PRECISION)
    if WEIGHTED:
        b_dp = head_sums(b_dk * b_centred, o_k, o_k, DK, DK, HEADS)
        b_dp += head_sums(b_v * b_g_mean[None, :], o_v, o_k, DV, DK, HEADS)
        b_share = load_shares(p_share, p_lse, N, t, o_t, m_here, o_k, m_k, DK, HEADS, ANCHORED)
        b_dk *= b_share
        b_dv *= load_shares(p_share, p_lse, N, t, o_t, m_here, o_v, m_v, DV, HEADS, ANCHORED)
        if ANCHORED:
            b_dp = b_share * (b_dp - b_overlap)
            b_dk += b_dp * b_anchor[None, :]
        if HAS_MASK:
            b_dp = tl.where(m_here[:, None], b_dp, 0.0)
        store_scalars(p_dshare, b_dp, N, t, o_t, m_t, o_k, m_k, DK, HEADS)
    b_dk = feature_map_backward(b_k, b_dk, MAP)
    if HAS_MASK:
        b_dk = tl.where(m_here[:, None], b_dk, 0.0)
        b_dv = tl.where(m_here[:, None], b_dv, 0.0)
    store_rows(p_dk, b_dk, stride_dk, t, o_t, m_t, o_k, m_k)
    store_rows(p_dv, b_dv, stride_dv, t, o_t, m_t, o_v, m_v)


@triton.jit
def write_grads(
    p_q, p_k, p_v, p_g, p_dq, p_dk, p_dv, p_mask, p_mask_q, p_share, p_lse, p_dshare,
    stride_q, stride_k, stride_v, stride_g, stride_dq, stride_dk, stride_dv,
    t, o_t, m_q, m_t, N, o_k, m_k, o_v, m_v,
    b_st, b_ds, b_dst, b_q_mean, b_g_mean, b_k_mean, b_v_mean, b_offset, b_anchor, b_overlap,
    MAP: tl.constexpr, NORM: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HEADS: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr, HAS_MASK: tl.constexpr, MASK_Q: tl.constexpr, WEIGHTED: tl.constexpr,
    OFFSET: tl.constexpr, ANCHORED: tl.constexpr,
):  # fmt: skip
    """Gradients of queries t + o_t where m_q and of keys and values where m_t, without the local residual's part

    If NORM scales the outputs, `accumulate_normalised` has written those of the queries.
    """
    if NORM == "subtract":
        write_query_grads(
            p_q, p_g, p_dq, p_mask_q, stride_q, stride_g, stride_dq, t, o_t, m_q, o_k, m_k, o_v, m_v, b_st, b_offset,
            MAP, DOT, PRECISION, MASK_Q, OFFSET,
        )  # fmt: skip
    write_key_grads(
        p_k, p_v, p_dk, p_dv, p_mask, p_share, p_lse, p_dshare, stride_k, stride_v, stride_dk, stride_dv,
        t, o_t, m_t, N, o_k, m_k, o_v, m_v, b_ds, b_dst, b_q_mean, b_g_mean, b_k_mean, b_v_mean, b_anchor, b_overlap,
        MAP, NORM, DK, DV, HEADS, DOT, PRECISION, HAS_MASK, WEIGHTED, ANCHORED,
    )  # fmt: skip


@triton.jit
def write_grads_run(
    p_q, p_k, p_v, p_g, p_dq, p_dk, p_dv, p_mask, p_mask_q, p_share, p_lse, p_dshare,
    stride_q, stride_k, stride_v, stride_g, stride_dq, stride_dk, stride_dv, t_begin, t_end, Nq, N, o_k, m_k, o_v, m_v,
    b_st, b_ds, b_dst, b_q_mean, b_g_mean, b_k_mean, b_v_mean, b_offset, b_anchor, b_overlap,
    MAP: tl.constexpr, NORM: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HEADS: tl.constexpr, BN: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, HAS_MASK: tl.constexpr, MASK_Q: tl.constexpr, WEIGHTED: tl.constexpr,
    OFFSET: tl.constexpr, ANCHORED: tl.constexpr,
):  # fmt: skip
    """`write_grads` for those of the tokens t_begin … t_end − 1 that exist as queries and as keys"""
    o_t = tl.arange(0, BN)
    for t in range(t_begin, t_end, BN):
        m_t = t + o_t < t_end
        write_grads(
            p_q, p_k, p_v, p_g, p_dq, p_dk, p_dv, p_mask, p_mask_q, p_share, p_lse, p_dshare,
            stride_q, stride_k, stride_v, stride_g, stride_dq, stride_dk, stride_dv,
            t, o_t, m_t & (t + o_t < Nq), m_t & (t + o_t < N), N, o_k, m_k, o_v, m_v,
            b_st, b_ds, b_dst, b_q_mean, b_g_mean, b_k_mean, b_v_mean, b_offset, b_anchor, b_overlap,
            MAP, NORM, DK, DV, HEADS, DOT, PRECISION, HAS_MASK, MASK_Q, WEIGHTED, OFFSET, ANCHORED,
        )  # fmt: skip


@triton.jit
def sum_queries(
    p_q, p_g, p_dq, p_mask, stride_q, stride_g, stride_dq, t_begin, t_end, N, o_k, m_k, o_v, m_v,
    b_st, b_k_full, b_v_mean, b_offset, eps,
    MAP: tl.constexpr, NORM: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HEADS: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, MASK_Q: tl.constexpr,
    OFFSET: tl.constexpr,
):  # fmt: skip
    """dS, dk̄ and dv̄, without their factors: (BK, BV), (BK,), (BV,). dk̄ has no meaning for "subtract"."""
    if NORM == "subtract":
        b_ds, b_q_sum, b_g_sum, _, _ = accumulate(
            p_q, p_g, p_mask, None, None, stride_q, stride_g, t_begin, t_end, N, o_k, m_k, o_v, m_v, b_offset, 0, 0,
            MAP, DK, DV, HEADS, BN, BK, BV, DOT, PRECISION, False, MASK_Q, False, False, OFFSET,
        )  # fmt: skip
    else:
        b_ds, b_q_sum, b_g_sum = accumulate_normalised(
            p_q, p_g, p_dq, p_mask, stride_q, stride_g, stride_dq, t_begin, t_end, o_k, m_k, o_v, m_v,
            b_st, b_k_full, b_v_mean, eps,
            MAP, NORM, DK, DV, HEADS, BN, BK, BV, DOT, PRECISION, MASK_Q,
        )  # fmt: skip
    return b_ds, b_q_sum, b_g_sum


@triton.jit
def add_map_to_state_grad(b_ds, b_g_sum, MAP: tl.constexpr, NORM: tl.constexpr):
    """dS with the part of φ(0), which `accumulate` leaves out. b_g_sum (1, BV)"""
    if NORM == "subtract":
        b_ds = add_map_at_zero(b_ds, b_g_sum, MAP)
    return b_ds


@triton.jit
def overlap_of(b_ds, b_s, scale, o_k, D: tl.constexpr, HEADS: tl.constexpr):
    """Σ p·dp over the tokens: the sum of dS·S over the elements of a head, (1, 1) or (1, BK)

    Both hold the factor s, and the sum has it once.
    """
    b_rows = tl.sum(b_ds * b_s, 1)[None, :]
    return head_sums(b_rows, o_k, o_k, D, D, HEADS) * tl.where(scale == 0.0, 0.0, tl.div_rn(1.0, scale))


@triton.jit(do_not_specialize=SIZES)
def backward_kernel(
    p_q, p_k, p_v, p_w, p_g, p_mask, p_mask_q, p_count, p_seq, p_share, p_lse, p_offset, p_s, p_means,
    p_d0, p_d1, p_d2, p_dw, p_dshare, p_g_mean,
    Nq, N, H, W, prefix, scale, blocks, heads,
    stride_qb, stride_q, stride_kb, stride_k, stride_vb, stride_v, stride_gb, stride_g,
    stride_dqb, stride_dq, stride_dkb, stride_dk, stride_dvb, stride_dv,
    MAP: tl.constexpr, NORM: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HEADS: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    LOCAL: tl.constexpr, GRAD_LOCAL: tl.constexpr, HAS_MASK: tl.constexpr, MASK_Q: tl.constexpr, PACKED: tl.constexpr,
    WEIGHTED: tl.constexpr, OFFSET: tl.constexpr, ANCHORED: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """All gradients for short sequences. Grid (B·blocks,)"""
    i_b = tl.cast(tl.program_id(0) // blocks, tl.int64)
    h = (tl.program_id(0) % blocks) * HEADS
    start, N, H, W = locate(p_seq, i_b, N, H, W, PACKED)
    if PACKED:
        Nq = N
    o_k, m_k = channels(h, heads, DK, HEADS, BK)
    o_v, m_v = channels(h, heads, DV, HEADS, BV)
    p_q += i_b * stride_qb + start * stride_q + h * DK
    p_k += i_b * stride_kb + start * stride_k + h * DK
    p_v += i_b * stride_vb + start * stride_v + h * DV
    p_g += i_b * stride_gb + start * stride_g + h * DV
    p_dq, p_dk, p_dv = gradient_pointers(p_d0, p_d1, p_d2, heads * DK, LAYOUT)
    p_dq += i_b * stride_dqb + start * stride_dq + h * DK
    p_dk += i_b * stride_dkb + start * stride_dk + h * DK
    p_dv += i_b * stride_dvb + start * stride_dv + h * DV
    if HAS_MASK:
        p_mask += i_b * N
    if MASK_Q:
        p_mask_q += i_b * Nq
    if WEIGHTED:
        p_share += (i_b * heads + h) * N
        p_dshare += (i_b * heads + h) * N
    if ANCHORED:
        p_lse += i_b * heads + h
    b_offset = load_offset(p_offset, i_b, h, heads, o_k, m_k, DK, OFFSET)
    scale = tl.cast(scale, tl.float32)
    tokens = tokens_of(p_count, i_b, N, HAS_MASK)
    count = divisor_of(tokens, WEIGHTED)
    eps = tl.div_rn(EPS, tokens)

    m_head = same_head(o_k, m_k, o_v, m_v, DK, DV)
    b_s = tl.load(p_s + (i_b * heads + h) * DK * DV + state_offsets(o_k, o_v, DV), mask=m_head, other=0.0)
    b_st = tl.trans(operand(b_s, DOT, PRECISION))
    p_means += i_b * heads * (DK + DV)
    b_k_mean = tl.load(p_means + h * DK + o_k, mask=m_k, other=0.0)
    b_v_mean = tl.load(p_means + heads * DK + h * DV + o_v, mask=m_v, other=0.0)
    b_k_full = full_mean(b_k_mean, m_k, MAP) * scale
    b_ds, b_q_sum, b_g_sum = sum_queries(
        p_q, p_g, p_dq, p_mask_q, stride_q, stride_g, stride_dq, 0, Nq, Nq, o_k, m_k, o_v, m_v,
        b_st, b_k_full, b_v_mean, b_offset, eps,
        MAP, NORM, DK, DV, HEADS, BN, BK, BV, DOT, PRECISION, MASK_Q, OFFSET,
    )  # fmt: skip
    b_ds = add_map_to_state_grad(b_ds, b_g_sum[None, :], MAP, NORM)
    b_ds = tl.where(m_head, b_ds * tl.div_rn(scale, count), 0.0)
    b_q_mean = tl.div_rn(b_q_sum * scale, count)
    b_g_mean = tl.div_rn(b_g_sum, count)
    b_anchor = 0.0
    b_overlap = 0.0
    if ANCHORED:
        b_anchor = b_offset * scale
        b_overlap = overlap_of(b_ds, b_s.to(tl.float32), scale, o_k, DK, HEADS)
    if OFFSET:
        tl.store(p_g_mean + (i_b * heads + h) * DV + o_v, b_g_mean, mask=m_v)
    b_ds = operand(b_ds, DOT, PRECISION)
    b_dst = tl.trans(b_ds)
    write_grads_run(
        p_q, p_k, p_v, p_g, p_dq, p_dk, p_dv, p_mask, p_mask_q, p_share, p_lse, p_dshare,
        stride_q, stride_k, stride_v, stride_g, stride_dq, stride_dk, stride_dv,
        0, tl.maximum(Nq, N), Nq, N, o_k, m_k, o_v, m_v,
        b_st, b_ds, b_dst, b_q_mean, b_g_mean, b_k_mean, b_v_mean, b_offset, b_anchor, b_overlap,
        MAP, NORM, DK, DV, HEADS, BN, DOT, PRECISION, HAS_MASK, MASK_Q, WEIGHTED, OFFSET, ANCHORED,
    )  # fmt: skip
    if LOCAL:
        tl.debug_barrier()  # add_local reads what other threads wrote
        for x in range(0, W, BW):
            add_local(
                p_g, p_w + (i_b * heads + h) * DV * 9, p_dv, p_mask_q, p_mask, stride_g, stride_dv,
                x, 0, H, H, W, prefix, o_v, m_v, BW, BV, True, MASK_Q, HAS_MASK,
            )  # fmt: skip
    if GRAD_LOCAL:
        a0, a1, a2, a3, a4, a5, a6, a7, a8 = sum_local_grad(
            p_g, p_v, p_mask, p_mask_q, stride_g, stride_v, 0, W, 0, H, H, W, prefix, o_v, m_v,
            BW, BV, HAS_MASK, MASK_Q,
        )  # fmt: skip
        store_local_grad(p_dw + ((i_b * heads + h) * DV + o_v) * 9, 1, m_v, a0, a1, a2, a3, a4, a5, a6, a7, a8)


@triton.jit(do_not_specialize=SIZES)
def grad_state_kernel(
    p_q, p_v, p_g, p_mask, p_mask_q, p_count, p_seq, p_offset, p_s, p_means, p_dq, p_part,
    Nq, N, H, W, prefix, scale, blocks, heads, stride_qb, stride_q, stride_vb, stride_v, stride_gb, stride_g,
    stride_dqb, stride_dq,
    MAP: tl.constexpr, NORM: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HEADS: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    GRAD_LOCAL: tl.constexpr, HAS_MASK: tl.constexpr, MASK_Q: tl.constexpr, PACKED: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Sums over one part of the tokens. Grid (B·blocks, parts)

    The gradient of the local weight is summed over about the same part of the map: some rows, or some columns of a row.
    Parts are (B·blocks, parts, BK·BV + BK + 10·BV) float32: dS, dk̄, dv̄ and nine taps.
    """
    i = tl.cast(tl.program_id(0), tl.int64)
    i_b = i // blocks
    i_p = tl.program_id(1)
    parts = tl.num_programs(1)
    h = (i % blocks) * HEADS
    start, N, H, W = locate(p_seq, i_b, N, H, W, PACKED)
    if PACKED:
        Nq = N
    o_k, m_k = channels(h, heads, DK, HEADS, BK)
    o_v, m_v = channels(h, heads, DV, HEADS, BV)
    p_q += i_b * stride_qb + start * stride_q + h * DK
    p_v += i_b * stride_vb + start * stride_v + h * DV
    p_g += i_b * stride_gb + start * stride_g + h * DV
    if HAS_MASK:
        p_mask += i_b * N
    if MASK_Q:
        p_mask_q += i_b * Nq
    b_offset = load_offset(p_offset, i_b, h, heads, o_k, m_k, DK, OFFSET)
    b_st = 0.0
    b_k_full = 0.0
    b_v_mean = 0.0
    eps = 0.0
    if NORM != "subtract":
        p_dq += i_b * stride_dqb + start * stride_dq + h * DK
        m_head = same_head(o_k, m_k, o_v, m_v, DK, DV)
        b_s = tl.load(p_s + (i_b * heads + h) * DK * DV + state_offsets(o_k, o_v, DV), mask=m_head, other=0.0)
        b_st = tl.trans(operand(b_s, DOT, PRECISION))
        p_means += i_b * heads * (DK + DV)
        b_k_full = full_mean(tl.load(p_means + h * DK + o_k, mask=m_k, other=0.0), m_k, MAP)
        b_k_full *= tl.cast(scale, tl.float32)
        b_v_mean = tl.load(p_means + heads * DK + h * DV + o_v, mask=m_v, other=0.0)
        eps = tl.div_rn(EPS, tokens_of(p_count, i_b, N, HAS_MASK))
    p_part += (i * parts + i_p) * (BK * BV + BK + 10 * BV)
    length = tl.cdiv(tl.cdiv(Nq, parts), BN) * BN
    t_begin = tl.minimum(i_p * length, Nq)
    t_end = tl.minimum(t_begin + length, Nq)
    b_ds, b_q_sum, b_g_sum = sum_queries(
        p_q, p_g, p_dq, p_mask_q, stride_q, stride_g, stride_dq, t_begin, t_end, Nq, o_k, m_k, o_v, m_v,
        b_st, b_k_full, b_v_mean, b_offset, eps,
        MAP, NORM, DK, DV, HEADS, BN, BK, BV, DOT, PRECISION, MASK_Q, OFFSET,
    )  # fmt: skip
    tl.store(p_part + o_k[:, None] * BV + o_v[None, :], b_ds)
    p_part += BK * BV
    if NORM != "subtract":
        tl.store(p_part + o_k, b_q_sum)
    p_part += BK
    tl.store(p_part + o_v, b_g_sum)
    if GRAD_LOCAL:
        across = tl.maximum(parts // H, 1)
        rows = tl.cdiv(H, parts // across)
        y_begin = tl.minimum(i_p // across * rows, H)
        y_end = tl.minimum(y_begin + rows, H)
        span = tl.cdiv(tl.cdiv(W, across), BW) * BW
        x_begin = i_p % across * span
        x_end = tl.minimum(x_begin + span, W)
        a0, a1, a2, a3, a4, a5, a6, a7, a8 = sum_local_grad(
            p_g, p_v, p_mask, p_mask_q, stride_g, stride_v, x_begin, x_end, y_begin, y_end, H, W, prefix, o_v, m_v,
            BW, BV, HAS_MASK, MASK_Q,
        )  # fmt: skip
        store_local_grad(p_part + BV + o_v, BV, o_v >= 0, a0, a1, a2, a3, a4, a5, a6, a7, a8)


@triton.jit(do_not_specialize=SIZES)
def grad_finish_kernel(
    p_part, p_count, p_seq, p_ds, p_q_mean, p_g_mean, p_dw, N, H, W, scale, parts, blocks, heads,
    MAP: tl.constexpr, NORM: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HEADS: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, BR: tl.constexpr, BP: tl.constexpr, STEPS: tl.constexpr, GRAD_LOCAL: tl.constexpr,
    HAS_MASK: tl.constexpr, PACKED: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """dS with the factor s/n, dk̄/n, dv̄/n and the gradient of the local weight from their parts

    Grid (B·blocks, the larger of BK and BV / BR): a program sums BR rows of dS and the taps of BR channels
    """
    i = tl.cast(tl.program_id(0), tl.int64)
    i_b = i // blocks
    h = (i % blocks) * HEADS
    _, N, H, W = locate(p_seq, i_b, N, H, W, PACKED)
    count = divisor_of(tokens_of(p_count, i_b, N, HAS_MASK), WEIGHTED)
    scale = tl.cast(scale, tl.float32)
    o_v, m_v = channels(h, heads, DV, HEADS, BV)
    o_r = tl.program_id(1) * BR + tl.arange(0, BR)
    m_r = (o_r < HEADS * DK) & (h * DK + o_r < heads * DK)
    m_head = same_head(o_r, m_r, o_v, m_v, DK, DV)
    size: tl.constexpr = BK * BV + BK + 10 * BV
    p_part += i * parts * size
    b_ds = sum_parts(p_part, o_r[:, None] * BV + o_v[None, :], m_head, parts, size, BP, STEPS)
    p_part += BK * BV
    if NORM != "subtract":
        b_q_sum = sum_parts(p_part, o_r[:, None], m_r[:, None], parts, size, BP, STEPS)
        tl.store(p_q_mean + (i_b * heads + h) * DK + o_r, tl.sum(tl.div_rn(b_q_sum * scale, count), 1), mask=m_r)
    p_part += BK
    b_g_sum = sum_parts(p_part, o_v[None, :], m_v[None, :], parts, size, BP, STEPS)
    b_ds = add_map_to_state_grad(b_ds, b_g_sum, MAP, NORM)
    p = p_ds + (i_b * heads + h) * DK * DV + state_offsets(o_r, o_v, DV)
    tl.store(p, b_ds * tl.div_rn(scale, count), mask=m_head)
    if tl.program_id(1) == 0:
        tl.store(p_g_mean + (i_b * heads + h) * DV + o_v, tl.div_rn(tl.sum(b_g_sum, 0), count), mask=m_v)
    if GRAD_LOCAL:
        o_t = tl.arange(0, 16)
        m_t = ((o_r < HEADS * DV) & (h * DV + o_r < heads * DV))[:, None] & (o_t < 9)[None, :]
        b_dw = sum_parts(p_part, BV + o_t[None, :] * BV + o_r[:, None], m_t, parts, size, BP, STEPS)
        p = p_dw + ((i_b * heads + h) * DV + o_r[:, None]) * 9 + o_t[None, :]
        tl.store(p, b_dw.to(p_dw.dtype.element_ty), mask=m_t)


@triton.jit(do_not_specialize=SIZES)
def grad_kernel(
    p_q, p_k, p_v, p_w, p_g, p_mask, p_mask_q, p_seq, p_share, p_lse, p_offset, p_s, p_means,
    p_ds, p_q_mean, p_g_mean, p_d0, p_d1, p_d2, p_dshare,
    Nq, N, H, W, prefix, scale, blocks, columns, rows, heads,
    stride_qb, stride_q, stride_kb, stride_k, stride_vb, stride_v, stride_gb, stride_g,
    stride_dqb, stride_dq, stride_dkb, stride_dk, stride_dvb, stride_dv,
    MAP: tl.constexpr, NORM: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HEADS: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    LOCAL: tl.constexpr, HAS_MASK: tl.constexpr, MASK_Q: tl.constexpr, PACKED: tl.constexpr, WEIGHTED: tl.constexpr,
    OFFSET: tl.constexpr, ANCHORED: tl.constexpr, LAYOUT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Gradients of q, k, v from the states. Grid (B·blocks, tiles), tiles as for `forward.output_kernel`"""
    i_b = tl.cast(tl.program_id(0) // blocks, tl.int64)
    h = (tl.program_id(0) % blocks) * HEADS
    i_t = tile_index(WIDE)
    start, N, H, W = locate(p_seq, i_b, N, H, W, PACKED)
    if PACKED:
        Nq = N
        columns = tl.cdiv(W, BW)
        tiles = tl.cdiv(H, rows) * columns if LOCAL else tl.cdiv(N, rows)
        if i_t >= tiles:  # the grid is for the image with the most tiles
            return
    o_k, m_k = channels(h, heads, DK, HEADS, BK)
    o_v, m_v = channels(h, heads, DV, HEADS, BV)
    p_q += i_b * stride_qb + start * stride_q + h * DK
    p_k += i_b * stride_kb + start * stride_k + h * DK
    p_v += i_b * stride_vb + start * stride_v + h * DV
    p_g += i_b * stride_gb + start * stride_g + h * DV
    p_dq, p_dk, p_dv = gradient_pointers(p_d0, p_d1, p_d2, heads * DK, LAYOUT)
    p_dq += i_b * stride_dqb + start * stride_dq + h * DK
    p_dk += i_b * stride_dkb + start * stride_dk + h * DK
    p_dv += i_b * stride_dvb + start * stride_dv + h * DV
    if HAS_MASK:
        p_mask += i_b * N
    if MASK_Q:
        p_mask_q += i_b * Nq
    if WEIGHTED:
        p_share += (i_b * heads + h) * N
        p_dshare += (i_b * heads + h) * N
    if ANCHORED:
        p_lse += i_b * heads + h
    b_offset = load_offset(p_offset, i_b, h, heads, o_k, m_k, DK, OFFSET)
    m_head = same_head(o_k, m_k, o_v, m_v, DK, DV)
    o_s = (i_b * heads + h) * DK * DV + state_offsets(o_k, o_v, DV)
    b_s = tl.load(p_s + o_s, mask=m_head, other=0.0)
    b_st = tl.trans(operand(b_s, DOT, PRECISION))
    b_ds = tl.load(p_ds + o_s, mask=m_head, other=0.0)
    p_means += i_b * heads * (DK + DV)
    b_k_mean = tl.load(p_means + h * DK + o_k, mask=m_k, other=0.0)
    b_v_mean = tl.load(p_means + heads * DK + h * DV + o_v, mask=m_v, other=0.0)
    b_g_mean = tl.load(p_g_mean + (i_b * heads + h) * DV + o_v, mask=m_v, other=0.0)
    b_q_mean = 0.0
    b_anchor = 0.0
    b_overlap = 0.0
    if NORM != "subtract":
        b_q_mean = tl.load(p_q_mean + (i_b * heads + h) * DK + o_k, mask=m_k, other=0.0)
    if ANCHORED:
        b_anchor = b_offset * tl.cast(scale, tl.float32)
        b_overlap = overlap_of(b_ds, b_s.to(tl.float32), tl.cast(scale, tl.float32), o_k, DK, HEADS)
    b_ds = operand(b_ds, DOT, PRECISION)
    b_dst = tl.trans(b_ds)
    if LOCAL:
        if i_t == 0:
            write_grads_run(
                p_q, p_k, p_v, p_g, p_dq, p_dk, p_dv, p_mask, p_mask_q, p_share, p_lse, p_dshare,
                stride_q, stride_k, stride_v, stride_g, stride_dq, stride_dk, stride_dv,
                0, prefix, Nq, N, o_k, m_k, o_v, m_v,
                b_st, b_ds, b_dst, b_q_mean, b_g_mean, b_k_mean, b_v_mean, b_offset, b_anchor, b_overlap,
                MAP, NORM, DK, DV, HEADS, 16, DOT, PRECISION, HAS_MASK, MASK_Q, WEIGHTED, OFFSET, ANCHORED,
            )  # fmt: skip
        x = (i_t % columns) * BW
        y = (i_t // columns) * rows
        y_end = tl.minimum(y + rows, H)
        if (x < W) & (y < H):
            t = prefix + y * W + x
            for i in range(0, rows * BW, BN):
                o_t, m_t = tile_tokens(i, x, y, y_end, W, BN, BW, WIDE)
                write_grads(
                    p_q, p_k, p_v, p_g, p_dq, p_dk, p_dv, p_mask, p_mask_q, p_share, p_lse, p_dshare,
                    stride_q, stride_k, stride_v, stride_g, stride_dq, stride_dk, stride_dv,
                    t, o_t, m_t, m_t, N, o_k, m_k, o_v, m_v,
                    b_st, b_ds, b_dst, b_q_mean, b_g_mean, b_k_mean, b_v_mean, b_offset, b_anchor, b_overlap,
                    MAP, NORM, DK, DV, HEADS, DOT, PRECISION, HAS_MASK, MASK_Q, WEIGHTED, OFFSET, ANCHORED,
                )  # fmt: skip
            tl.debug_barrier()  # add_local reads what other threads wrote
            add_local(
                p_g, p_w + (i_b * heads + h) * DV * 9, p_dv, p_mask_q, p_mask, stride_g, stride_dv,
                x, y, y_end, H, W, prefix, o_v, m_v, BW, BV, True, MASK_Q, HAS_MASK,
            )  # fmt: skip
    else:
        t = i_t * rows
        write_grads_run(
            p_q, p_k, p_v, p_g, p_dq, p_dk, p_dv, p_mask, p_mask_q, p_share, p_lse, p_dshare,
            stride_q, stride_k, stride_v, stride_g, stride_dq, stride_dk, stride_dv,
            t, t + rows, Nq, N, o_k, m_k, o_v, m_v,
            b_st, b_ds, b_dst, b_q_mean, b_g_mean, b_k_mean, b_v_mean, b_offset, b_anchor, b_overlap,
            MAP, NORM, DK, DV, HEADS, BN, DOT, PRECISION, HAS_MASK, MASK_Q, WEIGHTED, OFFSET, ANCHORED,
        )  # fmt: skip
