"""Models against counterparts: the models that are built, their records, and the ratios."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import timm
import torch
from small import create_small, image
from torch import Tensor, nn
from torch.nn import functional as F

from inline_attention.bench import contenders
from inline_attention.bench import model as bench
from inline_attention.bench.record import Record, read_record
from inline_attention.bench.timing import Effort, Timing
from inline_attention.cli import main
from inline_attention.layers import InLineAttention
from inline_attention.linearize.convert import linearization_of, linearize
from inline_attention.models import list_models
from inline_attention.models.weights import save_weights
from inline_attention.optimize import MODES

CPU = torch.device("cpu")
OPTIONS = dict(device=CPU, dtype=torch.float32, effort=Effort(rounds=2, seconds=0), modes=["eager"])


def result(contender: str, speed: float | None, **changes: object) -> dict:
    timing = None if speed is None else Timing(64 / speed, 63 / speed, 66 / speed, 5)
    values = dict(
        model="inline_deit_tiny",
        img_size=224,
        batch=64,
        task="infer",
        contender=contender,
        mode="default",
        timing=timing,
        images_per_second=speed,
        peak_bytes=2**30,
        error="OutOfMemoryError: no memory" if speed is None else None,
    )
    return asdict(bench.ModelResult(**{**values, **changes}))


@pytest.mark.parametrize("name", contenders.COUNTERPARTS)
def test_counterparts_exist(name: str) -> None:
    assert name in list_models()
    assert timm.is_model(contenders.COUNTERPARTS[name])


def test_model_of_a_weights_file(tmp_path: Path) -> None:
    model = create_small("inline_deit_tiny")
    path = save_weights(model, tmp_path / "model.safetensors")
    built = contenders.build_textbook(str(path), 32).eval()
    model.set_input_size(32)
    torch.testing.assert_close(built(image(32)), model(image(32)))


def test_the_command_takes_a_weights_file(tmp_path: Path) -> None:
    """The model may have any number of classes and channels, such as that of the quickstart."""
    model = create_small("inline_deit_tiny", num_classes=2, in_chans=1)
    path = save_weights(model, tmp_path / "model.safetensors")
    options = ["--img-sizes", "32", "--batch-sizes", "2", "--no-latency", "--modes", "eager", "--device", "cpu"]
    record = tmp_path / "record.json"
    contenders = ["--contenders", "reference,textbook"]
    assert main(["bench", "model", str(path), *contenders, *options, "--quick", "--json", str(record)]) == 0
    results = read_record(record, kinds=["model"])[2]
    assert [(r["task"], r["error"]) for r in results] == [(task, None) for task in ("infer", "train") for _ in range(2)]


@pytest.mark.parametrize("contender", [name for name in contenders.OF_CLASSIFIERS if name not in ("fused", "student")])
@pytest.mark.parametrize("training", [False, True])
def test_every_contender_is_measured(contender: str, training: bool) -> None:
    setting = bench.Setting("inline_deit_tiny", 32, 2, training)
    [measured] = bench.run_setting(setting, contenders=[contender], **OPTIONS)
    assert measured.error is None
    assert measured.timing is not None
    assert measured.images_per_second == 2 / measured.timing.median


def test_a_softmax_model_is_measured_beside_its_linear_forms(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ["--img-sizes", "32", "--batch-sizes", "2", "--no-latency", "--modes", "eager", "--device", "cpu"]
    record = tmp_path / "record.json"
    words = ["bench", "model", "vit_tiny_patch16_224", *options, "--infer", "--quick", "--json", str(record)]
    assert main(words) == 0
    results = read_record(record, kinds=["model"])[2]
    assert [r["contender"] for r in results] == ["peer", "peer_optimized", "tangent", "inline"]
    assert {r["error"] for r in results} == {None}
    assert main([*words, "--contenders", "fused,peer"]) == 2
    assert "vit_tiny_patch16_224 is a softmax model; use --contenders peer,tangent,inline" in capsys.readouterr().err


@pytest.fixture(params=["timm", "own"])
def student(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "timm":
        arguments = dict(depth=1, embed_dim=48, num_classes=5)
        model = timm.create_model("vit_tiny_patch16_224", img_size=48, **arguments)
        linearize(model, arguments=arguments)
    else:
        model = create_small("softmax_deit_tiny", num_classes=5)
        linearize(model)
    return save_weights(model, tmp_path / "student.safetensors")


def test_a_student_is_measured_beside_its_softmax_form(
    student: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ["--img-sizes", "32", "--batch-sizes", "2", "--no-latency", "--modes", "eager", "--device", "cpu"]
    record = tmp_path / "record.json"
    words = ["bench", "model", str(student), *options, "--infer", "--quick", "--json", str(record)]
    assert main(words) == 0
    results = read_record(record, kinds=["model"])[2]
    assert [r["contender"] for r in results] == ["peer", "peer_optimized", "student"]
    assert {r["error"] for r in results} == {None}
    images = image(32)
    ours, teacher = (contenders.CONTENDERS[name].build(str(student), 32).eval() for name in ("student", "peer"))
    assert linearization_of(ours).report.linear()
    assert not hasattr(teacher, "linearization")
    linearize(teacher)
    with torch.no_grad():
        torch.testing.assert_close(teacher(images), ours(images))
    assert main([*words, "--contenders", "fused,peer"]) == 2
    assert f"{student} is a linearised model; use --contenders peer,peer_optimized,student" in capsys.readouterr().err


def test_only_a_file_of_a_linearised_model_is_a_student(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "model", "inline_deit_tiny", "--contenders", "student", "--device", "cpu"]) == 2
    assert "--contenders student: inline_deit_tiny is no file of a linearised model" in capsys.readouterr().err


def test_modes_with_cuda_graphs_are_those_of_cuda() -> None:
    for kind in ("cpu", "mps"):
        assert bench.default_modes(torch.device(kind)) == ["eager"]
        assert bench.usable_modes(["reduce-overhead", "default"], torch.device(kind)) == ["default"]
    assert bench.default_modes(torch.device("cuda")) == ["reduce-overhead", "max-autotune"]


@pytest.mark.parametrize("attention", contenders.LINEARIZED)
def test_linear_forms_have_the_local_residual(attention: str) -> None:
    model = contenders.CONTENDERS[attention].build("vit_tiny_patch16_224", 32)
    form = linearization_of(model)
    assert form.form.attention == attention
    assert form.local_residual


@pytest.mark.parametrize(("contender", "backend"), [("fused", "triton"), ("reference", "reference")])
def test_contenders_run_the_backend_they_are_named_after(contender: str, backend: str) -> None:
    model = contenders.CONTENDERS[contender].build("inline_swin_tiny", 32)
    attentions = [module for module in model.modules() if isinstance(module, InLineAttention)]
    assert attentions
    assert {attention.backend for attention in attentions} == {backend}


@pytest.mark.parametrize(
    ("name", "size"),
    [("inline_deit_tiny", 32), ("inline_pvt_tiny", 32), ("inline_swin_tiny", 224), ("inline_cswin_tiny", 32)],
)
def test_textbook_models_compute_inline_attention(name: str, size: int) -> None:
    images = torch.randn(1, 3, size, size)
    outputs = []
    for build in (contenders.build_reference, contenders.build_textbook):
        torch.manual_seed(0)
        model = build(name, size).eval()
        with torch.no_grad():
            outputs.append(model(images))
    attentions = [module for module in model.modules() if isinstance(module, InLineAttention)]
    assert {type(attention) for attention in attentions} == {contenders.TextbookAttention}
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)


def test_sdpa_is_forced_for_one_counterpart_alone() -> None:
    """By default, timm does not use SDPA in Swin's windows."""
    for build, expected in [
        (contenders.build_peer, False),
        (contenders.build_peer_sdpa, True),
        (contenders.build_peer, False),
    ]:
        model = build("inline_swin_tiny", 32)
        assert {m.fused_attn for m in model.modules() if hasattr(m, "fused_attn")} == {expected}


