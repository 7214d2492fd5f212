"""The commit of the training script, from git itself. Takes up to seconds: for a background thread, never for the training thread.

Of the repository nothing is kept but the commit and whether tracked files differ from it: no path, branch, remote or file name.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gpudiag.model.bundle import Code

TIMEOUT_S = 5.0
"""How long git may take for each question: on network drives `git status` of a large repository may take longer than anyone waits."""

_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_OWN = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
"""Set while git runs a hook; they would name another repository."""

_QUIET = {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "GIT_NO_LAZY_FETCH": "1", "LC_ALL": "C"}
"""git --help: writes nothing to the repository where it need not, asks nobody, fetches nothing."""

_HARMLESS = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
"""No hook or monitor that the repository's own configuration names is started; _find_changes() does the same for its filters."""

_FILTERS = ("config", "--name-only", "--get-regexp", r"^filter\..*\.(clean|process)$")
_STATUS = ("status", "--porcelain", "-z", "--no-renames", "--untracked-files=no", "--ignore-submodules=all")

MAX_FILTERS = 16
"""Filters that are switched off one by one; with more (Git LFS is one) the changes are unknown."""

MAX_CHANGED = 64
"""Changed files that are asked about."""

MAX_ANSWER = 1 << 16
"""Bytes kept of an answer."""

_PAUSE_S = 0.005
"""Between two looks at a git that has not finished."""


def find_script() -> Path | None:
    """Return the script that runs; None where there is none (an interpreter, a notebook)."""
    found = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(os.path.abspath(found)) if isinstance(found, str) else None


def read_code(folder: Path, file: Path | None = None) -> Code | None:
    """Return commit and state of the repository that `folder` is in, and whether it tracks `file`; None where git does not answer."""
    git = shutil.which("git")
    commit = None if git is None else _ask_git(git, folder, "rev-parse", "--verify", "HEAD")
    if git is None or commit is None or not _COMMIT.fullmatch(commit):
        return None
    dirty = _find_changes(git, folder)
    if file is None:
        return Code(commit=commit, dirty=dirty, script_tracked=None)
    tracked = _ask_git(git, folder, "--literal-pathspecs", "ls-files", "--", str(file), accepted=(0, 128))  # 128: outside the repository
    return Code(commit=commit, dirty=dirty, script_tracked=None if tracked is None else bool(tracked))


def _find_changes(git: str, folder: Path) -> bool | None:
    """Return whether tracked files differ from the commit; None where git does not say, or only a filter of the repository could.

    A filter is a program that the configuration names, and `git status` runs it on files whose time has changed: all are switched off. An
    empty command is none (git's convert.c), and a filter that is not required may be missing.
    """
    filters = _ask_git(git, folder, *_FILTERS, accepted=(0, 1))  # 1: there are none
    drivers = {key.rpartition(".")[0] for key in (filters or "").splitlines()}
    if filters is None or len(drivers) > MAX_FILTERS or any("=" in driver for driver in drivers):
        return None
    without = [part for driver in sorted(drivers) for key in ("clean=", "process=", "required=false") for part in ("-c", f"{driver}.{key}")]
    changes = _ask_git(git, folder, *without, *_STATUS)
    if not changes or not without:
        return None if changes is None else bool(changes)
    # Without its filter a file that was only touched differs too, so one of the changed files must have none. An entry is 'XY path' with a
    # 0 byte behind it; X is not blank for what was changed in the index, which holds filtered content.
    entries = changes.rstrip("\0").split("\0")[:MAX_CHANGED]
    if any(not entry.startswith(" ") for entry in entries):
        return True
    top = _ask_git(git, folder, "rev-parse", "--show-toplevel")  # the paths are relative to it
    attributes = top and _ask_git(git, Path(top), "check-attr", "-z", "filter", "--", *(entry[3:] for entry in entries))
    return True if attributes and {"unspecified", "unset"} & set(attributes.split("\0")[2::3]) else None


def _ask_git(git: str, folder: Path, *words: str, accepted: Sequence[int] = (0,)) -> str | None:
    """Return what git prints; None where it ends in another way than `accepted`, or takes too long and has to be ended.

    No lock of Python's is held meanwhile (tempfile and imports have such): a DataLoader worker that is forked in that moment would find it
    locked for ever. Nor does anything wait for the end of a pipe, of which such a worker may hold a copy: the answer is read as it comes,
    until git has ended. With these arguments Python spawns without a pipe of its own (os.posix_spawn).
    """
    environment = {name: value for name, value in os.environ.items() if name not in _OWN} | _QUIET
    answer, end = os.pipe()
    try:
        os.set_blocking(answer, False)
        try:
            process = subprocess.Popen(  # noqa: S603 - fixed words
                [git, "-C", str(folder), *_HARMLESS, *words],
                stdin=subprocess.DEVNULL, stdout=end, stderr=subprocess.DEVNULL, env=environment, close_fds=False,
            )  # fmt: skip
        except OSError:
            return None
        finally:
            os.close(end)
        deadline, found = time.monotonic() + TIMEOUT_S, bytearray()
        while process.poll() is None:
            _drain_pipe(answer, found)
            if time.monotonic() > deadline:
                process.kill()
                process.wait()
                return None
            time.sleep(_PAUSE_S)
        _drain_pipe(answer, found)
        return found.decode(errors="surrogateescape").strip("\r\n") if process.returncode in accepted else None
    finally:
        os.close(answer)


def _drain_pipe(answer: int, found: bytearray) -> None:
    for _ in range(16):
        try:
            data = os.read(answer, MAX_ANSWER)
        except BlockingIOError:
            return
        if not data:
            return
        found += data[: MAX_ANSWER - len(found)]
