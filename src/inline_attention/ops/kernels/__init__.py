"""The Triton kernels; `ops.fused` and `ops.fused_local_weight` launch them."""
