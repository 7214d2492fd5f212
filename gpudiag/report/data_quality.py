"""How far the figures of a report can be trusted: steps, device, coverage, profiler overhead, suppressed rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set as AbstractSet

from gpudiag.model.finding import RuleOutcome
from gpudiag.model.hardware import SCALED_PEAKS
from gpudiag.model.notices import NO_ROOFLINE, WITHHELD, WITHOUT_GAIN, NoticeCode
from gpudiag.model.report import MfuReference, ReportData
from gpudiag.report import idle_time, ranks, telemetry, whole_run
from gpudiag.report.blocks import Amount, Block, Column, Fold, Heading, Listing, Section, Table, Topics, build_row, say_all
from gpudiag.report.labels import (
    ROUNDS_TO_ZERO,
    find_weak_measurement,
    format_place,
    format_rule_counts,
    has_steps,
    is_on_cpu,
    name_work,
    pluralize,
)
from gpudiag.units import format_flop, format_ns, format_rate, format_share

_PROVENANCE = {
    "datasheet": "peak rates from its data sheet",
    "derived": "peak rates derived from its units and clock",
    "unverified": "unverified peak rates",
    "measured": "measured peak rates",
}
_SAID_ABOVE = frozenset(
    {NoticeCode.TRACE_BREAKS_OFF, NoticeCode.NO_STEP_MARKS, NoticeCode.FEW_STEPS, NoticeCode.DEVICE_TIME_OUTSIDE,
     NoticeCode.MFU_MIXED_TYPES}
)  # fmt: skip
"""What the headlines and the line on the steps say already."""
SMALL_UTILISATION = 0.0005


def format_headlines(report: ReportData) -> list[str]:
    """Return what stands beside the verdict: the spread over the ranks, how much of the time the figures cover, the utilisation."""
    lines = [format_break(report), *list_remarks(report), format_coverage(report), format_mfu(report)]
    return [text for text in lines if text]


def format_break(report: ReportData) -> str:
    """Return that the recording breaks off, '' where it is whole."""
    broken = _find_warning(report, frozenset({NoticeCode.TRACE_BREAKS_OFF}))
    return f"The recording is not whole: {broken}." if broken else ""


def list_remarks(report: ReportData) -> list[str]:
    """Return what the parts of a step do not show: findings of the first screen, the largest line of the program, the ranks."""
    lines = []
    for finding in report.findings:
        if finding.role in ("first_screen", "disturbance"):
            place = f" Seen most: {format_place(finding.where[0], report)}." if finding.where else ""
            lines.append(f"{finding.message}{place}")
    lines += [_format_largest_lines(report), ranks.format_ranks_headline(report)]
    return [text for text in lines if text]


WORTH_A_HEADLINE = 0.1
"""Share of the step from which on the line with most work is told above all findings."""


def _format_largest_lines(report: ReportData) -> str:
    wall, count = report.breakdown.wall_ns, max(1, report.steps.count)
    if not report.lines or (report.lines[0].time_ns or 0) < WORTH_A_HEADLINE * wall:
        return ""
    told = []
    for place in report.lines:
        ns, line = place.time_ns or 0, f"{place.file}{'' if place.line is None else f':{place.line}'} ({place.what})"
        told.append(f"{line}, {format_ns(ns / count)} ({format_share(ns / wall)})")
    return f"Line with the most op time, its backward pass included: {'; largest below it: '.join(told)}."


def list_quality_lines(report: ReportData) -> list[tuple[str, str]]:
    """Return (topic, plain sentence) of what was modelled, linked and read; unknown shares are said."""
    trust, weak = report.trust, find_weak_measurement(report)
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in sorted(trust.dropped.items()))
    read = f"{trust.events:,} events, {trust.kernels:,} {name_work(report, trust.kernels)}"
    sites = f"Known for {format_share(trust.site_match_share)} of the op time: the line of the call where recorded, else of the function."
    counted = ""
    if (mfu := report.mfu) is not None:
        ways = {"exact": "from recorded shapes", "derived": "partly derived from other ops", "generic": "partly estimated"}
        how = ways.get(mfu.provenance, "of unknown origin")
        known = "" if mfu.known_share is None else f"; counted for {format_share(mfu.known_share)} of the time that may hold matrix work"
        counted = f"{format_flop(mfu.model_flops)} of matrix work, {how}{known}."
    # Which rules were judged by other thresholds than their own, and which not at all, as the user chose
    changed = "; ".join(f"{rule.id} {rule.changed}" for rule in report.rules if rule.changed)
    off = ", ".join(rule.id for rule in report.rules if _has_code(rule, frozenset({NoticeCode.SWITCHED_OFF})))
    chosen = [f"Thresholds changed: {changed}." if changed else "", f"Switched off: {off}." if off else ""]
    lines = [
        ("coverage", _format_modelled(report)),
        ("by name", _format_kernel_classes(report)),
        # An invalid measurement is a finding
        ("measurement", f"Weak: findings lose one grade of confidence. {weak.message} ({weak.rule})" if weak else ""),
        ("steps", format_steps(report)),
        ("device", format_device(report)),
        ("utilisation", counted),
        ("profiler", _format_slowdown(report)),
        ("read", f"{read}; not used: {dropped}." if dropped else f"{read}."),
        ("ranks", ranks.format_ranks_quality(report)),
        *telemetry.list_telemetry(report.telemetry, report.energy),
        ("replay", idle_time.format_replay_trust(report)),
        ("call sites", "" if trust.site_match_share is None else sites),
        ("whole run", whole_run.explain_missing_history(report)),
        ("rules", " ".join(text for text in chosen if text)),
    ]
    return [(topic, text) for topic, text in lines if text]


def list_warnings(report: ReportData, but: AbstractSet[NoticeCode] = frozenset()) -> list[str]:
    """Return the warnings without those that only repeat what a line above them says: how many steps there are, a file that breaks off;
    and without those of `but`."""
    pairs = zip(report.trust.warnings, report.trust.notices, strict=True)
    return [text for text, notice in pairs if notice.code not in _SAID_ABOVE | but]


def _find_warning(report: ReportData, codes: frozenset[NoticeCode]) -> str:
    pairs = zip(report.trust.warnings, report.trust.notices, strict=True)
    return next((text for text, notice in pairs if notice.code in codes), "")


def _has_code(rule: RuleOutcome, codes: frozenset[NoticeCode]) -> bool:
    return rule.notice is not None and rule.notice.code in codes


def format_basis(report: ReportData) -> str:
    """Return what all figures of a report rest on: the analysed steps, the peaks, the profiler's part."""
    return f"Basis: {format_steps(report)} {format_device(report)} {_format_slowdown(report)}"


