"""Memory that polars would keep goes back to the system in commands that only analyse, and nothing of that reaches other programs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gpudiag.cli.frugal import ALLOCATOR, RETURNED

_INSIDE = f"""
import os
from gpudiag.cli.frugal import frugal
{{before}}
with frugal():
    print(os.environ.get({ALLOCATOR!r}))
    {{inside}}
print(os.environ.get({ALLOCATOR!r}))
"""


def said(before: str = "", inside: str = "import polars", **environ: str) -> list[str]:
    """Return what a fresh process prints of the option inside and after `frugal`."""
    clean = {name: value for name, value in os.environ.items() if name != ALLOCATOR}  # polars itself may have set it in this process
    code = _INSIDE.format(before=before, inside=inside)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**clean, **environ})
    return done.stdout.split()


def test_the_option_is_there_while_polars_is_loaded_and_gone_afterwards() -> None:
    assert said() == [RETURNED, "None"]


def test_what_the_user_has_set_stays() -> None:
    inside, after = said(**{ALLOCATOR: "narenas:1"})
    assert inside == "narenas:1"
    assert after.split(",")[-1] == "narenas:1"  # polars puts its own options before it


def test_polars_that_is_loaded_already_would_never_look() -> None:
    inside, after = said("import polars")
    assert inside == after != RETURNED


@pytest.mark.parametrize("failure", ["raise SystemExit(0)", "raise KeyboardInterrupt"])
def test_the_option_is_gone_after_a_failure_too(failure: str) -> None:
    both = f"try:\n        with frugal():\n            {failure}\n    except BaseException:\n        print(os.environ.get({ALLOCATOR!r}))"
    assert said(inside=f"pass\n{both.replace(chr(10) + '    ', chr(10))}")[1:] == ["None", "None"]
