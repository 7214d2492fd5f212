"""What was done between moments: which thread trains, cycles of several optimizers, what only a step holds."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from handmade import call, kernel, mark, op, trace

from gpudiag.attribution import step_patterns


def test_the_training_thread_is_that_of_the_forward_pass() -> None:
    backward = [op(f"autograd::engine::evaluate_function: MmBackward{k}", 10 + k, 11 + k, tid=2) for k in range(9)]
    made = trace(op("aten::mm", 0, 5, tid=7, seq=1), *backward, *(op("aten::stack", k, k + 1, tid=3) for k in range(20)))
    assert made.meta.threads[step_patterns.find_training_thread(made)].tid == "7"


def test_a_trace_without_host_threads_has_no_training_thread() -> None:
    made = trace(kernel(0, 5, None))
    assert step_patterns.find_training_thread(msgspec.structs.replace(made, marks=made.marks.clear())) == -1


@pytest.mark.parametrize(("names", "expected"), [("AAAAAAAA", 1), ("ABABABAB", 2), ("AABAABAAB", 3)])
def test_optimizers_of_different_names_take_turns(names: str, expected: int) -> None:
    ends = np.arange(1, len(names) + 1) * 10_000
    made = trace(op("aten::mm", 0, 1))
    assert step_patterns.find_cycle(made, ends, list(names)) == expected


def test_a_cycle_is_told_by_the_work_in_between_where_names_are_equal() -> None:
    work = {"d": ["aten::conv", "aten::relu", "aten::relu", "aten::mul"], "g": ["aten::linear", "aten::tanh"]}
    events, ends = [], []
    for row, kind in enumerate("ddgddgddgddg"):
        start = row * 100
        events += [op(name, start + k, start + k + 1) for k, name in enumerate(work[kind] * 3)]
        ends.append((start + 90) * 1000)
    assert step_patterns.find_cycle(trace(mark("zero", 0, 0), *events), np.array(ends), ["Optimizer.step#Adam.step"] * 12) == 3


def test_intervals_with_a_varying_number_of_equal_ops_are_one_cycle() -> None:
    rng = np.random.default_rng(5)
    events, ends = [], []
    for row in range(30):
        count = int(rng.integers(95, 105))
        events += [op(f"aten::op{k % 7}", row * 200 + k, row * 200 + k + 0.5) for k in range(count)]
        ends.append((row * 200 + 190) * 1000)
    assert step_patterns.find_cycle(trace(mark("zero", 0, 0), *events), np.array(ends), ["Optimizer.step#SGD.step"] * 30) == 1


def test_optimizer_ops_are_one_run_until_the_next_forward_op() -> None:
    def iteration(at: float) -> list[dict[str, object]]:
        return [
            op("aten::linear", at, at + 5, seq=1),
            op("autograd::engine::evaluate_function: AddmmBackward0", at + 6, at + 9, tid=2),
            op("aten::_foreach_add_", at + 10, at + 12),
            op("aten::_foreach_addcdiv_", at + 13, at + 15),
        ]

    made = trace(mark("zero", 0, 0), *iteration(100), *iteration(200), *iteration(300))
    bursts = step_patterns.find_optimizer_bursts(made).select("start_ns", "end_ns").rows()
    assert bursts == [(110_000, 115_000), (210_000, 215_000), (310_000, 315_000)]


def test_schedulers_step_too_and_are_no_optimizers() -> None:
    def frame(name: str, start: float, end: float) -> dict[str, object]:
        return {"ph": "X", "cat": "python_function", "name": name, "pid": 1, "tid": 1, "ts": start, "dur": end - start, "args": {}}

    made = trace(
        frame("torch/optim/lr_scheduler.py(120): step", 0, 5),
        frame("torch/optim/adamw.py(200): step", 10, 20),
        frame("apex/optimizers/fused_adam.py(90): step", 30, 40),
        frame("torch/amp/grad_scaler.py(400): step", 50, 60),
        frame("my/walker.py(3): step", 70, 80),
    )
    assert step_patterns.find_optimizer_frames(made)["name"].to_list() == [
        "torch/optim/adamw.py(200): step", "apex/optimizers/fused_adam.py(90): step",
    ]  # fmt: skip


def test_kernels_stand_in_the_order_of_their_launch_and_not_of_their_run() -> None:
    made = trace(call(10, 1), call(20, 2), call(30, 3), kernel(90, 95, 1, "a"), kernel(50, 60, 2, "b", stream=9), kernel(96, 99, 3, "a"))
    found = step_patterns.build_kernel_sequence(made)
    assert (found.starts_ns - found.starts_ns[0]).tolist() == [0, 10_000, 20_000]
    assert found.codes[0] == found.codes[2] != found.codes[1]


def _trained(at: float, *, layers: int = 2, kind: str = "Addmm", extra: int = 0) -> list[dict[str, object]]:
    """Return 100 us: a forward and a backward pass over `layers`, then `extra` forward ops without gradients."""
    return [
        *(op("aten::linear", at + row, at + row + 1, seq=row) for row in range(layers)),
        *(op(f"autograd::engine::evaluate_function: {kind}Backward0", at + 20 + row, at + 21 + row, tid=2) for row in range(layers)),
        *(op("aten::linear", at + 50 + row, at + 51 + row) for row in range(extra)),
    ]


@pytest.mark.parametrize("every", [2, 4, 5, 8])
def test_evaluation_every_few_steps_is_no_further_optimizer(every: int) -> None:
    intervals = [_trained(100 * row, extra=40 if row % every == every - 1 else 0) for row in range(40)]
    ends = np.arange(1, 41) * 100_000
    made = trace(mark("zero", 0, 0), *(event for interval in intervals for event in interval))
    assert step_patterns.find_cycle(made, ends, ["Optimizer.step#SGD.step"] * 40) == 1


@pytest.mark.parametrize("critics", [1, 3, 5])
def test_a_critic_whose_ops_the_generators_pass_holds_too_takes_turns_with_it(critics: int) -> None:
    turns = [_trained(100 * row, layers=8 if row % (critics + 1) == critics else 3) for row in range(48)]
    ends = np.arange(1, 49) * 100_000
    made = trace(mark("zero", 0, 0), *(event for turn in turns for event in turn))
    assert step_patterns.find_cycle(made, ends, ["Optimizer.step#Adam.step"] * 48) == critics + 1


def test_without_backward_passes_extra_work_every_few_intervals_is_no_cycle() -> None:
    events = [op(f"aten::op{k}", 100 * row + k, 100 * row + k + 1) for row in range(40) for k in range(40 if row % 4 == 3 else 10)]
    ends = np.arange(1, 41) * 100_000
    assert step_patterns.find_cycle(trace(mark("zero", 0, 0), *events), ends, ["batch"] * 40) == 1


@pytest.mark.parametrize("seed", range(5))
def test_backward_passes_of_random_length_are_no_cycle(seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(2, 19, size=18)
    events = [event for row, layers in enumerate(lengths) for event in _trained(100 * row, layers=int(layers))]
    ends = np.arange(1, 19) * 100_000
    assert step_patterns.find_cycle(trace(mark("zero", 0, 0), *events), ends, ["Optimizer.step#SGD.step"] * 18) == 1
