"""A first look: two photographs through a model, and the table of all models. Run by `make quickstart`."""

import torch
from sklearn.datasets import load_sample_images
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from inline_attention import create_model
from inline_attention.cli import main as inline


def main() -> None:
    torch.manual_seed(0)
    model = create_model("inline_pvt_tiny").eval()
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD))
    samples = load_sample_images()
    print("inline_pvt_tiny with random weights: what it answers means nothing until it is trained, or loads weights.")
    for name, pixels in zip(samples.filenames, samples.images, strict=True):
        image = torch.tensor(pixels).permute(2, 0, 1) / 255
        with torch.inference_mode():
            probabilities = model(((image - mean) / std)[None]).softmax(1)[0]
        height, width = pixels.shape[:2]
        top = probabilities.topk(3)
        answer = ", ".join(f"class {i} ({p:.2%})" for p, i in zip(top.values, top.indices.tolist(), strict=True))
        print(f"{name.rpartition('/')[2]}, {width}×{height}, at its own size: {answer}")
    inline(["models"])


if __name__ == "__main__":
    main()
