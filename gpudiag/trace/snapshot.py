"""A snapshot of the CUDA caching allocator, as torch.cuda.memory._dump_snapshot writes it: an untrusted pickle -> typed values.

Format: torch/cuda/memory.py (_snapshot) and torch/cuda/_memory_viz.py, of torch 2.0 to 2.13.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from gpudiag.errors import InputError
from gpudiag.files import open_file, read_file
from gpudiag.trace.source import shown
from gpudiag.trace.unpickle import NotPlainDataError, plain_data

MAX_BYTES = 1 << 30
"""A snapshot of 100,000 entries with Python stacks has some tens of MB."""

MAX_ROWS = 2_000_000
"""Segments, blocks and entries of a snapshot: a hostile file may refer to one list from everywhere."""

MAX_FRAMES = 1_000
"""Frames of one stack that are looked at."""

_HINT = "give a file written by torch.cuda.memory._dump_snapshot, or a bundle recorded with gpudiag.profile(memory=True)"
_FEWER = "record fewer entries: torch.cuda.memory._record_memory_history(max_entries=100_000)"

LARGEST = 1 << 40
"""Bytes of a block; with MAX_ROWS of them no sum leaves 64 bits."""
Size = Annotated[int, Meta(ge=0, le=LARGEST)]
Asked = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
"""Bytes of a request: one that failed may have been for any number."""
Address = Annotated[int, Meta(ge=0)]
"""Below 2^64 (_check_address); those of some devices have the highest bit set."""
Index = Annotated[int, Meta(ge=-1, le=(1 << 63) - 1)]


OOM = "oom"
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
    """As in the file: shared between entries. See stack_of."""

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
    """As in the file: shared between entries. See stack_of."""

    def __post_init__(self) -> None:
        _check_address(self.addr)
        if self.size > LARGEST and self.action != OOM:
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


def stack_of(frames: Any) -> Iterable[Frame]:
    """Yield the frames of a block or entry, innermost first; what is no frame is left out."""
    for frame in frames[:MAX_FRAMES] if isinstance(frames, list) else ():
        if isinstance(frame, dict):
            filename, line, name = frame.get("filename"), frame.get("line"), frame.get("name")
            if isinstance(filename, str) and isinstance(line, int) and isinstance(name, str):
                yield Frame(filename, line, name)


def is_pickle(path: Path) -> bool:
    """Return whether the file at `path` begins as a pickle of protocol 2 or later does."""
    start = _start(path)
    return len(start) >= 2 and start[0] == 0x80 and 2 <= start[1] <= 5


def is_old_pickle(path: Path) -> bool:
    """Return whether the file at `path` begins as a pickled list or dictionary of protocol 0 or 1 does; no JSON does."""
    return _start(path).startswith(_OLD_STARTS)


_OLD_STARTS = tuple(start + code for start, code in product((b"(d", b"(l", b"}", b"]"), (b"p", b"q", b"r")))
"""A new container (Lib/pickle.py: MARK DICT, MARK LIST, EMPTY_DICT, EMPTY_LIST), and that it is kept under a number (PUT, BINPUT)."""


def _start(path: Path) -> bytes:
    try:
        with open_file(path) as file:
            return file.read(3)
    except (OSError, ValueError):
        return b""


def read_snapshot(path: Path) -> Snapshot:
    """Return the snapshot at `path`; nothing in it is ever called. Raises InputError where it is none, or too large."""
    name = shown(str(path))
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InputError(f"{name} is larger than {MAX_BYTES >> 30} GiB", _FEWER)
        data = read_file(path, MAX_BYTES)
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror}", "check the path and its permissions") from None
    return decode(data, name)


def decode(data: bytes, name: str) -> Snapshot:
    """Return the snapshot in `data`; `name` stands in messages. Raises InputError."""
    try:
        found = plain_data(data)
        if isinstance(found, list):
            found = {"segments": found}  # torch.cuda.memory_snapshot()
        _check_rows(found)
        return msgspec.convert(found, Snapshot)
    except NotPlainDataError as error:
        raise InputError(f"{name} is no snapshot of the CUDA allocator: {error}", _HINT) from None
    except msgspec.ValidationError:
        raise InputError(f"{name} is no snapshot of the CUDA allocator: a field is missing or has an unexpected value", _HINT) from None


def _check_rows(found: Any) -> None:
    """Raise NotPlainDataError where converting would take more than MAX_ROWS rows; wrong types are found later."""
    rows = 0
    for key, inner in (("segments", "blocks"), ("device_traces", None)):
        items = found.get(key) if isinstance(found, dict) else None
        for item in items if isinstance(items, (list, tuple)) else ():
            held = item if inner is None else item.get(inner) if isinstance(item, dict) else None
            rows += 1 + (len(held) if isinstance(held, (list, tuple)) else 0)
            if rows > MAX_ROWS:
                raise NotPlainDataError(f"more than {MAX_ROWS:,} blocks and entries ({_FEWER})")
