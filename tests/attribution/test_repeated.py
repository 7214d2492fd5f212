"""Which forward op a repeated op repeats: in both kinds of checkpointing, and not where names differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kept
import numpy as np
import polars as pl
import pytest
from handmade import linked, op, steps

from gpudiag.attribution.autograd import find_repeated_forward, pair_forward_ops
from gpudiag.attribution.links import link_kernels
from gpudiag.attribution.steps import find_steps
from gpudiag.model.trace import Trace

Event = dict[str, Any]
X = [[8, 8]]


def node(name: str, start: float, end: float, seq: int) -> Event:
    made = op(name, start, end, seq=seq)
    made["args"]["Fwd thread id"] = 1
    return made


def repeats(*events: Event) -> list[tuple[str, float | None]]:
    """Return (name, start in us of the forward op) of each repeated aten op."""
    trace = linked(*steps(0, 1000), *events)
    names = trace.ops["name"].cast(pl.String)
    found = find_repeated_forward(trace.ops, pair_forward_ops(trace.ops), names.str.starts_with("aten::").to_numpy())
    again = trace.ops["recompute"].to_numpy()
    starts = trace.ops["start_ns"].to_list()
    return [(names[int(row)], starts[found[row]] / 1000 if found[row] >= 0 else None) for row in np.flatnonzero(again)]


def block(start: float, first: int | None, *names: str) -> list[Event]:
    """Return ops of 5 us every 10 us; `first`: sequence number of the first, None: gradients were off."""
    return [
        op(f"aten::{name}", start + 10 * n, start + 10 * n + 5, X if first is None else None, seq=None if first is None else first + n)
        for n, name in enumerate(names)
    ]


REENTRANT = [op("CheckpointFunction", 95, 140, X, seq=3), *block(100, None, "mm", "relu", "mm")]


def test_all_ops_within_the_custom_function_are_repeated_in_its_node() -> None:
    found = repeats(
        *block(0, None, "mm", "relu", "mm"),  # the same names before
        *REENTRANT,
        node("CheckpointFunctionBackward", 500, 600, 3),
        op("aten::empty", 505, 506),
        op("aten::detach", 507, 508, X),
        *block(510, 7, "mm", "relu", "mm"),
    )
    assert found == [("aten::mm", 100), ("aten::relu", 110), ("aten::mm", 120)]


@pytest.mark.parametrize("names", [("mm", "relu"), ("mm", "tanh", "mm"), ("mm", "relu", "mm", "mm")])
def test_other_ops_than_those_of_the_region_repeat_nothing(names: tuple[str, ...]) -> None:
    detach = op("aten::detach", 507, 508, X)
    found = repeats(*REENTRANT, node("CheckpointFunctionBackward", 500, 600, 3), detach, *block(510, 7, *names))
    assert found == [(f"aten::{name}", None) for name in names]


def test_a_repetition_ends_with_the_op_of_the_node_that_needs_it() -> None:
    """Equal layers, of which the last is not repeated: the node's number tells which layer it was. An op more ran before the stop."""
    layers = [*block(0, 1, "mm", "relu"), *block(20, 3, "mm", "relu"), *block(40, 5, "mm", "relu")]
    again = [node("ReluBackward0", 500, 600, 4), op("aten::detach", 505, 506, X)]
    expected = [("aten::mm", 20), ("aten::relu", 30)]
    assert repeats(*layers, *again, *block(510, 7, "mm", "relu")) == expected
    assert repeats(*layers, *again, *block(510, 7, "mm", "relu", "mm")) == [*expected, ("aten::mm", 40)]


def test_ops_without_a_tensor_are_not_compared() -> None:
    """Whether they are repeated cannot be seen, so that they are missing among the repeated ones."""
    made = [op("CheckpointFunction", 95, 140, X, seq=3), op("aten::arange", 96, 98, [[], []]), *block(100, None, "mm")]
    again = [op("aten::arange", 502, 503), op("aten::detach", 507, 508, X)]
    assert repeats(*made, node("CheckpointFunctionBackward", 500, 600, 3), *again, *block(510, 7, "mm")) == [("aten::mm", 100)]


def test_a_node_without_a_forward_repeats_nothing() -> None:
    again = [node("ReluBackward0", 500, 600, 99), op("aten::detach", 505, 506, X), *block(510, 7, "mm")]
    assert repeats(*block(0, 1, "mm", "relu"), *again) == [("aten::mm", None)]


def _real(traces: Path, name: str) -> Trace:
    trace = kept.tables(traces / name)
    return link_kernels(trace, find_steps(trace).table, on_cpu=False)[0]


def test_a_real_training_repeats_what_its_record_says(traces: Path) -> None:
    """Shapes were recorded in the backward thread of this one: each op found has the inputs of the op that repeats it."""
    trace = _real(traces, "mi300x_resnet18_ddp8_actckpt_train_rank0.json.gz")
    work = trace.ops["name"].cast(pl.String).is_in(["aten::miopen_convolution", "aten::miopen_batch_norm", "aten::clamp_min_"]).to_numpy()
    found = find_repeated_forward(trace.ops, pair_forward_ops(trace.ops), work)
    again = np.flatnonzero(trace.ops["recompute"].to_numpy() & work)
    assert len(again) > 100
    assert (found[again] >= 0).all()
    signature = trace.ops["signature"].to_numpy()
    assert (signature[found[again]] == signature[again]).all()
    assert len(np.unique(found[again])) == len(again)
