"""Checks of the Triton kernels that take a GPU and more time than a test. Run from a checkout:

    PYTHONPATH=src python tests/gpu_check.py sanitize --processes 14
    PYTHONPATH=src compute-sanitizer --tool memcheck python tests/gpu_check.py sanitize
    PYTHONPATH=src compute-sanitizer --tool initcheck python tests/gpu_check.py sanitize
    PYTHONPATH=src python tests/gpu_check.py repeat --out FOLDER
    PYTHONPATH=src python tests/gpu_check.py random --cases 2000 --processes 14 --seconds 540 --out FOLDER
    PYTHONPATH=src python tests/gpu_check.py mlp --cases 400 --processes 14 --seconds 540 --out FOLDER
    PYTHONPATH=src python tests/gpu_check.py norm --cases 400 --processes 10 --out FOLDER
    PYTHONPATH=src python tests/gpu_check.py block --processes 14 --out FOLDER
    PYTHONPATH=src python tests/gpu_check.py short --processes 14 --out FOLDER
    PYTHONPATH=src python tests/gpu_check.py settings --processes 14 --seconds 200 --out FOLDER

`sanitize` calls forward and backward of every kernel once, on small shapes, and compares the results with float64 on
the CPU. Run it without the sanitizer first: its processes compile the kernels, and Triton keeps them on disk for the
runs that follow. `repeat` makes the same call many times and counts results that differ in any bit. No kernel adds
atomically, so there should be none. `random` compares random cases with float64 on the GPU, as
`tests/ops/test_triton.py` does for 210 of them. A process takes all cases of a specialization, so that each kernel is
compiled once. With `--seconds` it stops in time; `--first` starts at a later seed. `mlp` does the same for the
MLP's kernel. It then times every tile of `fused_mlp.TILES` beside what torch.compile makes of the
reference, and prints the lines of `fused_mlp.WINS` for the tiles that win. For training it times the forward pass
of every tile, and then forward and backward with the fastest, compiled, beside those of a block's own modules; that
gives the wins of "training". `--modes` names what is timed. `norm` does it for the kernel of a norm and the projection
to q, k and v. `block` compares a block that takes all of these kernels with the same block in plain PyTorch: the errors
of its output and gradients against float64, as multiples of the plain block's. `short` does what `mlp` does for the
forward pass in one launch: beside today's launches in CUDA graphs, with the local weight made inside and with a given
one. It prints the lines of `fused.short.WINS`, and stops after 150 seconds unless `--seconds` says otherwise.
`settings` times each attention kernel with other tokens of a step, warps and stages than `fused.config.STEPS` has, and
prints the fastest.

Each command prints a table, writes a JSON file to `--out`, and exits with 1 if anything is wrong.
"""

import argparse
import json
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

if "sanitize" in sys.argv:
    # An allocation for each tensor, or the sanitizer sees reads beyond one tensor as reads of its neighbour.
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch
from torch import Tensor

if not torch.cuda.is_available():  # to try this script; the interpreter is slow
    os.environ.setdefault("TRITON_INTERPRET", "1")

from kernel_cases import (
    BLOCK_FACTOR,
    BLOCK_RUNS,
    DEVICE,
    DTYPES,
    FAMILY,
    INLINE,
    ONE_LAUNCH,
    PATHS,
    BlockCase,
    Kind,
    NormLinearCase,
    RandomCase,
    RandomMlp,
    RandomShort,
    Specialization,
    block_cases,
    configured,
    every_kernel_wins,
    made_results,
    make_inputs,
    make_source,
    random_case,
    random_mlp,
    random_norm_linear,
    random_short,
    run,
    run_made,
    specialization_of,
)

from inline_attention.bench.tuning import one_launch, steps, tiles
from inline_attention.bench.tuning.candidates import workers
from inline_attention.layers import LocalWeight
from inline_attention.ops import fused_mlp, gpu, inline_attention_packed, inline_attention_projected, norm_linear

PLACE = torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device(DEVICE)
MEASURED: Any = dict(device=PLACE, dtype=DTYPES[-1])  # what is timed

# Relative to the norm of the exact result. They find wrong values; `random` measures accuracy.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}

