"""Which recordings the given paths name: ranks of a job, windows of a bundle, files behind fsspec URLs."""

from __future__ import annotations

import glob
import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from gpudiag.bundle.layout import SITES_INDEX, is_bundle, list_ranks, list_traces, manifest_name
from gpudiag.bundle.manifest import read_manifest
from gpudiag.bundle.reader import OpenedBundle
from gpudiag.errors import InputError, UsageError, suggest_file
from gpudiag.model.bundle import MANIFEST_NAME, Window
from gpudiag.model.notices import Notice, NoticeCode, format_notice, make_notice
from gpudiag.model.report import Source
from gpudiag.report.whole_run import list_history
from gpudiag.timeline.history import build_history
from gpudiag.trace.decompression import format_path
from gpudiag.trace.trace_files import filter_traces, find_rank_files, is_trace_name, parse_ranks, peek_header


class RemoteFile(NamedTuple):
    """One file behind a URL. `size`: its bytes as stored, 0 where the file system does not tell."""

    url: str
    size: int


def list_remote_traces(url: str) -> tuple[RemoteFile, ...]:
    """List the traces behind `url` by the numbers in their names: itself, what its pattern matches, or what is in its folder.

    Raises InputError where nothing is found, or where the file system fails.
    """
    pattern = is_url_pattern(url)
    if "::" in url or (is_trace_name(url) and not pattern):
        return (RemoteFile(url, 0),)
    try:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped,unused-ignore]

        system, path = url_to_fs(url)
        if not pattern and not system.isdir(path):
            return (RemoteFile(url, 0),)
        entries = list(system.glob(path, detail=True).values()) if pattern else system.ls(path, detail=True)
        sizes = {entry["name"]: int(entry.get("size") or 0) for entry in entries if entry.get("type") != "directory"}
    except ImportError as error:
        raise InputError(f"{format_path(url)} needs a package that is not installed: {error.name or error}") from None
    except Exception as error:  # noqa: BLE001 -- every file system has exceptions of its own
        raise InputError(
            f"{format_path(url)} cannot be listed: {type(error).__name__}", "check the address and your access rights"
        ) from None
    if not pattern and any(name.rsplit("/", 1)[-1] == MANIFEST_NAME for name in sizes):
        where = f"read its traces: {format_path(url).rstrip('/')}/trace"
        raise InputError(f"{format_path(url)} is a bundle, which is read from a folder of this machine", where)
    names = filter_traces(sizes)
    if not names:
        what = "no trace matches this pattern" if pattern else "no trace in this folder"
        hint = "give a URL of a .json, .json.gz or .json.zst trace, of a folder of such, or a pattern"
        raise InputError(f"{format_path(url)}: {what}", hint)
    return tuple(RemoteFile(system.unstrip_protocol(name), sizes[name]) for name in names)


def is_url_pattern(url: str) -> bool:
    """Return whether `url` is a pattern: '*' anywhere; '?' and '[' belong to the queries of http."""
    return "*" in url or (not url.startswith(("http://", "https://")) and any(sign in url for sign in "?["))


_SIGNS = (
    (NoticeCode.RECORDING_SWITCHED_OFF, "mend that and record again"),
    (NoticeCode.PART_SWITCHED_OFF, "mend that and record again"),
    (NoticeCode.OTHER_PROFILER, "leave out the other profiler, or record at steps where it does not run: at_steps="),
    (NoticeCode.RECORDING_UNFINISHED, "let the run reach its profiled steps: lower skip=, or wait"),
    (NoticeCode.LOOP_ENDED_BY_ERROR, "the loop was left before the profiled steps: lower skip="),
    (NoticeCode.WINDOW_SHORT, "record more steps, about 20 and better 50, or lower skip= and record="),
    (NoticeCode.RUN_ENDED_EARLY, "record more steps, or ask for earlier ones"),
    (NoticeCode.WINDOWS_NOT_BEGUN, "the loop ended before the profiled steps: record more steps, or lower skip="),
)
"""What a session notes when a window is not recorded, the causes before what follows from them; and what to do."""