def test_softmax_is_written_out_for_one_counterpart_alone() -> None:
    """A DeiT of timm uses SDPA by default. The paper compares with one that does not."""
    outputs = []
    for build, expected in [
        (contenders.build_peer, True),
        (contenders.build_peer_math, False),
        (contenders.build_peer, True),
    ]:
        torch.manual_seed(0)
        model = build("inline_deit_tiny", 32).eval()
        assert {bool(m.fused_attn) for m in model.modules() if hasattr(m, "fused_attn")} == {expected}
        with torch.no_grad():
            outputs.append(model(torch.ones(1, 3, 32, 32)))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-4)


def test_latency_gets_more_samples() -> None:
    [measured] = bench.run_setting(
        bench.Setting("inline_deit_tiny", 32, 1, training=False), contenders=["peer"], **OPTIONS
    )
    assert measured.timing is not None
    assert measured.timing.samples == OPTIONS["effort"].for_latency().rounds > OPTIONS["effort"].rounds


@pytest.mark.parametrize("name", ["inline_deit_tiny", "inline_swin_tiny"])
def test_free_attention_replaces_all_attention(name: str) -> None:
    model = contenders.build_free(name, 32).eval()
    assert not [m for m in model.modules() if hasattr(m, "num_heads") and hasattr(m, "qkv")]
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 1000)


