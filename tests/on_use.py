"""Large packages that few tests use. Every worker collects every file, and would import them all."""

from typing import Any

import pytest


class OnUse:
    """A module that is imported when a test first uses it. Without it, the test is skipped."""

    def __init__(self, name: str, *, minversion: str | None = None) -> None:
        self._name, self._minversion = name, minversion

    def __getattr__(self, attribute: str) -> Any:
        return getattr(pytest.importorskip(self._name, minversion=self._minversion), attribute)
