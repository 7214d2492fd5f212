"""The frame of a report: how long a step is, whose work holds the device, on which clock it stands. Planted faults with known answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kept
import msgspec
import numpy as np
import polars as pl
import pytest
from handmade import A100_PROPERTIES, Event, call, kernel, mark, op, steps, trace, write
from nsysfile import NsysFile

from gpudiag import api
from gpudiag.attribution.device import LATE_NOISE_NS, align_clocks
from gpudiag.model.notices import NoticeCode
from gpudiag.model.trace import Trace
from gpudiag.queries import whatif

EVIDENCE = Path(__file__).resolve().parents[2] / "shared" / "evidence"
MS = 1000.0
"""In microseconds."""


def report(path: Path, *events: Event, **header: Any) -> dict[str, Any]:
    written = write(path / "trace.json", *events, deviceProperties=[A100_PROPERTIES], **header)
    found: dict[str, Any] = msgspec.json.decode(api.diagnose(str(written)).json())
    return found


def host_ahead(takes: float, count: int = 6) -> list[Event]:
    """Return steps whose marks lie 2 ms apart and whose kernels take `takes` ms each, one after the other."""
    events, free = steps(*(2 * MS * row for row in range(count + 1))), 0.0
    for row in range(count):
        start = max(2 * MS * row + 20, free)
        free = start + takes * MS
        events += [op("aten::mm", 2 * MS * row + 5, 2 * MS * row + 50, [[64, 64], [64, 64]])]
        events += [call(2 * MS * row + 10, row + 1), kernel(start, free, row + 1)]
    return events


@pytest.mark.parametrize(("takes", "step"), [(8.0, 8.0), (1.9, 2.0)])
def test_a_step_is_as_long_as_the_device_takes_where_the_host_runs_ahead(tmp_path: Path, takes: float, step: float) -> None:
    found = report(tmp_path, *host_ahead(takes))
    assert found["breakdown"]["wall_ns"] / found["steps"]["count"] == pytest.approx(step * 1e6, rel=0.01)
    codes = [notice["code"] for notice in found["trust"]["notices"]]
    assert (NoticeCode.STEPS_AT_DEVICE_PACE in codes) == (takes > step - 0.1)
    assert sum(found["breakdown"]["buckets_ns"].values()) == found["breakdown"]["wall_ns"]


@pytest.mark.parametrize("encoder", [False, True])
def test_only_work_that_no_step_launched_is_said_to_lie_in_none(tmp_path: Path, encoder: bool) -> None:
    """The GPU runs one step behind the host all the time: a fifth of its time lies after the last mark."""
    events = [*steps(20 * MS, 30 * MS, 40 * MS, 50 * MS, 60 * MS), op("aten::mm", 0, 10, [[64, 64], [64, 64]])]
    for row, at in enumerate((10, 20, 30, 40, 50)):
        events += [call(at * MS + 100, row + 1), kernel((at + 9) * MS, (at + 18.9) * MS, row + 1)]
    if encoder:
        events += [call(61 * MS, 6), kernel(69 * MS, 89 * MS, 6, "image_encoder")]
    found = [notice for notice in report(tmp_path, *events)["trust"]["notices"] if notice["code"] == NoticeCode.DEVICE_TIME_OUTSIDE]
    assert [notice["params"]["share"] for notice in found] == ([pytest.approx((20 + 1) / 69.5, abs=0.01)] if encoder else [])


def rounds(first: float, count: int, takes: float, number: int, passes: str = "fb") -> list[Event]:
    """Return rounds of 10 ms: passes, forward or backward, of four ops with kernels; a round's kernels take `takes` ms together."""
    events, each, many = [], 10 * MS / (4 * len(passes)), 4 * len(passes)
    for row in range(count * many):
        start, name = first + each * row, f"{'backward' if passes[row % many // 4] == 'b' else 'forward'}_{row % 4}"
        events += [op(f"aten::{name}", start + 10, start + 0.9 * each, [[64, 64]]), call(start + 20, number + row)]
        events += [kernel(start + 40, start + 40 + takes / many * MS, number + row, name)]
    return events


