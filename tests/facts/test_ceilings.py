"""Findings on simulated runs: the planted cause is found at its line, and the ceiling is what the run without it really gains."""

from __future__ import annotations

import statistics
from pathlib import Path

import msgspec
import polars as pl
import pytest
import simulator as s
from examples import sample
from simulator import Hardware, Recording, Simulation, simulate

from gpudiag.analysis import analyse
from gpudiag.diagnosis import judge, load_rules
from gpudiag.facts import Facts
from gpudiag.facts.window import Window
from gpudiag.inputs import resolve_input
from gpudiag.model.analysis import Analysis
from gpudiag.model.finding import Finding
from gpudiag.timeline.graph import build_all_graphs
from gpudiag.timeline.replay import measure_replay_trust

STEPS = 12
"""Enough for a host that runs ahead of a queue of 16 places to be held up by the device, as in a long run."""
WITHIN = 0.15


def _layers(us: float = 120, count: int = 12) -> list[s.Instruction]:
    side = [[2048, 2048], [2048, 2048]]
    return [s.op("aten::mm", [s.python(10), s.launch("gemm_kernel", us)], shapes=side) for _ in range(count)]


def _loop(step: list[s.Instruction]) -> Simulation:
    program = [*([s.step(), *step, s.python(30, "train.py(9): main")] * STEPS), s.step()]
    return simulate(program, recording=Recording(stacks=True), hardware=Hardware(queue_limit=16))


def _analysed(run: Simulation, folder: Path) -> Analysis:
    analysis = analyse(resolve_input(str(run.write(folder / "trace.json")), None), lambda _: None)
    if analysis.graphs:
        return analysis
    assert analysis.syncs is not None
    graphs = build_all_graphs(analysis.trace, analysis.steps, analysis.idle, analysis.syncs, False)[0]
    return msgspec.structs.replace(analysis, graphs=graphs, replay=measure_replay_trust(graphs, analysis.steps))


def _finding(analysis: Analysis, rule: str) -> Finding:
    judgement = judge(analysis, load_rules())
    assert judgement.fact_errors == {}
    return next(found for found in judgement.findings if found.rule == rule)


def _step_ns(run: Simulation) -> float:
    return statistics.median(run.step_ns[-6:-1])


def _between(planted: list[s.Instruction]) -> list[s.Instruction]:
    return [instruction for _ in range(6) for instruction in (*_layers(60, 4), *planted)]


PAIRS = {
    "INP-01": ([s.frame("exp/train.py(12): batches", [s.loader(3000)]), *_layers()], _layers()),
    "SYN-01": (_between([s.frame("exp/train.py(41): log", [s.item()])]), _between([])),
    "SYN-03": (_between([s.frame("exp/train.py(52): timed", [s.sync("device")])]), _between([])),
    "SYN-04": ([*_layers(), s.frame("exp/train.py(30): step", [s.malloc(4000)]), *_layers()], [*_layers(), *_layers()]),
    "OVH-05": ([s.frame("exp/train.py(20): step", [s.compile(5000)]), *_layers()], _layers()),
}


@pytest.mark.parametrize("rule", sample(sorted(PAIRS), 3))
def test_the_ceiling_is_what_the_run_without_the_cause_gains(rule: str, tmp_path: Path) -> None:
    bad, good = (_loop(step) for step in PAIRS[rule])
    finding = _finding(_analysed(bad, tmp_path), rule)
    assert finding.ceiling is not None
    assert finding.ceiling.method == "replay"
    assert finding.ceiling.error_share is not None
    then = (1 - finding.ceiling.share) * _step_ns(bad)
    assert then == pytest.approx(_step_ns(good), rel=WITHIN)


@pytest.mark.parametrize(("rule", "line"), [("INP-01", 12), ("SYN-01", 41), ("SYN-03", 52), ("SYN-04", 30), ("OVH-05", 20)])
def test_findings_point_at_the_line(rule: str, line: int, tmp_path: Path) -> None:
    places = _finding(_analysed(_loop(PAIRS[rule][0]), tmp_path), rule).where
    assert (places[0].file, places[0].line) == ("exp/train.py", line)


