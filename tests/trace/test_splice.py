"""A trace with events of our own: every layout, nothing else changed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from gpudiag.errors import InputError
from gpudiag.trace.kineto import insert_events

OURS = (b'{"ph":"X","name":"ours"}', b'{"ph":"M","name":"name"}')
THEIRS = '{"ph": "X", "name": "a ] [ \\" {", "ts": 1712345678901234.567}'

LAYOUTS = {
    "object, events last": f'{{"schemaVersion": 1, "nested": {{"traceEvents": [1, 2]}}, "traceEvents": [\n  {THEIRS},\n {THEIRS}\n]}}\n',
    "object, events first": f'{{"traceEvents": [{THEIRS}], "meta": ["x", {{"y": "]"}}]}}',
    "bare list": f"[{THEIRS},{THEIRS}]",
    "byte order mark": f'\ufeff{{"traceEvents":[{THEIRS}]}}',
    "empty list": '{"traceEvents": [ \n ], "a": 1}',
    "bracket at the end of a block": f'{{"k": "{"x" * 81}","traceEvents":[{THEIRS}]}}',
}


def _spliced(path: Path, **options: int) -> bytes:
    return b"".join(insert_events(str(path), OURS, **options))


@pytest.mark.parametrize("text", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("block_bytes", [7, 100, 4_000_000])
def test_our_events_stand_before_theirs_and_no_other_byte_changes(tmp_path: Path, text: str, block_bytes: int) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text, encoding="utf-8")
    found = _spliced(path, block_bytes=block_bytes)
    document = json.loads(found.decode("utf-8-sig"))
    events = document if isinstance(document, list) else document["traceEvents"]
    before = json.loads(text.lstrip("\ufeff"))
    assert [event["name"] for event in events[:2]] == ["ours", "name"]
    assert events[2:] == (before if isinstance(before, list) else before["traceEvents"])
    ours = b"\n" + b",\n".join(OURS) + (b",\n" if len(events) > 2 else b"")
    assert found.replace(ours, b"", 1) == text.encode()


def test_a_compressed_trace_is_passed_on_as_text(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(LAYOUTS["bare list"].encode()))
    assert [event["name"] for event in json.loads(_spliced(path))][:2] == ["ours", "name"]


def test_a_trace_that_breaks_off_is_passed_on_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(f'{{"traceEvents": [{THEIRS}, {{"ph": "X", "na')
    assert _spliced(path).endswith(b', {"ph": "X", "na')


@pytest.mark.parametrize(
    ("text", "message"), [('{"a": 1}', "no traceEvents"), ("html", "not a JSON trace"), ("<html>", "a web page"), ('{"a": ', "breaks off")]
)
def test_what_is_no_trace_is_one_clear_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        _spliced(path)
