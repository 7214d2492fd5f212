"""Bundles with several windows: which is analysed, and what is said of the others."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from handmade import op, steps, write
from noticewords import format_notices

from gpudiag import api
from gpudiag.capture.session import Session
from gpudiag.errors import InputError, UsageError
from gpudiag.inputs import resolve_input
from gpudiag.model.bundle import Manifest, Window

SLOW = "step time rose 31 %"


def bundle(folder: Path, *windows: tuple[int, str, int, int, str], told: bool = True) -> Path:
    """Write a bundle by hand from (index, kind, first step, steps, trigger); 2 steps are planned in each window."""
    (folder / "trace").mkdir(parents=True)
    made = []
    for index, kind, first, count, trigger in windows:
        name = f"trace/rank0-w{index}.json.gz"
        length = 10 * (index + 1)
        events: list[dict[str, Any]] = [*steps(0, 50, 100), op("aten::mm", 10, 10 + length, [[64, 32], [32, 16]])]
        (folder / name).write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
        made.append(Window(0, index, kind, name, first, count, True, kind == "sites", trigger, 2))  # type: ignore[arg-type]
    manifest = Manifest(finished=told, windows=tuple(made) if told else (), steps=50)
    (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    return folder


THREE = ((0, "timing", 7, 2, "schedule"), (1, "sites", 11, 2, "schedule"), (2, "timing", 40, 2, SLOW), (3, "timing", 60, 1, "step 60"))


def about(path: Path, window: int | None = None) -> tuple[str, list[str]]:
    found = resolve_input(str(path), None, window)
    return Path(found.trace).name, [text for text in format_notices(found.notices) if "--window" in text or "of the site window" in text]


def test_the_first_complete_timing_window_and_how_to_see_the_others(tmp_path: Path) -> None:
    assert about(bundle(tmp_path / "b", *THREE)) == (
        "rank0-w0.json.gz",
        [
            "3 timing windows: window 0 (steps 7 to 8, on schedule) is analysed; "
            "--window 2: steps 40 to 41, because step time rose 31 %; --window 3: step 60, asked for at step 60"
        ],
    )


def test_one_that_is_asked_for(tmp_path: Path) -> None:
    name, notes = about(bundle(tmp_path / "b", *THREE), 2)
    assert name == "rank0-w2.json.gz"
    assert notes[0].startswith("3 timing windows: window 2 (steps 40 to 41, because step time rose 31 %) is analysed; --window 0: steps 7")
    report = api.diagnose(tmp_path / "b", window=2).data
    assert [row.kernel_ns for row in report.ops if row.name == "aten::mm"] == [30_000]
    assert notes[0] in report.trust.warnings


def test_an_incomplete_window_is_passed_over_for_a_complete_one(tmp_path: Path) -> None:
    path = bundle(tmp_path / "b", (0, "timing", 7, 1, "schedule"), (2, "timing", 40, 2, "signal SIGUSR1"))
    name, notes = about(path)
    assert name == "rank0-w2.json.gz"
    assert notes == [
        "2 timing windows: window 2 (steps 40 to 41, on signal SIGUSR1) is analysed; --window 0: step 7, on schedule",
    ]


def test_a_bundle_with_one_timing_window_says_nothing(tmp_path: Path) -> None:
    assert about(bundle(tmp_path / "b", *THREE[:2]))[1] == []


def test_the_site_window_may_be_asked_for_too(tmp_path: Path) -> None:
    path = bundle(tmp_path / "b", *THREE[:2])
    name, notes = about(path, 1)
    assert name == "rank0-w1.json.gz"
    assert notes == [
        "1 timing window: site window 1 (steps 11 to 12, on schedule) is analysed; --window 0: steps 7 to 8, on schedule",
        "times are those of the site window, which Python stacks slow down",
    ]
    assert resolve_input(str(path), None, 1).sites is None


def test_windows_of_a_killed_run_are_told_by_their_files(tmp_path: Path) -> None:
    path = bundle(tmp_path / "b", *THREE, told=False)
    name, notes = about(path)
    assert name == "rank0-w0.json.gz"
    assert notes[0].startswith("3 timing windows: window 0 (steps not known) is analysed; --window 2: steps not known")
    assert Path(str(resolve_input(str(path), None).sites)).name == "rank0-w1.json.gz"


def test_a_window_that_is_not_there(tmp_path: Path) -> None:
    path = bundle(tmp_path / "b", *THREE)
    with pytest.raises(InputError, match=r"no window 7 in this bundle \(it holds windows 0, 1, 2, 3\)"):
        api.diagnose(path, window=7)
    with pytest.raises(InputError, match="it holds no window"):
        api.diagnose(bundle(tmp_path / "empty"), window=0)


def test_a_plain_trace_has_no_windows(tmp_path: Path) -> None:
    trace = write(tmp_path / "rank0.json", *steps(0, 50, 100))
    for path in (trace, tmp_path):
        with pytest.raises(UsageError, match="--window chooses from a bundle"):
            api.diagnose(path, window=0)


def test_a_rank_that_did_not_finish_is_named(tmp_path: Path) -> None:
    path = bundle(tmp_path / "b", *THREE[:1])
    for rank, finished in ((1, True), (2, False)):
        (path / f"manifest-rank{rank}.json").write_bytes(msgspec.json.encode(Manifest(finished=finished)))
    warnings = format_notices(resolve_input(str(path), None).notices)
    assert "rank 2 did not finish: still recording, or killed" in warnings
    assert "rank 0 only; not analysed: ranks 1, 2" in warnings


def why_none(path: Path) -> str:
    with pytest.raises(InputError, match="no window was recorded") as failure:
        resolve_input(str(path), None)
    return str(failure.value)


@pytest.mark.parametrize(
    ("warnings", "told"),
    [
        ((), "none was planned, and nothing asked for one"),
        (
            ("timing window: 0 of 6 steps recorded (too short)", "sites window: 0 of 2 steps recorded (too short)"),
            "(50 steps): timing window: 0 of 6 steps recorded (too short) (record more steps, about 20",  # the first one alone
        ),
        (("profiling was switched off: OSError", "no memory was recorded"), "(50 steps): profiling was switched off: OSError"),
    ],
)
def test_a_bundle_without_windows_says_why(tmp_path: Path, warnings: tuple[str, ...], told: str) -> None:
    path = bundle(tmp_path / "b")
    manifest = Manifest(finished=True, steps=50, warnings=warnings)
    (path / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    assert told in why_none(path)


@pytest.mark.needs("torch")
def test_a_recording_without_windows_tells_what_its_records_say_of_the_run(tmp_path: Path) -> None:
    with Session(tmp_path / "run", repeat=0, on_slow=0.5) as prof:
        list(prof.steps(range(30)))
    text = why_none(prof.path)
    assert "none was planned" in text
    assert "30 steps: an unprofiled one takes" in text


@pytest.mark.needs("torch")
def test_a_recording_that_was_switched_off_says_so_and_keeps_its_records(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="switched off"), Session(tmp_path / "run", skip=100) as prof:  # noqa: PT031
        for index, _ in enumerate(prof.steps(range(30))):
            if index == 20:
                prof._fail(OSError("gone"))
    assert prof._recording.background.join(10)
    text = why_none(prof.path)
    assert "recording was switched off, training goes on: OSError" in text
    assert "20 steps: an unprofiled one takes" in text
