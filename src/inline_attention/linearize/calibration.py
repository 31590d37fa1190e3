"""Calibrates a linearised model without training, and measures what the conversion of each layer costs.

Both run on a few hundred unlabelled images, and both compare each layer with softmax on the inputs that it has in the
original model. So the layers do not depend on each other, and one pass measures all of them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from inline_attention.layers.mode import evaluation_mode
from inline_attention.ops.precision import widest_float
from inline_attention.ops.projections import unstack

from .convert import add_gains, floating_parameter, linearized_modules
from .modules import Call, LinearizedAttention

Images = Tensor | Iterable[Tensor]


def widened(x: Tensor) -> Tensor:
    return x.to(widest_float(x.device))


def as_softmax(module: LinearizedAttention, call: Call) -> Tensor:
    """An observer that computes the original softmax."""
    return module.softmax_form(call)


class LayerFit:
    """An observer that compares the linear form of a layer with softmax, and returns the output of softmax.

    The linear form is base + gain·slope, with one gain for each head. Sums over all images give the best gain, and the
    error of any gain.
    """

    sums: Tensor  # (4, heads): Σ slope², Σ slope·rest, Σ rest² and Σ (softmax − its mean over the tokens)²

    def __call__(self, module: LinearizedAttention, call: Call) -> Tensor:
        bare = call.without_residual()  # softmax has none, or the same
        softmax = module.softmax_form(bare)
        out = widened(softmax)
        ones = torch.ones(out.shape[2], device=out.device)
        base, full = (widened(module.linear_form(bare, gain)) for gain in (0 * ones, ones))
        slope, rest, deviation = full - base, out - base, out - out.mean(1, keepdim=True)
        pairs = ((slope, slope), (slope, rest), (rest, rest), (deviation, deviation))
        sums = torch.stack([(a * b).sum((0, 1, 3)) for a, b in pairs])
        self.sums = self.sums + sums if hasattr(self, "sums") else sums
        return call.add_residual(softmax) if module.local_before == "present" else softmax

    def gain(self) -> Tensor:
        """The gain of each head with the least squared error; 1 if the head does not depend on it."""
        slope_slope, slope_rest, _, _ = self.sums
        return torch.where(slope_slope > 0, slope_rest / slope_slope, 1)

    def error(self, gain: Tensor | float) -> float:
        """The squared error with a gain for each head, relative to the spread of softmax's output over the tokens."""
        slope_slope, slope_rest, rest_rest, spread = self.sums
        squared = rest_rest - 2 * gain * slope_rest + gain * gain * slope_slope
        return (squared.sum() / spread.sum()).item()


@dataclass
class LayerCost:
    """The effect of converting one layer alone."""

    name: str
    error: float  # of the layer's output, squared, relative to the spread of softmax's output over the tokens
    change: float  # of the model's output, squared, relative to its spread over the images
    agreement: float | None  # share of images whose largest output stays the same; None without a head


@dataclass
class Costs:
    """The effect of converting each layer alone. It prints as a table; `draw` makes a picture."""

    layers: list[LayerCost]
    images: int
    together: LayerCost  # all of them converted at once

    def __str__(self) -> str:
        width = max(len(layer.name) for layer in [*self.layers, self.together])
        lines = [f"{'layer'.ljust(width)}  output error  prediction change  agreement"]
        for layer in [*self.layers, self.together]:
            agreement = "–" if layer.agreement is None else f"{layer.agreement:.1%}"
            error = "–" if layer is self.together else f"{layer.error:.4f}"
            lines.append(f"{layer.name.ljust(width)}  {error:>12}  {layer.change:>17.4f}  {agreement:>9}")
        return "\n".join([*lines, f"{self.images} images"])

    def draw(self, path: str | Path) -> Path:
        """Writes bars of both measures, layer by layer, as PNG or SVG by the path's ending."""
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("figures need matplotlib: pip install 'inline-attention[train]'") from error
        names = [layer.name for layer in self.layers]
        figure = Figure(figsize=(8, 1.6 + 0.25 * len(names)), layout="constrained")
        FigureCanvasAgg(figure)
        panels = (
            ("error of the layer's output", "error", "#4c72b0"),
            ("change of the prediction", "change", "#dd8452"),
        )
        axes: Any = figure.subplots(1, 2, sharey=True)
        for axis, (title, attribute, colour) in zip(axes, panels, strict=True):
            axis.barh(names, [getattr(layer, attribute) for layer in self.layers], color=colour)
            axis.set_title(title, fontsize=10)
            axis.set_xlabel("relative squared error")
            axis.grid(alpha=0.3, axis="x")
            axis.set_axisbelow(True)
        axes[0].invert_yaxis()
        figure.supxlabel(
            f"Each layer converted alone, the others softmax. Images: {self.images}.", fontsize=8, color="0.35"
        )
        path = Path(path)
        figure.savefig(path, dpi=110)
        return path


