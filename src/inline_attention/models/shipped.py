"""Weights that come with the package: small classifiers, one for each attention, trained in the same way."""

from pathlib import Path

# One for each attention, in the order of comparisons.
SHIPPED = ("softmax_deit_study", "linear_deit_study", "inline_deit_study")
FOLDER = Path(__file__).parent / "study"


def shipped_weights(name: str) -> Path | None:
    """The file of a model in `SHIPPED` if this installation has it; None for any other name."""
    path = FOLDER / f"{name}.safetensors"
    return path if name in SHIPPED and path.is_file() else None


def shipped_models() -> list[str]:
    """The models of `SHIPPED` whose weights are in this installation."""
    return [name for name in SHIPPED if shipped_weights(name)]
