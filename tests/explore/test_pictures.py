"""Pictures of visitors: what is decoded, what is refused before it is, and how long it is kept."""

import io

import numpy as np
import pytest
from explored import huge_png, picture_file
from PIL import Image

from inline_attention.explore.pictures import MAX_PIXELS, SIDE, BadPicture, Picture, PictureStore, decode_picture


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_formats(file_format: str) -> None:
    image = decode_picture(picture_file(80, 50, format=file_format))
    assert (image.mode, image.size) == ("RGB", (SIDE, SIDE))


def test_the_centre_square_is_kept() -> None:
    pixels = np.zeros((40, 100, 3), dtype=np.uint8)
    pixels[:, 30:70] = (200, 100, 50)  # just the centre
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    image = np.asarray(decode_picture(file.getvalue())).astype(int)
    inner = image[:, 30:-30]  # scaling blends a pixel of the file at the edges, which is 13 here, with its neighbours
    assert abs(inner - (200, 100, 50)).max() <= 1


def test_a_photograph_is_upright() -> None:
    """Phones write the pixels as the sensor has them, and how to turn them."""
    pixels = np.zeros((40, 40, 3), dtype=np.uint8)
    pixels[:20] = 255
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG", exif=exif)
    image = np.asarray(decode_picture(file.getvalue()))
    assert image[10].max() == 0
    assert image[-10].min() == 255


@pytest.mark.parametrize("side", [7000, 12000, 30000])  # Pillow itself warns of the second and refuses the third
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_too_many_pixels_are_not_decoded(side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(*args: object, **kwargs: object) -> None:
        raise AssertionError("pixels are decoded")

    assert side**2 > MAX_PIXELS
    data = huge_png(side)
    monkeypatch.setattr("inline_attention.explore.pictures.decode_image", decode)
    with pytest.raises(BadPicture, match="at most 40 million pixels"):
        decode_picture(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not an image"),
        (b"GIF89a", "not an image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image"),
        (picture_file(format="TIFF"), "not an image"),
        (picture_file()[:200], "damaged"),
        (picture_file(format="JPEG")[:700], "damaged"),
    ],
    ids=["empty", "stub", "svg", "tiff", "cut png", "cut jpeg"],
)
def test_what_is_no_picture(data: bytes, message: str) -> None:
    with pytest.raises(BadPicture, match=message):
        decode_picture(data)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def a_picture() -> Picture:
    return Picture.of(Image.new("RGB", (SIDE, SIDE)))


def test_pictures_are_kept_for_a_while() -> None:
    clock = Clock()
    sample = a_picture()
    store = PictureStore({"sample": sample}, seconds=10, clock=clock)
    looked_at, forgotten = store.add(a_picture()), store.add(a_picture())
    clock.now = 9
    assert store.get(looked_at) is not None
    clock.now = 11
    assert store.get(looked_at) is not None
    assert store.get(forgotten) is None
    clock.now = 1000
    assert store.get(looked_at) is None
    assert store.get("sample") is sample


def test_the_oldest_makes_room() -> None:
    store = PictureStore({}, capacity=2)
    first, second = store.add(a_picture()), store.add(a_picture())
    assert store.get(first) is not None  # now the second is the oldest
    third = store.add(a_picture())
    assert store.get(second) is None
    assert store.get(first) is not None
    assert store.get(third) is not None
    assert len({first, second, third}) == 3
    assert min(len(name) for name in (first, second, third)) >= 22  # 128 bits
