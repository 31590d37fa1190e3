import io
import os
import struct
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from fuzz_images import fuzz_readers
from PIL import Image

from inline_attention.data import DataConfig, open_files
from inline_attention.data.decode import UnreadableImage, decode_image, image_size, read_image
from inline_attention.explore.pictures import decode_picture
from inline_attention.tasks.detection.annotations import without_annotations
from inline_attention.tasks.detection.data import load
from inline_attention.tasks.segmentation.sources import MaskSource, Pair, read_mask

GRADIENT = np.arange(0, 256, 4, dtype=np.uint8).reshape(8, 8)
COLOURS = np.stack([GRADIENT, GRADIENT.T, 255 - GRADIENT], axis=-1)


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> io.BytesIO:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    buffer.seek(0)
    return buffer


def pixels(file: io.BytesIO, in_chans: int = 3) -> np.ndarray:
    return np.asarray(decode_image(file, in_chans=in_chans)).astype(int)


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


def turned(form: str = "PNG") -> tuple[bytes, np.ndarray]:
    """A file as phones write photographs, and its pixels upright."""
    exif = Image.Exif()
    exif[0x0112] = 6  # shown correctly after a quarter turn clockwise
    landscape = COLOURS[:5]
    return encoded(Image.fromarray(landscape), form, exif=exif).getvalue(), np.rot90(landscape, -1)


@pytest.mark.parametrize("form", ["PNG", "TIFF"])  # Pillow treats the orientation of a TIFF file in another way
def test_photographs_are_upright(form: str, tmp_path: Path) -> None:
    content, upright = turned(form)
    assert (pixels(io.BytesIO(content)) == upright).all()
    path = tmp_path / "photo"
    path.write_bytes(content)
    assert (np.asarray(read_image(path)) == upright).all()
    assert image_size(path) == upright.shape[:2] == (8, 5)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(10))  # 0 and 9 mean nothing
def test_sizes_are_those_of_upright_images(tmp_path: Path, kind: str, orientation: int) -> None:
    """Pillow turns TIFF files itself."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / "photo"
    path.write_bytes(encoded(Image.fromarray(COLOURS[:5]), kind, exif=exif).getvalue())
    image = read_image(path)
    assert image_size(path) == (image.height, image.width) == ((8, 5) if 5 <= orientation <= 8 else (5, 8))


def test_every_command_reads_photographs_alike(tmp_path: Path) -> None:
    """Classification, segmentation with its masks, detection and the web page."""
    content, upright = turned()
    path = tmp_path / "photo.png"
    path.write_bytes(content)
    config = DataConfig(img_size=[8, 5], eval_transform="resize", workers=0, mean=[0.0] * 3, std=[1.0] * 3)
    (batch,) = open_files([path], config=config)
    assert ((batch.images[0].permute(1, 2, 0) * 255).round().numpy() == upright).all()
    images = MaskSource([Pair(path, None)], class_names=[], labels=np.empty(0, np.int16))
    assert (images.read(0)[0] == upright).all()
    (annotated,) = without_annotations([path], ["cat"]).images
    assert annotated.size == (8, 5)
    assert (np.asarray(load(annotated)) == upright).all()
    assert np.abs(np.asarray(decode_picture(content).resize((5, 5))).astype(int) - upright[1:6]).mean() < 20
    mask = tmp_path / "mask.png"
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(GRADIENT[:5]).save(mask, exif=exif)
    assert (read_mask(mask) == np.rot90(GRADIENT[:5], -1)).all()


def test_damaged_exif_data_do_not_matter() -> None:
    file = encoded(Image.fromarray(COLOURS), exif=b"Exif\0\0not a directory of tags")
    assert (pixels(file) == COLOURS).all()


# Images that are attacks


def test_only_known_formats_are_opened(tmp_path: Path) -> None:
    """Pillow decides by content: it would start Ghostscript for this file, although its name ends in .jpg."""
    path = tmp_path / "photo.jpg"
    path.write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n%%EOF\n")
    for read in (read_image, image_size, read_mask):
        with pytest.raises(UnreadableImage, match="not an image in a known format"):
            read(path)


def png_header(width: int, height: int, *, depth: int, colour: int) -> bytes:
    """A PNG file that declares a size, with a few compressed zeros in it."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    rows = zlib.compress(bytes(4096))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize(("width", "height"), [(9460, 9460), (30000, 30000), (1, 90_000_000)])
def test_the_number_of_pixels_is_limited(tmp_path: Path, width: int, height: int) -> None:
    path = tmp_path / "photo.png"
    path.write_bytes(png_header(width, height, depth=16, colour=0))
    for read in (read_image, image_size, read_mask):
        with pytest.raises(UnreadableImage, match=r"more than the limit of 89,478,485|exceeds limit"):
            read(path)


def test_sixteen_bits_take_little_more_memory_than_the_image() -> None:
    values = np.arange(4_000_000, dtype=np.uint16).reshape(2000, 2000)
    tracemalloc.start()
    decode_image(Image.fromarray(values), in_chans=1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6 * values.size  # the values, the result, and a part of them as wider integers


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "photo.jpg")
    with pytest.raises(UnreadableImage, match="not a regular file"):
        read_image(tmp_path / "photo.jpg")


@pytest.mark.filterwarnings("ignore")  # Pillow's about damaged metadata
def test_damaged_images_are_read_or_refused(tmp_path: Path) -> None:
    outcome = fuzz_readers(tmp_path, count=400, seed=0)
    assert outcome["read"] > 40
    assert outcome["skipped"] > 100


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
