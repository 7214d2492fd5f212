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

_MAGIC = b"PAR1"
_INT64, _DOUBLE, _BYTE_ARRAY = 2, 5, 6  # parquet.thrift: Type
_PHYSICAL: dict[pl.DataType, int] = {pl.Int64(): _INT64, pl.Float64(): _DOUBLE, pl.String(): _BYTE_ARRAY}
_OPTIONAL, _UTF8 = 1, 0  # FieldRepetitionType, ConvertedType
_PLAIN, _RLE, _UNCOMPRESSED, _DATA_PAGE = 0, 3, 0, 0
_I32, _I64, _BINARY, _LIST, _STRUCT = 5, 6, 8, 9, 12  # Thrift compact protocol field types


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
    if kind == _BYTE_ARRAY:
        encoded = [str(value).encode("utf-8", "replace") for value in found]
        body = b"".join(struct.pack("<I", len(item)) + item for item in encoded)
    else:
        body = np.asarray(found, dtype="<f8" if kind == _DOUBLE else "<i8").tobytes()
    data = struct.pack("<I", len(levels)) + levels + body
    size = _zigzag(len(data))
    counts = _struct((1, _I32, _zigzag(len(values))), (2, _I32, _zigzag(_PLAIN)), (3, _I32, _zigzag(_RLE)), (4, _I32, _zigzag(_RLE)))
    return _struct((1, _I32, _zigzag(_DATA_PAGE)), (2, _I32, size), (3, _I32, size), (5, _STRUCT, counts)) + data


def _chunk(name: str, kind: int, rows: int, offset: int, size: int) -> bytes:
    """Return the ColumnChunk of a page of `size` bytes that starts at `offset`."""
    meta = _struct(
        (1, _I32, _zigzag(kind)),
        (2, _LIST, _list(_I32, [_zigzag(_PLAIN), _zigzag(_RLE)])),
        (3, _LIST, _list(_BINARY, [_binary(name)])),
        (4, _I32, _zigzag(_UNCOMPRESSED)),
        (5, _I64, _zigzag(rows)),
        (6, _I64, _zigzag(size)),
        (7, _I64, _zigzag(size)),
        (9, _I64, _zigzag(offset)),
    )
    return _struct((2, _I64, _zigzag(offset)), (3, _STRUCT, meta))


def _element(name: str, kind: int) -> bytes:
    fields = [(1, _I32, _zigzag(kind)), (3, _I32, _zigzag(_OPTIONAL)), (4, _BINARY, _binary(name))]
    return _struct(*fields, *([(6, _I32, _zigzag(_UTF8))] if kind == _BYTE_ARRAY else []))


def encode(table: str, columns: Mapping[str, Sequence[Cell]]) -> bytes:
    """Return `columns` as a Parquet file with the schema of `table` (model.tables; Int64, Float64 and String columns, nullable)."""
    schema = {name: _PHYSICAL[dtype] for name, dtype in tables.schema(table).items()}
    rows = len(next(iter(columns.values())))
    out, chunks = bytearray(_MAGIC), []
    for name, kind in schema.items():
        page = _page(columns[name], kind)
        chunks.append(_chunk(name, kind, rows, len(out), len(page)))
        out += page
    root = _struct((4, _BINARY, _binary("schema")), (5, _I32, _zigzag(len(schema))))
    group = _struct((1, _LIST, _list(_STRUCT, chunks)), (2, _I64, _zigzag(len(out) - len(_MAGIC))), (3, _I64, _zigzag(rows)))
    footer = _struct(
        (1, _I32, _zigzag(1)),
        (2, _LIST, _list(_STRUCT, [root, *(_element(name, kind) for name, kind in schema.items())])),
        (3, _I64, _zigzag(rows)),
        (4, _LIST, _list(_STRUCT, [group])),
        (6, _BINARY, _binary("gpudiag")),
    )
    return bytes(out + footer + struct.pack("<I", len(footer)) + _MAGIC)