Tensors = dict[str, Tensor]
Case = tuple[str, Callable[[], tuple[Tensors, Tensors]]]  # a name, and what gives (kernel's results, exact ones)


def in_processes(f: Callable[[Any], Any], items: Iterable[Any], processes: int) -> Iterator[Any]:
    """`map(f, items)`, in order. A process takes the next item when it is done with one."""
    with workers(processes) as mapped:
        yield from mapped(f, items)


# sanitize


def attention_case(path: str, dtype: torch.dtype, kind: Kind, *shape: Any, **options: Any) -> Case:
    def call() -> tuple[Tensors, Tensors]:
        qkv, weight, grad, rest = make_inputs(*shape, dtype, **options)
        if rest["query_mask"] is not None:
            rest["query_mask"] = rest["query_mask"].flip(1)
        with configured(**(ONE_LAUNCH if path == "one launch" else PATHS[path])):
            fast = run(qkv, weight, grad, rest, backend="triton", kind=kind)
        on_cpu = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in rest.items()}
        weight = None if weight is None else weight.cpu()
        exact = run(qkv.cpu(), weight, grad.cpu(), on_cpu, backend="reference", dtype=torch.float64, kind=kind)
        return fast, exact

    facts = ", ".join(name for name, value in options.items() if value)
    return f"attention {path} {str(dtype)[6:]} {kind} {shape} {facts}", call


def call_both(f: Callable[..., Tensor], tensors: list[Tensor]) -> tuple[Tensors, Tensors]:
    """`f(backend, *tensors)` and its gradients by the kernels, and by the reference on the CPU in float64."""
    results = []
    for backend, leaves in (("triton", tensors), ("reference", [x.detach().cpu().double() for x in tensors])):
        leaves = [x.detach().requires_grad_() for x in leaves]
        out = f(backend, *leaves)
        grads = torch.autograd.grad(out.float().square().sum() if backend == "triton" else out.square().sum(), leaves)
        results.append({"out": out.detach()} | {f"d{i}": grad for i, grad in enumerate(grads)})
    return results[0], results[1]


def packed_case(path: str, dtype: torch.dtype, *, local: bool) -> Case:
    grids = [(2, 3), (1, 1), (9, 20), (1, 17)]
    bounds = [0]
    for height, width in grids:
        bounds.append(bounds[-1] + 1 + height * width)

    def call() -> tuple[Tensors, Tensors]:
        torch.manual_seed(0)
        tensors = list(torch.randn(3, bounds[-1], 2, 32, device=DEVICE, dtype=dtype))
        if local:
            tensors.append(torch.randn(len(grids), 2, 32, 9, device=DEVICE, dtype=dtype) / 9)

        def attention(backend: Any, q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None = None) -> Tensor:
            return inline_attention_packed(
                q, k, v, cu_seqlens=bounds, grids=grids, local_weight=weight, num_prefix_tokens=1, backend=backend
            )

        with configured(**PATHS[path]):
            return call_both(attention, tensors)

    return f"packed {path} {str(dtype)[6:]} {'local' if local else ''}", call


def projected_case(path: str, sizes: tuple[int, ...]) -> Case:
    def call() -> tuple[Tensors, Tensors]:
        qkv, weight, _, rest = make_inputs(2, (5, 9), 1, 2, 32, DTYPES[-1])
        assert weight is not None

        def attention(backend: Any, weight: Tensor, *projections: Tensor) -> Tensor:
            return inline_attention_projected(*projections, local_weight=weight, backend=backend, **rest)

        with configured(**PATHS[path]):
            return call_both(attention, [weight, *(x.contiguous() for x in qkv.split(sizes, 2))])

    return f"projected {path} {sizes}", call


def queries_case(path: str) -> Case:
    def call() -> tuple[Tensors, Tensors]:
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, n, 2, 32, device=DEVICE, dtype=DTYPES[-1]) for n in (37, 91, 91))

        def attention(backend: Any, *qkv: Tensor) -> Tensor:
            return inline_attention_projected(*(x.unsqueeze(2) for x in qkv), backend=backend)

        with configured(**PATHS[path]):
            return call_both(attention, [q, k, v])

    return f"queries of another length {path}", call


