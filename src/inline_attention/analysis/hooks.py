"""The attention layers of a running model, one by one.

The model is not changed. Hooks record the inputs and outputs of its attention modules, and the weights are recomputed
from them. An attention of this library writes itself out (`Attention.write_out`), and so does one that `linearize`
converted, of any library. `timm_models` does so for the softmax attention of timm's vision transformers and Swins.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from inline_attention.layers import Attention, Block, SoftmaxAttention
from inline_attention.layers.mode import evaluation_mode
from inline_attention.layers.windows import WindowPlan
from inline_attention.linearize import LinearizedAttention

from . import timm_models
from .record import LayerAttention


def layer_names(model: nn.Module) -> list[str]:
    """The attention modules of a model whose weights can be written out, in order."""
    known = (LinearizedAttention, Attention, *timm_models.ATTENTIONS)
    return [name for name, module in model.named_modules() if isinstance(module, known)]


def attention_kinds(model: nn.Module) -> list[str]:
    """The different attentions of a model, in the order of its layers."""
    return list(dict.fromkeys(_kind(model.get_submodule(name)) for name in layer_names(model)))


def _kind(module: nn.Module) -> str:
    if isinstance(module, LinearizedAttention):  # first: it is still of the class that it was converted from
        return module.form.attention
    return module.kind if isinstance(module, Attention) else SoftmaxAttention.kind


@torch.no_grad()
def capture(model: nn.Module, images: Tensor, *, layers: Sequence[str | int] | None = None) -> list[LayerAttention]:
    """Run a model on these images and return its attention layers.

    Args:
        model: of this library, a softmax ViT or Swin of timm, or one that `linearize` converted; on the images' device.
        images: (B, channels, H, W), normalised.
        layers: names (see `layer_names`) or indices, negative ones from the end; None for all.
    """
    records: list[LayerAttention] = []
    observe(model, images, records.append, layers=layers)
    return records


@torch.no_grad()
def observe(
    model: nn.Module,
    images: Tensor,
    on_layer: Callable[[LayerAttention], Tensor | None],
    *,
    layers: Sequence[str | int] | None = None,
) -> Tensor:
    """Run a model and call `on_layer` with each attention layer after it has run. Only one layer is in memory.

    A tensor that `on_layer` returns replaces the output of the module in this run. The model runs in evaluation mode,
    and the mode of every module is restored. Arguments are as for `capture`. Returns the output of the model.
    """
    chosen = resolve_layers(model, layers)
    with evaluation_mode(model), _hooks(model, chosen, on_layer):
        return model(images)


def resolve_layers(model: nn.Module, layers: Sequence[str | int] | None) -> list[str]:
    """The names of the chosen layers."""
    names = layer_names(model)
    if not names:
        raise ValueError(
            f"{type(model).__name__} has no attention that can be written out; expected a model of this library, "
            "a ViT or Swin of timm with softmax attention, or a linearised model"
        )
    if layers is None:
        return names
    chosen = []
    for layer in layers:
        if isinstance(layer, int) and -len(names) <= layer < len(names):
            chosen.append(names[layer])
        elif isinstance(layer, str) and layer in names:
            chosen.append(layer)
        else:
            raise ValueError(f"there is no layer {layer!r}; expected 0 to {len(names) - 1}, or one of {names}")
    return chosen


@contextmanager
def _hooks(
    model: nn.Module, names: Sequence[str], on_layer: Callable[[LayerAttention], Tensor | None]
) -> Iterator[None]:
    """Call `on_layer` with each of the named layers after it has run. The result, if any, replaces its output.

    The hook of a block runs before that of its attention. It records how the map was cut into windows, which the
    attention does not know.
    """
    plans: dict[nn.Module, WindowPlan | None] = {}
    vit_map = timm_models.VitMap()

    def read_grid(module: nn.Module, args: tuple[Any, ...]) -> None:
        vit_map.read(module, args[0])

    def record_plan(block: Any, args: tuple[Any, ...]) -> None:
        is_own = isinstance(block, Block)
        plans[block.attn] = block.window_plan(args[1]) if is_own else timm_models.window_plan(block, args[0])

    def attention_hook(name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            plan = plans.get(module)
            if isinstance(module, LinearizedAttention):
                token_map = vit_map.token_map if plan is None else (plan.window, 0)
                try:
                    written = module.write_out(*args, token_map=token_map, **kwargs)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from error
            elif isinstance(module, Attention):
                written = module.write_out_call(*args, **kwargs)
            else:
                written = timm_models.write_out(module, *args, name=name, vit_map=vit_map, plan=plan, **kwargs)
            windows = None if plan is None or plan.counts == (1, 1) else plan
            tokens, *rest = (output,) if isinstance(output, Tensor) else output  # some return weights too, or None
            replaced = on_layer(LayerAttention(**vars(written), name=name, output=tokens, windows=windows))
            return replaced if replaced is None or not rest else (replaced, *rest)

        return hook

    with ExitStack() as stack:
        handles = [model.register_forward_pre_hook(read_grid)]
        for module in model.modules():
            if isinstance(module, (Block, timm_models.WINDOWED_BLOCK)):
                handles.append(module.register_forward_pre_hook(record_plan))
        for name in names:
            handles.append(model.get_submodule(name).register_forward_hook(attention_hook(name), with_kwargs=True))
        for handle in handles:
            stack.callback(handle.remove)
        yield
