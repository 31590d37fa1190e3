"""Softmax attention of real models becomes its first-order expansion, with the weights as they were."""

import copy
import inspect
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import timm
import timm.layers
import torch
import torchvision
from linearize_cases import CASES, Case, shrink_logits, vit
from small import create_small
from torch import Tensor, nn

import inline_attention
from inline_attention import linear_attention, linearize, tangent_attention
from inline_attention.layers import InLineAttention, SoftmaxAttention, TangentAttention
from inline_attention.linearize import LinearizedAttention, register, restore
from inline_attention.linearize.convert import add_gains
from inline_attention.linearize.modules import Call
from inline_attention.linearize.timm_modules import LinearizedViTAttention
from inline_attention.models import create_model
from inline_attention.ops import local_residual

of_every_kind = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
OF_NAME = {case.name: case for case in CASES}


@of_every_kind
@pytest.mark.parametrize(("attention", "anchors"), [("inline", 1), ("tangent", 1), ("tangent", 2)])
def test_the_difference_shrinks_with_the_square_of_the_logits(case: Case, attention: str, anchors: int) -> None:
    differences = []
    for factor in (2**-7, 2**-8):
        model = case.model
        shrink_logits(model, factor)
        images = case.images(len(case.sizes) - 1)
        with torch.no_grad():
            expected = model(images)
            linearize(model, attention=attention, anchors=anchors)
            differences.append((model(images) - expected).norm().item())
    assert differences[1] > 1e-12  # the logits do matter
    assert math.log2(differences[0] / differences[1]) == pytest.approx(2, abs=0.08)


@of_every_kind
def test_weights_are_the_same_objects_under_the_same_names(case: Case) -> None:
    model = case.model
    before = dict(model.named_parameters())
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = linearize(model)
    assert len(report.linear()) == case.converted
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    assert all(".local.fc" in f".{name}" for name in after.keys() - before.keys())
    assert all(torch.equal(model.state_dict()[name], value) for name, value in values.items())


@of_every_kind
def test_restoring_gives_the_model_back(case: Case) -> None:
    model, images = case.model, case.images()
    kinds, attributes = [(type(m), sorted(vars(m))) for m in model.modules()], list(model.state_dict())
    with torch.no_grad():
        expected = model(images)
        linearize(model)
        assert not torch.equal(model(images), expected)
        restore(model)
        assert torch.equal(model(images), expected)
    assert [(type(m), sorted(vars(m))) for m in model.modules()] == kinds
    assert list(model.state_dict()) == attributes


@of_every_kind
def test_gradients_reach_the_old_and_the_new_parameters(case: Case) -> None:
    model = case.model.train()
    linearize(model)
    for size in range(len(case.sizes)):
        model(case.images(size)).square().mean().backward()
    for name, parameter in model.named_parameters():
        # The residual's last layer is zero, so what comes before it gets no gradient yet.
        if "local.fc1" not in name and "mask_token" not in name:
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
    # In the last layer before a class token's head, no gradient comes back from the map.
    residuals = [p.grad for name, p in model.named_parameters() if "local.fc2.weight" in name]
    assert not residuals or residuals[0].abs().max() > 0


# Only the kinds of calls: with prefix tokens, and with fewer keys than queries. Swin and CSwin take minutes.
with_anchors = [(case, 1) for case in CASES if "gemma4" not in case.name]  # timm's code branches on its padding
with_anchors += [(case, 2) for case in CASES if case.name in ("vit_small_patch14_reg4_dinov2", "pvt_v2_b0")]
of_every_kind_with_anchors = pytest.mark.parametrize(
    ("case", "anchors"), with_anchors, ids=[f"{case.name}-{anchors}" for case, anchors in with_anchors]
)


@of_every_kind_with_anchors
@pytest.mark.slow
def test_it_compiles_to_one_graph(case: Case, anchors: int) -> None:
    torch._dynamo.reset()  # or the graphs of earlier cases count against the limit of recompilations
    model = train_residual(case.model, anchors=anchors)
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for size in range(len(case.sizes)):
            torch.testing.assert_close(compiled(case.images(size)), model(case.images(size)))


