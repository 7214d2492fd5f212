"""A script under `gpudiag run` finds no line of torch's profiler on stderr, and hands no level of it on."""

from __future__ import annotations

import os
import subprocess

import pytest
from torch.autograd import profiler

from gpudiag.capture.patches import Patches
from gpudiag.capture.unmodified import quiet


def level() -> str:
    """Return what a program started now finds in its environment."""
    return subprocess.run("echo $KINETO_LOG_LEVEL", shell=True, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S602


@pytest.mark.parametrize("chosen", [None, "1"])
def test_the_level_stands_while_a_profiler_begins_and_a_chosen_one_stays(monkeypatch: pytest.MonkeyPatch, chosen: str | None) -> None:
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    if chosen:
        monkeypatch.setenv("KINETO_LOG_LEVEL", chosen)
    monkeypatch.setattr(profiler, "_prepare_profiler", lambda: (level(), os.environ.get("KINETO_LOG_LEVEL")))
    patches = Patches()
    quiet.keep_quiet(patches)
    try:
        assert profiler._prepare_profiler() == (chosen or "6", chosen)
    finally:
        patches.restore()
    assert level() == (chosen or "")
