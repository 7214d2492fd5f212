"""Names of ops, call sites and parts of a step; verdict, upper bounds and figures as text. The same in every renderer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from gpudiag.diagnosis.gains import find_measured_gain
from gpudiag.fixes import FIX_BY_ID
from gpudiag.model.event_labels import format_kernel_name, parse_site
from gpudiag.model.finding import NO_GAIN, Evidence, Finding, Where
from gpudiag.model.notices import NSYS_COMMAND, TO_RECORD, UNSEEN, WITHHELD, NoticeCode, format_notice
from gpudiag.model.ops import OVER_ROOF_ABOVE
from gpudiag.model.report import OpRow, ReportData
from gpudiag.model.timeline import BUSY_BUCKETS, IDLE_BUCKETS
from gpudiag.report.console import clean
from gpudiag.units import format_bytes, format_count, format_flop, format_ns, format_rate, format_share

COMMUNICATION_RECORD = "record_param_comms"
"""torch.distributed's own event around a collective; its name says nothing about which one."""

# 'ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)', 'ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(...)' (NCCL and RCCL since 2.0)
_NCCL = re.compile(r"^nccl(?:Dev)?Kernel_([A-Za-z]+)")
_FEW = 2


def format_site(where: str | None) -> str:
    """Return a call site as people write it ('models/resnet.py:89 forward'), '' where there is none."""
    return str(parse_site(where) or where or "")


def name_collective(name: str) -> str:
    """Return the collective that a name stands for, such as 'AllReduce'; 'generic NCCL kernel' where the name does not tell."""
    found = _NCCL.match(name)
    if found is None:
        return name
    return "generic NCCL kernel" if found[1] == "Generic" else found[1]


def build_op_namer(report: ReportData) -> Callable[[OpRow], str]:
    """Return the function that names op rows: collectives by what they do, where the report knows; kernels without their namespaces."""
    known = {(row.count, row.kernel_ns): row for row in report.collectives}
    kinds = sorted({name_collective(row.name) for row in report.collectives})
    either = " or ".join(kinds) if 0 < len(kinds) <= _FEW else "collective"

    def name(row: OpRow) -> str:
        if row.name != COMMUNICATION_RECORD:
            return name_collective(row.name) if _NCCL.match(row.name) else format_kernel_name(row.name)
        found = known.get((row.count, row.kernel_ns))
        if found is None:
            return either
        size = f" {format_bytes(found.bytes)}" if found.bytes is not None else ""
        return f"{name_collective(found.name)}{size}{f' over {found.size} ranks' if found.size else ''}"

    return name


def format_op_detail(row: OpRow) -> str:
    """Return what tells two op rows of one name apart: call site, module, shapes, then phase and recompute; '' where nothing is known."""
    record = COMMUNICATION_RECORD if row.name == COMMUNICATION_RECORD else ""  # how a reader finds it in the trace
    known = [text for text in (record, format_site(row.where), row.module, row.signature) if text]
    told = [*known, format_phase(row)] if known and row.phase else known
    return ", ".join([*told, format_recompute(row)] if row.recompute_ns else told)


def format_phase(row: OpRow) -> str:
    """Return the phase of an op row in words, '' where it is not known."""
    return {"before the window": "launched before the recording"}.get(row.phase or "", row.phase or "")


def format_recompute(row: OpRow) -> str:
    """Return how much of an op row's time repeats forward work inside the backward pass, '' where none does."""
    if row.recompute_ns <= 0:
        return ""
    return "recomputed" if row.recompute_ns >= row.kernel_ns else f"{format_share(row.recompute_ns / row.kernel_ns)} recomputed"


MATTER_MOST = 3
"""Findings that are told in full: more than three are not acted upon."""

ROUNDS_TO_ZERO = 0.005

OVER_ROOF = "above roofline"
OVER_ROOF_LEGEND = (
    "above roofline: faster than the peak allows; the data stays in a cache, a fast algorithm (Winograd, FFT) multiplies less than is "
    "counted, or the peak or the count is wrong"
)
UNKNOWN_LEGEND = "?: unavailable (no cost model, no shapes or no peak)"
GUESS_LEGEND = "~: a guess (no cost model: one operation an element and the bytes of all arguments, so that the bound may be another)"

