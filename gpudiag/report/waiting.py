"""Why the device was idle, in words: places by cause, calls that wait, how far the host is ahead, the longest path, what changes give."""

from __future__ import annotations

import re
from collections import Counter

import msgspec

from gpudiag.facts.spoken import place_words
from gpudiag.model.replay import WhatIf
from gpudiag.model.report import IdleRow, ReportData, SyncRow
from gpudiag.report import words
from gpudiag.units import format_count, format_ns, format_share

MOST_PLACES = 3
MOST_CALLS = 3
MOST_CHANGES = 5
WORTH_TELLING = 0.01
"""Share of the time below which a cause or place is not listed: nobody acts upon it."""
_PARTS = 5
_HOST_BOUND = 0.5
"""Share of the kernels that the device waits for from which the host is called the slower one."""

_NUMBER = re.compile(r"\d{1,9}(\.\d{1,9})?")
_MEANINGS = {
    "idle_launch": "nothing was queued for the {device} while the host was in Python, the framework or a launch call",
    "idle_sync": "after a wait nothing is queued until the host has issued more",
    "idle_dependency": "the work had been issued and waited its turn",
    "idle_unexplained": "nothing that was recorded tells why",
}
_MEANINGS_ON_CPU = {"idle_launch": "no op ran on the threads that train"}
_PATH_AS_BUCKET = {
    **{bound: bound for bound in ("compute", "memory", "overhead", "unknown")},
    "communication": "exposed_communication",
    "copy": "exposed_copy",
}
_PATH = {
    "launch": "Python and framework",
    "communication": "communication",
    "copy": "host-device copies",
    "dependency": "waits between dependent work",
}
"""Bounds on the longest path that are not called as in the breakdown, where only what nothing hides is meant."""
_CHANGES = {
    "launch": "one CUDA graph issues the {span}",
    "host": "Python and framework take {percent} of their time",
    "fused": "element-wise chains fused",
    "roof": "every {work} at {percent} of its roof",
    "loader": "the next batch always ready",
    "copies": "host-device copies beside other work",
    "communication": "communication beside other work",
    "sync": "no waiting for the {device}",
    "gc": "no garbage collection",
    "io": "no files written",
    "allocation": "no memory allocated from the driver",
    "compile": "nothing compiled",
    "profiler": "no work of the profiler",
    "batch": "{value} x the batch (gain per sample)",
}


class Place(msgspec.Struct, frozen=True):
    """Idle time at one place: mean ns a step, share of the time, and where (site, then what happened)."""

    ns: float
    share: float
    site: str
    what: str

    @property
    def detail(self) -> str:
        """Return site and event in one line."""
        return ": ".join(text for text in (self.site, self.what) if text)


class Cause(msgspec.Struct, frozen=True):
    """Idle time of one cause in words, mean ns a step, share of the time, its places, and what the words mean ('': plain)."""

    bucket: str
    label: str
    ns: float
    share: float
    places: tuple[Place, ...]
    meaning: str


def causes(report: ReportData, most: int = MOST_PLACES) -> list[Cause]:
    """Return why the device was idle, longest cause first, each with at most `most` places and the rest as one; they add up.

    None where no cause is known; left out is what fills less than 1 % of the time, unless it is the largest and does not round to nothing.
    """
    if not report.breakdown.wall_ns or report.breakdown.buckets_ns.idle_unexplained >= report.breakdown.idle_ns:
        return []
    rows = [row for row in words.bucket_rows(report, 99) if row.idle]
    return [_cause(row, report, most) for index, row in enumerate(rows) if _worth(row.share, index)]


def _worth(share: float, index: int) -> bool:
    return share >= (WORTH_TELLING if index else words.ROUNDS_TO_ZERO)


