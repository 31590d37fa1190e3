"""Train a Faster R-CNN on images with boxes, and draw what it finds.

    python examples/detect_boxes.py --data FOLDER --image photo.jpg    # FOLDER in YOLO's or COCO's layout

The default is a small model from a random start, on pieces of one photograph with a piece of the other one pasted on.
For a model that is worth using, empty SETTINGS: the recipe then downloads weights (or model.weights=FILE) and chooses
the sizes from your images. Needs pycocotools.
"""

import argparse
from pathlib import Path

import torch
from photo_data import write_boxes

from inline_attention.tasks.detection.prediction import detect_files
from inline_attention.tasks.detection.task import Detection
from inline_attention.tasks.detection.weights import load_detector
from inline_attention.training import plan_run, train

SETTINGS = [
    "model.weights=null",
    "model.kwargs={depths: [1, 1, 1, 1], embed_dims: [32, 64, 96, 128], num_heads: [1, 2, 3, 4]}",
    "model.channels=64",
    "model.regions=64",
    "data.batch_size=2",
    "data.workers=0",
    "data.short_side=128",
    "data.train_short_sides=[128]",
    "optim.lr=1e-3",
    "log.tensorboard=false",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="default: pictures made from the photographs of the package")
    parser.add_argument("--image", type=Path, action="append", help="with --data; may be given several times")
    parser.add_argument("--output", type=Path, default=Path("runs/detect"))
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("settings", nargs="*", help="settings of `inline detect train`, as key=value")
    args = parser.parse_args()
    if args.data and not args.image:
        parser.error("--data needs --image, a picture to search")

    data = args.data or write_boxes(args.output / "data")
    settings = [*SETTINGS, f"data.path={data}", f"schedule.steps={args.steps}", *args.settings]
    outcome = train(plan_run("finetune", task=Detection, overrides=settings, output=str(args.output / "run")))
    print(f"AP50 of the validation images: {outcome.summary['val_box_ap50']:.1f}%")

    trained = load_detector(str(outcome.folder / "checkpoints" / "best.safetensors"))
    images = args.image or sorted((data / "images" / "val").iterdir())[:4]
    for file in detect_files(trained, images, args.output / "found", min_score=0.95, device=torch.device("cpu")):
        print(file.picture, [f"{found['class']} {found['score']:.2f}" for found in file.objects])


if __name__ == "__main__":
    main()
