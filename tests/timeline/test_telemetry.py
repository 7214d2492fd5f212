"""What samples say of steps: each holds until the next one of its column. Times in s, worked by hand."""

from __future__ import annotations

import pytest
from sampled import S, at, spans

from gpudiag.attribution.intervals import NO_SPANS
from gpudiag.model import trace
from gpudiag.model.bundle import TelemetryInfo
from gpudiag.timeline.telemetry import find_held_samples, summarise_telemetry


def test_a_sample_counts_by_the_time_that_it_holds_within_the_steps() -> None:
    frame = at((0, {"sm_clock_mhz": 1000}), (1, {"power_w": 1.0}), (4, {"sm_clock_mhz": 2000}))
    found = find_held_samples(frame, "sm_clock_mhz", spans((2, 3), (4, 5), (9, 10)))
    assert found.values.tolist() == [1000, 2000]
    assert found.weights.tolist() == [1 * S, 2 * S]


def test_before_the_first_sample_nothing_is_known() -> None:
    found = find_held_samples(at((5, {"sm_clock_mhz": 1000})), "sm_clock_mhz", spans((0, 6)))
    assert found.weights.tolist() == [1 * S]
    assert find_held_samples(at((7, {"sm_clock_mhz": 1000})), "sm_clock_mhz", spans((0, 6))).values.size == 0


def test_throttle_reasons_are_shares_of_the_time_in_the_words_of_nvidia() -> None:
    # of 10 s: 2 s SW Power Cap, 1 s SW Power Cap and HW Thermal, 3 s idle
    frame = at(*((time, {"clock_event_reasons": mask}) for time, mask in ((0, 0), (4, 0x4), (6, 0x44), (7, 0x1))))
    found = summarise_telemetry(None, frame, NO_SPANS, spans((0, 10)))
    assert found is not None
    assert {event.reason: event.share for event in found.clock_events} == {
        "SW Power Cap": pytest.approx(0.3), "GPU Idle": pytest.approx(0.3), "HW Thermal Slowdown": pytest.approx(0.1),
    }  # fmt: skip
    assert found.throttle_share == pytest.approx(0.3)  # idle lowers nothing, and one second had two reasons
    assert found.over == "all steps"


def test_the_analysed_steps_are_judged_alone_where_they_have_ten_samples() -> None:
    frame = at(*((time / 10, {"sm_clock_mhz": 1500 if time < 50 else 1000}) for time in range(100)))
    few, many = (summarise_telemetry(None, frame, spans((5, end)), spans((0, 10))) for end in (5.9, 6.5))
    assert few is not None
    assert many is not None
    assert (few.over, few.columns["sm_clock_mhz"].max) == ("all steps", 1500)
    assert (many.over, many.columns["sm_clock_mhz"].max) == ("analysed steps", 1000)


def test_a_sample_does_not_stand_for_the_rest_of_the_run_after_the_driver_stopped_answering() -> None:
    # five seconds at 20 Hz, the last sample throttled; then fifty seconds without an answer
    rows = [(row / 20, {"clock_event_reasons": 0x8 if row == 99 else 0, "sm_clock_mhz": 1980}) for row in range(100)]
    found = summarise_telemetry(None, at(*rows), NO_SPANS, spans((0, 55)))
    assert found is not None
    assert found.throttle_share == pytest.approx(0.2 / 5.15)  # four intervals of 50 ms
    assert found.throttle_covered_share == found.columns["sm_clock_mhz"].covered_share == pytest.approx(5.15 / 55)


def test_samples_that_come_once_a_second_later_in_the_run_hold_as_long() -> None:
    rows = [*(row / 20 for row in range(200)), *(float(row) for row in range(11, 30))]
    found = find_held_samples(at(*((time, {"power_w": 100.0}) for time in rows)), "power_w", spans((0, 30)))
    assert found.covered_share == pytest.approx(1 - (1.05 - 0.2) / 30)  # all but the change of the pace