@pytest.mark.parametrize(("marked", "source"), [("validate ", "period"), ("ProfilerStep#", "period"), ("both", "ProfilerStep marks")])
def test_the_steps_are_the_unit_that_holds_most_of_the_devices_time(tmp_path: Path, marked: str, source: str) -> None:
    """Five annotated forward passes of 4 ms of kernels, then thirty trained batches of 8 ms that nobody annotated (or all are marked)."""
    events = [*rounds(0, 5, 4, 1, "f"), *rounds(50 * MS, 30, 8, 1000)]
    name, named = ("ProfilerStep#", 35) if marked == "both" else (marked, 5)
    events += [mark(f"{name}{row}", 10 * MS * row, 10 * MS * (row + 1) - 1) for row in range(named)]
    found = report(tmp_path, *events)
    assert found["steps"]["source"].startswith(source)
    assert found["steps"]["count"] >= 27
    assert NoticeCode.DEVICE_TIME_OUTSIDE not in [one["code"] for one in found["trust"]["notices"]]


def test_work_that_the_first_step_alone_does_is_said_to_lie_outside(tmp_path: Path) -> None:
    """Ten steps of 4 ms of kernels; the first, which is left out, has 26 ms more: 26 of 66 ms."""
    events = [*rounds(40 * MS, 10, 4, 1), *steps(0, *(50 * MS + 10 * MS * row for row in range(10)))]
    events += [op("aten::encode", 10, 1000, [[64, 64]]), call(20, 999), kernel(100, 26.1 * MS, 999, "encoder")]
    found = report(tmp_path, *events)
    (share,) = [one["params"]["share"] for one in found["trust"]["notices"] if one["code"] == NoticeCode.DEVICE_TIME_OUTSIDE]
    assert share == pytest.approx(26 / 66, abs=0.01)


@pytest.mark.parametrize("tail", [0.0, 30.0])
def test_the_tail_after_the_last_activity_belongs_to_no_step(tmp_path: Path, tail: float) -> None:
    found = report(tmp_path, *rounds(0, 5, 8, 1), *steps(*(10 * MS * row for row in range(5)), 50 * MS + tail * MS))
    assert found["breakdown"]["wall_ns"] == pytest.approx(50e6, rel=0.02)


def test_work_carried_into_the_recording_is_no_part_of_its_first_step(tmp_path: Path) -> None:
    late = [event | {"ts": event["ts"] + 30 * MS} if event["cat"] == "kernel" else event for event in host_ahead(8.0)]
    found = report(tmp_path, kernel(0, 30 * MS, None), *late)
    assert found["breakdown"]["wall_ns"] / found["steps"]["count"] == pytest.approx(8e6, rel=0.01)


def test_a_utilisation_above_the_peak_is_a_fault_that_is_said(tmp_path: Path) -> None:
    events = [op("aten::mm", 5, 50, [[8192, 8192], [8192, 8192]]), call(10, 1), kernel(20, 120, 1, "ampere_sgemm")]
    found = report(tmp_path, *steps(0, 200), *events)  # 1.1 TFLOP in 0.2 ms
    assert found["mfu"] is None
    (said,) = [text for text in found["trust"]["warnings"] if "utilisation" in text]
    assert "cannot be" in said


def test_a_device_that_waits_for_work_outside_the_recording_is_not_idle(tmp_path: Path) -> None:
    busy = [event for row in range(2, 40) for event in (call(10 * row, row), kernel(90 * MS + row * MS, 91 * MS + row * MS, row))]
    found = report(tmp_path, op("aten::mm", 0, 500, [[64, 64], [64, 64]]), *busy)
    buckets = found["breakdown"]["buckets_ns"]
    assert buckets["outside_recording"] == pytest.approx(92e6, rel=0.01)
    assert sum(ns for name, ns in buckets.items() if name.startswith("idle_")) < 1e6


