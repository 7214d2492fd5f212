"""The training run comes first: whatever fails in the recording, the loop does not notice."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from noticewords import format_notices
from torch.amp import autocast_mode
from torch.autograd import profiler as autograd_profiler
from torch.optim import optimizer
from torch.utils.data import dataloader

from gpudiag.bundle.reader import open_bundle
from gpudiag.capture import session as session_module
from gpudiag.capture import windows
from gpudiag.capture.session import Session

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def patched() -> list[object]:
    """Everything that a session replaces or registers."""
    return [
        dataloader._BaseDataLoaderIter.__next__,
        torch.save,
        autocast_mode.autocast.__enter__,
        autograd_profiler._prepare_profiler,
        autograd_profiler._enable_profiler,
        autograd_profiler._disable_profiler,
        list(optimizer._global_optimizer_post_hooks),
        list(gc.callbacks),
        torch._C._autograd._profiler_enabled(),
    ]


@pytest.fixture(autouse=True)
def _everything_is_put_back() -> Any:
    before = patched()
    yield
    assert patched() == before


def train(prof: Session, loop: Any) -> list[float]:
    loop.epoch(prof.steps(loop.loader()))
    return loop.losses


def test_patches_are_on_inside_and_off_after(tmp_path: Path) -> None:
    before = patched()
    with pytest.raises(ZeroDivisionError), Session(tmp_path / "run"):  # noqa: PT012
        assert all(new != old for new, old in zip(patched()[:-1], before[:-1], strict=True))
        _ = 1 / 0
    assert patched() == before


def test_a_wrapper_put_over_ours_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.save
    with Session(tmp_path / "run"):
        ours = torch.save
        torch.save = lambda *args, **kwargs: ours(*args, **kwargs)
        theirs = torch.save
    assert torch.save is theirs
    torch.save(1, tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt") == 1
    torch.save = original


class Failing:
    """torch.profiler.profile whose `method` raises at its `call`-th call."""

    method, call = "", 1

    def __init__(self, real: type, method: str, call: int) -> None:
        self.real, self.method, self.left = real, method, call

    def __call__(self, **options: Any) -> Any:
        if self.method == "__init__":
            raise TypeError("profile() got an unexpected keyword argument")
        made = self.real(**options)
        inner = getattr(made, self.method)

        def fail(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")
            return inner(*args, **kwargs)

        setattr(made, self.method, fail)
        return made


@pytest.mark.parametrize(
    ("method", "call"),
    [
        ("__init__", 1),
        ("start", 1),
        ("step", 1),
        ("step", 3),
        ("step", 8),
        ("stop", 1),
        ("export_chrome_trace", 1),
        ("export_chrome_trace", 2),
    ],
)
def test_a_failing_profiler_costs_the_window_only(
    tmp_path: Path, make_loop: type, monkeypatch: pytest.MonkeyPatch, method: str, call: int
) -> None:
    expected = _plain(make_loop())
    monkeypatch.setattr(torch.profiler, "profile", Failing(torch.profiler.profile, method, call))
    loop = make_loop()
    torch.manual_seed(1)
    with warnings.catch_warnings(record=True) as caught, Session(tmp_path / "run") as prof:
        warnings.simplefilter("always")
        assert train(prof, loop) == expected
    assert sum("gpudiag" in str(w.message) for w in caught) == 1
    bundle = open_bundle(prof.path)
    assert bundle.manifest.finished
    assert bundle.step_records.height == 24
    assert any("profiling was switched off" in text for text in format_notices(bundle.notices))
    assert not any("CUPTI" in text for text in format_notices(bundle.notices))


def _plain(loop: Any) -> list[float]:
    torch.manual_seed(1)
    loop.epoch(loop.loader())
    return loop.losses


def _disk_full(*_: object, **__: object) -> Any:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("where", ["segment", "trace", "manifest at the end"])
def test_a_full_disk_stops_the_recording_not_the_loop(tmp_path: Path, make_loop: type, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    expected = _plain(make_loop())
    loop = make_loop()
    monkeypatch.setattr(session_module, "SEGMENT_NS", 0)
    torch.manual_seed(1)
    with warnings.catch_warnings(record=True) as caught, Session(tmp_path / "run") as prof:
        warnings.simplefilter("always")
        if where == "trace":
            monkeypatch.setattr(windows, "compress_trace", _disk_full)
        elif where == "segment":
            monkeypatch.setattr(session_module, "write_atomic", _disk_full)
        assert train(prof, loop) == expected
        if where == "manifest at the end":
            monkeypatch.setattr(session_module, "write_atomic", _disk_full)
    assert sum("switched off" in str(w.message) for w in caught) == 1
    assert not prof.recording
    assert open_bundle(prof.path).manifest.finished == (where == "trace")  # without traces the records of the steps are still worth having
    if where == "trace":
        assert open_bundle(prof.path).step_records.height == 24


def test_a_path_that_cannot_be_created_records_nothing(tmp_path: Path, make_loop: type) -> None:
    expected = _plain(make_loop())
    (tmp_path / "file").write_text("in the way")
    loop = make_loop()
    torch.manual_seed(1)
    with pytest.warns(RuntimeWarning, match="switched off") as caught, Session(tmp_path / "file" / "run") as prof:  # noqa: PT031
        assert not prof.recording
        assert train(prof, loop) == expected
        prof.step()
    assert len(caught) == 1


def test_a_folder_removed_under_the_session_does_not_matter(tmp_path: Path, make_loop: type) -> None:
    import shutil

    loop = make_loop()
    with Session(tmp_path / "run") as prof:
        shutil.rmtree(prof.path)
        train(prof, loop)
    assert len(loop.losses) == 24


def test_warnings_as_errors_do_not_reach_the_loop(tmp_path: Path, make_loop: type, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = make_loop()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setattr(torch.profiler, "profile", Failing(torch.profiler.profile, "start", 1))
        with Session(tmp_path / "run") as prof:
            train(prof, loop)
    assert len(loop.losses) == 24


def test_a_failing_peak_lookup_is_a_warning(tmp_path: Path) -> None:
    def broken(_: object) -> None:
        raise KeyError("cache")

    with Session(tmp_path / "run", peaks=broken) as prof:
        list(prof.steps(range(3)))
    bundle = open_bundle(prof.path)
    assert bundle.manifest.finished
    assert bundle.manifest.peaks is None
    assert any("peaks could not be looked up" in text for text in format_notices(bundle.notices))


# -- other profilers -------------------------------------------------------------------------------------------------------


def test_waits_for_another_profiler_to_stop(tmp_path: Path, trace_of: Callable[[Path], Any]) -> None:
    theirs = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with Session(tmp_path / "run") as prof:
        for index, _ in enumerate(prof.steps(range(40))):
            if index == 3:
                theirs.start()
            torch.ones(2).sum()
            if index == 12:
                theirs.stop()
    assert sum(event.key == "aten::ones" and event.count == 10 for event in theirs.key_averages()) == 1
    bundle = open_bundle(prof.path)
    assert bundle.manifest.windows[0].first_step == 15
    assert bundle.manifest.windows[0].steps == 6
    assert any("another torch profiler is running" in text for text in format_notices(bundle.notices))


@pytest.mark.parametrize("at", [5, 6, 9, 12, 14, 16])
def test_steps_aside_when_another_profiler_starts(tmp_path: Path, at: int) -> None:
    with Session(tmp_path / "run") as prof:
        for index, _ in enumerate(prof.steps(range(60))):
            if index == at:
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as theirs:
                    torch.ones(2).sum()
                assert "aten::sum" in {event.key for event in theirs.key_averages()}
            torch.ones(2).sum()
    bundle = open_bundle(prof.path)
    assert [(window.kind, window.steps) for window in bundle.manifest.windows] == [("timing", 6), ("sites", 2)]
    assert any("window was given up" in text for text in format_notices(bundle.notices))


# -- other processes -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_run_leaves_a_readable_bundle(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import sys, time, torch
        from gpudiag.capture import session
        session.SEGMENT_NS = 10**8
        with session.Session(sys.argv[1]) as prof:
            for step in prof.steps(iter(int, 1)):
                torch.ones(8).sum()
                time.sleep(0.01)
        """)
    )
    process = subprocess.Popen([sys.executable, str(script), str(tmp_path / "run")], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(list((tmp_path / "run").glob("trace/*-w1.json.gz"))) + len(list((tmp_path / "run").glob("steps/rank0/*"))) < 6:
        assert process.poll() is None, "the script ended by itself"
        assert time.monotonic() < deadline, "no segments were written"
        time.sleep(0.05)
    written = len(list((tmp_path / "run").glob("steps/rank0/*.json")))
    process.send_signal(signal.SIGKILL)
    process.wait()
    bundle = open_bundle(tmp_path / "run")
    assert not bundle.manifest.finished
    assert any("killed" in text for text in format_notices(bundle.notices))
    assert bundle.step_records["step"].to_list() == list(range(bundle.step_records.height))
    assert bundle.step_records.height >= written >= 2  # a segment holds a step at least, on a slow machine a few
    assert bundle.window("timing") is not None


@pytest.mark.slow
def test_polars_works_in_workers_forked_after_a_segment_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing with polars itself would start its threads here, and a worker forked afterwards would hang for ever."""
    script = textwrap.dedent("""
        import os, signal, sys
        from gpudiag.capture import session
        session.SEGMENT_NS = 0
        with session.Session(sys.argv[1]) as prof:
            list(prof.steps(range(30)))
        import polars as pl
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            pl.DataFrame({"a": [3, 1, 2]}).lazy().group_by("a").len().sort("a").collect()
            os._exit(0)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """)
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "run")], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_forked_child_does_not_write_into_the_bundle(tmp_path: Path) -> None:
    with Session(tmp_path / "run") as prof:
        for index, _ in enumerate(prof.steps(range(8))):
            if index == 4:
                child = os.fork()
                if child == 0:
                    try:
                        assert not prof.recording
                        (tmp_path / "child.txt").write_text("x")
                        gc.collect()
                        prof.__exit__(None, None, None)
                    finally:
                        os._exit(0 if prof._marks.take() is None or not prof.recording else 1)
                assert os.waitpid(child, 0)[1] == 0
    bundle = open_bundle(prof.path)
    assert bundle.step_records.height == 8
    assert not bundle.host_marks.filter(name="child.txt").height


# -- torch's own machinery ---------------------------------------------------------------------------------------------------


def test_compiled_code_and_scripts_with_autocast_work_inside(tmp_path: Path) -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x

    x = torch.ones(4, 4)
    torch._dynamo.reset()
    with Session(tmp_path / "run", sites=0) as prof:
        compiled = torch.compile(double, backend="eager", fullgraph=True)
        for _ in prof.steps(range(16)):
            assert compiled(x).dtype == torch.bfloat16
    manifest = open_bundle(prof.path).manifest
    assert manifest.settings.compiled is True
    assert manifest.windows[0].steps == 6


@pytest.mark.slow
def test_overhead_outside_windows_is_small(tmp_path: Path) -> None:
    batch = (torch.ones(4, 2), torch.ones(4))
    with Session(tmp_path / "run") as prof:
        list(prof.steps(range(30)))
        while prof._recording.background.busy:
            time.sleep(0.01)
        best = float("inf")
        for _ in range(5):
            begun = time.thread_time()
            for _ in prof.steps(batch for _ in range(2000)):
                pass
            best = min(best, (time.thread_time() - begun) / 2000)
    # ten times what a slow processor takes: a file or a call of the driver at each step would show; figures: make bench-capture
    assert best < 300e-6, f"{best * 1e6:.1f} us a step"
