"""Linear attention as Triton kernels: how they are launched, their gradients and their cost.

q, k and v arrive as `projections`: tensors (B, N, m, heads, d) that hold m of them next to each other. A qkv projection
is one tensor of three, q and kv are tensors of one and two. The kernels read q, k and v, and write their gradients, in
the layout of these tensors. Values may have another number of channels than queries and keys.
"""

from .entry import attention, why_not, why_not_widths

__all__ = ["attention", "why_not", "why_not_widths"]
