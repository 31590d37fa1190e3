"""Links, anchors and pictures of the documentation exist, in the repository and on the site of `make docs`."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "src", "study", "tests")
MARKDOWN = sorted([*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))])
GENERATED = {
    "index.md",
    "contributing.md",
    "security.md",
    "changelog.md",
}  # docs/site/hooks.py makes them of the repository's own


def prose(path: Path) -> str:
    """Without code, which holds brackets and hashes of its own."""
    text = re.sub(r"^(```+).*?^\1", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^ {4}.*$", "", text, flags=re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """Of the headings, as code hosts make them: letters, digits, - and _ in lower case, blanks as hyphens."""
    headings = re.findall(r"^#+ (.+)$", prose(path), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def links(path: Path) -> list[str]:
    """Targets of links and pictures that are no addresses."""
    without_code = re.sub(r"`[^`\n]*`", "code", prose(path))
    found = re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"", without_code)
    return [target for pair in found for target in pair if target and not re.match(r"[a-z]+:", target)]


def pages(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from pages(entry)


def test_every_page_is_in_the_navigation_once() -> None:
    listed = list(pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    written = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert len(listed) == len(set(listed))
    assert set(listed) == written | GENERATED


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path: Path) -> None:
    for link in links(path):
        target, _, anchor = link.partition("#")
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), link
        assert not anchor or anchor in anchors(file), link


def test_every_photograph_is_in_the_notice() -> None:
    """Photographs are JPEG files here; drawings, which are ours, are PNG files."""
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    tracked = subprocess.run(
        ["git", "ls-files", "*.jpg", "*.jpeg"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    photographs = tracked.stdout.split()
    assert "docs/images/camvid.jpg" in photographs
    assert [path for path in photographs if path not in notice] == []


def test_links_are_found() -> None:
    """Without this test, the one above would pass on pages without links."""
    assert "docs/attention.md" in links(ROOT / "README.md")
    assert "images/explore-plane.png" in links(ROOT / "docs" / "explore.md")
    assert "training.md#files-of-a-run" in {link for path in MARKDOWN for link in links(path)}
    assert "files-of-a-run" in anchors(ROOT / "docs" / "training.md")


def test_docstrings_describe_parameters_that_exist() -> None:
    """The strict build of the site refuses others, but only in modules that the site shows."""
    described = 0
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                inits = [f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"]
                fields = {
                    f.target.id for f in node.body if isinstance(f, ast.AnnAssign) and isinstance(f.target, ast.Name)
                }
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                inits, fields = [node], set()
            else:
                continue
            _, _, section = (ast.get_docstring(node) or "").partition("\nArgs:\n")
            names = re.findall(r"^    (\S[^:]*):", section.partition("\n\n")[0], flags=re.MULTILINE)
            parameters = fields.union(
                arg.arg
                for f in inits
                for arg in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs, f.args.vararg, f.args.kwarg)
                if arg is not None
            )
            assert [name for name in names if name.strip("*") not in parameters] == [], f"{path}: {node.name}"
            described += len(names)
    assert described > 100
