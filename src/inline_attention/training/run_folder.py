"""The folder of a run: planning a new or resumed run, locking the folder, and the files that describe the run."""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from inline_attention.environment import describe_environment
from inline_attention.training import settings
from inline_attention.training.checkpoint import find_damage, list_checkpoints
from inline_attention.training.config import LoopConfig, change, check_command, load_recipe, read_yaml
from inline_attention.training.distributed import Ranks
from inline_attention.training.files import write_atomically
from inline_attention.training.lock import FileLock
from inline_attention.training.task import Task

CONFIG, ENVIRONMENT, CHECKPOINTS = "config.yaml", "environment.json", "checkpoints"
LOCK = ".lock"  # locked by the process that trains there (rank 0)


@dataclass(frozen=True)
class Plan:
    """A run before it starts: the task, its configuration, the run folder, and the run it resumes from."""

    task: type[Task]
    config: LoopConfig
    folder: Path
    source: Path | None = None  # folder of the run to resume, usually `folder` itself; None: a new run
    checkpoint: Path | None = None  # the checkpoint to resume from; None: the newest of `source`, if there is one
    changes: tuple[str, ...] = ()  # settings that differ from those of the resumed run

    @property
    def loop_settings(self) -> LoopConfig:
        return self.task.loop_settings(self.config)


def plan_run(
    recipe: str | None = None,
    *,
    task: type[Task],
    overrides: Iterable[str] = (),
    flags: Mapping[str, Any] | None = None,
    output: str | None = None,
    resume: str | None = None,
) -> Plan:
    """Plan a run. Writes nothing.

    Args:
        recipe: name of a recipe of the task, or a YAML file; None: the task's default.
        task: what to train, such as `tasks.classification.Classification`.
        overrides: settings as `section.key=value`.
        flags: settings as nested dictionaries, applied before `overrides`.
        output: run folder; None: runs/RECIPE-TIME, or the folder of the resumed run.
        resume: "auto" for the run in `output`, a run folder, or a checkpoint. A resumed run has the settings in its
            config.yaml, changed by `flags` and `overrides`.
    """
    if resume is None:
        config = _new_config(recipe, task=task, overrides=overrides, flags=flags)
        return Plan(task, config, Path(output) if output else default_folder(config))
    if resume == "auto":
        if output is None:
            raise ValueError("--resume auto continues the run in --output: give --output DIR too")
        source, checkpoint = Path(output), None
        if not (source / CONFIG).exists():  # the first start: a job uses the same command for all starts
            if recipe is None:
                raise ValueError(f"--resume auto: {output} holds no run to continue; to begin one there, name a recipe")
            config = _new_config(recipe, task=task, overrides=overrides, flags=flags)
            return Plan(task, config, source, source=source)
    else:
        source, checkpoint = _resume_source(Path(resume))
    text = (source / CONFIG).read_text(encoding="utf-8", errors="replace")
    # The run may have been started by another version of the package, with other settings.
    saved = read_yaml(text, str(source / CONFIG))
    check_command(saved, task.defaults(), f"the run in {source}")
    values, unknown = settings.drop_unknown(task.defaults(), saved)
    if foreign := [name for name in unknown if isinstance(saved.get(name), Mapping)]:
        raise ValueError(f"{source} holds a run of another command: its {CONFIG} has the section {foreign[0]}")
    before = settings.update(task.defaults(), values)
    if recipe is not None and _recipe_name(recipe) != before.recipe:
        raise ValueError(
            f"{source} holds a run of recipe {before.recipe}, not {recipe}: "
            "leave the recipe out, or give another --output for a new run"
        )
    config = change(before, overrides=overrides, flags=flags)
    return Plan(
        task,
        config,
        Path(output) if output else source,
        source=source,
        checkpoint=checkpoint,
        changes=(*_differences(before, config), *(f"{name} no longer exists" for name in unknown)),
    )


def check_plan(plan: Plan, lock: FileLock) -> None:
    """Check what can be checked before anything is built, and lock the folder if it exists.

    Raises ValueError if there is no data, the folder holds another run, or another process trains in it. Raises
    ImportError if a package that a setting needs is missing.
    """
    folder = plan.folder
    if not plan.config.data.path:
        raise ValueError(f"no data: {plan.task.data_hint}")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output {folder} is a file; expected a folder")
    is_taken = (folder / CONFIG).exists() or list_checkpoints(folder / CHECKPOINTS)
    if is_taken and (plan.source is None or plan.source.resolve() != folder.resolve()):
        raise ValueError(f"{folder} already holds a run: continue it with --resume auto, or give another --output")
    if not is_taken and (inside := sorted(path.parent.name for path in folder.glob(f"*/{CONFIG}"))):
        raise ValueError(f"{folder} holds other runs ({', '.join(inside)}): give another --output")
    if folder.exists():
        _take(lock)
    if plan.config.log.wandb is not None and find_spec("wandb") is None:
        raise ImportError(f"log.wandb={plan.config.log.wandb} needs the package wandb: pip install wandb")
    optimizer = plan.config.optim.name
    if optimizer.startswith("kron") and find_spec("opt_einsum") is None:  # timm only warns
        raise ImportError(f"optim.name={optimizer} needs the package opt_einsum: pip install opt_einsum")


