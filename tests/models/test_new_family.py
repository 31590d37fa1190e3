"""A family is one file: the one below exists only here, and the rest of the library works with it unchanged."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from small import image
from timm.models import _registry as timm_registry
from torch import Tensor, nn

import inline_attention
from inline_attention.cli import main
from inline_attention.export import export_model
from inline_attention.layers import Block
from inline_attention.layers.registry import build_attention, parse_attention
from inline_attention.models import registry
from inline_attention.models.base import Grid, PyramidModel, Stage, StateDict
from inline_attention.models.convert import convert
from inline_attention.models.hub import save_for_hf
from inline_attention.models.profile import profile

NAME = "inline_toy_tiny"


class ToyEmbed(nn.Module):
    """Patches of 4 × 4 pixels, each channel scaled."""

    def __init__(self, in_chans: int, dim: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_chans, dim, 4, stride=4)
        self.toy_scale = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        bottom, right = -x.shape[2] % 4, -x.shape[3] % 4
        return self.conv(nn.functional.pad(x, (0, right, 0, bottom))).permute(0, 2, 3, 1) * self.toy_scale


class ToyMerging(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.toy_conv = nn.Conv2d(dim, 2 * dim, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.toy_conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class Toy(PyramidModel):
    """Two stages."""

    checkpoint_names = r"(patch_embed|stem)\.toy_scale"
    norm_eps = 1e-6

    def __init__(
        self,
        img_size: int | Sequence[int] = 64,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        embed_dim: int = 8,
        depth: int = 1,
        drop_rate: float = 0.0,
    ) -> None:
        dims = [embed_dim, 2 * embed_dim]
        super().__init__(dims, img_size=img_size, in_chans=in_chans, global_pool=global_pool)
        self.attention = parse_attention("inline", [depth, depth])
        self.patch_embed = ToyEmbed(in_chans, embed_dim)
        self.stages = nn.ModuleList()
        for i, dim in enumerate(dims):
            grid = self.stage_grid(i)
            options = dict(mlp_ratio=2.0, norm_eps=self.norm_eps)
            blocks = [Block(dim, build_attention("inline", dim, 2, grid=grid), **options) for _ in range(depth)]
            self.stages.append(Stage(ToyMerging(dims[i - 1]) if i else nn.Identity(), blocks))
        self.norm = nn.LayerNorm(self.num_features, eps=self.norm_eps)
        self.build_head(num_classes, drop_rate)
        self.init_weights()

    def no_weight_decay(self) -> set[str]:
        return {"patch_embed.toy_scale"}

    def adapt_state_dict(self, state_dict: Mapping[str, Tensor], *, img_size: Grid | None = None) -> StateDict:
        return {name.replace("stem.", "patch_embed."): tensor for name, tensor in state_dict.items()}


def inline_toy_tiny(pretrained: bool = False, **kwargs: Any) -> Toy:
    return registry.build(Toy, NAME, pretrained, kwargs)


default_cfgs: dict[str, Any] = {}


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    """What the last lines of a family's file do; undone afterwards, so that no other test meets this family."""
    tables = [value for value in vars(timm_registry).values() if isinstance(value, dict | set)]
    before = [table.copy() for table in tables]
    default_cfgs.update(registry.register_family(Toy, NAME, input_size=64, first_conv="patch_embed.conv"))
    sys.modules.setdefault(__name__, sys.modules[Toy.__module__])
    timm.models.register_model(inline_toy_tiny)
    yield
    del registry._FAMILIES[NAME]
    for table, content in zip(tables, before, strict=True):
        table.clear()
        table.update(content)


def create(**kwargs: Any) -> Any:
    torch.manual_seed(0)
    return inline_attention.create_model(NAME, num_classes=5, **kwargs).eval()


def test_it_is_listed_and_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert NAME in inline_attention.list_models()
    assert main(["models", "*toy*", "--json", "-"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["img_size"], row["attention"], row["weights"]) == (64, "II", False)
    assert main(["info", NAME]) == 0
    assert "inline_toy_tiny at 64×64" in capsys.readouterr().out


def test_contract() -> None:
    model = create(drop_rate=0.5)
    x = image(65, 90)
    with torch.no_grad():
        final, maps = model.forward_intermediates(x)
        assert [tuple(y.shape) for y in maps] == [(2, 8, 17, 23), (2, 16, 9, 12)]
        assert torch.equal(model.forward_head(final), model(x))
        features = timm.create_model(NAME, features_only=True)
        assert [tuple(y.shape) for y in features(x)] == [tuple(y.shape) for y in maps]
        model.reset_classifier(3)
        assert model(x).shape == (2, 3)
        assert model.prune_intermediate_layers([0], prune_norm=True) == [0]
        assert torch.equal(model(x).permute(0, 3, 1, 2), maps[0])
    groups = timm.models.group_parameters(model, model.group_matcher())
    assert sorted(n for names in groups.values() for n in names) == sorted(n for n, _ in model.named_parameters())


def test_profile() -> None:
    with torch.device("meta"):
        model = create()
    costs = profile(model)
    assert [cost.name for cost in costs] == ["stem", "stage 1", "stage 2", "head"]
    assert sum(cost.params for cost in costs) == sum(p.numel() for p in model.parameters())
    assert costs[0].macs == 8 * 3 * 16 * 16 * 16


def test_weights(tmp_path: Path) -> None:
    model = create()
    model.set_input_size((64, 96))
    model.reset_classifier(4)
    path = inline_attention.save_weights(model, tmp_path / "toy.safetensors")
    again = inline_attention.load_model(path).eval()
    with torch.no_grad():
        assert torch.equal(again(image()), model(image()))
    assert again.img_size == (64, 96)

    official = {name.replace("patch_embed.", "stem."): tensor for name, tensor in model.state_dict().items()}
    torch.save({"model": official}, tmp_path / "official.pth")
    done = convert(tmp_path / "official.pth", tmp_path / "converted.safetensors")
    with torch.no_grad():
        assert torch.equal(done.model.eval()(image()), model(image()))
    deit = inline_attention.create_model("inline_deit_tiny", depth=1, num_classes=4)
    with pytest.raises(ValueError, match="looks like the weights of a Toy model, and this is a DeiT"):
        inline_attention.load_weights(deit, official)
    with pytest.raises(ValueError, match="looks like the weights of a DeiT model, and this is a Toy"):
        inline_attention.load_weights(model, deit.state_dict())


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_export(dynamic: bool, tmp_path: Path) -> None:
    exported = export_model(create(), tmp_path / "toy.pt2", format="pt2", dynamic_batch=True, dynamic_size=dynamic)
    assert all(check.passed for check in exported.checks)
    assert ("at least 32" if dynamic else "64 × 64") in exported.covers


def test_hub(tmp_path: Path) -> None:
    model = create()
    save_for_hf(model, tmp_path)
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    with torch.no_grad():
        assert torch.equal(loaded(image()), model(image()))
