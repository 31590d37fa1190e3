"""Segmentation models: their cost, the sizes at which they run, and their losses."""

from collections.abc import Iterable

import pytest
import torch
from small import shrunk
from tensor_sizes import Largest

from inline_attention.tasks.segmentation.heads import PyramidPooling
from inline_attention.tasks.segmentation.inference import Inference, places, segment_images
from inline_attention.tasks.segmentation.losses import pixel_loss
from inline_attention.tasks.segmentation.model import Segmenter, create_segmenter
from inline_attention.tasks.segmentation.norm import BatchNorm
from inline_attention.tasks.segmentation.published import SEGMENTERS, count_cost


def small_segmenter(name: str = "inline_pvt_tiny", head: str = "fpn", *, classes: int = 4) -> Segmenter:
    torch.manual_seed(0)
    kwargs = {key: value for key, value in shrunk(name).items() if key != "num_classes"}
    return create_segmenter(name, head, num_classes=classes, kwargs=kwargs, head_kwargs={"dim": 8})


def _deep_ones_are_slow(names: Iterable[str]) -> list[object]:
    return [pytest.param(n, marks=pytest.mark.slow if n.split("_")[2] != "tiny" else ()) for n in names]


@pytest.mark.parametrize("name", _deep_ones_are_slow(n for n, facts in SEGMENTERS.items() if facts.macs is not None))
def test_published_cost(name: str) -> None:
    """Published in whole millions and 10⁹, with 512×2048 images and 150 classes."""
    facts = SEGMENTERS[name]
    assert facts.params is not None
    assert facts.macs is not None
    cost = count_cost(name, facts.head)
    assert cost.params / 1e6 == pytest.approx(facts.params, rel=0.02)
    assert cost.macs / 1e9 == pytest.approx(facts.macs, rel=0.02)


# Millions of parameters and 10⁹ MACs that we count for models whose cost was not published.
COUNTED = {
    "inline_pvt_tiny": (15.79, 127.0),
    "inline_pvt_small": (25.31, 167.5),
    "inline_pvt_medium": (41.37, 229.1),
    "inline_pvt_large": (54.91, 297.3),
    "inline_swin_tiny": (60.88, 940.7),
    "inline_swin_small": (81.45, 1036.1),
    "inline_swin_base": (121.86, 1183.9),
}


@pytest.mark.parametrize("name", _deep_ones_are_slow(COUNTED))
def test_counted_cost(name: str) -> None:
    """The figures of docs/dense.md."""
    cost = count_cost(name, SEGMENTERS[name].head)
    assert (round(cost.params / 1e6, 2), round(cost.macs / 1e9, 1)) == COUNTED[name]


