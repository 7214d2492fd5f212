"""What lies behind an fsspec URL: one trace, or all that a pattern matches or a folder holds."""

from __future__ import annotations

from typing import Any, NamedTuple

from gpudiag.errors import InputError
from gpudiag.model.bundle import MANIFEST_NAME
from gpudiag.trace.folder import is_trace_name, traces_among
from gpudiag.trace.source import shown


class Remote(NamedTuple):
    """One file behind a URL. `size`: its bytes as stored, 0 where the file system does not tell."""

    url: str
    size: int


def listed(url: str) -> tuple[Remote, ...]:
    """Return the traces behind `url` by the numbers in their names: itself, what its pattern matches, or what is in its folder.

    Raises InputError where nothing is found, or where the file system fails.
    """
    if "::" in url or (is_trace_name(url) and not is_pattern(url)):
        return (Remote(url, 0),)
    try:
        system, sizes = _entries(url)
    except ImportError as error:
        raise InputError(f"{shown(url)} needs a package that is not installed: {error.name or error}") from None
    except Exception as error:  # noqa: BLE001 -- every file system has exceptions of its own
        raise InputError(f"{shown(url)} cannot be listed: {type(error).__name__}", "check the address and your access rights") from None
    if sizes is None:
        return (Remote(url, 0),)
    if not is_pattern(url) and any(name.rsplit("/", 1)[-1] == MANIFEST_NAME for name in sizes):
        where = f"read its traces: {shown(url).rstrip('/')}/trace"
        raise InputError(f"{shown(url)} is a bundle, which is read from a folder of this machine", where)
    names = traces_among(sizes)
    if not names:
        what = "no trace matches this pattern" if is_pattern(url) else "no trace in this folder"
        raise InputError(f"{shown(url)}: {what}", "give a URL of a .json, .json.gz or .json.zst trace, of a folder of such, or a pattern")
    return tuple(Remote(system.unstrip_protocol(name), sizes[name]) for name in names)


def is_pattern(url: str) -> bool:
    """Return whether `url` is a pattern: '*' anywhere; '?' and '[' belong to the queries of http."""
    return "*" in url or (not url.startswith(("http://", "https://")) and any(sign in url for sign in "?["))


def _entries(url: str) -> tuple[Any, dict[str, int] | None]:
    """Return the file system of `url` and the sizes of the files there; None: it is no folder."""
    from fsspec.core import url_to_fs  # type: ignore[import-untyped,unused-ignore]

    system, path = url_to_fs(url)
    if is_pattern(url):
        found = list(system.glob(path, detail=True).values())
    elif system.isdir(path):
        found = system.ls(path, detail=True)
    else:
        return system, None
    return system, {entry["name"]: int(entry.get("size") or 0) for entry in found if entry.get("type") != "directory"}
