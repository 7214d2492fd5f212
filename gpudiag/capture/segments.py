"""The segments of a bundle's tables: a Parquet encoder that starts no thread pool, and a decoder that trusts nothing.

Not polars' own writer: it starts polars' thread pool, and a DataLoader worker forked from this process afterwards would hang
for ever in its first polars call. Recording must leave no thread pool behind in the process that trains. One row group, PLAIN
encoding, no compression; format: https://github.com/apache/parquet-format (README.md and parquet.thrift), Thrift compact protocol.

Not polars' own reader either: a bundle may come from anyone, and a few changed bytes make that one ask for more memory than any machine
has, which ends the process. Exactly what encode_segment writes is read here, and nothing is larger than the file.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from gpudiag.files import open_file
from gpudiag.model import trace

Cell = int | float | str | None
Encodable = int | str | bytes | tuple[int, Sequence[int | str | bytes]]

MAGIC = b"PAR1"
INT64, DOUBLE, BYTE_ARRAY = 2, 5, 6  # parquet.thrift: Type
_PHYSICAL: dict[pl.DataType, int] = {pl.Int64(): INT64, pl.Float64(): DOUBLE, pl.String(): BYTE_ARRAY}
_NUMBER_TYPES = {INT64: np.dtype("<i8"), DOUBLE: np.dtype("<f8")}
_OPTIONAL, _UTF8 = 1, 0  # FieldRepetitionType, ConvertedType
PLAIN, RLE, UNCOMPRESSED, DATA_PAGE = 0, 3, 0, 0
I32, I64, BINARY, LIST, STRUCT = 5, 6, 8, 9, 12  # Thrift compact protocol field types


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _encode_value(value: Encodable) -> bytes:
    """Return a number, a text or a list (type of its items, items) in Thrift's compact protocol; structs come encoded."""
    if isinstance(value, int):
        return _encode_varint(value << 1)  # zigzag; every number of this format that is written here is non-negative
    if isinstance(value, str):
        data = value.encode("utf-8", "replace")
        return _encode_varint(len(data)) + data
    if isinstance(value, tuple):
        kind, items = value
        head = bytes([len(items) << 4 | kind]) if len(items) < 15 else bytes([0xF0 | kind]) + _encode_varint(len(items))
        return head + b"".join(map(_encode_value, items))
    return value


def _encode_struct(*fields: tuple[int, int, Encodable]) -> bytes:
    out, last = bytearray(), 0
    for number, kind, value in fields:
        out.append((number - last) << 4 | kind)
        out += _encode_value(value)
        last = number
    return bytes(out) + b"\0"


def _encode_page(values: Sequence[Cell], kind: int) -> bytes:
    """Return one data page: header, definition levels (1 = present), values."""
    present = np.fromiter((value is not None for value in values), dtype=np.uint8, count=len(values))
    bits = np.packbits(present, bitorder="little").tobytes()
    levels = _encode_varint(len(bits) << 1 | 1) + bits
    known = [value for value in values if value is not None]
    if kind == BYTE_ARRAY:
        texts = [str(value).encode("utf-8", "replace") for value in known]
        body = b"".join(struct.pack("<I", len(text)) + text for text in texts)
    else:
        body = np.asarray(known, dtype=_NUMBER_TYPES[kind]).tobytes()
    data = struct.pack("<I", len(levels)) + levels + body
    counts = _encode_struct((1, I32, len(values)), (2, I32, PLAIN), (3, I32, RLE), (4, I32, RLE))
    return _encode_struct((1, I32, DATA_PAGE), (2, I32, len(data)), (3, I32, len(data)), (5, STRUCT, counts)) + data


def encode_segment(table: str, columns: Mapping[str, Sequence[Cell]]) -> bytes:
    """Return `columns` as a Parquet file with the schema of `table` (model.trace; Int64, Float64 and String columns, nullable)."""
    rows = len(next(iter(columns.values())))
    out, chunks = bytearray(MAGIC), []
    elements = [_encode_struct((4, BINARY, "schema"), (5, I32, len(trace.build_table_schema(table))))]
    for name, dtype in trace.build_table_schema(table).items():
        kind, page, offset = _PHYSICAL[dtype], _encode_page(columns[name], _PHYSICAL[dtype]), len(out)
        out += page
        text_type = [(6, I32, _UTF8)] if kind == BYTE_ARRAY else []
        elements.append(_encode_struct((1, I32, kind), (3, I32, _OPTIONAL), (4, BINARY, name), *text_type))
        meta = _encode_struct(
            (1, I32, kind), (2, LIST, (I32, [PLAIN, RLE])), (3, LIST, (BINARY, [name])),
            (4, I32, UNCOMPRESSED), (5, I64, rows), (6, I64, len(page)), (7, I64, len(page)), (9, I64, offset),
        )  # fmt: skip
        chunks.append(_encode_struct((2, I64, offset), (3, STRUCT, meta)))
    group = _encode_struct((1, LIST, (STRUCT, chunks)), (2, I64, len(out) - len(MAGIC)), (3, I64, rows))
    footer = _encode_struct(
        (1, I32, 1),
        (2, LIST, (STRUCT, elements)),
        (3, I64, rows),
        (4, LIST, (STRUCT, [group])),
        (6, BINARY, "gpudiag"),
    )
    return bytes(out + footer + struct.pack("<I", len(footer)) + MAGIC)


