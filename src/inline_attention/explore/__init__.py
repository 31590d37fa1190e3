"""A local web page: the attention functions in the plane, on images, and what they cost."""

from .app import App
from .server import ExploreServer, open_server
from .subjects import Subject, load_subjects

__all__ = ["App", "ExploreServer", "Subject", "load_subjects", "open_server"]
