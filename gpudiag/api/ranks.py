"""Which ranks PATHS name, and where the recording of each lies: files, a pattern, a folder, bundles, fsspec URLs of such."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import msgspec

from gpudiag.api.remote import listed
from gpudiag.api.windows import common_window
from gpudiag.capture.folder import is_bundle, ranks_of
from gpudiag.errors import InputError, UsageError
from gpudiag.model.job import RANKS_UNTOLD
from gpudiag.model.report import Source
from gpudiag.trace.folder import rank_files, ranks_by_name, traces_among
from gpudiag.trace.peek import peek
from gpudiag.trace.source import shown

_AT_ONCE = 16
"""Headers read at a time: behind a URL each is a wait for the network."""

_NAMED = 16
"""Ranks or files that a sentence names one by one."""


class RankInput(msgspec.Struct, frozen=True):
    """Where the recording of one rank lies. Small, and told to the processes that read it."""

    rank: int
    path: str
    """A trace (absolute path, or URL), or the folder of a bundle."""
    bundle: bool = False
    window: int | None = None
    """Of a bundle; None: as api.windows.choose_window chooses."""
    size: int = 0
    """Bytes of the trace as stored; 0: not known."""

    @property
    def is_url(self) -> bool:
        """Return whether it is read through fsspec."""
        return "://" in self.path


class Recording(msgspec.Struct, frozen=True):
    """The ranks of one job."""

    source: Source
    ranks: tuple[RankInput, ...]
    """By rank."""
    unread: dict[int, str] = {}
    """Ranks of a bundle without the window that is read of the others, and why."""
    warnings: tuple[str, ...] = ()

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return all ranks, also those without a window."""
        return tuple(sorted((*(item.rank for item in self.ranks), *self.unread)))

    def others(self, rank: int) -> str:
        """Return 'ranks 0, 2' for a sentence: all but `rank`; '' where there is no other."""
        return listed_ranks([number for number in self.numbers if number != rank])

    def one(self, rank: int) -> RankInput:
        """Return where `rank` lies. Raises UsageError where there is none to choose, InputError where it is not there or cannot be read."""
        if self.source.kind == "trace":
            raise UsageError(f"{self.source.path}: --rank chooses from a folder or a bundle, this is one trace", "leave --rank out")
        found = next((item for item in self.ranks if item.rank == rank), None)
        if found is not None:
            return found
        if rank in self.unread:
            raise InputError(f"{self.source.path}: rank {rank}: {self.unread[rank]}", "choose another rank or window")
        raise InputError(f"{self.source.path}: no rank {rank}", f"it holds {listed_ranks(self.numbers)}")


def listed_ranks(ranks: Sequence[int]) -> str:
    """Return 'rank 3', 'ranks 0, 1', or the first 16 and how many more; '' for none."""
    if not ranks:
        return ""
    shown = ", ".join(map(str, ranks[:_NAMED]))
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def find_ranks(paths: Sequence[str], window: int | None = None) -> Recording:
    """Return the ranks that `paths` name; `window`: which of a bundle's windows, the same on all ranks (see api.windows).

    Raises InputError where nothing is there, UsageError for a window of what is no bundle.
    """
    for path in paths:
        _check_text(path)
    bundles = [path for path in paths if "://" not in path and os.path.isdir(path) and is_bundle(Path(path))]
    if window is not None and len(bundles) < len(paths):
        other = next(path for path in paths if path not in bundles)
        raise UsageError(f"{other}: --window chooses from a bundle, this is none", "leave --window out")
    traces = [one for path in paths if path not in bundles for one in _traces(path, alone=len(paths) == 1)]
    told, warnings = _numbered(traces)
    unread: dict[int, str] = {}
    for path in bundles:
        found, missing = _of_bundle(path, window)
        told.extend(found)
        unread.update(missing)
    ranks, twice = _once(told)
    left = {rank: why for rank, why in unread.items() if rank not in {item.rank for item in ranks}}
    every = tuple(sorted((*(item.rank for item in ranks), *left)))
    return Recording(_source(paths, bundles, ranks, every), ranks, left, (*warnings, *twice))


def _source(paths: Sequence[str], bundles: Sequence[str], ranks: tuple[RankInput, ...], numbers: tuple[int, ...]) -> Source:
    """Return what was given: one trace, or several ranks."""
    if len(paths) == 1 and not bundles and ranks[0].path in (paths[0], os.path.abspath(paths[0])):
        return Source(paths[0], "trace")
    name = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
    kind: Literal["bundle", "folder"] = "bundle" if len(bundles) == len(paths) else "folder"
    return Source(name, kind, numbers)


# -- what one path names ------------------------------------------------------------------------------------------------------


