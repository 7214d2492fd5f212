"""Idle time in words: causes, call sites, sync calls, queue depth, critical path; and what-ifs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import msgspec

from gpudiag.facts.event_labels import describe_idle_event
from gpudiag.model.report import IdleRow, ReportData, SyncRow
from gpudiag.model.timeline import ReplayTrust, WhatIf
from gpudiag.report import labels
from gpudiag.report.console import (
    QUIET,
    clean_unbroken,
    collect_text,
    create_console,
    create_table,
    format_cells,
    print_heading,
    print_line,
    shrink_table,
)
from gpudiag.units import format_count, format_ns, format_share

MOST_PLACES = 3
WORTH_TELLING = 0.01
"""Share of the time below which a cause or place is not listed: nobody acts upon it."""
_PARTS = 5

_NUMBER = re.compile(r"\d{1,9}(\.\d{1,9})?")
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
_CHANGES = {
    "launch": "one CUDA graph launches the {span}",
    "host": "host overhead at {percent}",
    "fused": "element-wise chains fused",
    "roof": "every {work} at {percent} of its roofline",
    "loader": "no waiting for data",
    "copies": "copies (H2D, D2H) {value}",
    "communication": "communication overlapped",
    "sync": "no host-device sync",
    "gc": "no garbage collection",
    "io": "no file I/O",
    "allocation": "no memory allocation from the driver",
    "compile": "no compilation",
    "profiler": "no profiler overhead",
    "batch": "{value} x the batch (gain per sample; a training then differs)",
}


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

    None where no cause is known; left out is what fills less than 1 % of the time, unless it is the largest and does not round to nothing.
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
    return " ".join(f"{cause.label[:1].upper()}{cause.label[1:]}: {cause.meaning}." for cause in found if cause.meaning)


def format_row_site(row: IdleRow | SyncRow) -> str:
    """Return 'file.py:12', '' where the place is not known."""
    return "" if not row.file else row.file if row.line is None else f"{row.file}:{row.line}"


def list_waiting_calls(report: ReportData) -> list[SyncRow]:
    """Return the calls that wait for the device and matter, those of one name and place as one: by what they cost, else by their time."""
    merged: dict[tuple[str, str], SyncRow] = {}
    for row in report.syncs:
        key = (name_call(row), format_row_site(row))
        if (first := merged.get(key)) is None:
            merged[key] = row
        else:
            sums = {name: getattr(first, name) + getattr(row, name) for name in ("count", "wall_ns", "waited_ns", "cost_ns")}
            merged[key] = msgspec.structs.replace(first, **sums)
    wall = report.breakdown.wall_ns
    rows = [row for row in merged.values() if wall and max(row.cost_ns, row.wall_ns) / wall >= labels.ROUNDS_TO_ZERO]
    return sorted(rows, key=lambda row: (-row.cost_ns, -row.wall_ns))[:3]


def format_call_figures(row: SyncRow, report: ReportData) -> tuple[str, str, str]:
    """Return calls, time inside them and idle time after them, each of one step."""
    steps = max(1, report.steps.count)
    return format_count(row.count / steps), format_ns(row.wall_ns / steps), format_ns(row.cost_ns / steps)


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


def name_what_if(what_if: WhatIf, report: ReportData) -> str:
    """Return a what-if in a few words; one that is not known by its name."""
    name, _, value = what_if.name.partition("=")
    known = _CHANGES.get(name)
    if known is None:
        return what_if.name
    fill = {"device": labels.name_device(report), "work": labels.name_work(report, 1), "span": labels.name_span(report)}
    percent = format_share(float(value)) if _NUMBER.fullmatch(value) else value
    return known.format(value=value, percent=percent, **fill)


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
        changes.append(WhatIfChange(name_what_if(found, report), found.name, then, gain, found.share))
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


_ROUNDS_TO = 0.001


def render_what_ifs(
    what_ifs: Sequence[WhatIf], trust: ReplayTrust | None, *, reason: str = "", width: int = 100, color: bool = False
) -> str:
    """Return trust, step time now and then, gain and assumption of each of `what_ifs`; `reason`: why there is no replay."""
    from rich.text import Text

    console, sink = create_console(width, color)
    if reason:
        print_line(console, f"No what-ifs: {reason}.")
        return collect_text(sink)
    for text in list_replay_trust(trust):
        print_line(console, text)
    if not what_ifs:
        print_line(console, "No standard what-if applies to these steps.")
        return collect_text(sink)
    step_ns = what_ifs[0].step_ns
    # How long the steps take with the work that earlier steps left on the device, where that makes them much longer
    alone, times = "", sorted(step.measured_ns for step in (trust.steps if trust else ()))
    if times and times[-1] > 1.1 * step_ns:  # two that differ by less are one to the reader
        span = " to ".join(dict.fromkeys((format_ns(times[0]), format_ns(times[-1]))))
        alone = f"; alone, with work that earlier steps left on the device: {span}"
    print_heading(console, f"A step takes {format_ns(step_ns)} in a run that repeats these{alone}")
    error = "" if trust is None else f" \u00b1 {_format_error(trust.error_share)}"
    table = create_table([("what if", "name"), ("step", "right"), ("gain", "right")])
    what_ifs = sorted(what_ifs, key=lambda found: found.name.startswith("batch="))  # its gain is per sample, not of the step
    for found in what_ifs:
        gain = f"{format_share(found.share, 1)}{error}"
        table.add_row(*format_cells(clean_unbroken(found.name), format_ns(found.changed_ns), gain))
    # Rows of one line each, with the whole of its detail under each row
    shrink_table(console, table)
    details = ("", *("; ".join((found.words, *found.notes)) for found in what_ifs))
    for row, detail in zip(console.render_lines(table, pad=False), details, strict=True):
        console.print(Text.assemble(*((segment.text, segment.style or "") for segment in row)), no_wrap=True, overflow="crop")
        if detail:
            print_line(console, detail, QUIET, indent=2)
    if len(what_ifs) == 1:
        for name, before, after in what_ifs[0].per_step_ns:
            print_line(console, f"{name}: {format_ns(before)} -> {format_ns(after)}", indent=2)
    return collect_text(sink)


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
