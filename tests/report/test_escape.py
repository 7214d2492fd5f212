"""Text from a trace is harmless wherever it is shown."""

from __future__ import annotations

import html
import json
import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from gpudiag.report.console import clean, encode_script_json, escape_markdown, format_code_span, join_units, replace_unencodable

ANY_TEXT = st.text(st.characters(), max_size=80)
MARKS = st.text(st.sampled_from("`|\\*_[]()<>#&@ a1\n\x1b"), max_size=40)


@given(ANY_TEXT)
def test_clean_leaves_one_line_of_visible_characters(text: str) -> None:
    cleaned = clean(text, 50)
    assert len(cleaned) <= 50
    assert not {unicodedata.category(character) for character in cleaned} & {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
    cleaned.encode("utf-8")


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;owned\x07title", "title"),
        ("\x1b]8;;https://example.org\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x9b2Jgone", "gone"),
        ("abc\u202etxt.exe", "abctxt.exe"),
        ("a\r\nb\tc", "a b c"),
        ("plain aten::mm", "plain aten::mm"),
    ],
)
def test_clean_removes_whole_escape_sequences(text: str, cleaned: str) -> None:
    assert clean(text) == cleaned


def test_a_name_of_ten_million_characters_is_cut_and_says_so() -> None:
    assert clean("x" * 10_000_000, 20) == "x" * 19 + "…"


def _as_text(rendered: str) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "", rendered)).strip()


@given(MARKS)
def test_a_code_span_shows_the_text_as_it_stands(text: str) -> None:
    rendered = MarkdownIt("commonmark").render(f"- {format_code_span(text)}")
    assert _as_text(rendered) == clean(text)
    assert rendered.count("<code>") == 1


@given(MARKS)
def test_a_code_span_stays_in_its_table_cell(text: str) -> None:
    parser = MarkdownIt("commonmark").enable("table")
    rendered = parser.render(f"| a | b |\n| --- | --- |\n| {format_code_span(text, cell=True)} | end |")
    assert re.search(r"<td>end</td>\s*</tr>\s*</tbody>", rendered)
    assert rendered.count("<td>") == 2


@given(MARKS)
def test_markdown_prose_makes_no_element(text: str) -> None:
    rendered = MarkdownIt("commonmark").render(f"x {escape_markdown(text)}")
    assert set(re.findall(r"<\s*/?\s*(\w+)", rendered)) == {"p"}
    assert _as_text(rendered) == f"x {clean(text)}".strip()


@given(ANY_TEXT.filter(lambda text: text.isprintable()))
def test_json_for_script_cannot_leave_its_element(text: str) -> None:
    written = encode_script_json({"name": f"{text}</script><!--&\u2028"})
    assert not set(written) & set("<>&\u2028\u2029")
    assert json.loads(written) == {"name": f"{text}</script><!--&\u2028"}


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp437", "utf-8", None, "no-such-encoding"])
def test_output_can_be_written_in_any_locale(encoding: str | None) -> None:
    written = replace_unencodable("██ 3 % … 北京", encoding)
    if encoding not in {None, "no-such-encoding"}:
        written.encode(encoding)
    assert "3 %" in written
    assert (written == "██ 3 % … 北京") == (encoding == "utf-8")


def test_bars_stay_bars_in_ascii() -> None:
    assert replace_unencodable("██ 3 %", "ascii") == "## 3 %"


def test_numbers_stay_with_their_units() -> None:
    assert join_units("takes 75.1 ms, 30 % of 5 steps at 3.35 TB/s", "_") == "takes 75.1_ms, 30_% of 5 steps at 3.35_TB/s"
