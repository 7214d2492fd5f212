"""The experiments of a bundle on disk: pairs as they come (`experiments/<id>.jsonl`), and results (`<id>.json`)."""

from __future__ import annotations

import errno
import os
import shlex
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from gpudiag.bundle.layout import EXPERIMENTS_FOLDER
from gpudiag.errors import InputError
from gpudiag.experiment.design import Design
from gpudiag.experiment.offers import Named
from gpudiag.experiment.plan import Plan
from gpudiag.files import hold_lock, read_file
from gpudiag.model.bundle import UNREADABLE
from gpudiag.model.experiment import Baseline, Comparison, ExperimentData, Pair, Parity
from gpudiag.report.experiment.results import MAX_RESULT_BYTES
from gpudiag.report.files import write_file


class NamedRow(msgspec.Struct, frozen=True, tag="named"):
    """What a search chooses from, in its order, and why others are left out."""

    named: tuple[Named, ...]
    notes: tuple[str, ...] = ()
    own_line: str = ""
    """The first finding in short, and how it is the user's to mend ('a line of your own, FILE:LINE'); '' where it is not."""
    treating: tuple[str, ...] = ()
    """Those of `named` that the first finding names."""


class BaselineRow(msgspec.Struct, frozen=True, tag="baseline"):
    """What the probe found, and the design that a short script has room for; None: the usual one."""

    baseline: Baseline
    design: Design | None = None


class PairRow(msgspec.Struct, frozen=True, tag="pair"):
    """One pair of the comparison `of`."""

    of: str
    pair: Pair


class ComparisonRow(msgspec.Struct, frozen=True, tag="comparison"):
    """A comparison that has come to its end; its pairs stand in rows of their own."""

    of: str
    found: Comparison
    seconds: float


class LegRow(msgspec.Struct, frozen=True, tag="leg"):
    """The time that the comparison `of` took in one go, or the whole command ('')."""

    of: str
    seconds: float


class ParityRow(msgspec.Struct, frozen=True, tag="parity"):
    """Whether the change `of` trains the same."""

    of: str
    parity: Parity


Row = Plan | NamedRow | BaselineRow | PairRow | LegRow | ComparisonRow | ParityRow

RowT = TypeVar("RowT", NamedRow, BaselineRow, ComparisonRow, ParityRow)


