"""Keeps what multiprocessing leaves behind in the folder of the arm: loader workers are killed at the end of a trial."""

from __future__ import annotations

import os
from contextlib import suppress

FOLDER = "mp"

LONGEST = 80
"""Characters of the folder: an address of a socket has 107 (unix(7)), and multiprocessing adds 'listener-' and a random name."""


def sockets_below(folder: str) -> None:
    """Have this process and its children make the sockets of multiprocessing below `folder`, where that name is short enough.

    A worker makes a folder 'pymp-...' among the temporary files of the user else, and removes it only when it ends by itself.
    """
    from multiprocessing import process

    target = os.path.join(folder, FOLDER)
    if len(target) > LONGEST:
        return
    with suppress(OSError, AttributeError):  # a full disk, or another Python: they lie where they ever did
        os.makedirs(target, exist_ok=True)
        process.current_process()._config.setdefault("tempdir", target)  # type: ignore[attr-defined]  # as multiprocessing.util reads it
