"""A snapshot of the CUDA caching allocator (torch.cuda.memory._dump_snapshot): an untrusted pickle of plain data -> typed values.

Of the pickle format only containers, numbers and texts are known here, no other operation, so nothing can be called.

Opcodes: Lib/pickle.py and Lib/pickletools.py of CPython. The standard unpickler is not used, not even with find_class closed: it sizes its
memo by a number that the file claims, and has no limit on what a small file may unfold to.

Format of the snapshot: torch/cuda/memory.py (_snapshot) and torch/cuda/_memory_viz.py, of torch 2.0 to 2.13.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from gpudiag.errors import InputError
from gpudiag.files import open_file, read_file
from gpudiag.trace.decompression import format_path

MAX_OPERATIONS = 60_000_000
"""A snapshot of 100,000 entries with stacks of 20 frames takes about five million."""

MAX_CONTAINERS = 10_000_000

MAX_KEY = 1 << 16
"""Largest number that may be a key. Hashes of larger ones (and of fractions) can be made to collide, and n keys then take n^2 comparisons;
those of texts are salted."""


class NotPlainDataError(ValueError):
    """The pickle holds something else than plain data, is damaged, or is too large; the text says which."""


def load_plain_data(data: bytes) -> Any:
    """Load the value that `data`, a pickle of protocol 2 or later, holds. Raises NotPlainDataError."""
    reader = _Reader(data)
    try:
        return reader.read()
    except (IndexError, KeyError, TypeError, struct.error, AttributeError):
        raise NotPlainDataError(f"it is damaged or cut short at byte {reader.at:,}") from None


class _Reader:
    """A stack machine: what is between two marks is a list of its own."""

    def __init__(self, data: bytes) -> None:
        self._data, self.at = data, 0
        self.stack: list[Any] = []
        self._below: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._containers = 0

    def read(self) -> Any:
        data, table = self._data, _OPERATIONS
        for _ in range(MAX_OPERATIONS):
            code = data[self.at]
            self.at += 1
            if code == _STOP:
                return self.stack.pop()
            operation = table.get(code)
            if operation is None:
                raise NotPlainDataError(f"it is not plain data: operation {code:#04x} at byte {self.at - 1:,} is refused")
            operation(self)
        raise NotPlainDataError(f"more than {MAX_OPERATIONS:,} operations")

    def take(self, length: int) -> bytes:
        found = self._data[self.at : self.at + length]
        if len(found) < length:
            raise IndexError
        self.at += length
        return found

    def skip(self, length: int) -> None:
        self.at += length

    def number(self, length: int, *, signed: bool = False) -> int:
        return int.from_bytes(self.take(length), "little", signed=signed)

    def build(self, value: Any) -> None:
        self._containers += 1
        if self._containers > MAX_CONTAINERS:
            raise NotPlainDataError(f"more than {MAX_CONTAINERS:,} containers")
        self.stack.append(value)

    def mark(self) -> None:
        self._below.append(self.stack)
        self.stack = []

    def pop_mark(self) -> list[Any]:
        found, self.stack = self.stack, self._below.pop()
        return found

    def pop(self, count: int) -> tuple[Any, ...]:
        found = tuple(self.stack[-count:])
        if len(found) < count:
            raise IndexError
        del self.stack[-count:]
        return found

    def put(self, index: int | None = None) -> None:
        self._memo[len(self._memo) if index is None else index] = self.stack[-1]

    def get(self, index: int) -> None:
        self.stack.append(self._memo[index])

    def add(self, values: list[Any] | tuple[Any, ...]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise TypeError
        target.extend(values)

    def set(self, pairs: list[Any] | tuple[Any, ...]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(pairs) % 2:
            raise TypeError
        keys = pairs[::2]
        for key in keys:  # what may be hashed: the hash of a tuple is that of all in it, as deep and as often as the file says
            if type(key) is not str and key is not None and not (type(key) in (int, bool) and -MAX_KEY <= key <= MAX_KEY):
                raise NotPlainDataError(f"a key at byte {self.at:,} is neither a text nor a small number")
        target.update(zip(keys, pairs[1::2], strict=True))


def _read_text(length: int) -> Callable[[_Reader], None]:
    # a path that is no UTF-8 is pickled with half surrogate pairs, which no report could be written with
    return lambda reader: reader.stack.append(reader.take(reader.number(length)).decode("utf-8", "replace"))


_STOP = ord(".")
_OPERATIONS: dict[int, Callable[[_Reader], None]] = {
    0x80: lambda reader: reader.skip(1),  # PROTO
    0x95: lambda reader: reader.skip(8),  # FRAME: how the writer buffered, no matter to the reader
    ord("("): _Reader.mark,
    ord("N"): lambda reader: reader.stack.append(None),
    0x88: lambda reader: reader.stack.append(True),
    0x89: lambda reader: reader.stack.append(False),
    ord("J"): lambda reader: reader.stack.append(reader.number(4, signed=True)),
    ord("K"): lambda reader: reader.stack.append(reader.number(1)),
    ord("M"): lambda reader: reader.stack.append(reader.number(2)),
    0x8A: lambda reader: reader.stack.append(reader.number(reader.number(1), signed=True)),  # LONG1
    ord("G"): lambda reader: reader.stack.append(struct.unpack(">d", reader.take(8))[0]),
    0x8C: _read_text(1),
    ord("X"): _read_text(4),
    0x8D: _read_text(8),
    ord("C"): lambda reader: reader.stack.append(reader.take(reader.number(1))),
    ord("B"): lambda reader: reader.stack.append(reader.take(reader.number(4))),
    ord("]"): lambda reader: reader.build([]),
    ord("}"): lambda reader: reader.build({}),
    ord(")"): lambda reader: reader.build(()),
    0x85: lambda reader: reader.build(reader.pop(1)),
    0x86: lambda reader: reader.build(reader.pop(2)),
    0x87: lambda reader: reader.build(reader.pop(3)),
    ord("t"): lambda reader: reader.build(tuple(reader.pop_mark())),
    ord("a"): lambda reader: reader.add(reader.pop(1)),
    ord("e"): lambda reader: reader.add(reader.pop_mark()),
    ord("s"): lambda reader: reader.set(reader.pop(2)),
    ord("u"): lambda reader: reader.set(reader.pop_mark()),
    0x94: _Reader.put,
    ord("q"): lambda reader: reader.put(reader.number(1)),
    ord("r"): lambda reader: reader.put(reader.number(4)),
    ord("h"): lambda reader: reader.get(reader.number(1)),
    ord("j"): lambda reader: reader.get(reader.number(4)),
}

MAX_SNAPSHOT_BYTES = 1 << 30
"""A snapshot of 100,000 entries with Python stacks has some tens of MB."""

MAX_SNAPSHOT_ROWS = 2_000_000
"""Segments, blocks and entries of a snapshot: a hostile file may refer to one list from everywhere."""

MAX_FRAMES = 1_000
"""Frames of one stack that are looked at."""

_HINT = "give a file written by torch.cuda.memory._dump_snapshot, or a bundle recorded with gpudiag.profile(memory=True)"
_FEWER_HINT = "record fewer entries: torch.cuda.memory._record_memory_history(max_entries=100_000)"

LARGEST = 1 << 40
"""Bytes of a block; with MAX_ROWS of them no sum leaves 64 bits."""
Size = Annotated[int, Meta(ge=0, le=LARGEST)]
Asked = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
"""Bytes of a request: one that failed may have been for any number."""
Address = Annotated[int, Meta(ge=0)]
"""Below 2^64 (_check_address); those of some devices have the highest bit set."""
Index = Annotated[int, Meta(ge=-1, le=(1 << 63) - 1)]

OOM_ACTION = "oom"
"""Action of a request that failed."""


class Frame(NamedTuple):
    """A line of a stack."""

    filename: str
    line: int
    name: str


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a segment."""

    size: Size
    requested_size: Size | None = None
    address: Address | None = None
    """None: torch before 2.1; it follows from the sizes of the blocks before it."""
    state: str
    """active_allocated | active_awaiting_free (active_pending_free) | inactive."""
    frames: Any = None
    """As in the file: shared between entries. See list_frames."""

    def __post_init__(self) -> None:
        _check_address(self.address)


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that the allocator got from the driver; its blocks in the order of their addresses."""

    device: Index = 0
    address: Address
    total_size: Size
    stream: int = 0
    """The stream's handle as a number: 0 for the default one, else an address, which torch may write with a sign."""
    segment_type: str | None = ""
    blocks: tuple[Block, ...] = ()

    def __post_init__(self) -> None:
        _check_address(self.address)
        if not -(1 << 63) <= self.stream <= _LAST_ADDRESS:
            raise ValueError("no stream")


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One action of the allocator: alloc, free_requested, free_completed, segment_alloc, segment_free, segment_map, oom, snapshot, ..."""

    action: str
    size: Asked = 0
    addr: Address | None = None
    """None: for oom."""
    frames: Any = None
    """As in the file: shared between entries. See list_frames."""

    def __post_init__(self) -> None:
        _check_address(self.addr)
        if self.size > LARGEST and self.action != OOM_ACTION:
            raise ValueError("no size of memory that was given")


_LAST_ADDRESS = (1 << 64) - 1


def _check_address(address: int | None) -> None:
    """Raise ValueError where `address` has more than 64 bits; msgspec's own bounds have 63."""
    if address is not None and address > _LAST_ADDRESS:
        raise ValueError("no address")