@pytest.mark.parametrize("seen", [False, True])
def test_a_wait_for_the_device_while_nothing_recorded_runs_is_for_work_outside(tmp_path: Path, seen: bool) -> None:
    """50 of 100 ms in a wait for the device; where a kernel of it was recorded the time is that kernel's."""
    events = [call(10, 1), kernel(20, 50 * MS, 1, "first")] if seen else []
    events += [op("aten::mm", 0, 90, [[64, 64], [64, 64]]), call(100, None, api="cudaDeviceSynchronize", end=50 * MS + 5)]
    events += [op("aten::mm", 50 * MS + 20, 51 * MS, [[64, 64], [64, 64]]), call(50 * MS + 30, 2), kernel(50 * MS + 40, 100 * MS, 2)]
    buckets = report(tmp_path, *steps(0, 100 * MS), *events)["breakdown"]["buckets_ns"]
    assert buckets["outside_recording"] == pytest.approx(0 if seen else 50e6, rel=0.01)
    assert sum(ns for name, ns in buckets.items() if name.startswith("idle_")) < 0.2e6


def test_setting_up_the_device_is_a_cause_of_its_own(tmp_path: Path) -> None:
    first = call(100, None, api="cudaDeviceGetStreamPriorityRange", end=900 * MS)
    found = report(
        tmp_path, first, call(901 * MS, 1), kernel(901 * MS + 10, 950 * MS, 1), op("aten::mm", 0, 902 * MS, [[64, 64], [64, 64]])
    )
    assert found["breakdown"]["buckets_ns"]["idle_init"] == pytest.approx(900e6, rel=0.01)
    assert not [one for one in found["findings"] if one["rule"] == "OVH-01"]


def test_the_capture_of_a_graph_is_no_step_that_the_host_holds_up(tmp_path: Path) -> None:
    """80 of 100 ms: launches between begin and end of a capture are recorded into the graph, and nothing runs."""
    border = [call(10 * MS, None, api="cudaStreamBeginCapture"), call(90 * MS, None, api="cudaStreamEndCapture")]
    layers = [op("aten::mm", (10 + row) * MS + 100, (11 + row) * MS - 100, [[64, 64], [64, 64]]) for row in range(79)]
    around = [call(row * MS, row + 1) for row in (1, 95)] + [kernel(row * MS + 10, (row + 4) * MS, row + 1) for row in (1, 95)]
    found = report(tmp_path, op("aten::mm", 0, MS, [[64, 64], [64, 64]]), *border, *layers, *around, call(100 * MS, None))
    assert found["breakdown"]["buckets_ns"]["idle_compile"] == pytest.approx(80e6, rel=0.01)
    told = {one["rule"]: one["severity"] for one in found["findings"]}
    assert told["OVH-05"] == "info"
    assert not told.keys() & {"OVH-01", "OVH-08"}


def what_if(path: Path, *settings: str) -> float:
    """Return the share of a step that these settings save."""
    (found,) = whatif(str(path), list(settings)).what_ifs
    return found.share


@pytest.mark.parametrize("early", [0.0, 5.0, 500.0])
def test_kernels_before_a_copy_hold_up_the_host_that_copies(tmp_path: Path, early: float) -> None:
    """Steps of 60 ms of kernels, awaited by a copy that returns `early` us before it is over, and of 40 ms of Python after it."""
    events = steps(*(100 * MS * row for row in range(5)))
    for row in range(4):
        start, number = 100 * MS * row, 2 * row + 1
        events += [op("aten::mm", start, start + 50, [[64, 64], [64, 64]]), call(start + 10, number)]
        events += [kernel(start + 30, start + 60 * MS, number), op("aten::copy_", start + 60, start + 60 * MS + 20)]
        events += [call(start + 70, number + 1, api="hipMemcpyWithStream", end=start + 60 * MS + 20)]
        events += [kernel(start + 60 * MS + 5, start + 60 * MS + 20 + early, number + 1, "Memcpy HtoD (Host -> Device)")]
        events += [op("aten::max", start + 60 * MS + 30, start + 100 * MS - 10)]
    path = write(tmp_path / "trace.json", *events, deviceProperties=[A100_PROPERTIES])
    assert what_if(path, "kernel:gemm=0.5") == pytest.approx(0.3, abs=0.005)


