"""Steps from marks: contiguous, with gaps, twice, out of order, or none at all."""

from __future__ import annotations

from pathlib import Path

import kept
import msgspec
import numpy as np
import polars as pl
import pytest
from handmade import call, kernel, mark, op, steps, trace
from noticewords import format_notices

from gpudiag.attribution.steps import (
    FROM_MARKS,
    WHOLE_TRACE,
    assign_steps,
    cut_by_annotation,
    cut_by_loader,
    cut_by_optimizer,
    cut_by_period,
    find_steps,
)
from gpudiag.model.trace import Trace

US = 1000


def bounds(*events: dict[str, object]) -> list[tuple[float, float]]:
    table = find_steps(trace(*events)).table
    return [(start / US, end / US) for start, end in table.select("start_ns", "end_ns").iter_rows()]


def test_a_step_reaches_to_the_next_mark() -> None:
    # the profiler's own step() lies between the marks and belongs to the step before
    found = find_steps(trace(mark("ProfilerStep#7", 0, 9), mark("ProfilerStep#8", 10, 19), mark("ProfilerStep#9", 20, 28)))
    assert found.source == FROM_MARKS
    assert found.table.select("name", "start_ns", "end_ns").rows() == [
        ("ProfilerStep#7", 0, 10_000), ("ProfilerStep#8", 10_000, 20_000), ("ProfilerStep#9", 20_000, 28_000),
    ]  # fmt: skip


def test_a_gap_in_the_numbers_is_no_part_of_a_step() -> None:
    assert bounds(mark("ProfilerStep#1", 0, 9), mark("ProfilerStep#5", 50, 60)) == [(0, 9), (50, 60)]


def test_marks_in_any_order_of_the_file() -> None:
    assert bounds(*reversed(steps(0, 10, 25, 30))) == [(0, 10), (10, 25), (25, 30)]


def test_a_second_profiler_around_or_after_the_first_counts_once() -> None:
    nested = [mark(f"ProfilerStep#{row}", 10 * row + 1, 10 * row + 9) for row in range(3)]
    assert bounds(*steps(0, 10, 20, 30, first=0), *nested) == [(0, 10), (10, 20), (20, 30)]
    # its step() is called after the first one's: every mark of it overlaps two of the first
    shifted = [mark(f"ProfilerStep#{row}", 10 * row + 1, 10 * row + 11) for row in range(3)]
    assert bounds(*steps(0, 10, 20, 30, first=0), *shifted) == [(0, 10), (10, 20), (20, 30)]


@pytest.mark.parametrize(("count", "analysed"), [(1, 1), (3, 3), (6, 6), (7, 5), (9, 7)])
def test_edge_steps_are_dropped_only_where_five_remain(count: int, analysed: int) -> None:
    found = find_steps(trace(*steps(*(10 * row for row in range(count + 1)))))
    assert found.table["analysed"].sum() == analysed
    assert bool(format_notices(found.notices)) == (count < 7)
    if analysed < count:
        assert found.table.filter(~pl.col("analysed"))["id"].to_list() == [0, count - 1]


def test_without_marks_the_whole_trace_is_one_step_and_it_is_said() -> None:
    found = find_steps(trace(op("aten::mm", 5, 9), call(6, 1), kernel(8, 30, 1)))
    assert found.source == WHOLE_TRACE
    assert found.table.select("start_ns", "end_ns", "analysed").rows() == [(5000, 30_000, True)]
    assert len(format_notices(found.notices)) == 1


def test_a_users_annotation_is_no_step() -> None:
    assert find_steps(trace(mark("my ProfilerStep#3", 0, 10), op("aten::mm", 1, 2))).source == WHOLE_TRACE


def test_step_of_is_half_open_and_null_outside() -> None:
    table = find_steps(trace(mark("ProfilerStep#1", 10, 20), mark("ProfilerStep#2", 20, 30), mark("ProfilerStep#9", 40, 50))).table
    moments = np.array([9999, 10_000, 19_999, 20_000, 30_000, 45_000, 50_000])
    assert assign_steps(table, moments).to_list() == [None, 0, 0, 1, None, 2, None]


SOURCES = {
    "optimizer": cut_by_optimizer,
    "loader": cut_by_loader,
    "annotation": cut_by_annotation,
    "kernels": lambda trace: cut_by_period(trace, on_cpu=False),
    "ops": lambda trace: cut_by_period(trace, on_cpu=True),
}
MARKED = {
    "a100_dlrm_train_rank3of8": set(SOURCES),
    "a100_dlrm_train_cudagraph_triton_rank0of16": {"optimizer", "annotation", "kernels", "ops"},
    "mi300x_resnet18_ddp8_actckpt_train_rank0": {"optimizer", "kernels"},
    "v100_ddp2_inductor_train_rank1": {"optimizer", "kernels"},
    "v100_resnet50_train_2021_memory_callstack": {"optimizer", "loader", "kernels", "ops"},
}


def unmarked(trace: Trace) -> Trace:
    return msgspec.structs.replace(trace, marks=trace.marks.filter(~pl.col("name").cast(pl.String).str.starts_with("ProfilerStep")))


@pytest.mark.parametrize("name", MARKED)
def test_each_source_finds_the_steps_that_the_profiler_marked(traces: Path, name: str) -> None:
    """One cut a mark, at the same place of each step up to a tenth of it, and the same median duration within 2 %."""
    trace = kept.tables(traces / f"{name}.json.gz")
    marked = find_steps(trace).table
    starts, lengths = marked["start_ns"].to_numpy(), (marked["end_ns"] - marked["start_ns"]).to_numpy()
    for source, find in SOURCES.items():
        cuts = find(unmarked(trace))
        assert (cuts is not None) == (source in MARKED[name]), source
        if cuts is None:
            continue
        assert len(cuts.times) == marked.height, source
        assert np.median(np.diff(cuts.times)) == pytest.approx(np.median(lengths), rel=0.02), source
        # the place within a step is a circle: just before a mark is the same place as just behind it
        shift = np.interp(cuts.times, [*starts, marked["end_ns"][-1]], np.arange(len(starts) + 1))
        angle = np.exp(2j * np.pi * shift)
        assert np.abs(np.angle(angle / (angle.mean() / abs(angle.mean())))).max() / (2 * np.pi) < 0.1, source


def test_a_training_run_without_marks_is_cut_by_its_optimizer(traces: Path) -> None:
    found = find_steps(kept.tables(traces / "rtx2080ti_resnet18_train_noshapes.json.gz"))
    assert (found.source, found.table.height, found.table["analysed"].sum()) == ("optimizer steps", 29, 27)
    assert "40 % of the recording" in format_notices(found.notices)[-1]  # the first iteration starts the workers and takes 4.8 of 14.4 s


def test_image_by_image_where_the_user_annotated_them(traces: Path) -> None:
    found = find_steps(kept.tables(traces / "a100-80g_sam_fast_compiled_cudagraph.json.gz"))
    assert (found.source, found.table.height) == ("annotations 'generate_masks 0 1 0'", 17)


@pytest.mark.parametrize(
    "name", ["h100_qwen1.5-0.5b_prefill", "h100_timesformer_video", "mi210_gpu_only_no_ops", "mi300x_flux1_xdit_compiled"]
)
def test_the_layers_of_a_real_model_are_not_taken_for_steps(traces: Path, name: str) -> None:
    assert find_steps(unmarked(kept.tables(traces / f"{name}.json.gz"))).source == WHOLE_TRACE
