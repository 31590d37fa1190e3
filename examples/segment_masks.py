"""Train a segmenter on images with masks, and colour a photograph with it.

    python examples/segment_masks.py --data FOLDER --image photo.jpg    # FOLDER/images/SPLIT, masks/SPLIT, classes.txt

The default is a small model from a random start, on 24 crops of one photograph. For a model that is worth using, empty
SETTINGS and take the recipe "finetune": it downloads weights (or model.weights=FILE) and chooses the sizes.
"""

import argparse
from pathlib import Path

import torch
from photo_data import PHOTOS, write_masks

from inline_attention.tasks.segmentation.prediction import segment_files
from inline_attention.tasks.segmentation.task import Segmentation
from inline_attention.tasks.segmentation.weights import load_segmenter
from inline_attention.training import plan_run, train

SETTINGS = [
    "model.name=inline_pvt_tiny",
    "model.kwargs={depths: [1, 1, 1, 1], embed_dims: [32, 64, 96, 128], num_heads: [1, 2, 3, 4]}",
    "model.head=fpn",
    "data.batch_size=8",
    "data.crop=96",
    "data.short_side=null",
    "data.workers=0",
    "optim.lr=1e-3",
    "schedule.warmup_steps=5",
    "log.tensorboard=false",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="default: crops of a photograph of the package, masks by colour")
    parser.add_argument("--image", type=Path, help="default: that photograph")
    parser.add_argument("--output", type=Path, default=Path("runs/segment"))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("settings", nargs="*", help="settings of `inline segment train`, as key=value")
    args = parser.parse_args()

    data = args.data or write_masks(args.output / "data")
    settings = [*SETTINGS, f"data.path={data}", f"schedule.steps={args.steps}", *args.settings]
    outcome = train(plan_run("camvid_fpn", task=Segmentation, overrides=settings, output=str(args.output / "run")))
    print(f"mIoU of the validation images: {outcome.summary['best_miou']:.1f}%")

    trained = load_segmenter(str(outcome.folder / "checkpoints" / "best.safetensors"))
    (file,) = segment_files(
        trained, [args.image or PHOTOS["flower"]], args.output / "segmented", device=torch.device("cpu")
    )
    print(file.overlay, {name: f"{100 * share:.0f}%" for name, share in file.shares.items()})


if __name__ == "__main__":
    main()
