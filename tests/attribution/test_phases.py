"""Phases of ops from autograd nodes, sequence numbers and torch's own marks."""

from __future__ import annotations

import polars as pl
from handmade import linked, mark, op


def test_phases() -> None:
    events = [
        mark("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 10), op("aten::stack", 2, 8),
        op("aten::linear", 20, 30, seq=5), op("aten::addmm", 22, 28), op("aten::empty", 31, 32),
        op("autograd::engine::evaluate_function: AddmmBackward0", 40, 60, tid=2, seq=5), op("AddmmBackward0", 42, 58, tid=2, seq=5),
        op("aten::mm", 44, 50, tid=2),
        mark("Optimizer.step#SGD.step", 70, 90), op("aten::_foreach_add_", 72, 88), op("aten::item", 75, 80, tid=2),
        mark("Optimizer.zero_grad#SGD.zero_grad", 91, 95), op("aten::zero_", 92, 94),
    ]  # fmt: skip
    found = linked(*events, on_cpu=True).ops
    phases = dict(found.select(pl.col("name").cast(pl.String), "phase").iter_rows())
    assert phases == {
        "aten::stack": "data", "aten::linear": "forward", "aten::addmm": "forward", "aten::empty": None,
        "autograd::engine::evaluate_function: AddmmBackward0": "backward", "AddmmBackward0": "backward", "aten::mm": "backward",
        "aten::_foreach_add_": "optimizer", "aten::item": None, "aten::zero_": "optimizer",
    }  # fmt: skip


def test_recomputation_inside_the_backward_pass_counts_as_backward() -> None:
    events = [op("autograd::engine::evaluate_function: CheckpointFunctionBackward", 0, 50, seq=1), op("aten::mm", 10, 20, seq=9)]
    assert linked(*events, on_cpu=True).ops["phase"].to_list() == ["backward", "backward"]