class Snapshot(msgspec.Struct, frozen=True):
    """The allocator's state and, where history was recorded, what led to it, by device index."""

    segments: tuple[Segment, ...]
    device_traces: tuple[tuple[Entry, ...], ...] = ()


def list_frames(frames: Any) -> Iterable[Frame]:
    """Yield the frames of a block or entry, innermost first; what is no frame is left out."""
    for frame in frames[:MAX_FRAMES] if isinstance(frames, list) else ():
        if isinstance(frame, dict):
            filename, line, name = frame.get("filename"), frame.get("line"), frame.get("name")
            if isinstance(filename, str) and isinstance(line, int) and isinstance(name, str):
                yield Frame(filename, line, name)


def is_pickle(path: Path) -> bool:
    """Return whether the file at `path` begins as a pickle of protocol 2 or later does."""
    start = _read_start(path)
    return len(start) >= 2 and start[0] == 0x80 and 2 <= start[1] <= 5


def is_old_pickle(path: Path) -> bool:
    """Return whether the file at `path` begins as a pickled list or dictionary of protocol 0 or 1 does; no JSON does."""
    return _read_start(path).startswith(_OLD_STARTS)


_OLD_STARTS = tuple(start + code for start, code in product((b"(d", b"(l", b"}", b"]"), (b"p", b"q", b"r")))
"""A new container (Lib/pickle.py: MARK DICT, MARK LIST, EMPTY_DICT, EMPTY_LIST), and that it is kept under a number (PUT, BINPUT)."""


