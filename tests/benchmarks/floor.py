"""The floor that reading is compared with: a typed decode in chunks cut at event ends, straight from the .gz, columns only.

It links, checks and explains nothing, and takes times as floats: a bound on what any reader in this language with these
libraries can reach, not a reader.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator
from pathlib import Path

import msgspec
from isal import igzip

CHUNK_BYTES = 16_000_000
END_TRIES = 100

Number = int | float | str | None


class Args(msgspec.Struct, gc=False):
    """The arguments that every analysis needs."""

    correlation: Number = None
    external_id: Number = msgspec.field(name="External id", default=None)
    device: Number = None
    stream: Number = None
    shapes: msgspec.Raw = msgspec.field(name="Input Dims", default=msgspec.Raw())
    dtypes: msgspec.Raw = msgspec.field(name="Input type", default=msgspec.Raw())


class Event(msgspec.Struct, gc=False):
    """One event."""

    ph: str = ""
    cat: str = ""
    name: Number = None
    ts: Number = None
    dur: Number = None
    pid: Number = None
    tid: Number = None
    args: Args | None = None


def _cut(buffer: bytes) -> int:
    """Return the position of the comma before the last event that starts in `buffer` (-1: none)."""
    end = len(buffer)
    while (key := buffer.rfind(b'"ph"', 0, end)) > 0:
        brace = buffer.rfind(b"{", 0, key)
        before = buffer[max(0, brace - 64) : brace].rstrip()
        if not buffer[brace + 1 : key].strip() and before.endswith(b","):
            return buffer.rfind(b",", 0, brace)
        end = key
    return -1


def _last(decoder: msgspec.json.Decoder[list[Event]], rest: bytes) -> list[Event]:
    """Return the events of the last piece, which ends in the end of the array and whatever keys follow it."""
    end = len(rest)
    for _ in range(END_TRIES):
        end = rest.rfind(b"]", 0, end)
        try:
            return decoder.decode(b"[" + rest[: end + 1])
        except msgspec.DecodeError:
            continue
    raise ValueError("no end of traceEvents found")


def chunks(path: Path) -> Iterator[list[Event]]:
    """Yield the events of a .json.gz trace, some at a time. Raises ValueError or DecodeError on files that it does not understand."""
    decoder = msgspec.json.Decoder(list[Event])
    with igzip.open(path, "rb") as file:
        buffer = file.read(CHUNK_BYTES)
        head = buffer.find(b'"traceEvents"')
        buffer = buffer[buffer.index(b"[", max(head, 0)) + 1 :]
        while piece := file.read(CHUNK_BYTES):
            buffer += piece
            cut = _cut(buffer)
            if cut > 0:
                yield decoder.decode(b"[" + buffer[:cut] + b"]")
                buffer = buffer[cut + 1 :]
    yield _last(decoder, buffer)


def read(path: Path) -> int:
    """Return the number of events after all of them went into columns."""
    texts: dict[object, int] = {}
    names, kinds, starts, durations, links = array("l"), array("l"), array("d"), array("d"), array("d")
    shapes: dict[bytes, int] = {}
    shape_ids = array("l")
    for events in chunks(path):
        names.extend([texts.setdefault(event.name, len(texts)) for event in events])
        kinds.extend([texts.setdefault(event.cat, len(texts)) for event in events])
        starts.extend([float(event.ts or 0) for event in events])
        durations.extend([float(event.dur or 0) for event in events])
        arguments = [event.args or Args() for event in events]
        links.extend([float(item.correlation or 0) for item in arguments])
        shape_ids.extend([shapes.setdefault(bytes(item.shapes), len(shapes)) for item in arguments])
    return len(names)


if __name__ == "__main__":
    print(read(Path(sys.argv[1])))
