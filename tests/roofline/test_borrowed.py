"""A repeated forward on a thread without shapes costs what its forward costs."""

from __future__ import annotations

from pathlib import Path

import kept
import msgspec
import polars as pl
from handmade import call, kernel, linked, op, steps

from gpudiag.attribution.links import link_kernels
from gpudiag.attribution.steps import find_steps
from gpudiag.model.ops import Cost
from gpudiag.model.trace import Trace
from gpudiag.roofline.attributed_ops import find_attributed_ops, inherit_signatures


def matrix_flops(trace: Trace) -> tuple[int, int]:
    """Return the matrix FLOP of the distinct calls that own kernels: (forward and backward, repeated)."""
    found = find_attributed_ops(trace, on_cpu=False)
    again = trace.ops["recompute"].to_list()
    calls = {(owner, row) for owner, row in zip(found.owner.tolist(), found.call.tolist(), strict=True) if row >= 0}
    total = [0, 0]
    for owner, row in calls:
        cost = found.costs[row]
        total[bool(again[owner])] += cost.matrix_flops if isinstance(cost, Cost) else 0
    return total[0], total[1]


def test_the_cost_is_that_of_the_forward_and_derived() -> None:
    """[16, 32] x [32, 8]: 2 * 16 * 8 * 32 FLOP."""
    node = op("CheckpointFunctionBackward", 500, 600, seq=3)
    node["args"]["Fwd thread id"] = 1
    trace = linked(
        *steps(0, 10_000),
        op("CheckpointFunction", 0, 50, [[16, 32]], seq=3),
        op("aten::mm", 10, 20, [[16, 32], [32, 8]]),
        node,
        op("aten::detach", 502, 503),
        op("aten::mm", 510, 520, seq=7),
        call(511, 1),
        kernel(1000, 1100, 1, "gemm"),
    )
    found = find_attributed_ops(trace, on_cpu=False)
    cost = found.costs[found.call[0]]
    assert isinstance(cost, Cost)
    assert (cost.matrix_flops, cost.provenance) == (2 * 16 * 8 * 32, "derived")


def without_backward_shapes(trace: Trace) -> Trace:
    """Return the trace as if the threads that repeat forward work had recorded no shapes."""
    threads = trace.ops.filter("recompute")["thread"].unique().implode()
    bare = pl.when(pl.col("thread").is_in(threads)).then(None).otherwise("signature")
    return msgspec.structs.replace(trace, ops=trace.ops.with_columns(signature=bare))


def test_a_real_training_keeps_its_matrix_work_without_shapes_in_the_backward_thread(traces: Path) -> None:
    """ResNet-18 with checkpointing: all repeated convolutions, and both gradients but of the first layer's input."""
    trace = kept.tables(traces / "mi300x_resnet18_ddp8_actckpt_train_rank0.json.gz")
    trace = link_kernels(trace, find_steps(trace).table, on_cpu=False)[0]
    bare = without_backward_shapes(trace)
    assert bare.ops.filter("recompute")["signature"].null_count() == bare.ops["recompute"].sum() > 1000
    assert matrix_flops(bare) == matrix_flops(trace)


def test_a_trace_that_repeats_nothing_is_left_alone() -> None:
    trace = linked(*steps(0, 1000), op("aten::mm", 10, 20, [[16, 32], [32, 8]]), op("aten::mm", 30, 40))
    ops, borrowed = inherit_signatures(trace.ops)
    assert ops is trace.ops
    assert not borrowed.any()