def _read_start(path: Path) -> bytes:
    try:
        with open_file(path) as file:
            return file.read(3)
    except (OSError, ValueError):
        return b""


def read_snapshot(path: Path) -> Snapshot:
    """Read the snapshot at `path`; nothing in it is ever called. Raises InputError where it is none, or too large."""
    name = format_path(str(path))
    try:
        if path.stat().st_size > MAX_SNAPSHOT_BYTES:
            raise InputError(f"{name} is larger than {MAX_SNAPSHOT_BYTES >> 30} GiB", _FEWER_HINT)
        data = read_file(path, MAX_SNAPSHOT_BYTES)
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror}", "check the path and its permissions") from None
    return decode_snapshot(data, name)


def decode_snapshot(data: bytes, name: str) -> Snapshot:
    """Return the snapshot in `data`; `name` stands in messages. Raises InputError."""
    try:
        found = load_plain_data(data)
        if isinstance(found, list):
            found = {"segments": found}  # torch.cuda.memory_snapshot()
        # Raise NotPlainDataError where converting would take more than MAX_SNAPSHOT_ROWS rows; wrong types are found later
        rows = 0
        for key, inner in (("segments", "blocks"), ("device_traces", None)):
            items = found.get(key) if isinstance(found, dict) else None
            for item in items if isinstance(items, (list, tuple)) else ():
                held = item if inner is None else item.get(inner) if isinstance(item, dict) else None
                rows += 1 + (len(held) if isinstance(held, (list, tuple)) else 0)
                if rows > MAX_SNAPSHOT_ROWS:
                    raise NotPlainDataError(f"more than {MAX_SNAPSHOT_ROWS:,} blocks and entries ({_FEWER_HINT})")
        return msgspec.convert(found, Snapshot)
    except NotPlainDataError as error:
        raise InputError(f"{name} is no snapshot of the CUDA allocator: {error}", _HINT) from None
    except msgspec.ValidationError:
        raise InputError(f"{name} is no snapshot of the CUDA allocator: a field is missing or has an unexpected value", _HINT) from None
