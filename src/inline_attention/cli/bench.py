"""Speed and memory of the operation, of whole models and of dense prediction, compared with peers in one run."""

import argparse
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inline_attention.cli._options import add_action, add_device, add_img_size, add_precision, check_at_least
from inline_attention.cli._output import check_writable, parse_size
from inline_attention.environment import choose_device
from inline_attention.printing import STANDARD_OUTPUT, counted, say, say_text, write_json

if TYPE_CHECKING:
    import torch

    from inline_attention.bench.model import Setting
    from inline_attention.bench.record import Record

CASE = "BATCH,SIDE[xSIDE][+PREFIX],HEADSxDIM: shape of the input, such as 256,14+1,6x32"
DENSE_MODELS = ("fpn-pvt_tiny", "upernet-swin_tiny", "mask_rcnn-pvt_tiny", "cascade_mask_rcnn-swin_tiny")


def _names(text: str) -> list[str]:
    return text.split(",")


def configure(parser: argparse.ArgumentParser) -> None:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--json",
        metavar="FILE",
        help="write the results as JSON to FILE, each as soon as it is measured; - prints them, and text to stderr",
    )
    add_device(common, mps=False)
    add_precision(common, default="bf16 on a GPU, fp32 on a CPU")
    common.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: PyTorch's choice)")
    timed = argparse.ArgumentParser(add_help=False, parents=[common])
    timed.add_argument("--quick", action="store_true", help="measure less often, for a first impression")
    tasks = argparse.ArgumentParser(add_help=False)
    tasks.add_argument("--train", action="store_true", help="only training steps")
    tasks.add_argument("--infer", action="store_true", help="only inference")
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)

    op = add_action(kinds, "op", "the attention operation alone", parents=[timed])
    op.add_argument("--case", nargs="+", metavar="CASE", help=CASE)
    _add_contenders(op, "fused, reference, textbook, softmax, softmax_wide, linear, mala, tangent, …")
    op.add_argument("--forward", action="store_true", help="only the forward pass")
    op.add_argument("--backward", action="store_true", help="only the forward and backward pass together")

    kernels = add_action(kinds, "kernels", "the Triton kernels one by one, on a GPU", parents=[timed])
    kernels.add_argument("--case", nargs="+", metavar="CASE", help=CASE)

    even = add_action(
        kinds, "break-even", "number of tokens from which linear attention is faster than softmax", parents=[timed]
    )
    even.add_argument(
        "--heads",
        nargs="+",
        default=["6x64"],
        metavar="HxD",
        help="number of heads and channels of each (default: 6x64)",
    )
    even.add_argument(
        "--sides", nargs="+", type=int, metavar="N", help="sides of the token map (default: 4 7 10 14 20 28 40 56)"
    )
    even.add_argument("--anchors", type=int, default=1, metavar="M", help="anchors of tangent attention (default: 1)")
    even.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help="images in a batch, such as 1 (default: as many as have 262,144 tokens together, on a CPU 4,096)",
    )

    model = add_action(kinds, "model", "whole models", parents=[timed, tasks])
    sweep = add_action(kinds, "sweep", "InLine-DeiT-T over resolutions", parents=[timed, tasks])
    profile = add_action(kinds, "profile", "time of whole models by kernel", parents=[common, tasks])
    for sub in (model, profile):
        sub.add_argument(
            "models",
            nargs="+",
            metavar="MODEL",
            help="a name such as inline_deit_tiny, a weights file, also of a linearised model, or a softmax model of "
            "timm, to time it linearised",
        )
    for sub in (model, sweep, profile):
        sizes = "224 384 640 1024 2048, on a CPU 112 224 448" if sub is sweep else "224"
        batches = "256 128 64 32 8, on a CPU 4 2 1" if sub is sweep else "64, on a CPU 2"
        sub.add_argument(
            "--img-sizes", nargs="+", type=int, metavar="N", help=f"image sides in pixels (default: {sizes})"
        )
        sub.add_argument(
            "--batch-sizes", nargs="+", type=int, metavar="N", help=f"one, or one for each side (default: {batches})"
        )
        _add_contenders(
            sub,
            "fused, reference, textbook, peer, peer_sdpa, peer_math, free; of softmax models tangent, inline; student",
        )
    for sub in (model, sweep):
        _add_modes(sub, "reduce-overhead,max-autotune, on a CPU eager")
        sub.add_argument(
            "--latency", action=argparse.BooleanOptionalAction, default=sub is model, help="also time single images"
        )
        sub.add_argument(
            "--cast-weights",
            action="store_true",
            help="cast whole models to --precision; without it autocast keeps the residual stream in fp32",
        )
        sub.add_argument("--picture", type=Path, metavar="FILE", help="draw images a second over resolution")
    sweep.set_defaults(models=["inline_deit_tiny"])
    profile.set_defaults(quick=False)
    profile.add_argument(
        "--mode", metavar="MODE", help="mode of torch.compile, or eager (default: reduce-overhead, on a CPU eager)"
    )

    dense = add_action(
        kinds, "dense", "segmenters and detectors with InLine and softmax backbones", parents=[timed, tasks]
    )
    dense.add_argument(
        "models",
        nargs="*",
        default=list(DENSE_MODELS),
        metavar="HEAD-BACKBONE",
        help=f"models to time (default: {', '.join(DENSE_MODELS)})",
    )
    add_img_size(dense, default="the published one")
    dense.add_argument(
        "--batch-size", type=int, metavar="N", help="images in a batch (default: 1 in inference, 2 in training)"
    )
    _add_contenders(dense, "fused, reference, softmax")
    _add_modes(dense, "eager and compiled, in inference also with CUDA graphs")
    dense.add_argument("--picture", type=Path, metavar="FILE", help="draw times and memory")
    for sub in (model, sweep, dense):
        sub.add_argument(
            "--jobs",
            type=int,
            default=1,
            metavar="N",
            help="compile N sizes side by side, then time one after the other; all are in memory together (default: 1)",
        )

    tune = add_action(
        kinds,
        "tune",
        "measure the kernels' launch settings on this GPU, and keep them for later processes",
        description="Measure the kernels' launch settings on this GPU, and keep them in a file that all later\n"
        "processes read. What the file already has is not measured again: after Ctrl-C or --minutes, the\n"
        "same command goes on.",
    )
    tune.add_argument(
        "--parts",
        type=_names,
        metavar="A,B",
        help="some of steps (the attention), short (its form in one launch), inference and projected (the MLP, alone "
        "and with the projection before it), normed (norm and qkv), training (the MLP; default: all but training)",
    )
    tune.add_argument("--minutes", type=float, metavar="M", help="begin no measurement after M minutes")
    tune.add_argument(
        "--jobs", type=int, default=4, metavar="N", help="processes that compile the kernels (default: 4)"
    )
    tune.add_argument("--again", action="store_true", help="measure everything anew")
    tune.add_argument(
        "--json", metavar="FILE", help="also write the file's content to FILE, to pass it on; - prints it"
    )
    add_device(tune, mps=False)

    tables = add_action(kinds, "table", "print the results of earlier runs as markdown")
    tables.add_argument("records", nargs="+", type=Path, metavar="FILE", help="files that --json wrote")
    tables.add_argument(
        "--picture",
        type=Path,
        metavar="FILE",
        help="draw records of model and sweep, or of dense; a row that two records have is that of the later one",
    )


