"""Fixtures shared by all tests."""

from __future__ import annotations

import atexit
import gc
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings
from realtraces import SHARED

# how long an example takes on a machine that does other work as well says nothing about the code: speed is measured by benchmarks
# the same examples in every run, so that a change is judged by what it changed; GPUDIAG_RANDOM=1 (and `make fuzz`) look at new ones
settings.register_profile("all", deadline=None, derandomize=not os.environ.get("GPUDIAG_RANDOM"))

FEW = 15
"""Examples of a property, whatever it states, but for `--hypothesis-profile=all`, with which `make test-slow` runs all properties again."""
settings.register_profile("few", settings.get_profile("all"), max_examples=FEW)
settings.load_profile("few")

for threads in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "POLARS_MAX_THREADS"):
    # each worker of xdist has a core: threads that wait for each other on a core that others use take many times as long
    os.environ.setdefault(threads, "1")

# nothing is kept beside recordings that tests read, and no test sees what another one kept: the fixture `keeping` is for those that do
os.environ["GPUDIAG_NO_CACHE"] = "1"

# experiments of tests that run at the same time do not refuse each other: what is measured there is planted, or far apart
# peaks that were measured on this machine are not those of a test: the home folder's cache is empty, here and in what tests start
for variable in ("GPUDIAG_LOCKS", "XDG_CACHE_HOME"):
    os.environ[variable] = tempfile.mkdtemp(prefix=f"{variable.lower().replace('_', '-')}-")
    atexit.register(shutil.rmtree, os.environ[variable], ignore_errors=True)

WITHOUT_TORCH = [] if find_spec("torch") else ["capture", "gpu", "api/test_telemetry.py"]
"""What cannot even be imported in an installation for analysis only; other tests that train skip by themselves."""

collect_ignore = WITHOUT_TORCH

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # a shell without job control starts what runs in the background so, and tests press Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)


FAST_PART, SLOW_PART = "not slow and not long", "(slow or properties) and not long"
"""The `-m` of `make test` and `make test-slow`; what is long is run by `make test-long` alone."""

WHOLLY_SLOW = re.compile(rb"^pytestmark = \[?\s*pytest\.mark\.slow\b", re.MULTILINE)
SLOW_OR_PROPERTY = re.compile(rb"slow|given", re.IGNORECASE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out modules in which nothing can be chosen by the `-m` of the two parts: importing all takes many seconds of each worker."""
    chosen = config.getoption("markexpr")
    if chosen not in (FAST_PART, SLOW_PART) or not collection_path.name.startswith("test_"):
        return None
    text = collection_path.read_bytes()
    return True if (WHOLLY_SLOW.search(text) if chosen == FAST_PART else not SLOW_OR_PROPERTY.search(text)) else None


def pytest_collection_finish() -> None:
    """Leave what was imported and collected out of all further garbage collections: each would look at some million objects."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the properties, and let none of them look at more examples than the profile does where that is FEW."""
    for item in items:
        test = getattr(item, "obj", None)
        if getattr(test, "is_hypothesis_test", False):
            item.add_marker("properties")
            given = getattr(test, "__func__", test)
            stated = given._hypothesis_internal_use_settings
            if settings().max_examples <= FEW < stated.max_examples:
                given._hypothesis_internal_use_settings = settings(stated, max_examples=FEW)


BEGAN_S = time.monotonic()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Keep how long the whole fast part took: `make size` shows it."""
    config = session.config
    whole = config.option.markexpr == FAST_PART and config.args == config.getini("testpaths")
    if whole and not exitstatus and not hasattr(config, "workerinput") and getattr(config, "cache", None) is not None:
        config.cache.set("gpudiag/fast_run_s", time.monotonic() - BEGAN_S)


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
    from gpudiag import cache

    monkeypatch.setattr(cache, "MIN_TEXT_BYTES", 1)
    monkeypatch.setattr(cache, "_KNOWN_DIGESTS", {})
    monkeypatch.delenv(cache.NO_CACHE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def known_peaks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What this machine can do is known, as on one where `gpudiag calibrate` was run; the figures are made up.

    Without it each `gpudiag run` takes 8 s to measure it: beside other tests the figures are disturbed, and such are not kept.
    """
    pytest.importorskip("torch", reason="torch is not installed")
    from gpudiag.capture.environment import read_machine
    from gpudiag.hardware.peaks_cache import build_peaks_key, store_peaks
    from gpudiag.model.hardware import Device

    core = Device(
        "cpu", "a core", "cpu", "measured", "made up", bandwidth_byte_per_s=1e10, peaks={"fp32": 1e11}, launch_floor_ns=500.0
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("peaks")))
        for threads in range(1, (os.cpu_count() or 1) + 1):
            store_peaks(core, build_peaks_key(read_machine(), threads=threads))
        yield
