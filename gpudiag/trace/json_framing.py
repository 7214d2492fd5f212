"""A trace's text as its parts: the header values that are used, and chunks of events. Works on bounded blocks, without recursion."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from typing import NamedTuple

import numpy as np

from gpudiag.arrays import Bools, Ints
from gpudiag.trace.decompression import BLOCK_BYTES
from gpudiag.trace.events import Event, EventDecoder

_QUOTE_CLASS, _BACKSLASH_CLASS, _OPEN_CLASS, _CLOSE_CLASS = 1, 2, 3, 4
_CLASS_OF_BYTE = np.zeros(256, np.uint8)
_CLASS_OF_BYTE[ord('"')] = _QUOTE_CLASS
_CLASS_OF_BYTE[ord("\\")] = _BACKSLASH_CLASS
_CLASS_OF_BYTE[[ord("{"), ord("[")]] = _OPEN_CLASS
_CLASS_OF_BYTE[[ord("}"), ord("]")]] = _CLOSE_CLASS

WINDOW_BYTES = 1 << 22
"""Text looked at in one go: bounds the memory that text full of brackets needs."""


class ArrayItems(NamedTuple):
    """Containers that lie directly inside an array: [starts[i], ends[i]) in bytes; `closed` = position of the array's ']' or None."""

    starts: list[int]
    ends: list[int]
    closed: int | None


class BracketReader:
    """Finds the brackets that lie outside of strings, in text that arrives in windows."""

    def __init__(self) -> None:
        self._in_string = False
        self._escaped = False
        self._depth = 0

    def feed(self, window: bytes | bytearray | memoryview) -> tuple[Ints, Ints, Ints]:
        """Return for each bracket of `window` its position, +1 (opens) or -1 (closes), and the depth after it."""
        codes = np.frombuffer(window, np.uint8)
        shift = int(self._escaped)
        if shift:  # a virtual backslash in front carries the escape over the border
            codes = np.concatenate([np.array([ord("\\")], np.uint8), codes])
        classes = _CLASS_OF_BYTE[codes]
        special = np.flatnonzero(classes)
        kinds = classes[special]
        # Find for each special character, and for the end of the text, whether an odd run of backslashes stands directly before it
        order = np.arange(special.size)
        breaks = np.ones(special.size, np.bool_)  # True where no backslash stands directly before
        breaks[1:] = (kinds[:-1] != _BACKSLASH_CLASS) | (special[1:] - special[:-1] != 1)
        run_start = np.maximum.accumulate(np.where(breaks, order, 0)) if special.size else order
        before = order - run_start  # backslashes directly before this character
        last = before[-1] + 1 if special.size and kinds[-1] == _BACKSLASH_CLASS else 0
        escaped: Bools = np.append(before, last) % 2 == 1
        inside = (np.cumsum((kinds == _QUOTE_CLASS) & ~escaped[:-1]) + self._in_string) % 2 == 1
        brackets = (kinds >= _OPEN_CLASS) & ~inside
        if special.size:
            self._in_string = bool(inside[-1])
        self._escaped = bool(special.size and special[-1] == codes.size - 1 and escaped[-1])
        positions, steps = special[brackets], np.where(kinds[brackets] == _OPEN_CLASS, 1, -1)
        depths = self._depth + np.cumsum(steps)
        self._depth = int(depths[-1]) if depths.size else self._depth
        return positions - shift, steps, depths


def find_array_items(text: memoryview) -> ArrayItems:
    """Find the complete objects and arrays of `text`, which begins inside an array, outside of any string."""
    reader = BracketReader()
    starts: list[int] = []
    ends: list[int] = []
    for offset in range(0, len(text), WINDOW_BYTES):
        positions, steps, depths = reader.feed(text[offset : offset + WINDOW_BYTES])
        closing = np.flatnonzero(depths < 0)
        stop = int(closing[0]) if closing.size else depths.size
        positions, steps, depths = positions + offset, steps[:stop], depths[:stop]
        starts += positions[:stop][(steps == 1) & (depths == 1)].tolist()
        ends += (positions[:stop][(steps == -1) & (depths == 0)] + 1).tolist()
        if closing.size:
            return ArrayItems(starts, ends, int(positions[stop]))
    return ArrayItems(starts[: len(ends)], ends, None)


