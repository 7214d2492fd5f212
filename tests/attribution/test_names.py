"""Patterns against the names of a column of categories."""

from __future__ import annotations

import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from gpudiag.attribution.names import matching


@given(st.lists(st.sampled_from(["aten::mm", "aten::add", "Memcpy HtoD", None])))
def test_each_row_is_told_by_its_own_name(names: list[str | None]) -> None:
    column = pl.Series(names, dtype=pl.Categorical)
    assert matching(column, r"^aten::").tolist() == [name is not None and name.startswith("aten::") for name in names]
