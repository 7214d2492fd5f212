"""What the comparison of ranks tells, in sentences: steps, the straggler, clocks, pipeline, experts, balance, and what was not read."""

from __future__ import annotations

from collections.abc import Iterable

from gpudiag.model.job import Balance, Clocks, Difference, Experts, Job, Pipeline, RankRow, Spread, Straggler
from gpudiag.model.notices import NoticeCode
from gpudiag.model.report import ReportData
from gpudiag.model.timeline import BUCKETS
from gpudiag.report import labels, whole_run
from gpudiag.report.console import clean
from gpudiag.units import format_count, format_flop, format_ns, format_share

RANKS_TITLE = "Ranks"

STRAGGLER_RULE = "DST-06"
_SHAPE_RULES = {"pipeline": "DST-07", "experts": "DST-09", "balance": "DST-10"}
"""Findings that say what a sentence here would say: it is left out beside them."""

_NAMES = {
    **whole_run.TELEMETRY_LABELS,
    "forward_ns": "forward pass",
    "optimizer_ns": "optimizer",
    "h2d_ns": "copies to the device",
    "loader_wait_ns": "waiting for batches",
    "rest_ns": "outside loading, forward, backward and optimizer",
    "batch": "size of the batches",
    "matrix_flops": "matrix work",
    "calls": "calls of ops",
}
"""What a Difference names -> what people call it."""

_STRANGERS = (
    "Nothing in the files shows that they are ranks of one job: if they are not, report on each file alone, and compare two with "
    "gpudiag compare A B."
)
_ALIKE = 0.005
"""Spread over the ranks, as a share of the median, below which a figure is the same on all of them."""

_LONGEST_REASON = 600
_MOST_REASONS = 3


def format_ranks_headline(report: ReportData) -> str:
    """Return how long a step takes on the ranks and which of them the report shows, '' where one rank was analysed alone."""
    job = report.job
    if job is None:
        return ""
    read = len(select_read_ranks(job))
    step = f"a step takes {_format_spread(job.wall, ('the slowest', 'the fastest'))}"
    own = "" if job.own is None or _is_same(job.own) else f"; without waiting for other ranks {_format_spread(job.own, ('', ''))}"
    reason = f": {clean(job.shown_reason, 200).rstrip('.')}" if job.shown_reason else ""
    told = f"{read} {labels.pluralize(read, 'rank')}: {step}{own}. This report shows rank {job.shown_rank}{reason}."
    return f"{told} {_STRANGERS}" if any(notice.code == NoticeCode.RANKS_UNTOLD for notice in report.trust.notices) else told


def select_read_ranks(job: Job) -> list[RankRow]:
    """Return the rows of the ranks that could be read."""
    return [row for row in job.ranks if row.wall_ns is not None]


def _format_spread(found: Spread, called: tuple[str, str]) -> str:
    """Return a time over the ranks: the same on all, or that of the median rank, most and least; `called`: what the ranks of those are."""
    if _is_same(found):
        return f"{format_ns(found.median)} on each of them" if found.least_rank != found.most_rank else format_ns(found.median)
    most, least = (
        f"{format_ns(time)} on {f'{word} (rank {rank})' if word else f'rank {rank}'}"
        for time, rank, word in zip((found.most, found.least), (found.most_rank, found.least_rank), called, strict=True)
    )
    return f"{format_ns(found.median)} on the median rank, {most} and {least}"


def _is_same(found: Spread) -> bool:
    return found.most - found.least < _ALIKE * found.median


# -- what was not read --------------------------------------------------------------------------------------------------------


def list_missing_ranks(job: Job) -> list[str]:
    """Return which ranks could not be read, with the reason, and which were never recorded; none where all are there."""
    by_reason: dict[str, list[int]] = {}
    for row in job.ranks:
        if row.wall_ns is None:
            by_reason.setdefault(row.unread or "the reason is unknown", []).append(row.rank)
    said = [f"{_name_ranks(ranks)} could not be read: {format_sentence(why)}" for why, ranks in list(by_reason.items())[:_MOST_REASONS]]
    if rest := [rank for ranks in list(by_reason.values())[_MOST_REASONS:] for rank in ranks]:
        said.append(f"{_name_ranks(rest)} could not be read either, for other reasons.")
    # The ranks of the training without a file; none where its size is not known
    if absent := sorted(set(range(job.world_size or 0)) - {row.rank for row in job.ranks}):
        said.append(f"Not recorded, or not given: {_name_ranks(absent).lower()} of {job.world_size:,}.")
    return said


def _name_ranks(ranks: Iterable[int]) -> str:
    """Return 'Rank 3', or 'Ranks 0-2, 7'."""
    listed = format_ranges(ranks)
    return f"Rank {listed}" if listed.isdigit() else f"Ranks {listed}"