def _cause(row: words.BucketRow, report: ReportData, most: int) -> Cause:
    places = _places(row, report, most)
    known = {**_MEANINGS, **_MEANINGS_ON_CPU} if words.on_cpu(report) else _MEANINGS
    meaning = known.get(row.bucket, "").format(device=words.device_word(report))
    return Cause(row.bucket, row.label.removeprefix("idle: "), row.ns, row.share, places, meaning)


def _places(cause: words.BucketRow, report: ReportData, most: int) -> tuple[Place, ...]:
    """Return the largest places of a cause; those with the same words are one, and what is not told of is the last."""
    steps, wall = max(1, report.steps.count), report.breakdown.wall_ns
    sums: Counter[tuple[str, str]] = Counter()
    for row in report.idle:
        if row.cause == cause.bucket:
            sums[site(row), place_words(row.evidence, row.op)] += row.idle_ns
    del sums["", ""]
    ranked = [(key, ns) for index, (key, ns) in enumerate(sums.most_common(most)) if _worth(ns / wall, index)]
    found = [Place(ns / steps, ns / wall, *key) for key, ns in ranked]
    rest = cause.ns * steps - sum(ns for _, ns in ranked)
    if found and rest / wall >= words.ROUNDS_TO_ZERO:
        found.append(Place(rest / steps, rest / wall, "", "other places"))
    return tuple(found)


def meanings(found: list[Cause]) -> str:
    """Return what the names of causes mean that do not speak for themselves, as one paragraph."""
    return " ".join(f"{cause.label[:1].upper()}{cause.label[1:]}: {cause.meaning}." for cause in found if cause.meaning)


def site(row: IdleRow | SyncRow) -> str:
    """Return 'file.py:12', '' where the place is not known."""
    return "" if not row.file else row.file if row.line is None else f"{row.file}:{row.line}"


def calls(report: ReportData, most: int = MOST_CALLS) -> list[SyncRow]:
    """Return the calls that wait for the device and matter, those of one name and place as one: by what they cost, else by their time."""
    sums: dict[tuple[str, str], SyncRow] = {}
    for row in report.syncs:
        key = (call_name(row), site(row))
        sums[key] = _sum(sums[key], row) if key in sums else row
    wall = report.breakdown.wall_ns
    rows = [row for row in sums.values() if wall and max(row.cost_ns, row.wall_ns) / wall >= words.ROUNDS_TO_ZERO]
    return sorted(rows, key=lambda row: (-row.cost_ns, -row.wall_ns))[:most]


def _sum(first: SyncRow, second: SyncRow) -> SyncRow:
    sums = {name: getattr(first, name) + getattr(second, name) for name in ("count", "wall_ns", "waited_ns", "cost_ns")}
    return msgspec.structs.replace(first, **sums)


def call_figures(row: SyncRow, report: ReportData) -> tuple[str, str, str]:
    """Return calls, time inside them and idle time after them, each of one step."""
    steps = max(1, report.steps.count)
    return format_count(row.count / steps), format_ns(row.wall_ns / steps), format_ns(row.cost_ns / steps)


def call_name(row: SyncRow) -> str:
    """Return what waits, as a user knows it: the op, else the runtime call."""
    return row.op or row.api


def queue_line(report: ReportData) -> str:
    """Return how far the host is ahead of the device, '' where launches were not recorded."""
    queue, device = report.queue, words.device_word(report)
    if queue is None:
        return ""
    if queue.host_bound_share >= _HOST_BOUND:
        return (
            f"The {device} waits for the host at {words.part(queue.host_bound_share)} of its kernels; for "
            f"{words.part(queue.empty_share)} of the time it has nothing to do."
        )
    depth = round(queue.depth_median)
    issued = f", with {depth:,} {words.plural(depth, 'kernel')} issued and not yet over" if depth else ""
    return (
        f"The host runs {format_ns(queue.delay_median_ns)} ahead of the {device} (median){issued}; at "
        f"{words.small_share(queue.host_bound_share)} of the kernels the {device} waits for it."
    )