def format_coverage(report: ReportData) -> str:
    """Return how much of the time cost models cover, and what the rest is; '' where there is no time that could be modelled."""
    trust, work = report.trust, name_work(report, 1)
    if trust.linked_share is None:
        return ""
    rest = ", ".join(f"{format_share(share)} {words}" for words, share in list_uncovered(report))
    if trust.modelled_share is None:
        return f"Cost models cover none of the {work} time{f': {rest}' if rest else ''}."
    text = f"Cost models cover {format_share(trust.modelled_share)} of the {work} time"
    if trust.modelled_share_of_all is not None and trust.modelled_share - trust.modelled_share_of_all >= ROUNDS_TO_ZERO:
        text += f" that can be modelled, {format_share(trust.modelled_share_of_all)} of all"
    return f"{text}{f'; the rest: {rest}' if rest else ''}."


def list_uncovered(report: ReportData) -> list[tuple[str, float]]:
    """Return (words, share of all kernel time) of what cost models do not cover, largest first; what rounds to 0 left out."""
    trust = report.trust
    guessed = None if trust.attributable_share is None else trust.attributable_share - (trust.modelled_share_of_all or 0.0)
    parts = (
        ("launched before the recording", trust.without_launch_share),
        ("outside any op", trust.outside_ops_share),
        ("in ops without shapes", trust.without_shapes_share),
        ("replayed from captured graphs", trust.replay_share),
        ("communication", trust.collective_share),
        ("copies and memory fills", trust.copy_share),
        ("in ops without a cost model", guessed),
    )
    known = [(words, share) for words, share in parts if share is not None and share >= ROUNDS_TO_ZERO]
    return sorted(known, key=lambda part: -part[1])


def _format_modelled(report: ReportData) -> str:
    trust, work = report.trust, name_work(report, 1)
    if trust.linked_share is None:
        return f"The recording holds no {work} time that could be attributed or modelled."
    modelled = "Cost models cover none of it: no op with recorded shapes stands behind it."
    if trust.modelled_share is not None:
        exact, generic, unknown = map(format_share, (trust.modelled_share, trust.generic_share, trust.unknown_share))
        modelled = f"Of the {work} time that can be modelled, {exact} has a cost model, {generic} a generic estimate, {unknown} neither."
    if is_on_cpu(report):  # its work is the ops themselves
        return modelled
    linked = f"{format_share(trust.linked_share)} of all {work} time is attributed to the op that launched it"
    if trust.mapped_replay_share is not None and trust.mapped_replay_share >= ROUNDS_TO_ZERO:
        linked += f", {format_share(trust.mapped_replay_share)} through the capture of the replayed graph"
    return f"{modelled} {linked}."


