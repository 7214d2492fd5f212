"""How ops, collectives and places in code are called: what the profiler names for machines, written for people."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import msgspec

from gpudiag.facts.spoken import kernel_label
from gpudiag.model.finding import Where
from gpudiag.model.report import CollectiveRow, OpRow, ReportData
from gpudiag.units import format_bytes, format_share

COMMUNICATION_RECORD = "record_param_comms"
"""torch.distributed's own event around a collective; its name says nothing about which one."""

# 'ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)', 'ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(...)' (NCCL and RCCL since 2.0)
_NCCL = re.compile(r"^nccl(?:Dev)?Kernel_([A-Za-z]+)")
_SITE = re.compile(r"^(.*)\((\d+)\): (.*)$", re.DOTALL)
_SHAPE = re.compile(r"\[[\d, ]*\]")
_FEW = 2
"""Kinds of collectives that are named one by one."""
_BEFORE = {"before the window": "launched before the recording"}
_MOST_OF_IT = 0.5
"""A site stands for a group of calls only where at least half of their known time belongs to it."""


class Site(msgspec.Struct, frozen=True):
    """A place in code: the end of its path, the function, and the line of the function (Kineto records no line of the call)."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}".rstrip()


def parse_site(where: str | None) -> Site | None:
    """Return 'path/to/file.py(12): function' as a site with the last two parts of its path; None where it is not of that form."""
    found = _SITE.match(where or "")
    if found is None:
        return None
    path, line, function = found.groups()
    return Site("/".join(re.split(r"[\\/]", path)[-2:]), int(line[:9]), function)


def site_text(where: str | None) -> str:
    """Return a call site as people write it ('models/resnet.py:89 forward'), '' where there is none."""
    return str(parse_site(where) or where or "")


def collective_label(name: str) -> str:
    """Return the collective that a name stands for, such as 'AllReduce'; 'generic NCCL kernel' where the name does not tell."""
    found = _NCCL.match(name)
    if found is None:
        return name
    return "generic NCCL kernel" if found[1] == "Generic" else found[1]


def namer(report: ReportData) -> Callable[[OpRow], str]:
    """Return the function that names op rows: collectives by what they do, where the report knows; kernels without their namespaces."""
    known = {(row.count, row.kernel_ns): row for row in report.collectives}
    kinds = sorted({collective_label(row.name) for row in report.collectives})
    either = " or ".join(kinds) if 0 < len(kinds) <= _FEW else "collective"

    def name(row: OpRow) -> str:
        if row.name != COMMUNICATION_RECORD:
            return collective_label(row.name) if _NCCL.match(row.name) else kernel_label(row.name)
        found = known.get((row.count, row.kernel_ns))
        return _described(found) if found else either

    return name


def _described(row: CollectiveRow) -> str:
    """Return a collective with the size of its message and group."""
    size = f" {format_bytes(row.bytes)}" if row.bytes is not None else ""
    ranks = f" over {row.size} ranks" if row.size else ""
    return f"{collective_label(row.name)}{size}{ranks}"


def op_detail(row: OpRow) -> str:
    """Return what tells two op rows of one name apart: call site, module, shapes, then phase and recompute; '' where nothing is known."""
    record = COMMUNICATION_RECORD if row.name == COMMUNICATION_RECORD else ""  # how a reader finds it in the trace
    known = [text for text in (record, site_text(row.where), row.module, row.signature) if text]
    told = [*known, phase_text(row)] if known and row.phase else known
    return ", ".join([*told, recompute_text(row)] if row.recompute_ns else told)


def phase_text(row: OpRow) -> str:
    """Return the phase of an op row in words, '' where it is not known."""
    return _BEFORE.get(row.phase or "", row.phase or "")


def recompute_text(row: OpRow) -> str:
    """Return how much of an op row's time repeats forward work inside the backward pass, '' where none does."""
    if row.recompute_ns <= 0:
        return ""
    return "recomputed" if row.recompute_ns >= row.kernel_ns else f"{format_share(row.recompute_ns / row.kernel_ns)} recomputed"


def placed(place: Where, rows: Sequence[OpRow]) -> Where:
    """Return `place` with the call site of the op rows that it names ('op [shapes] x [shapes]'), unchanged where they do not say.

    Left alone are places with a site of their own and those that name no op with shapes: calls of one op with other shapes may come
    from elsewhere.
    """
    shapes = tuple(_SHAPE.findall(place.what))
    if place.file is not None or not shapes:
        return place
    site = _common_site([row for row in rows if _is_named(row, place.what.partition(" [")[0], shapes)])
    return place if site is None else msgspec.structs.replace(place, file=site.file, line=site.line)


def _is_named(row: OpRow, names: str, shapes: tuple[str, ...]) -> bool:
    """Return whether a row is one of the ops in 'aten::mul, aten::add on' whose first tensors have these shapes."""
    ops = names.removesuffix(" on").split(", ")
    return row.name in ops[:1] and tuple(_SHAPE.findall(row.signature or ""))[: len(shapes)] == shapes


def _common_site(rows: Sequence[OpRow]) -> Site | None:
    """Return the site with most of the rows' time, None where no site has half of it."""
    times: dict[str, int] = {}
    for row in rows:
        if row.where:
            times[row.where] = times.get(row.where, 0) + row.kernel_ns
    if not times:
        return None
    where = max(times, key=lambda site: times[site])
    return parse_site(where) if times[where] >= _MOST_OF_IT * sum(row.kernel_ns for row in rows) else None
