"""Annotations of the program that are open when a recording of ours ends: closed later, they must not write into freed memory."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.profiler import record_function

from gpudiag.capture.schedule import Planned
from gpudiag.capture.torch_profiler import OpenAnnotations, ProfilerGuard, ProfilerWindow

KEEPS = {"MALLOC_MMAP_THRESHOLD_": "33000000", "MALLOC_TRIM_THRESHOLD_": "1000000000"}
"""Have glibc give freed memory to the next who asks: a write into it is then seen, every time (torch 2.13)."""

own = record_function.__enter__


@pytest.fixture(autouse=True)
def _nothing_is_left_wrapped() -> Any:
    yield
    assert record_function.__enter__ is own


def recording() -> ProfilerWindow:
    """Return a window that records its first step."""
    window = ProfilerWindow(Planned(0, "timing", 1, 3), 0, guard=ProfilerGuard(lambda: None))
    window.start()
    assert record_function.__enter__ is own, "nothing is wrapped during the warm-up: no annotation is recorded there"
    window.step()
    assert torch._C._autograd._profiler_enabled()
    return window


@pytest.mark.slow
@pytest.mark.parametrize("closed_by", [pytest.param("ours", marks=pytest.mark.long), "foreign"])
def test_an_annotation_that_spans_recordings_corrupts_no_memory(tmp_path: Path, closed_by: str) -> None:
    program = Path(__file__).with_name("open_annotations.py")
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "run"), closed_by],
        env={**os.environ, **KEEPS, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr


def test_what_is_open_ends_with_the_recording(tmp_path: Path) -> None:
    window, mark = recording(), record_function("mine")
    mark.__enter__()
    torch.ones(8)
    window.stop()
    torch.ones(8)
    mark.__exit__(None, None, None)  # nothing to do, and no error
    path = tmp_path / "trace.json"
    window.export(path)
    events = {event["name"]: event for event in json.loads(path.read_bytes())["traceEvents"] if event.get("ph") == "X"}
    mine, ones, last = events["mine"], events["aten::ones"], max(event["ts"] + event["dur"] for event in events.values())
    assert mine["ts"] <= ones["ts"]
    assert ones["ts"] + ones["dur"] <= mine["ts"] + mine["dur"] <= last


def test_one_that_the_program_drops_is_not_kept() -> None:
    window, mark = recording(), record_function("dropped")
    mark.__enter__()
    dropped = weakref.ref(mark)
    del mark
    assert dropped() is None
    window.stop()


def test_those_of_a_recording_that_cannot_be_stopped_are_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    window, ended = recording(), []
    mark = record_function("mine")
    mark.__enter__()
    end = torch.ops.profiler._record_function_exit._RecordFunction

    def end_indeed(handle: Any) -> None:  # one that is not ended writes into freed memory when it is collected in a later recording
        ended.append(handle)
        end(handle)

    monkeypatch.setattr(window._profiler, "stop", lambda: 1 / 0)
    monkeypatch.setattr(torch.ops.profiler._record_function_exit, "_RecordFunction", end_indeed)
    with pytest.raises(ZeroDivisionError):
        window.stop()
    assert mark.record in ended
    mark.__exit__(None, None, None)


def test_an_annotation_of_another_kind_is_left_alone() -> None:
    watching = OpenAnnotations()
    watching.watch()
    strange = record_function("strange")
    strange.__enter__()
    handle, strange.record = strange.record, "no handle"  # type: ignore[assignment]
    watching.end()
    strange.record = handle
    strange.__exit__(None, None, None)


def labelled(x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.profiler.record_function("scripted"):
        return x + 1


def test_torchscript_compiles_an_annotation_inside_a_window() -> None:
    window = recording()
    try:
        scripted = torch.jit.script(labelled)
        assert scripted(torch.zeros(2)).tolist() == [1.0, 1.0]
    finally:
        window.stop()


def test_a_decorated_function_can_be_called_in_and_between_windows() -> None:
    called = record_function("decorated")(lambda: torch.ones(2).sum().item())
    for _ in range(2):
        window = recording()
        assert called() == 2.0
        window.stop()
        assert called() == 2.0
    gc.collect()
