"""Steps of the attention's kernels: tokens, warps, stages and registers, as in `ops.fused.config.STEPS`."""

import contextlib
import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from inline_attention.bench.op import CONTENDERS, Case, Inputs, bind, draw_sets
from inline_attention.bench.timing import Call, Effort
from inline_attention.ops import (
    gpu,
    inline_attention_projected,
    linear_attention_projected,
    tangent_attention_projected,
    tuned,
)
from inline_attention.ops.fused import config
from inline_attention.ops.fused.config import Steps

from .candidates import LEAST_GAIN, micros_of, time_calls

KINDS = {"fused": "plain", "linear": "divide", "mala": "magnitude", "tangent": "weighted"}  # contender → key of STEPS
KERNELS = tuple(config.STEPS["plain"])
WHOLE_SAMPLE = ("forward", "backward")  # kernels that take a whole sample, which is short
SHORT = ("256,14,6x32",)
LONG: tuple[str, ...] = ("32,40,6x32", "16,64,6x32", "64,28,12x32", "1,256,6x32", "8,128,6x64")
SPACE = [Steps(*each) for each in itertools.product((16, 32, 64), (1, 2, 4), (2, 3))]
REGISTERS: tuple[int, ...] = (128, 144, 168)  # fewer than these gained less than 1 % on an H200

# What a user waits for, by channels of a head.
TUNED_SHORT = {32: ("256,14,6x32",), 64: ("256,14,3x64",)}
TUNED_LONG = {32: ("32,40,6x32", "1,256,6x32"), 64: ("8,128,6x64",)}
if gpu.INTERPRETED:  # to try this in the interpreter
    SHORT, LONG, SPACE, REGISTERS = ("1,2,2x16",), ("1,7,2x16",), [Steps(16, 1, 2)], ()
    TUNED_SHORT, TUNED_LONG = {32: SHORT}, {32: LONG}

# The interpreter's bfloat16 is wrong.
DTYPES = [torch.float32, torch.float16, *([] if gpu.INTERPRETED else [torch.bfloat16])]


def cases_of(kernel: str) -> tuple[str, ...]:
    return SHORT if kernel in WHOLE_SAMPLE else LONG


class Setting(NamedTuple):
    """One kernel with other steps, and all others as they are. steps None: this one too."""

    kind: str
    kernel: str
    steps: Steps | None

    @property
    def direction(self) -> str:
        return "forward" if self.kernel in ("forward", "state", "output") else "forward+backward"


def all_settings(kinds: Iterable[str], kernels: Iterable[str]) -> list[Setting]:
    """Those of a kernel and kind come together, the present one first."""
    return [Setting(*each) for each in itertools.product(kinds, kernels, [None, *SPACE])]


@contextlib.contextmanager
def applied(setting: Setting) -> Iterator[None]:
    rows = () if setting.steps is None else ((tuple(setting.steps),),)
    keys = [tuned.key_of(KINDS[setting.kind], setting.kernel, channels) for channels in (32, 64)]
    with tuned.trying("steps", dict.fromkeys(keys, rows) if rows else {}):
        yield


def calls_of(setting: Setting, inputs: Sequence[Inputs]) -> list[Call]:
    def call(run: Call) -> object:
        with applied(setting):
            return run()

    return [partial(call, bind(CONTENDERS[setting.kind], x, setting.direction)) for x in inputs]


class Share(NamedTuple):
    setting: Setting
    case: str
    device: torch.device
    dtype: torch.dtype


def compile_one(share: Share) -> str | None:
    """Compiles the kernels of a setting, for Triton's cache on disk. Says why it cannot."""
    try:
        inputs = Inputs.draw(Case.parse(share.case), device=share.device, dtype=share.dtype)
        calls_of(share.setting, [inputs])[0]()
    except Exception as error:  # the other settings are timed
        return f"{share.setting} {share.case}: {error!r}"[:300]
    return None