def test_a_counter_since_the_driver_was_loaded_is_that_of_the_run() -> None:
    frame = at(*((time, {"ecc_uncorrected": count}) for time, count in ((0, 7), (10, 7), (20, 9))))
    found = summarise_telemetry(None, frame, NO_SPANS, spans((0, 30)))
    assert found is not None
    assert (found.columns["ecc_uncorrected"].min, found.columns["ecc_uncorrected"].max) == (0, 2)


def test_limits_and_values_that_cannot_be_are_left_out() -> None:
    limits = {"max_sm_clock_mhz": 1e308, "power_limit_w": -1.0, "memory_bytes": float("nan"), "made_up": 1.0, "cpus": 64.0}
    told = TelemetryInfo(source="nvml", interval_ns=5, samples=2, limits=limits)
    found = summarise_telemetry(told, at((0, {"sm_clock_mhz": 9e18}), (1, {"sm_clock_mhz": 1500})), NO_SPANS, spans((0, 2)))
    assert found is not None
    assert found.limits == {"cpus": 64.0}
    assert found.columns["sm_clock_mhz"].max == 1500


def test_medians_are_weighted_by_time_not_by_samples() -> None:
    # twenty samples at 1,000 MHz in the first second, then nine at 2,000, a second apart
    rows = [(row / 20, {"sm_clock_mhz": 1000.0}) for row in range(20)] + [(at_s, {"sm_clock_mhz": 2000.0}) for at_s in range(1, 10)]
    found = summarise_telemetry(None, at(*rows), NO_SPANS, spans((0, 10)))
    assert found is not None
    assert found.columns["sm_clock_mhz"].median == 2000
    assert found.columns["sm_clock_mhz"].unit == "MHz"


def test_nvlink_counters_become_rates_and_one_that_went_back_tells_nothing() -> None:
    frame = at(*((time, {"nvlink_rx_bytes": count}) for time, count in ((0, 0), (1, 5e9), (2, 1e10), (3, 1e9), (4, 6e9))))
    found = summarise_telemetry(None, frame, NO_SPANS, spans((0, 4)))
    assert found is not None
    assert found.columns["nvlink_rx_bytes_per_s"].max == 5e9
    assert found.columns["nvlink_rx_bytes_per_s"].min == 5e9
    assert "nvlink_rx_bytes" not in found.columns


@pytest.mark.parametrize(("seconds", "expected"), [(100, 0.5), (30, None)])
def test_growth_of_memory_needs_a_minute(seconds: int, expected: float | None) -> None:
    # 1 GB in the second quarter of the time, 1.5 GB in the last
    frame = at(*((time, {"rss_bytes": 1e9 if time < seconds / 2 else 1.5e9}) for time in range(seconds)))
    found = summarise_telemetry(None, frame, NO_SPANS, spans((0, seconds)))
    assert found is not None
    assert found.rss_growth_share == (None if expected is None else pytest.approx(expected))


def test_what_is_no_number_and_what_the_manifest_invents_are_left_out() -> None:
    frame = at((0, {"power_w": float("nan")}), (1, {"power_w": float("inf")}), (2, {"power_w": 100.0}))
    told = TelemetryInfo(source="nvml", interval_ns=5, samples=3, missing={"made_up": "x", "ecc_uncorrected": "Not Supported"})
    found = summarise_telemetry(told, frame, NO_SPANS, spans((0, 10)))
    assert found is not None
    assert (found.columns["power_w"].min, found.columns["power_w"].samples) == (100.0, 1)
    assert found.missing == {"ecc_uncorrected": "Not Supported"}
    assert summarise_telemetry(None, trace.build_empty_table("telemetry"), NO_SPANS, NO_SPANS) is None
    empty = summarise_telemetry(told, trace.build_empty_table("telemetry"), NO_SPANS, NO_SPANS)
    assert empty is not None
    assert empty.columns == {}
