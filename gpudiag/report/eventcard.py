"""One event of the time line in words: what it is, how long, what it belongs to, why. Texts of the trace are cleaned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import polars as pl

from gpudiag.facts.spoken import event_words, kernel_label
from gpudiag.model.analysis import Analysis
from gpudiag.model.cost import OVER_ROOF_ABOVE
from gpudiag.model.report import ReportData
from gpudiag.model.signature import parse_signature
from gpudiag.report import words
from gpudiag.report.build import signature_text
from gpudiag.report.escape import clean
from gpudiag.report.labels import site_text
from gpudiag.units import format_bytes, format_flop, format_ns, format_rate, format_share

Row = dict[str, Any]
Lines = list[tuple[str, str | None]]

_BOUNDS = {
    "compute": "bound by compute",
    "memory": "bound by memory",
    "overhead": "too small for the device (overhead)",
    "communication": "collective (communication)",
    "copy": "copy between host and device",
    "unknown": "bound not known",
}
_HOST = {
    "step": "step",
    "step_left_out": "step that is not analysed",
    "op": "op on the host",
    "call": "runtime call",
    "wait": "call that waits for the device",
    "mark": "annotation",
}
_NAMES = {
    "kernels": "name",
    "ops": "name",
    "marks": "name",
    "launches": "api",
    "steps": "name",
    "idle": "cause",
    "critical_path": "bound",
}
"""Column of each table that names its events."""

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
    """What and its value, only what is known."""
    op: str | None = None
    """Name of its row in the op table, as it stands in the trace."""
    related: tuple[tuple[str, str, int], ...] = ()
    """What, table and row of events that belong to it, such as the call that launched a kernel."""


def style_words(report: ReportData) -> dict[str, str]:
    """Return what each of timeline.lanes.STYLES is called in a legend; idle causes as in the breakdown."""
    idle = [name for name in report.breakdown.buckets_ns.__struct_fields__ if name.startswith("idle_")]
    return {**_BOUNDS, **{name: words.bucket_label(name, report) for name in idle}, **_HOST}


def card(analysis: Analysis, report: ReportData, sites: pl.Series | None, table: str, row: int) -> Card:
    """Return what is told of a row of a table; `sites`: call sites by op. Raises KeyError, IndexError where there is no such event."""
    return _CARDS[table](_Source(analysis, report, sites), row)


def raw_names(analysis: Analysis, table: str) -> pl.Series:
    """Return the column of a table that names its events, as it stands in the trace."""
    return _frame(analysis, table)[_NAMES[table]]


def shown_name(name: str, *, kernel: bool) -> str:
    """Return a name as it is written on an event: as people know it, cleaned, short."""
    return clean(kernel_label(name) if kernel else name, _LABEL)


def _frame(analysis: Analysis, table: str) -> pl.DataFrame:
    owner = analysis if table in ("steps", "idle", "critical_path") else analysis.trace
    found: pl.DataFrame = getattr(owner, table)
    return found


class _Source:
    """The tables of one analysis, asked row by row."""

    def __init__(self, analysis: Analysis, report: ReportData, sites: pl.Series | None) -> None:
        self.analysis, self.report, self.sites = analysis, report, sites
        self.words = style_words(report)

    def row(self, table: str, number: int) -> Row:
        """Return a row as a dict. Raises IndexError."""
        frame = _frame(self.analysis, table)
        if not 0 <= number < frame.height:
            raise IndexError(f"{table} has no row {number}")
        return frame.row(number, named=True)

    def step(self, number: int | None) -> str | None:
        """Return the name of a step."""
        return None if number is None else clean(str(self.row("steps", number)["name"]), _NAME)

    def op_lines(self, number: int | None, *, named: bool = True) -> Lines:
        """Return what is known of an op: name, module, phase, inputs, call site."""
        if number is None:
            return []
        op = self.row("ops", number)
        return [
            ("op", _text(op["name"]) if named else None),
            ("module", _text(op["module"])),
            ("phase", _text(op["phase"])),
            ("inputs", self._inputs(op["signature"])),
            ("called at", _text(site_text(self.sites[number])) if self.sites is not None else None),
        ]

    def _inputs(self, number: int | None) -> str | None:
        if number is None:
            return None
        row = self.analysis.trace.signatures.row(number, named=True)
        return _text(signature_text(parse_signature(row["shapes"], row["dtypes"], row["strides"], row["args"])))


def _text(value: object) -> str | None:
    """Return a name of the trace, cleaned; None where there is nothing to show."""
    return clean(str(value), _NAME) or None if value is not None else None


def _card(table: str, row: Row, title: str, lines: Lines, **more: Any) -> Card:
    begins = f"{format_ns(row['start_ns'])} into the recording"
    length: Lines = [("duration", format_ns(row["end_ns"] - row["start_ns"])), ("begins", begins)]
    known = tuple((what, value) for what, value in [*length, *lines] if value)
    return Card(table=table, row=row["id"], title=title, start_ns=row["start_ns"], end_ns=row["end_ns"], lines=known, **more)


def _kernel(source: _Source, number: int) -> Card:
    row = source.row("kernels", number)
    owner = row["op"] if row["owner"] is None else row["owner"]
    own: Lines = [("own time", _own_time(row))] if row["kind"] == "cpu" else []
    lines = [
        *own,
        *_judged(row, source),
        *source.op_lines(owner),
        *_launched(row, source),
        *_shape(row),
        ("step", source.step(row["step"])),
    ]
    related = [("the call that launched it", "launches", row["launch"]), ("its op on the host", "ops", owner)]
    return _card(
        "kernels", row, _text(kernel_label(str(row["name"]))) or "kernel", lines,
        op=str(row["name"] if owner is None else source.row("ops", owner)["name"]), related=_known(related),
    )  # fmt: skip


def _known(related: list[tuple[str, str, int | None]]) -> tuple[tuple[str, str, int], ...]:
    return tuple((what, table, row) for what, table, row in related if row is not None)


def _judged(row: Row, source: _Source) -> Lines:
    """Return how a kernel is bound, how close it is to its roof, what it computes and moves."""
    took = row["busy_ns"]
    flops, moved = row["flops"] or None, row["bytes_moved"] or None
    rate = f", {format_rate(flops * 1e9 / took, 'FLOP')}" if flops and took else ""
    speed = f", {format_rate(moved * 1e9 / took, 'B')}" if moved and took else ""
    return [
        ("bound", _BOUNDS.get(str(row["bound"]), "not known").removeprefix("bound by ").removeprefix("bound ")),
        ("efficiency", _efficiency(row)),
        ("computes", f"{format_flop(flops)}{rate}" if flops else None),
        ("moves", f"{format_bytes(moved)}{speed} (compulsory bytes)" if moved else None),
        ("copied", format_bytes(row["bytes"]) if row["bytes"] is not None else None),
        ("cost model", row["provenance"] if row["provenance"] != "none" else None),
    ]


def _own_time(row: Row) -> str:
    return f"{format_ns(row['busy_ns'])}, without the ops inside"


def _efficiency(row: Row) -> str | None:
    if row["efficiency"] is None or row["t_roof_ns"] is None:
        return None
    if row["over_roof"] or row["efficiency"] > OVER_ROOF_ABOVE:
        return f"{words.OVER_ROOF}: its roofline time is {format_ns(row['t_roof_ns'])}"
    return f"{format_share(row['efficiency'])} of its roof (roofline time {format_ns(row['t_roof_ns'])})"


def _launched(row: Row, source: _Source) -> Lines:
    if row["kind"] == "cpu":
        return []
    if row["launch"] is None:
        return [("launched", "before the recording, or its call was not recorded")]
    launch = source.row("launches", row["launch"])
    replay = " of a graph" if row["replay"] else ""
    return [("launched", f"by {_text(launch['api'])}{replay}, {format_ns(row['start_ns'] - launch['start_ns'])} before it began")]


def _shape(row: Row) -> Lines:
    known = row["grid"] is not None and row["block"] is not None
    blocks = f"{row['grid']:,} {words.plural(row['grid'], 'block')} of {row['block']:,} threads" if known else None
    return [
        ("stream", str(row["stream"]) if row["stream"] is not None else None),
        ("grid", blocks),
        ("occupancy", f"{format_share(row['occupancy'])} (estimate of the profiler)" if row["occupancy"] else None),
    ]


def _op(source: _Source, number: int) -> Card:
    """Return an op of the host; on a CPU it is the device's work, and its own time is judged."""
    row = source.row("ops", number)
    kernels = source.analysis.trace.kernels
    own = kernels.filter((pl.col("op") == number) & (pl.col("kind") == "cpu"))
    judged: Lines = []
    if own.height:
        kernel = own.row(0, named=True)
        judged = [("own time", _own_time(kernel)), *_judged(kernel, source)]
    work = kernels.filter((pl.col("op") == number) & (pl.col("kind") != "cpu"))
    launched = f"{work.height:,} {words.plural(work.height, 'kernel')}, {format_ns(int(work['busy_ns'].sum()))}" if work.height else None
    lines = [*judged, *source.op_lines(number, named=False), ("launches", launched), ("step", source.step(row["step"]))]
    related = [("the op around it", "ops", row["parent"]), ("its first kernel", "kernels", work["id"].first() if work.height else None)]
    return _card("ops", row, _text(row["name"]) or "op", lines, op=str(row["name"]), related=_known(related))


