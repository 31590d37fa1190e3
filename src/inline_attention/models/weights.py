"""Weights in and out of models: official checkpoints, safetensors, downloads.

Reading a file executes nothing in it. All of it is checked against the model before the first value is loaded. Files
are written under a temporary name and then renamed, so that no incomplete file is left.
"""

import json
import os
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from timm.models import adapt_input_conv, get_pretrained_cfg
from timm.utils import unwrap_model
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from inline_attention._version import __version__

from . import schema
from ._checkpoint import (
    Checkpoint,
    WeightsError,
    errors_name,
    one_line,
    open_checkpoint,
    read_checkpoint,
    read_metadata,
    select_weights,
)
from ._download import atomic_path, download, local_path
from .base import Grid, ModuleT, StateDict, VisionModel, to_pair
from .registry import check_name, create_model, families, find_family, list_models

__all__ = [
    "WeightsError",
    "download",
    "load_model",
    "load_weights",
    "read_checkpoint",
    "read_metadata",
    "save_weights",
]

HEAD_NAMES = ("head.weight", "head.bias")
# Architectures of timm that resemble a family, but are not in this library: a pattern of a name in their weights.
_RELATIVES = {
    "a distilled DeiT": r"^dist_token$",
    "a ViT with registers": r"^reg_token$",
    "DeiT III": r"\.ls1\.gamma$",
    "PVT v2": r"\.mlp\.dwconv\.",
    "Swin v2": r"\.attn\.logit_scale$",
}
# timm's models with the tensors of one of ours, most of whose weights expect images normalised with a mean of 0.5.
_TWINS = {f"softmax_deit_{size}": f"vit_{size}_patch16_224" for size in ("tiny", "small", "base")}
_MAX_LISTED = 8
_MISFITS = (ValueError, IndexError, RuntimeError)  # errors of adapting the weights of another model

Source = str | os.PathLike[str] | Mapping[str, Any]


def load_model(source: str | os.PathLike[str], model: nn.Module | None = None) -> nn.Module:
    """Returns the model of a weights file, with its weights.

    A file of `save_weights` or `inline train` names its model. An official checkpoint is recognised
    by its names and shapes. For any other file build the model and pass it.

    Args:
        source: a weights file, or the http(s) URL of one.
        model: a model to load the weights into. It must have exactly the file's tensors; models of this library also
            take official names and other input sizes, see `load_weights`.
    """
    path = local_path(source)
    checkpoint = open_checkpoint(path)
    if model is None:
        return restore(checkpoint, origin=str(path))
    load_checkpoint(model, checkpoint, origin=str(path))
    return model


def open_model(name: str | None, weights: str | None, *, num_classes: int | None = None) -> nn.Module:
    """Returns a model of this library, or a linearised one of timm, by its name, by its weights, or by both.

    Args:
        weights: a file or its http(s) URL, "pretrained" for the published weights, or None for random ones.
        num_classes: number of classes of a model without a file; None for its default. A file must have the same.
    """
    if weights is None or weights == "pretrained":
        if name is None:
            raise ValueError("there is neither a model nor a weights file: give the name of one")
        options = {} if num_classes is None else dict(num_classes=num_classes)
        model = create_model(name, pretrained=weights is not None, **options)
    else:
        path = local_path(weights)
        model = restore(open_checkpoint(path), origin=str(path), name=name)
        if num_classes not in (None, model.num_classes):
            raise ValueError(f"num_classes={num_classes}, but {path} has {model.num_classes} classes")
    if not isinstance(model, VisionModel) and not hasattr(model, "linearization"):
        raise ValueError(
            f"{architecture(model)} is a model of timm, not one of this library; `inline models` lists those"
        )
    return model


def load_weights(
    model: nn.Module,
    source: Source,
    *,
    ema: bool | None = None,
    reset_head: bool = False,
) -> nn.Module:
    """Loads weights into a model and returns it. An error leaves the model as it was.

    For models of this library, position embeddings and bias tables are resized to the model's, and the first
    convolution is adapted to its number of input channels (timm's `adapt_input_conv`). Any other difference is an
    error.

    Args:
        source: a safetensors file, an official checkpoint, an http(s) or file URL of either, or a mapping from
            official or own names to tensors.
        ema: None takes averaged (EMA) weights if there are any, True requires them, False takes the others.
        reset_head: keep the model's own head. Without it, another class count is an error.
    """
    checkpoint, origin = _open_source(source, ema=ema)
    load_checkpoint(model, checkpoint, origin=origin, reset_head=reset_head)
    return model


