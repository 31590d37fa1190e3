"""Folders without splits: what they may look like, how they are divided, and what is refused."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from inline_attention.data import DataConfig, open_data, open_eval_data
from inline_attention.data.tables import ImageTable, divide, read_table

MakeFolder = Callable[..., Path]


def config(path: object, **options: object) -> DataConfig:
    return DataConfig(path=str(path), **{"img_size": 8, "batch_size": 2, "workers": 0, **options})


@pytest.fixture
def flat(make_folder: MakeFolder) -> Path:
    return make_folder(train={"cat": 10, "dog": 5, "emu": 2}) / "train"


def splits(table: ImageTable | None) -> dict[str, str]:
    assert table is not None
    return dict(zip(table.files, table.splits, strict=True))


def test_a_folder_of_classes_is_divided_by_class(flat: Path) -> None:
    data = open_data(config(flat), seed=3)
    assert data.class_names == ["cat", "dog", "emu"]
    found = splits(data.table)
    assert Counter((file.split("/")[0], split) for file, split in found.items()) == {
        ("cat", "train"): 8, ("cat", "val"): 2, ("dog", "train"): 4, ("dog", "val"): 1, ("emu", "train"): 1,
        ("emu", "val"): 1,
    }  # fmt: skip
    labels = [int(label) for batch in data.val for label in batch.targets]
    assert Counter(labels) == {0: 2, 1: 1, 2: 1}
    assert splits(open_data(config(flat), seed=3).table) == found
    assert splits(open_data(config(flat), seed=4).table) != found
    half = splits(open_data(config(flat, val_share=0.5), seed=3).table)
    assert sum(split == "val" for split in half.values()) == 5 + 2 + 1


def test_images_that_are_added_move_no_others() -> None:
    def divided(count: int) -> dict[str, str]:
        files = [f"{number}.png" for number in range(count)]
        table = ImageTable(files, ["cat"] * count, [""] * count, origin="a test")
        return splits(divide(table, config=DataConfig(), seed=0))

    before, after = divided(100), divided(101)
    assert sum(before[file] != after[file] for file in before) <= 1


def test_loose_files_with_a_table(flat: Path, tmp_path: Path) -> None:
    root = tmp_path / "loose"
    root.mkdir()
    lines = ["file,label"]
    for path in sorted(flat.rglob("*.png")):
        path.rename(root / f"{path.parent.name}, {path.name}")
        lines.append(f'"{path.parent.name}, {path.name}",a {path.parent.name}')
    (root / "labels.csv").write_text("\n".join(lines) + "\n", encoding="utf-8-sig")  # as spreadsheets save it
    data = open_data(config(root))
    assert data.class_names == ["a cat", "a dog", "a emu"]
    assert data.val.num_images == 4
    own = [f"{line},{'val' if number % 2 else 'train'}" for number, line in enumerate(lines[1:])]
    (root / "labels.csv").write_text("\n".join(["file,label,split", *own]))
    assert open_data(config(root)).val.num_images == 8
    assert open_eval_data(config(root)).num_images == 8  # the table has splits: no run is needed
    (root / "labels.csv").write_text("\n".join(["file,label,split", *(line.replace("train", "val") for line in own)]))
    with pytest.raises(ValueError, match=r"no images of split 'train' in '.*labels\.csv'; there is 'val'"):
        open_data(config(root))


def test_a_written_table_gives_the_same_split(flat: Path, tmp_path: Path) -> None:
    odd = flat / "cat" / 'with "quotes", a comma and \udcff.png'  # a byte that is not UTF-8
    (flat / "cat" / "000.png").rename(odd)
    data = open_data(config(flat), seed=5)
    assert data.table is not None
    file = tmp_path / "split.csv"
    file.write_bytes(data.table.to_csv())
    again = open_data(config(flat, split_file=str(file)), seed=99)
    assert splits(again.table) == splits(data.table)
    for one, other in ((data.val, again.val), (data.train.epoch(0), open_data(config(flat), seed=5).train.epoch(0))):
        assert all((a.images == b.images).all() for a, b in zip(one, other, strict=True))
    assert open_eval_data(config(flat, split_file=str(file))).num_images == 4


def test_new_images_stay_out_of_a_written_table(flat: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "split.csv").write_text("file,label,split\ncat/000.png,cat,train\ncat/001.png,cat,val\n")
    data = open_data(config(flat, split_file=str(tmp_path / "split.csv"), batch_size=1, mixup=0, cutmix=0))
    assert (data.train.steps_per_epoch, data.val.num_images) == (1, 1)
    assert "15 images are not in" in caplog.text


def test_evaluation_needs_to_know_the_split(flat: Path) -> None:
    with pytest.raises(
        ValueError, match=r"has no splits: name the table of a run .*or take all images \(--split all\)"
    ):
        open_eval_data(config(flat))
    assert open_eval_data(config(flat, val_split="all")).num_images == 17


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"begins with ''; expected the columns file,label or file,label,split"),
        ("file,tags\n", r"expected the columns .*; if an image has several labels, file,labels or file,labels,split"),
        ("file,label\na.png,cat\nb.png,dog\nc.png,dog|cat\n", r"line 4 has the label 'dog\|cat', .*column labels"),
        (
            "file,labels\na.png,cat\nb.png,dog\nc.png,dog cat\n",
            r"line 4 .*'dog cat', .*labels by \|: dog\|cat",
        ),
        ("file,labels\na.png,\n", r"no image in .* has a label"),
        ("file,labels,split\na.png,cat,train\na.png,dog,val\n", r"line 3 gives 'a\.png' a second split"),
        ("file,labels,split\na.png,cat,\n", r"line 2 is 'a\.png,cat,'; expected file,labels,split"),
        ("name,class\n", r"begins with 'name,class'; expected the columns"),
        ("file,label\n", r"no images in .*: the table is empty"),
        ("file,label\na.png\n", r"line 2 is 'a\.png'; expected file,label"),
        ("file,label\na.png,  \n", r"line 2 is 'a\.png,  '; expected file,label"),
        ("file,label\n../a.png,cat\n", r"line 2 names '\.\./a\.png'; expected a file below"),
        ("file,label\n/a.png,cat\n", r"line 2 names '/a\.png'; expected a file below"),
        ("file,label\nb.png,cat\nb.png,dog\n", r"line 3 names 'b\.png' a second time"),
        ("file,label\nb.png,cat\n./b.png,dog\n", r"line 3 names 'b\.png' a second time"),
        ("file,label\nb.png,cat\nc.png,cat \n", r"line 3 has the label 'cat '; another line has it without the spaces"),
        ("file,label\nb.png,cat\n", r"1 of the 1 images in .* are not in .*: 'b\.png'"),
        ('file,label\n"b.png,cat\n', r"table .* cannot be read"),
    ],
)
def test_tables_that_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "labels.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_table(tmp_path / "labels.csv", tmp_path)


def test_folders_that_are_refused(flat: Path, make_folder: MakeFolder, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"looked for the splits 'train' and 'val' .*labels\.csv, and for two"):
        open_data(config(tmp_path / "empty"))
    with pytest.raises(ValueError, match=r"no classes in .*two or more folders, each with the images of a class"):
        open_data(config(make_folder("single", pictures={"more": 3})))
    with pytest.raises(ValueError, match=r"no split 'val' in .* Or train with --data .*train, which is then divided\."):
        open_data(config(flat.parent))
    for path in sorted((flat / "emu").iterdir())[1:]:
        path.unlink()
    with pytest.raises(ValueError, match=r"1 class\(es\) with one image in folder .*: 'emu'"):
        open_data(config(flat))
    other = make_folder("other", training={"cat": 2}, validation={"cat": 2})  # splits, not classes
    with pytest.raises(ValueError, match=r"no split 'train' in .*; there is training, validation\. Name the splits"):
        open_data(config(other))


def several(root: Path, *lines: str) -> ImageTable:
    """The table of these lines, whose files exist."""
    root.mkdir(exist_ok=True)
    for line in lines:
        Image.new("RGB", (8, 8)).save(root / line.split(",")[0])
    (root / "labels.csv").write_text("\n".join(["file,labels", *lines]) + "\n")
    return read_table(root / "labels.csv", root)


def test_several_labels(tmp_path: Path) -> None:
    """Labels are separated by | or ;, the lines of a file are united, and an image may have no label."""
    table = several(tmp_path / "a", "1.png,dog|black cat", "2.png,dog; emu ;", "3.png,", "4.png,emu", "4.png,dog")
    assert table.files == ["1.png", "2.png", "3.png", "4.png"]
    assert table.label_sets() == [["dog", "black cat"], ["dog", "emu"], [], ["emu", "dog"]]
    assert table.to_csv().startswith(b"file,labels,split\n1.png,dog|black cat,\n2.png,dog|emu,\n3.png,,\n")
    loader = open_eval_data(config(tmp_path / "a", val_split="all"))
    assert loader.class_names == ["black cat", "dog", "emu"]
    assert loader.multi_label
    expected = torch.tensor([[1, 1, 0], [0, 1, 1], [0, 0, 0], [0, 1, 1]], dtype=torch.float32)
    assert torch.equal(torch.cat([batch.targets for batch in loader]), expected)
    in_memory = open_eval_data(config(tmp_path / "a", val_split="all", in_memory=True))
    assert torch.equal(torch.cat([batch.targets for batch in in_memory]), expected)
    more = open_eval_data(config(tmp_path / "a", val_split="all"), class_names=["emu", "fox", "dog", "black cat"])
    matched = torch.stack([expected[:, 2], torch.zeros(4), expected[:, 1], expected[:, 0]], 1)
    assert torch.equal(torch.cat([batch.targets for batch in more]), matched)


def test_the_split_keeps_rare_labels_on_both_sides(tmp_path: Path) -> None:
    common = [f"{number}.png,{'cat|dog' if number % 3 else 'cat'}" for number in range(30)]
    rare = ["a.png,cat|emu", "b.png,dog|emu", "c.png,fox", "d.png,", "e.png,cat|gnu", "f.png,dog|gnu|emu"]
    root = tmp_path / "a"
    table = several(root, *common, *rare)
    for seed in range(10):
        divided = divide(table, config=DataConfig(), seed=seed)
        sides: dict[str, set[str]] = {}
        for labels, split in zip(divided.label_sets(), divided.splits, strict=True):
            for label in labels:
                sides.setdefault(label, set()).add(split)
        assert sides.pop("fox") == {"train"}  # one image
        assert set(map(frozenset, sides.values())) == {frozenset({"train", "val"})}
        assert 5 <= sum(split == "val" for split in divided.splits) <= 10
    assert divide(table, config=DataConfig(), seed=0) == divide(table, config=DataConfig(), seed=0)


def test_spaces_after_commas_belong_to_no_name(flat: Path) -> None:
    first, second = sorted(path.relative_to(flat).as_posix() for path in flat.rglob("*.png"))[:2]
    table = flat / "labels.csv"
    table.write_text(f"file, label, split\n{first}, cat, train\n{second}, dog, val\n")
    read = read_table(table, flat)
    assert (read.files, read.labels, read.splits) == ([first, second], ["cat", "dog"], ["train", "val"])


def test_a_table_of_other_images_is_refused(flat: Path, tmp_path: Path) -> None:
    (tmp_path / "split.csv").write_text("file,label,split\nelsewhere.png,cat,val\n")
    with pytest.raises(ValueError, match=r"add these files, .*other data .*--split all"):
        open_eval_data(config(flat, split_file=str(tmp_path / "split.csv")))


def test_validation_images_without_any_label_are_refused(tmp_path: Path) -> None:
    several(tmp_path / "a", "1.png,cat", "2.png,cat", "3.png,")
    (tmp_path / "a" / "labels.csv").write_text("file,labels,split\n1.png,cat,train\n2.png,cat,train\n3.png,,val\n")
    with pytest.raises(ValueError, match="none of the 1 validation images has a label"):
        open_data(config(tmp_path / "a"), rank=1, world_size=2)


def test_labels_without_validation_images_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    several(tmp_path / "a", "1.png,cat", "2.png,cat", "3.png,cat|emu", "4.png,")
    data = open_data(config(tmp_path / "a"))
    assert "1 labels have no validation image and are not measured: 'emu'" in caplog.text
    assert data.class_counts is not None
    assert data.train_images == 4 - data.val.num_images
    assert dict(zip(data.class_names, data.class_counts, strict=True))["emu"] == 1
