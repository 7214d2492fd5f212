"""A bundle -> a copy of its files that may be shared, written anew from what gpudiag knows of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import polars as pl

from gpudiag.api.scrub.manifest import Values
from gpudiag.api.scrub.trace import Scrubber, packed
from gpudiag.api.scrub.words import Words
from gpudiag.capture.bundle import MAX_INDUCTOR_BYTES, read_manifest, read_segment, traces_of
from gpudiag.capture.folder import SEGMENTS, inductor_name, manifest_name, ranks_of
from gpudiag.capture.memory.files import MAX_OWNERS_BYTES, owners_name
from gpudiag.capture.parquet import encode
from gpudiag.files import read_file
from gpudiag.model import tables
from gpudiag.model.decoding import UNREADABLE
from gpudiag.model.inductor import InductorCode
from gpudiag.model.memory import Owners
from gpudiag.report.files import write, write_pieces

Tell = Callable[[str], None]
_Kept = TypeVar("_Kept", Owners, InductorCode)


class BundleScrubber:
    """Writes the files of one bundle to another folder."""

    def __init__(self, source: Path, target: Path, scrubber: Scrubber, words: Words) -> None:
        self._source, self._target = source, target
        self._scrubber, self._words = scrubber, words
        self._values = Values(scrubber.names, words)
        self.written: list[Path] = []
        """Files of the copy, relative to it; those of the source with the same names are what they were made from."""

    def copy(self, tell: Tell) -> None:
        """Write everything that is known; what cannot be read is noted. Raises InputError where a manifest or a trace cannot be read."""
        for rank in ranks_of(self._source):
            name = manifest_name(rank)
            self._write(name, msgspec.json.encode(self._values.manifest(read_manifest(self._source / name))) + b"\n")
            self._small(owners_name(rank), Owners, MAX_OWNERS_BYTES, self._values.owners)
            self._small(inductor_name(rank), InductorCode, MAX_INDUCTOR_BYTES, self._values.inductor)
            for table, folder in SEGMENTS.items():
                for path in sorted((self._source / folder / f"rank{rank}").glob("[0-9]*.parquet")):
                    self._segment(table, path)
        for path in traces_of(self._source).values():
            name = str(path.relative_to(self._source))
            tell(f"scrubbing {name}")
            self._to(name)
            write_pieces(self._target / name, packed(self._scrubber.pieces(str(path), tell), name))

    def left_out(self) -> int:
        """Return how many files of the source have no counterpart."""
        written = set(self.written)
        return sum(path.relative_to(self._source) not in written for path in self._source.rglob("*") if path.is_file())

    def texts(self) -> Iterator[Iterator[bytes]]:
        """Yield the texts of the copy's files but for the traces, read again, as JSON."""
        for name in self.written:
            path = self._target / name
            if path.suffix == ".parquet":
                yield _strings(path)
            elif path.suffix == ".json":
                yield iter([path.read_bytes()])

    def traces(self) -> list[Path]:
        """Return the traces of the copy."""
        return [self._target / name for name in self.written if name.parent.name == "trace"]

    def _small(self, name: str, kind: type[_Kept], limit: int, rewrite: Callable[[_Kept], _Kept]) -> None:
        path = self._source / name
        if not path.is_file() or path.is_symlink():
            return
        try:
            found = msgspec.json.decode(read_file(path, limit), type=kind)
        except (OSError, *UNREADABLE):
            self._words.removed.note("files that could not be read")
        else:
            self._write(name, msgspec.json.encode(rewrite(found)))

    def _segment(self, table: str, path: Path) -> None:
        """Write the known columns of one segment; its own metadata and other columns stay behind."""
        frame = None if path.is_symlink() else read_segment(path, tables.schema(table))
        if frame is None:
            self._words.removed.note("files that could not be read")
            return
        columns: dict[str, Any] = frame.to_dict(as_series=False)
        for name in (name for name, kind in frame.schema.items() if kind == pl.String):
            rewrite = self._scrubber.names.site if name == "site" else self._values.sentence
            columns[name] = [None if text is None else rewrite(text) for text in columns[name]]
        self._write(str(path.relative_to(self._source)), encode(table, columns))

    def _to(self, name: str) -> None:
        (self._target / name).parent.mkdir(parents=True, exist_ok=True)
        self.written.append(Path(name))

    def _write(self, name: str, data: bytes) -> None:
        self._to(name)
        write(self._target / name, data)


def _strings(path: Path) -> Iterator[bytes]:
    """Yield the texts of a table as JSON."""
    frame = pl.read_parquet(path)
    for column in frame.select(pl.col(pl.String)).iter_columns():
        yield msgspec.json.encode(column.unique().to_list()) + b"\n"
    yield msgspec.json.encode(frame.columns)