def restore(
    checkpoint: Checkpoint, *, origin: str, name: str | None = None, arguments: Mapping[str, Any] | None = None
) -> nn.Module:
    """Build the model of an open checkpoint and load it. Every command that opens weights calls this.

    Args:
        origin: the name of the checkpoint in errors.
        name: the model that the user named, perhaps one of timm. None: the checkpoint or its shapes decide.
        arguments: arguments of the model from the user. They replace those of the checkpoint.
    """
    if name is not None:
        check_name(name)
        base, _, _ = name.partition(".")
        name = base if find_family(base) else name  # without timm's tag of the weights
    with errors_name(origin):
        description = schema.read_description(checkpoint.info)
        schema.check_task(description, schema.CLASSIFICATION)
        if description is not None and name not in (None, description.architecture):
            raise WeightsError(f"holds weights of {one_line(description.architecture)}, not of {name}")
        if description is None:
            if any(key in checkpoint.info for key in schema.CONVERSIONS):  # its shapes may be those of another model
                raise WeightsError(
                    "holds a linearised model and does not say how to build it: build it, linearise it and call "
                    "load_model(path, model=…)"
                )
            name = name or identify(checkpoint, filename=Path(origin).name)
            options = _fitting_options(name, checkpoint)
        elif name is not None and find_family(name) is None:  # a model of timm, which the user named
            schema.check_foreign_arguments(description.arguments)
            options = dict(description.arguments)
        else:
            name, options = description.architecture, dict(description.arguments)
            schema.check_model(name, options)
        for key, conversion in (description.conversions if description else {}).items():
            schema.check_arguments(schema.CONVERSIONS[key].apply, conversion)
    changes = dict(description.changes) if description else {}
    for key, value in (arguments or {}).items():
        options[key] = value
        if key in changes:
            changes[key] = value

    def build() -> nn.Module:
        model = create_model(name, **options)
        if changes:
            assert isinstance(model, VisionModel)
            schema.check_arguments(VisionModel.apply_changes, changes)
            model.apply_changes(**changes)
        for key, conversion in (description.conversions if description else {}).items():
            schema.CONVERSIONS[key].apply(model, **conversion)
        return model

    model = build_fitting(build, checkpoint, origin=origin)
    load_checkpoint(model, checkpoint, origin=origin)
    return model


def build_fitting(build: Callable[[], ModuleT], checkpoint: Checkpoint, *, origin: str) -> ModuleT:
    """Build a model as a checkpoint describes it, without values for its parameters.

    It is built on the meta device and compared with the checkpoint there, so a file cannot make it allocate more memory
    than its weights take.
    """
    with torch.device("meta"), _limited_parameters():
        try:
            model = build()
        except Exception as error:  # a constructor may raise anything for absurd arguments
            raise WeightsError(f"{origin} asks for a model that cannot be built: {one_line(error)}") from error
    on_meta = {name: tensor.to("meta") for name, tensor in checkpoint.state_dict.items()}
    state_dict = fit(model, Checkpoint(on_meta, checkpoint.is_ema, checkpoint.info), origin=origin)
    if all(name in state_dict for name, _ in model.named_buffers()):
        return model.to_empty(device="cpu")
    return build()  # computes the buffers that no file holds


