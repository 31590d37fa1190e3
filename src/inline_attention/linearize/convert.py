"""Replaces the softmax attention of a model by a linear one, and puts it back."""

import fnmatch
import importlib
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from inline_attention.layers import Attention, LocalWeight
from inline_attention.layers.token_grid import GridSource, TokenGrid, drops_patches
from inline_attention.models.base import input_shape

from .detection import computes_attention
from .modules import LEFT_ALONE, REFUSED, REGISTRY, LinearForm, LinearizedAttention, Removable

# Adapters of optional libraries. One is imported when a model of its library is converted, so that another release of
# the library does not get in the way of other models.
_OPTIONAL_ADAPTERS = {"transformers": ".transformers_modules"}

KeepSoftmax = str | int | Sequence[str | int] | None


@dataclass
class Layer:
    """One attention module in the report of `linearize`."""

    name: str
    kind: str  # the class that it had
    action: str
    tokens: int | None = None  # keys of one call at the model's own input size, if known
    head_dim: int | None = None
    is_linear: bool = False
    anchors: int = 1  # expansions that are computed; each has the cost of one
    has_bias: bool = False  # a position bias, whose product with v is one of the two of softmax
    heads: int | None = None

    @property
    def saves_products(self) -> bool:
        """Whether the linear form needs fewer products than softmax, as far as the sizes are known."""
        if self.tokens is None or self.head_dim is None:
            return True
        return self.tokens > (1 + self.has_bias) * self.anchors * self.head_dim


@dataclass
class Report:
    """What `linearize` did to a model, layer by layer. It prints as a table."""

    layers: list[Layer]

    def linear(self) -> list[Layer]:
        """The layers that are linear now."""
        return [layer for layer in self.layers if layer.is_linear]

    def __str__(self) -> str:
        rows = [("layer", "module", "tokens", "head", "what was done")]
        for layer in self.layers:
            tokens, head_dim = ("–" if size is None else str(size) for size in (layer.tokens, layer.head_dim))
            rows.append((layer.name, layer.kind, tokens, head_dim, layer.action))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[4]]) for row in rows]
        short = [layer for layer in self.linear() if not layer.saves_products]
        if short:
            channels = "channels in a head" if short[0].anchors == 1 else "anchors times channels in a head"
            if any(layer.has_bias for layer in short):
                channels += ", counted twice where there is a position bias"
            layers = "1 layer has" if len(short) == 1 else f"{len(short)} layers have"
            lines.append(
                f"{layers} no more tokens than {channels}. There the linear form saves no products: do not expect it "
                "to be faster."
            )
        others = [layer for layer in self.linear() if layer.saves_products]
        if others:
            sizes = " ".join(dict.fromkeys(f"{layer.heads}x{layer.head_dim}" for layer in others))
            known = [layer.tokens for layer in others if layer.tokens is not None]
            fewest = f" The fewest tokens of {'the others' if short else 'a layer'} are {min(known)}." if known else ""
            lines.append(
                f"Fewer products are not always faster: with few tokens, softmax is.{fewest} To measure from how many "
                f"on the linear form is faster on a device: inline bench break-even --heads {sizes}"
            )
            if any(layer.has_bias for layer in others):
                lines.append("It times attention without a position bias. With one, the linear form needs more tokens.")
        return "\n".join(lines)


@dataclass
class Linearization:
    """How a model was converted. It is the model's attribute `linearization`; `restore` and weights files need it."""

    form: LinearForm
    local_residual: bool
    arguments: dict[str, Any] | None  # of timm.create_model, as far as the user gave them
    report: Report
    hooks: list[Removable] = field(default_factory=list)


class _Found(NamedTuple):
    """An attention module of a model that can be converted."""

    name: str
    module: nn.Module
    adapter: type[LinearizedAttention]
    source: GridSource | None
    local_residual: bool

    def as_linear(self, form: LinearForm) -> Layer:
        action = f"→ {form}, with residual" if self.local_residual else f"→ {form}"
        return replace(self.as_softmax(action), is_linear=True, anchors=form.anchors)

    def as_softmax(self, action: str) -> Layer:
        tokens = self.adapter.num_tokens(self.module)
        if tokens is None and self.source is not None:
            tokens = self.source.num_tokens
        heads, head_dim = self.adapter.heads(self.module)
        kind, has_bias = type(self.module).__name__, self.adapter.has_bias
        return Layer(self.name, kind, action, tokens, head_dim, has_bias=has_bias, heads=heads)


