"""A recording adds no line of torch's profiler to stderr, and hands no level of it on."""

from __future__ import annotations

import os
import subprocess

import pytest
import torch
from torch.autograd import profiler

from gpudiag.capture import torch_profiler
from gpudiag.capture.hooks import Patches


def level() -> str:
    """Return what a program started now finds in its environment."""
    return subprocess.run("echo $KINETO_LOG_LEVEL", shell=True, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S602


@pytest.mark.parametrize(
    ("chosen", "gpu", "errors_too", "found"),
    [(None, False, True, "6"), ("1", False, True, "1"), (None, True, True, "6"), (None, False, False, "6"), (None, True, False, "")],
)
def test_the_level_stands_while_a_profiler_begins_and_a_chosen_one_stays(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None, gpu: bool, errors_too: bool, found: str
) -> None:
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    if chosen:
        monkeypatch.setenv("KINETO_LOG_LEVEL", chosen)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: gpu)
    monkeypatch.setattr(profiler, "_prepare_profiler", lambda: (level(), os.environ.get("KINETO_LOG_LEVEL")))
    patches = Patches()
    torch_profiler.silence_kineto(patches, errors_too=errors_too)
    try:
        assert profiler._prepare_profiler() == (found, chosen)
    finally:
        patches.restore()
    assert level() == (chosen or "")
