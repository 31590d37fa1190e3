"""Triton kernels of InLine attention; `ops.fused` launches them."""
