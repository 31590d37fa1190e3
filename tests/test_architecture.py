"""Imports point one way, and docs/architecture.md shows which."""

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import training_runs

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "inline_attention"
UNDRAWN = {"__init__", "__main__", "_version"}  # the package's face, and a number


def load_drawing() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_architecture", ROOT / "docs" / "site" / "draw_architecture.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def room_of(file: Path) -> str:
    """The folder below the package, or the name of a file that stands beside the folders."""
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(file: Path) -> set[str]:
    """The folders that a file imports, also inside functions and for type checkers."""
    package = ["inline_attention", *file.relative_to(PACKAGE).parts[:-1]]
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            names.update(f"{module}.{alias.name}" for alias in node.names)
    parts = [name.split(".") for name in names]
    return {part[1] for part in parts if part[0] == "inline_attention" and len(part) > 1}


def test_the_page_shows_the_imports() -> None:
    rooms = {room_of(file) for file in PACKAGE.rglob("*.py")} - UNDRAWN
    arrows: dict[str, set[str]] = {room: set() for room in rooms}
    for file in PACKAGE.rglob("*.py"):
        if room_of(file) in rooms:
            arrows[room_of(file)] |= imported(file) & rooms - {room_of(file)}
    drawing = load_drawing()
    shown = drawing.read_table(drawing.PAGE.read_text(encoding="utf-8"))
    assert {room: set(imports) for room, imports in shown.items()} == arrows


def test_imports_point_one_way() -> None:
    drawing = load_drawing()
    arrows = drawing.read_table(drawing.PAGE.read_text(encoding="utf-8"))
    levels = {room: drawing.level(room, arrows) for room in arrows}  # a cycle has no level
    chain = ["ops", "layers", "models", "training", "tasks", "analysis", "explore", "cli"]
    assert [levels[room] for room in chain] == sorted({levels[room] for room in chain})


def libraries_loaded_with_the_integrations() -> set[str]:
    importlib.import_module("inline_attention.integrations")
    return {"transformers", "diffusers"} & sys.modules.keys()


def test_integrations_import_operations_and_layers_alone() -> None:
    """Nothing imports them either: other libraries are loaded only on request."""
    drawing = load_drawing()
    arrows = drawing.read_table(drawing.PAGE.read_text(encoding="utf-8"))
    assert set(arrows["integrations"]) <= {"ops", "layers"}
    assert not [room for room, imports in arrows.items() if "integrations" in imports]
    assert not training_runs.call(libraries_loaded_with_the_integrations)


def test_the_picture_is_of_the_table() -> None:
    drawing = load_drawing()
    arrows = drawing.read_table(drawing.PAGE.read_text(encoding="utf-8"))
    assert drawing.PICTURE.read_text(encoding="utf-8") == drawing.draw(arrows), (
        "run python docs/site/draw_architecture.py"
    )
