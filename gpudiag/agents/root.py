"""The one folder below which everything lies that an agent may name."""

from __future__ import annotations

import os
from pathlib import Path

from gpudiag.errors import InputError

MOST_ENTRIES = 20_000
"""Files and folders of a recording that are looked at for links; whoever has more names a folder further down."""


def confine_path(root: Path, given: str) -> str:
    """Return `given`, a path in the folder `root` or below it, relative to `root`, with its links resolved.

    `root` is resolved already. Raises InputError for what lies outside, or leads there by a link, for a URL, and for what is neither a
    file nor a folder.
    """
    if not given.strip() or "\0" in given or "://" in given:
        raise InputError(f"{given[:200]!r} is no path in the folder of this server", "give one as the tool recordings lists it")
    try:
        found = Path(root, given).resolve()
        inside = found.is_relative_to(root)  # said before anything is said of what is there
        if inside and not (found.is_file() or found.is_dir()):
            raise InputError(f"{given[:200]}: no such file or folder", "the tool recordings lists what is there")
    except (OSError, RuntimeError, ValueError):  # a name that is too long, a folder that may not be looked into, links in a circle
        raise InputError(f"{given[:200]}: cannot be looked at", "the tool recordings lists what is there") from None
    if not inside:
        raise InputError(f"{given[:200]} is outside of the folder of this server", "give a path in it, or start it with another folder")
    if found.is_dir():
        _check_links(root, found)
    return os.path.relpath(found, root)


def _check_links(root: Path, folder: Path) -> None:
    count = 0
    for place, folders, names in os.walk(folder):
        count += len(folders) + len(names)
        if count > MOST_ENTRIES:
            raise InputError(f"{os.path.relpath(folder, root)} holds more than {MOST_ENTRIES:,} files", "name a folder further down")
        for name in (*folders, *names):
            path = Path(place, name)
            if path.is_symlink() and not path.resolve().is_relative_to(root):
                raise InputError(f"{os.path.relpath(path, root)} is a link that leads out of the folder of this server", "take it away")
