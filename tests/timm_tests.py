"""timm's own tests of models, from timm's source distribution, run over the names of this library: `make test-timm`.

The tests come from the release that is installed. They are downloaded by pip, or read from a folder (`--sdist`). They
run over `timm.list_models`, so this file, as a plugin of pytest, makes that list name our models alone. Whatever
follows `--` goes to pytest: `make test-timm ARGS='-- -k "forward and swin"'`.
"""

import argparse
import fnmatch
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOWNLOADS = ROOT / "build" / "timm"
# The tests that run over a list of names. The others are about single models of timm.
TESTS = (
    "test_model_forward",
    "test_model_backward",
    "test_model_default_cfgs",
    "test_model_default_cfgs_non_std",
    "test_model_load_pretrained",
    "test_model_forward_features",
    "test_model_forward_intermediates_features",
    "test_model_forward_intermediates",
    "test_model_forward_fx",
    "test_model_backward_fx",
)
EXCLUDED = ("test_model_forward_torchscript", "test_model_forward_fx_torchscript")  # docs/models.md says why


def pytest_configure(config: Any) -> None:
    """Puts our names in the place of timm's, before the tests are imported."""
    import timm

    import inline_attention
    from inline_attention.models.shipped import SHIPPED

    of_timm = timm.list_models

    def list_models(
        filter: Any = "", *, exclude_filters: Any = "", pretrained: bool = False, module: Any = "", **options: Any
    ) -> list[str]:
        """Ours, chosen as timm chooses: its list of models whose output is a row of tokens has "deit*"."""
        names = inline_attention.list_models()
        if pretrained:  # the published weights would be downloaded
            names = [name for name in names if name in SHIPPED]
        if "deit*" in filter:
            names = [name for name in names if fnmatch.fnmatch(name, "*_deit_*")]
        if "deit*" in exclude_filters:
            names = [name for name in names if not fnmatch.fnmatch(name, "*_deit_*")]
        if options.get("include_tags"):
            names = [tagged for name in names for tagged in of_timm(f"{name}.*", include_tags=True)]
        return names

    timm.list_models = list_models
    timm.list_pretrained = lambda *args, **kwargs: []  # of timm's own test models


def find_tests(sdist: Path | None) -> Path:
    """test_models.py of the timm that is installed."""
    import timm

    if sdist is None:
        sdist = DOWNLOADS / f"timm-{timm.__version__}"
        if not sdist.is_dir():
            DOWNLOADS.mkdir(parents=True, exist_ok=True)
            wanted = ["--no-deps", "--no-binary", ":all:", "--dest", str(DOWNLOADS), f"timm=={timm.__version__}"]
            subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *wanted], check=True)
            with tarfile.open(sdist.with_name(f"{sdist.name}.tar.gz")) as archive:
                archive.extractall(DOWNLOADS, filter="data")
    return sdist / "tests" / "test_models.py"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sdist", type=Path, help="timm's unpacked source distribution; downloaded by default")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, after --")
    args = parser.parse_args()
    tests = find_tests(args.sdist)
    chosen = [f"{tests}::{name}" for name in TESTS]
    # Markers of timm's own configuration, and of plugins that it uses, are unknown here.
    options = ["-p", "timm_tests", "-c", "/dev/null", "--rootdir", str(tests.parent), "-W", "ignore", "-q", "-rfs"]
    command = [sys.executable, "-m", "pytest", *options, *chosen, *args.pytest]
    print(f"{tests.parents[1].name}; left out: {', '.join(EXCLUDED)}")
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"}).returncode


if __name__ == "__main__":
    raise SystemExit(main())
