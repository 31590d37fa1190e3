"""The metadata of linearised models in weights files, from which `load_model` builds them again."""

import json
import warnings
from typing import Any

import timm
import torch
from timm.layers import DropPath, PatchDropout, PatchDropoutWithIndices
from torch import nn

from inline_attention.models import schema
from inline_attention.models.base import VisionModel

from .convert import add_gains, linearization_of, linearize, linearized_modules

KEY = "linearize"


def describe(model: nn.Module) -> dict[str, str]:
    """The metadata of a linearised model; empty for any other.

    A model of timm is named with the arguments that build it. If they are not known, the file does not name the model,
    and `load_model` must be given it.
    """
    if not hasattr(model, "linearization"):
        return {}
    record = linearization_of(model)
    present = {name for name, _ in model.named_modules()}  # layers may have been pruned since
    arguments = dict(
        attention=record.form.attention,
        anchors=record.form.anchors,
        feature_map=record.form.feature_map,
        local_residual=record.local_residual,
        keep_softmax=[layer.name for layer in record.report.layers if not layer.is_linear and layer.name in present],
        gains=any(module.gain is not None for module in linearized_modules(model).values()),
    )
    entries = {KEY: json.dumps(arguments)}
    if not isinstance(model, VisionModel):
        built = timm_arguments(model, record.arguments)
        if built is not None:
            name, options = built
            entries[schema.ARCHITECTURE], entries[schema.ARGUMENTS] = name, json.dumps(options)
    return entries


def apply(
    model: nn.Module,
    *,
    attention: str,
    feature_map: str,
    local_residual: bool,
    keep_softmax: list[str],
    gains: bool,
    anchors: int = 1,
) -> None:
    """Repeats a conversion on a new model."""
    linearize(
        model,
        attention=attention,
        anchors=anchors,
        feature_map=feature_map,
        local_residual=local_residual,
        keep_softmax=keep_softmax,
    )
    if gains:
        add_gains(model)


schema.CONVERSIONS[KEY] = schema.Conversion(describe, apply)


def timm_arguments(model: Any, given: dict[str, Any] | None) -> tuple[str, dict[str, Any]] | None:
    """The name and the arguments that make timm build this model again; None, with a warning, if they are not known."""
    cfg = getattr(model, "pretrained_cfg", None)
    name = cfg.get("architecture") if isinstance(cfg, dict) else None
    if name is None or not timm.is_model(name):
        return None
    options = dict(given or {})
    found = _observed(model)
    try:
        with torch.device("meta"):
            default = _observed(timm.create_model(name, **options))
            options.update({key: found[key] for key in found if found[key] != default.get(key)})
            twin = timm.create_model(name, **options)
        schema.check_foreign_arguments(options)
        why = _why_different(twin, model)
    except Exception as error:  # a constructor may raise anything for arguments that do not fit together
        why = str(error)
    if why is None:
        return name, options
    warnings.warn(
        f"the file will not say how to build this {name}, because {why}. Pass the arguments of "
        "timm.create_model as linearize(…, arguments=…), or load the file with load_model(path, model=…)",
        stacklevel=4,
    )
    return None


def _observed(model: Any) -> dict[str, Any]:
    """Arguments of timm's constructors that can be read from a model's attributes."""
    found: dict[str, Any] = {}
    for name in ("num_classes", "in_chans", "dynamic_img_size", "global_pool"):
        if isinstance(value := getattr(model, name, None), int | str):
            found[name] = value
    patch_embed: Any = getattr(model, "patch_embed", None)
    if (size := getattr(patch_embed, "img_size", None)) is not None:
        found["img_size"] = list(size)
        if hasattr(patch_embed, "strict_img_size"):  # PiT's has no such switch
            found["strict_img_size"] = patch_embed.strict_img_size
    if "dynamic_img_size" in found:
        found.pop("strict_img_size", None)  # follows from it
    return found


def _why_different(twin: nn.Module, model: nn.Module) -> str | None:
    """What differs between a newly built model and this one, apart from what the conversion added.

    Weights have the same shapes with other heads, activations or constants of norms, so modules are compared too.
    """
    added = tuple(f"{name}.{what}" for name in linearized_modules(model) for what in ("local.", "gain"))
    own = {name: t.shape for name, t in model.state_dict().items() if not name.startswith(added)}
    built = {name: t.shape for name, t in twin.state_dict().items()}
    different = [name for name in {**own, **built} if own.get(name) != built.get(name)]
    if different:
        return f"its {different[0]} would be different"
    modules = dict(model.named_modules())
    for name, theirs in twin.named_modules():
        ours = modules.get(name)
        if isinstance(ours, _ONLY_IN_TRAINING) and isinstance(theirs, _ONLY_IN_TRAINING):
            continue
        if not isinstance(ours, type(theirs)):  # the conversion and `optimize` make subclasses
            built_as, is_now = ("missing" if module is None else _class_name(module) for module in (theirs, ours))
            return f"its {name or 'class'} would be {built_as} and not {is_now}"
        found = _constants(ours)
        for key, value in _constants(theirs).items():
            if key in found and found[key] != value:
                where = f"{name}.{key}" if name else key
                return f"its {where} would be {value!r} and not {found[key]!r}"
    return None


# Dropout changes no output of a model that is loaded.
_ONLY_IN_TRAINING = (nn.Identity, nn.Dropout, DropPath, PatchDropout, PatchDropoutWithIndices)


def _class_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"  # several libraries have a class LayerNorm


def _constants(module: nn.Module) -> dict[str, Any]:
    """The plain attributes of a module, without those that are switches of training and of the computation."""
    return {
        name: value
        for name, value in vars(module).items()
        if _is_plain(value)
        and not name.startswith("_")
        and "drop" not in name
        and name not in ("training", "grad_checkpointing", "fused_attn")
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
