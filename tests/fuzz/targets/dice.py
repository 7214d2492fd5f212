"""Random choices that are read off the bytes of an input, so that what a fuzzer changes in them changes what is built."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from fuzz.mutations import break_structure


class Dice(random.Random):
    """Decides by `data`, a few bytes a choice; every choice after their end is the first one."""

    def __init__(self, data: bytes) -> None:
        super().__init__(0)
        self._data, self._at = data, 0

    def getrandbits(self, k: int) -> int:
        """Return a number of `k` bits."""
        size = (k + 7) // 8
        piece = self._data[self._at : self._at + size]
        self._at += size
        return int.from_bytes(piece, "little") & ((1 << k) - 1)

    @property
    def ended(self) -> bool:
        """Return whether every byte has been read."""
        return self._at >= len(self._data)

    def random(self) -> float:
        """Return a number from 0 to 1, without 1."""
        return self.getrandbits(16) / (1 << 16)


def broken(document: dict[str, Any], dice: Dice, most: int) -> dict[str, Any]:
    """Return `document` with up to `most` accidents, as many as `dice` decides."""
    for _ in range(1 + dice.randrange(most)):
        if not dice.ended:
            break_structure(document, dice, 1)
    return document


def decisions() -> Iterator[bytes]:
    """Yield inputs to begin with: each decides otherwise."""
    yield from (random.Random(seed).randbytes(10 * seed) for seed in range(1, 12))
