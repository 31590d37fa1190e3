"""The kernels build for GPUs that are not there, and fit their shared memory. `kernel_builds.py` says how."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

TESTS = Path(__file__).parents[1]
GPUS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
OF_ATTENTION = {
    "forward_kernel", "state_kernel", "finish_kernel", "output_kernel", "backward_kernel", "grad_state_kernel",
    "grad_finish_kernel", "grad_kernel",
}  # fmt: skip
EVERY_KERNEL = OF_ATTENTION | {
    "anchor_grad_kernel", "short_kernel", "local_weight_kernel", "local_weight_backward_kernel",
    "weight_gradient_kernel", "mlp_kernel", "mlp_sum_kernel", "norm_linear_kernel",
}  # fmt: skip


def build(folder, *options):
    """In a process of its own, because this one may have chosen Triton's interpreter."""
    path = folder / "builds.json"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, TESTS / "kernel_builds.py", *options, "--json", path]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(path.read_text())


@pytest.mark.slow
def test_a_few(tmp_path):
    """The smallest GPU, another maker's, and the one that the launch parameters were measured on."""
    kernels = ("state_kernel", "mlp_kernel")
    cases = ("inline-bf16-32", "mlp-bf16-192", "mlp-bf16-192-save")
    builds = build(tmp_path, "--gpus", "sm_86", "sm_90", "gfx942", "--cases", *cases, "--kernels", *kernels)
    assert {(one["gpu"], one["kernel"]) for one in builds} == {
        (gpu, kernel) for gpu in ("sm_86", "sm_90", "gfx942") for kernel in kernels
    }
    assert all(0 <= one["shared"] <= one["limit"] for one in builds)
    measured = next(one for one in builds if one["gpu"] == "sm_90" and one["kernel"] == "state_kernel")
    assert (measured["settings"], measured["stack"]) == ("BN=32 num_warps=2 num_stages=3", 0)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPUS)
def test_every_kernel(gpu, tmp_path):
    """Every kernel, for heads of 32 channels and the widest. `kernel_builds.py` has more cases, for half an hour."""
    attentions = ("inline-bf16-32", "inline-bf16-128", "inline-fp16-32-packed", "inline-fp32-32-masked", "mala-bf16-32")
    others = (
        "tangent-bf16-32",
        "one_launch-bf16-32",
        "one_launch-bf16-128",
        "local_weight-bf16-32",
        "mlp-bf16-192",
        "mlp-bf16-192-few",
        "mlp-bf16-192-save",
        "norm_linear-bf16-192",
    )
    builds = build(tmp_path, "--gpus", gpu, "--cases", *attentions, *others)
    assert {one["kernel"] for one in builds} == EVERY_KERNEL
    wide = {one["case"] for one in builds if "128" in one["case"]}
    assert ("inline-bf16-128" in wide) == (gpu in ("sm_80", "sm_90", "sm_100"))  # elsewhere the reference runs


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["sm_86", "sm_120", "gfx942"])
def test_heads_of_64_channels(gpu, tmp_path):
    """The widest that run on these GPUs, in float32, which takes the most shared memory."""
    cases = {"inline-fp32-64", "tangent-fp32-64", "mala-fp32-64"}
    builds = build(tmp_path, "--gpus", gpu, "--cases", *cases)
    assert {one["case"] for one in builds} == cases
    for case in cases:
        of_anchors = {"anchor_grad_kernel"} if case.startswith("tangent") else set()
        assert {one["kernel"] for one in builds if one["case"] == case} == OF_ATTENTION | of_anchors
