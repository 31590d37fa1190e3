"""Whole models against their counterparts: inference and training steps, throughput, latency and memory."""

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inline_attention.layers import InLineAttention
from inline_attention.models import create_model
from inline_attention.models.base import VisionModel
from inline_attention.models.weights import open_model
from inline_attention.ops import Backend, Grid
from inline_attention.ops.projections import unstack
from inline_attention.optimize import MODES, optimize

from .op import textbook_attention
from .record import check_contenders, fastest, table
from .timing import Call, Effort, Timing, describe_error, measure, synchronised

# The softmax model nearest to each of ours: timm's where it has one.
COUNTERPARTS = {
    "inline_deit_tiny": "deit_tiny_patch16_224",
    "inline_deit_small": "deit_small_patch16_224",
    "inline_deit_base": "deit_base_patch16_224",
    "inline_pvt_tiny": "pvt_v2_b1",
    "inline_pvt_small": "pvt_v2_b2",
    "inline_swin_tiny": "swin_tiny_patch4_window7_224",
    "inline_swin_small": "swin_small_patch4_window7_224",
    "inline_swin_base": "swin_base_patch4_window7_224",
    "inline_cswin_tiny": "softmax_cswin_tiny",
    "inline_cswin_small": "softmax_cswin_small",
    "inline_cswin_base": "softmax_cswin_base",
}
COMPILE_MODES = ("reduce-overhead", "max-autotune")
EAGER = "eager"
# (sizes, batch of each) that are measured unless a command says otherwise. A GPU needs large batches to be busy; with
# those a CPU would take hours, and with these about a minute.
SIZES_AND_BATCHES: dict[tuple[str, str], tuple[tuple[int, ...], tuple[int, ...]]] = {
    ("model", "cuda"): ((224,), (64,)),
    ("model", "cpu"): ((224,), (2,)),
    ("sweep", "cuda"): ((224, 384, 640, 1024, 2048), (256, 128, 64, 32, 8)),
    ("sweep", "cpu"): ((112, 224, 448), (4, 2, 1)),
}
PEERS = ("peer", "peer_sdpa")


class FreeAttention(nn.Module):
    """q + k + v in the place of attention: it moves the bytes that any attention must, and computes nothing."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.qkv = attention.get_submodule("qkv")
        self.proj = attention.get_submodule("proj")

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """(B, N, C) → (B, N, C)"""
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.proj(q + k + v)


class TextbookAttention(InLineAttention):
    """InLine attention as the paper's matrix products, the residual as a grouped convolution. φ is the identity."""

    def attend(
        self,
        projections: Sequence[Tensor],
        *,
        grid: Grid,
        token_mask: Tensor | None,
        local_weight: Tensor | None,
    ) -> Tensor:
        assert self.feature_map == "identity"
        assert token_mask is None  # at the size that a model was built for, no window is padded
        assert local_weight is not None
        prefix = self.num_prefix_tokens
        return textbook_attention(*unstack(projections), local_weight=local_weight, grid=grid, num_prefix_tokens=prefix)


def set_backend(model: nn.Module, backend: Backend) -> nn.Module:
    """Name the backend of all InLine attention, so that a benchmark does not depend on what "auto" chooses."""
    for module in model.modules():
        if isinstance(module, InLineAttention):
            module.backend = backend
    return model


def build_model(name: str, img_size: int) -> nn.Module:
    """A registered model, or the model of a weights file, at an input size."""
    if not Path(name).is_file():
        return create_model(name, img_size=img_size)
    model = open_model(None, name)
    model.set_input_size(img_size)
    return model


def build_fused(name: str, img_size: int) -> nn.Module:
    return set_backend(build_model(name, img_size), "triton")


def build_reference(name: str, img_size: int) -> nn.Module:
    return set_backend(build_model(name, img_size), "reference")


def build_textbook(name: str, img_size: int) -> nn.Module:
    model = build_reference(name, img_size)
    for module in model.modules():
        if isinstance(module, InLineAttention):
            module.__class__ = TextbookAttention  # the same parameters, another way to compute
    return model


def build_peer(name: str, img_size: int) -> nn.Module:
    if name not in COUNTERPARTS:
        raise ValueError(f"{name} has no counterpart; those that have one: {', '.join(COUNTERPARTS)}")
    peer = COUNTERPARTS[name]
    # PVT v2 has nothing that depends on the input size, and no argument for it.
    return create_model(peer) if peer.startswith("pvt_v2") else create_model(peer, img_size=img_size)


