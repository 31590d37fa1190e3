"""Weights files of strangers: what is harmless is read, and everything else is refused without executing anything."""

import argparse
import copyreg
import functools
import io
import json
import os
import pickle
import random
import resource
import struct
import sys
import types
import warnings
import zipfile
from collections import OrderedDict

import pytest
import torch
import training_runs

from inline_attention.models._checkpoint import WeightsError, _load_torch_file, open_checkpoint

REFUSED = "nothing in it was executed"


def read(path):
    """The whole content, not only the weights."""
    return _load_torch_file(path)


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
    parts = [pickle.dumps(part, protocol=2) for part in (torch.serialization.MAGIC_NUMBER, 1001, system)]
    parts += [pickled, pickle.dumps(list(storages or {}), protocol=2)]
    for data in (storages or {}).values():
        parts += [struct.pack("<q", len(data) // 4), data]
    path.write_bytes(b"".join(parts))
    return path


CONTAINERS = pytest.mark.parametrize("container", [as_zip, as_legacy])
FORMATS = pytest.mark.parametrize("new_format", [True, False], ids=["zip", "legacy"])


# What is harmless reads as torch.load reads it.


@FORMATS
def test_equals_torch_load(tmp_path, new_format):
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
    torch.save(saved, path, _use_new_zipfile_serialization=new_format)
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


def memory_to_open(paths):
    """For each file, what was said, and by how many MiB the peak of this process grew."""
    results = []
    for path in paths:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            open_checkpoint(path)
            said = "read"
        except ValueError as error:
            said = str(error)
        results.append((said, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024))
    return results


# Names that torch's restricted loader lets a pickle call with any size.
ALLOCATORS = (b"cbuiltins\nbytearray\n", b"ctorch\nByteStorage\n")


def test_memory_follows_the_size_of_a_file(tmp_path):
    """Small files that ask for gigabytes, and a large one of which little is used. Opened in a process of their own."""
    expected = {}
    for container in (as_zip, as_legacy):
        for number, allocator in enumerate(ALLOCATORS):
            call = allocator + b"J" + struct.pack("<i", 1 << 29) + b"\x85R"
            pickled = b"\x80\x02}" + text("model") + b"](" + call * 2 + b"es."
            path = container(tmp_path / f"{container.__name__}_{number}.pth", pickled)
            expected[path] = REFUSED

        elements = 1 << 28  # a gigabyte
        declared = pickled_tensor(
            Storage("0", elements), 0, (elements,), (1,), False, OrderedDict(), container=container
        )
        expected[container(tmp_path / f"{container.__name__}_declared.pth", declared, {"0": SIX})] = "damaged"
        repeated = pickled_tensor(Storage(), 0, (elements,), (0,), False, OrderedDict(), container=container)
        expected[container(tmp_path / f"{container.__name__}_repeated.pth", repeated, {"0": SIX})] = "damaged"

    zeros = tmp_path / "compressed.pth"  # 128 MiB when read
    torch.save({"model": {"w": torch.zeros(1 << 25)}}, zeros)
    with zipfile.ZipFile(zeros) as archive:
        content = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(zeros, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    assert zeros.stat().st_size < 1 << 20
    expected[zeros] = "compressed"

    # An optimizer's state is twice as large as the model and of no use here.
    torch.save({"model": {"w": torch.ones(3)}, "optimizer": torch.ones(100 << 18)}, tmp_path / "trained.pth")
    expected[tmp_path / "trained.pth"] = "read"

    measured = training_runs.call(memory_to_open, list(expected))
    for (path, message), (said, grown) in zip(expected.items(), measured, strict=True):
        assert message in said, path
        assert grown < 50, path


def test_script_arguments_of_timm(tmp_path):
    """timm's train.py saves its command line as an argparse.Namespace."""
    args = argparse.Namespace(model="inline_deit_tiny", lr=1e-3, mean=None, betas=(0.9, 0.999), classes=["a"])
    torch.save({"state_dict": {"w": torch.ones(2)}, "args": args, "epoch": 3}, tmp_path / "checkpoint-3.pth.tar")
    checkpoint = open_checkpoint(tmp_path / "checkpoint-3.pth.tar")
    assert torch.equal(checkpoint.state_dict["w"], torch.ones(2))
    assert vars(checkpoint.info["args"]) == vars(args)
    assert type(checkpoint.info["args"]) is OrderedDict  # not a Namespace, whose class could have been anything


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


@FORMATS
def test_yacs_configuration_is_inert(tmp_path, yacs, monkeypatch, new_format):
    inner = yacs({"IMG_SIZE": 224, "MEAN": (0.485, 0.456), "TAGS": {"x"}})
    config = yacs({"DATA": inner, "AGAIN": inner, "NAME": "swin", "LIST": [1, None, [2.5]], "ON": True})
    path = tmp_path / "file.pth"
    torch.save(
        {"model": OrderedDict(w=torch.ones(2)), "config": config},
        path,
        _use_new_zipfile_serialization=new_format,
    )
    monkeypatch.delitem(sys.modules, "yacs.config")
    with pytest.raises(pickle.UnpicklingError):  # without a stand-in for the class
        torch.load(path, weights_only=True)
    actual = read(path)
    assert actual["config"] == dict(config)
    assert torch.equal(actual["model"]["w"], torch.ones(2))
    assert type(actual["config"]) is OrderedDict
    assert actual["config"]["DATA"] is actual["config"]["AGAIN"]


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
    pickles["dotted_name"] = b"\x80\x04" + text("shutil") + text("os.system") + b"\x93" + text(shell) + b"\x85R."
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
    with pytest.raises(WeightsError, match=REFUSED):
        open_checkpoint(path)
    assert not marker.exists()


@CONTAINERS
def test_refusal_names_the_name(tmp_path, container):
    path = container(tmp_path / "file.pth", pickle.dumps(Reduces(os.system, "true")))
    with pytest.raises(WeightsError, match=rf"{os.system.__module__}\.system"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    "name", ["torch.EvilStorage", "os.FloatStorage", "torch.nn.Linear", "torch.hub.load", "builtins.getattr", "x.y"]
)
def test_names_outside_the_tables_are_refused(tmp_path, name):
    module, _, attribute = name.rpartition(".")
    path = as_zip(tmp_path / "file.pth", f"c{module}\n{attribute}\n.".encode())
    with pytest.raises(WeightsError, match=name):
        open_checkpoint(path)


def test_a_reader_leaves_no_trace_in_torch(tmp_path):
    """BUILD on a name would set attributes of the real object in the whole process."""
    for name in ("torch._utils\n_rebuild_tensor_v2", "collections\nOrderedDict", "torch\nSize", "torch\nfloat32"):
        pickled = f"c{name}\n".encode() + b"N}" + text("__doc__") + text("altered") + b"s\x86b."
        with pytest.raises(WeightsError, match="not a mapping"):
            open_checkpoint(as_zip(tmp_path / "file.pth", pickled))
    assert torch._utils._rebuild_tensor_v2.__doc__ != "altered"


def test_names_cannot_be_called_as_something_else(tmp_path):
    for pickled in (b"ctorch\nFloatStorage\n)R.", b"cyacs.config\nCfgNode\n)R.", b"ctorch\nSize\n)\x81.", b"K\x01)R."):
        with pytest.raises(WeightsError, match="a call of"):
            open_checkpoint(as_zip(tmp_path / "file.pth", pickled))


@CONTAINERS
def test_pickled_module_is_refused(tmp_path, container):
    pickled = b"(" + text("module") + b"K\x01K\x02K\x03tQ."
    with pytest.raises(WeightsError, match=REFUSED):
        open_checkpoint(container(tmp_path / "file.pth", pickled))


# Files that lie about sizes. Built from a pickle with our own arguments for the tensor.


class Storage:
    def __init__(self, key="0", num_elements=6):
        self.identifier = ("storage", torch.FloatStorage, key, "cpu", num_elements)


class TensorPickler(pickle.Pickler):
    legacy = False

    def persistent_id(self, obj):
        if isinstance(obj, Storage):
            return (*obj.identifier, None) if self.legacy else obj.identifier
        return None


def pickled_tensor(*arguments, container=as_zip):
    buffer = io.BytesIO()
    pickler = TensorPickler(buffer, protocol=2)
    pickler.legacy = container is as_legacy
    pickler.dump({"w": Reduces(torch._utils._rebuild_tensor_v2, *arguments)})
    return buffer.getvalue()


SIX = struct.pack("=6f", *range(6))


@CONTAINERS
def test_tensor_from_its_parts(tmp_path, container):
    pickled = pickled_tensor(Storage(), 1, (2, 2), (1, 3), False, OrderedDict(), container=container)
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
        (0, (2**62, 2**62, 0), (1, 1, 1)),
        (2**63, (1,), (1,)),
    ],
)
def test_view_outside_its_storage(tmp_path, container, offset, size, stride):
    pickled = pickled_tensor(Storage(), offset, size, stride, False, OrderedDict(), container=container)
    with pytest.raises(ValueError, match="damaged"):
        open_checkpoint(container(tmp_path / "file.pth", pickled, {"0": SIX}))


@CONTAINERS
@pytest.mark.parametrize("num_elements", [5, 7, 2**40, 2**62, -1, 1.5])
def test_storage_of_another_length(tmp_path, container, num_elements):
    """The archive's storages are mapped: whatever their declared length, a tensor shows bytes of the file."""
    pickled = pickled_tensor(
        Storage(num_elements=num_elements), 0, (1,), (1,), False, OrderedDict(), container=container
    )
    path = container(tmp_path / "file.pth", pickled, {"0": SIX})
    if container is as_zip and num_elements in (5, 7, 2**40, 2**62):
        assert open_checkpoint(path).state_dict["w"].tolist() == [0]
    else:
        with pytest.raises(ValueError, match="damaged"):
            open_checkpoint(path)


@CONTAINERS
def test_storage_that_is_not_there(tmp_path, container):
    pickled = pickled_tensor(Storage(key="../0"), 0, (1,), (1,), False, OrderedDict(), container=container)
    with pytest.raises(ValueError, match="damaged"):
        open_checkpoint(container(tmp_path / "file.pth", pickled, {"0": SIX}))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:FutureWarning")
def test_zip_tricks(tmp_path):
    pickled = pickled_tensor(Storage(), 0, (6,), (1,), False, OrderedDict())
    with pytest.raises(WeightsError, match="compressed"):  # so a small file cannot become a large one
        open_checkpoint(as_zip(tmp_path / "a.pth", pickled, {"0": SIX}, zipfile.ZIP_DEFLATED))

    path = as_zip(tmp_path / "b.pth", pickled, {"0": SIX})
    with zipfile.ZipFile(path, "a") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        archive.writestr("archive/data/0", bytes(24))
    with pytest.raises(WeightsError, match="two zip entries"):
        open_checkpoint(path)

    path = tmp_path / "c.pth"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("notes.txt", "hello")
    with pytest.raises(WeightsError, match=r"no data\.pkl"):
        open_checkpoint(path)

    path = tmp_path / "d.pth"
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)
    with pytest.raises(WeightsError, match="TorchScript"):
        open_checkpoint(path)


