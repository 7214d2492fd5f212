"""Idle time in words: causes, call sites, sync calls, queue depth, critical path; and what-ifs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from gpudiag.model.event_labels import describe_event, describe_idle_event
from gpudiag.model.report import IdleRow, ReportData, SyncRow
from gpudiag.model.timeline import ReplayTrust, WhatIf
from gpudiag.report import labels
from gpudiag.report.blocks import (
    Amount,
    BarPart,
    Bars,
    Block,
    Cell,
    Column,
    Document,
    Heading,
    Paragraph,
    Row,
    Section,
    Strip,
    Strips,
    Table,
    build_count_cell,
    build_row,
    build_section,
    build_share_cell,
    build_time_cell,
    say,
    say_all,
)
from gpudiag.units import format_count, format_ns, format_share

MOST_PLACES = 3
WORTH_TELLING = 0.01
"""Share of the time below which a cause or place is not listed: nobody acts upon it."""
_PARTS = 5

_MEANINGS = {
    "idle_launch": "nothing is queued for the {device} while the host runs Python, the framework or a launch call",
    "idle_sync": "after a sync nothing is queued until the host launches more",
    "idle_dependency": "the work is launched and waits for its stream order, or for the usual gap between kernels",
    "idle_init": "the first use of the {device} sets up its driver and libraries, once in a run: record later steps",
    "idle_unexplained": "nothing in the recording tells why",
}
_PATH_AS_BUCKET = {
    **{bound: bound for bound in ("compute", "memory", "overhead", "unknown")},
    "communication": "exposed_communication",
    "copy": "exposed_copy",
}
_PATH = {
    "launch": "host overhead",
    "communication": "communication",
    "copy": "copies (H2D, D2H)",
    "dependency": "dependencies",
}
"""Bounds on the critical path that are not called as in the breakdown, where only what nothing hides is meant."""


class IdlePlace(msgspec.Struct, frozen=True):
    """Idle time at one place: mean ns a step, share of the time, and where (site, then what happened)."""

    ns: float
    share: float
    site: str
    what: str

    @property
    def detail(self) -> str:
        """Return site and event in one line."""
        return ": ".join(text for text in (self.site, self.what) if text)


class IdleCause(msgspec.Struct, frozen=True):
    """Idle time of one cause in words, mean ns a step, share of the time, its places, and what the words mean ('': plain)."""

    bucket: str
    label: str
    ns: float
    share: float
    places: tuple[IdlePlace, ...]
    meaning: str


def list_idle_causes(report: ReportData, most: int = MOST_PLACES) -> list[IdleCause]:
    """Return why the device was idle, longest cause first, each with at most `most` places and the rest as one; they add up.

    Empty where no cause is known; left out is what fills less than 1 % of the time, unless it is the largest and does not round to nothing.
    """
    wall, steps = report.breakdown.wall_ns, max(1, report.steps.count)
    if not wall or report.breakdown.buckets_ns.idle_unexplained >= report.breakdown.idle_ns:
        return []
    known = _MEANINGS | {"idle_launch": "no op runs on the threads that train"} if labels.is_on_cpu(report) else _MEANINGS
    causes = []
    for index, bucket in enumerate(row for row in labels.build_bucket_rows(report, 99) if row.idle):
        if not _is_worth_telling(bucket.share, index):
            continue
        # The largest places; those with the same words are one, and what is not told of is the last
        sums: Counter[tuple[str, str]] = Counter()
        for row in report.idle:
            if row.cause == bucket.bucket:
                sums[format_row_site(row), describe_idle_event(row.evidence, row.op, row.notice)] += row.idle_ns
        del sums["", ""]
        ranked = [(key, ns) for place, (key, ns) in enumerate(sums.most_common(most)) if _is_worth_telling(ns / wall, place)]
        places = [IdlePlace(ns / steps, ns / wall, *key) for key, ns in ranked]
        rest = bucket.ns * steps - sum(ns for _, ns in ranked)
        if places and rest / wall >= labels.ROUNDS_TO_ZERO:
            places.append(IdlePlace(rest / steps, rest / wall, "", "other call sites"))
        meaning = known.get(bucket.bucket, "").format(device=labels.name_device(report))
        causes.append(IdleCause(bucket.bucket, bucket.label.removeprefix("idle: "), bucket.ns, bucket.share, tuple(places), meaning))
    return causes


def _is_worth_telling(share: float, index: int) -> bool:
    return share >= (WORTH_TELLING if index else labels.ROUNDS_TO_ZERO)


def format_cause_meanings(found: list[IdleCause]) -> str:
    """Return what the names of causes mean that do not speak for themselves, as one paragraph."""
    return " ".join(f"{labels.capitalize(cause.label)}: {cause.meaning}." for cause in found if cause.meaning)


def format_row_site(row: IdleRow | SyncRow) -> str:
    """Return 'file.py:12', '' where the place is not known."""
    return "" if not row.file else row.file if row.line is None else f"{row.file}:{row.line}"


def list_waiting_calls(report: ReportData, most: int | None = 3, least: float = labels.ROUNDS_TO_ZERO) -> list[SyncRow]:
    """Return the calls that wait for the device and matter, those of one name and place as one: by what they cost, else by their time.

    `least`: share of the time below which one is left out.
    """
    merged: dict[tuple[str, str], SyncRow] = {}
    for row in report.syncs:
        key = (name_call(row), format_row_site(row))
        if (first := merged.get(key)) is None:
            merged[key] = row
        else:
            sums = {name: getattr(first, name) + getattr(row, name) for name in ("count", "wall_ns", "waited_ns", "cost_ns")}
            merged[key] = msgspec.structs.replace(first, **sums)
    wall = report.breakdown.wall_ns
    rows = [row for row in merged.values() if wall and max(row.cost_ns, row.wall_ns) / wall >= least]
    return sorted(rows, key=lambda row: (-row.cost_ns, -row.wall_ns))[:most]


def name_call(row: SyncRow) -> str:
    """Return what waits, as a user knows it: the op, else the runtime call."""
    return row.op or row.api


def format_queue(report: ReportData) -> str:
    """Return how far the host is ahead of the device, '' where launches were not recorded."""
    queue, device = report.queue, labels.name_device(report)
    if queue is None:
        return ""
    if queue.host_bound_share >= 0.5:  # share of the kernels that the device waits for from which the host is called the slower one
        return (
            f"The {device} waits for the host before {labels.format_part(queue.host_bound_share)} of its kernels; for "
            f"{labels.format_part(queue.empty_share)} of the time nothing is queued."
        )
    depth = round(queue.depth_median)
    issued = f", with {depth:,} {labels.pluralize(depth, 'kernel')} in flight" if depth else ""
    return (
        f"The host runs {format_ns(queue.delay_median_ns)} ahead of the {device} (median){issued}; the {device} "
        f"waits for it before {labels.format_small_share(queue.host_bound_share)} of its kernels."
    )


def list_path_parts(report: ReportData) -> list[tuple[str, str, float]]:
    """Return (bucket, words, share) of the critical path, the largest first; called as in the breakdown where the same is meant."""
    sums: Counter[str] = Counter()
    for row in report.critical_path:
        sums[row.bound] += row.share  # type: ignore[assignment]
    parts = []
    for bound, share in sums.most_common():
        bucket = _PATH_AS_BUCKET.get(bound, f"idle_{bound}")
        words = _PATH.get(bound) or labels.name_bucket(bucket, report).removeprefix("idle: ")
        parts.append((bucket, words, float(share)))
    return parts


def format_critical_path(report: ReportData) -> str:
    """Return what the critical path of the step consists of, '' where it is not known."""
    parts = [part for part in list_path_parts(report) if part[2] >= labels.ROUNDS_TO_ZERO]
    if not parts:
        return ""
    told = [f"{format_share(share)} {text}" for _, text, share in parts[:_PARTS]]
    rest = sum(share for _, _, share in parts[_PARTS:])
    told += [f"{format_share(rest)} other"] if rest >= labels.ROUNDS_TO_ZERO else []
    return f"Critical path of the {labels.name_span(report)}: {', '.join(told)}."


class WhatIfChange(msgspec.Struct, frozen=True):
    """One what-if: in words, as `gpudiag whatif --set` takes it, the step then, the gain with the replay's error, and as a share."""

    label: str
    setting: str
    then: str
    gain: str
    share: float


