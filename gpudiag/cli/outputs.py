"""Files that a command writes: named by suffix, checked before the work starts, written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gpudiag.errors import InputError, UsageError

SUFFIXES = (".html", ".md", ".json")


def check_targets(targets: Sequence[Path], source: str) -> None:
    """Raise UsageError or InputError where a target has no known suffix, no folder, or would overwrite what is read."""
    for target in targets:
        try:
            _check(target, source)
        except OSError as error:  # a name that is too long, a folder that may not be looked into
            raise InputError(f"cannot write {target}: {error.strerror}", "choose another place") from None


def _check(target: Path, source: str) -> None:
    if target.suffix.lower() not in SUFFIXES:
        raise UsageError(f"cannot write {target}: the format is not known by its suffix", f"use one of {', '.join(SUFFIXES)}")
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


def write(target: Path, data: bytes) -> None:
    """Write `data` to `target` by a temporary file beside it and a rename. Raises InputError where that fails."""
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:60]}.")
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror or error}", "choose another place") from error
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(target)
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror or error}", "choose another place") from error
    finally:
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    """Return the process's file mode mask (it can only be read by setting it); mkstemp makes files for the owner alone."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
