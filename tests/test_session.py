"""The settings of the test session itself."""

import os

import torch


def test_one_thread_however_pytest_is_started() -> None:
    assert torch.get_num_threads() == 1
    assert os.environ["OMP_NUM_THREADS"] == "1"  # of the processes that tests start
