"""Each measurement against its definition, pair by pair and query by query."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.legend import Legend
from PIL import Image
from small import create_small, image
from torch import Tensor, nn

from inline_attention import create_model, inline_attention, linear_attention
from inline_attention.analysis import (
    analysis_class,
    analysis_names,
    attention_maps,
    capture,
    measure_confusion,
    measure_injectivity,
    measure_locality,
    measure_masking,
    measure_rank,
    observe,
    plane_weights,
)
from inline_attention.analysis.divergence import Divergence
from inline_attention.analysis.measures import confusion
from inline_attention.analysis.measures.locality import Locality
from inline_attention.analysis.measures.maps import Maps
from inline_attention.analysis.measures.masking import random_mask, window_mask
from inline_attention.data.samples import sample_photographs

KINDS = ("softmax", "linear", "inline")


def deit(kind: str, **kwargs: Any) -> Any:
    return create_small("inline_deit_tiny", attention=kind, **kwargs)


# Injectivity


def test_figure_1() -> None:
    result = measure_injectivity()
    assert [panel.feature_map for panel in result.panels] == ["ReLU(x)", "ReLU(A·x + b)"]
    for panel in result.panels:
        rows = panel.rows["linear"].weights
        assert np.abs(rows - rows[0]).max() < 1e-6
        assert panel.rows["linear"].verdict == "all equal"
        for kind in ("softmax", "inline"):
            rows = panel.rows[kind].weights
            assert all(np.abs(rows[i] - rows[j]).max() > 0.01 for i in range(4) for j in range(i))
            assert panel.rows[kind].verdict == "all different"
        for rows in panel.rows.values():
            np.testing.assert_allclose(rows.weights.sum(1), 1, atol=1e-6)


def test_figure_1_by_hand() -> None:
    """The second query of the second panel, from the formulas."""
    panel = measure_injectivity().panels[1]
    weight, bias = np.array([[1.2, -0.4], [-0.3, 0.9]]), np.array([0.5, 0.2])
    phi_q, phi_k = (np.maximum(x @ weight.T + bias, 0) for x in (panel.queries[1], panel.keys))
    np.testing.assert_allclose(phi_q, panel.mapped_queries[1])
    np.testing.assert_allclose(phi_k, panel.mapped_keys)
    s, n = 2**-0.5, 4
    scores = phi_k @ phi_q
    np.testing.assert_allclose(panel.rows["linear"].weights[1], scores / (scores.sum() + 1e-6))
    np.testing.assert_allclose(panel.rows["inline"].weights[1], s / n * scores - s / n**2 * scores.sum() + 1 / n)
    exponents = np.exp(s * panel.keys @ panel.queries[1])
    np.testing.assert_allclose(panel.rows["softmax"].weights[1], exponents / exponents.sum())


def test_some_rows_may_be_equal() -> None:
    from inline_attention.analysis.measures.injectivity import compare

    queries = torch.tensor([[1.0, 1.0], [2.0, 2.0], [1.0, 2.0]], dtype=torch.float64)
    panel = compare(queries, queries + 1, name="ReLU(x)")
    assert panel.rows["linear"].verdict == "some equal"
    assert panel.rows["inline"].verdict == "all different"
    direct = plane_weights(queries, queries + 1, kind="inline", feature_map="relu")
    np.testing.assert_allclose(panel.rows["inline"].weights, direct.numpy())


# Confusion


def lower_median(values: list[float]) -> float:
    """The lower of the two in the middle, as torch takes it."""
    return sorted(values)[(len(values) - 1) // 2]


def confused_by_hand(weights: Tensor, q: Tensor, present: Tensor, *, tau: float, rho: float) -> int:
    """One head of one sample: weights (N, N), q (N, d)"""
    tokens = present.nonzero()[:, 0].tolist()
    weights, q = weights.double(), q.double()
    pairs = [(i, j) for i in tokens for j in tokens if i < j]
    if not pairs:
        return 0
    rows = [float((weights[i] - weights[j]).norm()) for i, j in pairs]
    queries = [float((q[i] - q[j]).norm()) for i, j in pairs]
    row_limit, query_limit = tau * lower_median(rows), rho * lower_median(queries)
    return sum(row < row_limit and query > query_limit for row, query in zip(rows, queries, strict=True))


@pytest.mark.parametrize("name", ["inline_deit_tiny", "softmax_swin_tiny", "softmax_pvt_tiny"])
def test_confusion_by_definition(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Class tokens, padded windows, reduced keys; thresholds that some pairs pass and others do not."""
    model, images, taus, rhos = create_small(name), image(32, 80), (0.5, 0.8), (0.5, 0.9)
    expected = np.zeros((2, 2, 2), dtype=int)
    for record in capture(model, images):
        per_image = record.q.shape[0] // 2
        weights = record.weights()
        for sample in range(record.q.shape[0]):
            present = torch.ones(record.q.shape[1]) > 0 if record.token_mask is None else record.token_mask[sample]
            for head, (t, tau), (r, rho) in product(range(record.num_heads), enumerate(taus), enumerate(rhos)):
                count = confused_by_hand(weights[sample, head], record.q[sample, :, head], present, tau=tau, rho=rho)
                expected[sample // per_image, t, r] += count
    result = measure_confusion(model, [images], taus=taus, rhos=rhos)
    assert result.by_image.tolist() == expected.tolist()
    assert expected.sum(0).min() > 0
    assert expected.sum(0).max() < result.summary()["pairs"]
    # The same in blocks of few rows, and image by image.
    blocks = measure_confusion(model, [images[:1], images[1:]], taus=taus, rhos=rhos, max_bytes=20_000)
    assert blocks.by_image.tolist() == expected.tolist()
    np.testing.assert_array_equal(blocks.by_layer, result.by_layer)
    np.testing.assert_array_equal(blocks.pairs, result.pairs)
    # Medians over some of the tokens: the pairs are still all counted.
    monkeypatch.setattr(confusion, "MEDIAN_TOKENS", 5)
    sampled = measure_confusion(model, [images], taus=taus, rhos=rhos, max_bytes=20_000)
    np.testing.assert_array_equal(sampled.pairs, result.pairs)
    assert sampled.by_image.sum() == pytest.approx(expected.sum(), rel=0.5)


def test_bins_of_the_histogram() -> None:
    """As its labels say them: 0, 1–3, 4–9, 10–31, 32–99."""
    assert confusion.histogram_edges(50).tolist() == [0, 1, 4, 10, 32, 100]
    assert confusion.histogram_edges(0).tolist() == [0, 1]


@pytest.mark.parametrize("kind", ["softmax", "inline"])
def test_flat_attention_is_not_confused(kind: str) -> None:
    """The rows of an untrained model differ little, but so do its queries. An injective attention confuses none."""
    torch.manual_seed(0)
    model = create_model("inline_deit_tiny", attention=kind, img_size=64, patch_size=8, depth=2, num_classes=2)
    photographs = torch.stack([photograph(path, 64) for path in sample_photographs()])
    result = measure_confusion(model, [photographs], rhos=(1.0,))
    assert result.per_million.max() < 100
    # Distances relative to the norm of a row ignore how flat the rows are. By them all rows would count as equal.
    record = capture(model, photographs, layers=[0])[0]
    rows = record.weights()
    assert (torch.cdist(rows, rows).median() < 0.2 * rows.norm(dim=-1).mean()).all()


def photograph(path: Path, size: int) -> Tensor:
    with Image.open(path) as file:
        pixels = np.asarray(file.convert("RGB").resize((size, size)), dtype=np.float32)
    return torch.from_numpy(pixels / 128 - 1).permute(2, 0, 1)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_collinear_queries_confuse_linear_attention_alone(share: float) -> None:
    """Queries of one direction and different lengths: linear attention cannot tell them apart, whether half of the
    queries are such, or all of them and no two rows differ."""
    model = deit("linear", depth=1, num_heads=1, local_residual=False)
    record = capture(model, image())[0]
    tokens, d = record.q.shape[1], record.q.shape[3]
    collinear = int(share * tokens)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.linspace(1, 3, collinear)[:, None] * torch.linspace(0.5, 1, d)
    queries = torch.cat([lengths, torch.rand(tokens - collinear, d, generator=generator) * 3])
    for kind in KINDS:
        other = capture(deit(kind, depth=1, num_heads=1, local_residual=False), image())[0]
        other.q.copy_(queries[None, :, None])
        confused, pairs = confusion.confused_pairs(other, taus=(0.03,), rhos=(0.1,))
        found = int(confused.sum()) / pairs
        if kind == "linear":
            assert found > 0.6 * share**2
        else:
            assert found == 0, kind


@pytest.mark.parametrize(("side", "megabytes"), [(64, 6), (128, 24)], ids=["1025", "4097"])
@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak of a process as Linux tells it")
def test_confusion_memory_is_bounded(side: int, megabytes: int) -> None:
    """The matrix alone would take 67 MB in float32 and 134 MB in float64 at 4,097 tokens, a sixteenth at 1,025."""
    script = f"""
import pathlib, torch
from inline_attention import create_model
from inline_attention.analysis import capture
from inline_attention.analysis.measures.confusion import confused_pairs
torch.set_num_threads(1)
small = dict(patch_size=2, embed_dim=8, depth=1, num_heads=1, num_classes=2)

def layer(side):
    model = create_model("inline_deit_tiny", img_size=side, **small)
    return capture(model, torch.randn(1, 3, side, side))[0]

def memory(what):
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split(what)[1].split()[0])

record = layer({side})
confused_pairs(layer(32), max_bytes=2**20)  # what the libraries take for themselves at first use
pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
before = memory("VmRSS:")
pairs = confused_pairs(record, max_bytes={megabytes} * 2**20)[1]
after = memory("VmHWM:")
tokens = ({side} // 2) ** 2 + 1
assert record.q.shape[1] == tokens and pairs == tokens * (tokens - 1) // 2
print((after - before) / 1024)
"""
    # glibc returns blocks of this size at once, so the process has the size of its live memory.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert 0 < float(done.stdout) < megabytes, done.stdout


# Locality


@pytest.mark.parametrize("name", ["inline_deit_tiny", "softmax_swin_tiny"])
def test_locality_by_definition(name: str) -> None:
    model, images = create_small(name), image(48, 80)
    result = measure_locality(model, [images[:1], images[1:]])
    assert result.images == 2
    for record, share, chance in zip(capture(model, images), result.share, result.chance, strict=True):
        (height, width), prefix = record.grid, record.num_prefix_tokens
        weights = record.weights()
        sums, chances = [], []
        for sample in range(weights.shape[0]):
            present = torch.ones(weights.shape[2]) > 0 if record.token_mask is None else record.token_mask[sample]
            for y in range(height):
                for x in range(width):
                    query = prefix + y * width + x
                    if not present[query]:
                        continue
                    near = [
                        prefix + v * width + u
                        for v in range(max(y - 1, 0), min(y + 2, height))
                        for u in range(max(x - 1, 0), min(x + 2, width))
                    ]
                    sums.append(float(weights[sample, :, query, near].sum(-1).mean()))
                    chances.append(9 / int(present.sum()))
        assert share == pytest.approx(np.mean(sums), abs=1e-6)
        assert chance == pytest.approx(np.mean(chances))


def test_locality_of_uniform_attention_is_chance_less_the_border() -> None:
    model = deit("softmax")
    for block in model.blocks:
        nn.init.zeros_(block.attn.qkv.weight)
        nn.init.zeros_(block.attn.qkv.bias)
    result = measure_locality(model, [image()])
    np.testing.assert_allclose(result.share, result.uniform, rtol=1e-6)
    np.testing.assert_allclose(result.chance, 9 / 17)
    # A 4×4 map: 4 corners with 4, 8 edges with 6, 4 inner ones with 9.
    np.testing.assert_allclose(result.uniform, (4 * 4 + 8 * 6 + 4 * 9) / 16 / 17)


def test_locality_names_what_it_skips() -> None:
    result = measure_locality(create_small("softmax_pvt_tiny"), [image()])
    assert set(result.skipped.values()) == {"its keys are a reduced map"}
    assert result.layers  # the last stage reduces nothing
    with pytest.raises(ValueError, match=r"not defined here.*reduced map"):
        measure_locality(create_small("softmax_pvt_tiny"), [image()], layers=[0])
    striped = measure_locality(create_small("softmax_cswin_tiny"), [image()])
    assert "its heads attend in stripes" in striped.skipped.values()
    with pytest.raises(ValueError, match="side=4; expected an odd number"):
        measure_locality(create_small("inline_deit_tiny"), [image()], side=4)


# Rank


def test_rank_by_definition() -> None:
    model, images = deit("softmax"), image()
    result = measure_rank(model, [images[:1], images[1:]])
    for record, numerical, effective in zip(capture(model, images), result.numerical, result.effective, strict=True):
        weights = record.weights()
        np.testing.assert_array_equal(numerical, torch.linalg.matrix_rank(weights).numpy())
        for sample, head in np.ndindex(*effective.shape):
            values = np.linalg.svd(weights[sample, head].double().numpy(), compute_uv=False)
            shares = values / values.sum()
            assert effective[sample, head] == pytest.approx(np.exp(-(shares * np.log(shares)).sum()), rel=1e-4)
    assert (result.tokens == 17).all()


def test_rank_of_linear_attentions_is_small() -> None:
    for kind in ("linear", "inline"):
        result = measure_rank(deit(kind, num_heads=4), [image()])
        assert max(layer.max() for layer in result.numerical) <= 4 + 1
    softmax = measure_rank(deit("softmax", num_heads=4), [image()])
    assert softmax.means(softmax.numerical).min() > 4 + 1


def test_windows_have_ranks_of_their_own() -> None:
    result = measure_rank(create_small("softmax_swin_tiny"), [image()])
    assert result.numerical[0].shape == (2 * 64, 1)  # a 16×16 map in windows of 2×2
    assert (result.tokens == 4).all()


# Masking


def seen_window(record: Any, side: int) -> Any:
    """All but the window around the query is masked."""
    mask = window_mask(record, side)
    return lambda rows: ~mask(rows)


@pytest.mark.parametrize("kind", KINDS)
def test_all_but_the_window_masked_by_hand(kind: str) -> None:
    """Each query attends to the tokens that are left as if there were no others, by the model's own fast path."""
    model = deit(kind, depth=1, local_residual=False)
    record = capture(model, image(64, 48))[0]
    attn, (height, width) = model.blocks[0].attn, record.grid
    out = record.recompute_output(mask=seen_window(record, 3))
    for y in range(height):
        for x in range(width):
            query = 1 + y * width + x
            near = [
                1 + v * width + u
                for v in range(max(y - 1, 0), min(y + 2, height))
                for u in range(max(x - 1, 0), min(x + 2, width))
            ]
            q, k, v_ = record.q[:, [query]], record.k[:, near], record.v[:, near]
            with torch.no_grad():
                if kind == "softmax":
                    heads = (t.transpose(1, 2) for t in (q, k, v_))
                    attended = nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2)
                else:
                    attended = (inline_attention if kind == "inline" else linear_attention)(q, k, v_)
                expected = attn.merge(attended)[:, 0]
            torch.testing.assert_close(out[:, query], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_masking_nothing_changes_nothing(kind: str) -> None:
    result = measure_masking(deit(kind), [(image(), torch.tensor([1, 2]))], sides=(1,))
    assert result.outcomes[0].condition.what == "none"
    assert result.outcomes[0].agreement == 1
    assert result.outcomes[0].logit_change < 1e-5
    assert result.outcomes[0].top1 == result.top1
    everything = [o for o in result.outcomes if o.condition.what != "none"]
    assert all(o.logit_change > 1e-4 for o in everything)


def test_taps_zeroed_and_kept() -> None:
    """A 3×3 mask takes all taps of the local residual with it, or leaves all of them."""
    model = deit("inline", depth=1)
    record = capture(model, image())[0]
    mask = window_mask(record, 3)
    zeroed, kept = record.recompute_output(mask=mask), record.recompute_output(mask=mask, mask_local=False)
    alone = torch.einsum("shij,sjhd->sihd", record.weights(mask=mask(slice(None))), record.v)
    with torch.no_grad():
        weight = model.blocks[0].attn.proj.weight
        torch.testing.assert_close(zeroed, model.blocks[0].attn.merge(alone), atol=1e-5, rtol=1e-5)
        local = record.output - capture(_without_local(model), image())[0].output
        torch.testing.assert_close(kept - zeroed, local, atol=1e-5, rtol=1e-4)
    assert weight.shape == (16, 16)


def _without_local(model: Any) -> Any:
    other = deit("inline", depth=1, local_residual=False)
    other.load_state_dict({n: p for n, p in model.state_dict().items() if ".local." not in n})
    return other


def test_masks() -> None:
    record = capture(deit("inline"), image(64, 48), layers=[0])[0]  # a 4×3 map behind a class token
    local = window_mask(record, 3)(slice(None))
    assert local[0].all()
    assert local[:, 0].all()
    hidden = [4, 6, 4, 6, 9, 6, 6, 9, 6, 4, 6, 4]
    assert (~local[1:]).sum(1).tolist() == hidden
    assert not local.diagonal()[1:].any()
    (random,) = random_mask(record, 3, torch.Generator().manual_seed(0))(slice(None))
    assert random[0].all()
    assert random[:, 0].all()
    assert (~random[1:]).sum(1).tolist() == hidden  # as many, query by query
    assert len({tuple(row) for row in random[1:].tolist()}) > 6  # drawn anew for each query
    again = random_mask(record, 3, torch.Generator().manual_seed(0))(slice(None))
    assert torch.equal(random[None], again)


def test_random_masks_hide_as_many_present_tokens_as_local_ones() -> None:
    """Windows with padding: tokens that are absent anyway do not count."""
    model = create_small("inline_swin_tiny", window_size=3)
    record = capture(model, image(32, 80), layers=[0])[0]
    assert record.token_mask is not None
    assert not record.token_mask.all()
    rows = slice(0, 9)
    present = record.token_mask[:, None, :]
    local = (~window_mask(record, 3)(rows)[None] & present).sum(-1)
    seen = random_mask(record, 3, torch.Generator().manual_seed(0))(rows)
    assert torch.equal((~seen & present).sum(-1), local)
    # Each sample has its own mask, for the weights and for the taps.
    each = random_mask(record, 1, torch.Generator().manual_seed(0))
    out = record.recompute_output(mask=each)
    masks = random_mask(record, 1, torch.Generator().manual_seed(0))(slice(None))
    alone = record.recompute_output(mask=lambda rows: masks[1, rows])
    torch.testing.assert_close(out[1], alone[1])


def test_masking_conditions_and_small_maps() -> None:
    """Layers whose map is not larger than the window are not masked, and the result lists those that were."""
    model = create_small("inline_swin_tiny")
    result = measure_masking(model, [(image(), None)], sides=(3, 17), seed=3)  # 17: larger than any map
    assert [str(o.condition) for o in result.outcomes] == [
        "none",
        "local 9, taps zeroed",
        "local 9, taps kept",
        "random 9, taps zeroed",
        "random 9, taps kept",
    ]
    assert all(o.top1 is None for o in result.outcomes)
    assert result.top1 is None
    # Maps of 16, 8 and 4; the last stage attends in softmax windows of 2×2.
    assert all(not name.startswith("stages.3") for name in result.masked_layers[9])
    assert any(name.startswith("stages.2") for name in result.masked_layers[9])
    assert 17**2 not in result.masked_layers
    same = measure_masking(model, [(image(), None)], sides=(3,), seed=3)
    assert same.outcomes == result.outcomes
    reduced = measure_masking(create_small("softmax_pvt_tiny"), [(image(), None)], sides=(3,))
    assert set(reduced.skipped.values()) == {"its keys are a reduced map"}
    with pytest.raises(ValueError, match=r"sides=\(17,\): no layer has a map larger than such a window"):
        measure_masking(model, [(image(), None)], sides=(17,))


def test_masked_accuracy_is_counted() -> None:
    model = deit("softmax")
    with torch.no_grad():
        labels = model(image()).argmax(1)
    batches = [(image()[:1], labels[:1]), (image()[1:], (labels[1:] + 1) % 5)]
    result = measure_masking(model, batches, sides=(1,))
    assert result.top1 == 0.5
    assert result.images == 2
    assert result.outcomes[0].top1 == 0.5


# Maps and divergence


def test_maps() -> None:
    model = create_small("inline_pvt_tiny", attention="SIII")
    result = attention_maps(model, image()[0], query=(0.99, 0.3), layers=[0, 1])
    reduced, whole = result.layers
    assert (reduced.kind, reduced.grid, reduced.query, reduced.weights.shape) == (
        "softmax",
        (16, 16),
        (15, 4),
        (1, 2, 2),
    )
    assert reduced.with_local is None
    assert (whole.kind, whole.grid, whole.query, whole.weights.shape) == ("inline", (8, 8), (7, 2), (2, 8, 8))
    assert whole.with_local is not None
    record = capture(model, image()[:1], layers=[1])[0]
    np.testing.assert_allclose(whole.weights, record.weights()[0, :, 7 * 8 + 2].unflatten(1, (8, 8)).numpy(), atol=1e-7)
    difference = whole.with_local - whole.weights
    changed = np.argwhere(np.abs(difference[0]) > 1e-7).tolist()
    assert set(map(tuple, changed)) <= {(y, x) for y in (6, 7) for x in (1, 2, 3)}
    assert changed
    with pytest.raises(ValueError, match=r"query 1.5, 0; expected two numbers"):
        attention_maps(model, image()[0], query=(1.5, 0))


def test_the_maps_of_several_images_are_side_by_side() -> None:
    models = {"softmax": deit("softmax"), "InLine": deit("inline")}
    results = {
        label: [attention_maps(model, one, picture=np.zeros((32, 32))) for one in image()]
        for label, model in models.items()
    }
    figure = Maps().draw(results)
    parts = figure.subfigs
    assert len(parts) == 2
    for part in parts:
        labels = [axes.get_ylabel() for axes in part.axes if axes.get_ylabel()]
        assert labels == ["softmax", "InLine", "InLine\nwith local terms"]
    assert figure.get_figwidth() > figure.get_figheight()


def test_every_model_has_a_panel_of_locality() -> None:
    """Lines of models with equal values, such as chance, would hide each other in one panel."""
    result = measure_locality(deit("softmax"), [image()])
    figure = Locality().draw({f"model {n}": result for n in range(5)})
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title() for axes in shown] == [f"model {n}" for n in range(5)]
    for axes in shown:
        values = [line.get_ydata() for line in axes.lines]
        np.testing.assert_array_equal(values, [result.share, result.chance, result.uniform])


