"""What a block keeps for the backward, and what it gives to the fused kernels."""

import pytest
import torch
from torch import nn

from inline_attention.layers import InLineAttention
from inline_attention.layers.activation import PolynomialGELU
from inline_attention.layers.block import Block, Mlp
from inline_attention.layers.mode import is_plain
from inline_attention.ops.backends import HAS_TRITON

KEPT_BY_INDUCTOR = "aot_eager_decomp_partition"  # chooses what to keep as Inductor does, and compiles nothing


def train(mlp, x, compiled):
    torch._dynamo.reset()
    run = torch.compile(mlp, backend=KEPT_BY_INDUCTOR, fullgraph=True) if compiled else mlp
    torch.manual_seed(1)
    out = run(x)
    kept = [tuple(t.shape) for t in out.grad_fn.saved_tensors] if compiled else []
    return out, torch.autograd.grad(out.square().sum(), list(mlp.parameters())), kept


@pytest.mark.parametrize(("activation", "dtype"), [(nn.GELU, torch.float32), (PolynomialGELU, torch.bfloat16)])
def test_compiled_training_keeps_no_activation(activation, dtype):
    mlp = Mlp(8, 24).train().to(dtype)
    mlp.act.__class__ = activation
    x = torch.randn(5, 8, dtype=dtype)
    out, grads, kept = train(mlp, x, compiled=True)
    assert kept.count((5, 24)) == 1  # the activation's input, and not its output
    expected, expected_grads, _ = train(mlp, x, compiled=False)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(grads, expected_grads, **({} if dtype == torch.float32 else dict(rtol=0.02, atol=0.02)))


@pytest.mark.parametrize("index", range(4))
def test_the_backward_sees_the_same_dropout(index):
    mlp = Mlp(8, 24, drop=0.4).double().train()
    x = torch.randn(5, 8, dtype=torch.double)
    _, grads, _ = train(mlp, x, compiled=True)
    parameter = list(mlp.parameters())[index]
    direction, step = torch.randn_like(parameter), 1e-6
    losses = []
    for sign in (1, -1):
        with torch.no_grad():
            parameter += sign * step * direction
            torch.manual_seed(1)
            losses.append(torch.compile(mlp, backend=KEPT_BY_INDUCTOR)(x).square().sum())
            parameter -= sign * step * direction
    difference = (losses[0] - losses[1]) / (2 * step)
    torch.testing.assert_close(difference, (grads[index] * direction).sum(), rtol=1e-6, atol=1e-6)


def watch(*args):
    """A hook that changes nothing."""


def replace_forward(module):
    module.forward = type(module).forward.__get__(module)


CHANGES = {
    "hook": lambda module: module.register_forward_hook(watch),
    "pre-hook": lambda module: module.register_forward_pre_hook(watch),
    "backward hook": lambda module: module.register_full_backward_hook(watch),
    "backward pre-hook": lambda module: module.register_full_backward_pre_hook(watch),
    "forward": replace_forward,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_module_whose_call_was_changed_is_not_plain(change):
    module = nn.Linear(2, 2)
    assert is_plain(module, nn.Linear)
    CHANGES[change](module)
    assert not is_plain(module, nn.Linear)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("norm1", {"mlp", "projection"}),
        ("attn", {"mlp"}),
        ("attn.qkv", {"mlp", "projection"}),
        ("attn.proj", {"mlp", "norm"}),
        ("attn.proj_drop", {"mlp", "norm"}),
        *((name, {"norm", "projection"}) for name in ("norm2", "mlp", "mlp.fc1", "mlp.act", "mlp.drop1", "mlp.norm")),
        *((name, {"norm", "projection"}) for name in ("mlp.fc2", "mlp.drop2", "drop_path2")),
    ],
)
def test_a_changed_call_is_made(name, kept, change):
    """No kernel takes the place of a module that somebody watches or replaced."""
    block = Block(16, InLineAttention(16, 2), mlp_ratio=2, norm_eps=1e-6).eval()
    CHANGES[change](block.get_submodule(name))
    plain = {
        "mlp": block.has_plain_mlp(),
        "norm": block.has_plain_norm(),
        "projection": block.attn.has_plain_projection(),
    }
    assert {key for key, value in plain.items() if value} == kept


def test_a_watched_first_drop_path_keeps_the_projection_apart(monkeypatch):
    monkeypatch.setattr("inline_attention.layers.block.pays_for", lambda *args: True)
    block = Block(16, InLineAttention(16, 2), mlp_ratio=2, norm_eps=1e-6).eval()
    block.fused = ("inference", "projected")
    x = torch.zeros(1, 4, 16)
    assert block.pays("projected", x)
    block.drop_path1.register_forward_hook(watch)
    assert not block.pays("projected", x)
    assert block.pays("inference", x)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.fixture
def compiled(monkeypatch):
    """A block that takes all kernels it may, its compiled call, and the arguments."""
    monkeypatch.setattr("inline_attention.layers.block.pays_for", lambda *args: True)
    torch._dynamo.reset()
    block = Block(16, InLineAttention(16, 2), mlp_ratio=2, norm_eps=1e-6).eval()
    block.fused = ("inference", "projected", "normed")
    with torch.no_grad():
        yield block, torch.compile(block, backend="aot_eager", fullgraph=True), (torch.randn(1, 4, 16), (2, 2))


def test_a_hook_before_the_first_compiled_call_is_called(compiled):
    block, call, args = compiled
    seen = []
    block.mlp.fc1.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    call(*args)
    assert seen == [(1, 4, 32)]


@pytest.mark.parametrize("name", ["mlp.fc1", "attn.qkv", "attn.proj"])
def test_compiled_code_notices_a_replaced_module(compiled, name):
    block, call, args = compiled
    call(*args)
    old = block.get_submodule(name)
    new = Doubled(old.in_features, old.out_features).eval()
    new.load_state_dict(old.state_dict())
    block.set_submodule(name, new)
    torch.testing.assert_close(call(*args), block(*args))


def checks_of(code):
    (entry,) = torch._C._dynamo.eval_frame._debug_get_cache_entry_list(code)
    return str(entry.guard_manager)


def test_a_compiled_call_checks_no_hooks(compiled):
    """With the tables below they took longer than all other checks of a call."""
    _, call, args = compiled
    call(*args)
    checks = checks_of(Block.forward.__code__)
    assert "_parameters" in checks
    assert "._forward_hooks" not in checks  # those that PyTorch checks are global


@pytest.mark.skipif(not HAS_TRITON, reason="the tables are of Triton's kernels")
def test_a_compiled_call_checks_no_tables(monkeypatch):
    from inline_attention.ops import fused_mlp, gpu
    from inline_attention.ops.fused import short

    def count(x):
        of_mlp = fused_mlp.wins_of(x.device, 192, 768, "inference")
        return x + len(of_mlp) + len(short.wins_of(x.device, 32, True))

    monkeypatch.setattr(gpu, "chip_of", lambda device: gpu.H200)
    torch._dynamo.reset()
    expected = len(fused_mlp.WINS["inference"][gpu.H200, 192, 768]) + len(short.WINS[gpu.H200, 32, True])
    assert torch.compile(count, backend="eager", fullgraph=True)(torch.zeros(())) == expected > 0
    assert "WINS" not in checks_of(count.__code__)
