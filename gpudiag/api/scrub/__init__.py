"""`gpudiag scrub`: a copy of a recording that may be shared. Only what is on a list is kept (kept.py); the copy is read again."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from gpudiag.api.scrub.bundle import BundleScrubber
from gpudiag.api.scrub.check import left_in, text_of
from gpudiag.api.scrub.trace import Scrubber, packed
from gpudiag.api.scrub.words import MAX_TEXTS, Removed, Words
from gpudiag.capture.folder import is_bundle
from gpudiag.errors import InputError, UsageError
from gpudiag.report.files import write_pieces
from gpudiag.trace.folder import rank_files
from gpudiag.trace.formats import is_sqlite
from gpudiag.trace.snapshot import is_old_pickle, is_pickle

Tell = Callable[[str], None]

SUFFIXES = (".json", ".gz", ".zst")


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What one run of scrub did."""

    removed: dict[str, int]
    """Kind of what was taken out -> how often."""
    files: int
    """Files that the copy has."""
    left_out: int = 0
    """Files of a folder that it has not."""
    looked_for: int
    """Removed texts that the copy was searched for: those of nine characters and more that are not made of known words."""
    left: tuple[str, ...] = ()
    """Those that stand in it all the same, in a name that is kept as it is."""
    complete: bool = True
    """Whether all removed texts could be remembered for the search."""


def scrub(path: str, target: Path, *, force: bool = False, keep_names: bool = False, tell: Tell = lambda _: None) -> Summary:
    """Return what was removed; writes the copy of a trace, a bundle or a folder of ranks to `target`, all of it or nothing.

    `keep_names`: annotations and folders keep their names. Raises InputError and UsageError; nothing is written then.
    """
    _check(path, target, force=force)
    removed = Removed()
    words = Words(removed)
    scrubber = Scrubber(words, keep_names=keep_names)
    if not os.path.isdir(path):
        return _file(path, target, scrubber, removed, tell)
    return _folder(Path(path), target, scrubber, words, tell)


def _check(path: str, target: Path, *, force: bool) -> None:
    """Raise InputError or UsageError where the copy cannot be made, or would be written over something."""
    if "://" in path:
        raise InputError(f"{path}: scrub reads files of this machine", "copy it here first")
    if not os.path.exists(path):
        raise InputError(f"{path}: no such file or folder", "check the path")
    if os.path.isdir(path):
        _check_folder(Path(path), target)
        return
    _check_format(Path(path))
    if target.suffix.lower() not in SUFFIXES:
        raise UsageError(f"cannot write {target}: a copy of a trace is .json, .json.gz or .json.zst", "name a file that ends so")
    if target.exists() and target.samefile(path):
        raise UsageError(f"will not write over {target}: it is what is read", "choose another name")
    if target.is_dir() or not target.parent.is_dir():
        raise InputError(f"cannot write {target}: it is a folder, or stands in none", "name a file in a folder that exists")
    if target.exists() and not force:
        raise UsageError(f"{target} exists", "choose another name, or write over it with --force")


def _check_folder(source: Path, target: Path) -> None:
    if source.resolve() in (target.resolve(), *target.resolve().parents):
        raise UsageError(f"will not write into {source}: it is what is read", "choose another place")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} exists and is not an empty folder", "choose another name")
    if not target.resolve().parent.is_dir():
        raise InputError(f"cannot write {target}: there is no folder {target.parent}", "make it first")


def _check_format(path: Path) -> None:
    """Raise InputError for files that hold no trace of torch.profiler."""
    if is_pickle(path) or is_old_pickle(path):
        raise InputError(f"{path} is a pickle: a snapshot of the allocator holds whole paths, and cannot be scrubbed", "leave it out")
    if is_sqlite(str(path)) or path.suffix.lower() in (".nsys-rep", ".qdrep"):
        raise InputError(
            f"{path} is a recording of Nsight Systems, which cannot be scrubbed", "share a report on it: gpudiag report PATH -o OUT.md"
        )
    if path.suffix.lower() in (".html", ".md"):
        raise InputError(f"{path} is a report", "scrub the recording, and write the report of the copy")


def _file(path: str, target: Path, scrubber: Scrubber, removed: Removed, tell: Tell) -> Summary:
    scratch = target.with_name(f".{target.stem[:40]}.scrub{target.suffix}")
    try:
        write_pieces(scratch, packed(scrubber.pieces(path, tell), scratch.name))
        summary = _summary(removed, [text_of(str(scratch))], files=1, tell=tell)
        scratch.replace(target)
    except InputError as error:
        raise InputError(error.message.replace(str(scratch), str(target)), error.hint) from None
    finally:
        scratch.unlink(missing_ok=True)
    return summary


def _folder(source: Path, target: Path, scrubber: Scrubber, words: Words, tell: Tell) -> Summary:
    scratch = target.resolve().with_name(f".{secrets.token_hex(8)}")
    try:
        scratch.mkdir()
        copies, files, left_out = (_bundle if is_bundle(source) else _ranks)(source, scratch, scrubber, words, tell)
        summary = _summary(words.removed, copies, files=files, left_out=left_out, tell=tell)
        if target.is_dir():
            target.rmdir()  # empty, as was checked
        scratch.rename(target)
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror}", "choose another place") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return summary


_Copies = tuple[Iterator[Iterator[bytes]], int, int]


def _bundle(source: Path, target: Path, scrubber: Scrubber, words: Words, tell: Tell) -> _Copies:
    found = BundleScrubber(source, target, scrubber, words)
    found.copy(tell)

    def copies() -> Iterator[Iterator[bytes]]:
        yield from found.texts()
        yield from (text_of(str(trace)) for trace in found.traces())

    return copies(), len(found.written), found.left_out()


def _ranks(source: Path, target: Path, scrubber: Scrubber, words: Words, tell: Tell) -> _Copies:
    """Write the traces of a folder, named by their ranks: file names of recordings hold the name of the host."""
    traces = rank_files(source)
    made = []
    for rank, path in traces.items():
        _check_format(path)
        name = f"rank{rank}.json" + (path.suffix if path.suffix.lower() in (".gz", ".zst") else "")
        words.removed.note("names of files", path.name)
        write_pieces(target / name, packed(scrubber.pieces(str(path), tell), name))
        made.append(str(target / name))
    others = sum(path.is_file() for path in source.iterdir()) - len(made)
    return (text_of(path) for path in made), len(made), others


def _summary(removed: Removed, copies: Iterable[Iterable[bytes]], *, files: int, left_out: int = 0, tell: Tell) -> Summary:
    tell("reading the copy again")
    wanted = removed.worth_a_look()
    return Summary(
        removed={kind: count for kind, count in removed.counts.most_common() if count},
        files=files,
        left_out=left_out,
        looked_for=len(wanted),
        left=tuple(sorted(left_in(copies, wanted))),
        complete=len(removed.texts) < MAX_TEXTS,
    )
