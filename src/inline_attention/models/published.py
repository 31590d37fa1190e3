"""What was published of each model: ImageNet top-1 and where the weights are. Facts of others, none measured here."""

from typing import NamedTuple


class Published(NamedTuple):
    top1: float | None = None
    url: str = ""
    sha256: str = ""  # of the file, where it was published


def _link(share: str) -> str:
    return f"https://cloud.tsinghua.edu.cn/f/{share}/?dl=1"


PUBLISHED: dict[str, Published] = {
    "inline_deit_tiny": Published(74.5, _link("1d6b8191ad6d4114b291")),
    "inline_deit_small": Published(80.2, _link("2f3898b07e9247f3beb3")),
    "inline_deit_base": Published(82.3, _link("10bdd726d4b0435eb34e")),
    "inline_pvt_tiny": Published(78.2, _link("90ac52b1555b401eb5e6")),
    "inline_pvt_small": Published(82.0, _link("1ab953b2479d433080a3")),
    "inline_pvt_medium": Published(83.2, _link("a72aec31e6084bc0a280")),
    "inline_pvt_large": Published(83.6, _link("efd91318ba964f01b288")),
    "inline_swin_tiny": Published(82.4, _link("32810869fcc34410966b")),
    "inline_swin_small": Published(83.6, _link("e9657fd247c04c7cb1a1")),
    "inline_swin_base": Published(84.1, _link("bf23564bb64c420aafe1")),
    "inline_swin_base_384": Published(),
    "inline_cswin_tiny": Published(83.2, _link("49fa2ecc543647c4b970")),
    "inline_cswin_small": Published(83.8, _link("59f4e65f776f4052b93c")),
    "inline_cswin_base": Published(84.5, _link("91e17121df284ae38521")),
    "inline_cswin_base_384": Published(85.7),
    "softmax_deit_tiny": Published(72.2),
    "softmax_deit_small": Published(79.8),
    "softmax_deit_base": Published(81.8),
    "softmax_pvt_tiny": Published(75.1),
    "softmax_pvt_small": Published(79.8),
    "softmax_pvt_medium": Published(81.2),
    "softmax_pvt_large": Published(81.7),
    "softmax_swin_tiny": Published(81.3),
    "softmax_swin_small": Published(83.0),
    "softmax_swin_base": Published(83.5),
    "softmax_cswin_tiny": Published(82.7),
    "softmax_cswin_small": Published(83.6),
    "softmax_cswin_base": Published(84.2),
}
