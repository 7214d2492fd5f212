"""A RankSummary as bytes and back: MessagePack for the fields, Arrow IPC for the tables. No pickle: bytes of others run no code."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import polars as pl

from gpudiag.errors import InputError
from gpudiag.model.rank import MESSAGES, OPS, STEPS, RankSummary
from gpudiag.model.tables import Column

WIRE_VERSION = 2
"""Changes with what the bytes hold: both ends must be of one version."""


class _Envelope(msgspec.Struct, frozen=True):
    version: int
    summary: msgspec.Raw


def encode(summary: RankSummary) -> bytes:
    """Return `summary` as bytes."""
    return msgspec.msgpack.encode(_Envelope(WIRE_VERSION, msgspec.Raw(msgspec.msgpack.encode(summary, enc_hook=_table_bytes))))


def decode(data: bytes) -> RankSummary:
    """Return the summary that `encode` wrote. Raises InputError for bytes of another version, or that are none."""
    try:
        envelope = msgspec.msgpack.decode(data, type=_Envelope)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError("the summary of a rank cannot be read", "all processes must run the same version of gpudiag") from error
    if envelope.version != WIRE_VERSION:
        message = f"the summary of a rank has version {envelope.version}, this gpudiag reads version {WIRE_VERSION}"
        raise InputError(message, "all processes must run the same version of gpudiag")
    try:
        summary = msgspec.msgpack.decode(envelope.summary, type=RankSummary, dec_hook=_table)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, pl.exceptions.PolarsError, OSError) as error:
        raise InputError("the summary of a rank cannot be read", "all processes must run the same version of gpudiag") from error
    for columns, frame in ((MESSAGES, summary.messages), (STEPS, summary.steps), (OPS, summary.ops)):
        _check(columns, frame)
    return summary


def _table_bytes(value: Any) -> bytes:
    if not isinstance(value, pl.DataFrame):
        raise TypeError(f"a summary holds no {type(value).__name__}")
    buffer = io.BytesIO()
    value.write_ipc(buffer, compression="zstd")
    return buffer.getvalue()


def _table(kind: type, value: bytes) -> pl.DataFrame:
    if kind is not pl.DataFrame:
        raise TypeError(f"a summary holds no {kind.__name__}")
    return pl.read_ipc(io.BytesIO(value))


def _check(columns: tuple[Column, ...], frame: pl.DataFrame) -> None:
    """Raise InputError where a table lacks a column or has one of another type."""
    for column in columns:
        if frame.schema.get(column.name) != column.dtype:
            raise InputError(
                f"the summary of a rank has no column {column.name} of type {column.dtype}", "all processes must run the same version"
            )
