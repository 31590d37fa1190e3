"""Two photographs to try things on: scikit-learn's, under licences that photos/README.md names."""

from importlib import resources
from pathlib import Path


def sample_photographs() -> list[Path]:
    """Files of a temple and of a flower."""
    folder = resources.files("inline_attention.data") / "photos"
    return [Path(str(folder / name)) for name in ("china.jpg", "flower.jpg")]
