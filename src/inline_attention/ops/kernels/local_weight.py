"""The kernel that makes the local residual's weight from the mean token. Vocabulary as in `blocks.py`."""

import triton
import triton.language as tl

from .blocks import gelu, operand, product_plus


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
