"""Published facts about each model: ImageNet top-1 and the address of its weights. Each family adds its own."""

from typing import NamedTuple


class Published(NamedTuple):
    """Published facts. None was measured here."""

    top1: float | None = None
    url: str = ""
    sha256: str = ""  # of the file, if it was published


PUBLISHED: dict[str, Published] = {}  # by the name of the model; filled when a family is imported


def share_link(share: str) -> str:
    """The address of a checkpoint that the authors of the paper share."""
    return f"https://cloud.tsinghua.edu.cn/f/{share}/?dl=1"
