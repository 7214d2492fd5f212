"""The small tables of a bundle read back: exactly the Parquet that parquet.py writes, and nothing else.

Not polars' own reader: a bundle may come from anyone, and a few changed bytes make that one ask for more memory than any machine has,
which ends the process. Here nothing is larger than the file. Format: see parquet.py.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.capture.parquet import (
    BINARY,
    BYTE_ARRAY,
    DATA_PAGE,
    DOUBLE,
    I32,
    I64,
    INT64,
    LIST,
    MAGIC,
    PLAIN,
    RLE,
    STRUCT,
    UNCOMPRESSED,
)  # fmt: skip
from gpudiag.files import open_file

_NUMBERS = {INT64: np.dtype("<i8"), DOUBLE: np.dtype("<f8")}
_END_BYTES = 8
"""The length of the footer, and the magic number."""
_MAX_FOOTER_BYTES, _MAX_HEADER_BYTES = 1 << 16, 256
"""Ours have some 2,000 and 20. Each byte of them may become a Python object."""
_MAX_DEPTH = 8
"""A footer of ours has 5 levels."""
_MAX_VARINT_BITS = 70


class NotASegmentError(ValueError):
    """The bytes are no table of a bundle."""


def decode(data: bytes) -> pl.DataFrame:
    """Return the table in `data`: Int64, Float64 and String columns. Raises NotASegmentError."""
    try:
        footer = _footer(data)
        (group,), (_, *elements) = footer[4], footer[2]
        columns = [_column(data, footer[3], element, chunk) for element, chunk in zip(elements, group[1], strict=True)]
        return pl.DataFrame(columns)
    except (LookupError, TypeError, ValueError, AttributeError, struct.error, pl.exceptions.PolarsError):
        raise NotASegmentError("damaged, or not written by gpudiag") from None


def rows(path: Path) -> int:
    """Return the rows of the table in a file, as its end counts them. Raises NotASegmentError, OSError."""
    with open_file(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _MAX_FOOTER_BYTES - _END_BYTES))
        end = file.read(_MAX_FOOTER_BYTES + _END_BYTES)
    try:
        found = _footer(end)[3]
    except (LookupError, TypeError, ValueError, struct.error):
        found = -1
    if not isinstance(found, int) or not 0 <= found <= 8 * size:  # a row takes a bit of each column
        raise NotASegmentError("damaged, or not written by gpudiag")
    return found


def _footer(data: bytes) -> dict[int, Any]:
    """Return the footer at the end of `data`."""
    (length,) = struct.unpack("<I", data[-_END_BYTES:-4])
    if not data.endswith(MAGIC) or length > min(_MAX_FOOTER_BYTES, len(data) - _END_BYTES):
        raise NotASegmentError
    return _Thrift(data[-_END_BYTES - length : -_END_BYTES]).struct()


def _column(data: bytes, count: int, element: dict[int, Any], chunk: dict[int, Any]) -> pl.Series:
    """Return one column of `count` rows: its page is found where the footer says."""
    kind, meta = element[1], chunk[3]
    reader = _Thrift(data[meta[9] : meta[9] + _MAX_HEADER_BYTES])
    header = reader.struct()
    page, counts = data[meta[9] + reader.at :][: header[3]], header[5]
    told = (meta[1], meta[4], meta[5], header[1], header[2], counts[1], counts[2], counts[3])
    if told != (kind, UNCOMPRESSED, count, DATA_PAGE, len(page), count, PLAIN, RLE):
        raise NotASegmentError
    (size,) = struct.unpack_from("<I", page)
    return _values(element[4].decode(), kind, _present(page[4 : 4 + size], count), page[4 + size :])


def _present(levels: bytes, count: int) -> npt.NDArray[np.bool_]:
    """Return which of `count` rows have a value: one run of bits (parquet.thrift, RLE/bit-packing hybrid)."""
    reader = _Thrift(levels)
    head = reader.varint()
    bits = levels[reader.at :]
    if head != len(bits) << 1 | 1 or count < 0 or len(bits) != (count + 7) // 8:
        raise NotASegmentError
    return np.unpackbits(np.frombuffer(bits, np.uint8), count=count, bitorder="little").astype(np.bool_)


def _values(name: str, kind: int, present: npt.NDArray[np.bool_], body: bytes) -> pl.Series:
    if kind == BYTE_ARRAY:
        texts = iter(_texts(body, int(present.sum())))
        return pl.Series(name, [next(texts) if there else None for there in present.tolist()], dtype=pl.String)
    found = np.frombuffer(body, _NUMBERS[kind])
    full = np.zeros(present.size, _NUMBERS[kind])
    full[present] = found  # raises ValueError where there are more or fewer
    if found.size != int(present.sum()):  # one value would be spread over all rows
        raise NotASegmentError
    known: pl.Series = pl.Series(name, full).set(pl.Series(~present), None)
    return known


def _texts(body: bytes, count: int) -> list[str]:
    found, at = [], 0
    for _ in range(count):
        (size,) = struct.unpack_from("<I", body, at)
        at += 4 + size
        if at > len(body):
            raise NotASegmentError
        found.append(body[at - size : at].decode())
    if at != len(body):
        raise NotASegmentError
    return found


class _Thrift:
    """Reads the part of Thrift's compact protocol that parquet.py writes."""

    def __init__(self, data: bytes) -> None:
        self._data, self.at = data, 0

    def taken(self, length: int) -> bytes:
        """Return the next `length` bytes."""
        found = self._data[self.at : self.at + length]
        if length < 0 or len(found) < length:
            raise NotASegmentError
        self.at += length
        return found

    def varint(self) -> int:
        """Return an unsigned number, seven bits a byte."""
        found = shift = 0
        while True:
            byte = self.taken(1)[0]
            found |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80 or shift >= _MAX_VARINT_BITS:
                return found

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """Return the fields of a struct by their numbers."""
        found: dict[int, Any] = {}
        number = 0
        while head := self.taken(1)[0]:
            number += head >> 4
            found[number] = self._value(head & 15, depth + 1)
        return found

    def _value(self, kind: int, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise NotASegmentError
        if kind in (I32, I64):
            number = self.varint()
            return number >> 1 ^ -(number & 1)
        if kind == BINARY:
            return self.taken(self.varint())
        if kind == LIST:
            head = self.taken(1)[0]
            size = head >> 4 if head >> 4 < 15 else self.varint()
            return [self._value(head & 15, depth + 1) for _ in range(size)]  # each takes a byte at least
        if kind == STRUCT:
            return self.struct(depth)
        raise NotASegmentError
