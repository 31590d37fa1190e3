"""Time and memory of whole models: inference and training steps of classifiers and dense models."""

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from timm.layers import to_2tuple
from torch import Tensor, nn

from inline_attention.optimize import MODES, optimize
from inline_attention.printing import table

from .contenders import CONTENDERS, PEERS, Loss, Size, is_dense, split_dense, training_loss
from .record import fastest
from .timing import Call, Effort, Timing, describe_error, host_seconds, measure, synchronised

COMPILE_MODES = ("reduce-overhead", "max-autotune")
EAGER = "eager"
# Default (sizes, batch of each). A GPU needs large batches to be busy. They would take a CPU hours; its own defaults
# take about a minute.
SIZES_AND_BATCHES: dict[tuple[str, str], tuple[tuple[int, ...], tuple[int, ...]]] = {
    ("model", "cuda"): ((224,), (64,)),
    ("model", "cpu"): ((224,), (2,)),
    ("sweep", "cuda"): ((224, 384, 640, 1024, 2048), (256, 128, 64, 32, 8)),
    ("sweep", "cpu"): ((112, 224, 448), (4, 2, 1)),
}
DENSE_BATCHES = {"infer": 1, "train": 2}  # as published; UperNet's batch norm cannot train on fewer than two images


@dataclass(frozen=True)
class Setting:
    """One row of a table: a model at a size and a batch size, in inference or training."""

    model: str
    img_size: Size
    batch: int
    training: bool

    def __str__(self) -> str:
        return f"{self.model} {describe_size(self.img_size)}×{self.batch} {self.task}"

    @property
    def task(self) -> str:
        return "train" if self.training else "infer"

    def facts(self) -> dict[str, Any]:
        """The fields of a `ContenderResult` that the setting determines."""
        return dict(model=self.model, img_size=self.img_size, batch=self.batch, task=self.task)

    @property
    def is_latency(self) -> bool:
        """Whether to wait for the end of each call. Batch 1 is the usual batch of a dense model, not a special case."""
        return self.batch == 1 and not self.training and not is_dense(self.model)


def describe_size(img_size: "Size | list[int]") -> str:
    return str(img_size) if isinstance(img_size, int) else "×".join(map(str, img_size))


@dataclass(frozen=True, kw_only=True)
class ContenderResult:
    """The result of one contender in one mode. A failed one has an error."""

    model: str
    img_size: Size
    batch: int
    task: str
    contender: str
    mode: str
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class ModelResult(ContenderResult):
    """`peak_bytes` counts parameters, optimiser state and activations, but not the images.

    `host_seconds`: until a call returns, where a GPU's latency was measured.
    """

    timing: Timing | None
    images_per_second: float | None
    peak_bytes: int | None
    host_seconds: float | None = None


def inference_step(model: nn.Module, images: Tensor, autocast: Callable[[], Any]) -> Call:
    model.eval()

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()  # the outputs of the last step are no longer needed
        with torch.no_grad(), autocast():
            model(images)

    return step


def training_step(model: nn.Module, loss_of: Loss, autocast: Callable[[], Any]) -> Call:
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


def in_precision(device: torch.device, dtype: torch.dtype) -> Callable[[], Any]:
    """A factory of autocast contexts, which do nothing for float32."""
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
    optimized: bool = True  # by `optimize`; otherwise by torch.compile alone, as a peer is used


def prepare(candidate: Candidate, device: torch.device) -> tuple[Call, int | None]:
    """The step of a candidate, compiled and warm, and the memory it takes."""
    mode = candidate.mode
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()  # otherwise the first candidate is charged for all of them
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    model = candidate.build().to(device)
    model.train(candidate.training)
    if mode != EAGER and candidate.optimized:
        optimize(model, mode=mode)
    elif mode != EAGER:
        model.compile(mode=mode)
    step = candidate.step_of(model)
    peak = None
    for call in range(WARM_UP):
        if device.type == "cuda" and call == 1:  # do not count the memory of compilation and tuning
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    return step, peak


def each_size_compiled() -> AbstractContextManager[None]:
    """Compile each size by itself. A graph for several sizes would be slower than one made for a single size."""
    return torch._dynamo.config.patch(automatic_dynamic_shapes=False, recompile_limit=64)


class Measured(NamedTuple):
    """Of one candidate."""

    timing: Timing | str  # or the error
    peak_bytes: int | None
    host_seconds: float | None  # where latency is measured, on a GPU


