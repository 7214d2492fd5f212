"""Facts about the host: who waits for whom, worked out by hand on small windows (times in us)."""

from __future__ import annotations

import msgspec
import polars as pl
import pytest
from factories import CPU, US, analysis, gap, kernel, mark, op, table

from gpudiag.attribution.steps import WHOLE_TRACE
from gpudiag.facts import Facts
from gpudiag.model.bundle import LoaderSettings, Manifest, Settings
from gpudiag.model.finding import Missing

NEXT = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def test_only_the_part_of_a_loader_wait_under_which_the_device_is_idle_counts() -> None:
    # __next__ runs 0..400; the device still works until 100: 300 of the 1000 us are a wait
    made = analysis([kernel("aten::mm", 0, 100), kernel("aten::mm", 400, 1000)], idle=[gap(100, 400)], marks=[mark(NEXT, 0, 400)])
    facts = Facts(made)
    assert facts.value("loader_wait_ns") == 300 * US
    assert facts.value("loader_wait_share") == pytest.approx(0.3)
    assert facts.value("loader_in_process") is True
    assert facts.value("loader_workers") == 0


def test_on_a_cpu_the_whole_loader_call_is_a_wait() -> None:
    # the loading thread itself computes (aten::stack) inside __next__: data work all the same
    made = analysis(
        [kernel("aten::stack", 50, 150), kernel("aten::mm", 400, 900)],
        idle=[gap(*ends, cause="idle_launch") for ends in ((0, 50), (150, 400), (900, 1000))],
        marks=[mark(NEXT, 0, 200)],
        device=CPU,
    )
    facts = Facts(made)
    assert facts.value("loader_wait_ns") == 200 * US


def test_on_a_cpu_the_unprofiled_steps_tell_how_long_the_loop_waits() -> None:
    # collating is no work of ops, so that the profiler, which doubles the rest of the step, hides it: 600 of 800 us without it
    row = {"start_unix_ns": 0, "wall_ns": 800 * US, "window": "plain", "loader_wait_ns": 600 * US}
    profiled = {**row, "wall_ns": 1000 * US, "window": "timing"}
    records = table("step_records", [{"step": step, **(profiled if step == 3 else row)} for step in range(10)])
    seen = {"marks": [mark(NEXT, 0, 600)], "step_records": records}
    facts = Facts(analysis([kernel("aten::mm", 600, 1000)], device=CPU, **seen))
    assert facts.value("loader_wait_share") == pytest.approx(0.75)
    assert facts.value("without_loader_ns") == pytest.approx(750 * US)  # the same share of the recorded step
    assert facts.value("loader_wait_base") == "the unprofiled steps"
    on_gpu = Facts(analysis([kernel("aten::mm", 600, 1000)], idle=[gap(0, 600)], **seen))
    assert on_gpu.value("loader_wait_share") == pytest.approx(0.6)


@pytest.mark.parametrize(("starts", "share"), [((4, 9), 0.5), ((4,), 0.0)])
def test_workers_that_start_again_cost_what_the_first_batch_waits_longer(starts: tuple[int, ...], share: float) -> None:
    # ten plain steps from step 2 on: eight of 500 us that wait for 100, two of 2500 us for 2350: 4500 of 9000 us beyond the usual
    rows = [
        {
            "step": step,
            "start_unix_ns": 0,
            "window": "plain",
            "wall_ns": (2500 if late else 500) * US,
            "loader_wait_ns": (2350 if late else 100) * US,
        }
        for step in range(12)
        for late in [step in (4, 9)]
    ]
    mark_row = {"kind": "loader", "start_unix_ns": 0, "duration_ns": 90 * US, "name": "_MultiProcessingDataLoaderIter"}
    marks = [{**mark_row, "step": step} for step in range(12)] + [
        {**mark_row, "name": mark_row["name"] + ".__iter__", "step": step} for step in starts
    ]
    made = analysis([kernel("aten::mm", 600, 1000)], step_records=table("step_records", rows))
    settings = Manifest(settings=Settings(loader=LoaderSettings(2, False, False)))
    made = msgspec.structs.replace(made, host_marks=table("host_marks", marks), manifest=settings)
    assert Facts(made).value("loader_restart_share") == pytest.approx(share)
    assert Facts(made).value("without_loader_restarts_ns") == pytest.approx(share * 1000 * US)


