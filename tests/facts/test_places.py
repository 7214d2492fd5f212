"""The words and the lines of places."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import polars as pl
import pytest
from factories import CPU, US, analysis, gap, kernel, table
from handmade import linked, op

from gpudiag.attribution.call_sites import find_own_paths
from gpudiag.facts import Facts, capacity, settings
from gpudiag.facts.call_sites import (
    _label_with_shapes,
    _rank_by_time,
    find_anomaly_call_sites,
    find_largest_lines,
    find_unwalked_call_sites,
)
from gpudiag.facts.window import Window
from gpudiag.model.finding import Where


def test_shapes_are_left_out_where_they_are_not_known() -> None:
    found = pl.DataFrame({"pattern": ["GELU"] * 3, "shapes": ["[8, 4]", "", None]}, schema={"pattern": pl.String, "shapes": pl.String})
    said = found.select(_label_with_shapes("pattern", " in single ops").alias("what"))["what"].to_list()
    assert said == ["GELU in single ops on [8, 4]", "GELU in single ops", "GELU in single ops"]


SITES = ["src/net.py(12): forward", "src/other.py(5): forward", "src/net.py(12): forward", None, "a.py(?): f"]


def build_window(**known: Any) -> Any:
    return SimpleNamespace(analysis=SimpleNamespace(sites=pl.Series(SITES), ask_frames=None), shared={}, **known)


def test_a_place_has_the_line_that_holds_half_of_its_time() -> None:
    work = pl.DataFrame({"call": [0, 1, 2, 3, 4], "name": ["mm", "mm", "mm", "mm", "add"], "time_ns": [3, 4, 5, 4, 9]})
    window = build_window()
    assert _rank_by_time(window, work, pl.col("name")) == (Where("mm", "src/net.py", 12, 16), Where("add", "a.py", None, 9))
    rarer = work.with_columns(pl.Series("time_ns", [3, 4, 4, 4, 9]))
    assert _rank_by_time(window, rarer, pl.col("name"))[0] == Where("mm", None, None, 15)  # 7 of 15
    assert _rank_by_time(window, work.drop("call"), pl.col("name"))[1] == Where("add", None, None, 9)


@pytest.mark.parametrize(
    ("paths", "place"),
    [
        (None, Where("addmm", "src/net.py", 12, 6)),
        (["train.py(3): main\nnet.py(7): forward", "train.py(9): main\nnet.py(7): forward"], Where("ops such as addmm", "train.py", 9, 6)),
        (["train.py(3): main", "train.py(9): main\nmetric.py(2): score"], Where("ops such as addmm", "metric.py", 2, 6)),
        (["train.py(3): main"] * 2, Where("addmm", "src/net.py", 12, 6)),  # one line calls both
    ],
)
def test_work_that_no_backward_pass_uses_stands_where_nothing_else_is_called(
    paths: list[str] | None, place: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {"id": [0, 1], "call": [0, 2], "op_name": ["addmm"] * 2, "name": ["addmm"] * 2, "shapes": [None] * 2, "time_ns": [5, 6]}
    kernels = pl.DataFrame({**rows, "phase": ["forward", "other"]}, schema_overrides={"shapes": pl.String})
    window = build_window(kernels=kernels)
    if paths:
        window.analysis.ask_frames = lambda _: pl.Series([paths[0], None, paths[1]])
    monkeypatch.setattr(capacity, "find_unwalked_work", lambda _: kernels.filter(pl.col("id") == 1))
    assert find_unwalked_call_sites(window) == (place,)


def test_own_code_stands_where_most_of_what_its_bound_holds_is_called() -> None:
    # a backward pass, then a pause of 0.4 ms and eight ops of validation, 0.2 ms each, of the loop's own code
    work = [kernel("aten::mm", 0, 100, phase="backward")]
    work += [kernel("aten::conv2d" if i else "aten::add", 500 + 200 * i, 700 + 200 * i, phase="other") for i in range(8)]
    made = analysis(work, idle=[gap(100, 500, cause="idle_launch", site="train.py(20): <module>")], device=CPU, wall=2100)
    sites = ["train.py(9): <module>", *["train.py(14): validate"] * 8]
    facts = Facts(msgspec.structs.replace(made, sites=made.sites.clear().extend(pl.Series(sites))))
    first, second = facts.places("own_code")
    assert first == Where("ops such as aten::conv2d", "train.py", 14, 1600 * US)
    assert (second.line, second.time_ns) == (20, 400 * US)


def test_what_no_step_with_stacks_did_stands_where_the_thread_was_seen_in_the_recorded_step() -> None:
    made = analysis([kernel("aten::mm", 0, 100)], idle=[gap(100, 900, cause="idle_launch", site=None)], device=CPU, wall=1000)
    records = table("step_records", [{"step": step, "start_unix_ns": 0, "wall_ns": 1, "window": "timing"} for step in (7, 8)])
    rows = [
        (7, "slow", "main", "train.py:9"),
        (7, "inside", "learn", "agent.py:30"),
        (8, "slow", "main", "train.py:9"),
        (3, "slow", "f", "x.py:1"),
    ]
    marks = [
        {"kind": kind, "name": name, "site": site, "step": step, "start_unix_ns": step, "duration_ns": 0} for step, kind, name, site in rows
    ]
    seen = msgspec.structs.replace(made, step_records=records, host_marks=table("host_marks", marks))
    package, own, idle = Facts(seen).places("late_ops")
    assert package == Where("learn(), 50 % of the samples", "agent.py", 30)
    assert own == Where("main(), 100 % of the samples", "train.py", 9)
    assert (idle.line, idle.time_ns) == (None, 800 * US)
    assert Facts(made).places("late_ops") == (idle,)
    known = analysis([kernel("aten::mm", 0, 100)], idle=[gap(100, 900, cause="idle_launch", site="a.py(3): f")], device=CPU, wall=1000)
    known = msgspec.structs.replace(known, step_records=records, host_marks=seen.host_marks)
    assert [place.line for place in Facts(known).places("late_ops")] == [3]


def test_dispatch_outside_the_passes_stands_where_the_model_is_called_for_something_else() -> None:
    # a forward and a backward pass of an op each, then forty small ops of sampling, in the same forward() of the model
    phases = ["forward", "backward", *["other"] * 40]
    work = [kernel("aten::mm", 30 * i, 30 * i + 9, shapes=[[4]], phase=phase, bound="overhead") for i, phase in enumerate(phases)]
    made = analysis(work, device=CPU, wall=1300)
    sites = pl.Series(["net.py(7): forward"] * len(work))
    paths = pl.Series(["train.py(3): main\nnet.py(7): forward", "train.py(4): main", *["train.py(9): main\nnet.py(7): forward"] * 40])
    outer = paths.str.replace(r"\n.*", "")
    changed = msgspec.structs.replace(
        made, sites=made.sites.clear().extend(sites), ask_frames=lambda own: paths if own is find_own_paths else outer
    )
    assert [(place.file, place.line) for place in Facts(changed).places("late_ops")[:1]] == [("train.py", 9)]
    assert Facts(msgspec.structs.replace(changed, ask_frames=None)).places("late_ops")[0].line == 7


def test_anomaly_detection_stands_where_a_step_turns_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def frame(name: str, start: float, length: float) -> dict[str, Any]:
        return {"ph": "X", "cat": "python_function", "name": name, "pid": 1, "tid": 1, "ts": start, "dur": length, "args": {}}

    before = (frame("train.py(40): main", 0, 99), frame("train.py(12): guard", 1, 9), op("aten::mm", 20, 30))
    left = frame("torch/autograd/anomaly_mode.py(90): __exit__", 0.5, 0.2)  # of the step before
    window: Any = SimpleNamespace(analysis=SimpleNamespace(ask_frames=None))
    monkeypatch.setattr(settings, "anomaly_mode", lambda _: True)
    for name, lines in (("torch/autograd/anomaly_mode.py(79): __init__", [12]), ("other.py(79): __init__", [])):
        window.analysis.trace = linked(*before, left, frame(name, 4, 1))
        assert [place.line for place in find_anomaly_call_sites(window)] == lines
    monkeypatch.setattr(settings, "anomaly_mode", lambda _: False)
    assert find_anomaly_call_sites(window) == ()


def test_padding_stands_where_batches_are_made_and_small_micro_batches_where_the_passes_run() -> None:
    work = [kernel("aten::mm", 500 + 100 * i, 600 + 100 * i, shapes=[[512, 512], [512, 512]], phase="forward") for i in range(4)]
    made = analysis(work, idle=[gap(100, 500, cause="idle_data", site="data.py(20): collate")], device=CPU, wall=1000)
    assert Facts(made).places("batches") == (Where("a batch is made", "data.py", 20),)
    path = "train.py(?): <module>\npackage/net.py(7): forward"  # the call of its trainer began before the stacks
    found = Facts(msgspec.structs.replace(made, ask_frames=lambda _: pl.Series([path] * 4))).places("micro_batches")
    assert found == (Where("forward", "package/net.py", 7, 400 * US),)


@pytest.mark.parametrize(
    ("file", "place"),
    [("transformers/data/data_collator.py", Where("a batch is made", "data/data_collator.py", 225)), ("mine/collate.py", None)],
)
def test_padding_stands_in_the_packages_collate_function(file: str, place: Where | None) -> None:
    """One of the program's is where the waits for batches are, or a line below it; the rows before it made no batch."""

    def frame(name: str, start: float, length: float) -> dict[str, Any]:
        return {"ph": "X", "cat": "python_function", "name": name, "pid": 1, "tid": 1, "ts": start, "dur": length, "args": {}}

    calls = [("datasets/arrow_dataset.py(3163): __getitems__", 1, 60)]
    calls += [
        (f"{file}(224): __call__", 62, 30),
        (f"{file}(225): __call__", 63, 20),
        ("transformers/tokenization_utils_base.py(95): pad", 64, 18),
    ]
    calls += [(f"{file}(230): __call__", 84, 7)]
    made = linked(frame("torch/utils/data/_utils/fetch.py(49): fetch", 0, 99), *[frame(*call) for call in calls], op("aten::mm", 100, 130))
    window = msgspec.structs.replace(analysis([kernel("aten::mm", 100, 130)], device=CPU), ask_frames=lambda own: own(made))
    assert Facts(window).places("batches") == ((place,) if place else ())


