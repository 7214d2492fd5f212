"""Ops of two runs: aligned with their like, and how each changed beside what it varies from step to step."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from gpudiag.comparison import batch_means
from gpudiag.comparison.batch_means import Estimate
from gpudiag.comparison.device_time import HIDDEN_BELOW_WORK
from gpudiag.model.comparison import Change, Matched, Measured, OpChange, OpKey
from gpudiag.model.report import OpRow
from gpudiag.roofline.op_table import BEFORE_WINDOW

OP_LEVEL = 0.99
"""Of the interval of one op: with hundreds of ops, at 95 % dozens would be called changed by chance."""

LEAST_CHANGE = 0.01
"""A change of an op below this share of its time is none: no one acts on it."""

EQUAL_WORK = 0.02
"""FLOP, bytes and calls that differ by no more are the same: the last batch of an epoch may be smaller."""

SAME_SHARE = 0.5
"""Share of the ops, by time or by number, that need their like on the other side in recordings of one program. Other attention, another
batch or autocast leave most ops and their calls as they are; another model leaves next to none."""

_COMPILED = ("triton_", "## Call CompiledFxGraph")

_OWN_NAMES = re.compile(r"^(triton_.*?)_\d+$|^(## Call CompiledFxGraph) \w+.*", re.DOTALL)
"""Inductor numbers the kernels of a compilation and names a graph by a hash: both change where anything else in the code does."""


class AlignedOp(msgspec.Struct, frozen=True):
    """Rows of an op table that stand together for one op; times, calls and work are those of a step."""

    keys: tuple[OpKey, ...]
    ns: float
    calls: float
    by_step: tuple[int, ...] | None
    """Kernel time in each step; None: not known."""
    device_ns: tuple[float, ...] | None = None
    """Its share of the device's time in each step (Measured.device_ns); None: not known."""
    flops: float | None = None
    bytes: float | None = None
    recompute_ns: float = 0.0
    types: frozenset[str] = frozenset()
    """Element types of its first tensors."""
    matrix: bool = False
    """Whether it does matrix work."""
    where: str | None = None
    """'file.py(line): function' of the call site that costs most."""
    hidden: bool = False
    """Whether it is a message or copy, which counts where no work hides it."""

    @property
    def estimate(self) -> Estimate:
        """Return the time a step with its error."""
        found = batch_means.estimate_by_batches(self.by_step, np.mean) if self.by_step else None
        return found or Estimate(self.ns)

    @property
    def spread_ns(self) -> float | None:
        """Return the standard deviation from step to step; None: not known."""
        return float(np.std(self.by_step, ddof=1)) if self.by_step is not None and len(self.by_step) > 1 else None


class OpPair(NamedTuple):
    """An op of both runs; None: it is not there."""

    a: AlignedOp | None
    b: AlignedOp | None
    matched: Matched


def collect_ops(side: Measured) -> dict[OpKey, AlignedOp]:
    """Return the ops launched in the analysed steps of a run; rows with one key (other strides, say) are one."""
    steps = max(side.report.steps.count, 1)
    rows: defaultdict[OpKey, list[OpRow]] = defaultdict(list)
    for row in side.report.ops:
        if row.phase != BEFORE_WINDOW:
            rows[OpKey(row.name, row.phase, row.module, row.signature)].append(row)
    return {
        key: AlignedOp(
            (key,),
            sum(row.kernel_ns for row in same) / steps,
            sum(row.count for row in same) / steps,
            side.ops.get(key),
            side.device_ns.get(key, (0.0,) * len(side.analysed_ns)) if side.device_ns else None,
            _sum_known(None if row.flops is None else row.flops / steps for row in same),
            _sum_known(None if row.bytes is None else row.bytes / steps for row in same),
            sum(row.recompute_ns for row in same) / steps,
            frozenset(row.dtype for row in same if row.dtype),
            any(row.engine for row in same),
            max(same, key=lambda row: row.kernel_ns).where,
            all(row.bound in HIDDEN_BELOW_WORK for row in same),
        )
        for key, same in rows.items()
    }