@pytest.mark.parametrize(
    ("waits_us", "workers", "in_turn"),
    [
        ([0, 0, 300, 20, 0, 5000], 3, True),  # each third, however long
        ([0, 0, 300, 20, 0, 5000], 2, False),
        ([0, 0, 300], 1, None),
        ([300, 290, 310], 3, False),  # all alike
        ([0, 400, 0, 0, 0, 300, 200, 0, 0, 0, 0, 900], 3, False),  # now and then
    ],
)
def test_one_worker_that_is_late_holds_up_each_nth_batch(waits_us: list[int], workers: int, in_turn: bool | None) -> None:
    row = {"start_unix_ns": 0, "window": "plain", "wall_ns": 6000 * US}
    rows = [{**row, "step": step, "loader_wait_ns": waits_us[step % len(waits_us)] * US} for step in range(40)]
    made = analysis([kernel("aten::mm", 600, 1000)], step_records=table("step_records", rows))
    made = msgspec.structs.replace(made, manifest=Manifest(settings=Settings(loader=LoaderSettings(workers, False, False))))
    found = Facts(made).value("loader_late_in_turn")
    assert isinstance(found, Missing) if in_turn is None else found is in_turn


def test_waits_outside_the_analysed_steps_do_not_count() -> None:
    made = analysis([kernel("aten::mm", 600, 1000)], steps=[(500, 1000)], idle=[gap(400, 600)], marks=[mark(NEXT, 0, 550)])
    assert Facts(made).value("loader_wait_ns") == 50 * US


@pytest.mark.parametrize(
    ("file", "seen", "in_process"),
    [("dataloader.py(728): __next__", True, False), ("_utils/fetch.py(25): fetch", True, True), (None, False, None)],
)
def test_frames_tell_the_waits_where_the_loader_has_no_mark(file: str | None, seen: bool, in_process: bool | None) -> None:
    # 300 of 1000 us idle in what a frame showed to be loading; the file of torch's that the frame is of says the rest
    frames = [{"name": f"torch/utils/data/{file}", "start_ns": 0, "end_ns": 300 * US}] if file else []
    waits = [gap(100, 400, cause="idle_data", evidence="batches() of train.py")]
    made = analysis([kernel("aten::mm", 0, 100), kernel("aten::mm", 400, 1000)], idle=waits)
    facts = Facts(msgspec.structs.replace(made, trace=msgspec.structs.replace(made.trace, frames=table("frames", frames))))
    assert facts.value("loader_wait_share") == pytest.approx(0.3)
    assert (facts.value("loader_seen"), facts.value("loader_inferred")) == (seen, not seen)
    assert isinstance(facts.value("loader_in_process"), Missing) if in_process is None else facts.value("loader_in_process") is in_process


def test_loader_calls_that_old_torch_recorded_as_ops_are_found() -> None:
    made = analysis([kernel("aten::mm", 500, 1000)], idle=[gap(0, 500)], ops=[op(NEXT, 100, 300)])
    assert Facts(made).value("loader_wait_ns") == 200 * US


def test_step_records_stand_in_for_marks_and_never_exceed_the_idle_time() -> None:
    row = {"start_unix_ns": 0, "wall_ns": 500 * US, "window": "timing"}
    records = table("step_records", [{"step": 0, "loader_wait_ns": 90 * US, **row}, {"step": 1, "loader_wait_ns": 70 * US, **row}])
    work = [kernel("aten::mm", 0, 900)]
    plenty = analysis(work, steps=2, idle=[gap(700, 1000)], step_records=records)
    assert Facts(plenty).value("loader_wait_ns") == 160 * US
    little = analysis(work, steps=2, idle=[gap(900, 1000)], step_records=records)
    assert Facts(little).value("loader_wait_ns") == 100 * US
    other_steps = records.with_columns(pl.col("step") + 50)
    value = Facts(analysis(work, steps=2, step_records=other_steps)).value("loader_wait_ns")
    assert isinstance(value, Missing)


def test_worker_count_comes_from_the_manifest() -> None:
    loader = LoaderSettings(num_workers=2, pin_memory=False, persistent_workers=False)
    manifest = Manifest(settings=Settings(loader=loader))
    facts = Facts(analysis(manifest=manifest))
    assert facts.value("loader_workers") == 2
    assert facts.value("loader_in_process") is False


def test_queued_and_unexplained_gaps_are_no_host_time() -> None:
    waits = [gap(100, 200, cause="idle_launch"), gap(200, 300, cause="idle_unexplained"), gap(300, 304, "queued")]
    facts = Facts(analysis([kernel("aten::mm", 0, 100)], idle=waits))
    assert facts.value("issuing_ns") == 100 * US
    assert facts.value("queued_gap_excess_ns") == 3 * US


