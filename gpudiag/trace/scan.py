"""Where JSON containers begin and end in a piece of text: exact (aware of strings and escapes), without decoding, without recursion."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_QUOTE, _BACKSLASH, _OPEN, _CLOSE = 1, 2, 3, 4
_CLASS = np.zeros(256, np.uint8)
_CLASS[ord('"')] = _QUOTE
_CLASS[ord("\\")] = _BACKSLASH
_CLASS[[ord("{"), ord("[")]] = _OPEN
_CLASS[[ord("}"), ord("]")]] = _CLOSE

WINDOW_BYTES = 1 << 22
"""Text looked at in one go: bounds the memory that text full of brackets needs."""

Positions = npt.NDArray[np.int64]


class Items(NamedTuple):
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

    def feed(self, window: bytes | bytearray | memoryview) -> tuple[Positions, Positions, Positions]:
        """Return for each bracket of `window` its position, +1 (opens) or -1 (closes), and the depth after it."""
        codes = np.frombuffer(window, np.uint8)
        shift = int(self._escaped)
        if shift:  # a virtual backslash in front carries the escape over the border
            codes = np.concatenate([np.array([ord("\\")], np.uint8), codes])
        positions, steps = self._brackets(codes)
        depths = self._depth + np.cumsum(steps)
        self._depth = int(depths[-1]) if depths.size else self._depth
        return positions - shift, steps, depths

    def _brackets(self, codes: npt.NDArray[np.uint8]) -> tuple[Positions, Positions]:
        classes = _CLASS[codes]
        special = np.flatnonzero(classes)
        kinds = classes[special]
        escaped = _after_odd_backslashes(special, kinds)
        inside = (np.cumsum((kinds == _QUOTE) & ~escaped[:-1]) + self._in_string) % 2 == 1
        brackets = (kinds >= _OPEN) & ~inside
        if special.size:
            self._in_string = bool(inside[-1])
        self._escaped = bool(special.size and special[-1] == codes.size - 1 and escaped[-1])
        return special[brackets], np.where(kinds[brackets] == _OPEN, 1, -1)


def array_items(text: memoryview) -> Items:
    """Return the complete objects and arrays of `text`, which begins inside an array, outside of any string."""
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
            return Items(starts, ends, int(positions[stop]))
    return Items(starts[: len(ends)], ends, None)


class ContainerScanner:
    """Finds the end of one container whose text arrives in windows."""

    def __init__(self) -> None:
        self._reader = BracketReader()

    def feed(self, window: bytes) -> int | None:
        """Return the position in `window` after the bracket that closes the container; None: it goes on in the next window."""
        positions, _, depths = self._reader.feed(window)
        closed = np.flatnonzero(depths == 0)
        return int(positions[closed[0]]) + 1 if closed.size else None


def _after_odd_backslashes(special: Positions, kinds: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Return for each special character, and for the end of the text, whether an odd run of backslashes stands directly before it."""
    order = np.arange(special.size)
    breaks = np.ones(special.size, np.bool_)  # True where no backslash stands directly before
    breaks[1:] = (kinds[:-1] != _BACKSLASH) | (special[1:] - special[:-1] != 1)
    run_start = np.maximum.accumulate(np.where(breaks, order, 0)) if special.size else order
    before = order - run_start  # backslashes directly before this character
    last = before[-1] + 1 if special.size and kinds[-1] == _BACKSLASH else 0
    odd: npt.NDArray[np.bool_] = np.append(before, last) % 2 == 1
    return odd
