"""The linear attention of SANA in diffusers, on this package's operation.

from inline_attention.integrations.diffusers import use_fused_attention

pipe = SanaPipeline.from_pretrained(…)
use_fused_attention(pipe.transformer)
"""

from typing import Any

import torch
from diffusers.models.attention_processor import Attention, SanaLinearAttnProcessor2_0
from torch import Tensor, nn

from inline_attention.ops import Backend, linear_attention_projected

# This factor cancels in the quotient, and turns the operation's 1e-6 into 1e-15. A power of two is exact.
MAGNIFICATION = 2.0**30


class SanaLinearAttnProcessor:
    """Replaces diffusers' SanaLinearAttnProcessor2_0: ReLU linear attention, fused where the kernels run.

    Two things differ. diffusers adds 1e-15 to the sum that it divides by, and this class 2^-30·1e-6 = 0.93e-15.
    diffusers computes in float32, and this class in the model's own dtype with sums in float32. The range of float16 is
    too small for the factor, so float16 becomes float32.
    """

    def __init__(self, backend: Backend = "auto") -> None:
        self.backend = backend

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        q, k, v = attn.to_q(hidden_states), attn.to_k(source), attn.to_v(source)
        q = q if attn.norm_q is None else attn.norm_q(q)
        k = k if attn.norm_k is None else attn.norm_k(k)
        dtype = torch.float32 if q.dtype == torch.float16 else q.dtype
        rows = (x.to(dtype).unflatten(-1, (1, attn.heads, -1)) for x in (MAGNIFICATION * q.to(dtype), k, v))
        # The operation rejects a mask over pairs. diffusers ignores every mask here.
        out = linear_attention_projected(*rows, token_mask=attention_mask, backend=self.backend)
        out = attn.to_out[1](attn.to_out[0](out.flatten(2).to(hidden_states.dtype)))
        return out.clip(-65504, 65504) if hidden_states.dtype == torch.float16 else out


def use_fused_attention(model: nn.Module, *, backend: Backend = "auto") -> int:
    """Replaces the processor of every linear attention of a SanaTransformer2DModel. Returns how many there are."""
    layers = [
        module
        for module in model.modules()
        if isinstance(module, Attention) and isinstance(module.processor, SanaLinearAttnProcessor2_0)
    ]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no SanaLinearAttnProcessor2_0; expected a SanaTransformer2DModel")
    processor: Any = SanaLinearAttnProcessor(backend)  # diffusers calls any callable, but annotates its own classes
    for module in layers:
        module.set_processor(processor)
    return len(layers)
