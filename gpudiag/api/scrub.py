"""`gpudiag scrub`: a copy of a recording that may be shared. Only what is on a list is kept (scrub_words.py); the copy is read again."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import polars as pl

from gpudiag.api.scrub_trace import JSON_ERRORS, TraceScrubber, compress
from gpudiag.api.scrub_words import LONG_CHARACTERS, MAX_TEXTS, Names, Removed, Words, list_own_words
from gpudiag.capture.bundle import MAX_INDUCTOR_BYTES, list_traces, read_manifest, read_segment
from gpudiag.capture.bundle_folder import SEGMENT_FOLDERS, inductor_name, is_bundle, list_ranks, manifest_name, trace_name
from gpudiag.capture.environment.process import KNOWN_PACKAGES, read_variables
from gpudiag.capture.memory import MAX_OWNERS_BYTES, owners_name
from gpudiag.capture.segments import encode_segment
from gpudiag.errors import InputError, UsageError
from gpudiag.files import read_file
from gpudiag.model import trace
from gpudiag.model.bundle import UNREADABLE, InductorCode, Manifest, Program
from gpudiag.model.memory import Owners
from gpudiag.report.files import write_file, write_file_pieces
from gpudiag.trace.decompression import read_text_blocks
from gpudiag.trace.memory_snapshot import is_old_pickle, is_pickle
from gpudiag.trace.trace_files import find_rank_files, is_sqlite

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')


def find_left_texts(copies: Iterable[Iterable[bytes]], texts: Iterable[str]) -> set[str]:
    """Return those of `texts` (of LONG_CHARACTERS or more) that stand in a string of one of the copies (their JSON, in blocks)."""
    strings: set[bytes] = set()
    for copy in copies:
        for line in _cut_at_lines(copy):
            strings.update(_STRING.findall(line))
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


def _cut_at_lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield `blocks` cut behind line ends: no string of a copy goes over one."""
    rest = b""
    for block in blocks:
        head, end, tail = (rest + block).rpartition(b"\n")
        yield head + end
        rest = tail
    yield rest


def read_searched_text(path: str) -> Iterator[bytes]:
    """Yield the text of a trace in blocks."""
    with closing(read_text_blocks(path)) as blocks:
        yield from blocks


_Kept = TypeVar("_Kept", Manifest, Program, Owners, InductorCode)

_VERSION = re.compile(r"\d[\w.+-]{0,39}", re.ASCII)
_DEVICE = re.compile(r"[\w .()@/+-]{0,100}", re.ASCII)
_CODE = re.compile(r"[\w.:]{1,500}", re.ASCII)

Rule = Callable[[str], str | None]
"""What becomes of the text of a field; None: it is rewritten as a sentence."""

_VERSIONS = ("tool_version", "python", "torch", "cuda", "driver", "compute_capability")
_DEVICES = ("name", "cpu", "id")
_DIGESTS = ("key", "device_key", "launch", "host")
_OF_CODE = ("sampler", "backend", "comm_hooks")


