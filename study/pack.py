"""Turns trained models of the grid into the weights that come with the package."""

import json
import os
from pathlib import Path
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from inline_attention import create_model, save_weights
from inline_attention.layers.attention import Attention
from inline_attention.models import schema, shipped
from inline_attention.models._checkpoint import Checkpoint, errors_name, open_checkpoint
from inline_attention.models.base import VisionModel
from inline_attention.models.weights import load_checkpoint, restore
from study.grid import DATASETS, PUBLISHED, ROWS, Run
from study.measures import weights_file
from study.report import remake
from study.results import Results, RunResult, Setting

# Arguments that do not change the trained model, and arguments with a default for each attention.
_TRAINING_ARGUMENTS = ("drop_rate", "proj_drop_rate", "drop_path_rate")
_RESOLVED_ARGUMENTS = ("feature_map", "local_residual")
PACKED_ROWS = {"softmax_deit_study": "softmax", "linear_deit_study": "linear", "inline_deit_study": "inline"}


def packed_setting(results: Results) -> Setting:
    """The longest training of all three rows with the data and tokens of the main setting.

    Accuracy plays no part in the choice. Raises ValueError if there is none.
    """
    main = results.main_setting
    if main is None:
        raise ValueError("no setting has finished runs of InLine and of linear attention: there is nothing to pack")
    alike = [s for s in results.settings if s[:2] == main[:2]]
    whole = [s for s in alike if set(PACKED_ROWS.values()) <= results.rows(s).keys()]
    if not whole:
        title, rows = DATASETS[main.dataset].title, ", ".join(PACKED_ROWS.values())
        raise ValueError(f"{title}, {main.tokens} tokens: no length has finished runs of all of {rows}; train the rest")
    return max(whole, key=lambda s: s.epochs)


def shipped_runs(results: Results) -> dict[Run, Path]:
    """The runs whose weights are in the package, with their files. A file has the command and accuracy of its run."""
    files = filter(None, map(shipped.shipped_weights, PACKED_ROWS))
    facts = {path: open_checkpoint(path).info for path in files}
    return {
        result.run: path
        for result in results.runs
        for path, info in facts.items()
        if f"/{result.run.name} " in info["recipe"] and info["top1"] == f"{result.top1:.2f}"
    }


def pack_models(results: Results, *, folder: str | os.PathLike[str] | None = None) -> list[Path]:
    """Write the files to a folder, by default to the package. ValueError if a run or its weights are missing."""
    setting = packed_setting(results)
    files = []
    for name, row in PACKED_ROWS.items():
        # Always the first seed: nothing is selected by validation accuracy.
        result = results.find(setting, row)
        assert result is not None
        files.append(_pack_run(result, name=name, folder=folder))
    return files


def pack_best(results: Results, *, folder: str | os.PathLike[str] | None = None) -> Path:
    """Write the row with the highest mean of the longest training with the published augmentation: its first seed.

    A row with the architecture of a model of the package gets its name, and by default its place. Another row gets its
    own name, and needs a folder: `load_model` opens the file, but the package does not know the model.
    """
    rows = {s: {row: x.mean for row, x in results.rows(s).items() if row in PUBLISHED} for s in results.settings}
    setting = max((s for s in rows if rows[s]), key=lambda s: s.epochs, default=None)
    if setting is None:
        raise ValueError(f"no run of the group published has finished: train some of {', '.join(PUBLISHED)}")
    best = max(rows[setting], key=rows[setting].__getitem__)
    name = next((name for name, row in PACKED_ROWS.items() if best == f"{row}_published"), best)
    if name == best and folder is None:
        raise ValueError(f"{best} is the best row, and the package has no model like it: give a folder (--to)")
    result = results.find(setting, best)
    assert result is not None
    return _pack_run(result, name=name, folder=folder)


def _pack_run(result: RunResult, *, name: str, folder: str | os.PathLike[str] | None) -> Path:
    weights = weights_file(result.folder)
    if not weights.exists():
        raise ValueError(f"{weights} is missing: {name} is made from it")
    title = DATASETS[result.run.dataset].title
    data = f"{title}; top-1 after the last epoch, of {result.images:,} validation images"
    seed, recipe, top1 = result.run.seed, remake(result), result.top1
    return pack_weights(weights, name=name, data=data, seed=seed, recipe=recipe, top1=top1, folder=folder)


