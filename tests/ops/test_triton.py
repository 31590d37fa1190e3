"""The Triton kernels against float64 and against the reference backend.

On a machine without a GPU they run in Triton's interpreter, on the CPU, in float32 and float16 and on small shapes:
its bfloat16 is wrong. There the kernels' configuration is shrunk so that every loop turns more than once.
"""

import functools
import re
import traceback
import warnings

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from kernel_cases import (
    DEVICE,
    DTYPES,
    FAMILY,
    GPU,
    INLINE,
    PATHS,
    SPECIALIZATIONS,
    TANGENT,
    Kind,
    NoGradient,
    compare,
    configured,
    errors,
    make_inputs,
    not_made,
    random_case,
    run,
)
from torch.autograd import forward_ad
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from inline_attention.ops import (
    FEATURE_MAPS,
    FeatureMap,
    backends,
    fused,
    gpu,
    inline_attention,
    inline_attention_packed,
    inline_attention_projected,
    linear_attention,
    linear_attention_packed,
    tangent_attention,
)
from inline_attention.ops.fused import config, plan
from inline_attention.ops.fused.operators import forward_op
from inline_attention.ops.fused.plan import make_plan, make_tiles, split, tile_rows

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture(params=["fused", "split"])
def path(request, monkeypatch):
    """Both paths through the kernels, whichever the heuristic would choose."""
    monkeypatch.setattr(config, "CONFIG", config.CONFIG._replace(**PATHS[request.param]))
    return request.param


def on_both_paths(names, cases):
    """Each case on both paths. In `make test` the interpreter, which is slow, runs each on one path, in turn."""
    slow = [] if GPU else [pytest.mark.slow]
    return pytest.mark.parametrize(
        ("path", *names),
        [
            pytest.param(path, *case, marks=[] if (i + j) % 2 == 0 else slow)
            for i, case in enumerate(cases)
            for j, path in enumerate(PATHS)
        ],
        indirect=["path"],
        ids=str,
    )


def assert_accurate(exact, plain, fast, what=""):
    for name, error, allowed in errors(exact, plain, fast):
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e} {what}"[:400]


def check(*inputs, kind=INLINE, mean=0.0):
    for name, error, allowed in compare(*inputs, kind=kind, mean=mean):
        what = f"{tuple(inputs[0].shape)}, {inputs[0].dtype}, {kind}, {inputs[3]}"
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e} for {what}"[:400]