def test_steps_repeat_only_with_the_same_kernels_and_grids_in_the_same_order() -> None:
    def steps(*grids: int) -> Facts:
        return Facts(
            analysis([kernel("aten::mm", i * 300 + 10, i * 300 + 20, grid=grid) for i, grid in enumerate(grids)], steps=3, wall=900)
        )

    assert steps(4, 4, 4).value("repeats_itself") is True
    assert steps(4, 4, 8).value("repeats_itself") is False
    assert isinstance(Facts(analysis([kernel("aten::mm", 0, 10)], steps=2)).value("repeats_itself"), Missing)


@pytest.mark.parametrize(
    ("name", "compiled"), [("aten::mm", False), ("Torch-Compiled Region: 0/0", True), ("CompiledFunctionBackward", True)]
)
def test_compiled_code_shows_in_its_ops(name: str, compiled: bool) -> None:
    assert Facts(analysis([kernel("aten::mm", 0, 10)], ops=[op(name, 0, 50)])).value("compiled") is compiled


def test_where_the_regions_are_not_marked_graph_breaks_are_not_known() -> None:
    calls = [{**op("CompiledFunction", start, start + 20), "step": 0} for start in (0, 30)]
    region = {**op("Torch-Compiled Region: 0/0", 0, 60), "step": 0}
    assert isinstance(Facts(analysis([kernel("aten::mm", 0, 10)], ops=calls)).value("breaks_per_step"), Missing)
    assert Facts(analysis([kernel("aten::mm", 0, 10)], ops=[*calls, region])).value("breaks_per_step") == 1
    assert Facts(analysis([kernel("aten::mm", 0, 10)], ops=[op("aten::mm", 0, 9)])).value("breaks_per_step") == 0


def test_what_the_driver_loads_and_what_memory_is_recorded() -> None:
    # 300 us of waiting for code, in the last 100 of which torch.compile is at work
    waits = [gap(100, 400, cause="idle_compile"), gap(400, 500, cause="idle_launch")]
    marks = [mark("entire_frame_compile (dynamo_timed)", 300, 450)]
    facts = Facts(analysis([kernel("aten::mm", 0, 10)], idle=waits, marks=marks, meta={"profile_memory": True}))
    assert facts.value("code_loading_ns") == 200 * US
    assert facts.value("memory_recorded") is True
    assert Facts(analysis([kernel("aten::mm", 0, 10)])).value("memory_recorded") is False


def test_a_recording_holds_the_start_of_a_program_where_the_device_is_set_up_in_it() -> None:
    start = analysis([kernel("aten::mm", 0, 10)], idle=[gap(0, 60_000, cause="idle_init")], wall=100_000)
    assert Facts(start).value("starts_up") is True
    stream = analysis([kernel("aten::mm", 0, 10)], idle=[gap(0, 2_000, cause="idle_init")], wall=100_000)
    assert Facts(stream).value("starts_up") is False


def test_allocations_count_only_inside_the_steps() -> None:
    calls = [
        {"thread": 0, "api": api, "start_ns": at * US, "end_ns": at * US + 10}
        for api, at in [("cudaMalloc", 100), ("cudaFree", 600), ("cudaMalloc", 2000)]
    ]
    assert Facts(analysis(launches=calls)).value("device_allocations") == 2


def test_missing_device_events_are_a_fault_only_where_an_accelerator_was_given_work() -> None:
    launched = [{"thread": 0, "api": "cudaLaunchKernel", "start_ns": 0, "end_ns": 5}]
    queried = [{"thread": 0, "api": "cudaGetDeviceCount", "start_ns": 0, "end_ns": 5}]
    assert Facts(analysis(launches=launched, device=CPU)).value("device_events_missing") is True
    assert Facts(analysis(launches=queried, device=CPU)).value("device_events_missing") is False
    assert Facts(analysis([kernel("aten::mm", 0, 10)], device=CPU)).value("device_events_missing") is False
    assert Facts(analysis([kernel("aten::mm", 0, 10)])).value("device_events_missing") is False
    assert Facts(analysis()).value("device_events_missing") is True


