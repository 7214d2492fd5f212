"""One window: whatever fails in torch's profiler, none is left running."""

from __future__ import annotations

import pytest
import torch

from gpudiag.capture.schedule import Planned
from gpudiag.capture.torch_profiler import ProfilerGuard, ProfilerWindow


class Interrupted:
    """The annotation of a step that a Ctrl-C left half made."""

    def __exit__(self, *_: object) -> None:
        raise AssertionError("Expected record to be set")


def recording() -> ProfilerWindow:
    window = ProfilerWindow(Planned(0, "timing", 1, 3), 0, guard=ProfilerGuard(lambda: None))
    window.start()
    window.step()
    assert torch._C._autograd._profiler_enabled()
    return window


def test_a_profiler_that_cannot_be_stopped_in_torch_s_way_is_switched_off() -> None:
    window = recording()
    window._profiler.step_rec_fn = Interrupted()
    with pytest.raises(AssertionError, match="Expected record"):
        window.stop()
    assert not torch._C._autograd._profiler_enabled()
    again = recording()
    torch.ones(8).sum()
    again.stop()
    assert any(event.name == "aten::sum" for event in again._profiler.events())


def test_the_annotation_of_a_step_is_closed_before_the_profiler_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    window = recording()
    annotation = window._profiler.step_rec_fn
    assert annotation is not None

    def fails(*_: object) -> None:
        raise RuntimeError("no stop")

    monkeypatch.setattr(window._profiler, "stop", fails)
    closed = []
    monkeypatch.setattr(type(annotation), "__exit__", lambda self, *_: closed.append(self) or original(self, None, None, None))
    with pytest.raises(RuntimeError, match="no stop"):
        window.stop()
    assert closed == [annotation]
    assert not torch._C._autograd._profiler_enabled()


original = torch.autograd.profiler.record_function.__exit__


def test_somebody_else_s_profiler_is_left_alone() -> None:
    guard = ProfilerGuard(lambda: None)
    guard.foreign_began = True
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert guard.foreign
