"""The segments of a bundle's tables: JSON by columns, written without polars and read without trust.

Not polars' own writer: it starts polars' thread pool, and a DataLoader worker forked from this process afterwards would hang
for ever in its first polars call. Recording must leave no thread pool behind in the process that trains.

JSON, and no format that says beforehand how long a list is: a bundle may come from anyone, and nothing that is read may be larger than
the file. Of the first edition's bundles the segments are Parquet; they are read exactly as that edition wrote them, for polars' own reader
asks for more memory than any machine has after a few changed bytes, which ends the process.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import polars as pl

from gpudiag.files import open_file, read_file
from gpudiag.model import trace
from gpudiag.model.bundle import UNREADABLE

Cell = int | float | str | None

SUFFIXES = (".json", ".parquet")
"""Of a segment's file: what is written, and what the first edition wrote."""

REQUIRED = ("step", "start_unix_ns", "wall_ns", "t_ns", "kind", "name")
"""Columns that every segment has; others came with later versions, or are not known on every device."""

MAX_SEGMENT_BYTES = 128 << 20
"""Ten minutes of a thousand steps a second take some 70 MB."""

_ROWS = re.compile(rb'\{"table":"\w+","rows":(\d{1,12}),')


class NotASegmentError(ValueError):
    """The bytes are no table of a bundle."""


class Segment(msgspec.Struct, frozen=True):
    """Rows of a table; a column that is not known in any row is left out, unless every segment has it."""

    table: str
    rows: int
    columns: dict[str, list[Cell]]


def encode_segment(table: str, columns: Mapping[str, Sequence[Cell]]) -> bytes:
    """Return `columns` as a segment with the schema of `table` (model.trace; Int64, Float64 and String columns, nullable)."""
    known: dict[str, list[Cell]] = {}
    for name, dtype in trace.build_table_schema(table).items():
        values = list(columns[name])
        if dtype == pl.String():  # names of files may hold what is no text
            values = [None if value is None else str(value).encode("utf-8", "replace").decode() for value in values]
        if name in REQUIRED or any(value is not None for value in values):
            known[name] = values
    return msgspec.json.encode(Segment(table, len(next(iter(columns.values()))), known))


def decode_segment(data: bytes) -> pl.DataFrame:
    """Return the table in `data`: Int64, Float64 and String columns, those that are known. Raises NotASegmentError."""
    try:
        if data.startswith(_MAGIC):
            return _decode_parquet(data)
        segment = msgspec.json.decode(data, type=Segment)
        schema = trace.build_table_schema(segment.table)
        frame = pl.DataFrame([pl.Series(name, values, schema[name], strict=True) for name, values in segment.columns.items()])
        if frame.height == segment.rows:
            return frame
    except (*UNREADABLE, LookupError, TypeError, ValueError, OverflowError, struct.error, pl.exceptions.PolarsError):
        pass
    raise NotASegmentError("damaged, or not written by gpudiag")


def count_rows(path: Path) -> int:
    """Return the rows of the table in a file, as it says at its begin. Raises NotASegmentError, OSError."""
    with open_file(path) as file:
        found, size = _ROWS.match(file.read(256)), file.seek(0, os.SEEK_END)
    if found is None:
        return decode_segment(read_file(path, MAX_SEGMENT_BYTES)).height
    if int(found[1]) > size:
        raise NotASegmentError("damaged, or not written by gpudiag")
    return int(found[1])


# The first edition: one row group, for each column one page, PLAIN, not compressed. Format: https://github.com/apache/parquet-format
# (README.md and parquet.thrift), Thrift's compact protocol; the bytes around the numbers are those that its encoder wrote.

_MAGIC = b"PAR1"
_NUMBER = rb"([\x80-\xff]{0,8}[\x00-\x7f])"
_PAGE = re.compile(rb"\x15\x00\x15" + _NUMBER + rb"\x15" + _NUMBER + rb"\x2c\x15" + _NUMBER + rb"\x15\x00\x15\x06\x15\x06\x00\x00")
"""Header of a page: its bytes, twice, and its rows."""
_LEVELS = re.compile(_NUMBER)
_COLUMN = re.compile(rb"\x15([\x04\x0a\x0c])\x25\x02\x18.([a-z0-9_]+)(?:\x25\x00)?\x00", re.DOTALL)
"""A column in the footer: its type (INT64, DOUBLE or BYTE_ARRAY) and its name."""
_NUMBERS = {b"\x04": np.dtype("<i8"), b"\x0a": np.dtype("<f8")}


def _decode_parquet(data: bytes) -> pl.DataFrame:
    (length,) = struct.unpack("<I", data[-8:-4])
    columns, at = [], len(_MAGIC)
    for kind, name in _COLUMN.findall(data, max(at, len(data) - 8 - length)):
        header = _PAGE.match(data, at)
        if header is None:
            raise NotASegmentError
        size, rows = _decode_number(header[1]) >> 1, _decode_number(header[3]) >> 1
        at = header.end() + size
        columns.append(_decode_page(name.decode(), kind, data[header.end() : at], rows))
    if at != len(data) - 8 - length or not data.endswith(_MAGIC):
        raise NotASegmentError
    return pl.DataFrame(columns)


def _decode_number(data: bytes) -> int:
    return sum((byte & 0x7F) << 7 * place for place, byte in enumerate(data))


def _decode_page(name: str, kind: bytes, page: bytes, rows: int) -> pl.Series:
    (size,) = struct.unpack_from("<I", page)
    head = _LEVELS.match(page, 4, 4 + size)
    bits, body = page[head.end() if head else 0 : 4 + size], page[4 + size :]
    # which rows have a value: one run of bits (parquet.thrift, RLE/bit-packing hybrid)
    if head is None or _decode_number(head[1]) != len(bits) << 1 | 1 or len(bits) != (rows + 7) // 8:
        raise NotASegmentError
    present = np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8), count=rows, bitorder="little"))
    values: list[Cell] = [None] * rows
    if kind in _NUMBERS:
        found = np.frombuffer(body, _NUMBERS[kind]).tolist()
    else:
        found, at = [], 0
        while at < len(body):
            (size,) = struct.unpack_from("<I", body, at)
            found.append(body[at + 4 : at + 4 + size].decode())
            at += 4 + size
        if at != len(body):
            raise NotASegmentError
    for row, value in zip(present.tolist(), found, strict=True):
        values[row] = value
    return pl.Series(name, values, pl.String() if kind not in _NUMBERS else pl.Int64() if kind == b"\x04" else pl.Float64())
