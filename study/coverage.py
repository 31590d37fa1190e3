"""Which models of timm `linearize` converts, counted by their names in timm's registry. Minutes on a CPU.

They are built on the meta device, without weights. Run it from a checkout: `python -m study.coverage [PATTERN …]`.
"""

import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterable

import timm
import torch

import inline_attention
from inline_attention import linearize
from inline_attention.printing import say, say_text, table

WHOLE, PARTLY, NO_MAP, REFUSED, NONE = (
    "converted whole",
    "converted, other attentions left alone",
    "converted with local_residual=False",
    "refused",
    "no softmax attention between tokens",
)


def classify(name: str) -> tuple[str, tuple[str, ...]]:
    """What `linearize` does to a model, and the classes of the modules that it leaves alone or refuses."""
    for local_residual in (True, False):
        with torch.device("meta"):
            model = timm.create_model(name)
        try:
            report = linearize(model, local_residual=local_residual)
        except ValueError as error:
            message = str(error)
            if "pass local_residual=False" in message and local_residual:
                continue
            modules = tuple(sorted(set(re.findall(r"\(([\w.]+)\): ", message))))
            return (NONE if message.startswith("there is nothing to convert") else REFUSED), modules
        left = tuple(sorted({layer.kind for layer in report.layers if not layer.is_linear}))
        return (NO_MAP if not local_residual else PARTLY if left else WHOLE), left
    raise AssertionError


def main(patterns: Iterable[str]) -> None:
    own = set(inline_attention.list_models())
    names = [name for name in timm.list_models(list(patterns)) if name not in own]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = [classify(name) for name in names]
    counts = Counter(kind for kind, _ in results)
    say(f"timm {timm.__version__}, {len(names)} names", "")
    say_text(table(["", "names"], [[kind, str(counts[kind])] for kind in (WHOLE, PARTLY, NO_MAP, REFUSED, NONE)]))
    modules = Counter(", ".join(found) for kind, found in results if kind == REFUSED)
    if modules:
        say("")
        say_text(table(["refused for", "names"], [[found, str(count)] for found, count in modules.most_common()]))


if __name__ == "__main__":
    main(sys.argv[1:])
