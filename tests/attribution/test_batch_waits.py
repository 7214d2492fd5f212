"""Waits for a batch in recordings of Nsight Systems: by named ranges, call chains, pauses of the loop, timed waits; and what is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from nsysfile import NsysFile

from gpudiag.api import Report, diagnose

STEPS, LOAD_NS, WORK_NS = 12, 3_000_000, 1_060_000
PYTHON_NEXT: list[str | tuple[str, str]] = [
    "__poll",
    "select_poll_poll",
    "_PyEval_EvalFrameDefault",
    "slot_tp_iternext",
    "_PyEval_EvalFrameDefault",
    "Py_RunMain",
]
"""A wait of torch's DataLoader for its workers, as nsys 2023.4 recorded it with CPython 3.11."""


def _sample_chain(file: NsysFile, begin: int, end: int, chain: list[str | tuple[str, str]]) -> None:
    for moment in range(begin + 10_000, end, 990_000):
        file.sample(moment, chain)


def _wait_while_another_works(file: NsysFile, begin: int, end: int) -> None:
    file.os("poll", begin + 10_000, end - 90_000)
    file.call("cudaStreamWaitEvent", begin + 500_000, begin + 510_000, begin + 1, tid=2)


RECORDED: dict[str, Callable[[NsysFile, int, int], None]] = {
    "named": lambda file, begin, end: file.range("Data loading", begin, end),
    "waits of workers": lambda file, begin, end: file.os("poll", begin + 10_000, end - 90_000),
    "another thread works": _wait_while_another_works,
    "calls in __next__": lambda file, begin, end: file.os("poll", begin + 10_000, end - 90_000, PYTHON_NEXT),
    "samples in __next__": lambda *at: _sample_chain(*at, ["ImagingResample", "slot_mp_subscript", "slot_tp_iternext", "Py_RunMain"]),
    "samples in a decoder": lambda *at: _sample_chain(*at, [("decode_mcu", "/usr/lib/libjpeg.so.62"), ("0x7f", "[Unknown]")]),
    "files": lambda file, begin, end: file.os("read", begin + 10_000, end - 10_000),
    "sleep": lambda file, begin, end: file.os("clock_nanosleep", begin + 10_000, end - 10_000),
}
"""What is recorded of each wait, from its begin to its end."""


def training(kind: str, batch_bytes: int = 1 << 20) -> NsysFile:
    """Return steps that wait 3 ms for a batch, of which `kind` is recorded, and work 1.06 ms on it."""
    file = NsysFile()
    file.gpu()
    for step in range(STEPS):
        now = step * (LOAD_NS + WORK_NS) + LOAD_NS
        if kind in RECORDED:
            RECORDED[kind](file, now - LOAD_NS, now)
        if kind in ("pauses of the loop", "sleep"):
            file.range(f"Batch {step}", now, now + 41 * 25_000 + 15_000)
        if kind == "phases":
            file.range("Forward pass", now, now + 20 * 25_000)
            file.range("Backward pass", now + 20 * 25_000, now + 41 * 25_000 + 15_000)
        file.call("cudaMemcpyAsync", now, now + 5_000, now)
        file.copy("HtoD", "Pageable", "Device", now + 6_000, now + 20_000, now, bytes=batch_bytes)
        for number in range(40):
            now += 25_000
            file.call("cudaLaunchKernel_v7000", now, now + 5_000, now)
            file.kernel(f"gemm_{number}", now + 6_000, now + 22_000, now)
        now += 25_000
        file.call("cudaMemcpyAsync", now, now + 5_000, now)
        file.copy("DtoH", "Device", "Pageable", now + 6_000, now + 9_000, now, bytes=4)
        file.call("cudaStreamSynchronize_v3020", now + 6_000, now + 10_000, now + 1)
    return file


def report_on(kind: str, tmp_path: Path) -> Report:
    return diagnose(training(kind).write(tmp_path / "run.sqlite"))


@pytest.mark.parametrize(
    ("kind", "place", "least_ns"),
    [
        ("named", "Data loading", 3_000_000),
        ("pauses of the loop", "between two ranges 'Batch N'", 2_980_000),
        ("phases", "before the range 'Forward pass'", 2_980_000),
        ("waits of workers", "poll: a timed wait for another thread or process in most steps", 2_900_000),
        ("calls in __next__", "poll in __next__", 2_900_000),
        ("samples in __next__", "at work in __next__", 2_970_000),
        ("samples in a decoder", "at work in a decoder", 2_970_000),
    ],
)
def test_a_planted_wait_for_the_loader_is_found_and_bounded(tmp_path: Path, kind: str, place: str, least_ns: int) -> None:
    data = report_on(kind, tmp_path).data
    assert data.steps.median_ns == LOAD_NS + WORK_NS
    buckets = data.breakdown.buckets_ns
    steps = data.breakdown.wall_ns / (LOAD_NS + WORK_NS)
    assert least_ns <= buckets.idle_data / steps <= LOAD_NS + 20_000  # a pause holds what the range leaves out
    first = data.findings[0]
    assert first.rule == "INP-01"
    assert first.ceiling is not None
    assert least_ns <= first.ceiling.time_ns / steps <= LOAD_NS + 20_000
    assert place in {where.what for where in first.where}


@pytest.mark.parametrize("kind", ["nothing", "sleep", "another thread works"])
def test_what_nothing_tells_and_what_is_no_batch_stays_unexplained(tmp_path: Path, kind: str) -> None:
    report = report_on(kind, tmp_path)
    assert report.data.breakdown.buckets_ns.idle_data == 0
    assert report.data.breakdown.buckets_ns.idle_unexplained > 0.5 * report.data.breakdown.wall_ns
    outcome = next(rule for rule in report.data.rules if rule.id == "INP-01")
    assert outcome.status == "not_applicable"
    assert "nsys profile --trace=cuda,nvtx,osrt --sample=process-tree" in " ".join(report.text(width=10_000).split())


@pytest.mark.parametrize(
    ("name", "loads"),
    [
        ("dataloader", True), ("next(train_loader)", True), ("data_parallel", False),
        *(pytest.param(*example, marks=pytest.mark.slow) for example in (
            ("load_batch 3", True), ("get next batch", True), ("wait for data", True), ("Batch loading", True), ("data", True),
            ("train/fetch", True), ("preprocessing", True), ("step 3: collate", True), ("train batch 3", False),
            ("## wait_for_batch ##", False), ("load_state_dict", False), ("data to device", False),
        )),
    ],
)  # fmt: skip
def test_names_of_ranges_that_load_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, loads: bool) -> None:
    monkeypatch.setitem(RECORDED, "range", lambda file, begin, end: file.range(name, begin, end))
    assert (report_on("range", tmp_path).data.breakdown.buckets_ns.idle_data > 0) == loads


@pytest.mark.parametrize("kind", ["pauses of the loop", "waits of workers"])
def test_a_server_waits_for_requests_and_not_for_a_loader(tmp_path: Path, kind: str) -> None:
    """Nothing trains, and each pass gets some token ids."""
    data = diagnose(training(kind, batch_bytes=512).write(tmp_path / "run.sqlite")).data
    assert data.breakdown.buckets_ns.idle_data == 0
    assert data.breakdown.buckets_ns.idle_unexplained > 0.5 * data.breakdown.wall_ns


def test_a_file_that_the_training_thread_reads_is_said_as_such(tmp_path: Path) -> None:
    data = report_on("files", tmp_path).data
    assert data.breakdown.buckets_ns.idle_io == pytest.approx(data.breakdown.wall_ns * 2_980_000 / (LOAD_NS + WORK_NS), rel=0.01)
