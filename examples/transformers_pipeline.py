"""A model of the package in a pipeline of Hugging Face's transformers (5.0 or newer), from a local folder.

`import inline_attention` comes first: it makes the models known to timm, which transformers builds them with.
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here needs the hub

import torch
from photo_data import PHOTOS, draw_row
from PIL import Image
from timm.data import ImageNetInfo
from transformers import AutoImageProcessor, AutoModelForImageClassification, pipeline

import inline_attention  # noqa: F401  (registers the models with timm)
from inline_attention.models.hub import save_for_hf
from inline_attention.tasks.classification import load_classifier


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", nargs="*", default=[str(path) for path in PHOTOS.values()])
    parser.add_argument("--model", default="inline_deit_study", help="a model with weights in the package")
    parser.add_argument("--output", type=Path, default=Path("runs/hf"), help="the folder that is written and read")
    args = parser.parse_args()

    classifier = load_classifier(args.model, "pretrained")
    words = [ImageNetInfo().label_name_to_description(name) for name in classifier.class_names]
    save_for_hf(classifier.model, args.output, class_names=words)

    classify = pipeline(
        "image-classification",
        model=AutoModelForImageClassification.from_pretrained(args.output),
        image_processor=AutoImageProcessor.from_pretrained(args.output),
    )
    results = [
        [f"{guess['label']} {guess['score']:.2f}" for guess in found] for found in classify(args.images, top_k=3)
    ]
    for image, found in zip(args.images, results, strict=True):
        print(Path(image).name, ", ".join(found))
    draw_row(args.output / "guesses.jpg", [Image.open(i) for i in args.images], [found[0] for found in results])

    inputs = classify.image_processor(images=Image.open(args.images[0]), return_tensors="pt")
    with torch.no_grad():
        difference = classify.model(**inputs).logits - classifier.model(inputs["pixel_values"])
    print(f"largest difference from the model itself: {difference.abs().max():.1e}")


if __name__ == "__main__":
    main()
