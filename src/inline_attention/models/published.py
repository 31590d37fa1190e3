"""What was published of each model: ImageNet top-1 and where the weights are. Each family adds its own facts."""

from typing import NamedTuple


class Published(NamedTuple):
    """Facts of others; none was measured here."""

    top1: float | None = None
    url: str = ""
    sha256: str = ""  # of the file, if it was published


PUBLISHED: dict[str, Published] = {}  # by the name of the model; filled when a family is imported


def share_link(share: str) -> str:
    """The address of a checkpoint that the authors of the paper share."""
    return f"https://cloud.tsinghua.edu.cn/f/{share}/?dl=1"
