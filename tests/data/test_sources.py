import io
import json
import os
import shutil
import struct
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import timm.utils.misc
from PIL import Image

from inline_attention.data import DataConfig, open_data, open_eval_data, typical_side
from inline_attention.data.dataset import load_image
from inline_attention.data.factory import open_source
from inline_attention.data.sources import FolderSource, PackedStrings, SpreadSource, natural_key

MakeFolder = Callable[..., Path]


def config(path: object, **options: object) -> DataConfig:
    defaults: dict[str, object] = {"img_size": 8, "batch_size": 2, "workers": 0}
    return DataConfig(path=str(path), **{**defaults, **options})


def test_packed_strings() -> None:
    strings = ["a", "", "n01440764/ü.png", "last"]
    packed = PackedStrings(strings)
    assert list(packed) == strings
    assert len(packed) == 4


# Folders


def test_natural_order_is_timms_and_takes_every_name() -> None:
    names = ["b", "A10", "a9", "10", "9", "٣", "x2y10", "x2y9", ""]
    assert sorted(names, key=natural_key) == sorted(names, key=timm.utils.misc.natural_key)
    assert sorted(["10²", "9²", "9"], key=natural_key) == ["9", "9²", "10²"]  # "²".isdigit(), but int("²") fails


def test_folder(make_folder: MakeFolder) -> None:
    root = make_folder(train={"class10": 3, "class2": 1, "class1": 2}, val={"class1": 1, "class2": 1, "class10": 1})
    nested = root / "train" / "class1" / "more" / "deep.PNG"
    nested.parent.mkdir()
    Image.new("RGB", (9, 9)).save(nested)
    (root / "train" / "class1" / "notes.txt").write_text("not an image, and not taken for one")
    (root / "train" / ".hidden").mkdir()
    (root / "train" / "__MACOSX").mkdir()
    (root / "train" / "class1" / "._000.png").write_bytes(b"no image: macOS adds such files on some disks")
    source = open_source(config(root), "train")
    assert source.class_names == ["class1", "class2", "class10"]  # natural order
    labels = {source.path(i): load_image(source, i, config=config(root))[1] for i in range(len(source))}
    images = [path for path in (root / "train").rglob("*") if path.suffix.lower() == ".png" and path.name[0] != "."]
    assert labels == {str(path): source.class_names.index(path.relative_to(root / "train").parts[0]) for path in images}


def test_class_names_that_differ_in_case_or_zeros(make_folder: MakeFolder) -> None:
    """Natural order alone would leave them to the file system, or to the process's hashes of strings."""
    names = ["A1", "a1", "a01", "A01", "b"]
    root = make_folder(train=dict.fromkeys(names, 1), val=dict.fromkeys(reversed(names), 1))
    data = open_data(config(root))
    assert data.class_names == data.val.class_names == ["A01", "A1", "a01", "a1", "b"]
    (root / "loose").mkdir()
    for number, name in enumerate(names):
        shutil.copy(root / "train" / name / "000.png", root / "loose" / f"{number}.png")
    lines = (f"{number}.png,{name},val\n" for number, name in enumerate(names))
    (root / "loose" / "labels.csv").write_text("file,label,split\n" + "".join(lines))
    assert open_eval_data(config(root / "loose")).class_names == data.class_names


def test_splits_are_named(make_folder: MakeFolder) -> None:
    root = make_folder(train={"a": 2}, validation={"a": 3}, test={"a": 1})
    assert open_data(config(root, val_split="validation")).val.num_images == 3
    assert open_data(config(root, val_split="test")).val.num_images == 1
    with pytest.raises(ValueError, match=r"no split 'val' in .*; there is test, train, validation\. Name the splits"):
        open_data(config(root))


