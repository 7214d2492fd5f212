"""One trace file -> a copy that may be shared: values in allowed forms, a chunk of events at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any

import msgspec
import zstandard
from msgspec import Raw

from gpudiag.api.scrub_words import ARGUMENTS, EVENT_KEYS, HEADERS, NAME_FORMS, Form, FormName, Names, consists_of_known_words
from gpudiag.errors import InputError
from gpudiag.report.exports import compress_gzip
from gpudiag.trace.decompression import format_path, read_text_blocks
from gpudiag.trace.events import EVENT_KINDS, CategoryCodes, EventDecoder
from gpudiag.trace.json_framing import CutShortError, Document, HeaderValue, NotATraceError

JSON_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_NUMBER = re.compile(
    rb'-?\d{1,50}(?:\.\d{1,30})?(?:[eE][-+]?\d{1,4})?|true|false|null|""|"(?:stream )?[-+]?\d{1,30}(?:\.\d{1,30})? ?"|"0x[0-9a-fA-F]{1,16}"'
)
_NUMBERS = re.compile(rb'"?[\[\]\s,\d.+-]*"?')
_PLAIN_SPLIT = re.compile(r"[\[\](),\s]+")
_PLAIN = re.compile(r"(?:True|False|None|-?inf|nan|-?\d{1,20}(?:\.\d{0,20})?(?:[eE][-+]?\d{1,3})?[jL]?)?")
_MAX_DEPTH, _MAX_ENTRIES = 8, 65_536


def _decode(text: bytes | Raw, kind: Any = Any) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except JSON_ERRORS:
        return None


class _WholeDocument(Document):
    """Also yields the header values that the reader skips: what is removed is looked for in the copy."""

    keeps_all_headers = True


class TraceScrubber:
    """Rewrites the traces of one run: the same word becomes the same digest in all of them."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._values: dict[tuple[FormName, bytes], bytes | None] = {}
        self._code_of = CategoryCodes()
        self._by_kind: list[dict[str, Form]] = [EVENT_KEYS | {"name": NAME_FORMS.get(kind, "words")} for kind in EVENT_KINDS]

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
                        if header := self._keep_members(HEADERS, {part.key: part.text}, "keys of the header"):
                            yield (b"\n]" if open_list else b"") + before + b"\n" + header
                            open_list, before = False, b","
                        continue
                    yield b",\n" if open_list else before + b'\n"traceEvents":[\n'
                    if part.events:
                        yield b",\n".join(map(self._rewrite_event, msgspec.json.decode(part.text, type=list[dict[str, Raw]])))
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

    def _rewrite_event(self, event: dict[str, Raw]) -> bytes:
        category = _decode(event.get("cat", b""), str)
        args = event.pop("args", None)
        kept = self._keep_members(self._by_kind[self._code_of[category]], event, "keys of events")
        if args is None:
            return b"{%b}" % kept
        forms = ARGUMENTS if bytes(event.get("ph", b"")) in (b'"X"', b'"i"', b'"M"') else {}
        found = self._keep_object(forms, args, "arguments of events", instead=b'""')
        return b'{%b,"args":%b}' % (kept, b"{}" if found is None else found)

    def _keep_members(
        self, forms: Mapping[str, Form], members: Mapping[str, Raw | bytes], kind: str, instead: bytes | None = None
    ) -> bytes:
        """Return the members of an object that are on the list; `instead`: what stands for a value that does not have its form."""
        parts = []
        for key, value in members.items():
            form, raw = forms.get(key), bytes(value)
            found = None if form is None else self._keep(form, raw)
            if found is None or (found != raw and form == "list"):
                self._names.note(kind, *([key] if form is None else []), _decode(raw))
            if found is None and form is not None:
                found = instead
            if found is not None:
                parts.append(b"%b:%b" % (msgspec.json.encode(key), found))
        return b",".join(parts)

    def _keep_object(self, forms: Mapping[str, Form], raw: bytes | Raw, kind: str, instead: bytes | None = None) -> bytes | None:
        members = _decode(raw, dict[str, Raw])
        if members is not None:
            return b"{%b}" % self._keep_members(forms, members, kind, instead)
        self._names.note(kind, _decode(raw))
        return None

    def _keep(self, form: Form, raw: bytes) -> bytes | None:
        """Return a value in its form; None for one of another form."""
        if isinstance(form, Mapping):
            if raw.startswith(b"{"):
                return self._keep_object(form, raw, "values of the header")
            entries = _decode(raw, list[Raw])
            objects = (self._keep_object(form, entry, "values of the header") or b"{}" for entry in (entries or [])[:_MAX_ENTRIES])
            return None if entries is None else b"[%b]" % b",".join(objects)
        if _NUMBER.fullmatch(raw) or (form == "list" and _NUMBERS.fullmatch(raw.replace(b"...", b""))):
            return raw
        if form == "number":
            return None
        found = self._values.get((form, raw), b"")
        if found == b"":
            value = _decode(raw)
            if form == "list":
                kept = _filter_texts(value) if isinstance(value, list) else None  # that something was recorded counts
                found = raw if kept == value else msgspec.json.encode(kept)
            else:
                found = msgspec.json.encode(self._names.rewrite(form, value)) if isinstance(value, str) else None
            if len(raw) < 4_000:  # longer ones do not come again
                if len(self._values) >= 200_000:  # values whose rewriting is remembered; a hostile file has more, and then waits longer
                    self._values.clear()
                self._values[form, raw] = found
        return found


def _filter_texts(value: Any, depth: int = 0) -> Any:
    """Return a list without its texts but for plain values, names of data types and known options."""
    if isinstance(value, list):
        return [_filter_texts(item, depth + 1) for item in value] if depth < _MAX_DEPTH else None
    if not isinstance(value, str):
        return value if isinstance(value, int | float) else None
    plain = all(map(_PLAIN.fullmatch, _PLAIN_SPLIT.split(value)))
    return value if plain or (len(value) < 80 and value.isascii() and consists_of_known_words(value)) else ""


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
