"""Marks name a line of the user's own program, wherever libraries are installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
sys.path.append(sys.argv[1])
from gpudiag.capture.host_marks import find_caller_site
import helper
print(helper.call(lambda: find_caller_site(sys._getframe())))
print(helper.ask(find_caller_site))
"""

HELPER = """
import sys

def call(function):
    return function()

def ask(find):
    return find(sys._getframe())
"""


@pytest.mark.parametrize(
    ("folder", "asked"), [("site-packages", "train.py:7"), ("dist-packages", "train.py:7"), ("project", "helper.py:8")]
)
def test_the_line_is_that_of_the_program_and_not_of_what_is_installed_anywhere_on_its_path(tmp_path: Path, folder: str, asked: str) -> None:
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "helper.py").write_text(HELPER)
    (tmp_path / "train.py").write_text(PROGRAM)
    done = subprocess.run([sys.executable, "train.py", str(tmp_path / folder)], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["train.py:6", asked]
