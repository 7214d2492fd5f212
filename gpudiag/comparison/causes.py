"""Why B takes another time than A: the difference of two steps taken apart into causes that sum to it.

The profiled steps are a partition: what no work covers goes by its cause (idle), messages and copies count where nothing hides them, and
each op has its share of the time that work ran (Measured.device_ns). So the differences of these sum to that of the mean profiled steps;
what the compared steps (unprofiled ones, or the median) have beyond is named as the rest. Ops are put together by what happened to them:
more work, other kernels, another element type, the same work in more time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from gpudiag.comparison import batch_means
from gpudiag.comparison.batch_means import Estimate
from gpudiag.comparison.ops import (
    EQUAL_WORK,
    LEAST_CHANGE,
    AlignedOp,
    OpPair,
    compare_amounts,
    compare_work,
    drop_own_name,
    find_common_word,
    judge_same_program,
    sum_by_step,
)
from gpudiag.comparison.settings import find_consistent, list_seen_changes, list_setting_changes
from gpudiag.model.comparison import Cause, CausePart, Explanation, Measured, SettingChange
from gpudiag.model.event_labels import describe_idle_event, parse_site
from gpudiag.model.report import IdleRow
from gpudiag.model.timeline import BUCKETS, IDLE_BUCKETS

WORK = ("compute", "memory", "overhead", "unknown")
"""Parts of the breakdown in which work of ops runs."""

LEAST_SHARE = 0.005
"""Of the step: a cause below it is told together with others like it, as is one that is no more than it varies."""

SAME_KERNELS = 0.5
"""Share of the time of an op in kernels of the same names below which its kernels are others."""

LEVEL = 0.95
MOST_PARTS = 5

_BY_PHASE = ("replaced", "new", "gone")
_LAST = ("small", "other_work", "rest")


class _Times(NamedTuple):
    """Time a step; by analysed step where that is known."""

    ns: float
    by_step: tuple[float, ...] | None

    @property
    def estimate(self) -> Estimate:
        return (batch_means.estimate_by_batches(self.by_step, np.mean) if self.by_step else None) or Estimate(self.ns)


class _Piece(NamedTuple):
    """One op, or one part of the breakdown, on both sides."""

    kind: str
    a: _Times
    b: _Times
    phase: str | None = None
    part: CausePart | None = None
    works: frozenset[str] = frozenset()

    @property
    def delta_ns(self) -> float:
        return self.b.ns - self.a.ns

    @property
    def span(self) -> tuple[float, float] | None:
        """Return the interval of the difference; None: not known."""
        if self.a.by_step is None or self.b.by_step is None:
            return None
        return batch_means.estimate_difference(self.a.estimate, self.b.estimate, LEVEL)


def explain_difference(a: Measured, b: Measured, pairs: Sequence[OpPair], difference_ns: float) -> Explanation | None:
    """Return the causes of `difference_ns`, by how much a step of B is longer; None where one has no complete step.

    `pairs`: the ops of both (comparison.ops.pair_ops).
    """
    if not a.report.steps.count or not b.report.steps.count:
        return None
    steps = [side.report.breakdown.wall_ns / side.report.steps.count for side in (a, b)]
    settings = (*list_setting_changes(a, b), *list_seen_changes(a, b))
    pieces = [*_list_ops(a, b, pairs, max(steps)), *_list_parts(a, b)]
    work = [_sum_parts(side, WORK) for side in (a, b)]
    of_ops = [_add([getattr(piece, side) for piece in pieces if piece.part]) for side in "ab"]
    pieces.append(_Piece("other_work", _subtract(work[0], of_ops[0]), _subtract(work[1], of_ops[1])))
    causes = _build_causes(pieces, difference_ns, max(steps), settings)
    return Explanation(
        difference_ns=difference_ns,
        profiled_ns=steps[1] - steps[0],
        causes=tuple(_add_places(cause, a, b) for cause in _rank_causes(causes, difference_ns)),
        settings=settings,
        work_ratio=_estimate_work_ratio(pairs),
        settings_known=a.report.recorded is not None and b.report.recorded is not None,
        same_program=judge_same_program(a, b, pairs),
    )


def _build_causes(pieces: Sequence[_Piece], difference_ns: float, step_ns: float, settings: Sequence[SettingChange]) -> list[Cause]:
    """Return the pieces put together, noise as one, and what they lack of the difference; their deltas sum to it."""
    groups: defaultdict[tuple[str, str | None], list[_Piece]] = defaultdict(list)
    for piece in pieces:
        groups[piece.kind, piece.phase if piece.kind in _BY_PHASE else None].append(piece)
    for kind in ("new", "gone"):
        _join_phases_of_a_line(kind, groups)
    noise = [key for key, group in groups.items() if key[0] == "small" or _is_noise(_join("", group), LEAST_SHARE * step_ns)]
    small = [piece for key in noise for piece in groups.pop(key)]
    causes = [_build_cause(kind, phase, group, difference_ns, settings) for (kind, phase), group in groups.items()]
    causes += [_build_cause("small", None, small, difference_ns, ())] if small else []
    left = difference_ns - sum(cause.delta_ns for cause in causes)
    if abs(left) >= 1:
        causes.append(Cause(kind="rest", a_ns=0.0, b_ns=left, delta_ns=left, share=left / difference_ns if difference_ns else None))
    return causes


def _join_phases_of_a_line(kind: str, groups: dict[tuple[str, str | None], list[_Piece]]) -> None:
    """Put ops of several phases together of which most stand on one line: between the passes a phase is told by gradients alone."""
    of_line: defaultdict[tuple[str, int], list[str | None]] = defaultdict(list)
    for (found, phase), group in groups.items():
        if found == kind and (line := _find_line(group)) is not None:
            of_line[line].append(phase)
    for phases in of_line.values():
        if len(phases) > 1:
            joined = [piece for phase in phases for piece in groups.pop((kind, phase))]
            groups[kind, None] = [*groups.get((kind, None), []), *joined]


def _find_line(group: Sequence[_Piece]) -> tuple[str, int] | None:
    """Return the line of the program that at least half of the change of these ops stands on; None: no such line."""
    sums: defaultdict[tuple[str, int], float] = defaultdict(float)
    for piece in group:
        if piece.part is not None and piece.part.file is not None and piece.part.line is not None:
            sums[piece.part.file, piece.part.line] += piece.delta_ns
    line = max(sums, key=lambda key: abs(sums[key]), default=None)
    return line if line is not None and 2 * abs(sums[line]) >= abs(sum(piece.delta_ns for piece in group)) else None


def _rank_causes(causes: Sequence[Cause], difference_ns: float) -> list[Cause]:
    """Return the causes, the largest first; those that are consistent with one setting stand together, by their sum."""
    sums: defaultdict[str, float] = defaultdict(float)
    for cause in causes:
        if cause.delta_ns * difference_ns > 0 and cause.settings:
            sums[cause.settings[0]] += abs(cause.delta_ns)

    def rank(cause: Cause) -> tuple[int, float, str, float, str]:
        own, setting = abs(cause.delta_ns), cause.settings[0] if cause.settings else ""
        if cause.kind in _LAST:
            return _LAST.index(cause.kind) + 2, 0.0, "", -own, cause.kind
        if cause.delta_ns * difference_ns < 0:
            return 1, 0.0, "", -own, cause.kind
        return 0, -max(own, sums[setting] if setting else own), setting, -own, cause.kind

    return sorted(causes, key=rank)


def _is_noise(piece: _Piece, least_ns: float) -> bool:
    return abs(piece.delta_ns) < least_ns or (piece.span is not None and piece.span[0] <= 0 <= piece.span[1])


# -- ops ------------------------------------------------------------------------------------------------------------------


def _list_ops(a: Measured, b: Measured, pairs: Sequence[OpPair], step_ns: float) -> list[_Piece]:
    """Return each op that takes time of the device, with what happened to it."""
    kernels = [_collect_kernels(side) for side in (a, b)]
    on_cpu = all(side.report.device is not None and side.report.device.kind == "cpu" for side in (a, b))
    found = []
    for pair in pairs:
        a_times, b_times = _time_op(pair.a, a), _time_op(pair.b, b)
        if a_times.ns or b_times.ns:
            piece = _Piece("", a_times, b_times)
            kind, used = _classify(pair, piece, kernels, on_cpu=on_cpu)
            part = _describe_op(pair, piece, used)
            found.append(piece._replace(kind=kind, phase=part.phase, part=part, works=_find_works(pair, part, on_cpu=on_cpu)))
    return _settle_even_ones(_match_replaced(found, step_ns), step_ns)


def _time_op(op: AlignedOp | None, side: Measured) -> _Times:
    """Return an op's share of the device's time; of a report that was read from a file its kernel time."""
    if op is None:
        return _Times(0.0, (0.0,) * len(side.analysed_ns) if side.device_ns else None)
    if op.device_ns is not None:
        return _Times(float(np.mean(op.device_ns)), op.device_ns)
    return _Times(0.0 if op.hidden else op.ns, None)


def _classify(
    pair: OpPair, piece: _Piece, kernels: Sequence[dict[str, dict[str, float]]], *, on_cpu: bool
) -> tuple[str, tuple[str | None, str | None]]:
    """Return what happened to an op, and the kernels that took most of its time on each side where these are others."""
    a, b = pair.a, pair.b
    nothing: tuple[str | None, str | None] = (None, None)
    if on_cpu and all(key.phase == "data" for op in (a, b) if op is not None for key in op.keys):
        return "data_work", nothing
    repeated = (b.recompute_ns if b else 0.0) - (a.recompute_ns if a else 0.0)
    if repeated * piece.delta_ns > 0 and abs(repeated) >= abs(piece.delta_ns) / 2:
        return "recompute", nothing
    if a is None or b is None:
        return ("gone" if b is None else "new"), nothing
    if amount := _classify_amounts(a, b, pair.matched):
        return amount, nothing
    used = [side.get(op.keys[0].name, {}) for op, side in zip((a, b), kernels, strict=True)]
    if all(used) and sum(min(used[0].get(name, 0.0), share) for name, share in used[1].items()) < SAME_KERNELS:
        first, second = (max(shares, key=lambda name: shares[name]) for shares in used)
        return "other_kernels", (first, second)
    if abs(piece.delta_ns) < LEAST_CHANGE * max(piece.a.ns, piece.b.ns) or (piece.span and piece.span[0] <= 0 <= piece.span[1]):
        return "even", nothing
    return "slower" if piece.delta_ns > 0 else "faster", nothing


def _classify_amounts(a: AlignedOp, b: AlignedOp, matched: str) -> str:
    """Return how the calls and the work of an op differ, '' where they are the same."""
    calls, work = compare_amounts(a.calls, b.calls), compare_work(a, b)
    if a.types and b.types and a.types != b.types and not work:
        return "other_type"
    if work and not (calls and abs((1 + work) / (1 + calls) - 1) < 2 * EQUAL_WORK):  # more than by its calls
        return "more_work" if work > 0 else "less_work"
    if calls or work:
        return "more_calls" if (calls or work or 0.0) > 0 else "fewer_calls"
    if work is None and not (matched == "exact" and a.keys[0].signature):  # with the same shapes it is the same, modelled or not
        other = matched != "exact" and {key.signature for key in a.keys} != {key.signature for key in b.keys}
        return "other_shapes" if other else "unknown_work"
    return ""


def _collect_kernels(side: Measured) -> dict[str, dict[str, float]]:
    """Return of each op the share that each of its kernels has of its time."""
    found: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in side.report.kernels:
        if row.op is not None and row.kernel_ns:
            found[row.op][drop_own_name(row.name)] += row.kernel_ns
    return {op: {name: ns / sum(times.values()) for name, ns in times.items()} for op, times in found.items()}


def _describe_op(pair: OpPair, times: _Piece, kernels: tuple[str | None, str | None]) -> CausePart:
    keys = [key for op in pair[:2] if op is not None for key in op.keys]
    signatures = [find_common_word(key.signature for key in op.keys) if op else None for op in pair[:2]]
    shown = pair.b or pair.a
    site = parse_site(shown.where) if shown else None
    return CausePart(
        name=keys[0].name,
        phase=find_common_word(key.phase for key in keys),
        a_ns=times.a.ns,
        b_ns=times.b.ns,
        signature_a=signatures[0],
        signature_b=signatures[1],
        a_calls=pair.a.calls if pair.a else None,
        b_calls=pair.b.calls if pair.b else None,
        a_flops=pair.a.flops if pair.a else None,
        b_flops=pair.b.flops if pair.b else None,
        kernel_a=kernels[0],
        kernel_b=kernels[1],
        file=site.file if site else None,
        line=site.line if site else None,
    )


def _find_works(pair: OpPair, part: CausePart, *, on_cpu: bool) -> frozenset[str]:
    """Return the kinds of work that an op is (comparison.settings.Reach.work)."""
    name = part.name.lower()
    told = {
        "matrix": any(op.matrix for op in pair[:2] if op is not None),
        "convolution": "conv" in name,
        "attention": "attention" in name,
        "optimizer": part.phase == "optimizer",
        "cpu": on_cpu,
    }
    return frozenset(work for work, true in told.items() if true)


def _match_replaced(pieces: list[_Piece], step_ns: float) -> list[_Piece]:
    """Return the pieces with ops of one phase that are gone where others are new called replaced, where neither is next to nothing."""
    sums: defaultdict[str | None, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for piece in pieces:
        if piece.kind in ("gone", "new"):
            sums[piece.phase][piece.kind == "new"] += piece.a.ns + piece.b.ns
    replaced = {
        phase
        for phase, (gone, new) in sums.items()
        if min(gone, new) >= 0.1 * max(gone, new) and min(gone, new) >= LEAST_SHARE / 2 * step_ns
    }
    return [piece._replace(kind="replaced") if piece.kind in ("gone", "new") and piece.phase in replaced else piece for piece in pieces]


def _settle_even_ones(pieces: list[_Piece], step_ns: float) -> list[_Piece]:
    """Return the pieces with those that each changed by no more than they vary called slower or faster where their sum did change."""
    even = [piece for piece in pieces if piece.kind == "even"]
    if not even:
        return pieces
    whole = _join("even", even)
    kind = "small" if _is_noise(whole, LEAST_SHARE * step_ns) else "slower" if whole.delta_ns > 0 else "faster"
    return [piece._replace(kind=kind) if piece.kind == "even" else piece for piece in pieces]


def _estimate_work_ratio(pairs: Sequence[OpPair]) -> float | None:
    """Return how much more work the calls have in B: the ratio of the median of the time of B in ops whose work is known."""
    known = []
    for a, b, _ in pairs:
        work = compare_work(a, b) if a is not None and b is not None and not compare_amounts(a.calls, b.calls) else None
        if work is not None and b is not None:
            known.append((1 + work, b.ns))
    if not known:
        return None
    known.sort()
    reached = np.cumsum([ns for _, ns in known])
    return known[int(np.searchsorted(reached, reached[-1] / 2))][0]


# -- parts of the breakdown, sums -------------------------------------------------------------------------------------------


def _list_parts(a: Measured, b: Measured) -> Iterator[_Piece]:
    """Yield the parts of the breakdown in which no work of ops runs."""
    for name in BUCKETS:
        if name not in WORK:
            times = [_sum_parts(side, (name,)) for side in (a, b)]
            if times[0].ns or times[1].ns:
                yield _Piece(name, times[0], times[1])


def _sum_parts(side: Measured, names: Sequence[str]) -> _Times:
    whole = sum(getattr(side.report.breakdown.buckets_ns, name) for name in names) / side.report.steps.count
    if not side.parts_ns:
        return _Times(whole, None)
    by_step = [side.parts_ns.get(name, (0,) * len(side.analysed_ns)) for name in names]
    return _Times(whole, tuple(float(sum(values)) for values in zip(*by_step, strict=True)))


def _add(times: Sequence[_Times]) -> _Times:
    return _Times(sum(one.ns for one in times), sum_by_step([one.by_step for one in times]) if times else None)


def _subtract(whole: _Times, part: _Times) -> _Times:
    known = whole.by_step is not None and part.by_step is not None
    by_step = tuple(x - y for x, y in zip(whole.by_step or (), part.by_step or (), strict=True)) if known else None
    return _Times(whole.ns - part.ns, by_step)


def _join(kind: str, group: Sequence[_Piece]) -> _Piece:
    return _Piece(kind, _add([piece.a for piece in group]), _add([piece.b for piece in group]))


def _build_cause(kind: str, phase: str | None, group: Sequence[_Piece], difference_ns: float, settings: Sequence[SettingChange]) -> Cause:
    whole = _join(kind, group)
    moved = sum(abs(piece.delta_ns) for piece in group)
    works = {work for piece in group for work in piece.works}
    named = {work for work in works if sum(abs(piece.delta_ns) for piece in group if work in piece.works) >= moved / 2}
    named |= works & {"attention"}  # what takes the place of one op may be many
    parts = sorted((piece.part for piece in group if piece.part), key=lambda part: (-abs(part.delta_ns), part.name))
    span = whole.span
    return Cause(
        kind=kind,
        phase=phase,
        a_ns=whole.a.ns,
        b_ns=whole.b.ns,
        delta_ns=whole.delta_ns,
        share=whole.delta_ns / difference_ns if difference_ns else None,
        low_ns=span[0] if span else None,
        high_ns=span[1] if span else None,
        parts=() if kind == "small" else tuple(parts[:MOST_PARTS]),
        settings=find_consistent(kind, frozenset(named), settings),
    )


def _add_places(cause: Cause, a: Measured, b: Measured) -> Cause:
    """Return a cause that is no op with what most of it is: places of idle time, kernels of copies and messages with all their time."""
    if cause.kind in ("exposed_copy", "exposed_communication"):
        return msgspec.structs.replace(cause, parts=_list_hidden_work(cause.kind, a, b))
    if cause.kind not in IDLE_BUCKETS:
        return cause
    sums: dict[tuple[str, str | None], list[float]] = {}
    lines: dict[tuple[str, str | None], int | None] = {}
    for place, side in enumerate((a, b)):
        for row in side.report.idle:
            if row.cause == cause.kind:
                key = (_name_place(row), row.file)
                sums.setdefault(key, [0.0, 0.0])[place] += row.idle_ns / side.report.steps.count
                lines[key] = row.line
    parts = (CausePart(name=name, a_ns=old, b_ns=new, file=file, line=lines[name, file]) for (name, file), (old, new) in sums.items())
    moved = sorted((part for part in parts if part.delta_ns * cause.delta_ns > 0), key=lambda part: (-abs(part.delta_ns), part.name))
    return msgspec.structs.replace(cause, parts=tuple(moved[:MOST_PARTS]))


def _list_hidden_work(kind: str, a: Measured, b: Measured) -> tuple[CausePart, ...]:
    """Return the copies, or the messages, whose time changed most."""
    sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for place, side in enumerate((a, b)):
        copies = [(row.name, row.kernel_ns) for row in side.report.kernels if row.kind == "memcpy"]
        messages = [(row.name, row.kernel_ns) for row in side.report.collectives]
        for name, ns in copies if kind == "exposed_copy" else messages:
            sums[name][place] += ns / side.report.steps.count
    parts = (CausePart(name=name, a_ns=old, b_ns=new) for name, (old, new) in sums.items())
    return tuple(sorted(parts, key=lambda part: (-abs(part.delta_ns), part.name))[:MOST_PARTS])


def _name_place(row: IdleRow) -> str:
    return describe_idle_event(row.evidence, row.op, row.notice)
