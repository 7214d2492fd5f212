"""Which blocks belong to parameters, gradients, optimizer state and buffers: by the addresses of their storages at the window's end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from gpudiag.model.memory import Owner, Owners
from gpudiag.timeline.memory.lives import Lives
from gpudiag.timeline.memory.uses import Texts

ROUNDING = 512
"""Bytes to which the CUDA caching allocator rounds a block up (kMinBlockSize, c10/cuda/CUDACachingAllocator.cpp)."""


class Held(NamedTuple):
    """A storage that was there before the recording, and still at its end."""

    owner: Owner
    bytes: int
    """Of the allocator's block."""


def owners_of(owners: Owners | None, device: str) -> dict[int, Owner]:
    """Return the owners on `device` by address; of several that share a storage the first."""
    found: dict[int, Owner] = {}
    for owner in owners.owners if owners else ():
        if owner.device == device and owner.address > 0 and owner.bytes > 0:
            found.setdefault(owner.address, owner)
    return found


def named(lives: Lives, found: Texts, owners: Mapping[int, Owner]) -> tuple[Texts, Texts]:
    """Return (category, owner's name) of each block: of those in use at the end as `owners` tell; what no one owns is none of theirs."""
    kinds, names = found.copy(), np.full(len(found), None, dtype=object)
    for row in np.flatnonzero((lives.died == lives.events) & (lives.born >= 0)).tolist():
        owner = owners.get(int(lives.address[row]))
        if owner is not None:
            kinds[row], names[row] = owner.kind, owner.name
        elif owners and kinds[row] in ("gradients", "optimizer_state"):
            kinds[row] = "unknown"
    return kinds, names


def held(lives: Lives, owners: Mapping[int, Owner], blocks: Mapping[int, int], *, on_cpu: bool) -> tuple[Held, ...]:
    """Return the owned storages that no recorded allocation made; `blocks`: size of each block at the end, where a snapshot tells."""
    made = set(lives.address[(lives.died == lives.events) & (lives.born >= 0)].tolist())
    return tuple(Held(owner, _block(owner, blocks, on_cpu)) for address, owner in owners.items() if address not in made)


def _block(owner: Owner, blocks: Mapping[int, int], on_cpu: bool) -> int:
    rounded = owner.bytes if on_cpu else -(-owner.bytes // ROUNDING) * ROUNDING
    return blocks.get(owner.address, rounded)
