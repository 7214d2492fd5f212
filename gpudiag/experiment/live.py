"""The experiments of a bundle while they run: results, and the pairs so far of those that have none yet. Nothing is written or mended."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from gpudiag.bundle.layout import EXPERIMENTS_FOLDER
from gpudiag.errors import MissingDependencyError
from gpudiag.experiment.plan import Plan
from gpudiag.experiment.stats import judge_pairs
from gpudiag.experiment.store import BaselineRow, ComparisonRow, NamedRow, PairRow, ParityRow, Row, read_rows
from gpudiag.files import read_file
from gpudiag.model.bundle import UNREADABLE
from gpudiag.model.experiment import Comparison, ExperimentData, Outcome, Pair, make_outcome
from gpudiag.recordings.series import is_alive
from gpudiag.report.experiment.results import MAX_RESULT_BYTES, MAX_RESULT_FILES

NO_SCIPY = "scipy is not installed here: pairs are shown, their interval is not computed (pip install 'gpudiag[train]')"


class Trial(msgspec.Struct, frozen=True):
    """One change: what its pairs say until now. While it is not `over` its verdict is none to be told."""

    outcome: Outcome
    over: bool


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """One call of `gpudiag ab`. `data`: its result, or what there is of it."""

    name: str
    """Its file's name, the time at which it began: '20250131-120000'."""
    command: tuple[str, ...] = ()
    fixes: tuple[str, ...] = ()
    data: ExperimentData = ExperimentData()
    trials: tuple[Trial, ...] = ()
    ended: bool = False
    """Whether its result was written: it came to its end, or was stopped in order."""
    changed_unix_ns: int = 0
    alive: bool = False
    """Whether the process that measures still runs; one that was killed has no result, and is not alive."""


class Trials:
    """Reads the experiments of the bundle at `path` again and again. One object serves many threads."""

    def __init__(self, path: Path) -> None:
        self._folder = path / EXPERIMENTS_FOLDER
        self._made: dict[str, tuple[tuple[int, ...], Series]] = {}
        self._lock = threading.Lock()

    def read(self) -> tuple[tuple[Series, ...], tuple[str, ...]]:
        """Read the experiments, newest first, and warnings about files that cannot be read and are left out."""
        with self._lock:
            try:  # never a link: where it leads is nobody's business
                there = [path for path in self._folder.iterdir() if path.suffix in (".json", ".jsonl") and not path.is_symlink()]
            except OSError:
                there = []
            found, warnings = [], []
            for name in sorted({path.stem for path in there}, reverse=True)[:MAX_RESULT_FILES]:
                rows, result = self._folder / f"{name}.jsonl", self._folder / f"{name}.json"
                stamp = (*_read_stamp(rows), *_read_stamp(result))
                kept = self._made.get(name)
                # what was made before where neither file has changed since
                made = kept[1] if kept is not None and kept[0] == stamp else self._read(name, rows, result)
                if made is None:
                    warnings.append(f"{EXPERIMENTS_FOLDER}/{name} could not be read and is left out")
                else:
                    self._made[name] = stamp, made
                    alive = not made.ended and is_alive(rows, made.changed_unix_ns)
                    found.append(msgspec.structs.replace(made, alive=alive))
            return tuple(found), tuple(warnings)

    def _read(self, name: str, rows: Path, result: Path) -> Series | None:
        data, stamps = None, (_read_stamp(rows)[0], _read_stamp(result)[0])
        with suppress(OSError, *UNREADABLE):
            data = None if result.is_symlink() else msgspec.json.decode(read_file(result, MAX_RESULT_BYTES), type=ExperimentData)
        kept: list[Row] = []  # stays empty where the file cannot be read
        with suppress(OSError, *UNREADABLE):
            kept, _ = read_rows(rows)
        plan = next((row for row in kept if isinstance(row, Plan)), None)
        asked = Series(name=name, changed_unix_ns=max(stamps))
        if plan is not None:
            command = plan.options.command_shown or plan.command
            changes = (*map(str, plan.fixes), *(variant.name for variant in plan.variants))
            asked = msgspec.structs.replace(asked, command=command, fixes=changes)
        if data is not None and (data.complete or stamps[1] >= stamps[0] or not kept):  # else it was resumed, and runs
            trials = tuple(Trial(outcome, over=True) for outcome in data.experiments)
            return msgspec.structs.replace(asked, data=data, trials=trials, ended=True)
        if plan is None:
            return None
        try:
            return _build_running_series(asked, plan, kept)
        except (ArithmeticError, LookupError, ValueError):  # figures and plans that no experiment of ours writes
            return None


def _read_stamp(path: Path) -> tuple[int, int]:
    try:
        state = path.lstat()
    except OSError:
        return 0, 0
    return state.st_mtime_ns, state.st_size


def _build_running_series(asked: Series, plan: Plan, rows: Sequence[Row]) -> Series:
    ceilings = {str(one.fix): one.ceiling_share for row in rows if isinstance(row, NamedRow) for one in row.named}
    baseline = next((row.baseline for row in rows if isinstance(row, BaselineRow)), None)
    checked = {row.of: row.parity for row in rows if isinstance(row, ParityRow)}
    ended = {row.of: row for row in rows if isinstance(row, ComparisonRow)}
    pairs: dict[str, list[Pair]] = {}
    for row in rows:
        if isinstance(row, PairRow):
            pairs.setdefault(row.of, []).append(row.pair)
    trials = []
    for of in dict.fromkeys((*pairs, *ended)):
        stage, _, name = of.partition(":")
        measured, over = pairs.get(of, []), ended.get(of)
        if over is not None:
            found = over.found
        else:
            try:
                found = judge_pairs(measured, plan.options.build_design())
            except MissingDependencyError:
                found = Comparison(verdict="inconclusive", pairs=len(measured), unit=measured[0].unit, notes=(NO_SCIPY,))
        outcome = msgspec.structs.replace(
            make_outcome(name, found, screening=stage == "screen"),
            ceiling_share=ceilings.get(name),
            parity=checked.get(name),
            measured=tuple(measured),
            seconds=None if over is None else over.seconds,
        )
        trials.append(Trial(outcome, over is not None))
    data = ExperimentData(baseline=baseline, experiments=tuple(trial.outcome for trial in trials), complete=False)
    return msgspec.structs.replace(asked, data=data, trials=tuple(trials))
