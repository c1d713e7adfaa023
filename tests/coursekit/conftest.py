"""What several of these tests need: the sample exercise, and one graded class with every attack in it."""

from __future__ import annotations

from pathlib import Path

import pytest

import coursekit

ROOT = Path(coursekit.__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository, for subprocesses that must import coursekit from it."""
    return ROOT