def large_map_case() -> Case:
    name, call = attention_case("split", DTYPES[-1], INLINE, 1, (40, 18), 1, 1, 32)

    def call_with_a_small_axis() -> tuple[Tensors, Tensors]:
        before, gpu.MOST_ON_AN_AXIS = gpu.MOST_ON_AN_AXIS, 2
        try:
            return call()
        finally:
            gpu.MOST_ON_AN_AXIS = before

    return f"{name} with more tiles than an axis holds", call_with_a_small_axis


def made_case(dtype: torch.dtype) -> Case:
    def call() -> tuple[Tensors, Tensors]:
        qkv, _, _, rest = make_inputs(2, (5, 19), 1, 3, 32, dtype, masked=True)
        exact, _, fast = made_results(qkv, make_source(qkv), rest)
        return fast, exact

    return f"attention one launch {str(dtype)[6:]}, local weight made inside", call


def local_weight_case(dtype: torch.dtype, batch: int, heads: int, head_dim: int) -> Case:
    def call() -> tuple[Tensors, Tensors]:
        torch.manual_seed(0)
        layer = LocalWeight(heads * head_dim, heads).to(DEVICE, dtype)
        mean = torch.randn(batch, heads * head_dim, device=DEVICE, dtype=dtype)

        def generate(backend: Any, mean: Tensor, *parameters: Tensor) -> Tensor:
            named = dict(zip(dict(layer.named_parameters()), parameters, strict=True))
            return torch.func.functional_call(layer, named, (mean,), dict(backend=backend))

        return call_both(generate, [mean, *layer.parameters()])

    return f"local_weight {str(dtype)[6:]} {(batch, heads, head_dim)}", call


def sanitized_cases() -> Iterator[Case]:
    for path in PATHS:
        for i, feature_map in enumerate(("identity", "relu", "leaky_relu", "exp")):
            dtype = DTYPES[i % len(DTYPES)]
            yield attention_case(path, dtype, Kind(feature_map=feature_map), 2, (5, 19), 1, 3, 32, masked=True)
        for i, kind in enumerate(FAMILY):
            yield attention_case(path, DTYPES[i % len(DTYPES)], kind, 2, (5, 19), 1, 3, (32, 16)[i % 2], masked=True)
        for dtype in DTYPES:
            yield attention_case(path, dtype, INLINE, 2, (7, 18), 0, 2, 32)
            yield attention_case(path, dtype, INLINE, 2, (3, 7), 1, 1, 24, local=False)
        for head_dim in (16, 40, 64, 80, 128):
            yield attention_case(path, DTYPES[-1], INLINE, 1, (3, 5), 1, 3, head_dim, masked=True)
        yield attention_case(path, DTYPES[-1], INLINE, 1, (1, 1), 0, 1, 16)
        yield from (packed_case(path, DTYPES[-1], local=local) for local in (False, True))
        yield from (projected_case(path, sizes) for sizes in ((3,), (1, 2), (2, 1), (1, 1, 1)))
        yield queries_case(path)
    yield large_map_case()
    for i, kind in enumerate((INLINE, *FAMILY)):
        yield attention_case(
            "one launch", DTYPES[i % len(DTYPES)], kind, 2, (5, 19), 1, 3, (32, 16)[i % 2], masked=True
        )
    yield attention_case("one launch", DTYPES[-1], INLINE, 1, (3, 5), 1, 3, 128)
    yield from (made_case(dtype) for dtype in DTYPES)
    for i, shape in enumerate([(1, 1, 16), (3, 2, 24), (17, 3, 32), (2, 1, 128)]):
        yield local_weight_case(DTYPES[i % len(DTYPES)], *shape)


def run_sanitized(index: int) -> list[dict[str, Any]]:
    """The case of that index in `sanitized_cases`, one row for each result."""
    name, call = list(sanitized_cases())[index]
    fast, exact = call()
    rows = []
    for result, of_kernel in fast.items():
        x, z = exact[result].cpu(), of_kernel.detach().cpu().double()
        size = float(x.norm()) or 1.0
        error = float((z - x).norm()) / size
        rows.append(dict(case=name, result=result, error=error, passed=error <= TOLERANCE[fast[result].dtype]))
    print(f"{'ok  ' if all(row['passed'] for row in rows) else 'FAIL'} {name}", flush=True)
    return rows


