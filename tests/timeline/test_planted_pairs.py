"""A cause is planted in one run and not in the other: the what-if on the bad run gives the step time of the good one within 15 %.

The runs are simulated (tests/simulator.py, which shares no code with the replay), so the good one is not computed by what is tested.
"""

from __future__ import annotations

import statistics

import polars as pl
import pytest
import simulator as s
from examples import sample
from replayed import study
from simulator import Hardware, Recording, Simulation, simulate

from gpudiag.model.trace import build_table_schema
from gpudiag.timeline.whatif.registry import parse_settings
from gpudiag.timeline.whatif.study import Study

STEPS = 12
QUEUE = 64
"""Short, so that a host that runs ahead is held up within the few steps of the test, as a queue of 1,024 does in a long run."""

SIDE = 4096
SQUARE = [[SIDE, SIDE], [SIDE, SIDE]]


def _op(name: str, us: float, host: float = 10, stream: int = 7) -> s.Instruction:
    return s.op(name, [s.python(host), s.launch(name.removeprefix("aten::") + "_kernel", us, stream)], shapes=SQUARE)


def _forward(us: float = 80, host: float = 10, count: int = 12) -> list[s.Instruction]:
    return [s.op("aten::linear", [_op("aten::mm", us, host)], seq=number) for number in range(count)]


def _training(us: float = 80, host: float = 10, count: int = 12) -> list[s.Instruction]:
    """A step of `count` layers: forward, backward of twice the work, optimizer."""
    nodes = [
        s.op("autograd::engine::evaluate_function: MmBackward0", [_op("aten::mm", 2 * us, host)], seq=n) for n in reversed(range(count))
    ]
    return [*_forward(us, host, count), s.backward(nodes), s.optimizer([_op("aten::_fused_sgd_", 60)])]


def _tail() -> list[s.Instruction]:
    return [s.python(30, "train.py(40): main")]


def _small(number: int) -> s.Instruction:
    return s.op("aten::mm", [s.python(10), s.launch("mm_kernel", 4 + number % 3)])


def _graphed() -> list[s.Instruction]:
    return [s.graph([("mm_kernel", 4 + number % 3) for number in range(200)])]


_POINTWISE_US = 3 * SIDE * SIDE * 4 / 3.35e12 / 0.85 * 1e6
"""Two inputs and one output of 4 bytes an element at 85 % of an H100's 3.35 TB/s (datasheet)."""


def _pointwise(count: int) -> list[s.Instruction]:
    """`count` ops of two inputs each; fused, only the first input, the second ones and the last output are moved."""
    return [_op("aten::mul", _POINTWISE_US) for _ in range(count)]


def _fused(count: int) -> list[s.Instruction]:
    return [_op("triton_poi_fused_mul_0", _POINTWISE_US * (count + 2) / 3)]


def _after_copy(kind: str) -> list[s.Instruction]:
    return [s.op("aten::to", [s.op("aten::_to_copy", [s.op("aten::copy_", [s.python(5), s.copy(kind, 900)])])]), *_training()]


def _prefetched() -> list[s.Instruction]:
    return [s.op("aten::to", [s.op("aten::_to_copy", [s.op("aten::copy_", [s.python(5), s.copy("H2D pinned", 900, 21)])])]), *_training()]


