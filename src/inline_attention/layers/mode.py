"""What a module does when it is called: its mode, and whether anybody changed its call."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

# For a method without arguments that looks at modules, such as at their hooks. torch.compile calls it when it traces a
# model and keeps the answer: a check of hundreds of attributes would take as long as the kernels of a small image. A
# module that is replaced by one of another class is traced again. Hooks that are added after the first compiled call do
# nothing, as those of any module that PyTorch compiles.
asked_once = torch.compiler.assume_constant_result


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode; afterwards every module is in the mode that it was in.

    `model.train()` is not enough: it would put frozen norms, which a user keeps in evaluation mode, into training mode.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a call of the module is the forward of this class and nothing else."""
    return type(module) is kind and not is_changed(module)


def is_changed(module: nn.Module) -> bool:
    """Whether a call of this module does more or other than its class says: it has hooks, or a forward of its own."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in vars(module)  # as some libraries attach adapters
    )
