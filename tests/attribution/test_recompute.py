"""What counts as forward work repeated in the backward pass: on recordings of both kinds of checkpointing, and on a real training run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kept
import polars as pl
import pytest
from handmade import linked, op, steps
from realtraces import reference

from gpudiag.attribution import intervals
from gpudiag.attribution.device import classify_run
from gpudiag.attribution.links import link_kernels
from gpudiag.attribution.steps import find_steps
from gpudiag.model.trace import Trace
from gpudiag.trace import read_trace

Event = dict[str, Any]


def node(name: str, start: float, end: float, seq: int, thread: int = 1, tid: int = 1) -> Event:
    """Return an autograd node of the forward op with number `seq`."""
    made = op(name, start, end, [[8, 8]], seq=seq, tid=tid)
    made["args"]["Fwd thread id"] = thread
    return made


def repeated(trace: Trace) -> list[str]:
    return trace.ops.filter("recompute")["name"].cast(pl.String).to_list()


def test_numbered_ops_in_a_node_whose_own_ops_carry_no_number_repeat_a_forward() -> None:
    trace = linked(
        *steps(0, 1000),
        op("aten::relu", 0, 10, [[8, 8]], seq=4),
        node("ReluBackward0", 100, 200, 4),
        op("aten::linear", 110, 140, [[8, 8], [8, 8]], seq=9),
        op("aten::addmm", 115, 135, [[8], [8, 8], [8, 8]], seq=9),
        op("aten::copy_", 120, 125, [[8], [8]]),
        op("aten::threshold_backward", 150, 180, [[8, 8], [8, 8]]),
    )
    assert repeated(trace) == ["aten::linear", "aten::addmm", "aten::copy_"]


def test_a_node_that_runs_the_engine_repeats_a_forward_though_all_its_ops_carry_numbers() -> None:
    """A custom function that turns gradients on, calls its forward and then backward() in its own node (reversible layers)."""
    trace = linked(
        *steps(0, 1000),
        node("ReversibleBackward", 100, 300, 4),
        op("aten::mul", 110, 140, [[8, 8], [8, 8]], seq=9),
        node("autograd::engine::evaluate_function: MulBackward0", 150, 200, 9),
        node("MulBackward0", 155, 195, 9),
        op("aten::mul", 160, 180, [[8, 8], [8, 8]]),
    )
    assert repeated(trace) == ["aten::mul"]
    assert trace.ops.filter("recompute")["sequence"].to_list() == [9]


def test_a_differentiable_backward_is_no_repetition() -> None:
    """create_graph=True: all that a node does carries numbers, but for ops without a tensor argument."""
    trace = linked(
        *steps(0, 1000),
        op("aten::mul", 0, 10, [[8, 8], [8, 8]], seq=4),
        node("MulBackward0", 100, 200, 4),
        op("aten::zeros", 105, 110, [[]]),
        op("aten::mul", 110, 140, [[8, 8], [8, 8]], seq=9),
        op("aten::mul", 150, 180, [[8, 8], [8, 8]], seq=10),
    )
    assert repeated(trace) == []


def test_numbered_ops_outside_the_backward_pass_are_no_repetition() -> None:
    assert repeated(linked(*steps(0, 1000), op("aten::linear", 0, 50, seq=1), op("aten::t", 5, 10, seq=1), op("aten::empty", 20, 30))) == []


def test_nodes_of_2021_without_a_call_of_the_engine_are_backward(traces: Path) -> None:
    trace = kept.tables(traces / "v100_resnet50_train_2021_memory_callstack.json.gz")
    ops = link_kernels(trace, find_steps(trace).table, on_cpu=False)[0].ops.with_columns(pl.col("name").cast(pl.String))
    nodes = ops.filter(pl.col("name").str.contains(r"Backward\d*$"))
    assert nodes.height == 1068
    below = ops.filter(pl.col("name").str.contains("cudnn_convolution_backward"))
    assert set(nodes["phase"]) == set(below["phase"]) == {"backward"}


def _record(work: Any, path: Path) -> Trace:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorder:
        work()
    recorder.export_chrome_trace(str(path))
    trace = read_trace(path)
    return link_kernels(trace, find_steps(trace).table, on_cpu=classify_run(trace).startswith("cpu"))[0]


@pytest.fixture(scope="module")
def network() -> Any:
    from torch import nn

    parts = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(144, 8), nn.LayerNorm(8), nn.GELU())
    return nn.Sequential(*parts)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.needs("torch")
def test_checkpointing_repeats_each_layer_once(network: Any, reentrant: bool, tmp_path: Path) -> None:
    import torch
    from torch.utils.checkpoint import checkpoint

    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    trace = _record(lambda: checkpoint(network, x, use_reentrant=reentrant).sum().backward(), tmp_path / "trace.json")
    names = repeated(trace)
    layers = ("aten::conv2d", "aten::batch_norm", "aten::relu", "aten::linear", "aten::layer_norm", "aten::gelu")
    assert [names.count(layer) for layer in layers] == [1] * len(layers)
    assert not any("backward" in name.lower() for name in names)


@pytest.mark.needs("torch")
def test_a_gradient_penalty_repeats_nothing(network: Any, tmp_path: Path) -> None:
    import torch

    x = torch.randn(2, 3, 8, 8, requires_grad=True)

    def step() -> None:
        loss = network(x).pow(2).mean()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + (gradient.norm() - 1) ** 2).backward()

    assert repeated(_record(step, tmp_path / "trace.json")) == []


def test_recomputed_time_of_a_real_run(traces: Path) -> None:
    """TraceLens counts 4.122 ms of recomputed kernels; it leaves out the memsets that some convolutions begin with."""
    name = "mi300x_resnet18_ddp8_actckpt_train_rank0"
    trace = kept.tables(traces / f"{name}.json.gz")
    trace = link_kernels(trace, find_steps(trace).table, on_cpu=False)[0]
    kernels = trace.kernels.join(trace.ops.select(pl.col("id").alias("op"), "recompute"), on="op").filter("recompute")
    assert dict(kernels.group_by("kind").len().rows()) == {"kernel": 591, "memset": 24}
    found = intervals.build_spans(kernels.filter(pl.col("kind") == "kernel"))
    told = reference(traces, name)["tracelens"]["gpu_timeline_ms"]["recompute"]["busy_time"]
    assert float((found[:, 1] - found[:, 0]).sum()) / 1e6 == pytest.approx(told, rel=1e-5)