@contextmanager
def _limited_parameters(limit: int = 5_000) -> Iterator[None]:
    """Stop a constructor in this thread at this number of parameters. Ten million blocks take hours, even on meta."""
    thread, count = threading.get_ident(), 0

    def hook(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal count
        if threading.get_ident() == thread:
            count += 1
            if count > limit:
                raise WeightsError(f"it has more than {limit} parameters")

    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def load_checkpoint(model: nn.Module, checkpoint: Checkpoint, *, origin: str, reset_head: bool = False) -> None:
    """`load_weights` of an open checkpoint. Errors name its origin."""
    target = unwrap_model(model)
    if any(tensor.is_meta for tensor in target.state_dict().values()):
        raise ValueError("the model is on the meta device, which holds no values: build it on the CPU or a GPU")
    target.load_state_dict(fit(target, checkpoint, origin=origin, reset_head=reset_head))


def fit(target: nn.Module, checkpoint: Checkpoint, *, origin: str, reset_head: bool = False) -> StateDict:
    """The weights under the names and shapes of the model, also on the meta device. WeightsError if they do not fit."""
    own, state_dict = target.state_dict(), checkpoint.state_dict
    if isinstance(target, VisionModel):
        with errors_name(origin):
            schema.check_task(schema.read_description(checkpoint.info), schema.CLASSIFICATION)
    family = family_of_weights(state_dict) if isinstance(target, VisionModel) else None
    hint = ""
    if family is not None and not isinstance(target, family):
        hint = f"it looks like the weights of a {family.__name__} model, and this is a {type(target).__name__}; "
    elif isinstance(target, VisionModel):
        if relative := _name_relative(state_dict):
            hint = f"it looks like the weights of {relative}, which this library does not have; "
        try:
            state_dict = target.adapt_state_dict(state_dict, img_size=source_size(checkpoint))
        except _MISFITS as error:  # also for impossible shapes
            raise WeightsError(f"{origin} does not fit the model: {hint}{one_line(error)}") from error
        _adapt_input_channels(own, state_dict, name=first_conv_name(target))
    head = _head_names(target)
    if reset_head:
        if not head:
            raise ValueError(f"reset_head=True: the {type(target).__name__} does not say which layer is its head")
        state_dict = {name: tensor for name, tensor in state_dict.items() if name not in head}
        state_dict |= {name: own[name] for name in head if name in own}
    with errors_name(origin):
        _check_class_count(own, state_dict, head)
    if problems := _misfits(own, state_dict):
        raise WeightsError(f"{origin} does not fit the model: {hint}{problems}")
    return state_dict


def save_weights(model: nn.Module, path: str | os.PathLike[str], *, metadata: Mapping[str, str] | None = None) -> Path:
    """Writes the weights as safetensors, with the model's architecture and configuration in the metadata.

    `load_model` rebuilds the model from such a file. `read_metadata` returns the metadata.
    """
    target = unwrap_model(model)
    entries = describe_model(target)
    for key, value in (metadata or {}).items():
        if key in entries or not isinstance(value, str):
            raise ValueError(f"metadata {key!r}: {value!r}; expected a string, under none of the keys {list(entries)}")
        entries[key] = value

    tensors: StateDict = {}
    storages: set[int] = set()
    for name, tensor in target.state_dict().items():
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device: there are no values to write")
        tensor = tensor.detach().cpu().contiguous()
        # safetensors refuses tensors that share memory. Tied weights are written once for each name.
        if tensor.untyped_storage().data_ptr() in storages:
            tensor = tensor.clone()
        storages.add(tensor.untyped_storage().data_ptr())
        tensors[name] = tensor
    return write_safetensors(tensors, Path(path).expanduser(), metadata=entries)


def write_safetensors(tensors: StateDict, path: Path, *, metadata: dict[str, str]) -> Path:
    """Write a file with the permissions of any new file. safetensors would make it readable only for its owner."""
    with atomic_path(path) as temporary:
        temporary.touch()
        permissions = temporary.stat().st_mode
        save_file(tensors, temporary, metadata=metadata)
        temporary.chmod(permissions)
    return path


def describe_model(model: nn.Module) -> dict[str, str]:
    """The metadata from which `load_model` builds the model again: its name, its arguments, its conversions."""
    entries = {"format": "pt", schema.LIBRARY: f"inline_attention {__version__}"}
    if isinstance(model, VisionModel) and hasattr(model, "config"):  # built by create_model
        entries[schema.ARCHITECTURE] = architecture(model)
        entries[schema.ARGUMENTS] = json.dumps(model.config)
        entries[schema.CHANGES] = json.dumps(model.changes())
    for conversion in schema.CONVERSIONS.values():
        entries.update(conversion.describe(model))
    return entries


def _open_source(source: Source, *, ema: bool | None) -> tuple[Checkpoint, str]:
    """The checkpoint, and its name in errors."""
    if isinstance(source, Mapping):
        with errors_name("the mapping"):
            state_dict, is_ema = select_weights(source, ema=ema)
            if any(tensor.is_meta for tensor in state_dict.values()):
                raise ValueError("is on the meta device: there are no values to load")
        return Checkpoint(state_dict, is_ema, {}), "the mapping"
    path = local_path(source)
    return open_checkpoint(path, ema=ema), str(path)


def architecture(model: nn.Module) -> str:
    """The name that a model of this library or of timm is registered under."""
    cfg: Any = model.pretrained_cfg  # timm's builder sets it
    return cfg["architecture"]


def family_of_weights(names: Collection[str]) -> type[VisionModel] | None:
    """The family of weights with these names, official or own. None if that is not clear."""
    found = [cls for cls in families() if any(re.match(cls.checkpoint_names, name) for name in names)]
    return found[0] if len(found) == 1 else None


def _name_relative(names: Collection[str]) -> str | None:
    """The one of _RELATIVES that has weights with these names."""
    found = (key for key, pattern in _RELATIVES.items() if any(re.search(pattern, name) for name in names))
    return next(found, None)


def first_conv_name(model: nn.Module) -> str:
    """The weight whose shape depends on the channels of the image."""
    return next(f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Conv2d))


