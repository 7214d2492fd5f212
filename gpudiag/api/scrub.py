"""`gpudiag scrub`: a copy of a recording that may be shared. Only what is on a list is kept (scrub_words.py); the copy is read again."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from gpudiag.api.scrub_trace import JSON_ERRORS, TraceScrubber, compress
from gpudiag.api.scrub_words import LONG_CHARACTERS, MAX_TEXTS, Names, consists_of_known_words
from gpudiag.capture.bundle import MAX_INDUCTOR_BYTES, list_traces, read_manifest, read_segment
from gpudiag.capture.bundle_folder import SEGMENT_FOLDERS, inductor_name, is_bundle, list_ranks, manifest_name, trace_name
from gpudiag.capture.environment.process import KNOWN_PACKAGES, read_variables
from gpudiag.capture.memory import MAX_OWNERS_BYTES, owners_name
from gpudiag.capture.segments import encode_segment
from gpudiag.errors import InputError, UsageError
from gpudiag.files import read_file
from gpudiag.model import trace
from gpudiag.model.bundle import UNREADABLE, InductorCode, Manifest
from gpudiag.model.memory import Owners
from gpudiag.report.files import write_file_pieces
from gpudiag.trace.decompression import read_text_blocks
from gpudiag.trace.memory_snapshot import is_old_pickle, is_pickle
from gpudiag.trace.trace_files import find_rank_files, is_nsys

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')


def find_left_texts(copies: Iterable[Path], texts: Iterable[str]) -> set[str]:
    """Return those of `texts` (of LONG_CHARACTERS or more) that stand in a string of one of the files."""
    strings: set[bytes] = set()
    for copy in copies:
        if copy.suffix == ".parquet":
            strings.update(_STRING.findall(pl.read_parquet(copy).select(pl.col(pl.String).unique().implode()).write_json().encode()))
            continue
        rest = b""
        with closing(read_text_blocks(str(copy))) as blocks:
            for block in blocks:  # cut behind line ends: no string of a copy goes over one
                head, end, tail = (rest + block).rpartition(b"\n")
                strings.update(_STRING.findall(head + end))
                rest = tail
        strings.update(_STRING.findall(rest))
    wanted: dict[str, list[str]] = {}
    for text in texts:
        wanted.setdefault(text[:LONG_CHARACTERS], []).append(text)
    found: set[str] = set()
    for string in strings:
        try:
            text = msgspec.json.decode(string, type=str)
        except JSON_ERRORS:
            text = string.decode("utf-8", "replace")
        for at in range(len(text) - LONG_CHARACTERS + 1):
            candidates = wanted.get(text[at : at + LONG_CHARACTERS], ())
            found.update(candidate for candidate in candidates if text.startswith(candidate, at))
    return found


_FORMS: dict[str, Any] = {
    **dict.fromkeys(("tool_version", "python", "torch", "cuda", "driver", "compute_capability"), "version"),
    **dict.fromkeys(("name", "cpu", "id"), "device"),
    **dict.fromkeys(("key", "device_key", "launch", "host", "sampler", "backend", "comm_hooks"), "words"),
    "optimizers": {"name": "words"}, "owners": {"name": "words"},
    "graphs": {"key": "words", **dict.fromkeys(("name", "ops", "nodes"), "symbol")},
}  # fmt: skip
"""Form of a field of a bundle by its name, of fields within it; all others hold sentences of gpudiag's."""


def _rewrite_value(names: Names, value: Any, forms: Mapping[str, Any] = _FORMS, form: Any = "sentence") -> Any:
    """Return a decoded value with its texts rewritten."""
    if isinstance(form, dict):
        return _rewrite_value(names, value, form)
    if isinstance(value, list | tuple):
        return [_rewrite_value(names, item, forms, form) for item in value]
    if isinstance(value, dict):
        return {
            names.rewrite("sentence", key): _rewrite_value(names, item, forms, forms.get(key, "sentence")) for key, item in value.items()
        }
    return names.rewrite(form, value) if isinstance(value, str) else value


def _rewrite_manifest(names: Names, found: Manifest) -> Manifest:
    """Return a manifest without serial number, command and commit, its other texts rewritten."""
    fields = msgspec.to_builtins(found)
    for window in fields["windows"]:
        window["file"] = trace_name(window["rank"], window["index"])
    program = fields["program"] or {}
    code, variables, packages = (program.pop(key, None) for key in ("code", "variables", "packages"))
    removed = {
        "words of the command line": fields.pop("command"), "serial numbers": fields["machine"].pop("gpu_uuid"), "commits": code
    }  # fmt: skip
    for kind, value in removed.items():
        if value:
            names.note(kind, value)
    kept = _rewrite_value(names, fields)
    if program:
        public = KNOWN_PACKAGES.values()
        kept["program"]["packages"] = {name: names.rewrite("version", text) for name, text in packages.items() if name in public}
        # known variables alone; "-" has the form of none, and stands for a value that was not recorded
        kept["program"]["variables"] = read_variables({name: value or "-" for name, value in variables.items()})
    return msgspec.convert(kept, Manifest)


Tell = Callable[[str], None]


def _rewrite_bundle(source: Path, names: Names) -> Iterator[tuple[str, bytes]]:
    """Yield (name, bytes) of the files of a bundle that are known, but for its traces; what cannot be read is noted.

    Raises InputError where a manifest cannot be read.
    """
    for rank in list_ranks(source):
        name = manifest_name(rank)
        yield name, msgspec.json.encode(_rewrite_manifest(names, read_manifest(source / name))) + b"\n"
        for name, kind, limit in ((owners_name(rank), Owners, MAX_OWNERS_BYTES), (inductor_name(rank), InductorCode, MAX_INDUCTOR_BYTES)):
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
            yield name, msgspec.json.encode(_rewrite_value(names, msgspec.to_builtins(found)))
        for table, folder in SEGMENT_FOLDERS.items():
            for path in sorted((source / folder / f"rank{rank}").glob("[0-9]*.parquet")):
                frame = None if path.is_symlink() else read_segment(path, trace.build_table_schema(table))
                if frame is None:
                    names.note("files that could not be read")
                    continue
                columns = _rewrite_value(names, frame.to_dict(as_series=False), {"site": "words"})
                yield str(path.relative_to(source)), encode_segment(table, columns)


def _list_copies(source: Path, target: Path, names: Names, tell: Tell) -> Iterator[tuple[str, Iterable[bytes]]]:
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
        yield name, compress(scrubber.pieces(str(path), tell), name)


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


def scrub(path: str, target: Path, *, force: bool = False, keep_names: bool = False, tell: Tell = lambda _: None) -> ScrubSummary:
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
        tell("reading the copy again")
        # the removed texts that no known word explains
        wanted = {text for text in names.removed_texts if not consists_of_known_words(text)}
        there = sum(one.is_file() for one in source.glob("**/*" if is_bundle(source) else "*"))
        summary = ScrubSummary(
            removed={kind: count for kind, count in names.removed.most_common() if count},
            files=len(written),
            left_out=max(0, there - len(written)),
            looked_for=len(wanted),
            left=tuple(sorted(find_left_texts(written, wanted))),
            complete=len(names.removed_texts) < MAX_TEXTS,
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
