"""The bracket scanner agrees with a JSON parser on text full of quotes, escapes and brackets, however it is cut into windows."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpudiag.trace import json_framing
from gpudiag.trace.json_framing import BracketReader, find_array_items

TEXT = st.text(alphabet='"\\[]{},: ax\n\u00e9', max_size=12)
VALUE = st.recursive(
    TEXT | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=12,
)
CONTAINER = st.lists(VALUE, max_size=4) | st.dictionaries(TEXT, VALUE, max_size=4)


@given(st.lists(CONTAINER, max_size=6), st.booleans(), st.integers(1, 40))
def test_items_are_those_of_the_parser(items: list[Any], closed: bool, window: int) -> None:
    parts = [json.dumps(item, ensure_ascii=False).encode() for item in items]
    text = b" ,\n".join(parts) + (b' ], "after": [{}, {}]}' if closed else b', {"cut": [')
    original, json_framing.WINDOW_BYTES = json_framing.WINDOW_BYTES, window
    try:
        found = find_array_items(memoryview(text))
    finally:
        json_framing.WINDOW_BYTES = original
    assert [text[start:end] for start, end in zip(found.starts, found.ends, strict=True)] == parts
    assert found.closed == (text.index(b' ], "after"') + 1 if closed else None) or b' ], "after"' in b"".join(parts)


@given(CONTAINER, st.integers(1, 30))
def test_the_end_of_a_container_is_found_in_any_windows(value: Any, size: int) -> None:
    body = json.dumps(value, ensure_ascii=False).encode()
    text = body + b' , "next": {"a": [1]}}'
    reader = BracketReader()
    for offset in range(0, len(text), size):
        positions, _, depths = reader.feed(text[offset : offset + size])
        if (depths == 0).any():
            assert offset + int(positions[depths == 0][0]) + 1 == len(body)
            return
    pytest.fail("no end found")


def test_depth_needs_no_recursion() -> None:
    deep = b"[" * 300_000 + b"]" * 300_000
    found = find_array_items(memoryview(deep + b", {}]"))
    assert (found.starts, found.ends, found.closed) == ([0, 600_002], [600_000, 600_004], 600_004)
