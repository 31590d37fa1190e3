"""Where a step's time goes: the kernels of each contender (on a CPU, the operators), by name and by kind."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from inline_attention.printing import table

from .contenders import CONTENDERS
from .kernels import UNITS
from .model import (
    Candidate,
    ContenderResult,
    Setting,
    describe_size,
    each_size_compiled,
    make_candidates,
    prepare,
    release_graphs,
    row_of,
    usable_modes,
)
from .timing import Kernel, describe_error, profiled

STEPS = 10  # profiled, after the warm-up

PRODUCTS, ELEMENTWISE, OTHER = "matrix products", "norms, elementwise", "other"
# (pattern of a name, kind). The first match counts. The profiler reports names only. Attention that consists of matrix
# products and elementwise code (reference and textbook) is therefore counted as those.
KINDS = (
    (r"^triton_tem_\w*mm", PRODUCTS),  # Inductor's templates, which max-autotune tries
    (r"^triton_tem_\w*conv", "convolutions"),
    (r"^triton_[a-z]+_fused|cpp_fused", ELEMENTWISE),  # Inductor's; the name lists the fused operators
    (rf"^({'|'.join(UNITS)}|(scores|logsumexp|anchor_grad)_kernel)$", "attention"),
    (r"^(local_weight|local_weight_backward|weight_gradient)_kernel$", "attention"),
    (r"^mlp_", "mlp"),
    (r"^norm_linear_kernel$", PRODUCTS),
    (r"flash|fmha|sdpa|scaled_dot_product|inline_?attention", "attention"),
    (r"conv(?!ert)|fprop|dgrad|wgrad", "convolutions"),
    (r"gemm|gemv|nvjet|cutlass|splitk|^aten::b?(add)?b?mm$|mkl\w*_linear", PRODUCTS),
    (r"adam", "optimiser"),
    (r"elementwise|reduce_kernel|norm|softmax|gelu|^aten::(add|sub|mul|div|pow|copy|mean|sum)_?$", ELEMENTWISE),
)
SHOWN_SHARE = 0.02  # kernels with at least this share of a step have a row of their own in the table
NAME_WIDTH = 60


@dataclass(frozen=True, kw_only=True)
class ProfileResult(ContenderResult):
    """One kernel in one step; on a CPU, one operator without the operators that it calls."""

    kernel: str | None = None  # None: the contender failed
    microseconds: float = 0.0
    launches: float = 0.0


def kind_of(kernel: str) -> str:
    return next((kind for pattern, kind in KINDS if re.search(pattern, kernel, re.IGNORECASE)), OTHER)


def run_setting(
    setting: Setting,
    *,
    contenders: Sequence[str],
    mode: str,
    device: torch.device,
    dtype: torch.dtype,
    log: Callable[[str], None] = lambda line: None,
) -> list[ProfileResult]:
    """The kernels of every contender, the longest first, one contender after the other."""
    results: list[ProfileResult] = []
    candidates = make_candidates(
        setting, contenders=contenders, modes=usable_modes([mode], device), device=device, dtype=dtype
    )
    for (contender, used_mode), candidate in candidates.items():
        row = partial(ProfileResult, **setting.facts(), contender=contender, mode=used_mode)
        try:
            for kernel in profile_candidate(candidate, device):
                results.append(row(kernel=kernel.name, microseconds=kernel.seconds * 1e6, launches=kernel.launches))
            log(f"{setting}: profiled: {contender} {used_mode}")
        except Exception as error:  # the other contenders go on
            results.append(row(error=describe_error(error)))
            log(f"{setting}: failed: {contender} {used_mode}: {results[-1].error}")
        release_graphs(device)
    return results


def profile_candidate(candidate: Candidate, device: torch.device) -> list[Kernel]:
    """The kernels of one step."""
    # Inductor's loops on a CPU have no names in a profile unless they are compiled with them.
    names = torch._inductor.config.patch({"cpp.enable_kernel_profile": device.type == "cpu"})
    with each_size_compiled(), names:
        step, _ = prepare(candidate, device)
        return profiled(step, device=device, calls=STEPS)


def profile_table(results: Sequence[dict]) -> str:
    """For each contender: the whole step, its kinds of kernels, and the longest kernels of each kind."""
    steps: dict[tuple, list[dict]] = {}
    for r in results:
        steps.setdefault((*row_of(r), r["contender"], r["mode"]), []).append(r)
    rows = []
    for (model, size, batch, task, contender, mode), kernels in steps.items():
        cells = [model, f"{describe_size(size)} × {batch}", task, CONTENDERS[contender].title, mode]
        if kernels[0]["kernel"] is None:
            rows.append([*cells, kernels[0]["error"], "", "", "", ""])
            continue
        whole = _sum(kernels)
        kinds: dict[str, list[dict]] = {}
        for r in kernels:
            kinds.setdefault(kind_of(r["kernel"]), []).append(r)
        lines = [("all", "", kernels)]
        for kind, part in sorted(kinds.items(), key=lambda item: -_sum(item[1])):
            lines.append((kind, "", part))
            lines += [("", _shortened(r["kernel"]), [r]) for r in part if r["microseconds"] >= SHOWN_SHARE * whole]
        for kind, name, part in lines:
            launches = sum(r["launches"] for r in part)
            rows.append([*cells, kind, name, f"{_sum(part):,.1f}", f"{_sum(part) / whole:.1%}", f"{launches:,.0f}"])
    header = ["model", "size × batch", "task", "contender", "mode", "kind", "kernel", "µs a step", "share", "calls"]
    return table(header, rows)


def _sum(kernels: Sequence[dict]) -> float:
    return sum(r["microseconds"] for r in kernels)


def _shortened(name: str) -> str:
    """A name short enough for a table. The names of C++ kernels include all template arguments."""
    name = name.replace("|", "¦")
    return name if len(name) <= NAME_WIDTH else f"{name[: NAME_WIDTH - 1]}…"