class Store:
    """The rows of one `gpudiag ab`. What is appended is on disk when append() returns; `bundle` is the folder that it lies in."""

    def __init__(self, bundle: Path, name: str, rows: Sequence[Row]) -> None:
        self.bundle, self.name = bundle, name
        self._rows = list(rows)
        self._held: BinaryIO | None = None
        folder = bundle / EXPERIMENTS_FOLDER
        self.path, self.result_path = folder / f"{name}.jsonl", folder / f"{name}.json"
        self._resume_command = f"gpudiag ab --resume {shlex.quote(str(bundle))}"
        with suppress(OSError):
            self._held = hold_lock(self.path)  # until the result is written, or this process ends: readers see that the series runs
        if self._held is not None:
            weakref.finalize(self, self._held.close)

    @property
    def locked(self) -> bool:
        """Whether this process holds the lock of the file."""
        return self._held is not None

    def append(self, row: Row) -> None:
        """Keep a row. Raises InputError where it cannot be written."""
        try:
            with open(self.path, "ab") as file:
                file.write(msgspec.json.encode(row) + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise InputError(f"cannot write {self.path}: {error.strerror}", f"make room, then {self._resume_command}") from None
        self._rows.append(row)

    def finish(self, data: ExperimentData) -> None:
        """Write the result, the whole file or none of it. Raises InputError where it cannot be written."""
        try:
            write_file(self.result_path, msgspec.json.format(msgspec.json.encode(data), indent=2) + b"\n")
        except InputError as error:
            raise InputError(error.message, f"make room, then {self._resume_command}") from None
        finally:
            if self._held is not None:  # it has ended, also where its process goes on (gpudiag.ab in a program of somebody's)
                self._held.close()
                self._held = None

    def find_row(self, kind: type[RowT], of: str | None = None) -> RowT | None:
        """Find the row of this kind, `of` a comparison or change; None where that was not done yet."""
        return next((row for row in self._rows if isinstance(row, kind) and getattr(row, "of", None) == of), None)

    def list_pairs(self, of: str) -> tuple[Pair, ...]:
        """List the pairs of a comparison so far."""
        return tuple(row.pair for row in self._rows if isinstance(row, PairRow) and row.of == of)

    def add_leg(self, of: str, seconds: float) -> float:
        """Keep the time of a leg; return that of all its legs, those before an interruption too. Raises as append() does."""
        self.append(LegRow(of, seconds))
        return sum(row.seconds for row in self._rows if isinstance(row, LegRow) and row.of == of)

    def find_comparison(self, of: str) -> ComparisonRow | None:
        """Find a comparison that is complete, with its pairs; None where it is not."""
        row = self.find_row(ComparisonRow, of)
        if row is None:
            return None
        return msgspec.structs.replace(row, found=msgspec.structs.replace(row.found, measured=self.list_pairs(of)))


def begin_store(bundle: Path, plan: Plan) -> Store:
    """Return a new store in `bundle`, which is made where it does not exist. Raises InputError where it cannot be written."""
    folder, begun, name = bundle / EXPERIMENTS_FOLDER, time.strftime("%Y%m%d-%H%M%S"), ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for suffix in range(1, 1000):
            name = begun if suffix == 1 else f"{begun}-{suffix:03d}"
            with suppress(FileExistsError):
                os.close(os.open(folder / f"{name}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
                break
        else:
            raise FileExistsError(errno.EEXIST, "too many experiments of this second")
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror}", "choose another place with -o") from None
    store = Store(bundle, name, ())
    try:
        store.append(msgspec.structs.replace(plan, locked=store.locked))
    except InputError as error:
        store.path.unlink(missing_ok=True)
        raise InputError(error.message, "choose another place with -o") from None
    return store


def read_rows(path: Path) -> tuple[list[Row], int]:
    """Read the rows of a file, and where they end: the last line may be half written. Raises OSError and UNREADABLE."""
    data = read_file(path, MAX_RESULT_BYTES)
    end = data.rfind(b"\n") + 1
    return [msgspec.json.decode(line, type=Row) for line in data[:end].split(b"\n") if line], end


def resume_store(bundle: Path) -> tuple[Store, Plan]:
    """Return the newest store of `bundle` that was not completed, and what it was to do. Raises InputError where there is none."""
    complete = False
    for path in sorted((bundle / EXPERIMENTS_FOLDER).glob("*.jsonl"), key=lambda path: path.stem, reverse=True):
        with suppress(OSError, *UNREADABLE):
            if msgspec.json.decode(read_file(path.with_suffix(".json"), MAX_RESULT_BYTES), type=ExperimentData).complete:
                complete = True
                continue
        try:
            rows, end = read_rows(path)
            if end < path.stat().st_size:  # cut off when the process was killed
                os.truncate(path, end)
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror})") from None
        except UNREADABLE as error:
            raise InputError(f"{path}: not the rows of an experiment of this version ({error})", "start anew without --resume") from None
        if rows and isinstance(rows[0], Plan):
            return Store(bundle, path.stem, rows), rows[0]
    there = "all experiments in it are complete" if complete else "it holds no experiments"  # or none with a plan, when it was killed
    inside = bundle.name == EXPERIMENTS_FOLDER and any(bundle.glob("*.jsonl"))
    wanted = f"name the bundle that it lies in: --resume {bundle.parent}" if inside else "start anew: gpudiag ab -o BUNDLE ... train.py"
    raise InputError(f"nothing to resume in {bundle}: {there}", wanted)
