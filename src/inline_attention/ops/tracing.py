"""Whether a program is being recorded that must run without this library."""

import torch


def is_exporting() -> bool:
    """True under torch.export and torch.jit.trace, whose programs hold PyTorch's own operations only.

    The flag is that of `torch.compiler.is_exporting`, which is also True under torch.compile in torch 2.9 to 2.11.
    """
    return torch.compiler._is_exporting_flag or torch.jit.is_tracing()
