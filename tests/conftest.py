"""Where there is no GPU, Triton's kernels run in its interpreter, which is chosen before Triton is imported first."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
