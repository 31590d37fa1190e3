"""A learned gain of the queries, for every attention that takes it."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from inline_attention import create_model, load_model, save_weights
from inline_attention.analysis import capture
from inline_attention.layers import ATTENTIONS, InLineAttention, LinearAttention

DIM, HEADS, GRID = 16, 4, (3, 3)
WITH_GAIN = [name for name, cls in ATTENTIONS.items() if "gain" in cls.follows]


def tokens() -> Tensor:
    return torch.randn(2, 9, DIM, generator=torch.Generator().manual_seed(0)).double()


def attention(kind: str, gain: bool | float, **options: object) -> torch.nn.Module:
    torch.manual_seed(0)
    return ATTENTIONS[kind](DIM, HEADS, gain=gain, **options).double()


def test_attentions_whose_rows_depend_on_the_length_of_a_query_take_it() -> None:
    assert {"inline", "softmax", "mala", "tangent"} <= set(WITH_GAIN)
    assert "linear" not in WITH_GAIN


@pytest.mark.parametrize("fused_qkv", [True, False])
@pytest.mark.parametrize("kind", WITH_GAIN)
def test_a_gain_multiplies_the_queries(kind: str, fused_qkv: bool) -> None:
    x = tokens()
    plain, same, other = (attention(kind, gain, fused_qkv=fused_qkv) for gain in (False, True, 3.0))
    torch.testing.assert_close(same(x, GRID), plain(x, GRID))
    gains = torch.tensor([0.5, 1.0, 2.0, 4.0]).double()
    other.query_gain.weight.data.copy_(gains)
    linear = plain.qkv if fused_qkv else plain.q
    with torch.no_grad():
        linear.weight[:DIM] *= gains.repeat_interleave(DIM // HEADS)[:, None]
        linear.bias[:DIM] *= gains.repeat_interleave(DIM // HEADS)
    torch.testing.assert_close(other(x, GRID), plain(x, GRID))


def test_an_adapter_of_the_projection_has_gains_too() -> None:
    class Adapter(torch.nn.Module):
        def __init__(self, linear: torch.nn.Linear) -> None:
            super().__init__()
            self.linear, self.more = linear, torch.nn.Linear(DIM, 3 * DIM, bias=False).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) + self.more(x)

    x, module = tokens(), attention("inline", 2.0)
    module.qkv = Adapter(module.qkv)
    out = module(x, GRID)
    both = torch.nn.Linear(DIM, 3 * DIM).double()
    both.load_state_dict({
        "weight": module.qkv.linear.weight + module.qkv.more.weight, "bias": module.qkv.linear.bias,
    })  # fmt: skip
    more, module.qkv = module.qkv.more, module.qkv.linear
    hook = module.qkv.register_forward_hook(lambda _, args, out: out + more(args[0]))
    torch.testing.assert_close(module(x, GRID), out)
    hook.remove()
    module.qkv = both
    torch.testing.assert_close(module(x, GRID), out)


def test_inline_attention_deviates_from_the_mean_in_proportion() -> None:
    x = tokens()
    plain, doubled = (InLineAttention(DIM, HEADS, local_residual=False, gain=gain).double() for gain in (True, 2.0))
    doubled.load_state_dict({**plain.state_dict(), "query_gain.weight": torch.full((HEADS,), 2.0)})
    rows = [
        module.write_out(x, GRID).matrix(slice(None), slice(None), slice(None), None) for module in (plain, doubled)
    ]
    torch.testing.assert_close(rows[1] - 1 / 9, 2 * (rows[0] - 1 / 9))


def test_linear_attention_does_not_depend_on_it() -> None:
    x = tokens()
    plain, doubled = LinearAttention(DIM, HEADS).double(), LinearAttention(DIM, HEADS, gain=2.0).double()
    doubled.load_state_dict(plain.state_dict(), strict=False)
    torch.testing.assert_close(doubled(x, GRID), plain(x, GRID), rtol=1e-3, atol=1e-4)  # 1e-6 in its divisor


@pytest.mark.parametrize("kind", WITH_GAIN)
def test_gradients_reach_it(kind: str) -> None:
    module = attention(kind, True)
    module(tokens(), GRID).square().sum().backward()
    assert (module.query_gain.weight.grad != 0).all()


@pytest.mark.parametrize("gain", [-1.0, float("nan"), float("inf")])
def test_a_start_that_makes_no_sense(gain: float) -> None:
    with pytest.raises(ValueError, match="expected True, or the positive number"):
        InLineAttention(DIM, HEADS, gain=gain)


FAMILIES = {
    "inline_deit_tiny": dict(img_size=32, depth=1),
    "inline_swin_tiny": dict(img_size=32, depths=(1, 1), num_heads=(3, 6), attention="IS"),
    "inline_pvt_tiny": dict(img_size=32, depths=(1, 1, 1, 1), attention="IISS"),
    "inline_cswin_tiny": dict(img_size=32, depths=(1, 1, 1, 1), attention="IISS"),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_models_files_and_analyses(name: str, tmp_path: Path) -> None:
    """Published models have no gains. Gains start at the given value, and a weights file restores them."""
    options = dict(FAMILIES[name], num_classes=3)
    published = create_model(name, **options)
    assert not [key for key in published.state_dict() if "query_gain" in key]
    model = create_model(name, gain=8.0, **options).eval()
    gains = {key: value for key, value in model.state_dict().items() if "query_gain" in key}
    assert len(gains) == sum(hasattr(module, "query_gain") for module in model.modules())
    assert all((value == 8).all() for value in gains.values())
    with torch.no_grad():
        for key, value in model.named_parameters():
            if key in gains:
                value.uniform_(0.5, 2.0)
    save_weights(model, tmp_path / "gain.safetensors")
    again = load_model(tmp_path / "gain.safetensors").eval()
    images = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(again(images), model(images))
    assert max(layer.error() for layer in capture(model, images)) < 1e-5
