"""A large trace read by two processes: each decompresses all of it and decodes every other chunk. The tables are those of one process.

Both cut the text at the same places, as long as each cut proves to lie between events, which only the process that decodes the chunk can
tell. Where one does not, or the second process cannot be started or dies, the file has to be read again by one process.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from itertools import islice
from multiprocessing import parent_process
from queue import SimpleQueue
from threading import Thread
from typing import IO, Any, cast

import msgspec
import polars as pl

from gpudiag.cores import count_usable_cores
from gpudiag.trace.collector import Collector, Counts
from gpudiag.trace.columns import KEY_COLUMNS, Keys
from gpudiag.trace.decompression import GZIP_MAGIC, ZSTD_MAGIC, read_text_blocks
from gpudiag.trace.events import EventDecoder
from gpudiag.trace.json_framing import Document, EventChunk, NotSharedError, Share, ShareDoneError
from gpudiag.trace.table_store import Part, Store, pause_cycle_collection

PROCESSES = 2
"""A third one would decompress the whole file once more, and need the memory of another few chunks."""
PAYS_FROM_BYTES = 20_000_000
"""Of compressed text, some 300 MB of events: the second process takes half a second to start, and then saves two fifths of the time."""
_TEXT_PER_COMPRESSED = 12
_LENGTH = struct.Struct("<Q")
_MAX_MESSAGE_BYTES = 1 << 30
_START = (
    "import sys; sys.path[:] = sys.argv[3:]; from gpudiag.trace.two_process_reader import send_share; "
    "send_share(sys.argv[1], int(sys.argv[2]), sys.stdout.buffer)"
)
"""The second process looks for modules where this one does, never in its working directory, and runs nothing of the caller's script."""


class NewKeys(msgspec.Struct):
    """Keys that a process met for the first time in a chunk, in the order of appearance."""

    threads: list[tuple[str, str]]
    signatures: list[tuple[bytes, bytes, bytes, bytes]]
    names: dict[str, list[str | None]]


class ChunkMessage(msgspec.Struct, tag=True):
    """The columns of a chunk that the second process decoded."""

    number: int
    keys: NewKeys
    tables: dict[str, bytes]
    """Arrow IPC."""


class FinalMessage(msgspec.Struct, tag=True):
    """The last message of the second process: what it counted, and where it made its cuts."""

    counts: Counts
    events: int
    dropped: dict[str, int]
    cuts: list[int]


def is_worth_two_processes(path: str) -> bool:
    """Return whether two processes are faster for the file at `path`, and welcome.

    A URL would be fetched twice; a process of a pool shares the cores with its siblings already.
    """
    if "://" in path or not sys.executable or parent_process() is not None or count_usable_cores() < PROCESSES:
        return False
    try:
        if not os.path.isfile(path):
            return False
        with open(path, "rb") as file:
            compressed = file.read(4).startswith((GZIP_MAGIC, ZSTD_MAGIC))
            return os.fstat(file.fileno()).st_size >= PAYS_FROM_BYTES * (1 if compressed else _TEXT_PER_COMPRESSED)
    except (OSError, ValueError):
        return False


class NewKeyTracker:
    """Tells which keys are new since it was last asked."""

    def __init__(self, keys: Keys) -> None:
        self._numbered = keys.numbered()
        self._known = dict.fromkeys(self._numbered, 0)

    def new(self) -> NewKeys:
        """Return the keys that were added since the last call."""
        numbered = self._numbered.items()
        found = {kind: list(islice(reversed(numbers), len(numbers) - self._known[kind]))[::-1] for kind, numbers in numbered}
        self._known = {kind: len(numbers) for kind, numbers in numbered}
        return NewKeys(found.pop("threads"), found.pop("signatures"), {kind: keys for kind, keys in found.items() if keys})


class _Renumbering:
    """Turns the numbers that one process gives to keys into those of the whole file."""

    def __init__(self, whole: Keys) -> None:
        self._whole = whole.numbered()
        self._numbers: dict[str, list[int]] = {kind: [] for kind in self._whole}

    def apply(self, part: Part, new: NewKeys) -> Part:
        added: dict[str, list[Any]] = {"threads": new.threads, "signatures": new.signatures, **new.names}
        for kind, keys in added.items():
            whole = self._whole[kind]
            self._numbers[kind] += [whole.setdefault(key, len(whole)) for key in keys]
        renumbered = {}
        for table, frame in part.items():
            kinds = ((column, KEY_COLUMNS.get((table, column.name))) for column in frame)
            columns = [pl.Series(column.name, self._numbers[kind], dtype=column.dtype).gather(column) for column, kind in kinds if kind]
            renumbered[table] = frame.with_columns(columns)
        return renumbered


