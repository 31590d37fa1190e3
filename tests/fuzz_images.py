"""Damaged images for the readers: `fuzz_readers(folder, count=300, seed=0)`, with any count for a longer run.

python tests/fuzz_images.py 100000 7        # count and seed
"""

import io
import random
import resource
import struct
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
from PIL import Image

from inline_attention.data import DataConfig, open_files
from inline_attention.data.decode import MAX_PIXELS, UnreadableImage, image_size
from inline_attention.explore.pictures import BadPicture, decode_picture
from inline_attention.tasks.segmentation.sources import read_mask

# An image at the pixel limit, decoded (4 bytes a pixel), converted, and turned upright.
MAX_GROWTH = 4 * 4 * MAX_PIXELS
_INTERESTING = (0, 1, 2, 5, 6, 8, 0x7F, 0x80, 0xFF, 0x100, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFFFF, 0xFFFFFFFF)


def fuzz_readers(folder: Path, *, count: int, seed: int) -> Counter[str]:
    """Show `count` damaged images to every reader of the package: each is decoded or refused, and nothing else.

    Returns how many the classifier's loader has read and skipped.
    """
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcome: Counter[str] = Counter()
    names = []
    for number, (kind, content) in enumerate(damaged_images(count=count, seed=seed)):
        path = folder / f"{number:06}-{kind}.jpg"  # the readers go by the content
        path.write_bytes(content)
        names.append(path)
        _show_to_readers(path, content)
        if len(names) == 64 or number == count - 1:
            config = DataConfig(img_size=16, eval_transform="timm", batch_size=64, workers=0, max_broken=count)
            loader = open_files(names, config=config)
            read = sum(len(batch.images) for batch in loader)
            assert read + len(loader.skipped) == len(names), [path.name for path in names]
            outcome += Counter(read=read, skipped=len(loader.skipped))
            for path in names:
                path.unlink()
            names = []
    growth = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert growth < MAX_GROWTH, f"{growth:,} bytes of memory"
    return outcome


def _show_to_readers(path: Path, content: bytes) -> None:
    with suppress(UnreadableImage):
        height, width = image_size(path)
        assert 0 < height * width <= MAX_PIXELS
    with suppress(UnreadableImage, ValueError):  # ValueError: an image, but not of class numbers
        assert read_mask(path).ndim == 2
    with suppress(BadPicture):
        assert decode_picture(content).mode == "RGB"


def damaged_images(*, count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Image files of every format, each with up to four damages; a function of the seed."""
    originals = list(whole_images().items())
    rng = random.Random(seed)
    for _ in range(count):
        kind, content = rng.choice(originals)
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            damage = rng.choice((_flip_bit, _set_number, _cut_off, _cut_out, _insert, _repeat))
            content = damage(content, rng)
        if rng.random() < 0.2:
            content = content[: rng.randrange(len(content) + 1)] + rng.choice(originals)[1]
        yield kind, _with_png_checksums(content) if rng.random() < 0.7 else content


def whole_images() -> dict[str, bytes]:
    rng = np.random.default_rng(0)
    colours = Image.fromarray(rng.integers(0, 256, (24, 33, 3), dtype=np.uint8))
    smooth = Image.linear_gradient("L").resize((40, 24))
    sixteen_bit = Image.fromarray((np.arange(24 * 33) * 80 % 65536).astype(np.uint16).reshape(24, 33))
    frames = [colours.rotate(angle) for angle in (90, 180)]
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "a camera"
    animation = {"save_all": True, "append_images": frames}
    return {
        "jpeg": _encoded(colours, "JPEG", exif=exif),
        "jpeg-progressive": _encoded(smooth, "JPEG", progressive=True),
        "jpeg-cmyk": _encoded(colours.convert("CMYK"), "JPEG"),
        "png": _encoded(colours, "PNG", exif=exif),
        "png-palette": _encoded(colours.convert("P"), "PNG", transparency=3),
        "png-grey": _encoded(smooth, "PNG"),
        "png-16": _encoded(sixteen_bit, "PNG"),
        "png-animation": _encoded(colours, "PNG", **animation),
        "webp": _encoded(colours, "WEBP", exif=exif),
        "webp-lossless": _encoded(colours.convert("RGBA"), "WEBP", lossless=True),
        "webp-animation": _encoded(colours, "WEBP", **animation),
        "tiff": _encoded(colours, "TIFF"),
        "tiff-lzw": _encoded(colours, "TIFF", compression="tiff_lzw"),
        "tiff-deflate": _encoded(sixteen_bit, "TIFF", compression="tiff_adobe_deflate"),
        "tiff-jpeg": _encoded(colours, "TIFF", compression="jpeg"),
        "tiff-float": _encoded(smooth.convert("F"), "TIFF"),
        "gif": _encoded(colours, "GIF"),
        "gif-animation": _encoded(colours, "GIF", **animation),
        "bmp": _encoded(colours, "BMP"),
        "ppm": _encoded(colours, "PPM"),
        "pgm": _encoded(smooth, "PPM"),
    }


def _encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def _flip_bit(content: bytes, rng: random.Random) -> bytes:
    if not content:
        return content
    place = _place(content, rng)
    return content[:place] + bytes([content[place] ^ (1 << rng.randrange(8))]) + content[place + 1 :]


def _set_number(content: bytes, rng: random.Random) -> bytes:
    """Overwrite a length, a size or an offset with a value that parsers may not expect."""
    if not content:
        return content
    width = rng.choice((1, 2, 4))
    number = (rng.choice(_INTERESTING) % 2 ** (8 * width)).to_bytes(width, rng.choice(("little", "big")))
    place = _place(content, rng)
    return content[:place] + number + content[place + width :]


def _cut_off(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content) + 1)]


def _cut_out(content: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(content) + 1)
    return content[:place] + content[place + rng.randint(1, 64) :]


def _insert(content: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(content) + 1)
    return content[:place] + rng.randbytes(rng.randint(1, 64)) + content[place:]


def _repeat(content: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(content) + 1)
    end = min(len(content), start + rng.randint(1, 256))
    return content[:end] + content[start:end] * rng.randint(1, 8) + content[end:]


def _place(content: bytes, rng: random.Random) -> int:
    """A position, more often in the header, where sizes and offsets are."""
    return rng.randrange(min(len(content), 64) if rng.random() < 0.6 else len(content))


def _with_png_checksums(content: bytes) -> bytes:
    """The same with right checksums, without which a damaged chunk of a PNG file is not even parsed."""
    signature = b"\x89PNG\r\n\x1a\n"
    if not content.startswith(signature):
        return content
    parts, place = [signature], len(signature)
    while place + 12 <= len(content):
        (length,) = struct.unpack(">I", content[place : place + 4])
        end = place + 8 + length
        if end + 4 > len(content):
            break
        chunk = content[place + 4 : end]
        parts.append(content[place : place + 4] + chunk + struct.pack(">I", zlib.crc32(chunk)))
        place = end + 4
    return b"".join(parts) + content[place:]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        print(dict(fuzz_readers(Path(temporary), count=int(sys.argv[1]), seed=int(sys.argv[2]))))
