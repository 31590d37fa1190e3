"""Two gloo ranks compared with one, FSDP compared with DDP, and ranks that are stopped or killed."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import training_runs as _runs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from inline_attention.models import create_model
from inline_attention.training.distributed import fresh_store, gathered, join_ranks, parallelize, rank_device

SETTINGS = ("log.every_steps=1", "schedule.epochs=1")  # 10 updates of 16 images
TWO = (*SETTINGS, "data.batch_size=8")
SHARDED = (*TWO, "run.strategy=fsdp")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same training on one rank ("one"), on two ("two") and on two with sharded weights ("sharded")."""
    root = tmp_path_factory.mktemp("runs")
    assert _runs.run(_runs.arguments(root / "one", *SETTINGS), log=root / "one.txt") == 0
    for name, settings in (("two", TWO), ("sharded", SHARDED)):
        log, saving = root / f"{name}.txt", (*settings, "checkpoint.every_steps=6")
        assert _runs.run_ranks(_runs.arguments(root / name, *saving), 2, log=log) == [0, 0], log.read_text()
    return root


@pytest.mark.parametrize(("one", "other"), [("one", "two"), ("two", "sharded")])
def test_losses_and_gradients_do_not_depend_on_the_ranks(runs: Path, one: str, other: str) -> None:
    first, second = _runs.metrics(runs / one), _runs.metrics(runs / other)
    assert [record["update"] for record in first] == list(range(1, 11))
    assert [r["loss"] for r in second] == pytest.approx([r["loss"] for r in first], rel=1e-6)
    assert [r["grad_norm"] for r in second] == pytest.approx([r["grad_norm"] for r in first], rel=1e-4)


@pytest.mark.parametrize("name", ["two", "sharded"])
def test_every_image_is_evaluated_once(runs: Path, name: str) -> None:
    (record,), (reference,) = (_runs.metrics(runs / run, "eval") for run in (name, "one"))
    assert record["val_images"] == 41
    assert record["val_loss"] == pytest.approx(reference["val_loss"], rel=1e-5)


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_all_ranks_evaluate_the_statistics_that_are_saved(strategy: str, tmp_path: Path) -> None:
    """Batch norm of timm's models takes its statistics from the images of one rank."""
    output, log = tmp_path / "run", tmp_path / "log.txt"
    small = ("model.name=test_resnet", "data.img_size=32", "data.batch_size=8", "data.workers=0", "schedule.epochs=1")
    more = ("optim.lr=3e-2", "schedule.warmup_epochs=0", "log.tensorboard=false", f"run.strategy={strategy}")
    common = [f"--data={_runs.images()}", "--device=cpu"]
    command = ["train", "inline_deit_tiny", *small, *more, *common, f"--output={output}"]
    assert _runs.run_ranks(command, 2, log=log) == [0, 0], log.read_text()
    weights = f"--weights={output / 'checkpoints' / 'last.safetensors'}"
    evaluated = tmp_path / "eval.json"
    assert _runs.inline(["eval", weights, "--workers=0", f"--json={evaluated}", *common], log=log) == 0, log.read_text()
    (record,) = _runs.metrics(output, "eval")
    assert record["val_loss"] == pytest.approx(json.loads(evaluated.read_text())["loss"], rel=1e-6)


@pytest.mark.slow
def test_an_evaluated_average_leaves_sharded_training_alone(tmp_path: Path) -> None:
    """The second epoch starts from the weights, not from their average, which was swapped in for the evaluation."""
    settings = ("ema.decay=0.999", "schedule.epochs=2", "data.batch_size=16", "log.every_steps=1")
    for strategy in ("ddp", "fsdp"):
        log, more = tmp_path / f"{strategy}.txt", (*settings, f"run.strategy={strategy}")
        assert _runs.run_ranks(_runs.arguments(tmp_path / strategy, *more), 2, log=log) == [0, 0], log.read_text()
    for kind, key in (("train", "loss"), ("eval", "val_loss"), ("eval", "ema_loss")):
        replicated, sharded = ([r[key] for r in _runs.metrics(tmp_path / name, kind)] for name in ("ddp", "fsdp"))
        assert sharded == pytest.approx(replicated, rel=1e-5), key


