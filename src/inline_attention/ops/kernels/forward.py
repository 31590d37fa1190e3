"""The kernels of the forward pass. Vocabulary and shapes as in `blocks.py`."""

import triton
import triton.language as tl

from ..feature_maps import add_map_at_zero, feature_map
from ..reference import LINEAR_EPS
from .blocks import (
    SIZES,
    accumulate,
    accumulate_weighted,
    as_float32,
    channels,
    covariance,
    divisor_of,
    factors,
    full_mean,
    head_of,
    head_sums,
    load_offset,
    load_origin,
    load_queries,
    load_rows,
    locate,
    log_of_parts,
    normalizers,
    offset_product,
    operand,
    present,
    product_plus,
    same_head,
    state_offsets,
    store_of_heads,
    store_rows,
    sum_parts,
    tile_index,
    tokens_of,
    tokens_of_part,
    widened,
)
from .local import LANES, add_local, first_sums, lanes, load_local_weight, next_sums, shift_matrices

EPS = tl.constexpr(LINEAR_EPS)  # added to the row sums of vanilla linear attention


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
def sums_of_tokens(
    p_k, p_v, p_mask, p_share, stride_k, stride_v, t_begin, t_end, N, o_k, m_k, o_v, m_v, b_offset, scale,
    MAP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HEADS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, CENTRE: tl.constexpr, HAS_MASK: tl.constexpr,
    WEIGHTED: tl.constexpr, ANCHORED: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """`accumulate` or, if WEIGHTED, `accumulate_weighted`, around the sample's pivots. b_offset (BK,) is the anchor."""
    b_k0 = pivot_of(p_k, stride_k, N, o_k, m_k, p_mask, MAP, CENTRE, HAS_MASK)
    b_v0 = pivot_of(p_v, stride_v, N, o_v, m_v, p_mask, "identity", PRECISION == "ieee", HAS_MASK)
    if WEIGHTED:
        tl.static_assert(CENTRE, "weighted tokens are centred")
        b_anchor = 0.0
        b_origin = 0.0
        if ANCHORED:
            b_anchor = b_offset * tl.cast(scale, tl.float32)
            b_origin = load_origin(p_k, p_mask, o_k, m_k, HAS_MASK, PRECISION)
        return accumulate_weighted(
            p_k, p_v, p_mask, p_share, stride_k, stride_v, t_begin, t_end, N, o_k, m_k, o_v, m_v,
            b_anchor, b_origin, b_k0, b_v0,
            MAP, DK, DV, HEADS, BN, BK, BV, DOT, PRECISION, HAS_MASK, ANCHORED, SAVE,
        )  # fmt: skip
    else:
        b_kv, b_k_sum, b_v_sum, b_dk_sum, b_dv_sum = accumulate(
            p_k, p_v, p_mask, stride_k, stride_v, t_begin, t_end, o_k, m_k, o_v, m_v, 0.0, b_k0, b_v0,
            MAP, BN, BK, BV, DOT, PRECISION, CENTRE, HAS_MASK, False,
        )  # fmt: skip
        return b_kv, b_k_sum, b_v_sum, b_dk_sum, b_dv_sum, 0.0


@triton.jit
def sum_state(
    p_k, p_v, p_mask, p_share, p_lse, stride_k, stride_v, N, o_k, m_k, o_v, m_v, b_offset, count, scale,
    MAP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HEADS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, CENTRE: tl.constexpr, HAS_MASK: tl.constexpr,
    WEIGHTED: tl.constexpr, ANCHORED: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """The state of a sample from all its tokens: S (BK, BV), and the means of φ(k) − φ(0) (BK,) and of v (BV,)

    If SAVE, an anchor's scores are stored to p_share and log Σ exp to p_lse.
    """
    b_kv, b_k_sum, b_v_sum, b_dk_sum, b_dv_sum, b_lse = sums_of_tokens(
        p_k, p_v, p_mask, p_share, stride_k, stride_v, 0, N, N, o_k, m_k, o_v, m_v, b_offset, scale,
        MAP, DK, DV, HEADS, BN, BK, BV, DOT, PRECISION, CENTRE, HAS_MASK, WEIGHTED, ANCHORED, SAVE,
    )  # fmt: skip
    if ANCHORED and SAVE:
        store_of_heads(p_lse, b_lse, 1, o_k, m_k, DK, HEADS)
    m_head = same_head(o_k, m_k, o_v, m_v, DK, DV)
    b_s = tl.where(m_head, covariance(b_kv, b_dk_sum[:, None], b_dv_sum[None, :], count, scale), 0.0)
    if WEIGHTED and PRECISION != "ieee":  # they are pivots
        b_k_mean = b_k_sum + b_dk_sum
        b_v_mean = b_v_sum + b_dv_sum
    elif PRECISION == "ieee":  # exact, as the tokens less their mean should have a sum of zero
        b_k_mean = tl.div_rn(b_k_sum, count)
        b_v_mean = tl.div_rn(b_v_sum, count)
    else:
        inverse_count = tl.div_rn(1.0, count)
        b_k_mean = b_k_sum * inverse_count
        b_v_mean = b_v_sum * inverse_count
    return b_s, b_k_mean, b_v_mean


@triton.jit
def bases_of(b_s, b_v_mean, MAP: tl.constexpr, NORM: tl.constexpr):
    """What is added to the product of queries and S before its factor and after it, without the local residual: (BV,)

    The product is (φ(q) − φ(0))·S, and for "magnitude" g(z)·φ(q)·S.
    """
    b_zero = tl.zeros_like(b_v_mean)
    if NORM == "subtract":
        return b_zero, add_map_at_zero(b_v_mean, tl.sum(b_s, 0), MAP)
    elif NORM == "divide":
        return add_map_at_zero(b_zero, tl.sum(b_s, 0), MAP), b_zero
    else:
        return b_zero, b_v_mean


@triton.jit
def outputs_of(
    p_q, stride_q, t, o_t, m_t, o_k, m_k, o_v, b_s, b_base, b_rest, b_k_mean, b_v_mean, b_offset, eps,
    MAP: tl.constexpr, NORM: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HEADS: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """g(z)·φ(q)·S + f(z)·v̄ for queries t + o_t where m_t, anything elsewhere: (BN, BV). b_k_mean holds s·k̄

    b_base (BV,) and b_rest, (1, BV) or (BN, BV), are those of `bases_of`, the second with the local residual.
    """
    b_q = load_queries(p_q, stride_q, t, o_t, m_t, o_k, m_k, b_offset, MAP, PRECISION, OFFSET)
    if MAP != "identity":
        b_q = feature_map(as_float32(b_q), MAP)
    if NORM == "subtract":
        return product_plus(operand(b_q, DOT, PRECISION), b_s, b_rest, PRECISION)
    elif NORM == "divide":
        b_z = normalizers(b_q, b_k_mean, o_k, o_v, MAP, DK, DV, HEADS, DOT, PRECISION)
        b_g, b_f, _ = factors(b_z, eps, NORM, PRECISION)
        b_rest = b_f * b_v_mean[None, :] + b_rest
        return b_g * product_plus(operand(b_q, DOT, PRECISION), b_s, b_base[None, :], PRECISION) + b_rest
    else:
        # f is 1, so the queries can be scaled. Then φ is computed once, and not by every warp that takes them.
        b_q = add_map_at_zero(as_float32(b_q), 1.0, MAP)
        b_g, _, _ = factors(head_sums(b_q * b_k_mean[None, :], o_k, o_k, DK, DK, HEADS), eps, NORM, PRECISION)
        return product_plus(operand(b_g * b_q, DOT, PRECISION), b_s, b_rest, PRECISION)


@triton.jit
def write_outputs(
    p_q, p_out, p_mask, stride_q, stride_out, t, o_t, m_t, o_k, m_k, o_v, m_v,
    b_s, b_base, b_rest, b_k_mean, b_v_mean, b_offset, eps,
    MAP: tl.constexpr, NORM: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HEADS: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr, MASK_Q: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Stores `outputs_of` queries t + o_t where m_t, and zeros for absent ones"""
    m_here = present(p_mask, t, o_t, m_t, MASK_Q)
    b_out = outputs_of(
        p_q, stride_q, t, o_t, m_here, o_k, m_k, o_v, b_s, b_base, b_rest, b_k_mean, b_v_mean, b_offset, eps,
        MAP, NORM, DK, DV, HEADS, DOT, PRECISION, OFFSET,
    )  # fmt: skip
    if MASK_Q:
        b_out = tl.where(m_here[:, None], b_out, 0.0)
    store_rows(p_out, b_out, stride_out, t, o_t, m_t, o_v, m_v)


@triton.jit
def write_run(
    p_q, p_out, p_mask, stride_q, stride_out, t_begin, t_end, o_k, m_k, o_v, m_v,
    b_s, b_base, b_rest, b_k_mean, b_v_mean, b_offset, eps,
    MAP: tl.constexpr, NORM: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HEADS: tl.constexpr, BN: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, MASK_Q: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """`write_outputs` for queries t_begin … t_end − 1"""
    o_t = tl.arange(0, BN)
    for t in range(t_begin, t_end, BN):
        write_outputs(
            p_q, p_out, p_mask, stride_q, stride_out, t, o_t, t + o_t < t_end, o_k, m_k, o_v, m_v,
            b_s, b_base, b_rest[None, :], b_k_mean, b_v_mean, b_offset, eps,
            MAP, NORM, DK, DV, HEADS, DOT, PRECISION, MASK_Q, OFFSET,
        )  # fmt: skip


@triton.jit
def write_tile(
    p_q, p_v, p_w, p_out, p_mask, p_mask_q, stride_q, stride_v, stride_out, x, y_begin, y_end, H, W, prefix,
    o_k, m_k, o_v, m_v, b_s, b_base, b_rest, b_k_mean, b_v_mean, b_offset, eps,
    MAP: tl.constexpr, NORM: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HEADS: tl.constexpr, BV: tl.constexpr,
    BW: tl.constexpr, HALO: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, HAS_MASK: tl.constexpr,
    MASK_Q: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """`write_outputs` for rows y_begin … y_end − 1 and columns x … x + BW − 1 of the map, with the local residual"""
    shifts = shift_matrices(p_v.dtype.element_ty, BW, HALO)
    o_y, o_x = lanes(BW)
    b_start = b_rest[None, :]
    if PRECISION != "ieee":
        w = load_local_weight(p_w, o_v, m_v, False)
        b_next, b_after = first_sums(
            p_v, stride_v, p_mask, y_begin, x, H, W, prefix, o_v, m_v, b_start, w, shifts, BW, HALO, HAS_MASK
        )
    for y in range(y_begin, y_end, LANES // BW if BW < LANES else 1):
        b_sum = b_start
        if PRECISION != "ieee":
            b_sum, b_next, b_after = next_sums(
                p_v, stride_v, p_mask, y, x, H, W, prefix, o_v, m_v, b_start, b_next, b_after, w, shifts,
                BW, HALO, HAS_MASK,
            )  # fmt: skip
        write_outputs(
            p_q, p_out, p_mask_q, stride_q, stride_out,
            prefix + y * W + x, o_y * W + o_x, (y + o_y < y_end) & (x + o_x < W), o_k, m_k, o_v, m_v,
            b_s, b_base, b_sum, b_k_mean, b_v_mean, b_offset, eps,
            MAP, NORM, DK, DV, HEADS, DOT, PRECISION, MASK_Q, OFFSET,
        )  # fmt: skip
    if PRECISION == "ieee":
        add_local(
            p_v, p_w, p_out, p_mask, p_mask_q, stride_v, stride_out, x, y_begin, y_end, H, W, prefix, o_v, m_v, shifts,
            BW, BV, HALO, False, HAS_MASK, MASK_Q,
        )  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    p_q, p_k, p_v, p_w, p_mask, p_mask_q, p_count, p_seq, p_share, p_lse, p_offset, p_out, p_s, p_means,
    Nq, N, H, W, prefix, scale, blocks, heads,
    stride_qb, stride_q, stride_kb, stride_k, stride_vb, stride_v, stride_ob, stride_o,
    MAP: tl.constexpr, NORM: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HEADS: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    CENTRE: tl.constexpr, LOCAL: tl.constexpr, HAS_MASK: tl.constexpr, MASK_Q: tl.constexpr, PACKED: tl.constexpr,
    WEIGHTED: tl.constexpr, ANCHORED: tl.constexpr, OFFSET: tl.constexpr, SAVE: tl.constexpr, HALO: tl.constexpr,
):  # fmt: skip
    """The whole forward pass for short sequences. Grid (B·blocks,)

    A program sums its keys and values to the state, then writes its outputs. It reads the values from the cache then.
    """
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
    p_out += i_b * stride_ob + start * stride_o + h * DV
    if HAS_MASK:
        p_mask += i_b * N
    if MASK_Q:
        p_mask_q += i_b * Nq
    if WEIGHTED:
        p_share += (i_b * heads + h) * N
    if ANCHORED:
        p_lse += i_b * heads + h
    b_offset = load_offset(p_offset, i_b, h, heads, o_k, m_k, DK, OFFSET)
    tokens = tokens_of(p_count, i_b, N, HAS_MASK)
    count = divisor_of(tokens, WEIGHTED)

    b_s, b_k_mean, b_v_mean = sum_state(
        p_k, p_v, p_mask, p_share, p_lse, stride_k, stride_v, N, o_k, m_k, o_v, m_v, b_offset, count, scale,
        MAP, DK, DV, HEADS, BN, BK, BV, DOT, PRECISION, CENTRE, HAS_MASK, WEIGHTED, ANCHORED, SAVE,
    )  # fmt: skip
    if SAVE:
        p_means += i_b * heads * (DK + DV)
        tl.store(p_means + h * DK + o_k, b_k_mean, mask=m_k)
        tl.store(p_means + heads * DK + h * DV + o_v, b_v_mean, mask=m_v)
        p = p_s + (i_b * heads + h) * DK * DV + state_offsets(o_k, o_v, DV)
        tl.store(p, b_s.to(p_s.dtype.element_ty), mask=same_head(o_k, m_k, o_v, m_v, DK, DV))
    b_base, b_rest = bases_of(b_s, b_v_mean, MAP, NORM)
    b_k_mean = full_mean(b_k_mean, m_k, MAP) * tl.cast(scale, tl.float32)
    b_s = operand(b_s, DOT, PRECISION)
    b_rest -= offset_product(b_s, b_offset, MAP, PRECISION, OFFSET)
    eps = tl.div_rn(EPS, tokens)
    write_run(
        p_q, p_out, p_mask_q, stride_q, stride_o, 0, prefix if LOCAL else Nq, o_k, m_k, o_v, m_v,
        b_s, b_base, b_rest, b_k_mean, b_v_mean, b_offset, eps,
        MAP, NORM, DK, DV, HEADS, LANES if LOCAL else BN, DOT, PRECISION, MASK_Q, OFFSET,
    )  # fmt: skip
    if LOCAL:
        p_w += (i_b * heads + h) * DV * 9
        for x in range(0, W, BW):
            write_tile(
                p_q, p_v, p_w, p_out, p_mask, p_mask_q, stride_q, stride_v, stride_o, x, 0, H, H, W, prefix,
                o_k, m_k, o_v, m_v, b_s, b_base, b_rest, b_k_mean, b_v_mean, b_offset, eps,
                MAP, NORM, DK, DV, HEADS, BV, BW, HALO, DOT, PRECISION, HAS_MASK, MASK_Q, OFFSET,
            )  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def state_kernel(
    p_k, p_v, p_mask, p_seq, p_share, p_offset, p_part, p_log,
    N, H, W, scale, blocks, heads, stride_kb, stride_k, stride_vb, stride_v,
    MAP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HEADS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BN: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, CENTRE: tl.constexpr, HAS_MASK: tl.constexpr,
    PACKED: tl.constexpr, WEIGHTED: tl.constexpr, ANCHORED: tl.constexpr, SAVE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Sums over one part of the tokens. Grid (B·blocks, parts)

    Parts are (B·blocks, parts, BK·BV + 2·BK + 2·BV) float32: the five sums of `accumulate`. If ANCHORED, the shares of
    a part have a sum of one, and p_log (B, heads, parts) gets log Σ exp of its scores.
    """
    i = tl.cast(tl.program_id(0), tl.int64)
    i_b = i // blocks
    i_p = widened(tl.program_id(1), WIDE)
    parts = tl.num_programs(1)
    h = (i % blocks) * HEADS
    start, N, H, W = locate(p_seq, i_b, N, H, W, PACKED)
    o_k, m_k = channels(h, heads, DK, HEADS, BK)
    o_v, m_v = channels(h, heads, DV, HEADS, BV)
    p_k += i_b * stride_kb + start * stride_k + h * DK
    p_v += i_b * stride_vb + start * stride_v + h * DV
    if HAS_MASK:
        p_mask += i_b * N
    if WEIGHTED:
        p_share += (i_b * heads + h) * N
    b_offset = load_offset(p_offset, i_b, h, heads, o_k, m_k, DK, ANCHORED)
    t_begin, t_end = tokens_of_part(i_p, parts, N, BN)
    b_kv, b_k_sum, b_v_sum, b_dk_sum, b_dv_sum, b_lse = sums_of_tokens(
        p_k, p_v, p_mask, p_share, stride_k, stride_v, t_begin, t_end, N, o_k, m_k, o_v, m_v, b_offset, scale,
        MAP, DK, DV, HEADS, BN, BK, BV, DOT, PRECISION, CENTRE, HAS_MASK, WEIGHTED, ANCHORED, SAVE,
    )  # fmt: skip
    if ANCHORED:
        store_of_heads(p_log + (i_b * heads + h) * parts + i_p, b_lse, parts, o_k, m_k, DK, HEADS)
    p_part += (i * parts + i_p) * (BK * BV + 2 * BK + 2 * BV)
    tl.store(p_part + o_k[:, None] * BV + o_v[None, :], b_kv)
    p_part += BK * BV
    tl.store(p_part + o_k, b_k_sum)
    tl.store(p_part + BK + o_v, b_v_sum)
    if CENTRE:
        tl.store(p_part + BK + BV + o_k, b_dk_sum)
        tl.store(p_part + 2 * BK + BV + o_v, b_dv_sum)


@triton.jit(do_not_specialize=SIZES)
def finish_kernel(
    p_part, p_log, p_count, p_seq, p_s, p_means, p_lse, N, H, W, scale, parts, blocks, heads,
    DK: tl.constexpr, DV: tl.constexpr, HEADS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BR: tl.constexpr,
    BP: tl.constexpr, STEPS: tl.constexpr, CENTRE: tl.constexpr, HAS_MASK: tl.constexpr, PACKED: tl.constexpr,
    WEIGHTED: tl.constexpr, PIVOTED: tl.constexpr, ANCHORED: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """The state from its parts, and log Σ exp of an anchor's scores if SAVE. Grid (B·blocks, BK / BR)

    A program sums BR rows of S.
    """
    i = tl.cast(tl.program_id(0), tl.int64)
    i_b = i // blocks
    h = (i % blocks) * HEADS
    _, N, H, W = locate(p_seq, i_b, N, H, W, PACKED)
    count = divisor_of(tokens_of(p_count, i_b, N, HAS_MASK), WEIGHTED)
    o_v, m_v = channels(h, heads, DV, HEADS, BV)
    o_r = tl.program_id(1) * BR + tl.arange(0, BR)
    m_r = (o_r < HEADS * DK) & (h * DK + o_r < heads * DK)
    m_head = same_head(o_r, m_r, o_v, m_v, DK, DV)
    o_hr = head_of(o_r, h, heads, DK, HEADS)[:, None]
    o_hv = head_of(o_v, h, heads, DV, HEADS)[None, :]
    b_log_r = 0.0
    b_log_v = 0.0
    if ANCHORED:
        p_log += (i_b * heads + h) * parts
        b_log_r = log_of_parts(p_log, o_hr, parts, BP, STEPS)
        b_log_v = log_of_parts(p_log, o_hv, parts, BP, STEPS)
        if SAVE:
            store_of_heads(p_lse + i_b * heads + h, tl.sum(b_log_r, 1), 1, o_r, m_r, DK, HEADS)
    size: tl.constexpr = BK * BV + 2 * BK + 2 * BV
    p_part += i * parts * size
    b_kv = sum_parts(
        p_part, o_r[:, None] * BV + o_v[None, :], m_head, parts, size, BP, STEPS, p_log, o_hr, b_log_r, ANCHORED
    )
    p_part += BK * BV
    o_r = o_r[:, None]
    o_v = o_v[None, :]
    m_r = m_r[:, None]
    m_v = m_v[None, :]
    if CENTRE:
        b_dk_sum = sum_parts(p_part, BK + BV + o_r, m_r, parts, size, BP, STEPS, p_log, o_hr, b_log_r, ANCHORED)
        b_dv_sum = sum_parts(p_part, 2 * BK + BV + o_v, m_v, parts, size, BP, STEPS, p_log, o_hv, b_log_v, ANCHORED)
    if PIVOTED:  # the pivots are the same in every part
        b_k_mean = b_dk_sum + tl.load(p_part + o_r, mask=m_r, other=0.0)
        b_v_mean = b_dv_sum + tl.load(p_part + BK + o_v, mask=m_v, other=0.0)
    else:
        b_k_mean = sum_parts(p_part, o_r, m_r, parts, size, BP, STEPS, p_log, o_hr, b_log_r, ANCHORED)
        b_v_mean = sum_parts(p_part, BK + o_v, m_v, parts, size, BP, STEPS, p_log, o_hv, b_log_v, ANCHORED)
        if not CENTRE:
            b_dk_sum = b_k_mean
            b_dv_sum = b_v_mean
        b_k_mean = tl.div_rn(b_k_mean, count)
        b_v_mean = tl.div_rn(b_v_mean, count)
    b_s = covariance(b_kv, b_dk_sum, b_dv_sum, count, scale)
    p = p_s + (i_b * heads + h) * DK * DV + (o_r * DV + o_v % DV)
    tl.store(p, b_s.to(p_s.dtype.element_ty), mask=m_head)
    p_means += i_b * heads * (DK + DV)
    tl.store(p_means + h * DK + o_r, b_k_mean, mask=m_r)
    if tl.program_id(1) == 0:
        tl.store(p_means + heads * DK + h * DV + o_v, b_v_mean, mask=m_v)


@triton.jit(do_not_specialize=SIZES)
def output_kernel(
    p_q, p_v, p_w, p_mask, p_mask_q, p_count, p_seq, p_offset, p_out, p_s, p_means,
    Nq, N, H, W, prefix, scale, blocks, columns, rows, heads,
    stride_qb, stride_q, stride_vb, stride_v, stride_ob, stride_o,
    MAP: tl.constexpr, NORM: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HEADS: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    LOCAL: tl.constexpr, HAS_MASK: tl.constexpr, MASK_Q: tl.constexpr, PACKED: tl.constexpr, OFFSET: tl.constexpr,
    WIDE: tl.constexpr, HALO: tl.constexpr,
):  # fmt: skip
    """Outputs from the state. Grid (B·blocks, tiles)

    With a local residual a tile is `rows` rows and BW columns of the map, and `columns` tiles lie side by side. A
    packed image counts its own. Without a local residual a tile is `rows` tokens.
    """
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
    p_v += i_b * stride_vb + start * stride_v + h * DV
    p_out += i_b * stride_ob + start * stride_o + h * DV
    if HAS_MASK:
        p_mask += i_b * N
    if MASK_Q:
        p_mask_q += i_b * Nq
    b_offset = load_offset(p_offset, i_b, h, heads, o_k, m_k, DK, OFFSET)
    m_head = same_head(o_k, m_k, o_v, m_v, DK, DV)
    b_s = tl.load(p_s + (i_b * heads + h) * DK * DV + state_offsets(o_k, o_v, DV), mask=m_head, other=0.0)
    p_means += i_b * heads * (DK + DV)
    b_v_mean = tl.load(p_means + heads * DK + h * DV + o_v, mask=m_v, other=0.0)
    b_k_mean = 0.0
    eps = 0.0
    if NORM != "subtract":
        b_k_mean = full_mean(tl.load(p_means + h * DK + o_k, mask=m_k, other=0.0), m_k, MAP)
        b_k_mean *= tl.cast(scale, tl.float32)
        eps = tl.div_rn(EPS, tokens_of(p_count, i_b, N, HAS_MASK))
    b_base, b_rest = bases_of(b_s, b_v_mean, MAP, NORM)
    b_s = operand(b_s, DOT, PRECISION)
    b_rest -= offset_product(b_s, b_offset, MAP, PRECISION, OFFSET)
    if LOCAL:
        if i_t == 0:
            write_run(
                p_q, p_out, p_mask_q, stride_q, stride_o, i_t, prefix, o_k, m_k, o_v, m_v,
                b_s, b_base, b_rest, b_k_mean, b_v_mean, b_offset, eps,
                MAP, NORM, DK, DV, HEADS, LANES, DOT, PRECISION, MASK_Q, OFFSET,
            )  # fmt: skip
        x = (i_t % columns) * BW
        y = (i_t // columns) * rows
        if (x < W) & (y < H):
            p_w += (i_b * heads + h) * DV * 9
            write_tile(
                p_q, p_v, p_w, p_out, p_mask, p_mask_q, stride_q, stride_v, stride_o,
                x, y, tl.minimum(y + rows, H), H, W, prefix,
                o_k, m_k, o_v, m_v, b_s, b_base, b_rest, b_k_mean, b_v_mean, b_offset, eps,
                MAP, NORM, DK, DV, HEADS, BV, BW, HALO, DOT, PRECISION, HAS_MASK, MASK_Q, OFFSET,
            )  # fmt: skip
    else:
        t = i_t * rows
        write_run(
            p_q, p_out, p_mask_q, stride_q, stride_o, t, tl.minimum(t + rows, Nq), o_k, m_k, o_v, m_v,
            b_s, b_base, b_rest, b_k_mean, b_v_mean, b_offset, eps,
            MAP, NORM, DK, DV, HEADS, BN, DOT, PRECISION, MASK_Q, OFFSET,
        )  # fmt: skip
