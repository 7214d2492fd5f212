"""Times are exact to the nanosecond, at every magnitude and in every spelling."""

from __future__ import annotations

import json
from decimal import ROUND_HALF_EVEN, Decimal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpudiag.trace.columns import EXACT_BELOW_US, MAX_NS, convert_numbers_to_ns, convert_texts_to_ns, parse_exact_ns

# microseconds as Kineto writes them: up to three decimals, of any magnitude up to the limit
MICROSECONDS = st.integers(-MAX_NS, MAX_NS).flatmap(
    lambda ns: st.sampled_from([f"{Decimal(ns).scaleb(-3):f}", str(ns // 1000), f"{Decimal(ns // 100).scaleb(-1):f}"])
)
SMALL = st.integers(0, int(EXACT_BELOW_US) * 1000 - 1).map(lambda ns: f"{ns // 1000}.{ns % 1000:03}")


def expected(text: str) -> int:
    return int((Decimal(text) * 1000).to_integral_value(ROUND_HALF_EVEN))


def through_json(texts: list[str]) -> list[int]:
    """What the reader does: decode, and take the text where the numbers are not exact."""
    values = msgspec.json.decode(f"[{','.join(texts)}]", type=list[int | float | str | None])
    found = convert_numbers_to_ns(values) or convert_texts_to_ns([text.encode() for text in texts])
    assert found.valid.all()
    return [int(ns) for ns in found.ns]


@given(st.lists(MICROSECONDS, min_size=1, max_size=20))
def test_any_time_with_up_to_three_decimals_is_exact(texts: list[str]) -> None:
    assert through_json(texts) == [expected(text) for text in texts]


@given(st.lists(SMALL | st.integers(0, 2**42).map(str), min_size=1, max_size=20))
def test_times_below_the_limit_need_no_text(texts: list[str]) -> None:
    values = [json.loads(text) for text in texts]
    found = convert_numbers_to_ns(values)
    assert found is not None
    assert found.ns.tolist() == [expected(text) for text in texts]


@given(st.lists(st.decimals(0, 10**15, places=6).map(lambda number: f"{number:f}"), min_size=1))
def test_digits_below_the_nanosecond_round_to_the_nearest(texts: list[str]) -> None:
    found = convert_texts_to_ns([text.encode() for text in texts])
    assert found.ns.tolist() == [expected(text) for text in texts]


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("1712345678901234.567", 1712345678901234567),
        ("1712345678901234.04", 1712345678901234040),
        ("1712345678901234", 1712345678901234000),
        ('"1712345678901234.567"', 1712345678901234567),
        ("1.5e3", 1_500_000),
        ("-0.25", -250),
        ("0.0005", 0),
        ("0.0015", 2),
        ("8796093022207.999", 8796093022207999),  # the last below 2^43
        ("8796093022208.001", 8796093022208001),
    ],
)
def test_worked_examples(text: str, ns: int) -> None:
    assert parse_exact_ns(text.encode()) == ns
    assert through_json([text]) == [ns]
    assert through_json([text, "1.001"]) == [ns, 1001]


def test_a_double_would_be_wrong_where_the_text_is_taken() -> None:
    """The reason for the text path: near 1.7e15 us a double is off by up to 125 ns."""
    assert round(1712345678901234.567 * 1000) != 1712345678901234567
    assert convert_numbers_to_ns([1712345678901234.567]) is None


@pytest.mark.parametrize(
    "text", ["null", '""', '"soon"', "1e999999999", "-1e30", "4000000000000001", "9" * 5000, '"nan"', '"inf"', "true", "", "1_0.000"]
)
def test_what_is_no_usable_time_is_not_valid(text: str) -> None:
    assert parse_exact_ns(text.encode()) is None
    found = convert_texts_to_ns([text.encode(), b"1.5"])
    assert found.valid.tolist() == [False, True]
    assert found.ns.tolist() == [0, 1500]


@pytest.mark.parametrize("number", [None, "1", 10**50, 2**62 * 1.0])
def test_numbers_that_need_their_text_are_sent_there(number: float | str | None) -> None:
    assert convert_numbers_to_ns([1, number]) is None


def test_whole_numbers_out_of_range_are_not_valid() -> None:
    found = convert_numbers_to_ns([5, 2**62, -(2**62)])
    assert found is not None
    assert found.valid.tolist() == [True, False, False]
