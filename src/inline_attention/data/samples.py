"""The two photographs that scikit-learn brings along."""

from importlib import resources
from pathlib import Path


def sample_photographs() -> list[Path]:
    """Files of a temple and of a flower."""
    try:
        folder = resources.files("sklearn.datasets.images")
    except ImportError as error:
        raise ImportError(
            "the sample photographs come with scikit-learn: pip install 'inline-attention[train]', or name images"
        ) from error
    return [Path(str(folder / name)) for name in ("china.jpg", "flower.jpg")]
