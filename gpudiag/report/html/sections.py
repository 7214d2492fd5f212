"""Sections of the HTML page as plain values: findings, idle time, memory, telemetry, experiments."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from gpudiag.facts.catalogue import CATALOGUE
from gpudiag.model.experiment import Outcome, Pair
from gpudiag.model.finding import Evidence, Finding, Where
from gpudiag.model.fixes import FIX_BY_ID
from gpudiag.model.hardware import ClockEvent, Telemetry
from gpudiag.model.memory import MemoryReport
from gpudiag.model.report import ReportData
from gpudiag.report import findings, idle_time, labels, memory, whole_run
from gpudiag.report.console import clean, clean_prose, join_units
from gpudiag.report.experiment import summary, verdicts
from gpudiag.report.experiment.intervals import compute_pair_ratios
from gpudiag.report.experiment.verdicts import build_outcome_row
from gpudiag.units import format_bytes, format_ns, format_share

MOST_FINDING_PLACES = 3
"""Places of one finding."""

PROGRAM_PLACEHOLDER = "train.py ARGS"
"""Stands for the user's program: a report is passed on, and what follows a script on its command line may be secret."""

_LONGEST_PATH = 400


def build_cards(report: ReportData) -> list[dict[str, Any]]:
    """Return the findings in order, those that are told in full first."""
    full, rest = findings.split_findings(report)
    ops = {clean(row.name, 160) for row in report.ops}
    return [_build_card(finding, report, ops) for finding in (*full, *rest)]


def count_full_findings(report: ReportData) -> int:
    """Return how many findings are told in full."""
    return len(findings.split_findings(report)[0])


def _build_card(finding: Finding, report: ReportData, ops: set[str]) -> dict[str, Any]:
    share = finding.ceiling.share if finding.ceiling else None
    return {
        "rule": clean(finding.rule, 60),
        "title": clean(finding.title),
        "severity": finding.severity,
        "confidence": finding.confidence,
        "message": clean_prose(finding.message),
        "why": clean_prose(finding.why, 4_000),
        "gain": clean_prose(labels.format_upper_bound(finding, report)),
        "gain_percent": None if share is None else f"{min(1.0, max(0.0, share)) * 100:.2f}",
        "evidence": [_format_evidence(item) for item in finding.evidence],
        "fixes": _list_fixes(finding, report),
        "where": [_format_place(place, report, ops) for place in findings.select_places(finding, report, MOST_FINDING_PLACES)],
        "folded": [(clean(rule, 60), clean_prose(said)) for rule, said in findings.list_symptoms(finding, report)],
        "references": [split_reference(text) for text in finding.references],
    }


def _format_evidence(item: Evidence) -> tuple[str, str, str]:
    """Return (fact, value with its unit, what the fact is)."""
    known = CATALOGUE.get(item.fact)
    return clean(item.fact), clean(labels.format_evidence(item)), clean_prose(known.doc) if known else ""


def _format_place(place: Where, report: ReportData, ops: set[str]) -> tuple[str, str]:
    """Return a place in words, and the op of the table that it names: '' where it names none."""
    name = clean(place.what.partition(" [")[0].removesuffix(" on").split(", ")[0], 160)
    return clean(labels.format_place(place, report)), name if name in ops else ""


def _list_fixes(finding: Finding, report: ReportData) -> list[dict[str, str]]:
    """Return the fixes: title, code change, effect on results, and the command that tests it."""
    rows = zip(finding.fixes, labels.list_fix_lines(finding), strict=True)
    return [
        {
            "title": clean(title),
            "change": clean(change, 1_000),
            "effect": effect,
            "test": build_test_command(fix, report),
            "note": _find_fix_note(fix),
        }
        for fix, (title, change, effect) in rows
    ]


def build_test_command(fix: str, report: ReportData) -> str:
    """Return the command line that measures a fix against the program as it is, '' for an id that is not known.

    A bundle keeps the result, and its report sets what was promised beside what is measured.
    """
    known = FIX_BY_ID.get(fix)
    if known is None:
        return ""
    path = clean(report.source.path, _LONGEST_PATH)
    kept = f" --from {shlex.quote(path)} -o {shlex.quote(path)}" if report.source.kind == "bundle" else ""
    change = f"--fix {fix}{'=VALUE' if known.needs_value else ''}" if known.injected else f"--variant {fix}=script:COPY.py"
    return f"gpudiag ab {change}{kept} {PROGRAM_PLACEHOLDER}"


