"""List the registered models: input, parameters, multiply-accumulates, published ImageNet top-1, attention by stage."""

import argparse

from inline_attention.cli._options import add_results
from inline_attention.cli._output import check_writable
from inline_attention.printing import STANDARD_OUTPUT, write_json


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pattern", nargs="?", default="*", help="names to list, such as 'inline_swin*' (default: all)")
    add_results(parser)


def run(args: argparse.Namespace) -> None:
    from inline_attention.models import list_models
    from inline_attention.models.published import PUBLISHED
    from inline_attention.models.registry import has_weights
    from inline_attention.models.summary import summarise

    check_writable(args.json)
    names = list_models(args.pattern)
    if not names:
        raise ValueError(f"no model matches {args.pattern!r}; `inline models` without a pattern lists them all")
    top1 = {name: PUBLISHED[name].top1 if name in PUBLISHED else None for name in names}
    if args.json:
        facts = [dict(name=n, top1=top1[n], weights=has_weights(n), **summarise(n)._asdict()) for n in names]
        write_json(args.json, facts)
    if args.json == STANDARD_OUTPUT:
        return

    from rich.console import Console
    from rich.table import Table

    table = Table(header_style="bold", caption_justify="left")
    for heading in ("model", "input", "params", "MACs", "top-1", "attention"):
        table.add_column(heading, justify="left" if heading in ("model", "attention") else "right", no_wrap=True)
    for name in names:
        summary = summarise(name)
        table.add_row(
            name,
            str(summary.img_size),
            f"{summary.params / 1e6:.2f}M",
            f"{summary.macs / 1e9:.2f}G",
            "–" if top1[name] is None else f"{top1[name]:.1f}",
            summary.attention,
        )
    console = Console()
    console.print(table)
    console.print(
        "top-1: ImageNet-1k, as published, not measured here.\n"
        "attention by stage: I InLine, L linear, S softmax; I:2: the first 2 blocks are InLine, the others softmax.",
        soft_wrap=True,
        highlight=False,
    )