class ValueScrubber:
    """Rewrites the texts of a decoded value; which rule holds is told by the name of the field, and by the struct it stands in."""

    def __init__(self, names: Names, words: Words) -> None:
        self._names, self._words = names, words
        self._of_manifest: dict[str, Rule] = {
            **dict.fromkeys(_VERSIONS, _keep_version), **dict.fromkeys(_DEVICES, _keep_device_name), **dict.fromkeys(_DIGESTS, names.text),
            **dict.fromkeys(_OF_CODE, self._keep_code),
        }  # fmt: skip
        self._of_code: dict[str, Rule] = dict.fromkeys(("name", "ops", "nodes", "key"), self._keep_code)

    def manifest(self, found: Manifest) -> Manifest:
        """Return a manifest without serial number, command and commit, its other texts rewritten."""
        for text in found.command or ():
            self._words.removed.note("words of the command line", text)
        if found.machine.gpu_uuid:
            self._words.removed.note("serial numbers", found.machine.gpu_uuid)
        if found.program is not None and found.program.code is not None:
            self._words.removed.note("commits", found.program.code.commit)
        bare = msgspec.structs.replace(
            found, command=None, program=None, machine=msgspec.structs.replace(found.machine, gpu_uuid=None),
            windows=tuple(msgspec.structs.replace(one, file=trace_name(one.rank, one.index)) for one in found.windows),
        )  # fmt: skip
        kept = self._rewrite(bare, self._of_manifest)
        return kept if found.program is None else msgspec.structs.replace(kept, program=self._scrub_program(found.program))

    def _scrub_program(self, found: Program) -> Program:
        packages = {name: text for name, text in found.packages.items() if name in KNOWN_PACKAGES.values() and _VERSION.fullmatch(text)}
        said = read_variables({name: value for name, value in found.variables.items() if value is not None})
        unsaid = read_variables(dict.fromkeys(found.variables, "-"))  # "-" is no value that is kept
        bare = msgspec.structs.replace(found, code=None, packages={}, variables={})
        return msgspec.structs.replace(self._rewrite(bare, self._of_manifest), packages=packages, variables={**unsaid, **said})

    def owners(self, found: Owners) -> Owners:
        """Return the owners of a rank's memory; the snapshot beside them is not copied."""
        return self._rewrite(msgspec.structs.replace(found, snapshot=False), self._of_code)

    def inductor(self, found: InductorCode) -> InductorCode:
        """Return what is known of a rank's compiled code; its keys stand in the trace too."""
        return self._rewrite(found, self._of_code)

    def sentence(self, text: str) -> str:
        """Return a text of gpudiag's with the words replaced that are not its own."""
        return self._words.known(text, list_own_words())

    def _rewrite(self, found: _Kept, rules: Mapping[str, Rule]) -> _Kept:
        return msgspec.convert(self._walk(msgspec.to_builtins(found), "", rules), type(found))

    def _walk(self, value: Any, field: str, rules: Mapping[str, Rule]) -> Any:
        if isinstance(value, str):
            found = rules[field](value) if field in rules else None
            return self.sentence(value) if found is None else found
        if isinstance(value, list | tuple):
            return [self._walk(item, field, rules) for item in value]
        if isinstance(value, dict):
            inner = self._of_code if "capturable" in value else rules  # an optimizer's name is a class
            return {self.sentence(key): self._walk(item, key, inner) for key, item in value.items()}
        return value

    def _keep_code(self, text: str) -> str | None:
        return self._names.symbol(text) if _CODE.fullmatch(text) else None


def _keep_version(text: str) -> str | None:
    return text if _VERSION.fullmatch(text) else None


def _keep_device_name(text: str) -> str | None:
    return text if _DEVICE.fullmatch(text) else None


Tell = Callable[[str], None]
_KeptFile = TypeVar("_KeptFile", Owners, InductorCode)


