"""The header of a trace without its events: which rank wrote it."""

from __future__ import annotations

from contextlib import closing

from gpudiag.errors import InputError
from gpudiag.trace.events import EventDecoder
from gpudiag.trace.framing import CutShortError, Document, HeaderValue, NotATraceError
from gpudiag.trace.header import Header, parse_header
from gpudiag.trace.source import text_blocks

HEAD_BYTES = 1 << 16
"""Text read at a time: Kineto writes its header first, a few kB."""


def peek(path: str) -> Header:
    """Return what stands before the events of the trace at `path` (a file or an fsspec URL); an empty header where it cannot be read."""
    values: dict[str, bytes] = {}
    try:
        with closing(text_blocks(path, HEAD_BYTES)) as blocks:
            for part in Document(blocks, EventDecoder(), HEAD_BYTES).parts():
                if not isinstance(part, HeaderValue):
                    break
                values[part.key] = part.text
    except (InputError, NotATraceError, CutShortError):
        return Header()  # the reader of the whole file says what is wrong
    return parse_header(values)
