"""Profiles: kernels by kind, of every contender, in a record that can be printed again."""

import importlib
import json
import pkgutil
from pathlib import Path

import pytest
import torch
from torch import nn

from inline_attention.bench import model as bench
from inline_attention.bench import profile
from inline_attention.cli import main
from inline_attention.ops import kernels
from inline_attention.ops.backends import HAS_TRITON

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_kernel0_0", "attention"),
        ("void pytorch_flash::flash_bwd_convert_dq_kernel<Traits<64, cutlass::bfloat16_t>>", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("nvjet_sm90_tst_64x96_64x10_1x2_h_bz_bias_TNT", "matrix products"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_64x64_nn_align8>", "matrix products"),
        ("triton_tem_fused_addmm_3", "matrix products"),
        ("aten::addmm", "matrix products"),
        ("aten::bmm", "matrix products"),
        ("void implicit_convolve_sgemm<__nv_bfloat16, __nv_bfloat16, 128, 5, 5, 3, 3, 3, 1>", "convolutions"),
        ("aten::mkldnn_convolution", "convolutions"),
        ("triton_poi_fused__to_copy_convolution_1", "norms, elementwise"),
        ("triton_per_fused_add_native_layer_norm__scaled_dot_product_flash_attention_backward_4", "norms, elementwise"),
        ("graph_0_cpp_fused_gelu_native_layer_norm_0", "norms, elementwise"),
        ("void multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor>", "optimiser"),
        ("Memset (Unknown)", "other"),
        ("aten::as_strided", "other"),
        ("void convert_dtypes_kernel<float>", "other"),
    ],
)  # fmt: skip
def test_kinds(kernel: str, kind: str) -> None:
    assert profile.kind_of(kernel) == kind


@pytest.mark.skipif(not HAS_TRITON, reason="the kernels need Triton to be imported")
def test_our_kernels_have_a_kind() -> None:
    kinds = {
        (module.name, profile.kind_of(name))
        for module in pkgutil.iter_modules(kernels.__path__)
        for name in vars(importlib.import_module(f"{kernels.__name__}.{module.name}"))
        if name.endswith("_kernel")
    }
    attention = ("forward", "backward", "short", "anchor", "local_weight")
    others = {("mlp", "mlp"), ("norm_linear", "matrix products")}
    assert kinds == {(module, "attention") for module in attention} | others


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "STEPS", 2)


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("task", ["infer", pytest.param("train", marks=pytest.mark.slow)])
def test_profile_writes_record_and_table(task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "profile.json"
    options = [
        "--img-sizes",
        "32",
        "--batch-sizes",
        "1",
        f"--{task}",
        "--contenders",
        "textbook,peer",
        "--mode",
        "eager",
    ]
    assert main(["bench", "profile", "inline_deit_tiny", *options, "--device", "cpu", "--json", str(record)]) == 0
    content = json.loads(record.read_text())
    assert content["kind"] == "profile"
    assert {"torch", "device", "dtype", "compile modes", "date"} <= content["facts"].keys()
    assert {(r["model"], r["img_size"], r["batch"], r["task"], r["mode"]) for r in content["results"]} == {
        ("inline_deit_tiny", 32, 1, task, "eager")
    }
    launches = {(r["contender"], r["kernel"]): r["launches"] for r in content["results"]}
    attention = "aten::scaled_dot_product_attention"
    assert launches["peer", attention] == 12  # one a block and step
    assert ("textbook", attention) not in launches
    assert (("peer", "aten::_fused_adamw_") in launches) == (task == "train")
    assert all(r["microseconds"] > 0 for r in content["results"])
    printed = capsys.readouterr().out
    assert main(["bench", "table", str(record)]) == 0
    assert capsys.readouterr().out.split("\n\n")[1] in printed


@pytest.mark.usefixtures("few_steps")
def test_a_contender_that_fails_leaves_the_others() -> None:
    setting = bench.Setting("inline_pvt_tiny", 32, 1, training=False)
    options = dict(mode="eager", device=CPU, dtype=torch.float32)
    failed, *peer = profile.run_setting(setting, contenders=["free", "peer"], **options)
    assert failed.kernel is None
    assert failed.error is not None
    assert "no attention with one qkv projection" in failed.error
    assert peer
    assert {r.contender for r in peer} == {"peer"}


def result(kernel: str | None, microseconds: float, launches: float = 1, **changes: object) -> dict:
    values = dict(model="inline_deit_tiny", img_size=224, batch=1, task="infer", contender="fused", mode="default")
    return {**values, "kernel": kernel, "microseconds": microseconds, "launches": launches, **changes}


def test_table_sums_kinds_and_shows_what_counts() -> None:
    kernels = [result("nvjet_a", 50, 4), result("state_kernel", 49, 12), result("nvjet_b", 1, 2)]
    failed = result(None, 0, contender="peer", error="OutOfMemoryError: no memory")
    lines = profile.profile_table([*kernels, failed]).splitlines()[2:]
    assert [[cell.strip() for cell in line.split("|")[6:-1]] for line in lines] == [
        ["all", "", "100.0", "100.0%", "18"],
        ["matrix products", "", "51.0", "51.0%", "6"],
        ["", "nvjet_a", "50.0", "50.0%", "4"],
        ["attention", "", "49.0", "49.0%", "12"],
        ["", "state_kernel", "49.0", "49.0%", "12"],
        ["OutOfMemoryError: no memory", "", "", "", ""],
    ]


@pytest.mark.slow  # compiles
@pytest.mark.usefixtures("few_steps")
def test_compiled_loops_have_names() -> None:
    images = torch.randn(4, 3, 2, 2)
    candidate = bench.Candidate(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 64), nn.GELU(), nn.LayerNorm(64)),
        "default",
        lambda model: bench.inference_step(model, images, lambda: torch.autocast("cpu", enabled=False)),
        training=False,
    )
    kernels = profile.profile_candidate(candidate, CPU)
    assert {"matrix products", "norms, elementwise"} <= {profile.kind_of(k.name) for k in kernels}
    assert any("cpp_fused" in k.name and k.launches == 1 for k in kernels)


@pytest.mark.gpu
def test_kernels_in_cuda_graphs() -> None:
    setting = bench.Setting("inline_deit_tiny", 224, 1, training=False)
    options = dict(contenders=["fused"], mode="reduce-overhead", device=torch.device("cuda"), dtype=torch.bfloat16)
    launches = {r.kernel: r.launches for r in profile.run_setting(setting, **options)}
    assert launches["local_weight_kernel"] == 12, launches  # one a block
    assert sum(n for name, n in launches.items() if profile.kind_of(name) == "matrix products") >= 4 * 12, launches
