"""The simulator of tests/simulator.py keeps the laws of the machine that it stands for."""

from __future__ import annotations

import itertools

import polars as pl
import simulator as s
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator import Hardware, Recording, simulate

_US = st.integers(0, 300)


def _leaves() -> st.SearchStrategy[s.Instruction]:
    stream = st.sampled_from([7, 20])
    copies = st.sampled_from(["H2D pageable", "H2D pinned", "D2H pageable", "D2H pinned"])
    return st.one_of(
        st.builds(s.python, _US, st.sampled_from([None, "train.py(3): step"])),
        st.builds(s.launch, st.just("gemm"), _US, stream),
        st.builds(s.copy, copies, _US, stream),
        st.builds(s.sync, st.sampled_from([7, 20, "device"])),
        st.builds(s.item, stream),
        st.builds(s.graph, st.lists(st.tuples(st.just("node"), _US), min_size=1, max_size=4), stream),
        *(st.builds(make, _US) for make in (s.malloc, s.loader, s.gc, s.compile, s.io, s.overhead)),
    )


def _waits(stream: int) -> s.Instruction:
    return s.block([s.event_record("e", 27 - stream), s.event_wait("e", stream)])


_INSTRUCTIONS = st.recursive(
    st.one_of(_leaves(), st.builds(_waits, st.sampled_from([7, 20]))),
    lambda inner: st.one_of(
        st.builds(s.op, st.just("aten::mm"), st.lists(inner, max_size=3)),
        st.builds(s.frame, st.just("train.py(9): forward"), st.lists(inner, max_size=3)),
        st.builds(s.optimizer, st.lists(inner, max_size=3)),
    ),
    max_leaves=12,
)
_PROGRAMS = st.lists(_INSTRUCTIONS, min_size=1, max_size=12).map(lambda body: [s.step(), s.launch("first", 5), *body, s.step()])


@settings(deadline=None, max_examples=80)
@given(_PROGRAMS, st.floats(0, 0.5), st.integers(0, 5))
def test_work_keeps_the_order_of_its_stream_and_starts_after_its_call(program: list[s.Instruction], jitter: float, seed: int) -> None:
    run = simulate(program, jitter=jitter, seed=seed)
    for stream in {work.stream for work in run.work}:
        own = [work for work in run.work if work.stream == stream]
        assert all(before.end_ns <= after.start_ns for before, after in itertools.pairwise(own))
    assert all(work.start_ns >= work.call_start_ns for work in run.work)
    assert all(work.start_ns >= work.depends_ns for work in run.work)


@settings(deadline=None, max_examples=80)
@given(_PROGRAMS, st.floats(0, 0.5))
def test_the_truth_tells_a_cause_for_every_idle_nanosecond(program: list[s.Instruction], jitter: float) -> None:
    run = simulate(program, jitter=jitter)
    first, last = run.marks[0], run.marks[-1]
    moments = sorted({first, last, *(min(max(t, first), last) for work in run.work for t in (work.start_ns, work.end_ns))})
    busy = sum(
        end - start for start, end in itertools.pairwise(moments) if any(work.start_ns <= start and work.end_ns >= end for work in run.work)
    )
    assert busy + sum(run.idle_ns().values()) == last - first
    assert "idle_unexplained" not in run.idle_ns()
    assert all(before.end_ns <= after.start_ns for before, after in zip(run.idle[:-1], run.idle[1:], strict=True))


@settings(deadline=None, max_examples=30)
@given(_PROGRAMS, st.booleans(), st.booleans())
def test_events_of_a_thread_nest_and_reach_the_tables_unchanged(program: list[s.Instruction], stacks: bool, rocm: bool) -> None:
    run = simulate([s.backward(program[1:-1]), *program], recording=Recording(stacks=stacks, rocm=rocm, sync_records=True))
    host = [e for e in run.events if e["cat"] in ("cpu_op", "python_function", "cuda_runtime")]
    for thread in {e["tid"] for e in host}:
        spans = sorted((round(e["ts"] * 1000), -round((e["ts"] + e["dur"]) * 1000)) for e in host if e["tid"] == thread)
        opened: list[int] = []
        for start, end in spans:
            while opened and opened[-1] <= start:
                opened.pop()
            assert not opened or -end <= opened[-1]
            opened.append(-end)
    trace = run.trace()
    expected = sorted((work.start_ns, work.end_ns, work.correlation) for work in run.work)
    assert sorted(trace.kernels.select("start_ns", "end_ns", "correlation").iter_rows()) == expected
    assert trace.kernels.join(trace.launches, on="correlation").height == len(expected)
    assert set(trace.kernels["stream"]) <= {7, 20}
    assert bool(trace.frames.height) == (stacks and any(e["cat"] == "python_function" for e in run.events))


