"""What the evaluations of all tasks share: values of all ranks, and the check of unreadable images."""

import logging
from typing import Any, TypeVar

from inline_attention.data import EvalLoader
from inline_attention.training.distributed import current_ranks

Value = TypeVar("Value")

_logger = logging.getLogger(__name__)


def over_ranks(value: Value) -> list[Value]:
    """Every rank's value, on every rank."""
    return current_ranks().gather(value)


def check_readable(loader: EvalLoader[Any, Any], *, images: int, skipped: int) -> None:
    """Check the numbers of images of all ranks that were evaluated and that could not be read.

    ValueError if no image could be read, or too many could not. A few unreadable images are logged.
    """
    ranks = current_ranks()
    if images == 0:
        ranks.fail(ValueError(f"nothing to evaluate: none of the {loader.num_images} images could be read"))
    loader.skipped.check_limit(skipped)
    if skipped and ranks.is_first:
        _logger.warning("%d unreadable images are left out: results are over the other %d", skipped, images)