@pytest.mark.parametrize("name", ["inline_pvt_tiny", "pvt_v2_b1"])
def test_free_attention_that_cannot_be_is_an_error_of_its_own(name: str) -> None:
    setting = bench.Setting(name, 32, 1, training=False)
    free, peer = bench.run_setting(setting, contenders=["free", "peer"], **OPTIONS)
    assert free.error is not None
    assert "pvt_v2_b1 has no attention with one qkv projection" in free.error
    assert peer.timing is not None


def test_training_step_trains() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5))
    before = [p.detach().clone() for p in model.parameters()]
    images, labels = torch.randn(3, 3, 2, 2), torch.tensor([0, 1, 2])
    step = bench.training_step(
        model, lambda model: F.cross_entropy(model(images), labels), lambda: torch.autocast("cpu")
    )
    step()
    assert all((p != old).any() for p, old in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("training", [False, True])
def test_steps_run_as_a_model_would(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step has the requested dtype and mode, and records gradients only in training."""
    seen = []

    class Network(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x.flatten(1)[:, :4])
            seen.append((self.training, out.requires_grad, out.dtype))
            return out

    monkeypatch.setitem(contenders.CONTENDERS, "peer", contenders.Contender("", lambda name, size: Network(4, 1000)))
    options = OPTIONS | dict(dtype=torch.bfloat16)
    [measured] = bench.run_setting(bench.Setting("inline_deit_tiny", 32, 2, training), contenders=["peer"], **options)
    assert measured.error is None
    assert set(seen) == {(training, training, torch.bfloat16)}


@pytest.mark.parametrize("cast", [False, True])
def test_the_residual_stream_has_the_dtype_of_the_weights(cast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()

    def build(name: str, size: object) -> nn.Module:
        model = create_small("inline_deit_tiny")
        model.blocks[0].register_forward_pre_hook(lambda block, inputs: seen.add(inputs[0].dtype))
        return model

    monkeypatch.setitem(contenders.CONTENDERS, "reference", contenders.Contender("", build))
    options = OPTIONS | dict(dtype=torch.bfloat16, cast_weights=cast)
    setting = bench.Setting("inline_deit_tiny", 32, 2, training=False)
    [measured] = bench.run_setting(setting, contenders=["reference"], **options)
    assert measured.error is None
    assert seen == {torch.bfloat16 if cast else torch.float32}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--precision=bf16"], "--cast-weights: training keeps its weights in fp32; add --infer"),
        (["--infer"], "--cast-weights with --precision fp32 casts nothing; expected bf16 or fp16"),
    ],
)
def test_weights_that_are_not_cast_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "model", "inline_deit_tiny", "--device=cpu", "--cast-weights", *words]) == 2
    assert message in capsys.readouterr().err


def test_every_mode_but_eager_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours by `optimize`, and a peer as its users compile it."""
    modes = []
    monkeypatch.setattr(bench, "optimize", lambda model, *, mode: modes.append(("optimize", mode)))
    monkeypatch.setattr(torch.nn.Module, "compile", lambda model, *, mode: modes.append(("compile", mode)))
    options = OPTIONS | dict(modes=["eager", "default"])
    setting = bench.Setting("inline_deit_tiny", 32, 1, training=False)
    bench.run_setting(setting, contenders=["peer", "reference", "peer_optimized"], **options)
    assert modes == [("compile", "default"), ("optimize", "default"), ("optimize", "default")]


def test_settings_pair_sizes_with_batches() -> None:
    options = dict(img_sizes=[224, 384], tasks=["infer", "train"], latency=True)
    settings = bench.make_settings(["inline_deit_tiny"], batches=[8, 4], **options)
    assert [(s.img_size, s.batch, s.task) for s in settings] == [
        (224, 8, "infer"),
        (224, 8, "train"),
        (224, 1, "infer"),
        (384, 4, "infer"),
        (384, 4, "train"),
        (384, 1, "infer"),
    ]
    assert [s.is_latency for s in settings] == [False, False, True] * 2
    with pytest.raises(ValueError, match="2 sizes and 3 batches"):
        bench.make_settings(["inline_deit_tiny"], batches=[8, 4, 2], **options)


GPU = torch.device("cuda")


@pytest.mark.parametrize("kind", ["model", "sweep"])
def test_a_cpu_is_given_what_it_can_do(kind: str) -> None:
    """In images of 224 pixels: the CPU's defaults take a minute on two cores, the GPU's would take hours."""

    def work(device: torch.device) -> float:
        sizes, batches = bench.default_sizes(kind, device, img_sizes=None, batches=None)
        return sum((size / 224) ** 2 * batch for size, batch in zip(sizes, batches, strict=True))

    assert work(CPU) <= 8
    assert work(GPU) >= 64
    assert bench.default_modes(CPU) == [bench.EAGER]
    assert bench.default_modes(GPU) == list(bench.COMPILE_MODES)


def test_sizes_and_batches_that_are_given_are_used() -> None:
    both = dict(img_sizes=[96, 64], batches=[3, 5])
    assert bench.default_sizes("sweep", CPU, **both) == ([96, 64], [3, 5])
    sizes, batches = bench.default_sizes("sweep", GPU, img_sizes=[96, 64, 32], batches=None)
    assert (sizes, len(batches)) == ([96, 64, 32], 1)
    sizes, batches = bench.default_sizes("sweep", GPU, img_sizes=None, batches=[7])
    assert (len(sizes), batches) == (5, [7])


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["model", "inline_deit_tiny"], ["sweep"]], ids=["model", "sweep"])
def test_the_defaults_end_on_a_cpu(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments, "--device", "cpu", "--quick"]) == 0
    out = capsys.readouterr().out
    assert "compile modes: eager" in out
    plan = re.search(r"(\d+) measurements of 4 contenders: inline_deit_tiny", out)
    assert plan is not None
    assert re.findall(r"^\[(\d+)/(\d+)\] inline_deit_tiny", out, re.MULTILINE) == [
        (str(number), plan[1]) for number in range(1, int(plan[1]) + 1)
    ]


