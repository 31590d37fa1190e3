"""A local web page: the attention functions in the plane, on images, and what they cost. `serve` is all it offers."""

from .server import ExploreServer, open_server

__all__ = ["ExploreServer", "open_server"]
