"""InLine attention for vision."""

from inline_attention._version import __version__

__all__ = ["__version__"]
