"""Keeps a program from changing its folder: an overlay in a mount namespace of its own, where the machine allows that."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from gpudiag.errors import InputError, nearest

MODES = ("auto", "overlay", "block", "off")

HELD_BACK = "checkpoints are held back; other files that the program writes are real ones"

_CHECK_S = 20.0
_SPECIAL = frozenset(",:\\\"'\n")
"""Characters that stand for something else in the options of an overlay mount (Documentation/filesystems/overlayfs.rst)."""

_SCRIPT = """
set -e
layer=$(mktemp -d "$2/layer.XXXXXX")
if [ "$3" = tmpfs ]; then mount -t tmpfs tmpfs "$layer"; fi
mkdir "$layer/upper" "$layer/work"
mount -t overlay overlay -o "lowerdir=$1,upperdir=$layer/upper,workdir=$layer/work$4" "$1"
cd "$1"
shift 4
exec "$@"
"""
"""Arguments: folder, scratch, kind of the upper layer, further options, command. Each start has a layer of its own: two overlays must not
share one. What is mounted is seen by the process and its children alone, and is gone with them."""

_WAYS = (
    (("-U", "-r", "-m"), "disk", ",userxattr"),
    (("-U", "-r", "-m"), "tmpfs", ",userxattr"),
    (("-m",), "disk", ""),
    (("-m",), "tmpfs", ""),
)
"""How it may work: in a user namespace (userxattr: Linux 5.11), or as root; with the layer on the disk, or in memory where that disk cannot
hold one (an overlay itself, as in a container)."""

_PROBE = ".gpudiag-sandbox-check"


def sandboxed(mode: str, command: tuple[str, ...], cwd: Path | None, scratch: Path) -> tuple[tuple[str, ...], Path | None, str]:
    """Return the command and working directory by which `command` runs without changing its folder, and a note on what is kept.

    `mode`: overlay (raises InputError where it does not work here), auto (overlay, else as block), block (only what saves checkpoints is
    held back: Design.block_saves), off. `scratch`: for what the program writes; its files are there afterwards, or were in memory.
    """
    if mode not in MODES:
        raise InputError(f"no sandbox is named {mode!r}{nearest(mode, MODES)}", f"one of {', '.join(MODES)}")
    if mode == "off":
        return command, cwd, ""
    if mode == "block":
        return command, cwd, HELD_BACK
    folder = (cwd or Path.cwd()).resolve()
    found = _way(folder, scratch)
    if isinstance(found, tuple):
        return (*found, *command), cwd, f"what the program writes to {folder} goes to a layer that is thrown away; elsewhere it is real"
    if mode == "overlay":
        raise InputError(f"no overlay of {folder} here: {found}", "--sandbox block holds checkpoints back")
    return command, cwd, f"{HELD_BACK} (no overlay here: {found})"


def _way(folder: Path, scratch: Path) -> tuple[str, ...] | str:
    """Return the command that runs what follows it in an overlay of `folder`; else why there is none."""
    why = _unsuitable(folder, scratch)
    if why is not None:
        return why
    said = "unshare is not installed"
    for flags, kind, options in _WAYS if shutil.which("unshare") else ():
        prefix = ("unshare", *flags, "sh", "-c", _SCRIPT, "gpudiag-sandbox", str(folder), str(scratch.resolve()), kind, options)
        said = _fault(prefix, folder)
        if not said:
            return prefix
    return said


def _unsuitable(folder: Path, scratch: Path) -> str | None:
    """Return why an overlay of `folder` would hide something that the program or the experiment needs; None: it would not."""
    if _SPECIAL & set(f"{folder}{scratch}"):
        return "its path has characters that a mount does not take"
    if any(place.resolve().is_relative_to(folder) for place in (scratch, Path(tempfile.gettempdir()))):
        return "the folder for temporary files lies in it"
    inside = [place for place in _mounts() if place != folder and place.is_relative_to(folder)]
    return f"another file system is mounted in it ({inside[0]})" if inside else None


def _mounts() -> list[Path]:
    """Return all mount points of this process (proc(5): the fifth field, with octal escapes)."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [Path(line.split()[4].encode().decode("unicode_escape")) for line in lines]


def _fault(prefix: tuple[str, ...], folder: Path) -> str:
    """Return what goes wrong with a command behind `prefix` that writes to `folder`; '' where it does as it should."""
    try:
        run = subprocess.run(  # noqa: S603 - our own command
            (*prefix, "sh", "-c", f": > {_PROBE} && test -e {_PROBE}"),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_CHECK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    leaked = folder / _PROBE
    if leaked.exists():
        leaked.unlink()
        return "what was written came through"
    lines = run.stderr.decode(errors="replace").strip().splitlines()
    return "" if run.returncode == 0 else (lines[-1] if lines else f"exit code {run.returncode}")


def kept(scratch: Path) -> tuple[str, ...]:
    """Return the files that sandboxed programs wrote into layers on the disk, relative to their folder."""
    layers = [layer / "upper" for layer in scratch.glob("layer.*")]
    found = {os.path.relpath(path, layer) for layer in layers for path in layer.rglob("*") if path.is_file() and path.name != _PROBE}
    return tuple(sorted(found))
