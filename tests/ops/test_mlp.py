"""The MLP's kernel against the reference in float64. Without a GPU it runs in Triton's interpreter."""

from functools import partial

import pytest
import torch
from torch.library import opcheck
from torch.nn import functional as F

pytest.importorskip("triton")

import triton
import triton.language as tl
from kernel_cases import (
    DEVICE,
    DTYPES,
    GPU,
    NoGradient,
    last_step,
    mlp_errors,
    mlp_inputs,
    random_mlp,
    trained_mlp_errors,
)

from inline_attention.ops import add_mlp, fused_mlp, gpu, use_backend
from inline_attention.ops.fused_mlp import TILES, Tile, Win, choose_tile, halves
from inline_attention.ops.kernels.blocks import gelu, gelu_slope

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SPLIT = Tile(16, 16, 4, 1, splits=4)
SHAPES = {  # rows, channels, hidden channels, tile
    "one token": ((1,), 16, 16, None),
    "two blocks of channels": ((2, 9), 48, 32, None),
    "more rows than a tile": ((37,), 16, 48, None),
    "no width of a block": ((3, 5), 23, 37, None),
    "narrower than a block": ((5,), 7, 9, None),
    "split": ((3, 7), 48, 64, SPLIT),
    "split unevenly": ((19,), 40, 72, SPLIT._replace(splits=3)),
    "more splits than steps": ((2,), 16, 20, SPLIT),
    "no token": ((0,), 16, 16, None),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_against_float64(shape, dtype):
    rows, width, hidden, tile = SHAPES[shape]
    error, allowed = mlp_errors(mlp_inputs(rows, width, hidden, dtype), tile)
    assert error <= allowed


TRAINED = SHAPES | {
    "one row": ((1,), 48, 40, None),
    "one row more than a tile": ((17,), 16, 64, None),
    "one row more than two tiles": ((33,), 48, 100, None),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", TRAINED)
def test_gradients_against_float64(shape, dtype):
    rows, width, hidden, tile = TRAINED[shape]
    for name, error, allowed in trained_mlp_errors(mlp_inputs(rows, width, hidden, dtype), tile):
        assert error <= allowed, name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_with_a_projection_against_float64(shape, dtype):
    rows, width, hidden, tile = SHAPES[shape]
    inputs = mlp_inputs(rows, width, hidden, dtype)
    error, allowed = mlp_errors(inputs, tile, projection=last_step(inputs[0]))
    assert error <= allowed


@pytest.mark.parametrize("seed", range(210 if GPU else 4))
def test_random_shapes(seed):
    case = random_mlp(seed)
    for name, error, allowed in case.errors():
        assert error <= allowed, (case, name)


@pytest.mark.parametrize("dtype", DTYPES[1:] if GPU else DTYPES[-1:])
def test_no_less_accurate_than_the_modules(dtype):
    """On enough numbers for chance to cancel: at most 1.2 times the error of the reference, outputs and gradients."""
    inputs = mlp_inputs((4096 if GPU else 130,), 192 if GPU else 48, 768 if GPU else 96, dtype)
    for projection in (None, last_step(inputs[0])):
        error, allowed = mlp_errors(inputs, None, projection=projection)
        assert error <= allowed - torch.finfo(dtype).eps
    upstream = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    exact, plain, fast = (
        torch.autograd.grad(f(*leaves), leaves, upstream.to(leaves[0].dtype))
        for f, kind in ((by_reference, torch.float64), (by_reference, dtype), (by_kernel, dtype))
        for leaves in [[t.to(kind).requires_grad_() for t in inputs]]
    )
    for one, other, reference in zip(fast, exact, plain, strict=True):
        assert (one - other).norm() <= 1.2 * (reference - other).norm()


def by_reference(*tensors):
    return add_mlp(*tensors, backend="reference")


def by_kernel(x, *tensors):
    return fused_mlp.add_mlp(x, tensors[:2], tensors[2:], None, 1e-5, x.dtype)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_where_gradients_are_needed_the_projection_has_them(backend):
    leaves = mlp_inputs((3, 5), 16, 24, torch.float32)
    last = last_step(leaves[0])
    for leaf in (*leaves, *last):
        leaf.requires_grad_()
    out = add_mlp(*leaves, projection=last, backend=backend)
    x, *tensors = leaves
    expected = add_mlp(x + F.linear(*last), *tensors, backend="reference")
    wanted = [*leaves, *last]
    found, exact = (torch.autograd.grad(y.square().sum(), wanted) for y in (out, expected))
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stream", [torch.float32, DTYPES[-1]])
def test_autocast_keeps_the_precision_of_the_stream(stream):
    x, *tensors = mlp_inputs((3, 5), 32, 64, torch.float32)
    x = x.to(stream)
    with torch.autocast(DEVICE, DTYPES[-1]), torch.no_grad():
        fast, plain = (add_mlp(x, *tensors, backend=backend) for backend in ("triton", "reference"))
    assert fast.dtype == plain.dtype == stream
    torch.testing.assert_close(fast, plain, rtol=1e-2, atol=1e-2)


def test_few_rows_take_float32_weights_as_they_are(monkeypatch):
    """The kernel casts matrices. Biases keep their digits, which is all that differs."""
    x, *tensors = mlp_inputs((3, 5), 32, 64, torch.float32)
    seen, outs = [], []
    op = fused_mlp._mlp_op
    monkeypatch.setattr(fused_mlp, "_mlp_op", lambda *args: seen.append(args[3].dtype) or op(*args))
    for few in (15, 14):
        monkeypatch.setattr(fused_mlp, "FEW_ROWS", few)
        with torch.autocast(DEVICE, DTYPES[-1]), torch.no_grad():
            outs += [add_mlp(x, *tensors, projection=last, backend="triton") for last in (None, last_step(x))]
    assert seen == [torch.float32] * 2 + [DTYPES[-1]] * 2
    torch.testing.assert_close(outs[:2], outs[2:], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("stream", "parameter"),
    [(torch.float32, torch.float32), (DTYPES[-1], torch.float32), (DTYPES[-1], DTYPES[-1])],
)
def test_gradients_have_the_dtype_of_their_tensors_under_autocast(stream, parameter):
    x, *tensors = mlp_inputs((3, 5), 32, 64, parameter)
    leaves = [t.requires_grad_() for t in (x.to(stream), *tensors)]
    results = []
    for backend in ("triton", "reference"):
        with torch.autocast(DEVICE, DTYPES[-1]):
            out = add_mlp(*leaves, backend=backend)
        results.append(torch.autograd.grad(out.float().square().sum(), leaves))
    for leaf, fast, plain in zip(leaves, *results, strict=True):
        assert fast.dtype == plain.dtype == leaf.dtype
        assert (fast - plain).norm() <= 3e-3 * plain.norm()


@pytest.mark.parametrize("wanted", [[0], [1], [3, 4], [2, 5, 6]])
def test_only_some_gradients(wanted):
    tensors = mlp_inputs((3, 5), 23, 37, torch.float32)
    for i in wanted:
        tensors[i].requires_grad_()
    grads = []
    for backend in ("triton", "reference"):
        out = add_mlp(*tensors, backend=backend)
        grads.append(torch.autograd.grad(out.square().sum(), [tensors[i] for i in wanted]))
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


def test_no_gradient_arrives():
    """It counts as zero."""
    x, *tensors = mlp_inputs((3,), 16, 16, torch.float32)
    x.requires_grad_()
    (NoGradient.apply(add_mlp(x, *tensors, backend="triton")).sum() + x.sum()).backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_second_derivatives():
    leaves = [t.requires_grad_() for t in mlp_inputs((5,), 16, 24, torch.float32)]
    upstream = torch.randn(5, 16, device=DEVICE, requires_grad=True)
    found = []
    for backend in ("triton", "reference"):
        out = add_mlp(*leaves, backend=backend)
        grads = torch.autograd.grad(out, leaves, upstream, create_graph=True)
        size = sum(grad.square().sum() for grad in grads)
        found.append(torch.autograd.grad(size, [*leaves[:-1], upstream]))  # b2 changes no gradient
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-3)


def test_keeps_hidden_values_only_where_gradients_are_needed(monkeypatch):
    kept = []
    op = fused_mlp._mlp_op

    def recorded(*args):
        out, hidden = op(*args)
        kept.append(tuple(hidden.shape))
        return out, hidden

    monkeypatch.setattr(fused_mlp, "_mlp_op", recorded)
    x, *tensors = mlp_inputs((3, 5), 16, 24, torch.float32)
    add_mlp(x, *tensors, backend="triton")
    tensors[-1].requires_grad_()
    with torch.no_grad():
        add_mlp(x, *tensors, backend="triton")
    add_mlp(x, *tensors, backend="triton")
    assert kept == [(0, 24), (0, 24), (15, 24)]


@pytest.mark.parametrize("save", [False, True])
def test_what_pytorch_is_told_of_the_operator(save):
    x, *tensors = mlp_inputs((3, 5), 16, 24, DTYPES[-1])
    arguments = (x.float(), *tensors, None, None, None, 1e-5, DTYPES[-1], [], save)
    opcheck(torch.ops.inline_attention.mlp.default, arguments, test_utils=("test_schema", "test_faketensor"))


@triton.jit
def gelu_kernel(p_x, p_out, n, FUNCTION: tl.constexpr, PRECISION: tl.constexpr, BN: tl.constexpr):
    o = tl.program_id(0) * BN + tl.arange(0, BN)
    b_x = tl.load(p_x + o, mask=o < n, other=0.0)
    tl.store(p_out + o, FUNCTION(b_x, PRECISION), mask=o < n)


def applied(function, x, precision="tf32"):
    out = torch.empty_like(x)
    gelu_kernel[(triton.cdiv(len(x), 4096),)](x, out, len(x), FUNCTION=function, PRECISION=precision, BN=4096)
    return out


NEAR_ZERO = torch.logspace(-6, 0, 1000)
GELU_INPUTS = torch.cat([torch.linspace(-12, 12, 20_001), NEAR_ZERO, -NEAR_ZERO])


@pytest.mark.parametrize(("precision", "error"), [("ieee", 5e-7), ("tf32", 5e-6)])
def test_the_slope_of_gelu(precision, error):
    x = GELU_INPUTS.to(DEVICE)
    exact = torch.ops.aten.gelu_backward(torch.ones_like(x).double(), x.double())
    assert (applied(gelu_slope, x, precision) - exact).abs().max() <= error
    slope = applied(gelu_slope, torch.tensor([100.0, -100.0, torch.nan], device=DEVICE), precision)
    assert slope[0] == 1
    assert abs(slope[1]) < 1e-9
    assert slope[2].isnan()


def test_gelu_is_exact_to_float32():
    x = GELU_INPUTS.to(DEVICE)
    out = applied(gelu, x)
    exact = torch.nn.functional.gelu(x.double())
    of_erf = (torch.nn.functional.gelu(x) - exact).abs().max()
    error = (out - exact).abs()
    assert error.max() <= max(3e-7, of_erf)  # where x is large that is the rounding of x
    assert (error / exact.abs())[x.abs() < 1].max() <= 1e-5
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0], device=DEVICE)
    out = applied(gelu, special)
    assert out[0] == torch.inf
    assert -1e-9 < out[1] <= 0
    assert out[2].isnan()
    assert out[3] == 0


