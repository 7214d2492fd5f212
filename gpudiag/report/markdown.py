"""A report as GitHub Markdown: the same content as the terminal's, for issues and pull requests."""

from __future__ import annotations

from collections.abc import Iterator

from gpudiag.model.finding import Finding
from gpudiag.model.report import OpRow, ReportData
from gpudiag.report import chosen, history, memory, ranks_markdown, recorded, telemetry, trust, waiting, words
from gpudiag.report.escape import code, markdown
from gpudiag.report.experiment import markdown as experiments
from gpudiag.report.labels import namer, recompute_text, site_text
from gpudiag.report.marktable import table as _table
from gpudiag.units import format_ns, format_rate, format_share

_BAR_CELLS = 20


def render(report: ReportData, *, top: int = 20) -> str:
    """Return the report as Markdown with the `top` ops."""
    blocks = [
        "# gpudiag report",
        f"**{markdown(words.verdict(report))}**",
        *(markdown(text) for text in trust.headlines(report)),
        _source(report),
        _breakdown(report),
        ranks_markdown.section(report, top),
        *_waiting(report),
        *_findings(report),
        _changes(report),
        experiments.section(report.experiments),
        history.as_markdown(report),
        memory.as_markdown(report.memory),
        _telemetry(report),
        _ops(report, top),
        _trust(report),
        _recorded(report),
        _rules(report),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _source(report: ReportData) -> str:
    device = markdown(report.device.name, 100) if report.device else "unknown device"
    return f"{code(report.source.path)} on {device}, by {report.tool.name} {markdown(report.tool.version)}"


def _breakdown(report: ReportData) -> str:
    rows = words.bucket_rows(report)
    if not rows:
        return ""
    cells = ((row.label, format_ns(row.ns), format_share(row.share, 1), "█" * round(_BAR_CELLS * row.share)) for row in rows)
    total = (f"**sum: the {words.span_word(report)}**", format_ns(words.step_ns(report)), format_share(1, 1), "")
    title = f"## Where {words.span_phrase(report)} goes"
    table = _table(("part", "time", "share", ""), "lrrl", (*cells, total))
    return "\n\n".join(text for text in (title, table, markdown(words.idle_note(report))) if text)


def _waiting(report: ReportData) -> Iterator[str]:
    """Yield where the device was idle and why, the calls that wait for it, how far the host is ahead, and the longest path."""
    found, device = waiting.causes(report), words.device_word(report)
    if found:
        yield f"## Why the {device} was idle"
        yield _table(("cause", "at", "what happened", "time", "share"), "lllrr", (row for cause in found for row in _cause(cause)))
        yield markdown(waiting.meanings(found))
    if rows_of := waiting.calls(report):
        cells = ((_code(waiting.call_name(row)), _code(waiting.site(row)), *waiting.call_figures(row, report)) for row in rows_of)
        yield f"### Calls that wait for the {device}, in {words.span_phrase(report)}"
        yield _table(("call", "at", "calls", "inside", "idle after"), "llrrr", cells)
    yield "\n\n".join(markdown(text) for text in (waiting.queue_line(report), waiting.path_line(report)) if text)


def _cause(cause: waiting.Cause) -> Iterator[tuple[str, ...]]:
    """Yield the row of a cause, then those of its places."""
    yield f"**{markdown(cause.label)}**", "", "", format_ns(cause.ns), format_share(cause.share, 1)
    for place in cause.places:
        yield "", _code(place.site), markdown(place.what, 200), format_ns(place.ns), format_share(place.share, 1)


def _changes(report: ReportData) -> str:
    found = waiting.changes(report)
    if not found:
        return ""
    rows = ((markdown(change.label, 100), _code(change.setting), change.then, change.gain) for change in found)
    title = (
        f"## What changes could give at most\n\nThe {words.span_word(report)} replayed with one thing changed; gains do not add up. "
        "Others, and several at once: `gpudiag whatif PATH --set NAME=VALUE`.\n\n"
    )
    return title + _table(("change", "`--set`", words.span_word(report), "gain"), "llrr", rows)


def _code(text: str) -> str:
    return code(text, 80, cell=True) if text else ""


def _findings(report: ReportData) -> Iterator[str]:
    found, rest = chosen.findings(report)
    if not found:
        yield f"## Findings\n\n{markdown(words.nothing_found(report))}"
        return
    yield "## What matters most"
    for number, finding in enumerate(found, 1):
        yield _finding(number, finding, report)
    if rest:
        yield f"<details><summary>And {len(rest)} more</summary>"
        for number, finding in enumerate(rest, len(found) + 1):
            yield _finding(number, finding, report)
        yield "</details>"
    if said := chosen.on_gains(report):
        yield said


def _finding(number: int, finding: Finding, report: ReportData) -> str:
    gain = markdown(words.ceiling_line(finding, report))
    lines = [
        f"### {number}. {markdown(finding.title, 100)} ({markdown(finding.rule, 40)}, {finding.severity})",
        "",
        markdown(finding.message),
        "",
        f"**{gain}** Confidence: {finding.confidence}." if gain else f"Confidence: {finding.confidence}.",
        "",
    ]
    lines += [f"- Where: {code(words.where_text(place, report))}" for place in chosen.places(finding, report, 3)]
    for title, change, effect in words.fix_lines(finding):
        effect_text = f" ({effect})" if effect else ""
        lines.append(f"- Try: {markdown(title)}{effect_text}" + (f": {code(change)}" if change else ""))
    lines += [f"- What to know: {markdown(finding.why)}"] if finding.why and not finding.fixes else []
    lines += [f"- Explains also {markdown(rule, 40)}: {markdown(said)}" for rule, said in chosen.folded(finding, report)]
    facts = ", ".join(f"{code(item.fact)} = {markdown(words.evidence_text(item))}" for item in finding.evidence)
    lines += [f"- Evidence: {facts}"] if facts else []
    return "\n".join(lines).rstrip()


def _ops(report: ReportData, top: int) -> str:
    rows = sorted(report.ops, key=lambda row: -row.kernel_ns)[: max(0, top)]
    if not rows:
        return ""
    header: tuple[str, ...] = ("op", "at", "calls", "time", "share", "bound", "of roof", "compute", "memory", "FLOP/B")
    total, name = words.op_total_ns(report.ops), namer(report)
    cells = [_op_cells(row, name(row), total) for row in rows]
    if not any(row.where for row in rows):  # an empty column helps nobody
        header, cells = header[:1] + header[2:], [line[:1] + line[2:] for line in cells]
    table = _table(header, "l" * (len(header) - 8) + "rrrlrrrr", cells)
    legend = "\n\n".join(markdown(f"{text}.") for text in words.legend(rows))
    return "\n\n".join(part for part in (f"## Ops that cost most ({len(rows)} of {len(report.ops)})", table, legend) if part)


def _op_cells(row: OpRow, name: str, total_ns: int) -> list[str]:
    detail = " ".join(text for text in (row.module or row.signature, recompute_text(row)) if text)
    return [
        code(f"{name} {detail}" if detail else name, 120, cell=True),
        code(site_text(row.where), 80, cell=True) if row.where else "",
        f"{row.count:,}",
        format_ns(row.kernel_ns),
        format_share(row.kernel_ns / total_ns if total_ns else None, 1),
        row.bound,
        words.of_roof(row),
        format_rate(words.per_second(row.flops, row.kernel_ns), "FLOP"),
        format_rate(words.per_second(row.bytes, row.kernel_ns), "B"),
        words.number(words.intensity(row)),
    ]


def _trust(report: ReportData) -> str:
    lines = [f"{topic}: {markdown(line)}" for topic, line in trust.trust_lines(report)]
    if published := trust.reference_lines(report):
        lines.append("published, to compare with:\n" + "\n".join(f"  - {markdown(text)}" for text in published))
    lines += [f"**Warning:** {markdown(warning)}" for warning in trust.warning_lines(report)]
    return "## How far to trust this\n\n" + "\n".join(f"- {line}" for line in lines)


def _recorded(report: ReportData) -> str:
    rows = [(topic, markdown(said, recorded.LONGEST)) for topic, said in recorded.lines(report)]
    return "## Recorded with\n\n" + _table(("", ""), "ll", rows) if rows else ""


def _telemetry(report: ReportData) -> str:
    found = telemetry.rows(report)
    if not found:
        return ""
    cells = ((row.label, row.low, row.median, row.high) for row in found)
    table = _table(("sampled", "lowest", "median", "highest"), "lrrr", cells)
    return f"<details><summary>Clocks, power and load during the steps</summary>\n\n{telemetry.caption(report)}.\n\n{table}\n\n</details>"


def _rules(report: ReportData) -> str:
    unknown = [rule for rule in report.rules if rule.status in {"not_applicable", "suppressed", "error"}]
    summary = f"## Rules\n\n{words.rules_line(report)}"
    if not unknown:
        return summary
    rows = ((markdown(rule.id), rule.status.replace("_", " "), markdown(rule.reason, 300)) for rule in unknown)
    table = _table(("rule", "status", "reason"), "lll", rows)
    return f"{summary}\n\n<details><summary>What could not be judged, and why</summary>\n\n{table}\n\n</details>"