def test_any_mode_can_be_asked_for() -> None:
    """This includes the mode of `optimize(model)` in training, which has no CUDA graphs."""
    modes = [*MODES, bench.EAGER]
    bench.check_modes(modes)
    assert bench.usable_modes(modes, torch.device("cuda")) == modes
    assert bench.usable_modes(modes, CPU) == ["default", bench.EAGER]


def test_best_mode_counts() -> None:
    results = [result("fused", 90.0), result("fused", 120.0, mode="max-autotune"), result("peer", 100.0)]
    assert [(r["contender"], r["mode"]) for r in bench.best_of(results)] == [
        ("fused", "max-autotune"),
        ("peer", "default"),
    ]
    assert "1.20" in bench.ratio_table(results)


def test_ratio_is_over_the_faster_counterpart() -> None:
    results = [result("fused", 120.0), result("peer", 100.0), result("peer_sdpa", 200.0)]
    assert bench.ratio_table(results).splitlines()[-1].split("|")[-2].strip() == "0.60"
    assert bench.ratio_table(results[:1]) == ""


def test_failures_are_shown() -> None:
    text = bench.model_table([result("fused", 120.0), result("peer", None)])
    assert "OutOfMemoryError: no memory" in text


def test_latency_on_a_gpu_shows_the_host() -> None:
    with_host, without = result("fused", 1000.0, batch=1, host_seconds=0.0004), result("fused", 120.0)
    assert "host ms" not in bench.model_table([without])
    (header, _, *rows) = [line.split("|") for line in bench.model_table([with_host, without]).splitlines()]
    column = [cell.strip() for cell in header].index("host ms")
    assert [row[column].strip() for row in rows] == ["0.40", ""]