_BUSY = {
    "compute": "compute-bound {work}",
    "memory": "memory-bound {work}",
    "overhead": "overhead-bound {work}",
    "unknown": "{work} not modelled",
    "exposed_communication": "exposed communication",
    "exposed_copy": "exposed copies (H2D, D2H)",
    "outside_recording": "work outside the recording",
}
_IDLE = {
    "idle_data": "data loading",
    "idle_launch": "host overhead (Python, framework, launches)",
    "idle_sync": "host-device sync",
    "idle_dependency": "dependencies and kernel gaps",
    "idle_allocation": "memory allocation",
    "idle_compile": "compilation",
    "idle_init": "{device} initialisation",
    "idle_gc": "garbage collection",
    "idle_io": "file I/O",
    "idle_profiler": "profiler overhead",
    "idle_unexplained": "unexplained",
}
_ON_CPU = {"idle_launch": "host overhead (Python, framework)", "idle_sync": "sync with another thread"}
_SHORT = {"idle_launch": "host-bound"}
"""Names of idle causes within a sentence, where they are shorter."""
_CLAUSES = {
    **{bucket: f"in {words}" for bucket, words in _BUSY.items()},
    "overhead": "in overhead-bound {work} ({small})",
    "unknown": "in {work} that are not modelled",
}
_FORMATS: dict[str, Callable[[float], str]] = {
    "ns": format_ns,
    "share": lambda value: format_share(value, 1),
    "B": format_bytes,
    "FLOP": format_flop,
    "count": format_count,
    "B/s": lambda value: format_rate(value, "B"),
    "FLOP/s": lambda value: format_rate(value, "FLOP"),
}
_PREFIXES = (("T", 1e-12, 1e13), ("G", 1e-9, 1e8), ("M", 1e-6, 0.0))
"""Prefix, factor, and the rate per second from which it is used: below 10 TB/s people write GB/s."""


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


def list_fired_rules(report: ReportData) -> set[str]:
    """Return the ids of the findings and of the symptoms that are told with them."""
    return {rule for finding in report.findings for rule in (finding.rule, *finding.folded)}


def is_on_cpu(report: ReportData) -> bool:
    """Return whether the device is the CPU itself."""
    return report.device is not None and report.device.kind == "cpu"


def name_device(report: ReportData) -> str:
    """Return 'GPU', 'CPU', or 'device' where the kind is not known."""
    return report.device.kind.upper() if report.device else "device"


def name_bucket(bucket: str, report: ReportData) -> str:
    """Return the name of a bucket as people read it, such as 'idle: data loading'."""
    missing = _name_missing(report) if bucket == "unknown" else None
    return format_bucket_name(bucket, work=name_work(report), device=name_device(report), missing=missing)


def format_bucket_name(bucket: str, *, work: str, device: str, missing: str | None = None) -> str:
    """Return the name of a bucket where `work` and `device` are called so; `missing`: its words where no cost model is to blame."""
    if bucket in _BUSY:
        return (missing or _BUSY[bucket]).format(work=work, device=device)
    words = {**_IDLE, **_ON_CPU} if device == "CPU" else _IDLE
    known = words.get(bucket)
    return f"idle: {known.format(device=device) if known else bucket.removeprefix('idle_')}"


def name_css_classes(bucket: str) -> str:
    """Return the classes by which the style sheet colours and hatches a bucket; only words of our own reach a page's markup."""
    name = bucket.replace("_", "-")
    known = name.replace("-", "").isascii() and name.replace("-", "").isalpha()
    return f"{'idle ' if name.startswith('idle') else ''}{name}" if known else "idle"


def _name_missing(report: ReportData) -> str | None:
    if any(notice.code == NoticeCode.NO_DEVICE_EVENTS for notice in report.trust.notices):
        return "work that was not recorded"
    if report.device is None or not report.device.peaks:
        return "{work} not classified (no peak rates)"
    return None if report.device.bandwidth_byte_per_s else "{work} not classified (memory bandwidth unknown)"


