"""The strips show what was planted: values in their units, holes, limits, what held the clocks, and no more points than fit a screen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from growingbundle import Bundle, gpu_info

pytest.importorskip("dash", reason="the dashboard's libraries are not installed: pip install gpudiag[dashboard]")
from gpudiag_dashboard import telemetry_figure
from gpudiag_dashboard.telemetry_figure import MEMORY_STRIPS, STRIPS, Strip, StripFigure, draw_strips

from gpudiag.recordings.live import GrowingRecording
from gpudiag.report.telemetry_chart import BINS

SECOND = 10**9
LIMITS = {"power_limit_w": 700.0, "max_sm_clock_mhz": 1980.0, "memory_bytes": 80e9}


def strips(path: Path, *, count: int = 100, kind: str = "step", chosen: tuple[Strip, ...] = STRIPS, **columns: list[float]) -> StripFigure:
    bundle = Bundle(path / "run", telemetry=gpu_info())
    bundle.steps(count)
    times = [k * SECOND // 20 for k in range(2 * count)]
    bundle.samples(times, **{name: values * len(times) if len(values) == 1 else values for name, values in columns.items()})
    return draw_strips(GrowingRecording(bundle.path).read(), kind, LIMITS, chosen)  # type: ignore[arg-type]


def titles(found: StripFigure) -> list[str]:
    assert found.figure is not None
    return [note["text"] for note in found.figure["layout"]["annotations"]]


def trace(found: StripFigure, name: str) -> dict:
    assert found.figure is not None
    return next(one for one in found.figure["data"] if one.get("name") == name)


def test_each_column_is_a_strip_in_its_unit_with_its_limit(tmp_path: Path) -> None:
    found = strips(tmp_path, power_w=[650.0], mem_used_bytes=[60_000_000_000], temperature_c=[70.0], sm_clock_mhz=[500.0])
    assert titles(found) == [
        "Time of a step (ms)",
        "SM clock (MHz), limit 1,980 MHz",
        "Power (W), limit 700 W",
        "GPU temperature (\u00b0C)",
        "Device memory in use (GB), limit 80.0 GB",
    ]
    assert set(trace(found, "Device memory in use")["y"]) == {60.0}
    assert set(trace(found, "step time")["y"]) == {100.0}
    assert found.figure is not None
    levels = [shape["y0"] for shape in found.figure["layout"]["shapes"] if shape["type"] == "line"]
    assert levels == [700.0, 80.0]  # a clock of 500 MHz would lie on the ground beside a limit of 1,980


def test_memory_over_the_run_is_of_the_device_the_allocator_and_the_host(tmp_path: Path) -> None:
    found = strips(
        tmp_path, chosen=MEMORY_STRIPS, mem_used_bytes=[60_000_000_000], torch_reserved_bytes=[40_000_000_000],
        torch_allocated_bytes=[9_000_000_000, 31_000_000_000] * 100, rss_bytes=[5_000_000_000],
    )  # fmt: skip
    assert titles(found) == [
        "Device memory in use (GB), limit 80.0 GB",
        "Held by PyTorch's allocator (GB), limit 80.0 GB",
        "In tensors of this process, when sampled (GB), limit 80.0 GB",
        "Resident memory of the process (GB)",
    ]
    assert {9.0, 31.0} == set(trace(found, "In tensors of this process, when sampled")["y"])


def test_what_held_the_clocks_stands_below_them(tmp_path: Path) -> None:
    masks = [0x4] * 50 + [0x1] * 150
    found = strips(tmp_path, sm_clock_mhz=[1500.0], power_w=[600.0], clock_event_reasons=masks)
    assert titles(found)[1:5] == [
        "SM clock (MHz), limit 1,980 MHz",
        "SW Power Cap 25 % of the time: lowers the clocks",
        "GPU Idle 75 % of the time: lowers nothing under load",
        "Power (W), limit 700 W",
    ]
    shares = trace(found, "SW Power Cap")["z"][0]
    assert shares[10] == pytest.approx(1)
    assert shares[-10] == 0


def test_slow_steps_are_cut_off_and_counted(tmp_path: Path) -> None:
    bundle = Bundle(tmp_path / "run")
    bundle.steps(100, [9 * SECOND] + [SECOND // 10] * 99)
    found = draw_strips(GrowingRecording(bundle.path).read(), "step", {})
    assert found.figure is not None
    assert found.figure["layout"]["yaxis"]["range"][1] == pytest.approx(420)
    assert found.notes[0] == "1 step took longer than the axis of step times shows, the longest 9.00 s: zoom out to see it."


def test_recorded_steps_are_shaded_and_marked(tmp_path: Path) -> None:
    bundle = Bundle(tmp_path / "run")
    for count, window in ((10, "plain"), (4, "timing"), (10, "plain")):
        bundle.steps(count, window=window)
    found = draw_strips(GrowingRecording(bundle.path).read(), "step", {})
    assert found.figure is not None
    assert [(shape["x0"], shape["x1"]) for shape in found.figure["layout"]["shapes"]] == [(10.0, 14.0)]
    assert trace(found, "step with the profiler")["x"] == [10.0, 11.0, 12.0, 13.0]
    assert any("Shaded" in note for note in found.notes)


def test_a_hole_breaks_line_and_band(tmp_path: Path) -> None:
    bundle = Bundle(tmp_path / "run")
    times = [k * SECOND // 20 for k in range(2000)]
    bundle.samples([*times, *(60 * SECOND + times[-1] + time for time in times)], power_w=[600.0, 650.0] * 2000)
    found = draw_strips(GrowingRecording(bundle.path).read(), "time", {})
    line = trace(found, "Power")
    assert line["y"].count(None) == 1
    assert found.figure is not None
    band = next(one for one in found.figure["data"] if one.get("fill") == "toself")
    assert band["x"].count(None) == 1
    place = band["x"].index(None)
    assert band["x"][0] == band["x"][place - 1]  # each outline comes back to where it began
    assert {value for value in band["y"] if value is not None} == {600.0, 650.0}


def test_a_long_run_is_small_and_strict_json(tmp_path: Path) -> None:
    count = 4_000
    found = strips(tmp_path, count=count, power_w=[600.0] * (2 * count), sm_clock_mhz=[1500.0] * (2 * count))
    assert found.figure is not None
    text = json.dumps(found.figure, allow_nan=False)
    assert len(text) < 400_000
    assert max(len(one["x"]) for one in found.figure["data"]) <= 2 * BINS + 1
    assert any("mean of the samples" in note for note in found.notes)


@pytest.mark.parametrize(("run_s", "title"), [(300, "(s)"), (3_000, "(min)"), (30_000, "(h)")])
def test_time_is_shown_in_a_unit_that_fits(tmp_path: Path, run_s: int, title: str) -> None:
    bundle = Bundle(tmp_path / "run")
    bundle.samples([0, run_s * SECOND], power_w=[1.0, 2.0])
    found = draw_strips(GrowingRecording(bundle.path).read(), "time", {})
    assert found.figure is not None
    axis = found.figure["layout"]["xaxis"]
    assert axis["title"]["text"] == f"time since the run began {title}"
    assert axis["range"][1] == pytest.approx(run_s / {"(s)": 1, "(min)": 60, "(h)": 3600}[title])


def test_nothing_recorded_is_no_figure(tmp_path: Path) -> None:
    assert draw_strips(GrowingRecording(Bundle(tmp_path / "run").path).read(), "step", {}) == StripFigure(None, 0, ())


def test_memory_alone(tmp_path: Path) -> None:
    bundle = Bundle(tmp_path / "run")
    bundle.steps(10)
    bundle.samples([0, SECOND // 2], rss_bytes=[1_000_000, 2_000_000], power_w=[1.0, 2.0])
    found = draw_strips(GrowingRecording(bundle.path).read(), "step", {}, telemetry_figure.MEMORY_STRIPS)
    assert titles(found) == ["Resident memory of the process (MB)"]
