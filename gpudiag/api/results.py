"""The results of experiments that a bundle holds (`experiments/<id>.json`), for its reports and facts."""

from __future__ import annotations

from pathlib import Path

import msgspec

from gpudiag.api.claims import together
from gpudiag.files import read_file
from gpudiag.model.decoding import UNREADABLE
from gpudiag.model.experiment import ExperimentData

FOLDER = "experiments"

MAX_BYTES = 256 << 20
"""Largest file of rows or result that is read: a thousand times what hours of experiments write."""

MAX_FILES = 1000
"""Newest results of a bundle that are read."""


def stored(bundle: Path) -> tuple[tuple[ExperimentData, ...], tuple[str, ...]]:
    """Return the results of a bundle in their order, and warnings about those that cannot be read.

    They are shown side by side: a claim stands among those of all runs (claims.together), whatever its own run made of it.
    """
    found: list[ExperimentData] = []
    warnings: list[str] = []
    for path in sorted((bundle / FOLDER).glob("*.json"), key=lambda path: path.stem)[-MAX_FILES:]:
        try:
            if path.is_symlink():
                raise OSError
            found.append(msgspec.json.decode(read_file(path, MAX_BYTES), type=ExperimentData))
        except (OSError, *UNREADABLE):
            warnings.append(f"{FOLDER}/{path.name} could not be read and is left out")
    return together(found), tuple(warnings)