def test_images_without_labels(make_folder: MakeFolder, tmp_path: Path) -> None:
    """Images may be at any depth, in different folders in each split. A folder without splits is divided."""
    root = make_folder(train={"a": 2, "b": 1}, val={"c": 3})
    Image.new("RGB", (9, 9)).save(root / "train" / "top.png")
    data = open_data(config(root, labels=False))
    assert (data.train.steps_per_epoch, data.val.num_images, data.class_names) == (2, 3, [])
    known = open_data(config(root, labels=False), class_names=["of", "a", "model"])
    assert [target for batch in known.val for target in batch.targets.tolist()] == [0, 0, 0]
    assert open_eval_data(config(root, labels=False), class_names=["of", "a", "model"]).num_images == 3
    with pytest.raises(ValueError, match="no split 'test'"):
        open_data(config(root, labels=False, val_split="test"))
    for number in range(21):
        path = tmp_path / "photos" / f"{number % 4}" / f"train {number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 9)).save(path)
    splits = [open_source(config(tmp_path / "photos", labels=False), split) for split in ("train", "val")]
    found = [{source.path(i) for i in range(len(source))} for source in splits]
    assert (len(found[0]), len(found[1])) == (18, 3)
    assert not found[0] & found[1]


def test_path_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'/no/such/place' does not exist; expected a folder with the splits 'train'"):
        open_data(config("/no/such/place"))
    file = tmp_path / "file.zip"
    file.touch()
    with pytest.raises(ValueError, match=r"file\.zip' is not a folder"):
        open_data(config(file))


def test_no_images(make_folder: MakeFolder, tmp_path: Path) -> None:
    (tmp_path / "images" / "train").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"no images in .*train.*: expected one folder per class"):
        open_data(config(tmp_path / "images"))
    make_folder(train={"cat": 0, "dog": 0})
    with pytest.raises(ValueError, match=r"no images in the class folders of .*train'; known: \.jpg"):
        open_data(config(tmp_path / "images"))


def test_empty_class_folder(make_folder: MakeFolder) -> None:
    root = make_folder(train={"cat": 2, "dog": 0, "fox": 0}, val={"cat": 1, "dog": 1, "fox": 1})
    with pytest.raises(ValueError, match=r"2 class\(es\) without images in folder '.*train': 'dog', 'fox'; remove"):
        open_data(config(root))


def test_different_classes(make_folder: MakeFolder) -> None:
    root = make_folder(train={"cat": 2, "dog": 2}, val={"cat": 2, "wolf": 2})
    message = r"'train' and 'val' have different classes: only in 'train': 'dog'; only in 'val': 'wolf'"
    with pytest.raises(ValueError, match=message):
        open_data(config(root))


@pytest.mark.parametrize(
    ("images", "batch_size", "world_size", "lowered"),
    [(10, 12, 1, 10), (7, 12, 1, 6), (7, 5, 1, 5), (3, 5, 1, 3), (1, 4, 1, 1), (9, 8, 2, 4), (3, 2, 3, 1)],
)
def test_a_batch_is_no_larger_than_the_data(
    make_folder: MakeFolder, images: int, batch_size: int, world_size: int, lowered: int
) -> None:
    root = make_folder(train={"cat": images}, val={"cat": 1})
    for in_memory in (False, True):
        options = config(root, batch_size=batch_size, mixup=0.0, cutmix=0.0, in_memory=in_memory)
        data = open_data(options, world_size=world_size)
        assert data.train.batch_size == lowered
        assert [len(batch.images) for batch in data.train.epoch(0)] == [lowered] * data.train.steps_per_epoch
        assert data.train.steps_per_epoch == images // (lowered * world_size)
        assert [len(batch.images) for batch in data.val] == [1]


def test_more_ranks_than_images(make_folder: MakeFolder) -> None:
    root = make_folder(train={"cat": 3}, val={"cat": 1})
    with pytest.raises(ValueError, match=r"the training split has 3 image\(s\) for 4 ranks; use fewer ranks"):
        open_data(config(root), world_size=4)
    (root / "train" / "cat" / "001.png").unlink()
    (root / "train" / "cat" / "002.png").unlink()
    with pytest.raises(ValueError, match="mixup mixes pairs; choose an even"):
        open_data(config(root, mixup=0.8))


# What is no regular file