USED_HEADERS = frozenset({"deviceProperties", "distributedInfo", "baseTimeNanoseconds", "record_shapes", "with_stack", "profile_memory"})
"""Top-level keys whose value is looked at. All others (metadata blocks with environment variables and tokens) are skipped unread."""
MAX_EVENT_BYTES = 64 << 20
MAX_HEADER_BYTES = 64 << 20
MAX_BAD = 1_000_000
"""Entries that are no events, from which on a file is given up where they are most of it: each is tried by itself."""
MAX_KEYS = 100_000
"""Top-level keys: traces have some twenty."""
_MAX_KEY_BYTES = 1 << 20

_WHITE = b" \t\r\n"
_SPACE = re.compile(rb"[ \t\r\n]*")
_IN_STRING = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
"""From inside a string to its end, or to the last complete escape; without the quote it never has to go back."""
_SCALAR = re.compile(rb'[^,\]}\[{"\s]*')
_BETWEEN_EVENTS = re.compile(rb"\}([ \t\r\n]*),[ \t\r\n]*\{")
_EVENTS_END = re.compile(rb"\}([ \t\r\n]*)\][ \t\r\n]*(?:[,}]|\Z)")
_TAIL_BYTES = 1 << 16
_OPEN_BRACE, _OPEN_BRACKET, _CLOSE_BRACKET, _COMMA, _COLON, _QUOTE = b'{[],:"'
_CLOSE_BRACE = ord("}")

_UNPACK = "unpack it, and give the traces in it"
WRITE_JSON = "write the recording as JSON: prof.export_chrome_trace('trace.json') of torch.profiler"