def build_peer_sdpa(name: str, img_size: int) -> nn.Module:
    """The peer with SDPA also where timm does not use it by default: in Swin's windows, whose bias is a mask."""
    before = timm.layers.use_fused_attn(), timm.layers.use_fused_attn(experimental=True)
    timm.layers.set_fused_attn(True, experimental=True)
    try:
        return build_peer(name, img_size)
    finally:
        timm.layers.set_fused_attn(*before)


def build_free(name: str, img_size: int) -> nn.Module:
    model = build_peer(name, img_size)
    for module in list(model.modules()):
        for child_name, child in module.named_children():
            if isinstance(getattr(child, "qkv", None), nn.Linear):
                setattr(module, child_name, FreeAttention(child))
    if not any(isinstance(module, FreeAttention) for module in model.modules()):
        raise ValueError(f"{COUNTERPARTS[name]} has no attention with one qkv projection to replace")
    return model


@dataclass(frozen=True)
class Contender:
    title: str
    build: Callable[[str, int], nn.Module]


CONTENDERS = {
    "fused": Contender("InLine, fused", build_fused),
    "reference": Contender("InLine, reference", build_reference),
    "textbook": Contender("InLine, textbook", build_textbook),
    "peer": Contender("counterpart", build_peer),
    "peer_sdpa": Contender("counterpart, SDPA forced", build_peer_sdpa),
    "free": Contender("counterpart, free attention", build_free),
}


def default_contenders(device: torch.device) -> list[str]:
    everywhere = ["reference", "textbook", "peer", "free"]
    return ["fused", *everywhere] if device.type == "cuda" else everywhere


@dataclass(frozen=True)
class Setting:
    """One row of a table: a model at a size and a batch size, in inference or training."""

    model: str
    img_size: int
    batch: int
    training: bool

    def __str__(self) -> str:
        return f"{self.model} {self.img_size}×{self.batch} {self.task}"

    @property
    def task(self) -> str:
        return "train" if self.training else "infer"

    @property
    def is_latency(self) -> bool:
        return self.batch == 1 and not self.training


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The result of one contender in one mode. `peak_bytes` counts parameters, optimiser state and activations, but not
    the images."""

    contender: str
    mode: str
    timing: Timing | None
    images_per_second: float | None
    peak_bytes: int | None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class ModelResult(Measured):
    model: str
    img_size: int
    batch: int
    task: str


def inference_step(model: nn.Module, images: Tensor, autocast: Callable[[], Any]) -> Call:
    model.eval()

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()  # the outputs of the last step are not needed any more
        with torch.no_grad(), autocast():
            model(images)

    return step


def learning_step(model: nn.Module, loss_of: Callable[[nn.Module], Tensor], autocast: Callable[[], Any]) -> Call:
    """Forward, loss, backward, AdamW."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        with autocast():
            loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def training_step(model: nn.Module, images: Tensor, labels: Tensor, autocast: Callable[[], Any]) -> Call:
    """The learning step of a classifier."""
    return learning_step(model, lambda model: F.cross_entropy(model(images), labels), autocast)


def in_precision(device: torch.device, dtype: torch.dtype) -> Callable[[], Any]:
    """What makes autocast's contexts; off for float32."""
    return partial(torch.autocast, device.type, dtype=dtype, enabled=dtype != torch.float32)


WARM_UP = 3  # calls: the first one compiles, the second one records CUDA graphs


@dataclass(frozen=True)
class Candidate:
    """A model in a mode of torch.compile (or EAGER), and the step that is timed."""

    build: Callable[[], nn.Module]
    mode: str
    step_of: Callable[[nn.Module], Call]
    training: bool
    latency: bool = False  # wait for the end of each call


def prepare(candidate: Candidate, device: torch.device) -> tuple[Call, int | None]:
    """The step of a candidate, compiled and warm, and the memory it takes."""
    mode = candidate.mode
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()  # the first candidate would pay for what all of them use
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    model = candidate.build().to(device)
    model.train(candidate.training)
    if mode != EAGER:
        optimize(model, mode=mode)
    step = candidate.step_of(model)
    peak = None
    for call in range(WARM_UP):
        if device.type == "cuda" and call == 1:  # memory that compiling and tuning took does not count
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    return synchronised(step, device) if candidate.latency else step, peak


def each_size_compiled() -> AbstractContextManager[None]:
    """Compile each size by itself. A graph for several sizes would be slower than one made for a single size."""
    return torch._dynamo.config.patch(automatic_dynamic_shapes=False, recompile_limit=64)


