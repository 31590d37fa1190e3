import multiprocessing
import pickle
import shutil
from pathlib import Path
from queue import Queue

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from timm.data import ImageNetInfo, RealLabelsImagenet
from torch import Tensor, nn

from inline_attention.data import DataConfig, open_eval_data
from inline_attention.tasks.classification.evaluation import (
    CALIBRATION_BINS,
    MAX_CONFUSION_CLASSES,
    EvalResult,
    evaluate,
)

CLASSES = 7


def config(root: Path, **options: object) -> DataConfig:
    defaults: dict[str, object] = {"img_size": 6, "batch_size": 10, "workers": 0, "eval_transform": "resize"}
    return DataConfig(path=str(root), **{**defaults, **options})


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """101 images of 7 classes."""
    rng = np.random.default_rng(0)
    for number in range(101):
        folder = tmp_path / "images" / "val" / f"class{number % CLASSES}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)).save(folder / f"{number:03}.png")
    return tmp_path / "images"


class Classifier(nn.Module):
    """Linear, and like a sharded model it communicates in every forward pass where there are several ranks."""

    def __init__(self, num_classes: int = CLASSES) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(3 * 6 * 6, num_classes)
        self.dropout = nn.Dropout(0.9)
        self.shapes: set[tuple[int, ...]] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.shapes.add(tuple(x.shape))
        if dist.is_initialized():
            dist.all_reduce(torch.zeros(1))
        return self.dropout(self.head(x.flatten(1)))


def expected(model: Classifier, root: Path) -> tuple[Tensor, Tensor]:
    """Logits and targets of all images, one batch."""
    batch = next(iter(open_eval_data(config(root, batch_size=200))))
    return model.eval()(batch.images), batch.targets


def test_result(images: Path) -> None:
    model = Classifier()
    logits, targets = expected(model, images)
    model.shapes.clear()
    model.train()
    model.head.eval()  # frozen
    heard: list[int] = []
    result = evaluate(model, open_eval_data(config(images)), device="cpu", on_images=heard.append)
    assert model.training  # put back, and dropout did not act
    assert not model.head.training
    assert result.images == sum(heard) == 101
    predicted = logits.argmax(1)
    assert result.top1 == pytest.approx(100 * (predicted == targets).float().mean().item())
    hits = sum(int(t in row) for t, row in zip(targets, logits.topk(5).indices, strict=True))
    assert result.top5 == pytest.approx(100 * hits / 101)
    assert result.loss == pytest.approx(F.cross_entropy(logits, targets).item(), rel=1e-6)
    confidence, gap = logits.detach().softmax(1).max(1).values, 0.0
    for low in np.arange(CALIBRATION_BINS) / CALIBRATION_BINS:
        inside = (confidence > low) & (confidence <= low + 1 / CALIBRATION_BINS)
        if inside.any():
            accuracy = (predicted == targets)[inside].float().mean()
            gap += float(inside.float().mean() * (accuracy - confidence[inside].mean()).abs())
    assert result.ece == pytest.approx(100 * gap, rel=1e-4)
    assert result.confusion is not None
    for true in range(CLASSES):
        for guess in range(CLASSES):
            assert result.confusion[true, guess] == ((targets == true) & (predicted == guess)).sum()
    assert torch.equal(result.per_class[:, 0], result.confusion.diagonal())
    assert torch.equal(result.per_class[:, 1], torch.bincount(targets))
    assert result.skipped == 0
    assert result.images_per_second == pytest.approx(101 / result.seconds)
    assert model.shapes == {(10, 3, 6, 6)}  # the last, short batch is padded


def test_fewer_than_five_classes(images: Path) -> None:
    for number in range(2, CLASSES):
        shutil.rmtree(images / "val" / f"class{number}")
    result = evaluate(Classifier(2), open_eval_data(config(images)), device="cpu")
    assert result.images == 30
    assert result.top5 == 100  # both of them
    assert "top-5" not in result.summary()


def test_many_classes_have_no_confusion_matrix(images: Path) -> None:
    names = [f"class{number}" for number in range(MAX_CONFUSION_CLASSES + 1)]
    result = evaluate(Classifier(len(names)), open_eval_data(config(images), class_names=names), device="cpu")
    assert result.confusion is None
    assert result.per_class.shape == (len(names), 2)
    assert result.per_class[:, 1].sum() == 101


def test_reassessed_labels_are_counted_as_by_timm(tmp_path: Path) -> None:
    """Images with several labels, and with none: those do not count."""
    labels = RealLabelsImagenet(range(50_000)).real_labels
    chosen = [name for size in (0, 1, 2) for name in [n for n, own in labels.items() if len(own) == size][:6]]
    rng = np.random.default_rng(0)
    for number, name in enumerate(sorted(chosen)):
        folder = tmp_path / "val" / str(number)
        folder.mkdir(parents=True)
        Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)).save(folder / name, format="PNG")
    for number in range(len(chosen), 1000):
        (tmp_path / "val" / str(number)).mkdir()
        Image.new("RGB", (6, 6)).save(tmp_path / "val" / str(number) / sorted(chosen)[0], format="PNG")
    names = ImageNetInfo().label_names()
    loader = open_eval_data(config(tmp_path), class_names=names)  # folders with numbers, as ImageNet-V2 has them
    model = Classifier(1000)
    result = evaluate(model, loader, device="cpu", real_labels=True)
    assert loader.path is not None
    theirs = RealLabelsImagenet([None] * 50_000)
    theirs.filenames = [loader.path(index) for index in range(1000)]
    logits, targets = expected(model, tmp_path)[0], [int(t) for batch in loader for t in batch.targets]
    assert targets == [int(Path(path).parent.name) for path in theirs.filenames]
    for batch in loader:
        theirs.add_result(model.eval()(batch.images))
    assert logits.shape[1] == 1000
    assert result.real_top1 == pytest.approx(theirs.get_accuracy(1))


