"""What a check found, kept at once: a part that is stopped leaves all that it had measured."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

Verdict = Literal["holds", "DOES NOT HOLD", "told", "not run", "ERROR"]
"""told: measured, with nothing to hold it against. not run: it could not be checked, and the note says why."""

ROWS, ABOUT, RESULTS, TABLE = "rows", "about.json", "results.json", "VALIDATION.md"


class Row(msgspec.Struct, frozen=True):
    """One claim: what was to be expected of this device, what was measured, whether that agrees."""

    part: str
    claim: str
    expected: str
    measured: str
    verdict: Verdict
    note: str = ""


class Job:
    """What a part works with: the device, the folder for what it keeps, how long it may take, and where its rows go."""

    def __init__(self, part: str, device: str, out: Path, budget_s: float) -> None:
        self.part, self.device, self.out = part, device, out
        self._deadline = time.monotonic() + budget_s

    @property
    def on_gpu(self) -> bool:
        """Return whether a GPU is checked."""
        return self.device == "cuda"

    @property
    def left_s(self) -> float:
        """Return the seconds that are left; below 0: none."""
        return self._deadline - time.monotonic()

    def add(self, claim: str, expected: str, measured: str, holds: bool | None, note: str = "") -> None:
        """Keep a row; `holds` None: it is only told."""
        self.keep(Row(self.part, claim, expected, measured, "told" if holds is None else "holds" if holds else "DOES NOT HOLD", note))

    def not_run(self, claim: str, why: str) -> None:
        """Keep that a claim could not be checked."""
        self.keep(Row(self.part, claim, "-", "-", "not run", why))

    def error(self, claim: str, error: BaseException) -> None:
        """Keep that a check failed by itself."""
        self.keep(Row(self.part, claim, "-", "-", "ERROR", f"{type(error).__name__}: {error}"[:400]))

    def keep(self, row: Row) -> None:
        """Write a row, and the table with it."""
        keep(self.out, row)

    def has_time(self, claim: str, need_s: float) -> bool:
        """Return whether `need_s` seconds are left; else keep that there was no time for `claim`."""
        if self.left_s >= need_s:
            return True
        self.not_run(claim, f"no time was left: it takes about {need_s:.0f} s")
        return False


def keep(out: Path, row: Row) -> None:
    """Add `row` to those below `out` and write results.json and VALIDATION.md anew."""
    with open(_made(out / ROWS) / f"{row.part}.jsonl", "ab+") as file:
        file.seek(max(file.tell() - 1, 0))
        cut_off = file.read(1) not in (b"", b"\n")  # by the death of whoever wrote it
        file.write(b"\n" * cut_off + msgspec.json.encode(row) + b"\n")
    write(out)


def read(out: Path) -> list[Row]:
    """Return all rows below `out`, part by part in the order in which the parts began; a line that was cut off is left out."""
    paths = sorted((out / ROWS).glob("*.jsonl"), key=lambda path: (_order(out, path.stem), path.stem))
    found = []
    for line in (line for path in paths for line in path.read_bytes().splitlines()):
        with suppress(msgspec.MsgspecError):
            found.append(msgspec.json.decode(line, type=Row))
    return found


def _order(out: Path, part: str) -> int:
    names = list(about(out).get("parts", "").split(","))
    return names.index(part) if part in names else len(names)


def about(out: Path) -> dict[str, str]:
    """Return what is known of the device and of this run; {} where nothing was written yet."""
    path = out / ABOUT
    return msgspec.json.decode(path.read_bytes(), type=dict[str, str]) if path.exists() else {}


def write(out: Path) -> None:
    """Write both files from the rows that there are."""
    rows, known = read(out), about(out)
    _replace(out / RESULTS, msgspec.json.format(msgspec.json.encode({"about": known, "rows": rows}), indent=2) + b"\n")
    _replace(out / TABLE, markdown(known, rows).encode())


def markdown(known: dict[str, str], rows: list[Row]) -> str:
    """Return the tables as Markdown, one for each part, those that do not hold counted first."""
    lines = ["# Validation on a device", "", *(f"* {name}: {text}" for name, text in known.items()), "", summary(rows), ""]
    for part in dict.fromkeys(row.part for row in rows):
        lines += [f"## {part}", "", "| claim | expected | measured | verdict | note |", "|---|---|---|---|---|"]
        cells = [(row.claim, row.expected, row.measured, row.verdict, row.note) for row in rows if row.part == part]
        lines += [f"| {' | '.join(' '.join(cell.split()).replace('|', '/') for cell in line)} |" for line in cells]
        lines.append("")
    return "\n".join(lines)


def summary(rows: list[Row]) -> str:
    """Return how many rows there are of each verdict."""
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in Verdict.__args__}  # type: ignore[attr-defined]
    return ", ".join(f"{verdict}: {count}" for verdict, count in counts.items())


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _replace(path: Path, data: bytes) -> None:
    new = path.with_name(path.name + ".new")
    new.write_bytes(data)
    new.replace(path)
