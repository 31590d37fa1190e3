"""The reader of torch.save files: equal to torch.load on what is harmless, and inert on everything else."""

import copyreg
import functools
import io
import os
import pickle
import random
import struct
import sys
import types
import warnings
import zipfile
from collections import OrderedDict

import pytest
import torch

from inline_attention.models._unpickle import LEGACY_MAGIC, RefusedFile, TensorRecord, TorchFile


def read(path):
    """The whole content with tensors in place of their records."""
    with TorchFile(path) as file:

        def build(value):
            if isinstance(value, TensorRecord):
                return file.tensor(value)
            if isinstance(value, dict):
                return {key: build(item) for key, item in value.items()}
            if isinstance(value, list | tuple):
                return type(value)(map(build, value))
            return value

        return build(file.content)


def as_zip(path, pickled, storages=None, compression=zipfile.ZIP_STORED):
    """A torch.save file around a pickle of our own."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", sys.byteorder)
        for key, data in (storages or {}).items():
            archive.writestr(f"archive/data/{key}", data)
        archive.writestr("archive/version", "3\n")
    return path


def as_legacy(path, pickled, storages=None):
    system = {"protocol_version": 1001, "little_endian": sys.byteorder == "little"}
    parts = [pickle.dumps(part, protocol=2) for part in (LEGACY_MAGIC, 1001, system)]
    parts += [pickled, pickle.dumps(list(storages or {}), protocol=2)]
    for data in (storages or {}).values():
        parts += [struct.pack("<q", len(data) // 4), data]
    path.write_bytes(b"".join(parts))
    return path


CONTAINERS = pytest.mark.parametrize("container", [as_zip, as_legacy])
FORMATS = pytest.mark.parametrize("new_format", [True, False], ids=["zip", "legacy"])


# What is harmless reads as torch.load reads it.


@FORMATS
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_equals_torch_load(tmp_path, new_format, protocol):
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(4, 6, generator=generator)
    saved = {
        "float": base,
        "transposed": base.t(),
        "column": base[1:, 2],
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "half": base.half(),
        "bfloat16": base.bfloat16(),
        "long": torch.arange(5),
        "bool": torch.tensor([True, False, True]),
        "parameter": torch.nn.Parameter(base.clone()),
        "nested": {"list": [1, 2.5, -7, None, True, "text", 2**40], "tuple": (1, (2, 3), ()), 3: "three"},
        "set": {"a", "b"},
        "shape": base.shape,
        "dtype": torch.float16,
    }
    path = tmp_path / "file.pth"
    torch.save(saved, path, pickle_protocol=protocol, _use_new_zipfile_serialization=new_format)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = torch.load(path, weights_only=False)
    actual = read(path)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert actual[name].dtype == value.dtype
            assert actual[name].stride() == value.stride()
            assert torch.equal(actual[name], value), name
        else:
            assert actual[name] == value, name
    assert actual["float"].data_ptr() == actual["transposed"].data_ptr()  # still one storage
    assert type(actual["parameter"]) is torch.Tensor


@FORMATS
def test_training_checkpoint(tmp_path, new_format):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 7}
    checkpoint["lr_scheduler"] = scheduler.state_dict()
    path = tmp_path / "file.pth"
    torch.save(checkpoint, path, _use_new_zipfile_serialization=new_format)
    actual = read(path)
    assert actual["epoch"] == 7
    assert actual["lr_scheduler"] == scheduler.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(actual["model"][name], value), name
    for index, state in optimizer.state_dict()["state"].items():
        assert torch.equal(actual["optimizer"]["state"][index]["exp_avg"], state["exp_avg"])


def test_reads_only_what_is_asked_for(tmp_path):
    """The bytes of a storage that nobody asks for may be anything: they are never touched."""
    path = tmp_path / "file.pth"
    torch.save({"model": torch.ones(3), "optimizer": torch.ones(100_000)}, path)
    with TorchFile(path) as file:
        file.tensor(file.content["model"])
        assert [storage.num_elements for storage in file._storages] == [3]


@pytest.fixture
def yacs(monkeypatch):
    """A class called yacs.config.CfgNode that keeps its state where yacs keeps it; importable only while saving."""

    class CfgNode(dict):
        def __init__(self, items=()):
            super().__init__(items)
            self.__dict__["__immutable__"] = False
            self.__dict__["__deprecated_keys__"] = {"OLD", "OLDER"}
            self.__dict__["__renamed_keys__"] = {"A": "B"}
            self.__dict__["__new_allowed__"] = False

        def __getattr__(self, name):
            if name in self:
                return self[name]
            raise AttributeError(name)

    CfgNode.__module__, CfgNode.__qualname__ = "yacs.config", "CfgNode"
    module = types.ModuleType("yacs.config")
    module.CfgNode = CfgNode
    monkeypatch.setitem(sys.modules, "yacs", types.ModuleType("yacs"))
    monkeypatch.setitem(sys.modules, "yacs.config", module)
    yield CfgNode
    assert "yacs.config" not in sys.modules, "a test must forget yacs before it reads"


@pytest.mark.filterwarnings("ignore:Detected pickle protocol 4")
@FORMATS
@pytest.mark.parametrize("protocol", [2, 4])
def test_yacs_configuration_is_inert(tmp_path, yacs, monkeypatch, new_format, protocol):
    inner = yacs({"IMG_SIZE": 224, "MEAN": (0.485, 0.456), "TAGS": {"x"}})
    config = yacs({"DATA": inner, "AGAIN": inner, "NAME": "swin", "LIST": [1, None, [2.5]], "ON": True})
    path = tmp_path / "file.pth"
    torch.save(
        {"model": OrderedDict(w=torch.ones(2)), "config": config},
        path,
        pickle_protocol=protocol,
        _use_new_zipfile_serialization=new_format,
    )
    monkeypatch.delitem(sys.modules, "yacs.config")
    with pytest.raises(pickle.UnpicklingError):  # why this reader exists
        torch.load(path, weights_only=True)
    actual = read(path)
    assert actual["config"] == dict(config)
    assert torch.equal(actual["model"]["w"], torch.ones(2))
    with TorchFile(path) as file:
        assert not vars(file.content["config"])
        assert file.content["config"]["DATA"] is file.content["config"]["AGAIN"]


# Hostile files. Each is first run through pickle itself, to see that it would have worked.


class Reduces:
    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


class WritesOnNew:
    """Saved with NEWOBJ, or NEWOBJ_EX where the path is a keyword."""

    def __new__(cls, path="", *, keyword=""):
        if path or keyword:
            open(path or keyword, "w").close()
        return super().__new__(cls)

    def __getnewargs_ex__(self):
        return self.arguments, self.keywords


class FloatStorage:
    """Its name would pass a test for the word Storage, and exists in torch."""

    def __init__(self, path):
        open(path, "w").close()


class WritesOnSetState:
    def __getstate__(self):
        return self.path

    def __setstate__(self, path):
        open(path, "w").close()


class WritesOnSetItem(dict):
    def __setitem__(self, key, value):
        open(value, "w").close()


class WritesOnAppend(list):
    def extend(self, items):
        for item in items:
            self.append(item)

    def append(self, item):
        open(item, "w").close()


def with_attributes(instance, **attributes):
    vars(instance).update(attributes)
    return instance


def text(value):
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()  # BINUNICODE


def hostile(path):
    """name → a pickle that creates the file `path`"""
    shell = f"touch {path}"
    code = f"open({str(path)!r}, 'w').close()"
    objects = {
        "os.system": Reduces(os.system, shell),
        "eval": Reduces(eval, code),
        "exec": Reduces(exec, code),
        "open": Reduces(open, str(path), "w"),
        "partial": Reduces(functools.partial(os.system, shell)),
        "torch_load": Reduces(torch.storage._load_from_bytes, torch_bytes(Reduces(os.system, shell))),
        "newobj": with_attributes(WritesOnNew(), arguments=(str(path),), keywords={}),
        "newobj_ex": with_attributes(WritesOnNew(), arguments=(), keywords={"keyword": str(path)}),
        "storage_name": Reduces(FloatStorage, str(path)),
        "setstate": with_attributes(WritesOnSetState(), path=str(path)),
        "setitem": WritesOnSetItem({"key": str(path)}),
        "append": WritesOnAppend([str(path)]),
        "nested": {"model": {"w": [1, (2, {"x": Reduces(os.system, shell)})]}},
    }
    pickles = {name: pickle.dumps(value, protocol=4) for name, value in objects.items()}
    pickles["protocol_2"] = pickle.dumps(objects["os.system"], protocol=2)
    pickles["protocol_0"] = pickle.dumps(objects["os.system"], protocol=0)
    pickles["dotted_name"] = b"\x80\x04" + text("pathlib") + text("os.system") + b"\x93" + text(shell) + b"\x85R."
    pickles["inst"] = b"\x80\x02(" + text(shell) + b"ios\nsystem\n."
    pickles["obj"] = b"\x80\x02(cos\nsystem\n" + text(shell) + b"o."
    pickles["extension"] = b"\x80\x02\x82\xf7" + text(shell) + b"\x85R."
    return pickles


def torch_bytes(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


HOSTILE_NAMES = list(hostile("nowhere"))


@pytest.fixture
def extension():
    copyreg.add_extension(os.system.__module__, "system", 0xF7)
    yield
    copyreg.remove_extension(os.system.__module__, "system", 0xF7)


@CONTAINERS
@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_hostile_pickle_is_refused(tmp_path, extension, container, name):
    marker = tmp_path / "written"
    pickled = hostile(marker)[name]
    pickle.loads(pickled)
    assert marker.exists(), "this pickle does no harm: the test would show nothing"
    marker.unlink()

    path = container(tmp_path / "file.pth", pickled)
    with pytest.raises(RefusedFile, match="nothing in it was executed"):
        TorchFile(path)
    assert not marker.exists()


@CONTAINERS
def test_refusal_names_the_name(tmp_path, container):
    path = container(tmp_path / "file.pth", pickle.dumps(Reduces(os.system, "true")))
    with pytest.raises(RefusedFile, match=rf"{os.system.__module__}\.system"):
        TorchFile(path)


@pytest.mark.parametrize(
    "name", ["torch.EvilStorage", "os.FloatStorage", "torch.nn.Linear", "torch.hub.load", "builtins.getattr", "x.y"]
)
def test_names_outside_the_tables_are_refused(tmp_path, name):
    module, _, attribute = name.rpartition(".")
    path = as_zip(tmp_path / "file.pth", f"c{module}\n{attribute}\n.".encode())
    with pytest.raises(RefusedFile, match=name):
        TorchFile(path)


def test_a_reader_leaves_no_trace_in_torch(tmp_path):
    """BUILD on a name would set attributes of the real object, for everybody."""
    for name in ("torch._utils\n_rebuild_tensor_v2", "collections\nOrderedDict", "torch\nSize", "torch\nfloat32"):
        pickled = f"c{name}\n".encode() + b"N}" + text("__doc__") + text("altered") + b"s\x86b."
        with pytest.raises(RefusedFile, match="attributes"):
            TorchFile(as_zip(tmp_path / "file.pth", pickled))
    assert torch._utils._rebuild_tensor_v2.__doc__ != "altered"


def test_names_cannot_be_called_as_something_else(tmp_path):
    for pickled in (b"ctorch\nFloatStorage\n)R.", b"cyacs.config\nCfgNode\n)R.", b"ctorch\nSize\n)\x81.", b"K\x01)R."):
        with pytest.raises(RefusedFile, match="a call of"):
            TorchFile(as_zip(tmp_path / "file.pth", pickled))


@CONTAINERS
def test_pickled_module_is_refused(tmp_path, container):
    pickled = b"(" + text("module") + b"K\x01K\x02K\x03tQ."
    with pytest.raises(RefusedFile, match="pickled module"):
        TorchFile(container(tmp_path / "file.pth", pickled))


# Files that lie about sizes. Built from a pickle with our own arguments for the tensor.


class Storage:
    def __init__(self, key="0", num_elements=6):
        self.identifier = ("storage", torch.FloatStorage, key, "cpu", num_elements)


class TensorPickler(pickle.Pickler):
    def persistent_id(self, obj):
        return obj.identifier if isinstance(obj, Storage) else None


def pickled_tensor(*arguments):
    buffer = io.BytesIO()
    TensorPickler(buffer, protocol=2).dump({"w": Reduces(torch._utils._rebuild_tensor_v2, *arguments)})
    return buffer.getvalue()


SIX = struct.pack("=6f", *range(6))


@CONTAINERS
def test_tensor_from_its_parts(tmp_path, container):
    pickled = pickled_tensor(Storage(), 1, (2, 2), (1, 3), False, OrderedDict())
    content = read(container(tmp_path / "file.pth", pickled, {"0": SIX}))
    assert content["w"].tolist() == [[1, 4], [2, 5]]


@CONTAINERS
@pytest.mark.parametrize(
    ("offset", "size", "stride"),
    [
        (0, (7,), (1,)),
        (1, (6,), (1,)),
        (0, (2, 2), (5, 1)),
        (0, (2**40,), (1,)),
        (0, (2**62, 2**62), (2**62, 1)),
        (0, (1000, 1000), (0, 0)),
        (-1, (2,), (1,)),
        (0, (-2,), (1,)),
        (3, (3,), (-1,)),
        (0, (2, 3), (1,)),
        (0, (2.0,), (1,)),
        (0, (1,) * 65, (1,) * 65),
        (2**63, (1,), (1,)),
    ],
)
def test_view_outside_its_storage(tmp_path, container, offset, size, stride):
    pickled = pickled_tensor(Storage(), offset, size, stride, False, OrderedDict())
    with pytest.raises(ValueError, match="damaged"):
        TorchFile(container(tmp_path / "file.pth", pickled, {"0": SIX}))


@CONTAINERS
@pytest.mark.parametrize("num_elements", [5, 7, 2**40, 2**62, -1, 1.5])
def test_storage_of_another_length(tmp_path, container, num_elements):
    pickled = pickled_tensor(Storage(num_elements=num_elements), 0, (1,), (1,), False, OrderedDict())
    with pytest.raises(ValueError, match="damaged"):
        TorchFile(container(tmp_path / "file.pth", pickled, {"0": SIX}))


@CONTAINERS
def test_storage_that_is_not_there(tmp_path, container):
    pickled = pickled_tensor(Storage(key="../0"), 0, (1,), (1,), False, OrderedDict())
    with pytest.raises(ValueError, match="damaged"):
        TorchFile(container(tmp_path / "file.pth", pickled, {"0": SIX}))


def test_hooks_are_dropped_and_conjugation_refused(tmp_path):
    hooks = OrderedDict({0: "anything"})
    path = as_zip(tmp_path / "a.pth", pickled_tensor(Storage(), 0, (6,), (1,), True, hooks), {"0": SIX})
    tensor = read(path)["w"]
    assert not tensor.requires_grad
    assert not tensor._backward_hooks
    pickled = pickled_tensor(Storage(), 0, (6,), (1,), False, OrderedDict(), {"neg": True})
    with pytest.raises(RefusedFile, match="negated"):
        TorchFile(as_zip(tmp_path / "b.pth", pickled, {"0": SIX}))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:FutureWarning")
def test_zip_tricks(tmp_path):
    pickled = pickled_tensor(Storage(), 0, (6,), (1,), False, OrderedDict())
    with pytest.raises(RefusedFile, match="compressed"):  # so a small file cannot become a large one
        TorchFile(as_zip(tmp_path / "a.pth", pickled, {"0": SIX}, zipfile.ZIP_DEFLATED))

    path = as_zip(tmp_path / "b.pth", pickled, {"0": SIX})
    with zipfile.ZipFile(path, "a") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        archive.writestr("archive/data/0", bytes(24))
    with pytest.raises(RefusedFile, match="two zip entries"):
        TorchFile(path)

    path, storages = tmp_path / "e.pth", {str(i): bytes(4000) for i in range(3)}
    buffer = io.BytesIO()
    tensors = [
        Reduces(torch._utils._rebuild_tensor_v2, Storage(key, 1000), 0, (1000,), (1,), False, OrderedDict())
        for key in storages
    ]
    TensorPickler(buffer, protocol=2).dump(tensors)
    assert len(read(as_zip(path, buffer.getvalue(), storages))) == 3
    with zipfile.ZipFile(path, "w") as archive:  # the same, with the bytes of one storage for all three
        archive.writestr("archive/data.pkl", buffer.getvalue())
        archive.writestr("archive/data/0", storages["0"])
        for key in ("1", "2"):
            archive.writestr(f"archive/data/{key}", b"")
            entry = archive.filelist[-1]
            entry.header_offset, entry.file_size, entry.compress_size = archive.filelist[1].header_offset, 4000, 4000
    with pytest.raises(ValueError, match="overlap"):
        TorchFile(path)

    path = tmp_path / "c.pth"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("notes.txt", "hello")
    with pytest.raises(RefusedFile, match=r"no data\.pkl"):
        TorchFile(path)

    path = tmp_path / "d.pth"
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)
    with pytest.raises(RefusedFile, match="TorchScript"):
        TorchFile(path)


def test_deep_keys_are_refused(tmp_path):
    """Python's own pickle crashes the interpreter on this one: the hash of a tuple recurses."""
    pickled = b"\x80\x02}" + b"N" + b"\x85" * 200_000 + b"Ns."
    with pytest.raises(RefusedFile, match="key"):
        TorchFile(as_zip(tmp_path / "file.pth", pickled))