def list_what_if_changes(report: ReportData, most: int = 5) -> list[WhatIfChange]:
    """Return the what-ifs, the largest gain first; last those that change the batch, whose gain is per sample.

    The step then is the mean analysed step times what the replay makes of it: as ceilings of findings are.
    """
    error = report.replay.error_share if report.replay else None
    plus_minus = "" if error is None else f" \u00b1 {labels.format_replay_error(error)}"
    ranked = sorted(report.what_ifs, key=lambda found: -found.share)
    batch = [found for found in ranked if found.name.startswith("batch=")]
    changes = []
    for found in [found for found in ranked if found not in batch][:most] + batch[:1]:
        then = format_ns(labels.step_ns(report) * found.changed_ns / found.step_ns) if found.step_ns else "?"
        gain = f"{labels.format_small_share(found.share)}{plus_minus}"
        changes.append(WhatIfChange(found.short or found.name, found.name, then, gain, found.share))
    return changes


def format_replay_trust(report: ReportData) -> str:
    """Return how well the replay reproduces the run, '' where nothing was replayed."""
    replay = report.replay
    if replay is None:
        return ""
    steps = ", ".join(f"{step.name} ({step.role})" for step in replay.steps)
    few = labels.has_steps(report) and len(replay.steps) < report.steps.count
    if not few:
        several = ""
    elif replay.run is not None:
        several = f"Gains are those of the recorded run, {replay.run.name}, in its order; single steps: {steps}. "
    else:
        several = f"{steps} stand{'s' if len(replay.steps) == 1 else ''} for all analysed steps. "
    note = f" {replay.note}." if replay.note else ""
    return (
        f"{several}Replayed with nothing changed, the step time is off by {labels.format_replay_error(replay.error_share)} at most; "
        f"{labels.format_replay_error(replay.free_share)} of it are waits that no dependency explains.{note}"
    )