@of_every_kind_with_anchors
@pytest.mark.slow
def test_it_exports(case: Case, anchors: int) -> None:
    model, images = train_residual(case.model, anchors=anchors), case.images()
    with torch.no_grad():
        program = torch.export.export(model, (images,))
        torch.testing.assert_close(program.module()(images), model(images))


@pytest.mark.parametrize("mode", ["autocast", "bfloat16"])
@of_every_kind
def test_it_runs_in_half_precision(case: Case, mode: str) -> None:
    model, images = train_residual(case.model).float(), case.images(len(case.sizes) - 1).float()
    with torch.no_grad():
        expected = model(images)
        if mode == "autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = model(images)
        else:
            out = model.bfloat16()(images.bfloat16())
    assert out.isfinite().all()
    assert (out.float() - expected).norm() < 0.1 * expected.norm()


def test_a_whole_model_can_be_pickled(tmp_path: Path) -> None:
    case = OF_NAME["vit_tiny_patch16_224"]
    model = train_residual(case.model)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    with torch.no_grad():
        assert torch.equal(loaded(case.images(1)), model(case.images(1)))
    restore(loaded)
    assert type(loaded) is type(model)


def train_residual(model: nn.Module, **options: Any) -> nn.Module:
    """The model converted, with a residual that is not zero."""
    linearize(model, **options)
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if "local.fc2" in name:
            nn.init.normal_(parameter, std=0.3)
    return model


def capture(model: nn.Module, name: str, images: Tensor) -> tuple[Any, Tensor, Tensor]:
    """A converted attention of a model, with its input and its output before the projection."""
    module: Any = model.get_submodule(name)
    seen: dict[str, Tensor] = {}
    handles = [
        module.register_forward_pre_hook(lambda _, args: seen.update(x=args[0])),
        module.proj.register_forward_pre_hook(lambda _, args: seen.update(out=args[0])),
    ]
    with torch.no_grad():
        model(images)
    for handle in handles:
        handle.remove()
    return module, seen["x"], seen["out"]


@pytest.mark.parametrize("name", ["vit_small_patch14_reg4_dinov2", "vit_base_patch16_siglip_224"])
def test_the_residual_runs_on_the_map_of_the_call(name: str) -> None:
    model = train_residual(OF_NAME[name].model)
    prefix = {"vit_small_patch14_reg4_dinov2": 5, "vit_base_patch16_siglip_224": 0}[name]
    for size, grid in enumerate([(3, 3), (2, 5)]):
        module, x, out = capture(model, "blocks.1.attn", OF_NAME[name].images(size))
        with torch.no_grad():
            q, k, v = module.qkv(x).unflatten(-1, (3, 2, 12)).unbind(2)
            expected = tangent_attention(q, k, v)
            expected += local_residual(v, module.local(x.mean(1)), grid=grid, num_prefix_tokens=prefix)
        torch.testing.assert_close(out, expected.flatten(2))


def test_regions_of_shifted_windows_do_not_mix() -> None:
    """If the input changes in one region, the outputs of the other regions stay the same."""
    case = OF_NAME["swin_tiny_patch4_window7_224"]
    model: Any = train_residual(case.model)
    block = model.layers[0].blocks[1]
    assert block.shift_size == (3, 3)
    mask = block.get_attn_mask(torch.zeros(1, 14, 14, 16, dtype=torch.float64))
    x = torch.randn(4, 49, 16, dtype=torch.float64)
    last_window = mask[-1]
    region = last_window[0] == 0  # of its first token
    changed = x.clone()
    changed[-1, region] += 1
    weight = block.attn.local(x.mean(1))  # made from the whole window, so it is held fixed here
    block.attn.local.forward = lambda mean: weight
    with torch.no_grad():
        difference = (block.attn(changed, mask=mask) - block.attn(x, mask=mask)).abs().amax(-1)
    assert (difference[:-1] == 0).all()
    assert (difference[-1][~region] == 0).all()
    assert (difference[-1][region] > 0).all()


ANCHORED = ["vit_small_patch14_reg4_dinov2", "eva02_tiny_patch14_224", "pvt_v2_b0", "softmax_swin_tiny"]


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "pvt_v2_b0", "softmax_cswin_tiny"])
def test_with_an_anchor_for_every_query_it_is_softmax(name: str) -> None:
    case = OF_NAME[name]
    model = case.model
    with torch.no_grad():
        expected = model(case.images())
        linearize(model, anchors=256)  # the largest map has 16² tokens
        torch.testing.assert_close(model(case.images()), expected)