def compare(
    candidates: Mapping[str, Candidate],
    *,
    device: torch.device,
    effort: Effort,
    before_timing: Callable[[], None] = lambda: None,
    log: Callable[[str], None] = lambda line: None,
) -> dict[str, Measured]:
    """All candidates are built first and then timed in turn."""
    steps: dict[str, Call] = {}
    peaks: dict[str, int | None] = {}
    errors: dict[str, str] = {}
    hosts: dict[str, float] = {}
    with each_size_compiled():
        for key, candidate in candidates.items():
            try:
                steps[key], peaks[key] = prepare(candidate, device)
                log(f"ready: {key}")
            except Exception as error:  # the other contenders go on
                errors[key] = describe_error(error)
                log(f"failed: {key}: {errors[key]}")
                _collect(device)
        before_timing()
        calls = {key: synchronised(step, device) if candidates[key].latency else step for key, step in steps.items()}
        outcome = {**measure(calls, device=device, effort=effort), **errors}
        for key, step in steps.items():
            if candidates[key].latency and device.type == "cuda" and isinstance(outcome[key], Timing):
                hosts[key] = host_seconds(step, device)
    steps.clear()
    calls.clear()
    release_graphs(device)
    return {key: Measured(outcome[key], peaks.get(key), hosts.get(key)) for key in candidates}


def default_modes(device: torch.device) -> list[str]:
    """The modes for classifiers. Both need CUDA. On a CPU, compiling takes longer than all measurements."""
    return list(COMPILE_MODES) if device.type == "cuda" else [EAGER]


def default_dense_modes(*, training: bool) -> list[str]:
    """CUDA graphs only in inference; in a detector they cover the backbone and the pyramid."""
    return [EAGER, "default"] if training else [EAGER, "default", "reduce-overhead"]


def default_sizes(
    kind: str, device: torch.device, *, img_sizes: Sequence[int] | None, batches: Sequence[int] | None
) -> tuple[Sequence[int], Sequence[int]]:
    """The sizes and batches of "model" or "sweep": those that are given, and defaults for the others."""
    if img_sizes is None:
        img_sizes, usual = SIZES_AND_BATCHES[kind, device.type]
    else:  # use the same batch for all sizes
        usual = SIZES_AND_BATCHES["model", device.type][1]
    return img_sizes, usual if batches is None else batches


def usable_modes(modes: Sequence[str], device: torch.device) -> list[str]:
    """The modes that make a difference on the device."""
    if device.type == "cuda":
        return list(modes)
    return [mode for mode in modes if mode in (EAGER, "default")] or ["default"]


