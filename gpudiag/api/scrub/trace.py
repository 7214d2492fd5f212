"""One trace file -> a copy that may be shared, a block at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing

import msgspec
import zstandard
from msgspec import Raw

from gpudiag.api.scrub import forms
from gpudiag.api.scrub.events import Events, forms_by_name
from gpudiag.api.scrub.kept import DEVICE, DISTRIBUTED, GROUP, HEADERS, FormName
from gpudiag.api.scrub.names import Names
from gpudiag.api.scrub.words import Words
from gpudiag.errors import InputError
from gpudiag.report.perfetto import gzipped
from gpudiag.trace.events import EventDecoder
from gpudiag.trace.framing import CutShortError, Document, HeaderValue, NotATraceError
from gpudiag.trace.source import shown, text_blocks

_MAX_ENTRIES = 65_536
"""Devices or process groups of a header."""


class _Whole(Document):
    """Also yields the header values that the reader skips: what is removed is looked for in the copy."""

    keeps_all_headers = True


class Scrubber:
    """Rewrites the traces of one run: the same word becomes the same digest in all of them."""

    def __init__(self, words: Words, *, keep_names: bool = False) -> None:
        self.names = Names(words, keep_names=keep_names)
        self._words = words
        self._forms = forms_by_name(self.names)
        self._events = Events(self.names, words)

    def pieces(self, path: str, tell: Callable[[str], None] = lambda _: None) -> Iterator[bytes]:
        """Yield the text of the copy of the trace at `path`. A file that breaks off has a copy that breaks off: reports say so.

        Raises InputError where it is no trace.
        """
        decoder = EventDecoder()
        open_list, before = False, b""
        yield b"{"
        with closing(text_blocks(path)) as blocks:
            try:
                for part in _Whole(blocks, decoder).parts():
                    if isinstance(part, HeaderValue):
                        value = self._header(part.key, part.text)
                        if value is not None:
                            yield (b"\n]" if open_list else b"") + before + b"\n%b:%b" % (msgspec.json.encode(part.key), value)
                            open_list, before = False, b","
                        continue
                    yield b",\n" if open_list else before + b'\n"traceEvents":[\n'
                    yield self._events.rewritten(part.text) if part.events else b""
                    open_list, before = bool(part.events), b","
                    tell(f"scrubbing, {decoder.count:,} events")
            except CutShortError:
                self._words.removed.note("events at the end that are cut short")
                return
            except NotATraceError as error:
                raise InputError(f"{shown(path)} {error}", error.hint or "give a trace that torch.profiler wrote, or a bundle") from None
            finally:
                self._words.removed.counts["events that could not be read"] += decoder.dropped.total()
        yield b"\n]}\n" if open_list else b"}\n"

    def _header(self, key: str, text: bytes) -> bytes | None:
        """Return what is kept of a header value; None where nothing is."""
        if key == "distributedInfo":
            found = self._object(text, DISTRIBUTED)
        elif HEADERS.get(key) == "device list":
            found = self._entries(text, DEVICE)
        elif key in HEADERS:
            found = self._forms[HEADERS[key]](text)
        else:
            self._words.removed.note("keys of the header", key)
            found = None
        if found is None:
            self._words.removed.note("values of the header")
            forms.texts_in(text, self._words, "texts of the header")
        return found

    def _entries(self, text: bytes, allowed: dict[str, FormName]) -> bytes | None:
        try:
            entries = msgspec.json.decode(text, type=list[Raw])[:_MAX_ENTRIES]
        except forms.JSON_ERRORS:
            return None
        found = (self._object(bytes(entry), allowed) for entry in entries)
        return b"[" + b",".join(b"{}" if entry is None else entry for entry in found) + b"]"

    def _object(self, text: bytes, allowed: dict[str, FormName]) -> bytes | None:
        try:
            entries = msgspec.json.decode(text, type=dict[str, Raw])
        except forms.JSON_ERRORS:
            return None
        parts = []
        for key, raw in entries.items():
            form = allowed.get(key)
            value = None if form is None else self._value(form, bytes(raw))
            if value is None:
                self._words.removed.note("values of the header", key if form is None else None)
                forms.texts_in(raw, self._words, "texts of the header")
            else:
                parts.append(b"%b:%b" % (msgspec.json.encode(key), value))
        return b"{" + b",".join(parts) + b"}"

    def _value(self, form: FormName, raw: bytes) -> bytes | None:
        return self._entries(raw, GROUP) if form == "group list" else self._forms[form](raw)


def packed(pieces: Iterable[bytes], name: str) -> Iterable[bytes]:
    """Return `pieces` compressed as the suffix of `name` says."""
    if name.lower().endswith(".gz"):
        return gzipped(pieces)
    return _zstd(pieces) if name.lower().endswith(".zst") else pieces


def _zstd(pieces: Iterable[bytes]) -> Iterator[bytes]:
    compressor = zstandard.ZstdCompressor().compressobj()
    for piece in pieces:
        yield compressor.compress(piece)
    yield compressor.flush()
