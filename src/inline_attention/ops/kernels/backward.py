"""The kernels of the backward pass. Vocabulary and shapes as in `blocks.py`; g is the gradient of the output."""

import triton
import triton.language as tl

from ..feature_maps import add_map_at_zero, feature_map, feature_map_backward
from .blocks import (
    SIZES,
    accumulate,
    add_local,
    gradient_pointers,
    load_map_row,
    load_neighbours,
    load_rows,
    locate,
    operand,
    present,
    product_plus,
    same_head,
    state_offsets,
    store_rows,
    sum_parts,
    tile_index,
    tile_tokens,
)


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
def write_query_grads(
    p_q, p_g, p_dq, p_mask, stride_q, stride_g, stride_dq, t, o_t, m_t, o_c, m_c, b_st,
    MAP: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, MASK_Q: tl.constexpr,
):  # fmt: skip
    """dq = φ'(q)·(g·Sᵀ) for queries t + o_t where m_t; zeros for absent ones"""
    m_here = present(p_mask, t, o_t, m_t, MASK_Q)
    b_g = load_rows(p_g, stride_g, t, o_t, m_here, o_c, m_c)
    b_dq = tl.dot(operand(b_g, DOT, PRECISION), b_st, input_precision=PRECISION)
    if MAP != "identity":
        b_q = load_rows(p_q, stride_q, t, o_t, m_here, o_c, m_c)
        b_dq = feature_map_backward(b_q.to(tl.float32), b_dq, MAP)
    store_rows(p_dq, b_dq, stride_dq, t, o_t, m_t, o_c, m_c)