def test_bit_identical_from_run_to_run(path):
    inputs = make_inputs(2, (5, 18) if GPU else (3, 5), 1, 2, 16, DTYPES[-1])
    first, second = (run(*inputs, backend="triton") for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


SHAPES = {  # batch, grid, prefix, heads, head_dim
    "one token": (1, (1, 1), 0, 1, 16),
    "row": (1, (1, 19), 0, 2, 16),
    "column": (2, (7, 1), 1, 1, 32),
    "class token": (2, (3, 5), 1, 3, 16),
    "several prefix tokens": (1, (2, 3), 18, 1, 16),
    "wider than a tile": (1, (3, 18), 1, 1, 16),
    "d=24": (1, (3, 4), 0, 3, 24),
    "d=40": (1, (2, 3), 0, 1, 40),
    "d=48": (1, (2, 3), 1, 2, 48),
    "d=80": (1, (2, 3), 0, 1, 80),
    "d=128": (1, (2, 2), 0, 1, 128),
    "windows": (640, (7, 7), 0, 1, 32) if GPU else (5, (2, 3), 0, 1, 16),
}


# The interpreter is slow: there each shape runs in one dtype, in turn.
CASES = [(s, d) for i, s in enumerate(SHAPES) for j, d in enumerate(DTYPES) if GPU or i % len(DTYPES) == j]


@on_both_paths(("shape", "dtype"), CASES)
def test_forward_and_gradients(shape, dtype, path):
    batch, grid, prefix, heads, head_dim = SHAPES[shape]
    check(*make_inputs(batch, grid, prefix, heads, head_dim, dtype))


EDGES = [(1, 1), (4, 1), (1, 4), (5, 2), (9, 2), (5, 3), (3, 8), (3, 9), (2, 15), (3, 16), (2, 17), (3, 33)]


@on_both_paths(("grid", "prefix"), [(grid, (0, 1, 5)[i % 3]) for i, grid in enumerate(EDGES)])
def test_edges_of_tiles(grid, prefix, path):
    """Maps of fewer columns than a tile, of as many and of more, and with steps of several rows; in half precision."""
    check(*make_inputs(2, grid, prefix, 2, 16, torch.float16, masked=grid[1] % 2 == 0))


@on_both_paths(("kind",), [(TANGENT,), (FAMILY[0],), (FAMILY[1],)])
def test_edges_of_tiles_in_the_family(kind, path):
    for grid in ((3, 5), (2, 18)):
        check(*make_inputs(1, grid, 1, 1, 16, torch.float16, masked=True), kind=kind)


def test_few_tokens_far_from_zero(path):
    """Keys less their mean have a sum of zero, which the gradient of values needs."""
    check(*make_inputs(1, (2, 8), 0, 1, 64, torch.float32, masked=True, mean=4.0, seed=2), mean=4.0)


@on_both_paths(("feature_map", "masked"), [("relu", True), ("leaky_relu", False), ("exp", True)])
def test_feature_maps_and_masks(feature_map, masked, path):
    check(*make_inputs(2, (3, 4), 1, 2, 16, torch.float32, masked=masked), kind=Kind(feature_map=feature_map))


@on_both_paths(("kind",), [(kind,) for kind in FAMILY])
def test_family(kind, path):
    """Heads that share a block, or fill it if values have fewer channels."""
    check(*make_inputs(2, (3, 4), 1, 3, 32 if kind.value_channels else 16, torch.float32, masked=True), kind=kind)


TANGENTS = [  # batch, grid, prefix, heads, head_dim, dtype, masked, channels of values
    (2, (3, 7), 1, 3, 16, torch.float16, True, None),
    (1, (5, 5), 0, 1, 32, torch.float16, False, 16),
    (2, (2, 9), 0, 4, 16, torch.float32, True, 8),
    (1, (1, 1), 0, 1, 24, torch.float32, False, None),
]


@on_both_paths(("case",), [(case,) for case in TANGENTS])
def test_tangents(case, path):
    """Also values narrower than keys, where heads share a block and where they do not."""
    *sizes, masked, channels = case
    check(*make_inputs(*sizes, masked=masked), kind=TANGENT._replace(value_channels=channels))


@on_both_paths(("heads", "dtype"), [(1, torch.float32), (3, torch.float16), (2, torch.float32), (1, torch.float16)])
def test_scores_that_rise_over_the_tokens(heads, dtype, path):
    """The large scores come last, after absent tokens that fill the first step.

    Scores differ by about 100, so a share that is not relative to the largest one would overflow.
    """
    qkv, weight, grad, options = make_inputs(1, (12, 16), 0, heads, 16, dtype, masked=True)
    rising = torch.linspace(-4, 12, qkv.shape[1], device=DEVICE, dtype=dtype).clamp(max=4)
    qkv[..., 0, :, 0] += 50
    qkv[..., 1, :, 0] += rising[:, None]
    options["token_mask"][:, :40] = False
    inputs = (qkv, weight, grad, options)
    exact = run(*inputs, backend="reference", dtype=torch.float64, kind=TANGENT)
    tolerance = 1e-3 if dtype == torch.float32 else 1e-2  # the covariance of the few tokens that count cancels
    for name, x in run(*inputs, backend="triton", kind=TANGENT).items():
        assert (x - exact[name]).norm() <= tolerance * exact[name].norm(), name


@pytest.mark.parametrize("save", [True, False])
@pytest.mark.parametrize("heads", [1, 3])
def test_what_tangents_leave_for_the_backward(heads, save, path, monkeypatch):
    """The same on both paths. Short sequences take one launch, and without a backward no score is stored."""
    qkv, _, _, options = make_inputs(2, (3, 7), 0, heads, 16, torch.float32, masked=True)
    q, k, v = qkv.unbind(2)
    anchor, mask = q.mean(1, keepdim=True), options["token_mask"]
    launched, launch = [], gpu.launch
    monkeypatch.setattr(gpu, "launch", lambda kernel, grid: launched.append(kernel.__name__) or launch(kernel, grid))
    arguments = ([qkv], None, mask, None, None, None, anchor, "subtract", "identity", True, 0.25)
    _, *left = forward_op(*arguments, [3, 7], 0, save, "")
    scores = (0.25 * (anchor * k).sum(-1)).masked_fill(~mask[..., None], -torch.inf).transpose(1, 2)
    shares = scores.softmax(-1)
    _, means, stored, lse = left
    if path == "fused":
        assert launched == ["forward_kernel"]
        assert all((x.numel() > 0) == save for x in left)
    else:
        assert launched == ["state_kernel", "finish_kernel", "output_kernel"]
        assert (stored.numel() > 0) == save
    if save:
        stored = stored.masked_fill(~mask[:, None], -torch.inf)
        torch.testing.assert_close((stored - lse[..., None]).exp().float(), shares)
        mean = torch.einsum("bhn,bnhe->bhe", shares, v)
        torch.testing.assert_close(means[:, heads * 16 :].view_as(mean), mean)
    opcheck(torch.ops.inline_attention.forward.default, (*arguments, [3, 7], 0, save, ""), test_utils=FACTS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_an_anchor_has_its_own_dtype(dtype, path):
    """It is read as it is, and its gradient is written in its dtype."""
    qkv, _, grad, _ = make_inputs(2, (3, 7), 0, 2, 16, torch.float32, local=False)
    anchor = qkv[:, :, 0].mean(1, keepdim=True).to(dtype).requires_grad_()
    found = {}
    for backend in ("reference", "triton"):
        out = tangent_attention(*qkv.unbind(2), anchor=anchor, backend=backend)
        (found[backend],) = torch.autograd.grad(out, anchor, grad)
    assert found["triton"].dtype == dtype
    eps = max(torch.finfo(dtype).eps, 1e-5)
    torch.testing.assert_close(found["triton"].float(), found["reference"].float(), rtol=eps, atol=eps)


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:divide by zero")  # by the interpreter
@pytest.mark.parametrize("size", [90.0, 1e4])
def test_elu_far_from_zero(size, path):
    """Where exp(x) overflows, x counts, and far below zero nothing is left but φ(0)."""
    qkv, weight, grad, options = make_inputs(2, (3, 7), 0, 2, 16, torch.float32)
    qkv[:, :, :2] = torch.where(qkv[:, :, :2] > 0, size, -size) + qkv[:, :, :2]
    kind = Kind("magnitude", "elu_plus_one")
    expected, found = (run(qkv, weight, grad, options, backend=name, kind=kind) for name in ("reference", "triton"))
    for name, x in expected.items():
        assert found[name].isfinite().all(), name
        torch.testing.assert_close(found[name], x, rtol=1e-3, atol=1e-4 * x.abs().max().item(), msg=name)


FACTS = ("test_schema", "test_faketensor")  # inputs stay as they are; shapes, dtypes and strides are those of the fake


class RecordedOperators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "inline_attention":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kind", "local"), [(INLINE, True), (TANGENT, False)], ids=str)
def test_what_pytorch_is_told_of_the_operators(kind, local, path):
    with RecordedOperators() as recorded:
        run(*make_inputs(2, (2, 3), 1, 2, 16, torch.float32, local=local, masked=True), backend="triton", kind=kind)
    assert [func.name() for func, _ in recorded.calls] == ["inline_attention::forward", "inline_attention::backward"]
    for func, args in recorded.calls:
        opcheck(func, args, test_utils=FACTS)


@pytest.mark.parametrize("kind", FAMILY[:2], ids=str)
def test_family_packed(kind, path):
    grids, bounds = [(2, 3), (1, 1), (3, 5)], [0, 7, 9, 25]
    tensors = [x.requires_grad_() for x in torch.randn(3, bounds[-1], 2, 16, device=DEVICE)]
    weight = (torch.randn(3, 2, 16, 9, device=DEVICE) / 9).requires_grad_()
    options = dict(normalization=kind.normalization, feature_map=kind.feature_map, num_prefix_tokens=1)
    grad = torch.randn(bounds[-1], 2, 16, device=DEVICE)
    results = []
    for backend in ("triton", "reference"):
        out = linear_attention_packed(
            *tensors, cu_seqlens=bounds, grids=grids, local_weight=weight, backend=backend, **options
        )
        results.append([out, *torch.autograd.grad(out, [*tensors, weight], grad)])
    for fast, exact in zip(*results, strict=True):
        torch.testing.assert_close(fast, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_without_local_residual(masked, path):
    check(*make_inputs(2, (3, 7), 1, 2, 16, torch.float32, local=False, masked=masked))


@pytest.mark.parametrize("part", [0, 1], ids=["q", "k"])
@pytest.mark.parametrize("feature_map", ["identity", "relu", "leaky_relu", "exp", "elu_plus_one"])
def test_nan_is_not_swallowed(feature_map, part, path):
    qkv, weight, grad, options = make_inputs(1, (3, 4), 0, 1, 16, torch.float32)
    qkv[0, 5, part, 0, 3] = torch.nan
    kind = Kind("subtract", feature_map)
    expected, found = (run(qkv, weight, grad, options, backend=name, kind=kind) for name in ("reference", "triton"))
    for name, x in expected.items():
        assert x.isnan().any() == found[name].isnan().any(), name
        assert found[name][x.isnan()].isnan().all(), name


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # by the interpreter
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("where", ["v", "grad"])
def test_nan_goes_as_far_as_in_the_reference(where, dtype, value, path):
    """Sums of neighbours are products with zeros in half precision, which turn an infinity into NaN too."""
    qkv, weight, grad, options = make_inputs(1, (4, 5), 0, 1, 16, dtype)
    (qkv[:, :, 2] if where == "v" else grad)[0, 7, 0, 3] = value
    expected, found = (run(qkv, weight, grad, options, backend=name) for name in ("reference", "triton"))
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(expected[name].isfinite(), found[name].isfinite()), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [INLINE, TANGENT], ids=str)
def test_inputs_far_from_zero(kind, dtype, path):
    large = GPU and path == "split"  # what is done at once is short
    check(*make_inputs(1, (64, 64) if large else (3, 7), 1, 2, 16, dtype, mean=4.0), kind=kind, mean=4.0)


def test_a_state_beyond_the_range_of_float16(path):
    """The covariance of large keys and values is beyond it. Outputs and gradients are within it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 1, 21, 1, 16, generator=generator)
    qkv = torch.stack([x[0] / 1000, 800 * x[1], 800 * (x[1] + x[2])], 2).to(DEVICE, torch.float16)
    check(qkv, None, (x[3] / 1000).to(DEVICE, torch.float16), {})


@pytest.mark.parametrize("kind", [INLINE, TANGENT], ids=str)
def test_absent_tokens_may_hold_anything(kind, path):
    qkv, weight, grad, options = make_inputs(1, (3, 5), 1, 1, 16, torch.float32, masked=True)
    qkv[~options["token_mask"]] = torch.nan
    clean = qkv.nan_to_num(0.0)
    first, second = (run(x, weight, grad, options, backend="triton", kind=kind) for x in (qkv, clean))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_queries_of_another_length(path):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 9, 2, 16, generator=generator).to(DEVICE)
    k, v = torch.randn(2, 2, 21, 2, 16, generator=generator).to(DEVICE)
    mask = (torch.rand(2, 21, generator=generator) > 0.3).to(DEVICE)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    results = []
    for backend in ("reference", "triton"):
        out = inline_attention(q, k, v, token_mask=mask, backend=backend)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@on_both_paths(
    ("given", "local"),
    [(("token_mask",), True), (("query_mask",), True), (("token_mask", "query_mask"), True),
     (("token_mask", "query_mask"), False)],
)  # fmt: skip
def test_masks_of_queries_and_keys_are_independent(given, local, path):
    """There may be as many queries as keys, and absent tokens may hold anything."""
    qkv, weight, grad, options = make_inputs(1, (3, 7), 1, 1, 16, torch.float32, local=local, masked=True)
    masks = dict(token_mask=options["token_mask"], query_mask=options["query_mask"].flip(1))
    options |= {name: masks[name] if name in given else None for name in masks}
    exact = run(qkv, weight, grad, options, backend="reference", dtype=torch.float64)
    plain = run(qkv, weight, grad, options, backend="reference")
    clean = run(qkv, weight, grad, options, backend="triton")
    assert_accurate(exact, plain, clean)
    if "query_mask" in given:
        qkv[..., 0, :, :][~masks["query_mask"]] = torch.nan
        grad[~masks["query_mask"]] = torch.nan
    if "token_mask" in given:
        qkv[..., 1:, :, :][~masks["token_mask"]] = torch.nan
    poisoned = run(qkv, weight, grad, options, backend="triton")
    assert all(torch.equal(clean[name], poisoned[name]) for name in clean)


LAYOUTS = {
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "tokens first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "separate": torch.Tensor.contiguous,
    "sliced": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
}


@pytest.mark.parametrize("dtype", DTYPES if GPU else DTYPES[:1])
def test_any_strides(dtype, path):
    """Inputs and the incoming gradient may have any strides. The results are the same to the bit."""
    qkv, weight, grad, options = make_inputs(2, (3, 5), 0, 2, 16, dtype)
    expected = run(qkv, weight, grad, options, backend="triton")
    for layout in LAYOUTS.values():
        leaves = [layout(x).requires_grad_() for x in qkv.unbind(2)]
        out = inline_attention(*leaves, local_weight=weight, backend="triton", **options)
        results = [out, *torch.autograd.grad(out, leaves, layout(grad))]
        for name, x in zip(("out", "dq", "dk", "dv"), results, strict=True):
            assert torch.equal(x, expected[name]), name


def test_tokens_far_apart(path):
    """Very many short sequences with tokens first have such strides. A step over tokens then exceeds 32 bits."""
    tokens, stride = (65, 2**25) if GPU else (17, 2**31 // 15 + 1)
    qkv, _, grad, options = make_inputs(1, (1, tokens), 0, 1, 16, torch.float16, local=False)
    expected = run(qkv, None, grad, options, backend="triton")
    # From NumPy: PyTorch would fill all of it with NaN here, and a system gives memory when it is first written.
    memory = torch.from_numpy(np.empty(tokens * stride, np.float16)).to(DEVICE)
    q, k, v, grad = memory.as_strided((4, 1, tokens, 1, 16), (16, tokens * stride, stride, 16, 1)).copy_(
        torch.stack([*qkv.unbind(2), grad])
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = inline_attention(*leaves, backend="triton", **options)
    results = [out, *torch.autograd.grad(out, leaves, grad)]
    for name, x in zip(("out", "dq", "dk", "dv"), results, strict=True):
        assert torch.equal(x, expected[name]), name


MASKS = {
    "expanded": lambda mask: mask[:1].expand(mask.shape),
    "sliced": lambda mask: torch.cat([mask, ~mask], 1)[:, : mask.shape[1]],
    "transposed": lambda mask: mask.T.contiguous().T,
}


@on_both_paths(("layout",), [(layout,) for layout in MASKS])
def test_any_strides_of_a_mask(layout, path):
    qkv, weight, grad, options = make_inputs(2, (3, 3), 0, 1, 16, torch.float32, masked=True)
    mask = MASKS[layout](options["token_mask"])
    assert not mask.is_contiguous()
    check(qkv, weight, grad, options | dict(token_mask=mask, query_mask=mask))


@pytest.mark.parametrize("shape", [(0, 6, 2, 16), (2, 6, 0, 16)])
def test_nothing_to_do(shape, path):
    batch, _, heads, head_dim = shape
    check(*make_inputs(batch, (2, 3), 0, heads, head_dim, torch.float32))


@pytest.mark.parametrize("attend", [functools.partial(inline_attention, feature_map="exp"), tangent_attention])
@pytest.mark.parametrize("queries", [6, 4])
def test_a_sample_without_tokens_is_zero(queries, attend, path):
    q, k, v = torch.randn(3, 2, 6, 1, 16, device=DEVICE)
    leaves = [x.requires_grad_() for x in (q[:, :queries], k, v)]
    mask = torch.tensor([[False] * 6, [True] * 6], device=DEVICE)
    out = attend(*leaves, token_mask=mask, backend="triton")
    for x in (out, *torch.autograd.grad(out.sum(), leaves)):
        assert x.isfinite().all()
        assert not x[0].any()


def test_no_query(path):
    q = torch.zeros(2, 0, 1, 16, device=DEVICE, requires_grad=True)
    k = torch.ones(2, 5, 1, 16, device=DEVICE, requires_grad=True)
    out = inline_attention(q, k, k, backend="triton")
    assert out.shape == q.shape
    assert not torch.autograd.grad(out.sum(), k)[0].any()


@pytest.mark.parametrize("kind", [TANGENT, FAMILY[3]], ids=str)
def test_autocast_does_not_reach_the_backward(kind, path, monkeypatch):
    """A loop may call `backward` inside its autocast region. Gradients of a scaled loss would overflow float16."""
    qkv, weight, grad, options = make_inputs(1, (2, 3), 0, 1, 16, torch.float32, masked=True)
    inputs = (qkv, weight, 1e5 * grad, options)
    expected = run(*inputs, backend="triton", kind=kind)
    differentiate = torch.autograd.grad

    def inside(*args):
        with torch.autocast(DEVICE, torch.float16):
            return differentiate(*args)

    monkeypatch.setattr(torch.autograd, "grad", inside)
    for name, x in run(*inputs, backend="triton", kind=kind).items():
        assert torch.equal(x, expected[name]), name


def test_no_gradient_arrives():
    """It counts as zero."""
    q = torch.randn(1, 4, 1, 16, device=DEVICE, requires_grad=True)
    (NoGradient.apply(inline_attention(q, q, q, backend="triton")).sum() + q.sum()).backward()
    assert torch.equal(q.grad, torch.ones_like(q))


def test_the_backward_fills_nothing_with_zeros(path):
    """As it would for the gradients of the state and the scores, which nobody uses."""
    qkv, _, grad, options = make_inputs(1, (2, 3), 0, 2, 16, torch.float32, local=False)
    out = tangent_attention(*qkv.requires_grad_().unbind(2), backend="triton", **options)
    with torch.profiler.profile() as profiled:
        out.backward(grad)
    assert "aten::zeros" not in {event.key for event in profiled.key_averages()}


def test_a_frozen_local_weight(path):
    """Its gradient is neither computed nor returned. The other gradients do not change."""
    from torch.utils.flop_counter import FlopCounterMode

    qkv, weight, grad, options = make_inputs(1, (3, 5), 1, 2, 16, torch.float32)
    qkv.requires_grad_()
    results, flops = [], []
    for frozen in (False, True):
        local_weight = weight.clone().requires_grad_(not frozen)
        with FlopCounterMode(display=False) as counter:
            out = inline_attention(*qkv.unbind(2), local_weight=local_weight, backend="triton", **options)
            results.append(torch.autograd.grad(out, qkv if frozen else [qkv, local_weight], grad)[0])
        flops.append(counter.get_total_flops())
    assert torch.equal(*results)
    assert flops[0] - flops[1] == 2 * qkv.shape[1] * 32 * 9


def test_parts_that_tensor_cores_sum_are_short(monkeypatch):
    """Even if few programs are enough, there are more parts, which are summed in more than one step."""
    monkeypatch.setattr(
        config, "CONFIG", config.CONFIG._replace(tokens=16, fused_tokens=0, state_programs=0, part=32, summed_parts=2)
    )
    inputs = make_inputs(1, (10, 10), 1, 1, 16, torch.float32)
    q, k, _ = inputs[0].unbind(2)
    plan = make_plan(q, k, k, None, (10, 10), 1)
    assert split(plan, 101) == (4, 4)
    check(*inputs)


def test_no_more_parts_than_work():
    q = torch.empty(1, 50, 1, 32, device=DEVICE)
    plan = make_plan(q, q, q, None, (1, 1), 0)
    steps = -(-50 // config.CONFIG.tokens)
    assert split(plan, 50).number == steps
    assert split(plan, 50, rows=steps + 1).number == steps + 1


@pytest.mark.parametrize(
    ("tokens", "programs", "expected"),
    [
        (197, 6, (4, 4)),  # one image of 224 pixels
        (197, 3, (4, 4)),
        (577, 6, (10, 16)),
        (4097, 6, (65, 128)),
        (1600, 192, (4, 4)),
        (65_536, 6, (128, 128)),
        (1 << 20, 6, (512, 512)),  # no part is longer than tensor cores may sum
        (1, 1, (1, 1)),
        (197, 10_000, (1, 1)),
    ],
)
def test_partial_sums_follow_the_length_the_batch_and_the_gpu(tokens, programs, expected, monkeypatch):
    monkeypatch.setattr(config, "CONFIG", config.Config())  # that of a GPU
    monkeypatch.setattr(gpu, "limits_of", lambda _: gpu.Limits(multiprocessors=132, shared_memory=0))
    q = torch.empty(programs, 1, 1, 32)
    assert split(make_plan(q, q, q, None, (1, 1), 0), tokens) == expected


@pytest.mark.parametrize("grid", [(1, 70), (2, 50)])
def test_few_long_rows(grid, monkeypatch):
    """Programs share the sums of the local weight's gradient by columns too."""
    monkeypatch.setattr(config, "CONFIG", config.CONFIG._replace(fused_tokens=0, state_programs=8))
    check(*make_inputs(1, grid, 1, 1, 16, torch.float32))


def test_a_batch_that_is_left_open_stays_open():
    """The most parts are a plain number then: torch.compile need not know the batch for it."""
    from torch.fx.experimental.proxy_tensor import make_fx

    seen = []

    def allocate(q):
        plan = make_plan(q, q, q, None, (1, 1), 0)
        seen.append((plan.programs, split(plan, q.shape[1]).most))
        return q.new_empty(plan.programs, seen[-1][1])

    graph = make_fx(allocate, tracing_mode="symbolic")(torch.empty(3, 300, 2, 32, device=DEVICE))
    ((programs, most),) = seen
    assert isinstance(programs, torch.SymInt)
    assert isinstance(most, int)
    (q,) = graph.graph.find_nodes(op="placeholder")
    assert not q.meta["val"].shape[0].node.maybe_as_int()


@on_both_paths(("sizes",), [((3,),), ((1, 2),), ((2, 1),), ((1, 1, 1),)])
def test_projections_that_hold_several(sizes, path):
    qkv, weight, grad, options = make_inputs(1, (3, 4), 1, 2, 16, torch.float32)
    results = []
    for backend in ("reference", "triton"):
        parts = [x.contiguous().requires_grad_() for x in qkv.split(sizes, 2)]
        out = inline_attention_projected(*parts, local_weight=weight, backend=backend, **options)
        results.append([out, *torch.autograd.grad(out, parts, grad)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("widest", [(1, 17), (2, 4)], ids=str)
def test_packed(widest, local, path):
    grids = [(2, 3), (1, 1), (5, 2), widest]
    lengths = [1 + h * w for h, w in grids]
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(DEVICE)
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(3, sum(lengths), 2, 16, generator=generator).to(DEVICE).requires_grad_()
    weight = torch.randn(len(grids), 2, 16, 9, generator=generator).to(DEVICE).requires_grad_() if local else None
    leaves = [qkv] if weight is None else [qkv, weight]
    results = []
    for backend in ("reference", "triton"):
        out = inline_attention_packed(
            *qkv, cu_seqlens=bounds, grids=grids, local_weight=weight, num_prefix_tokens=1, backend=backend
        )
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_packed_compiles_as_one_graph():
    """This holds if the layout is given as numbers."""

    def attend(qkv, weight, bounds, grids):
        return inline_attention_packed(*qkv, cu_seqlens=bounds, grids=grids, local_weight=weight, backend="triton")

    compiled = torch.compile(attend, fullgraph=True, backend="inductor" if GPU else "aot_eager")
    for grids in [(2, 3), (1, 4)], [(2, 3), (4, 1)], [(1, 3), (2, 2), (3, 1)]:
        bounds = [0, *torch.tensor(grids).prod(1).cumsum(0).tolist()]
        qkv = torch.randn(3, bounds[-1], 1, 16, device=DEVICE)
        weight = torch.randn(len(grids), 1, 16, 9, device=DEVICE)
        expected = attend(qkv, weight, torch.tensor(bounds, device=DEVICE), grids)
        torch.testing.assert_close(compiled(qkv, weight, bounds, grids), expected)


@pytest.mark.parametrize("attend", [inline_attention, tangent_attention])
def test_compiles_as_one_graph(attend):
    qkv, weight, _, options = make_inputs(1, (3, 5), 1, 2, 16, torch.float32)
    qkv.requires_grad_()

    def loss(qkv, weight):
        return attend(*qkv.unbind(2), local_weight=weight, backend="triton", **options).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="inductor" if GPU else "aot_eager")
    (expected,) = torch.autograd.grad(loss(qkv, weight), qkv)
    (grad,) = torch.autograd.grad(compiled(qkv, weight), qkv)
    torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("queries", [16, 5])
def test_flop_formula(queries):
    """Products as the reference backend's operators count them, where it has a product for each."""
    from torch.utils.flop_counter import FlopCounterMode

    q = torch.randn(2, queries, 2, 16, device=DEVICE, requires_grad=True)
    k = torch.randn(2, 16, 2, 16, device=DEVICE, requires_grad=True)
    counts = {}
    for backend in ("reference", "triton"):
        with FlopCounterMode(display=False) as counter:
            inline_attention(q, k, k, backend=backend).sum().backward()
        counts[backend] = counter.get_total_flops()
    assert counts["triton"] == counts["reference"] > 0


def test_flop_formula_of_the_local_residual():
    from torch.utils.flop_counter import FlopCounterMode

    counts = []
    for local in (False, True):
        with FlopCounterMode(display=False) as counter:
            run(*make_inputs(2, (3, 5), 1, 2, 16, torch.float32, local=local), backend="triton")
        counts.append(counter.get_total_flops())
    assert counts[1] - counts[0] == 3 * 2 * 9 * 2 * 16 * 32  # forward, dv and dweight: 9 taps of 2·16 tokens of 32


def plan_of(*grids, channels=32):
    x = torch.empty(1, 1, 1, channels, device=DEVICE)
    sequences = torch.zeros(len(grids), 4, device=DEVICE) if len(grids) > 1 else None
    return make_plan(x, x, x, sequences, [length for grid in grids for length in grid], 0)


TILE_STEPS = dict(num_warps=2, maxnreg=128)


def test_which_maps_are_large(monkeypatch):
    monkeypatch.setattr(config, "CONFIG", config.CONFIG._replace(tile_rows=(2,)))
    rows = 2 * config.CONFIG.columns  # of one column
    for (height, width), expected in [((64, 64), False), ((65_535 * rows, 1), False), ((65_536 * rows, 1), True)]:
        geometry = plan_of((height, width))
        tiles = make_tiles(geometry, local=True, steps=TILE_STEPS)
        assert tiles.wide == expected
        programs, *others = tiles.grid(geometry)
        assert programs == geometry.programs
        assert max(others) <= 65_535
        assert tiles.number <= torch.tensor(others).prod() < tiles.number + len(others)


@pytest.mark.parametrize("kind", [INLINE, TANGENT, Kind("divide", "relu")], ids=str)
def test_offsets_of_64_bits(kind, monkeypatch):
    """They change no bit."""
    qkv, weight, grad, options = make_inputs(1, (3, 5), 2, 1, 16, torch.float32, masked=True)
    launched, launch = [], gpu.launch
    monkeypatch.setattr(
        gpu,
        "launch",
        lambda kernel, grid: (
            lambda *args, **settings: launched.append(settings.get("WIDE")) or launch(kernel, grid)(*args, **settings)
        ),
    )
    results = []
    for most in (2**31, 1):
        monkeypatch.setattr(plan, "MOST_OFFSET", most)
        with configured(fused_tokens=0):
            results.append(run(qkv, weight, grad, options, backend="triton", kind=kind))
        with configured(one_launch=True), torch.no_grad():
            out = inline_attention(*qkv.unbind(2), local_weight=weight, backend="triton", **options)
            results[-1]["one launch"] = out
    assert {False, True} <= set(launched)
    assert all(torch.equal(x, results[1][name]) for name, x in results[0].items())


def test_large_maps(monkeypatch):
    monkeypatch.setattr(gpu, "MOST_ON_AN_AXIS", 2)
    monkeypatch.setattr(config, "CONFIG", config.CONFIG._replace(fused_tokens=0))
    assert make_tiles(plan_of((7, 18)), local=True, steps=TILE_STEPS).number > 2
    check(*make_inputs(1, (7, 18), 1, 1, 16, torch.float32))
    check(*make_inputs(1, (7, 18), 1, 1, 16, torch.float32, local=False))


def test_tiles_of_a_packed_batch():
    """The number of tiles is the largest of any image, not that of the largest height and the largest width."""
    tall, wide = (4096, config.CONFIG.columns), (1, 4096)
    together, *alone = (
        make_tiles(plan_of(*grids), local=True, steps=TILE_STEPS).number for grids in ((tall, wide), (tall,), (wide,))
    )
    assert together == max(alone)


def test_refuses_forward_mode_differentiation():
    q = torch.randn(1, 6, 1, 16, device=DEVICE)
    weight = torch.randn(1, 1, 16, 9, device=DEVICE)
    for attend, x in [
        (lambda q: inline_attention(q, q, q, backend="triton"), q),
        (lambda weight: inline_attention(q, q, q, local_weight=weight, grid=(2, 3), backend="triton"), weight),
    ]:
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
            attend(forward_ad.make_dual(x, x))
        with pytest.raises(ValueError, match=r"torch\.func"):
            torch.func.jvp(attend, (x,), (x,))
        leaf = x.clone().requires_grad_()
        out = attend(leaf)
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
            torch.autograd.grad(out, leaf, forward_ad.make_dual(out.detach(), out.detach()))


@pytest.fixture
def cuda_tensor():
    """A fake tensor, for any machine."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.empty(1, 4, 1, 128, device="cuda")


@pytest.mark.parametrize(
    ("capability", "hip", "reason"),
    [((7, 5), None, r"compute capability 8\.0"), ((9, 4), "6.4", "ROCm"), ((8, 0), None, None), ((9, 0), None, None)],
)
def test_other_gpus_get_the_reference_and_one_warning(capability, hip, reason, cuda_tensor, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(backends, "_warned", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert {backends.choose("auto", cuda_tensor) for _ in range(3)} == {"reference" if reason else "triton"}
    assert len(caught) == (1 if reason else 0)
    if reason:
        assert re.search(f"plain PyTorch: .*{reason}", str(caught[0].message))
        with pytest.raises(ValueError, match=reason):
            backends.choose("triton", cuda_tensor)


def test_the_warning_leaves_the_graph_of_torch_compile_whole(monkeypatch):
    monkeypatch.setattr(backends, "_warned", set())
    compiled = torch.compile(lambda x: backends._warn_once("a reason") or x + 1, fullgraph=True, backend="eager")
    with pytest.warns(UserWarning, match="a reason"):
        assert compiled(torch.ones(1)) == 2


def test_wide_heads_need_more_shared_memory_than_some_gpus_have(cuda_tensor, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 6))
    monkeypatch.setattr(torch.version, "hip", None)

    def choose(backend, channels):
        why_not = functools.partial(fused.why_not_widths, channels, channels, cuda_tensor.device)
        return backends.choose(backend, cuda_tensor, why_not=why_not)

    for memory, expected in [(99 * 1024, "reference"), (163 * 1024, "triton")]:
        monkeypatch.setattr(gpu, "limits_of", lambda _, memory=memory: gpu.Limits(84, memory))
        assert choose("auto", 128) == expected
        assert choose("auto", 64) == "triton"
    monkeypatch.setattr(gpu, "limits_of", lambda _: gpu.Limits(84, 99 * 1024))
    with pytest.raises(ValueError, match="128 channels a program takes 160 KiB of shared memory, and cuda:0 has 99"):
        choose("triton", 128)


def test_a_feature_map_that_the_kernels_do_not_have(monkeypatch):
    """PyTorch applies it before the kernels, and no kernel takes it for another."""
    square = FeatureMap(torch.square, lambda x, grad: 2 * x * grad)
    x = torch.randn(1, 6, 1, 16, device=DEVICE, requires_grad=True)
    for name in ("square", "relu"):  # a new name, and one that gets another meaning
        monkeypatch.setitem(FEATURE_MAPS, name, square)
        results = []
        for backend in ("triton", "reference"):
            out = inline_attention(x, x, x, feature_map=name, backend=backend)
            results.append((out, *torch.autograd.grad(out.square().sum(), x)))
        for fast, exact in zip(*results, strict=True):
            torch.testing.assert_close(fast, exact, rtol=1e-4, atol=1e-5)
    with pytest.raises(Exception) as caught:  # noqa: PT011  # the interpreter's is another than the compiler's
        fused.attention(
            [x[:, :, None]] * 3, None, None, None, None, None, None, anchored=False, normalization="subtract",
            feature_map="square", scale=1.0, grids=[(1, 1)], num_prefix_tokens=0, make=not_made,
        )  # fmt: skip
    assert "no branch in the kernels" in "".join(traceback.format_exception(caught.value))


def test_signed_halves_before_the_kernels():
    q, k, v = (torch.randn(1, 9, 2, 16, device=DEVICE, requires_grad=True) for _ in range(3))
    results = []
    for backend in ("triton", "reference"):
        out = linear_attention(q, k, v, feature_map="signed_halves", backend=backend)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for fast, exact in zip(*results, strict=True):
        torch.testing.assert_close(fast, exact, rtol=1e-4, atol=1e-5)


def test_the_pole_of_a_divisor(path):
    """Where z = −eps, g is zero in both backends. This happens if φ(q)·φ(k) can be negative."""
    q, k, v = (torch.zeros(1, 1, 1, 16, device=DEVICE) for _ in range(3))
    q[..., 0], k[..., 0], v[:] = -1e-6, 1.0, 2.0
    for backend in ("reference", "triton"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = linear_attention(*leaves, feature_map="identity", backend=backend)
        for x in (out, *torch.autograd.grad(out.sum(), leaves)):
            assert torch.equal(x, torch.zeros_like(x)), backend


def test_second_derivatives_are_refused():
    q = torch.randn(1, 6, 1, 16, device=DEVICE, requires_grad=True)
    (grad,) = torch.autograd.grad(inline_attention(q, q, q, backend="triton").square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivatives; pass backend='reference'"):
        torch.autograd.grad(grad.sum(), q)


def test_says_why_not():
    q = torch.randn(1, 4, 1, 16, dtype=torch.float64, device=DEVICE)
    with pytest.raises(ValueError, match="float64"):
        inline_attention(q, q, q, backend="triton")
    q = torch.randn(1, 4, 1, 160, device=DEVICE)
    with pytest.raises(ValueError, match="160"):
        inline_attention(q, q, q, backend="triton")


@pytest.mark.parametrize("seed", range(210 if GPU else len(SPECIALIZATIONS)))
def test_random_shapes(seed):
    """`gpu_check.py random` runs more of them."""
    case = random_case(seed)
    with configured(**case.config):
        check(*case.inputs, kind=case.kind, mean=case.mean)


@pytest.mark.gpu
class TestOnGPU:
    def test_more_than_two_to_the_31_elements(self):
        """2.4e9 elements, and in one tile of the map too, as its rows are long. Heads are apart: two are compared."""
        heads, head_dim, grid = 12, 64, (16, 65_536)
        tokens = grid[0] * grid[1]
        torch.manual_seed(0)
        qkv = torch.randn(1, tokens, 3, heads, head_dim, device="cuda", dtype=torch.bfloat16)
        # Otherwise the covariances of a million tokens, and with them the attention, are almost zero.
        qkv[:, :, 2] += qkv[:, :, 1]
        grad = torch.randn(1, tokens, heads, head_dim, device="cuda", dtype=torch.bfloat16) + qkv[:, :, 0]
        weight = torch.randn(1, heads, head_dim, 9, device="cuda", dtype=torch.bfloat16) / 24
        fast = run(qkv, weight, grad, dict(grid=grid), backend="triton")
        for head in (0, heads - 1):
            head = slice(head, head + 1)
            inputs = (qkv[..., head, :], weight[:, head], grad[:, :, head], dict(grid=grid))
            assert_accurate(
                run(*inputs, backend="reference", dtype=torch.float64),
                run(*inputs, backend="reference"),
                {name: x[:, head] if name == "dweight" else x[:, :, head] for name, x in fast.items()},
            )

    def test_a_million_tokens_far_from_zero(self, monkeypatch):
        """Tensor cores round towards zero: left to sum all of them, they would be several per cent off."""
        monkeypatch.setattr(config, "CONFIG", config.CONFIG._replace(state_programs=0))
        torch.manual_seed(0)
        x = torch.randn(4, 1, 1 << 20, 1, 32, device="cuda")
        q, k, v, grad = x[0], x[1] + 4, x[1] / 2 + x[2] + 4, x[3] + x[0]
        check(torch.stack([q, k, v], 2).bfloat16(), None, grad.bfloat16(), {})

    def test_more_tiles_than_an_axis_of_the_grid_holds(self):
        check(*make_inputs(1, (1 << 20, 1), 1, 1, 32, torch.bfloat16))

    def test_images_of_very_different_shapes(self):
        grids = [(4096, 1), (1, 4096), (2, 2)]
        lengths = [height * width for height, width in grids]
        torch.manual_seed(0)
        qkv = torch.randn(3, sum(lengths), 1, 32, device="cuda")
        weight = torch.randn(len(grids), 1, 32, 9, device="cuda")
        bounds = torch.tensor([0, *lengths]).cumsum(0)
        outs = [
            inline_attention_packed(*qkv, cu_seqlens=bounds, grids=grids, local_weight=weight, backend=backend)
            for backend in ("reference", "triton")
        ]
        torch.testing.assert_close(*outs)

    def test_packed_waits_for_nothing(self):
        qkv = torch.randn(3, 10, 1, 32, device="cuda", dtype=torch.bfloat16)
        inline_attention_packed(*qkv, cu_seqlens=[0, 4, 10], backend="triton")
        torch.cuda.set_sync_debug_mode("error")
        try:
            inline_attention_packed(*qkv, cu_seqlens=[0, 3, 10], backend="triton")
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_packed_in_a_cuda_graph(self):
        """A replay reads nothing from memory of the host, which other tensors have taken over by then."""
        qkv = torch.randn(3, 10, 1, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)

        def call():
            out = inline_attention_packed(*qkv, cu_seqlens=[0, 4, 10], backend="triton")
            return out, *torch.autograd.grad(out.float().square().sum(), qkv)

        expected = call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = call()
        others = [torch.full((n, 4), 1 << 40).pin_memory() for n in (1, 2, 2, 3)]
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))
        del others

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
    def test_runs_where_its_inputs_are(self):
        qkv, weight, grad, options = make_inputs(2, (5, 7), 1, 2, 32, torch.float32)
        expected = run(qkv, weight, grad, options, backend="triton")
        assert torch.cuda.current_device() == 0
        there = run(*(x.to("cuda:1") for x in (qkv, weight, grad)), options, backend="triton")
        for name, x in there.items():
            assert torch.equal(x.cpu(), expected[name].cpu())
        assert torch.cuda.current_device() == 0

    def test_a_changing_batch_recompiles_a_few_times(self):
        torch._dynamo.reset()
        counter = torch._dynamo.utils.counters
        counter.clear()

        def loss(qkv, weight):
            return inline_attention(*qkv.unbind(2), local_weight=weight, grid=(15, 20), backend="triton").square().sum()

        compiled = torch.compile(loss, fullgraph=True)
        for batch in (2, 3, 5, 8, 7, 6, 4):
            qkv, weight, *_ = make_inputs(batch, (15, 20), 0, 6, 32, torch.float32)
            qkv.requires_grad_()
            (expected,), (grad,) = (torch.autograd.grad(f(qkv, weight), qkv) for f in (loss, compiled))
            torch.testing.assert_close(grad, expected)
        assert counter["stats"]["unique_graphs"] <= 4

    def test_trains_as_the_reference_does(self):
        """Fifty steps on fixed data: the curves of the two backends stay together."""
        from inline_attention import create_model
        from inline_attention.ops import backends

        images = torch.randn(32, 3, 64, 64, device="cuda")
        labels = torch.arange(32, device="cuda") % 8
        curves = {}
        for backend in ("triton", "reference"):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(backends, "choose", lambda *_, backend=backend, **__: backend)
                torch.manual_seed(0)
                model = create_model("inline_deit_tiny", depth=4, img_size=64, num_classes=8).cuda()
                optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
                curve = []
                for _ in range(50):
                    with torch.autocast("cuda", torch.bfloat16):
                        loss = torch.nn.functional.cross_entropy(model(images), labels)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    curve.append(loss.detach())
                curves[backend] = torch.stack(curve).cpu()
        assert curves["triton"][-1] < 0.5 * curves["triton"][0]
        torch.testing.assert_close(curves["triton"], curves["reference"], atol=0.1, rtol=0.1)

    def test_a_changing_resolution_recompiles_once(self):
        from inline_attention import create_model

        torch._dynamo.reset()
        counter = torch._dynamo.utils.counters
        counter.clear()
        model = create_model("inline_deit_tiny", depth=1, num_classes=8).cuda().eval()
        model.blocks[0].attn.backend = "triton"
        compiled = torch.compile(model, fullgraph=True)
        with torch.no_grad():
            for size in (512, 640, 768, 1024, (512, 1024)):
                height, width = (size, size) if isinstance(size, int) else size
                x = torch.randn(2, 3, height, width, device="cuda")
                torch.testing.assert_close(compiled(x), model(x), atol=1e-3, rtol=1e-3)
        assert counter["stats"]["unique_graphs"] <= 2


def test_tiles_fill_the_gpu():
    """Few maps are cut into small tiles. Of many, tiles come in whole turns."""
    settings = config.Config()
    assert tile_rows(6, 64, 1056, settings) == 4
    assert tile_rows(100_000, 64, 1056, settings) == 22, "the fewest rows that are loaded twice"
    for programs in (96, 384, 500, 1536):
        tiles = programs * -(-64 // tile_rows(programs, 64, 1056, settings))
        assert 0.8 < tiles / 1056 / -(-tiles // 1056) <= 1
