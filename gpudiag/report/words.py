"""What a report says, in words: the verdict, bucket names, ceilings, trust. Shared by every renderer, so that all say the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from gpudiag.model.breakdown import BUSY_BUCKETS, IDLE_BUCKETS
from gpudiag.model.finding import Evidence, Finding, Where
from gpudiag.model.fixes import FIX_BY_ID
from gpudiag.model.report import OpRow, ReportData
from gpudiag.units import format_bytes, format_flop, format_ns, format_rate, format_share

MATTER_MOST = 3
"""Findings that are told in full: more than three are not acted upon."""

ROUNDS_TO_ZERO = 0.005
"""A share below half a percent rounds to nothing."""

_BUSY = {
    "compute": "compute-bound {work}",
    "memory": "memory-bound {work}",
    "overhead": "{work} too small for the {device}",
    "unknown": "{work} no cost model covers",
    "exposed_communication": "exposed communication",
    "exposed_copy": "exposed host-device copies",
}
_IDLE = {
    "idle_data": "waiting for data",
    "idle_launch": "host launches too late",
    "idle_sync": "host waits for the device",
    "idle_dependency": "stream order, kernel spacing",
    "idle_allocation": "memory allocation",
    "idle_compile": "compilation",
    "idle_gc": "garbage collection",
    "idle_io": "checkpoints, logs, files",
    "idle_profiler": "the profiler itself",
    "idle_unexplained": "not explained",
}
_ON_CPU = {"idle_launch": "Python and framework between ops", "idle_sync": "waiting for another thread"}
_CLAUSES = {
    "compute": "computes {}",
    "memory": "is bound by memory traffic {}",
    "overhead": "runs {work} too small for it {}",
    "unknown": "runs {work} that no cost model covers {}",
    "exposed_communication": "waits for communication {}",
    "exposed_copy": "copies to or from the host {}",
}
_FORMATS: dict[str, Callable[[float], str]] = {
    "ns": format_ns,
    "share": lambda value: format_share(value, 1),
    "B": format_bytes,
    "FLOP": format_flop,
    "B/s": lambda value: format_rate(value, "B"),
    "FLOP/s": lambda value: format_rate(value, "FLOP"),
}
# Parts of the verdict: what is below three percent goes into its rest, except what is not known.
_WORTH_SAYING = 0.03


class BucketRow(msgspec.Struct, frozen=True):
    """One line of the breakdown: mean ns per step and share of the step's wall time."""

    bucket: str
    label: str
    ns: float
    share: float

    @property
    def idle(self) -> bool:
        """Return whether the device does nothing in it."""
        return self.bucket.startswith("idle")


def on_cpu(report: ReportData) -> bool:
    """Return whether the device is the CPU itself."""
    return report.device is not None and report.device.kind == "cpu"


def device_word(report: ReportData) -> str:
    """Return 'GPU', 'CPU', or 'device' where the kind is not known."""
    return report.device.kind.upper() if report.device else "device"


def bucket_label(bucket: str, report: ReportData) -> str:
    """Return the name of a bucket as people read it, such as 'idle: waiting for data'."""
    if bucket in _BUSY:
        return _BUSY[bucket].format(work=work_word(report), device=device_word(report))
    words = _ON_CPU if on_cpu(report) else {}
    return f"idle: {words.get(bucket) or _IDLE.get(bucket, bucket.removeprefix('idle_'))}"


def bucket_rows(report: ReportData, limit: int = 10) -> list[BucketRow]:
    """Return the non-zero buckets, busy before idle, idle causes largest first; the smallest causes merged beyond `limit`.

    Merged are idle causes only, never the unexplained: what is not known keeps its own line.
    """
    busy = [row for name in BUSY_BUCKETS if (row := _row(name, report)).ns]
    idle = sorted((row for name in IDLE_BUCKETS if (row := _row(name, report)).ns), key=lambda row: -row.ns)
    unexplained = [row for row in idle if row.bucket == "idle_unexplained"]
    named = [row for row in idle if row.bucket != "idle_unexplained"]
    room = max(1, limit - len(busy) - len(unexplained))
    if len(named) > room:
        rest = named[room - 1 :]
        merged = BucketRow("idle_other", f"idle: {len(rest)} smaller causes", sum(row.ns for row in rest), sum(row.share for row in rest))
        named = [*named[: room - 1], merged]
    return busy + sorted(named + unexplained, key=lambda row: -row.ns)