def format_ranges(numbers: Iterable[int], most: int = 8) -> str:
    """Return numbers as people list them, '0-2, 7'; beyond `most` pieces how many more there are."""
    pieces: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if pieces and number == pieces[-1][1] + 1:
            pieces[-1] = (pieces[-1][0], number)
        else:
            pieces.append((number, number))
    told = [f"{first}" if first == last else f"{first}-{last}" for first, last in pieces[:most]]
    rest = sum(last - first + 1 for first, last in pieces[most:])
    return ", ".join(told) + (f" and {rest} more" if rest else "")


# -- the straggler ------------------------------------------------------------------------------------------------------------


def format_straggler_title(job: Job) -> str:
    """Return 'Rank 7 is the straggler', '' where none does."""
    return f"Rank {job.straggler.rank} is the straggler" if job.straggler else ""


def format_straggler(report: ReportData) -> str:
    """Return which rank is the straggler, by how much, since when and why; short where a finding says it; or that there is none."""
    job = report.job
    if job is None or (job.straggler is None and not job.no_straggler):
        return ""
    if job.straggler is None:
        said = format_sentence(job.no_straggler)
        judged = job.notice is None or job.notice.code == NoticeCode.NO_STRAGGLER
        return capitalize(said) if judged else f"No straggler: {said}"
    if has_straggler_finding(report):
        return f"{format_straggler_title(job)}: finding {STRAGGLER_RULE} says more."
    return f"{format_straggler_title(job)}: {format_straggler_delay(job.straggler)} {explain_straggler(job.straggler)}"


def has_straggler_finding(report: ReportData) -> bool:
    """Return whether a finding tells of the straggler."""
    return any(finding.rule == STRAGGLER_RULE for finding in report.findings)


def format_straggler_delay(found: Straggler) -> str:
    """Return by how much the straggler is late, how often and since when."""
    since = "" if found.since_step is None else f", from step {found.since_step:,} on"
    over = "all recorded steps" if found.whole_run else "the profiled steps alone"
    return (
        f"its own time is {format_ns(found.excess_ns)} ({format_share(found.excess_share)}) a step beyond the median rank's"
        f"{_format_frequency(found)}{since} (judged by {over})."
    )


def _format_frequency(found: Straggler) -> str:
    if found.late_share is not None:
        return f", late in {format_share(found.late_share)} of the steps"
    return "" if found.last_share is None else f", the longest in {format_share(found.last_share)} of the steps"


def explain_straggler(found: Straggler) -> str:
    """Return why the straggler is late, in one sentence, or that nothing tells."""
    if found.reason:
        return capitalize(format_sentence(found.reason))
    return "The cause is unknown." if found.cause == "not known" else f"The cause: {format_sentence(found.cause)}"


def build_difference_rows(found: Straggler, report: ReportData, most: int = 8) -> list[tuple[str, str, str, str]]:
    """Return (what, on the straggler, on the median rank, difference) of what takes the straggler longer, the largest first."""
    return [_build_difference_row(item, report) for item in found.differences[:most]]


def _build_difference_row(item: Difference, report: ReportData) -> tuple[str, str, str, str]:
    own, median = _format_value(item.own, item.unit), _format_value(item.median, item.unit)
    change = item.own - item.median
    return clean(name_difference(item.what, report), 160), own, median, f"{'+' if change > 0 else ''}{_format_value(change, item.unit)}"


def name_difference(what: str, report: ReportData) -> str:
    """Return what differs as people read it: a part of the step, an op, or a field of the telemetry."""
    if what in BUCKETS:
        return labels.name_bucket(what, report)
    return what.removeprefix("op ") if what.startswith("op ") else _NAMES.get(what, what.replace("_", " "))


def _format_value(value: float, unit: str) -> str:
    if unit == "ns":
        return format_ns(value)
    if unit == "FLOP":
        return format_flop(value)
    return f"{format_count(value)} {clean(unit, 20)}".strip()


# -- the shape of the job -----------------------------------------------------------------------------------------------------


def list_parallelism_lines(report: ReportData) -> list[str]:
    """Return what is told of a pipeline, of experts and of unequal batches, but not what a finding says already."""
    job = report.job
    if job is None:
        return []
    found = {finding.rule for finding in report.findings}
    made = {"pipeline": _format_pipeline(job.pipeline), "experts": _format_experts(job.experts), "balance": _format_balance(job.balance)}
    return [said for name, said in made.items() if said and _SHAPE_RULES[name] not in found]


