"""Where a bundle is written: its folder, and the names of the files in it."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from gpudiag.files import read_file
from gpudiag.model.bundle import MANIFEST_NAME, Manifest, RankState
from gpudiag.model.decoding import UNREADABLE

SEGMENTS = {"step_records": "steps", "host_marks": "marks", "telemetry": "telemetry"}

MAX_SUFFIX = 1000
"""`<path>-2` ... `<path>-1000` are tried before giving up."""

SAME_RUN_NS = 600 * 10**9
"""An unfinished bundle begun by rank 0 within this time is taken for the run that another rank is joining, where no launcher says more."""

MAX_MANIFEST_BYTES = 16 << 20
"""A manifest is a few kB; more than this is no manifest."""

MANIFEST_PATTERN = re.compile(r"manifest(?:-rank(\d{1,9}))?\.json")

CLAIM_NAME = ".recording"
"""Holds the launch that writes into the folder, until its rank 0 has finished."""

UNKNOWN_LAUNCH = "?"

CLAIM_READS, CLAIM_WAIT_S = 20, 0.025
"""How often, and how far apart, an empty claim is read again: between making and filling it lie microseconds, or a slow file server."""


class _Finished(msgspec.Struct):
    finished: bool = False


def manifest_name(rank: int) -> str:
    """Return the file name of a rank's manifest: rank 0 writes the bundle's own."""
    return MANIFEST_NAME if rank == 0 else f"manifest-rank{rank}.json"


def trace_name(rank: int, window: int) -> str:
    """Return the path of a window's trace, relative to the bundle."""
    return f"trace/rank{rank}-w{window}.json.gz"


def inductor_name(rank: int) -> str:
    """Return the path of what is known of a rank's compiled code, relative to the bundle."""
    return f"inductor/rank{rank}.json"


def segment_name(table: str, rank: int, sequence: int) -> str:
    """Return the path of a segment of `table` (step_records, host_marks or telemetry), relative to the bundle."""
    return f"{SEGMENTS[table]}/rank{rank}/{sequence:06d}.parquet"


class Claim(NamedTuple):
    """Who wants a folder: one rank of a launch (`launch`: see launch.py; '' where the launcher does not say)."""

    rank: int = 0
    world_size: int = 1
    launch: str = ""


def _claimed(path: Path, who: Claim) -> bool:
    """Return whether the folder is now ours: the first who writes the claim has it, also of two runs that begin at the same moment."""
    try:
        descriptor = os.open(path / CLAIM_NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w") as file:
        file.write(who.launch or UNKNOWN_LAUNCH)
    return True


def _claimant(path: Path) -> str | None:
    """Return the launch that claimed the folder ('' unknown); None where there is no claim, or it stays empty."""
    for _ in range(CLAIM_READS):
        try:
            found = (path / CLAIM_NAME).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        if found:
            return "" if found == UNKNOWN_LAUNCH else found
        time.sleep(CLAIM_WAIT_S)  # another rank is about to write it
    return None


def _begun(path: Path) -> Manifest | None:
    try:
        return msgspec.json.decode(read_file(path / MANIFEST_NAME, MAX_MANIFEST_BYTES), type=Manifest)
    except (OSError, *UNREADABLE):
        return None


def _joins(path: Path, who: Claim) -> bool:
    """Return whether `path` is the bundle that other ranks of the same run have just begun."""
    if who.world_size == 1 or (path / manifest_name(who.rank)).exists():
        return False
    begun, claimant = _begun(path), _claimant(path)
    launch = claimant if claimant is not None else begun.launch if begun is not None else None
    if launch or (who.launch and launch is not None):
        return launch == who.launch
    if begun is not None:
        return not begun.finished and abs(time.time_ns() - begun.created_unix_ns) < SAME_RUN_NS
    if (path / MANIFEST_NAME).exists():
        return False  # one that cannot be read
    return claimant is not None or any(path.glob("manifest-rank*.json"))  # rank 0 comes later


def _taken(path: Path, who: Claim) -> bool:
    """Return whether the folder is ours to write into; it is made where it does not exist. Raises OSError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        return False  # a file
    if next(path.iterdir(), None) is None and _claimed(path, who):
        return True
    return _joins(path, who)


def choose(path: Path, who: Claim) -> Path:
    """Return `path`, or `<path>-2`, `-3`, ... where it already holds something: a finished recording is never overwritten.

    Ranks of one launch get the same folder. It is made, and claimed against other runs. Raises OSError where no folder can be used.
    """
    for suffix in range(1, MAX_SUFFIX + 1):
        candidate = path if suffix == 1 else path.with_name(f"{path.name}-{suffix}")
        if _taken(candidate, who):
            return candidate
    raise FileExistsError(f"{path} and {path}-2 ... -{MAX_SUFFIX} already exist")


def release_claim(path: Path) -> None:
    """Remove the claim: the finished manifest now says whose the folder is."""
    with suppress(OSError):
        (path / CLAIM_NAME).unlink()


def ranks_of(path: Path) -> tuple[int, ...]:
    """Return the ranks that have a manifest in the folder `path`. Raises OSError."""
    names = (MANIFEST_PATTERN.fullmatch(entry.name) for entry in path.iterdir() if entry.is_file())
    return tuple(sorted(int(match.group(1) or 0) for match in names if match))


def is_bundle(path: Path) -> bool:
    """Return whether `path` is a folder with a bundle's manifest (of any rank)."""
    try:
        return path.is_dir() and bool(ranks_of(path))
    except OSError:
        return False


def other_ranks(path: Path, rank: int) -> tuple[RankState, ...]:
    """Return the ranks that record or recorded beside `rank`, and whether their manifests are finished."""
    found = []
    for entry in path.iterdir():
        match = MANIFEST_PATTERN.fullmatch(entry.name)
        if match and int(match.group(1) or 0) != rank:
            found.append(RankState(int(match.group(1) or 0), _finished(entry)))
    return tuple(sorted(found, key=lambda state: state.rank))


def _finished(path: Path) -> bool:
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            return False
        return msgspec.json.decode(read_file(path, MAX_MANIFEST_BYTES), type=_Finished).finished
    except (OSError, *UNREADABLE):
        return False


def create(path: Path, rank: int) -> None:
    """Make the folders of one rank's files. Raises OSError."""
    for folder in (path / "trace", *(path / name / f"rank{rank}" for name in SEGMENTS.values())):
        folder.mkdir(parents=True, exist_ok=True)
