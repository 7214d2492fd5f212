"""What the page of the time line and the server say to each other: what is asked, and the columns of the answer as the page reads them."""

from __future__ import annotations

import base64
import threading
from collections import OrderedDict
from typing import Any, Literal

import msgspec
import numpy as np
from gpudiag_dashboard.library import Library

from gpudiag.api.lanes import STYLES, TABLES, Board, Drawn
from gpudiag.errors import InputError

MOST_PIXELS = 16_000
"""Two screens of 8,000 pixels: beside the window itself the page asks for half of it on either side."""

LEAST_NS = 100
"""Narrowest window: no device has events as short."""

AROUND = 12
"""An event that is looked for is shown in a window of so many times its length."""

STRIP_PIXELS = 1_000
"""Resolution of the whole recording in small; it is stretched to the page."""

_MOST_BOARDS = 4
_FAR_NS = 2**62


class Ask(msgspec.Struct, frozen=True):
    """A window that the page wants to draw; without a window the whole recording, or the surroundings of `event`."""

    number: int
    """Counts the questions: answers to old ones are left aside."""
    pixels: int
    from_ns: float | None = None
    to_ns: float | None = None
    lane: str | None = None
    op: str | None = None
    event: str | None = None
    """Such as 'kernels-12'."""
    setup: bool = False
    """Whether the page does not know the lanes yet."""


class Point(msgspec.Struct, frozen=True):
    """A piece under the pointer: an event, or `count` joined events of a row from its `first` on."""

    number: int
    event: str | None = None
    lane: int = 0
    row: int = 0
    first: int = 0
    count: int = 0


class Search(msgspec.Struct, frozen=True):
    """The next work of an op, seen from a moment."""

    op: str
    at_ns: float
    direction: Literal[-1, 1]


class Boards:
    """The time lines of the recordings that were looked at last, each made once."""

    def __init__(self, library: Library) -> None:
        self._library, self._lock = library, threading.Lock()
        self._kept: OrderedDict[tuple[str, int | None], tuple[object, Board]] = OrderedDict()

    def of(self, name: str, rank: int | None = None) -> Board:
        """Return the time line of a recording. Raises InputError where there is none of this name or it cannot be read."""
        opened, key = self._library.opened(name, rank), (name, rank)
        with self._lock:
            kept = self._kept.get(key)
            if kept is None or kept[0] is not opened:
                kept = self._kept[key] = (opened, Board(opened))
            self._kept.move_to_end(key)
            while len(self._kept) > _MOST_BOARDS:
                self._kept.popitem(last=False)
            return kept[1]


def event_of(text: str) -> tuple[str, int]:
    """Return (table, row) of an event's name such as 'kernels-12'. Raises InputError for another text."""
    table, _, digits = text.partition("-")
    if table not in TABLES or not (digits.isascii() and digits.isdigit() and len(digits) < 16):
        raise InputError(f"{text[:40]!r} names no event", "an event is named like kernels-12")
    return table, int(digits)


def answer(board: Board, ask: Ask) -> dict[str, Any]:
    """Return what the page draws. Raises InputError for a lane or event that is not there."""
    from_ns, to_ns = _window(board, ask)
    pixels = min(max(1, ask.pixels), MOST_PIXELS)
    drawing = board.draw(from_ns, to_ns, pixels, lane=ask.lane, op=ask.op)
    found: dict[str, Any] = {
        "number": ask.number,
        "from": from_ns,
        "to": to_ns,
        "pixels": pixels,
        "events": drawing.events,
        "joined": drawing.joined,
        "marked": drawing.marked,
        "rows": [_row(row) for row in drawing.rows],
    }
    return {**found, "setup": _setup(board)} if ask.setup else found


def around(board: Board, event: str) -> tuple[int, int]:
    """Return the window in which an event is looked at. Raises InputError where there is none."""
    found = board.card(*event_of(event))
    margin = max(LEAST_NS, (AROUND - 1) * (found.end_ns - found.start_ns)) // 2
    return found.start_ns - margin, found.end_ns + margin


def _window(board: Board, ask: Ask) -> tuple[int, int]:
    """Return the window asked for as whole ns, at least LEAST_NS long."""
    if ask.event is not None:
        from_ns, to_ns = around(board, ask.event)
    elif ask.from_ns is None or ask.to_ns is None:
        from_ns, to_ns = board.from_ns, board.to_ns
    else:
        from_ns, to_ns = (round(min(max(value, -_FAR_NS), _FAR_NS)) for value in (ask.from_ns, ask.to_ns))
    return from_ns, max(to_ns, from_ns + LEAST_NS)


def _setup(board: Board) -> dict[str, Any]:
    """Return what does not change with the window."""
    strip = board.strip(STRIP_PIXELS)
    return {
        "from": board.from_ns,
        "to": max(board.to_ns, board.from_ns + LEAST_NS),
        "lanes": [{"key": title.key, "title": title.title, "note": title.note, "hint": title.hint} for title in board.titles],
        "styles": list(STYLES),
        "words": [board.words[style] for style in STYLES],
        "tables": list(TABLES),
        "strip": None if strip is None else _row(strip),
    }


def _row(row: Drawn) -> dict[str, Any]:
    """Return one row: its columns as base64 of little-endian numbers, which neither side has to parse one by one."""
    of = row.pieces
    length = np.maximum(of.end_ns - of.start_ns, 1)
    return {
        "lane": row.lane,
        "row": row.row,
        "start": _packed(of.start_ns, "<f8"),
        "length": _packed(of.end_ns - of.start_ns, "<f8"),
        "code": _packed(of.code, "u1"),
        "count": _packed(of.events, "<i4"),
        "busy": _packed(np.clip(np.ceil(100 * of.busy_ns / length), 0, 100), "u1"),
        "first": _packed(of.first, "<i4"),
        "table": _packed(row.table, "u1"),
        "id": _packed(row.id, "<i4"),
        "marked": None if row.marked is None else _packed(row.marked, "u1"),
        "names": {str(place): name for place, name in row.names.items()},
    }


def _packed(column: Any, form: str) -> str:
    return base64.b64encode(np.ascontiguousarray(column, dtype=form).tobytes()).decode("ascii")
