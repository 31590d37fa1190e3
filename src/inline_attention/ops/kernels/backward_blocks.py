"""Functions that the kernels of the backward pass share. Vocabulary and shapes as in `blocks.py`; g is the gradient of
the output."""

import triton
import triton.language as tl

from ..feature_maps import add_map_at_zero, feature_map, feature_map_backward
from .blocks import (
    accumulate,
    add_product,
    as_float32,
    factors,
    head_sums,
    load_queries,
    load_rows,
    load_shares,
    normalizers,
    operand,
    present,
    product_plus,
    products_with_row,
    store_rows,
    store_scalars,
)
from .local import LANES, add_local, first_sums, lanes, load_local_weight, next_sums, shift_matrices


@triton.jit
def accumulate_normalised(
    p_q, p_g, p_dq, p_mask, stride_q, stride_g, stride_dq, t_begin, t_end, o_k, m_k, o_v, m_v,
    b_st, b_k_mean, b_v_mean, eps,
    MAP: tl.constexpr, NORM: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HEADS: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, MASK_Q: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """Sums over queries where NORM scales the outputs: dS = Σ (g(z)·φ(q))ᵀg (BK, BV), Σ dz·φ(q), Σ f(z)·g

    Writes dq = φ'(q)·(g(z)·g·Sᵀ + dz·s·k̄) too, zeros for absent queries: all that it takes is at hand. b_k_mean holds
    s·k̄. The outputs without their scale are not needed, as g·(φ(q)·S) = (g·Sᵀ)·φ(q).
    """
    o_t = tl.arange(0, BN)
    b_ds = tl.zeros([BK, BV], tl.float32)
    b_q_sum = tl.zeros([BN, BK], tl.float32)
    b_ones = tl.full([16, BN], 1.0, DOT)
    b_g_sum = tl.zeros([16, BV], tl.float32)
    for t in range(t_begin, t_end, BN):
        m_t = t + o_t < t_end
        m_here = present(p_mask, t, o_t, m_t, MASK_Q)
        b_q = as_float32(load_rows(p_q, stride_q, t, o_t, m_here, o_k, m_k))
        b_phi = feature_map(b_q, MAP)
        b_full = add_map_at_zero(b_phi, (m_here[:, None] & m_k[None, :]).to(tl.float32), MAP)
        if NORM == "magnitude" and WARPS > 1:  # for a product every warp would compute φ, which has exponentials
            b_z = head_sums(b_full * b_k_mean[None, :], o_k, o_k, DK, DK, HEADS)
        else:
            b_z = normalizers(b_phi, b_k_mean, o_k, o_k, MAP, DK, DK, HEADS, DOT, PRECISION)
        b_phi = b_full
        b_scale, _, b_slope = factors(b_z, eps, NORM, PRECISION)
        b_g = load_rows(p_g, stride_g, t, o_t, m_here, o_v, m_v)
        b_left = operand(b_g, DOT, PRECISION)
        b_u = tl.dot(b_left, b_st, input_precision=PRECISION)
        b_along = head_sums(b_u * b_phi, o_k, o_k, DK, DK, HEADS)
        if NORM == "divide":
            b_along -= eps * products_with_row(b_left, b_v_mean, o_v, o_k, DV, DK, HEADS, DOT, PRECISION)
        b_dz = -b_slope * b_along
        b_dq = feature_map_backward(b_q, b_scale * b_u + b_dz * b_k_mean[None, :], MAP)
        if MASK_Q:
            b_dq = tl.where(m_here[:, None], b_dq, 0.0)
        store_rows(p_dq, b_dq, stride_dq, t, o_t, m_t, o_k, m_k)
        b_q_sum += b_dz * b_phi
        b_ds = add_product(b_ds, tl.trans(operand(b_scale * b_phi, DOT, PRECISION)), b_left, PRECISION)
        if NORM != "divide":
            b_g_sum = add_product(b_g_sum, b_ones, b_left, PRECISION)
    if NORM == "divide":  # f(z) = g(z)·z, and z is φ(q)·s·k̄
        m_head = (o_k // DK)[:, None] == (o_v // DV)[None, :]
        return b_ds, tl.sum(b_q_sum, 0), tl.sum(tl.where(m_head, b_ds * b_k_mean[:, None], 0.0), 0)
    else:
        return b_ds, tl.sum(b_q_sum, 0), tl.max(b_g_sum, 0)


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
        b_q = load_queries(p_q, stride_q, t, o_t, m_here, o_k, m_k, b_offset, MAP, PRECISION, OFFSET)
        b_dq = feature_map_backward(as_float32(b_q), b_dq, MAP)
    store_rows(p_dq, b_dq, stride_dq, t, o_t, m_t, o_k, m_k)


@triton.jit
def constant_grads(
    b_ds, b_q_mean, b_g_mean, b_k_mean, b_v_mean,
    NORM: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """What `write_key_grads` adds to its products for dk and dv, and the mean of v for it: (BK,), (1, BV), (BV,)

    In half precision its products take v less its mean as rounded to DOT, and φ(k) as it is. The rest is in the first
    two. If WEIGHTED, they take v as it is and φ(k) less its mean, and dv̄ is not in the second, because shares scale it.
    """
    b_dk = tl.zeros_like(b_k_mean)
    if NORM != "subtract":
        b_dk = b_q_mean
    b_dv = tl.zeros_like(b_g_mean)[None, :]
    if not WEIGHTED:
        b_dv = b_g_mean[None, :]
    if PRECISION != "ieee":
        b_ds = b_ds.to(tl.float32)
        if WEIGHTED:
            b_dk -= tl.sum(b_ds * b_v_mean[None, :], 1)
        else:
            b_rounded = b_v_mean.to(DOT)
            b_dk += tl.sum(b_ds * (b_rounded.to(tl.float32) - b_v_mean)[None, :], 1)
            b_dv -= tl.sum(b_ds * b_k_mean[:, None], 0)[None, :]
            b_v_mean = b_rounded
    return b_dk, b_dv, b_v_mean


@triton.jit
def write_key_grads(
    p_k, p_v, p_dk, p_dv, p_mask, p_share, p_lse, p_dshare, stride_k, stride_v, stride_dk, stride_dv,
    t, o_t, m_t, N, o_k, m_k, o_v, m_v, b_ds, b_dst, b_dk0, b_rest, b_g_mean, b_k_mean, b_v_mean, b_anchor, b_overlap,
    MAP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HEADS: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr, HAS_MASK: tl.constexpr, WEIGHTED: tl.constexpr, ANCHORED: tl.constexpr,
):  # fmt: skip
    """dk = φ'(k)·((v − v̄)·dSᵀ + dk̄), dv = (φ(k) − k̄)·dS + dv̄ for tokens t + o_t where m_t; zeros for absent ones

    b_k_mean is the mean of φ(k) − φ(0). b_dk0 and b_v_mean are those of `constant_grads`, and b_rest, (1, BV) or
    (BN, BV), is its b_dv with the local residual's part of dv. If WEIGHTED, dk and dv are multiplied by the token's
    share p, and dp = ((v − v̄)·dSᵀ + dk̄)·(φ(k) − k̄) + dv̄·(v − v̄). If ANCHORED, p is the softmax of s·a·k: its scores
    have the gradient p·(dp − Σ p·dp), which is stored instead of dp and adds its product with s·a to dk. b_overlap is
    the sum.
    """
    m_here = present(p_mask, t, o_t, m_t, HAS_MASK)
    b_k = load_rows(p_k, stride_k, t, o_t, m_here, o_k, m_k)
    b_v = load_rows(p_v, stride_v, t, o_t, m_here, o_v, m_v)
    b_phi = b_k
    if MAP != "identity":
        b_phi = feature_map(as_float32(b_k), MAP)
    b_left = b_v
    if PRECISION == "ieee" or not WEIGHTED:
        b_left = b_v.to(DOT) - b_v_mean[None, :]
    b_dk = product_plus(operand(b_left, DOT, PRECISION), b_dst, b_dk0[None, :], PRECISION)
    if PRECISION == "ieee" or WEIGHTED:
        b_phi = as_float32(b_phi) - b_k_mean[None, :]
    if WEIGHTED:
        b_v = as_float32(b_v) - b_v_mean[None, :]
        b_dv = product_plus(operand(b_phi, DOT, PRECISION), b_ds, b_g_mean[None, :], PRECISION)
        if DK == DV:  # one sum, as the channels are the same
            b_dp = head_sums(b_dk * b_phi + b_v * b_g_mean[None, :], o_k, o_k, DK, DK, HEADS)
        else:
            b_dp = head_sums(b_dk * b_phi, o_k, o_k, DK, DK, HEADS)
            b_dp += head_sums(b_v * b_g_mean[None, :], o_v, o_k, DV, DK, HEADS)
        b_share = load_shares(p_share, p_lse, N, t, o_t, m_here, o_k, m_k, DK, HEADS, ANCHORED)
        b_dk *= b_share
        b_dv = b_dv * load_shares(p_share, p_lse, N, t, o_t, m_here, o_v, m_v, DV, HEADS, ANCHORED) + b_rest
        if ANCHORED:
            b_dp = b_share * (b_dp - b_overlap)
            b_dk += b_dp * b_anchor[None, :]
        if HAS_MASK:
            b_dp = tl.where(m_here[:, None], b_dp, 0.0)
        store_scalars(p_dshare, b_dp, N, t, o_t, m_t, o_k, m_k, DK, HEADS)
    else:
        b_dv = product_plus(operand(b_phi, DOT, PRECISION), b_ds, b_rest, PRECISION)
    if MAP != "identity":
        b_dk = feature_map_backward(as_float32(b_k), b_dk, MAP)
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
    b_st, b_ds, b_dst, b_dk0, b_rest, b_g_mean, b_k_mean, b_v_mean, b_offset, b_anchor, b_overlap,
    MAP: tl.constexpr, NORM: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HEADS: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr, HAS_MASK: tl.constexpr, MASK_Q: tl.constexpr, WEIGHTED: tl.constexpr,
    OFFSET: tl.constexpr, ANCHORED: tl.constexpr,
):  # fmt: skip
    """Gradients of queries t + o_t where m_q and of keys and values where m_t

    If NORM scales the outputs, `accumulate_normalised` has written those of the queries.
    """
    if NORM == "subtract":
        write_query_grads(
            p_q, p_g, p_dq, p_mask_q, stride_q, stride_g, stride_dq, t, o_t, m_q, o_k, m_k, o_v, m_v, b_st, b_offset,
            MAP, DOT, PRECISION, MASK_Q, OFFSET,
        )  # fmt: skip
    write_key_grads(
        p_k, p_v, p_dk, p_dv, p_mask, p_share, p_lse, p_dshare, stride_k, stride_v, stride_dk, stride_dv,
        t, o_t, m_t, N, o_k, m_k, o_v, m_v,
        b_ds, b_dst, b_dk0, b_rest, b_g_mean, b_k_mean, b_v_mean, b_anchor, b_overlap,
        MAP, DK, DV, HEADS, DOT, PRECISION, HAS_MASK, WEIGHTED, ANCHORED,
    )  # fmt: skip


@triton.jit
def write_grads_run(
    p_q, p_k, p_v, p_g, p_dq, p_dk, p_dv, p_mask, p_mask_q, p_share, p_lse, p_dshare,
    stride_q, stride_k, stride_v, stride_g, stride_dq, stride_dk, stride_dv, t_begin, t_end, Nq, N, o_k, m_k, o_v, m_v,
    b_st, b_ds, b_dst, b_dk0, b_dv0, b_g_mean, b_k_mean, b_v_mean, b_offset, b_anchor, b_overlap,
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
            b_st, b_ds, b_dst, b_dk0, b_dv0, b_g_mean, b_k_mean, b_v_mean, b_offset, b_anchor, b_overlap,
            MAP, NORM, DK, DV, HEADS, DOT, PRECISION, HAS_MASK, MASK_Q, WEIGHTED, OFFSET, ANCHORED,
        )  # fmt: skip


@triton.jit
def write_grads_tile(
    p_q, p_k, p_v, p_w, p_g, p_dq, p_dk, p_dv, p_mask, p_mask_q, p_share, p_lse, p_dshare,
    stride_q, stride_k, stride_v, stride_g, stride_dq, stride_dk, stride_dv,
    x, y_begin, y_end, N, H, W, prefix, o_k, m_k, o_v, m_v,
    b_st, b_ds, b_dst, b_dk0, b_dv0, b_g_mean, b_k_mean, b_v_mean, b_offset, b_anchor, b_overlap,
    MAP: tl.constexpr, NORM: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HEADS: tl.constexpr, BV: tl.constexpr,
    BW: tl.constexpr, HALO: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, HAS_MASK: tl.constexpr,
    MASK_Q: tl.constexpr, WEIGHTED: tl.constexpr, OFFSET: tl.constexpr, ANCHORED: tl.constexpr,
):  # fmt: skip
    """`write_grads` for rows y_begin … y_end − 1 and columns x … x + BW − 1 of the map, with the local residual"""
    shifts = shift_matrices(p_g.dtype.element_ty, BW, HALO)
    o_y, o_x = lanes(BW)
    if PRECISION != "ieee":
        w = load_local_weight(p_w, o_v, m_v, True)
        b_next, b_after = first_sums(
            p_g, stride_g, p_mask_q, y_begin, x, H, W, prefix, o_v, m_v, b_dv0, w, shifts, BW, HALO, MASK_Q
        )
    for y in range(y_begin, y_end, LANES // BW if BW < LANES else 1):
        b_sum = b_dv0
        if PRECISION != "ieee":
            b_sum, b_next, b_after = next_sums(
                p_g, stride_g, p_mask_q, y, x, H, W, prefix, o_v, m_v, b_dv0, b_next, b_after, w, shifts,
                BW, HALO, MASK_Q,
            )  # fmt: skip
        m_t = (y + o_y < y_end) & (x + o_x < W)
        write_grads(
            p_q, p_k, p_v, p_g, p_dq, p_dk, p_dv, p_mask, p_mask_q, p_share, p_lse, p_dshare,
            stride_q, stride_k, stride_v, stride_g, stride_dq, stride_dk, stride_dv,
            prefix + y * W + x, o_y * W + o_x, m_t, m_t, N, o_k, m_k, o_v, m_v,
            b_st, b_ds, b_dst, b_dk0, b_sum, b_g_mean, b_k_mean, b_v_mean, b_offset, b_anchor, b_overlap,
            MAP, NORM, DK, DV, HEADS, DOT, PRECISION, HAS_MASK, MASK_Q, WEIGHTED, OFFSET, ANCHORED,
        )  # fmt: skip
    if PRECISION == "ieee":
        add_local(
            p_g, p_w, p_dv, p_mask_q, p_mask, stride_g, stride_dv, x, y_begin, y_end, H, W, prefix, o_v, m_v, shifts,
            BW, BV, HALO, True, MASK_Q, HAS_MASK,
        )  # fmt: skip


@triton.jit
def sum_queries(
    p_q, p_g, p_dq, p_mask, stride_q, stride_g, stride_dq, t_begin, t_end, o_k, m_k, o_v, m_v,
    b_st, b_k_full, b_v_mean, b_offset, eps,
    MAP: tl.constexpr, NORM: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HEADS: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, MASK_Q: tl.constexpr,
    OFFSET: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """dS, dk̄ and dv̄, without their factors: (BK, BV), (BK,), (BV,). dk̄ has no meaning for "subtract"."""
    if NORM == "subtract":
        b_ds, b_q_sum, b_g_sum, _, _ = accumulate(
            p_q, p_g, p_mask, stride_q, stride_g, t_begin, t_end, o_k, m_k, o_v, m_v, b_offset, 0, 0,
            MAP, BN, BK, BV, DOT, PRECISION, False, MASK_Q, OFFSET,
        )  # fmt: skip
        if OFFSET and (MAP == "identity" and PRECISION != "ieee"):
            b_ds -= b_offset[:, None] * b_g_sum[None, :]
    else:
        b_ds, b_q_sum, b_g_sum = accumulate_normalised(
            p_q, p_g, p_dq, p_mask, stride_q, stride_g, stride_dq, t_begin, t_end, o_k, m_k, o_v, m_v,
            b_st, b_k_full, b_v_mean, eps,
            MAP, NORM, DK, DV, HEADS, BN, BK, BV, DOT, PRECISION, MASK_Q, WARPS,
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