def test_links_to_folders_above_are_searched_once(make_folder: MakeFolder, caplog) -> None:
    root = make_folder(val={"cat": 3, "dog": 2})
    cat, dog = root / "val" / "cat", root / "val" / "dog"
    (cat / "loop").symlink_to(cat)
    (cat / "more").mkdir()
    for number in range(12):  # a search that does not remember visited folders would take 12! paths
        (cat / "more" / f"way{number}").mkdir()
    for number in range(12):
        for other in range(12):
            (cat / "more" / f"way{number}" / f"to{other}").symlink_to(cat / "more" / f"way{other}")
    (cat / "more" / "a.png").symlink_to(cat / "000.png")  # a link to a file is one more image
    (dog / "linked").symlink_to(cat)  # and a folder may be part of two classes
    source = FolderSource(root / "val")
    names = [os.path.relpath(source.path(index), root / "val") for index in range(len(source))]
    images = ["000.png", "001.png", "002.png", "more/a.png"]
    assert names == [
        *(f"cat/{name}" for name in images),
        "dog/000.png",
        "dog/001.png",
        *(f"dog/linked/{n}" for n in images),
    ]
    assert "loop: it links to a folder that was searched already" in caplog.text


def test_a_pipe_is_an_unreadable_image(make_folder: MakeFolder) -> None:
    root = make_folder(val={"cat": 3})
    os.mkfifo(root / "val" / "cat" / "a.png")
    (root / "val" / "cat" / "b.png").symlink_to(root / "nowhere.png")
    (root / "val" / "cat" / "c.png").symlink_to("c.png")
    (root / "val" / "loop").symlink_to("loop")  # a link to itself is no class
    loader = open_eval_data(config(root, max_broken=3))
    assert sum(len(batch.images) for batch in loader) == 3
    assert {Path(image.path).name: image.reason for image in loader.skipped} == {
        "a.png": "not a regular file",
        "b.png": "No such file or directory",
        "c.png": "Too many levels of symbolic links",
    }


def test_names_that_are_not_utf8(make_folder: MakeFolder) -> None:
    root = make_folder(val={"cat": 1})
    folder = os.fsencode(root / "val") + b"/caf\xe9"
    os.mkdir(folder)
    shutil.copy(root / "val" / "cat" / "000.png", folder + b"/\xff.png")
    with open(folder + b"/broken\xff.png", "wb"):
        pass
    loader = open_eval_data(config(root))
    assert loader.class_names == ["caf\\udce9", "cat"]
    assert [target for batch in loader for target in batch.targets.tolist()] == [0, 1]
    (skipped,) = loader.skipped
    assert json.dumps([*skipped], ensure_ascii=False).encode()  # a result file can hold the name


# Labels of a model


def test_labels_follow_the_model(make_folder: MakeFolder) -> None:
    root = make_folder(val={"cat": 1, "wolf": 2})
    loader = open_eval_data(config(root), class_names=["wolf", "fox", "cat"])
    targets = [int(target) for batch in loader for target in batch.targets]
    assert targets == [2, 0, 0]
    assert loader.class_names == ["wolf", "fox", "cat"]
    with pytest.raises(
        ValueError, match=r"1 of the 2 classes of the data are not among the model's 2: 'wolf'; .*'dog'"
    ):
        open_eval_data(config(root), class_names=["cat", "dog"])


# The zip layout


def make_zip(
    root: Path, split: str, lines: list[str], *, members: list[str] | None = None, method: int = zipfile.ZIP_STORED
) -> None:
    """`split`.zip with the members named in the lines (or these), each with its own grey, and the map."""
    root.mkdir(exist_ok=True)
    (root / f"{split}_map.txt").write_text("".join(line + "\n" for line in lines))
    with zipfile.ZipFile(root / f"{split}.zip", "w", compression=method) as archive:
        for number, member in enumerate(members or [line.split("\t")[0] for line in lines]):
            with archive.open(member, "w") as file:
                Image.new("RGB", (8, 8), (number, number, number)).save(file, "PNG")


TRAIN_LINES = ["n02/x.JPEG\t1", "n01/a.JPEG\t0", "n01/b.JPEG\t0", "n02/y.JPEG\t1"]


