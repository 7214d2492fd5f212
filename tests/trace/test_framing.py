"""The parts of a document are found whatever its layout, and however the text is cut into blocks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpudiag.trace import json_framing
from gpudiag.trace.events import Complete, EventDecoder
from gpudiag.trace.json_framing import CutShortError, Document, HeaderValue, NotATraceError


def parse(text: bytes, block: int = 1 << 20) -> tuple[list[Any], dict[str, Any], EventDecoder]:
    """Names of the complete events, kept header values, and the decoder."""
    decoder = EventDecoder()
    blocks = iter([text[place : place + block] for place in range(0, len(text), block)])
    names: list[Any] = []
    header: dict[str, Any] = {}
    for part in Document(blocks, decoder, block).parts():
        if isinstance(part, HeaderValue):
            header[part.key] = json.loads(part.text)
        else:
            # the text of a chunk stays aligned with its events: exact times are taken from it
            assert len(decoder.times(part.text)) == len(part.events)
            names += [event.name for event in part.events if isinstance(event, Complete)]
    return names, header, decoder


def events(count: int) -> list[dict[str, Any]]:
    tricky = ['}, {"ph": "X"', "]}", '\\"},{', "\\", "a\nb", "", 'x"]', "é\u2028"]
    return [
        {"ph": "X", "name": tricky[number % len(tricky)] + str(number), "ts": number, "dur": 1, "args": {"list": [{"a": 1}, {"b": []}]}}
        for number in range(count)
    ]


HEADERS: dict[str, Any] = {
    "schemaVersion": 1,
    "deviceProperties": [{"id": 0, "name": 'a "quoted" ]}, {'}, {"id": 1}],
    "other": {"deep": [[[{}]]], "text": "}],", "number": -1.5e9},
    "record_shapes": 1,
    "word": "with_stack",
    "nothing": None,
    "distributedInfo": {"rank": 3},
    "baseTimeNanoseconds": 1751410836000000000,
}
KEPT = {key: HEADERS[key] for key in HEADERS if key in json_framing.USED_HEADERS}


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" ,\r\n\t", " :\n")])
@pytest.mark.parametrize("place", [0, 3, len(HEADERS)])
@pytest.mark.parametrize("block", [1, 7, 64, 1000, 1 << 20])
def test_events_anywhere_among_the_keys(separators: tuple[str, str], place: int, block: int) -> None:
    wanted = events(60)
    items = list(HEADERS.items())
    document = dict([*items[:place], ("traceEvents", wanted), *items[place:]])
    names, header, decoder = parse(json.dumps(document, separators=separators).encode(), block)
    assert names == [event["name"] for event in wanted]
    assert header == KEPT
    assert (decoder.count, dict(decoder.dropped)) == (60, {})


@pytest.mark.parametrize("block", [1, 50, 1 << 20])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_bare_list(block: int, indent: int | None) -> None:
    names, header, _ = parse(b"\xef\xbb\xbf \n" + json.dumps(events(20), indent=indent).encode(), block)
    assert (len(names), header) == (20, {})


@given(st.integers(0, 40), st.integers(1, 300), st.integers(0, 6000), st.booleans())
@settings(max_examples=150, deadline=None)
def test_a_cut_text_gives_every_complete_event_before_the_cut(count: int, block: int, cut: int, bare: bool) -> None:
    wanted = events(count)
    pieces = [json.dumps(event).encode() for event in wanted]
    head = b"[" if bare else b'{"distributedInfo": {"rank": 1}, "traceEvents": ['
    text = (head + b", ".join(pieces))[:cut]
    complete = sum(len(head) + sum(map(len, pieces[: index + 1])) + 2 * index <= len(text) for index in range(count))
    decoder = EventDecoder()
    blocks = iter([text[place : place + block] for place in range(0, len(text), block)])
    found = []
    with pytest.raises(CutShortError):
        found.extend(len(part.events) for part in Document(blocks, decoder, block).parts() if not isinstance(part, HeaderValue))
    assert decoder.count == sum(found) == complete


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b'{"ph": "X", "ts": [1]}', "unexpected type"),
        (b'{"ph": 3}', "unexpected type"),
        (b'{"ph": "X", "args": {"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}", "nested too deeply"),
        (b'{"ph": "X", "ts": 1 2}', "malformed"),
        (b'{"name": "no phase"}', "unexpected type"),
        (b"[1, 2]", "unexpected type"),
    ],
)
@pytest.mark.parametrize("block", [100, 1 << 20])
def test_one_bad_event_costs_only_itself(bad: bytes, reason: str, block: int) -> None:
    pieces = [json.dumps(event).encode() for event in events(30)]
    pieces[10] = bad
    names, _, decoder = parse(b'{"traceEvents": [' + b",\n".join(pieces) + b"]}", block)
    assert names == [event["name"] for index, event in enumerate(events(30)) if index != 10]
    assert decoder.count == 30
    assert [(reason in found, count) for found, count in decoder.dropped.items()] == [(True, 1)]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (b'{"ph": "X", "name": "a", "ts": 1, "args": {"memory bandwidth (GB/s)": inf}}', "a"),
        (b'{"ph": "X", "name": "a", "ts": 1, "args": {"x": [-nan(ind), NaN], "y":Infinity}}', "a"),
        (b'{"ph": "X", "name": "C:\\Users\\x", "ts": 1}', "C:\\Users\\x"),
        (b'{"ph": "X", "name": "a\xffb", "ts": 1}', "a\ufffdb"),
        (b'{"ph": "X", "name": "nan, inf", "ts": 1, "args": nan}', "nan, inf"),
        (b'{"ph": "X", "name": "\\ud800 \\ud83d\\ude00", "ts": 1}', "\ufffd \U0001f600"),
        (b'{"ph": "X", "name": "a\tb", "ts": 1}', "a b"),
    ],
)
def test_known_faults_of_writers_are_mended(text: bytes, name: str) -> None:
    names, _, decoder = parse(b'[{"ph": "X", "name": "first", "ts": 1},' + text + b"]")
    assert names == ["first", name]
    assert not decoder.dropped


@pytest.mark.parametrize("text", [b"\x89PNG\r\n\x1a\n", b"hello", b"7", b'"traceEvents"', b'{"a": 1}', b"{}", b'{"traceEvents": {}}'])
def test_other_content_is_no_trace(text: bytes) -> None:
    with pytest.raises(NotATraceError):
        parse(text)


@pytest.mark.parametrize("text", [b"\xff\xfe{\x00}\x00", b"\xfe\xff\x00{"])
def test_utf_16_is_named(text: bytes) -> None:
    with pytest.raises(NotATraceError, match="UTF-16"):
        parse(text)


@pytest.mark.parametrize("text", [b"", b"  ", b"{", b'{"a', b'{"a"', b'{"a":', b'{"a": [', b"{'a': 1}", b'{"a" 1}', b'{"a": 1', b'{"a": }'])
def test_broken_documents_are_cut_short(text: bytes) -> None:
    for block in (1, 1 << 20):
        with pytest.raises(CutShortError):
            parse(text, block)


def test_an_event_or_header_value_without_end_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_framing, "MAX_EVENT_BYTES", 10_000)
    monkeypatch.setattr(json_framing, "MAX_HEADER_BYTES", 10_000)
    with pytest.raises(NotATraceError, match="an event of more than"):
        parse(b"[{" + b" " * 30_000, 500)
    with pytest.raises(NotATraceError, match="a header value of more than"):
        parse(b'{"deviceProperties": [' + b" " * 30_000, 500)


def test_a_foreign_value_larger_than_every_limit_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_framing, "MAX_HEADER_BYTES", 10_000)
    text = b'{"other": [' + b'"x", ' * 20_000 + b'1], "traceEvents": [{"ph": "X", "name": "a"}]}'
    assert parse(text, 500)[0] == ["a"]


def test_events_are_decoded_in_bulk_not_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exact scan is for cuts that a guess cannot find; a plain file of many blocks must do without."""
    monkeypatch.setattr(json_framing, "find_array_items", None)
    wanted = [{"ph": "X", "name": str(number), "ts": number, "dur": 1} for number in range(3000)]
    names, _, _ = parse(json.dumps({"traceEvents": wanted, "traceName": "x"}, indent=1).encode(), 20_000)
    assert len(names) == 3000


def test_what_goes_on_without_an_event_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_framing, "MAX_KEYS", 20)
    monkeypatch.setattr(json_framing, "MAX_BAD", 20)
    with pytest.raises(NotATraceError, match="more than 20 top-level keys"):
        parse(b"{" + b'"a": 1,' * 21 + b'"traceEvents": []}')
    with pytest.raises(NotATraceError, match="of its first 21 entries, 21 are no events"):
        parse(b"[" + b"{}," * 20 + b"{}]")
    names, _, decoder = parse(b"[" + b"{}," * 21 + json.dumps(events(40)).encode()[1:])
    assert (len(names), decoder.dropped.total()) == (40, 21)