class BundleScrubber:
    """Writes the files of one bundle to another folder."""

    def __init__(self, source: Path, target: Path, scrubber: TraceScrubber, words: Words) -> None:
        self._source, self._target = source, target
        self._scrubber, self._words = scrubber, words
        self._values = ValueScrubber(scrubber.names, words)
        self.written: list[Path] = []
        """Files of the copy, relative to it; those of the source with the same names are what they were made from."""

    def copy(self, tell: Tell) -> None:
        """Write everything that is known; what cannot be read is noted. Raises InputError where a manifest or a trace cannot be read."""
        for rank in list_ranks(self._source):
            name = manifest_name(rank)
            self._write(name, msgspec.json.encode(self._values.manifest(read_manifest(self._source / name))) + b"\n")
            self._copy_json(owners_name(rank), Owners, MAX_OWNERS_BYTES, self._values.owners)
            self._copy_json(inductor_name(rank), InductorCode, MAX_INDUCTOR_BYTES, self._values.inductor)
            for table, folder in SEGMENT_FOLDERS.items():
                for path in sorted((self._source / folder / f"rank{rank}").glob("[0-9]*.parquet")):
                    self._copy_segment(table, path)
        for path in list_traces(self._source).values():
            name = str(path.relative_to(self._source))
            tell(f"scrubbing {name}")
            self._to(name)
            write_file_pieces(self._target / name, compress(self._scrubber.pieces(str(path), tell), name))

    def left_out(self) -> int:
        """Return how many files of the source have no counterpart."""
        written = set(self.written)
        return sum(path.relative_to(self._source) not in written for path in self._source.rglob("*") if path.is_file())

    def texts(self) -> Iterator[Iterator[bytes]]:
        """Yield the texts of the copy's files but for the traces, read again, as JSON."""
        for name in self.written:
            path = self._target / name
            if path.suffix == ".parquet":
                yield _read_strings(path)
            elif path.suffix == ".json":
                yield iter([path.read_bytes()])

    def traces(self) -> list[Path]:
        """Return the traces of the copy."""
        return [self._target / name for name in self.written if name.parent.name == "trace"]

    def _copy_json(self, name: str, kind: type[_KeptFile], limit: int, rewrite: Callable[[_KeptFile], _KeptFile]) -> None:
        path = self._source / name
        if not path.is_file() or path.is_symlink():
            return
        try:
            found = msgspec.json.decode(read_file(path, limit), type=kind)
        except (OSError, *UNREADABLE):
            self._words.removed.note("files that could not be read")
        else:
            self._write(name, msgspec.json.encode(rewrite(found)))

    def _copy_segment(self, table: str, path: Path) -> None:
        frame = None if path.is_symlink() else read_segment(path, trace.build_table_schema(table))
        if frame is None:
            self._words.removed.note("files that could not be read")
            return
        columns: dict[str, Any] = frame.to_dict(as_series=False)
        for name in (name for name, kind in frame.schema.items() if kind == pl.String):
            rewrite = self._scrubber.names.site if name == "site" else self._values.sentence
            columns[name] = [None if text is None else rewrite(text) for text in columns[name]]
        self._write(str(path.relative_to(self._source)), encode_segment(table, columns))

    def _to(self, name: str) -> None:
        (self._target / name).parent.mkdir(parents=True, exist_ok=True)
        self.written.append(Path(name))

    def _write(self, name: str, data: bytes) -> None:
        self._to(name)
        write_file(self._target / name, data)


def _read_strings(path: Path) -> Iterator[bytes]:
    frame = pl.read_parquet(path)
    for column in frame.select(pl.col(pl.String)).iter_columns():
        yield msgspec.json.encode(column.unique().to_list()) + b"\n"
    yield msgspec.json.encode(frame.columns)


SUFFIXES = (".json", ".gz", ".zst")


class ScrubSummary(msgspec.Struct, frozen=True, kw_only=True):
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


def scrub(path: str, target: Path, *, force: bool = False, keep_names: bool = False, tell: Tell = lambda _: None) -> ScrubSummary:
    """Return what was removed; writes the copy of a trace, a bundle or a folder of ranks to `target`, all of it or nothing.

    `keep_names`: annotations and folders keep their names. Raises InputError and UsageError; nothing is written then.
    """
    _check_target(path, target, force=force)
    removed = Removed()
    words = Words(removed)
    scrubber = TraceScrubber(words, keep_names=keep_names)
    if not os.path.isdir(path):
        scratch = target.with_name(f".{target.stem[:40]}.scrub{target.suffix}")
        try:
            write_file_pieces(scratch, compress(scrubber.pieces(path, tell), scratch.name))
            summary = _build_summary(removed, [read_searched_text(str(scratch))], files=1, tell=tell)
            scratch.replace(target)
        except InputError as error:
            raise InputError(error.message.replace(str(scratch), str(target)), error.hint) from None
        finally:
            scratch.unlink(missing_ok=True)
        return summary
    return _scrub_folder(Path(path), target, scrubber, words, tell)


def _check_target(path: str, target: Path, *, force: bool) -> None:
    if "://" in path:
        raise InputError(f"{path}: scrub reads files of this machine", "copy it here first")
    if not os.path.exists(path):
        raise InputError(f"{path}: no such file or folder", "check the path")
    if os.path.isdir(path):
        if Path(path).resolve() in (target.resolve(), *target.resolve().parents):
            raise UsageError(f"will not write into {Path(path)}: it is what is read", "choose another place")
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise UsageError(f"{target} exists and is not an empty folder", "choose another name")
        if not target.resolve().parent.is_dir():
            raise InputError(f"cannot write {target}: there is no folder {target.parent}", "make it first")
    else:
        _check_file_target(Path(path), target, force=force)


