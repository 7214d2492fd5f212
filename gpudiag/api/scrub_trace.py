"""One trace file -> a copy that may be shared: values in allowed forms, events one by one, a block at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import msgspec
import zstandard
from msgspec import Raw

from gpudiag.api.scrub_words import (
    ARGUMENTS,
    DEVICE_KEYS,
    DISTRIBUTED_KEYS,
    GROUP_KEYS,
    HEADERS,
    PHASES,
    PHASES_WITH_ARGUMENTS,
    WORDS,
    FormName,
    Names,
    Removed,
    Words,
)
from gpudiag.errors import InputError
from gpudiag.report.exports import compress_gzip
from gpudiag.trace.decompression import format_path, read_text_blocks
from gpudiag.trace.events import EVENT_KINDS, CategoryCodes, EventDecoder
from gpudiag.trace.json_framing import CutShortError, Document, HeaderValue, NotATraceError

JSON_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_NUMBER = re.compile(rb'-?\d{1,50}(?:\.\d{1,30})?(?:[eE][-+]?\d{1,4})?|true|false|null|""|"(?:stream )?[-+]?\d{1,30}(?:\.\d{1,30})? ?"')
_NUMBERS = re.compile(rb'[\[\]\s,\d.+-]*|"[\[\]\s,\d.+-]*"')
_PATTERNS: dict[FormName, re.Pattern[bytes]] = {
    "number": _NUMBER,
    "address": re.compile(rb'"0x[0-9a-fA-F]{1,16}"|' + _NUMBER.pattern),
    "version": re.compile(rb'"\d[\w.+-]{0,39}"|\d{1,10}'),
    "device": re.compile(rb'"[\w .()/+-]{0,100}"', re.ASCII),
}
"""Forms whose values are kept as they are."""
_LISTS: tuple[FormName, ...] = ("numbers", "types", "arguments")
"""Forms that leave out the texts in a value, and keep the rest."""
_PLAIN_SPLIT = re.compile(r"[\[\](),\s]+")
_PLAIN = re.compile(r"(?:True|False|None|-?inf|nan|-?\d{1,20}(?:\.\d{0,20})?(?:[eE][-+]?\d{1,3})?[jL]?)?")
_WORD = re.compile(r"\w+", re.ASCII)
_MAX_DEPTH, _MAX_NOTED_DEPTH = 8, 64


def rewrite_value(form: FormName, names: Names, raw: bytes) -> bytes | None:
    """Return a JSON value in its allowed form, the same bytes where nothing changes; None for a value of another form.

    Of lists the texts become empty, but for names of data types (types) or plain values and known options (arguments). What is no list
    becomes null: that something was recorded counts too.
    """
    if form in _PATTERNS:
        return raw if _PATTERNS[form].fullmatch(raw) else None
    if form in ("words", "symbol"):
        return _rewrite_text(names.text if form == "words" else names.symbol, raw)
    if form == "numbers" and _NUMBERS.fullmatch(raw.replace(b"...", b"")):
        return raw
    value = decode_json(raw)
    if not isinstance(value, list):
        return b"null"
    found = _filter_texts(value, form)
    return raw if found == value else msgspec.json.encode(found)


def _rewrite_text(rewrite: Callable[[str], str], raw: bytes) -> bytes | None:
    value = decode_json(raw)
    if isinstance(value, str):
        return msgspec.json.encode(rewrite(value))
    return raw if _NUMBER.fullmatch(raw) else None


def _filter_texts(value: Any, form: FormName, depth: int = 0) -> Any:
    if isinstance(value, list) and depth < _MAX_DEPTH:
        return [_filter_texts(item, form, depth + 1) for item in value]
    if not isinstance(value, str):
        return value if isinstance(value, int | float) else None
    kept = False
    if form == "types":
        kept = len(value) < 80 and all(word.lower() in WORDS for word in _WORD.findall(value))
    elif form == "arguments":
        plain = all(_PLAIN.fullmatch(token) for token in _PLAIN_SPLIT.split(value))
        kept = plain or value.strip("\"'").lower() in WORDS
    return value if kept else ""


def decode_json(raw: bytes | Raw) -> Any:
    """Return the value of a JSON text; None where it is none."""
    try:
        return msgspec.json.decode(raw)
    except JSON_ERRORS:
        return None


def note_texts(value: Any, removed: Removed, kind: str, depth: int = 0) -> None:
    """Note every text in a value that is left out."""
    if isinstance(value, str):
        removed.note(kind, value)
    elif isinstance(value, list) and depth < _MAX_NOTED_DEPTH:
        for item in value:
            note_texts(item, removed, kind, depth + 1)
    elif isinstance(value, dict) and depth < _MAX_NOTED_DEPTH:
        for key, item in value.items():
            removed.note(kind, key)
            note_texts(item, removed, kind, depth + 1)


_REMEMBERED = 200_000
"""Distinct values whose rewritten text is kept; a hostile file has more, and then waits longer."""

_LONGEST = 4_000
"""Bytes of a value that is worth remembering."""

_KEYS = frozenset(("ph", "cat", "name", "pid", "tid", "ts", "dur", "id", "s", "bp", "args"))
_FLAGS = frozenset((b'"p"', b'"t"', b'"g"', b'"e"'))
"""Scope of an instant event and binding point of a flow (Trace Event Format)."""


Rewrite = Callable[[bytes], bytes | None]


class EventScrubber:
    """Rewrites chunks of events; what is left out is noted in `removed`."""

    def __init__(self, names: Names, removed: Removed) -> None:
        self._removed = removed
        self._chunk = msgspec.json.Decoder(list[dict[str, Raw]])
        self._arguments = msgspec.json.Decoder(dict[str, Raw])
        self._by_argument: dict[str, Rewrite] = {key: partial(rewrite_value, form, names) for key, form in ARGUMENTS.items()}
        self._by_kind: list[Rewrite] = [partial(_rewrite_text, names.of(kind)) for kind in EVENT_KINDS]
        self._words: Rewrite = partial(rewrite_value, "words", names)
        self._begins = {key: b'"%b":' % key.encode() for key in (*ARGUMENTS, *_KEYS)}
        self._rewritten: dict[tuple[str | int, bytes], bytes | None] = {}
        self._code_of = CategoryCodes()
        self._kinds: dict[bytes, int] = {}
        self._phases: dict[bytes, str] = {}

    def rewrite(self, text: memoryview | bytes) -> bytes:
        """Return the events of `text`, a JSON array, as objects on lines of their own."""
        rewritten = []
        for event in self._chunk.decode(text):
            phase, category = bytes(event.get("ph", b"")), bytes(event.get("cat", b""))
            letter = self._phases.get(phase)
            if letter is None:
                value = decode_json(phase)
                letter = value if isinstance(value, str) and value in PHASES else ""
                if len(self._phases) < _REMEMBERED:
                    self._phases[phase] = letter
            parts = [b'"ph":"%b"' % letter.encode()] if letter else []
            for key in event:
                if key not in _KEYS:
                    self._removed.note("keys of events", key)
                    note_texts(decode_json(event[key]), self._removed, "texts of events")
                elif key not in ("ph", "args"):
                    found = self._rewrite_field(key, bytes(event[key]), category)
                    if found is not None:
                        parts.append(self._begins[key] + found)
            if "args" in event:
                parts.append(b'"args":' + self._rewrite_arguments(event["args"], letter))
            rewritten.append(b"{" + b",".join(parts) + b"}")
        return b",\n".join(rewritten)

    def _rewrite_field(self, key: str, raw: bytes, category: bytes) -> bytes | None:
        if key in ("ts", "dur") or not raw.startswith(b'"'):
            return raw if _NUMBER.fullmatch(raw) else None
        if key in ("s", "bp"):
            return raw if raw in _FLAGS else None
        if key != "name":
            return self._remember(key, raw, self._words)
        code = self._kinds.get(category)
        if code is None:
            value = decode_json(category)
            code = self._code_of[value if isinstance(value, str) else None]
            if len(self._kinds) < _REMEMBERED:
                self._kinds[category] = code
        return self._remember(code, raw, self._by_kind[code])

    def _remember(self, key: str | int, raw: bytes, rewrite: Rewrite) -> bytes | None:
        if len(raw) > _LONGEST:
            return rewrite(raw)
        found = self._rewritten.get((key, raw), b"")
        if found == b"":
            if len(self._rewritten) >= _REMEMBERED:
                self._rewritten.clear()
            found = self._rewritten[key, raw] = rewrite(raw)
        return found

    def _rewrite_arguments(self, raw: Raw, letter: str) -> bytes:
        """Return the arguments whose keys are on the list; an empty text where a value has another form."""
        try:
            args = self._arguments.decode(raw) if letter in PHASES_WITH_ARGUMENTS else {}
        except JSON_ERRORS:
            args = {}
        if not args and bytes(raw) != b"{}":
            self._removed.note("arguments of events")
            note_texts(decode_json(raw), self._removed, "texts of events")
        parts = []
        for key, value in args.items():
            given, form, found = bytes(value), ARGUMENTS.get(key), None
            if form == "number":
                found = given if _NUMBER.fullmatch(given) else None
            elif form is not None:
                found = self._remember(key, given, self._by_argument[key])
            if found != given and (found is None or form in _LISTS):
                self._removed.note("arguments of events", key if form is None else None)
                note_texts(decode_json(given), self._removed, "texts of events")
            if form is not None:
                parts.append(self._begins[key] + (b'""' if found is None else found))
        return b"{" + b",".join(parts) + b"}"


_MAX_ENTRIES = 65_536
"""Devices or process groups of a header."""


class _WholeDocument(Document):
    """Also yields the header values that the reader skips: what is removed is looked for in the copy."""

    keeps_all_headers = True


class TraceScrubber:
    """Rewrites the traces of one run: the same word becomes the same digest in all of them."""

    def __init__(self, words: Words, *, keep_names: bool = False) -> None:
        self.names = Names(words, keep_names=keep_names)
        self._removed = words.removed
        self._events = EventScrubber(self.names, words.removed)

    def pieces(self, path: str, tell: Callable[[str], None] = lambda _: None) -> Iterator[bytes]:
        """Yield the text of the copy of the trace at `path`. A file that breaks off has a copy that breaks off: reports say so.

        Raises InputError where it is no trace.
        """
        decoder = EventDecoder()
        open_list, before = False, b""
        yield b"{"
        with closing(read_text_blocks(path)) as blocks:
            try:
                for part in _WholeDocument(blocks, decoder).parts():
                    if isinstance(part, HeaderValue):
                        value = self._rewrite_header(part.key, part.text)
                        if value is not None:
                            yield (b"\n]" if open_list else b"") + before + b"\n%b:%b" % (msgspec.json.encode(part.key), value)
                            open_list, before = False, b","
                        continue
                    yield b",\n" if open_list else before + b'\n"traceEvents":[\n'
                    yield self._events.rewrite(part.text) if part.events else b""
                    open_list, before = bool(part.events), b","
                    tell(f"scrubbing, {decoder.count:,} events")
            except CutShortError:
                self._removed.note("events at the end that are cut short")
                return
            except NotATraceError as error:
                raise InputError(
                    f"{format_path(path)} {error}", error.hint or "give a trace that torch.profiler wrote, or a bundle"
                ) from None
            finally:
                self._removed.counts["events that could not be read"] += decoder.dropped.total()
        yield b"\n]}\n" if open_list else b"}\n"

    def _rewrite_header(self, key: str, text: bytes) -> bytes | None:
        form, found = HEADERS.get(key), None
        if key == "distributedInfo":
            found = self._rewrite_object(text, DISTRIBUTED_KEYS)
        elif form == "device list":
            found = self._rewrite_entries(text, DEVICE_KEYS)
        elif form is not None:
            found = rewrite_value(form, self.names, text)
        else:
            self._removed.note("keys of the header", key)
        if found is None:
            self._removed.note("values of the header")
            note_texts(decode_json(text), self._removed, "texts of the header")
        return found

    def _rewrite_entries(self, text: bytes, allowed: dict[str, FormName]) -> bytes | None:
        try:
            entries = msgspec.json.decode(text, type=list[Raw])[:_MAX_ENTRIES]
        except JSON_ERRORS:
            return None
        found = (self._rewrite_object(bytes(entry), allowed) for entry in entries)
        return b"[" + b",".join(b"{}" if entry is None else entry for entry in found) + b"]"

    def _rewrite_object(self, text: bytes, allowed: dict[str, FormName]) -> bytes | None:
        try:
            entries = msgspec.json.decode(text, type=dict[str, Raw])
        except JSON_ERRORS:
            return None
        parts = []
        for key, value in entries.items():
            form, raw, found = allowed.get(key), bytes(value), None
            if form == "group list":
                found = self._rewrite_entries(raw, GROUP_KEYS)
            elif form is not None:
                found = rewrite_value(form, self.names, raw)
            if found is None:
                self._removed.note("values of the header", key if form is None else None)
                note_texts(decode_json(raw), self._removed, "texts of the header")
            else:
                parts.append(b"%b:%b" % (msgspec.json.encode(key), found))
        return b"{" + b",".join(parts) + b"}"


def compress(pieces: Iterable[bytes], name: str) -> Iterator[bytes]:
    """Yield `pieces` compressed as the suffix of `name` says."""
    if name.lower().endswith(".gz"):
        yield from compress_gzip(pieces)
    elif name.lower().endswith(".zst"):
        compressor = zstandard.ZstdCompressor().compressobj()
        for piece in pieces:
            yield compressor.compress(piece)
        yield compressor.flush()
    else:
        yield from pieces
