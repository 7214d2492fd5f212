"""Peaks at the clock that was observed: H100 SXM at 1,410 of 1,980 MHz, worked by hand."""

from __future__ import annotations

import msgspec
import polars as pl
import pytest

from gpudiag.hardware.device_peaks import build_device, derate_device, find_observed_clock_mhz
from gpudiag.hardware.device_table import load_table
from gpudiag.model.hardware import Device


def test_clocks_that_are_null_or_no_number_tell_nothing() -> None:
    assert find_observed_clock_mhz(samples((0, None), (5, float("nan"))), [(0, 10)]) is None
    assert find_observed_clock_mhz(samples((0, 1500.0), (5, None), (6, float("inf"))), [(0, 10)]) == 1500


def h100() -> Device:
    table = load_table()
    return build_device(next(row for row in table.devices if row.id == "h100-sxm5-80gb"), table)


def samples(*pairs: tuple[int, float | None]) -> pl.DataFrame:
    return pl.DataFrame(pairs, schema={"t_ns": pl.Int64, "sm_clock_mhz": pl.Float64}, orient="row")


def test_vector_and_matrix_peaks_scale_from_the_clocks_that_they_hold_at() -> None:
    device = derate_device(h100(), 1410)
    assert device.peaks["fp32"] == pytest.approx(66.9e12 * 1410 / 1980)
    assert device.peaks["bf16"] == pytest.approx(989.4e12 * 1410 / 1830)  # the data sheet's tensor peaks imply 1,830 MHz
    assert device.peaks["fp64_tensor"] == pytest.approx(66.9e12 * 1410 / 1830)
    assert device.bandwidth_byte_per_s == h100().bandwidth_byte_per_s
    assert device.provenance == "derived"
    assert device.source.endswith("; peaks scaled by SM clock 1,410 / 1,980 MHz")
    assert device.notes[0] == "Peaks at the observed 1,410 of 1,980 MHz (matrix units: 1,830 MHz), the median over the analysed steps."


def test_never_above_the_published_peaks() -> None:
    assert derate_device(h100(), 2500).peaks == h100().peaks
    between = derate_device(h100(), 1900)
    assert between.peaks["bf16"] == h100().peaks["bf16"]
    assert between.peaks["fp32"] < h100().peaks["fp32"]


def test_without_a_clock_the_boost_clock_counts_and_is_said() -> None:
    device = derate_device(h100(), None)
    assert device.peaks == h100().peaks
    assert device.notes[0] == "Peaks at the boost clock of 1,980 MHz: the clock during the analysed steps was not recorded."


def test_measured_peaks_and_cpus_stay_as_they_are() -> None:
    for device in (
        msgspec.structs.replace(h100(), provenance="measured"),
        Device(id="cpu", name="CPU", kind="cpu", provenance="measured", source="s", peaks={"fp32": 1e11}),
        msgspec.structs.replace(h100(), boost_clock_mhz=None),
    ):
        assert derate_device(device, 1000) == device


def test_the_clock_is_the_median_within_the_spans() -> None:
    telemetry = samples((0, 345), (100, 1980), (200, 1500), (300, 1410), (400, 1400), (500, 345))
    assert find_observed_clock_mhz(telemetry, [(200, 500)]) == 1410
    assert find_observed_clock_mhz(telemetry, [(100, 200), (400, 500)]) == (1980 + 1400) / 2


def test_a_sample_holds_until_the_next() -> None:
    telemetry = samples((0, 1200), (1000, 1800))
    assert find_observed_clock_mhz(telemetry, [(400, 410)]) == 1200
    assert find_observed_clock_mhz(telemetry, [(400, 1001)]) == (1200 + 1800) / 2
    assert find_observed_clock_mhz(telemetry, [(5000, 6000)]) == 1800
    assert find_observed_clock_mhz(samples((500, 1200)), [(0, 400)]) is None  # only a later one
    minute = 60 * 10**9
    assert find_observed_clock_mhz(telemetry, [(minute, 2 * minute)]) is None  # the driver has stopped answering since


def test_a_field_of_ones_is_no_clock() -> None:
    assert find_observed_clock_mhz(samples((0, 1500.0), (5, 1e308)), [(0, 10)]) == 1500


def test_no_reading_is_no_clock() -> None:
    for telemetry in (samples(), samples((10, None), (20, 0.0))):
        assert find_observed_clock_mhz(telemetry, [(0, 100)]) is None
    assert find_observed_clock_mhz(samples((10, 0.0), (20, 1500.0), (30, None)), [(0, 100)]) == 1500
