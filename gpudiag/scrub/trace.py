"""One trace file -> a copy that may be shared: values in allowed forms, a chunk of events at a time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any

import msgspec
from msgspec import UNSET, Raw

from gpudiag.errors import InputError
from gpudiag.report.exports import compress_gzip
from gpudiag.scrub.words import ARGUMENTS, EVENT_KEYS, HEADERS, NAME_FORMS, Form, Names, consists_of_known_words
from gpudiag.trace.decompression import format_path, read_text_blocks, zstd
from gpudiag.trace.events import EVENT_KINDS, CategoryCodes, EventDecoder
from gpudiag.trace.json_framing import CutShortError, Document, HeaderValue, NotATraceError
from gpudiag.units import Progress

_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_DECODER = msgspec.json.Decoder(float_hook=lambda digits: Raw(digits.encode()))  # no digit of a time changes
_NUMBER = re.compile(r"(?:stream )?[-+]?\d{1,30}(?:\.\d{1,30})? ?|0x[0-9a-fA-F]{1,16}|", re.ASCII)
_NUMBERS = re.compile(r"[\[\]\s,\d.+-]*", re.ASCII)
_PLAIN_SPLIT = re.compile(r"[\[\](),\s]+")
_PLAIN = re.compile(r"(?:True|False|None|-?inf|nan|-?\d{1,20}(?:\.\d{0,20})?(?:[eE][-+]?\d{1,3})?[jL]?)?")
_MAX_DEPTH, _MAX_ENTRIES = 8, 65_536


def _decode(text: bytes | memoryview | Raw) -> Any:
    """Return a value; None for one that cannot be read: a reader that does not use it passes it over."""
    try:
        return _DECODER.decode(text)
    except _UNREADABLE:
        return None


def _decode_each(text: bytes | memoryview) -> list[dict[str, Any]]:
    return [{key: _decode(value) for key, value in event.items()} for event in msgspec.json.decode(text, type=list[dict[str, Raw]])]


class _WholeDocument(Document):
    """Also yields the header values that the reader skips: what is removed is looked for in the copy."""

    keeps_all_headers = True


class TraceScrubber:
    """Rewrites the traces of one run: the same word becomes the same digest in all of them."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._code_of = CategoryCodes()
        self._by_kind: list[dict[str, Form]] = [EVENT_KEYS | {"name": NAME_FORMS.get(kind, "words")} for kind in EVENT_KINDS]

    def pieces(self, path: str, tell: Progress = lambda _: None) -> Iterator[bytes]:
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
                        if header := self._keep_members(HEADERS, {part.key: _decode(part.text)}, "keys of the header"):
                            yield (b"\n]" if open_list else b"") + before + b"\n" + msgspec.json.encode(header)[1:-1]
                            open_list, before = False, b","
                        continue
                    yield b",\n" if open_list else before + b'\n"traceEvents":[\n'
                    if part.events:
                        yield b",\n".join(map(self._rewrite_event, _decode(part.text) or _decode_each(part.text)))
                    open_list, before = bool(part.events), b","
                    tell(f"scrubbing, {decoder.count:,} events")
            except CutShortError:
                self._names.note("events at the end that are cut short")
                return
            except NotATraceError as error:
                raise InputError(
                    f"{format_path(path)} {error}", error.hint or "give a trace that torch.profiler wrote, or a bundle"
                ) from None
            finally:
                self._names.removed["events that could not be read"] += decoder.dropped.total()
        yield b"\n]}\n" if open_list else b"}\n"

    def _rewrite_event(self, event: dict[str, Any]) -> bytes:
        category, args = event.get("cat"), event.pop("args", UNSET)
        kept = self._keep_members(self._by_kind[self._code_of[category if isinstance(category, str) else None]], event, "keys of events")
        if args is not UNSET:
            forms = ARGUMENTS if event.get("ph") in ("X", "i", "M") else {}
            found = self._keep(forms, args, "arguments of events", instead="")
            kept["args"] = {} if found is UNSET else found
        return msgspec.json.encode(kept)

    def _keep_members(self, forms: Mapping[str, Form], members: dict[str, Any], kind: str, instead: Any = UNSET) -> dict[str, Any]:
        """Return the members of an object that are on the list; `instead`: what stands for a value that does not have its form."""
        kept = {}
        for key, value in members.items():
            form = forms.get(key)
            found = UNSET if form is None else self._keep(form, value)
            if found is UNSET or (form == "list" and found != value):
                self._names.note(kind, *([key] if form is None else []), value)
            if found is UNSET and form is not None:
                found = instead
            if found is not UNSET:
                kept[key] = found
        return kept

    def _keep(self, form: Form, value: Any, kind: str = "values of the header", instead: Any = UNSET) -> Any:
        """Return a value in its form; UNSET for one of another form."""
        if isinstance(form, Mapping):
            if isinstance(value, dict):
                return self._keep_members(form, value, kind, instead)
            if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
                self._names.note(kind, value)
            if not isinstance(value, list):
                return UNSET
            return [self._keep_members(form, entry if isinstance(entry, dict) else {}, kind, instead) for entry in value[:_MAX_ENTRIES]]
        if isinstance(value, str):
            if _NUMBER.fullmatch(value) or (form == "list" and _NUMBERS.fullmatch(value.replace("...", ""))):
                return value
            return UNSET if form in ("number", "list") else self._names.rewrite(form, value)
        if isinstance(value, list | dict):  # that something was recorded counts
            return _filter_texts(value) if form == "list" and isinstance(value, list) else UNSET
        return value


def _filter_texts(value: Any, depth: int = 0) -> Any:
    """Return a list without its texts but for plain values, names of data types and known options."""
    if isinstance(value, list):
        return [_filter_texts(item, depth + 1) for item in value] if depth < _MAX_DEPTH else None
    if not isinstance(value, str):
        return None if isinstance(value, dict) else value
    plain = all(map(_PLAIN.fullmatch, _PLAIN_SPLIT.split(value)))
    return value if plain or (len(value) < 80 and value.isascii() and consists_of_known_words(value)) else ""


def compress(pieces: Iterable[bytes], name: str) -> Iterator[bytes]:
    """Yield `pieces` compressed as the suffix of `name` says."""
    if name.lower().endswith(".gz"):
        yield from compress_gzip(pieces)
    elif name.lower().endswith(".zst"):
        compressor = zstd.ZstdCompressor()
        for piece in pieces:
            yield compressor.compress(piece)
        yield compressor.flush()
    else:
        yield from pieces
