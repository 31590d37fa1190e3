"""The tables of the documentation show the numbers of their records."""

import itertools
import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from inline_attention import create_model, linearize
from inline_attention.bench.kernels import kernel_table
from inline_attention.bench.model import best_of
from inline_attention.bench.op import op_table
from inline_attention.bench.profile import kind_of
from inline_attention.models.profile import count_module_macs

DOCS = Path(__file__).parents[1] / "docs"
STUDY = ("softmax_deit_study", "linear_deit_study", "inline_deit_study")
Cells = dict[str, list[str]]


def record(name: str) -> Any:
    return json.loads((DOCS / "results" / f"{name}.json").read_text(encoding="utf-8"))


def results(name: str) -> list[dict[str, Any]]:
    return record(name)["results"]


def table(page: str, header: str, *, after: str = "", labels: int = 1) -> Cells:
    """The first table of a page whose header begins so, below some text: its cells by the first columns.

    Bold marks are left out. An empty label is that of the line above.
    """
    text = (DOCS / page).read_text(encoding="utf-8").replace("**", "")
    lines = (cells_of(line) for line in text[text.index(after) :].splitlines())
    wanted = cells_of(f"|{header}|")
    next(line for line in lines if line[: len(wanted)] == wanted)
    found: Cells = {}
    above = [""] * labels
    for line in itertools.islice(itertools.takewhile(len, lines), 1, None):  # below the rule
        above = [cell or before for cell, before in zip(line[:labels], above, strict=True)]
        found[" ".join(above)] = line[labels:]
    return found


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line[1:-1].split("|")] if line[:1] == "|" else []


def test_analysis() -> None:
    found = table("analysis.md", " | softmax | linear | InLine", after="## Results")
    analyses = record("analysis")["analyses"]

    def each(name: str, value: Callable[[dict[str, Any]], float | None]) -> list[float | None]:
        return [value(analyses[name]["models"][model]) for model in STUDY]

    def shown(name: str, value: Callable[[dict[str, Any]], float], digits: int) -> list[str]:
        return [f"{value(analyses[name]['models'][model]):.{digits}f}" for model in STUDY]

    def agreement(what: str, taps: str) -> list[str]:
        values = each("masking", lambda of: of["agreement"].get(f"{what}, taps {taps}"))
        plain = each("masking", lambda of: of["agreement"].get(what) if taps == "kept" else None)
        return [
            "–" if value is None else f"{100 * value:.0f}%"
            for value in (one if one is not None else other for one, other in zip(values, plain, strict=True))
        ]

    for tau, rho in ((0.1, 0.3), (0.3, 1)):
        at = f"rows < {tau:g}, queries > {rho:g}"
        pairs = shown("confusion", lambda of, at=at: of["pairs_in_a_million"][at], 1)
        assert found[f"confused pairs in a million, τ = {tau:g}, ρ = {rho:g}"] == pairs
    images = [100 * (value or 0) for value in each("confusion", lambda of: of["share_of_images_with_any"])]
    assert found["images with a confused pair, τ = 0.3, ρ = 1"] == [f"{value:.0f}%" for value in images]
    first = shown("locality", lambda of: of["first_layer_over_chance"], 2)
    assert found["attention to the 3×3 over chance (9/N), first layer"] == first
    assert found["the same, mean of the layers"] == shown("locality", lambda of: of["mean_over_chance"], 2)
    assert found["numerical rank of 257"] == shown("rank", lambda of: of["mean_numerical"], 1)
    assert found["effective rank"] == shown("rank", lambda of: of["mean_effective"], 1)
    masks = {name: cells for name, cells in found.items() if " tokens masked, " in name}
    assert len(masks) == 6
    for name, cells in masks.items():
        tokens, what, residual = re.findall(r"(\d+) (local|random) tokens masked, residual (\w+)", name)[0]
        assert cells == agreement(f"{what} {tokens}", {"kept": "kept", "masked": "zeroed"}[residual]), name


