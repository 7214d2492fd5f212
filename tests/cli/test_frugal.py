"""Memory that polars would keep goes back to the system in commands that only analyse, and nothing of that reaches other programs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gpudiag.cli.report import POLARS_ALLOCATOR, RETURN_AT_ONCE

_INSIDE = f"""
import os
from gpudiag.cli.report import return_free_memory
{{before}}
with return_free_memory():
    print(os.environ.get({POLARS_ALLOCATOR!r}))
    {{inside}}
print(os.environ.get({POLARS_ALLOCATOR!r}))
"""


def said(before: str = "", inside: str = "import polars", **environ: str) -> list[str]:
    """Return what a fresh process prints of the option inside and after `frugal`."""
    clean = {name: value for name, value in os.environ.items() if name != POLARS_ALLOCATOR}  # polars itself may have set it in this process
    code = _INSIDE.format(before=before, inside=inside)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**clean, **environ})
    return done.stdout.split()


def test_the_option_is_there_while_polars_is_loaded_and_gone_afterwards() -> None:
    assert said() == [RETURN_AT_ONCE, "None"]


def test_what_the_user_has_set_stays() -> None:
    inside, after = said(**{POLARS_ALLOCATOR: "narenas:1"})
    assert inside == "narenas:1"
    assert after.split(",")[-1] == "narenas:1"  # polars puts its own options before it


def test_polars_that_is_loaded_already_would_never_look() -> None:
    inside, after = said("import polars")
    assert inside == after != RETURN_AT_ONCE


@pytest.mark.parametrize("failure", ["raise SystemExit(0)", "raise KeyboardInterrupt"])
def test_the_option_is_gone_after_a_failure_too(failure: str) -> None:
    shown = f"print(os.environ.get({POLARS_ALLOCATOR!r}))"
    both = f"try:\n        with return_free_memory():\n            {failure}\n    except BaseException:\n        {shown}"
    assert said(inside=f"pass\n{both.replace(chr(10) + '    ', chr(10))}")[1:] == ["None", "None"]
