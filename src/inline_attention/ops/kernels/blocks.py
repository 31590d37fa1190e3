"""Functions that the kernels share.

A program works on one sample and one block of heads: BK channels of queries and keys, BV channels of values. Products
between different heads of a block are computed with the rest and then masked: the kernels are bound by memory, not by
tensor cores. Masked products are zeros that take part in later products, so an infinity or NaN in one head becomes NaN
in all heads of its block. Heads of up to 16 channels share a block.

Vocabulary: p_ pointer, b_ block value, o_ offset, m_ mask, i_ program index. Shapes in comments are of blocks.
- tokens: a sample's rows, `stride` elements apart, with contiguous channels; prefix tokens first, then the map.
- p_mask is the mask of keys and values, p_mask_q that of queries; HAS_MASK and MASK_Q say whether they exist.
- pivot: the mean of a sample's first tokens. It is subtracted from float32 inputs before their covariance is summed,
  because float32 loses the spread next to a large mean. Products of half-precision numbers leave enough digits, but
  tensor cores round sums towards zero: each sums a short part of the tokens, and the parts are added in float32. A
  pivot is computed where it is used and never stored, because its last digits depend on the block's layout. Weighted
  keys are centred in every precision, because their products with the weights are rounded. Their sum is near zero
  then, so a large mean of the values cancels: in half precision the pivot of values is zero.
- state: covariance S, mean of φ(k), mean of v, as in `reference.State`. φ(x) − φ(0) takes the place of φ(x), which
  leaves S unchanged.
- NORM: the normalization. out = g(z)·φ(q)·S + f(z)·v̄ with z = s·φ(q)·k̄; g and f are 1 for "subtract".
- shares: weights of the tokens with a sum of one, (heads, N) for a sample, if WEIGHTED. Otherwise all are 1/n.
- OFFSET: a row that is subtracted from all queries exists. ANCHORED: the shares are the softmax of its scores. They are
  never stored: the forward pass computes a share from the key, relative to the largest score so far, and the backward
  from the score.
"""

import triton
import triton.language as tl

from .. import gelu as gelu_of_torch
from ..feature_maps import K_LOG2E, add_map_at_zero, feature_map

# The score of an absent token, the same number in float32 and float64. Not −∞, because the softmax of a sample without
# tokens would be NaN.
LEAST = tl.constexpr(-(2.0**127))

# Arguments that change with the image size. A kernel is compiled once for all their values.
SIZES = ("Nq", "N", "H", "W", "prefix", "columns", "rows", "parts")


@triton.jit
def locate(p_seq, i_b, N, H, W, PACKED: tl.constexpr):
    """First token, tokens, height and width of a sample. If packed, they are row i_b of (B, 4) integers."""
    start = tl.cast(0, tl.int64)
    if PACKED:
        start = tl.cast(tl.load(p_seq + 4 * i_b), tl.int64)
        N = tl.cast(tl.load(p_seq + 4 * i_b + 1), tl.int32)
        H = tl.cast(tl.load(p_seq + 4 * i_b + 2), tl.int32)
        W = tl.cast(tl.load(p_seq + 4 * i_b + 3), tl.int32)
    return start, N, H, W


@triton.jit
def widened(i, WIDE: tl.constexpr):
    """An index of 64 bits, if WIDE. Tokens that are counted from it have as many, and so do their offsets."""
    if WIDE:
        i = tl.cast(i, tl.int64)
    return i


@triton.jit
def tokens_of_part(i_p, parts, N, BN: tl.constexpr):
    """First token of a part, and the one after its last. Parts are of whole steps; the last ones may have no token."""
    length = tl.cdiv(tl.cdiv(N, parts), BN) * BN
    t_begin = tl.minimum(i_p * length, N)
    return t_begin, tl.minimum(t_begin + length, N)


@triton.jit
def channels(h, heads, D: tl.constexpr, HEADS: tl.constexpr, BC: tl.constexpr):
    """Offsets of a block's channels from head h on, and which of them exist: (BC,)"""
    o_c = tl.arange(0, BC)
    return o_c, (o_c < HEADS * D) & (h * D + o_c < heads * D)


@triton.jit
def load_offset(p_offset, i_b, h, heads, o_k, m_k, D: tl.constexpr, OFFSET: tl.constexpr):
    """What is subtracted from the queries of a sample, (BK,) float32; a zero if nothing is"""
    b_offset = 0.0
    if OFFSET:
        b_offset = tl.load(p_offset + (i_b * heads + h) * D + o_k, mask=m_k, other=0.0).to(tl.float32)
    return b_offset


