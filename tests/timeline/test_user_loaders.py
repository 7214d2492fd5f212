"""Batches from iterators and generators of the user's own, told from frames; and what only resembles them."""

from __future__ import annotations

import pytest
from handmade import mark, op, trace

from gpudiag.attribution.call_sites import Frames
from gpudiag.timeline.host_events import find_user_loaders

Event = dict[str, object]


def frame(name: str, start: float, end: float) -> Event:
    return {"ph": "X", "cat": "python_function", "name": name, "pid": 1, "tid": 1, "ts": start, "dur": end - start, "args": {}}


def loop(called: str, *, at: float = 0, count: int = 6, every: int = 1, inside: tuple[Event, ...] = (), marks: bool = True) -> list[Event]:
    """Return steps of 100 us in the loop of train.py: `called` takes 30 us from `at`, then forward (40), backward (60), update (80)."""
    events = [frame("train.py(40): main", 0, 100 * count)]
    for row in range(count):
        start = 100 * row
        events += [
            op("aten::linear", start + 40, start + 50, seq=row),
            op("aten::addmm", start + 42, start + 48, seq=row),
            op("autograd::engine::evaluate_function: AddmmBackward0", start + 60, start + 70, tid=2, seq=row),
            mark("Optimizer.step#SGD.step", start + 80, start + 90),
        ]
        events += [frame(called, start + at + 1, start + at + 31)] if row % every == 0 else []
        events += [mark(f"ProfilerStep#{row}", start, start + 100)] if marks else []
    return [*events, *inside]


def found(*events: Event) -> list[tuple[float, str, str]]:
    made = trace(*events)
    rows = find_user_loaders(made, Frames(made.frames)).select("start_ns", "cause", "evidence").sort("start_ns").rows()
    return [(start / 1000, cause, evidence) for start, cause, evidence in rows]


@pytest.mark.parametrize(
    "name", ["__next__", "genloader", "get_batch", "batches", "load_data", "data_iter", "prefetch", "next_inputs", "__getitem__"]
)
@pytest.mark.parametrize("marks", [True, False])
def test_a_batch_of_the_users_own_code(name: str, marks: bool) -> None:
    calls = found(*loop(f"data.py(32): {name}", marks=marks))
    assert len(calls) >= 5
    assert {call[1:] for call in calls} == {("idle_data", f"{name}() of data.py")}


@pytest.mark.parametrize("name", ["busy", "adjust_learning_rate", "p_sleep", "log_step", "generate", "validate"])
def test_a_function_that_is_not_named_for_it_stays_python(name: str) -> None:
    assert found(*loop(f"data.py(32): {name}")) == []


def test_a_batch_below_the_line_of_the_loop_that_asks_for_it() -> None:
    lines = [frame("train.py(41): train", 100 * row + 0.999, 100 * row + 31.001) for row in range(6)]
    calls = [
        {**event, "name": "train.py(?): train"} if event["name"] == "train.py(40): main" else event
        for event in loop("data.py(32): batches")
    ]
    assert found(*lines, *calls) == found(*loop("data.py(32): batches"))


def test_a_function_after_the_forward_pass_makes_no_batch() -> None:
    assert found(*loop("data.py(32): save_batch", at=51)) == []


def test_a_function_that_is_called_in_some_steps_alone_is_no_loader() -> None:
    assert found(*loop("data.py(32): get_batch", every=3)) == []


def test_an_iterator_that_trains_is_the_loop_itself() -> None:
    steps = [frame("work.py(3): __next__", 100 * row + 32, 100 * row + 95) for row in range(6)]
    assert found(*loop("work.py(9): busy"), *steps) == []


def test_packages_between_the_loop_and_the_iterator_do_not_hide_it() -> None:
    bars = [frame("tqdm/std.py(1160): __iter__", 100 * row, 100 * row + 33) for row in range(6)]
    assert len(found(*loop("data.py(32): __next__"), *bars)) == 6


def test_an_iterator_deeper_in_the_users_code_is_not_the_loops() -> None:
    helpers = [frame("model.py(7): prepare", 100 * row, 100 * row + 33) for row in range(6)]
    assert found(*loop("data.py(32): __next__"), *helpers) == []


def test_without_frames_nothing_is_told() -> None:
    assert found(*[event for event in loop("x.py(1): __next__") if event["cat"] != "python_function"]) == []