def build_idle_section(report: ReportData, amount: Amount) -> Section | None:
    """Return why the device was idle: causes with their call sites, calls that synchronise, the launch queue, the critical path."""
    causes = list_idle_causes(report, amount.places)
    titled = amount.page
    shown: list[Block | None] = []
    if causes:
        shown = [build_causes_table(causes), say(format_cause_meanings(causes), "quiet")]
    if table := build_syncs_table(report, amount):
        shown += [Heading("Calls that synchronise", f"in {labels.format_span(report)}"), table]
    if said := format_queue(report):
        shown += [Heading("Launch queue") if titled else None, Paragraph(said), build_queue_strip(report)]
    if said := format_critical_path(report):
        only = f" Only work on it can make the {labels.name_span(report)} shorter." if titled else ""
        parts = [BarPart(labels.name_css_classes(bucket), text, None, share) for bucket, text, share in list_path_parts(report)]
        shown += [Heading("Critical path") if titled else None, Paragraph(f"{said}{only}"), Bars(tuple(parts))]
    return build_section(f"Why the {labels.name_device(report)} was idle", shown, "waits", nav="Idle time")


def build_causes_table(causes: Sequence[IdleCause]) -> Table:
    """Return the causes of idle time, under each its places."""
    rows = []
    for cause in causes:
        name = Cell(cause.label, css=labels.name_css_classes(cause.bucket))
        rows.append(build_row(name, build_time_cell(cause.ns), build_share_cell(cause.share), level="group"))
        for place in cause.places:
            alone = len(cause.places) == 1 and format_ns(place.ns) == format_ns(cause.ns)  # the same figures stand above it
            figures = (Cell(""), Cell("")) if alone else (build_time_cell(place.ns), build_share_cell(place.share))
            rows.append(build_row(place.detail, *figures, level="part"))
    columns = (Column("cause, call site", "words"), Column("time", "number"), Column("share", "number"))
    return Table(columns, tuple(rows), "Causes of idle time, and the call sites of each")


def build_syncs_table(report: ReportData, amount: Amount) -> Table | None:
    """Return the calls that wait for the device with the figures of one step, None where there is none."""
    steps = max(1, report.steps.count)
    rows = [
        build_row(
            Cell(name_call(row), details=(row.api,) if row.op and row.api else ()),
            Cell(format_count(row.count / steps), row.count),
            *(build_time_cell(ns / steps) for ns in (row.wall_ns, row.waited_ns, row.cost_ns)),
            detail=format_row_site(row),
        )
        for row in (list_waiting_calls(report, None, 0.0) if amount.page else list_waiting_calls(report))
    ]
    columns = (
        Column("call", "name"),
        Column("calls", "number"),
        Column("host time", "number", "time of the host in the calls"),
        Column("waited", "number", "part of it in which the work that it waited for still ran", 90),
        Column("exposed", "number", "exposed sync time: idle time of the device that the calls cause"),
    )
    return Table(columns, tuple(rows), "Calls that synchronise, with their exposed sync time", id="syncs") if rows else None


def build_queue_strip(report: ReportData) -> Strips | None:
    """Return the depth of the launch queue over time, None where it is not known or nothing was ever queued."""
    queue = report.queue
    if queue is None or len(queue.t_ns) < 2 or not max(queue.depth, default=0):
        return None
    last, most = queue.t_ns[-1] or 1, max(queue.depth)
    points = " ".join(f"{t / last * 720:.1f},{44 - depth / most * 42:.1f}" for t, depth in zip(queue.t_ns, queue.depth, strict=False))
    said = f"Kernels in flight over the {format_ns(last)} of the analysed steps; at most {most:,.0f}"
    lane = Strip("kernels in flight", "mean", f"{most:,.0f}", "at most", said, lines=(points,))
    return Strips((lane,), f"{format_ns(last)}: the analysed steps")


