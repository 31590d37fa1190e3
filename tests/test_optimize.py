"""`optimize` changes how a model runs, and nothing else."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from inline_attention import optimize, use_backend
from inline_attention.layers.activation import PolynomialGELU
from inline_attention.layers.embed import PatchConv2d
from inline_attention.ops import backends
from inline_attention.ops.backends import HAS_TRITON


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))


def test_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mode='fastest' is unknown; expected one of default, reduce-overhead"):
        optimize(small(), mode="fastest")


def test_without_a_compiler_the_model_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    model = small()
    x = torch.randn(3, 4)
    expected = model(x)
    with pytest.warns(UserWarning, match=r"not compiled: there is no C\+\+ compiler"):
        assert optimize(model) is model
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)


@pytest.mark.skipif(not HAS_TRITON, reason="nothing is compiled for a GPU without Triton")
@pytest.mark.parametrize(
    ("device", "training", "mode", "expected"),
    [
        ("cuda", False, None, "reduce-overhead"),
        ("cuda", True, None, "default"),
        ("cpu", False, None, "default"),
        ("cuda", True, "reduce-overhead", "reduce-overhead"),
    ],
)
def test_graphs_are_replayed_where_it_is_safe(
    device: str, training: bool, mode: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeTensorMode(), torch.device(device):
        model = small().train(training)
    modes = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, *, mode: modes.append(mode))
    optimize(model, mode=mode)
    assert modes == [expected]


def test_convolutions_that_cut_images_become_products(monkeypatch: pytest.MonkeyPatch) -> None:
    convolutions = {
        "patches": (nn.Conv2d(3, 8, 4, stride=4), PatchConv2d),
        "many channels": (nn.Conv2d(8, 8, 4, stride=4), nn.Conv2d),
        "overlapping": (nn.Conv2d(3, 8, 7, stride=4, padding=3), nn.Conv2d),
        "not square": (nn.Conv2d(3, 8, (2, 4), stride=(2, 4)), nn.Conv2d),
        "padded": (nn.Conv2d(3, 8, 4, stride=4, padding=1), nn.Conv2d),
        "in groups": (nn.Conv2d(3, 6, 4, stride=4, groups=3), nn.Conv2d),
    }
    hooked = nn.Conv2d(3, 8, 4, stride=4)
    hooked.register_forward_hook(lambda *_: None)
    model = nn.ModuleDict({name: module for name, (module, _) in convolutions.items()} | {"hooked": hooked})
    monkeypatch.setattr(nn.Module, "compile", lambda self, *, mode: None)
    optimize(model)
    assert {type(module) for module in model.values()} == {nn.Conv2d}, "on a CPU they stay"
    x = torch.randn(2, 3, 9, 13)
    expected = model["patches"](x)
    monkeypatch.setattr(torch.nn.Parameter, "device", torch.device("cuda"))
    optimize(model)
    monkeypatch.undo()
    assert {name: type(model[name]) for name in convolutions} == {
        name: kind for name, (_, kind) in convolutions.items()
    }
    assert type(hooked) is nn.Conv2d
    torch.testing.assert_close(model["patches"](x), expected)


@pytest.mark.slow
def test_compiled_model_keeps_its_type_names_and_results() -> None:
    model = small()
    x = torch.randn(3, 4)
    expected = model(x)
    names = list(model.state_dict())
    assert optimize(model) is model
    counter = torch._dynamo.utils.counters["stats"]
    before = counter["unique_graphs"]
    torch.testing.assert_close(model(x), expected)
    assert counter["unique_graphs"] == before + 1, "the call did not go through the compiler"
    assert list(model.state_dict()) == names
    assert isinstance(model, nn.Sequential)


@pytest.mark.skipif(not HAS_TRITON, reason="the MLP's kernel is Triton's")
@pytest.mark.parametrize("family", ["deit", "pvt", "swin", "cswin"])
@pytest.mark.parametrize("uses", [{"inference"}, {"projected"}, {"inference", "projected"}])
def test_blocks_take_the_mlps_kernel_where_a_table_says_so(
    family: str, uses: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from small import create_small, image

    from inline_attention.layers.block import Block
    from inline_attention.models.swin import WindowSoftmaxAttention
    from inline_attention.ops import add_mlp, fused_mlp, mlp

    model = create_small(f"inline_{family}_tiny")
    blocks = [block for block in model.modules() if isinstance(block, Block)]
    blocks[-1].mlp.fc1.register_forward_hook(lambda *_: None)
    blocks[0].attn.register_forward_hook(lambda *_: None)
    monkeypatch.setattr(nn.Module, "compile", lambda self, *, mode: None)
    with torch.no_grad():
        expected = model(image())
        optimize(model)
        assert not any(block.fused for block in blocks)  # no measurement, no change
        monkeypatch.setattr(sys.modules[optimize.__module__], "pays_on", lambda *args: args[-1] in uses)
        optimize(model)
        assert [set(block.fused) for block in blocks] == [*[uses] * (len(blocks) - 1), set()]
        tile = fused_mlp.TILES[0]
        monkeypatch.setattr(fused_mlp, "winning_tile", lambda *args: tile if args[-1] in uses else None)
        # Only the MLP takes its kernel, which does not run: tests/ops compare it with the reference.
        monkeypatch.setattr(
            mlp,
            "backends",
            SimpleNamespace(
                HAS_TRITON=True,
                resolve=backends.resolve,
                choose=lambda wanted, *_, **__: "reference" if wanted == "reference" else "triton",
            ),
        )
        projected = []

        def plain(x, norm, weights, projection, eps, *_):
            projected.append(projection is not None)
            x = x if projection is None else x + F.linear(*projection)
            return add_mlp(x, *norm, *weights, eps=eps, backend="reference")

        monkeypatch.setattr(fused_mlp, "add_mlp", plain)
        torch.testing.assert_close(model(image()), expected)
        by_itself = uses - {"projected"}  # a projection with hooks, or of a window's softmax
        inner = [by_itself if isinstance(block.attn, WindowSoftmaxAttention) else uses for block in blocks[1:-1]]
        assert projected == ["projected" in taken for taken in (by_itself, *inner) if taken]
        projected.clear()
        seen = []
        for block in blocks[:-1]:  # hooks and adapters may come after `optimize`
            block.mlp.fc2.register_forward_hook(lambda *_: seen.append("hook"))
        torch.testing.assert_close(model(image()), expected)
    assert (len(seen), projected) == (len(blocks) - 1, [])
    model.train()(image())
    assert not projected  # the table for training has no entry


@pytest.mark.skipif(not HAS_TRITON, reason="the MLP's kernel is Triton's")
def test_training_takes_the_mlps_kernel_where_its_table_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from small import create_small, image

    from inline_attention.layers.block import Block, Mlp
    from inline_attention.ops import fused_mlp, gpu

    def train(model: nn.Module) -> list[torch.Tensor]:
        loss = model(image()).square().sum()
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    model = create_small("inline_deit_tiny", depth=4).train()
    blocks = [block for block in model.modules() if isinstance(block, Block)]
    blocks[1].drop_path2.drop_prob = 0.5
    blocks[2].mlp.drop2.p = 0.5
    monkeypatch.setattr(nn.Module, "compile", lambda self, *, mode: None)
    monkeypatch.setattr(nn.Parameter, "device", torch.device("cuda"))
    monkeypatch.setattr(gpu, "chip_of", lambda device: gpu.H200)
    optimize(model)
    assert not any(block.fused for block in blocks)  # no measurement, no change
    fc1 = blocks[0].mlp.fc1
    win = fused_mlp.Win(0, fused_mlp.ANY, fused_mlp.TILES[0])
    monkeypatch.setitem(fused_mlp.WINS["training"], (gpu.H200, fc1.in_features, fc1.out_features), (win,))
    optimize(model)
    assert [block.fused for block in blocks] == [("training",), (), (), ("training",)]
    monkeypatch.undo()

    seen = []
    run, by_modules = fused_mlp.add_mlp, Mlp.forward
    monkeypatch.setattr(fused_mlp, "add_mlp", lambda *args: seen.append("kernel") or run(*args))
    monkeypatch.setattr(Mlp, "forward", lambda *args: seen.append("modules") or by_modules(*args))
    results = []
    for tile in (win.tile, None):  # None: another number of tokens
        monkeypatch.setattr(fused_mlp, "winning_tile", lambda *_, tile=tile: tile)
        with use_backend("triton" if tile else "auto"):
            torch.manual_seed(0)
            results.append(train(model))
    # Without the kernel the block's own module runs, which drops its activations.
    assert seen == ["kernel", "modules", "modules", "kernel"] + ["modules"] * 4
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-5)


def test_gelu_loses_the_error_function(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {
        "exact": (nn.GELU(), PolynomialGELU),
        "tanh": (nn.GELU(approximate="tanh"), nn.GELU),
        "other": (nn.SiLU(), nn.SiLU),
    }
    hooked = nn.GELU()
    hooked.register_forward_hook(lambda *_: None)
    model = nn.ModuleDict({name: module for name, (module, _) in kinds.items()} | {"hooked": hooked})
    model["linear"] = nn.Linear(1, 1)  # a device
    monkeypatch.setattr(nn.Module, "compile", lambda self, *, mode: None)
    optimize(model)
    assert type(model["exact"]) is nn.GELU, "on a CPU it stays"
    monkeypatch.setattr(torch.nn.Parameter, "device", torch.device("cuda"))
    optimize(model)
    monkeypatch.undo()
    assert {name: type(model[name]) for name in kinds} == {name: kind for name, (_, kind) in kinds.items()}
    assert type(hooked) is nn.GELU

    x = torch.linspace(-4, 4, 101)
    compiled = torch.compile(model["exact"], backend="aot_eager", fullgraph=True)
    for dtype in (torch.float32, torch.bfloat16):
        leaf, reference = (x.to(dtype).requires_grad_() for _ in range(2))
        out, expected = compiled(leaf), F.gelu(reference)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(
            *(torch.autograd.grad(y.sum(), z)[0] for y, z in ((out, leaf), (expected, reference)))
        )
    assert torch.equal(model["exact"](x), F.gelu(x))  # uncompiled, as it was
