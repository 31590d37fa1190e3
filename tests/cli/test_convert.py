"""`inline convert`: official checkpoint in, safetensors out."""

import json
from collections import OrderedDict
from pathlib import Path

import pytest
import timm
import torch

from inline_attention import create_model, list_models
from inline_attention.cli import main
from inline_attention.linearize import calibrate, linearize
from inline_attention.models._checkpoint import Checkpoint
from inline_attention.models.convert import convert
from inline_attention.models.weights import identify, load_model, load_weights, read_metadata, save_weights


@pytest.fixture(scope="module")
def deit():
    torch.manual_seed(0)
    return create_model("inline_deit_tiny", num_classes=12)


@pytest.fixture(scope="module")
def official_file(deit, tmp_path_factory):
    """A checkpoint as the official training code writes it: its names and shapes, weights and their average."""
    weights = OrderedDict()
    for name, tensor in deit.state_dict().items():
        if ".local." in name:
            name = name.replace("local.fc1", "residual.0").replace("local.fc2", "residual.2")
            tensor = tensor.reshape(-1, tensor.shape[-2], 1) if tensor.ndim == 3 else tensor.flatten()
        weights[name] = tensor
    path = tmp_path_factory.mktemp("official") / "ckpt_epoch_299.pth"
    averaged = {name: tensor * 2 for name, tensor in weights.items()}
    torch.save({"model": weights, "state_dict_ema": averaged, "epoch": 299}, path)
    return path


def same(model, other, factor=1):
    own, theirs = model.state_dict(), other.state_dict()
    return own.keys() == theirs.keys() and all(torch.equal(own[name], factor * theirs[name]) for name in own)


def test_model_is_found_and_the_result_loads(official_file, deit, tmp_path, capsys):
    out = tmp_path / "deit.safetensors"
    assert main(["convert", str(official_file), str(out)]) == 0
    printed = capsys.readouterr().out
    for part in ("inline_deit_tiny", "averaged (EMA)", "224×224", "12", "200"):
        assert part in printed
    assert read_metadata(out)["converted_from"] == "ckpt_epoch_299.pth"
    assert same(load_model(out), deit, factor=2)


def test_choice_of_weights_and_model(official_file, deit, tmp_path):
    out = tmp_path / "deit.safetensors"
    command = ["convert", str(official_file), str(out), "--no-ema", "--model", "inline_deit_tiny"]
    assert main(command) == 0
    assert same(load_weights(create_model("inline_deit_tiny", num_classes=12), out), deit)


def test_own_file_keeps_its_configuration(tmp_path):
    model = create_model("inline_deit_tiny", depth=2, img_size=(32, 48), num_classes=3, in_chans=1)
    about = {"class_names": '["a", "b", "c"]', "preprocessing": '{"mean": [0.5], "std": [0.5]}', "multi_label": "true"}
    source = save_weights(model, tmp_path / "a.safetensors", metadata=about)
    assert main(["convert", str(source), str(tmp_path / "b.safetensors")]) == 0
    first, second = read_metadata(source), read_metadata(tmp_path / "b.safetensors")
    for key in ("config", *about):
        assert first[key] == second[key]


