"""The period of a sequence of names: where a training step begins when nothing but its kernels (CPU: ops) was recorded.

A name that occurs once a step recurs at the distance of a step; steps may differ a little in length (logging, dynamic shapes), so the
sequence is cut where such a name occurs and the pieces are compared, rather than the sequence with itself at a fixed lag.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

MIN_PERIODS = 3
MIN_COVER = 0.8
"""Share of the sequence that the repetitions span, and of the pieces that must be alike."""
MIN_EQUAL = 0.95
"""Share of the entries of a piece that the piece before it has too."""
MIN_RECURRING = 0.8
"""Share of the distinct names (of those that occur MIN_PERIODS times) that occur in most pieces. A layer inside a step fails: the
embedding, the loss, the optimizer recur too, but not in each layer. A print every tenth step passes: it is few names of many."""

REGULAR = 0.2
"""Distance of a gap from the median gap, as a share, up to which a name counts as regular."""

_SHORTEST = 3
"""Entries of the shortest period: two names in turn are no step."""
_LAYERS = 4
"""A period that holds this many repetitions of a shorter one is a step of layers and no layer."""
_CLUSTERS = 12
"""Lengths that are tried; more occur only in sequences without a period."""
_ANCHORS = 64
_NONE: Ids = np.empty(0, dtype=np.int64)
_RUN = 4
"""Where no single name occurs once a step, runs of this many names are tried."""


class Period(NamedTuple):
    """Where the period begins: positions in the sequence, the median length, and how alike the pieces are."""

    cuts: Ids
    length: int
    equal_share: float
    within: int
    """How many times a shorter period recurs inside this one; 1: none was found."""


class _Names(NamedTuple):
    """Names that recur at regular distances: their code, how often, and the median distance."""

    code: Ids
    calls: Ids
    distance: npt.NDArray[np.float64]


def periods(codes: Ids, gap_ns: Ids) -> list[Period]:
    """Return the periods of `codes` (small numbers, one per entry), shortest first; each passes all the thresholds of this module.

    `gap_ns`: time before each entry; of the names that could begin a piece the one after the longest pause is taken. O(n log n).
    """
    for sequence in (codes, _runs(codes)):
        found = _periods(codes, sequence, gap_ns)
        if found:
            return found
    return []


def is_step_of_layers(period: Period) -> bool:
    """Return whether the period holds so many repetitions of a shorter one that it can be no layer itself."""
    return period.within >= _LAYERS


def _periods(codes: Ids, sequence: Ids, gap_ns: Ids) -> list[Period]:
    order = np.argsort(sequence, kind="stable")
    names = _regular(sequence, order)
    found, shorter = list[Period](), 0
    for chosen in _clusters(names):
        cuts = _cuts(sequence, order, names.code[chosen], gap_ns)
        length = int(np.median(np.diff(cuts)))
        if length < _SHORTEST:
            continue
        pieces = _pieces(codes, cuts)
        equal = _equal_share(pieces, np.diff(cuts))
        if equal is None:
            continue
        if _recurring_share(pieces, codes) >= MIN_RECURRING:
            found.append(Period(cuts, length, equal, length // shorter if shorter else 1))
        else:
            shorter = shorter or length
    return found


def _runs(codes: Ids) -> Ids:
    """Return a code for each run of _RUN names, by where it begins."""
    if len(codes) < _RUN:
        return codes
    key = np.zeros(len(codes), dtype=np.uint64)
    padded = np.concatenate((codes, np.full(_RUN - 1, -1)))
    for step in range(_RUN):  # a polynomial hash modulo 2**64: that two runs collide only costs a candidate
        key = key * np.uint64(0x9E3779B97F4A7C15) + padded[step : step + len(codes)].astype(np.uint64) + np.uint64(1)
    result: Ids = np.unique(key, return_inverse=True)[1].astype(np.int64)
    return result


def _regular(sequence: Ids, order: Ids) -> _Names:
    """Return the names that recur at nearly the same distance over most of the sequence. `order`: a stable argsort of it."""
    first = np.flatnonzero(np.diff(sequence[order], prepend=-1))
    counts = np.diff(first, append=len(order))
    often = counts >= MIN_PERIODS
    gaps = np.diff(order, append=0)
    name = np.repeat(np.arange(len(first)), counts)
    inner = np.ones(len(order), dtype=bool)
    inner[first + counts - 1] = False  # the last occurrence has no gap after it
    inner &= often[name]
    gaps, name = gaps[inner], name[inner]
    if not len(gaps):
        return _Names(_NONE, _NONE, np.empty(0))
    middle = gaps[np.lexsort((gaps, name))]
    number = np.unique(name)
    begins = np.searchsorted(name, number)
    median = middle[begins + (counts[number] - 2) // 2].astype(np.float64)
    near = np.abs(gaps - np.repeat(median, counts[number] - 1)) <= REGULAR * np.repeat(median, counts[number] - 1)
    steady = np.add.reduceat(near, begins) >= MIN_COVER * (counts[number] - 1)
    reach = order[first[number] + counts[number] - 1] - order[first[number]] + median
    kept = steady & (reach >= MIN_COVER * len(order))
    return _Names(sequence[order[first[number[kept]]]], counts[number[kept]], median[kept])


def _clusters(names: _Names) -> list[Ids]:
    """Return the rows of `names` in groups of like distance, shortest distance first; of too many groups the largest."""
    if not len(names.code):
        return []
    order = np.argsort(names.distance, kind="stable")
    ratio = names.distance[order][1:] / names.distance[order][:-1]
    groups = np.split(order, np.flatnonzero(ratio > 1 + REGULAR / 2) + 1)
    kept = sorted(range(len(groups)), key=lambda row: -len(groups[row]))[:_CLUSTERS]
    return [groups[row] for row in sorted(kept)]


def _cuts(sequence: Ids, order: Ids, codes: Ids, gap_ns: Ids) -> Ids:
    """Return the occurrences of that one of `codes` which comes after the longest pauses."""
    best, longest = np.empty(0, dtype=np.int64), -1.0
    sorted_codes = sequence[order]
    for code in codes[:_ANCHORS].tolist():
        begin, end = np.searchsorted(sorted_codes, [code, code + 1])
        pause = float(np.median(gap_ns[order[begin:end]]))
        if pause > longest:
            best, longest = order[begin:end], pause
    return best


class _Pieces(NamedTuple):
    """How often each name occurs in each whole piece between the cuts, sorted by piece and code."""

    number: int
    piece: Ids
    code: Ids
    calls: Ids


def _pieces(codes: Ids, cuts: Ids) -> _Pieces:
    inside = codes[cuts[0] : cuts[-1]]
    piece = np.repeat(np.arange(len(cuts) - 1), np.diff(cuts))
    width = int(codes.max()) + 1
    key, count = np.unique(piece * width + inside, return_counts=True)
    return _Pieces(len(cuts) - 1, key // width, key % width, count)


def _equal_share(pieces: _Pieces, lengths: Ids) -> float | None:
    """Return the mean share of entries that a piece has in common with the one before; None where too few pieces are alike."""
    width = int(pieces.code.max()) + 1
    key = pieces.piece * width + pieces.code
    before = np.minimum(np.searchsorted(key, key - width), len(key) - 1)
    common = np.where(key[before] == key - width, np.minimum(pieces.calls, pieces.calls[before]), 0)
    sums = np.bincount(pieces.piece, common, pieces.number)[1:]
    share = sums / np.maximum(lengths[1:], lengths[:-1])
    alike = share >= MIN_EQUAL
    return float(share[alike].mean()) if len(share) and alike.mean() >= MIN_COVER else None


def _recurring_share(pieces: _Pieces, codes: Ids) -> float:
    """Return the share of the distinct names, of those that occur often enough to tell, which occur in most pieces."""
    often = np.bincount(codes) >= MIN_PERIODS
    held = np.bincount(pieces.code, minlength=len(often))
    return float((held[often] >= MIN_COVER * pieces.number).mean())
