"""Sources whose images are in zip or tar files."""

import io
import os
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple, cast

import numpy as np

from inline_attention.data.config import MAX_CLASSES
from inline_attention.data.decode import MAX_BYTES, UnreadableImage
from inline_attention.data.sources import (
    IMAGE_EXTENSIONS,
    PackedStrings,
    check_every_class_has_images,
    class_order,
    is_hidden,
    list_some,
)


class ZipSource:
    """The layout of the official code: `train.zip` and `train_map.txt` with "relative/path<TAB>label" lines.

    Class names are the folder names in `names_from`, the map of the training split, since the official val.zip has no
    folders. If a label has no folder, or more than one, the label numbers are the names.
    """

    def __init__(self, archive: Path, map_file: Path, *, names_from: Path) -> None:
        named_by = names_from if names_from.is_file() else map_file
        paths, labels = _read_map(named_by)
        count = int(labels.max()) + 1
        self.class_names, self.named = _folder_names(paths, labels, count=count)
        if named_by == names_from:
            check_every_class_has_images(labels, self.class_names, where=repr(str(names_from)))
        if named_by != map_file:
            paths, labels = _read_map(map_file, num_classes=count)
        try:
            with zipfile.ZipFile(archive) as opened:
                members = {member.filename: member for member in opened.infolist()}
        except zipfile.BadZipFile as error:
            raise ValueError(f"{str(archive)!r} is not a readable zip file: {error}") from error
        missing = [path for path in paths if path not in members]
        if missing:
            what = f"{len(missing)} of {len(paths)} images of the map are not in {str(archive)!r}"
            raise ValueError(f"{what}: {list_some(missing)}")
        chosen = [members[path] for path in paths]
        readable = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
        if any(member.compress_type not in readable or member.flag_bits & 1 for member in chosen):
            raise ValueError(f"{str(archive)!r} is encrypted or neither stored nor deflated; pack it again")
        # Arrays instead of a ZipFile, which would hold an object per image in every worker.
        self._offsets = np.array([member.header_offset for member in chosen])
        self._packed_sizes = np.array([member.compress_size for member in chosen])
        self._sizes = np.array([member.file_size for member in chosen])
        self._checksums = np.array([member.CRC for member in chosen])
        self._deflated = np.array([member.compress_type == zipfile.ZIP_DEFLATED for member in chosen])
        self._paths, self.labels, self._archive = PackedStrings(paths), labels, str(archive)

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> tuple[BinaryIO, int]:
        size, packed_size = int(self._sizes[index]), int(self._packed_sizes[index])
        if max(size, packed_size) > MAX_BYTES:
            raise UnreadableImage(f"{max(size, packed_size):,} bytes, more than the limit of {MAX_BYTES:,}")
        with open(self._archive, "rb") as file:
            file.seek(self._offsets[index])
            name_length, extra_length = struct.unpack("<26x2H", file.read(30))  # lengths differ from the directory's
            file.seek(name_length + extra_length, os.SEEK_CUR)
            content = file.read(packed_size)
        if self._deflated[index]:
            content = zlib.decompressobj(wbits=-zlib.MAX_WBITS).decompress(content, size + 1)
        if len(content) != size:
            raise UnreadableImage(f"not the {size:,} bytes that the archive declares")
        if zlib.crc32(content) != self._checksums[index]:
            raise OSError("wrong checksum: the archive is damaged here")
        return io.BytesIO(content), int(self.labels[index])

    def path(self, index: int) -> str:
        return f"{self._archive}:{self._paths[index]}"


def _read_map(map_file: Path, *, num_classes: int = MAX_CLASSES) -> tuple[list[str], np.ndarray]:
    if not map_file.is_file():
        raise ValueError(f"{str(map_file)!r} is missing: the zip layout needs it, with 'path<TAB>label' lines")
    paths, labels = [], []
    with open(map_file, encoding="utf-8-sig", errors="surrogateescape") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            path, tab, label = line.rstrip("\r\n").rpartition("\t")
            digits = label.strip().removeprefix("-")
            if not tab or not path or not digits.isascii() or not digits.isdigit():
                raise ValueError(f"{str(map_file)!r} line {number} is {line.rstrip()!r}; expected 'path<TAB>label'")
            if label.strip() != digits or len(digits) > 18 or int(digits) >= num_classes:
                raise ValueError(
                    f"label {label.strip()[:20]} in {str(map_file)!r} line {number} is out of range; "
                    f"expected 0 to {num_classes - 1}"
                )
            paths.append(path)
            labels.append(int(digits))
    if not paths:
        raise ValueError(f"no images in {str(map_file)!r}: the map is empty")
    return paths, np.array(labels)


