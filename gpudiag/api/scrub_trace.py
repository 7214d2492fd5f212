"""One trace file -> a copy that may be shared: values in allowed forms, events one by one, a block at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
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
    Words,
)
from gpudiag.errors import InputError
from gpudiag.report.exports import compress_gzip
from gpudiag.trace.decompression import format_path, read_text_blocks
from gpudiag.trace.events import EVENT_KINDS, CategoryCodes, EventDecoder
from gpudiag.trace.json_framing import CutShortError, Document, HeaderValue, NotATraceError

Form = Callable[[bytes], bytes | None]

JSON_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_NUMBER = re.compile(rb'-?\d{1,50}(?:\.\d{1,30})?(?:[eE][-+]?\d{1,4})?|true|false|null|""|"(?:stream )?[-+]?\d{1,30}(?:\.\d{1,30})? ?"')
_NUMBERS = re.compile(rb'[\[\]\s,\d.+-]*|"[\[\]\s,\d.+-]*"')
_ADDRESS = re.compile(rb'"0x[0-9a-fA-F]{1,16}"')
_VERSION = re.compile(rb'"\d[\w.+-]{0,39}"|\d{1,10}')
_DEVICE = re.compile(rb'"[\w .()/+-]{0,100}"', re.ASCII)
_PLAIN_SPLIT = re.compile(r"[\[\](),\s]+")
_PLAIN = re.compile(r"(?:True|False|None|-?inf|nan|-?\d{1,20}(?:\.\d{0,20})?(?:[eE][-+]?\d{1,3})?[jL]?)?")
_WORD = re.compile(r"\w+", re.ASCII)
_MAX_DEPTH = 8


def keep_number(raw: bytes) -> bytes | None:
    """Return a number or truth value, also in quotes, as the profiler writes them."""
    return raw if _NUMBER.fullmatch(raw) else None


def keep_numbers(raw: bytes) -> bytes | None:
    """Return nested lists of numbers, also as a text; null for what is none: that something was recorded counts too."""
    return raw if _NUMBERS.fullmatch(raw.replace(b"...", b"")) else _map_texts(raw, lambda _: "")


def keep_address(raw: bytes) -> bytes | None:
    """Return a pointer or a number."""
    return raw if _ADDRESS.fullmatch(raw) else keep_number(raw)


def keep_version(raw: bytes) -> bytes | None:
    """Return the version of a library: it begins with a digit."""
    return raw if _VERSION.fullmatch(raw) else None


def keep_device_name(raw: bytes) -> bytes | None:
    """Return the name of a processor, as its vendor writes it."""
    return raw if _DEVICE.fullmatch(raw) else None


def keep_types(raw: bytes) -> bytes | None:
    """Return nested lists of the names of data types."""
    return _map_texts(raw, lambda text: text if all(word.lower() in WORDS for word in _WORD.findall(text)) and len(text) < 80 else "")


def keep_arguments(raw: bytes) -> bytes | None:
    """Return the plain arguments of an op: numbers, truth values, lists of such, and the known words among its options."""
    return _map_texts(raw, lambda text: text if _keep_plain(text) else "")


def _keep_plain(text: str) -> bool:
    if all(_PLAIN.fullmatch(token) for token in _PLAIN_SPLIT.split(text)):
        return True
    return text.strip("\"'").lower() in WORDS


def build_text_form(rewrite: Callable[[str], str]) -> Form:
    """Build the form of a text, or a number, that `rewrite` makes shareable."""

    def form(raw: bytes) -> bytes | None:
        value = decode_json(raw)
        return msgspec.json.encode(rewrite(value)) if isinstance(value, str) else keep_number(raw)

    return form


def build_words_form(names: Names) -> Form:
    """Build the form of a text of known words."""
    return build_text_form(names.text)


def build_symbol_form(names: Names) -> Form:
    """Build the form of the name of a kernel."""
    return build_text_form(names.symbol)


def decode_json(raw: bytes) -> Any:
    """Return the value of a JSON text; None where it is none."""
    try:
        return msgspec.json.decode(raw)
    except JSON_ERRORS:
        return None


def _map_texts(raw: bytes, keep: Callable[[str], str]) -> bytes:
    """Return nested lists with their texts as `keep` returns them, null for what is no list; the same bytes where nothing changes."""
    value = decode_json(raw)
    found = _walk_texts(value, keep, 0)
    if not isinstance(value, list):
        return b"null"
    return raw if found == value else msgspec.json.encode(found)


def _walk_texts(value: Any, keep: Callable[[str], str], depth: int) -> Any:
    if isinstance(value, str):
        return keep(value)
    if isinstance(value, list) and depth < _MAX_DEPTH:
        return [_walk_texts(item, keep, depth + 1) for item in value]
    return value if isinstance(value, int | float) else None


def note_texts(raw: bytes, words: Words, kind: str) -> None:
    """Note every text in a value that is left out."""
    _note_text(decode_json(raw), words, kind, 0)


def _note_text(value: Any, words: Words, kind: str, depth: int) -> None:
    if isinstance(value, str):
        words.removed.note(kind, value)
    elif isinstance(value, list) and depth < 64:
        for item in value:
            _note_text(item, words, kind, depth + 1)
    elif isinstance(value, dict) and depth < 64:
        for key, item in value.items():
            words.removed.note(kind, key)
            _note_text(item, words, kind, depth + 1)


_REMEMBERED = 200_000
"""Distinct values whose rewritten text is kept; a hostile file has more, and then waits longer."""

_LONGEST = 4_000
"""Bytes of a value that is worth remembering."""

_KEYS = frozenset(("ph", "cat", "name", "pid", "tid", "ts", "dur", "id", "s", "bp", "args"))
_FLAGS = frozenset(('"p"', '"t"', '"g"', '"e"'))
"""Scope of an instant event and binding point of a flow (Trace Event Format)."""


def build_forms(names: Names) -> Mapping[FormName, Form]:
    """Build the forms of the allow-list that hold one value."""
    return {
        "number": keep_number, "numbers": keep_numbers, "address": keep_address, "version": keep_version, "types": keep_types,
        "arguments": keep_arguments, "words": build_words_form(names), "symbol": build_symbol_form(names), "device": keep_device_name,
    }  # fmt: skip


_WITHOUT_TEXTS = (keep_numbers, keep_types, keep_arguments)
"""Forms that leave out the texts in a value, and keep the rest."""


class EventScrubber:
    """Rewrites chunks of events; what is left out is noted in `words.removed`."""

    def __init__(self, names: Names, words: Words) -> None:
        self._names, self._words = names, words
        self._chunk = msgspec.json.Decoder(list[dict[str, Raw]])
        self._rewrite_object = msgspec.json.Decoder(dict[str, Raw])
        known = build_forms(names)
        self._forms = {key: known[form] for key, form in ARGUMENTS.items()}
        self._begins = {key: b'"%b":' % key.encode() for key in (*ARGUMENTS, *_KEYS)}
        self._words_form = known["words"]
        self._plain: dict[tuple[str, bytes], bytes | None] = {}
        self._named: dict[tuple[int, bytes], bytes | None] = {}
        self._code_of = CategoryCodes()
        self._kinds: dict[bytes, int] = {}
        self._phases: dict[bytes, str] = {}

    def rewrite(self, text: memoryview | bytes) -> bytes:
        """Return the events of `text`, a JSON array, as objects on lines of their own."""
        return b",\n".join(map(self._rewrite_event, self._chunk.decode(text)))

    def _rewrite_event(self, event: dict[str, Raw]) -> bytes:
        letter = self._read_phase(bytes(event.get("ph", b"")))
        parts = [b'"ph":"%b"' % letter.encode()] if letter else []
        category = bytes(event.get("cat", b""))
        for key in event:
            if key not in _KEYS:
                self._words.removed.note("keys of events", key)
                note_texts(event[key], self._words, "texts of events")
            elif key not in ("ph", "args"):
                value = self._rewrite_field(key, bytes(event[key]), category)
                if value is not None:
                    parts.append(self._begins[key] + value)
        if "args" in event:
            parts.append(b'"args":' + self._rewrite_arguments(event["args"], letter))
        return b"{" + b",".join(parts) + b"}"

    def _read_phase(self, raw: bytes) -> str:
        found = self._phases.get(raw)
        if found is None:
            value = decode_json(raw)
            found = value if isinstance(value, str) and value in PHASES else ""
            if len(self._phases) < _REMEMBERED:
                self._phases[raw] = found
        return found

    def _rewrite_field(self, key: str, raw: bytes, category: bytes) -> bytes | None:
        if key in ("ts", "dur") or not raw.startswith(b'"'):
            return keep_number(raw)
        if key == "name":
            code = self._kinds.get(category)
            if code is None:
                value = decode_json(category)
                code = self._code_of[value if isinstance(value, str) else None]
                if len(self._kinds) < _REMEMBERED:
                    self._kinds[category] = code
            if len(raw) > _LONGEST:
                return build_text_form(self._names.of(EVENT_KINDS[code]))(raw)
            found = self._named.get((code, raw), b"")
            if found == b"":
                if len(self._named) >= _REMEMBERED:
                    self._named.clear()
                found = self._named[code, raw] = build_text_form(self._names.of(EVENT_KINDS[code]))(raw)
            return found
        if key in ("s", "bp"):
            return raw if raw.decode("utf-8", "replace") in _FLAGS else None
        return self._remember(key, raw, self._words_form)

    def _remember(self, key: str, raw: bytes, form: Form) -> bytes | None:
        if len(raw) > _LONGEST:
            return form(raw)
        found = self._plain.get((key, raw), b"")
        if found == b"":
            if len(self._plain) >= _REMEMBERED:
                self._plain.clear()
            found = self._plain[key, raw] = form(raw)
        return found

    def _rewrite_arguments(self, raw: Raw, letter: str) -> bytes:
        try:
            args = self._rewrite_object.decode(raw) if letter in PHASES_WITH_ARGUMENTS else {}
        except JSON_ERRORS:
            args = {}
        if not args and bytes(raw) != b"{}":
            self._words.removed.note("arguments of events")
            note_texts(raw, self._words, "texts of events")
        parts = []
        for key, value in args.items():
            found = self._rewrite_argument(key, bytes(value))
            if found is not None:
                parts.append(self._begins[key] + found)
        return b"{" + b",".join(parts) + b"}"

    def _rewrite_argument(self, key: str, raw: bytes) -> bytes | None:
        """Return the value of an argument: None where its key is not on the list, an empty text where its form is another."""
        form = self._forms.get(key)
        found = None if form is None else keep_number(raw) if form is keep_number else self._remember(key, raw, form)
        if found != raw and (found is None or form in _WITHOUT_TEXTS):
            self._words.removed.note("arguments of events", key if form is None else None)
            note_texts(raw, self._words, "texts of events")
        return b'""' if found is None and form is not None else found


_MAX_ENTRIES = 65_536
"""Devices or process groups of a header."""


class _WholeDocument(Document):
    """Also yields the header values that the reader skips: what is removed is looked for in the copy."""

    keeps_all_headers = True


class TraceScrubber:
    """Rewrites the traces of one run: the same word becomes the same digest in all of them."""

    def __init__(self, words: Words, *, keep_names: bool = False) -> None:
        self.names = Names(words, keep_names=keep_names)
        self._words = words
        self._forms = build_forms(self.names)
        self._events = EventScrubber(self.names, words)

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
                self._words.removed.note("events at the end that are cut short")
                return
            except NotATraceError as error:
                raise InputError(
                    f"{format_path(path)} {error}", error.hint or "give a trace that torch.profiler wrote, or a bundle"
                ) from None
            finally:
                self._words.removed.counts["events that could not be read"] += decoder.dropped.total()
        yield b"\n]}\n" if open_list else b"}\n"

    def _rewrite_header(self, key: str, text: bytes) -> bytes | None:
        if key == "distributedInfo":
            found = self._rewrite_object(text, DISTRIBUTED_KEYS)
        elif HEADERS.get(key) == "device list":
            found = self._rewrite_entries(text, DEVICE_KEYS)
        elif key in HEADERS:
            found = self._forms[HEADERS[key]](text)
        else:
            self._words.removed.note("keys of the header", key)
            found = None
        if found is None:
            self._words.removed.note("values of the header")
            note_texts(text, self._words, "texts of the header")
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
        for key, raw in entries.items():
            form = allowed.get(key)
            value = None if form is None else self._rewrite_value(form, bytes(raw))
            if value is None:
                self._words.removed.note("values of the header", key if form is None else None)
                note_texts(raw, self._words, "texts of the header")
            else:
                parts.append(b"%b:%b" % (msgspec.json.encode(key), value))
        return b"{" + b",".join(parts) + b"}"

    def _rewrite_value(self, form: FormName, raw: bytes) -> bytes | None:
        return self._rewrite_entries(raw, GROUP_KEYS) if form == "group list" else self._forms[form](raw)


def compress(pieces: Iterable[bytes], name: str) -> Iterable[bytes]:
    """Return `pieces` compressed as the suffix of `name` says."""
    if name.lower().endswith(".gz"):
        return compress_gzip(pieces)
    return _compress_zstd(pieces) if name.lower().endswith(".zst") else pieces


def _compress_zstd(pieces: Iterable[bytes]) -> Iterator[bytes]:
    compressor = zstandard.ZstdCompressor().compressobj()
    for piece in pieces:
        yield compressor.compress(piece)
    yield compressor.flush()