def _add_contenders(parser: argparse.ArgumentParser, names: str) -> None:
    parser.add_argument("--contenders", type=_names, metavar="A,B", help=f"some of {names}")


def _add_modes(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--modes",
        type=_names,
        metavar="A,B",
        help=f"modes of torch.compile, or eager; the best counts for each contender (default: {default})",
    )


def run(args: argparse.Namespace) -> int:
    import torch

    from inline_attention.bench.picture import check_picture
    from inline_attention.bench.record import DTYPES, describe_run
    from inline_attention.bench.timing import Effort

    picture = getattr(args, "picture", None)
    check_writable(picture, json=getattr(args, "json", None))
    if picture is not None:
        check_picture(picture)
    if args.kind == "table":
        _print_records(args.records, args.picture)
        return 0
    if args.kind == "tune":
        return _run_tune(args)
    if args.threads is not None:
        if args.threads < 1:
            raise ValueError(f"--threads {args.threads}: expected 1 or more")
        torch.set_num_threads(args.threads)
    device = choose_device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {device}: expected cpu or cuda")
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # the events that time a call belong to the current device
    dtype = DTYPES[args.precision or ("bf16" if device.type == "cuda" else "fp32")]
    options: dict[str, Any] = dict(device=device, dtype=dtype, effort=Effort.choose(quick=args.quick))
    facts = describe_run(device, dtype)
    runs = {"op": _run_op, "break-even": _run_break_even, "kernels": _run_kernels, "profile": _run_profile}
    with redirect_stdout(sys.stderr) if args.json == STANDARD_OUTPUT else nullcontext():
        record = runs.get(args.kind, _run_models)(args, facts, options)
    if args.json == STANDARD_OUTPUT:
        write_json(STANDARD_OUTPUT, record.content)
    return 1 if record.failed else 0


