import io

import numpy as np
import pytest
from PIL import Image

from inline_attention.data.decode import UnreadableImage, decode_image

GRADIENT = np.arange(0, 256, 4, dtype=np.uint8).reshape(8, 8)
COLOURS = np.stack([GRADIENT, GRADIENT.T, 255 - GRADIENT], axis=-1)


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> io.BytesIO:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    buffer.seek(0)
    return buffer


def pixels(file: io.BytesIO, in_chans: int = 3, **options: bool) -> np.ndarray:
    return np.asarray(decode_image(file, in_chans=in_chans, **options)).astype(int)


def test_colour_and_greyscale() -> None:
    assert (pixels(encoded(Image.fromarray(COLOURS))) == COLOURS).all()
    assert (pixels(encoded(Image.fromarray(GRADIENT)), in_chans=1) == GRADIENT).all()
    assert (pixels(encoded(Image.fromarray(GRADIENT))) == GRADIENT[..., None]).all()


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
@pytest.mark.parametrize("in_chans", [1, 3])
def test_sixteen_bits_are_scaled(kind: str, in_chans: int) -> None:
    values = np.linspace(0, 65535, 64).round().astype(np.uint16).reshape(8, 8)
    decoded = pixels(encoded(Image.fromarray(values), kind), in_chans=in_chans).reshape(8, 8, -1)
    assert (decoded == np.round(values / 257).astype(int)[..., None]).all()
    assert decoded.max() == 255
    assert (decoded == 255).sum() == in_chans  # only the brightest pixel: nothing is saturated


def test_thirty_two_bits_have_no_range() -> None:
    with pytest.raises(UnreadableImage, match="no defined range"):
        decode_image(encoded(Image.fromarray(np.full((2, 2), 1 << 20, dtype=np.int32)), "TIFF"), in_chans=3)
    with pytest.raises(UnreadableImage, match="floating-point"):
        decode_image(encoded(Image.fromarray(np.zeros((2, 2), dtype=np.float32)), "TIFF"), in_chans=3)


def test_cmyk() -> None:
    image = Image.fromarray(COLOURS).convert("CMYK")
    assert np.abs(pixels(encoded(image, "JPEG", quality=100, subsampling=0)) - COLOURS).max() < 16


@pytest.mark.filterwarnings("error")  # Pillow warns where a palette's transparency is dropped carelessly
def test_palette_with_transparency() -> None:
    image = Image.fromarray(COLOURS).convert("P", palette=Image.Palette.ADAPTIVE)
    expected = np.asarray(image.convert("RGB"))
    assert (pixels(encoded(image, transparency=bytes([0, 128]))) == expected).all()


def test_alpha_is_dropped() -> None:
    grey = Image.merge("LA", [Image.fromarray(GRADIENT), Image.fromarray(255 - GRADIENT)])
    assert (pixels(encoded(grey), in_chans=1) == GRADIENT).all()
    colour = Image.fromarray(np.dstack([COLOURS, GRADIENT]))
    assert (pixels(encoded(colour)) == COLOURS).all()


def test_animation_gives_its_first_frame() -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "lime", "blue")]
    decoded = pixels(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    assert (decoded == [255, 0, 0]).all()


def test_exif_rotation_is_an_option() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # shown correctly after a quarter turn clockwise
    file = encoded(Image.fromarray(COLOURS), exif=exif)
    assert (pixels(file) == COLOURS).all()
    file.seek(0)
    assert (pixels(file, exif_rotation=True) == np.rot90(COLOURS, -1)).all()


def test_unreadable() -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    for content, reason in (
        (b"", "empty file"),
        (b"<html>404</html>", "not an image"),
        (encoded(noise, "JPEG").getvalue()[:1500], "truncated"),
        (encoded(noise, "PNG").getvalue()[:1500], "truncated"),
    ):
        with pytest.raises(UnreadableImage, match=reason):
            decode_image(io.BytesIO(content), in_chans=3)
