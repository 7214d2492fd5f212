"""Ops of two runs aligned, and how each changed."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from gpudiag.diagnosis import batches
from gpudiag.diagnosis.batches import Estimate
from gpudiag.model.compare import Change, Matched, OpChange
from gpudiag.model.measured import Measured, OpKey
from gpudiag.model.report import OpRow, ReportData
from gpudiag.roofline.oprows import BEFORE_WINDOW

LEVEL = 0.99
"""Of the interval of one op: with hundreds of ops, at 95 % dozens would be called changed by chance."""

WORTH = 0.01
"""A change of an op below this share of its time is none: no one acts on it."""

_OWN_NAMES = re.compile(r"^(triton_.*?)_\d+$|^(## Call CompiledFxGraph) \w+")
"""Inductor numbers the kernels of a compilation and names a graph by a hash: both change where anything else in the code does."""


class Op(msgspec.Struct, frozen=True):
    """Rows of an op table that stand together for one op; times in ns a step."""

    keys: tuple[OpKey, ...]
    ns: float
    calls: float
    by_step: tuple[int, ...] | None
    """Kernel time in each step; None: not known."""

    @property
    def estimate(self) -> Estimate:
        """Return the time a step with its error."""
        found = batches.estimate(self.by_step, batches.mean) if self.by_step else None
        return found or Estimate(self.ns)

    @property
    def spread_ns(self) -> float | None:
        """Return the standard deviation from step to step; None: not known."""
        return float(np.std(self.by_step, ddof=1)) if self.by_step is not None and len(self.by_step) > 1 else None


def ops_of(side: Measured) -> dict[OpKey, Op]:
    """Return the ops launched in the analysed steps of a run; rows with one key (other strides, say) are one."""
    steps = max(side.report.steps.count, 1)
    found: dict[OpKey, Op] = {}
    for row in launched(side.report):
        key = _key(row)
        made = Op((key,), row.kernel_ns / steps, row.count / steps, side.ops.get(key))
        found[key] = made if key not in found else _joined([found[key], made], by_step=made.by_step)
    return found


def launched(report: ReportData) -> list[OpRow]:
    """Return the op rows without the work that was launched before the recording: it belongs to no step."""
    return [row for row in report.ops if row.phase != BEFORE_WINDOW]


def _key(row: OpRow) -> OpKey:
    return OpKey(row.name, row.phase, row.module, row.signature)


def _joined(ops: Sequence[Op], *, by_step: tuple[int, ...] | None) -> Op:
    keys = tuple(dict.fromkeys(key for op in ops for key in op.keys))
    return Op(keys, sum(op.ns for op in ops), sum(op.calls for op in ops), by_step)


def joined(ops: Sequence[Op]) -> Op:
    """Return several ops as one: times are added, step by step where that is known of all."""
    if len(ops) == 1:
        return ops[0]
    known = [op.by_step for op in ops if op.by_step is not None]
    sums = tuple(map(sum, zip(*known, strict=True))) if len(known) == len(ops) else None
    return _joined(ops, by_step=sums)


def aligned(a: Measured, b: Measured) -> list[OpChange]:
    """Return every op of both runs once, the largest difference first.

    Ops with the same name, phase, module and signature are one; of what is left those with other shapes, then those of the same name.
    What only one of the two recordings tells (modules, phases, shapes) tells no ops apart.
    """
    left, right = _alike(ops_of(a), ops_of(b))
    ways: tuple[tuple[Matched, Callable[[OpKey], Hashable]], ...] = (
        ("exact", lambda key: key),
        ("shapes", lambda key: key[:3]),
        ("name", lambda key: _plain_name(key.name)),
    )
    found = []
    for matched, of in ways:
        pairs, left, right = _paired(left, right, of)
        found += [_changed(one, other, matched) for one, other in pairs]
    found += [_changed(op, None, "alone") for op in left]
    found += [_changed(None, op, "alone") for op in right]
    return sorted(found, key=lambda change: (-abs(change.delta_ns), change.name, str(change.phase)))


def _plain_name(name: str) -> str:
    found = _OWN_NAMES.match(name)
    return (found[1] or found[2]) if found else name


def _alike(a: dict[OpKey, Op], b: dict[OpKey, Op]) -> tuple[list[Op], list[Op]]:
    """Return the ops of both with the parts of their keys left out that only one of the two knows."""
    for field in ("phase", "module", "signature"):
        known = [any(getattr(key, field) is not None for key in ops) for ops in (a, b)]
        if known[0] != known[1]:
            a, b = _without(a, field), _without(b, field)
    return list(a.values()), list(b.values())


def _without(ops: dict[OpKey, Op], field: str) -> dict[OpKey, Op]:
    groups: defaultdict[OpKey, list[Op]] = defaultdict(list)
    for key, op in ops.items():
        left: dict[str, Any] = {field: None}
        groups[key._replace(**left)].append(op)
    return {key: msgspec.structs.replace(joined(group), keys=(key,)) for key, group in groups.items()}


def _paired(a: Iterable[Op], b: Iterable[Op], of: Callable[[OpKey], Hashable]) -> tuple[list[tuple[Op, Op]], list[Op], list[Op]]:
    """Return pairs of ops for which `of` gives the same, and what is left on both sides. Several of one side count together."""
    groups: tuple[defaultdict[Hashable, list[Op]], ...] = (defaultdict(list), defaultdict(list))
    for ops, group in zip((a, b), groups, strict=True):
        for op in ops:
            group[of(op.keys[0])].append(op)
    both = groups[0].keys() & groups[1].keys()
    pairs = [(joined(groups[0][key]), joined(groups[1][key])) for key in groups[0] if key in both]
    rest = [[op for key, ops in group.items() if key not in both for op in ops] for group in groups]
    return pairs, rest[0], rest[1]


def _changed(a: Op | None, b: Op | None, matched: Matched) -> OpChange:
    first, second = a.estimate if a else Estimate(0.0), b.estimate if b else Estimate(0.0)
    span = batches.difference(first, second, LEVEL) if a and b else None
    keys = [*(a.keys if a else ()), *(b.keys if b else ())]
    return OpChange(
        name=keys[0].name,
        phase=_common(key.phase for key in keys),
        module=_common(key.module for key in keys),
        signature_a=_common(key.signature for key in a.keys) if a else None,
        signature_b=_common(key.signature for key in b.keys) if b else None,
        matched=matched,
        change=_word(first, second, span) if a and b else "new" if b else "gone",
        a_ns=first.value if a else None,
        b_ns=second.value if b else None,
        a_spread_ns=a.spread_ns if a else None,
        b_spread_ns=b.spread_ns if b else None,
        delta_ns=second.value - first.value,
        low_ns=span[0] if span else None,
        high_ns=span[1] if span else None,
        a_calls=a.calls if a else None,
        b_calls=b.calls if b else None,
    )


def _common(words: Iterable[str | None]) -> str | None:
    """Return the one word that all share, else None: their rows were added up."""
    different = set(words)
    return different.pop() if len(different) == 1 else None


def _word(a: Estimate, b: Estimate, span: tuple[float, float] | None) -> Change:
    if abs(b.value - a.value) < WORTH * max(a.value, b.value):
        return "unchanged"
    if span is None:
        return "not_known" if a.value != b.value else "unchanged"
    if span[0] <= 0 <= span[1]:
        return "unchanged"
    return "slower" if span[0] > 0 else "faster"


def aligned_shares(changes: Sequence[OpChange]) -> tuple[float | None, float | None]:
    """Return the share of the op time of A, and of B, whose op was found on the other side; None: it has no op time."""
    both = [change for change in changes if change.matched != "alone"]
    return _share([c.a_ns for c in both], [c.a_ns for c in changes]), _share([c.b_ns for c in both], [c.b_ns for c in changes])


def _share(part: Sequence[float | None], whole: Sequence[float | None]) -> float | None:
    total = sum(ns or 0.0 for ns in whole)
    return sum(ns or 0.0 for ns in part) / total if total > 0 else None
