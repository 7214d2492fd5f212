"""Files that a command reads and writes, checked before the work starts."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path

from gpudiag.errors import InputError, UsageError

SUFFIXES = (".html", ".md", ".json")


def check_named(what: str, paths: Sequence[str], hint: str) -> None:
    """Raise InputError where one of `paths` is empty: a variable that was not set. The folder that one stands in is '.'."""
    if not all(path.strip() for path in paths):
        raise InputError(f"{what} is empty", hint)


def check_there(paths: Sequence[str], hint: str) -> None:
    """Raise InputError where one of `paths` does not exist."""
    for path in paths:
        if not os.path.exists(path):
            raise InputError(f"{path}: no such file or folder", hint)


def check_captures(paths: Sequence[str]) -> None:
    """Raise InputError where a path given as --graph-capture is empty or does not exist."""
    check_named("--graph-capture", paths, "give a trace, or a folder of such")
    check_there(paths, "--graph-capture names a trace, or a folder of such")


def matched(paths: Sequence[str]) -> list[str]:
    """Return `paths`, with the files that patterns among them match."""
    return [*paths, *(found for path in paths if glob.has_magic(path) and "://" not in path for found in glob.glob(path, recursive=True))]


def check_targets(targets: Sequence[Path], source: str, suffixes: Sequence[str] = SUFFIXES) -> None:
    """Raise UsageError or InputError where a target has no known suffix, no folder, or would overwrite what is read."""
    for target in targets:
        try:
            _check(target, source, suffixes)
        except OSError as error:  # a name that is too long, a folder that may not be looked into
            raise InputError(f"cannot write {target}: {error.strerror}", "choose another place") from None


def _check(target: Path, source: str, suffixes: Sequence[str]) -> None:
    if target.suffix.lower() not in suffixes:
        raise UsageError(
            f"cannot write {target}: the format is not known by its suffix",
            f"use {'one of ' if len(suffixes) > 1 else ''}{', '.join(suffixes)}",
        )
    if not target.parent.is_dir():
        raise InputError(f"cannot write {target}: there is no folder {target.parent}", "make it first")
    if target.is_dir():
        raise InputError(f"cannot write {target}: it is a folder", "name a file")
    if _is_input(target, Path(source)):
        raise UsageError(f"will not overwrite {target}: it is part of what is read", "choose another name")


def _is_input(target: Path, source: Path) -> bool:
    """Return whether `target` is the source file, or a file in the source folder that is no report."""
    if not os.path.exists(source) or not target.exists():
        return False
    if source.is_dir():
        return source.resolve() in target.resolve().parents and target.stem != "report"
    return target.samefile(source)
