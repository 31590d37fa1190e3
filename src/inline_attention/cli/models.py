"""List the registered models: input, parameters, multiply-accumulates, published ImageNet top-1, attention by stage."""

import argparse

from inline_attention.cli._options import add_results
from inline_attention.cli._output import check_writable
from inline_attention.printing import STANDARD_OUTPUT, say, say_text, table, write_json


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pattern", nargs="?", default="*", help="names to list, such as 'inline_swin*' (default: all)")
    add_results(parser)


def run(args: argparse.Namespace) -> None:
    from inline_attention.models import list_models
    from inline_attention.models.published import PUBLISHED
    from inline_attention.models.registry import has_weights, suggest_names
    from inline_attention.models.summary import summarise

    check_writable(json=args.json)
    names = list_models(args.pattern)
    if not names:
        raise ValueError(f"no model matches {args.pattern!r}; {suggest_names(args.pattern)}")
    top1 = {name: PUBLISHED[name].top1 if name in PUBLISHED else None for name in names}
    if args.json:
        listed = [dict(name=n, top1=top1[n], weights=has_weights(n), **summarise(n)._asdict()) for n in names]
        write_json(args.json, listed)
    if args.json == STANDARD_OUTPUT:
        return

    rows = []
    for name in names:
        facts, accuracy = summarise(name), top1[name]
        rows.append([
            name,
            str(facts.img_size),
            f"{facts.params / 1e6:6.2f}M",
            f"{facts.macs / 1e9:6.2f}G",
            "–" if accuracy is None else f"{accuracy:.1f}",
            facts.attention,
        ])  # fmt: skip
    say_text(table(["model", "input", "params", "MACs", "top-1", "attention"], rows))
    say(
        "top-1: ImageNet-1k, as published, not measured here.",
        "attention by stage: I InLine, L linear, S softmax; I:2: the first 2 blocks are InLine, the others softmax.",
    )
