"""Whether reports on programs in many styles, and on those of others, are right, and the table of it."""

from __future__ import annotations

import ast
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from gpudiag.model.finding import Finding, Where
from gpudiag.model.report import ReportData
from gpudiag.report.findings import select_places

PLACES = 2
"""Places of the first finding that the terminal shows."""

NOISE = 0.05
"""A bound lies below a gain where it does by more than this share of the step: pairs on a busy machine differ by about as much."""


HALF_PRECISION = "CMP-02"
"""The rule that offers what healthy programs are measured with in place of a cure."""


class Truth(msgspec.Struct, frozen=True, kw_only=True):
    """What is true of a program: see truth.yaml."""

    cause: str = ""
    source: str = ""
    """Where the mistake is described or met, or how the cause was established."""
    rules: tuple[str, ...] | None = None
    """Right first findings; empty: no rule knows the cause; None: a healthy program."""
    where: tuple[str, ...] = ()
    """Places of the cause outside the program: a part of a path, or `path:function`."""
    gain: float | None = None
    """What the cure gained when the truth was written, as a share of CPU time."""
    gains: dict[str, str] = {}
    """What following a rule was measured to give on a healthy program, by its id."""
    round: str = ""
    """Whether the answers were used to mend rules ('seen') or never ('first')."""
    first_answer: str = ""
    """What the report said when gpudiag was first asked, which later runs do not change."""


class Pair(msgspec.Struct, frozen=True):
    """Seconds of one planted and one cured training that took turns."""

    planted_wall_s: float
    planted_cpu_s: float
    cured_wall_s: float
    cured_cpu_s: float

    @property
    def gain(self) -> float:
        """Return the share of the planted program's wall time that the cure gives back."""
        return 1 - self.cured_wall_s / self.planted_wall_s

    @property
    def cpu_gain(self) -> float:
        """Return the same of CPU time."""
        return 1 - self.cured_cpu_s / self.planted_cpu_s


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """What one report says, against the truth."""

    name: str
    rules: tuple[str, ...] | None
    """Right first findings; empty: no rule knows the cause; None: a healthy program."""
    first: str
    line: str
    """Where the first finding points, or, where no rule knows the cause, the largest line, which the first screen names."""
    line_right: bool
    function_right: bool
    """Whether it points at the `def` of a function that holds the cause, or at the cause."""
    bound: float | None
    loud: tuple[str, ...]
    pairs: tuple[Pair, ...]
    gainful: tuple[str, ...] = ()
    """Rules whose advice was measured to gain on this healthy program."""
    round: str = ""
    first_answer: str = ""

    @classmethod
    def without_report(cls, name: str, truth: Truth) -> Score:
        """Return the score of a program that could not be recorded: nothing about it is right."""
        return cls(
            name=name, rules=truth.rules, first="not recorded", line="", line_right=False, function_right=False, bound=None,
            loud=("not recorded",), pairs=(), round=truth.round, first_answer=truth.first_answer,
        )  # fmt: skip

    @property
    def right(self) -> bool:
        """Return whether the first finding is one of the right ones."""
        return bool(self.rules) and self.first in self.rules

    @property
    def gain(self) -> float | None:
        """Return the median gain of the pairs by wall time."""
        return statistics.median(pair.gain for pair in self.pairs) if self.pairs else None

    @property
    def promise(self) -> float | None:
        """Return bound / gain of a right first finding."""
        return self.bound / self.gain if self.right and self.bound is not None and self.gain and self.gain > 0 else None

    @property
    def false_alarms(self) -> tuple[str, ...]:
        """Return what is said above info of a healthy program and borne out by no gain: of bfloat16 autocast in all pairs, or `gainful`."""
        gained = bool(self.pairs) and min(gain for pair in self.pairs for gain in (pair.gain, pair.cpu_gain)) > NOISE
        return tuple(rule for rule in self.loud if rule not in self.gainful and not (rule == HALF_PRECISION and gained))

    @property
    def below(self) -> bool:
        """Return whether the bound of a right first finding lies below the gain of every pair, by wall and by CPU time."""
        gains = [gain for pair in self.pairs for gain in (pair.gain, pair.cpu_gain)]
        return self.right and self.bound is not None and bool(gains) and self.bound < min(gains) - NOISE


def judge(report: ReportData, script: Path, truth: Truth, pairs: Sequence[Pair]) -> Score:
    """Return how a report on `script` meets the truth: right first findings, and the lines of the cause, which end in `# cause`."""
    rules = truth.rules
    text = script.read_text(encoding="utf-8")
    lines = {n for n, line in enumerate(text.splitlines(), 1) if line.endswith("# cause")}
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    holding = [one for one in functions if lines & {*range(one.lineno, (one.end_lineno or one.lineno) + 1)}]
    starts = {node.lineno for one in holding for node in (one, *one.decorator_list)}  # Python counts a function from its decorators
    loud = [finding for finding in report.findings if finding.severity != "info"]
    places = report.lines if rules == () else _list_places(loud[0], report) if loud else ()
    place = next(iter(places), None)
    here = place.line if place is not None and Path(place.file or "").name == script.name else None
    elsewhere = place is not None and any(_lies_in(place, part) for part in truth.where)
    first = loud[0] if loud else None
    return Score(
        name=script.stem,
        rules=rules,
        first=first.rule if first else "",
        line=_name(place) if place else "",
        line_right=here in lines or elsewhere,
        function_right=here in lines | starts or elsewhere,
        bound=first.ceiling.share if first and first.ceiling else None,
        loud=tuple(finding.rule for finding in loud),
        pairs=tuple(pairs),
        gainful=tuple(truth.gains),
        round=truth.round,
        first_answer=truth.first_answer,
    )


