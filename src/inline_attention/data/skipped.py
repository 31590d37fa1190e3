"""Counts and lists unreadable images. Too many of them are an error."""

import logging
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from inline_attention.data.sources import utf8_name

_logger = logging.getLogger(__name__)


class SkippedImage(NamedTuple):
    """An image that could not be read, and why."""

    path: str
    reason: str


class SkippedImages:
    """The unreadable images of one split on this rank, each file once.

    `replaced` counts how often another image replaced one of them in a training batch.
    """

    def __init__(self, *, limit: int) -> None:
        self.limit = limit
        self.replaced = 0
        self._reasons: dict[str, str] = {}
        self._logged: set[str] = set()

    def __len__(self) -> int:
        return len(self._reasons)

    def __iter__(self) -> Iterator[SkippedImage]:
        return (SkippedImage(path, reason) for path, reason in self._reasons.items())

    def extend(self, images: Iterable[SkippedImage]) -> None:
        """Add images and log each file once. Raises ValueError if there are more than `limit` of them."""
        for image in (SkippedImage(utf8_name(path), reason) for path, reason in images):
            self._reasons.setdefault(image.path, image.reason)
            if image.path not in self._logged:
                self._logged.add(image.path)
                _logger.warning("skipping unreadable image %s: %s", image.path, image.reason)
        self.check_limit(len(self))

    def check_limit(self, count: int) -> None:
        """`count` is the number of unreadable images on all ranks."""
        if count > self.limit:
            listed = "; ".join(f"{path} ({reason})" for path, reason in list(self)[:5])
            raise ValueError(
                f"{count} unreadable images, more than the limit of {self.limit}: {listed}"
                f"{'; …' if count > 5 else ''}. Repair or remove them, or raise data.max_broken "
                "(in an evaluation: --max-broken)."
            )

    def clear(self) -> None:
        """Start a new count, as each evaluation does. A file that was logged is not logged again."""
        self.replaced = 0
        self._reasons.clear()