@triton.jit
def load_rows(p_x, stride, t, o_t, m_t, o_c, m_c):
    """Tokens t + o_t where m_t, zeros elsewhere: (BN, BC). t has 64 bits if t·stride needs them; o_t is small."""
    p = p_x + t * stride + (o_t[:, None] * stride + o_c[None, :])
    return tl.load(p, mask=m_t[:, None] & m_c[None, :], other=0.0)


@triton.jit
def load_columns(p_x, stride, t, o_t, m_t, o_c, m_c):
    """`load_rows` transposed: (BC, BN). A product that sums over tokens takes its left factor so."""
    p = p_x + t * stride + (o_t[None, :] * stride + o_c[:, None])
    return tl.load(p, mask=m_t[None, :] & m_c[:, None], other=0.0)


@triton.jit
def store_rows(p_x, b_x, stride, t, o_t, m_t, o_c, m_c):
    """(BN, BC) to tokens t + o_t where m_t"""
    p = p_x + t * stride + (o_t[:, None] * stride + o_c[None, :])
    tl.store(p, b_x.to(p_x.dtype.element_ty), mask=m_t[:, None] & m_c[None, :])


@triton.jit
def present(p_mask, t, o_t, m_t, HAS_MASK: tl.constexpr):
    """Which of the tokens t + o_t where m_t are present: (BN,)"""
    if HAS_MASK:
        m_t = m_t & (tl.load(p_mask + t + o_t, mask=m_t, other=0) != 0)
    return m_t


@triton.jit
def gradient_pointers(p_d0, p_d1, p_d2, CK, LAYOUT: tl.constexpr):
    """Where the gradients of q, k and v begin, in one, two or three tensors whose tokens hold them side by side.

    The kernels get whole tensors and not one view each for q, k and v, because torch.compile copies what a kernel
    writes through a view.
    """
    if LAYOUT == "qkv":
        return p_d0, p_d0 + CK, p_d0 + 2 * CK
    elif LAYOUT == "q,kv":
        return p_d0, p_d1, p_d1 + CK
    elif LAYOUT == "qk,v":
        return p_d0, p_d0 + CK, p_d1
    else:
        return p_d0, p_d1, p_d2


@triton.jit
def tile_index(WIDE: tl.constexpr):
    """The tile's index on axis 1 of the grid or, if WIDE, on axes 1 and 2. One axis holds 65,535 programs."""
    i_t = widened(tl.program_id(1), WIDE)
    if WIDE:
        i_t += tl.program_id(2) * tl.num_programs(1)
    return i_t


