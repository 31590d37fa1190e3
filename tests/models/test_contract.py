"""timm's contract: for every registered model at full size on the meta device, and shrunk where it runs.

Shrunk, the models of one family and one attention are the same, so that only different ones run (`DISTINCT`).
"""

import copy
import math
import pickle
import shutil
from pathlib import Path

import pytest
import timm
import torch
from small import DISTINCT, FAMILIES, create_shallow, create_small, deep_ones_are_slow, image, shrunk
from timm.models import get_notrace_functions, get_notrace_modules, group_parameters, save_for_hf
from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

import inline_attention
from inline_attention.models.base import PyramidModel

NAMES = inline_attention.list_models()
ONE_PER_FAMILY = [f"inline_{family}_tiny" for family in FAMILIES]
IMAGE_SIZES = [(224, 224), (160, 288), (225, 319)]

every_model = pytest.mark.parametrize("name", NAMES)
every_distinct_model = pytest.mark.parametrize("name", DISTINCT)
one_per_family = pytest.mark.parametrize("name", ONE_PER_FAMILY)


def train_step(model: torch.nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of a loss that every logit takes part in."""
    model.zero_grad()
    torch.nn.functional.cross_entropy(model(x), torch.arange(len(x))).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal_states(a: torch.nn.Module, b: torch.nn.Module) -> None:
    torch.testing.assert_close(dict(a.state_dict()), dict(b.state_dict()), atol=0, rtol=0)


# The registry


def test_all_published_models_and_their_baselines() -> None:
    published = [name for name in NAMES if not name.endswith("_study")]
    assert len(published) == 28
    assert sum(name.startswith("inline_") for name in published) == 15
    assert all(timm.is_model(name) for name in NAMES)
    assert inline_attention.list_models("*_pvt_*", pretrained=True) == [
        f"inline_pvt_{size}" for size in ("tiny", "small", "medium", "large")
    ]


def test_unknown_names_get_a_suggestion() -> None:
    with pytest.raises(ValueError, match="there is no model 'inline_swim_tiny'; did you mean inline_swin_tiny"):
        inline_attention.create_model("inline_swim_tiny")
    with pytest.raises(ValueError, match="`inline models` lists them"):
        inline_attention.create_model("qqq")


@pytest.mark.parametrize("name", deep_ones_are_slow())
def test_shapes_at_full_size(name: str) -> None:
    """Of logits and feature maps of the model itself."""
    with torch.device("meta"):
        model = timm.create_model(name)
        final, maps = model.forward_intermediates(torch.empty(2, 3, 225, 319))
        assert model.forward_head(final).shape == (2, 100 if name.endswith("_study") else 1000)
    for y, info in zip(maps, model.feature_info, strict=True):
        stride = info["reduction"]
        assert y.shape == (2, info["num_chs"], math.ceil(225 / stride), math.ceil(319 / stride))


@every_model
def test_configuration_and_parameter_groups(name: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    crop, interpolation = (1.0, "bilinear") if name.endswith("_study") else (0.875, "bicubic")
    cfg = model.pretrained_cfg
    assert cfg["input_size"] == (3, *model.img_size)
    assert (cfg["crop_pct"], cfg["crop_mode"], cfg["interpolation"]) == (crop, "squash", interpolation)
    assert model.get_submodule(cfg["classifier"]) is model.get_classifier()
    assert isinstance(model.get_submodule(cfg["first_conv"]), torch.nn.Conv2d)

    names = {n for n, _ in model.named_parameters()}
    assert model.no_weight_decay() <= names
    for coarse in (False, True):
        groups = group_parameters(model, model.group_matcher(coarse=coarse))
        assert sorted(n for members in groups.values() for n in members) == sorted(names)
        # The stem first, the head last, and depth in between.
        first, last = min(groups), max(groups)
        assert any(n.startswith("patch_embed") for n in groups[first])
        assert {"head.weight", "head.bias"} <= set(groups[last])
    assert not any(n.startswith("head") for n in groups[first])


@one_per_family
def test_arguments_of_timm_with_one_value(name: str) -> None:
    """A script may pass the value that a model has. Any other is refused, with what to do."""
    is_deit = "deit" in name
    own = dict(attn_drop_rate=0.0, class_token=is_deit, dynamic_img_size=True, output_stride=16 if is_deit else 32)
    model = timm.create_model(name, **shrunk(name), **own, device="meta", dtype=torch.float64)
    assert not own.keys() & model.config.keys()
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.float64)}
    others = dict(attn_drop_rate=0.1, class_token=not is_deit, dynamic_img_size=False, output_stride=8)
    for argument, value in others.items():
        with pytest.raises(ValueError, match=f"{argument}={value}; expected {own[argument]} of .*: .*"):
            timm.create_model(name, **shrunk(name), **{argument: value})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "inline_pvt_tiny",
            dict(embed_dims=(8, 16)),
            r"embed_dims=\(8, 16\): expected a value for each of the 4 stages",
        ),
        ("inline_swin_tiny", dict(num_heads=(3, 6)), r"num_heads=\(3, 6\): expected a value for each of the 4 stages"),
        ("inline_cswin_tiny", dict(stripes=(1, 2)), r"stripes=\(1, 2\): expected a value for each of the 4 stages"),
        ("inline_deit_tiny", dict(img_size=32.0), r"img_size=32\.0; expected a positive integer or a pair"),
        ("inline_deit_tiny", dict(patch_size=0), "patch_size=0; expected a positive integer"),
        ("inline_deit_tiny", dict(patch_size=(16, 16)), r"patch_size=\(16, 16\); expected a positive integer"),
        ("inline_deit_tiny", dict(depth=-1), "depth=-1; expected a positive integer"),
        ("inline_deit_tiny", dict(in_chans=0), "in_chans=0; expected a positive integer"),
        ("inline_deit_tiny", dict(num_classes=-3), "num_classes=-3; expected a number of classes, or 0"),
        ("inline_deit_tiny", dict(drop_path_rate=1.5), "drop_path_rate=1.5; expected a probability"),
        ("inline_swin_tiny", dict(embed_dim=-96), "embed_dim=-96; expected a positive integer"),
        ("inline_swin_tiny", dict(depths=(2, 2, -1, 2)), r"depths\[2\]=-1; expected a positive integer"),
        ("inline_swin_tiny", dict(depths=2), "depths=2; expected the number of blocks of each stage"),
        ("inline_cswin_tiny", dict(mlp_ratio=0), "mlp_ratio=0; expected a positive number"),
        ("inline_cswin_tiny", dict(stripes=(0, 2, 7, 7)), r"stripes\[0\]=0; expected a positive integer"),
        ("softmax_pvt_tiny", dict(reductions=(-1, 1, 1, 1)), r"reductions\[0\]=-1; expected a positive integer"),
    ],
)
def test_wrong_arguments_are_named(name: str, options: dict, message: str) -> None:
    with torch.device("meta"), pytest.raises(ValueError, match=message):
        inline_attention.create_model(name, **options)


# Running


@every_distinct_model
def test_forward_and_backward(name: str) -> None:
    # The class token alone would leave the last block's local residual without a gradient: it goes to the map.
    model = create_small(name, global_pool="avg").train()
    grads = train_step(model, image())
    assert grads.keys() == {n for n, _ in model.named_parameters()}
    for parameter, grad in grads.items():
        assert grad.isfinite().all(), parameter
        assert grad.abs().max() > 0, parameter


@every_distinct_model
def test_sizes_change_between_calls(name: str) -> None:
    """Earlier calls at other sizes do not change the output."""
    model = create_small(name)
    sizes = [(64, 64), (48, 80), (65, 91), (64, 64)]
    with torch.no_grad():
        outputs = [model(image(*size)) for size in sizes]
        assert torch.equal(outputs[0], outputs[-1])
        for size, output in zip(sizes, outputs, strict=True):
            assert output.isfinite().all()
            assert torch.equal(create_small(name)(image(*size)), output)


@one_per_family
def test_real_sizes(name: str) -> None:
    model = inline_attention.create_model(name, depth=1) if "deit" in name else None
    model = model or inline_attention.create_model(name, depths=(1, 1, 1, 2))
    with torch.no_grad():
        for size in IMAGE_SIZES:
            assert model.eval()(image(*size, batch=1)).isfinite().all()


@every_distinct_model
def test_padding_is_zeros_at_the_bottom_and_right(name: str) -> None:
    """An image whose side is not a multiple of the first stride gives the output of its zero-padded image."""
    model = create_small(name)
    stride = 16 if "deit" in name else 4
    x = image(61, 75)
    padded = torch.nn.functional.pad(x, (0, -75 % stride, 0, -61 % stride))
    with torch.no_grad():
        assert torch.equal(model(x), model(padded))


@every_distinct_model
def test_features_only(name: str) -> None:
    options = dict(features_only=True, **shrunk(name))
    model = timm.create_model(name, **options)
    reductions = [16] * 3 if "deit" in name else [4, 8, 16, 32]
    assert model.feature_info.reduction() == reductions
    maps = model(image(65, 91))
    for y, reduction, channels in zip(maps, reductions, model.feature_info.channels(), strict=True):
        assert y.shape == (2, channels, math.ceil(65 / reduction), math.ceil(91 / reduction))
    chosen = timm.create_model(name, out_indices=(1,), **options)
    assert [y.shape for y in chosen(image(65, 91))] == [maps[1].shape]


@every_distinct_model
def test_hooks_see_the_features(name: str) -> None:
    """On the modules that `feature_info` names. Class activation maps are made from such hooks."""
    model = create_small(name)
    seen: list[torch.Tensor] = []
    for info in model.feature_info:
        model.get_submodule(info["module"]).register_forward_hook(lambda module, args, output: seen.append(output))
    features = model.forward_intermediates(image(65, 91), intermediates_only=True)
    for found, expected in zip(seen, features, strict=True):
        tokens = found[:, 1:] if "deit" in name else found.flatten(1, 2)
        assert torch.equal(tokens.mT, expected.flatten(2))


def test_features_of_a_pyramid_with_two_stages() -> None:
    options = dict(depths=(1, 1), num_heads=(2, 4), attention="II", embed_dim=16, img_size=64)
    model = timm.create_model("inline_swin_tiny", features_only=True, **options)
    assert [y.shape[1:] for y in model(image())] == [(16, 16, 16), (32, 8, 8)]


@one_per_family
def test_features_from_timms_hooks(name: str) -> None:
    options = dict(features_only=True, **shrunk(name))
    torch.manual_seed(0)
    getter = timm.create_model(name, **options).eval()
    torch.manual_seed(0)
    hooked = timm.create_model(name, feature_cls="hook", **options).eval()
    for seen, expected in zip(hooked(image(65, 91)), getter(image(65, 91)), strict=True):
        tokens = seen[:, 1:] if "deit" in name else seen.flatten(1, 2)
        assert torch.equal(tokens.mT, expected.flatten(2))


@every_distinct_model
def test_intermediates_belong_to_the_features(name: str) -> None:
    model = create_small(name)
    x = image(48, 80)
    with torch.no_grad():
        final, maps = model.forward_intermediates(x, norm=True)
        features = model.forward_features(x)
        assert torch.equal(final, features)
        if isinstance(model, PyramidModel):
            assert torch.equal(maps[-1].permute(0, 2, 3, 1), features)
            nhwc = model.forward_intermediates(x, output_fmt="NHWC", intermediates_only=True)
            plain = model.forward_intermediates(x, intermediates_only=True)
            assert all(torch.equal(a.permute(0, 2, 3, 1), b) for a, b in zip(plain, nhwc, strict=True))
        else:
            assert torch.equal(maps[-1].flatten(2).mT, features[:, 1:])
            rows, prefix = model.forward_intermediates(
                x, [-1], norm=True, output_fmt="NLC", return_prefix_tokens=True, intermediates_only=True
            )[0]
            assert torch.equal(torch.cat([prefix, rows], dim=1), features)
        assert torch.equal(model.forward_head(final), model(x))
        early = model.forward_intermediates(x, [0], stop_early=True, intermediates_only=True)
        first = model.forward_intermediates(x, [0], intermediates_only=True)
        assert torch.equal(early[0], first[0])
        last, _ = model.forward_intermediates(x, [0], stop_early=True)
        if isinstance(model, PyramidModel):  # the final norm has the channels of the last stage
            assert torch.equal(last.permute(0, 3, 1, 2), first[0])
    with pytest.raises(ValueError, match="output_fmt='CHW'; expected 'NCHW' or"):
        model.forward_intermediates(x, output_fmt="CHW")


@every_distinct_model
def test_prune_intermediate_layers(name: str) -> None:
    model = create_small(name)
    x = image()
    with torch.no_grad():
        expected = model.forward_intermediates(x, [0, 1], intermediates_only=True)
        assert model.prune_intermediate_layers([0, 1], prune_norm=True, prune_head=True) == [0, 1]
        pruned = model.forward_intermediates(x, [0, 1], intermediates_only=True)
        assert all(torch.equal(a, b) for a, b in zip(pruned, expected, strict=True))
        assert model.num_classes == 0
        assert len(model.stages if isinstance(model, PyramidModel) else model.blocks) == 2
        model(x)  # what is left still runs


@every_distinct_model
def test_classifier(name: str) -> None:
    model = create_small(name)
    x = image()
    with torch.no_grad():
        features = model.forward_features(x)
        pooled = model.forward_head(features, pre_logits=True)
        assert pooled.shape == (2, model.head_hidden_size)
        assert torch.equal(model.head(pooled), model(x))
        model.double().reset_classifier(7)
        assert model.get_classifier().weight.dtype == torch.float64
        assert model(x.double()).shape == (2, 7)
        model.float().reset_classifier(0)
        assert torch.equal(model(x), pooled)
        model.reset_classifier(3, "")
        assert model.forward_head(features).shape == (*features.shape[:-1], 3)
        model.reset_classifier(3, "avg")
        assert model(x).shape == (2, 3)
    with pytest.raises(ValueError, match="global_pool='max'; expected"):
        model.reset_classifier(3, "max")


@pytest.mark.parametrize("family", FAMILIES)
def test_global_pool(family: str) -> None:
    model = create_small(f"inline_{family}_tiny", num_classes=0, global_pool="avg")
    with torch.no_grad():
        features = model.forward_features(image())
        mean = features[:, 1:].mean(1) if family == "deit" else features.mean((1, 2))
        torch.testing.assert_close(model(image()), mean)
    with pytest.raises(ValueError, match="global_pool='max'; expected"):
        create_small(f"inline_{family}_tiny", global_pool="max")


@every_distinct_model
def test_gradient_checkpointing(name: str) -> None:
    model = create_small(name).train()
    x = image()
    expected = train_step(model, x)
    model.set_grad_checkpointing()
    checkpointed = train_step(model, x)
    model.set_grad_checkpointing(False)
    torch.testing.assert_close(checkpointed, expected, atol=0, rtol=0)


def test_gradient_checkpointing_saves_memory() -> None:
    model = create_small("inline_deit_tiny", depth=4).train()
    sizes = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        saved: list[int] = []

        def pack(x: torch.Tensor, saved: list[int] = saved) -> torch.Tensor:
            saved.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            model(image())
        sizes.append(sum(saved))
    assert sizes[1] < sizes[0] / 2


# The fast one has InLine and softmax attention, and windows that are shifted.
@pytest.mark.parametrize(
    "name",
    [name if name == "inline_swin_tiny" else pytest.param(name, marks=pytest.mark.slow) for name in ONE_PER_FAMILY],
)
def test_compile(name: str) -> None:
    """One graph, forward and backward, with the gradients of the eager model."""
    torch.compiler.reset()
    model = create_shallow(name).train()
    x = image(65, 64)
    expected, grads = model(x), train_step(model, x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected)
    compiled_grads = train_step(compiled, x)
    torch.testing.assert_close({n.removeprefix("_orig_mod."): g for n, g in compiled_grads.items()}, grads)


@pytest.mark.slow  # tracing dynamic sizes takes ten seconds a model
@one_per_family
def test_compiled_graphs_serve_other_sizes(name: str) -> None:
    """One graph, with or without padding: sizes change from batch to batch, and compiling is slow.

    On the CPU, torch chooses a convolution by whether the batch, here of windows, is below 16, and guards on it.
    """
    torch.compiler.reset()
    model = create_shallow(name)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.no_grad():
        compiled(image(96, 160, batch=16))
        with torch.compiler.set_stance("fail_on_recompile"):
            for size in ((97, 171), (128, 192), (109, 97)):
                x = image(*size, batch=16)
                torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.skipif(shutil.which("c++") is None, reason="Inductor needs a C++ compiler")
@pytest.mark.slow  # runs a C++ compiler
@one_per_family
def test_compile_with_inductor(name: str) -> None:
    torch.compiler.reset()
    model = create_shallow(name)
    x = image(65, 64)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, fullgraph=True)(x), model(x), atol=1e-4, rtol=1e-4)


@one_per_family
def test_export(name: str) -> None:
    model = create_shallow(name)
    x = image(65, 64)
    with torch.no_grad():
        program = torch.export.export(model, (x,))
        torch.testing.assert_close(program.module()(x), model(x))


@every_distinct_model
def test_state_dict_round_trip(name: str) -> None:
    model, other = create_small(name), create_small(name, seed=1)
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(image()), other(image()))
    assert_equal_states(model, other)
    adapted = model.adapt_state_dict(model.state_dict(), img_size=model.img_size)  # own names stay as they are
    torch.testing.assert_close(adapted, dict(model.state_dict()), atol=0, rtol=0)


@every_distinct_model
def test_timm_local_directory_round_trip(name: str, tmp_path: Path) -> None:
    model = create_small(name)
    save_for_hf(model, tmp_path, model_args=shrunk(name))
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert type(loaded) is type(model)
    assert_equal_states(model, loaded)
    assert torch.equal(model(image()), loaded(image()))


@every_distinct_model
def test_set_input_size(name: str) -> None:
    """It permanently does what every call at that size would do."""
    model = create_small(name)
    x = image(96, 160)
    with torch.no_grad():
        expected = model(x)
        model.set_input_size((96, 160))
        assert model.img_size == (96, 160)
        torch.testing.assert_close(model(x), expected)
        fresh = create_small(name, img_size=(96, 160))
        assert {n: p.shape for n, p in fresh.state_dict().items()} == {
            n: p.shape for n, p in model.state_dict().items()
        }
    with pytest.raises(ValueError, match=r"img_size=\(3, 96, 160\); expected"):
        model.set_input_size((3, 96, 160))


@every_distinct_model
@pytest.mark.parametrize("options", [{}, dict(attention="focused")])
def test_an_optimizer_keeps_parameters_that_are_not_resized(name: str, options: dict) -> None:
    model = create_small(name, **options)
    before = dict(model.named_parameters())
    model.set_input_size(model.img_size)
    assert all(parameter is before[n] for n, parameter in model.named_parameters())


@pytest.mark.parametrize("name", [*ONE_PER_FAMILY, "softmax_swin_tiny"])
def test_resized_parameters_stay_frozen(name: str) -> None:
    model = create_small(name, attention="focused" if name == "inline_cswin_tiny" else None).requires_grad_(False)
    model.set_input_size((96, 160))
    assert not any(parameter.requires_grad for parameter in model.parameters())


@every_distinct_model
@pytest.mark.parametrize("in_chans", [1, 4])
def test_input_channels(name: str, in_chans: int) -> None:
    model = create_small(name, in_chans=in_chans, num_classes=0, img_size=(64, 96))
    with torch.no_grad():
        assert model(image(64, 96, channels=in_chans)).shape == (2, model.num_features)
        with pytest.raises(ValueError, match=rf"expected \(B, {in_chans}, H, W\)"):
            model(image())


@every_distinct_model
def test_dropout_is_for_training(name: str) -> None:
    model = create_small(name, drop_rate=0.3, proj_drop_rate=0.3, drop_path_rate=0.5)
    x = image()
    with torch.no_grad():
        expected = create_small(name)(x)
        assert torch.equal(model(x), expected)
        assert not torch.equal(model.train()(x), expected)
    rates = [m.drop_prob for m in model.modules() if isinstance(m, timm.layers.DropPath)]
    assert rates[::2] == pytest.approx(torch.linspace(0, 0.5, len(rates) // 2).tolist())


@every_distinct_model
def test_copies(name: str) -> None:
    model = create_small(name)
    x = image()
    with torch.no_grad():
        expected = model(x)
        assert torch.equal(copy.deepcopy(model)(x), expected)
        assert torch.equal(pickle.loads(pickle.dumps(model))(x), expected)


@every_distinct_model
def test_memory_formats_and_precisions(name: str) -> None:
    model = create_small(name)
    x = image(65, 64)
    with torch.no_grad():
        expected = model(x)
        torch.testing.assert_close(model(x.to(memory_format=torch.channels_last)), expected)
        with torch.autocast("cpu", torch.bfloat16):
            mixed = model(x)
        low = model.bfloat16()(x.bfloat16())
    for y in (mixed, low):
        assert y.dtype == torch.bfloat16
        assert (y.float() - expected).norm() < 0.1 * expected.norm()


@every_distinct_model
def test_torch_fx(name: str) -> None:
    """The recorded graph computes the same, at other sizes too, and its nodes are named after the blocks."""
    model = create_small(name)
    options = dict(leaf_modules=get_notrace_modules(), autowrap_functions=get_notrace_functions())
    _, nodes = get_graph_node_names(model, tracer_kwargs=options)
    assert ("blocks.0" if "deit" in name else "stages.0.blocks.0") in nodes
    graph = create_feature_extractor(model, return_nodes=[nodes[-1]], tracer_kwargs=options).eval()
    for size in [(64, 64), (72, 104)]:
        assert torch.equal(graph(image(*size))[nodes[-1]], model(image(*size)))


# Baselines that timm has as well


@pytest.mark.parametrize(
    ("name", "timms", "options"),
    [
        ("softmax_deit_tiny", "deit_tiny_patch16_224", dict(depth=2)),
        ("softmax_swin_tiny", "swin_tiny_patch4_window7_224", dict(depths=(1, 2, 2, 1))),
    ],
)
def test_baselines_are_timms(name: str, timms: str, options: dict) -> None:
    theirs = timm.create_model(timms, num_classes=10, **options).eval()
    ours = timm.create_model(name, num_classes=10, **options).eval()
    inline_attention.load_weights(ours, theirs.state_dict())
    x = image(224, batch=1)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), atol=1e-5, rtol=1e-5)
