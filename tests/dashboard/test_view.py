"""The address holds the whole state: what a page writes into it is read back, and nothing in it breaks a page."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("dash", reason="the dashboard's libraries are not installed: pip install gpudiag[dashboard]")
from gpudiag_dashboard.components import MOST_CHARACTERS, MOST_KEYS, View

KEYS = st.sampled_from(["sort", "group", "op", "from", "to", "lane", "find", "rule", "x_1"])
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)


def parsed(href: str) -> View:
    found = urlsplit(href)
    return View.parse(found.path, f"?{found.query}" if found.query else "")


@settings(max_examples=60)
@given(st.none() | TEXTS, st.none() | TEXTS, st.dictionaries(KEYS, TEXTS, max_size=5))
def test_what_is_written_is_read(bundle: str | None, other: str | None, query: dict[str, str]) -> None:
    view = View("/ops", bundle, other, query)
    assert parsed(view.href()) == view


def test_another_page_starts_with_no_state_of_this_one_but_of_the_same_recordings() -> None:
    view = View("/ops", "runs/a b", "runs/ü", {"sort": "calls", "op": "aten::mm"})
    assert view.href("/timeline", **{"from": 5, "to": -3}) == "/timeline?bundle=runs%2Fa%20b&other=runs%2F%C3%BC&from=5&to=-3"
    assert view.href(sort=None, sheet=2) == "/ops?bundle=runs%2Fa%20b&other=runs%2F%C3%BC&op=aten%3A%3Amm&sheet=2"
    assert view.href("/") == "/?bundle=runs%2Fa%20b&other=runs%2F%C3%BC"


@settings(max_examples=60)
@given(st.none() | st.text(), st.none() | st.text())
def test_any_address_is_some_view(pathname: str | None, search: str | None) -> None:
    view = View.parse(pathname, search)
    assert view.page.startswith("/")
    assert not view.page.startswith("//")
    assert parsed(view.href()).bundle == view.bundle


def test_too_long_and_too_many_values_are_left_out() -> None:
    long = "x" * (MOST_CHARACTERS + 1)
    assert View.parse("/ops", f"?a={long}&b=1").query == {"b": "1"}
    many = "&".join(f"k{number}=1" for number in range(MOST_KEYS + 10))
    assert len(View.parse("/ops", f"?{many}").query) == MOST_KEYS


@pytest.mark.parametrize(
    ("text", "number"), [("12", 12), ("-12", -12), ("", None), ("1e3", None), ("²", None), ("--1", None), ("9" * 30, None)]
)
def test_numbers(text: str, number: int | None) -> None:
    assert View(query={"from": text}).number("from") == number