def test_scatter_and_the_first_step() -> None:
    facts = Facts(analysis(steps=[(0, 200), (200, 300), (300, 400), (400, 500)]))
    assert facts.value("first_step_ratio") == pytest.approx(2.0)
    assert facts.value("step_variation") == pytest.approx(0.4)  # walls 200 100 100 100: mean 125, deviation 50
    dropped = analysis(steps=[(0, 200), (200, 300), (300, 400)])
    first_out = dropped.steps.with_columns(analysed=pl.col("id") > 0)
    assert Facts(msgspec.structs.replace(dropped, steps=first_out)).value("first_step_ratio") == 1.0


def test_compilation_and_profiler_overhead_by_steps() -> None:
    made = analysis(
        [kernel("aten::mm", 0, 10)],
        steps=4,
        idle=[gap(900, 1000, cause="idle_launch")],
        marks=[mark("entire_frame_compile (dynamo_timed)", 100, 300), mark("Buffer Flush", 800, 1100, "overhead")],
    )
    facts = Facts(made)
    assert facts.value("compilation_step_share") == 0.5  # 100..300 touches steps 0 and 1 of 250 us each
    assert facts.value("profiler_overhead_share") == pytest.approx(0.1)  # 100 of 200 us passed while the GPU was busy


def test_places_of_idle_time_are_lines_of_the_program_else_events_else_ops() -> None:
    work = [kernel(name, start, start + 100) for name, start in (("aten::mm", 0), ("aten::copy_", 500), ("aten::add", 900))]
    line = {"cause": "idle_launch", "site": "/home/me/exp/train.py(41): step", "evidence": "sleep()"}
    idle = [
        gap(100, 300, op=1, gap=0, cause="idle_launch", evidence="in aten::copy_"),
        gap(300, 450, op=1, gap=0, **line),
        gap(450, 500, op=1, gap=0, cause="idle_gc", evidence="gen 2"),
        gap(600, 700, op=2, gap=1, **line),
        gap(720, 900, op=2, gap=1, cause="idle_launch"),
    ]
    facts = Facts(analysis(work, idle=idle))
    assert facts.value("idle_launch_ns") == 630 * US
    found = [(where.what, where.file, where.line, where.time_ns) for where in facts.places("late_ops")]
    assert found == [
        ("sleep()", "exp/train.py", 41, 250 * US),
        ("in aten::copy_", None, None, 200 * US),
        ("near aten::add", None, None, 180 * US),
    ]
    assert [(where.what, where.time_ns) for where in facts.places("stalls")] == [("gen 2", 50 * US)]


def test_no_rule_passes_where_most_idle_time_has_no_cause() -> None:
    explained = Facts(analysis([kernel("aten::mm", 0, 400)], idle=[gap(400, 700, cause="idle_sync"), gap(700, 1000)]))
    assert explained.value("causes_told") is True
    unexplained = Facts(analysis([kernel("aten::mm", 0, 400)], idle=[gap(400, 600, cause="idle_sync"), gap(600, 1000)])).value(
        "causes_told"
    )
    assert isinstance(unexplained, Missing)
    assert "record with" in unexplained.reason
    assert Facts(analysis([kernel("aten::mm", 0, 960)], idle=[gap(960, 1000)])).value("causes_told") is True  # little to explain
    assert isinstance(explained.value("stalls_recorded"), Missing)  # neither a bundle nor stacks


def test_the_settings_of_the_loader_stand_in_the_bundle_only() -> None:
    loader = LoaderSettings(num_workers=3, pin_memory=True, persistent_workers=False, prefetch_factor=5)
    facts = Facts(analysis([kernel("aten::mm", 0, 10)], manifest=Manifest(settings=Settings(loader=loader))))
    names = ("loader_prefetch_factor", "loader_keeps_workers", "loader_pins_memory")
    assert [facts.value(name) for name in names] == [5, False, True]
    default = Manifest(settings=Settings(loader=LoaderSettings(num_workers=3, pin_memory=True, persistent_workers=False)))
    assert Facts(analysis(manifest=default)).value("loader_prefetch_factor") == 2
    for name in names:
        missing = Facts(analysis([kernel("aten::mm", 0, 10)], marks=[mark(NEXT, 0, 5)])).value(name)
        assert isinstance(missing, Missing)
        assert "gpudiag.profile" in missing.reason


def test_a_window_without_marked_steps_is_not_called_a_step() -> None:
    made = analysis([kernel("aten::mm", 0, 10)])
    assert Facts(made).value("a_step") == "a step"
    assert Facts(msgspec.structs.replace(made, steps_source=WHOLE_TRACE)).value("a_step") == "the recorded window"
