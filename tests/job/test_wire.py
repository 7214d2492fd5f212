"""Summaries travel as bytes: what arrives is what was sent, small, and of the same version."""

from __future__ import annotations

import io

import msgspec
import numpy as np
import polars as pl
import pytest
from plantedjobs import BEGIN, MS, Calls, job, summary
from polars.testing import assert_frame_equal

from gpudiag.errors import InputError
from gpudiag.job import rank_summary
from gpudiag.model import trace
from gpudiag.model.analysis import RankSummary


def planted(calls: int = 20, ranks: int = 4) -> RankSummary:
    at = BEGIN + np.arange(calls)[:, None] * 10 * MS
    members = ",".join(map(str, range(ranks)))
    given = {"exposed_by": [[10, 20, 255]] * calls, "phase": "backward", "name": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"}
    return job([Calls([0], at, MS, members=members, size=ranks, **given)], throttled=("SW Power Cap",))[0]


def test_what_arrives_is_what_was_sent() -> None:
    sent = msgspec.structs.replace(planted(), records=trace.build_empty_table("step_records").clear(3), sm_clock_mhz=1410.0)
    got = rank_summary.decode_summary(rank_summary.encode_summary(sent))
    for name in RankSummary.__struct_fields__:
        mine, theirs = getattr(sent, name), getattr(got, name)
        assert_frame_equal(mine, theirs) if isinstance(mine, pl.DataFrame) else None
        assert isinstance(mine, pl.DataFrame) or mine == theirs


def test_empty_tables_travel() -> None:
    got = rank_summary.decode_summary(rank_summary.encode_summary(summary(3, steps=[])))
    assert (got.rank, got.messages.height, got.steps.height, got.records) == (3, 0, 0, None)


def test_thousands_of_messages_of_a_large_group_stay_small() -> None:
    assert len(rank_summary.encode_summary(planted(calls=5_000, ranks=512))) < 200_000


def test_the_text_of_a_large_group_is_held_once() -> None:
    """3 MB of text were it held in each row; decoding many ranks must not add that up."""
    got = rank_summary.decode_summary(rank_summary.encode_summary(planted(calls=2_000, ranks=512))).messages["members"]
    assert got.to_list() == [",".join(map(str, range(512)))] * 2_000
    assert sum(len(buffer) for buffer in uncompressed(got)) < 100_000


def uncompressed(column: pl.Series) -> list[bytes]:
    """Return the column as Arrow IPC without compression, which writes shared text once."""
    buffer = io.BytesIO()
    column.to_frame().write_ipc(buffer, compression="uncompressed")
    return [buffer.getvalue()]


def test_bytes_of_another_version_or_none_are_told() -> None:
    other = msgspec.msgpack.encode({"version": rank_summary.WIRE_VERSION + 1, "summary": {}})
    with pytest.raises(InputError, match=f"version {rank_summary.WIRE_VERSION + 1}"):
        rank_summary.decode_summary(other)
    for data in (b"", b"\x80", b"garbage", msgspec.msgpack.encode({"version": rank_summary.WIRE_VERSION, "summary": {"rank": 1}})):
        with pytest.raises(InputError, match="cannot be read"):
            rank_summary.decode_summary(data)


def test_a_table_without_its_columns_is_told() -> None:
    broken = msgspec.structs.replace(planted(), messages=planted().messages.drop("kind"))
    with pytest.raises(InputError, match="column kind"):
        rank_summary.decode_summary(rank_summary.encode_summary(broken))
