"""Unreadable images: counted, listed, and a reason to stop when there are too many."""

import logging
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_logger = logging.getLogger(__name__)


class SkippedImage(NamedTuple):
    """An image that could not be read, and why."""

    path: str
    reason: str


class SkippedImages:
    """The unreadable images of one split that this rank has met, each file once.

    `replaced` counts how often another image stood in for one of them in a training batch.
    """

    def __init__(self, *, limit: int) -> None:
        self.limit = limit
        self.replaced = 0
        self._reasons: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._reasons)

    def __iter__(self) -> Iterator[SkippedImage]:
        return (SkippedImage(path, reason) for path, reason in self._reasons.items())

    def extend(self, images: Iterable[SkippedImage]) -> None:
        """Note the files, each in the log; ValueError when there are more than `limit`."""
        for image in images:
            if image.path not in self._reasons:
                self._reasons[image.path] = image.reason
                _logger.warning("skipping unreadable image %s: %s", image.path, image.reason)
        if len(self) > self.limit:
            listed = "; ".join(f"{path} ({reason})" for path, reason in list(self)[:5])
            raise ValueError(
                f"{len(self)} unreadable images, more than the limit of {self.limit}: {listed}"
                f"{'; …' if len(self) > 5 else ''}. Repair or remove them, or raise data.max_broken "
                "(inline eval: --max-broken)."
            )

    def clear(self) -> None:
        self.replaced = 0
        self._reasons.clear()
