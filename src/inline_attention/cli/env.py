"""What to paste into a bug report: versions and hardware. It prints no path and no environment variable."""

import argparse

from inline_attention.printing import say


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> None:
    import json

    from inline_attention.environment import describe_environment

    facts = describe_environment()
    if args.json:
        say(*json.dumps(facts, indent=2).split("\n"))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        say(f"{name:<{width}}  {value}")
