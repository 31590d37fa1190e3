"""Train a model. Without arguments: a small InLine-DeiT on the embedded digits, about a minute on a laptop.

The same command runs under torchrun: torchrun --nproc-per-node 8 -m inline_attention train inline_deit_tiny --data PATH
"""

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from inline_attention.cli._training import configure_training, run_training

if TYPE_CHECKING:
    from inline_attention.training.loop import Outcome
    from inline_attention.training.task import Task


def configure(parser: argparse.ArgumentParser) -> None:
    configure_training(
        parser,
        data="folder of class folders, with or without train/ and val/, or what data.path accepts",
        recipe="name of a recipe or a .yaml file (default: quickstart)",
        task=_task,
    )


def run(args: argparse.Namespace) -> int:
    return run_training(args, task=_task(), describe_outcome=_describe_outcome)


def _task() -> "type[Task]":
    from inline_attention.tasks.classification.task import Classification

    return Classification


def _describe_outcome(outcome: "Outcome") -> str:
    summary, folder = outcome.summary, outcome.folder
    best = folder / "checkpoints" / "best.safetensors"
    lines = [
        "",
        f"accuracy  {_figures(summary)}, epoch {summary['best_epoch']})",
        f"time      {summary['seconds']:.0f} s of training, {summary['images_per_second']:,.0f} images/s",
        f"curves    {folder / 'curves.png'}",
        f"weights   {best}",
    ]
    if summary["skipped_images"]:
        lines.append(f"skipped   {summary['skipped_images']} unreadable images")
    lines += ["", "next:"]
    if summary["recipe"] == "quickstart":
        lines += [
            "  inline train finetune --data FOLDER    your images: FOLDER/CLASS/…",
            "  inline train --list-recipes            the published models",
        ]
    lines += [
        f"  inline predict --weights {best} IMAGE",
        f"  inline eval --weights {best} --data FOLDER",
    ]
    return "\n".join(lines)


def _figures(summary: Mapping[str, Any]) -> str:
    if "val_map" in summary:  # an image may have several labels
        figures = f"mAP {summary['val_map']:.2f}%, F1 {summary['val_f1_micro']:.2f}% (micro)"
        return f"{figures} on the validation split (best {summary['best_map']:.2f}%"
    figures = f"top-1 {summary['val_top1']:.2f}%"
    if "val_top5" in summary:  # more than five classes
        figures += f", top-5 {summary['val_top5']:.2f}%"
    return f"{figures} on the validation split (best {summary['best_top1']:.2f}%"
