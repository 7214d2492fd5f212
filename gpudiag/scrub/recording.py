"""`gpudiag scrub`: a copy of a recording that may be shared. Only what is on a list is kept (keep_list.yaml)."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from gpudiag.bundle.layout import (
    SEGMENT_FOLDERS,
    compile_log_name,
    inductor_name,
    is_bundle,
    list_ranks,
    list_traces,
    manifest_name,
    owners_name,
    trace_name,
)
from gpudiag.bundle.manifest import read_manifest
from gpudiag.bundle.reader import MAX_COMPILE_LOG_BYTES, MAX_INDUCTOR_BYTES, MAX_OWNERS_BYTES, read_segment
from gpudiag.bundle.segments import SUFFIXES, encode_segment
from gpudiag.capture.environment.process import KNOWN_PACKAGES, read_variables
from gpudiag.errors import InputError, UsageError
from gpudiag.files import read_file
from gpudiag.model import trace
from gpudiag.model.bundle import UNREADABLE, InductorCode, Manifest
from gpudiag.model.compilation import CompileLog
from gpudiag.model.memory import Owners
from gpudiag.report.files import write_file_pieces
from gpudiag.scrub.trace import TraceScrubber, compress
from gpudiag.scrub.words import BUNDLE_FIELDS, Names
from gpudiag.trace.memory_snapshot import is_old_pickle, is_pickle
from gpudiag.trace.trace_files import find_rank_files, is_nsys
from gpudiag.units import Progress


def _find_fixed_words(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        yield from (*schema.get("properties", ()), *map(str, schema.get("enum", ())))
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _find_fixed_words(part)


@cache
def list_fixed_words() -> frozenset[str]:
    """List the names of fields in the documents of a bundle, and the values that are one of a few."""
    return frozenset(_find_fixed_words(msgspec.json.schema_components([Manifest, Owners, InductorCode, CompileLog])[1]))


def _rewrite_value(names: Names, value: Any, forms: dict[str, Any], form: Any = "text") -> Any:
    """Return a value of a bundle with its texts rewritten, without the fields that are removed."""
    if isinstance(form, dict):
        return _rewrite_value(names, value, forms | form)
    if isinstance(value, list | tuple):
        return [_rewrite_value(names, item, forms, form) for item in value]
    if isinstance(value, str):
        return value if value in list_fixed_words() else names.rewrite(form, value)
    if not isinstance(value, dict):
        return value
    removed = [value[key] for key, form in forms.items() if form == "removed" and value.get(key)]
    if removed:
        names.note("fields of a bundle", removed)
    return {
        _rewrite_value(names, key, forms): _rewrite_value(names, item, forms, forms.get(key, "text"))
        for key, item in value.items()
        if forms.get(key) != "removed"
    }


def _rewrite_manifest(names: Names, found: Manifest) -> Manifest:
    fields = msgspec.to_builtins(found)
    for window in fields["windows"]:
        window["file"] = trace_name(window["rank"], window["index"])
    program = fields["program"] or {}
    variables, packages = (program.pop(key, None) for key in ("variables", "packages"))
    kept = _rewrite_value(names, fields, BUNDLE_FIELDS)
    if program:
        public = KNOWN_PACKAGES.values()
        kept["program"]["packages"] = {name: names.rewrite("version", text) for name, text in packages.items() if name in public}
        # known variables alone; "-" has the form of none, and stands for a value that was not recorded
        kept["program"]["variables"] = read_variables({name: value or "-" for name, value in variables.items()})
    return msgspec.convert(kept, Manifest)


def _rewrite_bundle(source: Path, names: Names) -> Iterator[tuple[str, bytes]]:
    """Yield (name, bytes) of the files of a bundle that are known, but for its traces; what cannot be read is noted.

    Raises InputError where a manifest cannot be read.
    """
    for rank in list_ranks(source):
        name = manifest_name(rank)
        yield name, names.watch(msgspec.json.encode(_rewrite_manifest(names, read_manifest(source / name))) + b"\n")
        for name, kind, limit in (
            (owners_name(rank), Owners, MAX_OWNERS_BYTES),
            (inductor_name(rank), InductorCode, MAX_INDUCTOR_BYTES),
            (compile_log_name(rank), CompileLog, MAX_COMPILE_LOG_BYTES),
        ):
            path = source / name
            if not path.is_file() or path.is_symlink():
                continue
            try:
                found: msgspec.Struct = msgspec.json.decode(read_file(path, limit), type=kind)
            except (OSError, *UNREADABLE):
                names.note("files that could not be read")
                continue
            if isinstance(found, Owners):
                found = msgspec.structs.replace(found, snapshot=False)  # it is not copied
            yield name, names.watch(msgspec.json.encode(_rewrite_value(names, msgspec.to_builtins(found), BUNDLE_FIELDS)))
        for table, folder in SEGMENT_FOLDERS.items():
            for path in sorted((source / folder / f"rank{rank}").glob("[0-9]*")):
                if path.suffix not in SUFFIXES:
                    continue
                frame = None if path.is_symlink() else read_segment(path, trace.build_table_schema(table))
                if frame is None:
                    names.note("files that could not be read")
                    continue
                columns = {
                    name: _rewrite_value(names, values, {}, "words" if name == "site" else "text")
                    for name, values in frame.to_dict(as_series=False).items()
                }
                names.watch(msgspec.json.encode(columns))
                yield str(path.relative_to(source).with_suffix(SUFFIXES[0])), encode_segment(table, columns)


def _list_copies(source: Path, target: Path, names: Names, tell: Progress) -> Iterator[tuple[str, Iterable[bytes]]]:
    """Yield name and content of each file of the copy."""
    scrubber = TraceScrubber(names)
    traces: dict[str, Path] = {}
    if not source.is_dir():
        traces[target.name] = source
    elif is_bundle(source):
        yield from ((name, [data]) for name, data in _rewrite_bundle(source, names))
        traces = {str(path.relative_to(source)): path for path in list_traces(source).values()}
    else:
        for rank, path in find_rank_files(source).items():  # named by rank: file names of recordings hold the name of the host
            names.note("names of files", path.name)
            traces[f"rank{rank}.json" + (path.suffix if path.suffix.lower() in (".gz", ".zst") else "")] = path
    for name, path in traces.items():
        _check_format(path)
        tell(f"scrubbing {path.name}")
        yield name, compress(map(names.watch, scrubber.pieces(str(path), tell)), name)


class ScrubSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What one run of scrub did."""

    removed: dict[str, int]
    files: int
    left_out: int = 0
    looked_for: int
    """Removed texts that the copy was searched for: those of nine characters and more that are not made of known words."""
    left: tuple[str, ...] = ()
    """Those that stand in it all the same, in a name that is kept as it is."""
    complete: bool = True
    """Whether all removed texts could be remembered for the search."""


