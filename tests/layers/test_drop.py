import pytest
import timm
import timm.layers
import torch

from inline_attention.layers.drop import ChannelDrop, DropPath, SampledDepth


def tiny_model(rate: float = 0.5) -> torch.nn.Module:
    torch.manual_seed(0)
    return timm.create_model(
        "vit_tiny_patch16_224",
        img_size=8,
        patch_size=4,
        embed_dim=16,
        depth=3,
        num_heads=2,
        num_classes=5,
        drop_path_rate=rate,
    ).train()


def test_without_draws_it_is_timms_layer() -> None:
    ours, theirs = DropPath(0.4), timm.layers.DropPath(0.4)
    x = torch.randn(64, 3, 4)
    torch.manual_seed(1)
    dropped = ours(x)
    torch.manual_seed(1)
    assert torch.equal(dropped, theirs(x))
    assert torch.equal(ours.eval()(x), x)


def test_draws_depend_on_sample_and_key_not_on_order_or_batch() -> None:
    model = tiny_model()
    depth = SampledDepth(model, device="cpu")
    assert len(depth.layers) == 4  # two branches a block, the first block has rate 0
    ids = torch.arange(40)
    depth.draw(ids, key=7)
    keep = depth.keep.clone()
    order = torch.randperm(40)
    depth.draw(ids[order], key=7)
    assert torch.equal(depth.keep, keep[:, order])
    depth.draw(ids[10:15], key=7)
    assert torch.equal(depth.keep, keep[:, 10:15])
    depth.draw(ids, key=8)
    assert not torch.equal(depth.keep, keep)
    depth.draw(ids, key=7 + (1 << 40))
    assert not torch.equal(depth.keep, keep)


def test_masks_are_fair_and_uncorrelated() -> None:
    model = tiny_model(rate=0.4)
    depth = SampledDepth(model, device="cpu")
    n = 40_000
    depth.draw(torch.arange(n), key=123)
    rates = torch.tensor([layer.drop_prob for layer in depth.layers])
    dropped = (depth.keep == 0).float()
    assert torch.allclose(dropped.mean(1), rates, atol=4 / n**0.5 * 0.5)
    # Kept branches are scaled so that the expectation is unchanged.
    assert torch.allclose(depth.keep.amax(1), 1 / (1 - rates))
    noise = (dropped - dropped.mean(1, keepdim=True)) / dropped.std(1, keepdim=True)
    correlation = noise @ noise.T / n
    assert (correlation - torch.eye(len(rates))).abs().max() < 5 / n**0.5
    neighbours = (noise[:, 1:] * noise[:, :-1]).mean(1)
    assert neighbours.abs().max() < 5 / n**0.5
    depth.draw(torch.arange(n), key=124)
    again = (depth.keep == 0).float()
    steps = (noise * (again - again.mean(1, keepdim=True))).mean(1) / again.std(1)
    assert steps.abs().max() < 5 / n**0.5


def test_model_output_is_a_function_of_the_key() -> None:
    model, plain = tiny_model(), tiny_model()
    plain.load_state_dict(model.state_dict())
    depth = SampledDepth(model, device="cpu")
    images, ids = torch.randn(6, 3, 8, 8), torch.tensor([5, 1, 9, 200, 3, 77])
    depth.draw(ids, key=1)
    first = model(images)
    torch.manual_seed(99)  # the global generator has no say
    assert torch.equal(model(images), first)
    depth.draw(ids[2:4], key=1)
    assert torch.allclose(model(images[2:4]), first[2:4], atol=1e-6)
    assert torch.equal(model.eval()(images), plain.eval()(images))
    assert list(model.state_dict()) == list(plain.state_dict())


def test_gradient_checkpointing_recomputes_the_same_masks() -> None:
    model = tiny_model()
    depth = SampledDepth(model, device="cpu")
    images, ids = torch.randn(6, 3, 8, 8), torch.arange(6)
    grads = []
    for checkpointing in (False, True):
        model.set_grad_checkpointing(checkpointing)
        depth.draw(ids, key=5)
        model.zero_grad()
        model(images).square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("rate", [0.999, 1.0])
def test_extreme_rates_stay_finite(rate: float) -> None:
    layer = torch.nn.Sequential(timm.layers.DropPath(rate), ChannelDrop(rate, 2))
    depth = SampledDepth(layer, device="cpu")
    depth.draw(torch.arange(64), key=0)
    assert torch.isfinite(layer(torch.ones(64, 2, 1, 1))).all()
    assert isinstance(layer[0], DropPath)


def test_compiles_without_graph_break_or_recompile() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), timm.layers.DropPath(0.5)).train()
    depth = SampledDepth(model, device="cpu")
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    x, ids = torch.randn(8, 4), torch.arange(8)
    for key in range(4):
        depth.draw(ids, key=key)
        assert torch.equal(compiled(x), model(x))
    assert len(graphs) == 1


def test_channels_are_dropped_by_sample_and_key() -> None:
    model = torch.nn.Sequential(ChannelDrop(0.25, 64), torch.nn.Conv2d(64, 8, 1), ChannelDrop(0.25, 8)).train()
    drops = SampledDepth(model, device="cpu")
    ids = torch.arange(2000)
    x = torch.ones(2000, 64, 1, 2)
    drops.draw(ids, key=7)
    dropped = model[0](x)
    assert torch.equal(dropped[..., 0], dropped[..., 1])  # a channel goes as a whole
    assert dropped.unique().tolist() == pytest.approx([0, 4 / 3])
    assert dropped.mean() == pytest.approx(1, abs=0.01)
    assert (dropped[..., 0] == 0).float().mean(0).std() < 0.02  # every channel alike
    order = torch.randperm(2000)
    drops.draw(ids[order], key=7)
    assert torch.equal(model[0](x), dropped[order])
    drops.draw(ids[:5], key=8)
    assert not torch.equal(model[0](x[:5]), dropped[:5])
    assert not torch.equal(model[0].keep[:, :8], model[2].keep)
    assert torch.equal(model[0].eval()(x), x)
