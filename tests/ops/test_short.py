"""The forward pass in one launch, against float64. `test_triton.py` says how the kernels run without a GPU."""

import pytest
import torch

pytest.importorskip("triton")

from kernel_cases import (
    DEVICE,
    DTYPES,
    FAMILY,
    GPU,
    INLINE,
    ONE_LAUNCH,
    SPECIALIZATIONS,
    Kind,
    compare,
    configured,
    errors,
    made_results,
    make_inputs,
    make_source,
    not_made,
    random_short,
    run,
)
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from inline_attention.layers import InLineAttention, LocalWeight
from inline_attention.ops import (
    fused,
    gpu,
    inline_attention,
    inline_attention_packed,
    linear_attention_projected,
    make_local_weight,
)
from inline_attention.ops.fused import config, short
from inline_attention.ops.fused.arguments import Options
from inline_attention.ops.fused.plan import make_plan
from inline_attention.ops.fused.short import Tile, Win

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels that are launched."""
    names = []
    launch = gpu.launch

    def record(kernel, grid):
        names.append(kernel.__name__)
        return launch(kernel, grid)

    monkeypatch.setattr(gpu, "launch", record)
    return names


def assert_accurate(found, what):
    for name, error, allowed in found:
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e} for {what}"


def made_errors(*inputs, **options):
    return errors(*made_results(*inputs, **options))


SHAPES = {  # batch, grid, prefix, heads, head_dim, dtype, masked
    "one token": (1, (1, 1), 0, 1, 16, torch.float32, False),
    "row": (1, (1, 19), 0, 2, 16, torch.float16, True),
    "column": (2, (7, 1), 1, 1, 32, torch.float32, True),
    "class token": (2, (3, 5), 1, 3, 16, torch.float16, False),
    "several prefix tokens": (1, (2, 3), 18, 1, 16, torch.float32, False),
    "tall": (1, (9, 4), 4, 1, 24, torch.float16, True),
    "wide heads": (1, (2, 2), 0, 1, 80, torch.float32, False),
}


@pytest.mark.parametrize("made", [False, True], ids=["given", "made"])
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape, made, launched):
    """The local weight is given, or made inside."""
    *sizes, dtype, masked = SHAPES[shape]
    inputs = make_inputs(*sizes, dtype, masked=masked)
    if made:
        found = made_errors(inputs[0], make_source(inputs[0]), inputs[3])
    else:
        with configured(**ONE_LAUNCH):
            found = compare(*inputs)
    assert_accurate(found, shape)
    assert launched == ["short_kernel"]


@pytest.mark.parametrize("kind", [Kind(feature_map=name) for name in ("relu", "leaky_relu", "exp")] + FAMILY, ids=str)
def test_family(kind, launched):
    inputs = make_inputs(2, (3, 4), 1, 3, 32 if kind.value_channels else 16, torch.float32, masked=True)
    with configured(**ONE_LAUNCH):
        assert_accurate(compare(*inputs, kind=kind), kind)
    assert launched == ["short_kernel"]


@pytest.mark.parametrize("kind", [INLINE, *FAMILY[:2]], ids=str)
def test_made_inside_for_the_family(kind):
    inputs = make_inputs(2, (3, 4), 1, 2, 16, torch.float16, masked=True)
    assert_accurate(made_errors(inputs[0], make_source(inputs[0]), inputs[3], kind=kind), kind)


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_any_number_of_programs_for_a_sample(parts):
    """Also more than there are queries for."""
    inputs = make_inputs(1, (5, 9), 1, 1, 16, torch.float32)
    found = made_errors(inputs[0], make_source(inputs[0]), inputs[3], tile=Tile(32, 16, 4, 1, parts))
    assert_accurate(found, parts)


def test_without_a_local_residual_and_with_queries_of_another_length():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 2, 16, device=DEVICE) for n in (37, 21, 21))
    exact = inline_attention(q.double(), k.double(), v.double(), backend="reference")
    with configured(**ONE_LAUNCH):
        out = inline_attention(q, k, v, backend="triton")
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


def test_packed(launched):
    """Images of different sizes. The longest has work for more programs than the shortest."""
    grids, bounds = [(2, 3), (1, 1), (5, 8)], [0, 7, 9, 50]
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 50, 2, 16, device=DEVICE)
    options = dict(cu_seqlens=bounds, grids=grids, num_prefix_tokens=1)
    weight = torch.randn(3, 2, 16, 9, device=DEVICE) / 9
    doubles = (x.double() for x in (q, k, v))
    exact = inline_attention_packed(*doubles, local_weight=weight.double(), **options, backend="reference")
    with configured(**ONE_LAUNCH):
        out = inline_attention_packed(q, k, v, local_weight=weight, **options, backend="triton")
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    assert launched == ["short_kernel"]


def test_bit_identical_from_run_to_run():
    inputs = make_inputs(2, (3, 5), 1, 2, 16, DTYPES[-1])
    with configured(**ONE_LAUNCH):
        first, second = (run(*inputs, backend="triton")["out"] for _ in range(2))
    assert torch.equal(first, second)


def test_compiles_without_a_break():
    qkv, weight, _, options = make_inputs(1, (3, 4), 0, 2, 16, torch.float32)
    q, k, v = qkv.unbind(2)

    def attend(q, k, v):
        return inline_attention(q, k, v, local_weight=weight, grid=options["grid"], backend="triton")

    with configured(**ONE_LAUNCH), torch.no_grad():
        compiled = torch.compile(attend, fullgraph=True, backend="eager")
        assert torch.equal(compiled(q, k, v), attend(q, k, v))


@pytest.mark.parametrize("seed", range(210 if GPU else len(SPECIALIZATIONS)))
def test_random_cases(seed):
    """`gpu_check.py short` runs more of them."""
    case = random_short(seed)
    assert_accurate(case.errors(), case)


def test_gradients_take_the_other_launches(launched):
    inputs = make_inputs(1, (3, 4), 0, 1, 16, torch.float32)
    q, k, v = inputs[0].requires_grad_().unbind(2)
    with configured(**ONE_LAUNCH):
        inline_attention(q, k, v, backend="triton").sum().backward()
    assert "short_kernel" not in launched
    assert inputs[0].grad is not None


def test_measured_wins_name_sizes_that_the_kernel_takes():
    for (_, head_dim, _), wins in short.WINS.items():
        assert head_dim <= config.MOST_CHANNELS
        for win in wins:
            assert win.least_tokens <= win.most_tokens <= config.Config().part
            assert win.least_heads <= win.most_heads


def layer_and_tokens():
    torch.manual_seed(0)
    return InLineAttention(32, 2, num_prefix_tokens=1, backend="triton").to(DEVICE), torch.randn(2, 16, 32).to(DEVICE)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_a_layer_hands_over_its_tokens(masked, compiled, launched):
    """The kernel takes their mean and makes the local weight."""
    layer, x = layer_and_tokens()
    mask = torch.rand(2, 16, device=DEVICE) < 0.7 if masked else None
    call = torch.compile(layer, fullgraph=True, backend="eager") if compiled else layer
    with configured(**ONE_LAUNCH), torch.no_grad():
        out = call(x, (3, 5), token_mask=mask)
    assert launched == ["short_kernel"]
    layer.double().backend = "reference"
    torch.testing.assert_close(out.double(), layer(x.double(), (3, 5), token_mask=mask), rtol=1e-5, atol=1e-5)


def test_a_layer_makes_its_local_weight_where_somebody_sees_it(launched):
    """For gradients, for hooks, and for kernels that take a finished weight."""
    layer, x = layer_and_tokens()
    with torch.no_grad():
        expected = layer(x, (3, 5))
    assert "local_weight_kernel" in launched
    with configured(**ONE_LAUNCH):
        torch.testing.assert_close(layer(x, (3, 5)), expected)
        assert "short_kernel" not in launched
        seen = []
        layer.local.register_forward_hook(lambda module, args, out: seen.append(out.shape))
        with torch.no_grad():
            torch.testing.assert_close(layer(x, (3, 5)), expected)
    assert seen == [(2, 2, 16, 9)]
    assert launched[-2:] == ["local_weight_kernel", "short_kernel"]


def test_a_local_source_is_checked():
    layer, x = layer_and_tokens()
    qkv = torch.randn(2, 16, 3, 2, 16, device=DEVICE)
    with pytest.raises(ValueError, match=r"tokens of shape \(2, 15, 32\); expected \(B, N, heads·e\) = \(2, 16, 32\)"):
        linear_attention_projected(qkv, local_weight=layer.local.source(x[:, 1:]), grid=(4, 4))
    source = layer.local.source(x)
    for change, message in [
        (dict(b1=source.b1[:1]), r"b1 has shape \(1, 16\); expected \(2, 16\)"),
        (dict(w2=source.w2[:1]), r"w2 has shape \(1, 144, 16\); expected \(2, 144, 16\)"),
        (LocalWeight(32, 4).source(x)._asdict(), r"w1 of the LocalSource has shape \(4, 8, 8\); .* = \(2, 16\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            linear_attention_projected(qkv, local_weight=source._replace(**change), grid=(4, 4))


def test_only_measured_wins_are_chosen(monkeypatch):
    """By GPU, channels of a head, tokens, and samples × heads."""
    monkeypatch.setattr(gpu, "chip_of", lambda device: gpu.H200)
    tile = Tile(64, 32, 4, 2, 8)
    most = config.CONFIG.part
    options = Options("subtract", "relu", False, 1.0, (14, 14), 1)

    def chosen(batch=1, tokens=most, heads=6, d=32, dtype=torch.bfloat16, local=1, **changes):
        with FakeTensorMode():
            qkv = torch.empty(batch, tokens, 3, heads, d, dtype=dtype, device="cuda")
            return short.winning_tile([qkv], [qkv] * local, None, None, options._replace(**changes))

    monkeypatch.setattr(short, "WINS", {})
    assert chosen() is None
    monkeypatch.setattr(short, "WINS", {(gpu.H200, 32, False): (Win(most // 2, most * 2, 3, 24, tile),)})
    assert chosen() == chosen(batch=4) == tile
    for other in (
        dict(batch=5), dict(heads=2), dict(tokens=most // 2 - 1), dict(d=64), dict(dtype=torch.float32),
        dict(local=0), dict(local=5), dict(feature_map="exp"), dict(normalization="divide"), dict(anchored=True),
    ):  # fmt: skip
        assert chosen(**other) is None, other
    assert chosen(tokens=most + 1) is None  # tensor cores would round a longer sum


def test_a_program_for_every_multiprocessor_but_none_without_queries():
    for batch, tokens in [(1, 197), (1, 4096), (8, 197), (64, 197), (1, 1)]:
        q = torch.empty(batch, tokens, 6, 32, device=DEVICE)
        plan = make_plan(q, q, q, None, (1, 1), 0)
        tile = short.choose_tile(plan, torch.float32, 132)
        assert plan.programs * tile.parts <= max(132, plan.programs)
        assert plan.programs * (tile.parts + 1) > 132 or tile.parts * tile.queries >= tokens
        assert (tile.parts - 1) * tile.queries < tokens


def test_cost():
    """As much as of the two operations that it is in the place of."""
    qkv, *_ = make_inputs(2, (3, 4), 0, 2, 16, torch.float32)
    source = make_source(qkv)
    with FlopCounterMode(display=False) as one, configured(**ONE_LAUNCH):
        fused.attention(
            [qkv], source, None, None, None, None, None, anchored=False, normalization="subtract",
            feature_map="identity", scale=1.0, grids=[(3, 4)], num_prefix_tokens=0, make=not_made,
        )  # fmt: skip
    with FlopCounterMode(display=False) as several:
        weight = make_local_weight(source.x.mean(1), *source[1:], backend="triton")
        q, k, v = qkv.unbind(2)
        inline_attention(q, k, v, local_weight=weight, grid=(3, 4), backend="triton")
    assert one.get_total_flops() == several.get_total_flops()
