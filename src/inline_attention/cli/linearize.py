"""Turn a pretrained softmax transformer into a linear one: carry its weights over, match its layers, distil the whole.

MODEL is a model of this library or of timm. It is not needed if --weights is a file that names it. The same command
runs under torchrun: torchrun --nproc-per-node 8 -m inline_attention linearize MODEL --data FOLDER --output DIR
"""

import argparse
from typing import TYPE_CHECKING, Any

from inline_attention.cli import CommandParser
from inline_attention.cli._training import add_run_options, describe_settings, run_flags, split_settings
from inline_attention.printing import say, say_text

if TYPE_CHECKING:
    from inline_attention.tasks.linearization.stages import LinearizationPlan
    from inline_attention.training.task import Task


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = f"{parser.prog} [MODEL] [key=value ...] [options]"
    parser.add_argument(
        "arguments",
        nargs="*",
        metavar="[MODEL] [key=value ...]",
        help="the model to convert, called the teacher; then settings, listed below",
    )
    parser.add_argument("--weights", metavar="W", help="weights file of the teacher (default: the published weights)")
    add_run_options(parser, data="folder with train/ and val/, or what data.path accepts")
    parser.add_argument(
        "--recipe", metavar="FILE", help="recipe of your own, a .yaml file (default: that of the package)"
    )
    parser.add_argument("--epochs", type=int, metavar="N", help="epochs of distillation (default: 20); 0 skips it")
    parser.add_argument(
        "--attention", metavar="A", help="attention of the student: tangent, inline, linear or mala (default: tangent)"
    )
    parser.add_argument(
        "--anchors", type=int, metavar="M", help="queries around which tangent attention expands softmax (default: 1)"
    )
    parser.add_argument(
        "--keep-softmax",
        metavar="X",
        help="layers that keep softmax: names, wildcards or positions (0,-1), or auto:K, which chooses K of them",
    )
    parser.add_argument("--no-labels", action="store_true", help="learn from the teacher alone; any images will do")
    parser.add_argument("--no-report", action="store_true", help="do not measure accuracy and speed at the end")
    if isinstance(parser, CommandParser):
        parser.more_help = lambda: describe_settings(_task())


def run(args: argparse.Namespace) -> int:
    from inline_attention.tasks.linearization.stages import plan_linearization, run_linearization
    from inline_attention.training import settings

    model, overrides = split_settings(args.arguments)
    plan = plan_linearization(
        args.recipe, overrides=overrides, flags=_flags(args, model), output=args.output, resume=args.resume
    )
    if args.print_config:
        say_text(settings.to_yaml(plan.config).rstrip("\n"))
        return 0
    result = run_linearization(plan, log=say_text)
    if result.signal:
        return 128 + result.signal
    if result.is_first_rank:
        if not args.no_report:
            _report(result.plan)
        say_text(_next(result.plan))
    return 0


def _flags(args: argparse.Namespace, model: str | None) -> dict[str, Any]:
    if args.epochs is not None and args.epochs < 0:
        raise ValueError(f"--epochs {args.epochs}: expected 0 or more")
    flags = run_flags(args)
    chosen: dict[str, Any] = {"name": model, "weights": args.weights}
    chosen |= {"attention": args.attention, "anchors": args.anchors}
    if args.keep_softmax is not None:
        chosen["keep_softmax"] = args.keep_softmax.split(",")
    flags["model"] = {name: value for name, value in chosen.items() if value is not None}
    if args.no_labels:
        flags.setdefault("data", {})["labels"] = False
    if args.epochs is not None:
        flags["distill"] = {"enabled": args.epochs > 0}
    if args.epochs:
        flags["schedule"] = {"epochs": args.epochs}
    return flags


def _report(plan: "LinearizationPlan") -> None:
    from inline_attention.bench.linearization import make_report, write_report

    report = make_report(plan, log=say)
    files = write_report(report, plan.folder)
    say_text(f"\n{report.as_text()}\n")
    say_text(f"report    {', '.join(map(str, files))}")


def _next(plan: "LinearizationPlan") -> str:
    student = plan.student
    commands = [f"inline predict --weights {student} IMAGE"]
    if not plan.has_head:
        commands = [f"inline eval --weights {student} --data FOLDER --knn 20"]
    commands.append(f"inline export --weights {student}")
    return "\n".join([f"student   {student}", "", "next:", *(f"  {command}" for command in commands)])


def _task() -> "type[Task]":
    from inline_attention.tasks.linearization.task import Matching

    return Matching  # all stages have the same settings
