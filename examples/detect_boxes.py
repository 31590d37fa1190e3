"""Train torchvision's Faster R-CNN on a backbone of this package, from boxes alone.

The pictures are pieces of one photograph with a piece of the other one pasted on. Its place is the box.
"""

from collections import OrderedDict
from pathlib import Path

import numpy as np
import timm
import torch
from photo_data import pasted
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN
from torchvision.ops import FeaturePyramidNetwork, box_iou
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool
from torchvision.transforms.functional import to_pil_image, to_tensor
from torchvision.utils import draw_bounding_boxes

import inline_attention  # noqa: F401  (registers the models with timm)


class Backbone(nn.Module):
    out_channels = 64

    def __init__(self, **options: tuple[int, ...]) -> None:
        super().__init__()
        self.body = timm.create_model("inline_pvt_tiny", features_only=True, **options)  # maps at strides 4 to 32
        self.fpn = FeaturePyramidNetwork(self.body.feature_info.channels(), 64, extra_blocks=LastLevelMaxPool())

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return self.fpn(OrderedDict((str(level), x) for level, x in enumerate(self.body(images))))


def main() -> None:
    torch.manual_seed(0)
    made = [pasted(np.random.default_rng(seed)) for seed in range(84)]
    pictures = [to_tensor(picture) for picture, _ in made]
    targets = [dict(boxes=torch.tensor([box]).float(), labels=torch.tensor([1])) for _, box in made]
    small = dict(depths=(1, 1, 1, 1), embed_dims=(32, 64, 96, 128), num_heads=(1, 2, 3, 4))  # for a CPU
    model = FasterRCNN(Backbone(**small), num_classes=2, min_size=128, max_size=128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(40):
        batch = slice(2 * step, 2 * step + 2)
        loss = sum(model(pictures[batch], targets[batch]).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step + 1}  loss {loss.item():.2f}")
    with torch.no_grad():
        best = [found["boxes"][:1] for found in model.eval()(pictures[-4:])]
    overlaps = [box_iou(box, t["boxes"]).sum() for box, t in zip(best, targets[-4:], strict=True)]
    print("overlap of the most certain box with the true one:", " ".join(f"{value:.2f}" for value in overlaps))
    drawn = [draw_bounding_boxes(x, box, colors="yellow") for x, box in zip(pictures[-4:], best, strict=True)]
    Path("runs").mkdir(exist_ok=True)
    to_pil_image(torch.cat(drawn, 2)).save("runs/boxes.jpg")


if __name__ == "__main__":
    main()