def test_reassessed_labels_are_for_imagenet(images: Path) -> None:
    with pytest.raises(ValueError, match="ReaL labels are for ImageNet's thousand classes"):
        evaluate(Classifier(), open_eval_data(config(images)), device="cpu", real_labels=True)


def test_other_number_of_classes(images: Path) -> None:
    with pytest.raises(ValueError, match="the model has 1000 outputs, the data 7 classes"):
        evaluate(Classifier(1000), open_eval_data(config(images)), device="cpu")


def test_autocast(images: Path) -> None:
    types: list[torch.dtype] = []
    model = Classifier()
    model.head.register_forward_hook(lambda module, inputs, output: types.append(output.dtype))
    loader = open_eval_data(config(images))
    low = evaluate(model, loader, device="cpu", amp_dtype=torch.bfloat16)
    assert set(types) == {torch.bfloat16}
    assert low.loss == pytest.approx(evaluate(model, loader, device="cpu").loss, rel=0.02)


def test_unreadable_images_are_not_in_the_denominator(images: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Classifier()
    whole = evaluate(model, open_eval_data(config(images)), device="cpu")
    (images / "val" / "class3" / "003.png").write_bytes(b"")
    result = evaluate(model, open_eval_data(config(images)), device="cpu")
    assert (result.images, result.skipped) == (100, 1)
    difference = whole.per_class - result.per_class
    assert difference[:, 1].tolist() == [0, 0, 0, 1, 0, 0, 0]
    assert result.top1 == pytest.approx(100 * result.per_class[:, 0].sum().item() / 100)
    assert "1 unreadable images are left out: results are over the other 100" in caplog.text


def test_nothing_to_evaluate(images: Path) -> None:
    for path in (images / "val").rglob("*.png"):
        path.write_bytes(b"")
    loader = open_eval_data(config(images, max_broken=200))
    with pytest.raises(ValueError, match="nothing to evaluate: none of the 101 images could be read"):
        evaluate(Classifier(), loader, device="cpu")


def evaluate_on_rank(rank: int, world_size: int, root: Path, results: "Queue[tuple[int, bytes]]") -> None:
    store = dist.FileStore(str(root / "store"), world_size)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, store=store)
    loader = open_eval_data(config(root), rank=rank, world_size=world_size)
    result: EvalResult | str
    try:
        result = evaluate(Classifier(), loader, device="cpu")
    except ValueError as error:
        result = str(error)
    results.put((rank, pickle.dumps(result)))  # by value: shared memory would end with this process
    dist.barrier()
    dist.destroy_process_group()


def evaluate_on_two_ranks(root: Path) -> dict[int, EvalResult | str]:
    context = multiprocessing.get_context("fork")  # importing torch anew in each would take longer than the test
    results: Queue[tuple[int, bytes]] = context.Queue()  # type: ignore[assignment]
    ranks = [context.Process(target=evaluate_on_rank, args=(rank, 2, root, results)) for rank in range(2)]
    for process in ranks:
        process.start()
    found = {rank: pickle.loads(result) for rank, result in (results.get(timeout=60) for _ in ranks)}
    for process in ranks:
        process.join(timeout=60)
        assert process.exitcode == 0
    return found


@pytest.mark.parametrize("unreadable", [0, 1])
def test_two_ranks_count_every_image_once(images: Path, unreadable: int) -> None:
    """51 images on one rank, 50 on the other: six batches and five, in a model that communicates in each."""
    if unreadable:
        (images / "val" / "class3" / "003.png").write_bytes(b"")
    alone = evaluate(Classifier(), open_eval_data(config(images)), device="cpu")
    found = evaluate_on_two_ranks(images)
    for rank in range(2):
        result = found[rank]
        assert isinstance(result, EvalResult)
        assert (result.images, result.skipped) == (101 - unreadable, unreadable)
        assert (result.top1, result.top5) == (alone.top1, alone.top5)
        assert result.loss == pytest.approx(alone.loss, rel=1e-6)
        assert result.ece == pytest.approx(alone.ece, rel=1e-6)
        assert torch.equal(result.per_class, alone.per_class)
        assert result.confusion is not None
        assert torch.equal(result.confusion, alone.confusion)


def test_the_limit_of_unreadable_images_is_on_all_ranks_together(images: Path) -> None:
    """Two on each rank, which is as many as the default allows of 101."""
    for number in (0, 7, 14, 21):
        (images / "val" / "class0" / f"{number:03}.png").write_bytes(b"")
    assert all(
        "4 unreadable images, more than the limit of 2" in str(said) for said in evaluate_on_two_ranks(images).values()
    )
