"""Our models in a Trainer of Lightning. They are plain modules, and it needs to know nothing about them."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from small import shrunk
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import inline_attention  # noqa: F401  (registers the models)


def test_train_save_and_load(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning", reason="Lightning is not installed (pip install lightning)")

    class Classifier(lightning.LightningModule):
        def __init__(self, name: str, **options: Any) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.model = timm.create_model(name, **options)

        def forward(self, images: Tensor) -> Tensor:
            return self.model(images)

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            loss = F.cross_entropy(self(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=3e-3)

    torch.manual_seed(0)
    images, labels = torch.randn(16, 3, 64, 64), torch.arange(16) % 2
    images += 2.0 * labels[:, None, None, None]  # the classes differ in brightness
    module = Classifier("inline_pvt_tiny", **shrunk("inline_pvt_tiny", num_classes=2))
    trainer = lightning.Trainer(
        max_epochs=6,
        accelerator="cpu",
        default_root_dir=tmp_path,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(images, labels), batch_size=8))
    assert trainer.callback_metrics["loss"] < 0.5  # log 2 without learning
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    again = Classifier.load_from_checkpoint(tmp_path / "model.ckpt", weights_only=True).eval()
    torch.testing.assert_close(again(images), module.eval()(images))