def join_ops(ops: Sequence[AlignedOp]) -> AlignedOp:
    """Return several ops as one: times are added, step by step where that is known of all."""
    if len(ops) == 1:
        return ops[0]
    return AlignedOp(
        tuple(dict.fromkeys(key for op in ops for key in op.keys)),
        sum(op.ns for op in ops),
        sum(op.calls for op in ops),
        sum_by_step([op.by_step for op in ops]),
        sum_by_step([op.device_ns for op in ops]),
        _sum_known(op.flops for op in ops),
        _sum_known(op.bytes for op in ops),
        sum(op.recompute_ns for op in ops),
        frozenset().union(*(op.types for op in ops)),
        any(op.matrix for op in ops),
        max(ops, key=lambda op: op.ns).where,
        all(op.hidden for op in ops),
    )


def sum_by_step(values: Sequence[tuple[Any, ...] | None]) -> tuple[Any, ...] | None:
    """Return the sum of each step; None where it is not known of all."""
    known = [one for one in values if one is not None]
    return tuple(map(sum, zip(*known, strict=True))) if known and len(known) == len(values) else None


def _sum_known(values: Iterable[float | None]) -> float | None:
    found = list(values)
    known = [value for value in found if value is not None]
    return sum(known) if len(known) == len(found) else None


def pair_ops(a: Measured, b: Measured) -> list[OpPair]:
    """Return every op of both runs once.

    Ops with the same name, phase, module and signature are one; of what is left those with other shapes, then those of the same name.
    What only one of the two recordings tells (modules, phases, shapes) tells no ops apart.
    """
    of_a, of_b = collect_ops(a), collect_ops(b)
    for field in ("phase", "module", "signature"):
        known = [any(getattr(key, field) is not None for key in ops) for ops in (of_a, of_b)]
        if known[0] != known[1]:
            of_a, of_b = _drop_field(of_a, field), _drop_field(of_b, field)
    left, right = list(of_a.values()), list(of_b.values())
    ways: tuple[tuple[Matched, Callable[[OpKey], Hashable]], ...] = (
        ("exact", lambda key: key),
        ("shapes", lambda key: key[:3]),
        ("name", lambda key: drop_own_name(key.name)),
    )
    found = []
    for matched, of in ways:  # of what is left on both sides; several of one side count together
        groups: tuple[defaultdict[Hashable, list[AlignedOp]], ...] = (defaultdict(list), defaultdict(list))
        for ops, group in zip((left, right), groups, strict=True):
            for op in ops:
                group[of(op.keys[0])].append(op)
        both = groups[0].keys() & groups[1].keys()
        found += [OpPair(join_ops(ops), join_ops(groups[1][key]), matched) for key, ops in groups[0].items() if key in both]
        left, right = ([op for key, ops in group.items() if key not in both for op in ops] for group in groups)
    return [*found, *(OpPair(op, None, "alone") for op in left), *(OpPair(None, op, "alone") for op in right)]


def drop_own_name(name: str) -> str:
    """Return the name of an op or a kernel without what is its own in each compilation."""
    return _OWN_NAMES.sub(r"\1\2", name)


def _drop_field(ops: dict[OpKey, AlignedOp], field: str) -> dict[OpKey, AlignedOp]:
    groups: defaultdict[OpKey, list[AlignedOp]] = defaultdict(list)
    for key, op in ops.items():
        left: dict[str, Any] = {field: None}
        groups[key._replace(**left)].append(op)
    return {key: msgspec.structs.replace(join_ops(group), keys=(key,)) for key, group in groups.items()}


def list_op_changes(pairs: Iterable[OpPair]) -> list[OpChange]:
    """Return how each op changed, the largest difference first."""
    found = [_build_change(*pair) for pair in pairs]
    return sorted(found, key=lambda change: (-abs(change.delta_ns), change.name, str(change.phase)))


