"""`optimize` changes how a model runs, and nothing else."""

import sys

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from inline_attention import optimize, use_backend
from inline_attention.layers.embed import PatchConv2d
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


@pytest.mark.skipif(not HAS_TRITON, reason="the perceptron's kernel is Triton's")
def test_a_block_takes_the_perceptrons_kernel_where_a_table_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from small import create_small, image

    from inline_attention.layers.block import Block
    from inline_attention.ops import fused_perceptron

    model = create_small("inline_deit_tiny", depth=2).eval()
    blocks = [block for block in model.modules() if isinstance(block, Block)]
    blocks[1].mlp.fc1.register_forward_hook(lambda *_: None)
    monkeypatch.setattr(nn.Module, "compile", lambda self, *, mode: None)
    with torch.no_grad():
        expected = model(image())
        optimize(model)
        assert not any(block.fused_perceptron for block in blocks)  # no measurement, no change
        monkeypatch.setattr(sys.modules[optimize.__module__], "pays_on", lambda *_, training: not training)
        optimize(model)
        assert [block.fused_perceptron for block in blocks] == [True, False]
        monkeypatch.setattr(fused_perceptron, "winning_tile", lambda *_, training: fused_perceptron.TILES[0])
        seen = []
        run = fused_perceptron.add_perceptron
        monkeypatch.setattr(fused_perceptron, "add_perceptron", lambda *args: seen.append(1) or run(*args))
        with use_backend("triton"):
            torch.testing.assert_close(model(image()), expected)
    assert seen == [1]
    with use_backend("triton"):
        model.train()(image())
    assert seen == [1]  # the table for training has no entry


@pytest.mark.skipif(not HAS_TRITON, reason="the perceptron's kernel is Triton's")
def test_training_takes_the_perceptrons_kernel_where_its_table_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from small import create_small, image

    from inline_attention.layers.block import Block
    from inline_attention.ops import fused_perceptron, gpu

    def train(model: nn.Module) -> list[torch.Tensor]:
        loss = model(image()).square().sum()
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    model = create_small("inline_deit_tiny", depth=4).train()
    blocks = [block for block in model.modules() if isinstance(block, Block)]
    blocks[1].drop_path2.drop_prob = 0.5
    blocks[2].mlp.drop2.p = 0.5
    monkeypatch.setattr(nn.Module, "compile", lambda self, *, mode: None)
    monkeypatch.setattr(nn.Parameter, "device", torch.device("cuda"))
    monkeypatch.setattr(gpu, "capability", lambda device: (9, 0))
    optimize(model)
    assert not any(block.fused_perceptron_in_training for block in blocks)  # no measurement, no change
    fc1 = blocks[0].mlp.fc1
    win = fused_perceptron.Win(0, fused_perceptron.ANY, fused_perceptron.TILES[0])
    monkeypatch.setitem(fused_perceptron.TRAINING_WINS, ((9, 0), fc1.in_features, fc1.out_features), (win,))
    optimize(model)
    assert [block.fused_perceptron_in_training for block in blocks] == [True, False, False, True]
    assert not any(block.fused_perceptron for block in blocks)
    monkeypatch.undo()

    seen = []
    run = fused_perceptron.add_perceptron
    monkeypatch.setattr(fused_perceptron, "add_perceptron", lambda *args: seen.append(1) or run(*args))
    with use_backend("triton"):
        torch.manual_seed(0)
        fast = train(model)
        assert seen == [1, 1]
        for block in blocks:
            block.fused_perceptron_in_training = False
        torch.manual_seed(0)
        torch.testing.assert_close(fast, train(model), rtol=1e-3, atol=1e-5)
    assert seen == [1, 1]
