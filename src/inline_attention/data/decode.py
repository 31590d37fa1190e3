"""From the bytes of an image file to an 8-bit PIL image with one or three channels."""

from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps

# Pillow's modes for 16-bit greyscale; "I" is what older releases make of a 16-bit PNG.
_SIXTEEN_BIT_MODES = ("I;16", "I;16B", "I;16L", "I;16N", "I")


class UnreadableImage(Exception):
    """An image that cannot be decoded; the text says why. Callers skip and count it."""


def decode_image(file: BinaryIO | Image.Image, *, in_chans: int, exif_rotation: bool = False) -> Image.Image:
    """Decode to mode "L" (`in_chans` 1) or "RGB" (`in_chans` 3).

    CMYK, palette and YCbCr images are converted, an animation gives its first frame, an alpha channel is
    dropped (as torchvision and timm do), and 16-bit greyscale is scaled to 8 bits where `Image.convert` would
    saturate.
    """
    try:
        image = file if isinstance(file, Image.Image) else Image.open(file)
        image.load()
        if exif_rotation:
            image = ImageOps.exif_transpose(image)
        return _to_eight_bit(image, mode="L" if in_chans == 1 else "RGB")
    except Exception as error:  # Pillow's decoders raise nearly every built-in exception on damaged files
        empty = not isinstance(file, Image.Image) and file.seek(0, 2) == 0
        raise UnreadableImage("empty file (0 bytes)" if empty else reason(error)) from error


def _to_eight_bit(image: Image.Image, *, mode: str) -> Image.Image:
    if image.mode in _SIXTEEN_BIT_MODES:
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > 0xFFFF:
            raise ValueError(f"32-bit greyscale (values {values.min()} to {values.max()}) has no defined range")
        image = Image.fromarray(((values + 128) // 257).astype(np.uint8))
    elif image.mode == "F":
        raise ValueError("floating-point pixels have no defined range")
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # applies the palette first; otherwise Pillow warns
    return image if image.mode == mode else image.convert(mode)


def reason(error: Exception) -> str:
    """Why an image cannot be decoded, in one line."""
    if isinstance(error, Image.UnidentifiedImageError):
        return "not an image in a known format"
    text = " ".join(str(error).split())
    return text if isinstance(error, (OSError, ValueError)) and text else f"{type(error).__name__}: {text}"
