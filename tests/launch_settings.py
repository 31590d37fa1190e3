"""Times other launch settings than those of `fused.config.STEPS`, for `gpu_check.py settings`."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from kernel_cases import DEVICE, DTYPES, GPU

from inline_attention.bench.op import CONTENDERS, Case, Inputs, bind, draw_sets, in_turn
from inline_attention.bench.timing import Effort, Timing, measure
from inline_attention.ops.fused import config
from inline_attention.ops.fused.config import Steps

EFFORTS = {"fused": "plain", "linear": "divide", "mala": "magnitude", "tangent": "weighted"}  # contender → key of STEPS
SHORT = ("256,14,6x32",)  # of the kernels that take a whole sample
LONG = ("32,40,6x32", "16,64,6x32", "64,28,12x32", "1,256,6x32", "8,128,6x64")
CASES = {name: SHORT if name in ("forward", "backward") else LONG for name in config.STEPS["plain"]}
if not GPU:  # to try this script in the interpreter
    CASES = dict.fromkeys(CASES, ("1,2,2x16",))


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
    steps = [Steps(*each) for each in itertools.product((16, 32, 64), (1, 2, 4), (2, 3))] if GPU else [Steps(16, 1, 2)]
    return [Setting(*each) for each in itertools.product(kinds, kernels, [None, *steps])]


@contextmanager
def applied(setting: Setting) -> Iterator[None]:
    effort = EFFORTS[setting.kind]
    steps = dict(config.STEPS[effort])
    try:
        if setting.steps is not None:
            config.STEPS[effort][setting.kernel] = setting.steps
        yield
    finally:
        config.STEPS[effort] = steps


def draw(case: str) -> list[Inputs]:
    return draw_sets(Case.parse(case), device=torch.device(DEVICE), dtype=DTYPES[-1])


def compile_one(share: tuple[Setting, str]) -> str | None:
    """Compiles the kernels of a setting, for Triton's cache on disk. Says why it cannot."""
    setting, case = share
    try:
        with applied(setting):
            bind(CONTENDERS[setting.kind], draw(case)[0], setting.direction)()
    except Exception as error:  # the other settings are timed
        return f"{share}: {error!r}"[:300]
    return None


def time_one(setting: Setting, case: str, inputs: Mapping[str, list[Inputs]]) -> dict[str, Any]:
    """Microseconds of the whole operation, or why it cannot run."""
    calls = [bind(CONTENDERS[setting.kind], x, setting.direction) for x in inputs[case]]
    device = torch.device(DEVICE)
    timing: Timing | str
    try:
        with applied(setting):
            call, _ = in_turn(calls, device)
        timing = measure({"": call}, device=device, effort=Effort(rounds=5, seconds=0.002))[""]
    except Exception as error:  # such as out of resources; the other settings are timed
        timing = repr(error)[:300]
    micros = 1e6 * timing.shared(len(calls)).median if isinstance(timing, Timing) else None
    return dict(setting._asdict(), case=case, micros=micros, error=None if micros else timing)


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
