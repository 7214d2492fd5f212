"""What a comparison says, in words and rows of tables: shared by its renderers, so that all say the same. Nothing is escaped here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gpudiag.diagnosis.compare_gate import change_text, signed
from gpudiag.facts.spoken import kernel_label
from gpudiag.model.compare import Change, FindingChange, OpChange, RunSide, StepComparison, StepRatio
from gpudiag.report.words import bucket_text, plural
from gpudiag.units import format_ns, format_share

WITHIN = "within these two runs; another run of the same program may differ by more (gpudiag ab measures that)"
NO_P = "no p-value is given: steps of one process resemble their neighbours, and two processes differ even where nothing was changed"

_LISTED = 1e-9
_MARKS: dict[Change, str] = {
    "faster": "faster", "slower": "slower", "new": "new", "gone": "gone", "not_known": "variance not known", "unchanged": "within noise"
}  # fmt: skip
_MATCHES = {"exact": "", "shapes": "other shapes", "name": "by name", "alone": ""}
_STEPS = {"unprofiled": "unprofiled", "profiled": "profiled", "report": "profiled"}


class Cell(NamedTuple):
    """What stands in one place of a table; `tone`: good, bad or ''."""

    text: str
    tone: str = ""


class Table(NamedTuple):
    """One part of a comparison: its title, columns as (title, 'l' or 'r'), rows and what to know about them."""

    title: str
    columns: tuple[tuple[str, str], ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    details: tuple[str, ...] = ()
    """A line under each row, '' for none; empty: no row has one."""


def headline(found: StepComparison) -> str:
    """Return the answer in one sentence."""
    if found.same_recording:
        return "A and B are the same recording: nothing can have changed"
    ratio = found.ratio
    if ratio is None:
        return "How the steps compare is not known: one of the recordings has no complete step"
    if ratio.low is None or ratio.high is None:
        return f"In B {change_text(ratio.value)}; whether that is more than noise is not known: {ratio.reason}"
    if found.verdict == "no_difference":
        return f"No difference is shown: the median step changed by {signed(ratio.value)}, interval {_span(ratio)}"
    return f"In B {change_text(ratio.value)} (interval {_span(ratio)})"


def _span(ratio: StepRatio) -> str:
    return f"{signed(ratio.low or 1.0)} to {signed(ratio.high or 1.0)}"


def meaning(found: StepComparison) -> str:
    """Return what the interval holds, '' where there is none."""
    ratio = found.ratio
    if found.same_recording or ratio is None or ratio.low is None:
        return ""
    return (
        f"The interval ({format_share(ratio.level)}, over {ratio.batches[0]} and {ratio.batches[1]} batches of consecutive "
        f"{_STEPS[ratio.steps]} steps) holds the variance {WITHIN}; {NO_P}."
    )


def gate_line(found: StepComparison) -> str:
    """Return what --fail-if-slower decided and why, '' where it was not asked for."""
    gate = found.gate
    if gate is None:
        return ""
    word = {"passed": "passed", "failed": "FAILED", "within_noise": "passed, within noise", "unknown": "FAILED, not known"}[gate.outcome]
    return f"{gate.name}: {word}: {gate.message}"


def tables(found: StepComparison, top: int) -> Iterator[Table]:
    """Yield the parts that have something to show, with the `top` ops that changed most."""
    made = (runs(found), parts(found), ops(found, top), findings(found))
    return (table for table in made if table.rows or table.notes)


def runs(found: StepComparison) -> Table:
    """Return the two runs side by side; their devices where they are not the same, samples a second where those of one are known."""
    sides = (found.a, found.b)
    columns = (("", "l"), ("run", "l"), ("device", "l"), ("steps", "r"), ("median", "r"), ("p95", "r"), ("samples/s", "r"))
    alike = {"device"} if found.a.device == found.b.device else set()
    alike |= {"samples/s"} if all(side.samples_per_s is None for side in sides) else set()
    kept = [place for place, (title, _) in enumerate(columns) if title not in alike]
    rows = [_run(name, side) for name, side in zip("AB", sides, strict=True)]
    steps = f"median and 95th percentile of the {_STEPS[found.ratio.steps] if found.ratio else 'profiled'} steps"
    note = f"{steps}, on {found.a.device or 'devices that are not known'}" if "device" in alike else steps
    return Table("Runs", tuple(columns[place] for place in kept), tuple(tuple(row[place] for place in kept) for row in rows), (note,))


def _run(name: str, side: RunSide) -> tuple[Cell, ...]:
    rate = "?" if side.samples_per_s is None else f"{side.samples_per_s:,.4g}"
    figures = (f"{side.steps:,}", format_ns(side.median_ns), format_ns(side.p95_ns), rate)
    return tuple(map(Cell, (name, side.path, side.device or "not known", *figures)))


def parts(found: StepComparison) -> Table:
    """Return the parts of the step, busy before idle as in the breakdown, and their sum."""
    if not found.parts:
        return Table("", (), ())
    kinds = {side.device_kind for side in (found.a, found.b)}
    device = (kinds.pop() or "device").upper() if len(kinds) == 1 else "device"
    labels = {part.name: bucket_text(part.name, work="ops" if device == "CPU" else "kernels", device=device) for part in found.parts}
    rows = [_part(labels[part.name], part.a_ns, part.b_ns) for part in found.parts]
    whole = f"profiled step (mean of {found.a.analysed_steps} and {found.b.analysed_steps})"
    rows.append(_part(whole, sum(part.a_ns for part in found.parts), sum(part.b_ns for part in found.parts)))
    columns = (("part of the profiled step", "l"), ("A", "r"), ("B", "r"), ("change", "r"))
    return Table("Where the step goes", columns, tuple(rows))


def _part(label: str, a: float, b: float) -> tuple[Cell, ...]:
    return Cell(label), Cell(format_ns(a)), Cell(format_ns(b)), Cell(change_ns(b - a))


def change_ns(delta: float) -> str:
    """Return a difference with its sign."""
    return "0" if abs(delta) < _LISTED else f"{'+' if delta > 0 else ''}{format_ns(delta)}"


def ops(found: StepComparison, top: int) -> Table:
    """Return the ops that changed by more than they vary, or whose variance is not known, the largest change first."""
    changed = [change for change in found.ops if change.change != "unchanged"]
    shown = changed[:top]
    columns = (("op", "l"), ("phase", "l"), ("A", "r"), ("B", "r"), ("change", "r"), ("", "l"))
    rows = tuple(_op(change) for change in shown)
    return Table("Ops, in kernel time a step (mean \u00b1 its standard deviation from step to step)", columns, rows,
                 tuple(_op_notes(found, changed, shown)), tuple(_op_detail(change) for change in shown))  # fmt: skip


def _op(change: OpChange) -> tuple[Cell, ...]:
    tone = {"faster": "good", "gone": "good", "slower": "bad", "new": "bad"}.get(change.change, "")
    spreads = ((change.a_ns, change.a_spread_ns), (change.b_ns, change.b_spread_ns))
    said = ", ".join(word for word in (_MARKS[change.change], _MATCHES[change.matched]) if word)
    return (
        Cell(kernel_label(change.name)), Cell(change.phase or ""), *(Cell(_spread(*pair)) for pair in spreads),
        Cell(change_ns(change.delta_ns), tone), Cell(said, tone),
    )  # fmt: skip


def _spread(mean: float | None, spread: float | None) -> str:
    if mean is None:
        return "-"
    return format_ns(mean) if spread is None else f"{format_ns(mean)} \u00b1 {format_ns(spread)}"


def _op_detail(change: OpChange) -> str:
    """Return module and shapes, those of both where they differ."""
    shapes = " -> ".join(dict.fromkeys(text for text in (change.signature_a, change.signature_b) if text))
    calls = _calls(change)
    return ", ".join(text for text in (change.module, shapes, calls) if text)


def _calls(change: OpChange) -> str:
    if change.a_calls is None or change.b_calls is None or abs(change.a_calls - change.b_calls) < _LISTED:
        return ""
    return f"{change.a_calls:,.4g} -> {change.b_calls:,.4g} calls a step"


def _op_notes(found: StepComparison, changed: Sequence[OpChange], shown: Sequence[OpChange]) -> Iterator[str]:
    if not found.ops:
        yield "no ops were recorded"
        return
    yield f"in all: {'; '.join(_sums(found.ops))}"
    yield f"aligned: {_aligned(found.aligned_a_share)} of the op time of A and {_aligned(found.aligned_b_share)} of that of B"
    if len(shown) < len(changed):
        yield f"{len(shown)} of {len(changed):,} changed ops; --top N shows more"
    if any(change.change == "unchanged" for change in found.ops):
        level = format_share(found.op_level)
        yield f"within noise: changed by less than the op varies from step to step (interval of {level}), or by less than 1 % of its time"
    if any(change.change == "not_known" for change in found.ops):
        yield "variance not known: a report that was read from a file, or a single step, does not tell how an op varies"


def _sums(changes: Sequence[OpChange]) -> Iterator[str]:
    """Yield how many ops changed in each way, and by how much together."""
    for word, said in _MARKS.items():
        if found := [change.delta_ns for change in changes if change.change == word]:
            yield f"{said} {len(found):,} {plural(len(found), 'op')}, {change_ns(sum(found))} a step"


def _aligned(share: float | None) -> str:
    return "none" if share is None else format_share(share, 1)


def findings(found: StepComparison) -> Table:
    """Return the findings that came, went and stayed."""
    columns = (("", "l"), ("rule", "l"), ("finding", "l"), ("A", "r"), ("B", "r"))
    rows = tuple(_finding(change) for change in found.findings)
    notes = ("A and B: the most that mending it gives, as a share of the step",) if rows else ()
    return Table("Findings", columns, rows, notes, tuple(_without(change) for change in found.findings))


def _finding(change: FindingChange) -> tuple[Cell, ...]:
    unsure = change.change == "went" and change.reason
    tone = {"came": "bad", "went": "" if unsure else "good", "stayed": ""}[change.change]
    ceilings = ((change.a_severity, change.a_ceiling_share), (change.b_severity, change.b_ceiling_share))
    return (Cell(change.change, tone), Cell(change.rule), Cell(change.title), *(Cell(_ceiling(*pair)) for pair in ceilings))


def _ceiling(severity: str | None, share: float | None) -> str:
    if severity is None:
        return "-"
    return severity if share is None else f"{severity}, {format_share(share, 1)}"


def _without(change: FindingChange) -> str:
    if not change.reason:
        return ""
    said = "not mended for certain; in B" if change.change == "went" else "in A"
    return f"{said} {change.reason}"
