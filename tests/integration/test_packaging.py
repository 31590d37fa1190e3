"""The wheel works like the checkout, and the checkout like a torch.hub repository."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import inline_attention

ROOT = Path(__file__).parents[2]


def run(*command: str, cwd: Path, **env: str) -> str:
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_wheel(tmp_path: Path) -> None:
    """Built from the source distribution, as pip does where it finds no wheel."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(ROOT), cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    package = ROOT / "src" / "inline_attention"
    expected = {
        str(path.relative_to(package.parent)) for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"
    }
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
        licences = {name.partition("/licenses/")[2]: archive.read(name) for name in archive.namelist()}
    assert packed == expected | {"inline_command.py", "inline_completion.py"}
    for name in ("LICENSE", "NOTICE", "src/inline_attention/data/photos/README.md"):
        assert licences[name] == (ROOT / name).read_bytes()

    site = tmp_path / "site"
    run(
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
        str(wheel),
        cwd=tmp_path,
    )
    where = "import inline_attention; print(inline_attention.__file__)"
    assert run(sys.executable, "-c", where, cwd=tmp_path, PYTHONPATH=str(site)).startswith(str(site))
    listing = run(str(site / "bin" / "inline"), "models", cwd=tmp_path, PYTHONPATH=str(site))
    assert all(name in listing for name in inline_attention.list_models())
    (photo, *_) = sorted((site / "inline_attention" / "data" / "photos").glob("*.jpg"))
    named = run(str(site / "bin" / "inline"), "predict", str(photo), cwd=tmp_path, PYTHONPATH=str(site))
    assert named.count("%") == 5  # by the weights in the package


def test_the_tested_versions_are_allowed_ones() -> None:
    """The floors in pyproject.toml must allow the versions in constraints.txt, with which the tests passed."""
    tomllib = pytest.importorskip("tomllib", reason="part of Python since 3.11")
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    pinned = {canonicalize_name(name): version for name, version in pinned.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    requirements = [Requirement(text) for group in groups for text in group]
    checked = 0
    for requirement in requirements:
        name = canonicalize_name(requirement.name)
        if name != "inline-attention" and (requirement.marker is None or requirement.marker.evaluate()):
            assert requirement.specifier.contains(pinned[name]), requirement
            checked += 1
    assert checked > 15


def test_torch_hub() -> None:
    model = torch.hub.load(str(ROOT), "inline_deit_tiny", source="local", depth=1, num_classes=3)
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 3)


def test_workflows_run_what_the_makefile_has() -> None:
    tomllib = pytest.importorskip("tomllib", reason="part of Python since 3.11")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    steps, pythons = [], set()
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            steps += [step["run"] for step in job["steps"] if "run" in step]
            setups = [
                step["with"]["python-version"] for step in job["steps"] if "python-version" in step.get("with", {})
            ]
            pythons |= set(job.get("strategy", {}).get("matrix", {}).get("python", setups))
    made = [target for step in steps for target in re.findall(r"^make ([a-z-]+)", step)]
    assert made
    assert set(made) <= targets
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    assert pythons == {line.rpartition(" ")[2] for line in classifiers if re.search(r"Python :: 3\.", line)}