class TwoProcessCollector:
    """Takes the chunks of this process and of the second one into `store`, in the order of the file."""

    def __init__(self, collector: Collector, store: Store, messages: IO[bytes]) -> None:
        self.keys = Keys()
        """Of the whole file."""
        self._collector, self._store = collector, store
        self._growth = NewKeyTracker(collector.keys)
        self._renumberings = [_Renumbering(self.keys) for _ in range(PROCESSES)]
        self._waiting: dict[int, tuple[int, Part | ChunkMessage, NewKeys]] = {}
        self._next = 0
        self._rest: FinalMessage | None = None
        self._arrived: SimpleQueue[ChunkMessage | FinalMessage | None] = SimpleQueue()
        Thread(target=_listen, args=(messages, self._arrived), name="gpudiag-share", daemon=True).start()

    def take(self, chunk: EventChunk) -> None:
        """Take a chunk that this process decoded, and what has come from the second one. Raises NotSharedError."""
        self._waiting[chunk.number] = 0, self._collector.build_part(chunk), self._growth.new()
        while not self._arrived.empty():
            self._receive()
        self._move_on()

    def finish(self, decoder: EventDecoder, document: Document) -> None:
        """Take the rest of what the second process has to send. Raises NotSharedError."""
        while self._rest is None:
            self._receive()
            self._move_on()
        if self._waiting or self._rest.cuts != document.cuts:
            raise NotSharedError
        self._collector.add(self._rest.counts)
        decoder.count += self._rest.events
        decoder.dropped.update(self._rest.dropped)

    def _receive(self) -> None:
        message = self._arrived.get()
        if message is None and self._rest is None:
            raise NotSharedError
        if isinstance(message, FinalMessage):
            self._rest = message
        elif message:
            self._waiting[message.number] = 1, message, message.keys

    def _move_on(self) -> None:
        while self._next in self._waiting:
            process, part, new = self._waiting.pop(self._next)
            if isinstance(part, ChunkMessage):
                part = {table: pl.read_ipc(data) for table, data in part.tables.items()}
            self._store.take(self._renumberings[process].apply(part, new))
            self._next += 1


def _listen(messages: IO[bytes], arrived: SimpleQueue[ChunkMessage | FinalMessage | None]) -> None:
    """Put what the second process sends into `arrived`, None at its end."""
    decoder = msgspec.msgpack.Decoder(ChunkMessage | FinalMessage)
    try:
        while head := messages.read(_LENGTH.size):
            arrived.put(decoder.decode(messages.read(min(_MAX_MESSAGE_BYTES, *_LENGTH.unpack(head)))))
    except (OSError, ValueError, struct.error, msgspec.DecodeError):
        pass
    finally:
        arrived.put(None)


def send_message(message: ChunkMessage | FinalMessage, to: IO[bytes]) -> None:
    """Write a message for the first process."""
    text = msgspec.msgpack.encode(message)
    to.write(_LENGTH.pack(len(text)))
    to.write(text)
    to.flush()


@contextmanager
def start_second_process(path: str, block_bytes: int) -> Iterator[IO[bytes]]:
    """Yield the messages of a second process that reads its share of `path`; it has ended when the context has. Raises NotSharedError."""
    environ = os.environ | {"POLARS_MAX_THREADS": "1", "OMP_NUM_THREADS": "1"}
    try:
        process = subprocess.Popen(  # noqa: S603 -- this program, a constant
            [sys.executable, "-c", _START, path, str(block_bytes), *sys.path],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environ,
        )
    except OSError:
        raise NotSharedError from None
    with process:
        try:
            yield cast(IO[bytes], process.stdout)
        finally:
            process.kill()


def send_share(path: str, block_bytes: int, to: IO[bytes]) -> None:
    """Write the share of the second process of the trace at `path` to `to`, chunk after chunk.

    Whatever fails ends the process, which the first one notices.
    """
    decoder = EventDecoder()
    collector = Collector(decoder.times)
    growth = NewKeyTracker(collector.keys)
    with closing(read_text_blocks(path, block_bytes)) as blocks, pause_cycle_collection():
        document = Document(blocks, decoder, block_bytes, share=Share(1, PROCESSES))
        with suppress(ShareDoneError):
            for part in document.parts():
                if isinstance(part, EventChunk):
                    tables = {table: frame.write_ipc(None).getvalue() for table, frame in collector.build_part(part).items()}
                    send_message(ChunkMessage(part.number, growth.new(), tables), to)
                del part  # or its events would live on while the next chunk is decoded
    send_message(FinalMessage(collector.summarise(), decoder.count, dict(decoder.dropped), document.cuts), to)