def choose_window(bundle: OpenedBundle, asked: int | None) -> Window | None:
    """Choose the window to analyse: the one `asked` for, the first complete timing window, or the site window; None where there is none.

    Raises InputError where the bundle does not hold the window that was asked for.
    """
    windows = bundle.recorded()
    if asked is None:
        return bundle.timing_window() or next(iter(windows.values()), None)
    if asked not in windows:
        held = f"it holds window{'s' if len(windows) > 1 else ''} {', '.join(map(str, windows))}" if windows else "it holds no window"
        raise InputError(f"{bundle.path}: no window {asked} in this bundle", held)
    return windows[asked]


def build_no_window_error(path: str, bundle: OpenedBundle) -> InputError:
    """Build the error about a bundle without any window: why there is none, what to do, and what its records say of the run."""
    found = build_history(bundle.step_records, bundle.host_marks)
    known = "".join(f" {text}" for text in list_history(found)[:2]) if found else ""
    why, hint = "none was planned, and nothing asked for one", "record with repeat=1 or more, or ask for windows by at_steps="
    for code, advice in _SIGNS:
        said = [format_notice(notice) for notice in bundle.notices if notice.code == code]
        if said:
            why, hint = "; ".join(said), advice
            if code == NoticeCode.WINDOW_SHORT:  # the first window says it all, and the pace of a few steps tells nothing
                why, known = said[0], ""
            break
    count = max(bundle.manifest.steps, found.steps if found else 0)  # the manifest of a killed run has not been written again
    seen = f"{count} steps" if count else "no whole step was seen"
    return InputError(f"{path}: no window was recorded in this bundle ({seen}): {why}{'.' if known else ''}{known}", hint)


def _describe_window(window: Window) -> str:
    last, trigger, steps = window.first_step + window.steps - 1, window.trigger, "steps not known"
    if window.steps:
        steps = f"step {last}" if window.steps == 1 else f"steps {window.first_step} to {last}"
    if trigger.startswith("step time"):
        why = f"because {trigger}"
    elif trigger.startswith("step "):
        why = f"asked for at {trigger}"
    else:
        why = {"schedule": "on schedule", "": ""}.get(trigger, f"on {trigger}" if trigger.startswith("signal") else trigger)
    return f"{steps}, {why}" if why else steps


def describe_other_windows(bundle: OpenedBundle, chosen: Window) -> list[Notice]:
    """Describe what to say where a bundle has several timing windows: which is analysed, and how to see the others."""
    timing = [window for window in bundle.recorded().values() if window.kind == "timing"]
    if len(timing) < 2 and chosen in timing:
        return []
    others = [f"--window {window.index}: {_describe_window(window)}" for window in timing if window != chosen]
    if not others:
        return []
    count = f"{len(timing)} timing window{'s' if len(timing) > 1 else ''}"
    name = "window" if chosen.kind == "timing" else "site window"
    text = f"{count}: {name} {chosen.index} ({_describe_window(chosen)}) is analysed; {'; '.join(others)}"
    return [make_notice(NoticeCode.OTHER_WINDOWS, text=text)]


def _find_bundle_ranks(folder: str, asked: int | None) -> tuple[list[RankInput], dict[int, str]]:
    """Find the ranks of a bundle with the window to read, the same one of all: messages of different windows are not of each other.

    It is the one `asked` for, else the first timing window that is complete on most ranks, else the one that most have recorded.
    Also returns why it cannot be read of the others. Raises InputError where no rank has recorded the window that was asked for.
    """
    path, place = Path(folder), os.path.abspath(folder)
    ranks = list_ranks(path)
    if len(ranks) == 1:
        return [RankInput(ranks[0], place, bundle=True, window=asked)], {}
    unread: dict[int, str] = {}
    recorded: dict[int, dict[int, Window | None]] = {}
    traces: defaultdict[int, dict[int, Path]] = defaultdict(dict)
    for (owner, index), trace in sorted(list_traces(path).items()):
        traces[owner][index] = trace
    for rank in ranks:
        try:
            told = {window.index: window for window in read_manifest(path / manifest_name(rank)).windows}
        except InputError as error:
            unread[rank] = error.message
            continue
        recorded[rank] = {index: told.get(index) for index in traces[rank]}
    chosen = asked
    if asked is None:
        found = [(index, window) for windows in recorded.values() for index, window in windows.items()]
        timing = [(index, window) for index, window in found if (window.kind == "timing" if window else index != SITES_INDEX)]
        complete = [(index, window) for index, window in timing if window and window.planned and window.steps >= window.planned]
        votes = Counter(index for index, _ in complete or timing or found)
        chosen = min(votes, key=lambda index: (-votes[index], index), default=None)
    sizes = {rank: traces[rank][chosen].stat().st_size for rank in recorded if chosen is not None and chosen in traces[rank]}
    if asked is not None and not sizes:
        held = sorted({number for windows in recorded.values() for number in windows})
        raise InputError(f"{path}: no window {asked} in this bundle", f"it holds {', '.join(map(str, held)) or 'no window'}")
    missing = "no window was recorded" if chosen is None else f"window {chosen}, which is read of the other ranks, was not recorded"
    unread |= {rank: missing for rank in recorded if rank not in sizes}
    return [RankInput(rank, place, bundle=True, window=chosen, size=size) for rank, size in sorted(sizes.items())], unread


