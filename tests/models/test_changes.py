"""What holds for every architecture, also after changes: deterministic evaluation, round trips, finite values."""

import pytest
import torch
from small import DISTINCT, create_small, image
from torch import nn

from inline_attention import load_model, save_weights

# Shrunk, every other name is equal to one of these.
every_model = pytest.mark.parametrize("name", [*DISTINCT, "linear_deit_study"])
CHANGES = {
    "nothing": lambda model: None,
    "classes": lambda model: model.reset_classifier(3),
    "no classes": lambda model: model.reset_classifier(0),
    "pooling": lambda model: model.reset_classifier(4, "avg"),
    "larger": lambda model: model.set_input_size((96, 160)),
    "smaller": lambda model: model.set_input_size(32),
    "pruned": lambda model: model.prune_intermediate_layers([1], prune_norm=True, prune_head=True),
    "pruned, with norm": lambda model: model.prune_intermediate_layers(1, prune_norm=False),
    "all": lambda model: (
        model.set_input_size((96, 64)),
        model.reset_classifier(7),
        model.prune_intermediate_layers([0], prune_norm=True),
        model.set_input_size(48),
    ),
}
every_change = pytest.mark.parametrize("change", CHANGES)
# "all" makes what the others make.
FAST = {"nothing", "pooling", "pruned", "all"}


@every_model
@every_change
def test_evaluation_is_deterministic(name, change):
    model = create_small(name, drop_rate=0.5, proj_drop_rate=0.5, drop_path_rate=0.5).eval()
    CHANGES[change](model)
    assert not any(module.training for module in model.modules())
    with torch.no_grad():
        assert torch.equal(model(image()), model(image()))
    model.train()
    CHANGES[change](model)
    assert all(module.training for module in model.modules())


@every_model
@pytest.mark.parametrize(
    "change", [pytest.param(change, marks=[] if change in FAST else pytest.mark.slow) for change in CHANGES]
)
def test_file_builds_the_changed_model_again(tmp_path, name, change):
    model = create_small(name)
    CHANGES[change](model)
    path = save_weights(model, tmp_path / "model.safetensors")
    again = load_model(path).eval()
    assert {n: p.shape for n, p in again.state_dict().items()} == {n: p.shape for n, p in model.state_dict().items()}
    assert (again.img_size, again.num_classes, again.global_pool) == (
        model.img_size,
        model.num_classes,
        model.global_pool,
    )
    x = image(64, 96)
    with torch.no_grad():
        assert torch.equal(again(x), model(x))
    second = load_model(save_weights(again, tmp_path / "second.safetensors")).eval()
    with torch.no_grad():
        assert torch.equal(second(x), model(x))


@every_model
def test_modules_with_parameters_are_called(name):
    """Hooks, LoRA and quantisers replace or watch modules: one that is never called would ignore them."""
    model = create_small(name)
    called = set()
    for module in model.modules():
        module.register_forward_hook(lambda module, args, output: called.add(module))
    model(image())
    silent = [
        path
        for path, module in model.named_modules()
        if module not in called
        and type(module).forward is not nn.Module.forward  # else it only holds parameters and cannot be called
        and next(module.parameters(recurse=False), None) is not None
    ]
    assert silent == []


@every_model
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_finite(name, dtype):
    """This holds if the activations of a float64 model are in the range of the dtype."""
    model = create_small(name).double()
    largest = 0.0

    def watch(module: nn.Module, args: object, output: object) -> None:
        nonlocal largest
        if isinstance(output, torch.Tensor):
            largest = max(largest, output.abs().max().item())

    handles = [module.register_forward_hook(watch) for module in model.modules()]
    x = 20 + 10 * image(65, 91).double()  # odd sizes, so that windows are padded and means are masked
    with torch.no_grad():
        expected = model(x)
        for handle in handles:
            handle.remove()
        assert largest < torch.finfo(dtype).max / 8
        low = model.to(dtype)(x.to(dtype))
    assert low.isfinite().all()
    assert (low.double() - expected).norm() < 0.3 * expected.norm()
