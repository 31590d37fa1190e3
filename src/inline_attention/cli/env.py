"""Versions and hardware, for a bug report. It prints no paths and no environment variables."""

import argparse

from inline_attention.cli._options import add_results
from inline_attention.cli._output import check_writable
from inline_attention.printing import STANDARD_OUTPUT, say, write_json


def configure(parser: argparse.ArgumentParser) -> None:
    add_results(parser)


def run(args: argparse.Namespace) -> None:
    import torch

    from inline_attention.environment import describe_environment
    from inline_attention.ops.backends import HAS_TRITON, tuned

    check_writable(json=args.json)
    facts = describe_environment()
    if HAS_TRITON and torch.cuda.is_available():
        facts["launch settings"] = tuned.source_of(torch.device("cuda"))
    if args.json:
        write_json(args.json, facts)
    if args.json == STANDARD_OUTPUT:
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        say(f"{name:<{width}}  {value}")