class NotATraceError(Exception):
    """The text is not a trace; the message is in plain words and holds nothing of the text. `hint`: what to do, where its kind tells."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class CutShortError(Exception):
    """The text ends, or stops being JSON, before the document is complete."""


class NotSharedError(Exception):
    """The text cannot be cut alike by several readers, one of which does not decode what lies between the cuts."""


class ShareDoneError(Exception):
    """The rest of the text, from the last block on, belongs to the first reader."""


class HeaderValue(NamedTuple):
    """A kept top-level value as JSON text."""

    key: str
    text: bytes


class EventChunk(NamedTuple):
    """Events and the JSON array that they were decoded from; both are valid until the next part is asked for."""

    events: list[Event]
    text: memoryview | bytes
    number: int = 0
    """Of the chunk in the file, those of other readers included."""


class Share(NamedTuple):
    """Which chunks of a document a reader decodes: each `of`-th, from number `mine` on; number 0 has the end of the text as well."""

    mine: int
    of: int


class Document:
    """Reads one trace document, or one reader's share of it, from blocks of text."""

    keeps_all_headers = False
    """Whether the values of all top-level keys are yielded, not those of USED_HEADERS alone."""

    def __init__(self, blocks: Iterator[bytes], decoder: EventDecoder, block_bytes: int = BLOCK_BYTES, share: Share | None = None) -> None:
        self.cuts: list[int] = []
        """Bytes of text before each cut that several readers have to make alike."""
        self._share = share
        self._number = 0
        self._blocks = blocks
        self._decoder = decoder
        self._block_bytes = block_bytes
        self._data = bytearray()
        self._at = 0
        self._ended = False
        self.bytes_read = 0

    def parts(self) -> Iterator[HeaderValue | EventChunk]:
        """Yield header values and chunks of events in the file's order; raises NotATraceError and CutShortError.

        A reader's share: NotSharedError where the readers do not agree, ShareDoneError at the end of all shares but the first.
        """
        while len(self._data) < 3 and self._more():
            pass
        if self._data.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise NotATraceError("is UTF-16 text; a trace is UTF-8")
        if self._data.startswith(b"\n") and b"\0" in self._data[:1024]:  # field 1 of a message, of some length
            raise NotATraceError("is a file of protocol buffers (Perfetto's own format, or XLA's), not JSON", WRITE_JSON)
        if self._data.startswith(b"\xef\xbb\xbf"):
            self._at = 3
        first = self._peek()
        if first == _OPEN_BRACKET:
            yield from self._read_events()
        elif first == _OPEN_BRACE:
            yield from self._read_members()
        else:
            kinds = (
                (self._data[:4] == b"PK\x03\x04", "is a zip archive, not a trace", _UNPACK),
                (self._data[257:262] == b"ustar", "is a tar archive, not a trace", _UNPACK),
                (self._data[:512].lstrip()[:1] == b"<", "is a web page (HTML or XML), not a trace", "download the file itself"),
            )
            raise NotATraceError(*next((told for found, *told in kinds if found), ("is not a JSON trace",)))

    def _read_members(self) -> Iterator[HeaderValue | EventChunk]:
        seen_events = False
        keys = 0
        self._at += 1
        while (byte := self._peek()) != _CLOSE_BRACE:
            if byte == _COMMA:
                self._at += 1
                continue
            if byte != _QUOTE:
                raise CutShortError
            key = self._read_string(_MAX_KEY_BYTES)[1:-1].decode("utf-8", "replace")
            if self._peek() != _COLON:
                raise CutShortError
            self._at += 1
            keys += 1
            if keys > MAX_KEYS:
                raise NotATraceError(f"is not a trace: it has more than {MAX_KEYS:,} top-level keys")
            if key == "traceEvents":
                if self._peek() != _OPEN_BRACKET:
                    raise NotATraceError("is not a trace: its traceEvents are not a list")
                seen_events = True
                yield from self._read_events()
            elif self.keeps_all_headers or key in USED_HEADERS:
                yield HeaderValue(key, self._read_value(keep=True))
            else:
                self._read_value(keep=False)
        if not seen_events:
            raise NotATraceError("is JSON but not a trace: it has no traceEvents")

    def _more(self, wanted: int = 1) -> bool:
        """Append blocks to what is not consumed yet, at least `wanted` bytes of them if there are as many; False at the end of the text."""
        blocks, size = [], 0
        while size < wanted and (block := next(self._blocks, b"")):
            blocks.append(block)
            size += len(block)
        self.bytes_read += size
        self._ended = self._ended or size < wanted
        if blocks:
            # a new buffer: decoded events may still hold views of the old one
            self._data = bytearray().join((memoryview(self._data)[self._at :], *blocks))
            self._at = 0
        return bool(blocks)

    def _peek(self) -> int:
        """Return the next byte that is no white space, without taking it; raises CutShortError at the end of the text."""
        while True:
            self._at = _SPACE.match(self._data, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._data):
                return self._data[self._at]
            if not self._more():
                raise CutShortError

    def _read_value(self, keep: bool) -> bytes:
        """Take one value; return its text, or b'' where it is not kept."""
        first = self._peek()
        if first in (_OPEN_BRACE, _OPEN_BRACKET):
            return self._read_container(keep)
        if first == _QUOTE:
            return self._read_string(MAX_HEADER_BYTES)
        start = self._at
        end = _SCALAR.match(self._data, start).end()  # type: ignore[union-attr]
        while end == len(self._data) and end - start < _MAX_KEY_BYTES and self._more():
            start, end = 0, _SCALAR.match(self._data).end()  # type: ignore[union-attr]
        if end == start:
            raise CutShortError
        self._at = end
        return bytes(self._data[start:end])

    def _read_string(self, limit: int) -> bytes:
        length = 1
        while True:
            length = _IN_STRING.match(self._data, self._at + length).end() - self._at  # type: ignore[union-attr]
            start, end = self._at, self._at + length
            if self._data[end : end + 1] == b'"':
                self._at = end + 1
                return bytes(self._data[start : self._at])
            if length > limit or not self._double_buffer(length):
                raise CutShortError

    def _read_container(self, keep: bool) -> bytes:
        """Take the object or array that begins here, in windows, so that skipping a large one needs no memory."""
        reader, kept, size = BracketReader(), bytearray(), 1 << 14
        while True:
            window = bytes(self._data[self._at : self._at + size])
            positions, _, depths = reader.feed(window)
            closed = np.flatnonzero(depths == 0)
            taken = int(positions[closed[0]]) + 1 if closed.size else len(window)
            self._at += taken
            if keep:
                kept += window[:taken]
            if closed.size:
                return bytes(kept)
            if len(kept) > MAX_HEADER_BYTES:
                raise NotATraceError(f"has a header value of more than {MAX_HEADER_BYTES >> 20} MiB")
            if self._at == len(self._data) and not self._more():
                raise CutShortError
            size = min(size * 4, 1 << 22)

    def _read_events(self) -> Iterator[EventChunk]:
        """Yield the events of the array that begins here. `_at` stays on the separator before the next event."""
        while self._data[self._at] != _CLOSE_BRACKET:
            # one and a half blocks at once, so that the end of a small file is in sight from the start
            while not self._ended and 2 * (len(self._data) - self._at) < 3 * self._block_bytes:
                self._more()
            # a separator or closing bracket that probably follows an event, from the end of the buffer
            tail = max(self._at + 1, len(self._data) - _TAIL_BYTES)
            end = _EVENTS_END.search(self._data, tail) if self._ended else None
            cuts = [end.end(1)] if end else [match.end(1) for match in _BETWEEN_EVENTS.finditer(self._data, tail)][-1:]
            if self._share and not self._ended:  # what it passes over, another reader checks
                if not cuts:
                    raise NotSharedError
                self.cuts.append(self.bytes_read - len(self._data) + cuts[0])
                if self._number % self._share.of != self._share.mine:
                    self._number += 1
                    self._at = cuts[0]
                elif not (yield from self._decode_in_place(cuts[0])):
                    raise NotSharedError
            elif self._share and self._share.mine:
                raise ShareDoneError
            elif not cuts or not (yield from self._decode_in_place(cuts[0])):
                yield from self._scan_buffer()
        self._at += 1

    def _number_chunk(self, events: list[Event], text: memoryview | bytes) -> EventChunk:
        self._number += 1
        return EventChunk(events, text, self._number - 1)

    def _decode_in_place(self, cut: int) -> Generator[EventChunk, None, bool]:
        """Yield the events up to `cut` (what is good of them) and return True, or return False where it does not lie between two events.

        The text between brackets is valid JSON if and only if both ends lie between events, so decoding is the proof.
        """
        data, start = self._data, self._at
        separator = data[cut]
        data[start], data[cut] = _OPEN_BRACKET, _CLOSE_BRACKET
        text = memoryview(data)[start : cut + 1]
        events = self._decoder.whole(text)
        if events is None:
            data[cut] = separator
            view = memoryview(data)[start + 1 : cut]
            items = find_array_items(view)
            if not items.ends or items.closed is not None or bytes(view[items.ends[-1] :]).strip(_WHITE):
                return False
            yield self._salvage(view, items)
            self._at = cut
            return True
        yield self._number_chunk(events, text)
        data[cut] = separator
        self._at = cut
        return True

    def _salvage(self, view: memoryview, items: ArrayItems) -> EventChunk:
        spans = zip(items.starts, items.ends, strict=True)
        text, events = self._decoder.salvage([bytes(view[start:end]) for start, end in spans])
        bad = self._decoder.dropped.total()
        if bad > MAX_BAD and 2 * bad > self._decoder.count:
            raise NotATraceError(f"is not a trace: of its first {self._decoder.count:,} entries, {bad:,} are no events")
        return self._number_chunk(events, text)

    def _scan_buffer(self) -> Iterator[EventChunk]:
        """Yield the complete events of the buffer by the exact scan, then move on to the separator or bracket after them."""
        after = self._at + 1
        view = memoryview(self._data)[after:]
        items = find_array_items(view)
        if items.ends:
            text = b"[" + bytes(view[items.starts[0] : items.ends[-1]]) + b"]"
            events = self._decoder.whole(text)
            yield self._salvage(view, items) if events is None else self._number_chunk(events, text)
            self._at = after + items.ends[-1]
        if items.closed is not None:
            self._at = after + items.closed
        elif items.ends:
            if self._peek() not in (_COMMA, _CLOSE_BRACKET):
                raise CutShortError
        elif len(view) > MAX_EVENT_BYTES:
            raise NotATraceError(f"has an event of more than {MAX_EVENT_BYTES >> 20} MiB")
        elif not self._double_buffer(len(view)):
            raise CutShortError

    def _double_buffer(self, held: int) -> bool:
        """Read until twice as much as `held` is there, so that a large event or string is not looked at again after every block."""
        return self._more(max(1, 2 * held - (len(self._data) - self._at)))