def _traces(path: str, *, alone: bool) -> list[RankInput]:
    """Return the traces that `path` names, each as rank 0. Raises InputError where there is none; the reader does for one file `alone`."""
    if "://" in path:
        return [RankInput(0, remote.url, size=remote.size) for remote in listed(path)]
    if os.path.isdir(path):
        return [_local(str(found)) for found in rank_files(Path(path)).values()]
    if os.path.exists(path) or not glob.has_magic(path):
        if not alone and not os.path.exists(path):
            raise InputError(f"{path} does not exist", "check the path")
        return [_local(path)]
    return [_local(found) for found in _matching(path)]


def _matching(pattern: str) -> list[str]:
    """Return the traces that a pattern matches. Raises InputError where there is none."""
    files = [path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)]
    found = traces_among(files) or sorted(files)
    if not found:
        raise InputError(f"{pattern}: does not exist, nor does it match as a pattern", "check the pattern, and quote it: 'run/*.json.gz'")
    return found


def _check_text(path: str) -> None:
    """Raise InputError for a name that is no text: reports, which are UTF-8, could not say what they are of."""
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError(f"{shown(path)}: this name is no valid UTF-8", "rename it, or give another path to it") from None


def _local(path: str) -> RankInput:
    _check_text(path)
    try:
        size = os.path.getsize(path)
    except (OSError, ValueError):
        size = 0  # the reader says what is wrong
    return RankInput(0, os.path.abspath(path), size=size)


def _of_bundle(path: str, window: int | None) -> tuple[list[RankInput], dict[int, str]]:
    """Return the ranks of a bundle that recorded the window which is read, and why others did not."""
    ranks = ranks_of(Path(path))
    if len(ranks) == 1:
        return [RankInput(ranks[0], os.path.abspath(path), bundle=True, window=window)], {}
    common = common_window(Path(path), ranks, window)
    found = [
        RankInput(rank, os.path.abspath(path), bundle=True, window=common.number, size=size) for rank, size in sorted(common.sizes.items())
    ]
    return found, common.unread


# -- which rank it is ---------------------------------------------------------------------------------------------------------


def _numbered(traces: list[RankInput]) -> tuple[list[RankInput], tuple[str, ...]]:
    """Return the traces with their ranks: by their names, or by what they say of themselves where the names do not tell; and warnings."""
    if len(traces) < 2:
        told, _ = ranks_by_name([one.path.rsplit("/", 1)[-1] for one in traces])
        return [msgspec.structs.replace(one, rank=rank or 0) for one, rank in zip(traces, told, strict=True)], ()
    names = _short([one.path for one in traces])
    told, in_words = ranks_by_name(names)
    if not (in_words and len(set(told)) == len(told)):
        own = _own_ranks(traces)
        if None not in own and (len(set(own)) == len(own) or not in_words):
            told = own
    if set(told) == {None}:
        numbered = [msgspec.structs.replace(one, rank=place) for place, one in enumerate(traces)]
        return numbered, (f"{RANKS_UNTOLD}: they are numbered in the order of their names",)
    strays = [name for name, rank in zip(names, told, strict=True) if rank is None]
    numbered = [msgspec.structs.replace(one, rank=rank) for one, rank in zip(traces, told, strict=True) if rank is not None]
    return numbered, ((f"left out, their names tell no rank: {_listed(strays)}",) if strays else ())


def _short(paths: list[str]) -> list[str]:
    """Return `paths` without the folders that all of them lie in, with '/' on every system."""
    plain = [path.replace(os.sep, "/") for path in paths]
    start = os.path.commonprefix(plain).rfind("/") + 1  # noqa: RUF071 -- URLs too, and up to the last '/' alone
    return [path[start:] for path in plain]


def _own_ranks(traces: list[RankInput]) -> tuple[int | None, ...]:
    """Return the rank that each trace says that it is of (distributedInfo of its header); None where it does not say."""
    with ThreadPoolExecutor(_AT_ONCE, "gpudiag-peek") as pool:
        return tuple(header.rank for header in pool.map(lambda one: peek(one.path), traces))


def _once(told: Iterable[RankInput]) -> tuple[tuple[RankInput, ...], tuple[str, ...]]:
    """Return one recording of each rank, the first of its names, and warnings about the others."""
    ranks: dict[int, RankInput] = {}
    twice: list[tuple[RankInput, RankInput]] = []
    for one in told:
        kept = ranks.setdefault(one.rank, one)
        if kept is not one:
            twice.append((kept, one))
    return tuple(ranks[rank] for rank in sorted(ranks)), _said_twice(twice)


def _said_twice(twice: list[tuple[RankInput, RankInput]]) -> tuple[str, ...]:
    if not twice:
        return ()
    names = _short([path for pair in twice for path in (pair[0].path, pair[1].path)])
    said = [f"{names[2 * place]} is read, {names[2 * place + 1]} is not" for place in range(len(twice))]
    ranks = listed_ranks(sorted({one.rank for _, one in twice}))
    return (f"{ranks} {'is' if ranks.startswith('rank ') else 'are'} there more than once: {_listed(said)}",)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
