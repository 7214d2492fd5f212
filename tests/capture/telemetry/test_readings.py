"""When a question is asked again, and what its answers become."""

from __future__ import annotations

import math
import time

import pytest

from gpudiag.capture.telemetry.readings import (
    FAST_SHARE,
    RETRY_NS,
    SECOND,
    ImplausibleError,
    Reading,
    check_value,
    format_error,
    share_budget,
)
from gpudiag.model import trace
from gpudiag.model.trace import MAX_PLAUSIBLE


def test_every_column_but_the_time_has_a_largest_value() -> None:
    assert set(MAX_PLAUSIBLE) == set(trace.build_table_schema("telemetry")) - {"t_ns"}


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, 0xFFFFFFFF, "12 W", None, [1]])
def test_what_cannot_be_a_power_is_refused(value: object) -> None:
    with pytest.raises(ImplausibleError):
        check_value("power_w", value)  # type: ignore[arg-type]


def test_values_take_the_type_of_their_column() -> None:
    assert isinstance(check_value("power_w", 300), float)
    assert isinstance(check_value("pcie_link_gen", 4.0), int)


def test_a_question_is_asked_in_its_period_and_not_between() -> None:
    reading = Reading(("temperature_c",), lambda: {"temperature_c": 50}, SECOND)
    asked = [bool(reading.sample(at)) for at in range(0, 4 * SECOND, SECOND // 4)]
    assert asked == [True, False, False, False] * 4


def test_a_dear_question_is_asked_less_often() -> None:
    def spin() -> dict[str, float]:
        end = time.thread_time_ns() + 2_000_000
        while time.thread_time_ns() < end:
            pass
        return {"temperature_c": 50}

    reading = Reading(("temperature_c",), spin, 0, share=0.001)
    asked = sum(bool(reading.sample(at)) for at in range(0, 10 * SECOND, SECOND // 20))
    assert 1 <= asked <= 5  # 2 ms of every 2 s; at every tick it would be 200 times


def test_fast_questions_share_one_part_of_a_core() -> None:
    readings = [Reading((), dict, 0), Reading((), dict, 0), Reading((), dict, SECOND)]
    share_budget(readings)
    assert [reading.share for reading in readings[:2]] == [FAST_SHARE / 2] * 2
    assert readings[2].share < FAST_SHARE / 2


def test_one_column_may_fail_while_the_other_answers() -> None:
    answers = iter([{"power_w": 300.0, "energy_mj": OSError("busy")}, {"power_w": 310.0, "energy_mj": 7}])
    reading = Reading(("power_w", "energy_mj"), lambda: next(answers), 0)
    assert reading.sample(0) == {"power_w": 300.0}
    assert reading.missing() == {"energy_mj": "busy"}
    assert reading.sample(SECOND) == {"power_w": 310.0, "energy_mj": 7}
    assert reading.missing() == {"energy_mj": "at times: busy"}


def test_final_failures_are_not_asked_again_others_after_a_pause() -> None:
    asked = []

    def fail() -> dict[str, float]:
        asked.append(1)
        raise OSError("gone")

    passing, final = Reading(("power_w",), fail, 0), Reading(("power_w",), fail, 0, final=lambda _: True)
    for at in (0, RETRY_NS - 1, RETRY_NS + SECOND):
        passing.sample(at)
    assert len(asked) == 2
    for at in (0, RETRY_NS + SECOND, 100 * RETRY_NS):
        final.sample(at)
    assert len(asked) == 3


def test_reasons_are_short_and_hold_no_paths() -> None:
    assert format_error(OSError("Not\n Supported")) == "Not Supported"
    assert format_error(FileNotFoundError("/home/me/libnvidia-ml.so")) == "FileNotFoundError"
    assert len(format_error(ValueError("x" * 999))) == 120