def _find_fix_note(fix: str) -> str:
    """Return what stands in the command of a fix that the reader has to fill in, '' where nothing does."""
    known = FIX_BY_ID.get(fix)
    if known is None:
        return ""
    if not known.injected:
        return "COPY.py: a copy of your script with the change in it; no experiment can inject this change."
    return f"VALUE: {known.values}." if known.needs_value else ""


def split_reference(text: str) -> tuple[str, str]:
    """Return (text, link); only https is linked, and only when a reader clicks it."""
    text = clean(text, 500)
    return text, text if text.startswith("https://") and " " not in text else ""


QUEUE_WIDTH, QUEUE_HEIGHT = 720, 120
"""Size of the queue chart in its own units."""

MOST_WHAT_IFS = 12
"""Changes shown."""

MOST_IDLE_PLACES = 6
"""Places shown of each cause; the table of all idle time stands further down."""

_WIDE_ENOUGH, _WIDE_ON_A_PHONE = 0.08, 0.17
"""Shares from which a segment has room for its percentage."""

_AS_BUCKETS = {
    **{bound: bound for bound in ("compute", "memory", "overhead", "unknown")},
    "communication": "exposed-communication",
    "copy": "exposed-copy",
}


def build_idle_context(report: ReportData) -> dict[str, Any]:
    """Return the values of the template's part on idle time."""
    found = idle_time.list_idle_causes(report, MOST_IDLE_PLACES)
    return {
        "device_word": labels.name_device(report),
        "causes": [_build_cause(cause) for cause in found],
        "meanings": idle_time.format_cause_meanings(found),
        "queue_line": idle_time.format_queue(report),
        "queue": _build_queue_curve(report),
        "path_line": idle_time.format_critical_path(report),
        "path": _build_path_segments(report),
        "changes": [
            (clean(change.label), clean(change.setting), change.then, change.gain, f"{min(max(change.share, 0.0), 1.0) * 100:.2f}")
            for change in idle_time.list_what_if_changes(report, MOST_WHAT_IFS)
        ],
    }


def _build_cause(cause: idle_time.IdleCause) -> dict[str, Any]:
    """Return one cause with its places, each as (site, what happened, time, share)."""
    places = [(clean(place.site), clean(place.what, 240), format_ns(place.ns), format_share(place.share, 1)) for place in cause.places]
    figures = {"time": format_ns(cause.ns), "share": format_share(cause.share, 1)}
    return {"css": _name_css_class(cause.bucket), "label": clean(cause.label), "places": places, **figures}


def _name_css_class(bucket: str) -> str:
    """Return the class of a bucket; only words of our own reach the page's markup."""
    name = bucket.replace("_", "-")
    return f"idle {name}" if name.replace("-", "").isascii() and name.replace("-", "").isalpha() else "idle"


def _build_path_segments(report: ReportData) -> list[dict[str, Any]]:
    """Return the segments of the longest path's bar."""
    return [
        {
            "css": _AS_BUCKETS.get(bound) or _name_css_class(f"idle_{bound}"),
            "label": clean(text),
            "share": format_share(share, 1),
            "percent": f"{share * 100:.4f}",
            "inside": format_share(share) if share >= _WIDE_ENOUGH else "",
            "tight": share < _WIDE_ON_A_PHONE,
        }
        for bound, text, share in idle_time.list_path_parts(report)
        if share >= labels.ROUNDS_TO_ZERO / 5
    ]


def _build_queue_curve(report: ReportData) -> dict[str, str] | None:
    """Return the curve of the queue's depth as points of a line, None where it is not known or nothing was ever queued."""
    queue = report.queue
    if queue is None or len(queue.t_ns) < 2 or not max(queue.depth, default=0):
        return None
    last, most = queue.t_ns[-1] or 1, max(queue.depth)
    points = " ".join(
        f"{t / last * QUEUE_WIDTH:.1f},{QUEUE_HEIGHT - depth / most * (QUEUE_HEIGHT - 4):.1f}"
        for t, depth in zip(queue.t_ns, queue.depth, strict=False)
    )
    return {"points": points, "most": f"{most:,.0f}", "span": format_ns(last), "width": str(QUEUE_WIDTH), "height": str(QUEUE_HEIGHT)}


_MOST_MEMORY_PLACES = 20


