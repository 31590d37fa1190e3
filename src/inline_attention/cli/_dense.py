"""What `inline segment` and `inline detect` share: their actions, the options of trained weights, how a run ends."""

import argparse
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from inline_attention.cli._options import add_device, add_loading, add_output, add_precision, add_results
from inline_attention.cli._training import configure_training

if TYPE_CHECKING:
    from inline_attention.data.skipped import SkippedImage
    from inline_attention.tasks.dense.weights import TrainedModel
    from inline_attention.training.loop import Outcome
    from inline_attention.training.task import Task

TrainedT = TypeVar("TrainedT", bound="TrainedModel[Any, Any]")

FEW_IMAGES = 16  # below this, starting loader processes takes longer than they save


class Actions(NamedTuple):
    """The parsers of a command's actions that have options of their own."""

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
        command: the word after `inline`.
        model: what is trained, for the help.
        task: imports the task, when it is needed.
        data: the help of train's --data.
        add_options: adds how images are prepared, for eval and predict.
        measures: the help of eval.
        predicts: the help of predict.
        output: the default folder of predict.
    """
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    train = actions.add_parser("train", help=f"train a {model}", description=description)
    recipe = "name of a recipe or a .yaml file (--list-recipes shows them)"
    configure_training(train, data=data, recipe=recipe, task=task)
    actions.add_parser("models", help="published models: parameters, cost, results")

    trained = argparse.ArgumentParser(add_help=False)
    trained.add_argument("--weights", required=True, metavar="W", help=f"file that `inline {command} train` wrote")
    add_options(trained)
    add_loading(trained)
    add_device(trained)
    add_precision(trained, default="fp32")

    evaluate = actions.add_parser("eval", parents=[trained], help=measures)
    evaluate.add_argument("--data", required=True, metavar="PATH", help="folder of the data set")
    evaluate.add_argument("--split", help="split to evaluate on (default: as in the run that made the weights)")
    add_results(evaluate, csv="the figures of each class")

    predict = actions.add_parser("predict", parents=[trained], help=predicts)
    predict.add_argument("images", nargs="+", metavar="IMAGE|FOLDER", help="files, or folders (searched to any depth)")
    add_output(predict, default=output)
    return Actions(evaluate, predict)


def open_for_prediction(
    args: argparse.Namespace, load: "Callable[[argparse.Namespace], TrainedT]"
) -> "tuple[list[Path], TrainedT]":
    """The images of `predict`, none of which must be readable, and the model; makes the folder for what is found."""
    from inline_attention.data.sources import find_images

    paths = find_images(args.images)
    trained = load(args)
    trained.data.max_broken = len(paths)
    if args.workers is None and len(paths) < FEW_IMAGES:
        trained.data.workers = 0
    args.output.mkdir(parents=True, exist_ok=True)
    return paths, trained


def write_result(
    args: argparse.Namespace,
    trained: "TrainedModel[Any, Any]",
    figures: Mapping[str, Any],
    *,
    images: int,
    seconds: float,
    skipped: "Iterable[SkippedImage]",
) -> None:
    """The JSON file of `eval`, where one is wanted."""
    from inline_attention.cli._output import write_json

    if args.json:
        facts = {"model": trained.title, "weights": args.weights, "data": args.data, "split": trained.data.val_split}
        read = {"images": images, "seconds": seconds, "skipped_images": [image._asdict() for image in skipped]}
        write_json(args.json, {**facts, **figures, **read})


def describe_outcome(outcome: "Outcome", *, command: str, result: str, files: Mapping[str, str]) -> str:
    """The last lines of a run: its result, and where things are. `files`: what is in the run folder, by its name."""
    summary, folder = outcome.summary, outcome.folder
    best = folder / "checkpoints" / "best.safetensors"
    lines = {
        "result": result,
        "time": f"{summary['seconds']:.0f} s of training, {summary['images_per_second']:,.1f} images/s",
        **{what: str(folder / name) for what, name in files.items()},
        "weights": str(best),
    }
    if summary["skipped_images"]:
        lines["skipped"] = f"{summary['skipped_images']} unreadable images"
    listed = [f"{what:<10}{text}" for what, text in lines.items()]
    return "\n".join(["", *listed, "", "next:", f"  inline {command} predict --weights {best} IMAGE"])
