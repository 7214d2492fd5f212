"""What stands where in a bundle: the names of its files, its ranks and its traces, found by listing the folder."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import msgspec

from gpudiag.errors import InputError
from gpudiag.files import read_file
from gpudiag.model.bundle import MANIFEST_NAME, UNREADABLE, RankState

SEGMENT_FOLDERS = {"step_records": "steps", "host_marks": "marks", "telemetry": "telemetry"}
"""The folders of the tables; in them, one for each rank (rank0) with its segments (000000.json)."""

EXPERIMENTS_FOLDER = "experiments"
"""The folder of what `gpudiag ab` measured: in a bundle, or in a folder of its own."""

REPORT_NAME = "report.json"
"""The report that `gpudiag run` puts into a bundle."""

SITES_INDEX = 1
"""Index of the site window, kept free where there is none: a bundle of a killed run tells its windows apart by their indices."""

MAX_MANIFEST_BYTES = 16 << 20
"""A manifest is a few kB; more than this is no manifest."""

MANIFEST_PATTERN = re.compile(r"manifest(?:-rank(\d{1,9}))?\.json")

_TRACE = re.compile(r"rank(\d{1,9})-w(\d{1,9})\.json\.gz")


class _FinishedFlag(msgspec.Struct):
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


def compile_log_name(rank: int) -> str:
    """Return the path of what torch.compile did on a rank, relative to the bundle."""
    return f"inductor/rank{rank}-compilations.json"


def owners_name(rank: int) -> str:
    """Return the path of a rank's owners, relative to the bundle."""
    return f"memory/rank{rank}-owners.json"


def snapshot_name(rank: int) -> str:
    """Return the path of a rank's snapshot of the CUDA allocator, relative to the bundle."""
    return f"memory/rank{rank}.pickle"


def list_ranks(path: Path) -> tuple[int, ...]:
    """Return the ranks that have a manifest in the folder `path`. Raises OSError."""
    names = (MANIFEST_PATTERN.fullmatch(entry.name) for entry in path.iterdir() if entry.is_file())
    return tuple(sorted(int(match.group(1) or 0) for match in names if match))


def list_manifests(path: Path) -> list[Path]:
    """Return the manifests in the folder `path`, by name. Raises OSError."""
    return sorted(entry for entry in path.iterdir() if MANIFEST_PATTERN.fullmatch(entry.name))


def is_bundle(path: Path) -> bool:
    """Return whether `path` is a folder with a bundle's manifest (of any rank)."""
    try:
        return path.is_dir() and bool(list_ranks(path))
    except OSError:
        return False


def list_other_ranks(path: Path, rank: int) -> tuple[RankState, ...]:
    """Return the ranks that record or recorded beside `rank`, and whether their manifests are finished."""
    others = []
    for entry in path.iterdir():
        match = MANIFEST_PATTERN.fullmatch(entry.name)
        other = int(match.group(1) or 0) if match else rank
        if other != rank:
            finished = False
            with suppress(OSError, *UNREADABLE):
                finished = msgspec.json.decode(read_file(entry, MAX_MANIFEST_BYTES), type=_FinishedFlag).finished
            others.append(RankState(other, finished))
    return tuple(sorted(others, key=lambda state: state.rank))


def list_traces(path: Path) -> dict[tuple[int, int], Path]:
    """Return the trace files of the bundle at `path` by rank and window, found by listing its folder."""
    found = {}
    try:
        entries = sorted((path / "trace").iterdir())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InputError(f"{path / 'trace'}: cannot be read ({error.strerror})", "check the path and its permissions") from None
    for entry in entries:
        match = _TRACE.fullmatch(entry.name)
        if match and entry.is_file() and not entry.is_symlink():
            found[int(match.group(1)), int(match.group(2))] = entry
    return found