_MOST_NAMED = 16


class RankInput(msgspec.Struct, frozen=True):
    """Where the recording of one rank lies. Small, and told to the processes that read it."""

    rank: int
    path: str
    """A trace (absolute path, or URL), or the folder of a bundle."""
    bundle: bool = False
    window: int | None = None
    size: int = 0


class Recording(msgspec.Struct, frozen=True):
    """The ranks of one job."""

    source: Source
    ranks: tuple[RankInput, ...]
    unread: dict[int, str] = {}
    """Ranks of a bundle without the window that is read of the others, and why."""
    notices: tuple[Notice, ...] = ()

    @property
    def numbers(self) -> tuple[int, ...]:
        """All ranks, also those without a window."""
        return tuple(sorted((*(item.rank for item in self.ranks), *self.unread)))

    def others(self, rank: int) -> str:
        """Return 'ranks 0, 2' for a sentence: all but `rank`; '' where there is no other."""
        return format_ranks([number for number in self.numbers if number != rank])

    def one(self, rank: int) -> RankInput:
        """Return where `rank` lies. Raises UsageError where there is none to choose, InputError where it is not there or cannot be read."""
        if self.source.kind == "trace":
            raise UsageError(f"{self.source.path}: --rank chooses from a folder or a bundle, this is one trace", "leave --rank out")
        found = next((item for item in self.ranks if item.rank == rank), None)
        if found is not None:
            return found
        if rank in self.unread:
            raise InputError(f"{self.source.path}: rank {rank}: {self.unread[rank]}", "choose another rank or window")
        raise InputError(f"{self.source.path}: no rank {rank}", f"it holds {format_ranks(self.numbers)}")


def format_ranks(ranks: Sequence[int]) -> str:
    """Return 'rank 3', 'ranks 0, 1', or the first 16 and how many more; '' for none."""
    return f"rank{'s' if len(ranks) > 1 else ''} {_join_names([str(rank) for rank in ranks])}" if ranks else ""


