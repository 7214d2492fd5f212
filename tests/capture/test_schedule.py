"""The order of the windows, also when epochs cut into them."""

from __future__ import annotations

from gpudiag.capture.schedule import ATTEMPTS, Schedule


def labels(schedule: Schedule, count: int) -> list[str]:
    out = []
    for _ in range(count):
        out.append(schedule.slot.label)
        schedule.complete()
    return out


def test_default_order() -> None:
    found = labels(Schedule(5, 2, 6, 2), 20)
    assert found == ["plain"] * 5 + ["warm"] * 2 + ["timing"] * 6 + ["export", "warm", "sites", "sites", "export", "plain", "plain"]


def test_without_site_window() -> None:
    assert labels(Schedule(0, 1, 2, 0), 6) == ["warm", "timing", "timing", "export", "plain", "plain"]


def test_an_interrupted_window_starts_again_a_few_times_then_is_passed_over() -> None:
    schedule = Schedule(0, 1, 4, 2)
    for _ in range(ATTEMPTS):
        assert schedule.slot.window == 0
        assert schedule.slot.first
        labels(schedule, 3)
        assert schedule.recorded == 2
        schedule.interrupt()
    assert schedule.slot.window == 1


def test_an_interruption_before_the_first_step_of_a_window_costs_no_attempt() -> None:
    schedule = Schedule(0, 1, 2, 0)
    for _ in range(ATTEMPTS + 1):
        schedule.interrupt()
    assert schedule.slot.first


def test_a_complete_window_is_not_repeated() -> None:
    schedule = Schedule(0, 1, 2, 0)
    labels(schedule, 3)
    assert schedule.slot.label == "export"
    schedule.interrupt()
    assert schedule.slot.window is None