def build_bucket_rows(report: ReportData, limit: int = 12) -> list[BucketRow]:
    """Return the non-zero buckets, busy before idle, idle causes largest first; the smallest causes merged beyond `limit`.

    Merged are idle causes only, never the unexplained: what is not known keeps its own line.
    """
    wall, steps = report.breakdown.wall_ns, max(1, report.steps.count)
    times = [(name, getattr(report.breakdown.buckets_ns, name)) for name in (*BUSY_BUCKETS, *IDLE_BUCKETS)]
    rows = [BucketRow(name, name_bucket(name, report), ns / steps, ns / wall if wall else 0.0) for name, ns in times if ns]
    busy = [row for row in rows if not row.idle]
    unexplained = [row for row in rows if row.bucket == "idle_unexplained"]
    named = sorted((row for row in rows if row.idle and row.bucket != "idle_unexplained"), key=lambda row: -row.ns)
    room = max(1, limit - len(busy) - len(unexplained))
    if len(named) > room:
        rest = named[room - 1 :]
        merged = BucketRow("idle_other", f"idle: {len(rest)} smaller causes", sum(row.ns for row in rest), sum(row.share for row in rest))
        named = [*named[: room - 1], merged]
    return busy + sorted(named + unexplained, key=lambda row: -row.ns)


def capitalize(text: str) -> str:
    """Return `text` with a capital letter at its beginning."""
    return text[:1].upper() + text[1:]


def step_ns(report: ReportData) -> float:
    """Return the mean wall time of an analysed step in ns (the parts of the breakdown add up to the mean, not to the median)."""
    return report.breakdown.wall_ns / max(1, report.steps.count)


def has_steps(report: ReportData) -> bool:
    """Return whether steps were found; False: the whole recorded window stands for one step."""
    return "whole trace" not in report.steps.source


def name_span(report: ReportData) -> str:
    """Return what one unit of the breakdown is called: 'step' or 'recorded window'."""
    return "step" if has_steps(report) else "recorded window"


def format_span(report: ReportData) -> str:
    """Return 'a step', or 'the recorded window' where there is only that one."""
    return f"{'a' if has_steps(report) else 'the'} {name_span(report)}"


def format_verdict(report: ReportData) -> str:
    """Return two plain sentences: how long a step takes, and where it goes, largest part first; what is not modelled is always said."""
    wall, idle = report.breakdown.wall_ns, report.breakdown.idle_ns
    if wall <= 0:
        return "No time could be analysed: the recording holds no complete step; see data quality."
    took = format_pace(report)
    if not has_steps(report):
        took = f"The recorded window lasts {format_ns(step_ns(report))}; no steps are marked in it, so it counts as one step."
    # The clauses: (share of the wall time, words, bucket) of each busy bucket, and of the idle time with its main cause
    buckets, work = report.breakdown.buckets_ns, name_work(report)
    missing = _name_missing(report)
    words = _CLAUSES if missing is None else {**_CLAUSES, "unknown": f"in {missing}"}
    small = f"too small to fill the {name_device(report)}, or {'dispatch' if is_on_cpu(report) else 'launch'}-bound"
    clauses = [(getattr(buckets, name) / wall, text.format(work=work, small=small), name) for name, text in words.items()]
    rows = [row for row in build_bucket_rows(report, 99) if row.idle]
    main = ""
    if rows and (len(rows) > 1 or rows[0].bucket != "idle_unexplained"):
        share = f", {format_share(rows[0].share)}" if len(rows) > 1 else ""
        first = "" if len(rows) == 1 else "mostly " if 2 * rows[0].share >= idle / wall else "largest part: "
        main = f" ({first}{_SHORT.get(rows[0].bucket, rows[0].label.removeprefix('idle: '))}{share})"
    clauses = sorted([*clauses, (idle / wall, f"idle{main}", "idle")], key=lambda clause: -clause[0])
    # what is below five percent goes into the rest, except what is not known, and what is larger than that
    least = min([0.05, *(share for share, _, name in clauses if name == "unknown" and share >= ROUNDS_TO_ZERO)])
    told = [clause for clause in clauses if clause[0] >= least]
    said = [f"{format_part(share)}{'' if index else ' of it'} {text}" for index, (share, text, _) in enumerate(told)]
    rest = 1 - sum(round(share, 2) for share, _, _ in told)
    others = f"; smaller parts make up the other {format_share(rest)}" if rest >= ROUNDS_TO_ZERO else ""
    listed = said[0] if len(said) == 1 else f"{', '.join(said[:-1])} and {said[-1]}"
    outside = next((notice.params["share"] for notice in report.trust.notices if notice.code == NoticeCode.DEVICE_TIME_OUTSIDE), None)
    more = (
        f" {format_share(outside)} of the {name_device(report)}'s time lies outside the analysed steps, as in warm-up or evaluation."
        if isinstance(outside, float)
        else ""
    )
    return f"{took} The {name_device(report)} spends {listed}{others}.{more}"


