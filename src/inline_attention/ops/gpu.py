"""What launches need to know about a GPU, why kernels do not run on some GPUs, and the launch itself. Needs Triton."""

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

INTERPRETED = triton.knobs.runtime.interpret

# Tensor cores of older GPUs have neither bfloat16 nor tf32.
LEAST_CAPABILITY = (8, 0)

# Registers of a multiprocessor.
REGISTERS = 65_536

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


class Chip(NamedTuple):
    """The key of a table of measurements. GPUs of one capability differ: an H20, or a slice of an H200, is slower."""

    major: int
    minor: int
    multiprocessors: int


H200 = Chip(9, 0, 132)  # an H100 SXM has the same numbers, and was not measured


# torch.compile calls these while it traces, and takes their results as constants.
@torch.compiler.assume_constant_result
def chip_of(device: torch.device) -> Chip:
    return Chip(*torch.cuda.get_device_capability(device), limits_of(device).multiprocessors)


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
    """Makes the device of x current. Triton launches on the current device, wherever its arguments are."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
