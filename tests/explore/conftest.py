"""The page's models, small enough to run in milliseconds."""

import pytest
from explored import small_subjects

from inline_attention.explore import Subject


@pytest.fixture(scope="session")
def subjects() -> list[Subject]:
    return small_subjects()
