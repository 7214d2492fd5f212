"""A report for the terminal: the verdict first, then why, what to try, how far to trust it, and the ops that cost most."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from gpudiag.model.finding import Finding
from gpudiag.model.report import OpRow, ReportData
from gpudiag.report import trust, words
from gpudiag.report.escape import clean, joined
from gpudiag.report.labels import namer, op_detail, phase_text
from gpudiag.units import format_ns, format_share

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

NARROWEST = 60
"""Columns below which the tables cannot be read; narrower terminals wrap."""

_BAR_CELLS = 32
_FIGURES = 22
"""Columns that time, share and the space between them take."""
_JOINT = "\ue000"  # private use: `clean` removes it from names, so every one in the output is ours
# Blue / orange / grey stay apart in every common colour blindness; the words carry the meaning without them.
_STYLES = {"compute": "blue", "memory": "cyan", "overhead": "yellow", "unknown": "bright_black"}
_SEVERITIES = {"critical": "bold red", "warning": "bold yellow", "info": "bold blue"}
_INDENT = 3
_LONGEST_PATH = 200
_ROOMY = 92
"""Columns from which the op table has room for bandwidth and intensity too."""


def render(report: ReportData, *, width: int = 100, top: int = 10, color: bool = False) -> str:
    """Return the report as text of at most `width` columns; `top` ops; `color`: with ANSI colours."""
    from rich.console import Console

    sink = io.StringIO()
    console = Console(
        file=sink,
        width=max(width, NARROWEST),
        height=100,
        force_terminal=color,
        no_color=not color,
        color_system="standard" if color else None,
        markup=False,
        highlight=False,
        emoji=False,
        legacy_windows=False,
        force_jupyter=False,
    )
    _title(console, report)
    _breakdown(console, report)
    _findings(console, report)
    _trust(console, report)
    _ops(console, report, top)
    console.print()
    _line(console, words.rules_line(report), "bright_black")
    _line(console, "Everything, as one page: gpudiag report PATH -o report.html", "bright_black")
    lines = sink.getvalue().replace(_JOINT, " ").split("\n")
    return "\n".join(line.rstrip() for line in lines).strip("\n") + "\n"


def _line(console: Console, text: str, style: str = "", indent: int = 0) -> None:
    """Print one paragraph; `text` is made harmless here."""
    from rich.padding import Padding
    from rich.text import Text

    console.print(Padding(Text(_unbroken(text), style=style), (0, 0, 0, indent)))


def _unbroken(text: str) -> str:
    """Return `text`, harmless, with numbers and their units held together (`render` turns the joint into a space again)."""
    return joined(clean(text, 2_000), _JOINT)


def _heading(console: Console, text: str) -> None:
    console.print()
    _line(console, text, "bold")


def _title(console: Console, report: ReportData) -> None:
    device = report.device.name if report.device else "an unknown device"
    _line(console, f"{report.tool.name} {report.tool.version} on {clean(device, 80)}", "bright_black")
    _line(console, _tail(clean(report.source.path, 4_096), _LONGEST_PATH), "bright_black")
    console.print()
    _line(console, words.verdict(report), "bold")


def _tail(text: str, limit: int) -> str:
    """Return the end of a path, which tells more than its beginning."""
    return text if len(text) <= limit else f"…{text[1 - limit :]}"


def _table(columns: tuple[tuple[str, str], ...]) -> Table:
    """Return an empty table without lines; a column is (title, 'left' | 'right' | 'name' | 'wrapped'); the last two take what is left."""
    from rich.table import Table

    titled = any(title for title, _ in columns)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bright_black", show_header=titled)
    for title, align in columns:
        justify: Literal["left", "right"] = "right" if align == "right" else "left"
        ratio = 1 if align in {"name", "wrapped"} else None
        overflow: Literal["ellipsis", "fold"] = "ellipsis" if align == "name" else "fold"
        table.add_column(title, justify=justify, no_wrap=align != "wrapped", overflow=overflow, ratio=ratio)
    table.expand = any(align in {"name", "wrapped"} for _, align in columns)
    return table


def _cells(*values: str) -> list[RenderableType]:
    from rich.text import Text

    return [Text(value) for value in values]


def _breakdown(console: Console, report: ReportData) -> None:
    from rich.text import Text

    rows = words.bucket_rows(report)
    if not rows:
        return
    _heading(console, f"Where {words.span_phrase(report)} goes")
    largest = max(row.share for row in rows)
    room = min(_BAR_CELLS, console.width - max(len(row.label) for row in rows) - _FIGURES)
    table = _table((("", "left"), ("time", "right"), ("share", "right"), ("", "left")))
    for row in rows:
        cells = round(room * row.share / largest)
        style = "magenta" if row.idle else _STYLES.get(row.bucket, "green")
        table.add_row(*_cells(row.label, format_ns(row.ns), format_share(row.share, 1)), Text("█" * cells, style=style))
    table.add_row(*_cells(f"sum: the {words.span_word(report)}", format_ns(words.step_ns(report)), format_share(1, 1)), style="bold")
    console.print(table)
    if note := words.idle_note(report):
        _line(console, note, "bright_black")


def _findings(console: Console, report: ReportData) -> None:
    found = words.told(report)
    if not found:
        _heading(console, "Findings")
        _line(console, words.nothing_found(report))
        return
    _heading(console, "What matters most")
    for number, finding in enumerate(found[: words.MATTER_MOST], 1):
        if number > 1:
            console.print()
        _finding(console, number, finding, report)
    rest = found[words.MATTER_MOST :]
    if rest:
        console.print()
        _line(console, f"Also found: {'; '.join(f'{clean(finding.title, 100)} ({clean(finding.rule, 40)})' for finding in rest)}.")


def _finding(console: Console, number: int, finding: Finding, report: ReportData) -> None:
    from rich.text import Text

    title = Text.assemble(
        f"{number}. ",
        (clean(finding.title, 100), "bold"),
        "  ",
        (finding.severity, _SEVERITIES.get(finding.severity, "")),
        (f"  {clean(finding.rule, 40)}", "bright_black"),
    )
    console.print(title)
    _line(console, finding.message, indent=_INDENT)
    _line(console, f"{words.ceiling_line(finding, report)} Confidence: {finding.confidence}.".strip(), "bold", _INDENT)
    for place in finding.where[:2]:
        _line(console, f"Where: {clean(words.where_text(place, report))}", indent=_INDENT)
    for title_text, change, effect in words.fix_lines(finding)[:3]:
        _line(console, f"Try: {title_text}" + (f" ({effect})" if effect else ""), indent=_INDENT)
        if change:
            _line(console, change, "cyan", _INDENT + 5)


def _trust(console: Console, report: ReportData) -> None:
    _heading(console, "How far to trust this")
    table = _table((("", "left"), ("", "wrapped")))
    for topic, line in trust.trust_lines(report):
        table.add_row(*_cells(topic, _unbroken(line)))
    console.print(table)
    for warning in report.trust.warnings:
        _line(console, f"! {warning}", "yellow")


def _ops(console: Console, report: ReportData, top: int) -> None:
    rows = sorted(report.ops, key=lambda row: -row.kernel_ns)[: max(0, top)]
    if not rows:
        return
    roomy = console.width >= _ROOMY
    flop_unit, byte_unit = words.flop_unit(report, rows), words.byte_unit(report, rows)
    _heading(console, f"Ops that cost most ({len(rows)} of {len(report.ops)}, over {_window(report)})")
    columns: tuple[tuple[str, str], ...] = (("op", "name"), ("calls", "right"), ("time", "right"), ("share", "right"), ("bound", "left"))
    columns += (("of roof", "right"), (flop_unit[0], "right"))
    table = _table((*columns, (byte_unit[0], "right"), ("FLOP/B", "right")) if roomy else columns)
    total, name = words.op_total_ns(report.ops), namer(report)
    details = []
    for row in rows:
        figures = _op_figures(row, total, flop_unit[1], byte_unit[1])
        detail = op_detail(row)
        first = name(row) if detail or not row.phase else f"{name(row)}, {phase_text(row)}"
        table.add_row(*_cells(clean(first), *figures[: 8 if roomy else 6]))
        details.append(clean(detail, 400))
    _print_with_details(console, table, details)
    if any(row.efficiency is None for row in rows):
        _line(console, "?: not known (no cost model, no shapes or no peak)", "bright_black")


def _print_with_details(console: Console, table: Table, details: Sequence[str]) -> None:
    """Print a table whose rows take one line each, with a quieter line under each row that has a detail."""
    from rich.text import Text

    header, *lines = console.render_lines(table, pad=False)
    for segments, detail in zip([header, *lines], ["", *details], strict=True):
        console.print(Text.assemble(*((segment.text, segment.style or "") for segment in segments)), no_wrap=True, overflow="crop")
        if detail:
            console.print(Text(f"  {detail}", style="bright_black"), no_wrap=True, overflow="ellipsis")


def _window(report: ReportData) -> str:
    if not words.has_steps(report):
        return "the recorded window"
    return "1 step" if report.steps.count == 1 else f"{report.steps.count} steps"


def _op_figures(row: OpRow, total_ns: int, flop_factor: float, byte_factor: float) -> list[str]:
    """Return the cells of one op after its name: calls, time, share, bound, efficiency, FLOP rate, byte rate, FLOP/B."""
    flop_rate = words.per_second(row.flops, row.kernel_ns)
    byte_rate = words.per_second(row.bytes, row.kernel_ns)
    return [
        f"{row.count:,}",
        format_ns(row.kernel_ns),
        format_share(row.kernel_ns / total_ns if total_ns else None, 1),
        row.bound,
        words.number(row.efficiency, 100, " %"),
        words.number(flop_rate, flop_factor),
        words.number(byte_rate, byte_factor),
        words.number(words.intensity(row), 1),
    ]
