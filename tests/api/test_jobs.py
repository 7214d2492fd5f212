"""From the ranks of a recording to the job and its report: ranks that cannot be read, where they are read, what the report shows."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from handmade import op, steps, write

from gpudiag import api, workers
from gpudiag import ranks as jobs
from gpudiag.cluster import ReportRequest, answer_report_request, pack_rules
from gpudiag.errors import GpudiagError, InputError
from gpudiag.model.report import encode_report
from gpudiag.pipeline import ReportOptions, open_recording
from gpudiag.recordings.paths import RankInput, find_ranks
from gpudiag.workers import Answer, UnreadRank

EVENTS = [*steps(0, 50, 100), op("aten::mm", 10, 40, [[64, 32], [32, 16]]), op("aten::mm", 60, 90, [[64, 32], [32, 16]])]
ROOT = Path(__file__).resolve().parents[2]


def job_folder(folder: Path, *ranks: int) -> Path:
    folder.mkdir(exist_ok=True)
    for rank in ranks:
        write(folder / f"rank{rank}.json", *EVENTS)
    return folder


def test_a_rank_that_cannot_be_read_is_a_row_that_says_so(tmp_path: Path) -> None:
    job_folder(tmp_path, 0, 1, 2)
    (tmp_path / "rank1.json").write_text("no trace")
    report = api.diagnose(tmp_path).data
    assert report.job is not None
    unread = {row.rank: row.unread for row in report.job.ranks}
    assert "rank1.json is not a JSON trace" in unread.pop(1)
    assert unread == {0: "", 2: ""}
    assert report.job.shown_rank != 1
    assert report.source.ranks == (0, 1, 2)


def test_where_none_can_be_read_the_first_one_says_why(tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / f"rank{rank}.json").write_text("" if rank == 0 else "no trace")
    with pytest.raises(InputError, match=r"rank0\.json is empty"):
        api.diagnose(tmp_path)


def test_one_rank_that_can_be_read_is_enough(tmp_path: Path) -> None:
    job_folder(tmp_path, 0, 1)
    (tmp_path / "rank0.json").write_text("no trace")
    report = api.diagnose(tmp_path).data
    assert report.job is not None
    assert (report.job.shown_rank, [bool(row.unread) for row in report.job.ranks]) == (1, [True, False])
    assert "ranks" in api.Report(report).text().lower()


def test_a_fault_of_ours_on_all_ranks_is_no_bad_input(tmp_path: Path) -> None:
    def fails(name: str, ranks: Sequence[RankInput], requests: Sequence[bytes]) -> Iterator[tuple[int, Answer]]:
        yield from enumerate([UnreadRank("internal error: KeyError", bug=True)] * len(ranks))

    with pytest.raises(GpudiagError) as failed:
        jobs.compare_recorded_ranks(find_ranks([str(job_folder(tmp_path, 0, 1))]), lambda _: None, fails)
    assert failed.value.exit_code == 3


def test_ranks_missing_in_between_are_named(tmp_path: Path) -> None:
    job = jobs.compare_recorded_ranks(find_ranks([str(job_folder(tmp_path, 0, 1, 4))]), lambda _: None)
    assert "not there, though higher ranks are: ranks 2, 3" in job.warnings


def test_warnings_about_the_files_stand_in_the_job(tmp_path: Path) -> None:
    job_folder(tmp_path, 0, 1)
    shutil.copy(tmp_path / "rank0.json", tmp_path / "report.json")
    report = api.diagnose(tmp_path).data
    assert report.job is not None
    assert "left out, their names tell no rank: report.json" in report.job.warnings


def test_progress_is_told_rank_by_rank(tmp_path: Path) -> None:
    said: list[str] = []
    api.diagnose(job_folder(tmp_path, 0, 1), progress=said.append)
    assert said[:3] == ["ranks 0/2", "ranks 1/2", "ranks 2/2"]
    assert said[3:] == ["reading", "linking", "costing", "replaying", "judging"]


@pytest.mark.slow
def test_the_shown_rank_is_analysed_as_it_would_be_alone(traces: Path) -> None:
    paths = [str(traces / "v100_dlrm_train_8ranks" / f"rank{rank}.json.gz") for rank in (0, 3, 5)]
    every = open_recording(paths)
    assert every.analysis.job is not None
    shown = every.analysis.job.shown_rank
    alone = open_recording(paths, rank=shown)
    assert every.report.breakdown == alone.report.breakdown
    assert every.report.ops == alone.report.ops
    assert alone.analysis.job is None
    rows = {row.rank: row for row in every.analysis.job.ranks}
    assert set(rows) == {0, 3, 5}
    assert rows[shown].wall_ns == pytest.approx(alone.report.breakdown.wall_ns / alone.report.steps.count, abs=1)


@pytest.mark.slow
def test_processes_and_this_process_say_the_same(traces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = find_ranks([str(traces / "v100_dlrm_train_8ranks" / "rank[01].json.gz")])
    here = jobs.compare_recorded_ranks(recording, lambda _: None)
    monkeypatch.setattr(workers, "WORTH_S", 0.0)
    monkeypatch.setattr(workers, "count_usable_cores", lambda: 2)
    asked: list[int] = []
    really = workers.run_in_processes
    monkeypatch.setattr(workers, "run_in_processes", lambda *arguments: asked.append(arguments[2]) or really(*arguments))
    assert jobs.compare_recorded_ranks(recording, lambda _: None) == here
    assert asked == [2]


def test_traces_in_memory_are_read_by_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "WORTH_S", 0.0)
    monkeypatch.setattr(workers, "Worker", lambda *_: pytest.fail("no other process sees them"))
    ranks = [RankInput(rank, f"memory://nowhere/rank{rank}.json") for rank in range(2)]
    found = dict(jobs.map_on_this_machine("rankwork:twice", ranks, [b"a", b"b"]))
    assert found == {0: b"aa", 1: b"bb"}


@pytest.mark.slow
def test_users_rules_travel_as_texts_and_judge_the_same(tmp_path: Path) -> None:
    folder = job_folder(tmp_path / "run", 0, 1)
    rules = tmp_path / "rules" / "mine"
    rules.mkdir(parents=True)
    text = (ROOT / "rules" / "ovh" / "OVH-01.yaml").read_text().replace("id: OVH-01", "id: OVH-99", 1)
    (rules / "OVH-99.yaml").write_text(text)
    packed = pack_rules([str(tmp_path / "rules")])
    assert packed == ({"mine/OVH-99.yaml": text},)
    recording = find_ranks([str(folder)])
    job = jobs.compare_recorded_ranks(recording, lambda _: None)
    request = ReportRequest(
        item=recording.one(job.shown_rank), job=job, source=recording.source, question=ReportOptions(planned_steps=7), rules=packed
    )
    there = answer_report_request(msgspec.json.encode(request))
    here = api.diagnose(folder, rules_dirs=[tmp_path / "rules"], planned_steps=7).data
    assert there == encode_report(here)
    assert "OVH-99" in {rule.id for rule in here.rules}
