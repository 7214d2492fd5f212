"""Tests of tests/gpu, a row each, kept as each one ends."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from validation.rows import Job, Row, Verdict

ROOT = Path(__file__).resolve().parents[3]

_LINE = re.compile(r"(tests/\S+?\.py)::(.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")
_REASON = re.compile(r"(?:FAILED|ERROR) (tests/\S+?\.py)::(.+?) - (.+)")
"""Of pytest -v, and of its short summary (docs.pytest.org, how-to/output)."""

_VERDICTS: dict[str, Verdict] = {"PASSED": "holds", "FAILED": "DOES NOT HOLD", "ERROR": "ERROR", "SKIPPED": "not run"}


def run(job: Job) -> None:
    """Run all tests of tests/gpu that are not slow; those that compile come last."""
    files = sorted((ROOT / "tests" / "gpu").glob("test_*.py"), key=lambda path: (path.name == "test_fixes_gpu.py", path.name))
    tests(job, [path.name for path in files])


def tests(job: Job, files: Iterable[str]) -> None:
    """Run test files of tests/gpu and keep a row for each test; what had no time is said."""
    command = [sys.executable, "-m", "pytest", "-v", "-m", "not slow", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib"]
    command += ["--tb=line", *(str(ROOT / "tests" / "gpu" / name) for name in files)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # noqa: S603
    timer = threading.Timer(max(job.left_s, 0), process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        for row in rows_of(job.part, _printed(process.stdout)):
            job.keep(row)
    finally:
        timer.cancel()
        process.kill()
        process.wait()
    if job.left_s <= 0:
        job.not_run("the other tests", "no time was left for them")


def rows_of(part: str, lines: Iterable[str]) -> Iterator[Row]:
    """Yield a row for each test that passed or was skipped, at the end one for each that failed, with its reason."""
    failed: dict[tuple[str, str], tuple[Verdict, str]] = {}
    for line in lines:
        told, reason = _LINE.search(line), _REASON.match(line)
        if reason is not None:
            key = (reason[1], reason[2])
            failed[key] = (failed.get(key, ("DOES NOT HOLD", ""))[0], reason[3].strip())
        elif told is not None and told[3] in ("FAILED", "ERROR"):
            failed[told[1], told[2]] = (_VERDICTS[told[3]], "")
        elif told is not None:
            yield Row(part, _claim(told[1], told[2]), "passes", told[3].lower(), _VERDICTS.get(told[3], "told"))
    for (file, name), (verdict, why) in failed.items():
        yield Row(part, _claim(file, name), "passes", "failed", verdict, why)


def _claim(file: str, name: str) -> str:
    return f"{Path(file).stem.removeprefix('test_')}: {name.removeprefix('test_').replace('_', ' ')}"


def _printed(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines; they stand in the log of the part too."""
    for line in lines:
        print(line, end="", flush=True)
        yield line