def default_folder(config: LoopConfig) -> Path:
    return Path("runs") / f"{config.recipe}-{time.strftime('%Y%m%d-%H%M%S')}"


def claim_folder(
    plan: Plan, ranks: Ranks, lock: FileLock, *, notify: Callable[[str], None], files: Mapping[str, bytes] | None = None
) -> bool:
    """Create and lock the folder. Write config.yaml, and environment.json with one entry for each start of the run.

    Returns whether the folder held no run before. Only rank 0 calls this, after everything else was checked.

    files: further files, by name.
    """
    try:
        plan.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _no_output(plan.folder, error) from error
    _take(lock)  # `check_plan` has locked a folder that existed
    is_new = not (plan.folder / CONFIG).exists()
    write_atomically(plan.folder / CONFIG, settings.to_yaml(plan.config).encode())
    for name, content in (files or {}).items():
        write_atomically(plan.folder / name, content)
    path = plan.folder / ENVIRONMENT
    starts = _read_starts(path, notify=notify)
    starts.append(
        {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": sys.argv,
            "device": str(ranks.device),
            "world_size": ranks.world_size,
            **describe_environment(),
        }
    )
    write_atomically(path, json.dumps(starts, indent=1).encode())
    return is_new


def give_back(folder: Path) -> None:
    """Let the same command start again in the folder of a run that has failed, unless it has saved something."""
    if not any((folder / CHECKPOINTS).glob("*")):
        with contextlib.suppress(OSError):
            (folder / CONFIG).unlink()


def _read_starts(path: Path, *, notify: Callable[[str], None]) -> list[Any]:
    """The entries of environment.json. A damaged file does not prevent a resume: it is renamed."""
    if not path.exists():
        return []
    try:
        starts = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        starts = None
    if isinstance(starts, list):
        return starts
    damaged = path.with_name(f"{path.name}.damaged")
    path.replace(damaged)
    notify(f"{path} is damaged: it was renamed to {damaged.name}, and a new one begins")
    return []


def _take(lock: FileLock) -> None:
    try:
        taken = lock.take()
    except OSError as error:
        raise _no_output(lock.path.parent, error) from error
    if not taken:
        raise ValueError(
            f"another process (PID {lock.holder()}) trains in {lock.path.parent}: "
            "wait for it, stop it, or give another --output"
        )


def _no_output(folder: Path, error: OSError) -> ValueError:
    return ValueError(f"the run folder {folder} cannot be written ({error.strerror}); give another --output")


def _resume_source(path: Path) -> tuple[Path, Path | None]:
    """(run folder, checkpoint or None) of `--resume PATH`, which is a run folder or one of its checkpoints."""
    if (path / CONFIG).exists():
        return path, None
    if path.parent.name == CHECKPOINTS and (path.parent.parent / CONFIG).exists() and path.is_dir():
        if damage := find_damage(path):
            raise ValueError(f"checkpoint {path} is damaged ({damage}): --resume auto finds the newest intact one")
        return path.parent.parent, path
    there = "" if path.exists() else " does not exist"
    raise ValueError(
        f"--resume {path}{there}: expected auto, a run folder (with {CONFIG}) or a checkpoint in it "
        f"({CHECKPOINTS}/step-…). To start from weights alone, set model.weights={path}"
    )


def _new_config(
    recipe: str | None, *, task: type[Task], overrides: Iterable[str], flags: Mapping[str, Any] | None
) -> LoopConfig:
    recipe = recipe or task.default_recipe
    if recipe is None:
        raise ValueError("no recipe: name one (--list-recipes shows them) or a .yaml file of your own")
    return load_recipe(recipe, defaults=task.defaults(), folder=task.recipes, overrides=overrides, flags=flags)


def _recipe_name(recipe: str) -> str:
    return Path(recipe).stem if recipe.endswith((".yaml", ".yml")) else recipe


def _differences(before: LoopConfig, after: LoopConfig) -> list[str]:
    old, new = _flat(settings.to_mapping(before)), _flat(settings.to_mapping(after))
    return [f"{key}={new.get(key)} (was {old.get(key)})" for key in sorted(old | new) if old.get(key) != new.get(key)]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
