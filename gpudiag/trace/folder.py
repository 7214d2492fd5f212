"""A folder of traces, one a rank: which file belongs to which rank."""

from __future__ import annotations

import re
from pathlib import Path

from gpudiag.errors import InputError

_TRACE = re.compile(r"\.json(\.gz|\.zst)?$", re.IGNORECASE)
_RANK = (re.compile(r"rank[-_ ]?(\d{1,9})", re.IGNORECASE), re.compile(r"worker[-_ ]?(\d{1,9})", re.IGNORECASE), re.compile(r"(\d{1,9})"))


def rank_files(folder: Path) -> dict[int, Path]:
    """Return the trace files of `folder` by rank: the number after 'rank' or 'worker' in the name, else the order of the names.

    Raises InputError where the folder cannot be read or holds no trace.
    """
    try:
        files = sorted(path for path in folder.iterdir() if path.is_file() and _TRACE.search(path.name))
    except OSError as error:
        raise InputError(f"{folder}: cannot be read ({error.strerror})", "check the path and its permissions") from error
    if not files:
        raise InputError(f"{folder}: no trace in this folder", "give a .json, .json.gz or .json.zst trace, or a bundle of gpudiag.profile")
    for pattern in _RANK:
        found = [pattern.search(path.name) for path in files]
        ranks = [int(match.group(1)) for match in found if match]
        if len(set(ranks)) == len(files):
            return dict(sorted(zip(ranks, files, strict=True)))
    return dict(enumerate(files))
