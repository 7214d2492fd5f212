"""A trace file passed on as it is, with events of our own at the head of its list of events. Needs the memory of two blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing

from gpudiag.errors import InputError
from gpudiag.trace.events import EventDecoder
from gpudiag.trace.framing import CutShortError, Document, EventChunk, NotATraceError
from gpudiag.trace.source import BLOCK_BYTES, shown, text_blocks

_SPACE = b" \t\r\n"


class _UpToEvents(Document):
    """Reads a document up to its list of events."""

    first_event = -1
    """Bytes of text up to and with the list's opening bracket."""

    def _events(self) -> Iterator[EventChunk]:
        self.first_event = self.bytes_read - len(self._data) + self._at + 1
        yield EventChunk([], b"[]")


def with_events(path: str, events: Iterable[bytes], block_bytes: int = BLOCK_BYTES) -> Iterator[bytes]:
    """Yield the decompressed text of the trace at `path` with `events` (JSON objects) before its own; no other byte is changed.

    A file that ends too early is passed on as far as it goes. Raises InputError where it cannot be read or is no trace.
    """
    start = _first_event(path, block_bytes)
    with closing(text_blocks(path, block_bytes)) as blocks:
        yield from _spliced(blocks, start, events)


def _first_event(path: str, block_bytes: int) -> int:
    with closing(text_blocks(path, block_bytes)) as blocks:
        document = _UpToEvents(blocks, EventDecoder(), block_bytes)
        try:
            for part in document.parts():
                if isinstance(part, EventChunk):
                    break
        except (NotATraceError, CutShortError) as error:
            reason = str(error) or "breaks off before its first event"
            raise InputError(f"{shown(path)} {reason}", "give a trace of torch.profiler") from None
    return document.first_event


def _spliced(blocks: Iterator[bytes], start: int, events: Iterable[bytes]) -> Iterator[bytes]:
    passed = 0
    for block in blocks:
        if passed <= start < passed + len(block):
            yield block[: start - passed]
            yield from _joined(events, followed=not _closes(block[start - passed :]))
            yield block[start - passed :]
        else:
            yield block
        passed += len(block)
    if start == passed:  # the text ends with the bracket
        yield from _joined(events, followed=False)


def _closes(rest: bytes) -> bool:
    """Return whether the list is empty."""
    return rest.lstrip(_SPACE).startswith(b"]")


def _joined(events: Iterable[bytes], *, followed: bool) -> Iterator[bytes]:
    between = b"\n"
    for event in events:
        yield between + event
        between = b",\n"
    if followed and between != b"\n":
        yield between
