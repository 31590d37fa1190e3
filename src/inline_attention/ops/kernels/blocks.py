"""What the kernels are made of.

A program owns one sample and one block of channels, whole heads that fill BC of them. Products of two different heads
of a block are computed with the rest and masked away: every kernel here is bound by memory, not by tensor cores.

Vocabulary: p_ pointer, b_ block value, o_ offset, m_ mask, i_ program index. Shapes in comments are of blocks.
- tokens: a sample's rows, `stride` elements apart, channels next to each other; prefix tokens first, then the map.
- pivot: the mean of a sample's first tokens. Sums of float32 inputs are taken of what is left without it: float32
  is exact only as long as the mean does not swamp the spread. Products of half-precision numbers have the digits to
  spare, if only their sum is not left to the tensor cores for too long (CHUNK).
- state: covariance S, mean of φ(k), mean of v, as in `reference.State`; φ is used less φ(0), which S does not see.
"""

import triton
import triton.language as tl

# Tokens whose products the tensor cores sum before float32 addition takes over: they round towards zero.
CHUNK = tl.constexpr(2048)


@triton.jit
def feature_map(b_x, MAP: tl.constexpr):
    """φ(x) − φ(0), element by element, of float32"""
    if MAP == "relu":
        b_x = tl.maximum(b_x, 0.0)
    elif MAP == "leaky_relu":
        b_x = tl.where(b_x > 0, b_x, 0.01 * b_x)
    elif MAP == "exp":
        b_x = tl.exp(0.2 * b_x) - 1.0
    return b_x


@triton.jit
def feature_map_backward(b_x, b_grad, MAP: tl.constexpr):
    """φ'(x)·grad"""
    if MAP == "relu":
        b_grad = tl.where(b_x > 0, b_grad, 0.0)
    elif MAP == "leaky_relu":
        b_grad = tl.where(b_x > 0, b_grad, 0.01 * b_grad)
    elif MAP == "exp":
        b_grad = 0.2 * tl.exp(0.2 * b_x) * b_grad
    return b_grad


@triton.jit
def locate(p_seq, i_b, N, H, W, PACKED: tl.constexpr):
    """First token, tokens, height and width of a sample: of row i_b of (B, 4) integers if packed, else as given."""
    start = tl.cast(0, tl.int64)
    if PACKED:
        start = tl.cast(tl.load(p_seq + 4 * i_b), tl.int64)
        N = tl.cast(tl.load(p_seq + 4 * i_b + 1), tl.int32)
        H = tl.cast(tl.load(p_seq + 4 * i_b + 2), tl.int32)
        W = tl.cast(tl.load(p_seq + 4 * i_b + 3), tl.int32)
    return start, N, H, W


@triton.jit
def load_rows(p_x, stride, t, t_end, o_c, m_c, p_mask, BN: tl.constexpr, HAS_MASK: tl.constexpr):
    """Tokens t … t + BN − 1 below t_end: (BN, BC) with zeros beyond, and which of them are there, (BN,)"""
    o_n = tl.arange(0, BN)
    m_n = t + o_n < t_end
    if HAS_MASK:
        m_n = m_n & (tl.load(p_mask + t + o_n, mask=m_n, other=0) != 0)
    p = p_x + tl.cast(t, tl.int64) * stride + o_n[:, None] * stride + o_c[None, :]
    return tl.load(p, mask=m_n[:, None] & m_c[None, :], other=0.0), m_n


@triton.jit
def store_rows(p_x, b_x, stride, t, m_n, o_c, m_c, BN: tl.constexpr):
    """(BN, BC) to tokens t … t + BN − 1, where m_n (BN,)"""
    p = p_x + tl.cast(t, tl.int64) * stride + tl.arange(0, BN)[:, None] * stride + o_c[None, :]
    tl.store(p, b_x.to(p_x.dtype.element_ty), mask=m_n[:, None] & m_c[None, :])


