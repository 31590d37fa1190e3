"""Weights in and out of models, with real models made small."""

import argparse
import contextlib
import functools
import http.server
import shutil
import sys
import threading
import types
from collections import OrderedDict

import pytest
import timm
import timm.utils
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from inline_attention import create_model
from inline_attention.models.convert import convert
from inline_attention.models.weights import (
    WeightsError,
    load_model,
    load_weights,
    read_checkpoint,
    read_metadata,
    save_weights,
)
from inline_attention.tasks.classification.classifier import load_classifier

SMALL = {
    "inline_deit_tiny": dict(depth=2, img_size=64),
    "inline_pvt_tiny": dict(depths=(1, 1, 1, 1), img_size=64),
    "inline_swin_tiny": dict(depths=(1, 1, 1, 2), embed_dim=24, img_size=64),
    "inline_cswin_tiny": dict(depths=(1, 1, 1, 1), embed_dim=32, img_size=64),
}
FAMILIES = pytest.mark.parametrize("name", SMALL)
# Own names → official ones, for the parts of a DeiT that differ.
OFFICIAL_DEIT = {"attn.local.fc1": "attn.residual.0", "attn.local.fc2": "attn.residual.2"}


def small(name="inline_deit_tiny", seed=0, **options):
    torch.manual_seed(seed)
    return create_model(name, **{**SMALL[name], "num_classes": 10, **options}).eval()


@functools.cache
def other_state(name="inline_deit_tiny"):
    """Weights that a model of seed 0 does not have."""
    return small(name, seed=1).state_dict()


def official(state_dict):
    """A DeiT's weights under official names, with the shapes of the official 1×1 convolutions."""
    out = OrderedDict()
    for name, tensor in state_dict.items():
        for own, theirs in OFFICIAL_DEIT.items():
            if own in name:
                name = name.replace(own, theirs)
                tensor = tensor.reshape(-1, tensor.shape[-2], 1) if tensor.ndim == 3 else tensor.flatten()
        out[name] = tensor
    return out


def equal(model, state_dict):
    own = model.state_dict()
    return own.keys() == state_dict.keys() and all(torch.equal(own[name], state_dict[name]) for name in own)


# Sources.


@FAMILIES
def test_round_trip_through_safetensors(tmp_path, name):
    model = small(name, seed=1)
    path = save_weights(model, tmp_path / "model.safetensors")
    loaded = small(name)
    assert load_weights(loaded, path) is loaded
    assert equal(loaded, model.state_dict())
    image = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(loaded(image), model(image))


@pytest.mark.parametrize("nested", ["model", "state_dict", None])
@pytest.mark.parametrize("names", [official, dict])
@pytest.mark.parametrize("new_format", [True, False])
def test_torch_files_and_mappings(tmp_path, nested, names, new_format):
    weights = names(other_state())
    saved = {nested: weights, "epoch": 3, "max_accuracy": 74.5} if nested else weights
    torch.save(saved, tmp_path / "file.bin", _use_new_zipfile_serialization=new_format)
    for source in (tmp_path / "file.bin", str(tmp_path / "file.bin"), (tmp_path / "file.bin").as_uri(), saved):
        assert equal(load_weights(small(), source), other_state())


