"""Builds models with timm's builder and registry. Our own loader reads the published weights."""

import contextlib
import difflib
import fnmatch
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import timm
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs
from timm.models._builder import resolve_pretrained_cfg
from torch import nn

from ._checkpoint import read_checkpoint
from ._download import local_path
from .base import VisionModel
from .published import PUBLISHED
from .shipped import SHIPPED, shipped_weights

ModelT = TypeVar("ModelT", bound=VisionModel)

WEIGHTS_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar")  # the last of "checkpoint-42.pth.tar"

_FAMILIES: dict[str, type[VisionModel]] = {}  # registered name → family


def default_cfg(name: str, *, input_size: int = 224, first_conv: str = "patch_embed.proj", **kwargs: Any) -> dict:
    """timm's description of a model: input, published preprocessing, and the place of its weights."""
    file = shipped_weights(name)
    return {
        "url": PUBLISHED[name].url if name in PUBLISHED else "",
        "file": None if file is None else str(file),
        "num_classes": 1000,
        "input_size": (3, input_size, input_size),
        "fixed_input_size": True,  # makes the builder pass img_size; every model runs at other sizes too
        "pool_size": (input_size // 32, input_size // 32),
        "crop_pct": 0.875,
        "crop_mode": "squash",  # both sides are resized: the published evaluation does not keep the aspect ratio
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": first_conv,
        "classifier": "head",
        "license": "mit",
        "paper_ids": "arXiv:2412.06590",
        "paper_name": "Bridging the Divide: Reconsidering Softmax and Linear Attention",
        **kwargs,
    }


def register_family(family: type[VisionModel], *names: str, tag: str = "in1k", **kwargs: Any) -> Any:
    """Registers the names of a family, and returns timm's table of their configurations.

    The input size is 224, or the number that a name ends in. `tag` names the training data.
    """
    _FAMILIES.update(dict.fromkeys(names, family))
    sizes = {name: int(name[-3:]) if name[-3:].isdecimal() else 224 for name in names}
    return generate_default_cfgs({f"{n}.{tag}": default_cfg(n, **{"input_size": sizes[n], **kwargs}) for n in names})


def find_family(name: str) -> type[VisionModel] | None:
    """The class of one of this library's models; None for any other name."""
    return _FAMILIES.get(name)


def families() -> list[type[VisionModel]]:
    """All families, in the order in which they were registered."""
    return list(dict.fromkeys(_FAMILIES.values()))


def build(cls: type[ModelT], variant: str, pretrained: bool, kwargs: Mapping[str, Any], **architecture: Any) -> ModelT:
    """Build a registered variant for timm's `create_model`. `kwargs` are the user's arguments and take precedence.

    Published weights are pickles behind links without a file name. This function downloads and reads them. timm's
    builder then adapts the class count and input channels, as for its own models. Weights in the package are the `file`
    of timm's configuration. All other sources of timm (`hf-hub:`, `local-dir:`, a file or state dict in the
    configuration) work as they do there.
    """

    def create(*, device: Any = None, dtype: torch.dtype | None = None, **options: Any) -> ModelT:
        fixed = {name: options.pop(name) for name in FIXED if name in options}
        check_argument_names(cls, options)
        with contextlib.nullcontext() if device is None else torch.device(device):
            model = cls(**options)
        check_fixed(model, fixed)
        model.config = options
        return model if dtype is None else model.to(dtype)

    kwargs = {**architecture, **kwargs}
    # All features by number: timm's getter takes None for all of them, but its other `feature_cls` do not.
    depths = kwargs.get("depths")
    num_stages = len(depths) if isinstance(depths, Sequence) else None
    out_indices = kwargs.pop("out_indices", cls.out_indices or num_stages)
    overlay = dict(kwargs.pop("pretrained_cfg_overlay", None) or {})
    cfg = resolve_pretrained_cfg(variant, kwargs.get("pretrained_cfg"), dict(overlay))
    if pretrained and not (cfg.source or cfg.hf_hub_id or cfg.state_dict or overlay.get("file")):
        if cfg.url:
            overlay["state_dict"] = read_checkpoint(local_path(str(cfg.url), folder=kwargs.get("cache_dir")))
        elif isinstance(kwargs.get("pretrained_cfg"), str | None):  # otherwise the user's own configuration decides
            overlay["file"] = _shipped_file(variant)
    model: Any = build_model_with_cfg(
        create,
        variant,
        pretrained,
        pretrained_cfg_overlay=overlay,
        pretrained_filter_fn=lambda state_dict, model: model.adapt_state_dict(state_dict),
        feature_cfg=dict(out_indices=out_indices, feature_cls="getter"),
        **kwargs,
    )
    # Otherwise the configuration keeps a second copy of the weights, which is saved with the model.
    for module in model.modules():
        if isinstance(found := getattr(module, "pretrained_cfg", None), dict):
            found.pop("state_dict", None)
    return model


def _shipped_file(name: str) -> str:
    file = shipped_weights(name)
    if file is None:
        raise ValueError(
            f"there are no weights of {name} to load: build it with pretrained=False, "
            "and load a file of your own with load_weights"
        )
    return str(file)


# Arguments of timm's models that have one value here. A script may pass that value; any other is refused.
FIXED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "attn_drop_rate": (
        lambda model: 0.0,
        "linear attention never forms the weights that it would drop; use proj_drop_rate or drop_path_rate",
    ),
    "class_token": (
        lambda model: getattr(model, "num_prefix_tokens", 0) > 0,
        "the family decides it; global_pool='avg' takes the mean of the map in any family",
    ),
    "dynamic_img_size": (lambda model: True, "images of any size are taken in every call"),
    "dynamic_img_pad": (lambda model: True, "sides that are no multiple of the stride are padded"),
    "output_stride": (
        lambda model: model.feature_info[-1]["reduction"],
        "there is no dilated form; features_only=True with out_indices gives the finer maps",
    ),
}


