"""Measures launch settings of the kernels on this GPU, for `inline bench tune` and `tests/gpu_check.py`."""
