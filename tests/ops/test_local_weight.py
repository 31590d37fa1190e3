"""The kernel of the local weight against the reference in float64. Without a GPU it runs in Triton's interpreter."""

import random

import pytest
import torch
from torch.library import opcheck

pytest.importorskip("triton")

from kernel_cases import DEVICE, DTYPES, GPU

from inline_attention.layers import LocalWeight
from inline_attention.ops import fused_local_weight, gpu, make_local_weight

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def make_layer(batch, heads, head_dim):
    torch.manual_seed(0)
    return LocalWeight(heads * head_dim, heads).to(DEVICE), torch.randn(batch, heads * head_dim, device=DEVICE)


def run(layer, mean, grad, make):
    mean = mean.detach().requires_grad_()
    weight = make(layer, mean)
    return [weight, *torch.autograd.grad(weight, [mean, *layer.parameters()], grad.to(weight.dtype))]


def by_kernel(layer, mean):
    return fused_local_weight.make_local_weight(
        mean, layer.fc1.weight, layer.fc1.bias, layer.fc2.weight, layer.fc2.bias
    )


def by_reference(layer, mean):
    return layer(mean, backend="reference")


SHAPES = [(1, 1, 16), (3, 2, 24), (17, 3, 32), (2, 1, 40), (2, 1, 128), (70, 2, 16)]


def check(batch, heads, head_dim, dtype):
    """At most twice the error of the reference under autocast, and one rounding of the result."""
    layer, mean = make_layer(batch, heads, head_dim)
    grad = torch.randn(batch, heads, head_dim, 9, device=DEVICE)
    with torch.autocast(DEVICE, dtype, enabled=dtype != torch.float32):
        fast = run(layer, mean, grad, by_kernel)
        plain = run(layer, mean, grad, by_reference)
    exact = run(layer.double(), mean.double(), grad.double(), by_reference)
    assert fast[0].dtype == dtype
    names = ("local weight", "mean", *(name for name, _ in layer.named_parameters()))
    for name, x, y, z in zip(names, exact, plain, fast, strict=True):
        error, allowed = (z - x).norm(), 2 * (y - x).norm() + torch.finfo(dtype).eps * x.norm()
        assert error <= allowed, f"{name}: {error / x.norm():.2e}, allowed {allowed / x.norm():.2e}"