def test_sharded_weights_are_saved_whole(runs: Path) -> None:
    for name in ("last", "ema", "best"):
        replicated, sharded = _runs.weights(runs / "two", name), _runs.weights(runs / "sharded", name)
        assert replicated.keys() == sharded.keys()
        for key, value in replicated.items():
            assert torch.allclose(sharded[key], value, atol=1e-4), key
    parts = runs / "sharded" / "checkpoints" / "step-00000010" / "optimizer"
    assert len(list(parts.glob("*.distcp"))) == 2


@pytest.mark.parametrize(
    ("source", "settings", "ranks"),
    [
        ("sharded", SHARDED, 2),
        ("sharded", SETTINGS, 1),
        pytest.param("two", SHARDED, 2, marks=pytest.mark.slow),
    ],
    ids=["sharded goes on sharded", "sharded goes on alone", "replicated goes on sharded"],
)
def test_a_checkpoint_serves_any_number_of_ranks(
    runs: Path, source: str, settings: tuple[str, ...], ranks: int, tmp_path: Path
) -> None:
    """Resumed after its sixth update, the run repeats the last four updates."""
    output, log = tmp_path / "run", tmp_path / "log.txt"
    shutil.copytree(runs / source, output)
    shutil.rmtree(output / "checkpoints" / "step-00000010")
    strategy = "run.strategy=fsdp" if settings is SHARDED else "run.strategy=ddp"
    again = ["train", f"--output={output}", "--resume=auto", f"data.batch_size={16 // ranks}", strategy]
    assert _runs.run_ranks(again, ranks, log=log) == [0] * ranks, log.read_text()
    assert "6 updates done" in log.read_text()
    expected, continued = _runs.metrics(runs / source), _runs.metrics(output)
    assert [r["update"] for r in continued] == list(range(1, 11))
    assert [r["loss"] for r in continued] == pytest.approx([r["loss"] for r in expected], rel=1e-6)
    for key, value in _runs.weights(runs / source).items():
        assert torch.allclose(_runs.weights(output)[key], value, atol=1e-4), key


def test_a_signal_to_one_rank_stops_both_after_the_same_update(tmp_path: Path) -> None:
    output, log = tmp_path / "run", tmp_path / "log.txt"
    command = _runs.arguments(output, *TWO, "schedule.epochs=20")
    ranks = _runs.start_ranks(command, 2, log=log)
    while all(rank.is_alive() for rank in ranks) and not (output / "metrics.jsonl").exists():
        time.sleep(0.001)
    os.kill(ranks[1].pid or 0, signal.SIGTERM)
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [143, 143], log.read_text()
    assert len(list((output / "checkpoints").glob("step-*"))) == 1


@pytest.mark.slow
def test_sharded_ranks_agree_that_a_folder_cannot_be_written(tmp_path: Path) -> None:
    """The run continues without checkpoints, as on one rank, and ends with an error."""
    output, log = tmp_path / "run", tmp_path / "log.txt"
    output.mkdir()
    (output / "checkpoints").write_text("a file where a folder should be")
    assert _runs.run_ranks(_runs.arguments(output, *SHARDED, "checkpoint.every_steps=4"), 2, log=log) == [2, 2]
    text = log.read_text()
    assert text.count("could not save the checkpoint") == 1
    assert "the run is over, but its last state could not be saved" in text
    assert [record["update"] for record in _runs.metrics(output)] == list(range(1, 11))


@pytest.mark.slow
def test_sharded_weights_are_gathered_in_bf16(tmp_path: Path) -> None:
    """This holds for bf16 runs. The weights themselves, and the sum of their gradients, stay float32."""
    settings = (*TWO, "run.precision=bf16", "optim.accumulate=2")
    for strategy in ("ddp", "fsdp"):
        log, more = tmp_path / f"{strategy}.txt", (*settings, f"run.strategy={strategy}")
        assert _runs.run_ranks(_runs.arguments(tmp_path / strategy, *more), 2, log=log) == [0, 0], log.read_text()
    replicated, sharded = ([r["loss"] for r in _runs.metrics(tmp_path / name)] for name in ("ddp", "fsdp"))
    assert sharded == pytest.approx(replicated, rel=2e-3)
    assert all(value.dtype == torch.float32 for value in _runs.weights(tmp_path / "fsdp").values())
    for param_dtype in (torch.bfloat16, None):
        log = tmp_path / f"{param_dtype}.txt"
        assert _runs.run_on_ranks(check_types, 2, param_dtype, log) == [0, 0], log.read_text()