def test_it_is_the_layer_with_as_many_anchors() -> None:
    case = OF_NAME["softmax_deit_tiny"]
    model, layers = case.model, create_small("softmax_deit_tiny", attention="tangent", local_residual=False).double()
    layers.load_state_dict(model.state_dict())
    for module in layers.modules():
        if isinstance(module, TangentAttention):
            module.anchors = 3
    linearize(model, anchors=3, local_residual=False)
    with torch.no_grad():
        torch.testing.assert_close(model(case.images()), layers.eval()(case.images()))


@pytest.mark.parametrize("name", [name for name in ANCHORED if "eva" not in name])
def test_the_residual_is_added_once_for_all_anchors(name: str) -> None:
    """With equal queries all anchors are one, so their number does not matter. Rotary positions make them unequal."""
    outputs = []
    for anchors in (1, 3):
        model = train_residual(OF_NAME[name].model, anchors=anchors)
        for module in model.modules():
            if isinstance(module, LinearizedAttention):
                equal_queries(module)
        with torch.no_grad():
            outputs.append(model(OF_NAME[name].images()))
    torch.testing.assert_close(*outputs)


def equal_queries(module: Any) -> None:
    for layer in (getattr(module, name, None) for name in ("qkv", "q", "q_proj")):
        if layer is not None:
            with torch.no_grad():
                layer.weight[: module.proj.in_features] = 0


@pytest.mark.parametrize("name", ANCHORED)
def test_gradients_flow_with_several_anchors(name: str) -> None:
    case = OF_NAME[name]
    model = train_residual(case.model.train(), anchors=3)
    model(case.images(1)).square().mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if "qkv" in name or "local.fc2" in name}
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients.values())


def test_half_precision_with_several_anchors_and_gains() -> None:
    case = OF_NAME["vit_tiny_patch16_224"]
    model, images = train_residual(case.model, anchors=3).float(), case.images().float()
    add_gains(model)
    with torch.no_grad():
        expected = model(images)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert (model(images).float() - expected).norm() < 0.1 * expected.norm()
        assert (model.bfloat16()(images.bfloat16()).float() - expected).norm() < 0.1 * expected.norm()


def test_the_report_counts_anchors() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=160, depth=2)  # 101 tokens, heads of 64 channels
    assert "saves no products" not in str(linearize(model))
    restore(model)
    report = linearize(model, anchors=2)
    assert report.layers[0].action == "→ tangent, 2 anchors, with residual"
    assert "2 layers have no more tokens than anchors times channels in a head" in str(report)
    with torch.device("meta"):
        swin = timm.create_model("swin_tiny_patch4_window7_224")  # windows of 49 tokens, heads of 32 channels
    assert "12 layers have no more tokens than channels in a head, counted twice where" in str(linearize(swin))


@pytest.mark.parametrize(
    ("model", "tokens"),
    [
        (lambda: timm.create_model("pvt_v2_b0"), {49}),
        (lambda: timm.create_model("twins_svt_small"), {49}),
        (lambda: create_model("softmax_deit_tiny"), {197}),
        (lambda: create_model("softmax_pvt_tiny"), {49}),
        (lambda: create_model("softmax_cswin_tiny"), {49, 56, 98}),
    ],
)
def test_the_report_counts_tokens_that_no_module_knows(model: Callable[[], nn.Module], tokens: set[int]) -> None:
    with torch.device("meta"):
        built = model()
    before = dict(built.named_parameters())
    report = linearize(built, local_residual=False)
    assert {layer.tokens for layer in report.linear()} == tokens
    expected = ("saves no products: do not expect it to be faster", f"tokens of a layer are {min(tokens)}.")
    assert any(words in str(report) for words in expected)
    assert dict(built.named_parameters()) == before