def sanitize(args: argparse.Namespace) -> dict[str, Any]:
    cases = range(len(list(sanitized_cases())))
    rows = [row for found in in_processes(run_sanitized, cases, args.processes) for row in found]
    return dict(results=rows, failed=[row for row in rows if not row["passed"]])


# repeat


def repeat(args: argparse.Namespace) -> dict[str, Any]:
    cases = {
        "split, 56×56, 3 heads of 32": make_inputs(8, (56, 56), 0, 3, 32, DTYPES[-1]),
        "split, 56×56, masked": make_inputs(8, (56, 56), 1, 3, 32, DTYPES[-1], masked=True),
        "fused, 14×14, class token": make_inputs(256, (14, 14), 1, 6, 32, DTYPES[-1]),
        "float32, 40×40, heads of 64": make_inputs(4, (40, 40), 1, 2, 64, torch.float32),
    }
    torch.manual_seed(0)
    layer, mean = LocalWeight(192, 6).to(DEVICE), torch.randn(300, 192, device=DEVICE, requires_grad=True)

    def local_weight() -> Tensors:
        with torch.autocast(DEVICE, DTYPES[-1]):
            out = layer(mean, backend="triton")
        grads = torch.autograd.grad(out.float().square().sum(), [mean, *layer.parameters()])
        return {"out": out} | {f"d{i}": grad for i, grad in enumerate(grads)}

    calls: dict[str, Callable[[], Tensors]] = {
        name: lambda inputs=inputs: run(*inputs, backend="triton") for name, inputs in cases.items()
    }
    first_inputs = next(iter(cases.values()))
    for kind in FAMILY[:3]:
        calls[str(kind)] = lambda kind=kind: run(*first_inputs, backend="triton", kind=kind)
    calls["local_weight, 300 samples"] = local_weight
    made = make_inputs(1, (14, 14), 1, 6, 32, DTYPES[-1])
    source = make_source(made[0])
    calls["one launch, 14×14, class token"] = lambda: run_made(made[0], source, made[3])
    rows = []
    for name, call in calls.items():
        first = {key: x.clone() for key, x in call().items()}
        differing: dict[str, int] = defaultdict(int)
        for _ in range(args.times - 1):
            for key, x in call().items():
                differing[key] += not torch.equal(x, first[key])
        rows.append(dict(case=name, calls=args.times, differing={key: differing[key] for key in first}))
        print(f"{name}: {args.times} calls, differing {rows[-1]['differing']}", flush=True)
    return dict(results=rows, failed=[r for r in rows if any(r["differing"].values())])


# random


@contextmanager
def recorded_kernels() -> Iterator[set[str]]:
    """The kernels that Triton compiles, or finds compiled on disk: for which types, constants and alignments."""
    kernels: set[str] = set()

    def record(*, fn: Any, compile: dict[str, Any], **_: Any) -> None:
        facts = [compile[name] for name in ("signature", "constants", "configs", "num_warps", "num_stages")]
        kernels.add(f"{fn.name} {facts}")

    knobs = gpu.triton.knobs.runtime
    before, knobs.jit_cache_hook = knobs.jit_cache_hook, record
    try:
        yield kernels
    finally:
        knobs.jit_cache_hook = before


Draw = Callable[[int], RandomCase | RandomShort]


def run_seeds(share: tuple[Draw, list[int], float]) -> tuple[list[dict[str, Any]], set[str]]:
    """The cases of some seeds, none begun after a time, and the kernels that were compiled for them."""
    draw, seeds, until = share
    torch.use_deterministic_algorithms(True, warn_only=True)  # what a kernel leaves unwritten shows as NaN
    rows = []
    with recorded_kernels() as kernels:
        for seed in seeds:
            if time.time() > until:
                break
            case = draw(seed)
            row: dict[str, Any] = dict(seed=seed, case=str(case))
            try:
                found = case.errors()
                row["ratio"] = {name: error / allowed if allowed else error for name, error, allowed in found}
                row["passed"] = all(error <= allowed for _, error, allowed in found)
            except Exception as error:  # a kernel that does not compile or run is a result too
                row |= dict(ratio={}, passed=False, exception=repr(error)[:500])
            rows.append(row)
    return rows, kernels