class Timer:
    """Times settings on the same inputs. Those that compute something else than the present ones fail."""

    def __init__(self, *, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._inputs: dict[str, list[Inputs]] = {}
        self._expected: dict[tuple[str, ...], object] = {}

    def time(self, setting: Setting, case: str) -> dict[str, Any]:
        """Microseconds of the whole operation, or why it cannot run."""
        if case not in self._inputs:
            self._inputs[case] = draw_sets(Case.parse(case), device=self.device, dtype=self.dtype)
        inputs = self._inputs[case]
        key = (setting.kind, setting.direction, case)
        if key not in self._expected:
            with contextlib.suppress(Exception):  # the present steps need more than this GPU has
                self._expected[key] = calls_of(setting._replace(steps=None), inputs[:1])[0]()
        timings, failed = time_calls(
            {"": partial(calls_of, setting, inputs)},
            device=self.device, effort=Effort(rounds=5, seconds=0.002), expected=self._expected.get(key),
        )  # fmt: skip
        return dict(setting._asdict(), case=case, micros=micros_of(timings).get(""), error=failed.get(""))


# For `inline bench tune`


class Group(NamedTuple):
    """What one entry of the table is for."""

    effort: str
    kernel: str
    channels: int  # of a head

    def settings(self, space: Iterable[Steps | None]) -> list[Setting]:
        kinds = [kind for kind, effort in KINDS.items() if effort == self.effort]
        return [Setting(kind, self.kernel, steps) for kind in kinds for steps in space]

    @property
    def cases(self) -> tuple[str, ...]:
        return (TUNED_SHORT if self.kernel in WHOLE_SAMPLE else TUNED_LONG)[self.channels]


def groups() -> list[Group]:
    return [Group(*each) for each in itertools.product(config.STEPS, KERNELS, TUNED_LONG)]


def shares_of(group: Group, *, device: torch.device, dtype: torch.dtype) -> list[Share]:
    return [Share(setting, group.cases[0], device, dtype) for setting in group.settings([None, *SPACE])]


def time_group(group: Group, *, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """All settings on all cases, the fastest with fewer registers too. And the steps to take: None for the present."""
    timer = Timer(device=device, dtype=dtype)
    rows = [timer.time(setting, case) for setting in group.settings([None, *SPACE]) for case in group.cases]
    means = mean_micros(rows)
    fastest = min((steps for steps in means if steps), key=means.__getitem__, default=None)
    if fastest is not None:
        limited = group.settings([fastest._replace(registers=n) for n in REGISTERS])
        rows += [timer.time(setting, case) for setting in limited for case in group.cases]
        means = mean_micros(rows)
    present = means.pop(None, math.inf)
    if not means:
        raise RuntimeError(next((row["error"] for row in rows if row["error"]), "no setting runs"))
    chosen = None
    for steps in sorted(means, key=means.__getitem__):
        if steps is None or present < LEAST_GAIN * means[steps]:
            break
        if serves(group, steps, device=device):
            chosen = steps
            break
    return dict(rows=rows, steps=chosen, gain=present / means[chosen] if chosen and present < math.inf else None)


def mean_micros(rows: Iterable[Mapping[str, Any]]) -> dict[Steps | None, float]:
    """The geometric mean over cases and attentions, of the steps that ran in all of them."""
    by_steps: dict[Steps | None, list[float | None]] = {}
    for row in rows:
        by_steps.setdefault(row["steps"], []).append(row["micros"])
    return {
        steps: math.exp(statistics.fmean(math.log(n) for n in micros if n))
        for steps, micros in by_steps.items()
        if all(micros)
    }


def serves(group: Group, steps: Steps, *, device: torch.device) -> bool:
    """Whether the steps also run with masks and in every dtype, which may take more of the GPU."""
    for setting in group.settings([steps]):
        for dtype, case in itertools.product(DTYPES, group.cases[:1]):
            try:
                with applied(setting):
                    run_masked(setting, Inputs.draw(Case.parse(case), device=device, dtype=dtype))
            except Exception:  # such as out of resources
                return False
    return True


def run_masked(setting: Setting, x: Inputs) -> None:
    """Forward and backward with a mask of the tokens."""
    mask = torch.ones(x.qkv.shape[:2], dtype=torch.bool, device=x.qkv.device)
    options: dict[str, Any] = dict(
        local_weight=x.local_weight, grid=(x.case.height, x.case.width), num_prefix_tokens=x.case.prefix,
        token_mask=mask, query_mask=mask, backend="triton",
    )  # fmt: skip
    out = {
        "fused": partial(inline_attention_projected, x.qkv),
        "linear": partial(linear_attention_projected, x.qkv),
        "mala": partial(linear_attention_projected, x.qkv, normalization="magnitude", feature_map="elu_plus_one"),
        "tangent": partial(tangent_attention_projected, x.qkv, anchor=x.anchor),
    }[setting.kind](**options)
    torch.autograd.grad(out, [x.qkv, x.local_weight], x.grad_out)


def entries_of(rows: Mapping[Group, Mapping[str, Any]]) -> dict[str, dict[str, list[Any]]]:
    """The table: an entry for each group that has other steps than the present ones."""
    return {"steps": {tuned.key_of(*group): [[row["steps"]]] for group, row in rows.items() if row["steps"]}}


def describe(row: Mapping[str, Any]) -> str:
    if row["steps"] is None:
        return "as it is"
    tokens, warps, stages, registers = row["steps"]
    gain = f"{row['gain']:.2f} times as fast" if row["gain"] else "the present ones do not run"
    limit = f", {registers} registers" if registers else ""
    return f"{tokens} tokens, {warps} warps, {stages} stages{limit} ({gain})"


# For `tests/gpu_check.py`

HEADER = """| attention | kernel | case | now, µs | fastest: tokens, warps, stages | µs | ratio |
|---|---|---|---|---|---|---|"""


def lines_of(rows: list[dict[str, Any]]) -> list[str]:
    """For each kernel and case the present setting and the fastest one."""
    lines = []
    for key in dict.fromkeys((row["kind"], row["kernel"], row["case"]) for row in rows):
        timed = [row for row in rows if (row["kind"], row["kernel"], row["case"]) == key and row["micros"]]
        now = next((row["micros"] for row in timed if row["steps"] is None), None)
        best = min(timed, key=lambda row: row["micros"], default=None)
        if now is None or best is None:
            lines.append(f"| {' | '.join(key)} | failed | | | |")
            continue
        steps = "as it is" if best["steps"] is None else ", ".join(map(str, best["steps"]))
        lines.append(f"| {' | '.join(key)} | {now:.1f} | {steps} | {best['micros']:.1f} | {now / best['micros']:.3f} |")
    return lines
