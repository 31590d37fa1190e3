"""What the kernels' launches depend on in a GPU, why they do not run on some GPUs, and the launch. Needs Triton."""

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

INTERPRETED = triton.knobs.runtime.interpret

# Tensor cores of older GPUs have neither bfloat16 nor tf32.
LEAST_CAPABILITY = (8, 0)

# Most programs on the second and third axis of a launch grid.
MOST_ON_AN_AXIS = 65_535


class Limits(NamedTuple):
    """What a GPU has."""

    multiprocessors: int
    shared_memory: int  # most bytes of one program


# Assumed limits of Triton's interpreter: few multiprocessors, so that small tests have work for all of them.
INTERPRETER = Limits(multiprocessors=4, shared_memory=1 << 20)


@functools.cache
def _properties(device: torch.device) -> Limits:
    found = torch.cuda.get_device_properties(device)
    return Limits(found.multi_processor_count, found.shared_memory_per_block_optin)


def limits_of(device: torch.device) -> Limits:
    return INTERPRETER if INTERPRETED else _properties(device)


class Parts(NamedTuple):
    """How many parts the tokens of a sample are split into."""

    number: int
    most: int  # how many a kernel adds: a power of two, no less than the number


def parts_of(
    tokens: int,
    programs: int,
    multiprocessors: int,
    *,
    per_multiprocessor: int,
    step: int,
    longest: int,
    most: int,
    least: int = 0,
) -> Parts:
    """Into how many parts the sums over a sample's tokens are split.

    Args:
        tokens: of the longest sample.
        programs: there are for one part: samples × blocks of heads.
        multiprocessors: of the GPU.
        per_multiprocessor: programs that it should get. There are as many parts as that takes,
        most: but no more than this (a power of two),
        step: no more than there are steps of so many tokens,
        least: or this many, if there are fewer steps,
        longest: and enough that no part has more tokens than this. It comes before `most`.
    """
    while most > 1 and programs * most > per_multiprocessor * multiprocessors:
        most //= 2
    while most * longest < tokens:
        most *= 2
    number = torch.sym_min(most, torch.sym_max(triton.cdiv(tokens, step), least))
    # A short sequence has few parts, and few are added. A symbolic length keeps the bound, which was found by
    # comparisons: a plain number for torch.compile, and one compiled kernel for all lengths.
    return Parts(number, triton.next_power_of_2(number) if isinstance(number, int) else most)


# Constants for torch.compile.
@torch.compiler.assume_constant_result
def capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@torch.compiler.assume_constant_result
def why_not(device: torch.device) -> str | None:
    """Why no kernel runs on a GPU, or None if they do."""
    if torch.version.hip is not None:
        return "the kernels are tuned and tested on NVIDIA GPUs, and this PyTorch is built for ROCm"
    if torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return f"the kernels need a GPU of compute capability 8.0 (Ampere) or above, and {device} has less"
    return None


@torch.compiler.assume_constant_result
def why_not_memory(needed: int, device: torch.device) -> str | None:
    """Why a kernel cannot run that takes so many bytes of shared memory, or None if it can."""
    most = limits_of(device).shared_memory
    if needed <= most:
        return None
    return f"a program takes {needed // 1024} KiB of shared memory, and {device} has {most // 1024}"


def launch(kernel: Any, grid: tuple[int, ...]) -> Any:
    return (kernel if INTERPRETED else torch.library.wrap_triton(kernel))[grid]


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Makes a tensor's device the current one, where Triton launches. It ignores the device of its arguments."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
