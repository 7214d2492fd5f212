"""Why the device was idle, in words: places by cause, calls that wait, how far the host is ahead, the longest path, what changes give."""

from __future__ import annotations

import re
from collections import Counter

import msgspec

from gpudiag.model.replay import WhatIf
from gpudiag.model.report import IdleRow, ReportData, SyncRow
from gpudiag.report import words
from gpudiag.units import format_ns, format_share

MOST_PLACES = 5
MOST_CALLS = 3
MOST_CHANGES = 5
_PARTS = 5
_HOST_BOUND = 0.5
"""Share of the kernels that the device waits for from which the host is called the slower one."""

_NUMBER = re.compile(r"\d{1,9}(\.\d{1,9})?")
_ON_CPU = {"launch": "Python and framework between ops", "sync": "waiting for another thread"}
_PATH = {
    "launch": "the host issuing work",
    "data": "waiting for data",
    "sync": "the host waiting for the {device}",
    "allocation": "memory allocation",
    "gc": "garbage collection",
    "io": "checkpoints, logs, files",
    "compile": "compilation",
    "profiler": "the profiler itself",
    "dependency": "time between dependent work",
    "unknown": "work without a known bound",
    "communication": "communication",
    "copy": "copies",
    "overhead": "{work} too small for the {device}",
    "compute": "compute",
    "memory": "memory",
}
_CHANGES = {
    "launch": "issuing work at no cost (one CUDA graph)",
    "host": "{percent} of the time in Python and the framework",
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
    "batch": "{value} x the batch (per sample)",
}


class Place(msgspec.Struct, frozen=True):
    """Idle time at one place: cause in words, mean ns a step, share of the time, and where (site, then what happened)."""

    cause: str
    ns: float
    share: float
    site: str
    what: str
    bucket: str

    @property
    def detail(self) -> str:
        """Return site and event in one line; '' where neither is known."""
        return ": ".join(text for text in (self.site, self.what) if text)


def places(report: ReportData, most: int = MOST_PLACES) -> list[Place]:
    """Return where the device was idle longest; none where no cause is known, or only for what rounds to nothing."""
    wall = report.breakdown.wall_ns
    if not wall or report.breakdown.buckets_ns.idle_unexplained >= report.breakdown.idle_ns:
        return []
    rows = sorted(report.idle, key=lambda row: -row.idle_ns)
    return [_place(row, report) for row in rows if row.idle_ns / wall >= words.ROUNDS_TO_ZERO][:most]


def _place(row: IdleRow, report: ReportData) -> Place:
    label = words.bucket_label(row.cause, report).removeprefix("idle: ")
    what = row.evidence or (f"before {row.op}" if row.op else "")
    return Place(label, row.idle_ns / max(1, report.steps.count), row.idle_ns / report.breakdown.wall_ns, site(row), what, row.cause)


def site(row: IdleRow | SyncRow) -> str:
    """Return 'file.py:12', '' where the place is not known."""
    return "" if not row.file else row.file if row.line is None else f"{row.file}:{row.line}"


def calls(report: ReportData, most: int = MOST_CALLS) -> list[SyncRow]:
    """Return the calls that wait for the device and matter: by what they cost, else by the time inside them."""
    wall = report.breakdown.wall_ns
    rows = [row for row in report.syncs if wall and max(row.cost_ns, row.wall_ns) / wall >= words.ROUNDS_TO_ZERO]
    return sorted(rows, key=lambda row: (-row.cost_ns, -row.wall_ns))[:most]


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
            f"The {device} waits for the host at {format_share(queue.host_bound_share)} of its kernels; for "
            f"{format_share(queue.empty_share)} of the time it has nothing to do."
        )
    return (
        f"The host runs {format_ns(queue.delay_median_ns)} ahead of the {device} (median), with {queue.depth_median:,.0f} kernels issued "
        f"and not yet over; at {format_share(queue.host_bound_share)} of the kernels the {device} waits for it."
    )


def path_parts(report: ReportData) -> list[tuple[str, str, float]]:
    """Return (bound, words, share) of the longest path, the largest first."""
    sums: Counter[str] = Counter()
    for row in report.critical_path:
        sums[row.bound] += row.share  # type: ignore[assignment]
    fill = {"device": words.device_word(report), "work": words.work_word(report)}
    known = {**_PATH, **_ON_CPU} if words.on_cpu(report) else _PATH
    return [(bound, known[bound].format(**fill) if bound in known else bound, float(share)) for bound, share in sums.most_common()]


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
    percent = format_share(float(value)) if _NUMBER.fullmatch(value) else value
    return known.format(value=value, percent=percent, device=words.device_word(report), work=words.work_word(report, 1))


def changes(report: ReportData, most: int = MOST_CHANGES) -> list[tuple[str, str, str, float]]:
    """Return (change, step then, gain with the replay's error, gain as a share) of the what-ifs, the largest gain first."""
    error = report.replay.error_share if report.replay else None
    plus_minus = "" if error is None else f" \u00b1 {words.error_text(error)}"
    ranked = sorted(report.what_ifs, key=lambda found: -found.share)[:most]
    return [
        (change_label(found, report), format_ns(found.changed_ns), f"{words.small_share(found.share)}{plus_minus}", found.share)
        for found in ranked
    ]


def replay_line(report: ReportData) -> str:
    """Return how well the replay reproduces the run, '' where nothing was replayed."""
    replay = report.replay
    if replay is None:
        return ""
    steps = ", ".join(f"{step.name} ({step.role})" for step in replay.steps)
    few = words.has_steps(report) and len(replay.steps) < report.steps.count
    several = f"{steps} stand{'s' if len(replay.steps) == 1 else ''} for all analysed steps. " if few else ""
    return (
        f"{several}Replayed with nothing changed, the measured time is missed by {words.error_text(replay.error_share)} at most; "
        f"{words.error_text(replay.free_share)} of it are waits that no dependency explains."
    )
