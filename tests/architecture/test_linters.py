"""The linters, the types and the layers are part of the tests: a habit counts only where a tool fails when it is broken."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = {
    "lint": ("ruff", "check", "."),
    "format": ("ruff", "format", "--check", "."),
    "types": ("mypy",),
    "layers": ("lint-imports", "--no-logo", "--no-cache"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(COMMANDS))
def test_clean(name: str) -> None:
    tool, *arguments = COMMANDS[name]
    program = Path(sys.executable).with_name(tool)  # not resolved: the tools stand beside the environment's own python
    if not program.exists():
        pytest.fail(f"{tool} is not installed in this environment; `make setup` installs the [dev] extra", pytrace=False)
    done = subprocess.run([program, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(f"`{' '.join([tool, *arguments])}` says:\n{done.stdout}{done.stderr}", pytrace=False)
