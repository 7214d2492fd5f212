"""The order in which a replay works off nodes: made once for a graph, used by every replay of it with other times."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpudiag.model.graph import Ints

Bools = npt.NDArray[np.bool_]
Places = npt.NDArray[np.int32]

ORIGIN = -1
"""As the source of an edge: the begin of the step, which is over at origin_ns."""

AT_ONCE = 65_536
"""Nodes that stand as Python numbers at a time: they take ten times the memory of a column."""


class Order(NamedTuple):
    """Places in the order of the nodes, 0 being the origin. A place takes two others at most; helpers take what a node has more.

    first, second: place that it takes; first_edge, second_edge: edge by which it does, -1: none (it is free, and has no delay).
    """

    place: Places
    """Of each node."""
    first: Places
    first_edge: Places
    second: Places
    second_edge: Places


def order_of(src: Ints, dst: Ints, count: int) -> Order:
    """Return the order of `count` nodes (topological: src < dst for every edge; src may be ORIGIN)."""
    edges = np.argsort(dst, kind="stable").astype(np.int32)
    src, dst = src[edges], dst[edges]
    many = np.bincount(dst, minlength=count)
    helpers = np.maximum(many - 2, 0)
    place = np.append(np.arange(count) + np.cumsum(helpers) + 1, 0).astype(np.int32)  # the last one: that of ORIGIN
    rank = np.arange(len(dst)) - (np.cumsum(many) - many)[dst]
    # helper k of a node takes the helper before it (k = 0: edge 0) and edge k + 1; the node takes the last helper and the last edge
    at = place[dst] - helpers[dst] + np.maximum(rank - 1, 0)
    size = count + int(helpers.sum()) + 1
    found = Order(place[:count], *(np.full(size, value, dtype=np.int32) for value in (0, -1, 0, -1)))
    head, chained = rank == 0, at[rank > 1]
    found.first[at[head]], found.first_edge[at[head]] = place[src[head]], edges[head]
    found.second[at[~head]], found.second_edge[at[~head]] = place[src[~head]], edges[~head]
    found.first[chained] = chained - 1
    return found


def ends(order: Order, duration: Ints, delay: Ints, dropped: Bools, origin_ns: int) -> Ints:
    """Return the end of every node in ns: it begins when the edges that are not `dropped` are over, at `origin_ns` at the earliest."""
    delay, dropped = np.append(np.where(dropped, 0, delay), 0), np.append(dropped, False)  # the last ones: those of no edge
    held = np.zeros(len(order.first), dtype=np.int64)
    held[order.place] = duration
    found = [origin_ns]
    add = found.append
    for begin in range(1, len(held), AT_ONCE):
        part = slice(begin, begin + AT_ONCE)
        taken = [
            column
            for places, edges in ((order.first[part], order.first_edge[part]), (order.second[part], order.second_edge[part]))
            for column in (np.where(dropped[edges], 0, places).tolist(), delay[edges].tolist())
        ]
        for one, one_delay, two, two_delay, own in zip(*taken, held[part].tolist(), strict=True):
            t, other = found[one] + one_delay, found[two] + two_delay
            add((t if t > other else other) + own)
    result: Ints = np.array(found, dtype=np.int64)[order.place]
    return result
