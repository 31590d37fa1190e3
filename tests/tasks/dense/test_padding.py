"""An image in a padded batch gets exactly what it gets alone: maps, predictions and losses, in every family."""

import pytest
import torch
from small import FAMILIES, create_small, shrunk
from torch import Tensor, nn

from inline_attention.layers import ATTENTIONS
from inline_attention.layers.embed import resize_map
from inline_attention.layers.padding import resize_map_for_each
from inline_attention.tasks.dense.backbone import STRIDES, Backbone
from inline_attention.tasks.detection.model import Detector
from inline_attention.tasks.detection.roi_heads import Detections
from inline_attention.tasks.segmentation.losses import pixel_loss
from inline_attention.tasks.segmentation.model import HEADS, Segmenter, create_segmenter
from inline_attention.tasks.segmentation.norm import BatchNorm

CANVAS = (96, 128)
# A whole image; sides that are no multiple of a stride; smaller than a window, a stripe or a patch of the coarse maps.
SIZES = [(96, 128), (75, 101), (33, 128), (96, 40), (41, 37)]
NAMES = [f"{kind}_{family}_tiny" for family in FAMILIES for kind in ("inline", "softmax")]
MODELS = [
    *((name, {}) for name in NAMES),
    *((f"inline_{f}_tiny", {"attention": a}) for f in FAMILIES for a in ATTENTIONS if a not in ("inline", "softmax")),
    *(("inline_swin_tiny", {"attention": a, "window_size": 3}) for a in ("inline", "linear", "angular", "focused")),
    ("softmax_swin_tiny", {"softmax_window_size": (5, 4), "depths": (2, 2, 2, 2)}),
]


def images(canvas: tuple[int, int] = CANVAS, *, batch: int = len(SIZES), dtype: torch.dtype = torch.float64) -> Tensor:
    """With noise, not zeros, in the padding: what is there must not matter."""
    return torch.randn(batch, 3, *canvas, generator=torch.Generator().manual_seed(3), dtype=dtype)


def cropped(x: Tensor, image: int, size: tuple[int, int]) -> Tensor:
    return x[image : image + 1, :, : size[0], : size[1]]


