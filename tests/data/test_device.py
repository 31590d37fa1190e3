"""Batches that arrive on a CUDA device: the same as on the CPU, and without making the host wait."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from inline_attention.data import DataConfig, Mixup, open_data
from inline_attention.tasks.classification.evaluation import evaluate

pytestmark = pytest.mark.gpu

VARIANTS = [
    pytest.param({"workers": 2}, id="files"),
    pytest.param({"workers": 2, "in_memory": True}, id="decoded in memory"),
    pytest.param({"workers": 0, "in_memory": True, "augment": False}, id="on the device"),
    pytest.param(
        {"workers": 0, "in_memory": True, "augment_on_device": True, "auto_augment": None, "random_erase": 0.0},
        id="augmented on the device",
    ),
    pytest.param({"workers": 0, "in_memory": True, "augment_on_device": True}, id="published augmentation"),
]


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def config(folder: Path, **options: object) -> DataConfig:
    return DataConfig(**{"path": str(folder), "img_size": 16, "batch_size": 4, "random_erase": 0.5, **options})


@pytest.mark.parametrize("options", VARIANTS)
def test_training_batches(make_folder: Callable[..., Path], options: dict[str, object]) -> None:
    folder = make_folder(train={"a": 20, "b": 21}, val={"a": 5, "b": 6})
    on_cpu, on_gpu = (open_data(config(folder, **options), seed=1) for _ in range(2))
    on_gpu.to("cuda")
    mixup = Mixup(DataConfig(), num_classes=2, seed=1)
    weight = torch.randn(64, 64, device="cuda")
    found = []
    with no_synchronisation():
        for step, batch in enumerate(on_gpu.train.epoch(3)):
            images, targets = mixup(batch.images, batch.targets, epoch=3, step=step)
            for _ in range(50):  # the device is busy with this batch while the next one is transferred
                weight = weight @ weight / 64
            found.append((images, targets, batch.sample_ids))
            del batch, images, targets
    for step, (batch, gpu) in enumerate(zip(on_cpu.train.epoch(3), found, strict=True)):
        images, targets = mixup(batch.images, batch.targets, epoch=3, step=step)
        torch.testing.assert_close(gpu[0].cpu(), images, rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(gpu[1].cpu(), targets)
        assert torch.equal(gpu[2].cpu(), batch.sample_ids)


@pytest.mark.parametrize("options", VARIANTS)
def test_evaluation(make_folder: Callable[..., Path], options: dict[str, object]) -> None:
    folder = make_folder(train={"a": 4, "b": 4}, val={"a": 20, "b": 21})
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 2))
    data = open_data(config(folder, **options))
    on_cpu = evaluate(model, data.val, device="cpu")

    class NoSynchronisation(nn.Module):
        """From the first batch to the last forward pass nothing may wait; reading the counts at the end may."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model.cuda()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            torch.cuda.set_sync_debug_mode("error" if self.calls < data.val.max_batches else "default")
            return self.model(x)

    try:
        on_gpu = evaluate(NoSynchronisation(), data.val, device="cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert on_gpu.images == on_cpu.images == 41
    assert torch.equal(on_gpu.per_class, on_cpu.per_class)
    assert on_gpu.loss == pytest.approx(on_cpu.loss, rel=1e-5)
