"""The 3×3 local residual and the gradient of its weight. Vocabulary and shapes as in `blocks.py`."""

import triton
import triton.language as tl

from .blocks import load_rows, present, store_rows

# Least tokens of a step over the map: rows of a tensor core's product.
LANES = tl.constexpr(16)


@triton.jit
def load_tap(p_w, tap, o_c, m_c, FLIP: tl.constexpr):
    """One tap of each channel's 3×3 kernel: (1, BC) float32"""
    if FLIP:
        tap = 8 - tap
    return tl.load(p_w + o_c * 9 + tap, mask=m_c, other=0.0).to(tl.float32)[None, :]


@triton.jit
def load_local_weight(p_w, o_c, m_c, FLIP: tl.constexpr):
    """The nine taps of each channel, which are contiguous in memory. FLIP reverses them, for the backward."""
    w0 = load_tap(p_w, 0, o_c, m_c, FLIP)
    w1 = load_tap(p_w, 1, o_c, m_c, FLIP)
    w2 = load_tap(p_w, 2, o_c, m_c, FLIP)
    w3 = load_tap(p_w, 3, o_c, m_c, FLIP)
    w4 = load_tap(p_w, 4, o_c, m_c, FLIP)
    w5 = load_tap(p_w, 5, o_c, m_c, FLIP)
    w6 = load_tap(p_w, 6, o_c, m_c, FLIP)
    w7 = load_tap(p_w, 7, o_c, m_c, FLIP)
    w8 = load_tap(p_w, 8, o_c, m_c, FLIP)
    return w0, w1, w2, w3, w4, w5, w6, w7, w8


@triton.jit
def lanes(BW: tl.constexpr):
    """Rows and columns of a step's tokens, from its first: (BM,)"""
    o = tl.arange(0, LANES if BW < LANES else BW)
    return o // BW, o % BW


@triton.jit
def load_map(p_x, stride, p_mask, y, x, o_y, o_x, y_begin, y_end, W, prefix, o_c, m_c, HAS_MASK: tl.constexpr):
    """The map at rows y + o_y and columns x + o_x; zeros beside it and outside rows y_begin … y_end − 1: (BM, BC)"""
    m_t = (y + o_y >= y_begin) & (y + o_y < y_end) & (x + o_x >= 0) & (x + o_x < W)
    t = prefix + y * W + x
    o_t = o_y * W + o_x
    return load_rows(p_x, stride, t, o_t, present(p_mask, t, o_t, m_t, HAS_MASK), o_c, m_c)


