"""A report in Nsight Systems' own format, which is not documented: exported by `nsys` of this machine into gpudiag's cache folder.

`nsys` is run as its user would run it, with a time limit. It reads the formats of its own and of older versions.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from gpudiag.document_cache import find_cache_folder
from gpudiag.errors import InputError
from gpudiag.trace.decompression import format_path

REPORT_NAMES = (".nsys-rep", ".qdrep")
"""Endings of reports (.qdrep before 2021.4)."""

TIME_LIMIT_S = 600
KEPT_EXPORTS = 4
"""Exports of other reports that stay in the cache folder, the newest first: they are larger than the reports."""


def export_report(path: str) -> Path:
    """Return the SQLite export of the report at `path`: a kept one of the same file, else a new one.

    Raises InputError where there is no `nsys`, no such file, or the export fails.
    """
    name = format_path(path)
    by_hand = f"export it: nsys export --type sqlite {name}"
    program, folder = shutil.which("nsys"), find_cache_folder()
    if program is None or folder is None or "://" in path:
        raise InputError(f"{name} is a report in Nsight Systems' own format", by_hand)
    try:
        about = os.stat(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{name} cannot be read ({getattr(error, 'strerror', error)})", "check the path and its permissions") from error
    key = f"{os.path.realpath(path)}\0{about.st_size}\0{about.st_mtime_ns}".encode(errors="surrogateescape")
    exports = folder / "nsys"
    target = exports / f"{hashlib.blake2b(key, digest_size=16).hexdigest()}.sqlite"
    if not target.is_file():
        try:
            exports.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryDirectory(dir=exports) as made:
                export = Path(made) / "export.sqlite"
                # a list of arguments, no shell; the path is absolute, so that none is taken for an option
                command = [program, "export", "--type", "sqlite", "--output", str(export), os.path.abspath(path)]
                done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIME_LIMIT_S, check=False)  # noqa: S603
                if done.returncode or not export.is_file():
                    lines = (done.stderr or done.stdout).decode("utf-8", "replace").splitlines()
                    shown = ("".join(filter(str.isprintable, line))[:200] for line in reversed(lines) if line.strip())
                    told = next(shown, f"code {done.returncode}")
                    newer = f"with the version that recorded it, or a newer one, {by_hand}"
                    raise InputError(f"{name}: nsys cannot export it: {told}", newer)
                os.replace(export, target)
        except subprocess.TimeoutExpired:
            raise InputError(f"{name}: nsys did not export it within {TIME_LIMIT_S // 60} minutes", by_hand) from None
        except OSError as error:
            raise InputError(f"{name} cannot be exported into {exports} ({error.strerror})", by_hand) from error
        kept = sorted(exports.glob("*.sqlite"), key=lambda export: export.stat().st_mtime_ns)
        for old in kept[: -KEPT_EXPORTS - 1]:
            with suppress(OSError):
                old.unlink()
    return target