def check_types(param_dtype: torch.dtype | None, log: Path) -> None:
    with open(log, "a") as file, contextlib.redirect_stderr(file), join_ranks("cpu") as ranks:
        model = create_model("inline_deit_tiny", img_size=32, embed_dim=16, depth=2, num_heads=2, num_classes=4)
        parallelize(model, strategy="fsdp", ranks=ranks, param_dtype=param_dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=param_dtype is not None):
            model(torch.randn(2, 3, 32, 32)).float().square().mean().backward()
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
        with gathered(model):
            assert {p.dtype for p in model.parameters()} == {param_dtype or torch.float32}
        # The statistics of batch norm are buffers, which are not cast: its parameters are not either.
        normed = parallelize(
            torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)),
            strategy="fsdp",
            ranks=ranks,
            param_dtype=param_dtype,
        )
        for mode in (True, False):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=param_dtype is not None):
                normed.train(mode)(torch.randn(2, 3, 8, 8))


@pytest.mark.slow
def test_unfreezing_in_a_sharded_run(tmp_path: Path) -> None:
    output, log = tmp_path / "run", tmp_path / "log.txt"
    assert _runs.run_ranks(_runs.arguments(output, *SHARDED, "model.freeze=1"), 2, log=log) == [0, 0], log.read_text()
    again = ["train", f"--output={output}", "--resume=auto", "model.freeze=0", "schedule.epochs=2"]
    assert _runs.run_ranks(again, 2, log=log) == [0, 0], log.read_text()
    assert log.read_text().count("they were frozen before") == 1


def test_a_wrong_setting_ends_every_rank_with_one_message(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("recipe: inline_deit_tiny\n")
    assert _runs.run_ranks(_runs.arguments(tmp_path / "run", *TWO), 2, log=log) == [2, 2]
    assert log.read_text().count("already holds a run") == 1


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("optim.accumulate=100", "optim.accumulate=100: an epoch has only 10 batches of 8 images"),
        ("schedule.warmup_steps=100", "the warm-up has 100 updates and the run 10"),
        ("model.freeze=9", "model.freeze=9: DeiT has 4 layer groups"),
        ("optim.lr=1e30", "the gradient was not finite in update 2"),
    ],
)
def test_an_error_of_all_ranks_is_printed_once(setting: str, message: str, tmp_path: Path) -> None:
    log, more = tmp_path / "log.txt", ("schedule.warmup_epochs=0", "optim.clip_norm=null")
    assert _runs.run_ranks(_runs.arguments(tmp_path / "run", *TWO, *more, setting), 2, log=log) == [2, 2]
    assert log.read_text().count("inline train: ") == log.read_text().count(message) == 1, log.read_text()


def test_classes_of_another_run_are_an_error_of_one_rank(runs: Path, tmp_path: Path) -> None:
    log, data = tmp_path / "log.txt", tmp_path / "data"
    shutil.copytree(_runs.images(), data)
    for split in ("train", "val"):
        (data / split / "9").rename(data / split / "nine")
    resume = ["train", f"--resume={runs / 'two'}", f"--data={data}", f"--output={tmp_path / 'run'}"]
    assert _runs.run_ranks(resume, 2, log=log) == [2, 2]
    assert log.read_text().count("has other classes than the data") == 1, log.read_text()


