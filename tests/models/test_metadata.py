"""What a weights file says about its model is checked before anything is built, opened or requested."""

import http.server
import json
import resource
import threading
import time

import pytest
import timm
import torch
import training_runs
from PIL import Image
from safetensors.torch import save_file
from small import create_small

from inline_attention import load_model
from inline_attention.cli import main
from inline_attention.explore import load_subjects
from inline_attention.models.weights import WeightsError, read_metadata, save_weights
from inline_attention.tasks.classification.classifier import load_classifier
from inline_attention.tasks.detection.weights import load_detector
from inline_attention.tasks.segmentation.weights import load_segmenter

NAME = "inline_deit_tiny"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A model, and the metadata that describe it."""
    model = create_small(NAME)
    path = save_weights(model, tmp_path_factory.mktemp("good") / "good.safetensors")
    return model, read_metadata(path)


def altered(folder, good, **changes):
    """The same weights with other metadata; `config` and `changes` add to what is there if they are mappings."""
    model, metadata = good
    entries = dict(metadata)
    for key, value in changes.items():
        entries[key] = json.dumps(json.loads(entries[key]) | value) if isinstance(value, dict) else value
    path = folder / "altered.safetensors"
    save_file(model.state_dict(), path, metadata=entries)
    return path


class Pickle:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


LOADERS = {
    "load_model": load_model,
    "load_classifier": lambda path: load_classifier(None, str(path)),
    "explore": lambda path: load_subjects([str(path)], device=torch.device("cpu")),
}


@pytest.mark.parametrize("loader", LOADERS)
def test_a_file_cannot_name_another_file(tmp_path, good, loader):
    marker = tmp_path / "executed"
    torch.save(Pickle(marker), tmp_path / "evil.pth")
    torch.load(tmp_path / "evil.pth", weights_only=False)
    marker.unlink()  # it would have worked
    path = altered(tmp_path, good, config={"checkpoint_path": str(tmp_path / "evil.pth")})
    with pytest.raises(WeightsError, match="checkpoint_path"):
        LOADERS[loader](path)
    assert not marker.exists()


@pytest.mark.parametrize("task", ["segmentation", "detection"])
def test_a_file_of_a_whole_model_cannot_name_another_file(tmp_path, good, task):
    load, data = {
        "segmentation": (load_segmenter, {"short_side": 64}),
        "detection": (load_detector, {"short_side": 64, "max_side": 64}),
    }[task]
    facts = dict(task=task, class_names='["a", "b"]', preprocessing=json.dumps(data))

    def described(**arguments):
        return str(altered(tmp_path, good, **facts, config=json.dumps(arguments)))

    for arguments in (
        {"weights": str(tmp_path / "evil.pth")},
        {"kwargs": {"checkpoint_path": "evil.pth"}},
        {"kwargs": {"depth": 10**7}},
        {"kwargs": [1]},
        {"kwargs": {"pretrained": True}},
        {"head": "../../head"},
        {"head_kwargs": {"dim": 10**9}},
        {"head_kwargs": 3},
        {"channels": 2**62},
    ):
        with pytest.raises(WeightsError, match=r"altered\.safetensors") as caught:
            load(described(**arguments))
        assert "\n" not in str(caught.value)
    facts["preprocessing"] = json.dumps({**data, "short_side": "x"})
    with pytest.raises(WeightsError, match="gives short_side='x'"):
        load(described())


def test_a_file_cannot_make_requests(tmp_path, good, monkeypatch):
    """Neither addresses nor names of a hub cause a request to a server on this machine."""
    requests = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        try:
            for changes in (
                {"architecture": "hf-hub:somebody/something"},
                {"architecture": f"{address}/model"},
                {"config": {"pretrained_cfg": {"url": f"{address}/weights.pth"}, "pretrained": True}},
                {"config": {"weights": f"{address}/weights.pth"}},
                {"config": {"pretrained_cfg_overlay": {"url": address}}},
                {"config": {"attention": address}},
            ):
                path = altered(tmp_path, good, **changes)
                for load in LOADERS.values():
                    with pytest.raises(WeightsError, match=r"altered\.safetensors"):
                        load(path)
        finally:
            server.shutdown()
            thread.join()
    assert requests == []


DEEP = "[" * 100_000
BAD = [
    {"architecture": "resnet18"},
    {"architecture": "local-dir:/tmp"},
    {"architecture": "inline_deit_tiny.in1k"},
    {"architecture": ""},
    {"config": "{"},
    {"config": DEEP},
    {"config": '{"a": ' * 5000},
    {"config": "[1, 2]"},
    {"config": "null"},
    {"config": {"depth": 10**7}},
    {"config": {"depth": 60_000}},
    {"config": {"depth": -1}},
    {"config": {"depth": True}},
    {"config": {"depth": 1.5}},
    {"config": {"depth": [3]}},
    {"config": {"depth": None}},
    {"config": {"num_classes": 10**9}},
    {"config": {"embed_dim": 65_536}},
    {"config": {"embed_dim": 0}},
    {"config": {"num_heads": 0}},
    {"config": {"img_size": [1, 2, 3]}},
    {"config": {"img_size": {"a": 1}}},
    {"config": {"img_size": "64"}},
    {"config": {"patch_size": 0}},
    {"config": {"mlp_ratio": float("nan")}},
    {"config": {"mlp_ratio": 1e300}},
    {"config": {"attention": ["inline"] * 2000}},
    {"config": {"attention": "x" * 10_000}},
    {"config": {"attention": "x\n\x1b[31m"}},
    {"config": {"global_pool": "\x1b]0;title\x07"}},
    {"config": {"pretrained": True}},
    {"config": {"self": 1}},
    {"config": {"cls": 1}},
    {"changes": "{"},
    {"changes": {"img_size": "x"}},
    {"changes": {"img_size": [10**9, 1]}},
    {"changes": {"layers": 0}},
    {"changes": {"layers": 4}},
    {"changes": {"num_classes": -1}},
    {"changes": {"path": "x"}},
    {"changes": '{"img_size": [64, 64]}'},
]


@pytest.mark.parametrize("changes", BAD, ids=lambda changes: str(changes)[:60])
def test_what_cannot_be_is_one_error(tmp_path, good, changes):
    path = altered(tmp_path, good, **changes)
    start = time.monotonic()
    with pytest.raises(WeightsError, match=r"altered\.safetensors") as caught:
        load_model(path)
    assert time.monotonic() - start < 60
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 1000


@pytest.mark.parametrize(
    "changes",
    [
        {"class_names": "[1, 2]"},
        {"class_names": '{"a": 1}'},
        {"class_names": "["},
        {"class_names": '["a"]'},
        {"preprocessing": "[]"},
        {"preprocessing": '{"mean": "x"}'},
        {"preprocessing": '{"mean": [1, 2]}'},
        {"preprocessing": '{"std": [0, 0, 0]}'},
        {"preprocessing": '{"interpolation": "cubic"}'},
        {"preprocessing": '{"crop_pct": -1}'},
        {"task": "detection"},
    ],
    ids=str,
)
def test_classes_and_preprocessing_are_checked(tmp_path, good, changes):
    with pytest.raises(WeightsError, match=r"altered\.safetensors"):
        load_classifier(None, str(altered(tmp_path, good, **changes)))


def test_preprocessing_says_nothing_else(tmp_path, good):
    path = altered(tmp_path, good, preprocessing='{"path": "/", "crop_pct": 0.5, "workers": 1000, "retired": 1}')
    data = load_classifier(None, str(path)).data
    assert (data.crop_pct, data.path, data.workers) == (0.5, "digits", None)


def memory_to_load(first, *others):
    """What was said about the others, and by how many MiB they raised the peak of this process."""
    load_model(first)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    said = []
    for path in others:
        try:
            load_model(path)
        except ValueError as error:
            said.append(str(error))
    return said, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024


def test_memory_follows_the_file(tmp_path, good):
    """Neither a model that does not fit nor one that is made smaller after it was built is allocated."""
    paths = []
    for number, config in enumerate(({}, {"embed_dim": 16384}, {"num_classes": 10**6, "img_size": 65_536})):
        (tmp_path / str(number)).mkdir()
        paths.append(str(altered(tmp_path / str(number), good, config=config)))
    (said,), grown = training_runs.call(memory_to_load, *paths)
    assert "does not fit the model" in said
    assert grown < 100


def test_loading_leaves_the_random_state(tmp_path, good):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    load_model(altered(tmp_path, good))
    assert torch.equal(torch.rand(1), expected)


def test_a_file_may_name_a_model_of_timm(tmp_path):
    """It may give numbers, but no argument that makes `timm.create_model` open a file."""
    name, arguments = "vit_tiny_patch16_224", dict(img_size=32, embed_dim=16, depth=1, num_heads=2, num_classes=4)
    model = timm.create_model(name, **arguments)

    def saved(**more):
        metadata = {"library": "inline_attention", "architecture": name, "config": json.dumps(arguments | more)}
        save_file(model.state_dict(), tmp_path / "vit.safetensors", metadata=metadata)
        return str(tmp_path / "vit.safetensors")

    for given in (None, name):
        loaded = load_classifier(given, saved()).model
        assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))
        for more in ({"checkpoint_path": "x.pth"}, {"pretrained": True}, {"act_layer": "x"}, {"depth": 10**7}):
            with pytest.raises(WeightsError, match=next(iter(more))):
                load_classifier(given, saved(**more))


def test_the_command_line_prints_one_line(tmp_path, good, capsys):
    path, photo = str(altered(tmp_path, good, config={"depth": 10**7})), tmp_path / "photo.png"
    Image.new("RGB", (8, 8)).save(photo)
    for command in (
        ["predict", "--weights", path, str(photo)],
        ["eval", "--weights", path, "--data", "digits"],
        ["export", "--weights", path, "--output", str(tmp_path / "x.onnx")],
        ["info", "--weights", path],
        ["convert", path, str(tmp_path / "y.safetensors")],
        ["analyze", "maps", "--weights", path, "--output", str(tmp_path / "out")],
    ):
        assert main(command) == 2, command
        printed = capsys.readouterr()
        assert printed.err.count("\n") == 1
        assert "depth=10000000" in printed.err
