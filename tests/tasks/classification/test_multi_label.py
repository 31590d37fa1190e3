"""Images with several labels: the figures against scikit-learn's, and every command on a small folder."""

import csv
import json
import multiprocessing
from pathlib import Path
from queue import Queue

import numpy as np
import pytest
import torch
import torch.distributed as dist
from on_use import OnUse
from PIL import Image
from torch import Tensor, nn

from inline_attention.cli import main
from inline_attention.data import DataConfig, open_eval_data
from inline_attention.export import export_model
from inline_attention.tasks.classification import evaluate, evaluate_multi_label, load_classifier
from inline_attention.tasks.classification.multi_label import average_precision

sklearn_metrics = OnUse("sklearn.metrics")
COLOURS = ("red", "green", "blue")  # a label is one channel of the image: bright if it has the label
SMALL = (
    "model.kwargs={embed_dim: 16, depth: 1, num_heads: 2, patch_size: 4}", "model.name=inline_deit_tiny",
    "data.img_size=8", "data.in_chans=3", "data.batch_size=12", "data.workers=0", "data.in_memory=true",
    "data.mixup_prob=0.5", "schedule.epochs=20", "schedule.warmup_epochs=1", "optim.lr=1e-2", "optim.rate_batch=null",
    "log.tensorboard=false", "log.eval_epochs=10",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """61 loose files and their labels.csv; every eighth image has no label."""
    root = tmp_path_factory.mktemp("colours")
    rng = np.random.default_rng(0)
    lines = ["file,labels"]
    for number in range(61):
        bright = [bool(number >> bit & 1) for bit in range(3)]
        pixels = rng.integers(0, 60, (8, 8, 3)) + 150 * np.array(bright)
        Image.fromarray(pixels.astype(np.uint8)).save(root / f"{number}.png")
        names = [name for name, there in zip(COLOURS, bright, strict=True) if there]
        lines.append(f"{number}.png,{'|'.join(names)}")
    (root / "labels.csv").write_text("\n".join(lines) + "\n")
    return root


@pytest.fixture(scope="module")
def run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("runs") / "run"
    assert main(["train", "--data", str(folder), "--output", str(output), "--device", "cpu", *SMALL]) == 0
    return output


@pytest.mark.parametrize("ties", [False, True])
def test_average_precision_is_scikit_learns(ties: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    for positives in (1, 7, 40):
        scores = torch.randn(40, generator=generator)
        scores = scores.round() if ties else scores
        truth = torch.arange(40) < positives
        expected = sklearn_metrics.average_precision_score(truth.numpy(), scores.numpy())
        assert float(average_precision(scores, truth)) == pytest.approx(expected, rel=1e-5)
    assert average_precision(scores, torch.zeros(40, dtype=torch.bool)).isnan()


class Pixels(nn.Module):
    """Logits that depend on the image, and are wrong at times."""

    def forward(self, x: Tensor) -> Tensor:
        return 4 * x.mean((2, 3)) - 0.3 + x[:, :, 0, 0]


def test_figures_are_scikit_learns(folder: Path) -> None:
    loader = open_eval_data(DataConfig(path=str(folder), val_split="all", img_size=8, batch_size=7, workers=0))
    result = evaluate_multi_label(Pixels(), loader, device="cpu")
    logits = torch.cat([Pixels()(batch.images) for batch in loader])
    truth = torch.cat([batch.targets for batch in loader]).numpy()
    found = (logits > 0).numpy()
    assert result.map == pytest.approx(100 * sklearn_metrics.average_precision_score(truth, logits.numpy()), rel=1e-5)
    assert result.f1_micro == pytest.approx(100 * sklearn_metrics.f1_score(truth, found, average="micro"), rel=1e-5)
    assert result.f1_macro == pytest.approx(100 * sklearn_metrics.f1_score(truth, found, average="macro"), rel=1e-5)
    assert 0 < result.f1_micro < 100
    assert (result.images, result.skipped) == (61, 0)
    assert result.positives.tolist() == truth.sum(0).tolist()
    with pytest.raises(ValueError, match="accuracy needs one label for each image"):
        evaluate(Pixels(), loader, device="cpu")


def test_images_without_any_label_are_no_evaluation(folder: Path, tmp_path: Path) -> None:
    """Every eighth image has no label: the mean of no average precision would be NaN."""
    rows = [f"{number}.png,,val" for number in range(0, 61, 8)] + ["1.png,red,train"]
    (tmp_path / "labels.csv").write_text("\n".join(["file,labels,split", *rows]) + "\n")
    for image in folder.glob("*.png"):
        (tmp_path / image.name).symlink_to(image)
    loader = open_eval_data(DataConfig(path=str(tmp_path), img_size=8, workers=0), class_names=list(COLOURS))
    with pytest.raises(ValueError, match="nothing to evaluate: none of the 8 images has a label"):
        evaluate_multi_label(Pixels(), loader, device="cpu")


def evaluate_on_rank(rank: int, folder: Path, store: Path, results: "Queue[tuple[int, float, float, int]]") -> None:
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(str(store), 2))
    config = DataConfig(path=str(folder), val_split="all", img_size=8, batch_size=10, workers=0)
    result = evaluate_multi_label(Pixels(), open_eval_data(config, rank=rank, world_size=2), device="cpu")
    results.put((rank, result.map, result.f1_macro, result.images))
    dist.barrier()
    dist.destroy_process_group()


def test_two_ranks_rank_all_images_together(folder: Path, tmp_path: Path) -> None:
    """31 images on one rank, 30 on the other: four batches and three."""
    context = multiprocessing.get_context("fork")  # importing torch anew in each would take longer than the test
    results: Queue[tuple[int, float, float, int]] = context.Queue()  # type: ignore[assignment]
    arguments = [(rank, folder, tmp_path / "store", results) for rank in range(2)]
    ranks = [context.Process(target=evaluate_on_rank, args=given) for given in arguments]
    for process in ranks:
        process.start()
    found = sorted(results.get(timeout=60) for _ in ranks)
    for process in ranks:
        process.join(timeout=60)
        assert process.exitcode == 0
    loader = open_eval_data(DataConfig(path=str(folder), val_split="all", img_size=8, batch_size=7, workers=0))
    alone = evaluate_multi_label(Pixels(), loader, device="cpu")
    for rank in range(2):
        assert found[rank] == (rank, pytest.approx(alone.map), pytest.approx(alone.f1_macro), 61)


def test_training_learns_and_is_ranked_by_map(run: Path, folder: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert summary["best_map"] > 90  # 50 for a guess
    assert {"val_map", "val_f1_micro", "val_f1_macro"} <= summary.keys()
    assert "val_top1" not in summary
    assert (run / "split.csv").read_text().startswith("file,labels,split\n")
    assert not (run / "confusion.png").exists()
    last = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][-1]
    assert last["val_map"] == summary["val_map"]


def test_eval_and_predict(run: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = str(run / "checkpoints" / "best.safetensors")
    command = ["eval", "--weights", weights, "--data", str(folder), "--device", "cpu", "--workers", "0"]
    assert main([*command, "--json", str(tmp_path / "r.json"), "--csv", str(tmp_path / "r.csv")]) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["map"] == pytest.approx(json.loads((run / "summary.json").read_text())["best_map"], abs=0.01)
    assert f"mAP {result['map']:.3f}%  F1 {result['f1_micro']:.3f}% micro" in capsys.readouterr().out
    assert [row["class"] for row in csv.DictReader((tmp_path / "r.csv").open())] == sorted(COLOURS)
    assert main([*command, "--knn", "3"]) == 2
    assert "several labels: leave out --real and --knn" in capsys.readouterr().err

    weights = str(run / "checkpoints" / "last.safetensors")
    command = ["predict", "--weights", weights, str(folder / "3.png"), str(folder / "8.png"), "--device", "cpu"]
    assert main([*command, "--json", str(tmp_path / "p.json")]) == 0
    predictions = json.loads((tmp_path / "p.json").read_text())["predictions"]
    assert {guess["name"] for guess in predictions[0]["guesses"]} == {"red", "green"}
    assert predictions[1]["guesses"] == []
    assert "no class of 50% or more" in capsys.readouterr().out
    assert main([*command, "--threshold", "0", "--json", str(tmp_path / "p.json")]) == 0
    everything = json.loads((tmp_path / "p.json").read_text())["predictions"][0]["guesses"]
    assert {guess["name"] for guess in everything} == set(COLOURS)
    assert sum(guess["probability"] for guess in everything) > 1.2  # not a softmax
    assert main([*command, "--threshold", "50"]) == 2
    assert "--threshold is 50; expected a probability" in capsys.readouterr().err


def test_data_and_model_must_agree(run: Path, folder: Path, tmp_path: Path, capsys) -> None:
    for name in COLOURS:
        (tmp_path / "val" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "val" / name / "a.png")
    weights = str(run / "checkpoints" / "best.safetensors")
    options = ["--device", "cpu", "--workers", "0"]
    assert main(["eval", "--weights", weights, "--data", str(tmp_path), *options]) == 2
    assert "the data give one label for each image, and the model is for several" in capsys.readouterr().err
    wrong = ["--output", str(tmp_path / "wrong"), "optim.loss=cross_entropy", *SMALL]
    assert main(["train", "--data", str(folder), "--device", "cpu", *wrong]) == 2
    assert "optim.loss=cross_entropy: softmax gives an image one label" in capsys.readouterr().err


def test_files_say_so(run: Path, tmp_path: Path) -> None:
    classifier = load_classifier(None, str(run / "checkpoints" / "last.safetensors"))
    assert classifier.multi_label
    assert classifier.class_names == sorted(COLOURS)
    model = classifier.model.eval()
    exported = export_model(
        model, tmp_path / "hf", format="hf", class_names=classifier.class_names, multi_label=classifier.multi_label
    )
    assert exported.about["multi_label"] == "true"
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["problem_type"] == "multi_label_classification"  # transformers reads it
