"""One event of the time line in words: what it is, how long, what it belongs to, why. Texts of the trace are cleaned."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import polars as pl

from gpudiag.model.analysis import Analysis
from gpudiag.model.event_labels import describe_event, format_kernel_name, read_evidence
from gpudiag.model.ops import OVER_ROOF_ABOVE, format_signature, parse_signature
from gpudiag.model.report import ReportData
from gpudiag.model.timeline import IDLE_BUCKETS
from gpudiag.report import labels
from gpudiag.report.console import clean
from gpudiag.report.labels import format_site
from gpudiag.units import format_bytes, format_flop, format_ns, format_rate, format_share

EventRow = dict[str, Any]
CardLines = list[tuple[str, str | None]]

_BOUNDS = {
    "compute": "compute-bound",
    "memory": "memory-bound",
    "overhead": "overhead-bound",
    "communication": "collective (communication)",
    "copy": "copy between host and device",
    "unknown": "bound unknown",
}
_HOST = {
    "step": "step",
    "step_left_out": "step that is not analysed",
    "op": "op on the host",
    "call": "runtime call",
    "wait": "synchronising call",
    "mark": "annotation",
    "frame": "Python function",
}
_NAMES = {
    "kernels": "name",
    "ops": "name",
    "marks": "name",
    "frames": "name",
    "launches": "api",
    "steps": "name",
    "idle": "cause",
    "critical_path": "bound",
}

_NAME, _LABEL = 200, 80
"""Characters of one name in a card, which the page wraps, and on an event."""


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """What is told of one event."""

    table: str
    row: int
    title: str
    start_ns: int
    end_ns: int
    lines: tuple[tuple[str, str], ...]
    op: str | None = None
    """Name of its row in the op table, as it stands in the trace."""
    related: tuple[tuple[str, str, int], ...] = ()
    """What, table and row of events that belong to it, such as the call that launched a kernel."""


def name_styles(report: ReportData) -> dict[str, str]:
    """Return what each of timeline.lanes.STYLES is called in a legend; idle causes as in the breakdown."""
    idle = ("outside_recording", *IDLE_BUCKETS)
    return {**_BOUNDS, **{name: labels.name_bucket(name, report) for name in idle}, **_HOST}


def build_card(analysis: Analysis, report: ReportData, table: str, row: int) -> Card:
    """Return what is told of a row of a table. Raises KeyError, IndexError where there is no such event."""
    return _CARDS[table](_EventTables(analysis, report), row)


def read_raw_names(analysis: Analysis, table: str) -> pl.Series:
    """Return the column of a table that names its events, as it stands in the trace."""
    return _find_table(analysis, table)[_NAMES[table]]


def format_event_name(name: str, *, kernel: bool) -> str:
    """Return a name as it is written on an event: as people know it, cleaned, short."""
    return clean(format_kernel_name(name) if kernel else name, _LABEL)


def _find_table(analysis: Analysis, table: str) -> pl.DataFrame:
    owner = analysis if table in ("steps", "idle", "critical_path") else analysis.trace
    found: pl.DataFrame = getattr(owner, table)
    return found


class _EventTables:
    def __init__(self, analysis: Analysis, report: ReportData) -> None:
        self.analysis, self.report = analysis, report
        self.words = name_styles(report)

    def row(self, table: str, number: int) -> EventRow:
        frame = _find_table(self.analysis, table)
        if not 0 <= number < frame.height:
            raise IndexError(f"{table} has no row {number}")
        return frame.row(number, named=True)

    def step(self, number: int | None) -> str | None:
        return None if number is None else clean(str(self.row("steps", number)["name"]), _NAME)

    def op_lines(self, number: int | None, *, named: bool = True) -> CardLines:
        if number is None:
            return []
        op, inputs = self.row("ops", number), None
        if op["signature"] is not None:
            row = self.analysis.trace.signatures.row(op["signature"], named=True)
            inputs = format_signature(parse_signature(row["shapes"], row["dtypes"], row["strides"], row["args"]))
        return [
            ("op", _clean_name(op["name"]) if named else None),
            ("module", _clean_name(op["module"])),
            ("phase", _clean_name(op["phase"])),
            ("inputs", _clean_name(inputs)),
            ("call site", _clean_name(format_site(self.analysis.sites[number]))),
        ]


def _clean_name(value: object) -> str | None:
    return clean(str(value), _NAME) or None if value is not None else None


def _make_card(
    table: str, row: EventRow, title: str, lines: CardLines, related: list[tuple[str, str, int | None]], op: str | None = None
) -> Card:
    begins = f"{format_ns(row['start_ns'])} into the recording"
    length: CardLines = [("duration", format_ns(row["end_ns"] - row["start_ns"])), ("begins", begins)]
    known = tuple((what, value) for what, value in [*length, *lines] if value)
    others = tuple((what, other, number) for what, other, number in related if number is not None)
    return Card(table=table, row=row["id"], title=title, start_ns=row["start_ns"], end_ns=row["end_ns"], lines=known, op=op, related=others)


def _describe_kernel(source: _EventTables, number: int) -> Card:
    row = source.row("kernels", number)
    owner = row["op"] if row["owner"] is None else row["owner"]
    on_cpu = row["kind"] == "cpu"
    if row["launch"] is None:
        launched = "before the recording, or the launch was not recorded"
    else:
        launch, replay = source.row("launches", row["launch"]), " of a graph" if row["replay"] else ""
        launched = f"by {_clean_name(launch['api'])}{replay}, {format_ns(row['start_ns'] - launch['start_ns'])} before it began"
    known = row["grid"] is not None and row["block"] is not None
    blocks = f"{row['grid']:,} {labels.pluralize(row['grid'], 'block')} of {row['block']:,} threads" if known else None
    lines: CardLines = [
        *_list_roofline_lines(row),
        *source.op_lines(owner),
        ("launched", None if on_cpu else launched),
        ("stream", str(row["stream"]) if row["stream"] is not None else None),
        ("grid", blocks),
        ("occupancy", f"{format_share(row['occupancy'])} (estimate of the profiler)" if row["occupancy"] else None),
        ("step", source.step(row["step"])),
    ]
    title = _clean_name(format_kernel_name(str(row["name"]))) or "kernel"
    related = [("its launch", "launches", row["launch"]), ("attributed op", "ops", owner)]
    return _make_card("kernels", row, title, lines, related, str(row["name"] if owner is None else source.row("ops", owner)["name"]))


def _list_roofline_lines(row: EventRow) -> CardLines:
    took = row["busy_ns"]
    flops, moved = row["flops"] or None, row["bytes_moved"] or None
    rate = f", {format_rate(flops * 1e9 / took, 'FLOP')}" if flops and took else ""
    speed = f", {format_rate(moved * 1e9 / took, 'B')}" if moved and took else ""
    return [
        ("self time", f"{format_ns(took)}, without child ops" if row["kind"] == "cpu" else None),
        ("bound", _BOUNDS.get(str(row["bound"]), "unknown").removeprefix("bound ")),
        ("efficiency", _format_efficiency(row)),
        ("computes", f"{format_flop(flops)}{rate}" if flops else None),
        ("moves", f"{format_bytes(moved)}{speed} (compulsory bytes)" if moved else None),
        ("copied", format_bytes(row["bytes"]) if row["bytes"] is not None else None),
        (
            "cost model",
            {"none": None, "generic": "generic: a guess by the sizes of all arguments"}.get(row["provenance"], row["provenance"]),
        ),
    ]


def _format_efficiency(row: EventRow) -> str | None:
    if row["efficiency"] is None or row["t_roof_ns"] is None:
        return None
    if row["over_roof"] or row["efficiency"] > OVER_ROOF_ABOVE:
        return f"{labels.OVER_ROOF}: its roofline time is {format_ns(row['t_roof_ns'])}"
    return f"{format_share(row['efficiency'])} of roofline (roofline time {format_ns(row['t_roof_ns'])})"


def _describe_op(source: _EventTables, number: int) -> Card:
    row = source.row("ops", number)
    kernels = source.analysis.trace.kernels.filter(pl.col("op") == number)
    own, work = kernels.filter(pl.col("kind") == "cpu"), kernels.filter(pl.col("kind") != "cpu")
    judged = _list_roofline_lines(own.row(0, named=True)) if own.height else []
    launched = f"{work.height:,} {labels.pluralize(work.height, 'kernel')}, {format_ns(int(work['busy_ns'].sum()))}"
    lines = [*judged, *source.op_lines(number, named=False), ("launches", launched if work.height else None)]
    related = [("parent op", "ops", row["parent"]), ("its first kernel", "kernels", work["id"].first() if work.height else None)]
    return _make_card("ops", row, _clean_name(row["name"]) or "op", [*lines, ("step", source.step(row["step"]))], related, str(row["name"]))


def _describe_launch(source: _EventTables, number: int) -> Card:
    row = source.row("launches", number)
    work = source.analysis.trace.kernels.filter(pl.col("launch") == number)
    started = f"{work.height:,} {labels.pluralize(work.height, 'kernel')}" if work.height > 1 else None
    if work.height == 1:
        started = _clean_name(format_kernel_name(str(work["name"][0])))
    waits = None if source.analysis.syncs is None else source.analysis.syncs.filter(pl.col("launch") == number)
    waited: CardLines = []
    if waits is not None and waits.height:
        sync = waits.row(0, named=True)
        waited = [
            ("waited", f"{format_ns(sync['waited_ns'])} for work that still ran"),
            ("costs", f"{format_ns(sync['cost_ns'])} of exposed sync time" if sync["cost_ns"] else None),
            ("call site", _clean_name(format_site(sync["site"]))),
        ]
    related = [("its first kernel", "kernels", work["id"].first() if work.height else None), ("parent op", "ops", row["op"])]
    lines = [*waited, ("launches", started), *[line for line in source.op_lines(row["op"]) if line[0] not in dict(waited)]]
    return _make_card("launches", row, _clean_name(row["api"]) or "call", lines, related)


def _describe_idle(source: _EventTables, number: int) -> Card:
    row = source.row("idle", number)
    said = read_evidence(row["evidence_code"], row["evidence_name"], row["evidence_detail"])
    lines: CardLines = [
        ("cause", _clean_name(describe_event(row["evidence"], said)) if row["evidence"] else None),
        ("call site", _clean_name(format_site(row["site"]))),
        *source.op_lines(row["op"]),
    ]
    related = [("kernel that ends it", "kernels", row["kernel"]), ("attributed op", "ops", row["op"])]
    return _make_card("idle", row, source.words.get(row["cause"], "idle"), lines, related)


def _describe_path(source: _EventTables, number: int) -> Card:
    row = source.row("critical_path", number)
    bound = str(row["bound"])
    title = source.words.get(bound) or source.words.get(f"idle_{bound}", bound)
    kernel = source.row("kernels", row["kernel"]) if row["kernel"] is not None else None
    lines: CardLines = [
        ("kind", _clean_name(row["kind"])),
        ("work", _clean_name(format_kernel_name(str(kernel["name"]))) if kernel else None),
        ("efficiency", _format_efficiency(kernel) if kernel else None),
        *source.op_lines(row["op"]),
        ("step", source.step(row["step"])),
    ]
    related = [("its kernel", "kernels", row["kernel"]), ("attributed op", "ops", row["op"])]
    return _make_card("critical_path", row, f"critical path: {title.removeprefix('idle: ')}", lines, related)


def _describe_span(table: str, source: _EventTables, number: int) -> Card:
    row = source.row(table, number)
    if table == "steps":
        counted = "counts in the breakdown" if row["analysed"] else "left out of the analysis: at the edge of the recording"
        lines: CardLines = [("analysed", counted), ("found by", source.analysis.steps_source)]
    else:
        lines = [("category", _clean_name(row.get("category", "Python function")))]
    return _make_card(table, row, _clean_name(row["name"]) or ("step" if table == "steps" else "annotation"), lines, [])


_CARDS: dict[str, Callable[[_EventTables, int], Card]] = {
    "kernels": _describe_kernel,
    "ops": _describe_op,
    "launches": _describe_launch,
    "idle": _describe_idle,
    "critical_path": _describe_path,
    "steps": partial(_describe_span, "steps"),
    "marks": partial(_describe_span, "marks"),
    "frames": partial(_describe_span, "frames"),
}