def build_memory_context(found: MemoryReport | None) -> dict[str, Any] | None:
    """Return headline, categories, sentences and places; None where no memory was recorded."""
    if found is None:
        return None
    lists = (("Module", found.by_module), ("Op", found.by_op))
    places = [("Call site", memory.build_site_rows(found, _MOST_MEMORY_PLACES))]
    places += [(title, memory.build_memory_rows(rows, found, _MOST_MEMORY_PLACES)) for title, rows in lists]
    return {
        "headline": memory.format_memory_headline(found),
        "categories": _build_categories(found),
        "lines": memory.list_memory_lines(found),
        "places": [(title, _clean_rows(rows)) for title, rows in places if rows],
        "notes": [clean(note, 2_000) for note in found.notes],
    }


def _build_categories(found: MemoryReport) -> list[tuple[str, str, str, str]]:
    """Return (name, size, share, length of its bar in percent) of what memory was used for at its peak."""
    peak = found.peak_bytes or 1
    rows = zip(memory.build_category_rows(found), found.by_category.values(), strict=True)
    return [(*row, f"{min(1.0, max(0.0, size / peak)) * 100:.2f}") for row, size in rows]


def _clean_rows(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    return [tuple(clean(text, 300) for text in row) for row in rows]


STRIP_WIDTH, STRIP_HEIGHT = 720, 44
"""Size of one chart in its own units."""

_MARGIN = 3
_LEAST_RANGE = 0.05
"""A chart spans at least this share of its highest value: noise of a constant is no mountain."""
_FAINTEST = 0.25
"""Opacity of the least share that is drawn."""

Slices = Sequence[float | None]


def build_strip_context(report: ReportData) -> dict[str, Any] | None:
    """Return the charts, the reasons that lowered the clocks, and the axis; None where nothing was sampled."""
    found = report.telemetry
    if found is None or not (found.columns or found.clock_events):
        return None
    strip = found.strip
    lowered = found.strip.lowered if found.strip else {}
    return {
        "caption": whole_run.format_telemetry_caption(report),
        "lines": [clean(text, 600) for _, text in whole_run.list_report_telemetry(report)],
        "charts": _build_charts(found),
        "reasons": [_build_clock_reason(event, lowered.get(event.reason, ())) for event in found.clock_events],
        "untold": _explain_unknown_clocks(found),
        "span": format_ns(strip.span_ns) if strip else "",
        "analysed": _build_step_spans(strip.analysed_ns, strip.span_ns) if strip else [],
        "width": STRIP_WIDTH,
        "height": STRIP_HEIGHT,
    }


def _build_charts(found: Telemetry) -> list[dict[str, Any]]:
    """Return a chart for each column that the strip holds; text beside it says lowest, median and highest in the steps."""
    ranges = {row.label: row for row in whole_run.build_telemetry_rows(found)}
    strip = found.strip
    made = []
    for name, label in whole_run.TELEMETRY_LABELS.items():
        values = strip.columns.get(name, ()) if strip else ()
        row = ranges.get(label)
        if row is not None and any(value is not None for value in values):
            figures = {"low": row.low, "median": row.median, "high": row.high}
            made.append({"label": label, "lines": _build_polylines(values), **figures})
    return made


def _build_polylines(values: Slices) -> list[str]:
    """Return the curve as lines of points, one for each stretch without a hole; a lone slice is a short line."""
    known = [value for value in values if value is not None]
    low, high = min(known), max(known)
    low = max(0.0, min(low, high - _LEAST_RANGE * high))
    height, step = (high - low) or 1.0, STRIP_WIDTH / len(values)
    lines: list[list[str]] = [[]]
    for index, value in enumerate(values):
        if value is None:
            lines.append([])
            continue
        y = STRIP_HEIGHT - _MARGIN - (value - low) / height * (STRIP_HEIGHT - 2 * _MARGIN)
        lines[-1] += [f"{(index + part) * step:.1f},{y:.1f}" for part in (0, 1)]
    return [" ".join(points) for points in lines if points]


def _build_clock_reason(event: ClockEvent, values: Slices) -> dict[str, Any]:
    step = STRIP_WIDTH / len(values) if values else 0.0
    held = [
        (f"{index * step:.1f}", f"{step:.1f}", f"{_FAINTEST + (1 - _FAINTEST) * min(1.0, value):.2f}")
        for index, value in enumerate(values)
        if value
    ]
    share = "<1 %" if 0 < event.share < 0.005 else format_share(event.share)
    return {"name": clean(event.reason, 60), "share": share, "lowers": event.lowers, "held": held}


def _explain_unknown_clocks(found: Telemetry) -> str:
    """Return that nothing is known of what lowered the clocks, '' where it is, or where no GPU was sampled."""
    if found.source != "nvml" or found.throttle_share is not None:
        return ""
    why = found.missing.get("clock_event_reasons", "")
    return f"What lowered the clocks is unavailable{f': {clean(why, 200)}' if why else ''}."


def _build_step_spans(spans: Sequence[tuple[int, int]], whole_ns: int) -> list[tuple[str, str]]:
    """Return (x, width) of the analysed steps on the axis; the narrowest are a pixel wide."""
    scale = STRIP_WIDTH / max(1, whole_ns)
    return [(f"{start * scale:.1f}", f"{max(1.0, (end - start) * scale):.1f}") for start, end in spans[:200]]


_LONGEST_NOTE = 1_000
_LONGEST_OUTPUT = 4_000
_MOST_LINES = 60


def build_experiments_context(outcomes: Sequence[Outcome]) -> dict[str, Any] | None:
    """Return the values of the part on experiments, None where there are none."""
    if not outcomes:
        return None
    measured, screened, missing = verdicts.group_outcomes(outcomes)
    titled = (("", measured), ("Screening: ranks variants, proves nothing", screened), ("Without a result", missing))
    return {
        "groups": [(title, [_build_outcome_row(found) for found in group]) for title, group in titled if group],
        "details": [made for group in (measured, screened, missing) for found in group if (made := _build_outcome_details(found))],
        "legend": [_clean_prose(said) for said in summary.format_experiments_legend(outcomes)],
        "as_is": summary.AS_IS,
    }


def _build_outcome_row(found: Outcome) -> dict[str, str]:
    """Return the cells of one change."""
    made = build_outcome_row(found)
    texts = {key: _clean_prose(getattr(made, key)) for key in ("verdict", "ratio", "told", "parity", "memory", "pays_back", "promised")}
    return {**texts, "name": clean(made.name), "tone": made.tone}


def _build_outcome_details(found: Outcome) -> dict[str, Any] | None:
    """Return what stands behind a change: evidence, notes in full, its pairs; None where there is nothing."""
    made = build_outcome_row(found)
    energy = verdicts.format_energy(found)
    more = [f"In effect: {said}" for said in found.evidence] + ([energy] if energy else [])
    printed = [_split_output(note) for note in found.notes if "\n" in note.strip()]
    plain = [note for note in found.notes if "\n" not in note.strip()]
    # (number, ratio, steps, starts, peaks) of each pair that was measured
    pairs: list[tuple[str, ...]] = []
    for number, pair in enumerate(found.measured, 1):
        ratio = compute_pair_ratios([pair])
        pairs.append((str(number), verdicts.format_ratio(ratio[0], None) if ratio else "?", *_format_both_sides(pair)))
    if not more and not found.notes and not pairs:
        return None
    lines = [_clean_prose(said) for said in (*more, *plain)]
    return {"name": clean(made.name), "lines": lines, "printed": printed, "pairs": pairs, "unit": found.unit}


def _split_output(note: str) -> str:
    """Return what a program printed, line by line and harmless; of much its end."""
    lines = [clean(line, _LONGEST_NOTE) for line in note[-_LONGEST_OUTPUT:].splitlines()]
    return "\n".join(lines[-_MOST_LINES:])


def _format_both_sides(pair: Pair) -> tuple[str, str, str]:
    steps = (
        _format_arrow(format_ns(pair.first_step_ns), format_ns(pair.second_step_ns)) if pair.first_step_ns and pair.second_step_ns else "?"
    )
    starts = (
        _format_arrow(f"{pair.first_start_s:.1f} s", f"{pair.second_start_s:.1f} s") if pair.first_start_s and pair.second_start_s else "?"
    )
    known = pair.first_peak_bytes is not None and pair.second_peak_bytes is not None
    return steps, starts, _format_arrow(format_bytes(pair.first_peak_bytes), format_bytes(pair.second_peak_bytes)) if known else "?"


def _format_arrow(before: str, after: str) -> str:
    return f"{before} \u2192 {after}"


def _clean_prose(text: str) -> str:
    return join_units(clean(text, _LONGEST_NOTE))
