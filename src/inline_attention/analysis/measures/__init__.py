"""The analyses: every file of this folder is one."""

import importlib
import pkgutil

from inline_attention.analysis.base import Analysis


def analysis_names() -> tuple[str, ...]:
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def analysis_class(name: str) -> type[Analysis]:
    """The analysis class in a file of this folder."""
    if name not in analysis_names():
        raise ValueError(f"there is no analysis {name!r}; expected one of {', '.join(analysis_names())}")
    module = importlib.import_module(f"{__name__}.{name}")
    (found,) = (
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Analysis) and value.__module__ == module.__name__
    )
    return found
