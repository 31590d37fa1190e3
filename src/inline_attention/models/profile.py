"""The cost of a model by stage: parameters, multiply-accumulates and activation memory, counted from shapes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from inline_attention.layers import Attention, LocalWeight
from inline_attention.ops import Grid
from inline_attention.ops.local import TAPS

from .base import VisionModel, input_shape


class StageCost(NamedTuple):
    """The cost of one stage for one image."""

    name: str
    shape: tuple[int, ...]  # of the output for one image, without the batch
    params: int
    macs: int  # of one image
    activation_bytes: int  # kept for the backward of one image, in the model's dtype


def profile(model: nn.Module, *, img_size: Grid | None = None) -> list[StageCost]:
    """The cost of each stage for one image. A model of timm is one stage.

    The model must be on the meta device (build it under `torch.device("meta")`), where only shapes are computed.

    MACs are half of what `torch.utils.flop_counter` counts for matrix products and convolutions. The 3×3 local residual
    is elementwise, so that counter ignores it; nine MACs per channel and position are added for it. Norms, softmax
    and activations are not counted.

    Activation memory is what autograd keeps for the backward pass without checkpointing, parameters excluded. Softmax
    attention keeps no N×N weights, because PyTorch's scaled_dot_product_attention does not on any device.
    """
    if next(model.parameters()).device.type != "meta":
        raise ValueError('profile counts on the meta device: build the model under `with torch.device("meta"):`')
    channels, *size = input_shape(model)
    x = torch.empty(1, channels, *(img_size or size), device="meta")
    costs = []
    for name, modules, run in model.parts() if isinstance(model, VisionModel) else [("model", [model], model)]:
        with _counted(model) as counts:
            x = run(x)
        parameters = {p for m in modules for p in ([m] if isinstance(m, nn.Parameter) else m.parameters())}
        costs.append(
            StageCost(
                name, tuple(x.shape[1:]), sum(p.numel() for p in parameters), counts.macs, counts.activation_bytes
            )
        )
    return costs


def count_macs(model: VisionModel, *, img_size: Grid | None = None) -> int:
    """Multiply-accumulates of one image; see `profile`."""
    return sum(cost.macs for cost in profile(model, img_size=img_size))


def count_module_macs(module: nn.Module, *inputs: Any) -> int:
    """Multiply-accumulates of one call of a module that contains models of this library, counted as in `profile`.

    Module and inputs must be on the meta device.
    """
    with torch.no_grad(), _counted(module) as counts:
        module(*inputs)
    return counts.macs


_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
# torch 2.9 has no formula for it.
_FORMULAS = {_ON_CPU: lambda q, k, v, *args, **kwargs: sdpa_flop_count(q, k, v)}


class _FusedSoftmax(TorchFunctionMode):
    """Runs softmax attention as devices do. On the meta device PyTorch decomposes it and would keep the N×N weights."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        options = {key: kwargs[key] for key in ("attn_mask", "scale") if kwargs.get(key) is not None}
        if "attn_mask" in options:  # Swin's mask is learned, but this operator has no gradient for it
            options["attn_mask"] = options["attn_mask"].detach()
        return _ON_CPU(*args[:3], **options)[0]


class _Counts:
    macs: int = 0
    activation_bytes: int = 0


@contextmanager
def _counted(model: nn.Module) -> Iterator[_Counts]:
    counts = _Counts()
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, Any] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage  # keep it alive, so that no later storage reuses its address
        return x

    def count_local(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        x, (height, width) = args[:2]
        if isinstance(module, Attention) and (module.local is not None or module.position is not None):
            counts.macs += TAPS * x.shape[0] * height * width * x.shape[2]

    def count_linearized(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        counts.macs += TAPS * output.numel()

    hooks = [m.register_forward_hook(count_local) for m in model.modules() if isinstance(m, Attention)]
    others = [m for m in model.modules() if not isinstance(m, Attention)]  # attentions of timm with the residual
    with_residual = [m for m in others if isinstance(getattr(m, "local", None), LocalWeight)]
    hooks += [m.register_forward_hook(count_linearized) for m in with_residual]
    try:
        with (
            _FusedSoftmax(),
            FlopCounterMode(display=False, custom_mapping=_FORMULAS) as flops,
            torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
        ):
            yield counts
    finally:
        for hook in hooks:
            hook.remove()
    counts.macs += flops.get_total_flops() // 2
    counts.activation_bytes = sum(storage.nbytes() for storage in kept.values())
