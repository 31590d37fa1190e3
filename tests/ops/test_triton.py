"""The Triton kernels against float64 and against the reference backend.

On a machine without a GPU they run in Triton's interpreter, on the CPU, in float32 and float16 and on small shapes:
its bfloat16 is wrong. There the kernels' configuration is shrunk so that every loop turns more than once.
"""

import pytest
import torch

pytest.importorskip("triton")

from inline_attention.ops import fused, inline_attention, inline_attention_packed  # needs Triton
from inline_attention.ops.attention import inline_attention_projected

GPU = torch.cuda.is_available()

DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16] if GPU else [torch.float32, torch.float16]


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """Every torch.empty is filled with NaN, so that what a kernel leaves unwritten shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(params=["fused", "split"])
def path(request, monkeypatch):
    """Both ways through the kernels, whatever the heuristic would take."""
    tokens = 10**9 if request.param == "fused" else 0
    monkeypatch.setattr(fused, "CONFIG", fused.CONFIG._replace(fused_tokens=tokens, fused_programs=0))
    return request.param


def make_inputs(batch, grid, prefix, heads, head_dim, dtype, *, local=True, masked=False, mean=0.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = prefix + grid[0] * grid[1]
    qkv = (torch.randn(batch, tokens, 3, heads, head_dim, generator=generator) + mean).to(DEVICE, dtype)
    weight = torch.randn(batch, heads, head_dim, 9, generator=generator).to(DEVICE, dtype) if local else None
    grad = torch.randn(batch, tokens, heads, head_dim, generator=generator).to(DEVICE, dtype)
    mask = (torch.rand(batch, tokens, generator=generator) > 0.3).to(DEVICE) if masked else None
    return qkv, weight, grad, dict(grid=grid, num_prefix_tokens=prefix, token_mask=mask)


def run(qkv, weight, grad, options, *, backend, dtype=None, feature_map="identity"):
    """Output and gradients of q, k, v (as one) and of the local weight."""
    dtype = dtype or qkv.dtype
    qkv = qkv.detach().to(dtype).requires_grad_()
    leaves = [qkv]
    if weight is not None:
        weight = weight.detach().to(dtype).requires_grad_()
        leaves.append(weight)
    out = inline_attention(*qkv.unbind(2), feature_map=feature_map, local_weight=weight, backend=backend, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype))]


def check(qkv, weight, grad, options, *, feature_map="identity"):
    """At most twice the error of the reference backend on the same inputs, and one rounding of the result."""
    exact = run(qkv, weight, grad, options, backend="reference", dtype=torch.float64, feature_map=feature_map)
    plain = run(qkv, weight, grad, options, backend="reference", feature_map=feature_map)
    fast = run(qkv, weight, grad, options, backend="triton", feature_map=feature_map)
    for name, x, y, z in zip(("out", "qkv", "weight"), exact, plain, fast, strict=False):
        assert z.dtype == qkv.dtype
        error, allowed = (z - x).norm(), 2 * (y - x).norm() + torch.finfo(qkv.dtype).eps * x.norm()
        relative = f"{name}: error {error / x.norm():.2e}, allowed {allowed / x.norm():.2e}"
        assert error <= allowed, f"{relative} for {tuple(qkv.shape)}, {qkv.dtype}, {feature_map}, {options}"[:400]


def test_bit_identical_from_run_to_run(path):
    inputs = make_inputs(2, (5, 18) if GPU else (3, 5), 1, 2, 16, DTYPES[-1])
    first, second = (run(*inputs, backend="triton") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


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
    "windows": (5, (2, 3), 0, 1, 16),
}


# The interpreter takes its time: each shape in one dtype there, in turn.
CASES = [(s, d) for i, s in enumerate(SHAPES) for j, d in enumerate(DTYPES) if GPU or i % len(DTYPES) == j]


@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_forward_and_gradients(shape, dtype, path):
    batch, grid, prefix, heads, head_dim = SHAPES[shape]
    check(*make_inputs(batch, grid, prefix, heads, head_dim, dtype))


@pytest.mark.parametrize(("feature_map", "masked"), [("relu", True), ("leaky_relu", False), ("exp", True)])
def test_feature_maps_and_masks(feature_map, masked, path):
    check(*make_inputs(2, (3, 4), 1, 2, 16, torch.float32, masked=masked), feature_map=feature_map)


@pytest.mark.parametrize("masked", [False, True])
def test_without_local_residual(masked, path):
    check(*make_inputs(2, (3, 7), 1, 2, 16, torch.float32, local=False, masked=masked))


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_far_from_zero(dtype, path):
    check(*make_inputs(1, (64, 64) if GPU else (3, 7), 1, 2, 16, dtype, mean=4.0))


def test_absent_tokens_may_hold_anything(path):
    qkv, weight, grad, options = make_inputs(1, (3, 5), 1, 1, 16, torch.float32, masked=True)
    qkv[~options["token_mask"]] = torch.nan
    clean = qkv.nan_to_num(0.0)
    for a, b in zip(
        run(qkv, weight, grad, options, backend="triton"),
        run(clean, weight, grad, options, backend="triton"),
        strict=True,
    ):
        assert torch.equal(a, b)


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


@pytest.mark.parametrize("layout", ["heads first", "separate", "sliced"])
def test_any_strides(layout, path):
    qkv, weight, _, options = make_inputs(2, (3, 5), 0, 2, 16, torch.float32)
    q, k, v = qkv.unbind(2)
    if layout == "heads first":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    elif layout == "separate":
        q, k, v = (x.contiguous() for x in (q, k, v))
    else:
        q, k, v = (torch.cat([x, x], -1)[..., :16] for x in (q, k, v))
    expected = inline_attention(*qkv.unbind(2), local_weight=weight, backend="reference", **options)
    torch.testing.assert_close(inline_attention(q, k, v, local_weight=weight, backend="triton", **options), expected)


@pytest.mark.parametrize("sizes", [(3,), (1, 2), (2, 1), (1, 1, 1)])
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
def test_packed(local, path):
    grids = [(2, 3), (1, 1), (3, 2), (1, 17)]
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


def test_compiles_as_one_graph():
    qkv, weight, _, options = make_inputs(1, (3, 5), 1, 2, 16, torch.float32)
    qkv.requires_grad_()

    def loss(qkv, weight):
        return inline_attention(*qkv.unbind(2), local_weight=weight, backend="triton", **options).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="inductor" if GPU else "aot_eager")
    (expected,) = torch.autograd.grad(loss(qkv, weight), qkv)
    (grad,) = torch.autograd.grad(compiled(qkv, weight), qkv)
    torch.testing.assert_close(grad, expected)


def test_flop_formula():
    from torch.utils.flop_counter import FlopCounterMode

    qkv, weight, grad, options = make_inputs(2, (3, 5), 1, 2, 16, torch.float32)
    with FlopCounterMode(display=False) as counter:
        run(qkv, weight, grad, options, backend="triton")
    tokens, channels = 16, 32
    products = 2 * 2 * tokens * channels * 16
    assert counter.get_total_flops() == 6 * products + 3 * 2 * 2 * tokens * channels * 9


def test_says_why_not():
    q = torch.randn(1, 4, 1, 16, dtype=torch.float64, device=DEVICE)
    with pytest.raises(ValueError, match="float64"):
        inline_attention(q, q, q, backend="triton")
    q = torch.randn(1, 4, 1, 160, device=DEVICE)
    with pytest.raises(ValueError, match="160"):
        inline_attention(q, q, q, backend="triton")


def random_case(seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    pick = lambda *options: options[torch.randint(len(options), (), generator=generator)]  # noqa: E731  # reads best here
    limit = 96 if GPU else 6
    grid = tuple(int(torch.randint(1, limit, (), generator=generator)) for _ in range(2))
    options = dict(local=pick(True, True, False), masked=pick(True, False), mean=pick(0.0, 1.0, 4.0), seed=seed)
    heads, head_dim = pick(1, 2, 3, 6), pick(16, 24, 32, 40, 48, 64, 80, 128) if GPU else pick(16, 32)
    case = (pick(1, 2, 5), grid, pick(0, 1, 4), heads, head_dim, dtype)
    return make_inputs(*case, **options), pick("identity", "relu", "leaky_relu", "exp")


@pytest.mark.parametrize("seed", range(210 if GPU else 4))
def test_random_shapes(seed, monkeypatch):
    if seed % 2:
        monkeypatch.setattr(
            fused, "CONFIG", fused.CONFIG._replace(fused_tokens=10**9 if seed % 4 == 1 else 0, fused_programs=0)
        )
    inputs, feature_map = random_case(seed, DTYPES[seed % len(DTYPES)])
    check(*inputs, feature_map=feature_map)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
class TestOnGPU:
    def test_more_than_two_to_the_31_elements(self):
        qkv = torch.randn(1, 1 << 20, 3, 11, 64, device="cuda", dtype=torch.bfloat16)  # 2.2e9 elements
        weight = torch.randn(1, 11, 64, 9, device="cuda", dtype=torch.bfloat16)
        out = inline_attention(*qkv.unbind(2), local_weight=weight, grid=(1024, 1024), backend="triton")
        tail = slice(-3 * 1024, None)
        q, k, v = qkv.unbind(2)
        expected = inline_attention(q[:, tail].float(), k.float(), v.float(), backend="reference")
        middle = slice(1024, 2 * 1024)  # of the last three rows, the one with both neighbours
        local = inline_attention(
            *(torch.zeros_like(x[:, tail]).float() for x in (q, k)), v[:, tail].float(), local_weight=weight.float(),
            grid=(3, 1024), backend="reference",
        ) - v[:, tail].float().mean(1, keepdim=True)  # fmt: skip
        torch.testing.assert_close(out[:, tail][:, middle].float(), (expected + local)[:, middle], atol=0.1, rtol=0.02)

    def test_trains_as_the_reference_does(self):
        """Fifty steps on fixed data: the curves of the two backends stay together."""
        from inline_attention import create_model
        from inline_attention.ops import backends

        images = torch.randn(32, 3, 64, 64, device="cuda")
        labels = torch.arange(32, device="cuda") % 8
        curves = {}
        for backend in ("triton", "reference"):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(backends, "choose", lambda *_, backend=backend: backend)
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