def _launch(source: _Source, number: int) -> Card:
    row = source.row("launches", number)
    work = source.analysis.trace.kernels.filter(pl.col("launch") == number)
    started = f"{work.height:,} {words.plural(work.height, 'kernel')}" if work.height > 1 else None
    if work.height == 1:
        started = _text(kernel_label(str(work["name"][0])))
    waits = None if source.analysis.syncs is None else source.analysis.syncs.filter(pl.col("launch") == number)
    waited: Lines = []
    if waits is not None and waits.height:
        sync = waits.row(0, named=True)
        waited = [
            ("waited", f"{format_ns(sync['waited_ns'])} for work that was still running"),
            ("costs", f"{format_ns(sync['cost_ns'])} in which the device was idle" if sync["cost_ns"] else None),
            ("called at", _text(site_text(sync["site"]))),
        ]
    related = [("the work it launched", "kernels", work["id"].first() if work.height else None), ("the op around it", "ops", row["op"])]
    lines = [*waited, ("launches", started), *[line for line in source.op_lines(row["op"]) if line[0] not in dict(waited)]]
    return _card("launches", row, _text(row["api"]) or "call", lines, related=_known(related))


def _idle(source: _Source, number: int) -> Card:
    row = source.row("idle", number)
    lines: Lines = [
        ("because of", _text(event_words(row["evidence"])) if row["evidence"] else None),
        ("at", _text(site_text(row["site"]))),
        *source.op_lines(row["op"]),
    ]
    related = [("the work that ends it", "kernels", row["kernel"]), ("its op on the host", "ops", row["op"])]
    return _card("idle", row, source.words.get(row["cause"], "idle"), lines, related=_known(related))


