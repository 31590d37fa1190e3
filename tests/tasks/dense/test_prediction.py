"""The files that predictions are written to."""

from pathlib import Path

import pytest

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


def test_a_file_is_no_folder_for_results(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for output in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=r"is not a folder; give another one for the results \(--output\)"):
            names(["a.png"], output)