def _run_tune(args: argparse.Namespace) -> int:
    import torch

    from inline_attention.ops.backends import HAS_TRITON, gpu

    check_at_least(args, jobs=1, minutes=0)
    device = choose_device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if not HAS_TRITON or (device.type != "cuda" and not gpu.INTERPRETED):
        raise ValueError(f"--device {device}: the kernels are Triton's and run on a GPU, so there is nothing to tune")
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(device)
        if reason := gpu.why_not(device):
            raise ValueError(f"--device {device}: {reason}")
    from inline_attention.bench.tuning import session

    parts = args.parts or session.DEFAULT
    minutes = float("inf") if args.minutes is None else args.minutes
    dtype = torch.float16 if gpu.INTERPRETED else torch.bfloat16  # the interpreter's bfloat16 is wrong
    with redirect_stdout(sys.stderr) if args.json == STANDARD_OUTPUT else nullcontext():
        try:
            path, content = session.tune(
                parts, device=device, dtype=dtype, jobs=args.jobs, minutes=minutes, again=args.again, log=say
            )
        except KeyboardInterrupt:
            say("what was measured is kept; the same command goes on")
            raise
        left = sum(map(len, session.missing(content, parts).values()))
        say(f"{counted(left, 'measurement')} left or failed; the same command goes on" if left else "all is measured")
        say(f"processes that start from now on compute with {path}")
    if args.json is not None:
        write_json(args.json, content)
    return 0


def _chosen(one: bool, other: bool, names: tuple[str, str]) -> list[str]:
    """Both names, unless exactly one of them was asked for."""
    return [name for name, wanted in zip(names, (one, other), strict=True) if wanted or one == other]


def _open_record(kind: str, facts: dict[str, str], args: argparse.Namespace) -> "Record":
    """Print the facts of a run, and open the record of its results."""
    from inline_attention.bench.record import Record

    say(*(f"{name}: {value}" for name, value in facts.items()), "")
    return Record(kind, facts, None if args.json in (None, STANDARD_OUTPUT) else Path(args.json))


def _run_op(args: argparse.Namespace, facts: dict[str, str], options: dict[str, Any]) -> "Record":
    from inline_attention.bench import op
    from inline_attention.bench.timing import copy_bandwidth

    device = options["device"]
    contenders = op.choose_contenders(args.contenders, device)
    defaults = op.GPU_CASES if device.type == "cuda" else op.CPU_CASES
    cases = [op.Case.parse(text) for text in args.case or (op.QUICK_CASES if args.quick else defaults)]
    directions = _chosen(args.forward, args.backward, ("forward", "forward+backward"))
    bandwidth = copy_bandwidth(device, effort=options["effort"])
    facts |= {"compile modes": "eager", "copy": f"{bandwidth / 1e9:.1f} GB/s"}
    record = _open_record("op", facts, args)
    for case in cases:
        for results in op.run_case(case, contenders=contenders, directions=directions, bandwidth=bandwidth, **options):
            say_text(op.op_table(record.add(results)))
    return record