_END_BYTES = 8
"""The length of the footer, and the magic number."""
_MAX_FOOTER_BYTES, _MAX_HEADER_BYTES = 1 << 16, 256
"""Ours have some 2,000 and 20. Each byte of them may become a Python object."""
_MAX_DEPTH = 8
"""A footer of ours has 5 levels."""
_MAX_VARINT_BITS = 70


class NotASegmentError(ValueError):
    """The bytes are no table of a bundle."""


def decode_segment(data: bytes) -> pl.DataFrame:
    """Return the table in `data`: Int64, Float64 and String columns. Raises NotASegmentError."""
    try:
        footer = _read_footer(data)
        (group,), (_, *elements) = footer[4], footer[2]
        columns = [_read_column(data, footer[3], element, chunk) for element, chunk in zip(elements, group[1], strict=True)]
        return pl.DataFrame(columns)
    except (LookupError, TypeError, ValueError, AttributeError, struct.error, pl.exceptions.PolarsError):
        raise NotASegmentError("damaged, or not written by gpudiag") from None


def count_rows(path: Path) -> int:
    """Return the rows of the table in a file, as its end counts them. Raises NotASegmentError, OSError."""
    with open_file(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _MAX_FOOTER_BYTES - _END_BYTES))
        end = file.read(_MAX_FOOTER_BYTES + _END_BYTES)
    try:
        found = _read_footer(end)[3]
    except (LookupError, TypeError, ValueError, struct.error):
        found = -1
    if not isinstance(found, int) or not 0 <= found <= 8 * size:  # a row takes a bit of each column
        raise NotASegmentError("damaged, or not written by gpudiag")
    return found


def _read_footer(data: bytes) -> dict[int, Any]:
    (length,) = struct.unpack("<I", data[-_END_BYTES:-4])
    if not data.endswith(MAGIC) or length > min(_MAX_FOOTER_BYTES, len(data) - _END_BYTES):
        raise NotASegmentError
    footer: dict[int, Any] = _Thrift(data[-_END_BYTES - length : -_END_BYTES]).read(STRUCT)
    return footer


def _read_column(data: bytes, count: int, element: dict[int, Any], chunk: dict[int, Any]) -> pl.Series:
    name, kind, meta = element[4].decode(), element[1], chunk[3]
    reader = _Thrift(data[meta[9] : meta[9] + _MAX_HEADER_BYTES])
    header = reader.read(STRUCT)
    page, counts = data[meta[9] + reader.at :][: header[3]], header[5]
    told = (meta[1], meta[4], meta[5], header[1], header[2], counts[1], counts[2], counts[3])
    if told != (kind, UNCOMPRESSED, count, DATA_PAGE, len(page), count, PLAIN, RLE):
        raise NotASegmentError
    (size,) = struct.unpack_from("<I", page)
    # which rows have a value: one run of bits (parquet.thrift, RLE/bit-packing hybrid)
    levels = _Thrift(page[4 : 4 + size])
    head = levels.varint()
    bits, body = page[4 + levels.at : 4 + size], page[4 + size :]
    if head != len(bits) << 1 | 1 or count < 0 or len(bits) != (count + 7) // 8:
        raise NotASegmentError
    present = np.unpackbits(np.frombuffer(bits, np.uint8), count=count, bitorder="little").astype(np.bool_)
    if kind == BYTE_ARRAY:
        texts: list[str | None] = [None] * count
        at = 0
        for row in np.flatnonzero(present).tolist():
            (size,) = struct.unpack_from("<I", body, at)
            at += 4 + size
            if at > len(body):
                raise NotASegmentError
            texts[row] = body[at - size : at].decode()
        if at != len(body):
            raise NotASegmentError
        return pl.Series(name, texts, dtype=pl.String)
    found = np.frombuffer(body, _NUMBER_TYPES[kind])
    full = np.zeros(present.size, _NUMBER_TYPES[kind])
    full[present] = found  # raises ValueError where there are more or fewer
    if found.size != int(present.sum()):  # one value would be spread over all rows
        raise NotASegmentError
    known: pl.Series = pl.Series(name, full).set(pl.Series(~present), None)
    return known


class _Thrift:
    """Reads the part of Thrift's compact protocol that encode_segment writes."""

    def __init__(self, data: bytes) -> None:
        self._data, self.at = data, 0

    def take(self, length: int) -> bytes:
        found = self._data[self.at : self.at + length]
        if length < 0 or len(found) < length:
            raise NotASegmentError
        self.at += length
        return found

    def varint(self) -> int:
        found = shift = 0
        while True:
            byte = self.take(1)[0]
            found |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80 or shift >= _MAX_VARINT_BITS:
                return found

    def read(self, kind: int, depth: int = 0) -> Any:
        """Return a value of this type; of a struct a dictionary by field id."""
        if depth > _MAX_DEPTH:
            raise NotASegmentError
        if kind in (I32, I64):
            number = self.varint()
            return number >> 1 ^ -(number & 1)
        if kind == BINARY:
            return self.take(self.varint())
        if kind == LIST:
            head = self.take(1)[0]
            size = head >> 4 if head >> 4 < 15 else self.varint()
            return [self.read(head & 15, depth + 1) for _ in range(size)]  # each takes a byte at least
        if kind != STRUCT:
            raise NotASegmentError
        fields: dict[int, Any] = {}
        number = 0
        while head := self.take(1)[0]:
            number += head >> 4
            fields[number] = self.read(head & 15, depth + 1)
        return fields
