"""A local web page: attention functions in the plane and on images, and their cost."""

from .app import App
from .server import ExploreServer, open_server
from .subjects import Subject, load_subjects

__all__ = ["App", "ExploreServer", "Subject", "load_subjects", "open_server"]