def test_rows_far_from_zero():
    """A layer norm that subtracts squares would lose the spread."""
    x, *tensors = mlp_inputs((7,), 48, 32, torch.float32)
    error, allowed = mlp_errors((x + 1000, *tensors), None, mean=1000.0)
    assert error <= allowed


def test_any_strides():
    x, *tensors = mlp_inputs((4, 6), 16, 32, torch.float32)
    with torch.no_grad():
        expected = add_mlp(x, *tensors, backend="triton")
        tensors = [torch.stack([t, t], -1)[..., 0] for t in tensors]
        assert torch.equal(add_mlp(x.mT.contiguous().mT, *tensors, backend="triton"), expected)


def test_bit_identical_from_run_to_run():
    inputs = mlp_inputs((9,), 48, 64, DTYPES[-1])
    call = partial(fused_mlp.add_mlp, *split(inputs), None, 1e-5, DTYPES[-1], SPLIT)
    assert torch.equal(call(), call())


def split(inputs):
    x, *tensors = inputs
    return x, tensors[:2], tensors[2:]


def test_auto_is_the_reference_until_a_table_says_otherwise(monkeypatch):
    inputs = mlp_inputs((4,), 16, 32, torch.float32)
    ran = []
    monkeypatch.setattr(fused_mlp, "add_mlp", lambda *args: ran.append(args[-1]) or inputs[0])
    with torch.no_grad():
        add_mlp(*inputs)
        assert ran == []
        with use_backend("triton"):
            add_mlp(*inputs)
        assert ran == [None]


