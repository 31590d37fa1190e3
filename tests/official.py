"""The official models' outputs, and the rule that made their weights and images. See reference/README.md."""

import functools
import gzip
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

REFERENCE = Path(__file__).parent / "reference"
CLASS_STEP = 8  # every eighth logit is kept


@functools.cache
def manifest() -> dict[str, Any]:
    return json.loads(gzip.decompress((REFERENCE / "manifest.json.gz").read_bytes()))


@functools.cache
def outputs() -> dict[str, Tensor]:
    with np.load(REFERENCE / "outputs.npz") as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays}


def weight(name: str, shape: Sequence[int]) -> Tensor:
    """The value of one parameter, from its official name and shape alone."""
    z = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode()))).standard_normal(shape)
    if name.endswith("bias"):
        z = 0.1 * z
    elif len(shape) == 1:  # scale of a norm
        z = 1 + 0.1 * z
    elif "pos_embed" in name or "token" in name or "bias_table" in name:
        z = 0.2 * z
    else:
        z = z / math.sqrt(np.prod(shape[1:]))
    return torch.from_numpy(z.astype(np.float32))


def state_dict(shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    return {name: weight(name, shape) for name, shape in shapes.items()}


def image(batch: int, height: int, width: int) -> Tensor:
    z = np.random.Generator(np.random.PCG64(0)).standard_normal((batch, 3, height, width))
    return torch.from_numpy(z.astype(np.float32))
