"""The kernels of the forward pass. Vocabulary and shapes as in `blocks.py`."""

import triton
import triton.language as tl

from .blocks import (
    accumulate,
    feature_map,
    load_map_row,
    load_neighbours,
    load_rows,
    load_taps,
    locate,
    same_head,
    state_offsets,
    store_rows,
    sum_parts,
    weigh,
)


@triton.jit
def pivot_of(p_x, stride, N, o_c, m_c, p_mask, MAP: tl.constexpr, CENTRE: tl.constexpr, HAS_MASK: tl.constexpr):
    """Mean of the first tokens, (BC,); zero where sums are not centred"""
    b_pivot = o_c * 0.0
    if CENTRE:
        b_x, m_n = load_rows(p_x, stride, 0, N, o_c, m_c, p_mask, 16, HAS_MASK)
        b_x = tl.where(m_n[:, None], feature_map(b_x.to(tl.float32), MAP), 0.0)
        b_pivot = tl.sum(b_x, 0) / tl.maximum(tl.sum(m_n.to(tl.float32), 0), 1.0)
    return b_pivot


@triton.jit
def base_of(b_s, b_v_mean, MAP: tl.constexpr):
    """What every output starts from: v̄, and φ(0)·S where φ(0) is not zero. (BC,)"""
    if MAP == "exp":
        b_v_mean += tl.sum(b_s, 0)
    return b_v_mean


