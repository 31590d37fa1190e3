"""The kernels of the forward pass. Vocabulary and shapes as in `blocks.py`."""

import triton
import triton.language as tl

from ..feature_maps import add_map_at_zero, feature_map
from .blocks import (
    SIZES,
    accumulate,
    add_local,
    covariance,
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
def pivot_of(p_x, stride, N, o_c, m_c, p_mask, MAP: tl.constexpr, CENTRE: tl.constexpr, HAS_MASK: tl.constexpr):
    """Mean of the first tokens, (BC,). Zero if sums are not centred."""
    b_pivot = o_c * 0.0
    if CENTRE:
        o_t = tl.arange(0, 64)
        m_t = present(p_mask, 0, o_t, o_t < N, HAS_MASK)
        b_x = feature_map(load_rows(p_x, stride, 0, o_t, m_t, o_c, m_c).to(tl.float32), MAP)
        b_pivot = tl.sum(b_x, 0) / tl.maximum(tl.sum(m_t.to(tl.float32), 0), 1.0)
    return b_pivot


@triton.jit
def base_of(b_s, b_v_mean, MAP: tl.constexpr):
    """The part that all outputs share: v̄ plus φ(0) times the column sums of S, (BC,)"""
    return add_map_at_zero(b_v_mean, tl.sum(b_s, 0), MAP)


@triton.jit
def write_outputs(
    p_q, p_out, p_mask, stride_q, stride_out, t, o_t, m_t, o_c, m_c, b_s, b_base,
    MAP: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """out = φ(q)·S + base for queries t + o_t where m_t; zeros for absent ones"""
    m_here = present(p_mask, t, o_t, m_t, HAS_MASK)
    b_q = load_rows(p_q, stride_q, t, o_t, m_here, o_c, m_c)
    if MAP != "identity":
        b_q = feature_map(b_q.to(tl.float32), MAP)
    b_out = product_plus(operand(b_q, DOT, PRECISION), b_s, b_base[None, :], PRECISION)
    if HAS_MASK:
        b_out = tl.where(m_here[:, None], b_out, 0.0)
    store_rows(p_out, b_out, stride_out, t, o_t, m_t, o_c, m_c)


@triton.jit
def write_run(
    p_q, p_out, p_mask, stride_q, stride_out, t_begin, t_end, o_c, m_c, b_s, b_base,
    MAP: tl.constexpr, BN: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """`write_outputs` for queries t_begin … t_end − 1"""
    o_t = tl.arange(0, BN)
    for t in range(t_begin, t_end, BN):
        write_outputs(
            p_q, p_out, p_mask, stride_q, stride_out, t, o_t, t + o_t < t_end, o_c, m_c, b_s, b_base,
            MAP, DOT, PRECISION, HAS_MASK,
        )  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    p_q, p_k, p_v, p_w, p_mask, p_mask_q, p_count, p_seq, p_out, p_s, p_means,
    Nq, N, H, W, prefix, scale, blocks, C,
    stride_qb, stride_q, stride_kb, stride_k, stride_vb, stride_v, stride_ob, stride_o,
    MAP: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, CENTRE: tl.constexpr, LOCAL: tl.constexpr, HAS_MASK: tl.constexpr,
    MASK_Q: tl.constexpr, PACKED: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """The whole forward pass for short sequences. Grid (B·blocks,)

    A program sums its keys and values to the state, then writes its outputs. It reads the values from the cache then.
    """
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
    p_out += i_b * stride_ob + start * stride_o + c
    if HAS_MASK:
        p_mask += i_b * N
    if MASK_Q:
        p_mask_q += i_b * Nq
    count = tl.cast(N, tl.float32)
    if HAS_MASK:
        count = tl.load(p_count + i_b)

    b_k0 = pivot_of(p_k, stride_k, N, o_c, m_c, p_mask, MAP, CENTRE, HAS_MASK)
    b_v0 = pivot_of(p_v, stride_v, N, o_c, m_c, p_mask, "identity", CENTRE, HAS_MASK)
    b_kv, b_k_sum, b_v_sum, b_dk_sum, b_dv_sum = accumulate(
        p_k, p_v, p_mask, stride_k, stride_v, 0, N, o_c, m_c, b_k0, b_v0,
        MAP, BN, BC, DOT, PRECISION, CENTRE, HAS_MASK,
    )  # fmt: skip
    m_head = same_head(o_c, m_c, o_c, m_c, D)
    b_s = tl.where(m_head, covariance(b_kv, b_dk_sum[:, None], b_dv_sum[None, :], count, scale), 0.0)
    b_v_mean = tl.div_rn(b_v_sum, count)
    if SAVE:
        p_means += i_b * 2 * C + c
        tl.store(p_means + o_c, tl.div_rn(b_k_sum, count), mask=m_c)
        tl.store(p_means + C + o_c, b_v_mean, mask=m_c)
        tl.store(p_s + i_b * C * D + c * D + state_offsets(o_c, o_c, D), b_s.to(p_s.dtype.element_ty), mask=m_head)
    b_base = base_of(b_s, b_v_mean, MAP)
    b_s = operand(b_s, DOT, PRECISION)
    write_run(p_q, p_out, p_mask_q, stride_q, stride_o, 0, Nq, o_c, m_c, b_s, b_base, MAP, BN, DOT, PRECISION, MASK_Q)
    if LOCAL:
        tl.debug_barrier()  # add_local reads what other threads wrote
        for x in range(0, W, BW):
            add_local(
                p_v, p_w + (i_b * C + c) * 9, p_out, p_mask, p_mask_q, stride_v, stride_o,
                x, 0, H, H, W, prefix, o_c, m_c, BW, BC, False, HAS_MASK, MASK_Q,
            )  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def state_kernel(
    p_k, p_v, p_mask, p_seq, p_part,
    N, H, W, blocks, C, stride_kb, stride_k, stride_vb, stride_v,
    MAP: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr, CENTRE: tl.constexpr, HAS_MASK: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Sums over one part of the tokens. Grid (B·blocks, parts); parts (B·blocks, parts, BC·(BC + 4)) float32"""
    i = tl.cast(tl.program_id(0), tl.int64)
    i_b = i // blocks
    i_p = tl.program_id(1)
    parts = tl.num_programs(1)
    c = (i % blocks) * HEADS * D
    start, N, H, W = locate(p_seq, i_b, N, H, W, PACKED)
    o_c = tl.arange(0, BC)
    m_c = (o_c < HEADS * D) & (c + o_c < C)
    p_k += i_b * stride_kb + start * stride_k + c
    p_v += i_b * stride_vb + start * stride_v + c
    if HAS_MASK:
        p_mask += i_b * N
    length = tl.cdiv(tl.cdiv(N, parts), BN) * BN
    t_begin = tl.minimum(i_p * length, N)
    t_end = tl.minimum(t_begin + length, N)

    b_k0 = pivot_of(p_k, stride_k, N, o_c, m_c, p_mask, MAP, CENTRE, HAS_MASK)
    b_v0 = pivot_of(p_v, stride_v, N, o_c, m_c, p_mask, "identity", CENTRE, HAS_MASK)
    b_kv, b_k_sum, b_v_sum, b_dk_sum, b_dv_sum = accumulate(
        p_k, p_v, p_mask, stride_k, stride_v, t_begin, t_end, o_c, m_c, b_k0, b_v0,
        MAP, BN, BC, DOT, PRECISION, CENTRE, HAS_MASK,
    )  # fmt: skip
    p_part += (i * parts + i_p) * (BC * (BC + 4))
    tl.store(p_part + o_c[:, None] * BC + o_c[None, :], b_kv)
    p_part += BC * BC
    tl.store(p_part + o_c, b_k_sum)
    tl.store(p_part + BC + o_c, b_v_sum)
    if CENTRE:
        tl.store(p_part + 2 * BC + o_c, b_dk_sum)
        tl.store(p_part + 3 * BC + o_c, b_dv_sum)


@triton.jit(do_not_specialize=SIZES)
def finish_kernel(
    p_part, p_count, p_seq, p_s, p_means, N, H, W, scale, parts, blocks, C,
    D: tl.constexpr, HEADS: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, BP: tl.constexpr,
    STEPS: tl.constexpr, CENTRE: tl.constexpr, HAS_MASK: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The state from its parts. Grid (B·blocks, BC / BR): a program sums BR rows of S"""
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
    size: tl.constexpr = BC * (BC + 4)
    p_part += i * parts * size
    b_kv = sum_parts(p_part, o_r[:, None] * BC + o_c[None, :], m_head, parts, size, BP, STEPS)
    p_part += BC * BC
    b_k_sum = sum_parts(p_part, o_r[:, None], m_r[:, None], parts, size, BP, STEPS)
    b_v_sum = sum_parts(p_part, BC + o_c[None, :], m_c[None, :], parts, size, BP, STEPS)
    b_dk_sum = b_k_sum
    b_dv_sum = b_v_sum
    if CENTRE:
        b_dk_sum = sum_parts(p_part, 2 * BC + o_r[:, None], m_r[:, None], parts, size, BP, STEPS)
        b_dv_sum = sum_parts(p_part, 3 * BC + o_c[None, :], m_c[None, :], parts, size, BP, STEPS)
    b_s = covariance(b_kv, b_dk_sum, b_dv_sum, count, scale)
    tl.store(p_s + i_b * C * D + c * D + state_offsets(o_r, o_c, D), b_s.to(p_s.dtype.element_ty), mask=m_head)
    p_means += i_b * 2 * C + c
    tl.store(p_means + o_r, tl.sum(tl.div_rn(b_k_sum, count), 1), mask=m_r)
    if tl.program_id(1) == 0:
        tl.store(p_means + C + o_c, tl.sum(tl.div_rn(b_v_sum, count), 0), mask=m_c)


@triton.jit(do_not_specialize=SIZES)
def output_kernel(
    p_q, p_v, p_w, p_mask, p_mask_q, p_seq, p_out, p_s, p_means,
    Nq, N, H, W, prefix, blocks, columns, rows, C,
    stride_qb, stride_q, stride_vb, stride_v, stride_ob, stride_o,
    MAP: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, LOCAL: tl.constexpr, HAS_MASK: tl.constexpr, MASK_Q: tl.constexpr,
    PACKED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Outputs from the state. Grid (B·blocks, tiles)

    With a local residual a tile is `rows` rows and BW columns of the map, and `columns` tiles lie side by side. A
    packed image counts its own. Without a local residual a tile is `rows` tokens.
    """
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
    p_v += i_b * stride_vb + start * stride_v + c
    p_out += i_b * stride_ob + start * stride_o + c
    if HAS_MASK:
        p_mask += i_b * N
    if MASK_Q:
        p_mask_q += i_b * Nq
    m_head = same_head(o_c, m_c, o_c, m_c, D)
    b_s = tl.load(p_s + i_b * C * D + c * D + state_offsets(o_c, o_c, D), mask=m_head, other=0.0)
    b_v_mean = tl.load(p_means + i_b * 2 * C + C + c + o_c, mask=m_c, other=0.0)
    b_base = base_of(b_s, b_v_mean, MAP)
    b_s = operand(b_s, DOT, PRECISION)
    if LOCAL:
        if i_t == 0:
            write_run(
                p_q, p_out, p_mask_q, stride_q, stride_o, 0, prefix, o_c, m_c, b_s, b_base,
                MAP, 16, DOT, PRECISION, MASK_Q,
            )  # fmt: skip
        x = (i_t % columns) * BW
        y = (i_t // columns) * rows
        y_end = tl.minimum(y + rows, H)
        if (x < W) & (y < H):
            t = prefix + y * W + x
            for i in range(0, rows * BW, BN):
                o_t, m_t = tile_tokens(i, x, y, y_end, W, BN, BW, WIDE)
                write_outputs(
                    p_q, p_out, p_mask_q, stride_q, stride_o, t, o_t, m_t, o_c, m_c, b_s, b_base,
                    MAP, DOT, PRECISION, MASK_Q,
                )  # fmt: skip
            tl.debug_barrier()  # add_local reads what other threads wrote
            add_local(
                p_v, p_w + (i_b * C + c) * 9, p_out, p_mask, p_mask_q, stride_v, stride_o,
                x, y, y_end, H, W, prefix, o_c, m_c, BW, BC, False, HAS_MASK, MASK_Q,
            )  # fmt: skip
    else:
        t = i_t * rows
        write_run(
            p_q, p_out, p_mask_q, stride_q, stride_o, t, tl.minimum(t + rows, Nq), o_c, m_c, b_s, b_base,
            MAP, BN, DOT, PRECISION, MASK_Q,
        )  # fmt: skip
