"""The commit of the training script, from git itself. Takes up to seconds: for a background thread, never for the training thread.

Of the repository nothing is kept but the commit and whether tracked files differ from it: no path, branch, remote or file name.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from gpudiag.model.program import Code

TIMEOUT_S = 5.0
"""How long git may take for each question: on network drives `git status` of a large repository may take longer than anyone waits."""

_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_OWN = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
"""Set while git runs a hook; they would name another repository."""

_QUIET = {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
"""git --help: writes nothing to the repository where it need not, asks nothing."""

_HARMLESS = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
"""No program that the repository's own configuration names is started."""


def script_folder() -> Path:
    """Return the folder of the script that runs; the current folder where there is no script (an interpreter, a notebook)."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(os.path.abspath(script)).parent if isinstance(script, str) else Path.cwd()


def code(folder: Path) -> Code | None:
    """Return commit and state of the repository that `folder` is in; None where there is none, or git does not answer."""
    git = shutil.which("git")
    if git is None:
        return None
    commit = _ask(git, folder, "rev-parse", "--verify", "HEAD")
    if commit is None or not _COMMIT.fullmatch(commit):
        return None
    changes = _ask(git, folder, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all")
    return Code(commit=commit, dirty=None if changes is None else bool(changes))


def _ask(git: str, folder: Path, *words: str) -> str | None:
    """Return what git prints; None where it fails or takes too long.

    The answer goes through a file and not a pipe, and the arguments let Python spawn without a pipe of its own (os.posix_spawn): a
    DataLoader worker that is forked meanwhile would inherit its end and keep it open.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _OWN} | _QUIET
    with tempfile.TemporaryFile() as answer:
        try:
            done = subprocess.run(  # noqa: S603 - fixed words
                [git, "-C", str(folder), *_HARMLESS, *words],
                stdin=subprocess.DEVNULL, stdout=answer, stderr=subprocess.DEVNULL,
                env=environment, timeout=TIMEOUT_S, close_fds=False, check=False,
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError):
            return None
        if done.returncode != 0:
            return None
        answer.seek(0)
        return answer.read(1 << 16).decode(errors="replace").strip()
