"""Calls of communication back ends on the CPU ('gloo:all_reduce') as rows of the table of collectives."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import msgspec
import polars as pl
from msgspec import Raw

from gpudiag.trace.columns import JSON_ERRORS
from gpudiag.trace.comm_groups import no_group_columns
from gpudiag.trace.events import ABSENT, CompleteArgs

_SAME_SIZE = ("all_reduce", "allreduce", "broadcast", "reduce", "send", "recv", "all_to_all", "alltoall")
_GATHERS = ("all_gather", "allgather", "gather")
_LARGEST = 2**63 - 1
_MOST_RANKS = 2**20
"""More than any run has: a damaged header."""

# "Input type" -> what record_param_comms calls it ("dtype" of a collective); c10/core/ScalarType.h
_TYPES = {
    "float": "Float", "double": "Double", "long": "Long", "long int": "Long", "int": "Int", "short": "Short", "short int": "Short",
    "unsigned char": "Byte", "signed char": "Char", "bool": "Bool", "c10::complex<float>": "ComplexFloat",
}  # fmt: skip


def backend_collectives(rows: Sequence[int], names: Sequence[str], args: Sequence[CompleteArgs]) -> dict[str, pl.Series]:
    """Return the columns of the collectives of the ops `rows`: their recorded tensors are what they are given.

    What they result in is as large for those that change nothing but values; group and its size are not recorded with the call.
    """
    given = [_elements(item.dims) for item in args]
    result = [count if name in _SAME_SIZE else None for name, count in zip(names, given, strict=True)]
    blank = [None] * len(rows)
    return {
        "kernel": pl.Series(blank, dtype=pl.Int64),
        "op": pl.Series(rows, dtype=pl.Int64),
        "name": pl.Series(names, dtype=pl.String),
        "group": pl.Series(blank, dtype=pl.String),
        "size": pl.Series(blank, dtype=pl.Int64),
        "in_elements": pl.Series(given, dtype=pl.Int64),
        "out_elements": pl.Series(result, dtype=pl.Int64),
        "dtype": pl.Series([_dtype(item.dtypes) for item in args], dtype=pl.String),
        "seq": pl.Series(blank, dtype=pl.Int64),
    } | no_group_columns(len(rows))


def with_group_size(collectives: pl.DataFrame, size: int | None) -> pl.DataFrame:
    """Return `collectives` (stage 'read') with the size of the only process group where none was recorded with the call.

    A gathering call then results in that many times what it was given. `size`: None where there are several groups, or it is not known.
    """
    if size is None or size > _MOST_RANKS:
        return collectives
    silent = pl.col("size").is_null() & pl.col("group").is_null() & pl.col("op").is_not_null()
    gathered = (
        silent & pl.col("name").is_in(_GATHERS) & pl.col("out_elements").is_null() & (pl.col("in_elements") < _LARGEST // _MOST_RANKS)
    )
    ranks = pl.lit(size, dtype=pl.Int64)
    return collectives.with_columns(
        pl.when(silent).then(ranks).otherwise("size").alias("size"),
        pl.when(gathered).then(pl.col("in_elements") * ranks).otherwise("out_elements").alias("out_elements"),
    )


def _elements(dims: Raw) -> int | None:
    """Return the elements of all tensors in 'Input Dims' ('[[524800]]'); None where the sizes of one are not known."""
    try:
        shapes = msgspec.json.decode(dims, type=list[list[int]]) if dims is not ABSENT else []
    except JSON_ERRORS:
        return None
    if not shapes or any(size < 0 for shape in shapes for size in shape):
        return None
    total = sum(prod(shape) for shape in shapes)
    return total if total <= _LARGEST else None


def _dtype(dtypes: Raw) -> str | None:
    """Return the one type of all tensors in 'Input type'; None where they differ or it was not recorded."""
    try:
        found = set(msgspec.json.decode(dtypes, type=list[str])) if dtypes is not ABSENT else set()
    except JSON_ERRORS:
        return None
    name = found.pop() if len(found) == 1 else None
    return None if name is None else _TYPES.get(name, name.removeprefix("c10::"))