@pytest.mark.parametrize(("workers", "method"), [(0, zipfile.ZIP_STORED), (2, zipfile.ZIP_DEFLATED)])
def test_zip(tmp_path: Path, workers: int, method: int) -> None:
    make_zip(tmp_path / "zip", "train", TRAIN_LINES, method=method)
    make_zip(tmp_path / "zip", "val", ["val_1.JPEG\t1", "val_2.JPEG\t0", "val_3.JPEG\t1"])
    options = config(tmp_path / "zip", augment=False, mean=[0.0] * 3, std=[1.0] * 3)
    options.workers = workers
    data = open_data(options)
    assert data.class_names == ["n01", "n02"]
    seen = [
        (round(float(image.mean()) * 255), int(target))
        for batch in data.train.epoch(0)
        for image, target in zip(batch.images, batch.targets, strict=True)
    ]
    assert sorted(seen) == [(0, 1), (1, 0), (2, 0), (3, 1)]  # each grey with its own label
    assert [target for batch in data.val for target in batch.targets.tolist()] == [1, 0, 1]


def test_zip_map_of_a_windows_editor(tmp_path: Path) -> None:
    make_zip(tmp_path / "zip", "val", TRAIN_LINES)
    text = (tmp_path / "zip" / "val_map.txt").read_text()
    (tmp_path / "zip" / "val_map.txt").write_text(text, encoding="utf-8-sig", newline="\r\n")
    assert open_eval_data(config(tmp_path / "zip")).num_images == 4


def test_zip_without_folders_numbers_its_classes(tmp_path: Path) -> None:
    make_zip(tmp_path / "zip", "val", ["1.JPEG\t0", "2.JPEG\t2", "3.JPEG\t1"])
    assert open_eval_data(config(tmp_path / "zip")).class_names == ["0", "1", "2"]
    loader = open_eval_data(config(tmp_path / "zip"), class_names=["a", "b", "c", "d"])
    assert [target for batch in loader for target in batch.targets.tolist()] == [0, 2, 1]
    with pytest.raises(ValueError, match="the data have 3 classes, but the model has 2"):
        open_eval_data(config(tmp_path / "zip"), class_names=["a", "b"])


@pytest.mark.parametrize(
    ("split", "line", "message"),
    [
        ("train", "n01/a.JPEG 0", r"train_map\.txt' line 5 is 'n01/a\.JPEG 0'; expected 'path<TAB>label'"),
        ("train", "n01/a.JPEG\tcat", r"train_map\.txt' line 5 is .*cat'; expected 'path<TAB>label'"),
        ("train", "n01/a.JPEG\t²", r"train_map\.txt' line 5 is .*; expected 'path<TAB>label'"),
        ("train", "n01/a.JPEG\t1000000000", r"label 1000000000 in .*train_map\.txt' line 5 is out of range"),
        ("train", f"n01/a.JPEG\t{'9' * 5000}", r"label 9{20} in .*train_map\.txt' line 5 is out of range"),
        ("train", "n01/a.JPEG\t-1", r"label -1 in .*train_map\.txt' line 5 is out of range"),
        ("train", "n04/a.JPEG\t3", r"1 class\(es\) without images in .*train_map\.txt': '2'"),
        ("val", "a.JPEG\t2", r"label 2 in .*val_map\.txt' line 5 is out of range; expected 0 to 1"),
        ("val", "gone.JPEG\t0", r"1 of 5 images of the map are not in .*val\.zip': 'gone\.JPEG'"),
    ],
)
def test_zip_errors(tmp_path: Path, split: str, line: str, message: str) -> None:
    members = [entry.split("\t")[0] for entry in TRAIN_LINES]
    for name in ("train", "val"):
        make_zip(tmp_path / "zip", name, TRAIN_LINES + ([line] if name == split else []), members=[*members, "a.JPEG"])
    with pytest.raises(ValueError, match=message):
        open_data(config(tmp_path / "zip"))


def test_damage_inside_a_zip_is_an_unreadable_image(tmp_path: Path) -> None:
    make_zip(tmp_path / "zip", "val", TRAIN_LINES)
    archive = tmp_path / "zip" / "val.zip"
    content = archive.read_bytes()
    start = content.index(b"IDAT")
    archive.write_bytes(content[:start] + b"XXXX" + content[start + 4 :])
    loader = open_eval_data(config(tmp_path / "zip"))
    assert sum(len(batch.images) for batch in loader) == 3
    (skipped,) = loader.skipped
    assert skipped.path.endswith("val.zip:n02/x.JPEG")
    assert "wrong checksum" in skipped.reason
    assert typical_side(config(tmp_path / "zip", train_split="val")) == 8


