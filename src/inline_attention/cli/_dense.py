"""The actions of `inline segment` and `inline detect`: their options, prediction, result files, the end of a run."""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from inline_attention.cli._options import (
    add_action,
    add_device,
    add_loading,
    add_max_broken,
    add_output,
    add_precision,
    add_results,
)
from inline_attention.cli._output import autocast_dtype, image_progress
from inline_attention.cli._training import configure_training
from inline_attention.environment import choose_device
from inline_attention.printing import counted, say, write_json

if TYPE_CHECKING:
    from inline_attention.data.skipped import SkippedImage
    from inline_attention.tasks.dense.weights import TrainedModel
    from inline_attention.training.loop import Outcome
    from inline_attention.training.task import Task

TrainedT = TypeVar("TrainedT", bound="TrainedModel[Any, Any]")


class Actions(NamedTuple):
    """The parsers of the actions to which a command adds options."""

    eval: argparse.ArgumentParser
    predict: argparse.ArgumentParser


def add_actions(
    parser: argparse.ArgumentParser,
    *,
    command: str,
    model: str,
    description: str | None,
    task: "Callable[[], type[Task]]",
    data: str,
    add_options: Callable[[argparse.ArgumentParser], Any],
    measures: str,
    predicts: str,
    output: str,
) -> Actions:
    """Add train, models, eval and predict.

    Args:
        command: the name of the command.
        model: the kind of model, for the help.
        task: imports the task. It is called only when the task is needed.
        data: help of --data in train.
        add_options: adds the options of image preparation, for eval and predict.
        measures: help of eval.
        predicts: help of predict.
        output: default folder of predict.
    """
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    train = add_action(actions, "train", f"train a {model}", description=description)
    recipe = "name of a recipe or a .yaml file (--list-recipes shows them)"
    configure_training(train, data=data, recipe=recipe, task=task)
    add_action(actions, "models", "table of the published models: parameters, cost and accuracy")

    trained = argparse.ArgumentParser(add_help=False)
    trained.add_argument("--weights", required=True, metavar="W", help=f"file that `inline {command} train` wrote")
    add_options(trained)
    add_loading(trained)
    add_device(trained)
    add_precision(trained, default="fp32")

    evaluate = add_action(actions, "eval", measures, parents=[trained])
    evaluate.add_argument("--data", required=True, metavar="PATH", help="folder of the data set")
    evaluate.add_argument("--split", metavar="NAME", help="split to evaluate on (default: that of the training run)")
    add_max_broken(evaluate)
    add_results(evaluate, csv="the results of each class")
    evaluate.add_argument(
        "--examples", metavar="FILE", type=Path, help="draw the first images and their predictions to FILE"
    )

    predict = add_action(actions, "predict", predicts, parents=[trained])
    predict.add_argument("images", nargs="+", metavar="IMAGE|FOLDER", help="files, or folders (searched to any depth)")
    add_output(predict, default=output)
    return Actions(evaluate, predict)


def predict(
    args: argparse.Namespace,
    load: "Callable[[argparse.Namespace], TrainedT]",
    predict_files: "Callable[..., Sequence[Any]]",
    *,
    doing: str,
    describe: Callable[[Any], str],
    files: str,
) -> int:
    """Run the action `predict`.

    Args:
        load: opens the model, with the options of the command.
        predict_files: predicts and writes a list of files, such as `segment_files`.
        doing: title of the progress bar.
        describe: makes the line about one image.
        files: name of the written files, for the last line.
    """
    from inline_attention.data.sources import find_images

    device = choose_device(args.device)
    paths = find_images(args.images)
    trained = load(args)
    with image_progress(doing, total=len(paths)) as on_images:

        def on_file(file: Any) -> None:
            say(f"{file.path}: {describe(file)}")
            on_images(1)

        options = dict(device=device, amp_dtype=autocast_dtype(args.precision), on_file=on_file)
        done = predict_files(trained, paths, args.output, **options)
    if not done:
        raise ValueError("no image could be read")
    say(f"{files} of {counted(len(done), 'image')} in {args.output}")
    return 0


def write_result(
    args: argparse.Namespace,
    trained: "TrainedModel[Any, Any]",
    figures: Mapping[str, Any],
    *,
    images: int,
    seconds: float,
    skipped: "Iterable[SkippedImage]",
) -> None:
    """Write the JSON file of `eval`, if --json asks for it."""
    if args.json:
        facts = {"model": trained.title, "weights": args.weights, "data": args.data, "split": trained.data.val_split}
        read = {"images": images, "seconds": seconds, "skipped_images": [image._asdict() for image in skipped]}
        write_json(args.json, {**facts, **figures, **read})


def describe_outcome(outcome: "Outcome", *, command: str, result: str) -> str:
    """The last lines of a training run: its result and its files."""
    summary, folder = outcome.summary, outcome.folder
    best = folder / "checkpoints" / "best.safetensors"
    lines = {
        "result": result,
        "time": f"{summary['seconds']:.0f} s of training, {summary['images_per_second']:,.1f} images/s",
        "classes": str(folder / "per_class.csv"),
        "pictures": str(folder / "examples.png"),
        "weights": str(best),
    }
    if summary["skipped_images"]:
        lines["skipped"] = f"{summary['skipped_images']} unreadable images"
    listed = [f"{what:<10}{text}" for what, text in lines.items()]
    return "\n".join(["", *listed, "", "next:", f"  inline {command} predict --weights {best} IMAGE"])