def path_parts(report: ReportData) -> list[tuple[str, str, float]]:
    """Return (bound, words, share) of the longest path, the largest first."""
    sums: Counter[str] = Counter()
    for row in report.critical_path:
        sums[row.bound] += row.share  # type: ignore[assignment]
    return [(bound, _path_label(bound, report), float(share)) for bound, share in sums.most_common()]


def _path_label(bound: str, report: ReportData) -> str:
    """Return what a part of the longest path is called: as in the breakdown, where the same is meant."""
    if bound in _PATH and not (bound == "launch" and words.on_cpu(report)):
        return _PATH[bound]
    return words.bucket_label(_PATH_AS_BUCKET.get(bound, f"idle_{bound}"), report).removeprefix("idle: ")


def path_line(report: ReportData) -> str:
    """Return what the longest path through the step consists of, '' where it is not known."""
    parts = [part for part in path_parts(report) if part[2] >= words.ROUNDS_TO_ZERO]
    if not parts:
        return ""
    told = [f"{format_share(share)} {text}" for _, text, share in parts[:_PARTS]]
    rest = sum(share for _, _, share in parts[_PARTS:])
    told += [f"{format_share(rest)} other"] if rest >= words.ROUNDS_TO_ZERO else []
    return f"Longest path through the {words.span_word(report)}: {', '.join(told)}."


def change_label(what_if: WhatIf, report: ReportData) -> str:
    """Return a what-if in a few words; one that is not known by its name."""
    name, _, value = what_if.name.partition("=")
    known = _CHANGES.get(name)
    if known is None:
        return what_if.name
    fill = {"device": words.device_word(report), "work": words.work_word(report, 1), "span": words.span_word(report)}
    percent = format_share(float(value)) if _NUMBER.fullmatch(value) else value
    return known.format(value=value, percent=percent, **fill)


class Change(msgspec.Struct, frozen=True):
    """One what-if: in words, as `gpudiag whatif --set` takes it, the step then, the gain with the replay's error, and as a share."""

    label: str
    setting: str
    then: str
    gain: str
    share: float


def changes(report: ReportData, most: int = MOST_CHANGES) -> list[Change]:
    """Return the what-ifs, the largest gain first; last those that change the batch, whose gain is per sample.

    The step then is the mean analysed step times what the replay makes of it: as ceilings of findings are.
    """
    error = report.replay.error_share if report.replay else None
    plus_minus = "" if error is None else f" \u00b1 {words.error_text(error)}"
    ranked = sorted(report.what_ifs, key=lambda found: -found.share)
    batch = [found for found in ranked if found.name.startswith("batch=")]
    chosen = [found for found in ranked if found not in batch][:most] + batch[:1]
    return [
        Change(change_label(found, report), found.name, _then(found, report), f"{words.small_share(found.share)}{plus_minus}", found.share)
        for found in chosen
    ]


def _then(found: WhatIf, report: ReportData) -> str:
    return format_ns(words.step_ns(report) * found.changed_ns / found.step_ns) if found.step_ns else "?"


def replay_line(report: ReportData) -> str:
    """Return how well the replay reproduces the run, '' where nothing was replayed."""
    replay = report.replay
    if replay is None:
        return ""
    steps = ", ".join(f"{step.name} ({step.role})" for step in replay.steps)
    few = words.has_steps(report) and len(replay.steps) < report.steps.count
    if not few:
        several = ""
    elif replay.run is not None:
        several = f"Gains are those of the recorded run, {replay.run.name}, in its order; looked at one by one: {steps}. "
    else:
        several = f"{steps} stand{'s' if len(replay.steps) == 1 else ''} for all analysed steps. "
    return (
        f"{several}Replayed with nothing changed, the measured time is missed by {words.error_text(replay.error_share)} at most; "
        f"{words.error_text(replay.free_share)} of it are waits that no dependency explains.{f' {replay.note}.' if replay.note else ''}"
    )
