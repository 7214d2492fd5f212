"""A report, its ranks and its experiments as GitHub Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from gpudiag.model.experiment import ExperimentData, Outcome
from gpudiag.model.finding import Finding
from gpudiag.model.job import Job
from gpudiag.model.report import OpRow, ReportData
from gpudiag.report import data_quality, environment, findings, idle_time, labels, memory, rank_tables, ranks, whole_run
from gpudiag.report.console import escape_markdown, format_code_span
from gpudiag.report.console import escape_markdown as escaped
from gpudiag.report.experiment import summary
from gpudiag.report.experiment.verdicts import OutcomeRow, build_outcome_rows
from gpudiag.report.labels import build_op_namer, format_recompute, format_site
from gpudiag.units import format_ns, format_rate, format_share


def format_table(header: Sequence[str], aligns: str, rows: Iterable[Sequence[str]]) -> str:
    """Return a table; `aligns` has one letter a column (l or r); cells are escaped already."""
    rule = ["---:" if align == "r" else "---" for align in aligns]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *rows))


_BAR_CELLS = 20


def render_markdown(report: ReportData, *, top: int = 20) -> str:
    """Return the report as Markdown with the `top` ops."""
    lines = [f"{topic}: {escape_markdown(line)}" for topic, line in data_quality.list_quality_lines(report)]
    if published := data_quality.list_mfu_references(report):
        lines.append("published, to compare with:\n" + "\n".join(f"  - {escape_markdown(text)}" for text in published))
    lines += [f"**Warning:** {escape_markdown(warning)}" for warning in data_quality.list_warnings(report)]
    rows = [(topic, escape_markdown(said, environment.LONGEST_ENVIRONMENT_TEXT)) for topic, said in environment.list_environment(report)]
    blocks = [
        "# gpudiag report",
        f"**{escape_markdown(labels.format_verdict(report))}**",
        *(escape_markdown(text) for text in data_quality.format_headlines(report)),
        _format_source(report),
        _format_breakdown(report),
        format_ranks_section(report, top),
        *_format_idle(report),
        *_format_findings(report),
        _format_what_ifs(report),
        format_experiments_section(report.experiments),
        whole_run.format_history_markdown(report),
        memory.format_memory_markdown(report.memory),
        _format_telemetry(report),
        _format_ops(report, top),
        "## Data quality\n\n" + "\n".join(f"- {line}" for line in lines),
        "## Environment\n\n" + format_table(("", ""), "ll", rows) if rows else "",
        _format_rules(report),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _format_source(report: ReportData) -> str:
    device = escape_markdown(report.device.name, 100) if report.device else "unknown device"
    return f"{format_code_span(report.source.path)} on {device}, by {report.tool.name} {escape_markdown(report.tool.version)}"


def _format_breakdown(report: ReportData) -> str:
    rows = labels.build_bucket_rows(report)
    if not rows:
        return ""
    cells = ((row.label, format_ns(row.ns), format_share(row.share, 1), "█" * round(_BAR_CELLS * row.share)) for row in rows)
    total = (f"**sum: the {labels.name_span(report)}**", format_ns(labels.step_ns(report)), format_share(1, 1), "")
    title = f"## Where {labels.format_span(report)} goes"
    table = format_table(("part", "time", "share", ""), "lrrl", (*cells, total))
    return "\n\n".join(text for text in (title, table, escape_markdown(labels.format_idle_note(report))) if text)


def _format_idle(report: ReportData) -> Iterator[str]:
    """Yield where the device was idle and why, the calls that wait for it, how far the host is ahead, and the critical path."""
    found, device = idle_time.list_idle_causes(report), labels.name_device(report)
    if found:
        yield f"## Why the {device} was idle"
        yield format_table(
            ("cause", "call site", "what happened", "time", "share"), "lllrr", (row for cause in found for row in _format_cause(cause))
        )
        yield escape_markdown(idle_time.format_cause_meanings(found))
    if rows_of := idle_time.list_waiting_calls(report):
        cells = (
            (
                _format_code(idle_time.name_call(row)),
                _format_code(idle_time.format_row_site(row)),
                *idle_time.format_call_figures(row, report),
            )
            for row in rows_of
        )
        yield f"### Calls that synchronise, in {labels.format_span(report)}"
        yield format_table(("call", "call site", "calls", "host time", "exposed"), "llrrr", cells)
    yield "\n\n".join(escape_markdown(text) for text in (idle_time.format_queue(report), idle_time.format_critical_path(report)) if text)


def _format_cause(cause: idle_time.IdleCause) -> Iterator[tuple[str, ...]]:
    """Yield the row of a cause, then those of its places."""
    yield f"**{escape_markdown(cause.label)}**", "", "", format_ns(cause.ns), format_share(cause.share, 1)
    for place in cause.places:
        yield "", _format_code(place.site), escape_markdown(place.what, 200), format_ns(place.ns), format_share(place.share, 1)


def _format_what_ifs(report: ReportData) -> str:
    found = idle_time.list_what_if_changes(report)
    if not found:
        return ""
    rows = ((escape_markdown(change.label, 100), _format_code(change.setting), change.then, change.gain) for change in found)
    title = (
        f"## What-if: potential speed-up\n\nThe {labels.name_span(report)} replayed with one thing changed; gains do not add up. "
        "More, and several at once: `gpudiag whatif PATH --set NAME=VALUE`.\n\n"
    )
    return title + format_table(("change", "`--set`", labels.name_span(report), "gain"), "llrr", rows)


def _format_code(text: str) -> str:
    return format_code_span(text, 80, cell=True) if text else ""


def _format_findings(report: ReportData) -> Iterator[str]:
    found, rest = findings.split_findings(report)
    if not found:
        yield f"## Findings\n\n{escape_markdown(labels.format_nothing_found(report))}"
        return
    yield "## Top findings"
    for number, finding in enumerate(found, 1):
        yield _format_finding(number, finding, report)
    if rest:
        yield f"<details><summary>And {len(rest)} more</summary>"
        for number, finding in enumerate(rest, len(found) + 1):
            yield _format_finding(number, finding, report)
        yield "</details>"
    if said := findings.explain_gains(report):
        yield said


def _format_finding(number: int, finding: Finding, report: ReportData) -> str:
    gain = escape_markdown(labels.format_upper_bound(finding, report))
    lines = [
        f"### {number}. {escape_markdown(finding.title, 100)} ({escape_markdown(finding.rule, 40)}, {finding.severity})",
        "",
        escape_markdown(finding.message),
        "",
        f"**{gain}** Confidence: {finding.confidence}." if gain else f"Confidence: {finding.confidence}.",
        "",
    ]
    lines += [f"- Where: {format_code_span(labels.format_place(place, report))}" for place in findings.select_places(finding, report, 3)]
    for title, change, effect in labels.list_fix_lines(finding):
        effect_text = f" ({effect})" if effect else ""
        lines.append(f"- Try: {escape_markdown(title)}{effect_text}" + (f": {format_code_span(change)}" if change else ""))
    lines += [f"- Note: {escape_markdown(finding.why)}"] if finding.why and not finding.fixes else []
    lines += [
        f"- Also explains {escape_markdown(rule, 40)}: {escape_markdown(said)}" for rule, said in findings.list_symptoms(finding, report)
    ]
    facts = ", ".join(f"{format_code_span(item.fact)} = {escape_markdown(labels.format_evidence(item))}" for item in finding.evidence)
    lines += [f"- Evidence: {facts}"] if facts else []
    return "\n".join(lines).rstrip()


def _format_ops(report: ReportData, top: int) -> str:
    rows = sorted(report.ops, key=lambda row: -row.kernel_ns)[: max(0, top)]
    if not rows:
        return ""
    header: tuple[str, ...] = ("op", "call site", "calls", "time", "share", "bound", "of roofline", "compute", "memory", "FLOP/B")
    total, name = labels.sum_op_ns(report.ops), build_op_namer(report)
    cells = [_format_op_cells(row, name(row), total) for row in rows]
    if not any(row.where for row in rows):  # an empty column helps nobody
        header, cells = header[:1] + header[2:], [line[:1] + line[2:] for line in cells]
    table = format_table(header, "l" * (len(header) - 8) + "rrrlrrrr", cells)
    legend = "\n\n".join(escape_markdown(f"{text}.") for text in labels.format_op_legend(rows))
    return "\n\n".join(part for part in (f"## Top ops by time ({len(rows)} of {len(report.ops)})", table, legend) if part)


def _format_op_cells(row: OpRow, name: str, total_ns: int) -> list[str]:
    detail = " ".join(text for text in (row.module or row.signature, format_recompute(row)) if text)
    return [
        format_code_span(f"{name} {detail}" if detail else name, 120, cell=True),
        format_code_span(format_site(row.where), 80, cell=True) if row.where else "",
        f"{row.count:,}",
        format_ns(row.kernel_ns),
        format_share(row.kernel_ns / total_ns if total_ns else None, 1),
        row.bound,
        labels.format_efficiency(row),
        format_rate(labels.compute_rate(row.flops, row.kernel_ns), "FLOP"),
        format_rate(labels.compute_rate(row.bytes, row.kernel_ns), "B"),
        labels.format_number(labels.compute_intensity(row)),
    ]


def _format_telemetry(report: ReportData) -> str:
    found = whole_run.build_report_telemetry_rows(report)
    if not found:
        return ""
    cells = ((row.label, row.low, row.median, row.high) for row in found)
    table = format_table(("sampled", "lowest", "median", "highest"), "lrrr", cells)
    caption = whole_run.format_telemetry_caption(report)
    return f"<details><summary>Clocks, power and load during the steps</summary>\n\n{caption}.\n\n{table}\n\n</details>"


def _format_rules(report: ReportData) -> str:
    unknown = [rule for rule in report.rules if rule.status in {"not_applicable", "suppressed", "error"}]
    summary = f"## Rules\n\n{labels.format_rule_counts(report)}"
    if not unknown:
        return summary
    rows = ((escape_markdown(rule.id), rule.status.replace("_", " "), escape_markdown(rule.reason, 300)) for rule in unknown)
    table = format_table(("rule", "status", "reason"), "lll", rows)
    return f"{summary}\n\n<details><summary>Rules that were not judged, and why</summary>\n\n{table}\n\n</details>"


def format_ranks_section(report: ReportData, top: int) -> str:
    """Return how the ranks compare, `top` of them where there are no more; '' where one rank was analysed alone."""
    job = report.job
    if job is None:
        return ""
    said = [*ranks.list_missing_ranks(job), ranks.format_straggler(report), *ranks.list_parallelism_lines(report)]
    listed = "\n".join(f"- {escape_markdown(text)}" for text in said if text)
    blocks = (
        f"## {ranks.RANKS_TITLE}",
        _format_rank_table(report, job, top),
        listed,
        _format_message_table(job),
        escape_markdown(ranks.format_clock_alignment(job)),
    )
    return "\n\n".join(block for block in blocks if block)


def _format_rank_table(report: ReportData, job: Job, top: int) -> str:
    rows = rank_tables.select_rank_rows(job, top)
    known, differs = rank_tables.find_rank_roles(job), rank_tables.find_largest_differences(report)
    figures = [rank_tables.format_rank_figures(row) for row in rows]
    shown = rank_tables.find_known_columns(figures)
    more = [rank_tables.DIFFERS.title] if differs else []
    cells = [
        (
            rank_tables.name_rank(row, known),
            *(texts[place] for place in shown),
            *(escape_markdown(differs.get(row.rank, ""), 160) for _ in more),
        )
        for row, texts in zip(rows, figures, strict=True)
    ]
    titles = ("rank", *(rank_tables.RANK_COLUMNS[place].title for place in shown), *more)
    table = format_table(titles, f"l{'r' * len(shown)}{'l' * len(more)}", cells)
    rest = len(ranks.select_read_ranks(job)) - len(rows)
    return f"{table}\n\n{f'{rest:,} more ranks lie between them. ' if rest else ''}{rank_tables.format_rank_legend(job)}".strip()


def _format_message_table(job: Job) -> str:
    found = rank_tables.select_message_rows(job)
    if not found:
        return ""
    rows = found[: 2 * rank_tables.MOST_MESSAGES]
    figures = [rank_tables.format_message_figures(row) for row in rows]
    known = rank_tables.find_known_columns(figures)
    titles = ("message", *(rank_tables.MESSAGE_COLUMNS[place].title for place in known))
    names = [format_code_span(rank_tables.name_message(row), cell=True) for row in rows]
    table = format_table(
        titles, f"l{'r' * len(known)}", [(name, *(row[place] for place in known)) for name, row in zip(names, figures, strict=True)]
    )
    notes = (rank_tables.MESSAGE_LEGEND, rank_tables.format_unmatched(found))
    return f"### Messages between ranks\n\n{table}\n\n{' '.join(text for text in notes if text)}"


_OUTCOME_HEADER = ("change", "verdict", "throughput", "based on, or reason", "parity", "peak memory", "break-even")
_EXPERIMENTS_TITLE = f"Experiments: variants against {summary.AS_IS}"


def render_experiments_markdown(data: ExperimentData, *, bundle: str = "") -> str:
    """Return the experiments as Markdown; `bundle`: where they lie, if known."""
    blocks = [
        "# gpudiag ab",
        f"**{escaped(summary.format_experiments_headline(data))}**",
        *(escaped(said) for said in summary.list_leads(data, bundle)),
        format_experiments_section(data.experiments),
        "\n\n".join(_format_recipe(data, bundle)),
        _format_baseline(data),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def format_experiments_section(outcomes: Sequence[Outcome]) -> str:
    """Return the experiments of a report, '' where there are none."""
    if not outcomes:
        return ""
    found = build_outcome_rows(outcomes)
    lines = [_format_row(_OUTCOME_HEADER), _format_row(["---"] * len(_OUTCOME_HEADER))]
    for row in found:
        name = format_code_span(row.name, cell=True)
        verdict = f"**{escaped(row.verdict)}**" if row.tone != "weak" else escaped(row.verdict)
        others = (row.ratio, row.told, row.parity, row.memory, row.pays_back)
        lines.append(_format_row([name, verdict, *map(escaped, others)]))
    parts = [
        f"## {_EXPERIMENTS_TITLE}",
        "\n".join(lines),
        _format_outcome_details(found),
        "\n\n".join(escaped(said) for said in summary.format_experiments_legend(outcomes)),
    ]
    return "\n\n".join(part for part in parts if part)


def _format_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _format_outcome_details(found: Sequence[OutcomeRow]) -> str:
    """Return what the table has no room for: what was promised, evidence, notes."""
    told = [(row.name, [text for text in (row.promised, *row.more) if text]) for row in found]
    lines = [f"- {format_code_span(name)}: {escaped(said)}" for name, texts in told for said in texts]
    return "\n".join(lines)


def _format_recipe(data: ExperimentData, bundle: str) -> Iterator[str]:
    recipe = data.recipe
    if not recipe.fixes and not recipe.changes:
        return
    yield "## Recipe" if recipe.proved else "## Recipe (not proved)"
    for change in summary.list_recipe_changes(recipe):
        yield f"{format_code_span(change.fix)}{f': {escaped(change.title)}' if change.title else ''}"
        if change.code:
            yield _fence_code(change.code)
    for text in summary.list_variant_changes(recipe):
        yield _fence_code(text)
    yield escaped(summary.build_recipe_command(data, bundle))


def _fence_code(text: str) -> str:
    """Return a block of code that no run of backticks in it can end."""
    lines = summary.split_code_lines(text)
    fence = "```"
    while any(fence in line for line in lines):
        fence += "`"
    language = "diff" if any(line.startswith(("+++ ", "@@ ")) for line in lines) else "python"
    return "\n".join((f"{fence}{language}", *lines, fence))


def _format_baseline(data: ExperimentData) -> str:
    found = summary.build_baseline_rows(data.baseline)
    if not found:
        return ""
    lines = [f"- {topic}: {format_code_span(said) if topic == 'command' else escaped(said)}" for topic, said in found]
    return "## Baseline\n\n" + "\n".join(lines)
