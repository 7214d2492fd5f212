"""Allocator events -> blocks with a birth and a death, and how much was in use after each event."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

BEFORE = -1
"""Birth of a block that was allocated before the recording."""


class Lives(NamedTuple):
    """Blocks of memory. A block is in use after event k where born <= k < died."""

    address: Ints
    size: Ints
    """Bytes."""
    born: Ints
    """Event that allocated it; BEFORE: not recorded."""
    died: Ints
    """Event that freed it; `events`: in use at the end."""
    events: int

    def alive(self, event: int) -> npt.NDArray[np.bool_]:
        """Return which blocks, allocated in the recording, are in use after `event`."""
        found: npt.NDArray[np.bool_] = (self.born >= 0) & (self.born <= event) & (self.died > event)
        return found

    def before(self, event: int) -> int:
        """Return the bytes of the blocks of before the recording that were freed up to `event`."""
        return int(self.size[(self.born == BEFORE) & (self.died <= event)].sum())

    def in_use(self) -> Ints:
        """Return the bytes in use after each event, less those at the start."""
        change = np.zeros(self.events + 1, dtype=np.int64)
        recorded = self.born >= 0
        np.add.at(change, self.born[recorded], self.size[recorded])
        np.subtract.at(change, self.died, self.size)
        total: Ints = np.cumsum(change[:-1])
        return total


def lives(sizes: Ints, addresses: Ints | None) -> Lives:
    """Return the blocks of events in their order: `sizes` is positive for an allocation, negative for a free.

    Without `addresses` (torch before 1.13) a free ends the youngest block of its size: of blocks of one size the sum is right at any
    moment, but not always which of them it was.
    """
    if addresses is None:
        return _by_size(sizes)
    order = np.lexsort((np.arange(len(sizes)), addresses))
    rows, size, address = order, sizes[order], addresses[order]
    same = np.append(address[1:] == address[:-1], False)
    following = np.where(same, np.append(rows[1:], 0), len(sizes))  # a second allocation there means that a free was not recorded
    begins = size > 0
    orphan = ~begins & ~np.append(False, same[:-1] & begins[:-1])
    return Lives(
        np.concatenate((address[begins], address[orphan])),
        np.concatenate((size[begins], -size[orphan])),
        np.concatenate((rows[begins], np.full(int(orphan.sum()), BEFORE))),
        np.concatenate((following[begins], rows[orphan])),
        len(sizes),
    )


def _by_size(sizes: Ints) -> Lives:
    open_of: dict[int, list[int]] = {}
    died = np.full(len(sizes), len(sizes), dtype=np.int64)
    orphans = []
    for row, size in enumerate(sizes.tolist()):
        if size > 0:
            open_of.setdefault(size, []).append(row)
        elif waiting := open_of.get(-size):
            died[waiting.pop()] = row
        else:
            orphans.append(row)
    rows, lost = np.flatnonzero(sizes > 0), np.array(orphans, dtype=np.int64)
    return Lives(
        np.full(len(rows) + len(lost), -1),
        np.concatenate((sizes[rows], -sizes[lost])),
        np.concatenate((rows, np.full(len(lost), BEFORE))),
        np.concatenate((died[rows], lost)),
        len(sizes),
    )