def test_another_gpu_of_the_same_capability_has_no_measurements(monkeypatch):
    device = torch.device("cuda", 0)
    for count, measured in ((132, True), (78, False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        monkeypatch.setattr(gpu, "limits_of", lambda device, count=count: gpu.Limits(count, 227 * 1024))
        assert bool(fused_mlp.wins_of(device, 192, 768, "inference")) == measured


@pytest.mark.parametrize("use", fused_mlp.USES)
def test_the_table_decides_by_width_and_rows(use, monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(gpu, "chip_of", lambda device: gpu.H200)
    wins = {key: {} for key in fused_mlp.USES}
    wins[use] = {(gpu.H200, 192, 768): (Win(100, 200, SPLIT), Win(1000, 2000, TILES[0]))}
    monkeypatch.setattr(fused_mlp, "WINS", wins)
    with FakeTensorMode():
        found = [
            fused_mlp.winning_tile(torch.empty(rows, width, device="cuda"), 768, dtype, use)
            for rows, width, dtype in [
                (99, 192, torch.bfloat16), (100, 192, torch.bfloat16), (2000, 192, torch.float16),
                (2001, 192, torch.bfloat16), (150, 384, torch.bfloat16), (150, 192, torch.float32),
            ]
        ]  # fmt: skip
    assert found == [None, SPLIT, TILES[0], None, None, None]


def test_the_table_of_the_use_is_asked(monkeypatch):
    asked = []
    monkeypatch.setattr(fused_mlp, "winning_tile", lambda *args: asked.append(args[-1]))
    x, *tensors = mlp_inputs((4,), 16, 32, torch.float32)
    add_mlp(x, *tensors)
    add_mlp(x, *tensors, projection=last_step(x))
    tensors[0].requires_grad_()
    add_mlp(x, *tensors)
    add_mlp(x, *tensors, projection=last_step(x))
    with torch.no_grad():
        add_mlp(x, *tensors)
    assert asked == ["inference", "projected", "inference", "training", "training", "inference"]


@pytest.mark.parametrize("width", [16, 48, 64, 96, 192, 320, 384, 448, 512, 23, 7])
def test_two_blocks_hold_a_row(width):
    first, second = halves(width)
    assert first + second >= width
    assert all(n == 0 or (n >= 16 and n & (n - 1) == 0) for n in (first, second))
    if width in (16, 48, 64, 96, 192, 320, 384, 512):
        assert first + second == width  # nothing is computed in vain


@pytest.mark.parametrize("memory", [99, 163, 227])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tile_fits_or_the_reference_runs(memory, dtype, monkeypatch):
    limits = gpu.Limits(100, memory * 1024)
    monkeypatch.setattr(fused_mlp, "TILES", (Tile(128, 64, 8, 3), Tile(32, 32, 4, 2), Tile(16, 16, 4, 1)))
    monkeypatch.setattr(gpu, "limits_of", lambda _: limits)
    for width in (64, 192, 512):
        if fused_mlp._why_not_memory(width, dtype, torch.device("cuda:0")):
            assert fused_mlp.memory_of(Tile(16, 16, 4, 1), width, dtype) > limits.shared_memory
            continue
        for rows in (1, 197, 50_432):
            tile = choose_tile(rows, width, 4 * width, dtype, limits)
            assert fused_mlp.memory_of(tile, width, dtype) <= limits.shared_memory
            assert tile.splits * tile.hidden <= 4 * width
            if rows == 197:
                assert tile.splits > 1  # else most multiprocessors are idle


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(x=torch.zeros(2, 17)), r"x has shape \(2, 17\); expected \(…, 16\)"),
        (dict(w2=torch.zeros(32, 16)), r"w2 has shape \(32, 16\); expected \(16, 32\)"),
        (dict(b1=torch.zeros(16)), r"b1 has shape \(16,\); expected \(32,\)"),
        (dict(w1=torch.zeros(32)), r"w1 has shape \(32,\); expected \(hidden channels, channels\)"),
        (dict(x=torch.zeros(2, 16, dtype=torch.float16)), "x is torch.float16 and w1 is torch.float32"),
    ],
)
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_bad_inputs_are_named(change, message, backend):
    names = ("x", "norm_weight", "norm_bias", "w1", "b1", "w2", "b2")
    given = dict(zip(names, mlp_inputs((2,), 16, 32, torch.float32), strict=True))
    given |= {name: tensor.to(DEVICE) for name, tensor in change.items()}
    with pytest.raises(ValueError, match=message):
        add_mlp(**given, backend=backend)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(attended=torch.zeros(3, 16)), r"projection\.attended has shape \(3, 16\); expected that of x, \(2, 16\)"),
        (dict(weight=torch.zeros(16, 8)), r"projection\.weight has shape \(16, 8\); expected \(16, 16\)"),
        (dict(bias=torch.zeros(1)), r"projection\.bias has shape \(1,\); expected \(16,\)"),
    ],
)
def test_bad_projections_are_named(change, message):
    inputs = mlp_inputs((2,), 16, 32, torch.float32)
    last = last_step(inputs[0])._replace(**{name: tensor.to(DEVICE) for name, tensor in change.items()})
    with pytest.raises(ValueError, match=message):
        add_mlp(*inputs, projection=last)


