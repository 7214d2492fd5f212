"""Errors that reach the user: what happened, where, and what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GpudiagError(Exception):
    """A failure that is shown as one line; `hint` says what to do, `exit_code` is the command's code."""

    exit_code = 3

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        """Return the one line that is shown: the message, then the hint."""
        return f"{self.message} ({self.hint})" if self.hint else self.message


class InputError(GpudiagError):
    """A file, folder or value that was given cannot be used (exit code 2)."""

    exit_code = 2


class UsageError(GpudiagError):
    """A function or command was called in a way that it does not support (exit code 2)."""

    exit_code = 2


class MissingDependencyError(GpudiagError):
    """An optional library is not installed; the hint names the extra that brings it (exit code 2)."""

    exit_code = 2


def nearest(name: str, known: Iterable[str]) -> str:
    """Return '; did you mean ...?' with the most similar known name, '' where none is similar."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""
