"""What one place of a photograph attends to, in every layer, with softmax and with InLine attention.

python examples/attention_maps.py photo.jpg --query 0.4 0.5    # shares of the height and the width
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from photo_data import PHOTOS
from PIL import Image
from timm.data import create_transform, resolve_data_config

from inline_attention import create_model
from inline_attention.analysis.measures.maps import attention_maps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image", nargs="?", type=Path, default=PHOTOS["flower"])
    parser.add_argument("--query", nargs=2, type=float, default=(0.45, 0.5), metavar=("TOP", "LEFT"))
    parser.add_argument("--layers", nargs="+", type=int, default=[0, 2, 4, 6])
    parser.add_argument("--output", type=Path, default=Path("runs/maps.png"))
    args = parser.parse_args()
    photo = Image.open(args.image).convert("RGB")

    names = ["softmax_deit_study", "inline_deit_study"]
    figure, axes = plt.subplots(len(names), len(args.layers) + 1, figsize=(10, 4.2), layout="constrained")
    for row, name in zip(axes, names, strict=True):
        model = create_model(name, pretrained=True).eval()
        transform = create_transform(**resolve_data_config({}, model=model))
        result = attention_maps(model, transform(photo), query=tuple(args.query), layers=args.layers)
        row[0].imshow(photo.resize((256, 256)))
        row[0].plot(256 * args.query[1], 256 * args.query[0], "o", color="white", markeredgecolor="black")
        row[0].set_title(name, fontsize=9)
        for axis, number, layer in zip(row[1:], args.layers, result.layers, strict=True):
            weights = layer.weights.mean(0)  # over the heads; InLine's may be negative
            limit = np.abs(weights).max()
            axis.imshow(weights, cmap="RdBu_r", vmin=-limit, vmax=limit)
            axis.set_title(f"layer {number + 1}, up to {limit:.3f}", fontsize=9)
        sums = ", ".join(f"{layer.weights.mean(0).sum():.2f}" for layer in result.layers)
        print(f"{name}: attention to the map, by layer (the rest is the class token's): {sums}")
    for axis in axes.flat:
        axis.set_axis_off()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output, dpi=120)
    print(args.output)


if __name__ == "__main__":
    main()
