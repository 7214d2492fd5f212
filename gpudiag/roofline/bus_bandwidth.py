"""Algorithm and bus bandwidth of collectives (op_costs section 14; NVIDIA nccl-tests doc/PERFORMANCE.md).

algbw = S / t; busbw = algbw x factor compares with the one-direction rate of the link whatever the number of ranks. S is the whole
tensor: of all ranks' parts for all_gather (its output) and reduce_scatter (its input). A kernel's time holds the wait for the slowest
rank, so a bandwidth from one rank is a lower bound; below about 1 MiB latency decides.
"""

from __future__ import annotations

import re

import polars as pl

# Of the letters of a name ('_allgather_base', 'all_gather_into_tensor_coalesced', 'nccl:all_gather') the first that is found.
_TRAFFIC_KINDS: tuple[tuple[str, str], ...] = (
    ("reducescatter", "part"),
    ("allreduce", "twice"),
    ("allgather", "part"),
    ("alltoall", "part"),
    ("broadcast", "whole"),
    ("gather", "whole"),
    ("scatter", "whole"),
    ("reduce", "whole"),
    ("send", "whole"),
    ("recv", "whole"),
)

# c10::ScalarType as record_param_comms writes it -> bytes an element.
_ELEMENT = {
    "Half": 2, "BFloat16": 2, "Float": 4, "Double": 8, "Long": 8, "Int": 4, "Byte": 1, "Char": 1, "Bool": 1, "Short": 2,
    "Float8_e4m3fn": 1, "Float8_e5m2": 1, "Float8_e4m3fnuz": 1, "Float8_e5m2fnuz": 1, "ComplexFloat": 8, "ComplexDouble": 16,
}  # fmt: skip


def count_message_bytes(table: pl.DataFrame) -> pl.Series:
    """Return S of each row of `collectives` in bytes (the larger message), null where elements or dtype were not recorded."""
    item = table["dtype"].replace_strict(_ELEMENT, default=None, return_dtype=pl.Int64)
    frame = table.select(pl.max_horizontal("in_elements", "out_elements").alias("elements")).with_columns(item.alias("item"))
    return frame.select((pl.col("elements") * pl.col("item")).alias("bytes"))["bytes"]


def find_bus_factor(name: str, ranks: int) -> float | None:
    """Return busbw / algbw of a collective: 2(n-1)/n for all_reduce, (n-1)/n where each rank keeps its part, 1 for one-to-all.

    None for a name that is no collective (a barrier, an unknown kernel) or fewer than one rank. Reductions in the network (NVLS, SHARP)
    move less; a trace does not name them reliably, so their figure is not derated.
    """
    letters = re.sub(r"[^a-z0-9]", "", name.lower())
    kind = next((kind for word, kind in _TRAFFIC_KINDS if word in letters), None)
    if kind is None or ranks < 1:
        return None
    part = (ranks - 1) / ranks
    return {"twice": 2 * part, "part": part, "whole": 1.0}[kind]


def compute_bandwidths(name: str, moved_bytes: int | None, ranks: int | None, time_ns: int) -> tuple[float, float] | None:
    """Return (algbw, busbw) in byte/s of collectives that moved `moved_bytes` (S) in `time_ns`; None where one of them is not known."""
    factor = find_bus_factor(name, ranks) if ranks is not None else None
    if factor is None or moved_bytes is None or time_ns <= 0:
        return None
    algorithm = moved_bytes / time_ns * 1e9
    return algorithm, algorithm * factor
