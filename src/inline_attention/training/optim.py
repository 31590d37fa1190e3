"""Parameter groups, and AdamW with updates that never wait for the device."""

from typing import Any

import torch
from timm.models import group_parameters
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
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
    """Trainable parameters with and without weight decay. With `layer_decay`, each group also has an `lr_scale`.

    1-D parameters, biases and those in `model.no_weight_decay()` have none.
    """
    exempt = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()  # type: ignore[operator]  # timm's contract
    if config.layer_decay is None:
        return param_groups_weight_decay(model, config.weight_decay, no_weight_decay_list=exempt)
    return param_groups_layer_decay(
        model, config.weight_decay, no_weight_decay_list=exempt, layer_decay=config.layer_decay
    )


class Optimizer:
    """AdamW with clipping and, for fp16, a gradient scaler.

    An update with a non-finite gradient changes neither weights nor moments. The fused kernel decides that on the
    device (`found_inf`, the hook of GradScaler), so the host does not wait.
    """

    def __init__(self, model: nn.Module, config: OptimConfig, *, scaler: torch.amp.GradScaler | None = None) -> None:
        self.adamw = torch.optim.AdamW(
            parameter_groups(model, config), lr=config.lr, betas=config.betas, eps=config.eps, fused=True
        )
        self.parameters = [p for group in self.adamw.param_groups for p in group["params"]]
        self.clip_norm = config.clip_norm
        self.scaler = scaler

    def backward(self, loss: Tensor) -> None:
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(self, rate: float) -> Tensor:
        """Apply the accumulated gradient and clear it. Returns its norm before clipping, () on the device."""
        for group in self.adamw.param_groups:
            group["lr"] = rate * group.get("lr_scale", 1.0)
        if self.scaler is not None:
            self.scaler.unscale_(self.adamw)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        sharded_norm = torch.nn.utils.get_total_norm(gradients)
        norm = sharded_norm.full_tensor() if isinstance(sharded_norm, DTensor) else sharded_norm
        if self.clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.clip_norm, norm)
        if self.scaler is not None:
            self.scaler.step(self.adamw)
            self.scaler.update()
        else:
            self.adamw.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]  # read by the fused step
            self.adamw.step()
        self.adamw.zero_grad()
        return norm
