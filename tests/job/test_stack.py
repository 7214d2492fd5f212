"""The messages of all ranks in one table: what stands there is what the ranks sent, in few bytes, and by rank."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from plantedjobs import BEGIN, MS, Calls, job

from gpudiag.job import message_table as module
from gpudiag.job.message_table import CODES, PARTY_SEPARATOR, MessageTableBuilder, stack_summaries
from gpudiag.model.analysis import RankSummary


def planted(calls: int = 6) -> list[RankSummary]:
    at = BEGIN + np.arange(calls)[:, None] * 10 * MS + np.arange(3)[None, :] * MS
    shares = [None if call % 2 else list(range(15)) for call in range(calls)]
    every = Calls([0, 1, 2], at, MS, members="0,1,2", size=3, seq=np.arange(calls), exposed_by=shares, phase="backward", bytes=2**40)
    pair = Calls([0, 2], at[:, [0, 2]] + 5 * MS, MS, kind="point_to_point", source={0: None, 2: 0}, target={0: 2, 2: 2}, group="1")
    return job([every, pair])


def test_every_message_stands_under_its_rank_with_the_values_it_was_sent_with() -> None:
    summaries = planted()
    found = stack_summaries(reversed(summaries))
    assert [summary.rank for summary in found] == [0, 1, 2]
    assert not any(summary.messages.height for summary in found)
    for summary in summaries:
        sent = summary.messages
        rows = found.messages.slice(found.first[summary.rank], sent.height)
        assert set(rows["rank"].to_list()) == {summary.rank}
        for name in ("step", "seq", "bytes", "source", "target", "exposed_ns", "exposed_by", "sent"):
            assert rows[name].to_list() == sent[name].to_list(), name
        assert [CODES[kind] for kind in sent["kind"]] == rows["kind"].to_list()
        assert (rows["start"] + found.base_ns).to_list() == sent["start_ns"].to_list()
        assert (rows["end"] + found.base_ns).to_list() == sent["end_ns"].to_list()
        assert rows["number"].to_list() == summary.steps["number"].gather(sent["step"]).to_list()


def test_a_party_is_a_group_or_a_pair_with_both_ends() -> None:
    found = stack_summaries(planted())
    assert set(found.parties) == {PARTY_SEPARATOR.join(("G", "0", "0,1,2", "3")), PARTY_SEPARATOR.join(("P", "0", "2"))}
    pairs = found.messages.filter(pl.col("kind") == CODES["point_to_point"])
    untold = pairs.filter(pl.col("source").is_null())
    assert set(untold["party"]) == {-1}
    assert untold.height == 6


def test_a_message_takes_few_bytes() -> None:
    """Half a thousand ranks have some millions of messages; as sent, each takes about 290 bytes."""
    rows = stack_summaries(planted(calls=1_000)).messages
    assert rows.estimated_size() / rows.height < 75


def test_batches_are_of_whole_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_ROWS", 10)
    found = stack_summaries(planted())
    batches = list(found.batches())
    assert [begin for begin, _ in batches] == [0, found.first[1]]  # 12 rows, then 6 and 12
    assert sum(height for _, height in batches) == found.messages.height


def test_no_rank_is_an_empty_table_with_all_columns() -> None:
    empty, full = MessageTableBuilder().stack(), stack_summaries(planted())
    assert len(empty) == 0
    assert empty.messages.columns == full.messages.columns
    assert list(empty.batches()) == []