def test_analysis_of_accuracy() -> None:
    analyses = record("analysis")["analyses"]
    lost = table("analysis.md", "points of accuracy lost | softmax | InLine")
    for epochs, end in ((120, ""), (40, ", models of 40 epochs")):
        of = {name: model["top1"] for name, model in analyses[f"masking, 1000 images{end}"]["models"].items()}
        softmax, inline = of[STUDY[0]], of[STUDY[2]]
        points = (softmax["none"] - softmax["local 49"], inline["none"] - inline["local 49, taps kept"])
        assert lost[f"models of {epochs} epochs"] == [f"{100 * value:.1f}" for value in points]
    untrained = table("analysis.md", "confused pairs in a million, untrained")
    models = analyses["confusion, untrained, 20 images"]["models"]
    for tau, rho in ((0.1, 0.3), (0.3, 1)):
        pairs = [models[name]["pairs_in_a_million"][f"rows < {tau:g}, queries > {rho:g}"] for name in STUDY]
        assert untrained[f"τ = {tau:g}, ρ = {rho:g}"] == [f"{value:.1f}" for value in pairs]


def test_ablation() -> None:
    found = table("study.md", "model | what is taken away", labels=2)
    rows = {row["title"]: row for row in record("ablation")["rows"]}
    names = {"the residual": "without the residual", "attention": "attention spread evenly", "both": "without both"}
    for title, name in names.items():
        row, (low, high) = rows[name], rows[name]["lost_interval"]
        assert found[f"InLine (with residual) {title}"] == [
            f"{row['top1']:.1f}", f"{low:.1f} to {high:.1f}", f"{row['changed']:.1f}",
        ]  # fmt: skip
    assert found["InLine (with residual) nothing"][0] == f"{rows['the whole model']['top1']:.1f}"
    masked = record("analysis")["analyses"]["masking, 1000 images"]["models"][STUDY[2]]["top1"]
    shown = table("study.md", "120 epochs, first seed")["InLine (with residual)"]
    assert shown[1:4] == [
        f"{100 * masked[name]:.1f}" for name in ("none", "local 49, taps kept", "local 49, taps zeroed")
    ]


def test_precision() -> None:
    found = table("performance.md", " | top-1 % | predictions changed, %")
    conditions = {"float32 stream": "bf16 products, float32 stream", "bf16 stream": "bf16 weights and stream"}
    conditions["float64 and float32"] = "float32"
    rows = {(row["model"], row["condition"]): row for row in record("precision")["rows"]}
    for title, model in zip(("softmax", "linear (ReLU)", "InLine"), STUDY, strict=True):
        for shown, condition in conditions.items():
            row = rows[model, condition]
            error = f"{100 * row['error']:.{4 if condition == 'float32' else 1}f}"
            assert found[f"{title}, {shown}"] == [
                f"{row['top1']:.1f}",
                f"{row['changed']:.1f}".replace("0.0", "0"),
                error,
            ]


def rates(name: str, **facts: str) -> dict[tuple[int, str], dict[str, Any]]:
    """(size, contender): the fastest mode, of the results with these facts. A task is known by its beginning."""
    of = [r for r in results(name) if all(value.startswith(r[key]) for key, value in facts.items())]
    return {(r["img_size"], r["contender"]): r for r in best_of(of)}


SIZES = (224, 384, 640, 1024, 2048)


@pytest.mark.parametrize("task", ["inference", "training step"])
def test_sweeps(task: str) -> None:
    speeds = table("performance.md", f" | {SIZES[0]} × 256", after="## Speed over resolution")
    memory = table("performance.md", f" | {SIZES[0]} × 256", after="## Memory")
    found = rates("sweep-rows-h200", task=task[:5])
    kept = found if task == "inference" else rates("sweep-train-h200", mode="reduce-overhead")
    for title, contender in (("DeiT-T, FlashAttention", "peer"), ("InLine-DeiT-T", "fused")):
        of = [found[size, contender] for size in SIZES]
        cells = []
        for size, r in zip(SIZES, of, strict=True):
            ratio = r["images_per_second"] / found[size, "peer"]["images_per_second"]
            cells.append(f"{r['images_per_second']:,.0f}" + ("" if contender == "peer" else f" ({ratio:.2f})"))
        assert speeds[f"{task}, {title}"] == cells
        assert memory[f"{task}, {title}"] == [f"{kept[size, contender]['peak_bytes'] / 2**30:.2f}" for size in SIZES]


