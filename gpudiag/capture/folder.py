"""Where a bundle is written: its folder, and the names of the files in it."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from gpudiag.model.bundle import MANIFEST_NAME, Manifest

_SEGMENTS = {"step_records": "steps", "host_marks": "marks", "telemetry": "telemetry"}

MAX_SUFFIX = 1000
"""`<path>-2` ... `<path>-1000` are tried before giving up."""

SAME_RUN_NS = 600 * 10**9
"""An unfinished bundle begun by rank 0 within this time is taken for the run that another rank is joining."""


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
    return f"{_SEGMENTS[table]}/rank{rank}/{sequence:06d}.parquet"


def _joins(path: Path, rank: int) -> bool:
    """Return whether `path` is the bundle that other ranks of the same run have just begun."""
    if (path / manifest_name(rank)).exists() or not any(path.glob("manifest*.json")):
        return False
    try:
        begun = msgspec.json.decode((path / MANIFEST_NAME).read_bytes(), type=Manifest)
    except FileNotFoundError:
        return True  # rank 0 comes later
    except (OSError, msgspec.MsgspecError):
        return False
    return not begun.finished and abs(time.time_ns() - begun.created_unix_ns) < SAME_RUN_NS


def _free(path: Path, rank: int, world_size: int) -> bool:
    if not path.exists():
        return True
    if not path.is_dir():
        return False
    return next(path.iterdir(), None) is None or (world_size > 1 and _joins(path, rank))


def choose(path: Path, rank: int = 0, world_size: int = 1) -> Path:
    """Return `path`, or `<path>-2`, `-3`, ... where it already holds something: a finished recording is never overwritten.

    Raises OSError where no folder can be used.
    """
    for suffix in range(1, MAX_SUFFIX + 1):
        candidate = path if suffix == 1 else path.with_name(f"{path.name}-{suffix}")
        if _free(candidate, rank, world_size):
            return candidate
    raise FileExistsError(f"{path} and {path}-2 ... -{MAX_SUFFIX} already exist")


def create(path: Path, rank: int) -> None:
    """Make the folders of one rank's files. Raises OSError."""
    for folder in (path / "trace", *(path / name / f"rank{rank}" for name in _SEGMENTS.values())):
        folder.mkdir(parents=True, exist_ok=True)