@pytest.mark.parametrize(("batch", "heads", "head_dim"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_and_gradients(batch, heads, head_dim, dtype):
    check(batch, heads, head_dim, dtype)


@pytest.mark.parametrize("seed", range(210 if GPU else 6))
def test_random_shapes(seed):
    generator = random.Random(seed)
    batch = generator.choice((1, 16, 256, generator.randint(1, 2048))) if GPU else generator.randint(1, 70)
    check(batch, generator.randint(1, 6), generator.randint(1, 64 if GPU else 24), DTYPES[seed % len(DTYPES)])


@pytest.mark.parametrize(("most", "launches"), [(3, 1), (2, 0)])
def test_the_kernels_of_the_backward_pass_take_a_limited_number_of_samples(most, launches, monkeypatch):
    """PyTorch computes the gradients of more."""
    launched = []
    run_backward = fused_local_weight.run_backward
    monkeypatch.setattr(
        fused_local_weight, "run_backward", lambda *args: launched.append(args[0].shape) or run_backward(*args)
    )
    monkeypatch.setattr(fused_local_weight, "MOST_SAMPLES", most)
    layer, mean = make_layer(3, 2, 16)
    grad = torch.randn(3, 2, 16, 9, device=DEVICE)
    found, expected = (run(layer, mean, grad, make) for make in (by_kernel, by_reference))
    assert launched == [(3, 2, 16, 9)] * launches
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_no_sample():
    layer, mean = make_layer(0, 2, 16)
    for one in run(layer, mean, torch.empty(0, 2, 16, 9, device=DEVICE), by_kernel)[1:]:
        assert torch.equal(one, torch.zeros_like(one))


def test_second_derivatives():
    layer, mean = make_layer(3, 2, 16)
    mean.requires_grad_()
    upstream = torch.randn(3, 2, 16, 9, device=DEVICE, requires_grad=True)
    leaves = [mean, *layer.parameters()]
    found = []
    for make in (by_kernel, by_reference):
        grads = torch.autograd.grad(make(layer, mean), leaves, upstream, create_graph=True)
        size = sum(grad.square().sum() for grad in grads)
        found.append(torch.autograd.grad(size, [mean, layer.fc1.weight, layer.fc2.weight, upstream]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-3)


def test_what_pytorch_is_told_of_the_backward_pass():
    layer, mean = make_layer(3, 2, 16)
    arguments = (torch.randn(3, 2, 16, 9, device=DEVICE), mean, layer.fc1.weight, layer.fc1.bias, layer.fc2.weight)
    operator = torch.ops.inline_attention.local_weight_backward.default
    opcheck(operator, [x.detach() for x in arguments], test_utils=("test_schema", "test_faketensor"))


def test_a_mean_that_is_a_view():
    layer, mean = make_layer(3, 2, 16)
    torch.testing.assert_close(by_kernel(layer, torch.cat([mean, mean], 1)[:, :32]), by_kernel(layer, mean))


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("shape", [(3, 16), (3, 64), (3, 1, 32)])
def test_a_mean_of_another_width_is_refused(shape, backend):
    """The kernel would read beyond the end of the mean."""
    layer, _ = make_layer(3, 2, 16)
    with pytest.raises(ValueError, match=r"the mean token has shape \(3, .*expected \(B, 32\)"):
        layer(torch.randn(shape, device=DEVICE), backend=backend)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(w1=(16, 16)), r"w1 has shape \(16, 16\); expected \(heads, d, d\)"),
        (dict(b1=(2, 1)), r"b1 has shape \(2, 1\); expected \(2, 16\), as w1 is"),  # it would be broadcast
        (dict(w2=(2, 72, 16)), r"w2 has shape \(2, 72, 16\); expected \(2, 144, 16\)"),
        (dict(b2=(144,)), r"b2 has shape \(144,\); expected \(2, 144\)"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(change, message):
    shapes = dict(token_mean=(3, 32), w1=(2, 16, 16), b1=(2, 16), w2=(2, 144, 16), b2=(2, 144)) | change
    with pytest.raises(ValueError, match=message):
        make_local_weight(**{name: torch.randn(shape) for name, shape in shapes.items()})


def test_a_module_takes_the_backend_it_is_set_to():
    """The backend of the attention applies to its local weight too."""
    from inline_attention.layers import InLineAttention

    torch.manual_seed(0)
    attention = InLineAttention(32, 2).to(DEVICE)
    x = torch.randn(2, 6, 32, device=DEVICE)
    seen = {}
    for backend in ("reference", "triton"):
        attention.backend = backend
        with torch.profiler.profile() as profiler:
            out = attention(x, grid=(2, 3))
        seen[backend] = {event.key for event in profiler.key_averages()}, out
    assert "inline_attention::local_weight" in seen["triton"][0] - seen["reference"][0]
    torch.testing.assert_close(seen["triton"][1], seen["reference"][1])


def test_refuses_forward_mode_differentiation():
    layer, mean = make_layer(3, 2, 16)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda mean: by_kernel(layer, mean), (mean,), (mean,))


def test_compiles_as_one_graph():
    layer, mean = make_layer(3, 2, 16)
    compiled = torch.compile(by_kernel, fullgraph=True, backend="inductor" if GPU else "aot_eager")
    grad = torch.randn(3, 2, 16, 9, device=DEVICE)
    for one, other in zip(run(layer, mean, grad, compiled), run(layer, mean, grad, by_reference), strict=True):
        torch.testing.assert_close(one, other)


def test_flop_formula():
    from torch.utils.flop_counter import FlopCounterMode

    layer, mean = make_layer(3, 2, 16)
    for grad in (False, True):
        counts = []
        for make in (by_kernel, by_reference):
            with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(grad):
                weight = make(layer, mean.requires_grad_(grad))
                if grad:
                    weight.sum().backward()
            counts.append(counter.get_total_flops())
        again = 2 * mean.numel() * 16 if grad else 0  # the hidden values
        assert counts[0] == counts[1] + again > 0


def test_more_windows_than_the_grid_of_the_kernel_holds(monkeypatch):
    """65,535 programs of 16 windows: "auto" takes the reference, "triton" says why not."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert gpu.MOST_ON_AN_AXIS * fused_local_weight.SAMPLES == 1_048_560
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    layer, _ = make_layer(1, 1, 16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        mean = torch.empty(1_048_561, 16, device="cuda")
        with pytest.raises(ValueError, match="up to 1,048,560 samples or windows at once, not 1,048,561"):
            layer(mean, backend="triton")
    monkeypatch.setattr(gpu, "MOST_ON_AN_AXIS", 0)
    layer, mean = make_layer(3, 2, 16)
    torch.testing.assert_close(layer(mean), layer(mean, backend="reference"))


@pytest.mark.gpu
def test_is_what_models_use_on_a_gpu():
    layer, mean = make_layer(3, 2, 16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        layer(mean)
        torch.cuda.synchronize()
    launched = {event.key for event in profiler.key_averages() if event.self_device_time_total}
    assert "local_weight_kernel" in launched
    assert not any("gemm" in name or "nvjet" in name for name in launched)  # the reference's matrix products
