"""A Parquet encoder for the small flat tables of a bundle.

Not polars' own writer: it starts polars' thread pool, and a DataLoader worker forked from this process afterwards would hang
for ever in its first polars call. Recording must leave no thread pool behind in the process that trains. One row group, PLAIN
encoding, no compression; format: https://github.com/apache/parquet-format (README.md and parquet.thrift), Thrift compact protocol.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import numpy as np
import polars as pl

from gpudiag.model import tables

Cell = int | float | str | None

MAGIC = b"PAR1"
INT64, DOUBLE, BYTE_ARRAY = 2, 5, 6  # parquet.thrift: Type
_PHYSICAL: dict[pl.DataType, int] = {pl.Int64(): INT64, pl.Float64(): DOUBLE, pl.String(): BYTE_ARRAY}
_OPTIONAL, _UTF8 = 1, 0  # FieldRepetitionType, ConvertedType
PLAIN, RLE, UNCOMPRESSED, DATA_PAGE = 0, 3, 0, 0
I32, I64, BINARY, LIST, STRUCT = 5, 6, 8, 9, 12  # Thrift compact protocol field types


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _zigzag(value: int) -> bytes:
    return _varint(value << 1)  # every number of this format that is written here is non-negative


def _binary(text: str) -> bytes:
    data = text.encode("utf-8", "replace")
    return _varint(len(data)) + data


def _list(kind: int, items: Sequence[bytes]) -> bytes:
    head = bytes([len(items) << 4 | kind]) if len(items) < 15 else bytes([0xF0 | kind]) + _varint(len(items))
    return head + b"".join(items)


def _struct(*fields: tuple[int, int, bytes]) -> bytes:
    """Return a Thrift struct from (field id, type, encoded value) in ascending order of ids."""
    out, last = bytearray(), 0
    for number, kind, value in fields:
        out.append((number - last) << 4 | kind)
        out += value
        last = number
    return bytes(out) + b"\0"


def _page(values: Sequence[Cell], kind: int) -> bytes:
    """Return one data page: header, definition levels (1 = present), values."""
    present = np.fromiter((value is not None for value in values), dtype=np.uint8, count=len(values))
    bits = np.packbits(present, bitorder="little").tobytes()
    levels = _varint(len(bits) << 1 | 1) + bits
    found = [value for value in values if value is not None]
    if kind == BYTE_ARRAY:
        encoded = [str(value).encode("utf-8", "replace") for value in found]
        body = b"".join(struct.pack("<I", len(item)) + item for item in encoded)
    else:
        body = np.asarray(found, dtype="<f8" if kind == DOUBLE else "<i8").tobytes()
    data = struct.pack("<I", len(levels)) + levels + body
    size = _zigzag(len(data))
    counts = _struct((1, I32, _zigzag(len(values))), (2, I32, _zigzag(PLAIN)), (3, I32, _zigzag(RLE)), (4, I32, _zigzag(RLE)))
    return _struct((1, I32, _zigzag(DATA_PAGE)), (2, I32, size), (3, I32, size), (5, STRUCT, counts)) + data


def _chunk(name: str, kind: int, rows: int, offset: int, size: int) -> bytes:
    """Return the ColumnChunk of a page of `size` bytes that starts at `offset`."""
    meta = _struct(
        (1, I32, _zigzag(kind)),
        (2, LIST, _list(I32, [_zigzag(PLAIN), _zigzag(RLE)])),
        (3, LIST, _list(BINARY, [_binary(name)])),
        (4, I32, _zigzag(UNCOMPRESSED)),
        (5, I64, _zigzag(rows)),
        (6, I64, _zigzag(size)),
        (7, I64, _zigzag(size)),
        (9, I64, _zigzag(offset)),
    )
    return _struct((2, I64, _zigzag(offset)), (3, STRUCT, meta))


def _element(name: str, kind: int) -> bytes:
    fields = [(1, I32, _zigzag(kind)), (3, I32, _zigzag(_OPTIONAL)), (4, BINARY, _binary(name))]
    return _struct(*fields, *([(6, I32, _zigzag(_UTF8))] if kind == BYTE_ARRAY else []))


def encode(table: str, columns: Mapping[str, Sequence[Cell]]) -> bytes:
    """Return `columns` as a Parquet file with the schema of `table` (model.tables; Int64, Float64 and String columns, nullable)."""
    schema = {name: _PHYSICAL[dtype] for name, dtype in tables.schema(table).items()}
    rows = len(next(iter(columns.values())))
    out, chunks = bytearray(MAGIC), []
    for name, kind in schema.items():
        page = _page(columns[name], kind)
        chunks.append(_chunk(name, kind, rows, len(out), len(page)))
        out += page
    root = _struct((4, BINARY, _binary("schema")), (5, I32, _zigzag(len(schema))))
    group = _struct((1, LIST, _list(STRUCT, chunks)), (2, I64, _zigzag(len(out) - len(MAGIC))), (3, I64, _zigzag(rows)))
    footer = _struct(
        (1, I32, _zigzag(1)),
        (2, LIST, _list(STRUCT, [root, *(_element(name, kind) for name, kind in schema.items())])),
        (3, I64, _zigzag(rows)),
        (4, LIST, _list(STRUCT, [group])),
        (6, BINARY, _binary("gpudiag")),
    )
    return bytes(out + footer + struct.pack("<I", len(footer)) + MAGIC)
