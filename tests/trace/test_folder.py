"""Which file of a folder belongs to which rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpudiag.errors import InputError
from gpudiag.trace.trace_files import find_rank_files


def ranks(folder: Path, *names: str) -> dict[int, str]:
    for name in names:
        (folder / name).write_text("{}")
    return {rank: path.name for rank, path in find_rank_files(folder).items()}


def test_the_number_after_rank_or_worker(tmp_path: Path) -> None:
    names = ["h100_rank10.json.gz", "h100_rank2.json", "h100_rank-0.json.zst", "readme.md"]
    assert ranks(tmp_path, *names) == {0: names[2], 2: names[1], 10: names[0]}


def test_tensorboard_names(tmp_path: Path) -> None:
    names = ["worker3.1623143566756.pt.trace.json.gz", "worker1.1623143566999.pt.trace.json.gz"]
    assert ranks(tmp_path, *names) == {1: names[1], 3: names[0]}


def test_the_one_number_in_which_the_names_differ(tmp_path: Path) -> None:
    names = ["a100_8gpus_0.json", "a100_8gpus_2.json", "a100_8gpus_10.json"]
    assert ranks(tmp_path, *names) == {0: names[0], 2: names[1], 10: names[2]}


def test_else_the_order_of_the_names_by_their_numbers(tmp_path: Path) -> None:
    names = ["node1_500.1712345678901234567.json", "node1_501.1712345678901234999.json", "node2_7.1712345678901230000.json"]
    assert ranks(tmp_path, *names) == dict(enumerate(names))


def test_process_ids_are_no_ranks(tmp_path: Path) -> None:
    names = ["host_1234567.json", "host_1234568.json"]
    assert ranks(tmp_path, *names) == dict(enumerate(names))


def test_one_file_is_rank_0_whatever_its_name_says_of_the_device(tmp_path: Path) -> None:
    assert ranks(tmp_path, "h100_bert.json") == {0: "h100_bert.json"}


def test_two_files_of_one_rank_are_both_kept(tmp_path: Path) -> None:
    names = ["rank0-w0.json.gz", "rank0-w1.json.gz"]
    assert ranks(tmp_path, *names) == dict(enumerate(names))


def test_the_ranks_of_a_real_job(traces: Path) -> None:
    assert {rank: path.name for rank, path in find_rank_files(traces / "v100_dlrm_train_8ranks").items()} == {
        n: f"rank{n}.json.gz" for n in range(8)
    }


def test_folders_that_hold_no_trace(tmp_path: Path) -> None:
    (tmp_path / "sub.json").mkdir()
    with pytest.raises(InputError, match="no trace in this folder"):
        find_rank_files(tmp_path)
    with pytest.raises(InputError, match="cannot be read"):
        find_rank_files(tmp_path / "missing")
