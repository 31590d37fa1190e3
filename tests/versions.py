"""Tests with the oldest and the newest supported versions, each in an environment of its own: `make test-versions`.

| set | what is installed | what is run |
|---|---|---|
| oldest | torch, torchvision and timm at the floors of pyproject.toml | fast tests of ops, layers, models, linearize |
| middle | torch 2.11, whose torch.compile differs from that of both others | the same |
| newest | the newest release of everything | the same |
| floors | every dependency at its floor | forward passes, and an epoch of the quickstart |

Needs Python 3.11 or newer to run; the environments may have another (`--python`).
"""

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, dataclass
from pathlib import Path

import tomllib
from packaging.requirements import Requirement
from soak.record import write_into_page

ROOT = Path(__file__).parents[1]
RECORD, PAGE = ROOT / "docs" / "results" / "versions.json", ROOT / "docs" / "reliability.md"
SHOWN = ("torch", "torchvision", "triton", "timm", "numpy", "pillow", "safetensors", "scikit-learn")
RELEASED_TOGETHER = ("torch", "torchvision", "timm")  # what "oldest" holds at its floor
MIDDLE = ("torch==2.11.*", "torchvision==0.26.*")
OLDER_NUMPY = "numpy<2.4"  # the interpreter of Triton 3.5 and 3.6 takes no newer one
TESTS = ("tests/ops", "tests/layers", "tests/models", "tests/linearize")
SMOKE = """
import torch, inline_attention
for name in ("inline_deit_tiny", "inline_pvt_tiny", "inline_swin_tiny", "inline_cswin_tiny"):
    model = inline_attention.create_model(name, num_classes=3).eval()
    with torch.inference_mode():
        assert model(torch.randn(1, 3, 224, 224)).isfinite().all(), name
"""


@dataclass
class Result:
    name: str
    python: str
    versions: dict[str, str]
    what: str
    passed: int
    failed: int
    skipped: int
    failures: list[str]  # the names of tests, or the end of what was printed


def requirements(*extras: str) -> list[str]:
    """The dependencies in pyproject.toml, with those of `extras`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *(line for name in extras for line in project["optional-dependencies"][name])]


def at_floor(line: str) -> str:
    """numpy>=1.26 → numpy==1.26, and torch>=2.9 → torch==2.9.*: torch's bugfix releases count as one version."""
    requirement = Requirement(line)
    (floor,) = (entry.version for entry in requirement.specifier if entry.operator == ">=")
    version = f"{floor}.*" if requirement.name in ("torch", "torchvision") else floor
    return f"{requirement.name}=={version}{f'; {requirement.marker}' if requirement.marker else ''}"


def installed(name: str) -> list[str]:
    """What pip is asked for."""
    wanted = requirements("train")
    tools = ["pytest>=8", "hypothesis>=6.100"]
    if name == "floors":
        return [at_floor(line) for line in wanted]
    if name == "oldest":
        held = [at_floor(line) for line in wanted if Requirement(line).name in RELEASED_TOGETHER]
        return [*held, *wanted, *tools, OLDER_NUMPY]
    if name == "middle":
        return [*MIDDLE, *wanted, *tools, OLDER_NUMPY]
    return [*wanted, *tools]


def make_environment(folder: Path, python: str, packages: list[str]) -> Path:
    """The environment's interpreter. An environment that is there already is kept, and brought up to date."""
    interpreter = folder / "bin" / "python"
    if not interpreter.exists():
        subprocess.run([python, "-m", "venv", folder], check=True)
    subprocess.run([interpreter, "-m", "pip", "install", "--quiet", "--upgrade", *packages], check=True)
    return interpreter


