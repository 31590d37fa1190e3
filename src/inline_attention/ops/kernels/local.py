"""The 3×3 local residual and the gradient of its weight. Vocabulary and shapes as in `blocks.py`."""

import triton
import triton.language as tl

from .blocks import load_rows, present, store_rows

# Pipeline stages of the loop over a map's rows.
ROW_STAGES = tl.constexpr(4)


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
def load_map_row(p_x, stride, p_mask, y, x, H, W, prefix, o_c, m_c, BW: tl.constexpr, HAS_MASK: tl.constexpr):
    """Row y of the map from column x on, zeros outside the map: (BW, BC)"""
    o_x = tl.arange(0, BW)
    o_y = y + tl.zeros([BW], tl.int32)  # a block, because the interpreter cannot combine masks of a block and a scalar
    m_x = (x + o_x >= 0) & (x + o_x < W) & (o_y >= 0) & (o_y < H)
    t = prefix + y * W + x
    return load_rows(p_x, stride, t, o_x, present(p_mask, t, o_x, m_x, HAS_MASK), o_c, m_c)


@triton.jit
def load_neighbours(p_x, stride, p_mask, y, x, H, W, prefix, o_c, m_c, BW: tl.constexpr, HAS_MASK: tl.constexpr):
    """Row y of the map, read from columns x − 1, x and x + 1 on"""
    left = load_map_row(p_x, stride, p_mask, y, x - 1, H, W, prefix, o_c, m_c, BW, HAS_MASK)
    here = load_map_row(p_x, stride, p_mask, y, x, H, W, prefix, o_c, m_c, BW, HAS_MASK)
    right = load_map_row(p_x, stride, p_mask, y, x + 1, H, W, prefix, o_c, m_c, BW, HAS_MASK)
    return left, here, right


@triton.jit
def weigh(b_sum, w0, w1, w2, left, here, right):
    """b_sum plus three taps times a row's neighbours: (BW, BC) float32"""
    b_sum = b_sum + w0 * left.to(tl.float32)
    b_sum = b_sum + w1 * here.to(tl.float32)
    return b_sum + w2 * right.to(tl.float32)


@triton.jit
def add_local(
    p_x, p_w, p_out, p_mask_x, p_mask_out, stride_x, stride_out, x, y_begin, y_end, H, W, prefix, o_c, m_c,
    BW: tl.constexpr, BC: tl.constexpr, FLIP: tl.constexpr, MASK_X: tl.constexpr, MASK_OUT: tl.constexpr,
):  # fmt: skip
    """Adds the 3×3 sums of a map to what this program wrote for rows y_begin … y_end − 1, columns x … x + BW − 1

    Each row is loaded once, at three shifts, and added to the three rows of outputs that it is a neighbour of. This is
    a second pass over outputs that are still in the cache. Matrix products keep their blocks in another layout, and
    converting row by row would cost more than the pass.
    """
    w0, w1, w2, w3, w4, w5, w6, w7, w8 = load_local_weight(p_w, o_c, m_c, FLIP)
    b_zero = tl.zeros([BW, BC], tl.float32)
    left, here, right = load_neighbours(p_x, stride_x, p_mask_x, y_begin - 1, x, H, W, prefix, o_c, m_c, BW, MASK_X)
    b_next = weigh(b_zero, w0, w1, w2, left, here, right)  # sums of the row to be written next
    left, here, right = load_neighbours(p_x, stride_x, p_mask_x, y_begin, x, H, W, prefix, o_c, m_c, BW, MASK_X)
    b_next = weigh(b_next, w3, w4, w5, left, here, right)
    b_after = weigh(b_zero, w0, w1, w2, left, here, right)  # sums of the row after it
    o_x = tl.arange(0, BW)
    for y in tl.range(y_begin, y_end, num_stages=ROW_STAGES):
        left, here, right = load_neighbours(p_x, stride_x, p_mask_x, y + 1, x, H, W, prefix, o_c, m_c, BW, MASK_X)
        b_out = load_map_row(p_out, stride_out, p_mask_out, y, x, y_end, W, prefix, o_c, m_c, BW, MASK_OUT)
        t = prefix + y * W + x
        b_next = weigh(b_next, w6, w7, w8, left, here, right) + b_out.to(tl.float32)
        store_rows(p_out, b_next, stride_out, t, o_x, present(p_mask_out, t, o_x, x + o_x < W, MASK_OUT), o_c, m_c)
        b_next = weigh(b_after, w3, w4, w5, left, here, right)
        b_after = weigh(b_zero, w0, w1, w2, left, here, right)


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