@pytest.mark.parametrize("head", ["upernet", "fpn"])
@pytest.mark.parametrize("size", [(64, 64), (75, 130), (33, 47)])
@pytest.mark.parametrize("name", ["inline_pvt_tiny", "inline_deit_tiny"])
def test_any_size(name: str, head: str, size: tuple[int, int]) -> None:
    model = small_segmenter(name, head).eval()
    x = torch.randn(2, 3, *size)
    assert model.segment(x).shape == (2, 4, *size)
    assert model(x).auxiliary is None
    assert model(x).main.shape[2:] == (-(-size[0] // 4), -(-size[1] // 4))


@pytest.mark.parametrize("size", [(375, 1242), (512, 2048)])
@pytest.mark.parametrize(("name", "head"), [("inline_swin_tiny", "upernet"), ("softmax_swin_tiny", "fpn")])
def test_sizes_of_roads(name: str, head: str, size: tuple[int, int]) -> None:
    """The maps are not multiples of the windows."""
    model = small_segmenter(name, head).eval()
    with torch.no_grad():
        logits = model.segment(torch.randn(1, 3, *size))
    assert logits.shape == (1, 4, *size)
    assert logits.isfinite().all()


def test_the_auxiliary_head_is_for_training() -> None:
    model = small_segmenter("inline_swin_tiny", "upernet").train()
    logits = model(torch.randn(2, 3, 64, 96))
    assert logits.main.shape == (2, 4, 16, 24)
    assert logits.auxiliary is not None
    assert logits.auxiliary.shape == (2, 4, 4, 6)
    assert small_segmenter("inline_swin_tiny", "fpn").train()(torch.randn(2, 3, 64, 64)).auxiliary is None


@pytest.mark.parametrize("name", ["inline_cswin_tiny", "softmax_swin_tiny"])
def test_the_other_families_learn(name: str) -> None:
    model = small_segmenter(name, "upernet").train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, masks = torch.randn(2, 3, 64, 64), torch.randint(4, (2, 64, 64))
    masks[:, :8] = 255
    losses = []
    for _ in range(6):
        loss = pixel_loss(model(x).main, masks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_pyramid_pooling_averages_cells() -> None:
    """The 1×1 branch, with an identity for a projection, holds the mean everywhere."""
    pooling = PyramidPooling(2, 2, cells=(1,)).eval()
    with torch.no_grad():
        pooling.projections[0][0].weight.copy_(torch.eye(2)[:, :, None, None])
        pooling.bottleneck[0].weight.zero_()
        pooling.bottleneck[0].weight[:, 2:, 1, 1] = torch.eye(2)
    x = torch.rand(1, 2, 5, 7)
    expected = x.mean((2, 3), keepdim=True).expand_as(x)
    assert torch.allclose(pooling(x), expected, rtol=1e-4)


def test_loss_counts_no_ignored_pixel_but_divides_by_all() -> None:
    logits, masks = torch.randn(2, 3, 8, 8), torch.randint(3, (2, 8, 8))
    masks[0, :4] = 255
    kept = masks != 255
    by_hand = -logits.log_softmax(1).gather(1, masks.clamp(max=2)[:, None])[:, 0][kept].sum() / masks.numel()
    assert torch.allclose(pixel_loss(logits, masks), by_hand)
    masks[:] = 255
    assert pixel_loss(logits, masks) == 0


def test_batch_norm_alone_is_torchs() -> None:
    ours, theirs = BatchNorm(3), torch.nn.BatchNorm2d(3)
    x = torch.randn(4, 3, 5, 6)
    assert torch.equal(ours(x), theirs(x))
    assert torch.equal(ours.eval()(x), theirs.eval()(x))


def test_batch_norm_of_a_single_pixel_keeps_its_statistics_finite() -> None:
    """The coarsest map of one image that is smaller than the crop"""
    norm, present = BatchNorm(3), torch.zeros(1, 1, 2, 2, dtype=torch.bool)
    present[0, 0, 0, 0] = True
    assert norm(torch.randn(1, 3, 2, 2), present).isfinite().all()
    assert torch.equal(norm.running_var, torch.full((3,), 0.9))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head", ["upernet", "fpn"])
def test_parameters_in_half_precision(head: str, dtype: torch.dtype) -> None:
    model = small_segmenter("inline_pvt_tiny", head).to(dtype).train()
    logits = model(torch.randn(2, 3, 64, 64, dtype=dtype), torch.tensor([[64, 64], [40, 64]]))
    assert logits.main.dtype == dtype
    logits.main.sum().backward()
    assert all(value.isfinite().all() for value in model.state_dict().values())


@pytest.mark.parametrize(
    ("side", "window", "stride", "expected"),
    [
        (10, 4, 0.5, [0, 2, 4, 6]),
        (11, 4, 0.5, [0, 2, 4, 6, 7]),
        (4, 4, 0.5, [0]),
        (3, 4, 0.5, [0]),
        (9, 4, 1.0, [0, 4, 5]),
    ],
)
def test_windows_reach_the_end(side: int, window: int, stride: float, expected: list[int]) -> None:
    assert places(side, window, stride=stride) == expected


def by_colour(images: torch.Tensor) -> torch.Tensor:
    """Logits that depend on a pixel alone: its channels."""
    return images.float()


@pytest.mark.parametrize("size", [(375, 1242), (9, 300), (64, 64), (1, 1)])
def test_windows_and_mirror_images_of_a_pointwise_model_change_nothing(size: tuple[int, int]) -> None:
    image = torch.randn(1, 3, *size)
    expected = image.argmax(1)
    for inference in (
        Inference(),
        Inference(window=(64, 128)),
        Inference(window=(64, 128), window_stride=0.3, flip=True),
        Inference(scales=(1.0, 1.0), flip=True),
    ):
        assert torch.equal(inference(by_colour, image, size), expected)


def test_scores_of_a_large_image_are_enlarged_a_few_at_a_time() -> None:
    logits = torch.randn(1, 40, 5, 6)
    with Largest() as made:
        found = Inference()(lambda images: logits, torch.zeros(1, 3, 5, 6), (2000, 1500))
    assert made.numel <= 2**26
    for row in (0, 777, 1999):
        whole = torch.nn.functional.interpolate(logits, (2000, 1500), mode="bilinear")[:, :, row]
        assert torch.equal(found[:, row], whole.argmax(1))


def test_windows_are_averaged() -> None:
    """A model that sees where it is in its window: overlapping windows must give the mean of what each says."""

    def ramp(images: torch.Tensor) -> torch.Tensor:
        column = torch.arange(images.shape[3]).float().expand(images.shape[0], 1, *images.shape[2:])
        return torch.cat([column, torch.full_like(column, 2.5)], dim=1)

    # Windows start at 0, 2 and 4: column 4 is number 4 of the first, 2 of the second and 0 of the third, on average 2.
    inference = Inference(window=(1, 6), window_stride=1 / 3)
    found = inference(ramp, torch.zeros(1, 3, 1, 10), (1, 10))
    by_hand = [0, 1, 1, 2, 2, 3, 3, 4, 4, 5]
    assert found[0, 0].tolist() == [0 if value > 2.5 else 1 for value in by_hand]


def test_scales_are_averaged_as_probabilities() -> None:
    calls: list[tuple[int, ...]] = []

    def sized(images: torch.Tensor) -> torch.Tensor:
        """Sure of class 0 on large images, a little less sure of class 1 on small ones."""
        calls.append(tuple(images.shape))
        logits = torch.zeros(images.shape[0], 2, *images.shape[2:])
        logits[:, 0 if images.shape[2] > 8 else 1] = 9.0 if images.shape[2] > 8 else 1.0
        return logits

    image = torch.randn(2, 3, 8, 12)
    assert (Inference(scales=(1.0,))(sized, image, (8, 12)) == 1).all()
    assert (Inference(scales=(1.0, 2.0), flip=True)(sized, image, (8, 12)) == 0).all()
    assert calls[1:] == [(2, 3, 8, 12), (2, 3, 8, 12), (2, 3, 16, 24), (2, 3, 16, 24)]


def test_images_of_one_size_go_together_and_come_back_in_order() -> None:
    images = [torch.randn(3, *size) for size in ((8, 8), (8, 12), (8, 8))]
    sizes = [(8, 8), (16, 24), (8, 8)]
    batches: list[int] = []

    def counted(x: torch.Tensor) -> torch.Tensor:
        batches.append(len(x))
        return by_colour(x)

    found = segment_images(counted, images, sizes, inference=Inference())
    assert batches == [2, 1]
    assert [tuple(f.shape) for f in found] == sizes
    assert torch.equal(found[2], images[2].argmax(0))


def test_settings_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="head='unet'; expected one of upernet, fpn"):
        create_segmenter("inline_pvt_tiny", "unet", num_classes=3)
    with pytest.raises(ValueError, match="num_classes=0; expected 1 or more"):
        create_segmenter("inline_pvt_tiny", num_classes=0)