def _build_change(a: AlignedOp | None, b: AlignedOp | None, matched: Matched) -> OpChange:
    first, second = a.estimate if a else Estimate(0.0), b.estimate if b else Estimate(0.0)
    span = batch_means.estimate_difference(first, second, OP_LEVEL) if a and b else None
    keys = [*(a.keys if a else ()), *(b.keys if b else ())]
    change: Change = "unchanged"
    if a is None or b is None:
        change = "new" if b else "gone"
    elif abs(second.value - first.value) >= LEAST_CHANGE * max(first.value, second.value):
        if span is None:
            change = "not_known" if first.value != second.value else "unchanged"
        elif not span[0] <= 0 <= span[1]:
            change = "slower" if span[0] > 0 else "faster"
    return OpChange(
        name=keys[0].name,
        phase=find_common_word(key.phase for key in keys),
        module=find_common_word(key.module for key in keys),
        signature_a=find_common_word(key.signature for key in a.keys) if a else None,
        signature_b=find_common_word(key.signature for key in b.keys) if b else None,
        matched=matched,
        change=change,
        a_ns=first.value if a else None,
        b_ns=second.value if b else None,
        a_spread_ns=a.spread_ns if a else None,
        b_spread_ns=b.spread_ns if b else None,
        delta_ns=second.value - first.value,
        low_ns=span[0] if span else None,
        high_ns=span[1] if span else None,
        a_calls=a.calls if a else None,
        b_calls=b.calls if b else None,
        a_flops=a.flops if a else None,
        b_flops=b.flops if b else None,
        a_bytes=a.bytes if a else None,
        b_bytes=b.bytes if b else None,
    )


def find_common_word(words: Iterable[str | None]) -> str | None:
    """Return the word where all are the same, else None."""
    different = set(words)
    return different.pop() if len(different) == 1 else None


def compare_work(a: AlignedOp, b: AlignedOp) -> float | None:
    """Return by how much B has more FLOP (of what has none, bytes) as a share, 0.0 for as much; None: not known."""
    for old, new in ((a.flops, b.flops), (a.bytes, b.bytes)):
        if old is not None and new is not None and (old or new):
            return compare_amounts(old, new)
    return None


def compare_amounts(old: float, new: float) -> float:
    """Return by how much the new one is more, as a share; 0.0: no more than EQUAL_WORK."""
    if abs(new - old) <= EQUAL_WORK * max(old, new):
        return 0.0
    return new / old - 1 if old else 1.0


def judge_same_program(a: Measured, b: Measured, pairs: Sequence[OpPair]) -> bool | None:
    """Return whether most ops have their like on the other side; None: there are none, or one side is compiled, or replays graphs."""
    sides = [[op for op in ops if op is not None] for ops in ([pair.a for pair in pairs], [pair.b for pair in pairs])]
    compiled = [any(op.keys[0].name.startswith(_COMPILED) for op in ops) for ops in sides]
    if not all(sides) or compiled[0] != compiled[1] or any((side.report.trust.replay_share or 0.0) > SAME_SHARE for side in (a, b)):
        return None
    alike = [(old, new) for old, new, matched in pairs if old is not None and new is not None and _is_like(old, new, matched)]
    alone = sum(pair.matched == "alone" for pair in pairs)
    rows = len(alike) / (len(pairs) - alone / 2)  # an op that is alone is half a pair
    known = (sum(old.ns for old, _ in alike), sum(new.ns for _, new in alike))
    times = [ns / max(sum(op.ns for op in ops), 1.0) for ns, ops in zip(known, sides, strict=True)]
    return max(rows, min(times)) >= SAME_SHARE


def _is_like(a: AlignedOp, b: AlignedOp, matched: Matched) -> bool:
    """Return whether ops have the same shapes, or are called as often."""
    return (matched == "exact" and a.keys[0].signature is not None) or not compare_amounts(a.calls, b.calls)
