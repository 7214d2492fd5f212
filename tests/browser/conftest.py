"""Fixtures of the tests that drive a real browser: they skip, with the reason, where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browser import support

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """The installed Chromium, started once; skips where it or playwright is missing."""
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    if support.browser_path() is None:
        pytest.skip(f"no browser here: none of {', '.join(support.BROWSERS)} is installed")
    with support.launched() as started:
        yield started


@pytest.fixture(scope="session")
def axe() -> Path:
    """The file of axe-core; skips where it is missing."""
    path = support.axe_path()
    if path is None:
        pytest.skip(f"no axe-core here: neither GPUDIAG_AXE nor {support.AXE} (npm install axe-core)")
    return path
