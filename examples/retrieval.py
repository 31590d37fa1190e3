"""Find similar images: features of a model of the package, and the nearest neighbours by their cosine.

python examples/retrieval.py --data FOLDER --query photo.jpg    # all images below FOLDER
"""

import argparse
import tempfile
from pathlib import Path

import timm
import torch
from photo_data import write_classes
from PIL import Image
from timm.data import create_dataset, create_transform, resolve_data_config
from torch.nn import functional as F

import inline_attention  # noqa: F401  (registers the models with timm)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="default: crops of the package's two photographs")
    parser.add_argument("--query", type=Path, help="default: some of these crops")
    parser.add_argument("--model", default="inline_deit_study")
    parser.add_argument("--output", type=Path, default=Path("runs/retrieval.jpg"))
    args = parser.parse_args()
    made = tempfile.TemporaryDirectory()
    data = args.data or write_classes(Path(made.name)) / "train"
    queries = [args.query] if args.query else sorted((data.parent / "val").rglob("*.jpg"))[::4]

    model = timm.create_model(args.model, pretrained=True, num_classes=0).eval()  # features instead of logits
    transform = create_transform(**resolve_data_config({}, model=model))

    @torch.no_grad()
    def features(images: list[Image.Image]) -> torch.Tensor:
        return F.normalize(model(torch.stack([transform(image) for image in images])), dim=1)

    index = create_dataset("", root=data)
    gallery = [index[i][0].convert("RGB") for i in range(len(index))]
    asked = [Image.open(query).convert("RGB") for query in queries]
    similarity, nearest = (features(asked) @ features(gallery).T).topk(5)

    rows = Image.new("RGB", (6 * 96 + 8, 96 * len(queries)), "white")
    for row, (query, image, found) in enumerate(zip(queries, asked, nearest.tolist(), strict=True)):
        names = [index.filename(i, basename=True) for i in found]
        classes = [Path(index.filename(i)).parent.name for i in found]
        print(f"{query.parent.name}/{query.name}: {', '.join(map('/'.join, zip(classes, names, strict=True)))}")
        for column, picture in enumerate([image, *(gallery[i] for i in found)]):
            rows.paste(picture.resize((96, 96)), (column * 96 + (8 if column else 0), row * 96))
    print(
        f"similarity {similarity.min():.2f} to {similarity.max():.2f}; {args.output}: each query, then its neighbours"
    )
    args.output.parent.mkdir(parents=True, exist_ok=True)
    rows.save(args.output, quality=80)


if __name__ == "__main__":
    main()
