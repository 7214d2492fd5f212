"""The words for places."""

from __future__ import annotations

import polars as pl

from gpudiag.facts.catalogue import _label_with_shapes


def test_shapes_are_left_out_where_they_are_not_known() -> None:
    found = pl.DataFrame({"pattern": ["GELU"] * 3, "shapes": ["[8, 4]", "", None]}, schema={"pattern": pl.String, "shapes": pl.String})
    said = found.select(_label_with_shapes("pattern", " in single ops").alias("what"))["what"].to_list()
    assert said == ["GELU in single ops on [8, 4]", "GELU in single ops", "GELU in single ops"]