def test_deep_keys_are_refused(tmp_path):
    """Python's own pickle crashes the interpreter on this one: the hash of a tuple recurses."""
    pickled = b"\x80\x02}" + b"N" + b"\x85" * 200_000 + b"Ns."
    with pytest.raises(WeightsError, match="tuples inside each other"):
        open_checkpoint(as_zip(tmp_path / "file.pth", pickled))


def test_huge_memo_index_costs_nothing(tmp_path):
    """Python's own pickle allocates tens of GiB for it."""
    path = as_zip(tmp_path / "file.pth", b"\x80\x02}r\xff\xff\xff\xff.")
    assert read(path) == {}


def test_foreign_byte_order(tmp_path):
    path = tmp_path / "file.pth"
    other = {"little": "big", "big": "little"}[sys.byteorder]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled_tensor(Storage(), 0, (6,), (1,), False, OrderedDict()))
        archive.writestr("archive/byteorder", other)
        archive.writestr("archive/data/0", struct.pack(">6f" if other == "big" else "<6f", *range(6)))
        archive.writestr("archive/version", "3\n")
    assert open_checkpoint(path).state_dict["w"].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("saved", [{1: torch.ones(2)}, {"model": {(1, 2): torch.ones(2)}}, {None: torch.ones(1)}])
def test_names_that_are_not_strings(tmp_path, saved):
    torch.save(saved, tmp_path / "file.pth")
    with pytest.raises(WeightsError, match="names are not strings"):
        open_checkpoint(tmp_path / "file.pth")


def test_sizes_beyond_64_bits_in_safetensors(tmp_path):
    header = json.dumps({"w": {"dtype": "F32", "shape": [2**62, 2**62, 0], "data_offsets": [0, 0]}}).encode()
    (tmp_path / "file.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(WeightsError, match="damaged"):
        open_checkpoint(tmp_path / "file.safetensors")


def test_plain_pickle_is_refused(tmp_path):
    path = tmp_path / "file.pkl"
    path.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(WeightsError, match="plain pickle"):
        open_checkpoint(path)


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
