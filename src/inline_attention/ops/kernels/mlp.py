"""The kernels of the MLP half of a block, and of the projection before it. Vocabulary as in `blocks.py`.

Blocks are powers of two, and the widths of models are not. So a row of C channels is held in two blocks, of C0 and C1
channels: 192 are 128 and 64, 384 are 256 and 128. C1 is zero where C is a power of two.
"""

import triton
import triton.language as tl

from .blocks import add_product, gelu, operand


@triton.jit
def columns(C: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr):
    """Channels of the two blocks of a row, and which of them exist. Without a second block its place has the first."""
    o_0 = tl.arange(0, C0)
    o_1 = o_0
    if C1 > 0:
        o_1 = C0 + tl.arange(0, C1)
    return o_0, o_0 < C, o_1, o_1 < C


@triton.jit
def load_matrix(p, m_r, m_c, FULL: tl.constexpr):
    """A block at pointers p (R, X), zeros outside the masks. FULL: the masks hide nothing"""
    if FULL:
        return tl.load(p)
    else:
        return tl.load(p, mask=m_r[:, None] & m_c[None, :], other=0.0)


@triton.jit
def load_floats(p_x, o_m, m_m, o_c, m_c, C: tl.constexpr):
    """Some channels of the rows, zeros outside the masks: float32"""
    return tl.load(p_x + o_m[:, None] * C + o_c[None, :], mask=m_m[:, None] & m_c[None, :], other=0.0).to(tl.float32)


@triton.jit
def statistics(b_x0, b_x1, m_0, m_1, eps, C: tl.constexpr, C1: tl.constexpr):
    """Mean and 1 / standard deviation of the rows: (BM,) each"""
    b_total = tl.sum(b_x0, 1)
    if C1 > 0:
        b_total += tl.sum(b_x1, 1)
    b_mean = b_total / C
    b_square = tl.where(m_0[None, :], b_x0 - b_mean[:, None], 0.0)
    b_total = tl.sum(b_square * b_square, 1)
    if C1 > 0:
        b_square = tl.where(m_1[None, :], b_x1 - b_mean[:, None], 0.0)
        b_total += tl.sum(b_square * b_square, 1)
    return b_mean, tl.div_rn(1.0, tl.sqrt_rn(b_total / C + tl.cast(eps, tl.float32)))


