"""Names asked by their distinct texts say what a cast of every row would."""

from __future__ import annotations

import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from gpudiag.attribution.names import among, contains, matches, matching, text, texts

WORDS = ["aten::mm", "aten::add_", "void at::native::vectorized<4>", "", "nccl:all_reduce"]


@given(st.lists(st.sampled_from([*WORDS, None]), max_size=12), st.sampled_from([pl.Categorical(), pl.String()]))
def test_the_same_as_of_every_row(words: list[str | None], dtype: pl.DataType) -> None:
    names = pl.Series("name", words, dtype=pl.String).cast(dtype)
    plain = names.cast(pl.String)
    assert texts(names).to_list() == words
    assert contains(names, "^aten").to_list() == plain.str.contains("^aten").to_list()
    assert among(names, WORDS[:2]).to_list() == plain.is_in(WORDS[:2]).to_list()
    assert matching(names, "native|nccl").tolist() == plain.str.contains("native|nccl").fill_null(False).to_list()
    frame = pl.DataFrame({"name": names})
    assert frame.select(text("name"), found=matches("name", "_$")).rows() == list(
        zip(words, plain.str.contains("_$").to_list(), strict=True)
    )


def test_categories_of_another_column_do_not_disturb() -> None:
    pl.Series([f"other {row}" for row in range(1000)], dtype=pl.Categorical)
    names = pl.Series("name", ["b", "a", "b"], dtype=pl.Categorical)
    assert texts(names[1:]).to_list() == ["a", "b"]
    assert texts(names).name == "name"
