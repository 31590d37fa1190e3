"""Our backbones under the decoders of segmentation_models_pytorch."""

import pytest
import torch
from on_use import OnUse
from small import shrunk

smp = OnUse("segmentation_models_pytorch")


def test_upernet_trains_one_step() -> None:
    model = smp.UPerNet("tu-inline_swin_tiny", encoder_weights=None, decoder_channels=32, classes=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, target = torch.randn(2, 3, 64, 96), torch.randint(3, (2, 64, 96))
    losses = []
    for _ in range(2):
        logits = model(x)
        assert logits.shape == (2, 3, 64, 96)
        loss = torch.nn.functional.cross_entropy(logits, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[1] < losses[0]


@pytest.mark.parametrize("name", ["inline_pvt_tiny", "inline_cswin_tiny"])
def test_the_other_pyramids(name: str) -> None:
    options = {key: value for key, value in shrunk(name).items() if key != "num_classes"}
    model = smp.Unet(f"tu-{name}", encoder_weights=None, classes=2, **options)
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 2, 64, 64)
