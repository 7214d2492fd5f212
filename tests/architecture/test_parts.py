"""The two parts that the tests are run in, `make test` and `make test-slow`: nothing is in neither, and the slow one leaves nothing out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FAST_PART, SLOW_PART = "not slow and not long", "(slow or properties) and not long"
ROOT = Path(__file__).resolve().parents[2]
MODULE = """
import os
import pytest
from hypothesis import given, settings, strategies as st

{line}
@settings(max_examples=60)
@given(st.integers())
def test_a_property(number):
    with open(os.environ["SEEN"], "a") as file:
        file.write("x")

def test_plain():
    pass
"""


def run(folder: Path, line: str, *options: str) -> tuple[str, int]:
    """Return what pytest counts in a module with a property of 60 examples and a plain test, and how many examples were looked at."""
    (folder / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text(encoding="utf-8"))
    (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT / 'tests'}\nmarkers =\n  slow\n  long\n  properties\n")
    (folder / "test_module.py").write_text(MODULE.format(line=line))
    seen = folder / "seen"
    seen.write_text("")
    program = f"import os, sys; os.environ['SEEN'] = {str(seen)!r}; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:dash", str(folder), *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout.strip().splitlines()[-1].partition(" in ")[0], len(seen.read_text())


@pytest.mark.slow
def test_a_property_has_few_examples_in_the_one_part_and_all_in_the_other(tmp_path: Path) -> None:
    assert run(tmp_path, "", "-m", FAST_PART) == ("2 passed", 15)
    assert run(tmp_path, "", "-m", SLOW_PART, "--hypothesis-profile=all") == ("1 passed, 1 deselected", 60)


@pytest.mark.slow
def test_a_module_that_is_slow_as_a_whole_is_left_out_and_run(tmp_path: Path) -> None:
    line = "pytestmark = pytest.mark.slow"
    assert run(tmp_path, line, "-m", FAST_PART) == ("no tests ran", 0)
    assert run(tmp_path, line, "-m", SLOW_PART, "--hypothesis-profile=all") == ("2 passed", 60)


def test_what_is_long_is_in_neither_part_and_run_by_its_own_command(tmp_path: Path) -> None:
    line = "pytestmark = pytest.mark.long"
    assert run(tmp_path, line, "-m", FAST_PART)[0] == "2 deselected"
    assert run(tmp_path, line, "-m", SLOW_PART)[0] == "2 deselected"
    assert run(tmp_path, line, "-m", "long") == ("2 passed", 15)
    assert "-m long" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_ci_runs_both_parts() -> None:
    assert "make test test-slow" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    made = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f'-m "{FAST_PART}"' in made
    assert f'--hypothesis-profile all --reruns 1 -rR -m "{SLOW_PART}"' in made