def _run_break_even(args: argparse.Namespace, facts: dict[str, str], options: dict[str, Any]) -> "Record":
    from inline_attention.bench import break_even

    sides = args.sides or break_even.SIDES
    if min(sides) < 1:
        raise ValueError(f"--sides {' '.join(map(str, sides))}: expected 1 or more")
    if args.anchors < 1:
        raise ValueError(f"--anchors {args.anchors}: expected 1 or more")
    if args.batch_size is not None and args.batch_size < 1:
        raise ValueError(f"--batch-size {args.batch_size}: expected 1 or more")
    sizes = [_parse_heads(text) for text in args.heads]
    facts["compile modes"] = "eager"
    record = _open_record("break-even", facts, args)
    options |= dict(sides=sides, anchors=args.anchors, batch=args.batch_size)
    for heads, head_dim in sizes:
        results = break_even.time_sizes(heads, head_dim, **options)
        say_text(break_even.break_even_table(record.add(results)))
        say("", f"{heads}×{head_dim}: {break_even.describe_break_even(results)}")
    return record


def _parse_heads(text: str) -> tuple[int, int]:
    heads, times, head_dim = text.partition("x")
    if not (times and heads.isdecimal() and head_dim.isdecimal() and int(heads) and int(head_dim)):
        raise ValueError(f"--heads {text}: expected heads and their size, such as 6x64")
    return int(heads), int(head_dim)


def _run_kernels(args: argparse.Namespace, facts: dict[str, str], options: dict[str, Any]) -> "Record":
    from inline_attention.bench import op
    from inline_attention.bench.timing import copy_bandwidth
    from inline_attention.ops.backends import HAS_TRITON

    device, dtype = options["device"], options["dtype"]
    if device.type != "cuda" or not HAS_TRITON:
        raise ValueError(
            f"--device {device}: the kernels are Triton's and run on a GPU; `inline bench op` times the rest"
        )
    from inline_attention.bench import kernels
    from inline_attention.ops.fused_mlp import MOST_WIDTH

    cases = [op.Case.parse(text) for text in args.case or op.GPU_CASES]
    bandwidth = copy_bandwidth(device, effort=options["effort"])
    facts |= {"compile modes": "eager", "copy": f"{bandwidth / 1e9:.1f} GB/s"}
    record = _open_record("kernels", facts, args)
    for case in cases:
        results = kernels.run_case(case, device=device, dtype=dtype, bandwidth=bandwidth)
        if case.heads * case.head_dim <= MOST_WIDTH:
            results += kernels.run_mlp(case, bandwidth=bandwidth, **options)
        say_text(kernels.kernel_table(record.add(results)))
    return record


def _run_models(args: argparse.Namespace, facts: dict[str, str], options: dict[str, Any]) -> "Record":
    import torch

    from inline_attention.bench import contenders as known
    from inline_attention.bench import model
    from inline_attention.bench.picture import draw_bars, draw_sweep
    from inline_attention.bench.side_by_side import run_settings

    if args.jobs < 1:
        raise ValueError(f"--jobs {args.jobs}: expected 1 or more")
    device, dense = options["device"], args.kind == "dense"
    contenders = args.contenders or known.default_contenders(args.models, device, dense=dense)
    (known.check_dense_models if dense else known.check_classifiers)(args.models, contenders)
    model.check_modes(args.modes)
    settings = _settings(args, device, latency=not dense and args.latency)
    if not dense and args.cast_weights:
        if any(setting.training for setting in settings):
            raise ValueError("--cast-weights: training keeps its weights in fp32; add --infer")
        if options["dtype"] == torch.float32:
            raise ValueError("--cast-weights with --precision fp32 casts nothing; expected bf16 or fp16")
        options["cast_weights"] = True
        facts["weights"] = facts["dtype"]
    modes = args.modes or (None if dense else model.default_modes(device))
    if modes is not None:
        modes = model.usable_modes(modes, device)
    facts["compile modes"] = "each contender's best" if modes is None else ", ".join(modes)
    record = _open_record("dense" if dense else "model", facts, args)
    each = f"{len(contenders)} contenders" + (f" in {len(modes)} modes" if modes and len(modes) > 1 else "")
    say(f"{len(settings)} measurements of {each}: {', '.join(map(str, settings))}")
    measured = run_settings(settings, jobs=args.jobs, log=say, contenders=contenders, modes=modes, **options)
    for number, setting in enumerate(settings, start=1):
        say(f"[{number}/{len(settings)}] {setting}")
        say_text(model.model_table(record.add(next(measured))))
    if not dense and (ratios := model.ratio_table(record.results)):  # dense models share no size
        say("")
        say_text(ratios)
    if args.picture is not None:
        (draw_bars if dense else draw_sweep)(record.results, args.picture)
    return record