def _format_kernel_classes(report: ReportData) -> str:
    total = sum(row.kernel_ns for row in report.kernels)
    classes: Counter[str] = Counter()
    for row in report.kernels:
        if row.op is None and row.kernel_class is not None:
            classes[row.kernel_class] += row.kernel_ns
    if not total or classes.total() < 0.05 * total:  # share of the time in kernels without an op from which their names are told
        return ""
    told = [(name.replace("_", " "), ns / total) for name, ns in classes.most_common(5) if ns >= ROUNDS_TO_ZERO * total]
    listed = ", ".join(f"{format_share(share)} {name}" for name, share in told)
    return f"{format_share(classes.total() / total)} of the kernel time is in kernels without an attributed op; by their names: {listed}."


def format_steps(report: ReportData) -> str:
    """Return how many steps were analysed, how they were found, and their spread."""
    steps = report.steps
    if not has_steps(report):
        return f"No steps were found: the whole recorded window of {format_ns(steps.wall_ns)} was analysed as one."
    recorded = f" of {steps.recorded} recorded" if steps.recorded > steps.count else ""
    edges = "" if recorded or steps.count == 1 or not steps.recorded else ", the first and the last included"
    text = f"{steps.count}{recorded} {pluralize(max(steps.count, steps.recorded), 'step')} analysed{edges} (found by {steps.source})"
    if steps.count > 1:
        text += f", median {format_ns(steps.median_ns)}, 95th percentile {format_ns(steps.p95_ns)}"
    return f"{text}."


def format_device(report: ReportData) -> str:
    """Return the device and where its peaks come from, or that there is no roofline."""
    device = report.device
    if device is not None and device.peaks and device.provenance is not None:
        scaled = ", scaled to the clock that was observed" if SCALED_PEAKS in device.source else ""
        return f"{device.name}: {'published peak rates' if scaled else _PROVENANCE[device.provenance]}{scaled}."
    why = " (the reason is among the warnings)" if explain_missing_peaks(report) else ""
    name = f"{device.name}: peak rates unavailable" if device else "Unknown"
    return f"{name}, so there is no roofline{why}."


def format_mfu(report: ReportData) -> str:
    """Return the utilisation with what it is divided by, '' where it is not known; with recomputed work (HFU) where there is some."""
    figure, basis = split_mfu(report)
    return f"Model FLOPs utilisation (MFU): {figure} of {basis}." if figure else ""


def split_mfu(report: ReportData) -> tuple[str, str]:
    """Return the utilisation as a figure, and what it is of; ('', why it is not known) where it is not."""
    mfu = report.mfu
    if mfu is None:
        why = next((one.params.get("reason") for one in report.trust.notices if one.code is NoticeCode.NO_MFU), None)
        return "", str(why or "")
    # Below this share of matrix time with counted FLOPs a utilisation is a lower bound (facts.efficiency says so too)
    least = "at least " if mfu.known_share is not None and mfu.known_share < 0.95 else ""
    # The peak in words, such as '989 TFLOP/s (bf16 dense, H100 SXM)'
    if mfu.peak_flop_per_s is None:
        peak = f"the {mfu.dtype} peak".replace("  ", " ")
    else:
        of = ", ".join([*([f"{mfu.dtype} dense"] if mfu.dtype else []), *([report.device.name] if report.device else [])])
        peak = format_rate(mfu.peak_flop_per_s, "FLOP") + (f" ({of})" if of else "")
    text = peak
    mixed = next((str(one.params["types"]) for one in report.trust.notices if one.code is NoticeCode.MFU_MIXED_TYPES), "")
    text += f"; of the matrix work, by type: {mixed}" if mixed else ""
    if mfu.recompute_flops and mfu.hfu_share is not None:
        text += f"; with recomputed work (HFU) {_format_percent(mfu.hfu_share)}"
    return f"{least}{_format_percent(mfu.share)}", text


def _format_percent(share: float) -> str:
    return f"below {format_share(2 * SMALL_UTILISATION, 1)}" if share < SMALL_UTILISATION else format_share(share, 1)


def format_mfu_reference(item: MfuReference) -> str:
    """Return a published utilisation with what it was divided by; says so where that is another device."""
    return f"{format_share(item.share, 1)} of {item.denominator}{', another device' if item.another_device else ''}"


def explain_missing_peaks(report: ReportData) -> str:
    """Return the warning that says why there are no peaks to judge against, '' where none does."""
    return _find_warning(report, NO_ROOFLINE)


