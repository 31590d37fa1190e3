"""Exact GELU, x·Φ(x), without the error function, which takes most of a compiled kernel's instructions.

The Triton kernels compute the same (`kernels/blocks.py`). It is made for half precision: the error is up to 5e-7, and
that of the derivative up to 3e-6.
"""

import torch
from torch import Tensor

# log₂ Φ(−y) as a polynomial, lowest power first. Where y·Φ(−y) matters, up to GELU_END, its exponential is exact to
# float32: the largest error of y·Φ(−y) is 5e-8.
GELU_TAIL = (
    -0.999993085861206,
    -1.1512017250061035,
    -0.4587709903717041,
    -0.05341210216283798,
    0.008080714382231236,
    -0.0007692191866226494,
    3.309276144136675e-05,
)
GELU_END = 6.5


def gelu(x: Tensor) -> Tensor:
    """max(x, 0) − |x|·Φ(−|x|). Compiled, it is one kernel with half the instructions of `F.gelu`; uncompiled, many."""
    wide = x.float()
    below = wide < 0
    # `abs` and `relu` have no slope at zero, where GELU's is 1/2.
    y = torch.where(below, -wide, wide).clamp(max=GELU_END)
    log = GELU_TAIL[-1] * y + GELU_TAIL[-2]
    for coefficient in GELU_TAIL[-3::-1]:
        log = log * y + coefficient
    return (torch.where(below, 0.0, wide) - y * torch.exp2(log)).to(x.dtype)