def texts(figure: Any) -> Iterator[Any]:
    """What is written in a figure, without ticks that the limits of an axis hide."""
    yield from figure.texts
    for legend in figure.findobj(Legend):
        yield from legend.get_texts()
    for axes in figure.axes:
        yield from (axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts)
        for axis in (axes.xaxis, axes.yaxis) if axes.axison else ():
            low, high = sorted(axis.get_view_interval())
            ticks = zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=False)
            yield from (label for place, label in ticks if low <= place <= high)


@pytest.mark.parametrize("name", analysis_names())
def test_figures_are_legible(name: str) -> None:
    """Where a page shows them 800 pixels wide: text has 8 pixels or more, none overlaps another, none is cut off."""
    measure: dict[str, Callable[[Any], Any]] = {
        "confusion": lambda model: measure_confusion(model, [image()]),
        "locality": lambda model: measure_locality(model, [image()]),
        "maps": lambda model: [attention_maps(model, one, picture=np.zeros((32, 32))) for one in image()],
        "masking": lambda model: measure_masking(model, [(image(), None)], sides=(1, 3)),
        "rank": lambda model: measure_rank(model, [image()]),
    }
    models = {f"{kind}_deit_study": deit(kind) for kind in KINDS} if name in measure else {"plane": None}
    results = {label: measure[name](model) if model else measure_injectivity() for label, model in models.items()}
    figure: Any = analysis_class(name)().draw(results)
    figure.canvas.draw()
    written = [text for text in texts(figure) if text.get_text().strip()]
    assert min(text.get_fontsize() * 800 / (72 * figure.get_figwidth()) for text in written) > 8
    boxes = [(text.get_text(), text.get_window_extent()) for text in written if text.get_rotation() in (0, 90)]
    assert [label for label, box in boxes if box.x0 < 0 or box.y0 < 0 or box.x1 > figure.bbox.x1] == []
    pairs = [(a, b) for (a, one), (b, other) in combinations(boxes, 2) if one.padded(-1).overlaps(other.padded(-1))]
    assert pairs == []


