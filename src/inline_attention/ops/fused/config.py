"""Launch parameters of the attention's kernels, and what the kernels can hold."""

from typing import NamedTuple

from ..gpu import INTERPRETED


class Steps(NamedTuple):
    """Launch parameters of a kernel that steps over tokens."""

    tokens: int  # per step
    warps: int
    stages: int
    registers: int = 0  # most of a thread, in half precision; 0: as many as the compiler takes


class Config(NamedTuple):
    """Launch parameters, one set for every length, resolution and batch.

    They were chosen among those timed on an H200 in bfloat16 with heads of 32 channels, for all shapes together. Other
    GPUs and widths run with them too, but were not tuned: `inline bench tune` measures the steps of another GPU, and
    `plan.step_settings` takes them from its file. `part` is there for accuracy and `summed_parts` for compile time. The
    numbers of programs and of parts, and the rows of a tile, follow the GPU's multiprocessors. Nothing is autotuned at
    run time. The steps decide how sums are rounded, and autotuning could choose other steps in the next process.
    """

    tokens: int = 64  # most tokens per step of a loop
    columns: int = 16  # of a tile of the map, a power of two; as few as a narrower map needs
    tile_rows: tuple[int, ...] = tuple(range(4, 25))  # of a tile of the map, from which `plan.tile_rows` chooses
    tile_start: int = 6  # rows of a tile that take as long as its start and end
    steps: int = 4  # steps over tokens in a tile where there is no map
    state_programs: int = 8  # programs per multiprocessor that the tokens of a sample are split for
    scaled_state_programs: int = 16  # the same for "divide" and "magnitude"
    most_parts: int = 128  # most parts for that; a power of two
    part: int = 2048  # most tokens in a part: tensor cores sum a part, and round towards zero
    summed_parts: int = 128  # parts that are added at once
    fused_tokens: int = 256  # most tokens of a sample that one program handles alone, if there are at least
    fused_programs: int = 4  # this many programs per multiprocessor
    one_launch: bool = False  # take `short_kernel` for all that needs no gradients, measured or not; for tests


CONFIG = Config()

# By what the attention does with a token, and by kernel. The more it does, the fewer tokens its registers hold. With
# fewer registers than the compiler would take, more programs share a multiprocessor.
STEPS = {
    "plain": {
        "state": Steps(32, 2, 3),
        "output": Steps(32, 2, 3, 128),
        "forward": Steps(64, 2, 3, 144),
        "grad_state": Steps(64, 2, 2, 144),
        "grad": Steps(32, 2, 3, 168),
        "backward": Steps(32, 2, 3),
    },
    "weighted": {
        "state": Steps(32, 2, 3),
        "output": Steps(32, 2, 3, 128),
        "forward": Steps(32, 2, 3),
        "grad_state": Steps(64, 2, 2, 144),
        "grad": Steps(32, 2, 3),
        "backward": Steps(64, 2, 3),
    },
    "divide": {
        "state": Steps(16, 1, 3),
        "output": Steps(32, 1, 3),
        "forward": Steps(32, 2, 3, 144),
        "grad_state": Steps(16, 1, 3),
        "grad": Steps(32, 2, 3, 168),
        "backward": Steps(32, 2, 3, 168),
    },
    "magnitude": {
        "state": Steps(16, 1, 3),
        "output": Steps(32, 2, 3, 128),
        "forward": Steps(32, 2, 3, 144),
        "grad_state": Steps(16, 1, 3),
        "grad": Steps(32, 2, 3, 168),
        "backward": Steps(16, 2, 3, 168),
    },
}

# A step costs the same at any size in the interpreter. Small steps take small test shapes through every loop.
if INTERPRETED:
    CONFIG = Config(
        tokens=16, tile_rows=(2,), steps=1, state_programs=2, scaled_state_programs=2, part=64, summed_parts=2,
        fused_tokens=40, fused_programs=0,
    )  # fmt: skip

# Most channels of a head.
MOST_CHANNELS = 128

# Most channels of a head whose kernels fit the shared memory of every GPU they run on: 99 KiB from capability 8.6 on.
# With more channels a program takes up to WIDE_MEMORY bytes. `tests/kernel_builds.py` finds out what the kernels take.
WITHIN_ANY_MEMORY = 64
WIDE_MEMORY = 160 * 1024

# Least channels of a program, if there are enough heads. They fill a memory sector and a tensor core's tile.
LEAST_CHANNELS = 32

# Most elements from one token to the next. Offsets in a step of up to 256 tokens have 32 bits, and so have all in a
# sample that one program handles alone.
LONGEST_STRIDE = 2**31 // 256 - 1