def calibrate(model: nn.Module, images: Images) -> dict[str, tuple[float, float]]:
    """Fits a gain for each head of every converted attention, so that its output comes nearest to softmax's.

    The gain scales how an output changes with its query. The fit is by least squares, in one pass over the images.

    Args:
        model: a linearised model.
        images: (B, C, H, W), preprocessed as the model expects, or batches of them. A few hundred are enough.

    Returns:
        For each layer the relative squared error of its output before and after.
    """
    fits = _fit(model, images)
    add_gains(model)
    errors = {}
    for name, module in linearized_modules(model).items():
        gain = fits[name].gain()
        assert module.gain is not None
        errors[name] = (fits[name].error(1), fits[name].error(gain))
        with torch.no_grad():
            module.gain.copy_(gain)
    return errors


def layer_costs(model: nn.Module, images: Images) -> Costs:
    """Measures how converting each layer alone changes its output and the model's prediction.

    The model runs twice, and once more for each layer.

    Args:
        model: a linearised model. It is not changed.
        images: (B, C, H, W), preprocessed as the model expects, or batches of them.
    """
    batches = _batches(images)
    fits = _fit(model, batches)
    modules = linearized_modules(model)
    everything = dict.fromkeys(modules, as_softmax)
    expected = _outputs(model, batches, everything)
    spread = (expected - expected.mean(0)).square().sum()
    if spread == 0:
        raise ValueError("images: the model's outputs are equal for all of them; expected two or more different images")

    def compare(name: str, observers: Mapping[str, Any], error: float) -> LayerCost:
        found = _outputs(model, batches, observers)
        change = (found - expected).square().sum() / spread
        agreement = None
        if _has_head(model):
            agreement = widened(found.argmax(1) == expected.argmax(1)).mean().item()
        return LayerCost(name, error, change.item(), agreement)

    layers = []
    for name, module in modules.items():
        others = {other: as_softmax for other in modules if other != name}
        gain = 1.0 if module.gain is None else widened(module.gain.detach())
        layers.append(compare(name, others, fits[name].error(gain)))
    return Costs(layers, len(expected), compare("all together", {}, float("nan")))


def _has_head(model: nn.Module) -> bool:
    """By timm's contract, or transformers': there a model without a head is its own base model."""
    return getattr(model, "num_classes", 1) != 0 and getattr(model, "base_model", None) is not model


def costliest(model: nn.Module, images: Images, count: int) -> list[str]:
    """The layers whose conversion alone changes the prediction most."""
    costs = layer_costs(model, images).layers
    return [layer.name for layer in sorted(costs, key=lambda layer: -layer.change)[:count]]


def _fit(model: nn.Module, images: Images) -> dict[str, LayerFit]:
    fits = {name: LayerFit() for name in linearized_modules(model)}
    _outputs(model, _batches(images), fits)
    return fits


def _batches(images: Images) -> list[Tensor]:
    batches = [images] if isinstance(images, Tensor) else list(images)
    for batch in batches or [None]:
        if not isinstance(batch, Tensor) or batch.ndim != 4 or len(batch) == 0 or not batch.is_floating_point():
            raise ValueError("images: expected floats (B, C, H, W), or batches of them, with at least one image")
    return batches


def count_keys(model: nn.Module, shape: tuple[int, int, int]) -> dict[str, int]:
    """The number of keys of every converted attention for an image (C, H, W): name → tokens. Computes shapes alone."""
    keys: dict[str, int] = {}

    def counting(name: str) -> Callable[[LinearizedAttention, Call], Tensor]:
        def observe(module: LinearizedAttention, call: Call) -> Tensor:
            q, k, v = unstack(call.projections)
            keys[name] = k.shape[1]
            return v.new_empty(*q.shape[:3], v.shape[3])

        return observe

    tensors = {name: t.to("meta") for name, t in [*model.named_parameters(), *model.named_buffers()]}
    image = floating_parameter(model).new_empty(1, *shape, device="meta")
    observers = {name: counting(name) for name in linearized_modules(model)}
    with torch.no_grad(), evaluation_mode(model), observed(model, observers):
        torch.func.functional_call(model, tensors, (image,))
    return keys


def _outputs(model: nn.Module, batches: Iterable[Tensor], observers: Mapping[str, Any]) -> Tensor:
    """The model's outputs for all images as rows, with some of its attentions observed."""
    with torch.no_grad(), evaluation_mode(model), observed(model, observers):
        like = floating_parameter(model)
        outputs = [_prediction(model(batch.to(like))) for batch in batches]
    return torch.cat([widened(output.flatten(1)) for output in outputs])


def _prediction(output: Any) -> Tensor:
    """The tensor that is compared. A model of transformers returns several, with these names."""
    names = ("logits", "pooler_output", "last_hidden_state")
    tensors = (output, *(getattr(output, name, None) for name in names))
    found = next((tensor for tensor in tensors if isinstance(tensor, Tensor)), None)
    if found is None:
        raise ValueError(
            f"the model returns {type(output).__name__}; expected one tensor for a batch of images, or an output of "
            f"transformers with {', '.join(names)}"
        )
    return found


@contextmanager
def observed(model: nn.Module, observers: Mapping[str, Any]) -> Iterator[None]:
    """Inside, some of a model's converted attentions have an observer: name → (module, call) → output."""
    modules = linearized_modules(model)
    try:
        for name, observer in observers.items():
            modules[name].observer = observer
        yield
    finally:
        for module in modules.values():
            module.observer = None
