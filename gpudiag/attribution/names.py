"""Which rows have a name that a pattern matches."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl


def matching(names: pl.Series, pattern: str) -> npt.NDArray[np.bool_]:
    """Return which of `names` (categories) match `pattern`, False for none. Each distinct name is matched once, not each of a million."""
    distinct = names.drop_nulls().unique()
    chosen = distinct.filter(distinct.cast(pl.String).str.contains(pattern))
    found: npt.NDArray[np.bool_] = names.is_in(chosen.implode()).fill_null(False).to_numpy()
    return found
