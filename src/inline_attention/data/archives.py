"""Sources whose images are in zip or tar files."""

import io
import os
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np
from timm.data.readers.reader_image_in_tar import ReaderImageInTar

from inline_attention.data.config import MAX_CLASSES
from inline_attention.data.decode import MAX_BYTES, UnreadableImage
from inline_attention.data.sources import PackedStrings, check_every_class_has_images, list_some


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
        self._opened: tuple[int, BinaryIO] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> tuple[BinaryIO, int]:
        # Processes must not share a file handle: its position is shared too.
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = (os.getpid(), open(self._archive, "rb"))  # noqa: SIM115  # for the life of the process
        file = self._opened[1]
        file.seek(self._offsets[index])
        name_length, extra_length = struct.unpack("<26x2H", file.read(30))  # lengths differ from the directory's
        file.seek(name_length + extra_length, os.SEEK_CUR)
        size, packed_size = int(self._sizes[index]), int(self._packed_sizes[index])
        if max(size, packed_size) > MAX_BYTES:
            raise UnreadableImage(f"{max(size, packed_size):,} bytes, more than the limit of {MAX_BYTES:,}")
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

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_opened": None}


def _read_map(map_file: Path, *, num_classes: int = MAX_CLASSES) -> tuple[list[str], np.ndarray]:
    if not map_file.is_file():
        raise ValueError(f"{str(map_file)!r} is missing: the zip layout needs it, with 'path<TAB>label' lines")
    paths, labels = [], []
    with open(map_file, encoding="utf-8", errors="surrogateescape") as lines:
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
    """A tar file, or a folder with one tar file per class, through timm's reader."""

    named = True

    def __init__(self, root: Path) -> None:
        for path in sorted(root.glob("*.tar")) if root.is_dir() else [root]:
            check_tar_end(path)
        try:
            # Not cached: workers would share the position of a tar file that was opened before they start.
            self._reader = ReaderImageInTar(str(root), cache_tarfiles=False, cache_tarinfo=False)
        except tarfile.TarError as error:
            what = "a tar file in " if root.is_dir() else ""
            raise ValueError(f"{what}{str(root)!r} cannot be read ({error}); repair or remove it") from error
        except ValueError as error:  # timm unpacks an empty list
            raise ValueError(f"no images in {str(root)!r}; known in tar files: .png, .jpg, .jpeg") from error
        self._root = root
        self.class_names = sorted(self._reader.class_name_to_idx, key=self._reader.class_name_to_idx.__getitem__)
        # timm orders equal names in different tar files by the file system; ranks need the same order.
        names = [(tar or "", member.name) for member, tar, _ in self._reader.samples]
        self._order = np.array(sorted(range(len(names)), key=names.__getitem__))
        self.labels = np.array(self._reader.targets)[self._order]

    def __len__(self) -> int:
        return len(self._order)

    def read(self, index: int) -> tuple[BinaryIO, int]:
        file, label = self._reader[self._order[index]]
        return file, int(label)

    def path(self, index: int) -> str:
        member, tar, _ = self._reader.samples[self._order[index]]
        return f"{self._root / tar if tar else self._root}:{member.name}"


def check_tar_end(path: str | Path) -> None:
    """Raise ValueError for a truncated tar file. Readers would silently return only its first part."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - tarfile.BLOCKSIZE))
        is_whole = size % tarfile.BLOCKSIZE == 0 and file.read() == bytes(tarfile.BLOCKSIZE)
    if not is_whole:
        raise ValueError(
            f"{str(path)!r} has no end-of-archive mark after its {size:,} bytes: it was cut off, or is not a tar file. "
            "Copy it again, or pack it again"
        )
