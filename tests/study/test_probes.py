"""The probes on a tiny scale: bounds hold, InLine is far above them, and the seed decides everything."""

import json
from pathlib import Path

import pytest
import torch

from study import probes
from study.__main__ import main
from study.probes import LENGTH_CONTESTANTS, Effort, LengthProbe, LengthTask, Photographs, Score

TINY = Effort(steps=120, batch=32, test_crops=128, seeds=1, rate=1e-2)


@pytest.fixture(scope="module")
def photographs() -> Photographs:
    return Photographs()


@pytest.fixture(scope="module")
def task(photographs: Photographs) -> LengthTask:
    return LengthTask(photographs.crops("train", 64, torch.Generator().manual_seed(0)))


def score(name: str, variant: str, task: LengthTask, photographs: Photographs, seed: int = 0) -> Score:
    contestant = LENGTH_CONTESTANTS[name]
    return probes.length_score(contestant, variant, task, photographs, effort=TINY, seed=seed)


def test_linear_attention_alone_is_bounded_by_chance(task: LengthTask, photographs: Photographs) -> None:
    found = score("linear, ReLU", "bare", task, photographs)
    assert found.bound == 25
    assert found.mean <= 26


def test_inline_attention_alone_tells_lengths_apart(task: LengthTask, photographs: Photographs) -> None:
    found = score("InLine", "bare", task, photographs)
    assert found.bound == 100
    assert found.mean > 70


@pytest.mark.parametrize("variant", ["bias", "skip"])
def test_linear_attention_escapes_with_company(variant: str, task: LengthTask, photographs: Photographs) -> None:
    found = score("linear, ReLU", variant, task, photographs)
    assert found.bound > 95
    assert found.mean > 60


@pytest.mark.parametrize(("name", "injective"), [("softmax", True), ("InLine", True), ("linear, ReLU", False),
                                                 ("hydra", False), ("angular", False), ("focused", False)])  # fmt: skip
def test_bounds_of_untrained_layers(name: str, injective: bool, task: LengthTask, photographs: Photographs) -> None:
    torch.manual_seed(0)
    draws = torch.Generator().manual_seed(1)
    examples = task(photographs.crops("test", 32, draws), draws)
    with torch.no_grad():
        outputs = LengthProbe(LENGTH_CONTESTANTS[name], variant="bare").attended(examples.tokens)
    assert probes.distinct_share(outputs) == (1.0 if injective else 0.25)


def test_queries_do_not_see_themselves(task: LengthTask, photographs: Photographs) -> None:
    """Otherwise a linear attention could read the length from its own value."""
    torch.manual_seed(0)
    draws = torch.Generator().manual_seed(1)
    tokens, _ = task(photographs.crops("test", 4, draws), draws)
    probe = LengthProbe(LENGTH_CONTESTANTS["InLine"], variant="bare")
    changed = tokens.clone()
    changed[:, 1:4] = torch.randn(4, 3, tokens.shape[2])
    torch.testing.assert_close(probe.attended(changed)[:, 0], probe.attended(tokens)[:, 0])


def test_distinct_share_counts_groups() -> None:
    one, other = torch.ones(3), torch.tensor([1.0, 2.0, 3.0])
    groups = torch.stack([torch.stack([one, one, one, one]), torch.stack([one, other, one, 2 * one])])
    assert probes.distinct_share(groups) == pytest.approx((1 + 3) / 8)


def test_local_labels_name_the_brightest_neighbour() -> None:
    crops = torch.zeros(1, probes.SIDE**2, probes.FEATURES)
    middle = 3 * probes.SIDE + 4
    labels = []
    for neighbour in (middle - probes.SIDE, middle + probes.SIDE, middle - 1, middle + 1):
        bright = crops.clone()
        bright[0, neighbour] = 1
        labels.append(int(probes.local_task(bright, torch.Generator()).labels[0, middle]))
    assert labels == [0, 1, 2, 3]


@pytest.mark.slow
def test_the_residual_supplies_local_detail(photographs: Photographs) -> None:
    found = {}
    for name in ("InLine", "InLine + residual"):
        contestant = probes.LOCAL_CONTESTANTS[name]
        run = probes.run_probe(lambda c=contestant: probes.BlockProbe(c), probes.local_task, photographs,
                               effort=TINY, seed=0)  # fmt: skip
        found[name] = run.accuracy
    assert found["InLine + residual"] > found["InLine"] + 5


@pytest.mark.slow
def test_the_command_is_deterministic_by_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: LENGTH_CONTESTANTS[name] for name in ("InLine", "linear, ReLU")}
    monkeypatch.setattr(probes, "LENGTH_CONTESTANTS", few)
    monkeypatch.setattr(probes, "LOCAL_CONTESTANTS", {"InLine": probes.LOCAL_CONTESTANTS["InLine"]})
    found = {}
    for folder, seed in (("a", 0), ("b", 0), ("c", 7)):
        out = tmp_path / folder
        arguments = ["--output", str(out), "--seed", str(seed), "--seeds", "1", "--steps", "20"]
        assert main(["probes", *arguments]) == 0
        assert (out / "probes.png").stat().st_size > 5000
        found[folder] = json.loads((out / "probes.json").read_text())
    assert found["a"] == found["b"]
    assert found["a"]["length"] != found["c"]["length"]
    assert found["a"]["length"]["bare"]["linear, ReLU"]["bound"] == 25
