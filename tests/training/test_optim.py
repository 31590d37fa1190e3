import pytest
import timm.optim
import torch
from timm.utils import ModelEmaV3

from inline_attention import create_model
from inline_attention.training.config import OptimConfig
from inline_attention.training.ema import WeightAverage
from inline_attention.training.optim import Optimizer, freeze_layers, parameter_groups


def names_by_group(model: torch.nn.Module, groups: list[dict]) -> list[set[str]]:
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    return [{name_of[id(parameter)] for parameter in group["params"]} for group in groups]


def tiny_deit(**kwargs: object) -> torch.nn.Module:
    torch.manual_seed(0)
    arguments = dict(embed_dim=16, depth=3, num_heads=2, patch_size=4, img_size=8, in_chans=1, num_classes=5)
    return create_model("inline_deit_tiny", **arguments | kwargs)


@pytest.mark.parametrize(
    ("model", "exempt"),
    [
        ("inline_deit_tiny", ("pos_embed", "cls_token")),
        ("inline_pvt_tiny", ()),
        ("inline_swin_tiny", ("relative_position_bias_table",)),
        ("inline_cswin_tiny", ()),
    ],
)
def test_what_decays(model: str, exempt: tuple[str, ...]) -> None:
    with torch.device("meta"):
        network = create_model(model)
    groups = parameter_groups(network, OptimConfig())
    assert [group["weight_decay"] for group in groups] == [0.0, 0.05]
    free, decayed = names_by_group(network, groups)
    assert free | decayed == {name for name, _ in network.named_parameters()}
    expected = {
        name
        for name, parameter in network.named_parameters()
        if parameter.ndim <= 1 or name.endswith(".bias") or name.rpartition(".")[2] in exempt
    }
    assert free == expected
    for ending in exempt:
        assert any(name.endswith(ending) for name in free)


def test_layer_decay_scales_the_rates() -> None:
    model = tiny_deit()
    optimizer = Optimizer(model, OptimConfig(layer_decay=0.5))
    model(torch.randn(2, 1, 8, 8)).sum().backward()
    optimizer.step(rate=1.0)
    rate_of = {}
    for group, names in zip(
        optimizer.inner.param_groups, names_by_group(model, optimizer.inner.param_groups), strict=True
    ):
        rate_of |= dict.fromkeys(names, group["lr"])
    assert rate_of["head.weight"] == 1.0
    assert rate_of["blocks.1.norm1.weight"] == rate_of["blocks.2.norm1.weight"] / 2
    assert rate_of["blocks.0.mlp.fc1.weight"] == rate_of["blocks.2.mlp.fc1.weight"] / 4
    assert rate_of["patch_embed.proj.weight"] < rate_of["blocks.0.mlp.fc1.weight"]


def test_frozen_layers_stay_and_the_others_move() -> None:
    model = tiny_deit()
    frozen = freeze_layers(model, 2)  # the stem and the first block
    assert any(name.startswith("patch_embed") for name in frozen)
    assert any(name.startswith("blocks.0.") for name in frozen)
    assert not any(name.startswith(("blocks.1.", "head")) for name in frozen)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = Optimizer(model, OptimConfig())
    optimizer.backward(model(torch.randn(4, 1, 8, 8)).square().sum())
    optimizer.step(rate=1e-2)
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert not moved & set(frozen)
    assert {"blocks.1.mlp.fc1.weight", "blocks.2.attn.qkv.weight", "norm.weight", "head.weight"} <= moved


def test_freezing_more_than_there_is() -> None:
    with pytest.raises(ValueError, match=r"model.freeze=99: .* has 4 layer groups"):
        freeze_layers(tiny_deit(), 99)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_update_is_clipped_adamw(clip: float | None) -> None:
    model, twin = tiny_deit().double(), tiny_deit().double()
    config = OptimConfig(clip_norm=clip)
    optimizer = Optimizer(model, config)
    plain = torch.optim.AdamW(parameter_groups(twin, config), lr=1e-2, foreach=False, fused=False)
    for seed in range(3):
        images = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        optimizer.backward(model(images).square().sum())
        norm = optimizer.step(rate=1e-2)
        twin(images).square().sum().backward()
        expected = torch.nn.utils.clip_grad_norm_(twin.parameters(), clip or float("inf"))
        plain.step()
        plain.zero_grad()
        assert torch.allclose(norm, expected)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-12)


