"""Collectives of CPU back ends: spans of gloo as torch 2.13 records them, one process group and several."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from handmade import op, steps
from handmade import trace as made
from noticewords import format_notices

from gpudiag.attribution.device import find_cpu_gaps, find_cpu_spans
from gpudiag.attribution.intervals import build_spans
from gpudiag.attribution.links import link_kernels
from gpudiag.attribution.steps import find_steps
from gpudiag.trace import read_trace

ONE_GROUP = {"backend": "gloo", "rank": 0, "world_size": 4, "pg_count": 1}


def gloo(name: str, start: float, end: float, shapes: list[list[int]], dtype: str = "float") -> dict[str, Any]:
    event = op(f"gloo:{name}", start, end, shapes, dtype=dtype, tid=7)
    return event | {"cat": "user_annotation"}


def test_spans_of_gloo_are_collectives_with_their_message() -> None:
    events = [gloo("all_reduce", 10, 90, [[524800]]), gloo("all_gather", 100, 120, [[10], [20]], "c10::BFloat16"), op("aten::mm", 0, 5)]
    trace = made(*events, distributedInfo=ONE_GROUP)
    assert trace.collectives.select("name", "size", "in_elements", "out_elements", "dtype").rows() == [
        ("all_reduce", 4, 524800, 524800, "Float"),
        ("all_gather", 4, 30, 120, "BFloat16"),
    ]
    names = trace.ops["name"].cast(pl.String).gather(trace.collectives["op"])
    assert names.to_list() == ["gloo:all_reduce", "gloo:all_gather"]


def test_of_several_groups_the_size_is_not_known() -> None:
    trace = made(gloo("all_reduce", 10, 90, [[8]]), op("aten::mm", 0, 5), distributedInfo=ONE_GROUP | {"pg_count": 2})
    assert trace.collectives["size"].to_list() == [None]


@pytest.mark.parametrize("shapes", [[], [[[1], [2]]], [[-4]], [[2**40, 2**40]]])
def test_messages_that_are_none_are_unknown(shapes: list[Any]) -> None:
    trace = made(gloo("all_reduce", 10, 90, shapes), op("aten::mm", 0, 5))
    assert trace.collectives["in_elements"].to_list() == [None]


def test_the_training_threads_wait_is_communication_and_no_gap() -> None:
    events = [*steps(0, 100), op("aten::mm", 10, 40), gloo("all_reduce", 30, 80, [[8]]), op("aten::copy_", 80, 95)]
    trace = made(*events)
    table = find_steps(trace).table
    trace, nesting = link_kernels(trace, table, on_cpu=True)
    sent = trace.kernels.filter("collective")
    assert sent.select("start_ns", "end_ns", "busy_ns").rows() == [(30_000, 80_000, 50_000)]
    _, spans = find_cpu_spans(trace.ops, trace.kernels, nesting)
    assert find_cpu_gaps(spans, build_spans(table)).select("start_ns", "end_ns").rows() == [(0, 10_000), (95_000, 100_000)]


def test_overloads_are_one_operator(write: Callable[..., Path], event: Callable[..., dict[str, Any]]) -> None:
    spelled = {
        "aten::sum.dim_IntList": "aten::sum",
        "aten::sum": "aten::sum",
        "aten::add_.Tensor": "aten::add_",
        "fbgemm::lookup.v2": "fbgemm::lookup",
        "torch.distributed.ddp.reducer::copy_bucket_to_grad": "torch.distributed.ddp.reducer::copy_bucket_to_grad",
        "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad": (
            "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
        ),
        "nn.Module: block.0": "nn.Module: block.0",
    }
    path = write([event(name=name, ts=100 * row) for row, name in enumerate(spelled)])
    assert read_trace(path).ops["name"].cast(pl.String).to_list() == list(spelled.values())


def test_a_backward_pass_without_numbers_says_that_recomputation_cannot_be_told() -> None:
    silent = made(op("aten::relu", 0, 5, [[8]]), op("ReluBackward0", 10, 20, [[8]]))
    assert any("sequence numbers" in text for text in format_notices(silent.meta.notices))
    numbered = made(op("aten::relu", 0, 5, [[8]], seq=3), op("ReluBackward0", 10, 20, [[8]], seq=3))
    assert not any("sequence numbers" in text for text in format_notices(numbered.meta.notices))
    assert not format_notices(made(op("aten::relu", 0, 5, [[8]])).meta.notices)
