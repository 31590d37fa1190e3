"""The Triton kernels; `ops.fused`, `ops.fused_local_weight` and `ops.fused_mlp` launch them."""