def test_own_code_is_named_call_by_call_at_the_line_that_calls_it_and_its_bound_holds(tmp_path: Path) -> None:
    calls = [s.python(3000, "PIL/Image.py(10): resize"), s.python(1500, "numpy/core.py(5): clip"), s.python(100, "exp/train.py(70): count")]
    layers = _layers(60)
    bad, good = _loop([s.frame("exp/train.py(60): prepare", calls), *layers]), _loop(layers)
    analysis = _analysed(bad, tmp_path)
    finding = _finding(analysis, "OVH-08")
    assert [(place.what, place.file, place.line) for place in finding.where] == [
        ("resize() of Image.py", "exp/train.py", 60), ("clip() of core.py", "exp/train.py", 60)]  # fmt: skip
    resize, clip = (place.time_ns / analysis.steps["analysed"].sum() / 1e6 for place in finding.where)
    assert clip == pytest.approx(1.5, rel=0.05)
    assert 2 < resize < 3  # the device still works when it begins
    assert finding.fixes == ()
    assert finding.ceiling is not None
    assert (1 - finding.ceiling.share) * _step_ns(bad) == pytest.approx(_step_ns(good), rel=WITHIN)


def test_what_is_hidden_gains_nothing_and_is_said(tmp_path: Path) -> None:
    """Communication on a stream of its own, shorter than what the host takes to issue the next step."""
    slow = [s.op("aten::mm", [s.python(400), s.launch("gemm_kernel", 20)]) for _ in range(10)]
    step = [*slow[:2], s.launch("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 900, 20), *slow[2:]]
    analysis = _analysed(_loop(step), tmp_path)
    facts = Facts(analysis)
    exposed, gained = facts.value("exposed_communication_ns"), facts.value("communication_overlapped_ns")
    assert isinstance(exposed, int)
    assert isinstance(gained, float)
    assert facts.replayed("communication_overlapped_ns")
    assert exposed > 0.1 * analysis.wall_ns
    assert gained < 0.001 * analysis.wall_ns


def test_without_a_graph_ceilings_are_formulas(tmp_path: Path) -> None:
    analysis = msgspec.structs.replace(_analysed(_loop(PAIRS["INP-01"][0]), tmp_path), graphs=(), replay=None)
    ceiling = _finding(analysis, "INP-01").ceiling
    assert ceiling is not None
    assert (ceiling.method, ceiling.error_share) == ("formula", None)
    assert ceiling.time_ns == Facts(analysis).value("loader_wait_ns")


def test_only_where_steps_are_left_out_idle_time_speaks_against_a_small_gain(tmp_path: Path) -> None:
    """A cause with a second of idle time of which the replay gives back a few ms: it is hidden, or stood in steps left out."""
    analysis = _analysed(_loop(PAIRS["INP-01"][0]), tmp_path)
    window, idle = Window(analysis), 1e9
    assert 0 < window.what_if_ns("loader=0", otherwise=lambda: idle) < 0.5 * idle
    part = Window(msgspec.structs.replace(analysis, run_graph=None))
    assert part.what_if_ns("loader=0", otherwise=lambda: idle) == idle


def test_slower_hosts_under_the_profiler_are_no_finding(tmp_path: Path) -> None:
    slow = [s.op("aten::mm", [s.python(40), s.launch("gemm_kernel", 30)]) for _ in range(20)]
    analysis = _analysed(_loop(slow), tmp_path)
    idle = Facts(analysis).value("idle_launch_share")
    assert isinstance(idle, float)
    assert 0.15 < idle < 0.6
    rules = load_rules()
    for slowdown, status in ((1.02, "fired"), (1.15, "fired"), (1.19, "fired"), (1.5, "not_applicable")):
        outcomes = judge(msgspec.structs.replace(analysis, profiler_slowdown=slowdown), rules).outcomes
        assert next(found.status for found in outcomes if found.id == "OVH-01") == status, slowdown


def test_faster_kernels_gain_where_only_the_profiler_lets_the_host_limit_the_step(tmp_path: Path) -> None:
    # recorded, the host takes 150 us for each product of 140 us; 1.15 times as fast, the device may be what limits the step
    side = [[2048, 2048], [2048, 2048]]
    made = _analysed(
        _loop([s.op("aten::mm", [s.python(150), s.launch("ampere_sgemm_128x64_nn", 140)], shapes=side) for _ in range(12)]), tmp_path
    )
    paced = {slow: Window(msgspec.structs.replace(made, profiler_slowdown=slow)) for slow in (None, 1.0, 1.15)}
    kernels = {slow: window.saving_ns(window.kernels, pl.lit(0.0)) / window.wall_ns for slow, window in paced.items()}
    assert kernels[None] == kernels[1.0] <= 0.03
    assert kernels[1.15] > 0.3