FEW_PLAIN = 10
"""Fewer steps without the profiler are told beside the recorded ones, not in their place: most are of the start, where steps are slower."""

_UNLIKE = 1.1
"""Ratio from which two times of a step differ to the reader (a person who times the training would doubt one of them)."""


def format_pace(report: ReportData) -> str:
    """Return how long a step takes: without the profiler first, where that is known and differs; then the median, and the mean where that
    differs, with the longest step: parts of steps add up to the mean.
    """
    steps, mean, plain = report.steps, step_ns(report), find_plain_pace(report)
    took, ns = format_ns(mean), steps.longest_ns
    if steps.median_ns and is_lopsided(report):
        waited = f", {format_ns(steps.preempted_ns)} of them waiting for a processor" if steps.preempted_ns else ""
        longest = (
            f": step {clean(steps.longest.removeprefix('ProfilerStep'), 80)} took {format_ns(ns)}{waited}"
            if ns and mean > steps.median_ns
            else ""
        )
        took = f"{format_ns(steps.median_ns)} (median; the mean, to which its parts add up, is {took}{longest})"
    if plain is None:
        return f"A step takes {took}."
    usual, count = plain
    if count < FEW_PLAIN:
        return f"A step takes {took}; the {count} without the profiler took {format_ns(usual)} (median)."
    return f"Without the profiler a step takes {format_ns(usual)} (median of {count:,}). The recorded ones, analysed here, took {took}."


def is_lopsided(report: ReportData) -> bool:
    """Return whether the mean step is not like the median one, which then stands for how long a step takes."""
    return bool(report.steps.median_ns) and not 1 / _UNLIKE <= step_ns(report) / (report.steps.median_ns or 1) <= _UNLIKE


def find_plain_pace(report: ReportData) -> tuple[float, int] | None:
    """Return the median ns of a step without the profiler, and of how many, where the reader would doubt that of the recorded ones."""
    pace, recorded = report.history, (is_lopsided(report) and report.steps.median_ns) or step_ns(report)
    if pace is None or not pace.median_ns or 1 / _UNLIKE <= recorded / pace.median_ns <= _UNLIKE:
        return None
    return pace.median_ns, pace.plain


_NOTICES_OF_NSYS = (NoticeCode.NO_OPS_NSYS, NoticeCode.NO_SHAPES_NSYS, NoticeCode.NSYS_NO_RANGES, NoticeCode.TYPES_FROM_NAMES)
"""One of them stands in each report on a recording of Nsight Systems."""