def test_official_checkpoint_with_a_yacs_configuration(tmp_path, monkeypatch):
    class CfgNode(dict):
        pass

    CfgNode.__module__, CfgNode.__qualname__ = "yacs.config", "CfgNode"
    module = types.ModuleType("yacs.config")
    module.CfgNode = CfgNode
    data = CfgNode(IMG_SIZE=64, TAGS={"a", "b"})
    with monkeypatch.context() as context:
        context.setitem(sys.modules, "yacs", types.ModuleType("yacs"))
        context.setitem(sys.modules, "yacs.config", module)
        config = CfgNode(DATA=data, MODEL=CfgNode(NAME="x"))
        config.__dict__["__deprecated_keys__"] = {"OLD"}
        saved = {"model": official(other_state()), "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}}}
        torch.save({**saved, "lr_scheduler": {}, "max_accuracy": 74.5, "epoch": 299, "config": config}, tmp_path / "a")
    assert equal(load_weights(small(), tmp_path / "a"), other_state())
    # The configuration says at which size the position embedding was made.
    larger = load_weights(small(img_size=96), tmp_path / "a")
    expected = small(seed=1)
    expected.set_input_size(96)
    assert equal(larger, expected.state_dict())


@pytest.mark.parametrize("size", [dict(img_size=64), dict(img_size=None, input_size=[3, 64, 64])])
def test_checkpoint_of_timms_script(tmp_path, size):
    """The command line in the checkpoint names the model if two models have the same shapes."""
    torch.manual_seed(1)
    model = create_model("softmax_deit_study", num_classes=10, img_size=64)
    prepared = dict(mean=(0.5, 0.5, 0.5), std=[0.25], interpolation="bilinear")
    args = argparse.Namespace(model="softmax_deit_study", num_classes=10, lr=0.1, **prepared, **size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    saver = timm.utils.CheckpointSaver(model, optimizer, args=args, checkpoint_dir=tmp_path, recovery_dir=tmp_path)
    saver.save_checkpoint(0, metric=50.0)
    loaded = load_model(tmp_path / "checkpoint-0.pth.tar")
    assert loaded.attention[0][0] == "softmax"
    assert equal(loaded, model.state_dict())
    convert(tmp_path / "checkpoint-0.pth.tar", tmp_path / "converted.safetensors")
    for file in ("checkpoint-0.pth.tar", "converted.safetensors"):
        prepared = load_classifier(None, str(tmp_path / file)).preprocessing()
        assert (prepared["mean"], prepared["std"]) == ((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
        assert prepared["interpolation"] == "bilinear"


def test_a_normalisation_that_is_none(tmp_path):
    path = tmp_path / "model.pth"
    weights = create_model("inline_deit_study").state_dict()
    torch.save({"state_dict": weights, "args": argparse.Namespace(mean=["a"], img_size=64)}, path)
    with pytest.raises(WeightsError, match=r"model.pth gives mean=\['a'\]; expected list\[float\]"):
        load_classifier("inline_deit_study", str(path))


def test_a_vit_of_timm_is_not_taken_for_a_deit(tmp_path):
    """Both have the same tensors. timm's script names the model, the official code has no ViT."""
    weights = timm.create_model("vit_tiny_patch16_224", num_classes=10).state_dict()
    path = tmp_path / "model.pth"
    torch.save(weights, path)
    with pytest.raises(
        WeightsError, match=r"fit softmax_deit_tiny and timm's vit_tiny_patch16_224, .*: name the model"
    ):
        load_model(path)
    expected = {"vit_tiny_patch16_224.augreg_in21k": 0.5, "deit_tiny_patch16_224": 0.485, "softmax_deit_tiny": 0.485}
    for name, mean in expected.items():
        torch.save({"state_dict": weights, "args": argparse.Namespace(model=name)}, path)
        classifier = load_classifier(None, str(path))
        assert (classifier.data.mean[0], classifier.model.num_classes) == (mean, 10), name
    assert load_classifier("vit_tiny_patch16_224", str(path)).data.mean == [0.5] * 3
    torch.save({"model": weights, "config": {"DATA": {"IMG_SIZE": 224}}}, path)
    assert load_classifier(None, str(path)).data.mean[0] == 0.485


@pytest.mark.parametrize(
    "info",
    [
        {"config": {"DATA": 3}},
        {"config": {"DATA": {"IMG_SIZE": 1.5}}},
        {"config": {"DATA": {"IMG_SIZE": "64"}}},
        {"args": argparse.Namespace(input_size=3)},
        {"args": argparse.Namespace(img_size={"a": 1})},
    ],
    ids=str,
)
def test_sizes_that_are_none(tmp_path, info):
    torch.save({"model": other_state(), **info}, tmp_path / "file.pth")
    for load in (load_model, functools.partial(load_weights, small())):
        with pytest.raises(WeightsError, match="size"):
            load(tmp_path / "file.pth")


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_prefixes_of_wrappers_are_removed(tmp_path, prefix):
    torch.save({"model": {prefix + name: tensor for name, tensor in other_state().items()}}, tmp_path / "file.pth")
    assert equal(load_weights(small(), tmp_path / "file.pth"), other_state())


@pytest.mark.parametrize("key", ["state_dict_ema", "model_ema"])
def test_choice_of_averaged_weights(tmp_path, key):
    raw, averaged = other_state(), small(seed=2).state_dict()
    torch.save({"model": raw, key: averaged}, tmp_path / "both.pth")
    assert equal(load_weights(small(), tmp_path / "both.pth"), averaged)
    assert equal(load_weights(small(), tmp_path / "both.pth", ema=True), averaged)
    assert equal(load_weights(small(), tmp_path / "both.pth", ema=False), raw)

    torch.save({"model": raw, key: None}, tmp_path / "raw.pth")
    assert equal(load_weights(small(), tmp_path / "raw.pth"), raw)
    with pytest.raises(ValueError, match=r"raw\.pth holds no EMA weights"):
        load_weights(small(), tmp_path / "raw.pth", ema=True)

    torch.save({key: averaged}, tmp_path / "averaged.pth")
    with pytest.raises(ValueError, match="only EMA weights"):
        load_weights(small(), tmp_path / "averaged.pth", ema=False)


def test_url_is_downloaded_under_a_name_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr(torch.hub, "_hub_dir", None)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    for seed in (1, 2):
        (tmp_path / str(seed)).mkdir()
        save_weights(small(seed=seed), tmp_path / str(seed) / "model.safetensors")

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

    handler = functools.partial(Handler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            for seed in (1, 2, 1):  # two files of one name, and the first again from the cache
                url = f"http://127.0.0.1:{server.server_port}/{seed}/model.safetensors"
                assert equal(load_weights(small(), url), small(seed=seed).state_dict())
        finally:
            server.shutdown()
            thread.join()
    assert len(list((tmp_path / "torch/hub/checkpoints").glob("model-*.safetensors"))) == 2


# Adaptation.


def test_another_class_count_is_an_error_unless_the_head_is_reset(tmp_path):
    path = save_weights(small(seed=1), tmp_path / "model.safetensors")
    model = small(num_classes=7)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"has 10 classes and the model has 7.*reset_head=True"):
        load_weights(model, path)
    assert equal(model, before)
    load_weights(model, path, reset_head=True)
    head = {name: before[name] for name in ("head.weight", "head.bias")}
    assert equal(model, {**other_state(), **head})


def test_the_head_of_a_model_of_timm():
    """Its configuration names the layer."""
    three, other, five = (timm.create_model("test_resnet", num_classes=n) for n in (3, 3, 5))
    assert three.pretrained_cfg["classifier"] == "fc"
    for model in (other, five):
        own = model.get_classifier().weight.detach().clone()
        load_weights(model, three.state_dict(), reset_head=True)
        assert torch.equal(model.get_classifier().weight, own)
        assert torch.equal(model.layer1[0].conv1.weight, three.layer1[0].conv1.weight)
    with pytest.raises(ValueError, match=r"has 3 classes and the model has 5.*reset_head=True"):
        load_weights(five, three.state_dict())
    plain = torch.nn.Linear(2, 3)
    with pytest.raises(ValueError, match="reset_head=True: the Linear does not say which layer is its head"):
        load_weights(plain, plain.state_dict(), reset_head=True)


def test_models_and_files_without_a_head(tmp_path):
    features = small(num_classes=0)
    with pytest.raises(ValueError, match="has 10 classes and the model has 0"):
        load_weights(features, other_state())
    load_weights(features, other_state(), reset_head=True)
    assert torch.equal(features.pos_embed, other_state()["pos_embed"])

    with pytest.raises(ValueError, match="has 0 classes and the model has 10"):
        load_weights(small(), features.state_dict())
    wrapped = {f"model.{name}": tensor for name, tensor in other_state().items()}
    with pytest.raises(ValueError, match=r"missing: cls_token, .* unexpected: model\.cls_token"):  # not about classes
        load_weights(small(), wrapped)
    model = load_weights(small(), features.state_dict(), reset_head=True)
    assert torch.equal(model.head.weight, small().head.weight)
    assert torch.equal(model.pos_embed, other_state()["pos_embed"])


@FAMILIES
@pytest.mark.parametrize("in_chans", [1, 6])
def test_input_channels_are_adapted(name, in_chans):
    """A grey image, or one with doubled channels, gives the output of the three-channel image."""
    three = load_weights(small(name), other_state(name))
    other = load_weights(small(name, in_chans=in_chans), other_state(name))
    x = torch.randn(1, 1, 64, 64).expand(1, 3, 64, 64) if in_chans == 1 else torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(other(x[:, :1] if in_chans == 1 else torch.cat([x, x], dim=1)), three(x))


def test_input_channels_that_cannot_be_adapted():
    with pytest.raises(ValueError, match=r"1 of another shape: patch_embed\.proj\.weight \(\(192, 4, 16, 16\) instead"):
        load_weights(small(), small(in_chans=4).state_dict())


@FAMILIES
def test_saved_size_is_known_when_loaded_at_another(tmp_path, name):
    """A file of save_weights says which input size it was made at; the position parameters follow."""
    model = small(name, seed=1, img_size=(224, 320))
    path = save_weights(model, tmp_path / "model.safetensors")
    loaded = load_weights(small(name, img_size=256), path)
    model.set_input_size(256)
    for key, tensor in model.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[key], tensor)


def test_others_may_read_what_is_saved(tmp_path):
    """The process's umask decides, as for any new file, also if the file replaces an older one."""
    (tmp_path / "like any file").touch()
    expected = (tmp_path / "like any file").stat().st_mode
    for _ in range(2):
        assert save_weights(small(), tmp_path / "model.safetensors").stat().st_mode == expected


# What does not fit.


@FAMILIES
def test_weights_of_another_family(name):
    for other in SMALL:
        if other != name:
            family = {"deit": "DeiT", "pvt": "PVT", "swin": "Swin", "cswin": "CSwin"}[other.split("_")[1]]
            with pytest.raises(ValueError, match=f"looks like the weights of a {family} model"):
                load_weights(small(name), other_state(other))


def test_official_names_of_another_family():
    swin = {"layers.0.blocks.0.norm1.weight": torch.ones(96), "head.weight": torch.ones(10, 768)}
    with pytest.raises(ValueError, match="looks like the weights of a Swin model, and this is a DeiT"):
        load_weights(small(), swin)


@pytest.mark.parametrize(
    ("name", "timms", "relative"),
    [
        ("inline_deit_tiny", "deit_tiny_distilled_patch16_224", "a distilled DeiT"),
        ("inline_deit_tiny", "deit3_small_patch16_224", "DeiT III"),
        ("inline_pvt_tiny", "pvt_v2_b1", "PVT v2"),
        ("inline_swin_tiny", "swinv2_tiny_window8_256", "Swin v2"),
    ],
)
def test_similar_architectures_of_timm(tmp_path, name, timms, relative):
    weights = timm.create_model(timms).state_dict()
    with pytest.raises(ValueError, match=f"looks like the weights of {relative}, which this library does not have"):
        load_weights(small(name), weights)
    torch.save(weights, tmp_path / "model.pth")
    with pytest.raises(ValueError, match=f"fit none of the registered models; it looks like .* {relative}"):
        load_model(tmp_path / "model.pth")


def test_one_error_lists_everything_and_nothing_is_loaded():
    weights = {name: tensor for name, tensor in other_state().items() if "mlp" not in name}
    weights["extra.weight"] = torch.ones(2)
    weights["norm.weight"] = torch.ones(5)
    weights["norm.bias"] = torch.zeros(192, dtype=torch.long)
    model = small()
    with pytest.raises(ValueError, match="the mapping does not fit") as caught:
        load_weights(model, weights)
    message = str(caught.value)
    assert "8 missing: blocks.0.mlp.fc1.weight" in message
    assert "1 unexpected: extra.weight" in message
    assert "2 of another shape: norm.weight ((5,) instead of (192,)), norm.bias ((192,) integers" in message
    assert equal(model, small().state_dict())


def test_long_lists_are_cut():
    weights = {f"extra.{i}": torch.ones(1) for i in range(500)} | other_state()
    with pytest.raises(ValueError, match=r"500 unexpected: extra\.0, .*, …") as caught:
        load_weights(small(), weights)
    assert len(str(caught.value)) < 500


def test_positions_that_nothing_can_be_made_of():
    for positions in (torch.ones(3), torch.ones(1, 6, 192), torch.ones(1, 17, 5)):
        with pytest.raises(ValueError, match="the mapping does not fit the model"):
            load_weights(small(), {**other_state(), "pos_embed": positions})


def test_models_that_cannot_be_loaded_into():
    with torch.device("meta"):
        model = create_model("inline_deit_tiny", num_classes=10, **SMALL["inline_deit_tiny"])
    with pytest.raises(ValueError, match="meta device"):
        load_weights(model, other_state())
    with pytest.raises(ValueError, match="the mapping does not fit the model: 2 missing: weight, bias"):
        load_weights(torch.nn.Linear(2, 2), other_state())
    with pytest.raises(ValueError, match="meta device"):
        load_weights(small(), {name: tensor.to("meta") for name, tensor in other_state().items()})


def test_dtype_of_the_model_is_kept():
    model = load_weights(small().bfloat16(), other_state())
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.bfloat16}
    assert torch.equal(model.pos_embed, other_state()["pos_embed"].bfloat16())


@pytest.mark.gpu
def test_device_of_the_model_is_kept():
    model = load_weights(small().cuda(), other_state())
    assert all(tensor.is_cuda for tensor in model.state_dict().values())
    assert torch.equal(model.pos_embed.cpu(), other_state()["pos_embed"])


def test_wrapped_models(tmp_path):
    compiled = torch.compile(small(), backend="eager")
    assert load_weights(compiled, other_state()) is compiled
    assert equal(compiled._orig_mod, other_state())
    path = save_weights(compiled, tmp_path / "model.safetensors")
    assert load_file(path).keys() == other_state().keys()


# Files that are something else.


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"<!DOCTYPE html><html></html>", "a web page was saved instead"),
        (b"\n  <html>", "a web page was saved instead"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git lfs pull"),
        (b"\0" * 257 + b"ustar\0" + b"\0" * 300, "tar archive"),
        (b"hello, world", "neither a safetensors file nor"),
        (b"\x80\x02}q\x00.", "plain pickle"),
    ],
)
def test_files_that_are_no_weights(tmp_path, content, message):
    path = tmp_path / "model.pth"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        load_weights(small(), path)
    assert str(caught.value).startswith(str(path))


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.pth does not exist"):
        load_weights(small(), tmp_path / "nowhere.pth")
    with pytest.raises(ValueError, match="is a folder"):
        load_weights(small(), tmp_path)
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    best = save_weights(small(), tmp_path / "run/checkpoints/best.safetensors")
    with pytest.raises(ValueError, match=f"run is a folder, .* such as {best}"):
        load_model(tmp_path / "run")


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.999])
@pytest.mark.parametrize("kind", ["zip", "legacy", "safetensors"])
def test_truncated_file(tmp_path, kind, keep):
    path = tmp_path / "model"
    if kind == "safetensors":
        save_weights(small(), path)
    else:
        torch.save({"model": other_state()}, path, _use_new_zipfile_serialization=kind == "zip")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(ValueError, match="is damaged or truncated"):
        load_weights(small(), path)


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({"epoch": 3, "config": {"a": 1}}, r"no tensors \(entries: epoch, config\)"),
        ({"model": {}}, "no tensors"),
        ([torch.ones(2)], "type list"),
        ({"model": {"w": torch.ones(2), "step": 3}}, r"more than tensors .*step"),
    ],
)
def test_torch_files_without_a_state_dict(tmp_path, saved, message):
    torch.save(saved, tmp_path / "file.pth")
    with pytest.raises(ValueError, match=message):
        read_checkpoint(tmp_path / "file.pth")


