"""The recipes: the published curves and settings from the published numbers alone, and the rate of `finetune`."""

import math
from pathlib import Path

import pytest
from PIL import Image

from inline_attention.tasks.classification import Classification, load_config

IMAGENET = 1_281_167
RANKS = 8
# batch per GPU, epochs, warm-up epochs, cool-down epochs; rates per 512 images: base, warm-up, minimum
PUBLISHED = {
    "inline_deit_tiny": (512, 300, 20, 0, 5e-4, 5e-7, 5e-6),
    "inline_deit_small": (128, 300, 20, 0, 5e-4, 5e-7, 5e-6),
    "inline_deit_base": (64, 300, 20, 0, 5e-4, 5e-7, 5e-6),
    "inline_pvt_tiny": (128, 300, 5, 10, 5e-4, 1e-6, 1e-5),
    "inline_pvt_small": (128, 300, 5, 10, 5e-4, 1e-6, 1e-5),
    "inline_pvt_medium": (128, 300, 5, 10, 5e-4, 1e-6, 1e-5),
    "inline_pvt_large": (64, 300, 5, 10, 5e-4, 1e-6, 1e-5),
    "inline_swin_tiny": (128, 300, 20, 0, 5e-4, 5e-7, 5e-6),
    "inline_swin_small": (128, 300, 20, 0, 5e-4, 5e-7, 5e-6),
    "inline_swin_base": (64, 300, 20, 0, 5e-4, 5e-7, 5e-6),
    "inline_cswin_tiny": (128, 300, 20, 10, 5e-4, 1e-6, 1e-5),
    "inline_cswin_small": (128, 300, 20, 10, 5e-4, 1e-6, 1e-5),
    "inline_cswin_base": (64, 300, 20, 10, 5e-4, 1e-6, 1e-5),
    "inline_swin_base_384": (32, 30, 5, 0, 2e-5, 2e-8, 2e-7),
    "inline_cswin_base_384": (32, 20, 0, 10, 5e-6, None, 5e-7),
}
# weight decay, clip, EMA decay per update on eight GPUs, drop path, input size
TRAINING = {
    "inline_deit_tiny": (0.05, 5.0, None, 0.1, 224),
    "inline_deit_small": (0.05, 5.0, None, 0.1, 288),
    "inline_deit_base": (0.05, 5.0, None, 0.1, 448),
    "inline_pvt_tiny": (0.05, None, None, 0.1, 224),
    "inline_pvt_small": (0.05, None, None, 0.1, 224),
    "inline_pvt_medium": (0.05, 1.0, None, 0.3, 224),
    "inline_pvt_large": (0.05, 1.0, None, 0.3, 224),
    "inline_swin_tiny": (0.05, 5.0, None, 0.2, 224),
    "inline_swin_small": (0.05, 5.0, None, 0.3, 224),
    "inline_swin_base": (0.05, 5.0, None, 0.5, 224),
    "inline_cswin_tiny": (0.05, None, 0.9996 ** (1024 / 4096), 0.2, 224),
    "inline_cswin_small": (0.05, None, 0.9996 ** (1024 / 4096), 0.4, 224),
    "inline_cswin_base": (0.1, None, 0.9996 ** (512 / 4096), 0.5, 224),
    "inline_swin_base_384": (1e-8, 5.0, None, 0.5, 384),
    "inline_cswin_base_384": (1e-8, None, 0.9996 ** (256 / 4096), 0.7, 384),
}


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_published_rates(recipe: str) -> None:
    batch, epochs, warmup, cooldown, base, warmup_rate, minimum = PUBLISHED[recipe]
    scale = batch * RANKS / 512
    steps = IMAGENET // (batch * RANKS)
    schedule = load_config(recipe).build_schedule(steps_per_epoch=steps, world_size=RANKS)

    def cosine(epoch: float) -> float:
        return (minimum + (base - minimum) * 0.5 * (1 + math.cos(math.pi * epoch / epochs))) * scale

    table = {
        0: base * scale if warmup_rate is None else warmup_rate * scale,
        warmup * steps: cosine(warmup),
        epochs * steps // 2: cosine(epochs * steps // 2 / steps),
        epochs * steps - 1: cosine((epochs * steps - 1) / steps),
    }
    if warmup:
        # The last step of the warm-up is one step short of the peak.
        table[warmup * steps - 1] = scale * (base - (base - warmup_rate) / (warmup * steps))
    if cooldown:
        table[epochs * steps] = table[(epochs + cooldown) * steps - 1] = minimum * scale
    for step, rate in table.items():
        assert schedule.rate(step) == pytest.approx(rate, rel=1e-12), step
    assert schedule.total_steps == (epochs + cooldown) * steps


@pytest.mark.parametrize("recipe", TRAINING)
def test_published_training_settings(recipe: str) -> None:
    config = load_config(recipe)
    decay, clip, average, drop_path, size = TRAINING[recipe]
    assert config.optim.weight_decay == decay
    assert config.optim.clip_norm == clip
    assert config.ema.decay_per_step(config.global_batch(RANKS)) == average
    assert config.model.drop_path == drop_path
    assert Classification(config).config.data.img_size == size
    assert (config.optim.name, config.optim.betas, config.optim.eps, config.optim.label_smoothing) == (
        "adamw",
        None,
        None,
        0.1,
    )
    data = config.data
    assert data.auto_augment == "rand-m9-mstd0.5-inc1"
    assert (data.color_jitter, data.random_erase, data.mixup, data.cutmix, data.mixup_switch) == (
        0.4,
        0.25,
        0.8,
        1.0,
        0.5,
    )
    assert data.interpolation == "bicubic"
    assert data.eval_transform == ("resize" if recipe == "inline_swin_base_384" else "published")


@pytest.mark.parametrize("batch", [1, 12, 64, 4096])
def test_fine_tuning_has_one_rate_at_every_batch(batch: int) -> None:
    config = load_config("finetune", overrides=[f"data.batch_size={batch}", "optim.lr=3e-4"])
    schedule = config.build_schedule(steps_per_epoch=10, world_size=4)
    assert schedule.peak == 3e-4
    assert schedule.rate(0) == config.schedule.warmup_lr


@pytest.mark.parametrize(
    ("side", "model", "size"),
    [(128, "inline_deit_study", 96), (95, "inline_deit_study", 64), (128, "inline_swin_tiny", 224)],
)
def test_fine_tuning_enlarges_the_input_of_small_models_for_photographs(
    side: int, model: str, size: int, tmp_path: Path
) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number, more in enumerate((0, 0, 200)):  # the median counts
            Image.new("RGB", (side + more, 2 * side)).save(tmp_path / name / f"{number}.png")
    (tmp_path / "cat" / "0.png").write_bytes(b"no image")
    config = load_config("finetune", overrides=[f"data.path={tmp_path}", f"model.name={model}"])
    assert Classification(config).choose_from_data(1) == {"data.img_size": size}
    given = load_config("finetune", overrides=[f"data.path={tmp_path}", "data.img_size=80"])
    assert Classification(given).choose_from_data(1) == {}
    with pytest.raises(ValueError, match=r"from_data=optim.lr: cannot be chosen from the data; expected data.img_size"):
        Classification(load_config("finetune", overrides=["from_data=[optim.lr]"])).choose_from_data(1)