def _format_pipeline(found: Pipeline | None) -> str:
    if found is None:
        return ""
    batches = "" if found.micro_batches is None else f", {found.micro_batches} {_format_micro_batches(found.micro_batches)} a step"
    ideal = (
        ""
        if found.ideal_share is None
        else f"; with equal stages GPipe and 1F1B leave a bubble of {format_share(found.ideal_share)} of the step"
    )
    uneven = (
        f" The stage of rank {found.slowest_stage_rank} has most work: the mean stage is busy {format_share(found.imbalance_share)} less."
        if found.imbalance_share >= labels.ROUNDS_TO_ZERO
        else ""
    )
    return (
        f"Pipeline of {found.stages} stages{batches}: a stage has a bubble of {format_share(found.bubble_share)} of the step"
        f"{ideal}.{uneven}"
    )


def _format_micro_batches(count: int) -> str:
    return "micro-batch" if count == 1 else "micro-batches"


def _format_experts(found: Experts | None) -> str:
    if found is None:
        return ""
    waits = "" if found.waiting_share is None else f", {format_share(found.waiting_share)} of it before the last rank arrives"
    uneven = ""
    if found.received is not None and found.imbalance_share is not None:
        uneven = (
            f" A rank receives {format_count(found.received.median)} elements a step (median), rank {found.received.most_rank} "
            f"{format_count(found.received.most)}: the mean is {format_share(found.imbalance_share)} below that."
        )
    return f"Exchanges between experts (all-to-all) take {format_share(found.all_to_all_share)} of the step, exposed{waits}.{uneven}"


def _format_balance(found: Balance | None) -> str:
    if found is None or found.saved_share < labels.ROUNDS_TO_ZERO:
        return ""
    form = format_flop if found.measure == "matrix FLOP" else lambda value: f"{format_count(value)} positions"
    ranks = found.per_rank
    return (
        f"Work of a step ({found.measure}): {form(ranks.median)} on the median rank, {form(ranks.most)} on rank {ranks.most_rank}, "
        f"{form(ranks.least)} on rank {ranks.least_rank}. With equal work on all ranks a step could be up to {format_ns(found.saved_ns)} "
        f"({format_share(found.saved_share)}) shorter."
    )


# -- how far to trust it ------------------------------------------------------------------------------------------------------


def format_clock_alignment(job: Job) -> str:
    """Return how the clocks of the ranks were put on one time line, and by how much they may still differ."""
    found, note = job.clocks, job.clocks.note
    if found.method == "messages":
        return f"{_format_message_clocks(found)}{f' {capitalize(format_sentence(note))}' if note else ''}"
    said = "Times of different ranks are compared by the clocks of their machines, as recorded"
    if found.method == "none":
        said, note = "The clocks of the ranks could not be aligned", note or "wait time between ranks is unavailable"
    return f"{said}: {format_sentence(note)}" if note else f"{said}."


def _format_message_clocks(found: Clocks) -> str:
    error = "" if found.error_ns is None else f"; the ends of one message still differ by {format_ns(found.error_ns)} (95th percentile)"
    of = f"{found.matched:,} {labels.pluralize(found.matched, 'message')}" if found.matched else "matched messages"
    return f"Clocks of the ranks are aligned by the ends of {of}{error}."


def format_ranks_quality(report: ReportData) -> str:
    """Return how many ranks were read, which share of their messages was matched, and how their clocks were aligned; '' without a job."""
    job = report.job
    if job is None:
        return ""
    read, given = len(select_read_ranks(job)), len(job.ranks)
    of = job.world_size if job.world_size is not None and job.world_size >= given else given
    parts = [f"{read:,} of {of:,} {labels.pluralize(of, 'rank')} read.", _format_matched_share(job), format_clock_alignment(job)]
    return " ".join(part for part in parts if part)


def _format_matched_share(job: Job) -> str:
    """Return the share of the single ranks' messages that have a partner on every other rank of the group."""
    share = compute_matched_share(job)
    return "" if share is None else f"{labels.format_part(share)} of their messages are matched on every rank of the group."


def compute_matched_share(job: Job) -> float | None:
    """Return matched calls of single ranks over all; None where there is no message."""
    matched = sum(row.count * (len(row.members) or len(select_read_ranks(job))) for row in job.messages)
    whole = matched + sum(row.unmatched for row in job.messages)
    return matched / whole if whole else None


def format_sentence(text: str) -> str:
    """Return a text of the analysis, harmless, with a full stop."""
    said = clean(text, _LONGEST_REASON).rstrip()
    return said if said.endswith((".", "!", "?")) else f"{said}."


def capitalize(text: str) -> str:
    """Return `text` with a capital letter at its beginning."""
    return text[:1].upper() + text[1:]
