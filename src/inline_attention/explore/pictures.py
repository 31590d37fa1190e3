"""Uploaded pictures: decoded within limits, and kept in memory for a while under random names."""

import io
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from PIL import Image, ImageOps

from inline_attention.data.decode import TooManyPixels, UnreadableImage, decode_image, open_image

# The formats of cameras, browsers and screenshots. Pillow reads more, but every parser adds risk.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
MAX_BYTES = 16 * 2**20
MAX_PIXELS = 40_000_000
SIDE = 512  # of the square that is stored and shown; it is scaled for each model


class BadPicture(Exception):
    """A file that cannot be used as a picture. The text is shown to the user."""


def decode_picture(data: bytes) -> Image.Image:
    """The centre square of an image file, RGB, `SIDE` pixels a side. The size is checked before a pixel is decoded."""
    try:
        image = open_image(io.BytesIO(data), formats=FORMATS, max_pixels=MAX_PIXELS)
    except TooManyPixels as error:
        raise BadPicture(f"at most {MAX_PIXELS // 10**6} million pixels are decoded here ({error})") from error
    except UnreadableImage as error:
        raise BadPicture(f"this is not an image that can be read here; expected {', '.join(FORMATS)}") from error
    try:
        # A JPEG decodes at a half, quarter or eighth of its size many times faster; other formats ignore this.
        image.draft("RGB", (2 * SIDE, 2 * SIDE))
        decoded = decode_image(image, in_chans=3)
    except UnreadableImage as error:
        raise BadPicture(f"the image is damaged: {error}") from error
    return ImageOps.fit(decoded, (SIDE, SIDE), Image.Resampling.BICUBIC)


@dataclass(frozen=True)
class Picture:
    image: Image.Image  # RGB, square
    png: bytes  # the same, as the page shows it

    @classmethod
    def of(cls, image: Image.Image) -> "Picture":
        file = io.BytesIO()
        image.save(file, format="PNG", compress_level=1)
        return cls(image, file.getvalue())


class PictureStore:
    """Pictures by name: those of the page, which are permanent, and uploads, of which the oldest are removed.

    An upload has a random name, so visitors cannot find the pictures of others.
    """

    def __init__(
        self,
        samples: dict[str, Picture],
        *,
        capacity: int = 64,
        seconds: float = 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._samples = samples
        self._capacity, self._seconds, self._clock = capacity, seconds, clock
        self._visitors: OrderedDict[str, tuple[float, Picture]] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, picture: Picture) -> str:
        name = secrets.token_urlsafe(16)
        with self._lock:
            self._forget_old()
            while len(self._visitors) >= self._capacity:
                self._visitors.popitem(last=False)
            self._visitors[name] = (self._clock() + self._seconds, picture)
        return name

    def get(self, name: str) -> Picture | None:
        """The picture of that name, or None. A picture that is used stays longer."""
        if name in self._samples:
            return self._samples[name]
        with self._lock:
            self._forget_old()
            entry = self._visitors.get(name)
            if entry is None:
                return None
            self._visitors[name] = (self._clock() + self._seconds, entry[1])
            self._visitors.move_to_end(name)
            return entry[1]

    def _forget_old(self) -> None:
        now = self._clock()
        while self._visitors:  # in order of use, so the first goes first
            expires, _ = next(iter(self._visitors.values()))
            if expires > now:
                break
            self._visitors.popitem(last=False)