def pack_weights(
    source: str | os.PathLike[str],
    *,
    name: str,
    data: str,
    seed: int,
    recipe: str | None = None,
    top1: float | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> Path:
    """Write the weights of a trained classifier for `pretrained=True` of the registered model `name`.

    Tensors are stored as float16 and get the model's dtype when they are loaded. The metadata hold the class names and
    the preprocessing of the source, and its recipe, data, seed and accuracy.

    Args:
        source: a file that `inline train` wrote, such as RUN/checkpoints/best.safetensors.
        name: one of `SHIPPED`, or a row of the grid. The source must have exactly the architecture and preprocessing of
            a model in `SHIPPED`. A row's file describes its own model.
        data: the data set of training and evaluation.
        seed: seed of the run.
        recipe: recipe of the run. None: the one that the source names.
        top1: accuracy on the validation split in per cent. None: the one that the source names.
        folder: folder for NAME.safetensors. None: the place in the package.
    """
    if name not in (*shipped.SHIPPED, *ROWS):
        raise ValueError(f"name={name!r}; expected one of {', '.join(shipped.SHIPPED)}, or a row of the grid")
    checkpoint = open_checkpoint(source)
    if schema.read_description(checkpoint.info) is None:
        raise ValueError(f"{source} does not describe its model: expected a file that `inline train` wrote")
    trained = restore(checkpoint, origin=str(source))
    model = create_model(name) if name in shipped.SHIPPED else trained
    assert isinstance(model, VisionModel)
    assert isinstance(trained, VisionModel)
    with errors_name(source):
        _check_same(model, trained, name)
        facts = {
            "class_names": _fact(checkpoint, "class_names"),
            "preprocessing": _fact(checkpoint, "preprocessing"),
            "recipe": _fact(checkpoint, "recipe") if recipe is None else recipe,
            "top1": _fact(checkpoint, "top1") if top1 is None else f"{top1:.2f}",
            "data": data,
            "seed": str(seed),
        }
        if name in shipped.SHIPPED:
            _check_preprocessing(json.loads(facts["preprocessing"]), model)
    load_checkpoint(model, checkpoint, origin=str(source))
    model.half()
    if not all(p.isfinite().all() for p in model.parameters()):
        raise ValueError(f"{source} holds values beyond the range of float16")
    folder = Path(folder or shipped.FOLDER)
    folder.mkdir(parents=True, exist_ok=True)
    return save_weights(model, folder / f"{name}.safetensors", metadata=facts)


def _fact(checkpoint: Checkpoint, key: str) -> str:
    if key not in checkpoint.info:
        raise ValueError(f"does not say its {key}: expected a file that `inline train` wrote")
    return checkpoint.info[key]


def _check_same(model: VisionModel, trained: VisionModel, name: str) -> None:
    """ValueError if the source is not the registered model. Shapes alone may not show a difference."""
    ours, theirs = _architecture(model), _architecture(trained)
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            raise ValueError(f"has {key}={theirs.get(key)}, and {name} has {key}={ours.get(key)}")


def _architecture(model: VisionModel) -> dict[str, Any]:
    left_out = (*_TRAINING_ARGUMENTS, *_RESOLVED_ARGUMENTS)
    arguments = {key: value for key, value in model.config.items() if key not in left_out}
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    arguments["feature_map"] = [f"affine {a.feature_map}" if a.affine else a.feature_map for a in attentions]
    arguments["local_residual"] = [a.local is not None for a in attentions]
    parsed = dict(attention=model.attention, img_size=model.img_size, num_classes=model.num_classes)
    channels = dict(in_chans=model.in_chans, global_pool=model.global_pool)
    return {"family": type(model).__name__, **arguments, **parsed, **channels}


def _check_preprocessing(saved: dict[str, Any], model: VisionModel) -> None:
    """Check that the file and the registered configuration, which timm uses, prepare images in the same way."""
    cfg: Any = model.pretrained_cfg  # timm's builder sets it
    expected = dict(
        mean=list(cfg["mean"]),
        std=list(cfg["std"]),
        interpolation=cfg["interpolation"],
        eval_transform="resize",
    )
    assert cfg["crop_pct"] == 1
    found = {
        "mean": saved["mean"] or list(IMAGENET_DEFAULT_MEAN),
        "std": saved["std"] or list(IMAGENET_DEFAULT_STD),
        "interpolation": saved["interpolation"],
        "eval_transform": saved["eval_transform"],
    }
    for key, value in expected.items():
        if found[key] != value:
            raise ValueError(f"was evaluated with {key}={found[key]}, and the model is registered with {key}={value}")
