"""Who takes part in a collective: members, roots, ends of pairs and uneven splits, as torch writes them over versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kept
import pytest
from handmade import op
from handmade import trace as made

from gpudiag.model.trace import Trace

DISTRIBUTED = {"backend": "nccl", "rank": 1, "world_size": 8, "pg_count": 3}


def called(name: str = "allreduce", /, *, header: dict[str, Any] | None = None, **args: Any) -> Trace:
    event = op("record_param_comms", 0, 50)
    event["args"] = {"Collective name": name, "Group size": 4, "Process Group Name": "7", **args}
    return made(event, op("aten::mm", 60, 70), distributedInfo=DISTRIBUTED | (header or {}))


def row(name: str = "allreduce", /, **args: Any) -> dict[str, Any]:
    return called(name, **args).collectives.row(0, named=True)


@pytest.mark.parametrize("listed", ["[0, 2, 4, 6]", [0, 2, 4, 6], "[0,2,4,6]", "0, 2, 4, 6"])
def test_members_as_listed(listed: Any) -> None:
    assert row(**{"Process Group Ranks": listed})["members"] == "0,2,4,6"


def test_a_list_that_was_cut_off_is_told_by_its_spacing_or_not_at_all() -> None:
    cut = {"Process Group Ranks": f"[{', '.join(map(str, range(0, 60, 2)))}, ...]", "Group size": 32}
    assert row(**cut)["members"] is None
    assert row(**cut, **{"Global rank start": 0, "Global rank stride": 2})["members"] == ",".join(map(str, range(0, 64, 2)))
    assert row(**cut, **{"Global rank start": 0, "Global rank stride": -1})["members"] is None


def test_members_by_the_groups_of_the_header() -> None:
    groups = [
        {"pg_name": "0", "ranks": list(range(8))},
        {"pg_name": "7", "ranks": [4, 5, 6, 7], "pg_size": 4},
        {"pg_name": "9", "ranks": "?"},
    ]
    assert row(header={"pg_config": groups})["members"] == "4,5,6,7"
    assert row(header={"pg_config": groups}, **{"Process Group Name": "9"})["members"] is None
    assert row(header={"pg_config": "broken"})["members"] is None
    # ranks that do not fit the size of the call are none of its group
    assert row(header={"pg_config": groups}, **{"Group size": 2})["members"] is None


def test_a_group_as_large_as_the_job_is_all_of_it() -> None:
    assert row(**{"Group size": 8, "Process Group Ranks": "[]"})["members"] == "0,1,2,3,4,5,6,7"
    assert row(**{"Group size": 4, "Process Group Ranks": "[]"})["members"] is None


@pytest.mark.parametrize(("name", "root"), [("broadcast", 6), ("_reduce_oop", 6), ("gather", 6), ("scatter", 6), ("allreduce", None)])
def test_the_root_is_a_rank_of_the_job(name: str, root: int | None) -> None:
    assert row(name, Rank=3, **{"Process Group Ranks": "[0, 2, 4, 6]"})["source"] == root


def test_a_root_that_is_not_of_the_group_is_not_known() -> None:
    assert row("broadcast", Rank=9, **{"Process Group Ranks": "[0, 2, 4, 6]"})["source"] is None
    assert row("broadcast", Rank=1)["source"] is None


def test_ends_of_pairs() -> None:
    sent, got = row("send", **{"Dst Rank": 5, "Rank": 1}), row("recv", **{"Src Rank": 3, "Rank": 0})
    assert (sent["source"], sent["target"], got["source"], got["target"]) == (None, 5, 3, None)
    assert row("send", **{"Dst Rank": -1})["target"] is None


def test_uneven_splits() -> None:
    found = row("all_to_allv", **{"In split size": "[3, 4, 0, 5]", "Out split size": "[1, 2, 3, 6]"})
    assert (found["in_splits"], found["out_splits"]) == ("3,4,0,5", "1,2,3,6")
    for even in ("[]", "[1, 2, ...]", None, 7.5):
        assert row(**{"In split size": even})["in_splits"] is None


def test_a_real_job_of_eight_ranks(traces: Path) -> None:
    found = kept.tables(traces / "mi300x_resnet18_ddp8_actckpt_train_rank0.json.gz").collectives
    sent = found.filter(found["name"] != "wait")
    assert set(sent["members"]) == {"0,1,2,3,4,5,6,7"}
    on_ops = sent.drop_nulls("op")
    assert set(on_ops.filter(on_ops["name"] == "broadcast")["source"]) == {0}
    assert set(on_ops.filter(on_ops["name"] == "allreduce")["source"]) == {None}