def by_specialization(seeds: Iterable[int]) -> dict[Specialization, list[int]]:
    shares: dict[Specialization, list[int]] = defaultdict(list)
    for seed in seeds:
        shares[specialization_of(seed)].append(seed)
    return shares


def random(args: argparse.Namespace) -> dict[str, Any]:
    seeds = range(args.first, args.first + args.cases)
    until = time.time() + args.seconds
    shares = by_specialization(seeds)
    # The split path has more kernels to compile, so its cases begin first.
    ordered = sorted(shares, key=lambda specialization: specialization.path != "split")
    shared = list(in_processes(run_seeds, [(random_case, shares[x], until) for x in ordered], args.processes))
    kernels = set().union(*(kernels for _, kernels in shared))
    rows = sorted((row for share, _ in shared for row in share), key=lambda row: row["seed"])
    worst: dict[str, float] = defaultdict(float)
    for row in rows:
        for name, ratio in row["ratio"].items():
            worst[name] = max(worst[name], ratio)
    failed = [row for row in rows if not row["passed"]]
    print(f"{len(rows)} of {args.cases} cases from seed {args.first} on, {len(failed)} failed")
    print(f"{len(shares)} specializations, {len(kernels)} compiled kernels")
    print("largest error as a share of what is allowed:")
    for name, ratio in worst.items():
        print(f"  {name:8} {ratio:.3f}")
    for row in failed[:20]:
        print("FAILED", row["seed"], row["case"], row["ratio"], row.get("exception", ""))
    missing = sorted(set(seeds) - {row["seed"] for row in rows})
    if missing:
        print(f"not run in {args.seconds} s: {len(missing)} cases, the first is seed {missing[0]}")
    counts = dict(cases=len(rows), specializations=len(shares), kernels=len(kernels))
    return dict(**counts, missing=missing, worst=dict(worst), failed=failed, results=rows)


# What `inline bench tune` times, with checks before it, and lines for the library's tables after it


def winning_lines(wins: Mapping[tuple[Any, ...], Sequence[tuple[Any, ...]]]) -> list[str]:
    """Lines of a table for this GPU: the key, and the fields of each `Win`."""
    chip = gpu.chip_of(PLACE) if DEVICE == "cuda" else gpu.H200
    lines = []
    for key, found in wins.items():
        texts = [f"Win({', '.join(map(str, bounds))}, Tile{tile})" for *bounds, tile in found]
        if texts:
            line = f"    (gpu.{chip}, {', '.join(map(str, key))}): ({', '.join(texts)},),"
            lines.append(line.replace(str(fused_mlp.ANY), "ANY"))
    return lines


# mlp


def mlp_work(item: tuple[str, Any]) -> Any:
    """What processes share."""
    what, share = item
    return check_seed(random_mlp, share) if what == "check" else tiles.compile_one(share)


def check_seed(draw: Callable[[int], RandomMlp | NormLinearCase], seed: int) -> dict[str, Any]:
    torch.use_deterministic_algorithms(True, warn_only=True)  # what a kernel leaves unwritten shows as NaN
    case = draw(seed)
    row: dict[str, Any] = dict(seed=seed, case=str(case))
    try:
        found = case.errors()
        row["ratios"] = {name: error / allowed for name, error, allowed in found}
        row["ratio"] = max(row["ratios"].values())
        row["passed"] = all(error <= allowed for _, error, allowed in found)  # not if one is NaN
    except Exception as error:  # a kernel that does not compile or run is a result too
        row |= dict(ratio=None, passed=False, exception=repr(error)[:500])
    finally:
        torch.use_deterministic_algorithms(False)  # or every torch.empty would be filled, and timed
    return row