@triton.jit
def write_flat(
    p_q, p_out, p_mask, stride_q, stride_out, t_begin, t_end, o_c, m_c, b_s, b_base,
    MAP: tl.constexpr, BN: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """out = φ(q)·S + base for tokens t_begin … t_end − 1; zeros for absent ones"""
    for t in range(t_begin, t_end, BN):
        b_q, m_n = load_rows(p_q, stride_q, t, t_end, o_c, m_c, p_mask, BN, HAS_MASK)
        b_out = tl.dot(feature_map(b_q.to(tl.float32), MAP).to(DOT), b_s, input_precision=PRECISION)
        b_out += b_base[None, :]
        if HAS_MASK:
            b_out = tl.where(m_n[:, None], b_out, 0.0)
        store_rows(p_out, b_out, stride_out, t, t + tl.arange(0, BN) < t_end, o_c, m_c, BN)


@triton.jit
def write_map(
    p_q, p_v, p_w, p_out, p_mask, stride_q, stride_v, stride_out, x, y_begin, y_end, H, W, prefix, o_c, m_c,
    b_s, b_base,
    MAP: tl.constexpr, BW: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """out = φ(q)·S + base + local residual for rows y_begin … y_end − 1 of the map, columns x … x + BW − 1

    Each row of v is loaded once, at three shifts, and added to the three rows of outputs that it is a neighbour of.
    """
    w0, w1, w2, w3, w4, w5, w6, w7, w8 = load_taps(p_w, o_c, m_c, False)
    left, here, right = load_neighbours(p_v, stride_v, p_mask, y_begin - 1, x, H, W, prefix, o_c, m_c, BW, HAS_MASK)
    b_next = weigh(w0, w1, w2, left, here, right)  # of the row to be written next
    left, here, right = load_neighbours(p_v, stride_v, p_mask, y_begin, x, H, W, prefix, o_c, m_c, BW, HAS_MASK)
    b_next += weigh(w3, w4, w5, left, here, right)
    b_after = weigh(w0, w1, w2, left, here, right)  # of the row after it
    # Rows are loaded one turn before they are used.
    b_q = load_map_row(p_q, stride_q, p_mask, y_begin, x, H, W, prefix, o_c, m_c, BW, False)
    left, here, right = load_neighbours(p_v, stride_v, p_mask, y_begin + 1, x, H, W, prefix, o_c, m_c, BW, HAS_MASK)
    o_x = tl.arange(0, BW)
    m_x = x + o_x < W
    for y in range(y_begin, y_end):
        b_q1 = load_map_row(p_q, stride_q, p_mask, y + 1, x, H, W, prefix, o_c, m_c, BW, False)
        left1, here1, right1 = load_neighbours(p_v, stride_v, p_mask, y + 2, x, H, W, prefix, o_c, m_c, BW, HAS_MASK)
        b_out = tl.dot(feature_map(b_q.to(tl.float32), MAP).to(DOT), b_s, input_precision=PRECISION)
        b_out += b_base[None, :] + b_next + weigh(w6, w7, w8, left, here, right)
        b_next = b_after + weigh(w3, w4, w5, left, here, right)
        b_after = weigh(w0, w1, w2, left, here, right)
        t = prefix + y * W + x
        if HAS_MASK:
            m_n = tl.load(p_mask + t + o_x, mask=m_x, other=0) != 0
            b_out = tl.where(m_n[:, None], b_out, 0.0)
        store_rows(p_out, b_out, stride_out, t, m_x, o_c, m_c, BW)
        b_q, left, here, right = b_q1, left1, here1, right1


@triton.jit
def forward_kernel(
    p_q, p_k, p_v, p_w, p_mask, p_count, p_seq, p_out, p_s, p_means,
    Nq, N, H, W, prefix, scale, blocks, C,
    stride_qb, stride_q, stride_kb, stride_k, stride_vb, stride_v, stride_ob, stride_o,
    MAP: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, CENTRE: tl.constexpr, LOCAL: tl.constexpr, HAS_MASK: tl.constexpr,
    MASK_Q: tl.constexpr, PACKED: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """All of it for short sequences: a program reads its keys and values for the state and stays for the outputs,
    when the values come from the cache. Grid (B·blocks,)"""
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
    p_mask += i_b * N
    count = tl.cast(N, tl.float32)
    if HAS_MASK:
        count = tl.load(p_count + i_b)

    b_k0 = pivot_of(p_k, stride_k, N, o_c, m_c, p_mask, MAP, CENTRE, HAS_MASK)
    b_v0 = pivot_of(p_v, stride_v, N, o_c, m_c, p_mask, "identity", CENTRE, HAS_MASK)
    b_kv, b_k_sum, b_v_sum = accumulate(
        p_k, p_v, p_mask, stride_k, stride_v, 0, N, o_c, m_c, b_k0, b_v0,
        MAP, BN, BC, DOT, PRECISION, CENTRE, HAS_MASK,
    )  # fmt: skip
    b_dk = b_k_sum / count
    b_dv = b_v_sum / count
    m_head = same_head(o_c, m_c, o_c, m_c, D)
    b_s = tl.where(m_head, (b_kv / count - b_dk[:, None] * b_dv[None, :]) * scale, 0.0)
    b_v_mean = b_v0 + b_dv
    if SAVE:
        p_means += i_b * 2 * C + c
        tl.store(p_means + o_c, b_k0 + b_dk, mask=m_c)
        tl.store(p_means + C + o_c, b_v_mean, mask=m_c)
        tl.store(p_s + i_b * C * D + c * D + state_offsets(o_c, o_c, D), b_s, mask=m_head)
    b_base = base_of(b_s, b_v_mean, MAP)
    b_s = b_s.to(DOT)
    if LOCAL:
        write_flat(
            p_q, p_out, p_mask, stride_q, stride_o, 0, prefix, o_c, m_c, b_s, b_base, MAP, 16, DOT, PRECISION, MASK_Q
        )
        for x in range(0, W, BW):
            write_map(
                p_q, p_v, p_w + i_b * C * 9 + c * 9, p_out, p_mask, stride_q, stride_v, stride_o,
                x, 0, H, H, W, prefix, o_c, m_c, b_s, b_base, MAP, BW, DOT, PRECISION, HAS_MASK,
            )  # fmt: skip
    else:
        write_flat(
            p_q, p_out, p_mask, stride_q, stride_o, 0, Nq, o_c, m_c, b_s, b_base, MAP, BN, DOT, PRECISION, MASK_Q
        )


@triton.jit
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
    p_mask += i_b * N
    length = tl.cdiv(tl.cdiv(N, parts), BN) * BN
    t_begin = tl.minimum(i_p * length, N)
    t_end = tl.minimum(t_begin + length, N)

    b_k0 = pivot_of(p_k, stride_k, N, o_c, m_c, p_mask, MAP, CENTRE, HAS_MASK)
    b_v0 = pivot_of(p_v, stride_v, N, o_c, m_c, p_mask, "identity", CENTRE, HAS_MASK)
    b_kv, b_k_sum, b_v_sum = accumulate(
        p_k, p_v, p_mask, stride_k, stride_v, t_begin, t_end, o_c, m_c, b_k0, b_v0,
        MAP, BN, BC, DOT, PRECISION, CENTRE, HAS_MASK,
    )  # fmt: skip
    p_part += (i * parts + i_p) * (BC * (BC + 4))
    tl.store(p_part + o_c[:, None] * BC + o_c[None, :], b_kv)
    p_part += BC * BC
    tl.store(p_part + o_c, b_k_sum)
    tl.store(p_part + BC + o_c, b_v_sum)
    tl.store(p_part + 2 * BC + o_c, b_k0)
    tl.store(p_part + 3 * BC + o_c, b_v0)


@triton.jit
def finish_kernel(
    p_part, p_count, p_seq, p_s, p_means, N, H, W, scale, parts, blocks, C,
    D: tl.constexpr, HEADS: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, BP: tl.constexpr,
    HAS_MASK: tl.constexpr, PACKED: tl.constexpr,
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
    b_kv = sum_parts(p_part, o_r[:, None] * BC + o_c[None, :], m_head, parts, size, BP)
    p_part += BC * BC
    b_dk = sum_parts(p_part, o_r[:, None], m_r[:, None], parts, size, BP) / count
    b_dv = sum_parts(p_part, BC + o_c[None, :], m_c[None, :], parts, size, BP) / count
    b_s = (b_kv / count - b_dk * b_dv) * scale
    tl.store(p_s + i_b * C * D + c * D + state_offsets(o_r, o_c, D), b_s, mask=m_head)
    p_means += i_b * 2 * C + c
    b_k0 = tl.load(p_part + 2 * BC + o_r, mask=m_r, other=0.0)
    tl.store(p_means + o_r, b_k0 + tl.sum(b_dk, 1), mask=m_r)
    if tl.program_id(1) == 0:
        b_v0 = tl.load(p_part + 3 * BC + o_c, mask=m_c, other=0.0)
        tl.store(p_means + C + o_c, b_v0 + tl.sum(b_dv, 0), mask=m_c)


@triton.jit
def output_kernel(
    p_q, p_v, p_w, p_mask, p_seq, p_out, p_s, p_means,
    Nq, N, H, W, prefix, blocks, columns, C,
    stride_qb, stride_q, stride_vb, stride_v, stride_ob, stride_o,
    MAP: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr,
    ROWS: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, LOCAL: tl.constexpr, HAS_MASK: tl.constexpr,
    MASK_Q: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Outputs from the state. Grid (B·blocks, tiles): a tile is BW columns × ROWS rows of the map, or ROWS steps of BN
    tokens where there is no local residual"""
    i_b = tl.cast(tl.program_id(0) // blocks, tl.int64)
    c = (tl.program_id(0) % blocks) * HEADS * D
    i_t = tl.program_id(1)
    start, N, H, W = locate(p_seq, i_b, N, H, W, PACKED)
    if PACKED:
        Nq = N
    o_c = tl.arange(0, BC)
    m_c = (o_c < HEADS * D) & (c + o_c < C)
    p_q += i_b * stride_qb + start * stride_q + c
    p_v += i_b * stride_vb + start * stride_v + c
    p_out += i_b * stride_ob + start * stride_o + c
    p_mask += i_b * N
    m_head = same_head(o_c, m_c, o_c, m_c, D)
    b_s = tl.load(p_s + i_b * C * D + c * D + state_offsets(o_c, o_c, D), mask=m_head, other=0.0)
    b_v_mean = tl.load(p_means + i_b * 2 * C + C + c + o_c, mask=m_c, other=0.0)
    b_base = base_of(b_s, b_v_mean, MAP)
    b_s = b_s.to(DOT)
    if LOCAL:
        if i_t == 0:
            write_flat(
                p_q, p_out, p_mask, stride_q, stride_o, 0, prefix, o_c, m_c, b_s, b_base,
                MAP, 16, DOT, PRECISION, MASK_Q,
            )  # fmt: skip
        x = (i_t % columns) * BW
        y = (i_t // columns) * ROWS
        if (x < W) & (y < H):
            write_map(
                p_q, p_v, p_w + i_b * C * 9 + c * 9, p_out, p_mask, stride_q, stride_v, stride_o,
                x, y, tl.minimum(y + ROWS, H), H, W, prefix, o_c, m_c, b_s, b_base,
                MAP, BW, DOT, PRECISION, HAS_MASK,
            )  # fmt: skip
    else:
        t = i_t * BN * ROWS
        write_flat(
            p_q, p_out, p_mask, stride_q, stride_o, t, tl.minimum(t + BN * ROWS, Nq), o_c, m_c, b_s, b_base,
            MAP, BN, DOT, PRECISION, MASK_Q,
        )  # fmt: skip