@triton.jit
def accumulate(
    p_k, p_v, p_mask, stride_k, stride_v, t_begin, t_end, o_c, m_c, b_k0, b_v0,
    MAP: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    CENTRE: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Σ k vᵀ (BC, BC), Σ k and Σ v (BC,) over tokens, k = φ(k) − b_k0 and v = v − b_v0"""
    b_kv = tl.zeros([BC, BC], tl.float32)
    # Column sums as products with ones: no reduction across threads inside the loop.
    b_ones = tl.full([16, BN], 1.0, DOT)
    b_k_sum = tl.zeros([16, BC], tl.float32)
    b_v_sum = tl.zeros([16, BC], tl.float32)
    for chunk in range(t_begin, t_end, CHUNK):
        b_chunk = tl.zeros([BC, BC], tl.float32)
        for t in range(chunk, tl.minimum(chunk + CHUNK, t_end), BN):
            b_k, m_n = load_rows(p_k, stride_k, t, t_end, o_c, m_c, p_mask, BN, HAS_MASK)
            b_v, _ = load_rows(p_v, stride_v, t, t_end, o_c, m_c, p_mask, BN, HAS_MASK)
            if MAP != "identity":
                b_k = feature_map(b_k.to(tl.float32), MAP)
            if CENTRE:
                b_k = tl.where(m_n[:, None], b_k - b_k0[None, :], 0.0)
                b_v = tl.where(m_n[:, None], b_v - b_v0[None, :], 0.0)
            b_k = b_k.to(DOT)
            b_v = b_v.to(DOT)
            b_chunk = tl.dot(tl.trans(b_k), b_v, b_chunk, input_precision=PRECISION)
            b_k_sum = tl.dot(b_ones, b_k, b_k_sum, input_precision=PRECISION)
            b_v_sum = tl.dot(b_ones, b_v, b_v_sum, input_precision=PRECISION)
        b_kv += b_chunk
    # Every row of a sum is the sum.
    return b_kv, tl.sum(b_k_sum, 0) / 16, tl.sum(b_v_sum, 0) / 16


@triton.jit
def same_head(o_r, m_r, o_c, m_c, D: tl.constexpr):
    """Whether two channels are of one head: (R, BC)"""
    return (o_r[:, None] // D == o_c[None, :] // D) & m_r[:, None] & m_c[None, :]


@triton.jit
def state_offsets(o_r, o_c, D: tl.constexpr):
    """Where (heads, d, d) keeps the product of two channels of a head, from the block's first head on: (R, BC)"""
    return o_r[:, None] * D + (o_c % D)[None, :]


@triton.jit
def sum_parts(p_part, o, m, parts, part_size, BP: tl.constexpr):
    """Σ over parts of what stands at offsets o (R, X), where m: (R, X)"""
    o_p = tl.arange(0, BP)
    b_sum = tl.zeros(o.shape, tl.float32)
    for p in range(0, parts, BP):
        offset = tl.cast(p + o_p, tl.int64)[:, None, None] * part_size + o[None, :, :]
        b_sum += tl.sum(tl.load(p_part + offset, mask=(p + o_p < parts)[:, None, None] & m[None, :, :], other=0.0), 0)
    return b_sum


@triton.jit
def load_taps(p_w, o_c, m_c, FLIP: tl.constexpr):
    """The nine taps of each channel, nine blocks (1, BC); reversed for the backward"""
    step = -1 if FLIP else 1
    p = p_w + o_c * 9 + (8 if FLIP else 0)
    w0 = tl.load(p, mask=m_c, other=0.0).to(tl.float32)[None, :]
    w1 = tl.load(p + step, mask=m_c, other=0.0).to(tl.float32)[None, :]
    w2 = tl.load(p + 2 * step, mask=m_c, other=0.0).to(tl.float32)[None, :]
    w3 = tl.load(p + 3 * step, mask=m_c, other=0.0).to(tl.float32)[None, :]
    w4 = tl.load(p + 4 * step, mask=m_c, other=0.0).to(tl.float32)[None, :]
    w5 = tl.load(p + 5 * step, mask=m_c, other=0.0).to(tl.float32)[None, :]
    w6 = tl.load(p + 6 * step, mask=m_c, other=0.0).to(tl.float32)[None, :]
    w7 = tl.load(p + 7 * step, mask=m_c, other=0.0).to(tl.float32)[None, :]
    w8 = tl.load(p + 8 * step, mask=m_c, other=0.0).to(tl.float32)[None, :]
    return w0, w1, w2, w3, w4, w5, w6, w7, w8


@triton.jit
def load_map_row(p_x, stride, p_mask, y, x, H, W, prefix, o_c, m_c, BW: tl.constexpr, HAS_MASK: tl.constexpr):
    """Row y of the map from column x on, zeros outside the map: (BW, BC)"""
    o_x = tl.arange(0, BW)
    o_y = y + tl.zeros([BW], tl.int32)  # a block: the interpreter cannot combine a block's mask with a scalar's
    m_x = (x + o_x >= 0) & (x + o_x < W) & (o_y >= 0) & (o_y < H)
    t = prefix + y * W + x
    if HAS_MASK:
        m_x = m_x & (tl.load(p_mask + t + o_x, mask=m_x, other=0) != 0)
    p = p_x + tl.cast(t, tl.int64) * stride + o_x[:, None] * stride + o_c[None, :]
    return tl.load(p, mask=m_x[:, None] & m_c[None, :], other=0.0)


@triton.jit
def load_neighbours(p_x, stride, p_mask, y, x, H, W, prefix, o_c, m_c, BW: tl.constexpr, HAS_MASK: tl.constexpr):
    """Row y of the map seen from one column to the left, straight, and one to the right"""
    left = load_map_row(p_x, stride, p_mask, y, x - 1, H, W, prefix, o_c, m_c, BW, HAS_MASK)
    here = load_map_row(p_x, stride, p_mask, y, x, H, W, prefix, o_c, m_c, BW, HAS_MASK)
    right = load_map_row(p_x, stride, p_mask, y, x + 1, H, W, prefix, o_c, m_c, BW, HAS_MASK)
    return left, here, right


@triton.jit
def weigh(b_w0, b_w1, b_w2, left, here, right):
    """Three taps of a row: (BW, BC) float32"""
    return b_w0 * left.to(tl.float32) + b_w1 * here.to(tl.float32) + b_w2 * right.to(tl.float32)