def linearize(
    model: nn.Module,
    *,
    attention: str = "tangent",
    anchors: int = 1,
    feature_map: str | None = None,
    local_residual: bool = True,
    keep_softmax: KeepSoftmax = None,
    images: Tensor | Iterable[Tensor] | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Report:
    """Replaces a model's softmax attention by a linear one, in place. The weights are carried over as they are.

    The converted model is the first-order expansion of the original. The local residual starts at zero, so it changes
    nothing until it is trained. If any attention of the model is not known, this raises an error that names it, and
    nothing is changed.

    Args:
        model: a model of timm, torchvision, transformers or this library, or one with a registered attention module.
        attention: what takes the place of softmax: "tangent", its expansion around the mean query; "inline", its
            expansion around zero; "linear" or "mala", which are not expansions and need training.
        anchors: of "tangent". With M > 1, each image's queries are grouped around M means in every call, and each query
            uses the expansion around its own. The cost of the attention is M times that of one anchor.
        feature_map: φ of "inline", "linear" or "mala". Default: the published one.
        local_residual: add the input-dependent 3×3 residual on the token map, where queries and keys are one map.
        keep_softmax: attentions that stay as they are: names such as "blocks.0.attn", with the wildcards of a shell, or
            positions among the convertible ones, negative ones from the end. "auto:K" keeps the K attentions whose
            conversion alone changes the prediction most. A module that is not known can be named here, too.
        images: unlabelled images (B, C, H, W), preprocessed, or batches of them. "auto:K" needs them.
        arguments: what `timm.create_model` was given besides the name, for `save_weights`. Class count, channels and
            input size are found without it.

    Returns:
        What was done, layer by layer.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model={model!r}; expected a model, a torch.nn.Module, such as timm.create_model('vit_tiny_patch16_224')"
        )
    form = LinearForm.parse(attention, feature_map, anchors)
    if not isinstance(local_residual, bool):
        raise ValueError(f"local_residual={local_residual!r}; expected True or False")
    if arguments is not None and not isinstance(arguments, Mapping):
        raise ValueError(
            f"arguments={arguments!r}; expected a mapping from names of timm.create_model's arguments to values, such "
            "as {'num_heads': 6}"
        )
    names, automatic = parse_keep(keep_softmax)
    if automatic and images is None:
        raise ValueError(f"keep_softmax={keep_softmax!r} measures what each layer costs: pass images=, a batch of them")
    if isinstance(model, DistributedDataParallel):  # it would not average the gradients of new parameters
        raise ValueError("the model is wrapped in DistributedDataParallel: linearise it before it is wrapped")
    if isinstance(getattr(model, "linearization", None), Linearization):
        raise ValueError("the model is already linearised: call restore(model) first")
    plan = _plan(model, names, local_residual=local_residual)
    report = Report([item if isinstance(item, Layer) else item.as_linear(form) for item in plan])
    record = Linearization(form, local_residual, None if arguments is None else dict(arguments), report)
    convertible = [item for item in plan if isinstance(item, _Found)]
    if automatic > len(convertible):
        raise ValueError(f"keep_softmax={keep_softmax!r}, but the model has {len(convertible)} attentions to convert")
    for item in convertible:
        _convert_module(item, form, like=floating_parameter(item.module, model))
    record.hooks = [*_install_grids(convertible), *_change_around(model, convertible)]
    model.linearization = record  # type: ignore[assignment]
    from .calibration import costliest, count_keys  # they need a converted model

    if unknown := [layer for layer in report.linear() if layer.tokens is None]:
        with suppress(Exception):  # a model may not run with shapes alone, or not say for which size it was built
            keys = count_keys(model, input_shape(model))
            for layer in unknown:
                layer.tokens = keys.get(layer.name)
    if automatic:
        assert images is not None
        try:
            names_to_keep = costliest(model, images, automatic)
        except BaseException:  # Ctrl-C too
            restore(model)
            raise
        for name in names_to_keep:
            keep(model, name, "softmax, kept because its conversion changes the prediction most")
    return report


def restore(model: nn.Module) -> None:
    """Undoes `linearize`. Weights that were trained since stay as they are; local residuals and gains are dropped."""
    record = linearization_of(model)
    for module in linearized_modules(model).values():
        _restore_module(module)
    for handle in record.hooks:
        handle.remove()
    del model.linearization


def keep(model: nn.Module, name: str, reason: str) -> None:
    """Puts one attention of a converted model back to softmax."""
    layer = next(layer for layer in linearization_of(model).report.linear() if layer.name == name)
    _restore_module(model.get_submodule(name))
    layer.action, layer.is_linear = reason, False


def linearization_of(model: nn.Module) -> Linearization:
    record = getattr(model, "linearization", None)
    if not isinstance(record, Linearization):
        raise ValueError("the model is not linearised: call linearize(model) first")
    return record


def linearized_modules(model: nn.Module) -> dict[str, LinearizedAttention]:
    """The converted attentions of a model, by name."""
    linearization_of(model)  # raises if the model is not linearised
    return {name: module for name, module in model.named_modules() if isinstance(module, LinearizedAttention)}


def parse_keep(keep_softmax: KeepSoftmax) -> tuple[list[str | int], int]:
    """The names and positions to keep, and K of "auto:K" (0 without it)."""
    if keep_softmax is None:
        return [], 0
    if isinstance(keep_softmax, str) and keep_softmax.startswith("auto"):
        match = re.fullmatch(r"auto:([1-9]\d*)", keep_softmax)
        if match is None:
            raise ValueError(f"keep_softmax={keep_softmax!r}; expected the number of layers to keep, such as 'auto:2'")
        return [], int(match[1])
    wanted: Any = [keep_softmax] if isinstance(keep_softmax, str | int) else keep_softmax
    is_sequence = isinstance(wanted, Sequence | Set)
    if not is_sequence or not all(type(want) in (str, int) for want in wanted):  # not bool
        raise ValueError(
            f"keep_softmax={keep_softmax!r}; expected names, such as 'blocks.0.attn', positions, such as [0, -1], or "
            "'auto:2'"
        )
    return list(wanted), 0


def _plan(model: nn.Module, names: Sequence[str | int], *, local_residual: bool) -> list[_Found | Layer]:
    """The attentions of a model in its order: those to convert, and the report's lines about the others.

    Raises ValueError if a module is not known or cannot be converted.
    """
    libraries = {type(module).__module__.partition(".")[0] for module in model.modules()}
    for library in libraries & _OPTIONAL_ADAPTERS.keys():
        importlib.import_module(_OPTIONAL_ADAPTERS[library], __package__)
    attentions: dict[str, _Found | Layer | None] = {}  # None for a module that is refused
    problems: dict[str, str] = {}
    seen: dict[nn.Module, bool] = {}

    def visit(name: str, module: nn.Module, ancestors: list[nn.Module]) -> bool:
        """Whether the module is an attention, or holds one."""
        if module not in seen:
            seen[module] = inspect(name, module, ancestors)
        return seen[module]

    def inspect(name: str, module: nn.Module, ancestors: list[nn.Module]) -> bool:
        if (adapter := REGISTRY.get(type(module))) is not None:
            source = next(filter(None, map(adapter.grid_source, ancestors)), None)
            has_residual = local_residual and adapter.has_map(module)
            attentions[name] = _Found(name, module, adapter, source, has_residual)
            reason = adapter.why_not(module, ancestors[0] if ancestors else module)
            if "forward" in vars(module):
                reason = "its forward was replaced on the object and would stay softmax: linearise the model first"
            if reason is None and has_residual and not adapter.gets_grid:
                reason = _why_no_grid(source, ancestors)
            if reason is not None:
                problems[name] = reason
            return True
        if (why := _reason(LEFT_ALONE, module)) is not None:
            attentions[name] = Layer(name, type(module).__name__, why)
            return True
        if (why := _reason(REFUSED, module)) is not None:
            attentions[name], problems[name] = None, why
            return True
        if isinstance(module, LinearizedAttention):
            attentions[name], problems[name] = None, "a part of the model is linearised already: restore that part"
            return True
        inside = [
            visit(f"{name}.{child_name}" if name else child_name, child, [module, *ancestors])
            for child_name, child in module.named_children()
        ]
        if any(inside):
            if computes_attention(module):  # beside that of the modules inside
                attentions[name], problems[name] = None, "its own code computes attention, which is not known"
            return True
        if _looks_like_attention(module):
            attentions[name], problems[name] = None, "this module is not known"
            return True
        return False

    visit("", model, [])
    kept = _match(names, attentions)
    problems = {name: problem for name, problem in problems.items() if name not in kept}
    if problems:
        raise ValueError(
            f"cannot linearise {type(model).__name__}, and nothing was changed. {_listed(model, problems)}. "
            "Name such modules in keep_softmax to leave them as they are, or register a class for them"
        )
    if not any(isinstance(item, _Found) for item in attentions.values()):
        others = {name: item.action for name, item in attentions.items() if isinstance(item, Layer)}
        why = _listed(model, others) if others else "it has no attention that is known"
        raise ValueError(f"there is nothing to convert in {type(model).__name__}: {why}")
    for name in kept:
        item = attentions[name]
        if isinstance(item, _Found):
            attentions[name] = item.as_softmax("softmax, kept")
        elif item is None:
            attentions[name] = Layer(name, type(model.get_submodule(name)).__name__, "kept")
    return [item for item in attentions.values() if item is not None]


def _reason(reasons: Mapping[type[nn.Module], str | None], module: nn.Module) -> str | None:
    return next((reasons[cls] for cls in type(module).__mro__ if cls in reasons), None)


def _listed(model: nn.Module, problems: Mapping[str, str]) -> str:
    """Modules of one class and problem together: "blocks.0.attn and 11 more (timm.models.xcit.XCA): …" """
    groups: dict[tuple[type[nn.Module], str], list[str]] = {}
    for name, problem in problems.items():
        groups.setdefault((type(model.get_submodule(name)), problem), []).append(name)
    words = []
    for (cls, problem), names in groups.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        # With its package, because many of timm's modules have a class `Attention` of their own.
        words.append(f"{names[0] or '(the model itself)'}{more} ({cls.__module__}.{cls.__qualname__}): {problem}")
    return "; ".join(words)


def _looks_like_attention(module: nn.Module) -> bool:
    """Whether the class is named so, or drops attention weights, or has code that computes attention."""
    if isinstance(module, nn.Identity | nn.Dropout):
        return False
    is_named_so = re.search("attention|attn", type(module).__name__, re.IGNORECASE) is not None
    is_known_base = hasattr(module, "attn_drop") or isinstance(module, Attention)
    return is_named_so or is_known_base or computes_attention(module)


def _why_no_grid(source: GridSource | None, ancestors: list[nn.Module]) -> str | None:
    if source is None:
        return "no patch embedding gives the size of its token map: pass local_residual=False"
    if any(map(drops_patches, ancestors)):
        return "the model drops patches in training, which leaves no map: pass local_residual=False"
    return None


def _match(wanted: Sequence[str | int], attentions: "Mapping[str, _Found | Layer | None]") -> list[str]:
    """The names that `keep_softmax` selects. Positions count the convertible modules, patterns match all."""
    convertible = [name for name, item in attentions.items() if isinstance(item, _Found)]
    matched: list[str] = []
    for want in wanted:
        if isinstance(want, int):
            if not -len(convertible) <= want < len(convertible):
                raise ValueError(f"keep_softmax has {want}, but the model has {len(convertible)} attentions")
            matched.append(convertible[want])
            continue
        hits = fnmatch.filter(attentions, want)
        if not hits:
            raise ValueError(f"keep_softmax has {want!r}, which matches none of {', '.join(attentions)}")
        matched.extend(hits)
    return list(dict.fromkeys(matched))


def floating_parameter(*modules: nn.Module) -> Tensor:
    """The first parameter whose dtype and device new parameters can have. Quantised layers have none."""
    parameters = (p for module in modules for p in module.parameters() if p.is_floating_point())
    return next(parameters, torch.empty(0))


def _convert_module(item: _Found, form: LinearForm, *, like: Tensor) -> None:
    """`like` has the dtype and the device of new parameters."""
    module: Any = item.module
    num_heads, head_dim = item.adapter.heads(module)
    local = getattr(module, "local", None)
    before = "absent" if not hasattr(module, "local") else "none" if local is None else "present"
    if item.local_residual and local is None:
        local = LocalWeight(num_heads * head_dim, num_heads).to(like.device, like.dtype).train(module.training)
        nn.init.zeros_(local.fc2.weight)
        nn.init.zeros_(local.fc2.bias)
    module.__class__ = item.adapter
    module.form, module.local, module.local_before = form, local, before
    module.gain = module.token_grid = module.observer = None
    module.converted()


def _restore_module(module: nn.Module) -> None:
    assert isinstance(module, LinearizedAttention)
    module.restored()
    if module.local_before != "present":
        del module.local
    if module.local_before == "none":
        module.local = None
    for name in ("form", "local_before", "gain", "token_grid", "observer"):
        delattr(module, name)
    softmax: Any = next(cls for cls, adapter in REGISTRY.items() if adapter is type(module))
    module.__class__ = softmax


def _install_grids(converted: Sequence[_Found]) -> list[RemovableHandle]:
    """One hook for each patch embedding whose token map a residual needs."""
    grids: dict[nn.Module, TokenGrid] = {}
    hooks = []
    for item in converted:
        if item.local_residual and not item.adapter.gets_grid:
            source, module = item.source, item.module
            assert source is not None
            assert isinstance(module, LinearizedAttention)
            if source.module not in grids:
                grids[source.module] = TokenGrid(source.measure, source.num_prefix_tokens)
                hooks.append(source.module.register_forward_hook(grids[source.module], with_kwargs=True))
            module.token_grid = grids[source.module]
    return hooks


def _change_around(model: nn.Module, converted: Sequence[_Found]) -> list[Removable]:
    changes = []
    for adapter in dict.fromkeys(item.adapter for item in converted):
        changes += adapter.around(model, [item.module for item in converted if item.adapter is adapter])
    return changes


def add_gains(model: nn.Module) -> None:
    """Gives every converted attention without gains a gain of one for each head."""
    for module in linearized_modules(model).values():
        if module.gain is None:
            like = floating_parameter(module, model)
            module.gain = nn.Parameter(torch.ones(module.num_gains(module), device=like.device, dtype=like.dtype))
