"""Columns come out of the buffers as they went in, however they were cut into chunks."""

from __future__ import annotations

from typing import Any

import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from gpudiag.trace.table_store import Store

_WHOLE = st.integers(-(2**63), 2**63 - 1)
_ROW = st.tuples(
    st.integers(-(10**18), 10**18),
    st.none() | _WHOLE,
    st.integers(0, 2**32 - 1),
    st.none() | st.floats(allow_nan=False),
    st.sampled_from(["kernel", "memcpy", "a word of more than twelve letters"]),
)
_SCHEMA: dict[str, Any] = {"start_ns": pl.Int64, "bytes": pl.Int64, "name": pl.UInt32, "occupancy": pl.Float64, "kind": pl.String}


@given(st.lists(st.lists(_ROW, max_size=5), max_size=6))
@settings(deadline=None)
def test_a_table_is_its_chunks_one_below_the_other(chunks: list[list[Any]]) -> None:
    frames = [pl.DataFrame(rows, schema=_SCHEMA, orient="row") for rows in chunks]
    store = Store()
    for frame in frames:
        store.take({"kernels": frame})
    whole = pl.concat(frames) if frames else pl.DataFrame(schema=_SCHEMA)
    assert store.base_ns == whole["start_ns"].min()
    assert pl.DataFrame(store.take_columns("kernels"), schema=_SCHEMA).equals(whole)
    assert store.take_columns("kernels") == {}  # it was taken away


def _ops(count: int) -> pl.DataFrame:
    return pl.DataFrame({"start_ns": list(range(count))}, schema={"start_ns": pl.Int64})


def _fields(op: int | None, kernel: int | None) -> pl.DataFrame:
    return pl.DataFrame({"op": [op], "kernel": [kernel]}, schema={"op": pl.Int64, "kernel": pl.Int64})


def test_collectives_point_at_rows_of_the_whole_file() -> None:
    store = Store()
    store.take({"ops": _ops(3), "collectives": _fields(2, None)})
    store.take({"kernels": _ops(4)})
    store.take({"collectives": _fields(0, None), "ops": _ops(1)})
    store.take({"ops": _ops(2), "kernels": _ops(2), "collectives": _fields(None, 1)})
    assert store.collectives().rows() == [(2, None), (3, None), (None, 5)]
