"""Pickles of plain data: containers, numbers and texts. No other operation of the format is known here, so nothing can be called.

Opcodes: Lib/pickle.py and Lib/pickletools.py of CPython. The standard unpickler is not used, not even with find_class closed: it sizes its
memo by a number that the file claims, and has no limit on what a small file may unfold to.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

MAX_OPERATIONS = 60_000_000
"""A snapshot of 100,000 entries with stacks of 20 frames takes about five million."""

MAX_CONTAINERS = 10_000_000

MAX_KEY = 1 << 16
"""Largest number that may be a key. Hashes of larger ones (and of fractions) can be made to collide, and n keys then take n^2 comparisons;
those of texts are salted."""


class NotPlainDataError(ValueError):
    """The pickle holds something else than plain data, is damaged, or is too large; the text says which."""


def plain_data(data: bytes) -> Any:
    """Return the value that `data`, a pickle of protocol 2 or later, holds. Raises NotPlainDataError."""
    reader = _Reader(data)
    try:
        return reader.read()
    except (IndexError, KeyError, TypeError, struct.error, AttributeError):
        raise NotPlainDataError(f"it is damaged or cut short at byte {reader.at:,}") from None


class _Reader:
    """A stack machine: what is between two marks is a list of its own."""

    def __init__(self, data: bytes) -> None:
        self._data, self.at = data, 0
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._containers = 0

    def read(self) -> Any:
        data, table = self._data, _OPERATIONS
        for _ in range(MAX_OPERATIONS):
            code = data[self.at]
            self.at += 1
            if code == _STOP:
                return self._stack.pop()
            operation = table.get(code)
            if operation is None:
                raise NotPlainDataError(f"it is not plain data: operation {code:#04x} at byte {self.at - 1:,} is refused")
            operation(self)
        raise NotPlainDataError(f"more than {MAX_OPERATIONS:,} operations")

    def taken(self, length: int) -> bytes:
        """Return the next `length` bytes."""
        found = self._data[self.at : self.at + length]
        if len(found) < length:
            raise IndexError
        self.at += length
        return found

    def skip(self, length: int) -> None:
        self.at += length

    def number(self, length: int) -> int:
        """Return an unsigned number of `length` bytes."""
        return int.from_bytes(self.taken(length), "little")

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def build(self, value: Any) -> None:
        """Push a new container."""
        self._containers += 1
        if self._containers > MAX_CONTAINERS:
            raise NotPlainDataError(f"more than {MAX_CONTAINERS:,} containers")
        self._stack.append(value)

    def mark(self) -> None:
        self._below.append(self._stack)
        self._stack = []

    def since_mark(self) -> list[Any]:
        found, self._stack = self._stack, self._below.pop()
        return found

    def popped(self, count: int) -> tuple[Any, ...]:
        found = tuple(self._stack[-count:])
        if len(found) < count:
            raise IndexError
        del self._stack[-count:]
        return found

    def put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def get(self, index: int) -> None:
        self._stack.append(self._memo[index])

    def add(self, values: list[Any] | tuple[Any, ...]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise TypeError
        target.extend(values)

    def set(self, pairs: list[Any] | tuple[Any, ...]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(pairs) % 2:
            raise TypeError
        keys = pairs[::2]
        if not all(map(_is_key, keys)):
            raise NotPlainDataError(f"a key at byte {self.at:,} is neither a text nor a small number")
        target.update(zip(keys, pairs[1::2], strict=True))


def _is_key(value: Any) -> bool:
    """Return whether `value` may be hashed: the hash of a tuple is that of all in it, as deep and as often as the file says."""
    return type(value) is str or value is None or (type(value) in (int, bool) and -MAX_KEY <= value <= MAX_KEY)


def _text(length: int) -> Callable[[_Reader], None]:
    # a path that is no UTF-8 is pickled with half surrogate pairs, which no report could be written with
    return lambda reader: reader.push(reader.taken(reader.number(length)).decode("utf-8", "replace"))


def _bytes(length: int) -> Callable[[_Reader], None]:
    return lambda reader: reader.push(reader.taken(reader.number(length)))


def _signed(reader: _Reader, length: int) -> None:
    reader.push(int.from_bytes(reader.taken(length), "little", signed=True))


_STOP = ord(".")
_OPERATIONS: dict[int, Callable[[_Reader], None]] = {
    0x80: lambda reader: reader.skip(1),  # PROTO
    0x95: lambda reader: reader.skip(8),  # FRAME: how the writer buffered, no matter to the reader
    ord("("): _Reader.mark,
    ord("N"): lambda reader: reader.push(None),
    0x88: lambda reader: reader.push(True),
    0x89: lambda reader: reader.push(False),
    ord("J"): lambda reader: _signed(reader, 4),
    ord("K"): lambda reader: reader.push(reader.number(1)),
    ord("M"): lambda reader: reader.push(reader.number(2)),
    0x8A: lambda reader: _signed(reader, reader.number(1)),  # LONG1
    ord("G"): lambda reader: reader.push(struct.unpack(">d", reader.taken(8))[0]),
    0x8C: _text(1),
    ord("X"): _text(4),
    0x8D: _text(8),
    ord("C"): _bytes(1),
    ord("B"): _bytes(4),
    ord("]"): lambda reader: reader.build([]),
    ord("}"): lambda reader: reader.build({}),
    ord(")"): lambda reader: reader.build(()),
    0x85: lambda reader: reader.build(reader.popped(1)),
    0x86: lambda reader: reader.build(reader.popped(2)),
    0x87: lambda reader: reader.build(reader.popped(3)),
    ord("t"): lambda reader: reader.build(tuple(reader.since_mark())),
    ord("a"): lambda reader: reader.add(reader.popped(1)),
    ord("e"): lambda reader: reader.add(reader.since_mark()),
    ord("s"): lambda reader: reader.set(reader.popped(2)),
    ord("u"): lambda reader: reader.set(reader.since_mark()),
    0x94: _Reader.memoize,
    ord("q"): lambda reader: reader.put(reader.number(1)),
    ord("r"): lambda reader: reader.put(reader.number(4)),
    ord("h"): lambda reader: reader.get(reader.number(1)),
    ord("j"): lambda reader: reader.get(reader.number(4)),
}