def check_fixed(model: nn.Module, given: Mapping[str, Any]) -> None:
    """Raise ValueError for an argument of timm with a value that the model does not support."""
    for name, value in given.items():
        of_model, why = FIXED[name]
        if value != of_model(model):
            raise ValueError(f"{name}={value!r}; expected {of_model(model)!r} of {type(model).__name__}: {why}")


def check_argument_names(build: Callable[..., object], names: Iterable[str]) -> None:
    """Raise ValueError for a name that is not an argument of `build`."""
    known = inspect.signature(build).parameters
    for name in names:
        if name not in known:
            raise ValueError(f"{build.__name__} has no argument {name!r}; expected some of {', '.join(known)}")


def create_model(name: str, *, pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Create a registered model by name, like timm's `create_model`. An error suggests the nearest names."""
    check_name(name)
    return timm.create_model(name, pretrained=pretrained, **kwargs)


def check_name(name: str) -> None:
    """Raise ValueError for a name that timm does not know, and suggest the nearest ones."""
    if ":" not in name and not timm.is_model(name):
        is_file = Path(name).suffix in WEIGHTS_SUFFIXES
        meant = "a file of weights is given with --weights, in Python to load_model" if is_file else suggest_names(name)
        raise ValueError(f"there is no model {name!r}; {meant}")


def suggest_names(name: str) -> str:
    """The end of a message about an unknown model: the nearest names."""
    close = difflib.get_close_matches(name, list_models(), n=3)
    return f"did you mean {' or '.join(close)}?" if close else "`inline models` lists them"


def list_models(pattern: str = "*", *, pretrained: bool = False) -> list[str]:
    """Names of this library's models: InLine models, then their baselines, then the small ones of the package.

    Args:
        pattern: names to list, with shell wildcards: "inline_swin*".
        pretrained: list only models with weights, either to download or in the package.
    """
    published = sorted(PUBLISHED, key=lambda name: not name.startswith("inline_"))
    known = dict.fromkeys((*published, *SHIPPED, *_FAMILIES))
    names = [name for name in known if name in _FAMILIES and fnmatch.fnmatch(name, pattern)]
    return [name for name in names if has_weights(name)] if pretrained else names


def has_weights(name: str) -> bool:
    """Whether `pretrained=True` finds weights of one of this library's models."""
    return bool(PUBLISHED[name].url if name in PUBLISHED else shipped_weights(name))
