"""What to paste into a bug report: versions and hardware. It prints no path and no environment variable."""

import argparse

HELP = "versions and hardware, for a bug report"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> None:
    import json

    from inline_attention.environment import describe_environment

    facts = describe_environment()
    if args.json:
        print(json.dumps(facts, indent=2))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:<{width}}  {value}")
