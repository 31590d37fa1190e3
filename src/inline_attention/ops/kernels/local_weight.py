"""The kernels that make the local residual's weight from the mean token, and its gradients.

Vocabulary as in `blocks.py`.
"""

import triton
import triton.language as tl

from .blocks import add_product, gelu, gelu_slope, operand, product_plus


@triton.jit(do_not_specialize=("B",))
def local_weight_kernel(
    p_x, p_w1, p_b1, p_w2, p_b2, p_out, B, stride_x,
    HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BB: tl.constexpr, BO: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """W2·gelu(W1·x + b1) + b2 of one head, BO outputs for BB samples. Grid (heads, B / BB, 9·d / BO)

    Every program computes the hidden values again. That takes less time than waiting for one program to compute them.

    x (B, heads·d), W1 (heads, d, d), b1 (heads, d), W2 (heads, 9·d, d), b2 (heads, 9·d) → out (B, heads, 9·d)
    """
    i_h = tl.program_id(0)
    o_b = tl.program_id(1) * BB + tl.arange(0, BB)
    m_b = o_b < B
    o_b = tl.cast(o_b, tl.int64)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    b_x = tl.load(p_x + o_b[:, None] * stride_x + i_h * D + o_d[None, :], mask=m_b[:, None] & m_d[None, :], other=0.0)
    p_w1 += i_h * D * D
    b_w1 = tl.load(p_w1 + o_d[None, :] * D + o_d[:, None], mask=m_d[:, None] & m_d[None, :], other=0.0)  # (in, out)
    b_b1 = tl.load(p_b1 + i_h * D + o_d, mask=m_d, other=0.0).to(tl.float32)[None, :]
    # Loaded before the first product, so that one load does not wait for the other.
    o_o = tl.program_id(2) * BO + tl.arange(0, BO)
    m_o = o_o < 9 * D
    p_w2 += i_h * 9 * D * D
    b_w2 = tl.load(p_w2 + o_o[None, :] * D + o_d[:, None], mask=m_d[:, None] & m_o[None, :], other=0.0)
    b_b2 = tl.load(p_b2 + i_h * 9 * D + o_o, mask=m_o, other=0.0).to(tl.float32)[None, :]
    b_hidden = product_plus(operand(b_x, DOT, PRECISION), operand(b_w1, DOT, PRECISION), b_b1, PRECISION)
    b_hidden = operand(gelu(b_hidden, PRECISION), DOT, PRECISION)
    b_out = product_plus(b_hidden, operand(b_w2, DOT, PRECISION), b_b2, PRECISION)
    p_out += o_b[:, None] * (HEADS * 9 * D) + i_h * 9 * D + o_o[None, :]
    tl.store(p_out, b_out.to(p_out.dtype.element_ty), mask=m_b[:, None] & m_o[None, :])


@triton.jit(do_not_specialize=("B",))
def local_weight_backward_kernel(
    p_g, p_x, p_w1, p_b1, p_w2, p_dx, p_hidden, p_dbefore, B,
    HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BB: tl.constexpr, BO: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of x for BB samples of one head, and factors of the weights' gradients. Grid (heads, B / BB)

    gradient (B, heads, 9·d) → dx, gelu(before), dbefore (B, heads·d), where before is W1·x + b1
    """
    i_h = tl.program_id(0)
    o_b = tl.program_id(1) * BB + tl.arange(0, BB)
    m_b = o_b < B
    o_b = tl.cast(o_b, tl.int64)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    o_x = o_b[:, None] * (HEADS * D) + i_h * D + o_d[None, :]
    m_x = m_b[:, None] & m_d[None, :]
    m_w = m_d[:, None] & m_d[None, :]
    p_w1 += i_h * D * D
    b_x = tl.load(p_x + o_x, mask=m_x, other=0.0)
    b_w1 = tl.load(p_w1 + o_d[None, :] * D + o_d[:, None], mask=m_w, other=0.0)  # (in, out)
    b_b1 = tl.load(p_b1 + i_h * D + o_d, mask=m_d, other=0.0).to(tl.float32)[None, :]
    b_before = product_plus(operand(b_x, DOT, PRECISION), operand(b_w1, DOT, PRECISION), b_b1, PRECISION)
    tl.store(p_hidden + o_x, gelu(b_before, PRECISION).to(p_hidden.dtype.element_ty), mask=m_x)
    p_g += o_b[:, None] * (HEADS * 9 * D) + i_h * 9 * D
    p_w2 += i_h * 9 * D * D
    b_dhidden = tl.zeros([BB, BD], tl.float32)
    for o in range(0, 9 * D, BO):
        o_o = o + tl.arange(0, BO)
        m_o = o_o < 9 * D
        b_g = tl.load(p_g + o_o[None, :], mask=m_b[:, None] & m_o[None, :], other=0.0)
        b_w2 = tl.load(p_w2 + o_o[:, None] * D + o_d[None, :], mask=m_o[:, None] & m_d[None, :], other=0.0)
        b_dhidden = add_product(b_dhidden, operand(b_g, DOT, PRECISION), operand(b_w2, DOT, PRECISION), PRECISION)
    b_dbefore = b_dhidden * gelu_slope(b_before, PRECISION)
    tl.store(p_dbefore + o_x, b_dbefore.to(p_dbefore.dtype.element_ty), mask=m_x)
    b_w1 = tl.load(p_w1 + o_d[:, None] * D + o_d[None, :], mask=m_w, other=0.0)  # (out, in)
    b_dx = tl.dot(operand(b_dbefore, DOT, PRECISION), operand(b_w1, DOT, PRECISION), input_precision=PRECISION)
    tl.store(p_dx + o_x, b_dx.to(p_dx.dtype.element_ty), mask=m_x)


@triton.jit(do_not_specialize=("B",))
def weight_gradient_kernel(
    p_g, p_x, p_dw, p_db, B,
    HEADS: tl.constexpr, DO: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BB: tl.constexpr, BO: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of a linear layer of each head, of BO outputs. Grid (heads, DO / BO)

    gradient (B, heads·DO), inputs (B, heads·D) → dW (heads, DO, D), db (heads, DO)
    """
    i_h = tl.program_id(0)
    o_o = tl.program_id(1) * BO + tl.arange(0, BO)
    m_o = o_o < DO
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    b_dw = tl.zeros([BO, BD], tl.float32)
    b_db = tl.zeros([BO], tl.float32)
    for b in range(0, B, BB):
        o_b = b + tl.arange(0, BB)
        m_b = o_b < B
        o_b = tl.cast(o_b, tl.int64)
        p = p_g + o_b[:, None] * (HEADS * DO) + i_h * DO + o_o[None, :]
        b_g = tl.load(p, mask=m_b[:, None] & m_o[None, :], other=0.0)
        p = p_x + o_b[:, None] * (HEADS * D) + i_h * D + o_d[None, :]
        b_x = tl.load(p, mask=m_b[:, None] & m_d[None, :], other=0.0)
        b_dw = add_product(b_dw, tl.trans(operand(b_g, DOT, PRECISION)), operand(b_x, DOT, PRECISION), PRECISION)
        b_db += tl.sum(b_g.to(tl.float32), 0)
    p = p_dw + i_h * DO * D + o_o[:, None] * D + o_d[None, :]
    tl.store(p, b_dw.to(p_dw.dtype.element_ty), mask=m_o[:, None] & m_d[None, :])
    tl.store(p_db + i_h * DO + o_o, b_db.to(p_db.dtype.element_ty), mask=m_o)