def source_size(checkpoint: Checkpoint) -> Grid | None:
    """The image size of weights, if our metadata or a training configuration in the file has it."""
    description = schema.read_description(checkpoint.info)
    official = checkpoint.info.get("config")
    args = _training_arguments(checkpoint)
    size: Any = None
    try:
        if description is not None:
            size = description.changes.get("img_size", description.arguments.get("img_size"))
        elif isinstance(official, Mapping):
            size = official.get("DATA", {}).get("IMG_SIZE")
        elif args.get("img_size") is not None:
            size = args["img_size"]
        elif args.get("input_size") is not None:
            size = args["input_size"][1:]  # (channels, height, width)
        return None if size is None else to_pair(size)
    except (TypeError, ValueError, AttributeError) as error:
        raise WeightsError(f"has no usable image size in its configuration: {one_line(size)}") from error


def _training_arguments(checkpoint: Checkpoint) -> dict[str, Any]:
    """The command line of timm's training script in its checkpoints."""
    args = checkpoint.info.get("args")
    return vars(args) if hasattr(args, "__dict__") else {}


def trained_preparation(checkpoint: Checkpoint, *, in_chans: int) -> dict[str, Any]:
    """How timm's training script prepared images, if its options said so. Empty for any other file."""
    args = _training_arguments(checkpoint)
    types = {"mean": list[float], "std": list[float], "interpolation": str}
    given = {key: args[key] for key in types if args.get(key) is not None and args[key] != ""}
    schema.check_values(types, given)
    for key in given.keys() & {"mean", "std"}:
        given[key] = [*given[key]] * (in_chans if len(given[key]) == 1 else 1)  # one number is for all channels
    return given


# Finding the model of a checkpoint without our metadata, by names and shapes.


def identify(checkpoint: Checkpoint, *, filename: str = "") -> str:
    """The only registered model that the weights fit without resizing. ValueError if there is none, or several.

    For models that differ only in their input size, the size in the file's configuration or name decides. A file of
    timm's script names its model, which is one of timm if it normalises images in another way than ours.
    """
    family = family_of_weights(checkpoint.state_dict)
    fitting = [name for name in list_models() if find_family(name) is family and _fits(name, checkpoint)]
    if (trained := _training_arguments(checkpoint).get("model")) in fitting:
        return trained
    if len(fitting) > 1:
        size = source_size(checkpoint)
        sides = {size[0]} if size else {int(number) for number in re.findall(r"\d+", filename)}
        fitting = [name for name in fitting if _input_side(name) in sides] or fitting
    if len(fitting) != 1:
        found = " and ".join(fitting) if fitting else "none of the registered models"
        if relative := _name_relative(checkpoint.state_dict):
            found += f"; it looks like the weights of {relative}, which timm has"
        raise WeightsError(f"does not say which model it is for, and its weights fit {found}: name the model")
    name = fitting[0]
    if name not in _TWINS or "config" in checkpoint.info:  # the official code's
        return name
    if isinstance(trained, str) and schema.is_timms(trained):
        ours, theirs = (get_pretrained_cfg(model) for model in (name, trained))
        same = ours is not None and theirs is not None and (ours.mean, ours.std) == (theirs.mean, theirs.std)
        return name if same else trained
    raise WeightsError(
        f"does not say which model it is for, and its weights fit {name} and timm's {_TWINS[name]}, which normalise "
        "images in different ways: name the model"
    )


def _input_side(name: str) -> int:
    cfg = get_pretrained_cfg(name)
    assert cfg is not None
    return cfg.input_size[1]


def _adapted_shapes(name: str, checkpoint: Checkpoint) -> tuple[VisionModel, StateDict]:
    """The model without a head, and the weights adapted to it, both on the meta device."""
    size = source_size(checkpoint)
    options: dict[str, Any] = {"img_size": size} if size else {}
    with torch.device("meta"):
        model = create_model(name, num_classes=0, **options)
    assert isinstance(model, VisionModel)
    on_meta = {key: tensor.to("meta") for key, tensor in checkpoint.state_dict.items()}
    return model, model.adapt_state_dict(on_meta, img_size=size)


