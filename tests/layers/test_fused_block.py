"""A block with every kernel that `optimize` may choose, against the same block in plain PyTorch and float64.

`tests/ops/test_triton.py` says how the kernels run without a GPU.
"""

import pytest

pytest.importorskip("triton")

from kernel_cases import BLOCK_FACTOR, BLOCK_RUNS, GPU, block_cases, every_kernel_wins

from inline_attention.ops import gpu

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# The interpreter is slow: there `make test` has InLine attention with a float32 stream.
CASES = [
    pytest.param(case, run, marks=[] if GPU or (case.attention == "inline" and case.autocast) else pytest.mark.slow)
    for case in block_cases()
    for run in BLOCK_RUNS
]


@pytest.mark.parametrize(("case", "run"), CASES, ids=str)
def test_no_less_accurate_than_the_plain_block(case, run, monkeypatch):
    """At most 1.2 times the error: of the output, of the gradient of each matrix, and of all others together."""
    config, training = BLOCK_RUNS[run]
    launched, launch = [], gpu.launch
    monkeypatch.setattr(gpu, "launch", lambda kernel, grid: launched.append(kernel.__name__) or launch(kernel, grid))
    with every_kernel_wins():
        found = case.errors(training=training, **config)
    for name, error, allowed in found:
        assert error <= allowed, f"{name}: {BLOCK_FACTOR * error / allowed:.2f} times the error of the plain block"
    expected = {"mlp_kernel"}
    if training:
        expected |= {"local_weight_kernel", "local_weight_backward_kernel", "grad_kernel", "weight_gradient_kernel"}
    else:
        expected |= {"norm_linear_kernel", "short_kernel" if run == "inference, one launch" else "output_kernel"}
    assert expected <= set(launched)