def test_says_why_not():
    with pytest.raises(ValueError, match="up to 512 channels, not 528"), torch.no_grad():
        add_mlp(*mlp_inputs((2,), 528, 16, torch.float32), backend="triton")


def test_compiles_as_one_graph():
    inputs = mlp_inputs((3, 5), 16, 32, torch.float32)

    def call(*inputs):
        return add_mlp(*inputs, backend="triton")

    compiled = torch.compile(call, fullgraph=True, backend="inductor" if GPU else "aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs), add_mlp(*inputs, backend="reference"))
    leaves = [t.requires_grad_() for t in inputs]
    results = []
    for f in (compiled, lambda *inputs: add_mlp(*inputs, backend="reference")):
        out = f(*leaves)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_compiled_training_keeps_what_enters_the_gelu_and_nothing_as_wide():
    leaves = [t.requires_grad_() for t in mlp_inputs((15,), 16, 24, torch.float32)]

    def call(*inputs):
        return add_mlp(*inputs, backend="triton")

    out = torch.compile(call, fullgraph=True, backend="aot_eager_decomp_partition")(*leaves)
    kept = [tuple(t.shape) for t in out.grad_fn.saved_tensors]
    assert [shape for shape in kept if shape[0] == 15] == [(15, 16), (15, 24)]


def test_flop_formula():
    from torch.utils.flop_counter import FlopCounterMode

    inputs = mlp_inputs((3, 5), 16, 32, torch.float32)
    for projection in (None, last_step(inputs[0])):
        counts = []
        for backend in ("triton", "reference"):
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                add_mlp(*inputs, projection=projection, backend=backend)
            counts.append(counter.get_total_flops())
        assert counts[0] == counts[1] > 0