def failures(checked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of `check_seed` that failed; prints how many there are, and the largest error."""
    failed = [row for row in checked if not row["passed"]]
    worst = max((row["ratio"] for row in checked if row["ratio"] is not None), default=0.0)
    print(
        f"{len(checked)} random cases, {len(failed)} failed; largest error as a share of what is allowed: {worst:.3f}"
    )
    for row in failed[:20]:
        print("FAILED", row)
    return failed


def mlp(args: argparse.Namespace) -> dict[str, Any]:
    until = time.time() + args.seconds
    halves = {
        use: [
            half
            for half in tiles.halves_of(use)
            if half.width in args.widths and args.least_rows <= half.rows <= args.most_rows
        ]
        for use in args.modes
    }
    work: list[tuple[str, Any]] = [("check", seed) for seed in range(args.cases)]
    shares = dict.fromkeys(
        share for use, some in halves.items() for half in some for share in tiles.shares_of(half, use, **MEASURED)
    )
    # Those of torch.compile take longest, so they begin first.
    ordered = sorted(shares, key=lambda share: share.tile is not None)
    done = list(in_processes(mlp_work, [*(("compile", share) for share in ordered), *work], args.processes))
    broken = [found for found in done[: len(ordered)] if found]
    checked = done[len(ordered) :]
    print(f"{len(ordered)} kernels compiled, {len(broken)} failed; {until - time.time():.0f} s left", *broken[:9])
    failed = failures(checked)
    torch.use_deterministic_algorithms(False)  # or every torch.empty would be filled, and timed
    timed = {use: time_halves(use, some, until) for use, some in halves.items()}
    wins = {use: winning_lines(tiles.wins_of(rows)) for use, rows in timed.items()}
    print("WINS:", *(line for use in wins for line in (use, *wins[use])), sep="\n")
    return dict(checked=checked, failed=failed, broken=broken, timed=timed, wins=wins)


def time_halves(use: fused_mlp.Use, halves: Iterable[tiles.Half], until: float = math.inf) -> list[dict[str, Any]]:
    print(f"{use}\n{tiles.HEADER}")
    rows = []
    for half in halves:
        if time.time() < until:
            rows.append(tiles.time_one(half, use, **MEASURED))
            print(tiles.line_of(rows[-1]), flush=True)
    return rows


# norm


def normed_work(half: tiles.Half) -> tuple[list[str], float]:
    """Compiles both sides. Returns the tiles that failed, and the largest error, relative to a rounding."""
    inputs = tiles.draw(half, "normed", **MEASURED)
    tiles.reference_calls(inputs, "normed")[0]()
    x, (weight, bias, *_) = inputs.calls[0][0], inputs.weights
    exact = norm_linear(*(t.double() for t in (x, *inputs.norm, weight, bias)), eps=tiles.EPS, backend="reference")
    failed, worst = [], 0.0
    for tile in tiles.tiles_for(half, "normed", **MEASURED):
        try:
            found = tiles.kernel_calls(inputs, "normed", tile)[0]()
        except Exception as error:  # such as out of resources
            failed.append(f"{half} {tile}: {error!r}"[:300])
            continue
        for one, other in zip(found, exact, strict=True):
            error = (one.double() - other).norm() / other.norm()
            worst = max(worst, float(error) / torch.finfo(inputs.dtype).eps if error.isfinite() else math.inf)
    return failed, worst


def normed(args: argparse.Namespace) -> dict[str, Any]:
    until = time.time() + args.seconds
    checked = list(in_processes(partial(check_seed, random_norm_linear), range(args.cases), args.processes))
    failed = failures(checked)
    torch.use_deterministic_algorithms(False)  # or every torch.empty would be filled, and timed
    halves = tiles.halves_of("normed") if time.time() < until else []
    done = list(in_processes(normed_work, halves, args.processes))
    broken = [failure for each, _ in done for failure in each]
    worst = max((error for _, error in done), default=0.0)
    print(f"{len(broken)} tiles failed; largest error {worst:.2f} roundings", *broken[:9])
    timed = time_halves("normed", halves, until)
    wins = winning_lines(tiles.wins_of(timed))
    print("WINS:", *wins, sep="\n")
    wrong = [] if worst < 2 else [f"{worst} roundings"]
    return dict(checked=checked, broken=broken, timed=timed, wins=wins, failed=failed + wrong)


# block


def block_work(share: tuple[BlockCase, str]) -> dict[str, Any]:
    """The errors of a block with all kernels, as multiples of those of the plain block."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # what a kernel leaves unwritten shows as NaN
    case, name = share
    config, training = BLOCK_RUNS[name]
    row: dict[str, Any] = dict(case=str(case), run=name)
    try:
        with every_kernel_wins():
            found = case.errors(training=training, **config)
        row["ratio"] = {name: error / (allowed / BLOCK_FACTOR) for name, error, allowed in found}
        row["passed"] = all(error <= allowed for _, error, allowed in found)
    except Exception as error:  # a kernel that does not compile or run is a result too
        row |= dict(ratio={}, passed=False, exception=repr(error)[:500])
    return row


def block(args: argparse.Namespace) -> dict[str, Any]:
    work = [(case, name) for case in block_cases(args.attentions) for name in BLOCK_RUNS]
    print("| block | run | output | largest of gradients |\n|---|---|---|---|")
    rows = []
    for row in in_processes(block_work, work, args.processes):
        rows.append(row)
        ratios = {name: f"{ratio:.2f}" for name, ratio in row["ratio"].items()}
        out = ratios.pop("out", row.get("exception"))
        largest = max(ratios, key=lambda name: row["ratio"][name], default=None)
        print(
            f"| {row['case']} | {row['run']} | {out} | {f'{ratios[largest]}, {largest}' if largest else ''} |",
            flush=True,
        )
    return dict(results=rows, failed=[row for row in rows if not row["passed"]])


# short


def short_work(item: tuple[str, Any]) -> Any:
    """What processes share: random cases, and kernels to compile."""
    what, share = item
    with torch.no_grad():
        return run_seeds(share) if what == "check" else one_launch.compile_one(share)


def short(args: argparse.Namespace) -> dict[str, Any]:
    until = time.time() + args.seconds
    heads = one_launch.HEADS[: args.heads]
    order = [one_launch.Sizes(batch, side, *each) for batch in args.batches for each in heads for side in args.sides]
    compiled = dict.fromkeys(share for sizes in order for share in one_launch.shares_of(sizes, **MEASURED))
    shares = [(random_short, seeds, until) for seeds in by_specialization(range(args.cases)).values()]
    work = [*(("check", share) for share in shares), *(("compile", share) for share in compiled)]
    done = list(in_processes(short_work, work, args.processes))
    checked = [row for rows, _ in done[: len(shares)] for row in rows]
    broken = [found for found in done[len(shares) :] if found]
    failed = [row for row in checked if not row["passed"]]
    worst = max((max(row["ratio"].values()) for row in checked if row["ratio"]), default=0.0)
    print(f"{len(checked)} of {args.cases} random cases, {len(failed)} failed")
    print(f"largest error as a share of what is allowed: {worst:.3f}")
    for row in failed[:20]:
        print("FAILED", row)
    print(f"{len(compiled)} kernels compiled, {len(broken)} failed; {until - time.time():.0f} s left", *broken[:9])
    print(one_launch.HEADER)
    torch.use_deterministic_algorithms(False)  # or every torch.empty would be filled, and timed
    timed: list[dict[str, Any]] = []
    for sizes in order:
        if time.time() < until:
            timed.append(one_launch.time_one(sizes, **MEASURED))
            print(one_launch.line_of(timed[-1]), flush=True)
    if len(timed) < len(order):
        print(f"not timed in {args.seconds:.0f} s: {len(order) - len(timed)} of {len(order)} shapes")
    wins = winning_lines(one_launch.wins_of(timed))
    print("\n".join(["WINS:", *wins]))
    return dict(checked=checked, failed=failed, broken=broken, timed=timed, wins=wins)


# settings


def settings(args: argparse.Namespace) -> dict[str, Any]:
    until = time.time() + args.seconds
    chosen = steps.all_settings(args.kinds, args.kernels)
    work = [(setting, case) for setting in chosen for case in steps.cases_of(setting.kernel)]
    shares = {
        (setting, case.rpartition("x")[2]): steps.Share(setting, case, **MEASURED) for setting, case in work
    }  # a kernel serves a width
    found = in_processes(steps.compile_one, shares.values(), args.processes)
    broken = [error for error in found if error]
    print(f"{len(shares)} compiled, {len(broken)} failed; {until - time.time():.0f} s left", *broken[:9])
    timer = steps.Timer(**MEASURED)
    timed: list[dict[str, Any]] = []
    for setting, case in work:
        if time.time() < until:
            timed.append(timer.time(setting, case))
    print("\n".join([steps.HEADER, *steps.lines_of(timed)]))
    if len(timed) < len(work):
        print(f"not timed in {args.seconds:.0f} s: {len(work) - len(timed)} of {len(work)}")
    return dict(broken=broken, timed=timed, failed=[])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run_by_name = {
        "sanitize": sanitize,
        "repeat": repeat,
        "random": random,
        "mlp": mlp,
        "norm": normed,
        "block": block,
        "short": short,
        "settings": settings,
    }
    for name in run_by_name:
        command = commands.add_parser(name)
        command.add_argument("--out", type=Path, help="folder for a JSON file")
        if name == "repeat":
            command.add_argument("--times", type=int, default=1000)
        else:
            command.add_argument("--processes", type=int, default=1)
        if name == "mlp":
            command.add_argument("--cases", type=int, default=400)
            command.add_argument("--seconds", type=float, default=1e9, help="nothing is timed after this time")
            widths = list(dict.fromkeys(width for width, _ in tiles.ROWS))
            command.add_argument("--widths", type=int, nargs="+", default=widths, choices=widths)
            command.add_argument("--least-rows", type=int, default=0, help="leave out fewer rows")
            command.add_argument("--most-rows", type=int, default=fused_mlp.ANY, help="leave out more rows")
            uses = [use for use in fused_mlp.USES if use != "normed"]
            command.add_argument("--modes", nargs="+", default=uses, choices=uses, help="what is timed")
        if name == "norm":
            command.add_argument("--cases", type=int, default=400)
            command.add_argument(
                "--seconds", type=float, default=1e9, help="nothing is timed after this time; 0: not at all"
            )
        if name == "block":
            names = ("inline", "linear", "mala", "rala", "polaformer", "tangent")
            command.add_argument(
                "--attentions", nargs="+", default=["inline", "tangent", "mala", "rala"], choices=names
            )
        if name == "short":
            command.add_argument("--cases", type=int, default=240)
            command.add_argument("--seconds", type=float, default=150, help="nothing is timed after this time")
            command.add_argument("--heads", type=int, default=len(one_launch.HEADS), help="kinds of heads, in order")
            command.add_argument("--sides", type=int, nargs="+", default=one_launch.SIDES)
            command.add_argument("--batches", type=int, nargs="+", default=one_launch.BATCHES)
        if name == "settings":
            kinds, kernels = steps.KINDS, steps.KERNELS
            command.add_argument("--seconds", type=float, default=1e9, help="nothing is timed after this time")
            command.add_argument("--kinds", nargs="+", default=["fused"], choices=kinds, help="attentions")
            command.add_argument("--kernels", nargs="+", default=list(kernels), choices=kernels)
        if name == "random":
            command.add_argument("--cases", type=int, default=2000)
            command.add_argument("--first", type=int, default=0, help="the first seed")
            command.add_argument("--seconds", type=float, default=1e9, help="no case begins after this time")
    args = parser.parse_args()
    facts = dict(
        command=[word for word in sys.argv[1:] if args.out is None or word not in ("--out", str(args.out))],
        torch=torch.__version__,
        triton=gpu.triton.__version__,
        device=torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu, in Triton's interpreter",
    )
    print(facts, flush=True)
    began = time.time()
    found = run_by_name[args.command](args)
    found = facts | dict(seconds=round(time.time() - began, 1)) | found
    print(f"{len(found['failed'])} failures in {found['seconds']} s")
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / f"kernels-{args.command}.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