def test_the_report_says_how_to_find_where_the_linear_form_is_slower() -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=1)  # 197 tokens: fewer products, which may still be slower
    assert "The fewest tokens of a layer are 197." in str(linearize(model))
    report = str(model.linearization.report)
    assert "inline bench break-even --heads 3x64" in report
    assert "position bias" not in report
    windows = timm.create_model("swin_tiny_patch4_window7_224", img_size=112, window_size=14, depths=(1,), embed_dim=24)
    assert "It times attention without a position bias." in str(linearize(windows))


def test_restoring_is_at_the_top_of_the_package() -> None:
    """`inline_attention.linearize` is the function there, so the package's names cannot be reached as attributes."""
    assert inline_attention.restore is restore
    assert "restore" in inline_attention.__all__


def test_heads_may_have_other_channels_than_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean query is then that of the queries."""
    case = OF_NAME["vit_tiny_patch16_224"]
    model: Any = case.model.float()
    for block in model.blocks:
        block.attn = timm.layers.Attention(24, 2, attn_head_dim=8)
    train_residual(model)
    images = case.images().float()
    with torch.no_grad():
        out = model(images)
        monkeypatch.setattr(LinearizedViTAttention, "mean_query", None)
        torch.testing.assert_close(model(images), out)


def test_deep_copies_have_grids_of_their_own() -> None:
    case = OF_NAME["vit_tiny_patch16_224"]
    model = train_residual(case.model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        expected = model(case.images(1))
        model(case.images(0))
        assert torch.equal(twin(case.images(1)), expected)
    restore(twin)
    assert "linearization" not in vars(twin)
    assert torch.equal(model(case.images(1)), expected)


def test_modules_that_keep_their_forward_are_linear_without_fused_attention_too() -> None:
    case = OF_NAME["hiera_tiny_224"]
    outputs = []
    for fused in (True, False):
        model = case.model
        modules: list[Any] = [module for module in model.modules() if hasattr(module, "fused_attn")]
        for module in modules:
            module.fused_attn = fused
        linearize(model)
        with torch.no_grad():
            outputs.append(model(case.images()))
        restore(model)
        assert [module.fused_attn for module in modules] == [fused] * case.converted
    assert torch.equal(*outputs)


def needs(module: type[nn.Module], argument: str) -> pytest.MarkDecorator:
    """Skips a test with a version of timm whose module does not have this argument."""
    missing = argument not in inspect.signature(module).parameters
    return pytest.mark.skipif(missing, reason=f"this version of timm's {module.__name__} has no {argument}")


@pytest.mark.parametrize("attention", ["linear", "mala", "inline"])
def test_other_forms_are_those_of_the_operation(attention: str) -> None:
    model = OF_NAME["vit_tiny_patch16_224"].model
    linearize(model, attention=attention, feature_map="relu", local_residual=False)
    module, x, out = capture(model, "blocks.0.attn", OF_NAME["vit_tiny_patch16_224"].images())
    normalization: Any = {"linear": "divide", "mala": "magnitude", "inline": "subtract"}[attention]
    q, k, v = module.qkv(x).unflatten(-1, (3, 2, 12)).unbind(2)
    expected = linear_attention(q, k, v, normalization=normalization, feature_map="relu")
    torch.testing.assert_close(out, expected.flatten(2))


@pytest.mark.parametrize("hooked", [False, True])
def test_the_mean_query_is_that_of_the_mean_token(hooked: bool) -> None:
    """It takes no pass over the queries. A hook of their layer sees the tokens alone, and may change the queries."""
    case = OF_NAME["vit_tiny_patch16_224"]
    model = case.model
    linearize(model)
    attention = model.blocks[0].attn
    shapes: list[tuple[int, ...]] = []
    calls: list[Call] = []

    def observe(module: LinearizedAttention, call: Call) -> Tensor:
        calls.append(call)
        return module.linear_form(call)

    if hooked:
        attention.qkv.register_forward_pre_hook(lambda module, args: shapes.append(args[0].shape))
    attention.observer = observe
    module, x, out = capture(model, "blocks.0.attn", case.images())
    assert shapes == [x.shape] * hooked
    assert (calls[0].mean_query is None) == hooked
    q, k, v = module.qkv(x).unflatten(-1, (3, 2, 12)).unbind(2)
    torch.testing.assert_close(out, tangent_attention(q, k, v).flatten(2))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(dict(gated=True, qkv_bias=True), marks=needs(timm.layers.Attention, "gated")),
        dict(attn_head_dim=8, scale_norm=True, norm_layer=nn.LayerNorm),
        dict(qk_norm=True, norm_layer=timm.layers.RmsNorm),
    ],
    ids=["gate", "head size", "norm"],
)
def test_options_of_timms_attention(options: dict[str, Any]) -> None:
    check_module(timm.layers.Attention(24, 2, **options))


@needs(timm.layers.AttentionRope, "num_kv_heads")
def test_heads_that_share_keys() -> None:
    check_module(timm.layers.AttentionRope(24, 4, qkv_fused=False, num_kv_heads=2, gated=True))


def check_module(module: Any) -> None:
    """With equal queries, the tangent equals softmax for every option of the module."""
    torch.manual_seed(0)
    module = module.double().eval()
    x = torch.randn(2, 10, 24, dtype=torch.float64)
    q = module.q_proj if getattr(module, "qkv", None) is None else module.qkv
    with torch.no_grad():
        q.weight[: q.weight.shape[0] if q is not module.qkv else module.attn_dim] = 0
        if q.bias is not None:
            nn.init.normal_(q.bias)
        expected = module(x)
        linearize(module, local_residual=False)
        torch.testing.assert_close(module(x), expected)


def test_a_mask_over_keys_is_kept_and_others_are_refused() -> None:
    module = timm.layers.Attention(24, 2).double().eval()
    x = torch.randn(2, 6, 24, dtype=torch.float64)
    linearize(module, local_residual=False)
    mask = torch.tensor([True] * 4 + [False] * 2).expand(2, 1, 1, 6)
    with torch.no_grad():
        torch.testing.assert_close(module(x, attn_mask=mask)[:, :4], module(x[:, :4]))
    for other in (torch.ones(6, 6, dtype=torch.bool), mask.int()):  # integers would be added to the logits
        with pytest.raises(ValueError, match=r"\(B, 1, 1, 6\), of bool"):
            module(x, attn_mask=other)
    with pytest.raises(ValueError, match="causal"):
        module(x, is_causal=True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cait_xxs24_224", r"blocks\.0\.attn and 23 more \(timm\.models\.cait\.TalkingHeadAttn\): its heads mix"),
        ("vit_dwee_patch16_reg1_gap_256", r"blocks\.0\.attn.*\.DiffAttention\): it is the difference of two softmax"),
        ("vit_dpwee_patch16_reg1_gap_256", r"blocks\.0.*\.DiffParallelScalingBlock\): it is the difference"),
        ("mvitv2_tiny", r"\.MultiScaleAttention\): its position bias depends on the query"),
        ("convit_tiny", r"\.GPSA\): a gate mixes its weights .*\.MHSA\): this module is not known"),
        (
            "xcit_nano_12_p16_224",
            r"^there is nothing to convert in Xcit: .*\.XCA\): left alone: it is between channels; "
            r"cls_attn_blocks\.0\.attn and 1 more \(timm\.models\.cait\.ClassAttn\): .*only the class token attends$",
        ),
        ("resnet18", "^there is nothing to convert in ResNet: it has no attention that is known$"),
    ],
)
def test_a_model_is_refused_with_the_reason_and_nothing_changes(name: str, message: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=message):
        linearize(model)
    assert [type(module) for module in model.modules()] == kinds
    assert not hasattr(model, "linearization")


def test_softmax_attention_of_another_class_is_refused_and_linear_attention_left_alone() -> None:
    class Other(SoftmaxAttention):
        """Not registered, and not called attention."""

    model = nn.ModuleList([SoftmaxAttention(24, 2), InLineAttention(24, 2), Other(24, 2)])
    with pytest.raises(ValueError, match=r"2 \(.*Other\): this module is not known"):
        linearize(model)
    report = linearize(model, keep_softmax="2")
    actions = ["→ tangent, with residual", "left alone: it is not softmax attention", "kept"]
    assert [layer.action for layer in report.layers] == actions


def test_an_old_transformers_is_not_in_the_way_of_other_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    monkeypatch.delitem(sys.modules, "inline_attention.linearize.transformers_modules", raising=False)
    assert linearize(OF_NAME["vit_tiny_patch16_224"].model).linear()


def test_attention_between_other_tokens_is_refused() -> None:
    for model in (nn.Transformer(8, 2, 1, 1), nn.TransformerEncoderLayer(8, 2)):
        with pytest.raises(ValueError, match="may be masked or attend to other tokens"):
            linearize(model)


def test_patch_dropout_and_a_missing_patch_embedding_need_no_residual() -> None:
    dropping = vit("vit_tiny_patch16_224", patch_drop_rate=0.5).model
    with pytest.raises(ValueError, match=r"drops patches in training.*local_residual=False"):
        linearize(dropping)
    linearize(dropping, local_residual=False)
    alone = nn.Sequential(timm.layers.Attention(24, 2))
    with pytest.raises(ValueError, match="no patch embedding gives the size"):
        linearize(alone)
    linearize(alone, local_residual=False)


def test_images_of_different_sizes_in_one_batch_need_no_residual() -> None:
    model: Any = OF_NAME["naflexvit_base_patch16_gap"].model
    linearize(model)
    patches, valid = torch.randn(1, 6, 768, dtype=torch.float64), torch.ones(1, 6, dtype=torch.bool)
    coordinates = torch.cartesian_prod(torch.arange(2), torch.arange(3))[None]
    tokens, _ = model.embeds(patches, patch_coord=coordinates, patch_valid=valid)
    with pytest.raises(ValueError, match=r"images of different sizes in one batch.*local_residual=False"):
        model.blocks[0](tokens)


def test_pooling_heads_are_left_alone_and_listed() -> None:
    report = linearize(OF_NAME["vit_base_patch16_siglip_224"].model)
    pool = next(layer for layer in report.layers if layer.name == "attn_pool")
    assert "left alone: it pools" in pool.action
    assert "attn_pool" in str(report)


def test_crossvits_attention_of_the_class_token_is_left_alone_and_listed() -> None:
    with torch.device("meta"):
        model = timm.create_model("crossvit_9_240")
    report = linearize(model, local_residual=False)
    crossing = [layer for layer in report.layers if layer.kind == "CrossAttention"]
    assert {layer.action for layer in crossing} == {"softmax, left alone: only the class token attends"}
    assert len(crossing) == 6


def test_layers_can_stay_softmax() -> None:
    case = vit("vit_tiny_patch16_224", depth=4)
    for keep in (["blocks.0.attn", "blocks.3.*"], [0, -1]):
        model = case.model
        report = linearize(model, keep_softmax=keep)
        assert [layer.name for layer in report.linear()] == ["blocks.1.attn", "blocks.2.attn"]
        assert isinstance(model.get_submodule("blocks.1.attn"), LinearizedAttention)
        assert type(model.get_submodule("blocks.3.attn")) is timm.layers.Attention
    with pytest.raises(ValueError, match=r"matches none of blocks\.0\.attn, "):
        linearize(case.model, keep_softmax="blocks.9.attn")
    with pytest.raises(ValueError, match="4 attentions"):
        linearize(case.model, keep_softmax=4)


def test_an_unknown_module_can_be_kept() -> None:
    model = nn.ModuleDict({"known": timm.layers.Attention(8, 2), "other": timm.layers.DiffAttention(8, 2)})
    report = linearize(model, keep_softmax="other", local_residual=False)
    assert [(layer.name, layer.action) for layer in report.layers] == [("known", "→ tangent"), ("other", "kept")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(attention="flash"), "tangent, inline, linear, mala"),
        (dict(feature_map="relu"), "tangent of softmax has none"),
        (dict(attention="inline", feature_map="cube"), "feature_map='cube' is unknown"),
        (dict(anchors=0), "anchors=0; expected 1 or more"),
        (dict(anchors=2.0), "anchors=2.0; expected 1 or more, an integer"),
        (dict(attention="inline", anchors=4), "anchors=4: attention='inline' has none"),
        (dict(keep_softmax="auto:2"), "pass images="),
        (dict(keep_softmax="auto:x"), "such as 'auto:2'"),
        (dict(keep_softmax="auto"), "such as 'auto:2'"),
        (dict(keep_softmax=True), "keep_softmax=True; expected names, such as 'blocks.0.attn', positions"),
        (dict(keep_softmax=1.5), "keep_softmax=1.5; expected names"),
        (dict(keep_softmax=[0.5]), r"keep_softmax=\[0.5\]; expected names"),
        (dict(arguments="x"), "arguments='x'; expected a mapping"),
        (dict(anchors=True), "anchors=True; expected 1 or more, an integer"),
        (dict(local_residual="no"), "local_residual='no'; expected True or False"),
        (dict(model="vit_tiny_patch16_224"), "model='vit_tiny_patch16_224'; expected a model"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        linearize(**{"model": OF_NAME["vit_tiny_patch16_224"].model, **options})


def test_a_model_is_converted_once() -> None:
    model = OF_NAME["vit_tiny_patch16_224"].model
    with pytest.raises(ValueError, match="call linearize"):
        restore(model)
    linearize(model)
    with pytest.raises(ValueError, match="already linearised"):
        linearize(model)
    with pytest.raises(ValueError, match=r"0\.blocks\.0\.attn .*a part of the model is linearised already: restore"):
        linearize(nn.Sequential(model))


def test_a_model_whose_call_would_stay_as_it_is_is_refused() -> None:
    model: Any = OF_NAME["vit_tiny_patch16_224"].model
    model.blocks[0].attn.forward = torch.compile(model.blocks[0].attn.forward)
    with pytest.raises(ValueError, match=r"blocks\.0\.attn .*its forward was replaced"):
        linearize(model)
    assert len(linearize(model, keep_softmax="blocks.0.attn").linear()) == 1


def test_a_wrapped_model_would_not_average_the_gradients_of_residuals() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(OF_NAME["vit_tiny_patch16_224"].model)
        with pytest.raises(ValueError, match="linearise it before it is wrapped"):
            linearize(wrapped)
    finally:
        torch.distributed.destroy_process_group()


def test_an_attention_may_belong_to_several_modules() -> None:
    class AttentionCollector(nn.Module):
        def __init__(self, *attentions: nn.Module) -> None:
            super().__init__()
            self.attentions = nn.ModuleList(attentions)

    model: Any = OF_NAME["vit_tiny_patch16_224"].model
    model.collector = AttentionCollector(*(block.attn for block in model.blocks))
    assert [layer.name for layer in linearize(model).layers] == ["blocks.0.attn", "blocks.1.attn"]


class QuantizedLinear(nn.Module):
    """A linear layer with weights of int8 and no other parameters."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.scale = linear.weight.abs().max().item() / 127
        self.weight = nn.Parameter((linear.weight / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.scale * self.weight.to(x.dtype)).mT


def test_quantised_layers_do_not_decide_the_precision_of_new_parameters() -> None:
    case = OF_NAME["vit_tiny_patch16_224"]
    model: Any = case.model
    attn = model.blocks[1].attn
    attn.qkv, attn.proj = QuantizedLinear(attn.qkv), QuantizedLinear(attn.proj)
    expected = model(case.images())
    train_residual(model)
    add_gains(model)
    assert attn.local.fc1.weight.dtype == attn.gain.dtype == torch.float64
    assert model(case.images()).isfinite().all()
    restore(model)
    assert torch.equal(model(case.images()), expected)


class MyAttention(nn.Module):
    """A softmax attention that this library does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 2, 4
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(out.transpose(1, 2).flatten(2))


def test_a_module_of_ones_own_is_registered_by_one_function() -> None:
    model = nn.Sequential(MyAttention())
    with pytest.raises(ValueError, match=r"0 \(.*MyAttention\): this module is not known"):
        linearize(model)

    @register(MyAttention)
    class LinearMyAttention(LinearizedAttention, MyAttention):
        def forward(self, x: Tensor) -> Tensor:
            qkv = self.qkv(x).unflatten(-1, (3, 2, 4))
            return self.out(self.attend_linearly(qkv, scale=0.5, x=x).flatten(2))

    x = torch.randn(2, 7, 8)
    linearize(model, local_residual=False)
    assert model(x).shape == x.shape
    with pytest.raises(ValueError, match="already converted to LinearMyAttention"):
        register(MyAttention)(LinearMyAttention)


def test_vit_b_16_of_torchvision() -> None:
    with torch.device("meta"):
        model = torchvision.models.vit_b_16()
    assert len(linearize(model).linear()) == 12
