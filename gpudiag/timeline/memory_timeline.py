"""Memory in use over the recording by what it was for: a few hundred points, each with the place that holds most."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl

from gpudiag.arrays import Ints
from gpudiag.model.memory import MEMORY_CATEGORIES, MemoryTimeline
from gpudiag.timeline.memory_blocks import HeldStorage, Lives, Texts

POINTS = 200
"""As many as can be told apart on a page, and few enough for the JSON of a report."""

MOST_PLACES = 200


def build_timeline(
    lives: Lives, kinds: Texts, places: pl.Series, t_ns: Ints, base: int, known: Sequence[HeldStorage], *, reserved: pl.Series | None,
    starts_ns: Ints,
) -> MemoryTimeline | None:  # fmt: skip
    """Return the memory over time; None where there are no events, or all at one moment.

    `places`: name of the place of each block, null where it is not known; `t_ns`: of each event; `base`: bytes in use at the start, of
    which `known` are of owners; `reserved`: bytes of each event; `starts_ns`: of the steps.
    """
    if not len(t_ns) or t_ns[-1] <= t_ns[0]:
        return None
    at_ns = np.maximum.accumulate(t_ns)
    in_use = lives.in_use()
    chosen = _choose_events(at_ns, in_use)
    if in_use.max() <= 0:  # most was in use before the first event
        chosen = np.append(-1, chosen)
    recorded = lives.born >= 0
    held = {kind: np.zeros(len(chosen), dtype=np.int64) for kind in MEMORY_CATEGORIES}
    largest = {kind: np.full(len(chosen), -1, dtype=np.int64) for kind in MEMORY_CATEGORIES}
    names: dict[str, int] = {}
    ids = places.fill_null("").cast(pl.Categorical).to_physical().to_numpy()
    seen = set(kinds[recorded].tolist())
    for kind in (kind for kind in MEMORY_CATEGORIES if kind in seen):
        rows = np.flatnonzero(recorded & (kinds == kind))
        held[kind] += _measure_in_use(lives, rows, chosen)
        largest[kind] = _find_largest(lives, rows, ids, places, chosen, names)
    owned = sum(item.bytes for item in known)
    for item in known:
        held[item.owner.kind] += item.bytes
    gone = np.sort(lives.died[~recorded])
    sizes = np.append(0, np.cumsum(lives.size[~recorded][np.argsort(lives.died[~recorded], kind="stable")]))
    held["before_recording"] += np.maximum(0, base - owned - sizes[np.searchsorted(gone, chosen, side="right")])
    inside = starts_ns[(starts_ns >= t_ns[0]) & (starts_ns <= t_ns[-1])]
    total = sum(held.values())
    present = [kind for kind in MEMORY_CATEGORIES if held[kind].any()]
    told = None if reserved is None or reserved.null_count() == len(reserved) else reserved.fill_null(strategy="forward").fill_null(0)
    shown = np.maximum(chosen, 0)
    return MemoryTimeline(
        t_ns=tuple(at_ns[shown].tolist()),
        by_category={kind: tuple(held[kind].tolist()) for kind in present},
        peak=int(np.argmax(total)),
        places=tuple(names),
        largest={kind: tuple(largest[kind].tolist()) for kind in present if (largest[kind] >= 0).any()},
        reserved_bytes=() if told is None else tuple(told.to_numpy()[shown].tolist()),
        step_starts_ns=tuple(inside.tolist()),
    )


def _choose_events(at_ns: Ints, in_use: Ints) -> Ints:
    """Return the event with most in use of each of POINTS equal stretches of time that has any, and the last one before a stretch without:
    what was held then holds on."""
    edges = np.linspace(int(at_ns[0]), int(at_ns[-1]), POINTS + 1)[1:-1]
    stretch = np.searchsorted(edges, at_ns, side="right")
    order = np.lexsort((-in_use, stretch))
    highest = order[np.append(True, np.diff(stretch[order]) > 0)]
    before_gaps = np.flatnonzero(np.append(np.diff(stretch) > 1, True))
    found: Ints = np.unique(np.append(highest, before_gaps))
    return found


def _measure_in_use(lives: Lives, rows: Ints, events: Ints) -> Ints:
    """Return the bytes of the blocks `rows`, all of them allocated in the recording, that are in use after each of `events`."""
    total = np.zeros(len(events), dtype=np.int64)
    for moments, sign in ((lives.born[rows], 1), (lives.died[rows], -1)):
        order = np.argsort(moments, kind="stable")
        sums = np.append(0, np.cumsum(lives.size[rows][order]))
        total += sign * sums[np.searchsorted(moments[order], events, side="right")]
    return total


def _find_largest(lives: Lives, rows: Ints, ids: Ints, places: pl.Series, events: Ints, names: dict[str, int]) -> Ints:
    """Return which place holds most of the blocks `rows` after each of `events`; adds its name to `names`."""
    order = rows[np.argsort(ids[rows], kind="stable")]
    groups = np.split(order, np.flatnonzero(np.diff(ids[order])) + 1) if len(order) else []
    sized = sorted(((int(lives.size[group].sum()), group) for group in groups), key=lambda pair: (-pair[0], pair[1][0]))[:MOST_PLACES]
    most, found = np.zeros(len(events), dtype=np.int64), np.full(len(events), -1, dtype=np.int64)
    for _, group in sized:
        name = places[int(group[0])]
        held = _measure_in_use(lives, group, events)
        more = held > most
        if name is None or not more.any():
            continue
        most[more] = held[more]
        found[more] = names.setdefault(str(name), len(names))
    return found
