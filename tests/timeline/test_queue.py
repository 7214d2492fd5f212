"""Launch delay, queue depth and the share of kernels that the device waited for, against simulated runs whose truth is known."""

from __future__ import annotations

from pathlib import Path

import kept
import numpy as np
import pytest
import simulator as s
from handmade import call, kernel, op, steps
from handmade import trace as handmade
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator import Hardware, Recording, Simulation, simulate

from gpudiag.attribution import intervals
from gpudiag.attribution.links import link_kernels
from gpudiag.attribution.steps import find_steps
from gpudiag.model.timeline import QueueStats
from gpudiag.model.trace import Trace
from gpudiag.timeline.launch_queue import CURVE_POINTS, measure_queue


def _stats(trace: Trace) -> QueueStats | None:
    found = find_steps(trace).table
    return measure_queue(link_kernels(trace, found, on_cpu=False)[0], found, intervals.build_spans(found.filter("analysed")))


def _of(run: Simulation) -> QueueStats:
    found = _stats(run.trace())
    assert found is not None
    return found


def _mm(us: float, stream: int = 7) -> s.Instruction:
    return s.op("aten::mm", [s.python(10), s.launch("gemm", us, stream)])


def test_a_worked_example() -> None:
    """Calls return at 11, 21 and 31 us, kernels run 15..40, 40..60 and 60..65 us, in a step of 100 us."""
    trace = handmade(
        *steps(0, 100),
        op("aten::mm", 5, 35),
        *[call(10, 1), call(20, 2), call(30, 3)],
        *[kernel(15, 40, 1), kernel(40, 60, 2), kernel(60, 65, 3)],
    )
    found = _stats(trace)
    assert found is not None
    assert (found.launches_per_step, found.kernels_per_step) == (3, 3)
    assert (found.delay_p10_ns, found.delay_median_ns, found.delay_p90_ns) == (4_000, 19_000, 29_000)
    assert found.depth_max == 3  # 31..40
    assert found.depth_median == 1  # 46 us at 0, 10 + 5 at 1 (11..21, 60..65), 10 + 20 at 2 (21..31, 40..60), 9 at 3
    assert found.empty_share == pytest.approx(0.46)
    assert found.host_bound_share == pytest.approx(1 / 3)
    assert np.average(found.depth) == pytest.approx((15 * 1 + 30 * 2 + 9 * 3) / 100, abs=0.01)


def test_a_slow_host_is_seen_as_host_bound() -> None:
    found = _of(simulate([s.step(), *[*[_mm(5)] * 100, s.step()] * 3], jitter=0.2))
    assert found.host_bound_share > 0.95
    assert found.depth_max == 1
    assert found.delay_median_ns == pytest.approx(2_000, rel=0.25)
    assert found.empty_share > 0.4


def test_a_host_that_runs_ahead_is_not() -> None:
    found = _of(simulate([s.step(), *[*[_mm(100)] * 100, s.sync(), s.step()] * 3], jitter=0.2))
    assert found.host_bound_share < 0.05
    assert found.depth_max > 80
    assert found.delay_median_ns > 1_000_000
    assert found.empty_share < 0.05


def test_one_launch_of_a_graph_counts_once_and_its_later_kernels_do_not_wait_for_the_host() -> None:
    nodes = [(f"node{number}", 20.0) for number in range(50)]
    found = _of(simulate([s.step(), *[s.python(2_000), s.graph(nodes), s.step()] * 3]))
    assert (found.launches_per_step, found.kernels_per_step) == (1, 50)
    assert found.delay_median_ns == 2_000
    assert found.host_bound_share == pytest.approx(1 / 50)


def test_the_depth_stays_below_the_limit_of_the_launch_queue() -> None:
    found = _of(simulate([s.step(), *[_mm(100)] * 100, s.step(), *[_mm(100)] * 100, s.step()], hardware=Hardware(queue_limit=32)))
    assert 32 <= found.depth_max <= 34  # the waiting ones, the one that runs, the one whose call has just returned


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200), st.sampled_from([7, 20])), min_size=1, max_size=30), st.booleans())
def test_depth_and_empty_share_agree_with_the_work_of_the_simulation(parts: list[tuple[int, int, int]], rocm: bool) -> None:
    body = [part for host, device, stream in parts for part in (s.python(host), _mm(device, stream))]
    run = simulate([s.step(), *body, s.step()], recording=Recording(rocm=rocm))
    found = _of(run)
    first, last = run.marks
    moments = np.linspace(first, last, 2_001)[:-1] + (last - first) / 4_002
    depth = sum((np.minimum(w.call_end_ns, w.start_ns) <= moments) & (moments < w.end_ns) for w in run.work)
    assert found.depth_max >= np.max(depth)
    assert np.average(found.depth) == pytest.approx(np.mean(depth), abs=0.15)
    assert found.empty_share == pytest.approx(np.mean(depth == 0), abs=0.05)
    assert len(found.t_ns) == len(found.depth) <= CURVE_POINTS
    assert 0 <= found.host_bound_share <= 1


def test_work_launched_before_the_window_counts_for_the_depth_from_its_start() -> None:
    found = _stats(handmade(*steps(0, 100), op("aten::mm", 5, 35), call(10, 1), kernel(20, 60, 1), kernel(30, 80, None, stream=9)))
    assert found is not None
    assert found.depth_max == 2
    assert (found.kernels_per_step, found.empty_share) == (1, pytest.approx(0.31))


def test_a_run_without_launches_has_no_figures() -> None:
    assert _stats(handmade(*steps(0, 100), kernel(10, 50, None))) is None
    assert _stats(handmade(*steps(0, 100), op("aten::mm", 5, 35))) is None


@pytest.mark.parametrize(
    ("name", "most", "least", "host_bound"),
    [
        ("h100_bert-small", 1, 1, (0.9, 1.0)),  # launch bound by its description
        ("a100_dlrm_train_cudagraph_triton_rank0of16", 1_024, 900, (0.0, 0.1)),  # pressed against CUDA's launch queue of 1,024
        ("h100_qwen1.5-0.5b_prefill", 200, 50, (0.0, 0.1)),
    ],
)
def test_real_traces(traces: Path, name: str, most: int, least: int, host_bound: tuple[float, float]) -> None:
    found = _stats(kept.tables(traces / f"{name}.json.gz"))
    assert found is not None
    assert least <= found.depth_max <= most
    assert host_bound[0] <= found.host_bound_share <= host_bound[1]
