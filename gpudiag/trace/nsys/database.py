"""The SQLite file of an export as columns. It is untrusted: opened read-only, nothing that its schema defines can run.

Only ordinary columns of real tables are read: no view, no virtual table, no generated column (https://www.sqlite.org/security.html). No
text of the file reaches a statement. Work and texts are bounded by the size of the file, because a damaged tree of pages may name a page
twice, and many rows the same pages for their long values. So no value is fetched that is not of the wanted type.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import polars as pl

from gpudiag.errors import InputError
from gpudiag.files import open_file
from gpudiag.trace.source import MAX_TEXT_BYTES, shown

_HEADER_BYTES = 100
"""Of these, 16 and 17 hold the size of a page (1 stands for 65,536) and 28 to 31 the number of pages
(https://www.sqlite.org/fileformat.html, section 1.3)."""

EXPORT_AGAIN = "export the recording again: nsys export --type sqlite REPORT.nsys-rep"

CHUNK_ROWS = 50_000
"""Rows that exist as Python objects at a time."""

LONGEST_TEXT = 8192
"""Characters of a name that are kept; C++ kernel names reach some thousands."""

_STEPS_PER_BYTE = 12
"""Instructions of SQLite's machine that are allowed for each byte of the file: one with a million kernels took 0.44 (measured)."""
_STEPS_AT_LEAST = 2_000_000
_CALL_EVERY = 100_000

_TEXTS_PER_BYTE = 2
"""Bytes of text that are read for each byte of the file: it holds each once, and few names are used by two tables."""
_TEXTS_AT_LEAST = 1 << 20


class Export:
    """An open export: which of its tables hold which columns, and their contents."""

    def __init__(self, connection: sqlite3.Connection, tables: Iterable[str]) -> None:
        self._connection = connection
        self.columns = {table: found for table in tables if (found := self._columns(table))}

    def _columns(self, table: str) -> frozenset[str]:
        """Return the ordinary columns of `table`; none where it is missing, a view or virtual (those have no root page)."""
        real = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND rootpage > 0 AND name = ?"
        if self._connection.execute(real, (table,)).fetchone() is None:
            return frozenset()
        return frozenset(row[1] for row in self._connection.execute(f"PRAGMA table_info([{table}])"))

    def read(
        self, table: str, integers: Sequence[str], texts: Sequence[str] = (), products: Mapping[str, Sequence[str]] | None = None
    ) -> pl.DataFrame:
        """Return the columns of `table` as Int64 and String; a column that the export lacks, or a value of another type, is null.

        `products`: new columns, each the product of columns.
        """
        products = products or {}
        known = self.columns.get(table, frozenset())
        names = (*integers, *products, *texts)
        schema = dict.fromkeys((*integers, *products), pl.Int64()) | dict.fromkeys(texts, pl.String())
        parts = [pl.DataFrame(schema=schema)]
        if known.isdisjoint(names):
            return parts[0]
        fields = [_integer(name) if name in known else "NULL" for name in integers]
        fields += [" * ".join(f"[{name}]" for name in of) if known.issuperset(of) else "NULL" for of in products.values()]
        fields += [_text(name) if name in known else "NULL" for name in texts]
        cursor = self._connection.execute(f"SELECT {', '.join(fields)} FROM [{table}]")  # noqa: S608 - names are gpudiag's own
        while rows := cursor.fetchmany(CHUNK_ROWS):
            columns = zip(names, zip(*rows, strict=True), strict=True)
            parts.append(pl.DataFrame([_column(name, values, schema[name]) for name, values in columns]))
        return pl.concat(parts, rechunk=True)

    def counts(self, table: str, column: str) -> dict[int, int]:
        """Return the number of rows of `table` for each number in `column`."""
        if column not in self.columns.get(table, frozenset()):
            return {}
        statement = f"SELECT [{column}], count(*) FROM [{table}] WHERE typeof([{column}]) = 'integer' GROUP BY 1"  # noqa: S608 - as above
        return dict(self._connection.execute(statement))

    def strings(self, table: str, column: str) -> pl.DataFrame:
        """Return (id, value) of the texts of StringIds that `column` of `table` refers to."""
        known = self.columns.get(table, frozenset())
        if column not in known or not {"id", "value"} <= self.columns.get("StringIds", frozenset()):
            return pl.DataFrame(schema={"id": pl.Int64, "value": pl.String})
        used = f"SELECT {_integer(column)} FROM [{table}]"  # noqa: S608 - names are gpudiag's own
        statement = f"SELECT {_integer('id')}, {_text('value')} FROM StringIds WHERE id IN ({used})"  # noqa: S608
        rows = self._connection.execute(statement).fetchall()
        ids, values = zip(*rows, strict=True) if rows else ((), ())
        found = pl.DataFrame([_column("id", ids, pl.Int64()), _column("value", values, pl.String())])
        return found.drop_nulls().unique("id", keep="first", maintain_order=True)


def _integer(column: str) -> str:
    return f"CASE typeof([{column}]) WHEN 'integer' THEN [{column}] END"


def _text(column: str) -> str:
    return f"CASE typeof([{column}]) WHEN 'text' THEN substr([{column}], 1, {LONGEST_TEXT}) END"


def _column(name: str, values: Sequence[Any], dtype: pl.DataType) -> pl.Series:
    """Return `values` as a column; SQLite lets every row have a type of its own, and what is not of `dtype` is null."""
    wanted = int if dtype == pl.Int64 else str
    if not set(map(type, values)) <= {wanted, type(None)}:
        values = [value if type(value) is wanted else None for value in values]
    return pl.Series(name, values, dtype=dtype)


@contextmanager
def open_export(path: str, tables: Iterable[str]) -> Iterator[Export]:
    """Open the export at `path` for reading those of `tables` that it has.

    Raises InputError where the file is damaged, also when that shows while it is read.
    """
    size = _size(path)
    _check_whole(path, size)
    try:
        with closing(sqlite3.connect(f"{Path(os.path.abspath(path)).as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
            connection.text_factory = _bounded_texts(path, size)
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.execute("PRAGMA query_only = ON")
            _bound_work(connection, size)
            yield Export(connection, tables)
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the second where a damaged name stands in a message of SQLite
        told = "".join(filter(str.isprintable, str(error)))[:100]
        raise InputError(f"{shown(path)} is damaged or incomplete: SQLite says '{told}'", EXPORT_AGAIN) from None


def _size(path: str) -> int:
    try:
        size = os.path.getsize(path)
    except OSError as error:
        raise InputError(f"{shown(path)} cannot be read: {error.strerror}", "check the path and its access rights") from None
    if size > MAX_TEXT_BYTES:
        raise InputError(f"{shown(path)} is larger than {MAX_TEXT_BYTES >> 30} GiB", "record fewer steps")
    return size


def _check_whole(path: str, size: int) -> None:
    """Raise InputError where the file is shorter than its header says: SQLite reads what is missing as empty pages."""
    with open_file(path) as file:
        head = file.read(_HEADER_BYTES)
    page = int.from_bytes(head[16:18], "big")
    told = int.from_bytes(head[28:32], "big") * (65_536 if page == 1 else page)
    if len(head) < _HEADER_BYTES or size < told:
        raise InputError(f"{shown(path)} is damaged or incomplete: {size:,} of {told:,} bytes are there", EXPORT_AGAIN)


def _bound_work(connection: sqlite3.Connection, size: int) -> None:
    """Let SQLite give up after more work than a file of `size` bytes can ask for."""
    left = (_STEPS_AT_LEAST + _STEPS_PER_BYTE * size) // _CALL_EVERY

    def over() -> bool:
        nonlocal left
        left -= 1
        return left < 0

    connection.set_progress_handler(over, _CALL_EVERY)


def _bounded_texts(path: str, size: int) -> Callable[[bytes], str]:
    """Return what decodes the texts of a file of `size` bytes, and raises InputError once they are more than it has room for."""
    left = _TEXTS_AT_LEAST + _TEXTS_PER_BYTE * size

    def decoded(text: bytes) -> str:
        nonlocal left
        left -= len(text)
        if left < 0:
            raise InputError(f"{shown(path)} is damaged: its texts are longer than the file", EXPORT_AGAIN)
        return text.decode("utf-8", "replace")

    return decoded