def compare(
    candidates: Mapping[str, Candidate],
    *,
    device: torch.device,
    effort: Effort,
    log: Callable[[str], None] = lambda line: None,
) -> dict[str, tuple[Timing | str, int | None]]:
    """Timing (or the error) and peak memory of every candidate. All are built first and then timed in turn."""
    calls: dict[str, Call] = {}
    peaks: dict[str, int | None] = {}
    errors: dict[str, str] = {}
    with each_size_compiled():
        for key, candidate in candidates.items():
            try:
                calls[key], peaks[key] = prepare(candidate, device)
                log(f"ready: {key}")
            except Exception as error:  # an error of one contender does not end the others
                errors[key] = describe_error(error)
                log(f"failed: {key}: {errors[key]}")
                _collect(device)
        outcome = {**measure(calls, device=device, effort=effort), **errors}
    calls.clear()
    release_graphs(device)
    return {key: (outcome[key], peaks.get(key)) for key in candidates}


def default_modes(device: torch.device) -> list[str]:
    """Compiling takes longer on a CPU than everything that is measured there."""
    return [EAGER] if device.type == "cpu" else list(COMPILE_MODES)


def default_sizes(
    kind: str, device: torch.device, *, img_sizes: Sequence[int] | None, batches: Sequence[int] | None
) -> tuple[Sequence[int], Sequence[int]]:
    """Sizes and batches of "model" or "sweep", where one or both are not given."""
    if img_sizes is None:
        img_sizes, usual = SIZES_AND_BATCHES[kind, device.type]
    else:  # the batch of one size serves them all
        usual = SIZES_AND_BATCHES["model", device.type][1]
    return img_sizes, usual if batches is None else batches


def usable_modes(modes: Sequence[str], device: torch.device) -> list[str]:
    """The modes that make a difference on the device."""
    if device.type != "cpu":
        return list(modes)
    return [mode for mode in modes if mode in (EAGER, "default")] or ["default"]


def make_candidates(
    setting: Setting, *, contenders: Sequence[str], modes: Sequence[str], device: torch.device, dtype: torch.dtype
) -> dict[tuple[str, str], Candidate]:
    """(contender, mode) → candidate. All of them see the same random images."""
    images = torch.randn(setting.batch, 3, setting.img_size, setting.img_size, device=device)
    labels = torch.zeros(setting.batch, dtype=torch.int64, device=device)  # any number of classes has this one
    autocast = in_precision(device, dtype)

    def step_of(model: nn.Module) -> Call:
        channels = model.in_chans if isinstance(model, VisionModel) else 3
        inputs = images[:, :channels].contiguous()
        if setting.training:
            return training_step(model, inputs, labels, autocast)
        return inference_step(model, inputs, autocast)

    return {
        (contender, mode): Candidate(
            partial(CONTENDERS[contender].build, setting.model, setting.img_size),
            mode,
            step_of,
            training=setting.training,
            latency=setting.is_latency,
        )
        for contender in contenders
        for mode in modes
    }


def run_setting(
    setting: Setting,
    *,
    contenders: Sequence[str],
    modes: Sequence[str] | None,
    device: torch.device,
    dtype: torch.dtype,
    effort: Effort,
    log: Callable[[str], None] = lambda line: None,
) -> list[ModelResult]:
    """Every contender in every mode."""
    modes = usable_modes(modes or default_modes(device), device)
    candidates = make_candidates(setting, contenders=contenders, modes=modes, device=device, dtype=dtype)
    effort = effort.for_latency() if setting.is_latency else effort
    measured = measure_all(
        candidates, batch=setting.batch, device=device, effort=effort, log=lambda line: log(f"{setting}: {line}")
    )
    about: dict[str, Any] = dict(model=setting.model, img_size=setting.img_size, batch=setting.batch, task=setting.task)
    return [ModelResult(**about, **vars(one)) for one in measured]


def measure_all(
    candidates: Mapping[tuple[str, str], Candidate],
    *,
    batch: int,
    device: torch.device,
    effort: Effort,
    log: Callable[[str], None],
) -> list[Measured]:
    """Candidates by contender and mode: built first, then timed in turn, on `batch` images each."""
    named = {f"{contender} {mode}": candidate for (contender, mode), candidate in candidates.items()}
    outcome = compare(named, device=device, effort=effort, log=log)
    results = []
    for contender, mode in candidates:
        timing, peak = outcome[f"{contender} {mode}"]
        timed = timing if isinstance(timing, Timing) else None
        results.append(
            Measured(
                contender=contender,
                mode=mode,
                timing=timed,
                images_per_second=None if timed is None else batch / timed.median,
                peak_bytes=peak,
                error=timing if isinstance(timing, str) else None,
            )
        )
    return results


def release_graphs(device: torch.device) -> None:
    """Free what torch.compile keeps, and with it the memory of CUDA graphs."""
    torch._dynamo.reset()
    _collect(device)