def test_suffix_does_not_matter(tmp_path):
    save_weights(small(seed=1), tmp_path / "model.pth")
    assert equal(load_weights(small(), tmp_path / "model.pth"), other_state())
    torch.save(other_state(), tmp_path / "model.safetensors")
    assert equal(load_weights(small(), tmp_path / "model.safetensors"), other_state())


# Writing.


def test_metadata_builds_the_model_again(tmp_path):
    model = small("inline_swin_tiny", seed=1, attention="ISIS", window_size=7)
    model.set_input_size((96, 64))
    model.reset_classifier(5)
    path = save_weights(model, tmp_path / "model.safetensors", metadata={"note": "mine"})
    metadata = read_metadata(path)
    assert metadata["format"] == "pt"
    assert metadata["note"] == "mine"
    again = load_model(path).eval()
    assert equal(again, model.state_dict())
    image = torch.randn(1, 3, 96, 64)
    with torch.no_grad():
        assert torch.equal(again(image), model(image))


def test_file_that_does_not_describe_its_model(tmp_path):
    save_file(other_state(), tmp_path / "plain.safetensors")
    with pytest.raises(ValueError, match=r"plain\.safetensors does not say which model it is for.*name the model"):
        load_model(tmp_path / "plain.safetensors")
    assert equal(load_model(tmp_path / "plain.safetensors", model=small()), other_state())