def make_candidates(
    setting: Setting,
    *,
    contenders: Sequence[str],
    modes: Sequence[str],
    device: torch.device,
    dtype: torch.dtype,
    cast_weights: bool = False,
) -> dict[tuple[str, str], Candidate]:
    """(contender, mode) → candidate. All of them see the same random images.

    With `cast_weights` there is no autocast: weights, images and the residual stream are in `dtype`.
    """
    stream = dtype if cast_weights else torch.float32
    images = torch.randn(setting.batch, 3, *to_2tuple(setting.img_size), device=device, dtype=stream)
    autocast = in_precision(device, torch.float32 if cast_weights else dtype)

    def build(contender: str) -> nn.Module:
        return CONTENDERS[contender].build(setting.model, setting.img_size).to(stream)

    def step_of(model: nn.Module) -> Call:
        inputs = images[:, : getattr(model, "in_chans", 3)].contiguous()
        if setting.training:
            return training_step(model, training_loss(setting.model, inputs), autocast)
        return inference_step(model, inputs, autocast)

    return {
        (contender, mode): Candidate(
            partial(build, contender),
            mode,
            step_of,
            training=setting.training,
            latency=setting.is_latency,
            optimized=CONTENDERS[contender].optimized,
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
    cast_weights: bool = False,
    before_timing: Callable[[], None] = lambda: None,
    log: Callable[[str], None] = lambda line: None,
) -> list[ModelResult]:
    """Every contender in every mode. All are built first and then timed in turn. No modes: those of dense models."""
    modes = usable_modes(modes or default_dense_modes(training=setting.training), device)
    candidates = make_candidates(
        setting, contenders=contenders, modes=modes, device=device, dtype=dtype, cast_weights=cast_weights
    )
    named = {f"{contender} {mode}": candidate for (contender, mode), candidate in candidates.items()}
    effort = effort.for_latency() if setting.is_latency else effort
    outcome = compare(
        named, device=device, effort=effort, before_timing=before_timing, log=lambda line: log(f"{setting}: {line}")
    )
    results = []
    for contender, mode in candidates:
        timing, peak, host = outcome[f"{contender} {mode}"]
        timed = timing if isinstance(timing, Timing) else None
        results.append(
            ModelResult(
                **setting.facts(),
                contender=contender,
                mode=mode,
                timing=timed,
                images_per_second=None if timed is None else setting.batch / timed.median,
                peak_bytes=peak,
                host_seconds=host,
                error=timing if isinstance(timing, str) else None,
            )
        )
    return results


def failed_results(
    setting: Setting, error: str, contenders: Sequence[str], modes: Sequence[str] | None
) -> list[ModelResult]:
    """The results of a setting that could not be measured at all."""
    modes = modes or default_dense_modes(training=setting.training)
    nothing: dict[str, Any] = dict(error=error, timing=None, images_per_second=None, peak_bytes=None)
    return [
        ModelResult(**setting.facts(), contender=contender, mode=mode, **nothing)
        for contender in contenders
        for mode in modes
    ]


def release_graphs(device: torch.device) -> None:
    """Free the caches of torch.compile, which hold the memory of CUDA graphs."""
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


def make_dense_settings(
    models: Sequence[str], *, img_size: tuple[int, int] | None, batch: int | None, tasks: Sequence[str]
) -> list[Setting]:
    """Each dense model in each task, by default at the size and batch of the published cost and training."""
    if batch is not None and batch < 1:
        raise ValueError(f"--batch-size {batch}: expected 1 or more")
    settings = []
    for model in models:
        dense = split_dense(model)
        assert dense is not None
        for task in tasks:
            setting = Setting(model, img_size or dense[0].size, batch or DENSE_BATCHES[task], task == "train")
            if model.startswith("upernet-") and setting.training and setting.batch == 1:
                raise ValueError(
                    f"--batch-size 1: {model} needs 2 images or more to train, for a batch norm over the mean of an "
                    "image; give --batch-size 2, or --infer"
                )
            settings.append(setting)
    return settings


def check_modes(modes: Sequence[str] | None) -> None:
    if unknown := [mode for mode in modes or () if mode not in (*MODES, EAGER)]:
        raise ValueError(f"there is no mode {', '.join(unknown)}; expected some of {', '.join((*MODES, EAGER))}")


def row_of(r: dict) -> tuple:
    """The key of a row: results that differ only in contender and mode share it."""
    size = r["img_size"]
    return r["model"], size if isinstance(size, int) else tuple(size), r["batch"], r["task"]


def best_of(results: Sequence[dict]) -> list[dict]:
    return fastest(results, row_of)


def fastest_peers(best: Sequence[dict]) -> dict[tuple, dict]:
    """The fastest softmax model of each row. All ratios are over it."""
    peers: dict[tuple, dict] = {}
    for r in best:
        if r["contender"] in PEERS and r["images_per_second"]:
            row = row_of(r)
            peers[row] = max(peers.get(row, r), r, key=lambda one: one["images_per_second"])
    return peers


def _ratio(ours: float | None, theirs: float | None) -> str:
    return f"{ours / theirs:.2f}" if ours and theirs else ""


def model_table(results: Sequence[dict]) -> str:
    """A row for each contender in its best mode, with its speed and memory over those of the counterpart.

    The column "host ms" appears where latency was measured on a GPU.
    """
    best = best_of(results)
    peers = fastest_peers(best)
    hosts = any(r.get("host_seconds") for r in best)
    rows = []
    for r in best:
        size = f"{describe_size(r['img_size'])} × {r['batch']}"
        cells = [r["model"], size, r["task"], CONTENDERS[r["contender"]].title]
        if r["timing"] is None:
            rows.append([*cells, r["error"], *[""] * (7 if hosts else 6)])
            continue
        timing, peer = r["timing"], peers.get(row_of(r), {})
        speed = r["images_per_second"]
        rows.append([
            *cells,
            r["mode"],
            f"{speed:,.0f}" if speed >= 100 else f"{speed:.1f}",
            f"{timing['median'] * 1e3:.2f}",
            *([f"{r['host_seconds'] * 1e3:.2f}" if r.get("host_seconds") else ""] if hosts else []),
            f"{(timing['high'] - timing['low']) / timing['median']:.1%}",
            _ratio(speed, peer.get("images_per_second")),
            "" if r["peak_bytes"] is None else f"{r['peak_bytes'] / 2**30:.2f}",
            _ratio(r["peak_bytes"], peer.get("peak_bytes")),
        ])  # fmt: skip
    header = [
        "model", "size × batch", "task", "contender", "best mode", "img/s", "ms", *(["host ms"] if hosts else []),
        "spread", "speed ÷ softmax", "GiB", "GiB ÷ softmax",
    ]  # fmt: skip
    return table(header, rows)


def ratio_table(results: Sequence[dict]) -> str:
    """A column for each size: the speed of each contender over that of the counterpart. Empty without counterparts."""
    best = best_of(results)
    speeds = {(*row_of(r), r["contender"]): r["images_per_second"] for r in best if r["images_per_second"]}
    peers = fastest_peers(best)
    columns = list(dict.fromkeys(row_of(r)[1:3] for r in results))
    rows = []
    for model, task in dict.fromkeys((r["model"], r["task"]) for r in results):
        for contender in CONTENDERS:
            if contender in PEERS:
                continue
            cells = []
            for size, batch in columns:
                at = (model, size, batch, task)
                cells.append(_ratio(speeds.get((*at, contender)), peers.get(at, {}).get("images_per_second")))
            if any(cells):
                rows.append([model, task, CONTENDERS[contender].title, *cells])
    sizes = [f"{describe_size(size)} × {batch}" for size, batch in columns]
    return table(["model", "task", "speed ÷ softmax", *sizes], rows) if rows else ""
