"""What is made of a real trace: once for all tests, and again when the sources, the libraries or the trace have changed.

Pickles in .pytest_cache/kept, written and read by these tests alone. A test whose subject is the reading or the analysis itself, what
it leaves behind or how long it takes, asks gpudiag; one that looks at what came out asks here.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from gpudiag.model.analysis import Analysis
    from gpudiag.model.report import ReportData
    from gpudiag.model.trace import Trace
    from gpudiag.pipeline import AnalysedRecording

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".pytest_cache" / "kept"
OLD_S = 24 * 3600.0
Made = TypeVar("Made")


def tables(trace: Path) -> Trace:
    """Return the tables of `trace` as they are read."""
    from gpudiag.trace import read_trace

    return _kept("tables", trace, lambda: read_trace(trace))


def opened(trace: Path) -> AnalysedRecording:
    """Return the report on `trace` and the analysis behind it."""
    from gpudiag.pipeline import open_recording

    return _kept("opened", trace, lambda: open_recording(str(trace)))


def analysis(trace: Path) -> Analysis:
    """Return the analysis of `trace`."""
    return opened(trace).analysis


def report(trace: Path) -> ReportData:
    """Return the report on `trace`, judged by the built-in rules."""
    return opened(trace).report


def _kept(kind: str, trace: Path, make: Callable[[], Made]) -> Made:
    folder = FOLDER / _sources()
    named = hashlib.sha256(str(trace).encode() + trace.read_bytes()).hexdigest()[:16]
    place = folder / f"{kind}-{trace.name.partition('.')[0]}-{named}.pickle"
    if not place.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(place.with_suffix(".lock")):
            if not place.exists():
                _write(place, pickle.dumps(make(), pickle.HIGHEST_PROTOCOL))
    return pickle.loads(place.read_bytes())  # type: ignore[no-any-return]  # noqa: S301  # of this folder, which is the checkout's own


def _write(place: Path, data: bytes) -> None:
    number, name = tempfile.mkstemp(dir=place.parent)
    with os.fdopen(number, "wb") as file:
        file.write(data)
    Path(name).replace(place)


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Let the other workers wait for the one that makes it; where files cannot be locked, each makes its own."""
    with lock.open("w") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        except (ImportError, OSError):
            pass
        yield


@cache
def _sources() -> str:
    """Return a digest of all that a result depends on but for the trace. Results of other sources are removed after a day."""
    for other in FOLDER.glob("*"):
        if time.time() - other.stat().st_mtime > OLD_S:
            shutil.rmtree(other, ignore_errors=True)
    digest = hashlib.sha256(" ".join([platform.python_version(), *map(version, ("polars", "numpy", "msgspec"))]).encode())
    for path in sorted(path for top in ("gpudiag", "rules") for path in (ROOT / top).rglob("*") if path.suffix not in (".pyc", "")):
        if path.is_file():
            digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]
