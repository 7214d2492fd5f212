"""The change of a fix as a diff of the recorded script, where that is still here and the place of the change is certain."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from gpudiag_dashboard.library import Library, RecentCache

from gpudiag.errors import GpudiagError
from gpudiag.model.experiment import FixCall
from gpudiag.recordings.code_lines import find_program_file
from gpudiag.recordings.recorded_command import find_recorded_words
from gpudiag.report.experiment.patch import build_diff, describe_place

MOST_LINES = 60
"""A longer diff is no change that is read on a card."""

NOT_RUN = "Not run yet: gpudiag ab --patch measures a patched copy before it offers it."
_made: RecentCache[tuple[str, str]] = RecentCache(64)
_turn = threading.Lock()


def find_recorded_script(library: Library, name: str) -> Path | None:
    """Return the script that a bundle was recorded from, where it is still that file; None else, and for other recordings."""
    try:
        if library.entry(name).kind != "bundle":
            return None
        manifest = library.growing(name).read().manifest
        script = next((word for word in find_recorded_words(manifest) if word.endswith(".py")), "")
    except GpudiagError:
        return None
    return find_program_file(script, library.path(name), manifest) if script else None


def build_fix_diff(script: Path, fix: str) -> tuple[str, str]:
    """Return the diff of `script` that makes `fix`, and what to know of it; ('', why) where its place is not certain."""
    try:
        stamp = script.stat()
    except OSError:
        return "", ""
    with _turn:  # libcst is slow, and a page asks for several
        return _made.get((str(script), stamp.st_mtime_ns, stamp.st_size, fix), lambda: _build(str(script), fix))


def _build(path: str, fix: str) -> tuple[str, str]:
    try:
        from gpudiag.experiment.patch import build_patch

        patch = build_patch(path, [FixCall(fix)])
    except (GpudiagError, ImportError):  # no Python that can be read, a fix that a person has to make; libcst is not installed
        return "", ""
    if patch.left:
        return "", f"No diff: {describe_place(patch.left[0], Path(path).name)}."
    beside = os.path.relpath(path).startswith(os.pardir)  # then its name alone: it is applied in its own folder
    diff = build_diff(os.path.basename(path) if beside else path, patch.before, patch.after)
    return (diff, NOT_RUN) if 0 < len(diff.splitlines()) <= MOST_LINES else ("", "")