def _folder_names(paths: list[str], labels: np.ndarray, *, count: int) -> tuple[list[str], bool]:
    folders: dict[int, set[str]] = {}
    for path, label in zip(paths, labels.tolist(), strict=True):
        folders.setdefault(label, set()).add(path.rpartition("/")[0].rpartition("/")[2])
    names = {label: found.pop() for label, found in folders.items() if len(found) == 1}
    if len(names) == count and all(names.values()) and len(set(names.values())) == count:
        return [names[label] for label in range(count)], True
    return [str(label) for label in range(count)], False


class TarSource:
    """A tar file, or a folder with one tar file per class. Tar files inside tar files are searched, too.

    The class of an image is its folder, or the tar file that it is in. Images in neither are left out.
    """

    named = True

    def __init__(self, root: Path) -> None:
        found = []
        self._tars = [root]
        if root.is_dir():
            self._tars = sorted(path for path in root.glob("*.tar") if not is_hidden(path.name))
        for number, path in enumerate(self._tars):
            try:
                with tarfile.open(path, "r:") as tar:
                    images = list(_images_in_tar(tar, folder=path.stem if root.is_dir() else ""))
            except (tarfile.TarError, ValueError) as error:
                raise ValueError(
                    f"{str(path)!r} cannot be read as a tar file ({error}); copy it again, or pack it again"
                ) from error
            found += [(number, image) for image in sorted(images, key=lambda image: image.name)]
        if not found:
            raise ValueError(f"no images in folders in {str(root)!r}; known: {', '.join(IMAGE_EXTENSIONS)}")
        self.class_names = sorted({image.class_name for _, image in found}, key=class_order)
        position = {name: label for label, name in enumerate(self.class_names)}
        self.labels = np.array([position[image.class_name] for _, image in found])
        self._numbers = np.array([number for number, _ in found])
        self._places = np.array([(image.start, image.size) for _, image in found])
        self._names = PackedStrings(image.name for _, image in found)

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> tuple[BinaryIO, int]:
        start, size = self._places[index].tolist()
        with open(self._tars[self._numbers[index]], "rb") as file:
            file.seek(start)
            return io.BytesIO(file.read(size)), int(self.labels[index])

    def path(self, index: int) -> str:
        return f"{self._tars[self._numbers[index]]}:{self._names[index]}"


class _TarImage(NamedTuple):
    class_name: str
    name: str
    start: int
    size: int


def _images_in_tar(tar: tarfile.TarFile, *, folder: str, start: int = 0) -> Iterator[_TarImage]:
    """The images below a folder. `start` is the place of this tar file in its outermost one."""
    for member in tar:
        path = PurePosixPath(folder, member.name)
        if not member.isreg() or any(map(is_hidden, path.parts)):
            continue
        if path.suffix.lower() == ".tar":
            with tarfile.open(fileobj=tar.extractfile(member), mode="r:") as inner:
                yield from _images_in_tar(inner, folder=str(path.with_suffix("")), start=start + member.offset_data)
        elif path.suffix.lower() in IMAGE_EXTENSIONS and path.parent.name:
            yield _TarImage(path.parent.name, member.name, start + member.offset_data, member.size)
    # tarfile takes a damaged header for the end. After the true one there are only zeros.
    file = cast(BinaryIO, tar.fileobj)
    file.seek(tar.offset)
    rest = file.read(2**20)
    if len(rest) < tarfile.BLOCKSIZE or rest.strip(b"\0"):
        raise ValueError(f"it is damaged or cut off after byte {start + tar.offset:,}")