def test_divergence_is_counted_and_not_hidden() -> None:
    """Linear attention with φ = identity: a divisor that passes through zero."""
    model = deit("linear", depth=1, num_heads=1, feature_map="identity")
    attn = model.blocks[0].attn
    with torch.no_grad():
        attn.qkv.weight[16:32] = 0  # all keys are the bias
        attn.qkv.bias[16:32] = 0
        attn.qkv.bias[16] = 1
    counts = Divergence()

    def look(record: Any) -> None:
        record.q[0, 0] = 0
        record.q[0, 0, 0, 0] = -1e-6 / 17 * (1 - 1e-5)  # 17 tokens: the sum is −1e-6, and 1e-6 is added to it
        counts.add(record.weights())

    observe(model, image(), look)
    assert counts.rows == 34
    assert counts.diverged == 1
    counts.add(torch.tensor([[[torch.nan, 0.0], [0.5, 0.5]]]))
    assert (counts.rows, counts.diverged) == (36, 2)


def test_a_matrix_that_is_not_finite_has_no_rank() -> None:
    from inline_attention.analysis.measures.rank import _ranks

    weights = torch.eye(3).repeat(1, 2, 1, 1)
    weights[0, 1, 0, 0] = torch.inf
    numerical, effective = _ranks(weights)
    assert numerical[0, 0] == 3
    assert effective[0, 0] == pytest.approx(3)
    assert np.isnan([numerical[0, 1], effective[0, 1]]).all()


def test_no_images_is_an_error() -> None:
    model = deit("inline")
    for measure in (measure_confusion, measure_rank, measure_locality, measure_masking):
        with pytest.raises(ValueError, match="no images"):
            measure(model, [])