def patched_zip(archive: Path, sizes: bytes) -> None:
    """Write another size of the first member, unpacked, into the archive's directory."""
    content = bytearray(archive.read_bytes())
    entry = content.index(b"PK\x01\x02")
    content[entry + 24 : entry + 28] = sizes
    archive.write_bytes(content)


def test_a_member_that_is_larger_than_it_says(tmp_path: Path) -> None:
    """Zeros that inflate to a thousand times their packed size, while the directory declares 100 bytes."""
    make_zip(tmp_path / "zip", "val", TRAIN_LINES)
    archive = tmp_path / "zip" / "val.zip"
    with zipfile.ZipFile(archive, "w", compression=zipfile.ZIP_DEFLATED) as opened:
        opened.writestr("n02/x.JPEG", bytes(50_000_000))
        for line in TRAIN_LINES[1:]:
            with opened.open(line.split("\t")[0], "w") as file:
                Image.new("RGB", (8, 8)).save(file, "PNG")
    for declared, why in ((100, "not the 100 bytes that the archive declares"), (2**31, "more than the limit of")):
        patched_zip(archive, struct.pack("<I", declared))
        loader = open_eval_data(config(tmp_path / "zip"))
        tracemalloc.start()
        assert sum(len(batch.images) for batch in loader) == 3
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 5_000_000
        (skipped,) = loader.skipped
        assert why in skipped.reason


def test_zip_of_another_kind(tmp_path: Path) -> None:
    make_zip(tmp_path / "zip", "val", TRAIN_LINES, method=zipfile.ZIP_BZIP2)
    with pytest.raises(ValueError, match=r"val\.zip' is encrypted or neither stored nor deflated"):
        open_eval_data(config(tmp_path / "zip"))


def test_zip_is_damaged_or_incomplete(tmp_path: Path) -> None:
    root = tmp_path / "zip"
    make_zip(root, "val", TRAIN_LINES)
    (root / "val.zip").write_bytes(b"PK no")
    with pytest.raises(ValueError, match=r"val\.zip' is not a readable zip file"):
        open_eval_data(config(root))
    (root / "val_map.txt").write_text("\n")
    with pytest.raises(ValueError, match=r"no images in .*val_map\.txt': the map is empty"):
        open_eval_data(config(root))
    (root / "val_map.txt").unlink()
    with pytest.raises(ValueError, match=r"val_map\.txt' is missing: the zip layout needs it"):
        open_eval_data(config(root))


# Tar files


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def encoded(grey: int = 0) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (grey, grey, grey)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize("workers", [0, 2])
def test_tar(make_folder: MakeFolder, tmp_path: Path, workers: int) -> None:
    root = make_folder(train={"cat": 4, "dog": 3}, val={"cat": 1, "dog": 2})
    (tmp_path / "tars" / "val").mkdir(parents=True)
    with tarfile.open(tmp_path / "tars" / "train.tar", "w") as tar:  # one tar with class folders
        tar.add(root / "train", arcname=".")
    for name in ("cat", "dog"):  # a tar for each class
        with tarfile.open(tmp_path / "tars" / "val" / f"{name}.tar", "w") as tar:
            for path in sorted((root / "val" / name).iterdir()):
                tar.add(path, arcname=path.name)
    options = {"augment": False, "interpolation": "bilinear"}
    packed, plain = config(tmp_path / "tars", **options), config(root, **options)
    packed.workers = workers
    from_tar, from_folder = open_data(packed, seed=1), open_data(plain, seed=1)
    assert from_tar.class_names == from_folder.class_names == ["cat", "dog"]
    for loaders in ((from_tar.train.epoch(0), from_folder.train.epoch(0)), (from_tar.val, from_folder.val)):
        for a, b in zip(*loaders, strict=True):
            assert (a.images == b.images).all()
            assert (a.targets == b.targets).all()