def test_a_non_finite_gradient_changes_nothing() -> None:
    model = tiny_deit()
    optimizer = Optimizer(model, OptimConfig())
    images = torch.randn(4, 1, 8, 8)
    optimizer.backward(model(images).square().sum())
    optimizer.step(rate=1e-2)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    state = [{k: v.clone() for k, v in s.items()} for s in optimizer.inner.state.values()]
    optimizer.backward(model(images).sum() * float("nan"))
    assert not optimizer.step(rate=1e-2).isfinite()
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    for before, after in zip(state, optimizer.inner.state.values(), strict=True):
        assert all(torch.equal(before[key], after[key]) for key in before)
    optimizer.backward(model(images).square().sum())
    optimizer.step(rate=1e-2)
    assert not all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))


@pytest.mark.parametrize("name", ["sgd", "lamb", "lion", "muon"])
def test_other_optimizers_are_timms(name: str) -> None:
    model, twin = tiny_deit(), tiny_deit()
    config = OptimConfig(name=name, clip_norm=None, layer_decay=0.5, momentum=0.8)
    optimizer = Optimizer(model, config)
    plain = timm.optim.create_optimizer_v2(parameter_groups(twin, config), name, lr=1.0, momentum=0.8)
    for group in plain.param_groups:
        group["lr"] = 1e-2 * group["lr_scale"]
    images = torch.randn(4, 1, 8, 8)
    for _ in range(3):
        for network in (model, twin):
            optimizer.backward(network(images).square().sum())
        optimizer.step(rate=1e-2)
        plain.step()
        plain.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.backward(model(images).sum() * float("nan"))
    optimizer.step(rate=1e-2)
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))


@pytest.mark.parametrize("decay", [None, 0.5])
def test_the_classifier_has_its_own_rate(decay: float | None) -> None:
    model = tiny_deit()
    before = parameter_groups(model, OptimConfig(layer_decay=decay))
    after = parameter_groups(model, OptimConfig(layer_decay=decay, head_rate=10))

    def rates(groups: list[dict]) -> dict[str, tuple[float, float]]:
        named = zip(groups, names_by_group(model, groups), strict=True)
        return {name: (group.get("lr_scale", 1.0), group["weight_decay"]) for group, own in named for name in own}

    expected = {
        name: (scale * (10 if name.startswith("head.") else 1), weight_decay)
        for name, (scale, weight_decay) in rates(before).items()
    }
    assert rates(after) == expected
    with pytest.raises(ValueError, match=r"optim.head_rate=3: Linear has no classifier; use 1"):
        parameter_groups(torch.nn.Linear(2, 2), OptimConfig(head_rate=3))


def test_muon_leaves_the_classifier_to_adamw() -> None:
    model = tiny_deit()
    groups = parameter_groups(model, OptimConfig(name="muon"))
    names = names_by_group(model, groups)
    fallback = {name for group, own in zip(groups, names, strict=True) if group.get("use_fallback") for name in own}
    assert fallback == {"head.weight", "head.bias", "pos_embed", "cls_token"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "adamv"}, r"optim.name=adamv is not known; did you mean adam"),
        ({"name": "bnbadamw"}, r"optim.name=bnbadamw is not known"),
        ({"name": "sgd", "betas": (0.9, 0.99)}, r"optim.betas=\[0.9, 0.99\]: expected null: sgd has none"),
        ({"name": "adan", "betas": (0.9, 0.99)}, r"optim.betas=\[0.9, 0.99\]: expected 3 numbers in \[0, 1\)"),
        ({"momentum": 1.0}, r"optim.momentum=1.0: expected a factor in \[0, 1\)"),
    ],
)
def test_optimizers_that_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimConfig(**settings)


def test_an_optimizer_without_eps() -> None:
    with pytest.raises(ValueError, match=r"optim.name=kronc does not take eps"):
        Optimizer(torch.nn.Linear(2, 2), OptimConfig(name="kronc", eps=1e-6))


def test_average_of_the_weights() -> None:
    model = torch.nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
    average = WeightAverage(model, decay=0.75)
    for step, value in enumerate((3.0, 5.0)):
        with torch.no_grad():
            model.weight.fill_(value)
        average.update(step)
    # ((1 · ¾ + 3 · ¼) · ¾ + 5 · ¼)
    assert torch.allclose(average.average["weight"], torch.full((1, 2), 2.375))
    with average.in_place():
        assert torch.allclose(model.weight, torch.full((1, 2), 2.375))
    assert torch.equal(model.weight, torch.full((1, 2), 5.0))
    assert torch.allclose(average.average["weight"], torch.full((1, 2), 2.375))


def test_the_warm_up_of_the_average_is_timms() -> None:
    model = torch.nn.Linear(2, 1)
    ours, theirs = WeightAverage(model, decay=0.8, warmup=True), ModelEmaV3(model, decay=0.8, use_warmup=True)
    for step in range(30):
        with torch.no_grad():
            model.weight.fill_(float(step % 7))
        ours.update(step)
        theirs.update(model, step=step + 1)
        assert torch.allclose(ours.average["weight"], theirs.module.weight)
