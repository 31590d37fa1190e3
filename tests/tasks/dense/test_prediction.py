"""The files that predictions are written to."""

from pathlib import Path

import pytest
from PIL import Image

from inline_attention.tasks.dense.pictures import in_rows
from inline_attention.tasks.dense.prediction import open_output


def names(paths: list[str], output: Path) -> list[str]:
    return [result.name for result in open_output(output, [Path(path) for path in paths], endings=[".jpg"])]


def test_every_image_has_its_own_name(tmp_path: Path) -> None:
    assert names(["a.png", "b.c.png"], tmp_path) == ["a", "b.c"]
    assert names(["one/a.png", "two/a.png"], tmp_path) == ["a-0", "a-1"]
    assert names(["a.png", "a.jpg", "a-1.png"], tmp_path) == ["a-0", "a-2", "a-1"]


def test_no_result_replaces_an_image(tmp_path: Path) -> None:
    """As with `inline detect predict photos --output photos`."""
    image = tmp_path / "a.jpg"
    image.write_bytes(b"")
    with pytest.raises(ValueError, match=r"a.jpg would be replaced by a result; give another folder \(--output\)"):
        names([str(image)], tmp_path)
    assert names([str(tmp_path / "a.png")], tmp_path) == ["a"]


@pytest.mark.parametrize(("size", "expected"), [((40, 20), 40), ((20, 40), 160), ((1, 5000), 160), ((5000, 1), 1)])
def test_rows_of_narrow_images_are_not_endless(size: tuple[int, int], expected: int) -> None:
    """An image of 1 × 5000 pixels, enlarged to a width of 480, would take gigabytes."""
    cell = Image.new("RGB", size, "red")
    picture = in_rows([[cell, cell]], ("found", "annotated"), width=80)
    assert picture.size == (160, 20 + expected)
    for column in range(2):
        assert picture.getpixel((80 * column, 20)) == (255, 0, 0)


def test_a_file_is_no_folder_for_results(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for output in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=r"is not a folder; give another one for the results \(--output\)"):
            names(["a.png"], output)