def _settings(args: argparse.Namespace, device: "torch.device", *, latency: bool) -> "list[Setting]":
    from inline_attention.bench import model

    tasks = _chosen(args.infer, args.train, ("infer", "train"))
    if args.kind == "dense":
        size = parse_size(args.img_size)
        return model.make_dense_settings(args.models, img_size=size, batch=args.batch_size, tasks=tasks)
    kind = "sweep" if args.kind == "sweep" else "model"
    img_sizes, batches = model.default_sizes(kind, device, img_sizes=args.img_sizes, batches=args.batch_sizes)
    return model.make_settings(args.models, img_sizes=img_sizes, batches=batches, tasks=tasks, latency=latency)


def _run_profile(args: argparse.Namespace, facts: dict[str, str], options: dict[str, Any]) -> "Record":
    from inline_attention.bench import model, profile
    from inline_attention.bench.contenders import check_classifiers, default_contenders

    device = options["device"]
    contenders = args.contenders or default_contenders(args.models, device)
    mode = args.mode or model.default_modes(device)[0]
    check_classifiers(args.models, contenders)
    model.check_modes([mode])
    settings = _settings(args, device, latency=False)
    facts["compile modes"] = ", ".join(model.usable_modes([mode], device))
    record = _open_record("profile", facts, args)
    for setting in settings:
        results = profile.run_setting(
            setting, contenders=contenders, mode=mode, device=device, dtype=options["dtype"], log=say
        )
        say_text(profile.profile_table(record.add(results)))
    return record


def _print_records(paths: list[Path], picture: Path | None) -> None:
    from inline_attention.bench.break_even import break_even_table
    from inline_attention.bench.kernels import kernel_table
    from inline_attention.bench.model import model_table, ratio_table, row_of
    from inline_attention.bench.op import op_table
    from inline_attention.bench.picture import draw_bars, draw_sweep
    from inline_attention.bench.profile import profile_table
    from inline_attention.bench.record import read_record

    tables = {
        "op": op_table,
        "break-even": break_even_table,
        "kernels": kernel_table,
        "model": lambda results: "\n\n".join(filter(None, (ratio_table(results), model_table(results)))),
        "profile": profile_table,
        "dense": model_table,
    }
    pictures = {"model": draw_sweep, "dense": draw_bars}
    drawn: dict[str, list[dict[str, Any]]] = {}
    for path in paths:
        kind, facts, results = read_record(path, kinds=tables)
        try:
            text = tables[kind](results)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} has results that this version cannot read: {error!r}") from error
        say(f"{path.name}: {', '.join(f'{name} {value}' for name, value in facts.items())}", "")
        say_text(text + "\n")
        if kind in pictures:
            rows = {row_of(result) for result in results}
            drawn[kind] = [result for result in drawn.get(kind, []) if row_of(result) not in rows] + results
    if picture is None:
        return
    if len(drawn) != 1:
        raise ValueError(f"--picture {picture}: expected records of model and sweep, or of dense, and not of both")
    ((kind, results),) = drawn.items()
    pictures[kind](results, picture)