def format_idle_note(report: ReportData) -> str:
    """Return what to record where much of the time is idle without a cause, '' where little is."""
    wall, unexplained = report.breakdown.wall_ns, report.breakdown.buckets_ns.idle_unexplained
    if not wall or unexplained / wall < ROUNDS_TO_ZERO:
        return ""
    if unexplained >= report.breakdown.idle_ns:
        return (
            "The idle time is unexplained: nothing was recorded on the host. Record CPU activity, with Python stacks (with_stack=True), "
            "or with gpudiag.profile."
        )
    if unexplained / wall < 0.1:  # share of the step from which idle time without a cause deserves a hint
        return ""
    unlike = "a recording while nothing else runs on the machine, or with stacks of more steps (sites=4), may"  # a bundle has stacks of two
    stacks = "" if report.trust.site_match_share else "Python stacks (with_stack=True) or "
    if any(notice.code in _NOTICES_OF_NSYS for notice in report.trust.notices):
        stacks = f"NVTX ranges around the loading and the training of each batch, recorded with `{NSYS_COMMAND}`, or "
    may = unlike if report.source.kind == "bundle" else f"{stacks}a recording with gpudiag.profile may"
    return (
        f"The {name_device(report)} is idle for {format_share(unexplained / wall)} of {format_span(report)} without a known cause; "
        f"{may} explain it."
    )


def find_weak_measurement(report: ReportData) -> Finding | None:
    """Return the finding that the measurement is weak but valid: it stands in trust, for it costs no time and nothing fixes it."""
    weak = (finding for finding in report.findings if finding.role == "measurement" and finding.severity != "critical")
    return next(weak, None)


def select_findings(report: ReportData) -> tuple[Finding, ...]:
    """Return the findings about the program, an invalid measurement first; without a measurement that is only weak."""
    weak = find_weak_measurement(report)
    return tuple(finding for finding in report.findings if finding is not weak)


def format_bound_figure(finding: Finding) -> str:
    """Return the upper bound of a finding alone, 'up to 33 %'; 'not known', 'no gain by itself', or '' for one that is not about time."""
    ceiling = finding.ceiling
    if ceiling is None:
        return "" if finding.bound == "method" else "not known"
    if ceiling.method == "replay" and ceiling.share < NO_GAIN:
        return "no gain by itself"
    return f"up to {format_small_share(ceiling.share)}"


def format_upper_bound(finding: Finding, report: ReportData) -> str:
    """Return the most that removing the cause can give, per step; says so where it is not known, '' where there is nothing to gain."""
    ceiling = finding.ceiling
    if ceiling is None:
        return "" if finding.bound == "method" else "Potential speed-up: not known."
    what_if = f" if {ceiling.what_if}".rstrip(" .") if ceiling.what_if else ""
    if ceiling.method == "replay" and ceiling.share < NO_GAIN:
        return f"No gain by itself: replayed, the {name_span(report)} takes as long{what_if}; other work is on the critical path."
    gain = format_ns(ceiling.time_ns / max(1, report.steps.count))
    error = "" if ceiling.error_share is None else f", replay error {format_replay_error(ceiling.error_share)}"
    share, of = format_small_share(ceiling.share), f"the {format_ns(step_ns(report))} of {format_span(report)}"
    most = f"{share} of the run (an upper bound)" if finding.bound == "method" else f"{gain} of {of} ({share}; an upper bound{error})"
    return f"Potential speed-up: up to {most}{what_if}.{_format_measured_gain(finding, report)}"


def _format_measured_gain(finding: Finding, report: ReportData) -> str:
    gain = find_measured_gain((*finding.fixes, finding.rule), "cpu" if is_on_cpu(report) else "gpu")
    share = 0.0 if finding.ceiling is None else finding.ceiling.share
    if gain is None or gain.least * (1 - share) > 1:
        return ""
    change = f'"{FIX_BY_ID[gain.change].title}"' if gain.change in FIX_BY_ID else "taking the cause away"
    span = " to ".join(dict.fromkeys(f"{value:.2f}" for value in (gain.least, gain.most)))
    count, programs = "" if gain.count is None else f"{gain.count} ", pluralize(gain.count or 2, "program")
    where = f"{count}{programs} made to show the cause" if gain.planted else f"{count}other {programs}"
    return f" On {where} ({gain.device.upper()}), {change} gave {span} x the speed."


def format_small_share(share: float) -> str:
    """Return a percentage; what is more than nothing but rounds to it reads '<1 %', what is nearly all 'over 99 %'."""
    return f"<{format_share(0.01)}" if 0 < share < ROUNDS_TO_ZERO else format_part(share)


