"""Without a GPU, Triton's kernels run in its interpreter, and tests marked `gpu` are skipped.

The interpreter has to be chosen before Triton is imported for the first time. PyTorch has one thread, here and in the
processes that tests start: their tensors are small, and more threads than cores slow each other down.
"""

import atexit
import gc
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

os.environ["OMP_NUM_THREADS"] = "1"  # in other processes
torch.set_num_threads(1)

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# What somebody measured on this machine with `inline bench tune` decides nothing: there is no such folder.
os.environ["INLINE_TUNED"] = str(Path(__file__).with_name("nothing-tuned"))


def pytest_collectstart() -> None:
    gc.disable()  # imports leave little garbage


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Modules live until the end. Not looking through them for garbage saves 7% of the tests' CPU time."""
    gc.freeze()
    gc.set_threshold(10_000)  # new objects between searches: the default of 700 costs another 5%
    gc.enable()
    atexit.register(gc.unfreeze)  # extension modules report what outlives them


@pytest.fixture
def without_pictures() -> Iterator[None]:
    """Runs in this process draw nothing."""
    import training_runs

    with training_runs.without_pictures():
        yield


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Every torch.empty is filled with NaN, so that what a kernel leaves unwritten shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before)


if torch.cuda.is_available():

    @pytest.fixture(autouse=True)
    def _leave_the_gpu() -> Iterator[None]:
        """Memory goes back to the GPU, which the processes of a run share. A large test would keep the most it had."""
        yield
        torch.cuda.empty_cache()


@pytest.fixture(scope="session", autouse=True)
def _short_timings() -> Iterator[None]:
    """No test looks at how long a benchmark's calls took: each is timed twice."""
    from inline_attention.bench.timing import Effort

    choose = Effort.choose
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Effort, "choose", lambda *, quick: replace(choose(quick=quick), rounds=2, seconds=0.0))
        yield


@pytest.fixture(scope="session", autouse=True)
def _quick_interpreter() -> None:
    if torch.cuda.is_available():
        return
    try:
        import quick_interpreter
    except ImportError:
        return  # no Triton
    quick_interpreter.install()