def test_idle_that_nothing_explains_stays_when_python_gets_faster(tmp_path: Path) -> None:
    """Steps of 4 ms of ops and launches, 0.24 of it kernels, and of 6 ms in which the host shows nothing; half of its time is 2 ms.

    Without any, no more is gained than the time in which the GPU waited for the host.
    """
    events = steps(*(10 * MS * row for row in range(5)))
    for row in range(160):
        start = 10 * MS * (row // 40) + 100 * (row % 40)
        events += [
            op("aten::mm", start, start + 95, [[64, 64], [64, 64]]),
            call(start + 80, row + 1),
            kernel(start + 90, start + 96, row + 1),
        ]
    path = write(tmp_path / "trace.json", *events, deviceProperties=[A100_PROPERTIES])
    found = json.loads(api.diagnose(str(path)).json())
    assert found["breakdown"]["buckets_ns"]["idle_unexplained"] == pytest.approx(24e6, rel=0.02)
    assert what_if(path, "host=0.5") == pytest.approx(0.2, abs=0.01)
    assert what_if(path, "host=0", "launch=0") == pytest.approx(0.376, abs=0.001)
    path_share = {row["kind"]: row["share"] for row in found["critical_path"]}
    assert path_share["unexplained"] == pytest.approx(0.6, abs=0.01)


@pytest.mark.parametrize(("memory", "takes", "fixed"), [("Pageable", 10.0, True), ("Pinned", 4.0, False)])
def test_copies_of_pageable_memory_are_found_both_ways_and_pinned_ones_left(tmp_path: Path, memory: str, takes: float, fixed: bool) -> None:
    """100 MB each way one after the other; A100: PCIe 4 x16 brings them over in 3.7 ms each, both at once, at 85 % of 31.5 GB/s."""
    events = steps(*(2 * takes * MS * row for row in range(8)))
    for row in range(14):
        start, kinds = takes * MS * row, (f"HtoD ({memory} -> Device)", f"DtoH (Device -> {memory})")
        events += [op("aten::copy_", start + 5, start + takes * MS - 5), call(start + 10, row + 1, api="cudaMemcpyAsync", end=start + 20)]
        events += [kernel(start + 15, start + takes * MS - 8, row + 1, f"Memcpy {kinds[row % 2]}", stream=7 + row % 2, bytes=100_000_000)]
        if fixed:
            events[-2]["dur"] = takes * MS - 17  # the call waits for its copy
        events += [call(start + takes * MS - 6, None, api="cudaStreamSynchronize", end=start + takes * MS - 5)]
    found = {one["rule"]: one for one in report(tmp_path, *events)["findings"]}
    sold = [one["ceiling"]["share"] for one in found.values() if "pin-memory" in one["fixes"] and one["severity"] != "info"]
    assert ("INP-03" in found) == bool(sold) == fixed
    if fixed:
        assert found["INP-03"]["ceiling"]["share"] == pytest.approx(1 - 3.73 / 20, abs=0.02)


def test_a_sync_is_charged_up_to_when_the_next_work_was_issued(tmp_path: Path) -> None:
    """Each step: a kernel of 20 ms that is awaited, 1 ms of Python, then a kernel that starts 5 ms after its launch."""
    events = steps(*(30 * MS * row for row in range(5)))
    for row in range(4):
        start, number = 30 * MS * row, 2 * row + 1
        events += [op("aten::mm", start, start + 50, [[64, 64]]), call(start + 10, number), kernel(start + 20, start + 20 * MS, number)]
        events += [call(start + 60, None, api="cudaStreamSynchronize", end=start + 20 * MS + 5)]
        events += [op("aten::nonzero", start + 20 * MS + 10, start + 21 * MS + 20, [[64]]), call(start + 21 * MS, number + 1)]
        events += [op("aten::add", start + 21 * MS + 30, start + 30 * MS - 10, [[64]])]
        events += [kernel(start + 26 * MS, start + 30 * MS, number + 1)]
    buckets = report(tmp_path, *events)["breakdown"]["buckets_ns"]
    assert buckets["idle_sync"] == pytest.approx(4 * 1e6, rel=0.1)
    assert buckets["idle_unexplained"] == pytest.approx(4 * 5e6, rel=0.02)


def synced(moved: float = 0.0, drift: float = 0.0, count: int = 200) -> Trace:
    """Return launches of kernels, each read back by the host, on a device clock that is `moved` ms and drifts by `drift`."""
    events = []
    for row in range(count):
        start = row * MS
        for at, end, number in ((start + 8, start + 300, 2 * row + 1), (start + 301, start + 310, 2 * row + 2)):
            by = moved * MS + drift * start
            name = "gemm" if number % 2 else "Memcpy DtoH (Device -> Pageable)"
            events += [kernel(at + by, end + by, number, name)]
        events += [call(start, 2 * row + 1), call(start + 10, 2 * row + 2, api="cudaMemcpyAsync", end=start + 20)]
        events += [call(start + 21, None, api="cudaStreamSynchronize", end=start + 315)]
    return trace(*steps(0, count * MS), *events)


def measure_delays(found: Trace) -> Any:
    """Return how long after its call each piece of work begins, in ns."""
    calls = found.launches.select("correlation", called_ns="start_ns")
    both = found.kernels.join(calls, on="correlation").sort("correlation")
    return (both["start_ns"] - both["called_ns"]).to_numpy()


@pytest.mark.parametrize(("moved", "drift"), [(300.0, 0.0), (-300.0, 0.0), (5.0, 0.0), (300.0, 2e-4), (-20.0, -5e-4)])
def test_a_clock_is_moved_back_whichever_way_it_is_wrong(moved: float, drift: float) -> None:
    right, (notice, *_) = align_clocks(synced(moved, drift))
    after = [measure_delays(found) for found in (right, synced())]
    assert np.abs(after[0] - after[1]).max() < LATE_NOISE_NS
    assert notice.code == (NoticeCode.CLOCK_DRIFT if drift else NoticeCode.CLOCK_BOUNDED)


def ended(moved: float, other: float = 0.0) -> Trace:
    """Return launches of kernels that begin 5 us later, on a clock that is `moved` ms; one wait for the device ends the recording.

    `other`: how many ms after its return a kernel of a second device ends, which another thread uses.
    """
    events = [call(MS * row, row + 1) for row in range(50)]
    events += [kernel((row + moved) * MS + 5, (row + moved) * MS + 400, row + 1) for row in range(50)]
    events += [call(50 * MS, None, api="cudaDeviceSynchronize", end=50 * MS + 900)]
    if other:
        events += [call(49 * MS, 90, tid=2), kernel(49 * MS + 9, 50 * MS + 900 + other * MS, 90, device=1)]
        events += [call(49 * MS + 20, 91, tid=2), kernel(50 * MS, 50 * MS + 900 + other * MS, 91, device=1, stream=8)]
    return trace(*steps(0, 60 * MS), *events)


@pytest.mark.parametrize("moved", [300.0, -300.0, 3.0])
def test_one_wait_at_the_end_tells_a_clock_that_is_late_by_all_that_ends_after_it(moved: float) -> None:
    right, (notice,) = align_clocks(ended(moved))
    assert np.abs(measure_delays(right)).max() < 1_000  # launches on an idle device: their work begins at once
    assert notice.code == NoticeCode.CLOCK_BOUNDED


def test_a_wait_for_one_device_says_nothing_of_another() -> None:
    made = ended(0.0, other=5.0)
    assert align_clocks(made) == (made, ())


def test_clocks_that_agree_stay() -> None:
    made = synced()
    assert align_clocks(made) == (made, ())


@pytest.mark.slow
@pytest.mark.parametrize("moved_ns", [300_000_000, -300_000_000])
def test_a_planted_shift_of_a_real_recording_is_found(traces: Path, moved_ns: int) -> None:
    made = kept.tables(traces / "a100_dlrm_train_rank3of8.json.gz")  # it reads values, so both bounds are there
    moved = made.kernels.with_columns(pl.col("start_ns") + moved_ns, pl.col("end_ns") + moved_ns)
    right, notices = align_clocks(msgspec.structs.replace(made, kernels=moved))
    assert notices
    off = right.kernels["start_ns"].to_numpy() - made.kernels["start_ns"].to_numpy()
    assert np.abs(off).max() < LATE_NOISE_NS


@pytest.mark.parametrize("correlated", [True, False])
def test_external_ids_tie_kernels_to_calls_where_nothing_else_does(correlated: bool) -> None:
    def numbered(event: Event, number: int, external: int) -> Event:
        event["args"] |= {"External id": external} | ({"correlation": number} if correlated else {})
        return event

    events = [numbered(call(10.0 * row, None), row, 70) for row in (1, 2)] if correlated else []
    events += [] if correlated else [numbered(call(10.0 * row, None), row, 70 + row) for row in (1, 2)]
    events += [numbered(kernel(10.0 * row + 5, 10.0 * row + 9, None), row, 70 if correlated else 70 + row) for row in (1, 2)]
    made = trace(*steps(0, 100), *events)
    assert made.kernels["correlation"].to_list() == made.launches["correlation"].to_list() == ([1, 2] if correlated else [71, 72])


def test_fp32_products_are_found_by_the_names_of_kernels(tmp_path: Path) -> None:
    """A recording of Nsight Systems without NVTX ranges: 90 % of the time in sgemm on an A100, which has TF32."""
    file = NsysFile("2024")
    file.gpu("NVIDIA A100-SXM4-80GB")
    at = 0
    for row in range(200):
        name, length = ("ampere_sgemm_128x64_tn", 900_000) if row % 2 else ("vectorized_elementwise_kernel", 100_000)
        file.call("cudaLaunchKernel", row * 10_000, row * 10_000 + 5_000, row + 1)
        file.kernel(name, at + 20_000, at + 20_000 + length, row + 1)
        at += length
    found: dict[str, Any] = msgspec.json.decode(api.diagnose(str(file.write(tmp_path / "run.sqlite"))).json())
    (slow,) = [one for one in found["findings"] if one["rule"] == "CMP-01"]
    assert slow["fixes"] == ["tf32"]
    assert slow["ceiling"]["share"] == pytest.approx(0.9 * (1 - 1 / 8), abs=0.03)  # TF32 has 8 times the peak of fp32 there


def test_steps_at_the_pace_of_the_device_leave_out_nothing() -> None:
    """Ten launches of a graph within 6 ms, which run for 7.8 s: the host's marks cover next to nothing of that."""
    path = EVIDENCE / "nsys" / "a100_gpt2.7b_compile_graph.sqlite"
    if not path.is_file():
        pytest.skip(f"no recordings with known answers here: {path} does not exist (third-party data, not part of the project)")
    found = msgspec.json.decode(api.diagnose(str(path)).json())
    codes = [notice["code"] for notice in found["trust"]["notices"]]
    assert found["breakdown"]["wall_ns"] / found["steps"]["count"] == pytest.approx(781e6, rel=0.01)
    assert NoticeCode.STEPS_AT_DEVICE_PACE in codes
    assert NoticeCode.OUTSIDE_STEPS not in codes
