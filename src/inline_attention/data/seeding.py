"""Random numbers that are a function of what they are for, not of who draws them.

timm's and torchvision's augmentations draw from the global generators of `random`, NumPy and torch. Seeding
the three from (seed, epoch, sample) before each sample makes the result independent of the number of
workers, of the number of ranks and of the step at which a resumed epoch starts.
"""

import hashlib
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive_seed(purpose: str, *parts: int) -> int:
    """A 63-bit seed from the purpose and the integers; the same in every process and on every platform."""
    payload = purpose.encode() + b"\0" + struct.pack(f"<{len(parts)}q", *parts)
    return int.from_bytes(hashlib.blake2b(payload, digest_size=8).digest(), "little") >> 1


def seed_generators(seed: int) -> None:
    """Seed the CPU generators that augmentations use; a CUDA generator (the model's) is left alone."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


@contextmanager
def restored_generators() -> Iterator[None]:
    """Put the three CPU generators back afterwards: loading in the main process must not disturb it."""
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
