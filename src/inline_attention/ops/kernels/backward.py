"""The kernels of the backward pass. Vocabulary and shapes as in `blocks.py`; g is the gradient of the output."""

import triton
import triton.language as tl

from .backward_blocks import (
    add_map_to_state_grad,
    constant_grads,
    overlap_of,
    sum_queries,
    write_grads_run,
    write_grads_tile,
)
from .blocks import (
    SIZES,
    channels,
    divisor_of,
    full_mean,
    gradient_pointers,
    load_offset,
    locate,
    operand,
    same_head,
    state_offsets,
    sum_parts,
    tile_index,
    tokens_of,
    tokens_of_part,
    widened,
)
from .forward import EPS
from .local import LANES, store_local_grad, sum_local_grad


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
    WEIGHTED: tl.constexpr, OFFSET: tl.constexpr, ANCHORED: tl.constexpr, LAYOUT: tl.constexpr, HALO: tl.constexpr,
    WARPS: tl.constexpr,
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
        p_q, p_g, p_dq, p_mask_q, stride_q, stride_g, stride_dq, 0, Nq, o_k, m_k, o_v, m_v,
        b_st, b_k_full, b_v_mean, b_offset, eps,
        MAP, NORM, DK, DV, HEADS, BN, BK, BV, DOT, PRECISION, MASK_Q, OFFSET, WARPS,
    )  # fmt: skip
    b_ds = add_map_to_state_grad(b_ds, b_g_sum[None, :], MAP, NORM)
    inverse_count = tl.div_rn(1.0, count)
    b_ds = tl.where(m_head, b_ds * (scale * inverse_count), 0.0)
    b_q_mean = b_q_sum * (scale * inverse_count)
    b_g_mean = b_g_sum * inverse_count
    b_anchor = 0.0
    b_overlap = 0.0
    if ANCHORED:
        b_anchor = b_offset * scale
        b_overlap = overlap_of(b_ds, b_s.to(tl.float32), scale, o_k, DK, HEADS)
    if OFFSET:
        tl.store(p_g_mean + (i_b * heads + h) * DV + o_v, b_g_mean, mask=m_v)
    b_ds = operand(b_ds, DOT, PRECISION)
    b_dst = tl.trans(b_ds)
    b_dk0, b_dv0, b_v_mean = constant_grads(
        b_ds, b_q_mean, b_g_mean, b_k_mean, b_v_mean, NORM, DOT, PRECISION, WEIGHTED
    )  # fmt: skip
    write_grads_run(
        p_q, p_k, p_v, p_g, p_dq, p_dk, p_dv, p_mask, p_mask_q, p_share, p_lse, p_dshare,
        stride_q, stride_k, stride_v, stride_g, stride_dq, stride_dk, stride_dv,
        0, prefix if LOCAL else tl.maximum(Nq, N), Nq, N, o_k, m_k, o_v, m_v,
        b_st, b_ds, b_dst, b_dk0, b_dv0, b_g_mean, b_k_mean, b_v_mean, b_offset, b_anchor, b_overlap,
        MAP, NORM, DK, DV, HEADS, LANES if LOCAL else BN, DOT, PRECISION, HAS_MASK, MASK_Q, WEIGHTED, OFFSET, ANCHORED,
    )  # fmt: skip
    if LOCAL:
        p_w += (i_b * heads + h) * DV * 9
        for x in range(0, W, BW):
            write_grads_tile(
                p_q, p_k, p_v, p_w, p_g, p_dq, p_dk, p_dv, p_mask, p_mask_q, p_share, p_lse, p_dshare,
                stride_q, stride_k, stride_v, stride_g, stride_dq, stride_dk, stride_dv,
                x, 0, H, N, H, W, prefix, o_k, m_k, o_v, m_v,
                b_st, b_ds, b_dst, b_dk0, b_dv0, b_g_mean, b_k_mean, b_v_mean, b_offset, b_anchor, b_overlap,
                MAP, NORM, DK, DV, HEADS, BV, BW, HALO, DOT, PRECISION, HAS_MASK, MASK_Q, WEIGHTED, OFFSET, ANCHORED,
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
    WIDE: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Sums over one part of the tokens. Grid (B·blocks, parts)

    The gradient of the local weight is summed over about the same part of the map: some rows, or some columns of a row.
    Parts are (B·blocks, parts, BK·BV + BK + 10·BV) float32: dS, dk̄, dv̄ and nine taps.
    """
    i = tl.cast(tl.program_id(0), tl.int64)
    i_b = i // blocks
    i_p = widened(tl.program_id(1), WIDE)
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
    t_begin, t_end = tokens_of_part(i_p, parts, Nq, BN)
    b_ds, b_q_sum, b_g_sum = sum_queries(
        p_q, p_g, p_dq, p_mask_q, stride_q, stride_g, stride_dq, t_begin, t_end, o_k, m_k, o_v, m_v,
        b_st, b_k_full, b_v_mean, b_offset, eps,
        MAP, NORM, DK, DV, HEADS, BN, BK, BV, DOT, PRECISION, MASK_Q, OFFSET, WARPS,
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
    HALO: tl.constexpr,
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
    b_dk0, b_dv0, b_v_mean = constant_grads(
        b_ds, b_q_mean, b_g_mean, b_k_mean, b_v_mean, NORM, DOT, PRECISION, WEIGHTED
    )  # fmt: skip
    if LOCAL:
        if i_t == 0:
            write_grads_run(
                p_q, p_k, p_v, p_g, p_dq, p_dk, p_dv, p_mask, p_mask_q, p_share, p_lse, p_dshare,
                stride_q, stride_k, stride_v, stride_g, stride_dq, stride_dk, stride_dv,
                i_t, prefix, Nq, N, o_k, m_k, o_v, m_v,
                b_st, b_ds, b_dst, b_dk0, b_dv0, b_g_mean, b_k_mean, b_v_mean, b_offset, b_anchor, b_overlap,
                MAP, NORM, DK, DV, HEADS, LANES, DOT, PRECISION, HAS_MASK, MASK_Q, WEIGHTED, OFFSET, ANCHORED,
            )  # fmt: skip
        x = (i_t % columns) * BW
        y = (i_t // columns) * rows
        if (x < W) & (y < H):
            p_w += (i_b * heads + h) * DV * 9
            write_grads_tile(
                p_q, p_k, p_v, p_w, p_g, p_dq, p_dk, p_dv, p_mask, p_mask_q, p_share, p_lse, p_dshare,
                stride_q, stride_k, stride_v, stride_g, stride_dq, stride_dk, stride_dv,
                x, y, tl.minimum(y + rows, H), N, H, W, prefix, o_k, m_k, o_v, m_v,
                b_st, b_ds, b_dst, b_dk0, b_dv0, b_g_mean, b_k_mean, b_v_mean, b_offset, b_anchor, b_overlap,
                MAP, NORM, DK, DV, HEADS, BV, BW, HALO, DOT, PRECISION, HAS_MASK, MASK_Q, WEIGHTED, OFFSET, ANCHORED,
            )  # fmt: skip
    else:
        t = i_t * rows
        write_grads_run(
            p_q, p_k, p_v, p_g, p_dq, p_dk, p_dv, p_mask, p_mask_q, p_share, p_lse, p_dshare,
            stride_q, stride_k, stride_v, stride_g, stride_dq, stride_dk, stride_dv,
            t, t + rows, Nq, N, o_k, m_k, o_v, m_v,
            b_st, b_ds, b_dst, b_dk0, b_dv0, b_g_mean, b_k_mean, b_v_mean, b_offset, b_anchor, b_overlap,
            MAP, NORM, DK, DV, HEADS, BN, DOT, PRECISION, HAS_MASK, MASK_Q, WEIGHTED, OFFSET, ANCHORED,
        )  # fmt: skip
