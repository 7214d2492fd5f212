"""What the threads that call CUDA did in the operating system, by an export of Nsight Systems: calls (OSRT_API) and sampled call chains.

Calls have a chain from 80 us on (`--osrt-backtrace-threshold`), samples one at each (1 kHz). A chain tells what a call was for where the
symbols of Python were found: CPython's function slot_tp_iternext (Objects/typeobject.c) runs the `__next__` of a class that is written in
Python, as torch's DataLoader is; libraries that decode pictures, films and sound have files of their own.
"""

from __future__ import annotations

import polars as pl

from gpudiag.trace.kernel_names import DECODING, IN_NEXT
from gpudiag.trace.nsys_export import Export, filter_process

CALLS, CALL_CHAINS = "OSRT_API", "OSRT_CALLCHAINS"
SAMPLES, SAMPLE_CHAINS = "COMPOSITE_EVENTS", "SAMPLING_CALLCHAINS"
OS_TABLES = (CALLS, CALL_CHAINS, SAMPLES, SAMPLE_CHAINS)

LEAST_NS = 10_000
"""Shorter calls are left out: signals to other threads, by the hundred thousand."""

SAMPLED = "sample"
"""What a sample is called among the calls; it takes no time."""

_NEXT = r"^slot_tp_iternext$"
_DECODERS = (
    r"(?:^|[/\\])(?:_imaging(?:ft)?\.|cv2[./]|lib(?:turbo)?jpeg|libpng|libtiff|libwebp|libopenjp2|libav(?:codec|format)|libsndfile|libdecord"
    r"|libtorchcodec|libnvjpeg|torchvision[/\\]image)"
)


def read_os_calls(export: Export, process: int | None, cuda: pl.DataFrame) -> pl.DataFrame:
    """Return the calls and told samples as marks, in no order: 'poll', 'poll in __next__', 'sample in a decoder'.

    Those of the threads that make the CUDA calls `cuda`, from the first of these to the last.
    """
    threads = cuda["globalTid"].drop_nulls().unique()
    first, last = pl.lit(cuda["start_ns"].min(), dtype=pl.Int64), pl.lit(cuda["end_ns"].max(), dtype=pl.Int64)
    long = f"[end] - [start] >= {LEAST_NS}" if {"start", "end"} <= export.columns.get(CALLS, frozenset()) else ""
    calls = filter_process(export.read(CALLS, ["start", "end", "globalTid", "nameId", "callchainId"], where=long), process)
    calls = calls.filter(pl.col("globalTid").is_in(threads.implode()))
    names = export.strings(CALLS, "nameId").rename({"id": "nameId", "value": "api"})
    calls = calls.join(names, on="nameId", how="inner").join(_read_chains(export, CALL_CHAINS), on="callchainId", how="left")
    samples = filter_process(export.read(SAMPLES, ["id", "start", "globalTid"]), process).rename({"id": "callchainId"})
    samples = samples.filter(pl.col("globalTid").is_in(threads.implode())).join(_read_chains(export, SAMPLE_CHAINS), on="callchainId")
    samples = samples.with_columns(end="start", api=pl.lit(SAMPLED))
    columns = ["globalTid", "api", "told", "start", "end"]
    found = pl.concat([calls.select(columns), samples.select(columns)]).filter((pl.col("end") > first) & (pl.col("start") < last))
    return found.select(
        "globalTid",
        pl.concat_str("api", "told", separator=" ", ignore_nulls=True).alias("name"),
        pl.lit("os").alias("category"),
        pl.col("start").alias("start_ns"),
        pl.col("end").alias("end_ns"),
    )


def _read_chains(export: Export, table: str) -> pl.DataFrame:
    """Return (callchainId, told) of the chains that tell something."""
    found = [pl.DataFrame(schema={"callchainId": pl.Int64, "told": pl.String})]
    for column, pattern, told in (("symbol", _NEXT, IN_NEXT), ("module", _DECODERS, DECODING)):
        known = export.strings(table, column).filter(pl.col("value").str.contains(pattern))["id"]
        if known.len():
            chains = export.read(table, ["id"], where=f"[{column}] IN ({', '.join(map(str, known.to_list()))})")
            found.append(chains.select(callchainId="id", told=pl.lit(told)))
    return pl.concat(found).drop_nulls().unique("callchainId", keep="first", maintain_order=True)
