"""What the comparison of ranks tells, in sentences: steps, the straggler, clocks, pipeline, experts, balance, and what was not read."""

from __future__ import annotations

from collections.abc import Iterable

from gpudiag.model.finding import Finding, Role
from gpudiag.model.job import Job, RankRow, Spread, Straggler
from gpudiag.model.notices import NoticeCode
from gpudiag.model.report import ReportData
from gpudiag.model.timeline import BUCKETS
from gpudiag.report import labels, telemetry
from gpudiag.report.console import clean
from gpudiag.units import format_count, format_flop, format_ns, format_share

RANKS_TITLE = "Ranks"

_NAMES = {
    **telemetry.TELEMETRY_LABELS,
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
    own = "" if job.own is None or _is_same(job.own) else f"; without waiting for other ranks {_format_spread(job.own)}"
    reason = f": {clean(job.shown_reason, 200).rstrip('.')}" if job.shown_reason else ""
    told = (
        f"{read} {labels.pluralize(read, 'rank')}: a step takes {_format_spread(job.wall)}{own}. "
        f"This report shows rank {job.shown_rank}{reason}."
    )
    return f"{told} {_STRANGERS}" if any(notice.code == NoticeCode.RANKS_UNTOLD for notice in report.trust.notices) else told


def select_read_ranks(job: Job) -> list[RankRow]:
    """Return the rows of the ranks that could be read."""
    return [row for row in job.ranks if row.wall_ns is not None]


def _format_spread(found: Spread) -> str:
    if _is_same(found):
        return f"{format_ns(found.median)} on each of them" if found.least_rank != found.most_rank else format_ns(found.median)
    least, most = f"{format_ns(found.least)} (rank {found.least_rank})", f"{format_ns(found.most)} (rank {found.most_rank})"
    return f"{format_ns(found.median)} on the median rank, from {least} to {most}"


def _is_same(found: Spread) -> bool:
    return found.most - found.least < _ALIKE * found.median


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


def find_rank_roles(job: Job) -> dict[int, str]:
    """Return what each rank that stands out is: 'straggler', 'shown', 'longest own' (time), 'shortest own', or several of them.

    Without own times 'slowest' and 'fastest' by the step.
    """
    by, called = (job.wall, ("slowest", "fastest")) if job.own is None else (job.own, ("longest own", "shortest own"))
    parts = [(job.straggler.rank, "straggler")] if job.straggler else []
    parts += [(job.shown_rank, "shown")]
    parts += [(by.most_rank, called[0]), (by.least_rank, called[1])] if by.most > by.least else []
    made: dict[int, list[str]] = {}
    for rank, role in parts:
        made.setdefault(rank, []).append(role)
    return {rank: ", ".join(told) for rank, told in made.items()}


def name_rank(row: RankRow, known: dict[int, str]) -> str:
    """Return 'rank 7 (straggler, longest own)'; `known`: `find_rank_roles` of the job."""
    role = known.get(row.rank)
    return f"rank {row.rank} ({role})" if role else f"rank {row.rank}"


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
        return labels.capitalize(said) if judged else f"Whether a rank is a straggler cannot be told: {said}"
    if finding := find_straggler_finding(report):
        return f"{format_straggler_title(job)}: finding {finding.rule} says more."
    return f"{format_straggler_title(job)}: {format_straggler_delay(job.straggler)} {explain_straggler(job.straggler)}"


def find_straggler_finding(report: ReportData) -> Finding | None:
    """Return the finding that tells of the straggler."""
    return next((finding for finding in report.findings if finding.role == "straggler"), None)


def format_straggler_delay(found: Straggler) -> str:
    """Return by how much the straggler is late, how often and since when."""
    often = ""
    if found.late_share is not None:
        often = f", late in {format_share(found.late_share)} of the steps"
    elif found.last_share is not None:
        often = f", the longest in {format_share(found.last_share)} of the steps"
    since = "" if found.since_step is None else f", from step {found.since_step:,} on"
    over = "all recorded steps" if found.whole_run else "the profiled steps alone"
    return (
        f"its own time is {format_ns(found.excess_ns)} ({format_share(found.excess_share)}) a step beyond the median rank's"
        f"{often}{since} (judged by {over})."
    )


def explain_straggler(found: Straggler) -> str:
    """Return why the straggler is late, in one sentence, or that nothing tells."""
    if found.reason:
        return labels.capitalize(format_sentence(found.reason))
    return "The cause is unknown." if found.cause == "not known" else f"The cause: {format_sentence(found.cause)}"


def build_difference_rows(found: Straggler, report: ReportData) -> list[tuple[str, str, str, str]]:
    """Return (what, on the straggler, on the median rank, difference) of what takes the straggler longer, the largest first."""
    rows = []
    for item in found.differences[:8]:
        if item.what in BUCKETS:
            name = labels.name_bucket(item.what, report)
        elif item.what.startswith("op "):
            name = item.what.removeprefix("op ")
        else:
            name = _NAMES.get(item.what, item.what.replace("_", " "))
        figures = {"ns": format_ns, "FLOP": format_flop}.get(item.unit)
        own, median, change = (
            f"{format_count(value)} {clean(item.unit, 20)}".strip() if figures is None else figures(value)
            for value in (item.own, item.median, item.own - item.median)
        )
        rows.append((clean(name, 160), own, median, f"+{change}" if item.own > item.median else change))
    return rows


def list_parallelism_lines(report: ReportData) -> list[str]:
    """Return what is told of a pipeline, of experts and of unequal batches, but not what a finding says already."""
    job, lines = report.job, dict[Role, str]()
    if job is None:
        return []
    if (pipeline := job.pipeline) is not None:
        count = pipeline.micro_batches
        said = f"Pipeline of {pipeline.stages} stages"
        said += "" if count is None else f", {count} micro-batch{'' if count == 1 else 'es'} a step"
        said += f": a stage has a bubble of {format_share(pipeline.bubble_share)} of the step"
        if pipeline.ideal_share is not None:
            said += f"; with equal stages GPipe and 1F1B leave a bubble of {format_share(pipeline.ideal_share)} of the step"
        lines["pipeline"] = f"{said}."
        if pipeline.imbalance_share >= labels.ROUNDS_TO_ZERO:
            less = format_share(pipeline.imbalance_share)
            lines["pipeline"] += f" The stage of rank {pipeline.slowest_stage_rank} has most work: the mean stage is busy {less} less."
    if (experts := job.experts) is not None:
        waits = "" if experts.waiting_share is None else f", {format_share(experts.waiting_share)} of it before the last rank arrives"
        said = f"Exchanges between experts (all-to-all) take {format_share(experts.all_to_all_share)} of the step, exposed{waits}."
        if (received := experts.received) is not None and experts.imbalance_share is not None:
            said += (
                f" A rank receives {format_count(received.median)} elements a step (median), rank {received.most_rank} "
                f"{format_count(received.most)}: the mean is {format_share(experts.imbalance_share)} below that."
            )
        lines["experts"] = said
    if (balance := job.balance) is not None and balance.saved_share >= labels.ROUNDS_TO_ZERO:
        form = format_flop if balance.measure == "matrix FLOP" else lambda value: f"{format_count(value)} positions"
        work = balance.per_rank
        lines["balance"] = (
            f"Work of a step ({balance.measure}): {form(work.median)} on the median rank, {form(work.most)} on rank {work.most_rank}, "
            f"{form(work.least)} on rank {work.least_rank}. With equal work on all ranks a step could be up to "
            f"{format_ns(balance.saved_ns)} ({format_share(balance.saved_share)}) shorter."
        )
    found = {finding.role for finding in report.findings}
    return [said for role, said in lines.items() if role not in found]


def format_clock_alignment(job: Job) -> str:
    """Return how the clocks of the ranks were put on one time line, and by how much they may still differ."""
    found, note = job.clocks, job.clocks.note
    if found.method == "messages":
        of = f"{found.matched:,} {labels.pluralize(found.matched, 'message')}" if found.matched else "matched messages"
        differ = f"the ends of one message still differ by {format_ns(found.error_ns)} (95th percentile)"
        error = "" if found.error_ns is None else f"; {differ}"
        return (
            f"Clocks of the ranks are aligned by the ends of {of}{error}.{f' {labels.capitalize(format_sentence(note))}' if note else ''}"
        )
    said = "Times of different ranks are compared by the clocks of their machines, as recorded"
    if found.method == "none":
        said, note = "The clocks of the ranks could not be aligned", note or "wait time between ranks is unavailable"
    return f"{said}: {format_sentence(note)}" if note else f"{said}."


def format_ranks_quality(report: ReportData) -> str:
    """Return how many ranks were read, which share of their messages was matched, and how their clocks were aligned; '' without a job."""
    job = report.job
    if job is None:
        return ""
    read, given = len(select_read_ranks(job)), len(job.ranks)
    of = job.world_size if job.world_size is not None and job.world_size >= given else given
    # Matched calls of single ranks over all that need a partner on every other rank of the group
    calls = sum(row.count * (len(row.members) or read) for row in job.messages)
    whole = calls + sum(row.unmatched for row in job.messages)
    matched = f" {labels.format_part(calls / whole)} of their messages are matched on every rank of the group." if whole else ""
    return f"{read:,} of {of:,} {labels.pluralize(of, 'rank')} read.{matched} {format_clock_alignment(job)}"


def format_sentence(text: str) -> str:
    """Return a text of the analysis, harmless, with a full stop."""
    said = clean(text, _LONGEST_REASON).rstrip()
    return said if said.endswith((".", "!", "?")) else f"{said}."