def format_replay_error(share: float) -> str:
    """Return the error of the replay, such as '2 %'; no replay is exact, so what rounds to nothing reads '<1 %'."""
    return f"<{format_share(0.01)}" if share < ROUNDS_TO_ZERO else format_share(share)


def list_fix_lines(finding: Finding) -> list[tuple[str, str, str]]:
    """Return (title, code change, effect on results) of each fix; an id that is not known stands for itself."""
    effects = {
        "exact": "same results",
        "rounding": "differs by rounding",
        "low_precision": "lower precision",
        "semantics": "changes the training",
    }
    known = [(fix_id, FIX_BY_ID.get(fix_id)) for fix_id in finding.fixes]
    return [(fix.title, fix.change, effects[fix.parity]) if fix else (fix_id, "", "") for fix_id, fix in known]


def format_evidence(evidence: Evidence) -> str:
    """Return the value of a fact with its unit, such as '42.0 %' or '31.2 ms'."""
    value, unit = evidence.value, evidence.unit
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if unit in _FORMATS:
        return _FORMATS[unit](value)
    number = f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
    return number if unit in {"ratio", ""} else f"{number} {unit}"


def format_place(place: Where, report: ReportData) -> str:
    """Return a place with its time, such as 'loss.item() (train.py:41), 2.00 ms a step'."""
    site = f" ({place.file}{'' if place.line is None else f':{place.line}'})" if place.file else ""
    if place.time_ns is None:
        return f"{place.what}{site}"
    unit = " a step" if has_steps(report) else ""
    return f"{place.what}{site}, {format_ns(place.time_ns / max(1, report.steps.count))}{unit}"


def format_rule_counts(report: ReportData) -> str:
    """Return how many rules fired, passed and did not apply."""
    counts = Counter("suppressed" if rule.notice and rule.notice.code in WITHHELD else rule.status for rule in report.rules)
    if not counts:
        return "No rules were judged."
    weak = find_weak_measurement(report)
    folded = sorted({rule for finding in report.findings for rule in finding.folded})
    apart = [f"{weak.rule} on data quality"] if weak else []
    apart += [f"{', '.join(folded)} explained by others"] if folded else []
    measured = f" ({'; '.join(apart)})" if apart else ""
    parts = [f"{counts['fired']} fired{measured}", f"{counts['passed']} passed", f"{counts['not_applicable']} not applicable"]
    parts += [f"{counts['suppressed']} suppressed"] if counts["suppressed"] else []
    parts += [f"{counts['error']} failed"] if counts["error"] else []
    return f"Of {len(report.rules)} {pluralize(len(report.rules), 'rule')}: {', '.join(parts)}."


def format_nothing_found(report: ReportData) -> str:
    """Return what a report without findings can and cannot say: first what to record, where most rules lack what they look at."""
    missing = [rule for rule in report.rules if rule.notice and rule.notice.code in UNSEEN]
    nothing = f"No rule that could be judged found a cause worth changing. {format_rule_counts(report)}"
    replayed = report.trust.replay_share or 0.0
    said = next((format_notice(notice) for notice in report.trust.notices if notice.code in TO_RECORD), "")
    if not said and replayed > 0.5:
        said = f"{format_share(replayed)} of the kernel time was replayed from graphs; record their capture too (--graph-capture)"
    if said and len(missing) > len(report.rules) / 2:
        return f"Most rules could not be judged: {said}. {nothing}"
    most = Counter(rule.reason for rule in report.rules if rule.status == "not_applicable" and rule.reason).most_common(1)
    return f"{nothing} Most often because: {most[0][0].rstrip('.')}." if most else nothing


def compute_rate(amount: float | None, ns: int) -> float | None:
    """Return `amount` per second; None where it is not known or no time passed."""
    return None if amount is None or ns <= 0 else amount / (ns * 1e-9)


