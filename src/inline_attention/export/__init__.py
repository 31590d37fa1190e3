"""Exports models to files that run without this library, and compares each file with its model.

Each format is a `Route`: how a file is written, and how it is run again for the comparison.
"""

from .model import FORMATS, Format, export_model
from .route import TOLERANCE, Check, Exported

__all__ = ["FORMATS", "TOLERANCE", "Check", "Exported", "Format", "export_model"]