def _mm(us: float, stream: int = 7) -> s.Instruction:
    return s.op("aten::mm", [s.python(10), s.launch("gemm", us, stream)])


def test_a_host_that_is_slower_than_the_device_sets_the_pace() -> None:
    """10 us of op and 4 us of call for each kernel of 5 us: the step lasts 100 x 14 us, and the device idles for the rest."""
    run = simulate([s.step(), *[_mm(5)] * 100, s.step(), *[_mm(5)] * 100, s.step()])
    assert run.step_ns == [1_400_000, 1_400_000]
    assert set(run.idle_ns()) == {"idle_launch"}
    assert sum(run.idle_ns().values()) == 2_800_000 - 199 * 5_000  # the last kernel starts 2 us after the last mark


def test_a_device_that_is_slower_sets_the_pace_through_a_wait() -> None:
    """Kernels of 50 us with 1 us between them, and a wait at the end of each step that returns 5 us after the last one."""
    run = simulate([s.step(), *[*[_mm(50)] * 10, s.sync(), s.step()] * 2])
    assert run.step_ns[1] == 16_000 + 10 * 50_000 + 9 * 1_000 + 5_000
    assert run.idle_ns()["idle_dependency"] == 2 * 9 * 1_000


def test_a_full_launch_queue_blocks_the_host() -> None:
    run = simulate([s.step(), *[_mm(100)] * 40, s.step()], hardware=Hardware(queue_limit=8))
    began = sorted(work.start_ns for work in run.work)
    for place, work in enumerate(run.work):
        waiting = sum(start > work.call_end_ns - 4_000 for start in began[:place])
        assert waiting < 8
    assert run.step_ns[0] > 30 * 100_000


def test_the_wait_of_an_item_is_charged_with_the_head_start_that_it_costs() -> None:
    """The device runs dry in .item(): what the host does until its next launch would have been done during the wait."""
    run = simulate([s.step(), *[_mm(300), s.item(), s.python(100)] * 3, s.step()])
    assert run.idle_ns()["idle_sync"] >= 3 * 100_000
    assert simulate([s.step(), *[_mm(300), s.python(100)] * 3, s.sync(), s.step()]).step_ns[0] < run.step_ns[0] - 2 * 100_000


def test_autograd_runs_on_its_own_thread_while_the_main_thread_waits() -> None:
    run = simulate([s.step(), _mm(50), s.backward([s.op("MmBackward0", [_mm(50)], seq=3)]), s.step()], recording=Recording(stacks=True))
    threads = {event["name"]: event["tid"] for event in run.events if event["cat"] in ("cpu_op", "python_function")}
    assert threads["MmBackward0"] == 2
    assert threads["torch/autograd/__init__.py(353): backward"] == 1


def test_threads_run_beside_each_other() -> None:
    """A second thread copies on its own stream; the step is as long as without it."""
    program = [s.step(), *[_mm(50)] * 10, s.sync(7), s.step()]
    copies = [s.block([s.copy("H2D pageable", 40, 20), s.python(20)])] * 5
    both = simulate(program, others=(copies,))
    assert both.step_ns == simulate(program).step_ns
    assert len(both.trace().launches["thread"].unique()) == 2


def test_the_same_seed_gives_the_same_run_and_another_one_does_not() -> None:
    program = [s.step(), *[_mm(50), s.loader(30)] * 10, s.step()]
    assert simulate(program, jitter=0.2, seed=1).events == simulate(program, jitter=0.2, seed=1).events
    assert simulate(program, jitter=0.2, seed=1).step_ns != simulate(program, jitter=0.2, seed=2).step_ns


def test_host_marks_carry_the_call_site() -> None:
    run = simulate([s.step(), _mm(5), s.frame("train.py(7): main", [s.gc(30), s.io(200)]), _mm(5), s.step()])
    assert [(mark["kind"], mark["site"], mark["duration_ns"]) for mark in run.host_marks] == [
        ("gc", "train.py(7): main", 30_000),
        ("save", "train.py(7): main", 200_000),
    ]
    assert run.trace().marks.filter(pl.col("name").cast(pl.String).str.contains("gc")).is_empty()
