"""The nn.Module of each op, from frames of the same window or of another."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import kept
import pytest
from handmade import op, steps, trace

from gpudiag.attribution.call_sites import find_modules, find_own_modules
from gpudiag.attribution.links import link_kernels
from gpudiag.attribution.steps import find_steps
from gpudiag.model.trace import Trace


def frame(name: str, start: float, end: float, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": "python_function", "name": name, "pid": 1, "tid": tid, "ts": start, "dur": end - start, "args": {}}


def window(*events: dict[str, Any]) -> Trace:
    made = trace(*events)
    return link_kernels(made, find_steps(made).table, on_cpu=True)[0]


FRAMES = [
    frame("train.py(40): main", 0, 100),
    frame("nn.Module: Net_0", 5, 60),
    frame("model.py(7): forward", 6, 59),
    frame("nn.Module: Linear_0", 11, 20),
    frame("nn.Module: Linear_1", 21, 30),
    frame("nn.Module: Relu_0", 62, 70),
]
OPS = [
    op("aten::randn", 1, 2),
    op("aten::linear", 12, 18, seq=4),
    op("aten::mm", 13, 17),
    op("aten::linear", 22, 28, seq=5),
    op("aten::add", 40, 50),
    op("aten::relu", 63, 69),
]
BACKWARD = [op("autograd::engine::evaluate_function: LinearBackward0", 110, 140, tid=2, seq=5), op("aten::mm", 115, 120, tid=2)]
PATHS = [None, "Net_0.Linear_0", "Net_0.Linear_0", "Net_0.Linear_1", "Net_0", "Relu_0"]


def test_the_path_of_the_modules_around_an_op() -> None:
    assert find_modules(window(*steps(0, 200), *FRAMES, *OPS), None).to_list() == PATHS


def test_a_backward_op_has_the_module_of_its_forward_op() -> None:
    found = find_modules(window(*steps(0, 200), *FRAMES, *OPS, *BACKWARD), None)
    assert found.to_list()[6:] == ["Net_0.Linear_1"] * 2


def test_modules_are_carried_over_from_the_window_with_stacks() -> None:
    plain, other = window(*steps(0, 200), *OPS), window(*steps(0, 200), *FRAMES, *OPS)
    assert find_modules(plain, (other, find_steps(other).table)).to_list() == PATHS
    assert find_modules(plain, None).to_list() == [None] * 6


def test_modules_within_each_other_without_end_have_a_path_of_sane_length() -> None:
    depth = 20_000
    frames = [frame(f"nn.Module: Block_{k}", k, 3 * depth - k) for k in range(depth)]
    made = window(*steps(0, 4 * depth), *frames, op("aten::mm", depth + 1, depth + 2))
    before = time.perf_counter()
    (path,) = find_modules(made, None).to_list()
    assert time.perf_counter() - before < 5
    assert path.startswith("Block_0.Block_1.")
    assert len(path) < 2_100


@pytest.mark.parametrize("name", ["nn.Module: ", "nn.Module", "my nn.Module: Net_0"])
def test_other_frames_are_no_modules(name: str) -> None:
    assert find_modules(window(*steps(0, 200), frame(name, 0, 100), op("aten::mm", 5, 6)), None).to_list() == [None]


def test_a_module_that_is_called_again_from_the_backward_pass_keeps_its_place() -> None:
    again = [
        op("autograd::engine::evaluate_function: CheckpointFunctionBackward", 110, 190, tid=2, seq=77),
        frame("nn.Module: Linear_1", 112, 130, tid=2),
        op("aten::linear", 115, 120, tid=2, seq=90),
        frame("nn.Module: Relu_0", 140, 150, tid=2),
        op("aten::relu", 141, 149, tid=2, seq=91),
    ]
    found = find_modules(window(*steps(0, 200), *FRAMES, *OPS, *again), None).to_list()
    assert found[: len(PATHS)] == PATHS
    assert found[len(PATHS) + 1 :] == ["Net_0.Linear_1", "Relu_0"]


def test_without_module_frames_the_users_own_forward_stands_for_the_module() -> None:
    frames = [
        frame("train.py(40): main", 0, 100),
        frame("model.py(7): forward", 6, 59),
        frame("/usr/lib/python3/site-packages/torch/nn/modules/linear.py(125): forward", 11, 20),
    ]
    found = find_modules(window(*steps(0, 200), *frames, *OPS[:2], OPS[5]), None).to_list()
    assert found == [None, "model.py(7): forward", None]


def test_repeated_forward_work_of_a_real_run_has_the_modules_of_its_forward_pass(traces: Path) -> None:
    trace = kept.tables(traces / "mi300x_resnet18_ddp8_actckpt_train_rank0.json.gz")
    trace = link_kernels(trace, find_steps(trace).table, on_cpu=False)[0]
    modules = find_own_modules(trace)
    forward = set(modules.filter(trace.ops["phase"] == "forward").drop_nulls())
    again = modules.filter(trace.ops["recompute"])
    assert again.is_not_null().mean() > 0.99
    assert set(again.drop_nulls()) <= forward
    assert all(path.startswith("DistributedDataParallel_0.ResNet_0") for path in again.drop_nulls())


@pytest.mark.slow
def test_modules_of_two_hundred_thousand_frames_take_a_part_of_a_second(traces: Path) -> None:
    trace = kept.tables(traces / "mi300x_flux1_xdit_compiled.json.gz")
    trace = link_kernels(trace, find_steps(trace).table, on_cpu=False)[0]
    before = time.perf_counter()
    found = find_own_modules(trace)
    assert time.perf_counter() - before < 1.5
    assert found.is_not_null().mean() > 0.9
