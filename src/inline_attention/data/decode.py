"""The one image reader of the package: from a file to an upright 8-bit PIL image with one or three channels."""

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import ExifTags, Image, ImageOps

# The formats whose file name extensions `sources.IMAGE_EXTENSIONS` lists. Without this list Pillow decides by content:
# it would start Ghostscript for an EPS file called photo.jpg.
FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "GIF", "BMP", "PPM")
# Pillow only warns above this number of pixels, but a file of a few kilobytes can decode to many times more.
MAX_PIXELS = 89_478_485
MAX_BYTES = 2**29  # of an encoded image in a compressed archive

# Pillow's modes for 16-bit greyscale. Older releases open a 16-bit PNG as "I".
_SIXTEEN_BIT_MODES = ("I;16", "I;16B", "I;16L", "I;16N", "I")
_QUARTER_TURNS = (5, 6, 7, 8)  # EXIF orientations that exchange height and width


class UnreadableImage(Exception):
    """An image that cannot be decoded; the text says why. Callers skip and count it."""


class TooManyPixels(UnreadableImage):
    """An image above the pixel limit, refused before its pixels are decoded."""


def read_image(path: str | Path) -> Image.Image:
    """Decode an image file to "RGB", as `decode_image` does."""
    with open_file(path) as file:
        return decode_image(file, in_chans=3)


def open_file(path: str | Path) -> BinaryIO:
    """Open a regular file. Opening anything else could block: a named pipe waits for a writer."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise UnreadableImage("not a regular file")
        return open(path, "rb")
    except OSError as error:
        raise UnreadableImage(error.strerror or str(error)) from error


def open_image(file: BinaryIO, *, formats: tuple[str, ...] = FORMATS, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Read the header of an image. No pixel is decoded, and an image above `max_pixels` is refused."""
    try:
        image = Image.open(file, formats=formats)
    except Image.DecompressionBombError as error:
        raise TooManyPixels(reason(error)) from error
    except Exception as error:  # parsers of damaged files raise nearly every built-in exception
        empty = file.seek(0, os.SEEK_END) == 0
        raise UnreadableImage("empty file (0 bytes)" if empty else reason(error)) from error
    check_pixels(*image.size, max_pixels=max_pixels)
    return image


def check_pixels(width: int, height: int, *, max_pixels: int = MAX_PIXELS) -> None:
    if width * height > max_pixels:
        raise TooManyPixels(f"{width} × {height} pixels, more than the limit of {max_pixels:,}; scale it down")


def decode_image(file: BinaryIO | Image.Image, *, in_chans: int) -> Image.Image:
    """Decode to mode "L" (`in_chans` 1) or "RGB" (`in_chans` 3), turned upright by the EXIF orientation.

    CMYK, palette and YCbCr images are converted. An animation gives its first frame. An alpha channel is dropped, as
    torchvision and timm do. 16-bit greyscale is scaled to 8 bits, because `Image.convert` would saturate.
    """
    if isinstance(file, Image.Image):
        image = file
        check_pixels(*image.size)
    else:
        image = open_image(file)
    try:
        load_upright(image)
        return _to_eight_bit(image, mode="L" if in_chans == 1 else "RGB")
    except Exception as error:
        raise UnreadableImage(reason(error)) from error


def load_upright(image: Image.Image) -> None:
    """Decode the pixels in place and turn them by the EXIF orientation."""
    image.load()
    with suppress(Exception):  # damaged EXIF data do not make the pixels unreadable
        ImageOps.exif_transpose(image, in_place=True)


def image_size(path: str | Path) -> tuple[int, int]:
    """(height, width) of the upright image, from its header."""
    with open_file(path) as file:
        image = open_image(file)
        orientation = None
        with suppress(Exception):
            orientation = image.getexif().get(ExifTags.Base.Orientation)
        # Pillow already exchanges the sides of a TIFF file.
        turned = orientation in _QUARTER_TURNS and image.format != "TIFF"
        return (image.width, image.height) if turned else (image.height, image.width)


def _to_eight_bit(image: Image.Image, *, mode: str) -> Image.Image:
    if image.mode in _SIXTEEN_BIT_MODES:
        values = np.asarray(image)
        low, high = values.min(initial=0), values.max(initial=0)
        if low < 0 or high > 0xFFFF:
            raise ValueError(f"32-bit greyscale (values {low} to {high}) has no defined range")
        image = Image.fromarray(_sixteen_to_eight_bit(values))
    elif image.mode == "F":
        raise ValueError("floating-point pixels have no defined range")
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # applies the palette first; otherwise Pillow warns
    return image if image.mode == mode else image.convert(mode)


def _sixteen_to_eight_bit(values: np.ndarray) -> np.ndarray:
    """Round v/257, some rows at a time: the sum needs wider integers than the image."""
    scaled = np.empty(values.shape, dtype=np.uint8)
    rows = max(1, 2**20 // max(1, values.shape[1]))
    for start in range(0, len(values), rows):
        scaled[start : start + rows] = (values[start : start + rows].astype(np.uint32) + 128) // 257
    return scaled


def reason(error: Exception) -> str:
    """Why an image cannot be decoded, in one line."""
    if isinstance(error, UnreadableImage):
        return str(error)
    if isinstance(error, Image.UnidentifiedImageError):
        return "not an image in a known format"
    text = " ".join(str(error).split())
    return text if isinstance(error, (OSError, ValueError)) and text else f"{type(error).__name__}: {text}"
