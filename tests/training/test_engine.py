"""The engine knows no concrete task: tasks import it, never the other way round."""

import subprocess
import sys

CHECK = """
import importlib, pkgutil, sys
import inline_attention.training as training
for module in pkgutil.iter_modules(training.__path__, "inline_attention.training."):
    if module.name != "inline_attention.training.plots":  # imports matplotlib, which is optional
        importlib.import_module(module.name)
print([name for name in sys.modules if name.startswith("inline_attention.tasks")])
"""


def test_training_imports_no_task() -> None:
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