def _collect(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def make_settings(
    models: Sequence[str],
    *,
    img_sizes: Sequence[int],
    batches: Sequence[int],
    tasks: Sequence[str],
    latency: bool,
) -> list[Setting]:
    """Sizes with their batch sizes (a single one serves all sizes). `latency` adds inference of single images."""
    batches = list(batches) * len(img_sizes) if len(batches) == 1 else list(batches)
    if len(batches) != len(img_sizes):
        raise ValueError(f"{len(img_sizes)} sizes and {len(batches)} batches; give one batch, or one for each size")
    for option, values in {"--img-sizes": img_sizes, "--batch-sizes": batches}.items():
        if min(values) < 1:
            raise ValueError(f"{option} {' '.join(map(str, values))}: expected 1 or more")
    settings = []
    for model in models:
        for size, batch in zip(img_sizes, batches, strict=True):
            settings += [Setting(model, size, batch, task == "train") for task in tasks]
            if latency and "infer" in tasks and batch != 1:
                settings.append(Setting(model, size, 1, training=False))
    return settings


def check_modes(modes: Sequence[str] | None) -> None:
    if unknown := [mode for mode in modes or () if mode not in (*MODES, EAGER)]:
        raise ValueError(f"there is no mode {', '.join(unknown)}; expected some of {', '.join((*MODES, EAGER))}")


def check(models: Sequence[str], contenders: Sequence[str], modes: Sequence[str] | None) -> None:
    if unknown := [name for name in models if not timm.is_model(name) and not Path(name).is_file()]:
        raise ValueError(f"there is no model or file {', '.join(unknown)}; `inline models` lists the models")
    check_contenders(contenders, CONTENDERS)
    check_modes(modes)
    without = [name for name in models if name not in COUNTERPARTS]
    if without and {*PEERS, "free"} & set(contenders):
        raise ValueError(f"{', '.join(without)} has no counterpart; use --contenders fused,reference,textbook")


def best_of(results: Sequence[dict]) -> list[dict]:
    return fastest(results, row_of)


def peer_speeds(best: Sequence[dict]) -> dict[tuple, float]:
    """Images a second of the faster counterpart in each row. All ratios are over it."""
    speeds: dict[tuple, float] = {}
    for r in best:
        if r["contender"] in PEERS and r["images_per_second"]:
            speeds[row_of(r)] = max(speeds.get(row_of(r), 0), r["images_per_second"])
    return speeds


def model_table(results: Sequence[dict]) -> str:
    """A row for each contender in its best mode, with its speed over that of the counterpart."""
    best = best_of(results)
    peers = peer_speeds(best)
    rows = []
    for r in best:
        cells = [r["model"], f"{r['img_size']} × {r['batch']}", r["task"], CONTENDERS[r["contender"]].title]
        if r["timing"] is None:
            rows.append([*cells, r["error"], *[""] * 5])
            continue
        timing, peer = r["timing"], peers.get(row_of(r))
        spread = (timing["high"] - timing["low"]) / timing["median"]
        rows.append([
            *cells,
            r["mode"],
            f"{r['images_per_second']:,.0f}",
            f"{timing['median'] * 1e3:.2f}",
            f"{spread:.1%}",
            "" if peer is None else f"{r['images_per_second'] / peer:.2f}",
            "" if r["peak_bytes"] is None else f"{r['peak_bytes'] / 2**30:.2f}",
        ])  # fmt: skip
    header = [
        "model",
        "size × batch",
        "task",
        "contender",
        "best mode",
        "img/s",
        "ms",
        "spread",
        "÷ counterpart",
        "GiB",
    ]
    return table(header, rows)


def row_of(r: dict) -> tuple:
    return r["model"], r["img_size"], r["batch"], r["task"]


def ratio_table(results: Sequence[dict]) -> str:
    """A column for each size: the speed of each contender over that of the counterpart."""
    best = best_of(results)
    speeds = {(*row_of(r), r["contender"]): r["images_per_second"] for r in best if r["images_per_second"]}
    peers = peer_speeds(best)
    columns = list(dict.fromkeys((r["img_size"], r["batch"]) for r in results))
    rows = []
    for model, task in dict.fromkeys((r["model"], r["task"]) for r in results):
        for contender in CONTENDERS:
            if contender in PEERS:
                continue
            cells = []
            for size, batch in columns:
                at = (model, size, batch, task)
                ours, peer = speeds.get((*at, contender)), peers.get(at)
                cells.append(f"{ours / peer:.2f}" if ours and peer else "")
            if any(cells):
                rows.append([model, task, CONTENDERS[contender].title, *cells])
    return table(["model", "task", "÷ counterpart", *(f"{size} × {batch}" for size, batch in columns)], rows)
