"""Fixtures of what looks at the living objects of a process."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def _collectable() -> None:
    """Taking stock asks the collector for the program's objects: not those that it was told to leave alone (conftest of all)."""
    gc.unfreeze()
