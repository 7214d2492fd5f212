"""Which op takes the result of a call."""

from __future__ import annotations

from typing import Any

import polars as pl
from handmade import linked, op, steps

from gpudiag.roofline.attributed_ops import parse_signatures
from gpudiag.roofline.inferred_costs import LOOK_AHEAD, find_result_consumers

SIZE = [2, 8, 7, 7]


def takers(*events: dict[str, Any]) -> dict[str, str | None]:
    """Return convolution -> name of the op that takes its result."""
    trace = linked(*steps(0, 10_000), *events)
    names, recorded = trace.ops["name"].cast(pl.String).to_list(), trace.ops["signature"].to_list()
    found = find_result_consumers(
        trace.ops, trace.ops["parent"].fill_null(-1).to_numpy(), parse_signatures(trace), ["aten::conv2d", "aten::convolution"]
    )
    assert all(row < 0 for name, row in zip(names, found.tolist(), strict=True) if "conv" not in name)
    return {
        name: next((other for other, own in zip(names, recorded, strict=True) if own == row), None)
        for name, row in zip(names, found.tolist(), strict=True)
        if "conv" in name
    }


def test_the_next_op_behind_the_outermost_call_takes_the_result() -> None:
    inner, inside = op("aten::convolution", 2, 40, [SIZE, SIZE]), op("aten::add", 42, 48, [[1, 1, 1, 1]])
    found = takers(op("aten::conv2d", 0, 50, [SIZE, SIZE]), inner, inside, op("aten::relu", 60, 70, [[2, 9, 7, 7]]))
    assert found == {"aten::conv2d": "aten::relu", "aten::convolution": "aten::relu"}


def test_an_op_that_begins_as_the_call_ends_takes_it() -> None:
    assert takers(op("aten::conv2d", 0, 50, [SIZE, SIZE]), op("aten::relu", 50, 60, [[2, 9, 7, 7]])) == {"aten::conv2d": "aten::relu"}


def test_ops_of_other_dimensions_are_passed_over_but_not_for_long() -> None:
    small = [op("aten::add_", 60 + 10 * n, 65 + 10 * n, [[3]]) for n in range(LOOK_AHEAD)]
    relu = op("aten::relu", 500, 510, [[2, 9, 7, 7]])
    assert takers(op("aten::conv2d", 0, 50, [SIZE, SIZE]), *small[1:], relu) == {"aten::conv2d": "aten::relu"}
    assert takers(op("aten::conv2d", 0, 50, [SIZE, SIZE]), *small, relu) == {"aten::conv2d": None}


def test_each_thread_has_its_own_next_op() -> None:
    found = takers(
        op("aten::conv2d", 0, 50, [SIZE, SIZE], tid=1),
        op("aten::relu", 60, 70, [[2, 9, 7, 7]], tid=2),
        op("aten::gelu", 80, 90, [[2, 9, 5, 5]], tid=1),
    )
    assert found == {"aten::conv2d": "aten::gelu"}
