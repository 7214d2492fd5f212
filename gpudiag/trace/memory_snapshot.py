"""A snapshot of the CUDA caching allocator (torch.cuda.memory._dump_snapshot): an untrusted pickle of plain data -> typed values.

The unpickler is that of the standard library written in Python, with no operations but those that build containers, numbers and texts:
nothing can be named, so nothing can be called. The one in C is not used, not even with find_class closed: it sizes its memo by a number
that the file claims, and neither has a limit on what a small file may unfold to.

Format of the snapshot: torch/cuda/memory.py (_snapshot) and torch/cuda/_memory_viz.py, of torch 2.0 to 2.13.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable, Iterable, Sequence
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
    reader = _PlainUnpickler(io.BytesIO(data))
    try:
        return reader.load()
    except NotPlainDataError:
        raise
    except (pickle.UnpicklingError, EOFError, LookupError, TypeError, ValueError, OverflowError, struct.error, AttributeError):
        raise NotPlainDataError(f"it is damaged or cut short at byte {reader.file.tell():,}") from None


class _PlainUnpickler(pickle._Unpickler):
    read: Callable[[int], bytes]
    append: Callable[[Any], None]
    stack: list[Any]

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.file = file
        self.dispatch = self  # type: ignore[misc,assignment]  # load() asks it for each operation by its code
        self._operations = self._containers = 0

    def __getitem__(self, code: int) -> Callable[[_PlainUnpickler], None]:
        self._operations += 1
        self._containers += code in _BUILDING
        if self._operations > MAX_OPERATIONS:
            raise NotPlainDataError(f"more than {MAX_OPERATIONS:,} operations")
        if self._containers > MAX_CONTAINERS:
            raise NotPlainDataError(f"more than {MAX_CONTAINERS:,} containers")
        if code not in _PLAIN:
            raise NotPlainDataError(f"it is not plain data: operation {code:#04x} at byte {self.file.tell() - 1:,} is refused")
        return _PLAIN[code]

    def skip_frame(self) -> None:
        self.read(8)  # how the writer buffered, no matter to the reader

    def load_text(self, length: int) -> None:
        # a path that is no UTF-8 is pickled with half surrogate pairs, which no report could be written with
        self.append(self.read(int.from_bytes(self.read(length), "little")).decode("utf-8", "replace"))

    def set_items(self, pairs: Sequence[Any]) -> None:
        target, keys = self.stack[-1], pairs[::2]
        if type(target) is not dict or len(pairs) % 2:
            raise TypeError
        for key in keys:  # what may be hashed: the hash of a tuple is that of all in it, as deep and as often as the file says
            if type(key) is not str and key is not None and not (type(key) in (int, bool) and -MAX_KEY <= key <= MAX_KEY):
                raise NotPlainDataError(f"a key at byte {self.file.tell():,} is neither a text nor a small number")
        target.update(zip(keys, pairs[1::2], strict=True))


_BUILDING = frozenset(b"]})t\x85\x86\x87")
"""Operations that build a container (Lib/pickle.py): lists, dictionaries, tuples."""

_PLAIN: dict[int, Callable[[Any], None]] = {
    code: pickle._Unpickler.dispatch[code]
    for code in (*_BUILDING, *b"\x80.(N\x88\x89JKM\x8aGCBae\x94qrhj")
    # PROTO STOP MARK NONE NEWTRUE NEWFALSE BININT 1 2 LONG1 BINFLOAT SHORT_BINBYTES BINBYTES APPEND APPENDS MEMOIZE BINPUT BINGET
} | {
    pickle.FRAME[0]: _PlainUnpickler.skip_frame,
    pickle.SHORT_BINUNICODE[0]: lambda reader: reader.load_text(1),
    pickle.BINUNICODE[0]: lambda reader: reader.load_text(4),
    pickle.BINUNICODE8[0]: lambda reader: reader.load_text(8),
    pickle.SETITEM[0]: lambda reader: reader.set_items((reader.stack.pop(-2), reader.stack.pop())),
    pickle.SETITEMS[0]: lambda reader: reader.set_items(reader.pop_mark()),
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
