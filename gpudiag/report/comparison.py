"""A comparison of two recordings: its words and tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpudiag.model.comparison import Change, OpChange, StepComparison
from gpudiag.model.event_labels import format_kernel_name
from gpudiag.report.blocks import Block, Cell, Column, Document, Listing, Paragraph, Row, Section, Table, Tone, build_row, say_all
from gpudiag.report.causes import build_causes_section, format_main_cause, format_nothing_set, format_signed_ns, format_unlike
from gpudiag.report.labels import format_bucket_name, pluralize
from gpudiag.units import describe_ratio_change, format_ns, format_ratio_change, format_share

WITHIN = "within these two runs; another run of the same program may differ by more (gpudiag ab measures that)"
NO_P = "no p-value is given: steps of one process resemble their neighbours, and two processes differ even where nothing was changed"

_LISTED = 1e-9
MARKS: dict[Change, str] = {
    "faster": "faster", "slower": "slower", "new": "new", "gone": "gone", "not_known": "variance unknown", "unchanged": "within noise"
}  # fmt: skip
_MATCHES = {"exact": "", "shapes": "other shapes", "name": "by name", "alone": ""}
_STEPS = {"unprofiled": "unprofiled", "profiled": "profiled", "report": "profiled"}


def format_comparison_headline(found: StepComparison) -> str:
    """Return the answer in one sentence."""
    if found.same_recording:
        return "A and B are the same recording: nothing can have changed"
    ratio = found.ratio
    if ratio is None:
        return "The steps cannot be compared: one of the recordings has no complete step"
    ns = None if found.explanation is None else abs(found.explanation.difference_ns)
    changed = describe_ratio_change(ratio.value)
    if ns is not None and abs(ratio.value - 1) >= 0.0005:
        changed = f"{format_ns(ns)} ({format_share(abs(ratio.value - 1), 1)}) {'longer' if ratio.value > 1 else 'less'} a step"
    interval = "" if ratio.low is None or ratio.high is None else f"{format_ratio_change(ratio.low)} to {format_ratio_change(ratio.high)}"
    if found.verdict == "no_difference":
        return f"No difference beyond noise: the median step changed by {format_ratio_change(ratio.value)}, interval {interval}"
    doubt = f" (interval {interval})" if interval else f", and whether that is more than noise is unknown ({ratio.reason})"
    return ": ".join(filter(None, (f"B takes {changed}{doubt}", format_main_cause(found))))


def format_interval_meaning(found: StepComparison) -> str:
    """Return what the interval holds, '' where there is none."""
    ratio = found.ratio
    if found.same_recording or ratio is None or ratio.low is None:
        return ""
    return (
        f"The interval ({format_share(ratio.level)}, over {ratio.batches[0]} and {ratio.batches[1]} batches of consecutive "
        f"{_STEPS[ratio.steps]} steps) holds the variance {WITHIN}; {NO_P}."
    )


def format_speed_gate(found: StepComparison) -> str:
    """Return what --fail-if-slower decided and why, '' where it was not asked for."""
    gate = found.gate
    if gate is None:
        return ""
    word = {"passed": "passed", "failed": "FAILED", "within_noise": "passed, undecided", "unknown": "FAILED, unavailable"}[gate.outcome]
    return f"{gate.name}: {word}: {gate.message}"


def build_comparison(found: StepComparison, top: int) -> Document:
    """Return the comparison with the `top` ops that changed most."""
    gate, meaning = format_speed_gate(found), format_interval_meaning(found)
    failed = found.gate is not None and found.gate.fails
    leads: list[Block] = [Paragraph(gate, "bad" if failed else "strong")] if gate else []
    leads += [*say_all([format_unlike(found)], "strong"), *say_all([format_nothing_set(found)])]
    leads += [Listing(found.warnings, "warning")] if found.warnings else []
    sections = (
        build_causes_section(found),
        build_runs_section(found),
        build_parts_section(found),
        build_ops_section(found, top),
        build_findings_section(found),
    )
    return Document(
        "gpudiag compare",
        format_comparison_headline(found),
        leads=tuple(leads),
        sections=tuple(section for section in sections if section is not None),
        foot=tuple(say_all([meaning], "quiet")),
        title=f"gpudiag: {found.a.path} against {found.b.path}",
    )


def build_runs_section(found: StepComparison) -> Section:
    """Return the two runs side by side; their devices where they are not the same, samples a second where those of one are known."""
    rows = []
    for name, side in zip("AB", (found.a, found.b), strict=True):
        rate = "" if side.samples_per_s is None else f"{side.samples_per_s:,.4g}"
        device = "" if found.a.device == found.b.device else side.device or "not known"
        rows.append(build_row(name, side.path, device, f"{side.steps:,}", format_ns(side.median_ns), format_ns(side.p95_ns), rate))
    columns = [
        Column(""), Column("run", "name"), Column("device", least=120, below=""), Column("steps", "number"),
        Column("median", "number", least=50), Column("p95", "number", least=80), Column("samples/s", "number", least=70),
    ]  # fmt: skip
    if not any(row.cells[-1].text for row in rows):
        rows, columns = [Row(row.cells[:-1]) for row in rows], columns[:-1]
    steps = f"median and 95th percentile of the {_STEPS[found.ratio.steps] if found.ratio else 'profiled'} steps"
    on = f", on {found.a.device or 'devices that are not known'}" if found.a.device == found.b.device else ""
    about = f"A is the baseline, B the changed run; {steps}{on}."
    return Section("Runs", (Table(tuple(columns), tuple(rows), "Runs"), Paragraph(about, "quiet")))


def build_parts_section(found: StepComparison) -> Section | None:
    """Return the parts of the step, busy before idle as in the breakdown, and their sum."""
    if not found.parts:
        return None
    kinds = {side.device_kind for side in (found.a, found.b)}
    device = (kinds.pop() or "device").upper() if len(kinds) == 1 else "device"
    work = "ops" if device == "CPU" else "kernels"
    times = [(format_bucket_name(part.name, work=work, device=device), part.a_ns, part.b_ns) for part in found.parts]
    whole = f"profiled step (mean of {found.a.analysed_steps} and {found.b.analysed_steps})"
    sums = (sum(part.a_ns for part in found.parts), sum(part.b_ns for part in found.parts))
    rows = [build_row(label, format_ns(a), format_ns(b), format_signed_ns(b - a)) for label, a, b in times]
    rows.append(build_row(whole, *map(format_ns, sums), format_signed_ns(sums[1] - sums[0]), level="total"))
    columns = (Column("part of the profiled step", "words"), *_SIDES, Column("change", "number"))
    return Section("Where the step goes", (Table(columns, tuple(rows), "Where the step goes"),))


_SIDES = (Column("A", "number", least=50), Column("B", "number", least=50))


def build_ops_section(found: StepComparison, top: int) -> Section:
    """Return the ops that changed by more than they vary, or whose variance is not known, the largest change first."""
    changed = [change for change in found.ops if change.change != "unchanged"]
    table = build_changes_table(changed[:top])
    title = "Ops, in kernel time a step (mean \u00b1 its standard deviation from step to step)"
    notes = say_all(_list_op_notes(found, len(changed), len(table.rows)), "quiet")
    return Section(title, (*([table] if table.rows else []), *notes))


def build_changes_table(changes: Sequence[OpChange]) -> Table:
    """Return how ops changed, with module and shapes, those of both where they differ."""
    tones: dict[str, Tone] = {"faster": "good", "gone": "good", "slower": "bad", "new": "bad"}
    rows = []
    for change in changes:
        tone = tones.get(change.change, "")
        times = [
            "-" if mean is None else format_ns(mean) if spread is None else f"{format_ns(mean)} \u00b1 {format_ns(spread)}"
            for mean, spread in ((change.a_ns, change.a_spread_ns), (change.b_ns, change.b_spread_ns))
        ]
        interval = () if change.low_ns is None or change.high_ns is None else (change.low_ns, change.high_ns)
        between = (" to ".join(map(format_signed_ns, interval)),) if interval else ()
        said = ", ".join(word for word in (MARKS[change.change], _MATCHES[change.matched]) if word)
        shapes = " -> ".join(dict.fromkeys(text for text in (change.signature_a, change.signature_b) if text))
        calls = ""
        if change.a_calls is not None and change.b_calls is not None and abs(change.a_calls - change.b_calls) >= _LISTED:
            calls = f"{change.a_calls:,.4g} -> {change.b_calls:,.4g} calls a step"
        rows.append(
            build_row(
                Cell(format_kernel_name(change.name), link=("op", change.name)), change.phase or "", *times,
                Cell(format_signed_ns(change.delta_ns), change.delta_ns, between, tone), Cell(said, tone=tone),
                detail=", ".join(text for text in (change.module, shapes, calls) if text),
            )
        )  # fmt: skip
    columns = (
        Column("op", "name"), Column("phase", least=100, below=""), *_SIDES,
        Column("change", "number", "B less A, a step, with its interval"), Column("", least=60),
    )  # fmt: skip
    return Table(columns, tuple(rows), "Ops that changed")


def _list_op_notes(found: StepComparison, changed: int, shown: int) -> Iterator[str]:
    if not found.ops:
        yield "no ops were recorded"
        return
    sums = []
    for word, said in MARKS.items():
        if deltas := [change.delta_ns for change in found.ops if change.change == word]:
            sums.append(f"{said} {len(deltas):,} {pluralize(len(deltas), 'op')}, {format_signed_ns(sum(deltas))} a step")
    yield f"in all: {'; '.join(sums)}"
    a, b = ("none" if share is None else format_share(share, 1) for share in (found.aligned_a_share, found.aligned_b_share))
    yield f"aligned: {a} of the op time of A and {b} of that of B"
    if shown < changed:
        yield f"{shown} of {changed:,} changed ops; --top N shows more"
    if any(change.change == "unchanged" for change in found.ops):
        level = format_share(found.op_level)
        yield f"within noise: changed by less than the op varies from step to step (interval of {level}), or by less than 1 % of its time"
    if any(change.change == "not_known" for change in found.ops):
        yield "variance unknown: a report read from a file, or a single step, does not hold how an op varies"


def build_findings_section(found: StepComparison) -> Section | None:
    """Return the findings that came, went and stayed."""
    rows = []
    for change in found.findings:
        unsure = change.change == "went" and change.reason
        tones: dict[str, Tone] = {"came": "bad", "went": "" if unsure else "good"}
        ceilings = [
            "-" if severity is None else severity if share is None else f"{severity}, {format_share(share, 1)}"
            for severity, share in ((change.a_severity, change.a_ceiling_share), (change.b_severity, change.b_ceiling_share))
        ]
        side = "in A" if change.a_severity is None else "in B"
        reason = f"{'not certainly fixed; ' if unsure else ''}{side} {change.reason}" if change.reason else ""
        rows.append(build_row(Cell(change.change, tone=tones.get(change.change, "")), change.rule, change.title, *ceilings, detail=reason))
    if not rows:
        return None
    columns = (Column(""), Column("rule"), Column("finding", "words"), Column("A"), Column("B"))
    note = Paragraph("A and B: upper bound of the potential speed-up, as a share of the step.", "quiet")
    return Section("Findings", (Table(columns, tuple(rows), "Findings"), note))
