"""Names asked by their distinct texts say what a cast of every row would."""

from __future__ import annotations

import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from gpudiag.attribution.names import decode_column, decode_names, mask_names, match_any_of, match_column, match_names

WORDS = ["aten::mm", "aten::add_", "void at::native::vectorized<4>", "", "nccl:all_reduce"]


@given(st.lists(st.sampled_from([*WORDS, None]), max_size=12), st.sampled_from([pl.Categorical(), pl.String()]))
def test_the_same_as_of_every_row(words: list[str | None], dtype: pl.DataType) -> None:
    names = pl.Series("name", words, dtype=pl.String).cast(dtype)
    plain = names.cast(pl.String)
    assert decode_names(names).to_list() == words
    assert match_names(names, "^aten").to_list() == plain.str.contains("^aten").to_list()
    assert match_any_of(names, WORDS[:2]).to_list() == plain.is_in(WORDS[:2]).to_list()
    assert mask_names(names, "native|nccl").tolist() == plain.str.contains("native|nccl").fill_null(False).to_list()
    frame = pl.DataFrame({"name": names})
    assert frame.select(decode_column("name"), found=match_column("name", "_$")).rows() == list(
        zip(words, plain.str.contains("_$").to_list(), strict=True)
    )


def test_categories_of_another_column_do_not_disturb() -> None:
    pl.Series([f"other {row}" for row in range(1000)], dtype=pl.Categorical)
    names = pl.Series("name", ["b", "a", "b"], dtype=pl.Categorical)
    assert decode_names(names[1:]).to_list() == ["a", "b"]
    assert decode_names(names).name == "name"