def test_the_largest_line_is_the_programs_with_its_backward_pass_and_the_packages_below_it() -> None:
    at = (
        "train.py(30): main\nnet.py(8): forward",
        "train.py(31): main\nloss/triplets.py(40): compute",
        "train.py(31): main\nloss/triplets.py(50): mine",
    )
    runs = ((0, 400, "forward"), (1, 100, "forward"), (1, 300, "backward"), (2, 250, "forward"))
    ends = [sum(run[1] for run in runs[: i + 1]) for i in range(len(runs))]
    work = [kernel("aten::mm", end - long, end, phase=phase) for end, (_, long, phase) in zip(ends, runs, strict=True)]
    made = analysis(work, device=CPU, wall=1300)
    paths = pl.Series([at[path] for path, _, _ in runs])
    own, below = find_largest_lines(Window(msgspec.structs.replace(made, ask_frames=lambda _: paths)))
    assert own == Where("main", "train.py", 31, 650 * US)
    assert below == Where("compute", "loss/triplets.py", 40, 400 * US)
    alone = find_largest_lines(Window(msgspec.structs.replace(made, ask_frames=lambda _: pl.Series(["train.py(9): main"] * 4))))
    assert alone == (Where("main", "train.py", 9, 1050 * US),)
    assert find_largest_lines(Window(made)) == ()