@triton.jit
def shift_matrix(dx, DTYPE: tl.constexpr, BW: tl.constexpr, HALO: tl.constexpr):
    """Zeros and ones: takes from a step's tokens their neighbours dx columns to the right: (BM, BL)"""
    _, o_x = lanes(BW)
    o_m = tl.arange(0, o_x.shape[0])
    if HALO:  # the tokens that are loaded begin BW / 2 columns to the left
        return (o_m[:, None] + dx + BW // 2 == tl.arange(0, 2 * BW)[None, :]).to(DTYPE)
    else:
        m_x = (o_x + dx >= 0) & (o_x + dx < BW)
        return ((o_m[:, None] + dx == o_m[None, :]) & m_x[:, None]).to(DTYPE)


@triton.jit
def shift_matrices(DTYPE: tl.constexpr, BW: tl.constexpr, HALO: tl.constexpr):
    """Those of `load_neighbours`, which has no use for them in float32"""
    return shift_matrix(-1, DTYPE, BW, HALO), shift_matrix(0, DTYPE, BW, HALO), shift_matrix(1, DTYPE, BW, HALO)


@triton.jit
def load_neighbours(
    p_x, stride, p_mask, y, x, H, W, prefix, o_c, m_c, shifts,
    BW: tl.constexpr, HALO: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """A step of the map from (y, x) on, and its neighbours to the left and to the right: (BM, BC) float32

    In half precision they are products of what is loaded with zeros and ones. They are exact, and in the layout of the
    outputs. A NaN or an infinity becomes NaN in the same channel of the whole step. That is no loss: the means and the
    state carry it to every output of the channel anyway.
    """
    o_y, o_x = lanes(BW)
    if p_x.dtype.element_ty == tl.float32:  # tensor cores would cut digits off
        left = load_map(p_x, stride, p_mask, y, x, o_y, o_x - 1, 0, H, W, prefix, o_c, m_c, HAS_MASK)
        here = load_map(p_x, stride, p_mask, y, x, o_y, o_x, 0, H, W, prefix, o_c, m_c, HAS_MASK)
        right = load_map(p_x, stride, p_mask, y, x, o_y, o_x + 1, 0, H, W, prefix, o_c, m_c, HAS_MASK)
        return left, here, right
    else:
        if HALO:
            o_x = tl.arange(0, 2 * BW)
            o_y = o_x * 0
            x -= BW // 2
        b_x = load_map(p_x, stride, p_mask, y, x, o_y, o_x, 0, H, W, prefix, o_c, m_c, HAS_MASK)
        return tl.dot(shifts[0], b_x), tl.dot(shifts[1], b_x), tl.dot(shifts[2], b_x)


@triton.jit
def weigh(b_sum, w0, w1, w2, left, here, right):
    """b_sum plus three taps times a row's neighbours: (BM, BC) float32"""
    b_sum = b_sum + w0 * left.to(tl.float32)
    b_sum = b_sum + w1 * here.to(tl.float32)
    return b_sum + w2 * right.to(tl.float32)


@triton.jit
def first_sums(
    p_x, stride, p_mask, y, x, H, W, prefix, o_c, m_c, b_start, w, shifts,
    BW: tl.constexpr, HALO: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """What `next_sums` starts from: b_start plus what the rows y − 1 and y add to rows y and y + 1 of the outputs"""
    if BW < LANES:
        return b_start, b_start
    else:
        left, here, right = load_neighbours(
            p_x, stride, p_mask, y - 1, x, H, W, prefix, o_c, m_c, shifts, BW, HALO, HAS_MASK
        )
        b_next = weigh(b_start, w[0], w[1], w[2], left, here, right)
        left, here, right = load_neighbours(
            p_x, stride, p_mask, y, x, H, W, prefix, o_c, m_c, shifts, BW, HALO, HAS_MASK
        )
        b_next = weigh(b_next, w[3], w[4], w[5], left, here, right)
        return b_next, weigh(b_start, w[0], w[1], w[2], left, here, right)


@triton.jit
def next_sums(
    p_x, stride, p_mask, y, x, H, W, prefix, o_c, m_c, b_start, b_next, b_after, w, shifts,
    BW: tl.constexpr, HALO: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """b_start (1, BC) plus the 3×3 sums at a step of the map from (y, x) on: (BM, BC)

    A step is BW columns of a row, or of several rows of a narrow map. Single rows are loaded once and added to the
    three rows of outputs that they are neighbours of: b_next and b_after are the sums of the next two rows so far.
    Several rows at once are loaded anew for each of the three.
    """
    if BW < LANES:
        b_sum = b_start
        for dy in tl.static_range(3):
            left, here, right = load_neighbours(
                p_x, stride, p_mask, y + dy - 1, x, H, W, prefix, o_c, m_c, shifts, BW, HALO, HAS_MASK
            )
            b_sum = weigh(b_sum, w[3 * dy], w[3 * dy + 1], w[3 * dy + 2], left, here, right)
        return b_sum, b_next, b_after
    else:
        left, here, right = load_neighbours(
            p_x, stride, p_mask, y + 1, x, H, W, prefix, o_c, m_c, shifts, BW, HALO, HAS_MASK
        )
        b_sum = weigh(b_next, w[6], w[7], w[8], left, here, right)
        b_next = weigh(b_after, w[3], w[4], w[5], left, here, right)
        return b_sum, b_next, weigh(b_start, w[0], w[1], w[2], left, here, right)


@triton.jit
def add_local(
    p_x, p_w, p_out, p_mask_x, p_mask_out, stride_x, stride_out, x, y_begin, y_end, H, W, prefix, o_c, m_c, shifts,
    BW: tl.constexpr, BC: tl.constexpr, HALO: tl.constexpr, FLIP: tl.constexpr, MASK_X: tl.constexpr,
    MASK_OUT: tl.constexpr,
):  # fmt: skip
    """Adds the 3×3 sums to what this program wrote for rows y_begin … y_end − 1 and columns x … x + BW − 1

    For float32, whose products take the registers that the sums would need in the same loop.
    """
    w = load_local_weight(p_w, o_c, m_c, FLIP)
    b_zero = tl.zeros([1, BC], tl.float32)
    o_y, o_x = lanes(BW)
    o_t = o_y * W + o_x
    tl.debug_barrier()  # other threads wrote what is read here
    b_next, b_after = first_sums(
        p_x, stride_x, p_mask_x, y_begin, x, H, W, prefix, o_c, m_c, b_zero, w, shifts, BW, HALO, MASK_X
    )
    for y in range(y_begin, y_end, LANES // BW if BW < LANES else 1):
        b_sum, b_next, b_after = next_sums(
            p_x, stride_x, p_mask_x, y, x, H, W, prefix, o_c, m_c, b_zero, b_next, b_after, w, shifts,
            BW, HALO, MASK_X,
        )  # fmt: skip
        t = prefix + y * W + x
        m_t = present(p_mask_out, t, o_t, (y + o_y < y_end) & (x + o_x < W), MASK_OUT)
        b_sum += load_rows(p_out, stride_out, t, o_t, m_t, o_c, m_c)
        store_rows(p_out, b_sum, stride_out, t, o_t, m_t, o_c, m_c)


@triton.jit
def load_row(
    p_x, stride, p_mask, y, x, y_begin, y_end, W, prefix, o_c, m_c, BW: tl.constexpr, HAS_MASK: tl.constexpr
):  # fmt: skip
    """Row y of the map from column x on; zeros beside it and outside rows y_begin … y_end − 1: (BW, BC)"""
    o_x = tl.arange(0, BW)
    return load_map(p_x, stride, p_mask, y, x, o_x * 0, o_x, y_begin, y_end, W, prefix, o_c, m_c, HAS_MASK)


@triton.jit
def load_sides(p_x, stride, p_mask, y, x, H, W, prefix, o_c, m_c, BW: tl.constexpr, HAS_MASK: tl.constexpr):
    """Row y of the map, read from columns x − 1, x and x + 1 on: (BW, BC) each"""
    left = load_row(p_x, stride, p_mask, y, x - 1, 0, H, W, prefix, o_c, m_c, BW, HAS_MASK)
    here = load_row(p_x, stride, p_mask, y, x, 0, H, W, prefix, o_c, m_c, BW, HAS_MASK)
    right = load_row(p_x, stride, p_mask, y, x + 1, 0, H, W, prefix, o_c, m_c, BW, HAS_MASK)
    return left, here, right


@triton.jit
def accumulate_local_grad(
    p_g, p_v, p_mask, p_mask_q, stride_g, stride_v, x, y_begin, y_end, H, W, prefix, o_c, m_c,
    a0, a1, a2, a3, a4, a5, a6, a7, a8,
    BW: tl.constexpr, BC: tl.constexpr, HAS_MASK: tl.constexpr, MASK_Q: tl.constexpr,
):  # fmt: skip
    """Adds the gradient of the nine taps from rows y_begin … y_end − 1 and columns x … x + BW − 1 of g to nine sums
    (BW, BC)

    Row y of v is the upper neighbour of row y + 1 of g. Rows are loaded one turn before they are used. With products
    for the shifts, as in `load_neighbours`, nothing would be on its way during a turn, and it would take twice as long.
    """
    g_above = tl.zeros([BW, BC], tl.float32)
    g_here = tl.zeros([BW, BC], tl.float32)
    g_next = load_row(p_g, stride_g, p_mask_q, y_begin, x, y_begin, y_end, W, prefix, o_c, m_c, BW, MASK_Q)
    left, here, right = load_sides(p_v, stride_v, p_mask, y_begin - 1, x, H, W, prefix, o_c, m_c, BW, HAS_MASK)
    for y in range(y_begin - 1, y_end + 1):
        g_next1 = load_row(p_g, stride_g, p_mask_q, y + 2, x, y_begin, y_end, W, prefix, o_c, m_c, BW, MASK_Q)
        left1, here1, right1 = load_sides(p_v, stride_v, p_mask, y + 1, x, H, W, prefix, o_c, m_c, BW, HAS_MASK)
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
