"""The kernel of a layer norm and the linear layer after it. Vocabulary and blocks as in `mlp.py`."""

import triton
import triton.language as tl

from .mlp import columns, linear, normalised


@triton.jit
def store(p_out, b_out, o_m, m_m, o_c, m_c, C: tl.constexpr):
    """Some channels of the rows"""
    p = p_out + o_m[:, None] * C + o_c[None, :]
    tl.store(p, b_out.to(p_out.dtype.element_ty), mask=m_m[:, None] & m_c[None, :])


@triton.jit(do_not_specialize=("M",))
def norm_linear_kernel(
    p_x, p_weight, p_bias, p_w, p_b, p_normal, p_out, M, eps,
    C: tl.constexpr, DO: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr, BM: tl.constexpr, BO: tl.constexpr,
    SPLITS: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """norm(x) and W·norm(x) + b of BM rows. Grid (M / BM, SPLITS)

    The outputs pass BO at a time. With more than one split, a program takes a share of them; each normalises its rows.

    x (M, C), W (DO, C), b (DO,) → norm(x) (M, C), out (M, DO)
    """
    o_m = tl.program_id(0) * BM + tl.arange(0, BM)
    m_m = o_m < M
    o_m = tl.cast(o_m, tl.int64)
    o_0, m_0, o_1, m_1 = columns(C, C0, C1)
    b_n0, b_n1 = normalised(
        p_x, p_weight, p_bias, o_m, m_m, o_0, m_0, o_1, m_1, eps, C, C1, DOT, PRECISION
    )  # fmt: skip
    if tl.program_id(1) == 0:
        store(p_normal, b_n0, o_m, m_m, o_0, m_0, C)
        if C1 > 0:
            store(p_normal, b_n1, o_m, m_m, o_1, m_1, C)

    STEPS: tl.constexpr = (DO + BO - 1) // BO
    SHARE: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS * BO
    begin = tl.program_id(1) * SHARE
    for o in range(begin, tl.minimum(begin + SHARE, DO), BO):
        o_o = o + tl.arange(0, BO)
        m_o = o_o < DO
        b_out = linear(
            b_n0, b_n1, p_w, p_b, o_o, m_o, o_0, m_0, o_1, m_1, C, C0, C1, DO % BO == 0, DOT, PRECISION
        )  # fmt: skip
        store(p_out, b_out, o_m, m_m, o_o, m_o, DO)