def test_any_model_that_the_user_built(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    save_file(model.state_dict(), tmp_path / "plain.safetensors")
    built = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    assert load_model(tmp_path / "plain.safetensors", model=built) is built
    assert equal(built, model.state_dict())
    with pytest.raises(ValueError, match="does not fit the model: 2 missing: weight, bias"):
        load_model(tmp_path / "plain.safetensors", model=torch.nn.Linear(3, 4))


@pytest.mark.parametrize("metadata", [{"config": "x"}, {"epoch": 3}])
def test_metadata_must_be_strings_of_other_names(tmp_path, metadata):
    with pytest.raises(ValueError, match="metadata"):
        save_weights(small(), tmp_path / "model.safetensors", metadata=metadata)
    assert list(tmp_path.iterdir()) == []


def test_metadata_of_other_files(tmp_path):
    save_file({"w": torch.ones(1)}, tmp_path / "plain.safetensors")
    assert read_metadata(tmp_path / "plain.safetensors") == {}
    torch.save({"w": torch.ones(1)}, tmp_path / "file.pth")
    with pytest.raises(ValueError, match="only safetensors files have metadata"):
        read_metadata(tmp_path / "file.pth")


def test_tied_and_strided_weights_are_written(tmp_path):
    model = small(seed=1)
    model.blocks[1].mlp.fc1.weight = model.blocks[0].mlp.fc1.weight
    model.blocks[0].mlp.fc2.weight = torch.nn.Parameter(model.blocks[0].mlp.fc2.weight.t().contiguous().t())
    assert not model.blocks[0].mlp.fc2.weight.is_contiguous()
    path = save_weights(model, tmp_path / "model.safetensors")
    assert equal(load_weights(small(), path), model.state_dict())


def test_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = save_weights(small(seed=1), tmp_path / "model.safetensors")

    def fail(tensors, filename, metadata):
        filename.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr("inline_attention.models.weights.save_file", fail)
    with pytest.raises(OSError, match="no space left"):
        save_weights(small(), path)
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    assert equal(load_weights(small(), path), other_state())


def test_file_may_be_written_over_itself(tmp_path):
    path = save_weights(small(seed=1), tmp_path / "model.safetensors")
    save_weights(load_weights(small(), path), path)
    assert equal(load_weights(small(), path), other_state())


def test_model_built_without_the_registry(tmp_path):
    """The model can be saved and loaded, but the file does not say how to build it."""
    cls = type(small())
    model = cls(depth=1, img_size=32, num_classes=3)
    path = save_weights(model, tmp_path / "model.safetensors")
    assert set(read_metadata(path)) == {"format", "library"}
    assert equal(load_weights(cls(depth=1, img_size=32, num_classes=3), path), model.state_dict())


# timm's own ways.


@FAMILIES
@pytest.mark.parametrize("safe", [True, False])
def test_timm_local_dir(tmp_path, name, safe):
    model = small(name, seed=1)
    timm.models.save_for_hf(model, tmp_path / "saved", model_args=model.config, safe_serialization=safe)
    loaded = timm.create_model(f"local-dir:{tmp_path / 'saved'}", pretrained=True).eval()
    assert equal(loaded, model.state_dict())


def test_timm_hf_hub(tmp_path, monkeypatch):
    """From huggingface_hub's cache: what a download would have put there, without a network."""
    model = small(seed=1)
    repository = tmp_path / "models--somebody--deit"
    timm.models.save_for_hf(model, repository / "snapshots/0", model_args=model.config, safe_serialization=True)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("0")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    loaded = timm.create_model("hf-hub:somebody/deit", pretrained=True, cache_dir=tmp_path)
    assert equal(loaded, model.state_dict())


def test_timm_checkpoint_path(tmp_path):
    path = save_weights(small(seed=1), tmp_path / "model.safetensors")
    loaded = timm.create_model(
        "inline_deit_tiny", num_classes=10, checkpoint_path=str(path), **SMALL["inline_deit_tiny"]
    )
    assert equal(loaded, other_state())
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["format"] == "pt"  # what transformers and timm look for


@contextlib.contextmanager
def cached(tmp_path, monkeypatch, name, saved):
    """`saved` where pretrained=True looks before it downloads."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "_hub_dir", None)
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    torch.save(saved, folder / f"{name}.pth")
    yield
    shutil.rmtree(folder)


def test_pretrained_reads_the_cache(tmp_path, monkeypatch):
    torch.manual_seed(1)
    full = create_model("inline_deit_tiny", depth=2)
    with cached(tmp_path, monkeypatch, "inline_deit_tiny", {"model": official(full.state_dict())}):
        assert equal(create_model("inline_deit_tiny", pretrained=True, depth=2), full.state_dict())
        # timm's convention: with pretrained=True another class count gives a new head.
        fewer = create_model("inline_deit_tiny", pretrained=True, depth=2, num_classes=7, img_size=64)
    assert fewer.head.weight.shape == (7, 192)
    assert torch.equal(fewer.blocks[0].norm1.weight, full.blocks[0].norm1.weight)
    full.set_input_size(64)
    torch.testing.assert_close(fewer.pos_embed, full.pos_embed)
