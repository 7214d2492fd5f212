"""Fixtures shared by all tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


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


def reference(traces: Path, name: str) -> dict[str, Any]:
    """Reference facts of one trace (file name without .json.gz; '/' becomes '__')."""
    return json.loads((traces / "reference" / f"{name.replace('/', '__')}.json").read_text())
