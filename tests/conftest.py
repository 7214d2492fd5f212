"""Fixtures shared by all tests."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings
from realtraces import SHARED

# how long an example takes on a machine that does other work as well says nothing about the code: speed is measured by benchmarks
# the same examples in every run, so that a change is judged by what it changed; GPUDIAG_RANDOM=1 (and `make fuzz`) look at new ones
settings.register_profile("gpudiag", deadline=None, derandomize=not os.environ.get("GPUDIAG_RANDOM"))
settings.load_profile("gpudiag")

for threads in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "POLARS_MAX_THREADS"):
    # each worker of xdist has a core: threads that wait for each other on a core that others use take many times as long
    os.environ.setdefault(threads, "1")

# nothing is kept beside recordings that tests read, and no test sees what another one kept: the fixture `keeping` is for those that do
os.environ.setdefault("GPUDIAG_NO_CACHE", "1")

# experiments of tests that run at the same time do not refuse each other: what is measured there is planted, or far apart
os.environ["GPUDIAG_LOCKS"] = tempfile.mkdtemp(prefix="gpudiag-locks-")
atexit.register(shutil.rmtree, os.environ["GPUDIAG_LOCKS"], ignore_errors=True)

WITHOUT_TORCH = [] if find_spec("torch") else ["capture", "gpu", "api/test_telemetry.py"]
"""What cannot even be imported in an installation for analysis only; other tests that train skip by themselves."""

collect_ignore = WITHOUT_TORCH

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # a shell without job control starts what runs in the background so, and tests press Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs a library which an installation for analysis only leaves out."""
    for marker in item.iter_markers("needs"):
        if not find_spec(marker.args[0]):
            pytest.skip(f"{marker.args[0]} is not installed")


def pytest_report_header() -> str:
    """Return what is left out for want of torch, if anything."""
    return f"torch is not installed: {', '.join(WITHOUT_TORCH)} are left out" if WITHOUT_TORCH else ""


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


@pytest.fixture
def keeping(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Small recordings are kept as if they were large; nothing was kept before, and no peaks were measured on this machine."""
    from gpudiag.api import cache, result_cache

    monkeypatch.setattr(cache, "MIN_TEXT_BYTES", 1)
    monkeypatch.setattr(result_cache, "_KNOWN_DIGESTS", {})
    monkeypatch.delenv(cache.NO_CACHE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
