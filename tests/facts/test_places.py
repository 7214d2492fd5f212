"""The words and the lines of places."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest

from gpudiag.facts import capacity
from gpudiag.facts.catalogue import _label_with_shapes, _rank_by_time, find_unwalked_call_sites
from gpudiag.model.finding import Where


def test_shapes_are_left_out_where_they_are_not_known() -> None:
    found = pl.DataFrame({"pattern": ["GELU"] * 3, "shapes": ["[8, 4]", "", None]}, schema={"pattern": pl.String, "shapes": pl.String})
    said = found.select(_label_with_shapes("pattern", " in single ops").alias("what"))["what"].to_list()
    assert said == ["GELU in single ops on [8, 4]", "GELU in single ops", "GELU in single ops"]


SITES = ["src/net.py(12): forward", "src/other.py(5): forward", "src/net.py(12): forward", None, "a.py(?): f"]


def build_window(**known: Any) -> Any:
    return SimpleNamespace(analysis=SimpleNamespace(sites=pl.Series(SITES), paths=None), **known)


def test_a_place_has_the_line_that_holds_half_of_its_time() -> None:
    work = pl.DataFrame({"call": [0, 1, 2, 3, 4], "name": ["mm", "mm", "mm", "mm", "add"], "time_ns": [3, 4, 5, 4, 9]})
    window = build_window()
    assert _rank_by_time(window, work, pl.col("name")) == (Where("mm", "src/net.py", 12, 16), Where("add", "a.py", None, 9))
    rarer = work.with_columns(pl.Series("time_ns", [3, 4, 4, 4, 9]))
    assert _rank_by_time(window, rarer, pl.col("name"))[0] == Where("mm", None, None, 15)  # 7 of 15
    assert _rank_by_time(window, work.drop("call"), pl.col("name"))[1] == Where("add", None, None, 9)


@pytest.mark.parametrize(
    ("paths", "place"),
    [
        (None, Where("addmm", "src/net.py", 12, 6)),
        (["train.py(3): main\nnet.py(7): forward", "train.py(9): main\nnet.py(7): forward"], Where("ops such as addmm", "train.py", 9, 6)),
        (["train.py(3): main", "train.py(9): main\nmetric.py(2): score"], Where("ops such as addmm", "metric.py", 2, 6)),
        (["train.py(3): main"] * 2, Where("addmm", "src/net.py", 12, 6)),  # one line calls both
    ],
)
def test_work_that_no_backward_pass_uses_stands_where_nothing_else_is_called(
    paths: list[str] | None, place: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {"id": [0, 1], "call": [0, 2], "op_name": ["addmm"] * 2, "name": ["addmm"] * 2, "shapes": [None] * 2, "time_ns": [5, 6]}
    kernels = pl.DataFrame({**rows, "phase": ["forward", "other"]}, schema_overrides={"shapes": pl.String})
    window = build_window(kernels=kernels)
    if paths:
        window.analysis.paths = lambda: pl.Series([paths[0], None, paths[1]])
    monkeypatch.setattr(capacity, "find_unwalked_work", lambda _: kernels.filter(pl.col("id") == 1))
    assert find_unwalked_call_sites(window) == (place,)
