"""Telemetry in slices: a sample counts in a slice by the time that it holds there. Times in s, worked by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampled import S, at, spans

from gpudiag.attribution.intervals import NO_SPANS
from gpudiag.timeline.telemetry import SLICES, build_strip


def test_a_sample_holds_until_the_next_one_and_a_slice_is_their_mean() -> None:
    # a run of 120 s, so that a slice is a second; the clock falls in the middle of second 60
    frame = at(
        *((second, {"sm_clock_mhz": 1500.0}) for second in range(60)), (60.5, {"sm_clock_mhz": 500.0}), (61, {"sm_clock_mhz": 500.0})
    )
    found = build_strip(frame, spans((10, 12)), spans((0, 120)))
    assert found is not None
    clock = found.columns["sm_clock_mhz"]
    assert (len(clock), found.span_ns) == (SLICES, 120 * S)
    assert (clock[0], clock[59], clock[60], clock[61]) == (1500, 1500, 1000, 500)
    assert clock[80] is None  # the driver stopped answering: a sample holds for four intervals at most
    assert found.analysed_ns == ((10 * S, 12 * S),)
    assert set(found.columns) == {"sm_clock_mhz"}


def test_reasons_that_lower_the_clocks_are_shares_of_each_slice() -> None:
    frame = at(*((k / 2, {"clock_event_reasons": 0x4 if k % 4 == 1 else 0x1}) for k in range(240)))
    found = build_strip(frame, NO_SPANS, spans((0, 120)))
    assert found is not None
    assert set(found.lowered) == {"SW Power Cap"}  # an idle GPU lowers nothing
    assert found.lowered["SW Power Cap"][:4] == (0.5, 0.0, 0.5, 0.0)


def test_nothing_is_drawn_of_samples_that_span_no_time() -> None:
    assert build_strip(at((1, {"power_w": 100.0})), NO_SPANS, NO_SPANS) is None
    assert build_strip(at((1, {"power_w": 100.0}), (1, {"power_w": 100.0})), NO_SPANS, NO_SPANS) is None


def test_what_cannot_be_is_left_out() -> None:
    found = build_strip(at(*((k, {"power_w": -5.0 if k == 3 else 200.0}) for k in range(10))), NO_SPANS, NO_SPANS)
    assert found is not None
    assert set(found.columns["power_w"]) == {200.0}


@given(st.lists(st.tuples(st.floats(0, 1e5), st.floats(0, 900)), min_size=2, max_size=40))
def test_a_mean_lies_between_the_samples(rows: list[tuple[float, float]]) -> None:
    found = build_strip(at(*((time, {"power_w": power}) for time, power in rows)), NO_SPANS, NO_SPANS)
    if found is None or "power_w" not in found.columns:
        return
    powers = [power for _, power in rows]
    known = [value for value in found.columns["power_w"] if value is not None]
    assert min(known) >= min(powers) * (1 - 1e-3) - 1e-6
    assert max(known) == pytest.approx(min(max(known), max(powers)), rel=1e-3, abs=1e-6)
