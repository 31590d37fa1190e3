"""Two sample photographs from scikit-learn. photos/README.md names their licences."""

from importlib import resources
from pathlib import Path


def sample_photographs() -> list[Path]:
    """The files: a temple and a flower."""
    folder = resources.files("inline_attention.data") / "photos"
    return [Path(str(folder / name)) for name in ("china.jpg", "flower.jpg")]
