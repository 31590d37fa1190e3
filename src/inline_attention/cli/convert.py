"""Convert an official checkpoint to a safetensors file that every other command can open.

The file has this library's parameter names, and the configuration of its model in the metadata. With --average, it
holds the mean of several weights files of one model, such as the last checkpoints of a run.
"""

import argparse
from pathlib import Path

from inline_attention.cli._output import check_writable
from inline_attention.printing import say


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="IN", help="official .pth or safetensors file, or its URL")
    parser.add_argument("target", metavar="OUT", type=Path, help="safetensors file to write")
    parser.add_argument("--model", metavar="NAME", help="model of the weights (default: found from names and shapes)")
    parser.add_argument(
        "--ema",
        action=argparse.BooleanOptionalAction,
        help="take the averaged weights (EMA), or the others (default: averaged if there are any)",
    )
    parser.add_argument(
        "--average", metavar="FILE", nargs="+", type=Path, help="write the mean of IN and these files, all safetensors"
    )
    parser.add_argument("--force", action="store_true", help="overwrite OUT")


def run(args: argparse.Namespace) -> None:
    if args.target.exists() and not args.force:
        raise ValueError(f"{args.target} exists; --force overwrites it")
    if args.target.suffix != ".safetensors":
        raise ValueError(f"{args.target}: the name of the file to write must end in .safetensors")
    check_writable(args.target)

    from inline_attention.models.convert import average, convert
    from inline_attention.models.weights import architecture

    if args.average:
        if args.model is not None or args.ema is not None:
            raise ValueError("--average takes files as they are: leave out --model and --ema")
        path = average([Path(args.source), *args.average], args.target)
        say(f"mean of {1 + len(args.average)} files written to {path} ({path.stat().st_size / 1e6:.1f} MB)")
        return
    done = convert(args.source, args.target, model_name=args.model, ema=args.ema)
    model, checkpoint = done.model, done.checkpoint
    own = model.state_dict()
    tensors = f"{len(own)}"
    if left_out := len(checkpoint.state_dict) - len(own):
        tensors += f"; {left_out} others are left out, because the model computes them"
    size = f"{model.img_size[0]}×{model.img_size[1]}"
    rows = {
        "from": args.source,
        "weights": "averaged (EMA)" if checkpoint.is_ema else "as trained",
        "model": architecture(model),
        "input": f"{size}, position parameters resized" if done.was_resized else size,
        "classes": str(model.num_classes),
        "tensors": tensors,
        "parameters": f"{sum(p.numel() for p in model.parameters()):,}",
        "written": f"{done.path} ({done.path.stat().st_size / 1e6:.1f} MB)",
    }
    for name, value in rows.items():
        say(f"{name:<10}  {value}")