def _reduced(overlapped: bool) -> list[s.Instruction]:
    """Gradients are reduced on stream 20 at the end of backward; overlapped: the optimizer waits for those of the step before only."""
    reduce = s.op(
        "c10d::allreduce_",
        [
            s.event_record("ready"),
            s.event_wait("ready", 20),
            s.launch("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 1200, 20),
            s.event_record("done", 20),
        ],
    )
    nodes = [s.op("autograd::engine::evaluate_function: MmBackward0", [_op("aten::mm", 160)], seq=n) for n in reversed(range(12))]
    wait = [] if overlapped else [s.event_wait("done")]
    return [*_forward(), s.backward([*nodes, reduce]), *wait, s.optimizer([_op("aten::_fused_sgd_", 60)])]


def _churn() -> list[s.Instruction]:
    return [s.op("aten::empty", [s.malloc(400), s.malloc(300, "cudaFree")]), *_training()]


PAIRS: dict[str, tuple[list[s.Instruction], list[s.Instruction], str]] = {
    "slow loader": ([s.loader(2500), *_training(), s.sync()], [*_training(), s.sync()], "loader=0"),
    "slow loader, host ahead": ([s.loader(6000), *_training()], _training(), "loader=0"),
    "item in every step": ([*_training(20, 30), s.item(), s.python(900)], [*_training(20, 30), s.python(900)], "sync=0"),
    "many small reads": (
        [part for _ in range(20) for part in (_op("aten::mm", 15), s.item(), s.python(20))],
        [part for _ in range(20) for part in (_op("aten::mm", 15), s.python(20))],
        "sync=0",
    ),
    "device synchronize after every layer": (
        [part for layer in _forward(60, 70) for part in (layer, s.sync())] + _tail(),
        [*_forward(60, 70), *_tail()],
        "sync=0",
    ),
    "launch bound": ([s.python(200), *[_small(number) for number in range(200)]], [s.python(200), *_graphed()], "launch=0"),
    "launch bound, waits at the end": (
        [s.python(50), *[_small(number) for number in range(200)], s.item()],
        [s.python(50), *_graphed(), s.item()],
        "launch=0",
    ),
    "garbage collection": ([*_training(20, 30), s.gc(1500)], _training(20, 30), "gc=0"),
    "checkpoint in every step": ([*_training(20, 30), s.item(), s.io(4000)], [*_training(20, 30), s.item()], "io=0"),
    "copy from pageable memory": ([*_after_copy("H2D pageable"), s.item()], [*_prefetched(), s.item()], "copies=overlapped"),
    "copy from pinned memory, not overlapped": ([*_after_copy("H2D pinned"), s.item()], [*_prefetched(), s.item()], "copies=overlapped"),
    "copy from pinned memory, no waits": (_after_copy("H2D pinned"), _prefetched(), "copies=overlapped"),
    "exposed all-reduce, no waits": (_reduced(overlapped=False), _reduced(overlapped=True), "communication=overlapped"),
    "exposed all-reduce": ([*_reduced(overlapped=False), s.item()], [*_reduced(overlapped=True), s.item()], "communication=overlapped"),
    "unfused pointwise": ([*_forward(), *_pointwise(8)], [*_forward(), *_fused(8)], "fused"),
    "allocation churn": (_churn(), _training(), "allocation=0"),
    "recompiles": ([s.compile(5000), *_training(), s.sync()], [*_training(), s.sync()], "compile=0"),
}  # fmt: skip


def _run(step: list[s.Instruction], jitter: float, recording: Recording | None = None) -> Simulation:
    body = [part for _ in range(STEPS) for part in (s.step(), *step)]
    return simulate([s.python(5), *body, s.step()], jitter=jitter, seed=7, recording=recording, hardware=Hardware(queue_limit=QUEUE))


def _study(run: Simulation) -> Study:
    trace = run.trace()
    marks = [
        {"kind": m["kind"], "name": m["name"], "start_unix_ns": trace.meta.unix_base_ns + m["start_ns"], "duration_ns": m["duration_ns"],
         "site": m["site"], "step": None}
        for m in run.host_marks
    ]  # fmt: skip
    return study(trace, pl.DataFrame(marks, schema=build_table_schema("host_marks")))


@pytest.mark.parametrize(
    ("rocm", "jitter"),
    [
        pytest.param(False, 0.1, id="cuda-0.1"),
        pytest.param(True, 0.0, id="rocm-0.0"),
        pytest.param(False, 0.0, id="cuda-0.0", marks=pytest.mark.slow),
        pytest.param(True, 0.1, id="rocm-0.1", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", sample(PAIRS, 6))
def test_the_what_if_on_the_bad_run_gives_the_step_of_the_good_one(name: str, rocm: bool, jitter: float) -> None:
    bad, good, change = PAIRS[name]
    recording = Recording(rocm=rocm)
    slow, fast = _run(bad, jitter, recording), _run(good, jitter, recording)
    before, after = (statistics.median(run.step_ns[4:-1]) for run in (slow, fast))
    assert after < 0.93 * before, "the planted cause costs something"
    found = _study(slow).what_if(parse_settings([change]))
    assert found.step_ns == pytest.approx(before, rel=0.05), "with nothing changed the replay gives the measured step"
    assert found.changed_ns == pytest.approx(after, rel=0.15)
