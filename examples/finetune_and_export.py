"""Fine-tune weights of the package on a folder of images, and run the result with ONNX Runtime.

python examples/finetune_and_export.py --data FOLDER    # FOLDER/train/CLASS/…, FOLDER/val/CLASS/…
"""

import argparse
from pathlib import Path

import onnxruntime
from photo_data import draw_row, write_classes
from PIL import Image
from torch import from_numpy

from inline_attention.data import open_files
from inline_attention.export import export_model
from inline_attention.tasks.classification import Classification, load_classifier
from inline_attention.training import plan_run, train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="default: crops of the package's two photographs")
    parser.add_argument("--output", type=Path, default=Path("runs/example"))
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()

    data = args.data or write_classes(args.output / "data")
    settings = [f"schedule.epochs={args.epochs}", "data.batch_size=8", "data.workers=0", "log.tensorboard=false"]
    plan = plan_run(
        "finetune",
        task=Classification,
        flags={"data": {"path": str(data)}},
        overrides=settings,
        output=str(args.output / "run"),
    )
    outcome = train(plan)
    print(f"top-1 of the validation images: {outcome.summary['best_top1']:.1f}%")

    classifier = load_classifier(None, str(outcome.folder / "checkpoints" / "best.safetensors"))
    exported = export_model(classifier.model.eval(), args.output / "model.onnx", dynamic_batch=True)
    print(f"{exported.path}: {exported.covers}, {max(c.difference for c in exported.checks):.0e} from the model")

    session = onnxruntime.InferenceSession(exported.path)
    files = sorted((data / "val").rglob("*.jpg"))[2::5]
    (batch,) = open_files(files, config=classifier.data)
    logits = session.run(None, {"image": batch.images.numpy()})[0]
    best = [row.max(0) for row in from_numpy(logits).softmax(1)]
    guesses = [f"{classifier.class_names[index]} {value:.2f}" for value, index in best]
    for file, guess in zip(files, guesses, strict=True):
        print(f"{file.relative_to(data)}: {guess}")
    draw_row(args.output / "guesses.jpg", [Image.open(file) for file in files], guesses)


if __name__ == "__main__":
    main()
