"""Which forward op an autograd node belongs to: where numbers are shared, repeated, missing or hostile, and on all real traces."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import kept
import numpy as np
import polars as pl
import pytest
from handmade import linked, op, steps
from realtraces import recordings

from gpudiag.attribution.autograd import find_autograd_nodes, pair_forward_ops
from gpudiag.attribution.links import link_kernels
from gpudiag.attribution.steps import find_steps
from gpudiag.model.trace import build_empty_table, build_table_schema
from gpudiag.roofline.costs import find_kind
from gpudiag.roofline.costs.registry import BACKWARD_FORMULAS

Event = dict[str, Any]


def node(name: str, start: float, seq: int, thread: int | None = 1, tid: int = 1) -> Event:
    """Return an autograd node of 10 us for the forward op with number `seq` of autograd's forward thread `thread` (None: not recorded)."""
    made = op(name, start, start + 10, [[8, 8]], seq=seq, tid=tid)
    if thread is not None:
        made["args"]["Fwd thread id"] = thread
    return made


def paired(*events: Event) -> dict[str, tuple[str | None, bool]]:
    """Return node -> (forward op, whether the names agree), each with its start where a name occurs twice."""
    ops = linked(*steps(0, 10_000), *events).ops.with_columns(pl.col("name").cast(pl.String))
    found = pair_forward_ops(ops.with_columns(pl.col("name").cast(pl.Categorical)), BACKWARD_FORMULAS)
    names, starts = ops["name"].to_list(), ops["start_ns"].to_list()
    rows = np.flatnonzero(find_autograd_nodes(ops) & ops["sequence"].is_not_null().to_numpy())
    label = {row: f"{names[row]}@{starts[row] // 1000}" for row in range(ops.height)}
    return {label[row]: (label[found.forward[row]] if found.forward[row] >= 0 else None, bool(found.named[row])) for row in rows.tolist()}


def test_a_wrapper_shares_its_number_with_the_first_op_that_makes_a_node() -> None:
    found = paired(
        op("aten::linear", 0, 50, seq=3),
        op("aten::t", 5, 10, seq=3),
        op("aten::addmm", 15, 40, seq=4),
        node("AddmmBackward0", 100, 4),
        node("autograd::engine::evaluate_function: TBackward0", 120, 3),
    )
    assert found["AddmmBackward0@100"] == ("aten::addmm@15", True)
    assert found["autograd::engine::evaluate_function: TBackward0@120"] == ("aten::t@5", True)


@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        ("aten::nll_loss_forward", "NllLossBackward0"),
        ("aten::_log_softmax", "LogSoftmaxBackward0"),
        ("aten::relu_", "ReluBackward0"),
        ("aten::max_pool2d_with_indices", "MaxPool2DWithIndicesBackward0"),
        ("aten::gelu_backward", "GeluBackwardBackward0"),
        ("aten::cudnn_convolution", "CudnnConvolutionBackward"),
        ("CheckpointFunction", "CheckpointFunctionBackward"),
        ("MyLookup", "torch::autograd::CppNode<mine::MyLookup<float> >"),
    ],
)
def test_names_that_belong_together(forward: str, backward: str) -> None:
    found = paired(op("aten::detach", 0, 5, seq=7), op(forward, 10, 20, seq=7), op("aten::view", 12, 14, seq=7), node(backward, 100, 7))
    assert found[f"{backward}@100"] == (f"{forward}@10", True)


def test_a_node_without_an_op_of_its_name_belongs_to_the_last_op_under_its_number() -> None:
    found = paired(op("aten::copy_", 0, 5, seq=7), op("mine::fused", 10, 30, seq=7), op("aten::add", 40, 50, seq=8), node("Other", 100, 7))
    assert found["Other@100"] == ("mine::fused@10", False)


def test_an_operator_that_skips_the_autograd_layer_took_the_number_before_the_next_op() -> None:
    name = next(name for name in BACKWARD_FORMULAS if name.startswith("fbgemm::"))
    lookup = "torch::autograd::CppNode<SplitLookup>"
    found = paired(
        op("aten::to", 0, 5, seq=7),
        op(name, 10, 30),
        op(name, 32, 38),
        op("aten::add", 40, 50, seq=9),
        node(lookup, 100, 7),
        node(lookup, 120, 8),
    )
    assert found == {f"{lookup}@100": (f"{name}@10", False), f"{lookup}@120": (f"{name}@32", False)}


def test_numbers_count_for_each_forward_thread_alone() -> None:
    replicas = [op("aten::mm", 10 * tid, 10 * tid + 5, seq=1, tid=tid) for tid in (1, 2)]
    others = [op("aten::relu", 50, 55, seq=2, tid=1), op("aten::gelu", 50, 55, seq=2, tid=2)]
    nodes = [node("MmBackward0", 100, 1, thread=5, tid=3), node("GeluBackward0", 90, 2, thread=5, tid=3)]
    more = [node("MmBackward0", 200, 1, thread=4, tid=3), node("ReluBackward0", 190, 2, thread=4, tid=3)]
    found = paired(*replicas, *others, *nodes, *more)
    assert found["MmBackward0@100"] == ("aten::mm@20", True)
    assert found["MmBackward0@200"] == ("aten::mm@10", True)