def choose_op_units(report: ReportData, rows: Sequence[OpRow] | None = None) -> tuple[tuple[str, float], tuple[str, float]]:
    """Return the units for achieved rates and traffic in a table of `rows` (default: all ops), with their factors from FLOP/s and B/s."""
    rows = report.ops if rows is None else rows
    flops = [(compute_rate(row.flops, row.kernel_ns), row.kernel_ns) for row in rows]
    moved = [(compute_rate(row.bytes, row.kernel_ns), row.kernel_ns) for row in rows]
    return choose_rate_unit("FLOP/s", flops), choose_rate_unit("B/s", moved)


def choose_rate_unit(name: str, rates: Sequence[tuple[float | None, int]]) -> tuple[str, float]:
    """Return the unit (tera, giga or mega) in which the fastest row has two digits or more, and giga where no rate is known.

    Rows with next to none of the time have no say: what runs once for a microsecond would choose the unit of all.
    """
    total = sum(ns for _, ns in rates)
    fastest = max((rate for rate, ns in rates if rate and ns >= 0.01 * total), default=1e9)
    prefix, factor = next(((prefix, factor) for prefix, factor, least in _PREFIXES if fastest >= least), _PREFIXES[-1][:2])
    return f"{prefix}{name}", factor


def compute_intensity(row: OpRow) -> float | None:
    """Return the arithmetic intensity in FLOP/byte; None where either is not known or no byte moves."""
    return None if row.flops is None or not row.bytes else row.flops / row.bytes


def compute_over_roof(row: OpRow) -> float | None:
    """Return by how much an op beats its roof, where that is more than a measurement's error: the peak or a count is wrong."""
    if row.over_roof is not None:
        return row.over_roof
    return row.efficiency if row.efficiency is not None and row.efficiency > OVER_ROOF_ABOVE else None


def format_efficiency(row: OpRow) -> str:
    """Return how close an op runs to its roofline: a percentage, 'above roofline', or '?' where it is not known; '~' marks a guess."""
    known = OVER_ROOF if compute_over_roof(row) is not None else format_number(row.efficiency, 100, " %")
    return mark_guess(known, is_guess(row))


def is_guess(row: OpRow) -> bool:
    """Return whether the figures of a row are made of the sizes of all arguments alone."""
    return row.provenance == "generic"


def mark_guess(text: str, guess: bool) -> str:
    """Return the figure `text` with the mark of a guess where it is one and says anything."""
    return f"~{text}" if guess and text != "?" else text


def format_op_legend(rows: Sequence[OpRow]) -> list[str]:
    """Return what the words in the op table mean that are no figures, for those that occur."""
    beaten = [OVER_ROOF_LEGEND] if any(compute_over_roof(row) is not None for row in rows) else []
    missing = any(row.efficiency is None and compute_over_roof(row) is None for row in rows)
    guesses = [GUESS_LEGEND] if any(is_guess(row) and row.efficiency is not None for row in rows) else []
    return beaten + guesses + ([UNKNOWN_LEGEND] if missing else [])


def format_number(value: float | None, factor: float = 1, unit: str = "") -> str:
    """Return the scaled value with about three digits, '?' where it is not known; with a unit it has no decimals."""
    if value is None:
        return "?"
    scaled = value * factor
    smallest = 0.5 if unit else 0.005
    if 0 < scaled < smallest:
        return f"<{1 if unit else 0.01}{unit}"
    digits = 0 if unit or scaled >= 100 or scaled == 0 else 1 if scaled >= 10 else 2
    return f"{scaled:,.{digits}f}{unit}"


def sum_op_ns(rows: Sequence[OpRow]) -> int:
    """Return the summed kernel time of op rows in ns."""
    return sum(row.kernel_ns for row in rows)


def name_work(report: ReportData, count: int = 2) -> str:
    """Return what the device's work comes in: 'kernels', on a CPU 'ops'."""
    return pluralize(count, "op" if is_on_cpu(report) else "kernel")


def pluralize(count: int, word: str) -> str:
    """Return `word` with an s unless there is one of it."""
    return word if count == 1 else f"{word}s"


def format_part(share: float) -> str:
    """Return a percentage; what rounds to all of it but is not all says so."""
    return f"over {format_share(0.99)}" if 1 - ROUNDS_TO_ZERO <= share < 1 else format_share(share)
