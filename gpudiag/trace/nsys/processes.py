"""Which process of an export is read, and its threads.

Exports serialise identifiers into one integer, from the highest bits: hardware 8, virtual machine 8, process 24, thread 24 (NVIDIA, export
schema, "Serialized process and thread identifiers"). All but the thread identify the process here: a merged recording of several
machines may use a process id twice.
"""

from __future__ import annotations

import polars as pl

from gpudiag.errors import InputError
from gpudiag.model.trace import Thread
from gpudiag.trace.nsys.database import Export
from gpudiag.trace.source import shown

_THREAD_BITS = 24
_LOW = (1 << _THREAD_BITS) - 1
_LISTED = 8

WORK_TABLES = tuple(f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("KERNEL", "GRAPH_TRACE", "MEMCPY", "MEMSET"))
CALLS = "CUPTI_ACTIVITY_KIND_RUNTIME"
RANGES = "NVTX_EVENTS"

_SIGNS = (
    *((table, "globalPid", what) for table, what in zip(WORK_TABLES, ("kernel", "graph launch", "copy", "memset"), strict=True)),
    (CALLS, "globalTid", "CUDA call"),
    (RANGES, "globalTid", "NVTX range"),
)
"""What shows that a process is the one to read, the firmest first: table, column of its process, one of its rows in words."""


def process_of(ids: pl.Series) -> pl.Series:
    """Return the process of each globalPid or globalTid as one number; null stays null."""
    filled = ids.fill_null(0).to_numpy() >> _THREAD_BITS
    found: pl.Series = pl.Series(ids.name, filled, dtype=pl.Int64).set(ids.is_null(), None)
    return found


def of_process(frame: pl.DataFrame, process: int | None, column: str = "globalTid") -> pl.DataFrame:
    """Return the rows of `process` by `column`; all of them where none names a process (then the export holds only one)."""
    if process is None or frame[column].null_count() == frame.height:
        return frame
    return frame.filter(process_of(frame[column]) == process)


def choose_process(export: Export, path: str) -> tuple[int | None, tuple[str, ...]]:
    """Return the process with most kernels (None: the export names none) and what was left out.

    Raises InputError where work of several processes cannot be told apart.
    """
    counts = {table: _counts(export, table, column) for table, column, _ in _SIGNS}
    _check_named(export, counts, path)
    for table, _, what in _SIGNS:
        order = [process for process, _ in sorted(counts[table].items(), key=lambda item: (-item[1], item[0]))]
        if order:
            return order[0], _left_out(order[0], order[1:], counts[table], what)
    return None, ()


def _counts(export: Export, table: str, column: str) -> dict[int, int]:
    """Return the number of rows of each process."""
    found: dict[int, int] = {}
    for number, count in export.counts(table, column).items():
        found[number >> _THREAD_BITS] = found.get(number >> _THREAD_BITS, 0) + count
    return found


def _check_named(export: Export, counts: dict[str, dict[int, int]], path: str) -> None:
    """Raise InputError where device work names no process, though several made calls."""
    if len(counts[CALLS]) > 1 and any(not counts[table] and export.read(table, ["start"]).height for table in WORK_TABLES):
        raise InputError(
            f"{shown(path)} holds {len(counts[CALLS])} processes, but its device work does not say whose it is",
            "export it again with a newer Nsight Systems, or record one process",
        )


def _left_out(chosen: int, others: list[int], counts: dict[int, int], what: str) -> tuple[str, ...]:
    if not others:
        return ()
    plural = {"copy": "copies", "graph launch": "graph launches"}.get(what, f"{what}s")
    listed = [f"{pid(other)} ({counts[other]:,} {what if counts[other] == 1 else plural})" for other in others[:_LISTED]]
    more = f" and {len(others) - _LISTED} more" if len(others) > _LISTED else ""
    return (
        f"process {pid(chosen)} only ({counts[chosen]:,} {plural}); not analysed: process{'es' if len(others) > 1 else ''} "
        f"{', '.join(listed)}{more}",
    )


def pid(process: int) -> int:
    """Return the operating system's number of a process."""
    return process & _LOW


def threads(ids: pl.Series, names: pl.DataFrame) -> tuple[Thread, ...]:
    """Return the threads of the distinct `ids` (globalTid). `names`: globalTid and name, where the export has them."""
    known = dict(names.select("globalTid", "name").iter_rows())
    return tuple(Thread(str(pid(number >> _THREAD_BITS)), str(number & _LOW), (known.get(number) or "")[:200]) for number in ids.to_list())


def thread_names(export: Export) -> pl.DataFrame:
    """Return (globalTid, name) of the threads that have a name."""
    table = export.read("ThreadNames", ["globalTid", "nameId"])
    found = table.join(export.strings("ThreadNames", "nameId").rename({"id": "nameId", "value": "name"}), on="nameId", how="inner")
    return found.select("globalTid", "name").unique("globalTid", keep="first", maintain_order=True)