def _fits(name: str, checkpoint: Checkpoint) -> bool:
    try:
        model, theirs = _adapted_shapes(name, checkpoint)
    except _MISFITS:
        return False
    resized = num_elements(theirs) != num_elements(kept_weights(checkpoint))
    return not resized and _shapes(theirs, model) == _shapes(model.state_dict(), model)


def _shapes(state_dict: StateDict, model: VisionModel) -> dict[str, torch.Size]:
    """Shapes that distinguish models, without the head and the number of input channels."""
    shapes = {name: tensor.shape for name, tensor in state_dict.items() if name not in HEAD_NAMES}
    conv = first_conv_name(model)
    if conv in shapes:
        shapes[conv] = shapes[conv][:1] + shapes[conv][2:]
    return shapes


def _fitting_options(name: str, checkpoint: Checkpoint) -> dict[str, Any]:
    """Arguments that fit a model to the weights: class count; for this library's, also input channels and size."""
    if find_family(name) is None:
        cfg = get_pretrained_cfg(name)
        head = None if cfg is None else checkpoint.state_dict.get(f"{cfg.classifier}.weight")
        return {} if head is None or head.ndim != 2 else {"num_classes": head.shape[0]}
    try:
        model, theirs = _adapted_shapes(name, checkpoint)
    except _MISFITS:
        return {}  # the load will fail with the reason
    head, conv = theirs.get(HEAD_NAMES[0]), theirs.get(first_conv_name(model))
    return {
        "num_classes": 0 if head is None else head.shape[0],
        "in_chans": model.in_chans if conv is None else conv.shape[1],
        "img_size": model.img_size,
    }


def kept_weights(checkpoint: Checkpoint) -> StateDict:
    """The weights without values that the models compute themselves."""
    computed = ("relative_position_index", "attn_mask")
    return {name: tensor for name, tensor in checkpoint.state_dict.items() if not name.endswith(computed)}


def num_elements(state_dict: StateDict) -> int:
    return sum(tensor.numel() for tensor in state_dict.values())


def _adapt_input_channels(own: StateDict, state_dict: StateDict, *, name: str) -> None:
    """Adapt a convolution of 3 input channels to another number, as timm does. The check finds other differences."""
    if name in state_dict:
        channels, weight = own[name].shape[1], state_dict[name]
        if weight.ndim == 4 and weight.shape[1] == 3 != channels:
            state_dict[name] = adapt_input_conv(channels, weight)


def _head_names(model: nn.Module) -> Sequence[str]:
    """The weights of the classifier, first the one with a row for each class. Empty if the model does not name it."""
    if isinstance(model, VisionModel):
        return HEAD_NAMES
    found: Any = (getattr(model, "pretrained_cfg", None) or {}).get("classifier") or ()  # as timm's models have it
    layers = [found] if isinstance(found, str) else found
    return [f"{layer}.{name}" for layer in layers for name in ("weight", "bias")]


def _check_class_count(own: StateDict, state_dict: StateDict, head: Sequence[str]) -> None:
    """Raise ValueError if the head is all that differs. The check of all tensors finds other differences."""
    if not head or own.keys() - set(head) != state_dict.keys() - set(head):
        return
    shapes = (tensors[head[0]].shape if head[0] in tensors else () for tensors in (state_dict, own))
    theirs, ours = (next(iter(shape), 0) for shape in shapes)
    if theirs != ours:
        raise ValueError(
            f"has {theirs} classes and the model has {ours}: build the model with num_classes={theirs}, "
            "or pass reset_head=True to load everything but the head"
        )


def _misfits(own: StateDict, state_dict: StateDict) -> str:
    """The names that are missing, unexpected or of another shape, in words; empty if the weights fit."""
    missing = [name for name in own if name not in state_dict]
    unexpected = [name for name in state_dict if name not in own]
    misfits = [
        f"{name} ({_kind(tensor)} instead of {_kind(own[name])})"
        for name, tensor in state_dict.items()
        if name in own and _kind(tensor) != _kind(own[name])
    ]
    return "; ".join(
        f"{len(entries)} {what}: {', '.join(entries[:_MAX_LISTED])}{', …' if len(entries) > _MAX_LISTED else ''}"
        for what, entries in (("missing", missing), ("unexpected", unexpected), ("of another shape", misfits))
        if entries
    )


def _kind(tensor: Tensor) -> str:
    """The properties that must match for a tensor to be loaded: its shape, and whether it is floating-point."""
    return f"{tuple(tensor.shape)}{'' if tensor.is_floating_point() else ' integers'}"
