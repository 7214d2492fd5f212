"""Sections of the HTML page as plain values: findings, idle time, memory, telemetry, experiments."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from gpudiag.facts.catalogue import find_fact
from gpudiag.fixes import FIX_BY_ID
from gpudiag.model.experiment import Outcome
from gpudiag.model.memory import MemoryReport
from gpudiag.model.report import ReportData
from gpudiag.report import findings, idle_time, labels, memory, whole_run
from gpudiag.report.console import clean, clean_prose
from gpudiag.report.experiment import summary, verdicts
from gpudiag.report.experiment.intervals import compute_pair_ratios
from gpudiag.report.experiment.verdicts import build_outcome_row
from gpudiag.units import format_bytes, format_ns, format_share

PROGRAM_PLACEHOLDER = "train.py ARGS"
"""Stands for the user's program: a report is passed on, and what follows a script on its command line may be secret."""

_LONGEST_PATH = 400


def build_cards(report: ReportData) -> list[dict[str, Any]]:
    """Return the findings in order, those that are told in full first."""
    ops = {clean(row.name, 160) for row in report.ops}
    cards = []
    for finding in (finding for part in findings.split_findings(report) for finding in part):
        share = finding.ceiling.share if finding.ceiling else None
        evidence = []
        for item in finding.evidence:  # (fact, value with its unit, what the fact is)
            fact = find_fact(item.fact)
            evidence.append((clean(item.fact), clean(labels.format_evidence(item)), clean_prose(fact.doc) if fact else ""))
        where = []
        for place in findings.select_places(finding, report, 3):  # (in words, the op of the table that it names)
            name = clean(place.what.partition(" [")[0].removesuffix(" on").split(", ")[0], 160)
            where.append((clean(labels.format_place(place, report)), name if name in ops else ""))
        fixes = [
            {"title": clean(title), "change": clean(change, 1_000), "effect": effect, **explain_test(fix, report)}
            for fix, (title, change, effect) in zip(finding.fixes, labels.list_fix_lines(finding), strict=True)
        ]
        cards.append(
            {
                "rule": clean(finding.rule, 60),
                "title": clean(finding.title),
                "severity": finding.severity,
                "confidence": finding.confidence,
                "message": clean_prose(finding.message),
                "why": clean_prose(finding.why, 4_000),
                "gain": clean_prose(labels.format_upper_bound(finding, report)),
                "gain_percent": None if share is None else _format_length(share),
                "evidence": evidence,
                "fixes": fixes,
                "where": where,
                "folded": [(clean(rule, 60), clean_prose(said)) for rule, said in findings.list_symptoms(finding, report)],
                "references": [split_reference(text) for text in finding.references],
            }
        )
    return cards


def _format_length(share: float) -> str:
    return f"{min(1.0, max(0.0, share)) * 100:.2f}"


def explain_test(identifier: str, report: ReportData) -> dict[str, str]:
    """Return the command that tests a fix, and a note on what the reader has to fill in ('': nothing)."""
    fix = FIX_BY_ID.get(identifier)
    if fix is None:
        return {"test": "", "note": ""}
    path = shlex.quote(clean(report.source.path, _LONGEST_PATH))
    bundle = f" --from {path} -o {path}" if report.source.kind == "bundle" else ""
    if fix.injected:
        change = f"--fix {identifier}{'=VALUE' if fix.needs_value else ''}"
        note = f"VALUE: {fix.values}." if fix.needs_value else ""
    else:
        change = f"--variant {identifier}=script:COPY.py"
        note = "COPY.py: a copy of your script with the change in it; no experiment can inject this change."
    return {"test": f"gpudiag ab {change}{bundle} {PROGRAM_PLACEHOLDER}", "note": note}


def split_reference(text: str) -> tuple[str, str]:
    """Return (text, link); only https is linked, and only when a reader clicks it."""
    text = clean(text, 500)
    return text, text if text.startswith("https://") and " " not in text else ""


QUEUE_WIDTH, QUEUE_HEIGHT = 720, 120

_WIDE_ENOUGH, _WIDE_ON_A_PHONE = 0.08, 0.17