def build_idle_table(report: ReportData) -> Table:
    """Return all idle time of the analysed steps by cause and place, for a page."""
    wall = report.breakdown.wall_ns
    rows = [
        build_row(
            labels.name_bucket(row.cause, report).removeprefix("idle: "),
            Cell(describe_event(row.evidence or "", row.notice) or "unknown", details=(row.op,) if row.op else ()),
            format_row_site(row),
            build_count_cell(row.count),
            build_time_cell(row.idle_ns),
            build_share_cell(row.idle_ns / wall if wall else None),
        )
        for row in sorted(report.idle, key=lambda row: -row.idle_ns)
    ]
    columns = (
        Column("cause"),
        Column("what happened", help="the event that shows the cause, and the op"),
        Column("call site", "name"),
        Column("gaps", "number"),
        Column("idle time", "number"),
        Column(f"share of the {labels.name_span(report)}", "number"),
    )
    return Table(columns, tuple(rows), "Idle time of the device by cause", id="idle")


def build_what_if_section(report: ReportData, amount: Amount) -> Section | None:
    """Return the what-ifs: a step replayed with one thing changed."""
    span, changes = labels.name_span(report), list_what_if_changes(report, amount.what_ifs)
    rows = [build_row(one.label, one.setting, one.then, one.gain, Cell("", one.share)) for one in changes]
    columns = (
        Column("change", "words"), Column("--set", "text", least=92, below=""), Column(span, "number"), Column("gain at most", "number"),
        Column("as a bar", "bar"),
    )  # fmt: skip
    note = f"Each is the {span} replayed with one thing changed; gains do not add up. More, and several at once: "
    shown: list[Block] = [
        Table(columns, tuple(rows), "What-if: potential speed-up"),
        Paragraph(f"{note}gpudiag whatif PATH --set NAME=VALUE", "quiet"),
    ]
    return build_section("What-if: potential speed-up", shown if rows else [], "changes", nav="What-if")


_ROUNDS_TO = 0.001


def build_what_ifs_document(what_ifs: Sequence[WhatIf], trust: ReplayTrust | None, reason: str = "") -> Document:
    """Return trust, step time now and then, gain and assumption of each of `what_ifs`; `reason`: why there is no replay."""
    if reason:
        return Document("gpudiag whatif", "", leads=(Paragraph(f"No what-ifs: {reason}."),))
    leads = say_all(list_replay_trust(trust))
    if not what_ifs:
        return Document("gpudiag whatif", "", leads=(*leads, Paragraph("No standard what-if applies to these steps.")))
    step_ns = what_ifs[0].step_ns
    # How long the steps take with the work that earlier steps left on the device, where that makes them much longer
    alone, times = "", sorted(step.measured_ns for step in (trust.steps if trust else ()))
    if times and times[-1] > 1.1 * step_ns:  # two that differ by less are one to the reader
        span = " to ".join(dict.fromkeys((format_ns(times[0]), format_ns(times[-1]))))
        alone = f"; alone, with work that earlier steps left on the device: {span}"
    error = "" if trust is None else f" \u00b1 {_format_error(trust.error_share)}"
    rows: list[Row] = []
    for found in sorted(what_ifs, key=lambda found: found.name.startswith("batch=")):  # its gain is per sample, not of the step
        said = ["; ".join((found.words, *found.notes))]
        if len(what_ifs) == 1:
            said += [f"{name}: {format_ns(before)} -> {format_ns(after)}" for name, before, after in found.per_step_ns]
        gain = f"{format_share(found.share, 1)}{error}"
        rows.append(build_row(found.name, format_ns(found.changed_ns), gain, notes=tuple(say_all(said, "quiet"))))
    table = Table((Column("what if", "name"), Column("step", "number"), Column("gain", "number")), tuple(rows), "What-ifs")
    section = Section(f"A step takes {format_ns(step_ns)} in a run that repeats these{alone}", (table,))
    return Document("gpudiag whatif", "", leads=tuple(leads), sections=(section,))


def list_replay_trust(trust: ReplayTrust | None) -> list[str]:
    """Return which steps are replayed and how far the replay can be trusted, in words."""
    if trust is None:
        return ["Replay error: unavailable."]
    steps = ", ".join(f"{step.name} ({step.role})" for step in trust.steps)
    return [
        f"Replay of {len(trust.steps)} representative step{'s' if len(trust.steps) > 1 else ''}: {steps}.",
        *([f"Gains are those of the recorded run, {trust.run.name}, replayed in its order."] if trust.run else []),
        f"With nothing changed it is off by at most {_format_error(trust.error_share)} of a step; "
        f"up to {_format_error(trust.free_share)} of a step are waits that no dependency explains, which every what-if keeps.",
        *([f"{trust.note}."] if trust.note else []),
    ]


def _format_error(share: float) -> str:
    return f"<{format_share(_ROUNDS_TO, 1)}" if share < _ROUNDS_TO / 2 else format_share(share, 1)