def test_tar_with_other_formats_and_hidden_files(tmp_path: Path) -> None:
    """The files are those that a folder would show. macOS adds ._NAME to every file."""
    with tarfile.open(tmp_path / "val.tar", "w") as tar:
        for name in (
            "a/1.webp",
            "a/._1.webp",
            "./b/2.GIF",
            "__MACOSX/b/2.GIF",
            "preview.png",
            "./preview.png",
            "c/3.txt",
        ):
            add(tar, name, b"RIFF" if "._" in name else encoded())
    loader = open_eval_data(config(tmp_path))
    assert loader.class_names == ["a", "b"]
    assert [target for batch in loader for target in batch.targets.tolist()] == [1, 0]
    assert len(loader.skipped) == 0


def test_tar_of_tars(tmp_path: Path) -> None:
    """As ImageNet's training images come."""
    with tarfile.open(tmp_path / "val.tar", "w") as tar:
        for label in range(2):
            inner = io.BytesIO()
            with tarfile.open(fileobj=inner, mode="w") as classes:
                for number in range(3):
                    add(classes, f"n{label}_{number}.JPEG", encoded(40 * (3 * label + number)))
            add(tar, f"n{label}.tar", inner.getvalue())
    loader = open_eval_data(config(tmp_path, mean=[0.0] * 3, std=[1.0] * 3))
    assert loader.class_names == ["n0", "n1"]
    found = [(round(float(i.mean()) * 255), int(t)) for b in loader for i, t in zip(b.images, b.targets, strict=True)]
    assert found == [(0, 0), (40, 0), (80, 0), (120, 1), (160, 1), (200, 1)]
    content = (tmp_path / "val.tar").read_bytes()
    (tmp_path / "val.tar").write_bytes(
        content.replace(b"n1_1.JPEG", b"n1_1.JPEh", 1)
    )  # a wrong checksum in the inner one
    with pytest.raises(
        ValueError, match=r"val\.tar' cannot be read as a tar file .it is damaged or cut off after byte"
    ):
        open_eval_data(config(tmp_path))


def test_tar_errors(tmp_path: Path) -> None:
    root = tmp_path / "tars"
    root.mkdir()
    for content in (b"this is no tar file", b"this is no tar file".ljust(1024, b"\0")):
        (root / "val.tar").write_bytes(content)
        with pytest.raises(ValueError, match=r"val\.tar' cannot be read as a tar file .*; copy it again"):
            open_eval_data(config(root))
    with tarfile.open(root / "val.tar", "w"):
        pass
    with pytest.raises(ValueError, match=r"no images in .*val\.tar'"):
        open_eval_data(config(root))


@pytest.mark.parametrize("kept", [0.3, 0.5, 0.9])
def test_a_tar_file_that_was_cut_off(make_folder: MakeFolder, tmp_path: Path, kept: float) -> None:
    root = make_folder(val={"cat": 8, "dog": 8})
    (tmp_path / "whole").mkdir()
    path = tmp_path / "whole" / "val.tar"
    with tarfile.open(path, "w") as tar:
        tar.add(root / "val", arcname=".")
        starts = [member.offset for member in tar.getmembers()]
        blocks = tar.offset // 512
    content = path.read_bytes()
    assert open_eval_data(config(tmp_path / "whole")).num_images == 16
    start = starts[int(kept * len(starts))]
    damaged = [content[: int(kept * blocks) * 512], content[: int(kept * blocks) * 512 + 100], content[:start]]
    for header in (bytes(512), b"\xff" * 512):  # tarfile takes both for the end of the archive
        damaged.append(content[:start] + header + content[start + 512 :])
    for part in damaged:
        path.write_bytes(part)
        with pytest.raises(ValueError, match=r"val\.tar' cannot be read as a tar file .*copy it again"):
            open_eval_data(config(tmp_path / "whole"))


# Hugging Face data sets, through timm


def test_hugging_face_data_set(make_folder: MakeFolder) -> None:
    pytest.importorskip("datasets")
    root = make_folder(train={"cat": 4, "dog": 2}, validation={"cat": 1, "dog": 2})
    data = open_data(config(f"hfds/{root}", val_split="validation", augment=False), seed=3)
    folder = open_data(config(root, val_split="validation", augment=False), seed=3)
    assert data.class_names == ["cat", "dog"]
    for a, b in zip(data.val, folder.val, strict=True):
        assert (a.images == b.images).all()
        assert (a.targets == b.targets).all()
    assert data.train.steps_per_epoch == 3
    with pytest.raises(ValueError, match=r"split 'nothing' of 'hfds/.*cannot be read .*Unknown split"):
        open_data(config(f"hfds/{root}", val_split="nothing"))
    with pytest.raises(ValueError, match=r"no column 'picture' in .* \(data\.input_key\); there is image, label"):
        open_data(config(f"hfds/{root}", val_split="validation", input_key="picture"))