def build_idle_context(report: ReportData) -> dict[str, Any]:
    """Return the values of the template's part on idle time."""
    found = idle_time.list_idle_causes(report, 6)
    causes = []
    for cause in found:  # each place as (site, what happened, time, share)
        places = [(clean(place.site), clean(place.what, 240), format_ns(place.ns), format_share(place.share, 1)) for place in cause.places]
        figures = {"time": format_ns(cause.ns), "share": format_share(cause.share, 1)}
        causes.append({"css": labels.name_css_classes(cause.bucket), "label": clean(cause.label), "places": places, **figures})
    path = [
        {
            "css": labels.name_css_classes(bucket),
            "label": clean(text),
            "share": format_share(share, 1),
            "percent": f"{share * 100:.4f}",
            "inside": format_share(share) if share >= _WIDE_ENOUGH else "",
            "tight": share < _WIDE_ON_A_PHONE,
        }
        for bucket, text, share in idle_time.list_path_parts(report)
        if share >= labels.ROUNDS_TO_ZERO / 5
    ]
    # The depth of the queue as points of a line, where it is known and something was ever queued
    queue, curve = report.queue, None
    if queue is not None and len(queue.t_ns) >= 2 and max(queue.depth, default=0):
        last, most = queue.t_ns[-1] or 1, max(queue.depth)
        points = " ".join(
            f"{t / last * QUEUE_WIDTH:.1f},{QUEUE_HEIGHT - depth / most * (QUEUE_HEIGHT - 4):.1f}"
            for t, depth in zip(queue.t_ns, queue.depth, strict=False)
        )
        size = {"width": str(QUEUE_WIDTH), "height": str(QUEUE_HEIGHT)}
        curve = {"points": points, "most": f"{most:,.0f}", "span": format_ns(last), **size}
    return {
        "device_word": labels.name_device(report),
        "causes": causes,
        "meanings": idle_time.format_cause_meanings(found),
        "queue_line": idle_time.format_queue(report),
        "queue": curve,
        "path_line": idle_time.format_critical_path(report),
        "path": path,
        "changes": [
            (clean(change.label), clean(change.setting), change.then, change.gain, _format_length(change.share))
            for change in idle_time.list_what_if_changes(report, 12)
        ],
    }


def build_memory_context(found: MemoryReport | None) -> dict[str, Any] | None:
    """Return headline, categories, sentences and places; None where no memory was recorded."""
    if found is None:
        return None
    lists = (rows[:20] for _, rows in memory.list_memory_places(found))
    places = zip(("Call site", "Module", "Op"), lists, strict=True)
    categories = zip(memory.build_category_rows(found), found.by_category.values(), strict=True)
    return {
        "headline": memory.format_memory_headline(found),
        "categories": [(*row, _format_length(size / (found.peak_bytes or 1))) for row, size in categories],
        "lines": memory.list_memory_lines(found),
        "places": [(title, [tuple(clean(text, 300) for text in row) for row in rows]) for title, rows in places if rows],
        "notes": [clean(note, 2_000) for note in found.notes],
    }


STRIP_WIDTH, STRIP_HEIGHT = 720, 44

_MARGIN = 3
_FAINTEST = 0.25

Slices = Sequence[float | None]


def build_strip_context(report: ReportData) -> dict[str, Any] | None:
    """Return the charts, the reasons that lowered the clocks, and the axis; None where nothing was sampled."""
    found = report.telemetry
    if found is None or not (found.columns or found.clock_events):
        return None
    strip = found.strip
    # A chart for each column that the strip holds; text beside it says lowest, median and highest in the steps
    ranges = {row.label: row for row in whole_run.build_telemetry_rows(found)}
    charts = []
    for name, label in whole_run.TELEMETRY_LABELS.items():
        values = strip.columns.get(name, ()) if strip else ()
        row = ranges.get(label)
        if row is not None and any(value is not None for value in values):
            charts.append({"label": label, "lines": _build_polylines(values), "low": row.low, "median": row.median, "high": row.high})
    reasons = []
    for event in found.clock_events:
        lowered = strip.lowered.get(event.reason, ()) if strip else ()
        step = STRIP_WIDTH / len(lowered) if lowered else 0.0
        held = [
            (f"{index * step:.1f}", f"{step:.1f}", f"{_FAINTEST + (1 - _FAINTEST) * min(1.0, value):.2f}")
            for index, value in enumerate(lowered)
            if value
        ]
        share = "<1 %" if 0 < event.share < 0.005 else format_share(event.share)
        reasons.append({"name": clean(event.reason, 60), "share": share, "lowers": event.lowers, "held": held})
    unknown = found.source == "nvml" and found.throttle_share is None
    why = found.missing.get("clock_event_reasons", "")
    scale = STRIP_WIDTH / max(1, strip.span_ns) if strip else 0.0
    return {
        "caption": whole_run.format_telemetry_caption(report),
        "lines": [clean(text, 600) for _, text in whole_run.list_telemetry(found, report.energy)],
        "charts": charts,
        "reasons": reasons,
        "untold": f"What lowered the clocks is unavailable{f': {clean(why, 200)}' if why else ''}." if unknown else "",
        "span": format_ns(strip.span_ns) if strip else "",
        # (x, width) of the analysed steps; the narrowest are a pixel wide
        "analysed": [
            (f"{start * scale:.1f}", f"{max(1.0, (end - start) * scale):.1f}") for start, end in (strip.analysed_ns[:200] if strip else ())
        ],
        "width": STRIP_WIDTH,
        "height": STRIP_HEIGHT,
    }


