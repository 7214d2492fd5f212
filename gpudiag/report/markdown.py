"""A report, its ranks and its experiments as GitHub Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpudiag.model.experiment import ExperimentData, Outcome
from gpudiag.model.report import ReportData
from gpudiag.report import data_quality, environment, findings, idle_time, labels, memory, rank_tables, ranks, whole_run
from gpudiag.report.console import escape_markdown as escaped
from gpudiag.report.console import format_code_span, format_table
from gpudiag.report.experiment import summary
from gpudiag.report.experiment.verdicts import OUTCOME_HEADER, build_outcome_rows
from gpudiag.report.labels import build_op_namer, format_recompute, format_site
from gpudiag.report.rank_tables import RankColumn
from gpudiag.units import format_ns, format_rate, format_share

_BAR_CELLS = 20


def render_markdown(report: ReportData, *, top: int = 20) -> str:
    """Return the report as Markdown with the `top` ops."""
    device = escaped(report.device.name, 100) if report.device else "unknown device"
    history = whole_run.list_history(report.history)
    breakdown, telemetry = [], []
    if parts := labels.build_bucket_rows(report):
        cells = ((row.label, format_ns(row.ns), format_share(row.share, 1), "█" * round(_BAR_CELLS * row.share)) for row in parts)
        total = (f"**sum: the {labels.name_span(report)}**", format_ns(labels.step_ns(report)), format_share(1, 1), "")
        breakdown = [f"## Where {labels.format_span(report)} goes", format_table(("part", "time", "share", ""), "lrrl", (*cells, total))]
        breakdown.append(escaped(labels.format_idle_note(report)))
    if sampled := whole_run.build_telemetry_rows(report.telemetry):
        title = "<details><summary>Clocks, power and load during the steps</summary>"
        ranges = format_table(("sampled", "lowest", "median", "highest"), "lrrr", sampled)
        telemetry = [title, f"{whole_run.format_telemetry_caption(report)}.", ranges, "</details>"]
    what_ifs = []
    if changes := idle_time.list_what_if_changes(report):
        span = labels.name_span(report)
        rows = ((escaped(change.label, 100), _format_code(change.setting), change.then, change.gain) for change in changes)
        what_ifs = [
            "## What-if: potential speed-up",
            f"The {span} replayed with one thing changed; gains do not add up. More, and several at once: "
            "`gpudiag whatif PATH --set NAME=VALUE`.",
            format_table(("change", "`--set`", span, "gain at most"), "llrr", rows),
        ]
    blocks = [
        "# gpudiag report",
        f"**{escaped(labels.format_verdict(report))}**",
        *(escaped(text) for text in data_quality.format_headlines(report)),
        f"{format_code_span(report.source.path)} on {device}, by {report.tool.name} {escaped(report.tool.version)}",
        *breakdown,
        format_ranks_section(report, top),
        *_format_idle(report),
        *_format_findings(report),
        *what_ifs,
        format_experiments_section(report.experiments),
        f"## {whole_run.WHOLE_RUN_TITLE}\n\n" + "\n".join(f"- {escaped(text)}" for text in history) if history else "",
        memory.format_memory_markdown(report.memory),
        *telemetry,
        *_format_ops(report, top),
        *_format_trust(report),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _format_idle(report: ReportData) -> Iterator[str]:
    if causes := idle_time.list_idle_causes(report):
        cells: list[tuple[str, ...]] = []
        for cause in causes:
            cells.append((f"**{escaped(cause.label)}**", "", "", format_ns(cause.ns), format_share(cause.share, 1)))
            for place in cause.places:
                figures = (format_ns(place.ns), format_share(place.share, 1))
                cells.append(("", _format_code(place.site), escaped(place.what, 200), *figures))
        yield f"## Why the {labels.name_device(report)} was idle"
        yield format_table(("cause", "call site", "what happened", "time", "share"), "lllrr", cells)
        yield escaped(idle_time.format_cause_meanings(causes))
    if calls := idle_time.list_waiting_calls(report):
        names = [(_format_code(idle_time.name_call(row)), _format_code(idle_time.format_row_site(row))) for row in calls]
        rows = [(*texts, *idle_time.format_call_figures(row, report)) for texts, row in zip(names, calls, strict=True)]
        yield f"### Calls that synchronise, in {labels.format_span(report)}"
        yield format_table(("call", "call site", "calls", "host time", "exposed"), "llrrr", rows)
    yield escaped(idle_time.format_queue(report))
    yield escaped(idle_time.format_critical_path(report))


def _format_code(text: str) -> str:
    return format_code_span(text, 80, cell=True) if text else ""


def _format_findings(report: ReportData) -> Iterator[str]:
    full, rest = findings.split_findings(report)
    if not full:
        yield f"## Findings\n\n{escaped(labels.format_nothing_found(report))}"
        return
    yield "## Top findings"
    for number, finding in enumerate((*full, *rest), 1):
        if number == len(full) + 1:
            yield f"<details><summary>And {len(rest)} more</summary>"
        gain = escaped(labels.format_upper_bound(finding, report))
        yield f"### {number}. {escaped(finding.title, 100)} ({escaped(finding.rule, 40)}, {finding.severity})"
        yield escaped(finding.message)
        yield f"**{gain}** Confidence: {finding.confidence}." if gain else f"Confidence: {finding.confidence}."
        lines = [f"- Where: {format_code_span(labels.format_place(place, report))}" for place in findings.select_places(finding, report, 3)]
        for fix, change, effect in labels.list_fix_lines(finding):
            effect_text = f" ({effect})" if effect else ""
            lines.append(f"- Try: {escaped(fix)}{effect_text}" + (f": {format_code_span(change)}" if change else ""))
        lines += [f"- Note: {escaped(finding.why)}"] if finding.why and not finding.fixes else []
        lines += [f"- Also explains {escaped(rule, 40)}: {escaped(said)}" for rule, said in findings.list_symptoms(finding, report)]
        facts = ", ".join(f"{format_code_span(item.fact)} = {escaped(labels.format_evidence(item))}" for item in finding.evidence)
        yield "\n".join([*lines, f"- Evidence: {facts}"] if facts else lines)
    if rest:
        yield "</details>"
    yield findings.explain_gains(report)


def _format_ops(report: ReportData, top: int) -> Iterator[str]:
    rows = sorted(report.ops, key=lambda row: -row.kernel_ns)[: max(0, top)]
    if not rows:
        return
    total, name = labels.sum_op_ns(report.ops), build_op_namer(report)
    sites = any(row.where for row in rows)  # an empty column helps nobody
    header = ("op", *(("call site",) if sites else ()))
    cells = []
    for row in rows:
        told = " ".join(text for text in (name(row), row.module or row.signature, format_recompute(row)) if text)
        site = format_code_span(format_site(row.where), 80, cell=True) if row.where else ""
        rates = (
            format_rate(labels.compute_rate(row.flops, row.kernel_ns), "FLOP"),
            format_rate(labels.compute_rate(row.bytes, row.kernel_ns), "B"),
        )
        figures = (*labels.format_op_figures(row, total), *rates, labels.format_number(labels.compute_intensity(row)))
        cells.append((format_code_span(told, 120, cell=True), *((site,) if sites else ()), *figures))
    yield f"## Top ops by time ({len(rows)} of {len(report.ops)})"
    yield format_table(
        (*header, "calls", "time", "share", "bound", "of roofline", "compute", "memory", "FLOP/B"), "l" * len(header) + "rrrlrrrr", cells
    )
    yield from (escaped(f"{text}.") for text in labels.format_op_legend(rows))


def _format_trust(report: ReportData) -> Iterator[str]:
    lines = [f"{topic}: {escaped(line)}" for topic, line in data_quality.list_quality_lines(report)]
    if published := data_quality.list_mfu_references(report):
        lines.append("published, to compare with:\n" + "\n".join(f"  - {escaped(text)}" for text in published))
    lines += [f"**Warning:** {escaped(warning)}" for warning in data_quality.list_warnings(report)]
    yield "## Data quality\n\n" + "\n".join(f"- {line}" for line in lines)
    if recorded := environment.list_environment(report):
        rows = [(topic, escaped(said, environment.LONGEST_ENVIRONMENT_TEXT)) for topic, said in recorded]
        yield "## Environment\n\n" + format_table(("", ""), "ll", rows)
    yield f"## Rules\n\n{labels.format_rule_counts(report)}"
    if unjudged := [rule for rule in report.rules if rule.status in {"not_applicable", "suppressed", "error"}]:
        reasons = [(escaped(rule.id), rule.status.replace("_", " "), escaped(rule.reason, 300)) for rule in unjudged]
        yield "<details><summary>Rules that were not judged, and why</summary>"
        yield format_table(("rule", "status", "reason"), "lll", reasons)
        yield "</details>"


def format_ranks_section(report: ReportData, top: int) -> str:
    """Return how the ranks compare, `top` of them where there are no more; '' where one rank was analysed alone."""
    job = report.job
    if job is None:
        return ""
    rows = rank_tables.select_rank_rows(job, top)
    known, differs = rank_tables.find_rank_roles(job), rank_tables.find_largest_differences(report)
    table = _format_figures(
        "rank", [rank_tables.name_rank(row, known) for row in rows], rank_tables.RANK_COLUMNS,
        [rank_tables.format_rank_figures(row) for row in rows],
        (rank_tables.DIFFERS.title, [escaped(differs.get(row.rank, ""), 160) for row in rows]) if differs else None,
    )  # fmt: skip
    rest = len(ranks.select_read_ranks(job)) - len(rows)
    more = f"{rest:,} more ranks lie between them. " if rest else ""
    said = [*ranks.list_missing_ranks(job), ranks.format_straggler(report), *ranks.list_parallelism_lines(report)]
    blocks = [
        f"## {ranks.RANKS_TITLE}", table, f"{more}{rank_tables.format_rank_legend(job)}".strip(),
        "\n".join(f"- {escaped(text)}" for text in said if text),
    ]  # fmt: skip
    if messages := rank_tables.select_message_rows(job):
        shown = messages[: 2 * rank_tables.MOST_MESSAGES]
        names = [format_code_span(rank_tables.name_message(row), cell=True) for row in shown]
        figures = [rank_tables.format_message_figures(row) for row in shown]
        notes = (rank_tables.MESSAGE_LEGEND, rank_tables.format_unmatched(messages))
        blocks += ["### Messages between ranks", _format_figures("message", names, rank_tables.MESSAGE_COLUMNS, figures)]
        blocks.append(" ".join(text for text in notes if text))
    return "\n\n".join(block for block in (*blocks, escaped(ranks.format_clock_alignment(job))) if block)


def _format_figures(
    title: str, names: Sequence[str], columns: Sequence[RankColumn], figures: Sequence[Sequence[str]],
    last: tuple[str, Sequence[str]] | None = None,
) -> str:  # fmt: skip
    known = rank_tables.find_known_columns(figures)
    titles = (title, *(columns[place].title for place in known), *((last[0],) if last else ()))
    cells = [
        (name, *(row[place] for place in known), *((last[1][number],) if last else ()))
        for number, (name, row) in enumerate(zip(names, figures, strict=True))
    ]
    return format_table(titles, f"l{'r' * len(known)}{'l' if last else ''}", cells)


_EXPERIMENTS_TITLE = f"Experiments: variants against {summary.AS_IS}"


def render_experiments_markdown(data: ExperimentData, *, bundle: str = "") -> str:
    """Return the experiments as Markdown; `bundle`: where they lie, if known."""
    blocks = [
        "# gpudiag ab",
        f"**{escaped(summary.format_experiments_headline(data))}**",
        *(escaped(said) for said in summary.list_leads(data, bundle)),
        format_experiments_section(data.experiments),
    ]
    recipe = data.recipe
    if recipe.fixes or recipe.changes:
        blocks.append("## Recipe" if recipe.proved else "## Recipe (not proved)")
        for change in summary.list_recipe_changes(recipe):
            blocks.append(f"{format_code_span(change.fix)}{f': {escaped(change.title)}' if change.title else ''}")
            blocks.append(_fence_code(change.code) if change.code else "")
        blocks += map(_fence_code, summary.list_variant_changes(recipe))
        blocks.append(escaped(summary.build_recipe_command(data, bundle)))
    if rows := summary.build_baseline_rows(data.baseline):
        lines = [f"- {topic}: {format_code_span(said) if topic == 'command' else escaped(said)}" for topic, said in rows]
        blocks.append("## Baseline\n\n" + "\n".join(lines))
    return "\n\n".join(block for block in blocks if block) + "\n"


def format_experiments_section(outcomes: Sequence[Outcome]) -> str:
    """Return the experiments of a report, '' where there are none."""
    if not outcomes:
        return ""
    rows, details = [], []
    for row in build_outcome_rows(outcomes):
        verdict = f"**{escaped(row.verdict)}**" if row.tone != "weak" else escaped(row.verdict)
        others = map(escaped, (row.ratio, row.told, row.parity, row.memory, row.pays_back))
        rows.append((format_code_span(row.name, cell=True), verdict, *others))
        # What the table has no room for: what was promised, evidence, notes
        details += [f"- {format_code_span(row.name)}: {escaped(said)}" for said in (row.promised, *row.more) if said]
    parts = [
        f"## {_EXPERIMENTS_TITLE}",
        format_table(OUTCOME_HEADER, "l" * len(OUTCOME_HEADER), rows),
        "\n".join(details),
        *(escaped(said) for said in summary.format_experiments_legend(outcomes)),
    ]
    return "\n\n".join(part for part in parts if part)


def _fence_code(text: str) -> str:
    lines = summary.split_code_lines(text)
    fence = "```"
    while any(fence in line for line in lines):
        fence += "`"
    language = "diff" if any(line.startswith(("+++ ", "@@ ")) for line in lines) else "python"
    return "\n".join((f"{fence}{language}", *lines, fence))
