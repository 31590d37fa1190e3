"""Parameter groups, and the optimizer: AdamW with updates that never wait for the device, or one of timm's."""

from typing import Any

import torch
from timm.models import group_parameters
from timm.optim import create_optimizer_v2, param_groups_layer_decay, param_groups_weight_decay
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from inline_attention.training.config import OptimConfig


def freeze_layers(model: nn.Module, groups: int) -> list[str]:
    """Freeze the first `groups` layer groups of the model's `group_matcher`. Returns the names of the parameters."""
    if groups == 0:
        return []
    layer_of = group_parameters(model, model.group_matcher(coarse=True), reverse=True)  # type: ignore[operator]  # timm's contract
    last = max(layer_of.values())
    if groups > last:
        raise ValueError(f"model.freeze={groups}: {type(model).__name__} has {last} layer groups before its head")
    frozen = [name for name, layer in layer_of.items() if layer < groups]
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    return frozen


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Groups of trainable parameters. `lr_scale` of a group combines `layer_decay` and `head_rate`.

    1-D parameters, biases and those in `model.no_weight_decay()` have no weight decay.
    """
    exempt = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()  # type: ignore[operator]  # timm's contract
    options: dict[str, Any] = {"no_weight_decay_list": exempt}
    head = _classifier_parameters(model)
    if "muon" in config.name:
        # Muon is for weights between hidden layers. timm's Muon uses AdamW for tokens, positions and the classifier.
        options |= {"fallback_list": list(head), "fallback_no_weight_decay": True}
    if config.layer_decay is None:
        groups = param_groups_weight_decay(model, config.weight_decay, **options)
    else:
        groups = param_groups_layer_decay(model, config.weight_decay, layer_decay=config.layer_decay, **options)
    if config.head_rate == 1:
        return groups
    if not head:
        raise ValueError(f"optim.head_rate={config.head_rate}: {type(model).__name__} has no classifier; use 1")
    of_head = {id(parameter) for parameter in head.values()}
    parts = []
    for group in groups:
        scale = group.get("lr_scale", 1.0)
        for is_head, factor in ((False, 1.0), (True, config.head_rate)):
            chosen = [parameter for parameter in group["params"] if (id(parameter) in of_head) == is_head]
            if chosen:
                parts.append({**group, "params": chosen, "lr_scale": scale * factor})
    return parts


def _classifier_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of the classifier (or of several, in timm's distilled models), by name."""
    if not hasattr(model, "get_classifier"):
        return {}
    found: Any = model.get_classifier()  # type: ignore[operator]  # timm's contract
    classifiers = found if isinstance(found, tuple) else (found,)
    own = {id(parameter) for classifier in classifiers for parameter in classifier.parameters()}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in own}


class Optimizer:
    """The optimizer with clipping and, for fp16, a gradient scaler.

    An update with a non-finite gradient changes neither weights nor moments. AdamW's fused kernel decides that on the
    device (`found_inf`, the hook of GradScaler), so the host does not wait. With other optimizers the host waits.
    """

    def __init__(self, model: nn.Module, config: OptimConfig, *, scaler: torch.amp.GradScaler | None = None) -> None:
        groups = parameter_groups(model, config)
        self.inner: torch.optim.Optimizer
        self.is_fused = config.name == "adamw"
        if self.is_fused:
            first, second = config.betas or (0.9, 0.999)
            self.inner = torch.optim.AdamW(
                groups, lr=config.lr, betas=(first, second), eps=config.eps or 1e-8, fused=True
            )
        else:
            own = {"betas": config.betas, "eps": config.eps}
            given: dict[str, Any] = {key: value for key, value in own.items() if value is not None}
            try:
                self.inner = create_optimizer_v2(groups, config.name, lr=config.lr, momentum=config.momentum, **given)
            except TypeError as error:
                raise ValueError(f"optim.name={config.name} does not take {' and '.join(given)}: {error}") from error
        self.parameters = [p for group in self.inner.param_groups for p in group["params"]]
        self.clip_norm = config.clip_norm
        self.scaler = scaler

    def backward(self, loss: Tensor) -> None:
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(self, rate: float) -> Tensor:
        """Apply the accumulated gradient and clear it. Returns its norm before clipping, () on the device."""
        for group in self.inner.param_groups:
            group["lr"] = rate * group.get("lr_scale", 1.0)
        if self.scaler is not None:
            self.scaler.unscale_(self.inner)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        sharded_norm = torch.nn.utils.get_total_norm(gradients)
        norm = sharded_norm.full_tensor() if isinstance(sharded_norm, DTensor) else sharded_norm
        if self.clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.clip_norm, norm)
        if self.scaler is not None:
            self.scaler.step(self.inner)
            self.scaler.update()
        elif self.is_fused:
            self.inner.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]  # read by the fused step
            self.inner.step()
        elif norm.isfinite():
            self.inner.step()
        self.inner.zero_grad()
        return norm
