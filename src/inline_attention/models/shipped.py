"""Weights that come with the package: small classifiers of our own, trained alike with each attention."""

from pathlib import Path

# One for each attention, in the order in which they are compared.
SHIPPED = ("softmax_deit_study", "linear_deit_study", "inline_deit_study")
FOLDER = Path(__file__).parent / "study"


def shipped_weights(name: str) -> Path | None:
    """The file of a model in `SHIPPED`, if this installation has it; None for every other name."""
    path = FOLDER / f"{name}.safetensors"
    return path if name in SHIPPED and path.is_file() else None


def shipped_models() -> list[str]:
    """Those of `SHIPPED` whose weights this installation has."""
    return [name for name in SHIPPED if shipped_weights(name)]