def test_huge_memo_index_costs_nothing(tmp_path):
    """Python's own pickle allocates tens of GiB for it."""
    path = as_zip(tmp_path / "file.pth", b"\x80\x02}r\xff\xff\xff\xff.")
    with TorchFile(path) as file:
        assert file.content == {}


def test_foreign_byte_order(tmp_path):
    path = tmp_path / "file.pth"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}))
        archive.writestr("archive/byteorder", {"little": "big", "big": "little"}[sys.byteorder])
    with pytest.raises(RefusedFile, match="byte order"):
        TorchFile(path)


def test_plain_pickle_is_refused(tmp_path):
    path = tmp_path / "file.pkl"
    path.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(RefusedFile, match="plain pickle"):
        TorchFile(path)


@pytest.mark.filterwarnings("ignore:invalid escape sequence")
@FORMATS
def test_damage_is_always_a_value_error(tmp_path, new_format):
    """Cut anywhere, or with any byte changed, a file reads or raises ValueError; nothing else ever."""
    path = tmp_path / "file.pth"
    state = OrderedDict(weight=torch.arange(6.0).view(2, 3), bias=torch.ones(2), more={"x": (1, [2.5], "y")})
    torch.save({"model": state, "epoch": 3}, path, _use_new_zipfile_serialization=new_format)
    good = path.read_bytes()

    for length in range(0, len(good), 7):
        path.write_bytes(good[:length])
        with pytest.raises(ValueError, match=r"damaged|refused"):
            read(path)

    generator, outcomes = random.Random(0), set()
    for _ in range(600):
        changed = bytearray(good)
        changed[generator.randrange(len(good))] = generator.randrange(256)
        path.write_bytes(changed)
        try:
            read(path)
            outcomes.add("read")
        except ValueError:
            outcomes.add("error")
    assert outcomes == {"read", "error"}
