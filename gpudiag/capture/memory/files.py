"""Where the memory of a rank stands in a bundle, and reading it back. torch is not needed."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from gpudiag.files import read_file
from gpudiag.model.decoding import UNREADABLE
from gpudiag.model.memory import MEMORY_VERSION, Owners

MAX_OWNERS_BYTES = 256 << 20
"""A model of 100,000 tensors has 40 MB of owners."""


class MemoryFiles(NamedTuple):
    """What a bundle holds of one rank's memory."""

    owners: Owners | None = None
    snapshot: Path | None = None
    warning: str = ""


def owners_name(rank: int) -> str:
    """Return the path of a rank's owners, relative to the bundle."""
    return f"memory/rank{rank}-owners.json"


def snapshot_name(rank: int) -> str:
    """Return the path of a rank's snapshot of the CUDA allocator, relative to the bundle."""
    return f"memory/rank{rank}.pickle"


def memory_files(bundle: Path, rank: int) -> MemoryFiles:
    """Return what was recorded of the memory of `rank`; what is damaged is left out with a warning. Links are not followed."""
    path, snapshot = bundle / owners_name(rank), bundle / snapshot_name(rank)
    if not path.is_file() or path.is_symlink():
        return MemoryFiles()
    try:
        owners = msgspec.json.decode(read_file(path, MAX_OWNERS_BYTES), type=Owners)
    except (OSError, *UNREADABLE):
        owners = None
    if owners is None or owners.version > MEMORY_VERSION:
        return MemoryFiles(warning=f"memory/{path.name} could not be read: parameters and optimizer state are not told from other memory")
    return MemoryFiles(owners, snapshot if owners.snapshot and snapshot.is_file() and not snapshot.is_symlink() else None)