def _check_file_target(path: Path, target: Path, *, force: bool) -> None:
    _check_format(path)
    if target.suffix.lower() not in SUFFIXES:
        raise UsageError(f"cannot write {target}: a copy of a trace is .json, .json.gz or .json.zst", "name a file that ends so")
    if target.exists() and target.samefile(path):
        raise UsageError(f"will not write over {target}: it is what is read", "choose another name")
    if target.is_dir() or not target.parent.is_dir():
        raise InputError(f"cannot write {target}: it is a folder, or stands in none", "name a file in a folder that exists")
    if target.exists() and not force:
        raise UsageError(f"{target} exists", "choose another name, or write over it with --force")


def _check_format(path: Path) -> None:
    if is_pickle(path) or is_old_pickle(path):
        raise InputError(f"{path} is a pickle: a snapshot of the allocator holds whole paths, and cannot be scrubbed", "leave it out")
    if is_sqlite(str(path)) or path.suffix.lower() in (".nsys-rep", ".qdrep"):
        raise InputError(
            f"{path} is a recording of Nsight Systems, which cannot be scrubbed", "share a report on it: gpudiag report PATH -o OUT.md"
        )
    if path.suffix.lower() in (".html", ".md"):
        raise InputError(f"{path} is a report", "scrub the recording, and write the report of the copy")


def _scrub_folder(source: Path, target: Path, scrubber: TraceScrubber, words: Words, tell: Tell) -> ScrubSummary:
    scratch = target.resolve().with_name(f".{secrets.token_hex(8)}")
    try:
        scratch.mkdir()
        copies, files, left_out = (_scrub_bundle if is_bundle(source) else _scrub_ranks)(source, scratch, scrubber, words, tell)
        summary = _build_summary(words.removed, copies, files=files, left_out=left_out, tell=tell)
        if target.is_dir():
            target.rmdir()  # empty, as was checked
        scratch.rename(target)
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror}", "choose another place") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return summary


_Copies = tuple[Iterator[Iterator[bytes]], int, int]


def _scrub_bundle(source: Path, target: Path, scrubber: TraceScrubber, words: Words, tell: Tell) -> _Copies:
    found = BundleScrubber(source, target, scrubber, words)
    found.copy(tell)

    def copies() -> Iterator[Iterator[bytes]]:
        yield from found.texts()
        yield from (read_searched_text(str(trace)) for trace in found.traces())

    return copies(), len(found.written), found.left_out()


def _scrub_ranks(source: Path, target: Path, scrubber: TraceScrubber, words: Words, tell: Tell) -> _Copies:
    """Write the traces of a folder, named by their ranks: file names of recordings hold the name of the host."""
    traces = find_rank_files(source)
    made = []
    for rank, path in traces.items():
        _check_format(path)
        name = f"rank{rank}.json" + (path.suffix if path.suffix.lower() in (".gz", ".zst") else "")
        words.removed.note("names of files", path.name)
        write_file_pieces(target / name, compress(scrubber.pieces(str(path), tell), name))
        made.append(str(target / name))
    others = sum(path.is_file() for path in source.iterdir()) - len(made)
    return (read_searched_text(path) for path in made), len(made), others


def _build_summary(removed: Removed, copies: Iterable[Iterable[bytes]], *, files: int, left_out: int = 0, tell: Tell) -> ScrubSummary:
    tell("reading the copy again")
    wanted = removed.worth_a_look()
    return ScrubSummary(
        removed={kind: count for kind, count in removed.counts.most_common() if count},
        files=files,
        left_out=left_out,
        looked_for=len(wanted),
        left=tuple(sorted(find_left_texts(copies, wanted))),
        complete=len(removed.texts) < MAX_TEXTS,
    )