def test_one_image() -> None:
    found = table("performance.md", "size | DeiT-T, ms (quartiles)")
    timings = {(r["img_size"], r["contender"]): r["timing"] for r in results("one-image-rows-h200")}
    for size, cells in found.items():
        peer, ours = timings[int(size), "peer"], timings[int(size), "fused"]
        shown = [f"{1e3 * t['median']:.2f} ({1e3 * t['low']:.2f}–{1e3 * t['high']:.2f})" for t in (peer, ours)]
        assert cells == [*shown, f"{peer['median'] / ours['median']:.2f}"]


def test_few_tokens() -> None:
    found = table("performance.md", "part of a block, channels, tokens")
    of = record("few-tokens-h200")
    for title, cells in found.items():
        width, outputs, rows = (int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*\d", title))
        name, last = {
            "MLP half": ("mlp", "hidden"),
            "projection and MLP half": ("projected", "hidden"),
            "norm and projection": ("norm_linear", "outputs"),
        }[title.partition(",")[0]]
        (micros,) = (r["micros"] for r in of[name] if (r["width"], r[last], r["rows"]) == (width, outputs, rows))
        kernel = min(time for tile, time in micros.items() if tile != "compiled")
        assert cells == [f"{micros['compiled']:.1f}", f"{kernel:.1f} ({micros['compiled'] / kernel:.2f})"]


def test_speed_in_the_readme() -> None:
    found = table("../README.md", " | 224 px | 384")
    sources = {
        "inference, in batches": rates("sweep-rows-h200", task="infer"),
        "training step, in batches": rates("sweep-rows-h200", task="train"),
        "inference, one image": rates("one-image-rows-h200"),
    }
    for row, of in sources.items():
        assert found[row] == [
            f"{of[size, 'fused']['images_per_second'] / of[size, 'peer']['images_per_second']:.2f}"
            if (size, "peer") in of
            else "–"
            for size in SIZES
        ]


def test_linearised_in_the_readme() -> None:
    found = table("../README.md", " | softmax | tangent, 16 anchors", after="Linearised without training")
    top1 = {row["title"]: f"{row['top1']:.1f}" for row in record("expansion")["rows"]}
    order = ("softmax", "tangent at 16 anchors", "tangent at 4 anchors", "tangent at the mean query")
    assert found["top-1 (%)"] == [top1[name] for name in (*order, "InLine, the tangent at zero", "linear (ReLU)")]
    image = torch.zeros(1, 3, 64, 64)
    costs = [count_module_macs(create_model("softmax_deit_study"), image)]
    for attention, anchors in (("tangent", 16), ("tangent", 4), ("tangent", 1), ("inline", 1), ("linear", 1)):
        model = create_model("softmax_deit_study")
        linearize(model, attention=attention, anchors=anchors, local_residual=False)
        costs.append(count_module_macs(model, image))
    assert found["GMACs"] == [f"{cost / 1e9:.2f}" for cost in costs]


def test_free_attention() -> None:
    found = table("performance.md", "inference, ÷ DeiT-T with FlashAttention")
    free = rates("sweep-free-h200")
    ratios = [free[size, "free"]["images_per_second"] / free[size, "peer"]["images_per_second"] for size in SIZES]
    assert found["DeiT-T with q + k + v instead of attention"] == [f"{ratio:.2f}" for ratio in ratios]


def test_other_models() -> None:
    found = table("performance.md", " | size × batch | softmax, img/s", labels=2)
    assert len(found) == 18
    of = {(r["model"], r["img_size"], r["batch"], r["contender"]): r for r in results("models-h200")}
    again = {(r["model"], r["img_size"], r["batch"], r["contender"]): r for r in results("models-second-h200")}
    names = {"S": "small", "B": "base", "T": "tiny"}
    for title, cells in found.items():
        _, family, letter, size, batch = re.findall(r"(InLine)-(\w+)-(\w) (\d+) × (\d+)", title)[0]
        model = f"inline_{family.lower()}_{names[letter]}"
        source = again if family == "Swin" else of
        softmax, inline = (source[model, int(size), int(batch), contender] for contender in ("peer", "fused"))
        speeds = [r["images_per_second"] for r in (softmax, inline)]
        assert cells[:3] == [*(f"{speed:,.0f}" for speed in speeds), f"{speeds[1] / speeds[0]:.2f}"], title
        assert cells[3:] == [f"{r['peak_bytes'] / 2**30:.2f}" for r in (softmax, inline)], title


@pytest.mark.parametrize("direction", ["forward", "forward and backward"])
def test_the_family(direction: str) -> None:
    found = table("performance.md", f"{direction} | 14² × 256")
    titles = {"InLine": "fused", "linear (ReLU)": "linear", "MALA (ELU + 1)": "mala", "tangent, one anchor": "tangent"}
    cases = ("256, 14², 6×32", "32, 40², 6×32", "16, 64², 6×32", "1, 256², 6×32")
    times = {
        (r["case"], r["contender"]): 1e6 * r["timing"]["median"]
        for r in results("family-h200")
        if r["direction"] == direction.replace(" and ", "+")
    }
    for title, contender in titles.items():
        expected = [
            f"{times[case, contender]:.0f}"
            + ("" if contender == "fused" else f" ({times[case, contender] / times[case, 'fused']:.2f})")
            for case in cases
        ]
        assert found[title] == expected
    floors = [
        f"{r['timing']['median'] / r['floor_seconds']:.2f}"
        for case in (cases[0], "64, 28², 12×32", *cases[1:])
        for r in results("family-h200")
        if (r["case"], r["contender"], r["direction"]) == (case, "fused", direction.replace(" and ", "+"))
    ]
    assert table("performance.md", "InLine, ÷ floor")[direction] == floors


def test_all_kernels_of_one_image() -> None:
    found = table("performance.md", "size | µs | until the call returns")
    of = {(r["img_size"], r["contender"]): r for r in record("one-image-alone-h200")["results"]}
    names = {"DeiT-T": "peer", "InLine-DeiT-T": "fused"}
    assert len(found) == len(of)
    for title, cells in found.items():
        size, name = title.split(", ")
        r = of[int(size), names[name]]
        assert cells == [f"{r[key]:,}" for key in ("latency_us", "host_us", "kernels_us", "kernels")]


def test_the_kernel_of_the_mlp() -> None:
    found = table("performance.md", "channels → hidden | tokens", labels=2)
    timed = record("mlp-h200")["timed"]
    for title, cells in found.items():
        expected = []
        width, hidden, rows = (int(number.replace(",", "")) for number in re.findall(r"[\d,]+", title))
        for use in ("inference", "projected"):
            sizes = dict(rows=rows, width=width, hidden=hidden)
            (micros,) = (r["micros"] for r in timed[use] if sizes.items() <= r.items())
            compiled = micros["compiled"]
            kernel = min(time for name, time in micros.items() if name != "compiled")
            expected += [f"{compiled:,.0f}", f"{kernel:,.0f} ({compiled / kernel:.2f})"]
        assert cells == expected, title


def micro(seconds: float) -> str:
    return f"{1e6 * seconds:,.0f}" if seconds >= 1e-3 else f"{1e6 * seconds:.1f}"


def test_the_operation_on_a_gpu() -> None:
    found = table("results/performance-tables.md", "batch, map, heads×d |  | InLine, fused", labels=2)
    of = {(f"{r['case']} {r['direction']}", r["contender"]): r for r in results("op-h200")}
    assert found.keys() == {title for title, _ in of}
    for title, cells in found.items():
        fused = of[title, "fused"]
        times = [of[title, name]["timing"]["median"] for name in ("fused", "textbook", "softmax", "softmax_wide")]
        peaks = [of[title, name]["peak_bytes"] / 1e6 for name in ("fused", "softmax_wide")]
        floor = f"{times[0] / fused['floor_seconds']:.2f}"
        assert cells == [micro(times[0]), floor, *map(micro, times[1:]), *(f"{peak:.1f}" for peak in peaks)], title


def test_printed_tables() -> None:
    page = "results/performance-tables.md"
    kernels = table(page, "batch, map, heads×d | kernel | µs", labels=2)
    printed = [cells_of(line) for line in kernel_table(results("kernels-h200")).splitlines()[2:]]
    assert kernels == {" ".join(line[:2]): line[2:6] for line in printed}
    on_cpu = table(page, "batch, map, heads×d |  | contender", labels=3)
    printed = [cells_of(line) for line in op_table(results("op-cpu")).splitlines()[2:]]
    assert on_cpu == {" ".join(line[:3]): [*line[3:5], *line[6:]] for line in printed}  # without "timed"


def test_the_operation_on_a_cpu() -> None:
    found = table("performance.md", "batch, map, heads×d | InLine, reference", after="## On a CPU")
    of = {
        (r["case"], r["contender"]): f"{1e3 * r['timing']['median']:.1f}"
        for r in results("op-cpu")
        if r["direction"] == "forward+backward"
    }
    for case, cells in found.items():
        assert cells == [of[case, contender] for contender in ("reference", "textbook", "softmax")]


def test_recipes_of_linearize() -> None:
    found = table("linearize.md", "rate, share of labels")
    runs = record("linearization-recipes")["students"]
    last = {
        (f"{r['lr']:.0e}".replace("e-0", "e-") + f", {r['labels']}", r["attention"], r["epochs"]): r["evaluations"][-1]
        for r in runs
        if r["seed"] == 3
    }
    for row, cells in found.items():
        of = [last[row.split(":")[0], name, epochs] for name in ("tangent", "inline") for epochs in (5, 20)]
        assert cells == [f"{each['val_top1']:.1f}" for each in of]
    text = " ".join((DOCS / "linearize.md").read_text(encoding="utf-8").split())
    (alone,) = (r for r in runs if r["alone"])
    assert f"**20 epochs take {alone['seconds']:.0f} seconds**" in text
    half_rate = last["4e-3, 0.1", "tangent", 20]["val_agreement"]
    assert f"agrees with its teacher for {half_rate:.0f} % of the images" in text


def cells_of_students(students: list[dict[str, Any]]) -> dict[tuple[str, int], list[float]]:
    """Top-1 of each seed, by row and epochs"""
    cells: dict[tuple[str, int], list[float]] = {}
    for run in students:
        cells.setdefault((run["row"], run["epochs"]), []).append(run["top1"])
    return cells


def test_students() -> None:
    found = table("linearize.md", " | before training | 5 epochs")
    content = record("linearization")
    of = cells_of_students(content["students"])
    spread = [f"{statistics.mean(of['tangent', n]):.1f} ± {statistics.stdev(of['tangent', n]):.1f}" for n in (5, 20)]
    assert all(len(of["tangent", epochs]) == 3 for epochs in (5, 20))
    assert found["tangent, with residual"][1:] == spread
    readme = " ".join((DOCS.parent / "README.md").read_text(encoding="utf-8").split())
    assert f"the student with one anchor has {spread[1]} over three seeds" in readme
    titles = {
        "InLine, φ = ReLU, with residual": "inline_relu",
        "InLine, with residual": "inline",
        "linear (ReLU), with residual": "linear",
        "tangent, 3 of 7 layers softmax, with residual": "hybrid_3",
        "tangent, 2 of 7 layers softmax, with residual": "hybrid_2",
        "tangent, 1 of 7 layers softmax, with residual": "hybrid_1",
        "InLine, without residual": "inline_plain",
        "tangent, without residual": "tangent_plain",
    }
    for title, row in titles.items():
        assert found[title][1:] == [f"{of[row, n][0]:.1f}" if (row, n) in of else "–" for n in (5, 20)]
        if (row, -1) in of:
            assert found[title][0] == f"{of[row, -1][0]:.1f}"
    assert content["teacher"] == record("expansion")["teacher"]
    untrained = {row["title"]: row["top1"] for row in record("expansion")["rows"]}
    same = {"linear": "linear (ReLU)", "inline": "InLine, the tangent at zero", "tangent": "tangent at the mean query"}
    same |= {f"tangent_{count}": f"tangent at {count} anchors" for count in (4, 16)}
    assert all(of[row, -1] == [untrained[title]] for row, title in same.items())
    carried = {row["title"]: f"{row['top1']:.1f}" for row in record("expansion")["rows"]}
    before = {"tangent": "tangent at the mean query", "InLine": "InLine, the tangent at zero"}
    before["linear (ReLU)"] = "linear (ReLU)"
    for title, cells in found.items():
        attention, _, how = title.partition(", ")
        if how in ("with residual", "without residual"):  # the residual starts at zero
            assert cells[0] == carried[before[attention]]
    teacher = next(iter(found.values()))
    assert teacher[0] == f"{content['scratch']['softmax_deit_study']:.1f}"
    text = " ".join((DOCS / "linearize.md").read_text(encoding="utf-8").split())
    agreement = statistics.mean(content["agreement_after_20_epochs"])
    assert f"predicts the teacher's class for {agreement:.0f} % of the images" in text
    assert f"`inline_deit_study` has {content['scratch']['inline_deit_study']:.1f} %" in text


def test_calibration() -> None:
    found = table("linearize.md", " | carried over | with gains")
    content = record("calibration")
    assert content["teacher"] == record("expansion")["teacher"]
    top1 = {(row["attention"], row["softmax_layers"], row["gains"]): row["top1"] for row in content["rows"]}
    kept = {row["softmax_layers"]: sorted(row["kept"]) for row in content["rows"]}
    assert len(found) == 7
    for title, cells in found.items():
        attention = title.split(",")[0].strip('`"')
        layers = int((re.findall(r"auto:(\d)", title) or [0])[0])
        values = [top1.get((attention, layers, gains)) for gains in (False, True)]
        assert cells == ["" if value is None else f"{value:.1f}" for value in values], title
        if layers:
            assert kept[layers] == [f"blocks.{block}.attn" for block in re.findall(r"\d", title.partition("layer")[2])]
    text = " ".join((DOCS / "linearize.md").read_text(encoding="utf-8").split())
    assert f"{content['rows'][0]['images']:,} validation images" in text
    assert f"{content['calibration_images']} training images" in text


def test_linearised_in_short() -> None:
    """The first table of the page repeats numbers of the others."""
    found = table("linearize.md", "in short")
    top1 = {row["title"]: f"{row['top1']:.1f} %" for row in record("expansion")["rows"]}
    names = ("tangent at the mean query", "tangent at 16 anchors", "softmax")
    (untrained,) = (cells[0] for title, cells in found.items() if "without training" in title)
    assert re.findall(r"[\d.]+ %", untrained) == [top1[name] for name in names]
    speed, students = table("linearize.md", " | ViT-S/16, 1024 × 32"), table("linearize.md", " | before training")
    ratios = [re.findall(r"\(([\d.]+)\)", cell)[0] for cell in speed["tangent, with residual"][:2]]
    (shown,) = (cells[0] for title, cells in found.items() if "speed" in title)
    assert re.findall(r"\d\.\d\d", shown) == ratios
    (trained,) = (cells[0] for title, cells in found.items() if "after 20 epochs" in title)
    assert trained.startswith(f"{students['tangent, with residual'][2]} %")


def test_break_even() -> None:
    found = table("linearize.md", "tokens | 16 | 49")
    records = {f"{anchors} anchor{'s' if anchors > 1 else ''}": f"break-even-{anchors}-cpu" for anchors in (1, 4, 16)}
    records["1 anchor, one image"] = "break-even-one-image-cpu"
    assert found.keys() == records.keys()
    for title, name in records.items():
        assert found[title] == [f"{row['softmax'] / row['linear']:.2f}" for row in results(name)]
    assert {row["batch"] for row in results("break-even-one-image-cpu")} == {1}


def test_one_launch() -> None:
    found = table("results/performance-tables.md", "map, heads×d", after="## One launch")
    assert len(found) == len(record("short-h200")["timed"])
    for entry in record("short-h200")["timed"]:
        _, side, heads, dim = entry["sizes"]
        times: list[float] = []
        for form in ("made", "given"):
            today, best = entry[form]["today"], min(t for name, t in entry[form].items() if name != "today")
            times += [today, best, today / best]
        shown = [float(cell) for cell in found[f"{side}², {heads}×{dim}"]]
        assert shown == pytest.approx(times, abs=0.0501)


def test_the_profile_of_one_image() -> None:
    found = table("results/performance-tables.md", "µs a call (launches)")
    kernels: dict[tuple[int, str, str], list[dict[str, Any]]] = {}
    for r in results("profile-h200"):
        kind = kind_of(r["kernel"].replace("taps_kernel", "local_weight_kernel"))  # its name today
        for name in (kind, "all"):
            kernels.setdefault((r["img_size"], r["contender"], name), []).append(r)
    for name in ("attention", "matrix products", "norms, elementwise", "all"):
        parts = [kernels[size, contender, name] for size in (224, 1024) for contender in ("peer", "fused")]
        assert found[name] == [
            f"{sum(r['microseconds'] for r in part):,.0f} ({sum(r['launches'] for r in part):.0f})" for part in parts
        ]


def test_linearised_without_training() -> None:
    found = table("linearize.md", " | `softmax_deit_study`, top-1 %")
    titles = {"InLine": "InLine, the tangent at zero", "tangent": "tangent at the mean query"}
    titles |= {f"tangent, {count} anchors": f"tangent at {count} anchors" for count in (4, 16)}
    top1 = {row["title"]: f"{row['top1']:.1f}" for row in record("expansion")["rows"]}
    cosines = {
        (row["title"], row["img_size"]): f"{row['class_token']:.2f} / {row['patches']:.2f}"
        for row in record("pretrained")["rows"]
    }
    for title, cells in found.items():
        assert cells[0] == top1.get(titles.get(title, title), "–")
        if title != "softmax":
            assert cells[1:] == [cosines[title, size] for size in (224, 518, 1036)]


def test_expansions_by_layer() -> None:
    found = table("linearize.md", " | top-1 % | error of a layer: smallest")
    titles = {
        "InLine: first order at zero": "InLine, the tangent at zero",
        "tangent, 1 anchor": "tangent at the mean query",
    }
    titles |= {f"tangent, {count} anchors": f"tangent at {count} anchors" for count in (4, 16)}
    top1 = {row["title"]: row["top1"] for row in record("expansion")["rows"]}
    layers = {row["title"]: row for row in record("expansion")["layers"]}
    assert [titles.get(title, title) for title in found] == list(top1) == list(layers)
    for title, cells in found.items():
        name = titles.get(title, title)
        errors = layers[name]["errors"]
        assert len(errors) == 7
        assert cells == [f"{top1[name]:.1f}", *(f"{f(errors):.2f}" for f in (min, statistics.median, max))]
    assert {row["images"] for row in layers.values()} == {1016}
    assert "compared on 1,016 of the images" in (DOCS / "linearize.md").read_text(encoding="utf-8")
    tangent, centroids, second, first = (
        layers[name]["errors"]
        for name in (
            "tangent at 16 anchors",
            "16 centroids, order zero",
            "second order at zero",
            "InLine, the tangent at zero",
        )
    )
    assert all(10 * x < y for x, y in zip(tangent, centroids, strict=True))
    assert sum(x > y for x, y in zip(second, first, strict=True)) == 6