def _build_polylines(values: Slices) -> list[str]:
    known = [value for value in values if value is not None]
    low, high = min(known), max(known)
    # A chart spans at least this share of its highest value: noise of a constant is no mountain
    low = max(0.0, min(low, high - 0.05 * high))
    height, step = (high - low) or 1.0, STRIP_WIDTH / len(values)
    lines: list[list[str]] = [[]]
    for index, value in enumerate(values):
        if value is None:
            lines.append([])
            continue
        y = STRIP_HEIGHT - _MARGIN - (value - low) / height * (STRIP_HEIGHT - 2 * _MARGIN)
        lines[-1] += [f"{(index + part) * step:.1f},{y:.1f}" for part in (0, 1)]
    return [" ".join(points) for points in lines if points]


_LONGEST_NOTE = 1_000


def build_experiments_context(outcomes: Sequence[Outcome]) -> dict[str, Any] | None:
    """Return the values of the part on experiments, None where there are none."""
    if not outcomes:
        return None
    groups, details = [], []
    titles = ("", "Screening: ranks variants, proves nothing", "Without a result")
    for title, group in zip(titles, verdicts.group_outcomes(outcomes), strict=True):
        rows = []
        for found in group:
            row = build_outcome_row(found)
            names = ("verdict", "ratio", "told", "parity", "memory", "pays_back", "promised")
            texts = {name: clean_prose(getattr(row, name), _LONGEST_NOTE) for name in names}
            rows.append({**texts, "name": clean(row.name), "tone": row.tone})
            if behind := _build_outcome_details(found):
                details.append(behind)
        if rows:
            groups.append((title, rows))
    legend = [clean_prose(said, _LONGEST_NOTE) for said in summary.format_experiments_legend(outcomes)]
    return {"groups": groups, "details": details, "legend": legend, "as_is": summary.AS_IS}


def _build_outcome_details(found: Outcome) -> dict[str, Any] | None:
    energy = verdicts.format_energy(found)
    lines = [f"In effect: {said}" for said in found.evidence] + ([energy] if energy else [])
    printed = []
    for note in found.notes:
        if "\n" not in note.strip():
            lines.append(note)
        else:  # what a program printed, line by line and harmless; of much its end
            output = [clean(line, _LONGEST_NOTE) for line in note[-4_000:].splitlines()]
            printed.append("\n".join(output[-60:]))
    # (number, ratio, steps, starts, peaks) of each pair that was measured
    pairs: list[tuple[str, ...]] = []
    for number, pair in enumerate(found.measured, 1):
        ratio = compute_pair_ratios([pair])
        steps = (format_ns(pair.first_step_ns), format_ns(pair.second_step_ns)) if pair.first_step_ns and pair.second_step_ns else None
        starts = (f"{pair.first_start_s:.1f} s", f"{pair.second_start_s:.1f} s") if pair.first_start_s and pair.second_start_s else None
        known = pair.first_peak_bytes is not None and pair.second_peak_bytes is not None
        peaks = (format_bytes(pair.first_peak_bytes), format_bytes(pair.second_peak_bytes)) if known else None
        sides = (" \u2192 ".join(side) if side else "?" for side in (steps, starts, peaks))
        pairs.append((str(number), verdicts.format_ratio(ratio[0], None) if ratio else "?", *sides))
    if not lines and not found.notes and not pairs:
        return None
    told = [clean_prose(said, _LONGEST_NOTE) for said in lines]
    return {"name": clean(verdicts.name_outcome(found)), "lines": told, "printed": printed, "pairs": pairs, "unit": found.unit}
