"""The order of the windows, also when epochs cut into them and others are asked for meanwhile."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from noticewords import format_notices

from gpudiag.capture.schedule import MAX_ATTEMPTS, Options, Schedule


def schedule(skip: int, warm: int, record: int, sites: int, **options: Any) -> Schedule:
    return Schedule(Options(skip=skip, warm=warm, record=record, sites=sites, **options))


def labels(found: Schedule, count: int) -> list[str]:
    out = []
    for _ in range(count):
        out.append(found.slot.label)
        found.complete()
    return out


def recorded(found: Schedule) -> dict[int, int]:
    """What would be in a bundle if every window begun so far were complete but the one that runs."""
    return {index: window.record for index, window in found.begun.items() if index != found.slot.window}


def test_default_order() -> None:
    found = labels(schedule(5, 2, 6, 2), 20)
    assert found == ["plain"] * 5 + ["warm"] * 2 + ["timing"] * 6 + ["export", "warm", "sites", "sites", "export", "plain", "plain"]


def test_without_site_window() -> None:
    assert labels(schedule(0, 1, 2, 0), 6) == ["warm", "timing", "timing", "export", "plain", "plain"]


def test_repeats_wait_and_have_no_site_window_of_their_own() -> None:
    found = schedule(1, 1, 1, 1, repeat=3, wait=2)
    window, sites = ["warm", "timing", "export"], ["warm", "sites", "export"]
    assert labels(found, 19) == ["plain", *window, *sites, "plain", "plain", *window, "plain", "plain", *window, "plain", "plain"]
    assert {index: planned.trigger for index, planned in found.begun.items()} == {
        0: "schedule", 1: "schedule", 2: "repeat 2 of 3", 3: "repeat 3 of 3",
    }  # fmt: skip
    assert list(format_notices(found.missing(recorded(found)))) == []


def test_a_window_asked_for_while_another_runs_waits_for_its_end() -> None:
    found = schedule(0, 1, 2, 1)
    labels(found, 2)
    assert found.request("signal SIGUSR1")
    assert labels(found, 2 + 3 + 4) == ["timing", "export", "warm", "sites", "export", "warm", "timing", "timing", "export"]
    assert found.begun[2].trigger == "signal SIGUSR1"


def test_a_window_asked_for_first_is_window_0_and_the_plain_steps_go_on_after_it() -> None:
    found = schedule(4, 1, 1, 1)
    labels(found, 2)
    found.request("step 3")
    assert labels(found, 3 + 3 + 2 + 3) == [
        "warm",
        "timing",
        "export",
        "warm",
        "sites",
        "export",
        "plain",
        "plain",
        "warm",
        "timing",
        "export",
    ]
    assert [(window.index, window.trigger) for window in found.begun.values()] == [(0, "step 3"), (1, "schedule"), (2, "schedule")]


def test_index_1_stays_free_without_a_site_window() -> None:
    found = schedule(0, 1, 1, 0, repeat=2)
    labels(found, 6)
    assert list(found.begun) == [0, 2]


def test_the_same_request_twice_is_one_window() -> None:
    found = schedule(9, 1, 1, 0, repeat=0, on_signal=10)
    for _ in range(3):
        found.request("signal SIGUSR1")
    assert labels(found, 9).count("timing") == 2  # one had begun when the others came; those are one


def test_no_more_than_max_windows_and_what_is_on_schedule_keeps_its_place() -> None:
    found = schedule(50, 1, 1, 0, repeat=2, max_windows=3)
    assert found.request("step 1")
    assert not found.request("step 2")
    assert labels(found, 80).count("timing") == 3


def test_an_interrupted_window_starts_again_a_few_times_then_is_passed_over() -> None:
    found = schedule(0, 1, 4, 2)
    for _ in range(MAX_ATTEMPTS):
        assert found.slot.window == 0
        assert found.slot.first
        labels(found, 3)
        assert found.recorded == 2
        found.interrupt()
    assert found.slot.window == 1
    assert list(format_notices(found.missing({0: 2}))) == [
        "timing window: 2 of 4 steps recorded (the loop or its epochs were too short)",
        "sites window: 0 of 2 steps recorded (the loop or its epochs were too short)",
    ]


def test_a_window_that_was_asked_for_is_tried_as_often_as_one_on_schedule() -> None:
    found = schedule(0, 1, 4, 0, repeat=0, at_steps=(3,))
    found.request("step 3")
    for _ in range(MAX_ATTEMPTS):
        labels(found, 2)
        found.interrupt()
    assert found.slot.window is None
    assert list(format_notices(found.missing({0: 1}))) == [
        "timing window 0 (step 3): 1 of 4 steps recorded (the loop or its epochs were too short)"
    ]


def test_an_interruption_before_the_first_step_of_a_window_costs_no_attempt() -> None:
    found = schedule(0, 1, 2, 0)
    for _ in range(MAX_ATTEMPTS + 1):
        found.interrupt()
    assert found.slot.first


def test_a_complete_window_is_not_repeated() -> None:
    found = schedule(0, 1, 2, 0)
    labels(found, 3)
    assert found.slot.label == "export"
    found.interrupt()
    assert found.slot.window is None


def test_what_was_never_begun_is_said() -> None:
    found = schedule(5, 1, 2, 1, repeat=3)
    short = "steps recorded (the loop or its epochs were too short)"
    assert list(format_notices(found.missing({}))) == [
        f"timing window: 0 of 2 {short}",
        f"sites window: 0 of 1 {short}",
        "2 of 3 scheduled timing windows were not begun (the run was too short)",
    ]
    labels(found, 7)
    found.request("step 7")
    assert f"timing window: 1 of 2 {short}" in list(format_notices(found.missing({0: 1})))
    assert "the window asked for by step 7 was not begun (the run ended before)" in list(format_notices(found.missing({0: 1})))


def test_off_is_plain_for_ever() -> None:
    found = schedule(0, 1, 2, 1, repeat=4)
    labels(found, 2)
    found.off()
    assert found.request("step 9")
    assert set(labels(found, 30)) == {"plain"}


EVENTS = st.lists(st.sampled_from(["step", "step", "step", "step", "cut", "ask", "ask again"]), max_size=150)
SMALL = st.integers(0, 3)


@given(EVENTS, SMALL, st.integers(1, 3), st.integers(1, 3), SMALL, st.integers(1, 4), SMALL, st.integers(4, 6))
def test_whatever_happens_windows_are_whole_ordered_and_bounded(
    events: list[str], skip: int, warm: int, record: int, sites: int, repeat: int, wait: int, most: int
) -> None:
    found = schedule(skip, warm, record, sites, repeat=repeat, wait=wait, max_windows=most)
    seen: list[tuple[int | None, str]] = []
    for event in events:
        slot = found.slot
        if event == "step":
            if slot.first or slot.label == "plain":
                seen.append((None, "|"))
            seen.append((slot.window, slot.label))
            found.complete()
        elif event == "cut":
            found.interrupt()
            seen.append((None, "|"))
        else:
            found.request(event)
    order = [window for window, _ in seen if window is not None]
    assert order == sorted(order, key=lambda index: index)  # a window once left is never returned to
    assert len({window for window in found.begun.values() if window.kind == "timing"}) <= most
    for index, planned in found.begun.items():
        run = [label for window, label in seen if window == index]
        ended = [at for at, label in enumerate(run) if label == "export"]
        if ended:  # the attempt that was exported held all its steps
            whole = run[ended[0] - planned.record - planned.warm : ended[0]]
            assert whole == ["warm"] * planned.warm + [planned.kind] * planned.record


def test_a_window_covers_the_steps_that_it_will_record() -> None:
    found = schedule(1, 2, 3, 1)
    assert not found.covers(2)
    labels(found, 1)  # the present step is the first of the warm-up
    assert [ahead for ahead in range(9) if found.covers(ahead)] == [2, 3, 4]
    labels(found, 3)
    assert [ahead for ahead in range(9) if found.covers(ahead)] == [0, 1]
    labels(found, 4)  # in the site window, which records no timing
    assert found.begun[1].kind == "sites"
    assert not any(found.covers(ahead) for ahead in range(9))