def test_an_error_in_the_data_is_printed_once(tmp_path: Path) -> None:
    log, damaged = tmp_path / "log.txt", tmp_path / "data"
    (damaged / "train" / "0").mkdir(parents=True)  # a class without images
    (damaged / "val").mkdir()
    arguments = _runs.arguments(tmp_path / "run", *TWO)
    arguments.append(f"--data={damaged}")
    assert _runs.run_ranks(arguments, 2, log=log) == [2, 2]
    assert log.read_text().count("inline train: ") == 1, log.read_text()


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert rank_device("auto") == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match=r"rank 2 of this machine has no GPU: there are 2; lower --nproc-per-node"):
        rank_device("auto")


def test_restarted_ranks_find_each_other_in_a_used_store() -> None:
    """Entries that dead ranks of an earlier attempt left in the store are ignored."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def attempt() -> list[dist.Store]:
        def join(rank: int) -> dist.Store:
            store = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
            return fresh_store(store, rank=rank, world_size=3)

        with ThreadPoolExecutor(3) as pool:
            return list(pool.map(join, range(3)))

    for number in range(3):
        server.set("asking/1", f"dead {number}")
        stores = attempt()
        assert not stores[1].check(["address"])
        stores[0].set("address", f"attempt {number}")
        assert [store.get("address") for store in stores] == [f"attempt {number}".encode()] * 3


def test_the_run_survives_the_death_of_a_rank(runs: Path, tmp_path: Path) -> None:
    """torchrun's own agent: rank 1 kills itself with SIGKILL on the first try, the second try resumes and completes."""
    output, log = tmp_path / "run", tmp_path / "log.txt"
    command = _runs.arguments(output, *TWO, "checkpoint.every_steps=2", "--resume=auto")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{_runs.free_port()}",
        max_restarts=1,
        monitor_interval=0.1,
        start_method="forkserver",
    )
    elastic_launch(config, _runs.run_until_killed)(command, log, output)
    text = log.read_text()
    assert (output / "killed").exists()
    assert "continuing from" in text
    for key, value in _runs.weights(runs / "two").items():
        assert torch.equal(_runs.weights(output)[key], value), key


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks' processes in /proc")
def test_the_command_under_torchrun(runs: Path, tmp_path: Path) -> None:
    """The command itself, one of its two ranks killed from outside."""
    output, log = tmp_path / "run", tmp_path / "log.txt"
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    command = _runs.arguments(output, *TWO, "checkpoint.every_steps=1", "--resume=auto")
    with open(log, "w") as file:
        launcher = subprocess.Popen(
            [sys.executable, "-m", *launch, "-m", "inline_attention", *command], stdout=file, stderr=subprocess.STDOUT
        )
        while launcher.poll() is None and not list((output / "checkpoints").glob("step-*")):
            time.sleep(0.001)
        os.kill(_pid_of_rank(1, parent=launcher.pid), signal.SIGKILL)
        assert launcher.wait() == 0, log.read_text()[-3000:]
    assert "continuing from" in log.read_text()
    for key, value in _runs.weights(runs / "two").items():
        assert torch.equal(_runs.weights(output)[key], value), key


def _pid_of_rank(rank: int, *, parent: int) -> int:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # "pid (name) state parent …", and the name may hold blanks
            parent_of = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended meanwhile
            continue
        if parent_of == parent and f"RANK={rank}".encode() in environment:
            return int(folder.name)
    raise AssertionError(f"rank {rank} is not running")


@pytest.mark.parametrize("more", [(), pytest.param(("--knn=3",), marks=pytest.mark.slow)])
def test_evaluation_on_two_ranks(runs: Path, tmp_path: Path, more: tuple[str, ...]) -> None:
    weights = next(runs.glob("*/checkpoints/last.safetensors"))
    common = ["eval", f"--weights={weights}", f"--data={_runs.images()}", "--device=cpu", "--workers=0", *more]
    log = tmp_path / "log"
    assert _runs.run_ranks([*common, f"--json={tmp_path / 'two.json'}"], 2, log=log) == [0, 0], log.read_text()
    assert _runs.inline([*common, f"--json={tmp_path / 'one.json'}"], log=log) == 0
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    keys = ("knn_top1", "images", "training_images") if more else ("top1", "top5", "images", "skipped_images")
    assert [two[key] for key in keys] == [one[key] for key in keys]
    assert log.read_text().count("top-1") == 2  # rank 0 alone prints
