"""What a model costs: parameters, multiply-accumulates and activation memory by stage, counted without computing."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from inline_attention.layers import Attention
from inline_attention.layers.local import TAPS

from ._base import Grid, PyramidModel, VisionModel
from .deit import DeiT


class StageCost(NamedTuple):
    """What one stage costs, for one image."""

    name: str
    shape: tuple[int, ...]  # of the output for one image, without the batch
    params: int
    macs: int  # of one image
    activation_bytes: int  # kept for the backward of one image, in the model's dtype


def profile(model: VisionModel, *, img_size: Grid | None = None) -> list[StageCost]:
    """The cost of each stage for one image.

    The model must be on the meta device (build it under `torch.device("meta")`): shapes alone are run. MACs are half of
    what `torch.utils.flop_counter` counts, matrix products and convolutions, plus nine per channel and position for the
    3×3 local residual, which is elementwise and so unseen by that counter. Norms, softmax and activations count
    nothing. Activation memory is what autograd keeps of plain PyTorch, parameters apart, without checkpointing. Softmax
    attention keeps no N×N weights, because PyTorch's scaled_dot_product_attention does not, except for windows with a
    learned bias.
    """
    if next(model.parameters()).device.type != "meta":
        raise ValueError('profile counts on the meta device: build the model under `with torch.device("meta"):`')
    height, width = img_size or model.img_size
    x = torch.empty(1, model.in_chans, height, width, device="meta")
    costs = []
    for name, modules, run in _parts(model):
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
    """Multiply-accumulates of one call of any module that holds models of this library, counted as in `profile`.

    Module and inputs must be on the meta device.
    """
    with torch.no_grad(), _counted(module) as counts:
        module(*inputs)
    return counts.macs


Part = tuple[str, list[nn.Module | nn.Parameter], Callable[[Tensor], Tensor]]


def _parts(model: VisionModel) -> Iterator[Part]:
    """A model as steps, each with the modules that it runs."""
    if isinstance(model, PyramidModel):
        yield "stem", [model.patch_embed], model.patch_embed
        for i, stage in enumerate(model.stages):
            yield f"stage {i + 1}", [stage], functools.partial(model.forward_stage, i)
    else:
        assert isinstance(model, DeiT)
        grid: Grid = (0, 0)

        def embed(x: Tensor) -> Tensor:
            nonlocal grid
            x, grid = model.embed(x)
            return x

        def blocks(x: Tensor) -> Tensor:
            for block in model.blocks:
                x = model.run_block(block, x, grid)
            return x

        yield "stem", [model.patch_embed, model.cls_token, model.pos_embed], embed
        yield "blocks", [model.blocks], blocks
    yield "head", [model.norm, model.head], lambda x: model.forward_head(model.norm(x))


class _FusedSoftmax(TorchFunctionMode):
    """Softmax attention as devices run it: on the meta device PyTorch takes it apart and keeps the N×N weights."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        mask = kwargs.get("attn_mask")
        # With a learned bias, as in Swin's windows, PyTorch keeps the weights on a CPU, too.
        if func is not F.scaled_dot_product_attention or (mask is not None and mask.requires_grad):
            return func(*args, **kwargs)
        options = {key: kwargs[key] for key in ("attn_mask", "scale") if key in kwargs}
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*args[:3], **options)[0]


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
            kept[storage._cdata] = storage  # held, so that no later storage takes its place
        return x

    def count_local(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        x, (height, width) = args[:2]
        if isinstance(module, Attention) and (module.local is not None or module.position is not None):
            counts.macs += TAPS * x.shape[0] * height * width * x.shape[2]

    hooks = [m.register_forward_hook(count_local) for m in model.modules() if isinstance(m, Attention)]
    try:
        with (
            _FusedSoftmax(),
            FlopCounterMode(display=False) as flops,
            torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
        ):
            yield counts
    finally:
        for hook in hooks:
            hook.remove()
    counts.macs += flops.get_total_flops() // 2
    counts.activation_bytes = sum(storage.nbytes() for storage in kept.values())