def step_ns(report: ReportData) -> float:
    """Return the mean wall time of an analysed step in ns (the parts of the breakdown add up to the mean, not to the median)."""
    return report.breakdown.wall_ns / max(1, report.steps.count)


def has_steps(report: ReportData) -> bool:
    """Return whether steps were found; False: the whole recorded window stands for one step."""
    return "whole trace" not in report.steps.source


def span_word(report: ReportData) -> str:
    """Return what one unit of the breakdown is called: 'step' or 'recorded window'."""
    return "step" if has_steps(report) else "recorded window"


def verdict(report: ReportData) -> str:
    """Return one plain sentence: how long a step takes and where it goes, largest part first."""
    if report.breakdown.wall_ns <= 0:
        return "No time could be analysed: the recording holds no complete step; the reasons stand under trust."
    said, rest = _said(_clauses(report))
    subject = "A step takes" if has_steps(report) else f"The {span_word(report)} lasts"
    listed = said[0] if len(said) == 1 else f"{', '.join(said[:-1])} and {said[-1]}"
    return f"{subject} {format_ns(step_ns(report))}: the {device_word(report)} {listed}{rest}."


def ceiling_line(finding: Finding, report: ReportData) -> str:
    """Return the most that removing the cause can give, per step; says so where it is not known, '' where there is nothing to gain."""
    ceiling = finding.ceiling
    if ceiling is None:
        return "" if finding.bound == "method" else "Gain: not known."
    gain = format_ns(ceiling.time_ns / max(1, report.steps.count))
    what_if = f" if {ceiling.what_if}".rstrip(" .") if ceiling.what_if else ""
    return f"Up to {gain} of {format_ns(step_ns(report))} ({format_share(ceiling.share)}){what_if}."


def fix_lines(finding: Finding) -> list[tuple[str, str, str]]:
    """Return (title, code change, effect on results) of each fix; an id that is not known stands for itself."""
    effects = {
        "exact": "same results",
        "rounding": "differs by rounding",
        "low_precision": "lower precision",
        "semantics": "changes the training",
    }
    known = [(fix_id, FIX_BY_ID.get(fix_id)) for fix_id in finding.fixes]
    return [(fix.title, fix.change, effects[fix.parity]) if fix else (fix_id, "", "") for fix_id, fix in known]


def evidence_text(evidence: Evidence) -> str:
    """Return the value of a fact with its unit, such as '42.0 %' or '31.2 ms'."""
    value, unit = evidence.value, evidence.unit
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if unit in _FORMATS:
        return _FORMATS[unit](value)
    number = f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
    return number if unit in {"count", "ratio", ""} else f"{number} {unit}"


def where_text(place: Where, report: ReportData) -> str:
    """Return a place with its time, such as 'loss.item() (train.py:41), 2.00 ms a step'."""
    site = f" ({place.file}{'' if place.line is None else f':{place.line}'})" if place.file else ""
    if place.time_ns is None:
        return f"{place.what}{site}"
    unit = " a step" if has_steps(report) else ""
    return f"{place.what}{site}, {format_ns(place.time_ns / max(1, report.steps.count))}{unit}"


def rules_line(report: ReportData) -> str:
    """Return how many rules fired, passed and could not be judged."""
    counts = Counter(rule.status for rule in report.rules)
    if not counts:
        return "No rules were judged."
    parts = [f"{counts['fired']} fired", f"{counts['passed']} passed", f"{counts['not_applicable']} could not be judged"]
    parts += [f"{counts['suppressed']} withheld"] if counts["suppressed"] else []
    parts += [f"{counts['error']} failed"] if counts["error"] else []
    return f"Of {len(report.rules)} {plural(len(report.rules), 'rule')}: {', '.join(parts)}."


