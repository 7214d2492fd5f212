"""Telemetry by hand: samples and spans in seconds of a run."""

from __future__ import annotations

import numpy as np
import polars as pl

from gpudiag.attribution.intervals import Spans
from gpudiag.model import trace

UNIX = 1_700_000_000 * 10**9
S = 10**9


def at(*rows: tuple[float, dict[str, float]]) -> pl.DataFrame:
    schema = trace.build_table_schema("telemetry")
    made = [{**dict.fromkeys(schema), "t_ns": UNIX + round(time * S), **values} for time, values in rows]
    return pl.DataFrame(made, schema=schema, strict=False)


def spans(*pairs: tuple[float, float]) -> Spans:
    return np.array([[UNIX + round(start * S), UNIX + round(end * S)] for start, end in pairs], dtype=np.int64)