@triton.jit
def operand(b_x, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """b_x as a factor of a product in DOT. For tf32 it is rounded to nearest; tensor cores would cut digits off."""
    b_x = b_x.to(DOT)
    if (tl.float32 == DOT) and (PRECISION == "tf32"):
        b_rounded = ((b_x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        b_x = tl.where(b_x == b_x, b_rounded, b_x)
    return b_x


@triton.jit
def as_float32(b_x):
    """b_x in float32. bfloat16 is its upper half, and to move bits takes fewer instructions than to convert pairs."""
    if tl.bfloat16 == b_x.dtype:
        return (b_x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return b_x.to(tl.float32)


@triton.jit
def product_plus(b_x, b_y, b_base, PRECISION: tl.constexpr):
    """b_x·b_y + b_base; b_base has the product's shape or (1, BC).

    A plain `+` becomes a product that accumulates onto b_base, and loses the digits that a large base hides. In half
    precision the result has no room for them.
    """
    b_base = tl.broadcast_to(b_base, [b_x.shape[0], b_y.shape[1]])
    if PRECISION == "ieee":
        b_product = tl.dot(b_x, b_y, input_precision=PRECISION)
        return tl.fma(b_product, tl.full(b_product.shape, 1.0, tl.float32), b_base)
    else:
        return tl.dot(b_x, b_y, b_base, input_precision=PRECISION)


@triton.jit
def add_product(b_sum, b_x, b_y, PRECISION: tl.constexpr):
    """b_sum + b_x·b_y. A float32 product is summed by itself first: adding short sums rounds less than one long sum."""
    if PRECISION == "ieee":
        return product_plus(b_x, b_y, b_sum, PRECISION)
    else:
        return tl.dot(b_x, b_y, b_sum, input_precision=PRECISION)


GELU_TAIL = tl.constexpr(gelu_of_torch.GELU_TAIL)
GELU_END = tl.constexpr(gelu_of_torch.GELU_END)


@triton.jit
def gelu_tail(b_x):
    """Φ(−|x|), by a polynomial"""
    b_y = tl.minimum(tl.abs(b_x), GELU_END)
    b_log = GELU_TAIL[6] * b_y + GELU_TAIL[5]
    for i in tl.static_range(5):
        b_log = b_log * b_y + GELU_TAIL[4 - i]
    return tl.exp2(b_log)


@triton.jit
def gelu(b_x, PRECISION: tl.constexpr):
    """x·Φ(x), exact, of float32

    It is max(x, 0) − |x|·Φ(−|x|). In half precision Φ is the exponential of a polynomial, with a third of the
    instructions of `erf`. Its absolute error is that of `erf`; relative to a result near zero it is up to 5e-6.
    """
    if PRECISION == "ieee":
        return 0.5 * b_x * (1.0 + tl.erf(b_x * 0.7071067811865476))
    else:
        b_below = tl.minimum(tl.abs(b_x), GELU_END) * gelu_tail(b_x)
        return tl.maximum(b_x, 0.0, propagate_nan=tl.PropagateNan.ALL) - b_below


@triton.jit
def gelu_slope(b_x, PRECISION: tl.constexpr):
    """The derivative of `gelu`: Φ(x) + x·exp(−x²/2) / √(2π)"""
    if PRECISION == "ieee":
        b_phi = 0.5 * (1.0 + tl.erf(b_x * 0.7071067811865476))
    else:
        b_tail = gelu_tail(b_x)
        b_phi = tl.where(b_x < 0, b_tail, 1.0 - b_tail)
    return b_phi + b_x * tl.exp2(b_x * b_x * -0.7213475204444817) * 0.3989422804014327


@triton.jit
def load_queries(
    p_q, stride, t, o_t, m_t, o_k, m_k, b_offset, MAP: tl.constexpr, PRECISION: tl.constexpr, OFFSET: tl.constexpr
):  # fmt: skip
    """Queries t + o_t where m_t, zeros elsewhere: (BN, BK). They are less their offset (BK,), unless `offset_product`
    is subtracted later."""
    b_q = load_rows(p_q, stride, t, o_t, m_t, o_k, m_k)
    if OFFSET and (MAP != "identity" or PRECISION == "ieee"):
        b_q = tl.where(m_t[:, None], b_q.to(tl.float32) - b_offset[None, :], 0.0)
    return b_q


@triton.jit
def offset_product(b_s, b_offset, MAP: tl.constexpr, PRECISION: tl.constexpr, OFFSET: tl.constexpr):
    """The offset's product with S (BK, BV), which is subtracted from that of queries with their offset: (BV,)

    In half precision that spares a rounding of every query, and in float32 it would cost digits. Zero where queries
    are less their offset.
    """
    if OFFSET and (MAP == "identity" and PRECISION != "ieee"):
        return tl.sum(b_s.to(tl.float32) * b_offset[:, None], 0)
    else:
        return tl.zeros([b_s.shape[1]], tl.float32)


@triton.jit
def load_scalars(p_x, N, t, o_t, m_t, o_c, m_c, D: tl.constexpr, HEADS: tl.constexpr):
    """A number for each head and token, from (heads, N): (BN, 1) for one head, else (BN, BC), for each channel"""
    if HEADS == 1:
        return tl.load(p_x + t + o_t, mask=m_t, other=0.0)[:, None]
    else:
        p = p_x + (o_c // D)[None, :] * N + (t + o_t)[:, None]
        return tl.load(p, mask=m_t[:, None] & m_c[None, :], other=0.0)


@triton.jit
def store_scalars(p_x, b_x, N, t, o_t, m_t, o_c, m_c, D: tl.constexpr, HEADS: tl.constexpr):
    """Stores what `load_scalars` loads"""
    if HEADS == 1:
        tl.store(p_x + t + o_t, tl.sum(b_x, 1), mask=m_t)
    else:
        p = p_x + (o_c // D)[None, :] * N + (t + o_t)[:, None]
        tl.store(p, b_x, mask=m_t[:, None] & (m_c & (o_c % D == 0))[None, :])


@triton.jit
def load_of_heads(p_x, o_c, m_c, D: tl.constexpr, HEADS: tl.constexpr):
    """A number for each head, from (heads,): (1,) for one head, else (BC,), for each channel"""
    if HEADS == 1:
        return tl.load(p_x + tl.arange(0, 1))
    else:
        return tl.load(p_x + o_c // D, mask=m_c, other=0.0)


@triton.jit
def store_of_heads(p_x, b_x, stride, o_c, m_c, D: tl.constexpr, HEADS: tl.constexpr):
    """Stores what `load_of_heads` loads, `stride` apart"""
    if HEADS == 1:
        tl.store(p_x + tl.arange(0, 1), b_x)
    else:
        tl.store(p_x + o_c // D * stride, b_x, mask=m_c & (o_c % D == 0))


@triton.jit
def exp(b_x):
    """exp(x), zero where that would be subnormal. `tl.exp` adds three instructions for such results."""
    return tl.exp2(b_x * K_LOG2E)


@triton.jit
def load_shares(
    p_share, p_lse, N, t, o_t, m_t, o_c, m_c, D: tl.constexpr, HEADS: tl.constexpr, ANCHORED: tl.constexpr
):  # fmt: skip
    """The shares of tokens t + o_t where m_t, zeros elsewhere

    If ANCHORED, p_share holds scores, and p_lse the logarithm of the sum of their exponentials for each head. It has
    the digits that large scores lose.
    """
    b_share = load_scalars(p_share, N, t, o_t, m_t, o_c, m_c, D, HEADS)
    if ANCHORED:
        b_share = exp((b_share - load_of_heads(p_lse, o_c, m_c, D, HEADS)[None, :]).to(tl.float32))
        b_share = tl.where(m_t[:, None] & m_c[None, :] if HEADS > 1 else m_t[:, None], b_share, 0.0)
    return b_share


@triton.jit
def head_sums(b_x, o_x, o_y, DX: tl.constexpr, DY: tl.constexpr, HEADS: tl.constexpr):
    """Sums over the channels o_x of each head: (BN, 1) for one head, else (BN, BY), for each of the channels o_y"""
    if HEADS == 1:
        return tl.sum(b_x, 1)[:, None]
    else:
        b_sums = tl.zeros([b_x.shape[0], o_y.shape[0]], tl.float32)
        for h in tl.static_range(HEADS):
            b_sum = tl.sum(tl.where((o_x // DX == h)[None, :], b_x, 0.0), 1)
            b_sums = tl.where((o_y // DY == h)[None, :], b_sum[:, None], b_sums)
        return b_sums


@triton.jit
def products_with_row(
    b_x, b_row, o_x, o_y,
    DX: tl.constexpr, DY: tl.constexpr, HEADS: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`head_sums` of b_x times b_row, a row of the channels o_x: (BN, BX), (BX,)

    In half precision it is a product with eight equal columns, which every warp has to itself. That leaves the sums
    near the threads that hold other products; they would have to be moved there. The row in two parts keeps float32's
    digits.
    """
    if PRECISION == "ieee" or HEADS > 1:
        return head_sums(b_x.to(tl.float32) * b_row[None, :], o_x, o_y, DX, DY, HEADS)
    else:
        b_row = tl.broadcast_to(b_row[:, None], [b_row.shape[0], 8])
        b_high = operand(b_row, DOT, PRECISION)
        b_low = operand(b_row - b_high.to(tl.float32), DOT, PRECISION)
        b_x = operand(b_x, DOT, PRECISION)
        b_sums = add_product(tl.dot(b_x, b_low, input_precision=PRECISION), b_x, b_high, PRECISION)
        return tl.max(b_sums, 1)[:, None]


@triton.jit
def load_origin(p_k, p_mask, o_k, m_k, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr):
    """Where keys are measured from in their scores, (BK,): the first token's in float32, if it is present, else zero

    The softmax does not change. Scores of keys that are all far from zero would be large and lose digits, which matter
    in float32 alone. One row, unlike a mean, is the same to the last bit in every kernel.
    """
    b_origin = o_k * 0.0
    if PRECISION == "ieee":
        m_k = present(p_mask, 0, o_k * 0, m_k, HAS_MASK)
        b_origin = tl.load(p_k + o_k, mask=m_k, other=0.0).to(tl.float32)
    return b_origin


@triton.jit
def scores_of(b_k, b_anchor, b_origin, m_t, o_k, D: tl.constexpr, HEADS: tl.constexpr, PRECISION: tl.constexpr):
    """s·a·(k − origin) of keys where m_t, LEAST elsewhere: (BN, 1) for one head, else (BN, BK)

    b_anchor (BK,) holds s·a, b_origin is that of `load_origin`.
    """
    b_k = as_float32(b_k)
    if PRECISION == "ieee":
        b_k -= b_origin[None, :]
    b_score = head_sums(b_k * b_anchor[None, :], o_k, o_k, D, D, HEADS)
    return tl.where(m_t[:, None], b_score, LEAST)


@triton.jit
def normalizers(
    b_q, b_k_mean, o_k, o_v,
    MAP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HEADS: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """z = φ(q)·b_k_mean of each head, from φ(q) − φ(0), as `head_sums` returns it"""
    if PRECISION == "ieee" or HEADS > 1:
        b_q = add_map_at_zero(b_q.to(tl.float32), 1.0, MAP)
        return products_with_row(b_q, b_k_mean, o_k, o_v, DK, DV, HEADS, DOT, PRECISION)
    else:
        b_z = products_with_row(b_q, b_k_mean, o_k, o_v, DK, DV, HEADS, DOT, PRECISION)
        return add_map_at_zero(b_z, tl.sum(b_k_mean, 0), MAP)


@triton.jit
def inverse(b_z, PRECISION: tl.constexpr):
    """1/z, and zero for z = 0"""
    # `/` is faster, and accurate to two units in the last place.
    b_inverse = tl.div_rn(1.0, b_z) if PRECISION == "ieee" else 1.0 / b_z
    return tl.where(b_z == 0.0, 0.0, b_inverse)


@triton.jit
def factors(b_z, eps, NORM: tl.constexpr, PRECISION: tl.constexpr):
    """g(z), f(z), and g'(z) with its sign changed. f'(z) is eps times the last."""
    if NORM == "divide":
        b_g = inverse(b_z + eps, PRECISION)
        return b_g, b_z * b_g, b_g * b_g
    else:
        tl.static_assert(NORM == "magnitude", "this normalization has no branch in the kernels")
        b_inverse = inverse(b_z, PRECISION)
        return 1.0 + b_inverse, 1.0, b_inverse * b_inverse


@triton.jit
def accumulate(
    p_k, p_v, p_mask, stride_k, stride_v, t_begin, t_end, o_k, m_k, o_v, m_v, b_offset, b_k0, b_v0,
    MAP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr, CENTRE: tl.constexpr, HAS_MASK: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Sums over tokens: Σ (φ(k) − b_k0)(v − b_v0)ᵀ (BK, BV); Σ φ(k), Σ v, Σ (φ(k) − b_k0), Σ (v − b_v0)"""
    o_t = tl.arange(0, BN)
    b_kv = tl.zeros([BK, BV], tl.float32)
    # Column sums are products with ones, which need no reduction across threads inside the loop. Keys stand left and
    # values right, as in the product of both. On the other side φ would be computed a second time.
    b_ones = tl.full([16, BN], 1.0, DOT)
    b_ones_k = tl.full([BN, 16], 1.0, DOT)
    b_k_sum = tl.zeros([BK, 16], tl.float32)
    b_v_sum = tl.zeros([16, BV], tl.float32)
    b_dk_sum = tl.zeros([BK, 16], tl.float32)
    b_dv_sum = tl.zeros([16, BV], tl.float32)
    for t in range(t_begin, t_end, BN):
        m_t = present(p_mask, t, o_t, t + o_t < t_end, HAS_MASK)
        b_v = operand(load_rows(p_v, stride_v, t, o_t, m_t, o_v, m_v), DOT, PRECISION)
        b_k = load_columns(p_k, stride_k, t, o_t, m_t, o_k, m_k)
        if OFFSET and (MAP != "identity" or PRECISION == "ieee"):
            b_k = tl.where(m_t[None, :], b_k.to(tl.float32) - b_offset[:, None], 0.0)
        if MAP != "identity":
            b_k = feature_map(as_float32(b_k), MAP)
        b_k = operand(b_k, DOT, PRECISION)
        b_k_sum = add_product(b_k_sum, b_k, b_ones_k, PRECISION)
        b_v_sum = add_product(b_v_sum, b_ones, b_v, PRECISION)
        if CENTRE:
            b_k = tl.where(m_t[None, :], b_k - b_k0[:, None], 0.0)
            b_v = tl.where(m_t[:, None], b_v - b_v0[None, :], 0.0)
            b_dk_sum = add_product(b_dk_sum, b_k, b_ones_k, PRECISION)
            b_dv_sum = add_product(b_dv_sum, b_ones, b_v, PRECISION)
        b_kv = add_product(b_kv, b_k, b_v, PRECISION)
    # Every row, or column, holds the same sum.
    b_k_sum = tl.max(b_k_sum, 1)
    b_v_sum = tl.max(b_v_sum, 0)
    if CENTRE:
        return b_kv, b_k_sum, b_v_sum, tl.max(b_dk_sum, 1), tl.max(b_dv_sum, 0)
    else:
        return b_kv, b_k_sum, b_v_sum, b_k_sum, b_v_sum


@triton.jit
def accumulate_weighted(
    p_k, p_v, p_mask, p_share, stride_k, stride_v, t_begin, t_end, N, o_k, m_k, o_v, m_v,
    b_anchor, b_origin, b_k0, b_v0,
    MAP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HEADS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, HAS_MASK: tl.constexpr, ANCHORED: tl.constexpr,
    SAVE: tl.constexpr,
):  # fmt: skip
    """`accumulate` where every term is multiplied by the token's share, and log Σ exp of the scores

    If ANCHORED, the shares are the softmax of the scores of these tokens alone. Keys and values are read once: the sums
    are relative to the largest score so far, and shrink when a larger one comes. log Σ exp is in float64 for float32
    inputs, as `load_of_heads` loads it, and a zero without an anchor. If SAVE, the scores are stored to p_share.

    In half precision b_v0 is zero, and the pivots are returned in the place of Σ φ(k) and Σ v. Shares have a sum of
    one, so the means are the pivots plus the other two sums. In float32 that would lose digits of means that are much
    smaller than the pivots.
    """
    o_t = tl.arange(0, BN)
    # The weighted sum of half-precision values is a product with the shares, because values times shares would be
    # rounded. Its rows are equal for one head, else there is one for each channel of keys.
    ROWS: tl.constexpr = BK if HEADS > 1 and PRECISION != "ieee" else 16
    SCORES: tl.constexpr = 1 if HEADS == 1 else BK
    b_ones = tl.full([16, BN], 1.0, DOT)
    b_ones_k = tl.full([BN, 16], 1.0, DOT)
    b_kv = tl.zeros([BK, BV], tl.float32)
    b_k_sum = tl.zeros([BK, 16], tl.float32)
    b_v_sum = tl.zeros([16, BV], tl.float32)
    b_dk_sum = tl.zeros([BK, 16], tl.float32)
    b_dv_sum = tl.zeros([ROWS, BV], tl.float32)
    b_top = tl.full([1, SCORES], LEAST, tl.float32)
    b_total = tl.zeros([BN, SCORES], tl.float32)
    for t in range(t_begin, t_end, BN):
        m_t = t + o_t < t_end
        m_here = present(p_mask, t, o_t, m_t, HAS_MASK)
        b_v = operand(load_rows(p_v, stride_v, t, o_t, m_here, o_v, m_v), DOT, PRECISION)
        b_k = load_rows(p_k, stride_k, t, o_t, m_here, o_k, m_k)
        if ANCHORED:
            b_score = scores_of(b_k, b_anchor, b_origin, m_here, o_k, DK, HEADS, PRECISION)
            if SAVE:
                store_scalars(p_share, b_score, N, t, o_t, m_t, o_k, m_k, DK, HEADS)
            b_before = b_top
            b_top = tl.maximum(b_top, tl.max(b_score, 0, keep_dims=True))
            b_shrink = exp(b_before - b_top)
            b_share = exp(b_score - b_top)
            b_total = b_total * b_shrink + b_share
            b_kv, b_k_sum, b_v_sum, b_dk_sum, b_dv_sum = scaled(
                b_kv, b_k_sum, b_v_sum, b_dk_sum, b_dv_sum, b_shrink, o_k, o_v, DK, DV, HEADS, PRECISION
            )
        else:
            b_share = load_scalars(p_share, N, t, o_t, m_here, o_k, m_k, DK, HEADS)
        if MAP != "identity":
            b_k = feature_map(as_float32(b_k), MAP)
        if PRECISION == "ieee":
            b_share_v = by_value(b_share, o_k, o_v, DK, DV, HEADS)
            b_k_sum = add_product(b_k_sum, tl.trans(b_k * b_share), b_ones_k, PRECISION)
            b_v_sum = add_product(b_v_sum, b_ones, b_v * b_share_v, PRECISION)
            b_v -= b_v0[None, :]
            b_dv_sum = add_product(b_dv_sum, b_ones, b_v * b_share_v, PRECISION)
        else:
            # A share is a rounded factor and the rest. All factors stand before the products, because threads wait
            # for each other in between.
            b_shares = tl.trans(tl.broadcast_to(b_share, [BN, ROWS]))
            b_factor = operand(b_shares, DOT, PRECISION)
            b_rest = operand(b_shares - b_factor.to(tl.float32), DOT, PRECISION)
        b_k = tl.trans(operand((as_float32(b_k) - b_k0[None, :]) * b_share, DOT, PRECISION))
        b_dk_sum = add_product(b_dk_sum, b_k, b_ones_k, PRECISION)
        if PRECISION != "ieee":
            b_dv_sum = add_product(b_dv_sum, b_factor, b_v, PRECISION)
            b_dv_sum = add_product(b_dv_sum, b_rest, b_v, PRECISION)
        b_kv = add_product(b_kv, b_k, b_v, PRECISION)
    b_lse = 0.0
    if ANCHORED:
        LSE: tl.constexpr = tl.float64 if PRECISION == "ieee" else tl.float32
        b_total = tl.sum(b_total, 0, keep_dims=True)
        b_total = tl.where(b_total == 0.0, 1.0, b_total)  # a part without tokens
        b_lse = tl.sum(b_top.to(LSE) + tl.log(b_total).to(LSE), 0)
        b_kv, b_k_sum, b_v_sum, b_dk_sum, b_dv_sum = scaled(
            b_kv, b_k_sum, b_v_sum, b_dk_sum, b_dv_sum, tl.div_rn(1.0, b_total), o_k, o_v, DK, DV, HEADS, PRECISION
        )
    b_dk_sum = tl.max(b_dk_sum, 1)
    if PRECISION == "ieee":
        return b_kv, tl.max(b_k_sum, 1), tl.max(b_v_sum, 0), b_dk_sum, tl.max(b_dv_sum, 0), b_lse
    elif HEADS > 1:  # one row of each head
        b_dv_sum = tl.where(o_k[:, None] == (o_v // DV * DK)[None, :], b_dv_sum, 0.0)
        return b_kv, b_k0, b_v0, b_dk_sum, tl.sum(b_dv_sum, 0), b_lse
    else:
        return b_kv, b_k0, b_v0, b_dk_sum, tl.max(b_dv_sum, 0), b_lse


@triton.jit
def by_value(b_x, o_k, o_v, DK: tl.constexpr, DV: tl.constexpr, HEADS: tl.constexpr):
    """A number for each channel of keys, equal in a head, for each channel of values: (R, BK) → (R, BV)"""
    if HEADS > 1:
        b_x = head_sums(tl.where((o_k % DK == 0)[None, :], b_x, 0.0), o_k, o_v, DK, DV, HEADS)
    return b_x


@triton.jit
def scaled(
    b_kv, b_k_sum, b_v_sum, b_dk_sum, b_dv_sum, b_x, o_k, o_v,
    DK: tl.constexpr, DV: tl.constexpr, HEADS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sums of `accumulate_weighted` times a number for each head, (1, 1) or (1, BK)"""
    b_column = tl.trans(b_x)
    if PRECISION == "ieee":
        b_row = by_value(b_x, o_k, o_v, DK, DV, HEADS)
        return b_kv * b_column, b_k_sum * b_column, b_v_sum * b_row, b_dk_sum * b_column, b_dv_sum * b_row
    else:  # the other two are not computed
        return b_kv * b_column, b_k_sum, b_v_sum, b_dk_sum * b_column, b_dv_sum * b_column


@triton.jit
def covariance(b_kv, b_dk_sum, b_dv_sum, count, scale):
    """S from its sums: b_dk_sum (R, 1), b_dv_sum (1, X)"""
    # One division, because `/` is accurate to two units in the last place only, and an exact one takes ten times the
    # instructions of a product. torch.compile passes the scale in double precision.
    inverse_count = tl.div_rn(1.0, count)
    b_s = b_kv - b_dk_sum * (b_dv_sum * inverse_count)
    return b_s * (inverse_count * tl.cast(scale, tl.float32))


@triton.jit
def tokens_of(p_count, i_b, N, HAS_MASK: tl.constexpr):
    """Tokens present in a sample"""
    count = tl.cast(N, tl.float32)
    if HAS_MASK:
        count = tl.load(p_count + i_b)
    return count


@triton.jit
def divisor_of(count, WEIGHTED: tl.constexpr):
    """What sums over tokens are divided by. Shares have a sum of one."""
    if WEIGHTED:
        count = count * 0.0 + 1.0
    return count


@triton.jit
def full_mean(b_k_mean, m_k, MAP: tl.constexpr):
    """k̄ from the mean of φ(k) − φ(0), zeros beyond the channels"""
    return tl.where(m_k, add_map_at_zero(b_k_mean, 1.0, MAP), 0.0)


@triton.jit
def same_head(o_r, m_r, o_c, m_c, DR: tl.constexpr, DC: tl.constexpr):
    """Whether channels of keys and of values belong to one head: (R, BV)"""
    return (o_r[:, None] // DR == o_c[None, :] // DC) & m_r[:, None] & m_c[None, :]


@triton.jit
def state_offsets(o_r, o_c, DV: tl.constexpr):
    """Offsets of pairs of channels of one head in (heads, d, e), from the block's first head on: (R, BV)"""
    return o_r[:, None] * DV + (o_c % DV)[None, :]


@triton.jit
def head_of(o_c, h, heads, D: tl.constexpr, HEADS: tl.constexpr):
    """The head of each channel, counted from the block's first: (BC,), or (1,) for one head"""
    if HEADS == 1:
        return tl.arange(0, 1)
    else:
        return tl.minimum(o_c // D, tl.minimum(heads - h, HEADS) - 1)


@triton.jit
def load_logs(p_log, o_h, i, parts, BP: tl.constexpr):
    """log Σ exp of parts i … i + BP − 1, LEAST beyond the last, from (heads, parts): heads o_h (R, X) → (BP, R, X)"""
    o_p = (i + tl.arange(0, BP))[:, None, None]
    return tl.load(p_log + o_h[None, :, :] * parts + o_p, mask=o_p < parts, other=LEAST)


@triton.jit
def log_of_parts(p_log, o_h, parts, BP: tl.constexpr, STEPS: tl.constexpr):
    """log Σ exp over all parts, in the type of the parts: heads o_h (R, X) → (R, X)"""
    b_log = load_logs(p_log, o_h, 0, parts, BP)
    b_top = tl.max(b_log, 0)
    b_total = tl.sum(exp(b_log - b_top[None, :, :]), 0)
    if STEPS > 1:
        for i in range(BP, BP * STEPS, BP):
            b_log = load_logs(p_log, o_h, i, parts, BP)
            b_before = b_top
            b_top = tl.maximum(b_top, tl.max(b_log, 0))
            b_total = b_total * exp(b_before - b_top) + tl.sum(exp(b_log - b_top[None, :, :]), 0)
    return b_top + tl.log(b_total)


@triton.jit
def load_parts(p_part, o, m, i, parts, part_size, BP: tl.constexpr, p_log, o_h, b_log, ANCHORED: tl.constexpr):
    """The sum of parts i … i + BP − 1 for `sum_parts`"""
    o_p = (i + tl.arange(0, BP))[:, None, None]
    p = p_part + tl.cast(o_p, tl.int64) * part_size + o[None, :, :]
    b_x = tl.load(p, mask=(o_p < parts) & m[None, :, :], other=0.0)
    if ANCHORED:
        b_x *= exp((load_logs(p_log, o_h, i, parts, BP) - b_log[None, :, :]).to(tl.float32))
    return tl.sum(b_x, 0)


@triton.jit
def sum_parts(
    p_part, o, m, parts, part_size, BP: tl.constexpr, STEPS: tl.constexpr,
    p_log=None, o_h=None, b_log=None, ANCHORED: tl.constexpr = False,
):  # fmt: skip
    """The sum over up to BP·STEPS parts of the values at offsets o (R, X) where m: (R, X)

    If ANCHORED, a part has the share exp(log − b_log) of heads o_h, (R, 1) or (1, X), with the logarithms of
    `load_logs` and `log_of_parts`.
    """
    b_sum = load_parts(p_part, o, m, 0, parts, part_size, BP, p_log, o_h, b_log, ANCHORED)
    if STEPS > 1:
        for i in range(BP, BP * STEPS, BP):
            b_sum += load_parts(p_part, o, m, i, parts, part_size, BP, p_log, o_h, b_log, ANCHORED)
    return b_sum