def environment() -> dict[str, str]:
    return {
        **os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip


def versions(interpreter: Path) -> tuple[str, dict[str, str]]:
    code = (
        "import json, platform; from importlib import metadata; "
        "print(json.dumps([platform.python_version(), {d.name.lower(): d.version for d in metadata.distributions()}]))"
    )
    output = subprocess.run([interpreter, "-c", code], check=True, capture_output=True, text=True).stdout
    python, found = json.loads(output)
    return python, {name: found[name] for name in SHOWN if name in found}


def run_tests(interpreter: Path, scratch: Path) -> tuple[int, int, int, list[str]]:
    """(passed, failed, skipped, names of those that failed)"""
    report = scratch / "report.xml"
    command = [interpreter, "-m", "pytest", "-q", "-m", "not slow and not gpu", f"--junitxml={report}", *TESTS]
    subprocess.run([*command, "-p", "no:cacheprovider"], cwd=ROOT, env=environment())
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    total, failed, skipped = (int(suite.attrib[key]) for key in ("tests", "failures", "skipped"))
    failed += int(suite.attrib["errors"])
    names = [
        f"{case.attrib['classname']}::{case.attrib['name']}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return total - failed - skipped, failed, skipped, names


def run_smoke(interpreter: Path, scratch: Path) -> tuple[int, int, int, list[str]]:
    output = scratch / "run"
    shutil.rmtree(output, ignore_errors=True)
    epoch = ["schedule.epochs=1", "schedule.warmup_epochs=0"]
    train = ["-m", "inline_attention", "train", *epoch, f"--output={output}", "--device=cpu"]
    failures = []
    for arguments in (["-c", SMOKE], train):
        done = subprocess.run([interpreter, *arguments], cwd=scratch, env=environment(), capture_output=True, text=True)
        if done.returncode:
            failures.append((done.stdout + done.stderr)[-2000:])
            print(failures[-1])
    return 2 - len(failures), len(failures), 0, failures


CHECKS = {
    "oldest": ("fast tests of ops, layers, models, linearize", run_tests),
    "middle": ("fast tests of ops, layers, models, linearize", run_tests),
    "newest": ("fast tests of ops, layers, models, linearize", run_tests),
    "floors": ("forward passes, and an epoch of the quickstart", run_smoke),
}


def as_text(results: list[dict]) -> str:
    """The results as docs/reliability.md shows them."""
    lines = ["| set | Python | torch | Triton | timm | NumPy | what was run | passed | failed |", "|---" * 9 + "|"]
    for row in results:
        cells = [row["name"], row["python"], *(row["versions"][name] for name in ("torch", "triton", "timm", "numpy"))]
        lines.append(f"| {' | '.join([*cells, row['what'], str(row['passed']), str(row['failed'])])} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", metavar="SET", help=f"of {', '.join(CHECKS)} (default: all)")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "versions", help="where environments are kept")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the environments")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name} and the table into docs/")
    args = parser.parse_args()
    if unknown := set(args.sets) - set(CHECKS):
        parser.error(f"unknown set {', '.join(sorted(unknown))}; expected some of {', '.join(CHECKS)}")
    results = []
    for name in args.sets or CHECKS:
        what, check = CHECKS[name]
        folder = args.folder.resolve() / name
        interpreter = make_environment(folder, args.python, installed(name))
        python, found = versions(interpreter)
        print(f"{name}: Python {python}, {', '.join(f'{key} {value}' for key, value in found.items())}", flush=True)
        passed, failed, skipped, failures = check(interpreter, folder)
        results.append(asdict(Result(name, python, found, what, passed, failed, skipped, failures)))
    print(as_text(results))
    if args.record:
        record(results)
    return 1 if any(row["failed"] for row in results) else 0


def record(results: list[dict]) -> None:
    """Sets that were not run keep the row they had."""
    rows = {row["name"]: row for row in json.loads(RECORD.read_text())["results"]} if RECORD.exists() else {}
    rows |= {row["name"]: row for row in results}
    ordered = [rows[name] for name in CHECKS if name in rows]
    made = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    RECORD.write_text(json.dumps({"made": made, "results": ordered}, indent=1) + "\n", encoding="utf-8")
    write_into_page(PAGE, as_text(ordered), mark="versions")


if __name__ == "__main__":
    sys.exit(main())
