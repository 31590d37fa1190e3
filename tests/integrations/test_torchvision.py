"""Our pyramids under torchvision's detectors."""

from collections import OrderedDict

import pytest
import timm
import torch
from small import shrunk
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

import inline_attention  # noqa: F401  (registers the models)


class Pyramid(nn.Module):
    """A backbone as torchvision's detectors take it: maps by name, all with the same channels."""

    out_channels = 16

    def __init__(self, name: str) -> None:
        super().__init__()
        options = {key: value for key, value in shrunk(name).items() if key != "num_classes"}
        self.body = timm.create_model(name, features_only=True, **options)
        channels = self.body.feature_info.channels()
        self.fpn = FeaturePyramidNetwork(channels, self.out_channels, extra_blocks=LastLevelMaxPool())

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return self.fpn(OrderedDict((str(level), features) for level, features in enumerate(self.body(images))))


@pytest.mark.slow
def test_faster_rcnn_learns_a_box() -> None:
    torch.manual_seed(0)
    model = FasterRCNN(Pyramid("inline_swin_tiny"), num_classes=2, min_size=64, max_size=96)
    picture = torch.zeros(3, 64, 96)
    picture[:, 16:48, 24:72] = 1
    target = dict(boxes=torch.tensor([[24.0, 16.0, 72.0, 48.0]]), labels=torch.tensor([1]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(12):
        loss = sum(model([picture], [target]).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(parameter.grad is not None for parameter in model.backbone.body.parameters() if parameter.requires_grad)
    assert losses[-1] < 0.7 * losses[0]
    (found,) = model.eval()([picture])
    assert found["boxes"].shape[1] == 4
