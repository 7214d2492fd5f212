"""Tables as segments of a bundle, as a recording writes them."""

from __future__ import annotations

import polars as pl

from gpudiag.bundle.segments import encode_segment
from gpudiag.model import trace


def segment(table: str, frame: pl.DataFrame) -> bytes:
    """Return `frame` as a segment of `table`; columns that it lacks are null."""
    return encode_segment(
        table, {name: frame[name].to_list() if name in frame.columns else [None] * frame.height for name in trace.build_table_schema(table)}
    )
