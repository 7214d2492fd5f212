"""What must not stand in the project's files: unfinished work, one machine's paths, notes about its making, large files."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LARGEST_BYTES = 500_000
CODE = {".py", ".yaml", ".html", ".css", ".js", ".toml"}

# Put together from halves, so that this file passes its own tests.
UNFINISHED = re.compile("|".join([r"\bTO" + r"DO\b", r"\bFIX" + r"ME\b", r"\bX" + r"XX\b", "raise NotImplemented" + "Error"]))
PLACES = re.compile(
    "|".join(
        [
            "/wo" + r"rk/\w",
            "/ro" + "ot/",
            "/opt/w" + "heels",
            "/opt/py" + "pi",
            "py" + r"pi\.org",
            "pythonho" + "sted",
            "npm" + r"js\.org",
        ]
    )
)
AUTHORSHIP = re.compile("|".join([r"\bAI[- ](?:gen|writ|ass)", "co-auth" + "ored-by", "generated w" + "ith"]), re.IGNORECASE)


@cache
def _files() -> tuple[Path, ...]:
    """Return the files of the project: tracked, and new ones that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout: which files belong to the project is not known")
    return tuple(path for name in done.stdout.split("\0") if name and (path := ROOT / name).is_file())


def _hits(pattern: re.Pattern[str], suffixes: set[str] | None = None) -> list[str]:
    hits = []
    for path in _files():
        if suffixes is not None and path.suffix not in suffixes:
            continue
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # a recorded bundle or a picture
        hits += [f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}" for number, line in enumerate(lines, 1) if pattern.search(line)]
    return hits


def test_nothing_is_left_unfinished() -> None:
    assert not _hits(UNFINISHED, CODE)


def test_no_path_of_one_machine_and_no_package_index() -> None:
    assert not _hits(PLACES)


def test_files_speak_of_the_project_not_of_its_making() -> None:
    assert not _hits(AUTHORSHIP)


def test_files_are_small() -> None:
    large = {
        path.name: path.stat().st_size
        for path in _files()
        if path.stat().st_size > LARGEST_BYTES and path.name != "plotly-cartesian.min.js"
    }
    assert not large, f"over {LARGEST_BYTES} bytes: {large}"


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (UNFINISHED, "# TO" + "DO: later"),
        (PLACES, "see /wo" + "rk/here"),
        (PLACES, "https://py" + "pi.org/simple"),
        (AUTHORSHIP, "Generated w" + "ith a tool"),
    ],
)
def test_the_patterns_find_what_they_are_for(pattern: re.Pattern[str], text: str) -> None:
    assert pattern.search(text)
