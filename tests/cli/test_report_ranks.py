"""`gpudiag report` on the ranks of a job: what is passed on, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def traces_of_two(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"rank{rank}.json" for rank in (0, 1)]
    for path in paths:
        path.write_bytes(b"[]")
    return paths


def test_one_path_is_passed_on_as_it_is_and_several_as_a_list(command, api, traces_of_two: list[Path]) -> None:
    assert command("report", *traces_of_two).code == 0
    assert command("report", "s3://bucket/run/").code == 0
    assert command("report", "run/*.json.gz", "--rank", "all").code == 0
    assert [call["path"] for call in api.calls] == [[str(path) for path in traces_of_two], "s3://bucket/run/", "run/*.json.gz"]
    assert [call["rank"] for call in api.calls] == [None] * 3


@pytest.mark.parametrize("text", ["first", "-1", "1.5", "", "ALL"])
def test_a_rank_is_a_number_or_all(command, api, traces_of_two: list[Path], text: str) -> None:
    result = command("report", *traces_of_two, f"--rank={text}")
    assert result.code == 2
    assert result.err == f"gpudiag: --rank {text}: neither a number nor 'all' (give the number of a rank, from 0)\n"
    assert api.calls == []


def test_the_scheduler_is_passed_on(command, api, traces_of_two: list[Path]) -> None:
    assert command("report", traces_of_two[0], "--scheduler", "tcp://10.0.0.1:8786").code == 0
    assert api.calls[0]["scheduler"] == "tcp://10.0.0.1:8786"
    result = command("report", traces_of_two[0], "--scheduler", "")
    assert (result.code, result.err.splitlines()[0]) == (2, "gpudiag: --scheduler is empty (give tcp://host:port, or a scheduler file)")


def test_no_file_of_the_job_is_overwritten(command, api, traces_of_two: list[Path]) -> None:
    pattern = traces_of_two[0].with_name("rank*.json")
    for paths in (traces_of_two, [pattern]):
        result = command("report", *paths, "-o", traces_of_two[1])
        assert result.code == 2
        assert "will not overwrite" in result.err
    assert [path.read_bytes() for path in traces_of_two] == [b"[]", b"[]"]
    assert api.calls == []


@pytest.mark.parametrize("more", [["--rank", "all"], ["--scheduler", "tcp://h:1"], ["other"]])
def test_watch_follows_one_rank_of_one_bundle(command, api, tmp_path: Path, more: list[str]) -> None:
    result = command("report", tmp_path, "--watch", *more)
    assert result.code == 2
    assert result.err.startswith("gpudiag: --watch follows one")
    assert api.calls == []