@triton.jit
def write_key_grads(
    p_k, p_v, p_dk, p_dv, p_mask, stride_k, stride_v, stride_dk, stride_dv, t, o_t, m_t, o_c, m_c,
    b_ds, b_dst, b_g_mean, b_k_mean, b_v_mean,
    MAP: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """dk = φ'(k)·((v − v̄)·dSᵀ), dv = (φ(k) − k̄)·dS + ḡ for tokens t + o_t where m_t; zeros for absent ones"""
    m_here = present(p_mask, t, o_t, m_t, HAS_MASK)
    b_k = load_rows(p_k, stride_k, t, o_t, m_here, o_c, m_c).to(tl.float32)
    b_v = load_rows(p_v, stride_v, t, o_t, m_here, o_c, m_c).to(tl.float32) - b_v_mean[None, :]
    b_dk = feature_map_backward(b_k, tl.dot(operand(b_v, DOT, PRECISION), b_dst, input_precision=PRECISION), MAP)
    b_k = feature_map(b_k, MAP) - b_k_mean[None, :]
    b_dv = product_plus(operand(b_k, DOT, PRECISION), b_ds, b_g_mean[None, :], PRECISION)
    if HAS_MASK:
        b_dk = tl.where(m_here[:, None], b_dk, 0.0)
        b_dv = tl.where(m_here[:, None], b_dv, 0.0)
    store_rows(p_dk, b_dk, stride_dk, t, o_t, m_t, o_c, m_c)
    store_rows(p_dv, b_dv, stride_dv, t, o_t, m_t, o_c, m_c)


@triton.jit
def write_grads(
    p_q, p_k, p_v, p_g, p_dq, p_dk, p_dv, p_mask, p_mask_q,
    stride_q, stride_k, stride_v, stride_g, stride_dq, stride_dk, stride_dv, t, o_t, m_q, m_k, o_c, m_c,
    b_st, b_ds, b_dst, b_g_mean, b_k_mean, b_v_mean,
    MAP: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, HAS_MASK: tl.constexpr, MASK_Q: tl.constexpr,
):  # fmt: skip
    """Gradients of queries t + o_t where m_q and of keys and values where m_k, without the local residual's part"""
    write_query_grads(
        p_q, p_g, p_dq, p_mask_q, stride_q, stride_g, stride_dq, t, o_t, m_q, o_c, m_c, b_st,
        MAP, DOT, PRECISION, MASK_Q,
    )  # fmt: skip
    write_key_grads(
        p_k, p_v, p_dk, p_dv, p_mask, stride_k, stride_v, stride_dk, stride_dv, t, o_t, m_k, o_c, m_c,
        b_ds, b_dst, b_g_mean, b_k_mean, b_v_mean, MAP, DOT, PRECISION, HAS_MASK,
    )  # fmt: skip


@triton.jit
def write_grads_run(
    p_q, p_k, p_v, p_g, p_dq, p_dk, p_dv, p_mask, p_mask_q,
    stride_q, stride_k, stride_v, stride_g, stride_dq, stride_dk, stride_dv, t_begin, t_end, Nq, N, o_c, m_c,
    b_st, b_ds, b_dst, b_g_mean, b_k_mean, b_v_mean,
    MAP: tl.constexpr, BN: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, HAS_MASK: tl.constexpr,
    MASK_Q: tl.constexpr,
):  # fmt: skip
    """`write_grads` for those of the tokens t_begin … t_end − 1 that exist as queries and as keys"""
    o_t = tl.arange(0, BN)
    for t in range(t_begin, t_end, BN):
        m_t = t + o_t < t_end
        write_grads(
            p_q, p_k, p_v, p_g, p_dq, p_dk, p_dv, p_mask, p_mask_q,
            stride_q, stride_k, stride_v, stride_g, stride_dq, stride_dk, stride_dv,
            t, o_t, m_t & (t + o_t < Nq), m_t & (t + o_t < N), o_c, m_c,
            b_st, b_ds, b_dst, b_g_mean, b_k_mean, b_v_mean, MAP, DOT, PRECISION, HAS_MASK, MASK_Q,
        )  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def backward_kernel(
    p_q, p_k, p_v, p_w, p_g, p_mask, p_mask_q, p_count, p_seq, p_s, p_means, p_d0, p_d1, p_d2, p_dw,
    Nq, N, H, W, prefix, scale, blocks, C,
    stride_qb, stride_q, stride_kb, stride_k, stride_vb, stride_v, stride_gb, stride_g,
    stride_dqb, stride_dq, stride_dkb, stride_dk, stride_dvb, stride_dv,
    MAP: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, LOCAL: tl.constexpr, GRAD_LOCAL: tl.constexpr, HAS_MASK: tl.constexpr,
    MASK_Q: tl.constexpr, PACKED: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """All gradients for short sequences. Grid (B·blocks,)"""
    i_b = tl.cast(tl.program_id(0) // blocks, tl.int64)
    c = (tl.program_id(0) % blocks) * HEADS * D
    start, N, H, W = locate(p_seq, i_b, N, H, W, PACKED)
    if PACKED:
        Nq = N
    o_c = tl.arange(0, BC)
    m_c = (o_c < HEADS * D) & (c + o_c < C)
    p_q += i_b * stride_qb + start * stride_q + c
    p_k += i_b * stride_kb + start * stride_k + c
    p_v += i_b * stride_vb + start * stride_v + c
    p_g += i_b * stride_gb + start * stride_g + c
    p_dq, p_dk, p_dv = gradient_pointers(p_d0, p_d1, p_d2, C, LAYOUT)
    p_dq += i_b * stride_dqb + start * stride_dq + c
    p_dk += i_b * stride_dkb + start * stride_dk + c
    p_dv += i_b * stride_dvb + start * stride_dv + c
    if HAS_MASK:
        p_mask += i_b * N
    if MASK_Q:
        p_mask_q += i_b * Nq
    count = tl.cast(N, tl.float32)
    if HAS_MASK:
        count = tl.load(p_count + i_b)

    b_ds, _, b_g_sum, _, _ = accumulate(
        p_q, p_g, p_mask_q, stride_q, stride_g, 0, Nq, o_c, m_c, 0, 0, MAP, BN, BC, DOT, PRECISION, False, MASK_Q
    )
    b_ds = add_map_at_zero(b_ds, b_g_sum[None, :], MAP)
    m_head = same_head(o_c, m_c, o_c, m_c, D)
    b_ds = tl.where(m_head, b_ds * tl.div_rn(tl.cast(scale, tl.float32), count), 0.0)
    b_g_mean = tl.div_rn(b_g_sum, count)
    b_ds = operand(b_ds, DOT, PRECISION)
    b_dst = tl.trans(b_ds)
    b_st = tl.load(p_s + i_b * C * D + c * D + state_offsets(o_c, o_c, D), mask=m_head, other=0.0)
    b_st = tl.trans(operand(b_st, DOT, PRECISION))
    p_means += i_b * 2 * C + c
    b_k_mean = tl.load(p_means + o_c, mask=m_c, other=0.0)
    b_v_mean = tl.load(p_means + C + o_c, mask=m_c, other=0.0)
    write_grads_run(
        p_q, p_k, p_v, p_g, p_dq, p_dk, p_dv, p_mask, p_mask_q,
        stride_q, stride_k, stride_v, stride_g, stride_dq, stride_dk, stride_dv, 0, tl.maximum(Nq, N), Nq, N, o_c, m_c,
        b_st, b_ds, b_dst, b_g_mean, b_k_mean, b_v_mean, MAP, BN, DOT, PRECISION, HAS_MASK, MASK_Q,
    )  # fmt: skip
    if LOCAL:
        tl.debug_barrier()  # add_local reads what other threads wrote
        for x in range(0, W, BW):
            add_local(
                p_g, p_w + (i_b * C + c) * 9, p_dv, p_mask_q, p_mask, stride_g, stride_dv,
                x, 0, H, H, W, prefix, o_c, m_c, BW, BC, True, MASK_Q, HAS_MASK,
            )  # fmt: skip
    if GRAD_LOCAL:
        a0, a1, a2, a3, a4, a5, a6, a7, a8 = sum_local_grad(
            p_g, p_v, p_mask, p_mask_q, stride_g, stride_v, 0, W, 0, H, H, W, prefix, o_c, m_c,
            BW, BC, HAS_MASK, MASK_Q,
        )  # fmt: skip
        store_local_grad(p_dw + (i_b * C + c + o_c) * 9, 1, m_c, a0, a1, a2, a3, a4, a5, a6, a7, a8)


@triton.jit(do_not_specialize=SIZES)
def grad_state_kernel(
    p_q, p_v, p_g, p_mask, p_mask_q, p_seq, p_part,
    Nq, N, H, W, prefix, blocks, C, stride_qb, stride_q, stride_vb, stride_v, stride_gb, stride_g,
    MAP: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, GRAD_LOCAL: tl.constexpr, HAS_MASK: tl.constexpr, MASK_Q: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Sums over one part of the tokens. Grid (B·blocks, parts)

    The gradient of the local weight is summed over about the same part of the map: some rows, or some columns of a row.
    Parts are (B·blocks, parts, BC·(BC + 10)) float32: dS, Σ g and nine taps.
    """
    i = tl.cast(tl.program_id(0), tl.int64)
    i_b = i // blocks
    i_p = tl.program_id(1)
    parts = tl.num_programs(1)
    c = (i % blocks) * HEADS * D
    start, N, H, W = locate(p_seq, i_b, N, H, W, PACKED)
    if PACKED:
        Nq = N
    o_c = tl.arange(0, BC)
    m_c = (o_c < HEADS * D) & (c + o_c < C)
    p_q += i_b * stride_qb + start * stride_q + c
    p_v += i_b * stride_vb + start * stride_v + c
    p_g += i_b * stride_gb + start * stride_g + c
    if HAS_MASK:
        p_mask += i_b * N
    if MASK_Q:
        p_mask_q += i_b * Nq
    p_part += (i * parts + i_p) * (BC * (BC + 10))
    length = tl.cdiv(tl.cdiv(Nq, parts), BN) * BN
    t_begin = tl.minimum(i_p * length, Nq)
    t_end = tl.minimum(t_begin + length, Nq)
    b_ds, _, b_g_sum, _, _ = accumulate(
        p_q, p_g, p_mask_q, stride_q, stride_g, t_begin, t_end, o_c, m_c, 0, 0,
        MAP, BN, BC, DOT, PRECISION, False, MASK_Q,
    )  # fmt: skip
    tl.store(p_part + o_c[:, None] * BC + o_c[None, :], b_ds)
    tl.store(p_part + BC * BC + o_c, b_g_sum)
    if GRAD_LOCAL:
        across = tl.maximum(parts // H, 1)
        rows = tl.cdiv(H, parts // across)
        y_begin = tl.minimum(i_p // across * rows, H)
        y_end = tl.minimum(y_begin + rows, H)
        span = tl.cdiv(tl.cdiv(W, across), BW) * BW
        x_begin = i_p % across * span
        x_end = tl.minimum(x_begin + span, W)
        a0, a1, a2, a3, a4, a5, a6, a7, a8 = sum_local_grad(
            p_g, p_v, p_mask, p_mask_q, stride_g, stride_v, x_begin, x_end, y_begin, y_end, H, W, prefix, o_c, m_c,
            BW, BC, HAS_MASK, MASK_Q,
        )  # fmt: skip
        store_local_grad(p_part + BC * BC + BC + o_c, BC, o_c >= 0, a0, a1, a2, a3, a4, a5, a6, a7, a8)


@triton.jit(do_not_specialize=SIZES)
def grad_finish_kernel(
    p_part, p_count, p_seq, p_ds, p_g_mean, p_dw, N, H, W, scale, parts, blocks, C,
    MAP: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, BP: tl.constexpr,
    STEPS: tl.constexpr, GRAD_LOCAL: tl.constexpr, HAS_MASK: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """dS with the factor s/n, ḡ and the gradient of the local weight from their parts. Grid (B·blocks, BC / BR)"""
    i = tl.cast(tl.program_id(0), tl.int64)
    i_b = i // blocks
    c = (i % blocks) * HEADS * D
    _, N, H, W = locate(p_seq, i_b, N, H, W, PACKED)
    count = tl.cast(N, tl.float32)
    if HAS_MASK:
        count = tl.load(p_count + i_b)
    o_c = tl.arange(0, BC)
    m_c = (o_c < HEADS * D) & (c + o_c < C)
    o_r = tl.program_id(1) * BR + tl.arange(0, BR)
    m_r = (o_r < HEADS * D) & (c + o_r < C)
    m_head = same_head(o_r, m_r, o_c, m_c, D)
    size: tl.constexpr = BC * (BC + 10)
    p_part += i * parts * size
    b_ds = sum_parts(p_part, o_r[:, None] * BC + o_c[None, :], m_head, parts, size, BP, STEPS)
    b_g_sum = sum_parts(p_part, BC * BC + o_c[None, :], m_c[None, :], parts, size, BP, STEPS)
    b_ds = add_map_at_zero(b_ds, b_g_sum, MAP)
    tl.store(
        p_ds + i_b * C * D + c * D + state_offsets(o_r, o_c, D),
        b_ds * tl.div_rn(tl.cast(scale, tl.float32), count),
        mask=m_head,
    )
    if tl.program_id(1) == 0:
        tl.store(p_g_mean + i_b * C + c + o_c, tl.div_rn(tl.sum(b_g_sum, 0), count), mask=m_c)
    if GRAD_LOCAL:
        o_t = tl.arange(0, 16)
        m_t = m_r[:, None] & (o_t < 9)[None, :]
        b_dw = sum_parts(p_part, BC * BC + BC + o_t[None, :] * BC + o_r[:, None], m_t, parts, size, BP, STEPS)
        p = p_dw + (i_b * C + c + o_r[:, None]) * 9 + o_t[None, :]
        tl.store(p, b_dw.to(p_dw.dtype.element_ty), mask=m_t)


@triton.jit(do_not_specialize=SIZES)
def grad_kernel(
    p_q, p_k, p_v, p_w, p_g, p_mask, p_mask_q, p_seq, p_s, p_means, p_ds, p_g_mean, p_d0, p_d1, p_d2,
    Nq, N, H, W, prefix, blocks, columns, rows, C,
    stride_qb, stride_q, stride_kb, stride_k, stride_vb, stride_v, stride_gb, stride_g,
    stride_dqb, stride_dq, stride_dkb, stride_dk, stride_dvb, stride_dv,
    MAP: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, LOCAL: tl.constexpr, HAS_MASK: tl.constexpr, MASK_Q: tl.constexpr,
    PACKED: tl.constexpr, LAYOUT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Gradients of q, k, v from the states. Grid (B·blocks, tiles), tiles as for `forward.output_kernel`"""
    i_b = tl.cast(tl.program_id(0) // blocks, tl.int64)
    c = (tl.program_id(0) % blocks) * HEADS * D
    i_t = tile_index(WIDE)
    start, N, H, W = locate(p_seq, i_b, N, H, W, PACKED)
    if PACKED:
        Nq = N
        columns = tl.cdiv(W, BW)
        tiles = tl.cdiv(H, rows) * columns if LOCAL else tl.cdiv(N, rows)
        if i_t >= tiles:  # the grid is for the image with the most tiles
            return
    o_c = tl.arange(0, BC)
    m_c = (o_c < HEADS * D) & (c + o_c < C)
    p_q += i_b * stride_qb + start * stride_q + c
    p_k += i_b * stride_kb + start * stride_k + c
    p_v += i_b * stride_vb + start * stride_v + c
    p_g += i_b * stride_gb + start * stride_g + c
    p_dq, p_dk, p_dv = gradient_pointers(p_d0, p_d1, p_d2, C, LAYOUT)
    p_dq += i_b * stride_dqb + start * stride_dq + c
    p_dk += i_b * stride_dkb + start * stride_dk + c
    p_dv += i_b * stride_dvb + start * stride_dv + c
    if HAS_MASK:
        p_mask += i_b * N
    if MASK_Q:
        p_mask_q += i_b * Nq
    m_head = same_head(o_c, m_c, o_c, m_c, D)
    o_s = i_b * C * D + c * D + state_offsets(o_c, o_c, D)
    b_st = tl.trans(operand(tl.load(p_s + o_s, mask=m_head, other=0.0), DOT, PRECISION))
    b_ds = operand(tl.load(p_ds + o_s, mask=m_head, other=0.0), DOT, PRECISION)
    b_dst = tl.trans(b_ds)
    p_means += i_b * 2 * C + c
    b_k_mean = tl.load(p_means + o_c, mask=m_c, other=0.0)
    b_v_mean = tl.load(p_means + C + o_c, mask=m_c, other=0.0)
    b_g_mean = tl.load(p_g_mean + i_b * C + c + o_c, mask=m_c, other=0.0)
    if LOCAL:
        if i_t == 0:
            write_grads_run(
                p_q, p_k, p_v, p_g, p_dq, p_dk, p_dv, p_mask, p_mask_q,
                stride_q, stride_k, stride_v, stride_g, stride_dq, stride_dk, stride_dv, 0, prefix, Nq, N, o_c, m_c,
                b_st, b_ds, b_dst, b_g_mean, b_k_mean, b_v_mean, MAP, 16, DOT, PRECISION, HAS_MASK, MASK_Q,
            )  # fmt: skip
        x = (i_t % columns) * BW
        y = (i_t // columns) * rows
        y_end = tl.minimum(y + rows, H)
        if (x < W) & (y < H):
            t = prefix + y * W + x
            for i in range(0, rows * BW, BN):
                o_t, m_t = tile_tokens(i, x, y, y_end, W, BN, BW, WIDE)
                write_grads(
                    p_q, p_k, p_v, p_g, p_dq, p_dk, p_dv, p_mask, p_mask_q,
                    stride_q, stride_k, stride_v, stride_g, stride_dq, stride_dk, stride_dv, t, o_t, m_t, m_t, o_c, m_c,
                    b_st, b_ds, b_dst, b_g_mean, b_k_mean, b_v_mean, MAP, DOT, PRECISION, HAS_MASK, MASK_Q,
                )  # fmt: skip
            tl.debug_barrier()  # add_local reads what other threads wrote
            add_local(
                p_g, p_w + (i_b * C + c) * 9, p_dv, p_mask_q, p_mask, stride_g, stride_dv,
                x, y, y_end, H, W, prefix, o_c, m_c, BW, BC, True, MASK_Q, HAS_MASK,
            )  # fmt: skip
    else:
        t = i_t * rows
        write_grads_run(
            p_q, p_k, p_v, p_g, p_dq, p_dk, p_dv, p_mask, p_mask_q,
            stride_q, stride_k, stride_v, stride_g, stride_dq, stride_dk, stride_dv, t, t + rows, Nq, N, o_c, m_c,
            b_st, b_ds, b_dst, b_g_mean, b_k_mean, b_v_mean, MAP, BN, DOT, PRECISION, HAS_MASK, MASK_Q,
        )  # fmt: skip
