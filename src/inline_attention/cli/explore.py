"""Serve a local web page: queries and keys in the plane, attention on images, and the cost of attention."""

import argparse

from inline_attention.cli._options import add_device
from inline_attention.environment import choose_device
from inline_attention.printing import say


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--weights",
        nargs="+",
        default=[],
        metavar="FILE",
        help="files of `inline train`, one for each attention, or one of `inline linearize`, which is shown beside its "
        "teacher (default: the weights of the package)",
    )
    parser.add_argument(
        "--port", type=int, default=7860, metavar="N", help="port to listen on; 0 chooses a free one (default: 7860)"
    )
    parser.add_argument(
        "--host",
        metavar="ADDRESS",
        default="127.0.0.1",
        help="address to listen on (default: 127.0.0.1, this machine only)",
    )
    add_device(parser, mps=False)


def run(args: argparse.Namespace) -> None:
    from contextlib import closing

    import torch

    from inline_attention.explore import App, load_subjects, open_server

    device = choose_device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    subjects = load_subjects(args.weights, device=device)
    with closing(App(subjects, device=device)) as app, open_server(app, host=args.host, port=args.port) as server:
        try:  # also around the line with the address: Ctrl-C may come right after it
            say(f"{server.url} (Ctrl-C ends)")
            if not server.is_local:
                say("anyone who can reach this machine can use the page")
            server.serve_forever()
        except KeyboardInterrupt:
            say("ended")
