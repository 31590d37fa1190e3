"""Who is tracing."""

import torch


def is_exporting() -> bool:
    """As `torch.compiler.is_exporting`, which says True in torch.compile as well in torch 2.9 to 2.11."""
    return torch.compiler._is_exporting_flag