def test_hugging_face_labels_that_are_bare_numbers(tmp_path: Path) -> None:
    """The label column has another name, and a split may lack the last labels."""
    pytest.importorskip("datasets")
    for split, labels in (("train", [0, 1, 2, 1]), ("validation", [0, 1])):
        (tmp_path / split).mkdir()
        for number in range(len(labels)):
            Image.new("RGB", (8, 8)).save(tmp_path / split / f"{number}.png")
        lines = [f"{number}.png,{label}\n" for number, label in enumerate(labels)]
        (tmp_path / split / "metadata.csv").write_text("file_name,fine\n" + "".join(lines))
    data = open_data(config(f"hfds/{tmp_path}", target_key="fine", val_split="validation"))
    assert data.class_names == data.val.class_names == ["0", "1", "2"]
    assert [target for batch in data.val for target in batch.targets.tolist()] == [0, 1]
    with pytest.raises(ValueError, match=r"split 'train' of .* run from 0 to 2; expected 0 to 1"):
        open_data(config(f"hfds/{tmp_path}", target_key="fine", val_split="validation", num_classes=2))


@pytest.mark.parametrize(("labels", "wrong"), [(["cat", "dog"], "'cat'"), (["0.5", "1"], "0.5")])
def test_hugging_face_labels_that_are_no_class_numbers(labels: list[str], wrong: str, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "train").mkdir()
    for number in range(len(labels)):
        Image.new("RGB", (8, 8)).save(tmp_path / "train" / f"{number}.png")
    lines = [f"{number}.png,{label}\n" for number, label in enumerate(labels)]
    (tmp_path / "train" / "metadata.csv").write_text("file_name,kind\n" + "".join(lines))
    with pytest.raises(ValueError, match=rf"column 'kind' of 'hfds/.* has {wrong}; expected a class number"):
        open_eval_data(config(f"hfds/{tmp_path}", target_key="kind", val_split="train"))


# The embedded data set


@pytest.mark.parametrize("in_chans", [1, 3])
def test_digits(in_chans: int) -> None:
    data = open_data(DataConfig(img_size=8, in_chans=in_chans, batch_size=64, workers=0, augment=False))
    assert data.class_names == [str(digit) for digit in range(10)]
    assert data.num_classes == 10
    assert data.val.num_images == 450  # a quarter of 1797
    assert data.train.steps_per_epoch == 1347 // 64
    batch = next(data.train.epoch(0))
    assert batch.images.shape == (64, in_chans, 8, 8)


def test_digits_splits_are_disjoint_and_whole() -> None:
    train, val = (open_source(DataConfig(), split) for split in ("train", "val"))
    rows = [{source.path(index) for index in range(len(source))} for source in (train, val)]
    assert not rows[0] & rows[1]
    assert len(rows[0] | rows[1]) == 1797
    counts = np.bincount([val.read(index)[1] for index in range(len(val))])
    assert counts.min() >= 43  # every digit is held out in its share


def test_folder_source_reads_the_right_file(make_folder: MakeFolder) -> None:
    root = make_folder(train={"a": 3, "b": 2})
    source = FolderSource(root / "train")
    for index in range(len(source)):
        file, _ = source.read(index)
        with file, Image.open(source.path(index)) as expected:
            assert (np.asarray(Image.open(file)) == np.asarray(expected)).all()


def test_a_few_images_are_taken_from_everywhere(make_folder: MakeFolder) -> None:
    root = make_folder(val={f"c{label}": 5 for label in range(4)})
    source = SpreadSource(open_source(config(root), "val"), 8)
    assert len(source) == 8
    labels = []
    for index in range(8):
        file, label = source.read(index)
        file.close()
        labels.append(label)
    assert labels == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len({source.path(i) for i in range(8)}) == 8
    assert open_eval_data(config(root), max_images=8).num_images == 8
    assert open_eval_data(config(root), max_images=99).num_images == 20
