"""What-ifs on costs that not every step has: the gain is what the run without them really gains.

The true gain is that of two simulated runs (tests/simulator.py, which shares no code with the replay): how much sooner the device is done
with twenty steps, when queues are full and the pattern has come round often.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import simulator as s
from examples import sample
from replayed import study
from simulator import Hardware, Recording, Simulation, simulate

from gpudiag.timeline.whatif.registry import parse_settings

STEPS, SETTLED, LAYERS = 42, 21, 12
"""The first and the last step are not analysed: 40 hold every pattern a whole number of times, and so do the last twenty of them."""


def _run(every: int, cost: list[s.Instruction], layer_us: float, always: list[s.Instruction]) -> Simulation:
    layers = [s.op("aten::mm", [s.python(10), s.launch("mm_kernel", layer_us)]) for _ in range(LAYERS)]
    steps = [part for number in range(STEPS) for part in (s.step(), *layers, *always, *(cost if number % every == 0 else []))]
    return simulate([s.python(5), *steps, s.step()], hardware=Hardware(queue_limit=64), recording=Recording(stacks=True))


def _settled_ns(run: Simulation) -> int:
    ends = [work.end_ns for work in run.work if "mm_kernel" in work.name]
    return ends[(STEPS - 1) * LAYERS - 1] - ends[SETTLED * LAYERS - 1]


LOG = [s.python(3000, "train.py(7): log")]

RARE: dict[str, tuple[str, int, list[s.Instruction], list[s.Instruction], float]] = {
    "loader hidden by the queue": ("loader=0", 4, [s.loader(3000)], [], 80),
    "loader partly hidden, every 2nd": ("loader=0", 2, [s.loader(6000)], [], 80),
    "loader partly hidden, every 4th": ("loader=0", 4, [s.loader(6000)], [], 80),
    "loader partly hidden, every 10th": ("loader=0", 10, [s.loader(6000)], [], 80),
    "file hidden by the queue": ("io=0", 5, [s.io(8000)], [], 200),
    "file partly hidden": ("io=0", 5, [s.io(20_000)], [], 200),
    "sync before a log": ("sync=0", 4, [s.sync(), *LOG], LOG, 80),
}


@pytest.mark.parametrize("name", sample(RARE, 2))
def test_a_rare_cost_gains_what_the_run_without_it_gains(name: str) -> None:
    setting, every, cost, rest, layer_us = RARE[name]
    bad, good = _run(every, cost, layer_us, []), _run(every, rest, layer_us, [])
    true = 1 - _settled_ns(good) / _settled_ns(bad)
    found = study(bad.trace()).what_if(parse_settings([setting]))
    assert found.share == pytest.approx(true, abs=0.02)


@pytest.mark.parametrize("wait", [s.item, lambda: s.sync("device")], ids=["item", "sync"])
def test_the_unchanged_run_has_its_measured_length(wait: Callable[[], s.Instruction]) -> None:
    bad = _run(4, [s.loader(4000)], 80, [wait()])
    found = study(bad.trace()).what_if(parse_settings(["loader=0"]))
    assert found.step_ns == pytest.approx(sum(bad.step_ns[1:-1]) / (STEPS - 2), rel=0.01)


def test_what_each_representative_step_gives_is_told_beside() -> None:
    found = study(_run(4, [s.loader(6000)], 80, []).trace()).what_if(parse_settings(["loader=0"]))
    assert 1 < len(found.per_step_ns) <= 3
    before = [unchanged for _, unchanged, _ in found.per_step_ns]
    assert min(before) <= found.step_ns <= max(before)


def test_python_between_the_steps_is_in_no_cuda_graph() -> None:
    """20 kernels of 5 us and 2 ms of Python behind them: a graph takes what issuing them took, 20 x (10 + 4) us at most, not the 2 ms."""
    small = [s.op("aten::mm", [s.python(10), s.launch("mm_kernel", 5)]) for _ in range(20)]
    run = simulate([part for _ in range(8) for part in (s.step(), *small, s.item(), s.python(2000))] + [s.step()])
    found = study(run.trace()).what_if(parse_settings(["launch=0"]))
    assert 2_000_000 < found.changed_ns < found.step_ns - 100_000