@triton.jit
def scaled(b_x, b_mean, b_rstd, p_weight, p_bias, o_c, m_c, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """The normalised rows with their scale and shift, as a factor of a product: (BM, X)"""
    b_weight = tl.load(p_weight + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_bias = tl.load(p_bias + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_x = (b_x - b_mean[:, None]) * b_rstd[:, None] * b_weight[None, :] + b_bias[None, :]
    return operand(b_x, DOT, PRECISION)


@triton.jit
def normalised(
    p_x, p_weight, p_bias, o_m, m_m, o_0, m_0, o_1, m_1, eps,
    C: tl.constexpr, C1: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The rows after the layer norm, as factors of a product: both blocks, the second one unused if C1 is zero"""
    b_x0 = load_floats(p_x, o_m, m_m, o_0, m_0, C)
    b_x1 = b_x0
    if C1 > 0:
        b_x1 = load_floats(p_x, o_m, m_m, o_1, m_1, C)
    b_mean, b_rstd = statistics(b_x0, b_x1, m_0, m_1, eps, C, C1)
    b_n0 = scaled(b_x0, b_mean, b_rstd, p_weight, p_bias, o_0, m_0, DOT, PRECISION)
    b_n1 = b_n0
    if C1 > 0:
        b_n1 = scaled(b_x1, b_mean, b_rstd, p_weight, p_bias, o_1, m_1, DOT, PRECISION)
    return b_n0, b_n1


@triton.jit
def linear(
    b_n0, b_n1, p_w, p_b, o_o, m_o, o_0, m_0, o_1, m_1,
    C: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr, WHOLE: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Some outputs of a linear layer, W (…, C): (BM, BO) float32. WHOLE: m_o hides nothing"""
    b_w = load_matrix(p_w + o_o[None, :] * C + o_0[:, None], m_0, m_o, WHOLE & (C0 <= C))
    b_out = tl.dot(b_n0, operand(b_w, DOT, PRECISION), input_precision=PRECISION)
    if C1 > 0:
        b_w = load_matrix(p_w + o_o[None, :] * C + o_1[:, None], m_1, m_o, WHOLE & (C0 + C1 <= C))
        b_out = add_product(b_out, b_n1, operand(b_w, DOT, PRECISION), PRECISION)
    return b_out + tl.load(p_b + o_o, mask=m_o, other=0.0).to(tl.float32)[None, :]


@triton.jit
def write(p_x, p_bias, p_out, b_sum, o_m, m_m, o_c, m_c, C: tl.constexpr):
    """x + bias + sum, of some channels"""
    o = o_m[:, None] * C + o_c[None, :]
    m = m_m[:, None] & m_c[None, :]
    b_bias = tl.load(p_bias + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_out = tl.load(p_x + o, mask=m, other=0.0).to(tl.float32) + (b_sum + b_bias[None, :])
    tl.store(p_out + o, b_out.to(p_out.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=("M",))
def mlp_kernel(
    p_x, p_a, p_wp, p_bp, p_weight, p_bias, p_w1, p_b1, p_w2, p_b2, p_out, p_hidden, M, eps,
    C: tl.constexpr, H: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr,
    PROJECT: tl.constexpr, SPLITS: tl.constexpr, SAVE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x + W2·gelu(W1·norm(x) + b1) + b2 of BM rows. Grid (M / BM, SPLITS)

    The hidden channels pass BH at a time. SAVE: what enters the GELU is written, for the gradients; otherwise nothing
    of them is. With more than one split, a program takes a share of them, and its part of W2·gelu(…) goes to out
    (SPLITS, M, C) float32, for `mlp_sum_kernel`. PROJECT: x + Wp·a + bp takes the place of x. Every split computes it
    again, and the first adds it to its part.

    x, a (M, C), Wp (C, C), bp (C,), W1 (H, C), b1 (H,), W2 (C, H), b2 (C,) → out (M, C), hidden (M, H) if SAVE
    """
    o_m = tl.program_id(0) * BM + tl.arange(0, BM)
    m_m = o_m < M
    o_m = tl.cast(o_m, tl.int64)
    o_0, m_0, o_1, m_1 = columns(C, C0, C1)

    if SPLITS > 1:
        p_out += tl.cast(tl.program_id(1), tl.int64) * M * C
    if PROJECT:
        b_out0 = tl.zeros([BM, C0], tl.float32)
        if C1 > 0:
            b_out1 = tl.zeros([BM, C1], tl.float32)
        WHOLE_0: tl.constexpr = (C % BH == 0) & (C0 <= C)
        WHOLE_1: tl.constexpr = (C % BH == 0) & (C0 + C1 <= C)
        for c in range(0, C, BH):
            o_c = c + tl.arange(0, BH)
            m_c = o_c < C
            b_a = operand(load_matrix(p_a + o_m[:, None] * C + o_c[None, :], m_m, m_c, False), DOT, PRECISION)
            b_w = load_matrix(p_wp + o_0[None, :] * C + o_c[:, None], m_c, m_0, WHOLE_0)
            b_out0 = add_product(b_out0, b_a, operand(b_w, DOT, PRECISION), PRECISION)
            if C1 > 0:
                b_w = load_matrix(p_wp + o_1[None, :] * C + o_c[:, None], m_c, m_1, WHOLE_1)
                b_out1 = add_product(b_out1, b_a, operand(b_w, DOT, PRECISION), PRECISION)
        write(p_x, p_bp, p_out, b_out0, o_m, m_m, o_0, m_0, C)
        if C1 > 0:
            write(p_x, p_bp, p_out, b_out1, o_m, m_m, o_1, m_1, C)
        # The sum is read back, which takes fewer registers than keeping it: they are what limits the kernel.
        tl.debug_barrier()
        p_x = p_out

    b_n0, b_n1 = normalised(
        p_x, p_weight, p_bias, o_m, m_m, o_0, m_0, o_1, m_1, eps, C, C1, DOT, PRECISION
    )  # fmt: skip
    b_out0 = tl.zeros([BM, C0], tl.float32)
    if C1 > 0:
        b_out1 = tl.zeros([BM, C1], tl.float32)

    STEPS: tl.constexpr = (H + BH - 1) // BH
    SHARE: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS * BH
    begin = tl.program_id(1) * SHARE
    FULL_0: tl.constexpr = (H % BH == 0) & (C0 <= C)
    FULL_1: tl.constexpr = (H % BH == 0) & (C0 + C1 <= C)
    for h in range(begin, tl.minimum(begin + SHARE, H), BH):
        o_h = h + tl.arange(0, BH)
        m_h = o_h < H
        b_hidden = linear(
            b_n0, b_n1, p_w1, p_b1, o_h, m_h, o_0, m_0, o_1, m_1, C, C0, C1, H % BH == 0, DOT, PRECISION
        )  # fmt: skip
        if SAVE:
            o = o_m[:, None] * H + o_h[None, :]
            tl.store(p_hidden + o, b_hidden.to(p_hidden.dtype.element_ty), mask=m_m[:, None] & m_h[None, :])
        b_hidden = operand(gelu(b_hidden, PRECISION), DOT, PRECISION)
        b_w = load_matrix(p_w2 + o_0[None, :] * H + o_h[:, None], m_h, m_0, FULL_0)
        b_out0 = add_product(b_out0, b_hidden, operand(b_w, DOT, PRECISION), PRECISION)
        if C1 > 0:
            b_w = load_matrix(p_w2 + o_1[None, :] * H + o_h[:, None], m_h, m_1, FULL_1)
            b_out1 = add_product(b_out1, b_hidden, operand(b_w, DOT, PRECISION), PRECISION)

    if SPLITS == 1:
        write(p_x, p_b2, p_out, b_out0, o_m, m_m, o_0, m_0, C)
        if C1 > 0:
            write(p_x, p_b2, p_out, b_out1, o_m, m_m, o_1, m_1, C)
    else:
        if PROJECT:
            first = (tl.program_id(1) == 0).to(tl.float32)
            b_out0 += first * load_floats(p_x, o_m, m_m, o_0, m_0, C)
            if C1 > 0:
                b_out1 += first * load_floats(p_x, o_m, m_m, o_1, m_1, C)
        tl.store(p_out + o_m[:, None] * C + o_0[None, :], b_out0, mask=m_m[:, None] & m_0[None, :])
        if C1 > 0:
            tl.store(p_out + o_m[:, None] * C + o_1[None, :], b_out1, mask=m_m[:, None] & m_1[None, :])


@triton.jit(do_not_specialize=("M",))
def mlp_sum_kernel(
    p_x, p_b2, p_part, p_out, M, C: tl.constexpr, PROJECT: tl.constexpr, SPLITS: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """b2 + the sum of the parts + x, unless a part holds it. Grid (M·C / BN,); parts (SPLITS, M, C) float32"""
    o = tl.cast(tl.program_id(0), tl.int64) * BN + tl.arange(0, BN)
    size = tl.cast(M, tl.int64) * C
    m = o < size
    b_sum = tl.load(p_b2 + o % C, mask=m, other=0.0).to(tl.float32)
    for i in tl.static_range(SPLITS):
        b_sum += tl.load(p_part + i * size + o, mask=m, other=0.0)
    if not PROJECT:
        b_sum = tl.load(p_x + o, mask=m, other=0.0).to(tl.float32) + b_sum
    tl.store(p_out + o, b_sum.to(p_out.dtype.element_ty), mask=m)
