"""Errors and warnings that reach the user: what happened, where, and what to do next."""

from __future__ import annotations

import difflib
import logging
import os
import re
import warnings
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice

_MOST_BESIDE = 5_000
"""Names of a folder that are looked at for one that was meant."""


class GpudiagError(Exception):
    """A failure that is shown as one line; `hint` says what to do, `exit_code` is the command's code."""

    exit_code = 3

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        """Return the one line that is shown: the message, then the hint; a value that is quoted may hold line ends."""
        return " ".join((f"{self.message} ({self.hint})" if self.hint else self.message).splitlines())


class InputError(GpudiagError):
    """A file, folder or value that was given cannot be used (exit code 2)."""

    exit_code = 2


class UsageError(GpudiagError):
    """A function or command was called in a way that it does not support (exit code 2)."""

    exit_code = 2


class MissingDependencyError(GpudiagError):
    """An optional library is not installed; the hint names the extra that brings it (exit code 2)."""

    exit_code = 2


def suggest_nearest(name: str, known: Iterable[str]) -> str:
    """Return '; did you mean ...?' with the known name that is most similar, or shares a word with it; '' where there is none."""
    names = {one.lower(): one for one in known}
    # 'num_workers' and 'loader-workers' share a word
    words = {one: set(re.findall("[a-z]{4,}", one)) for one in (name.lower(), *names)}
    sharing = [one for one in names if words[one] & words[name.lower()]]
    close = difflib.get_close_matches(name.lower(), names, n=5, cutoff=0.6) or difflib.get_close_matches(
        name.lower(), sharing, n=1, cutoff=0
    )
    # of those as similar the first by name: OVH-1 is OVH-01 rather than OVH-11
    close.sort(key=lambda one: (-difflib.SequenceMatcher(None, one, name.lower()).ratio(), one))
    return f"; did you mean {names[close[0]]!r}?" if close else ""


def suggest_file(path: str, suffixes: tuple[str, ...] = ("",)) -> str:
    """Return '; did you mean ...?' with the name most like that of `path` in its folder, of those that end so; '' where there is none."""
    folder, name = os.path.split(path)
    try:
        with os.scandir(folder or os.curdir) as entries:
            beside = [entry.name for entry in islice(entries, _MOST_BESIDE) if entry.name.lower().endswith(suffixes)]
    except (OSError, ValueError):  # no such folder, or a name with a null byte
        return ""
    near = difflib.get_close_matches(name, beside, n=1, cutoff=0.7)
    return f"; did you mean {os.path.join(folder, near[0])!r}?" if near else ""


def warn_user(text: str, stacklevel: int) -> None:
    """Return None; `text` is a RuntimeWarning at the line `stacklevel` frames up (1: that of the caller). Raises nothing.

    Under -W error, where a warning would stop the training, it is logged; where neither can be shown (a closed stderr, a showwarning of
    the program's own that fails), it is lost.
    """
    with suppress(Exception):
        try:
            warnings.warn(text, RuntimeWarning, stacklevel=stacklevel + 1)
        except Warning:
            logging.getLogger("gpudiag").warning(text)
