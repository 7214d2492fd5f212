"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from realtraces import SHARED


@pytest.fixture(scope="session")
def traces() -> Path:
    """The folder of real third-party traces beside the checkout; skips where it is missing."""
    folder = SHARED / "traces"
    if not folder.is_dir():
        pytest.skip(f"no real traces here: {folder} does not exist (third-party data, not part of the project)")
    return folder


@pytest.fixture(scope="session")
def knowledge() -> Path:
    """The folder of design knowledge (worked examples) beside the checkout; skips where it is missing."""
    folder = SHARED / "knowledge"
    if not folder.is_dir():
        pytest.skip(f"no worked examples here: {folder} does not exist")
    return folder