def find_ranks(paths: Sequence[str], window: int | None = None) -> Recording:
    """Find the ranks that `paths` name; `window`: which of a bundle's windows, the same on all ranks (see choose_window).

    Raises InputError where nothing is there, UsageError for a window of what is no bundle.
    """
    for path in paths:
        _check_path_text(path)
    bundles = [path for path in paths if "://" not in path and os.path.isdir(path) and is_bundle(Path(path))]
    if window is not None and len(bundles) < len(paths):
        other = next(path for path in paths if path not in bundles)
        raise UsageError(f"{other}: --window chooses from a bundle, this is none", "leave --window out")
    traces = [one for path in paths if path not in bundles for one in _find_traces(path, alone=len(paths) == 1)]
    told, notices = _number_traces(traces)
    unread: dict[int, str] = {}
    for path in bundles:
        found, missing = _find_bundle_ranks(path, window)
        told.extend(found)
        unread.update(missing)
    ranks: dict[int, RankInput] = {}
    twice = [(kept, one) for one in told if (kept := ranks.setdefault(one.rank, one)) is not one]  # the first of each rank is read
    if twice:
        names = _shorten_paths([path for pair in twice for path in (pair[0].path, pair[1].path)])
        said = [f"{names[2 * place]} is read, {names[2 * place + 1]} is not" for place in range(len(twice))]
        numbers = sorted({one.rank for _, one in twice})
        notice = make_notice(NoticeCode.RANKS_TWICE, ranks=format_ranks(numbers), count=len(numbers), names=_join_names(said))
        notices = (*notices, notice)
    left = {rank: why for rank, why in unread.items() if rank not in ranks}
    items = tuple(ranks[rank] for rank in sorted(ranks))
    if len(paths) == 1 and not bundles and items[0].path in (paths[0], os.path.abspath(paths[0])):
        return Recording(Source(paths[0], "trace"), items, left, notices)
    name = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
    kind: Literal["bundle", "folder"] = "bundle" if len(bundles) == len(paths) else "folder"
    return Recording(Source(name, kind, tuple(sorted((*ranks, *left)))), items, left, notices)


def _find_traces(path: str, *, alone: bool) -> list[RankInput]:
    if "://" in path:
        return [RankInput(0, remote.url, size=remote.size) for remote in list_remote_traces(path)]
    if os.path.isdir(path):
        return [_build_local_rank(str(found)) for found in find_rank_files(Path(path)).values()]
    if os.path.exists(path) or not glob.has_magic(path):
        if not alone and not os.path.exists(path):
            raise InputError(f"{path} does not exist{suggest_file(path)}", "check the path")
        return [_build_local_rank(path)]
    files = [name for name in glob.glob(path, recursive=True) if os.path.isfile(name)]
    if not files:
        raise InputError(f"{path}: does not exist, nor does it match as a pattern", "check the pattern, and quote it: 'run/*.json.gz'")
    return [_build_local_rank(name) for name in filter_traces(files) or sorted(files)]


def _check_path_text(path: str) -> None:
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError(f"{format_path(path)}: this name is no valid UTF-8", "rename it, or give another path to it") from None


def _build_local_rank(path: str) -> RankInput:
    _check_path_text(path)
    try:
        size = os.path.getsize(path)
    except (OSError, ValueError):
        size = 0  # the reader says what is wrong
    return RankInput(0, os.path.abspath(path), size=size)


def _number_traces(traces: list[RankInput]) -> tuple[list[RankInput], tuple[Notice, ...]]:
    """Return the traces with their ranks: by their names, or by what they say of themselves where the names do not tell; and notices."""
    if len(traces) < 2:
        told, _ = parse_ranks([one.path.rsplit("/", 1)[-1] for one in traces])
        return [msgspec.structs.replace(one, rank=rank or 0) for one, rank in zip(traces, told, strict=True)], ()
    names = _shorten_paths([one.path for one in traces])
    told, in_words = parse_ranks(names)
    if not (in_words and len(set(told)) == len(told)):
        with ThreadPoolExecutor(16, "gpudiag-peek") as pool:  # headers read at a time: behind a URL each is a wait for the network
            own = tuple(header.rank for header in pool.map(peek_header, [one.path for one in traces]))
        if None not in own and (len(set(own)) == len(own) or not in_words):
            told = own
    if set(told) == {None}:
        numbered = [msgspec.structs.replace(one, rank=place) for place, one in enumerate(traces)]
        return numbered, (make_notice(NoticeCode.RANKS_UNTOLD),)
    strays = [name for name, rank in zip(names, told, strict=True) if rank is None]
    numbered = [msgspec.structs.replace(one, rank=rank) for one, rank in zip(traces, told, strict=True) if rank is not None]
    return numbered, ((make_notice(NoticeCode.RANKS_LEFT_OUT, names=_join_names(strays)),) if strays else ())


def _shorten_paths(paths: list[str]) -> list[str]:
    plain = [path.replace(os.sep, "/") for path in paths]
    start = os.path.commonprefix(plain).rfind("/") + 1  # noqa: RUF071 -- URLs too, and up to the last '/' alone
    return [path[start:] for path in plain]


def _join_names(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
