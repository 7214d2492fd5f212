"""Places of idle time: pieces of one line are one place, however much of its path and function each source tells."""

from __future__ import annotations

import polars as pl
import pytest

from gpudiag.facts.call_sites import sum_by_call_site
from gpudiag.timeline.host_events import CODED

OPS = pl.DataFrame({"id": [0], "name": ["aten::mm"]})


def places(*pieces: tuple[str, str | None, str | None, int]) -> list[tuple[str, str | None, str | None, int]]:
    """Return (cause, site, evidence, time) of the places of (cause, site, evidence, time)."""
    rows = [(row, cause, site, evidence, time, None) for row, (cause, site, evidence, time) in enumerate(pieces)]
    schema = {"gap": pl.Int64, "cause": pl.String, "site": pl.String, "evidence": pl.String, "time_ns": pl.Int64, "op": pl.Int64}
    pieces_frame = pl.DataFrame(rows, schema=schema, orient="row").with_columns(pl.lit(None, dtype=pl.String).alias(name) for name in CODED)
    return sum_by_call_site(pieces_frame, OPS).select("cause", "site", "evidence", "time_ns").rows()


@pytest.mark.parametrize("framed", ["rec.py(144): loop", "src/rec.py(144): loop"])
def test_one_wait_seen_by_the_profiler_and_by_the_bundle_is_one_place(framed: str) -> None:
    marks = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    assert places(("idle_data", framed, marks, 80), ("idle_data", "rec.py(144)", "waiting for the next batch", 50)) == [
        ("idle_data", framed, marks, 130)
    ]


def test_other_causes_lines_and_files_stay_apart() -> None:
    pieces = [
        ("idle_data", "a/rec.py(144): loop", "x", 9),
        ("idle_launch", "a/rec.py(144): loop", "x", 8),
        ("idle_data", "a/rec.py(145): loop", "x", 7),
        ("idle_data", "b/rec.py(145): loop", "x", 6),
        ("idle_data", "rec.py(145)", "x", 5),  # of a or of b: not known
        ("idle_data", None, "x", 4),
    ]
    assert places(*pieces) == pieces