def randomise(model: nn.Module) -> None:
    """Randomise all parameters. Initial biases are zero and would hide errors."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            fan = parameter[0].numel() if parameter.ndim > 1 else 1
            parameter.copy_(noise * fan**-0.5 if fan > 1 else parameter + 0.1 * noise)


@pytest.mark.parametrize(("name", "options"), MODELS, ids=lambda value: str(value))
def test_maps_of_padded_images_are_those_of_cropped_ones(name: str, options: dict[str, object]) -> None:
    backbone = Backbone(create_small(name, **options)).double().eval()
    randomise(backbone)
    x = images()
    with torch.no_grad():
        maps = backbone(x, torch.tensor(SIZES))
        for image, size in enumerate(SIZES):
            for stride, padded, alone in zip(STRIDES, maps, backbone(cropped(x, image, size)), strict=True):
                rows, columns = alone.shape[2:]
                assert (rows, columns) == tuple(-(-side // stride) for side in size)
                torch.testing.assert_close(padded[image, :, :rows, :columns], alone[0], rtol=1e-8, atol=1e-8)
                assert (padded[image, :, rows:] == 0).all()
                assert (padded[image, :, :, columns:] == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_cropped_images(name: str) -> None:
    """This includes windows and stripes that hold only padding, whose softmax has nothing to attend to."""
    backbone = Backbone(create_small(name)).double()
    backbone.set_grad_checkpointing(True)
    backbone.train()
    x = images(batch=2)
    sizes = [(75, 101), (41, 37)]

    def gradients(maps: list[Tensor]) -> dict[str, Tensor]:
        backbone.zero_grad()
        sum(y.square().sum() for y in maps).backward()  # type: ignore[union-attr]  # never empty
        return {n: p.grad.clone() for n, p in backbone.named_parameters() if p.grad is not None}

    padded = gradients(backbone(x, torch.tensor(sizes)))
    alone = [gradients(backbone(cropped(x, n, size))) for n, size in enumerate(sizes)]
    assert padded.keys() == alone[0].keys()
    for parameter, value in padded.items():
        expected = alone[0][parameter] + alone[1][parameter]
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))


def small_segmenter(name: str, head: str) -> Segmenter:
    torch.manual_seed(0)
    kwargs = {key: value for key, value in shrunk(name).items() if key != "num_classes"}
    model = create_segmenter(name, head, num_classes=4, kwargs=kwargs, head_kwargs={"dim": 8, "drop": 0.0}).double()
    randomise(model)
    for module in model.modules():
        if isinstance(module, BatchNorm):
            nn.init.uniform_(module.running_var, 0.5, 2)  # type: ignore[arg-type]  # it tracks statistics
            nn.init.normal_(module.running_mean)  # type: ignore[arg-type]
    return model


# Every model under one head, and every head on one model; the rest is slow.
@pytest.mark.parametrize(
    ("name", "head"),
    [
        pytest.param(name, head, marks=[] if head == "fpn" or name == "inline_pvt_tiny" else pytest.mark.slow)
        for name in NAMES
        for head in HEADS
    ],
)
def test_segmentation_of_padded_images_is_that_of_cropped_ones(name: str, head: str) -> None:
    model = small_segmenter(name, head).eval()
    x = images()
    with torch.no_grad():
        padded = model.segment(x, torch.tensor(SIZES))
        for image, size in enumerate(SIZES):
            (alone,) = model.segment(cropped(x, image, size))
            torch.testing.assert_close(padded[image, :, : size[0], : size[1]], alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("head", HEADS)
def test_segmenters_learn_the_same_from_padded_images(head: str) -> None:
    """Batch norm's statistics, the auxiliary head and the loss keep to the images' own pixels."""
    x, (height, width) = images(batch=2), (75, 101)
    masks = torch.full((2, *CANVAS), 255)
    masks[:, :height, :width] = torch.randint(4, (2, height, width), generator=torch.Generator().manual_seed(0))
    found = []
    for padded in (True, False):
        model = small_segmenter("inline_swin_tiny", head).train()
        if model.auxiliary is not None:
            model.auxiliary.classifier[0].p = 0.0
        sizes = torch.tensor([[height, width]] * 2) if padded else None
        seen = (x, masks) if padded else (x[:, :, :height, :width], masks[:, :height, :width])
        logits = model(seen[0], sizes)
        loss = pixel_loss(logits.main, seen[1], sizes=sizes)
        if logits.auxiliary is not None:
            loss = loss + pixel_loss(logits.auxiliary, seen[1], sizes=sizes, stride=16)
        loss = loss * seen[1].numel()  # it is divided by all pixels, padding too
        loss.backward()
        gradients = {n: p.grad for n, p in model.named_parameters()}
        statistics = {n: b for n, b in model.named_buffers() if "running" in n}
        found.append((loss, gradients, statistics))
    (loss, gradients, statistics), (own_loss, own_gradients, own_statistics) = found
    torch.testing.assert_close(loss, own_loss, rtol=1e-6, atol=0)
    for name, value in statistics.items():
        torch.testing.assert_close(value, own_statistics[name], rtol=1e-6, atol=1e-6)
    for name, gradient in gradients.items():
        expected = own_gradients[name]
        assert gradient is not None
        assert expected is not None
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()) + 1e-9)


def small_detector(name: str, head: str) -> Detector:
    torch.manual_seed(0)
    return Detector(Backbone(create_small(name)), head=head, num_classes=3, channels=32, regions=16)


def objects(size: tuple[int, int]) -> dict[str, Tensor]:
    """Two that touch the border of the image, where its padding begins"""
    height, width = size
    boxes = torch.tensor([[3, 4, width, height - 2], [width // 2, height // 3, width, height]]).float()
    masks = torch.zeros(2, *size, dtype=torch.uint8)
    masks[0, 4 : height - 2, 3:], masks[1, height // 3 :, width // 2 :] = 1, 1
    return {"boxes": boxes, "labels": torch.tensor([1, 3]), "masks": masks}


@pytest.mark.parametrize("name", NAMES)
def test_detections_in_padded_images_are_those_in_cropped_ones(name: str) -> None:
    model = small_detector(name, "mask_rcnn").double().eval()
    x, sizes = images()[1:3], SIZES[1:3]
    with torch.no_grad():
        for image, (size, padded) in enumerate(zip(sizes, model(x, sizes), strict=True)):
            (alone,) = model(cropped(x, image, size))
            assert len(padded.scores) == len(alone.scores) > 0
            # Rounding may change the order of two that are equally sure, so each is compared with its nearest.
            distances = torch.cdist(rows(padded), rows(alone), p=torch.inf)
            assert distances.amin(0).max() < 1e-9  # 1e-2 with padding that leaks
            assert distances.amin(1).max() < 1e-9


def rows(found: Detections) -> Tensor:
    """Everything of each detection; coordinates relative to the canvas"""
    return torch.cat(
        [found.boxes / max(CANVAS), found.scores[:, None], found.labels[:, None], found.masks.flatten(1)], 1
    )


@pytest.mark.parametrize("head", ["faster_rcnn", "mask_rcnn", "cascade_mask_rcnn"])
def test_detectors_learn_the_same_from_padded_images(head: str) -> None:
    model = small_detector("inline_pvt_tiny", head)
    x, sizes = images(dtype=torch.float32)[1:3], SIZES[1:3]
    targets, keys = [objects(size) for size in sizes], torch.tensor([11, 2**61])
    padded = model(x, sizes, targets, keys)
    alone = [model(cropped(x, n, size), None, targets[n : n + 1], keys[n : n + 1]) for n, size in enumerate(sizes)]
    for name, value in padded.items():
        torch.testing.assert_close(value, (alone[0][name] + alone[1][name]) / 2, rtol=1e-5, atol=1e-6)


def test_a_batch_without_padding_pays_nothing() -> None:
    """The size of every image is that of the canvas: nothing is masked, and the results are exactly the same."""
    model = small_detector("inline_swin_tiny", "mask_rcnn").eval()
    x = images(dtype=torch.float32)[:2]
    masks: list[object] = []
    for module in model.modules():
        if type(module) in ATTENTIONS.values():
            module.register_forward_pre_hook(
                lambda module, args, kwargs: masks.append(kwargs["token_mask"]), with_kwargs=True
            )
    with torch.no_grad():
        with_sizes, without = model(x, [CANVAS] * 2), model(x)
    assert masks
    assert all(mask is None for mask in masks)
    for one, other in zip(with_sizes, without, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_sizes_that_cannot_be() -> None:
    model = small_detector("inline_pvt_tiny", "mask_rcnn").eval()
    x = images(dtype=torch.float32)[:2]
    for wrong in ([(96, 129), (96, 128)], [(0, 5), (96, 128)], [(96, 128)]):
        with pytest.raises(ValueError, match=r"expected a \(height, width\) within \(96, 128\) for 2 images"):
            model(x, wrong)
    with pytest.raises(ValueError, match=r"sizes has shape \(1, 2\); expected \(height, width\) of 2 images"):
        model.backbone(x, torch.tensor([[96, 128]]))


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_resizing_for_each_image_is_torchs(mode: str) -> None:
    x = torch.randn(1, 5, 7, 3, dtype=torch.float64)
    sizes = [(5, 7), (1, 1), (3, 12), (9, 4), (10, 14)]
    found = resize_map_for_each(x, torch.tensor(sizes), (10, 14), mode=mode)
    for own, size in zip(found, sizes, strict=True):
        expected = resize_map(x, size, mode=mode)[0]
        torch.testing.assert_close(own[: size[0], : size[1]], expected)
        assert own.sum() == pytest.approx(float(expected.sum()))  # nothing beyond