def scrub(path: str, target: Path, *, force: bool = False, keep_names: bool = False, tell: Progress = lambda _: None) -> ScrubSummary:
    """Return what was removed; writes the copy of a trace, a bundle or a folder of ranks to `target`, all of it or nothing.

    `keep_names`: annotations and folders keep their names. Raises InputError and UsageError; nothing is written then.
    """
    if "://" in path:
        raise InputError(f"{path}: scrub reads files of this machine", "copy it here first")
    if not os.path.exists(path):
        raise InputError(f"{path}: no such file or folder", "check the path")
    source, names = Path(path), Names(keep_names=keep_names)
    _check_target(source, target, force)
    scratch = target.resolve().with_name(f".{secrets.token_hex(8)}")
    written: list[Path] = []
    try:
        scratch.mkdir()
        for name, pieces in _list_copies(source, target, names, tell):
            written.append(scratch / name)
            written[-1].parent.mkdir(parents=True, exist_ok=True)
            write_file_pieces(written[-1], pieces)
        there = sum(one.is_file() for one in source.glob("**/*" if is_bundle(source) else "*"))
        looked_for, left, complete = names.find_left_texts()
        summary = ScrubSummary(
            removed={kind: count for kind, count in names.removed.most_common() if count},
            files=len(written),
            left_out=max(0, there - len(written)),
            looked_for=looked_for,
            left=tuple(sorted(left)),
            complete=complete,
        )
        if target.is_dir():
            target.rmdir()  # empty, as was checked
        (scratch if source.is_dir() else written[0]).replace(target)
    except InputError as error:
        raise InputError(error.message.replace(str(scratch), str(target)), error.hint) from None
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror}", "choose another place") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return summary


def _check_target(source: Path, target: Path, force: bool) -> None:
    if not target.resolve().parent.is_dir():
        raise InputError(f"cannot write {target}: there is no folder {target.parent}: it stands in none", "make it first")
    if source.is_dir():
        if source.resolve() in (target.resolve(), *target.resolve().parents):
            raise UsageError(f"will not write into {source}: it is what is read", "choose another place")
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise UsageError(f"{target} exists and is not an empty folder", "choose another name")
        return
    _check_format(source)
    if target.suffix.lower() not in (".json", ".gz", ".zst"):
        raise UsageError(f"cannot write {target}: a copy of a trace is .json, .json.gz or .json.zst", "name a file that ends so")
    if target.is_dir():
        raise InputError(f"cannot write {target}: it is a folder", "name a file")
    if target.exists() and target.samefile(source):
        raise UsageError(f"will not write over {target}: it is what is read", "choose another name")
    if target.exists() and not force:
        raise UsageError(f"{target} exists", "choose another name, or write over it with --force")


def _check_format(path: Path) -> None:
    if is_pickle(path) or is_old_pickle(path):
        raise InputError(f"{path} is a pickle: a snapshot of the allocator holds whole paths, and cannot be scrubbed", "leave it out")
    if is_nsys(str(path)):
        raise InputError(
            f"{path} is a recording of Nsight Systems, which cannot be scrubbed", "share a report on it: gpudiag report PATH -o OUT.md"
        )
    if path.suffix.lower() in (".html", ".md"):
        raise InputError(f"{path} is a report", "scrub the recording, and write the report of the copy")