def _path(source: _Source, number: int) -> Card:
    row = source.row("critical_path", number)
    bound = str(row["bound"])
    title = source.words.get(bound) or source.words.get(f"idle_{bound}", bound)
    kernel = source.row("kernels", row["kernel"]) if row["kernel"] is not None else None
    lines: Lines = [
        ("kind", _text(row["kind"])),
        ("work", _text(kernel_label(str(kernel["name"]))) if kernel else None),
        ("efficiency", _efficiency(kernel) if kernel else None),
        *source.op_lines(row["op"]),
        ("step", source.step(row["step"])),
    ]
    related = [("its work", "kernels", row["kernel"]), ("its op on the host", "ops", row["op"])]
    return _card("critical_path", row, f"longest path: {title.removeprefix('idle: ')}", lines, related=_known(related))


def _step(source: _Source, number: int) -> Card:
    row = source.row("steps", number)
    counted = "counts in the breakdown" if row["analysed"] else "left out of the analysis: at the edge of the recording"
    return _card("steps", row, _text(row["name"]) or "step", [("analysed", counted), ("found by", source.analysis.steps_source)])


def _mark(source: _Source, number: int) -> Card:
    row = source.row("marks", number)
    return _card("marks", row, _text(row["name"]) or "annotation", [("category", _text(row["category"]))])


_CARDS: dict[str, Callable[[_Source, int], Card]] = {
    "kernels": _kernel,
    "ops": _op,
    "launches": _launch,
    "idle": _idle,
    "critical_path": _path,
    "steps": _step,
    "marks": _mark,
}