def test_nothing_is_overwritten_unless_forced(official_file, tmp_path, capsys):
    out = tmp_path / "deit.safetensors"
    out.write_bytes(b"precious")
    assert main(["convert", str(official_file), str(out)]) == 2
    assert "--force" in capsys.readouterr().err
    assert out.read_bytes() == b"precious"
    assert main(["convert", str(official_file), str(out), "--force"]) == 0
    assert read_metadata(out)["architecture"] == "inline_deit_tiny"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.pth", "out.safetensors"], "does not exist"),
        (["{file}", "out.pth"], "must end in .safetensors"),
        (["{file}", "out.safetensors", "--model", "inline_deit_tinny"], "inline_deit_tiny"),
        (["{file}", "out.safetensors", "--model", "inline_pvt_tiny"], "looks like the weights of a DeiT model"),
        (["{file}", "out.safetensors", "--model", "inline_deit_small"], "does not fit"),
        (["{html}", "out.safetensors"], "a web page was saved instead"),
        (["{plain}", "out.safetensors", "--ema"], "holds no EMA weights"),
        (["{plain}", "out.safetensors"], "fit none of the registered models"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(official_file, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    files = {"file": official_file, "html": tmp_path / "page.pth", "plain": tmp_path / "plain.pth"}
    files["html"].write_text("<html>sign in</html>")
    torch.save({"w": torch.ones(2)}, files["plain"])
    assert main(["convert", *(argument.format(**files) for argument in arguments)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.glob("out*"))


# The model is found by shapes alone, on the meta device, at full size.


def checkpoint_of(name, info=None, **options):
    with torch.device("meta"):
        model = create_model(name, **options)
    return Checkpoint(model.state_dict(), False, info or {})


@pytest.mark.parametrize("name", ["inline_deit_small", "inline_swin_base_384"])
def test_identify(name):
    assert identify(checkpoint_of(name, num_classes=7, in_chans=1)) == name


ALIKE = ["softmax_deit_study", "linear_deit_study"]  # the same parameters under other attention
TIMMS = [f"softmax_deit_{size}" for size in ("tiny", "small", "base")]  # the same parameters as a ViT of timm


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in list_models() if name not in [*ALIKE, *TIMMS]])
def test_identify_every_model(name):
    side = timm.models.get_pretrained_cfg(name).input_size[1]  # decides between models of the same shapes
    assert identify(checkpoint_of(name, num_classes=0), filename=f"epoch_299_{side}.pth") == name


@pytest.mark.slow
@pytest.mark.parametrize("name", TIMMS)
def test_weights_that_also_fit_a_vit_of_timm_need_its_name(name):
    with pytest.raises(ValueError, match=f"fit {name} and timm's vit_.*name the model"):
        identify(checkpoint_of(name, num_classes=0), filename="epoch_299_224.pth")


@pytest.mark.parametrize("name", ALIKE)
def test_models_that_differ_in_attention_alone_are_told_by_the_configuration_saved_with_them(name, tmp_path):
    with pytest.raises(ValueError, match=r"softmax_deit_study and linear_deit_study.*name the model"):
        identify(checkpoint_of(name), filename="weights.pth")
    source, target = tmp_path / "source.safetensors", tmp_path / "target.safetensors"
    save_weights(create_model(name), source)
    convert(source, target)
    assert load_model(target).default_cfg["architecture"] == name


def test_identify_models_that_differ_in_input_size_alone():
    checkpoint = checkpoint_of("inline_cswin_base")
    with pytest.raises(ValueError, match=r"inline_cswin_base and inline_cswin_base_384.*name the model"):
        identify(checkpoint, filename="ckpt_epoch_299.pth")
    checkpoint.info = {"config": {"DATA": {"IMG_SIZE": 224}}}
    assert identify(checkpoint, filename="cswin_b_384.pth") == "inline_cswin_base"


def test_mean_of_several_files(tmp_path, capsys):
    torch.manual_seed(0)
    models = [create_model("inline_deit_tiny", depth=1, img_size=32, num_classes=2) for _ in range(3)]
    names = json.dumps(["cat", "dog"])
    files = []
    for number, model in enumerate(models):
        metadata = {"class_names": names, "epoch": str(number)}
        files.append(str(save_weights(model, tmp_path / f"{number}.safetensors", metadata=metadata)))
    out = tmp_path / "mean.safetensors"
    assert main(["convert", files[0], str(out), "--average", *files[1:]]) == 0
    assert "mean of 3 files" in capsys.readouterr().out
    found = load_model(out).state_dict()
    for name, tensor in found.items():
        assert torch.allclose(tensor, sum(model.state_dict()[name] for model in models) / 3, atol=1e-6)
    assert read_metadata(out)["class_names"] == names
    assert json.loads(read_metadata(out)["averaged_from"]) == ["0.safetensors", "1.safetensors", "2.safetensors"]
    assert "epoch" not in read_metadata(out)
    assert out.stat().st_mode == Path(files[0]).stat().st_mode  # not readable for its owner alone
    other = str(save_weights(create_model("inline_deit_tiny", depth=2, img_size=32), tmp_path / "other.safetensors"))
    linearize(softmax := create_model("softmax_deit_tiny", depth=1, img_size=32))
    linear = [str(save_weights(softmax, tmp_path / "tangent.safetensors"))]
    calibrate(softmax, torch.randn(2, 3, 32, 32))
    linear.append(str(save_weights(softmax, tmp_path / "calibrated.safetensors")))
    for arguments, message in (
        ((files[0], "--average", other), "has another config than"),
        ((linear[0], "--average", linear[1]), "has another linearize than"),
        ((files[0], "--average", "ckpt.pth"), "ckpt.pth: expected a .safetensors file"),
        ((files[0], "--average", files[1], "--ema"), "leave out --model and --ema"),
    ):
        assert main(["convert", arguments[0], str(tmp_path / "new.safetensors"), *arguments[1:]]) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "new.safetensors").exists()
