"""Experiments are seen while they run: each pair as it comes, no verdict before the end, and files of others spoil nothing."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from outcomes import experiments, pair

from gpudiag.experiment import live as live_experiment
from gpudiag.experiment import store as stores
from gpudiag.experiment.live import Trials
from gpudiag.experiment.offers import Named
from gpudiag.experiment.plan import Options, Plan
from gpudiag.experiment.store import BaselineRow, ComparisonRow, NamedRow, PairRow, ParityRow, Store
from gpudiag.model.experiment import Baseline, Comparison, ExperimentData, FixCall, Parity

PLAN = Plan(("python", "train.py"), (FixCall("bf16"),), options=Options(command_shown=("train.py",)))


def begun(bundle: Path) -> Store:
    return stores.begin_store(bundle, PLAN)


@pytest.mark.needs("scipy")
def test_pairs_stream_in(tmp_path: Path) -> None:
    reader = Trials(tmp_path)
    assert reader.read() == ((), ())
    store = begun(tmp_path)
    (one,), _ = reader.read()
    assert (one.fixes, one.command, one.trials, one.ended) == (("bf16",), ("train.py",), (), False)
    store.append(BaselineRow(Baseline(command=("python",), step_ns=7)))
    widths = []
    for number in range(1, 5):
        store.append(PairRow("compare:bf16", pair(1.5 + 0.01 * number)))
        (one,), _ = reader.read()
        (trial,) = one.trials
        assert (trial.outcome.fix, trial.outcome.pairs, trial.over, len(trial.outcome.measured)) == ("bf16", number, False, number)
        assert trial.outcome.interval is not None
        widths.append(trial.outcome.interval[1] - trial.outcome.interval[0])
    assert trial.outcome.ratio == pytest.approx(1.525, rel=1e-3)
    assert one.data.baseline is not None
    assert widths[-1] != widths[0]


def test_an_unchanged_file_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = begun(tmp_path)
    store.append(PairRow("compare:bf16", pair(2.0)))
    reader = Trials(tmp_path)
    first = reader.read()
    decoded: list[bytes] = []
    plain = msgspec.json.decode
    monkeypatch.setattr(live_experiment.msgspec.json, "decode", lambda data, **options: decoded.append(data) or plain(data, **options))
    assert reader.read() == first
    assert decoded == []
    store.append(PairRow("compare:bf16", pair(2.0)))
    assert reader.read()[0][0].trials[0].outcome.pairs == 2
    assert decoded


def test_a_row_that_is_being_written_waits_and_the_file_is_left_as_it_is(tmp_path: Path) -> None:
    store = begun(tmp_path)
    store.append(PairRow("compare:bf16", pair(2.0)))
    whole = store.path.read_bytes()
    half = msgspec.json.encode(PairRow("compare:bf16", pair(2.0)))
    store.path.write_bytes(whole + half[:40])
    reader = Trials(tmp_path)
    assert reader.read()[0][0].trials[0].outcome.pairs == 1
    assert store.path.read_bytes() == whole + half[:40]
    store.path.write_bytes(whole + half + b"\n")
    assert reader.read()[0][0].trials[0].outcome.pairs == 2


def test_what_is_over_says_so_with_its_parity_and_ceiling(tmp_path: Path) -> None:
    store = begun(tmp_path)
    store.append(NamedRow((Named(FixCall("bf16"), 0.4),)))
    store.append(PairRow("compare:bf16", pair(2.0)))
    store.append(ComparisonRow("compare:bf16", Comparison(verdict="faster", ratio=2.0, interval=(1.9, 2.1), pairs=1), 33.0))
    store.append(ParityRow("bf16", Parity(kind="low_precision", verdict="same")))
    store.append(PairRow("screen:tf32", pair(1.1)))
    (one,), _ = Trials(tmp_path).read()
    bf16, tf32 = one.trials
    assert (bf16.over, bf16.outcome.verdict, bf16.outcome.ceiling_share, bf16.outcome.seconds) == (True, "faster", 0.4, 33.0)
    assert bf16.outcome.parity is not None
    assert (tf32.over, tf32.outcome.screening, tf32.outcome.fix) == (False, True, "tf32")


def test_a_result_takes_the_place_of_its_rows_until_it_goes_on(tmp_path: Path) -> None:
    store = begun(tmp_path)
    store.append(PairRow("compare:bf16", pair(2.0)))
    store.finish(experiments(complete=False))
    reader = Trials(tmp_path)
    (one,), _ = reader.read()
    assert one.ended
    assert len(one.trials) == len(experiments().experiments)
    later = os.stat(store.result_path).st_mtime_ns + 10**9
    store.append(PairRow("compare:bf16", pair(2.0)))  # gpudiag ab --resume
    os.utime(store.path, ns=(later, later))
    (one,), _ = reader.read()
    assert not one.ended
    assert one.trials[0].outcome.pairs == 2


def test_the_newest_comes_first(tmp_path: Path) -> None:
    for name in ("20250101-000000", "20250103-000000", "20250102-000000"):
        folder = tmp_path / "experiments"
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.json").write_bytes(msgspec.json.encode(ExperimentData()))
    assert [one.name[:8] for one in Trials(tmp_path).read()[0]] == ["20250103", "20250102", "20250101"]


@pytest.mark.parametrize(
    "data",
    [
        b"not json\n",
        b'{"type":"unheard-of"}\n',
        b'{"type":"planned","command":["x"],"options":{"looks":[]}}\n'
        + 5 * b'{"type":"pair","of":"a","pair":{"first":[1.0],"second":[2.0],"unit":"steps"}}\n',
        b'{"type":"planned","command":["x"]}\n{"type":"pair","of":"a","pair":{"first":["x"],"second":[2.0],"unit":"steps"}}\n',
        b'{"type":"pair","of":"a","pair":{"first":[1.0],"second":[2.0],"unit":"steps"}}\n',
    ],
)
def test_a_file_of_something_else_is_named_and_left_out(tmp_path: Path, data: bytes) -> None:
    begun(tmp_path)
    (tmp_path / "experiments" / "00-foreign.jsonl").write_bytes(data)
    found, warnings = Trials(tmp_path).read()
    assert len(found) == 1
    assert warnings == ("experiments/00-foreign could not be read and is left out",)


def test_no_link_is_followed(tmp_path: Path) -> None:
    store = begun(tmp_path / "other")
    folder = tmp_path / "run" / "experiments"
    folder.mkdir(parents=True)
    (folder / "a.jsonl").symlink_to(store.path)
    assert Trials(tmp_path / "run").read() == ((), ())


def test_without_scipy_pairs_are_shown_without_an_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpudiag.errors import MissingDependencyError

    def missing(*_: object) -> None:
        raise MissingDependencyError("an experiment needs scipy")

    monkeypatch.setattr(live_experiment, "judge_pairs", missing)
    begun(tmp_path).append(PairRow("compare:bf16", pair(2.0)))
    outcome = Trials(tmp_path).read()[0][0].trials[0].outcome
    assert (outcome.pairs, outcome.ratio, outcome.interval) == (1, None, None)
    assert "scipy" in outcome.notes[0]