def test_two_threads_that_nothing_tells_apart_are_each_used_once() -> None:
    replicas = [op("aten::mm", 10 * tid, 10 * tid + 5, seq=1, tid=tid) for tid in (1, 2)]
    found = paired(*replicas, node("MmBackward0", 100, 1, thread=5, tid=3), node("MmBackward0", 200, 1, thread=6, tid=3))
    assert {forward for forward, _ in found.values()} == {"aten::mm@10", "aten::mm@20"}


def test_a_node_that_does_not_name_its_forward_thread_goes_by_number_and_name() -> None:
    found = paired(op("aten::mm", 0, 5, seq=1, tid=1), op("aten::relu", 0, 5, seq=1, tid=2), node("MmBackward0", 20, 1, thread=None, tid=3))
    assert found == {"MmBackward0@20": ("aten::mm@0", True)}


def test_a_second_recording_of_a_number_belongs_to_the_forward_before_it() -> None:
    found = paired(op("aten::mm", 0, 5, seq=1), node("MmBackward0", 20, 1), op("aten::mm", 40, 45, seq=1), node("MmBackward0", 60, 1))
    assert [forward for forward, _ in found.values()] == ["aten::mm@0", "aten::mm@40"]


def test_a_node_whose_forward_was_not_recorded_has_none() -> None:
    assert paired(node("MmBackward0", 20, 1), op("aten::mm", 40, 45, seq=1)) == {"MmBackward0@20": (None, False)}


def _table(count: int, sequence: Any, fwd_thread: Any, thread: Any, names: list[str]) -> pl.DataFrame:
    rows = np.arange(count)
    made = pl.DataFrame(
        {
            "id": rows, "thread": np.broadcast_to(thread, count), "name": [names[row % len(names)] for row in rows.tolist()],
            "start_ns": rows * 10, "end_ns": rows * 10 + 5, "sequence": np.broadcast_to(sequence, count),
            "fwd_thread": np.broadcast_to(fwd_thread, count),
        }
    )  # fmt: skip
    return made.cast({name: kind for name, kind in build_table_schema("ops").items() if name in made.columns})


HOSTILE = 200_000


@pytest.mark.parametrize(
    ("sequence", "fwd_thread", "thread"),
    [
        (1, 1, 0),
        (-(2**63), 1, 0),
        (2**63 - 1, 2**63 - 1, 0),
        (1, np.arange(HOSTILE) % 2 * np.arange(HOSTILE), np.sort(np.arange(HOSTILE) // 2)),
        (np.arange(HOSTILE)[::-1].copy(), np.arange(HOSTILE) % 3, 0),
    ],
    ids=["one number", "lowest", "highest", "a thread each", "falling"],
)
def test_broken_numbers_cost_no_more_than_sound_ones(sequence: Any, fwd_thread: Any, thread: Any) -> None:
    ops = _table(HOSTILE, sequence, fwd_thread, thread, ["aten::mm", "MmBackward0", "fbgemm::x", "AddBackward0"])
    begun = time.perf_counter()
    found = pair_forward_ops(ops, BACKWARD_FORMULAS)
    assert time.perf_counter() - begun < 5
    assert len(found.forward) == HOSTILE
    paired_rows = np.flatnonzero(found.forward >= 0)
    assert (found.forward[paired_rows] < paired_rows).all()


def test_no_ops_no_pairs() -> None:
    assert len(pair_forward_ops(build_empty_table("ops", "link")).forward) == 0


EXPECTED_UNNAMED = 0.06
"""Lookups of FBGEMM, whose node has another name, are at most this share of the nodes of a recommendation model."""


@pytest.mark.slow
def test_every_node_of_every_real_trace_finds_its_forward(traces: Path) -> None:
    seen = 0
    for path in recordings(traces):
        trace = kept.tables(path)
        ops = link_kernels(trace, find_steps(trace).table, on_cpu=False)[0].ops
        rows = find_autograd_nodes(ops) & ops["sequence"].is_not_null().to_numpy()
        if not rows.any():
            continue
        found = pair_forward_ops(ops, BACKWARD_FORMULAS)
        seen += int(rows.sum())
        assert (found.forward[rows] >= 0).all(), path.name
        assert 1 - found.named[rows].mean() <= EXPECTED_UNNAMED, path.name
        unnamed = ops["name"].cast(pl.String).gather(found.forward[rows & ~found.named])
        assert unnamed.str.starts_with("fbgemm::").all(), (path.name, unnamed.unique().to_list())
    assert seen > 10_000


def test_backward_formulas_are_of_known_operators() -> None:
    """A name that nothing records would never pair."""
    assert not [name for name in BACKWARD_FORMULAS if name.startswith("aten::") and find_kind(name) is None]
