"""Turn the softmax attention of a trained model into a linear one, and look at what that changes."""

from pathlib import Path

import matplotlib.pyplot as plt
import torch
from photo_data import PHOTOS, crops
from timm.data import create_transform, resolve_data_config
from torch import Tensor, nn

from inline_attention import create_model, linearize
from inline_attention.linearize import calibrate


@torch.no_grad()
def compare(model: nn.Module, images: Tensor, before: Tensor, axis: plt.Axes) -> str:
    """How far the predictions are from those of the softmax model"""
    after = model(images).softmax(1)
    axis.plot([0, 1], [0, 1], color="0.8")
    axis.plot(before.flatten(), after.flatten(), ".")  # each class of each image
    same = (after.argmax(1) == before.argmax(1)).float().mean()
    distance = 0.5 * (after - before).abs().sum(1).mean()
    return f"{100 * same:.0f}% of the predictions are the same, their mean distance is {distance:.3f}"


def main() -> None:
    model = create_model("softmax_deit_study", pretrained=True).eval()  # or any ViT of timm
    transform = create_transform(**resolve_data_config({}, model=model))
    seen, unseen = (
        torch.stack([transform(image) for photo in PHOTOS for image in crops(photo, split)])
        for split in ("train", "val")
    )
    with torch.no_grad():
        before = model(unseen).softmax(1)

    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained", sharey=True)
    report = linearize(model)  # in place; the weights stay as they are
    print(report)
    print("linear:    ", compare(model, unseen, before, axes[0]))

    # A gain for each head, from unlabelled images, without training. `layer_costs` shows which layers to keep softmax.
    calibrate(model, seen[::2])
    print("calibrated:", compare(model, unseen, before, axes[1]))
    for axis, title in zip(axes, ("linear", "linear, calibrated"), strict=True):
        axis.set(title=title, xlabel="probability with softmax attention", ylabel="with linear attention")
    Path("runs").mkdir(exist_ok=True)
    figure.savefig("runs/linear.png", dpi=100)

    print("at 256 pixels:", tuple(model(torch.randn(1, 3, 256, 256)).shape))


if __name__ == "__main__":
    main()
