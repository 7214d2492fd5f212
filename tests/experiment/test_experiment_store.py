"""Experiments on disk: every row is there at once, what a kill cuts off is left out, and results are read back with the bundle."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from gpudiag.errors import InputError
from gpudiag.experiment.plan import Plan
from gpudiag.experiment.store import BaselineRow, ComparisonRow, NamedRow, PairRow, ParityRow, begin_store, resume_store
from gpudiag.model.experiment import Baseline, Comparison, ExperimentData, FixCall, Outcome, Pair, Parity
from gpudiag.model.notices import format_notice
from gpudiag.report.experiment.results import read_results

PLAN = Plan(("python", "train.py"), (FixCall("bf16"),))
PAIR = Pair((1.0, 2.0), (2.0, 4.0), "samples")


def test_what_is_appended_is_found_again_by_the_next_process(tmp_path: Path) -> None:
    store = begin_store(tmp_path / "bundle", PLAN)
    store.append(BaselineRow(Baseline(command=("python",), step_ns=7)))
    store.append(PairRow("compare:bf16", PAIR))
    store.append(PairRow("compare:other", PAIR))
    store.append(PairRow("compare:bf16", PAIR))
    store.append(ParityRow("bf16", Parity(kind="low_precision", verdict="same")))
    again, planned = resume_store(tmp_path / "bundle")
    assert (msgspec.structs.replace(planned, locked=False), again.name) == (PLAN, store.name)
    assert again.list_pairs("compare:bf16") == (PAIR, PAIR)
    assert again.find_comparison("compare:bf16") is None
    again.append(ComparisonRow("compare:bf16", Comparison(verdict="faster", ratio=2.0, pairs=2), 9.0))
    kept = resume_store(tmp_path / "bundle")[0].find_comparison("compare:bf16")
    assert kept is not None
    assert (kept.found.ratio, kept.found.measured, kept.seconds) == (2.0, (PAIR, PAIR), 9.0)
    assert again.find_row(ParityRow, "bf16") == ParityRow("bf16", Parity(kind="low_precision", verdict="same"))
    assert again.find_row(ParityRow, "fp16") is None
    assert again.find_row(NamedRow) is None
    baseline = again.find_row(BaselineRow)
    assert baseline is not None
    assert baseline.baseline.step_ns == 7


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_row_that_a_kill_cut_off_is_left_out_and_does_not_spoil_the_next_one(tmp_path: Path, cut: int) -> None:
    store = begin_store(tmp_path, PLAN)
    store.append(PairRow("a", PAIR))
    whole = store.path.read_bytes()
    store.append(PairRow("a", PAIR))
    store.path.write_bytes(whole + store.path.read_bytes()[len(whole) : -cut])
    again, _ = resume_store(tmp_path)
    assert again.list_pairs("a") == (PAIR,)
    again.append(PairRow("b", PAIR))
    assert resume_store(tmp_path)[0].list_pairs("b") == (PAIR,)


def test_the_newest_that_is_not_complete_goes_on(tmp_path: Path) -> None:
    for complete in (True, False, True):
        begin_store(tmp_path, PLAN).finish(ExperimentData(complete=complete))
    names = sorted(path.stem for path in (tmp_path / "experiments").glob("*.jsonl"))
    assert len(names) == 3
    assert resume_store(tmp_path)[0].name == names[1]


def test_nothing_to_resume_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="it holds no experiments"):
        resume_store(tmp_path)
    begin_store(tmp_path, PLAN).finish(ExperimentData())
    with pytest.raises(InputError, match="all experiments in it are complete"):
        resume_store(tmp_path)
    with pytest.raises(InputError, match="it holds no experiments") as inside:
        resume_store(tmp_path / "experiments")
    assert f"name the bundle that it lies in: --resume {tmp_path}" in str(inside.value)


@pytest.mark.parametrize("there", [b"", b'{"type": "pla'])
def test_one_that_was_killed_before_it_had_a_plan_is_none(tmp_path: Path, there: bytes) -> None:
    store = begin_store(tmp_path, PLAN)
    store.path.write_bytes(there)
    for _ in range(2):
        with pytest.raises(InputError, match="it holds no experiments"):
            resume_store(tmp_path)


def test_a_file_of_another_kind_is_no_store(tmp_path: Path) -> None:
    store = begin_store(tmp_path, PLAN)
    store.path.write_bytes(b'{"type": "something else"}\n')
    with pytest.raises(InputError, match="not the rows of an experiment"):
        resume_store(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_an_input_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match="cannot write"):
        begin_store(tmp_path / "bundle", PLAN)


def test_a_full_disk_is_one_line_and_what_was_kept_stays(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")
    store = begin_store(tmp_path, PLAN)
    before = store.path.read_bytes()
    kept = store.path.rename(tmp_path / "kept")
    store.path.symlink_to("/dev/full")
    with pytest.raises(InputError, match="No space left on device") as told:
        store.append(PairRow("a", PAIR))
    assert told.value.hint == f"make room, then gpudiag ab --resume {tmp_path}"
    assert kept.read_bytes() == before
    assert store.list_pairs("a") == ()


def test_results_come_back_in_their_order_and_what_is_none_is_named(tmp_path: Path) -> None:
    for fix in ("bf16", "compile"):
        begin_store(tmp_path, PLAN).finish(ExperimentData(experiments=(Outcome(fix=fix, verdict="faster"),)))
    (tmp_path / "experiments" / "zzz.json").write_text("[1, 2]")
    (tmp_path / "experiments" / "zzzz.json").write_text('{"x":' * 30_000)
    found, notices = read_results(tmp_path)
    assert [data.experiments[0].fix for data in found] == ["bf16", "compile"]
    assert [format_notice(notice) for notice in notices] == [
        f"experiments/{name}.json could not be read and is left out" for name in ("zzz", "zzzz")
    ]
    assert read_results(tmp_path / "nowhere") == ((), ())


def test_unknown_keys_of_a_newer_version_are_passed_over(tmp_path: Path) -> None:
    store = begin_store(tmp_path, PLAN)
    store.finish(ExperimentData())
    data = msgspec.json.decode(store.result_path.read_bytes())
    store.result_path.write_bytes(msgspec.json.encode(data | {"later": 1}))
    assert read_results(tmp_path) == ((ExperimentData(),), ())