def nothing_found(report: ReportData) -> str:
    """Return what a report without findings can and cannot say."""
    reasons = Counter(rule.reason for rule in report.rules if rule.status == "not_applicable" and rule.reason)
    most = reasons.most_common(1)
    often = f" Most often because: {most[0][0].rstrip('.')}." if most else ""
    return f"No rule found a cause that is worth changing. {rules_line(report)}{often}"


def op_label(row: OpRow) -> str:
    """Return an op's name with its module or shapes, so that two rows of one name can be told apart."""
    detail = row.module or row.signature
    return f"{row.name} {detail}" if detail else row.name


def per_second(amount: float | None, ns: int) -> float | None:
    """Return `amount` per second; None where it is not known or no time passed."""
    return None if amount is None or ns <= 0 else amount / (ns * 1e-9)


def flop_unit(report: ReportData) -> tuple[str, float]:
    """Return the unit for achieved rates in a table and its factor from FLOP/s: a CPU's would all be 0.1 TFLOP/s."""
    return ("GFLOP/s", 1e-9) if on_cpu(report) else ("TFLOP/s", 1e-12)


def intensity(row: OpRow) -> float | None:
    """Return the arithmetic intensity in FLOP/byte; None where either is not known or no byte moves."""
    return None if row.flops is None or not row.bytes else row.flops / row.bytes


def number(value: float | None, factor: float = 1, unit: str = "") -> str:
    """Return the scaled value with about three digits, '?' where it is not known; with a unit it has no decimals."""
    if value is None:
        return "?"
    scaled = value * factor
    smallest = 0.5 if unit else 0.005
    if 0 < scaled < smallest:
        return f"<{1 if unit else 0.01}{unit}"
    digits = 0 if unit or scaled >= 100 or scaled == 0 else 1 if scaled >= 10 else 2
    return f"{scaled:,.{digits}f}{unit}"


def op_total_ns(rows: Sequence[OpRow]) -> int:
    """Return the summed kernel time of op rows in ns."""
    return sum(row.kernel_ns for row in rows)


def _row(bucket: str, report: ReportData) -> BucketRow:
    ns = getattr(report.breakdown.buckets_ns, bucket)
    wall = report.breakdown.wall_ns
    return BucketRow(bucket, bucket_label(bucket, report), ns / max(1, report.steps.count), ns / wall if wall else 0.0)


def work_word(report: ReportData, count: int = 2) -> str:
    """Return what the device's work comes in: 'kernels', on a CPU 'ops'."""
    return plural(count, "op" if on_cpu(report) else "kernel")


def plural(count: int, word: str) -> str:
    """Return `word` with an s unless there is one of it."""
    return word if count == 1 else f"{word}s"


def _clauses(report: ReportData) -> list[tuple[float, str, str]]:
    """Return (share of the wall time, words with a place for it, bucket) of each busy bucket and of the idle time."""
    wall = report.breakdown.wall_ns
    buckets, work = report.breakdown.buckets_ns, work_word(report)
    parts = [(getattr(buckets, name) / wall, words.format("{}", work=work), name) for name, words in _CLAUSES.items()]
    rows = [row for row in bucket_rows(report, 99) if row.idle]
    main = ""
    if rows:
        share = f", {format_share(rows[0].share)}" if len(rows) > 1 else ""
        main = f" ({'mostly: ' if len(rows) > 1 else ''}{rows[0].label.removeprefix('idle: ')}{share})"
    return [*parts, (report.breakdown.idle_ns / wall, "is idle {}" + main, "idle")]


def _said(clauses: list[tuple[float, str, str]]) -> tuple[list[str], str]:
    """Return the clauses of the verdict, largest first, and what is said of the small ones; the unknown is always said."""
    ordered = sorted(clauses, key=lambda clause: -clause[0])
    told = [clause for clause in ordered if clause[0] >= (ROUNDS_TO_ZERO if clause[2] == "unknown" else _WORTH_SAYING)]
    said = [words.format(format_share(share) + ("" if index else " of it")) for index, (share, words, _) in enumerate(told)]
    rest = sum(share for share, _, _ in ordered) - sum(share for share, _, _ in told)
    return said, f"; smaller parts make up the other {format_share(rest)}" if rest >= ROUNDS_TO_ZERO else ""
