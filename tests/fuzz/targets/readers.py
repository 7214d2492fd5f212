"""Files of traces: any bytes are read, or refused by one line, whatever the sizes of the blocks in which they come."""

from __future__ import annotations

import gzip
import json
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from fuzz.documents import SHAPES
from fuzz.targets.dice import Dice, broken, decisions
from fuzz.targets.places import written
from fuzz.targets.target import Target, refused

from gpudiag.trace import trace_files
from gpudiag.trace.decompression import GZIP_MAGIC, ZSTD_MAGIC, read_text_blocks, zstd
from gpudiag.trace.events import EventDecoder, repair_event
from gpudiag.trace.json_framing import CutShortError, Document, EventChunk, NotATraceError
from gpudiag.trace.kineto import parse_header

SMALL = rb"""{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1.5, "dur": 2, "args": {"a": [1]}},
{"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "a\"\\b"}}], "record_shapes": 1, "deviceProperties": [{"id": 0}]}"""
_BLOCKS = (1 << 20, 200)


def framing(data: bytes) -> None:
    """Text in one block, then in small ones: the parts are found without a failure, and the header can be read."""
    for size in _BLOCKS:
        decoder = EventDecoder()
        document = Document(iter([data[at : at + size] for at in range(0, len(data), size)]), decoder, size)
        _walk(document, decoder)


def _walk(document: Document, decoder: EventDecoder) -> None:
    header: dict[str, bytes] = {}
    seen = Counter[str]()
    try:
        for part in document.parts():
            if isinstance(part, EventChunk):
                seen[""] += len(part.events)
                assert len(decoder.times(part.text)) == len(part.events)
            else:
                header[part.key] = part.text
    except (CutShortError, NotATraceError):
        pass
    assert seen.total() + decoder.dropped.total() == decoder.count
    parse_header(header)
    repair_event(bytes(document._data[:200]))


def packed(data: bytes) -> None:
    """Bytes of a compressed file, in blocks of text."""
    path = str(written("packed", data))
    refused(lambda: sum(map(len, read_text_blocks(path, 1 << 16))))


def reader(data: bytes) -> None:
    """The bytes of a file as they are: JSON, compressed, SQLite, a pickle."""
    path = written("trace", data)
    refused(lambda: trace_files.read_trace(path))


def document(data: bytes) -> None:
    """The bytes decide what is broken in the document of a small training, and how it is packed."""
    dice = Dice(data)
    text = json.dumps(broken(SHAPES[dice.choice(sorted(SHAPES))](), dice, 20)).encode()
    reader(dice.choice((bytes, lambda text: gzip.compress(text, 1)))(text))


def _texts() -> Iterator[bytes]:
    yield SMALL
    yield b"[" + SMALL[17:220] + b"]"
    yield from (json.dumps(make() | {"traceEvents": make()["traceEvents"][:4]}).encode() for make in SHAPES.values())


def _packed() -> Iterator[bytes]:
    for text in (SMALL, SMALL * 3):
        yield from (gzip.compress(text, 1), zstd.compress(text), gzip.compress(text, 1) * 2, text)


def _files() -> Iterator[bytes]:
    yield from _texts()
    yield from _packed()
    yield _export()


_EXPORT = """
PRAGMA page_size = 512;
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL
  (start INT, end INT, deviceId INT, streamId INT, correlationId INT, globalPid INT, shortName INT);
CREATE TABLE NVTX_EVENTS (start INT, end INT, eventType INT, text TEXT, globalTid INT);
INSERT INTO StringIds VALUES (1, 'gemm');
INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (5, 9, 0, 7, 1, 16777216, 1);
INSERT INTO NVTX_EVENTS VALUES (1, 20, 59, 'aten::mm, seq = 3, sizes = [[2, 3], [3, 4]]', 16777217);
"""


def _export() -> bytes:
    """Return a small export of Nsight Systems with pages of 512 bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "export.sqlite")
        with closing(sqlite3.connect(path)) as export:
            export.executescript(_EXPORT)
        return path.read_bytes()


_WORDS = (
    '"ph": "X"',
    '"ts": ',
    '"dur": ',
    '"args": {',
    '"cat": "kernel"',
    '"traceEvents": [',
    "},{",
    "NaN",
    "Infinity",
    "\\ud800",
    "\\u0000",
    "1e999",
    "9" * 25,
    '"Input Dims": [[',
    '"correlation": ',
    '"baseTimeNanoseconds": ',
    '"distributedInfo": {',
    '"pg_config": [',
    '"ph": "i"',
    '"name": "[memory]"',
)

TARGETS = (
    Target("framing", framing, _texts, ("gpudiag.trace",), _WORDS, 1500),
    Target("packed", packed, _packed, ("gpudiag.trace.decompression",), (GZIP_MAGIC, ZSTD_MAGIC), 2000),
    Target("reader", reader, _files, ("gpudiag.trace",), _WORDS, 8000),
    Target("document", document, decisions, ("gpudiag.trace",), longest=200),
)