def _lies_in(place: Where, part: str) -> bool:
    """Return whether a place lies in an installed file or folder, or in a function of a file (`path:function`).

    A report shows the last folder and the name of a file in a package.
    """
    path, _, function = part.partition(":")
    for installed in (Path(root) / path for root in sys.path):
        for file in [installed] if installed.is_file() else installed.rglob("*.py"):
            if f"/{file.as_posix()}".endswith(f"/{place.file}") and (not function or place.line in _find_lines(file, function)):
                return True
    return False


def _find_lines(file: Path, function: str) -> set[int]:
    """Return the lines of the functions of a file that have this name."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == function]
    return {line for node in found for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def _list_places(finding: Finding, report: ReportData) -> list[Where]:
    """List the places with a line that the terminal shows of a finding."""
    return [place for place in select_places(finding, report, PLACES) if place.line is not None]


def _name(place: Where) -> str:
    return f"{Path(place.file or '?').name}:{place.line}"


def write_table(scores: Sequence[Score], path: Path, title: str, about: str) -> None:
    """Write the tables of planted and of healthy programs, with their sums."""
    planted, healthy = [one for one in scores if one.rules is not None], [one for one in scores if one.rules is None]
    text = [f"# {title}", "", about, "", *_sums(planted, healthy), ""]
    columns = ["planted", "right would be", "first finding", "line", "bound", "gain (CPU time)", "bound / gain", "also above info"]
    text += _list_rows(columns, [(one, _cells(one)) for one in planted])
    columns = ["healthy", "said above info", "false", "bound of the first", "gain of bfloat16 autocast (CPU time)"]
    text += ["", *_list_rows(columns, [(one, _healthy_cells(one)) for one in healthy])]
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    print("\n".join(text))


def _list_rows(columns: list[str], rows: Sequence[tuple[Score, tuple[str, ...]]]) -> list[str]:
    """Return the lines of a table; what was said when gpudiag was first asked is a further column where any truth keeps it."""
    kept = any(score.first_answer for score, _ in rows)
    lines = [[*columns, *(["when first asked"] if kept else [])], ["---"] * (len(columns) + kept)]
    lines += [[*cells, *([score.first_answer or "-"] if kept else [])] for score, cells in rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _healthy_cells(score: Score) -> tuple[str, ...]:
    return _name_round(score), ", ".join(score.loud) or "nothing", ", ".join(score.false_alarms) or "-", _share(score.bound), _gains(score)


def _name_round(score: Score) -> str:
    return f"{score.name} ({score.round})" if score.round else score.name


def _cells(score: Score) -> tuple[str, ...]:
    wanted = " or ".join(score.rules or ()) or "no rule: the line"
    first = f"{score.first or 'nothing'}{' ok' if score.right else '' if score.rules == () else ' WRONG'}"
    line = f"{score.line or 'none'} {'ok' if score.line_right else 'function' if score.function_right else 'WRONG'}"
    bound = f"{_share(score.bound)}{' BELOW' if score.below else ''}"
    promise = "-" if score.promise is None else f"{score.promise:.2f}"
    return _name_round(score), wanted, first, line, bound, _gains(score), promise, ", ".join(score.loud[1:]) or "-"


def _gains(score: Score) -> str:
    if not score.pairs:
        return "-"
    low, high = min(pair.gain for pair in score.pairs), max(pair.gain for pair in score.pairs)
    return f"{low:.0%} to {high:.0%} ({_share(statistics.median(pair.cpu_gain for pair in score.pairs))})"


def _sums(planted: Sequence[Score], healthy: Sequence[Score]) -> list[str]:
    known, unknown = [one for one in planted if one.rules], [one for one in planted if one.rules == ()]
    promises = [one.promise for one in planted if one.promise is not None]
    spread = f"median {statistics.median(promises):.2f}, worst {max(promises):.2f}" if promises else "not measured"
    return [
        f"* First finding right: {sum(one.right for one in known)} of {len(known)} that a rule knows;"
        f" its first line right: {sum(one.line_right for one in known)}, its function: {sum(one.function_right for one in known)}.",
        f"* No rule knows the cause: the largest line is the right one in {sum(one.line_right for one in unknown)},"
        f" the right function in {sum(one.function_right for one in unknown)} of {len(unknown)}.",
        f"* Bound / gain of right first findings: {spread}; bounds below the gain: {sum(one.below for one in planted)}.",
        f"* Healthy programs with a finding above info that no measured gain bears out: {sum(bool(one.false_alarms) for one in healthy)}"
        f" of {len(healthy)}.",
    ]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
