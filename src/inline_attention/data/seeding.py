"""Seeds for random numbers that depend on their purpose only.

Augmentations of timm and torchvision draw from the global generators of `random`, NumPy and torch. All three are seeded
from (seed, epoch, sample) before each sample. So the result does not depend on the number of workers or ranks, or on
the step at which a resumed epoch starts.
"""

import hashlib
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive_seed(purpose: str, *parts: int) -> int:
    """A 63-bit seed from the purpose and the integers. It is the same in every process and on every platform."""
    payload = purpose.encode() + b"\0" + struct.pack(f"<{len(parts)}q", *parts)
    return int.from_bytes(hashlib.blake2b(payload, digest_size=8).digest(), "little") >> 1


def seed_generators(seed: int) -> None:
    """Seed the CPU generators that augmentations use. The model's CUDA generator is not changed."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


@contextmanager
def restored_generators() -> Iterator[None]:
    """Restore the three CPU generators at the end, so that loading in the main process does not change them."""
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