def test_record_is_complete_after_every_measurement(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    record = Record("model", {"torch": "x"}, path)
    setting = bench.Setting("inline_deit_tiny", 32, 1, training=False)
    for count in (1, 2):
        record.add(bench.run_setting(setting, contenders=["peer"], **OPTIONS))
        kind, facts, results = read_record(path, kinds=["model"])
        assert (kind, facts, len(results)) == ("model", {"torch": "x"}, count)
    assert results[0]["timing"].keys() == {"median", "low", "high", "samples"}


@pytest.mark.parametrize(("contenders", "status"), [("free", 1), ("free,peer", 0)])
def test_status_tells_whether_anything_was_measured(contenders: str, status: int) -> None:
    options = ["--img-sizes", "32", "--batch-sizes", "1", "--infer", "--modes", "eager", "--device", "cpu", "--quick"]
    assert main(["bench", "model", "inline_pvt_tiny", "--contenders", contenders, *options]) == status


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *[
            (text, "is not a record of `inline bench`")
            for text in (
                "{}",
                "no json",
                "[]",
                "é",
                '{"kind": "op", "facts": {}, "results": 3}',
                '{"kind": "op", "facts": ["torch"], "results": []}',
            )
        ],
        ('{"kind": "op", "facts": {}, "results": [{}]}', "has results that this version cannot read"),
        ('{"kind": "study", "facts": {}, "results": []}', "is a record of kind 'study'; expected op or"),
        ('{"kind": [], "facts": {}, "results": []}', "is a record of kind '[]'; expected op or"),
    ],
)
def test_file_that_is_no_record(tmp_path: Path, text: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(text.encode("latin-1"))
    assert main(["bench", "table", str(path)]) == 2
    error = capsys.readouterr().err
    assert f"{path} {expected}" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model", "inline_deit_huge"], "there is no model or file inline_deit_huge"),
        (["model", "inline_deit_tiny", "--contenders", "nobody"], "there is no contender nobody"),
        (["model", "inline_deit_tiny", "--modes", "warp"], "there is no mode warp"),
        (["model", "linear_deit_study", "--contenders", "peer"], "linear_deit_study has no counterpart"),
        (["op", "--case", "8x14"], "expected BATCH,SIDE"),
        (["model", "inline_deit_tiny", "--img-sizes", "0"], "--img-sizes 0: expected 1 or more"),
        (["model", "inline_deit_tiny", "--img-sizes", "32", "64", "--batch-sizes", "8", "-1"], "--batch-sizes 8 -1: "),
        (["op", "--threads", "0"], "--threads 0: expected 1 or more"),
        (["op", "--device", "gpu"], "device 'gpu' cannot be used"),
        (["op", "--device", "meta"], "--device meta: expected cpu or cuda"),
        (["op", "--json", "no/such/dir/x.json"], "'no/such/dir/x.json' cannot be written"),
        (["sweep", "--picture", "no/such/dir/x.png"], "'no/such/dir/x.png' cannot be written"),
        (["sweep", "--picture", "x.doc"], "--picture x.doc: expected a name that ends in one of"),
    ],
)
def test_bad_arguments_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["bench", *arguments, *([] if "--device" in arguments else ["--device", "cpu"])]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_sweep_writes_record_picture_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record, picture = tmp_path / "sweep.json", tmp_path / "sweep.png"
    sizes = ["--img-sizes", "32", "48", "--batch-sizes", "2", "--infer"]
    names = ["--contenders", "reference,peer", "--modes", "eager,max-autotune"]
    files = ["--json", str(record), "--picture", str(picture)]
    assert main(["bench", "sweep", *sizes, *names, *files, "--device", "cpu", "--quick"]) == 0
    content = json.loads(record.read_text())
    assert {(r["img_size"], r["contender"]) for r in content["results"]} == {
        (size, name) for size in (32, 48) for name in ("reference", "peer")
    }
    assert {"torch", "device", "dtype", "float32 products", "date"} <= content["facts"].keys()
    assert content["facts"]["compile modes"] == "eager"  # on a CPU the other one is none of its own
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    again = tmp_path / "again.png"
    assert main(["bench", "table", str(record), "--picture", str(again)]) == 0
    ratios = capsys.readouterr().out.split("\n\n")[1]
    assert ratios in printed
    assert again.read_bytes() == picture.read_bytes()

    older, both = tmp_path / "older.json", tmp_path / "both.png"
    for result in content["results"]:
        result["images_per_second"] *= 2
    older.write_text(json.dumps(content))
    assert main(["bench", "table", str(older), str(record), "--picture", str(both)]) == 0
    assert both.read_bytes() == picture.read_bytes()  # the later record has all rows of the older one