def _format_slowdown(report: ReportData) -> str:
    slowdown = report.trust.profiler_slowdown
    if slowdown is None and _find_warning(report, frozenset({NoticeCode.RECORDING_UNFINISHED})):
        return "Slow-down unavailable: the run was stopped, or still records, before the wall times of its unprofiled steps were written."
    if slowdown is None:
        return "Slow-down unavailable: no unprofiled steps were recorded beside the profiled ones."
    # what is nearer to 1 is noise that is not worth a word
    noisy = ": no profiler makes a step faster, so other work slowed the machine at times" if slowdown < 0.95 else ""
    # Findings about the host that are not made because the profiler slows it
    withheld = [rule.id for rule in report.rules if _has_code(rule, frozenset({NoticeCode.WITHHELD_BY_PROFILER}))]
    what = f"; that may explain {', '.join(withheld)}, so {'they are' if len(withheld) > 1 else 'it is'} suppressed" if withheld else ""
    return f"Profiled steps take {slowdown:.2f} x as long as unprofiled ones{noisy}{what}."


def list_suppressed_rules(report: ReportData, *, reasons: bool = False) -> list[str]:
    """Return which rules are no finding though they hold or might: a line for those without a gain, and one for those withheld.

    `reasons`: why, a line for each of the former and for each reason to withhold.
    """
    idle = [rule for rule in report.rules if _has_code(rule, WITHOUT_GAIN)]
    others = [rule for rule in report.rules if rule.status == "suppressed" and not _has_code(rule, WITHOUT_GAIN)]
    held = sorted([*others, *(rule for rule in report.rules if _has_code(rule, WITHHELD))], key=lambda rule: rule.id)
    if reasons:
        groups: dict[str, list[str]] = {}
        for rule in held:
            groups.setdefault(rule.reason.removeprefix("withheld: "), []).append(rule.id)
        alone = [f"{rule.id} {rule.reason}" for rule in idle]
        return [*alone, *(f"Suppressed: {', '.join(ids)}: {reason}" for reason, ids in groups.items())]
    recorded_pace = any(_has_code(rule, frozenset({NoticeCode.NO_GAIN_AT_RECORDED_PACE})) for rule in idle)
    where = " at the recorded pace" if recorded_pace else ""
    found = [f"Suppressed, no gain{where}: {', '.join(rule.id for rule in idle)}."] if idle else []
    return [*found, f"Suppressed (why: --all-findings): {', '.join(rule.id for rule in held)}."] if held else found


def build_quality_section(report: ReportData, amount: Amount) -> Section:
    """Return how far to trust the figures: shares as gauges on a page, topics, published utilisations, warnings."""
    topics = list_quality_lines(report)
    if amount.page and report.device is not None:  # where the peaks come from, and the notes of the device table
        said = {report.device.source, *report.trust.warnings}
        notes = " ".join(note for note in dict.fromkeys(report.device.notes) if note not in said)
        topics += [(topic, text) for topic, text in (("peaks from", report.device.source), ("device notes", notes)) if text]
    references = report.mfu.references if report.mfu else ()
    published = tuple(f"{item.what}: {format_mfu_reference(item)}" for item in references)
    if published and not amount.document:
        topics.append(("published", "; ".join(published)))
    shown: list[Block] = [Topics(tuple(topics))]
    if published and amount.document:
        shown += [Heading("Published utilisations, to compare with"), Listing(published, links=tuple(item.source for item in references))]
    if warnings := list_warnings(report):
        shown += [*([Heading("Warnings")] if amount.page else []), Listing(tuple(warnings), "warning")]
    return Section("Data quality", tuple(shown), "trust", nav="Data quality")


RULE_ORDER = {"fired": "fired", "error": "failed", "suppressed": "suppressed", "not_applicable": "not applicable", "passed": "passed"}
"""Status of a rule -> as it is said, in the order in which they are listed."""


def build_rules_section(report: ReportData, amount: Amount, pages: tuple[Fold, ...] = ()) -> Section:
    """Return how many rules fired, and for each that was not judged why; on pages all, and what there is to read on those that fired."""
    shown: list[Block] = [*say_all([format_rule_counts(report)])]
    rules = [rule for rule in report.rules if amount.page or rule.status in {"not_applicable", "suppressed", "error"}]
    order = list(RULE_ORDER)
    rows = [
        build_row(rule.id, RULE_ORDER[rule.status], rule.reason)
        for rule in sorted(rules, key=lambda rule: (order.index(rule.status), rule.id))
    ]
    columns = (Column("rule"), Column("status"), Column("reason"))
    if rows and amount.page:
        shown.append(Table(columns, tuple(rows), "Every rule, its status and the reason", "rules"))
    elif rows:
        shown.append(Fold("Rules that were not judged, and why", (Table(columns, tuple(rows)),)))
    return Section("Rules", (*shown, *pages), "rules-title", nav="Rules")
