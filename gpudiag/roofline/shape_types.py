"""The width of elements that a call's own record does not tell, from tensors of the same shape elsewhere in the recording.

The result of a join is taken by one of the next calls of its thread; parameters of an optimizer have the shapes, and the dtype, of the
gradients that autograd accumulated for them. Both hold as far as all tensors of the shape agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

import numpy as np
import polars as pl

from gpudiag.attribution.names import contains, texts
from gpudiag.attribution.nesting import nearest
from gpudiag.model.signature import ITEM_BYTES, Shape, Signature
from gpudiag.roofline.costs.shapes import category
from gpudiag.roofline.results import LOOK_AHEAD, Rows, next_rows

_ACCUMULATE = "AccumulateGrad"
_JOIN = r"^aten::_?(cat|stack|concat|concatenate|chunk_cat)$"


def result_bytes(ops: pl.DataFrame, parsed: Mapping[int, Signature], rows: Rows) -> Rows:
    """Return the bytes per element of the results of the joins `rows` (cat, stack); 0: not known.

    That of the next tensor of their size, else that of all tensors with the shapes of their list.
    """
    signature = ops["signature"].fill_null(-1).to_numpy()
    join = contains(ops["name"], _JOIN).to_numpy()
    parent = ops["parent"].fill_null(-1).to_numpy()
    looking = nearest(parent, join & ~np.append(join, False)[parent])[rows]
    found = np.zeros(len(rows), dtype=np.int64)
    seen: dict[tuple[int, int], int] = {}
    places = np.arange(len(rows))
    for _ in range(2 * LOOK_AHEAD):
        looking = next_rows(ops, looking)
        places, looking = places[looking >= 0], looking[looking >= 0]
        pairs = list(zip(signature[rows[places]].tolist(), signature[looking].tolist(), strict=True))
        for pair in set(pairs) - seen.keys():
            seen[pair] = _as_large(parsed[pair[0]], parsed.get(pair[1]))
        widths = np.array([seen[pair] for pair in pairs], dtype=np.int64)
        found[places] = widths
        places, looking = places[widths == 0], looking[widths == 0]
    tables = (_widths(parsed.values(), floating=False),)
    open_rows = found == 0
    of_signature = {row: _listed_width(parsed[row], tables) for row in set(signature[rows[open_rows]].tolist())}
    found[open_rows] = [of_signature[row] for row in signature[rows[open_rows]].tolist()]
    return found


def _as_large(join: Signature, taker: Signature | None) -> int:
    """Return the bytes per element of the tensor of `taker` that has as many elements as the list of `join` together; 0: none, or two."""
    listed = join.inputs[0].tensors or ()
    elements, rank = sum(prod(shape) for shape in listed), max((len(shape) for shape in listed), default=0)
    inputs = taker.inputs if taker is not None else ()
    found = {item.item_bytes for item in inputs if item.is_tensor and item.numel == elements and len(item.shape) >= max(rank, 1)}
    return found.pop() if len(found) == 1 else 0


def tensor_bytes(ops: pl.DataFrame, parsed: Mapping[int, Signature], rows: Rows) -> Rows:
    """Return the bytes per element of the tensor lists of the calls `rows`; 0 where tensors of their shapes differ, or there are none.

    By the gradients that autograd accumulated, else by all floating tensors of the recording.
    """
    name = texts(ops["name"])
    accumulated = ops.filter(name.str.ends_with(_ACCUMULATE))["signature"].drop_nulls().unique()
    tables = (_widths((parsed[row] for row in accumulated.to_list()), floating=True), _widths(parsed.values(), floating=True))
    signature = ops["signature"].gather(rows).to_list()
    of_signature = {row: _listed_width(parsed[row], tables) for row in set(signature)}
    return np.array([of_signature[row] for row in signature], dtype=np.int64)


def _widths(signatures: Iterable[Signature], *, floating: bool) -> dict[Shape, set[int]]:
    found: dict[Shape, set[int]] = {}
    for signature in signatures:
        for item in signature.inputs:
            if item.is_tensor and item.shape and (category(item.dtype or "") >= 2 or not floating):
                found.setdefault(item.shape, set()).add(ITEM_BYTES[item.dtype or ""])
    return found


def _listed_width(signature: Signature, tables: tuple[dict[Shape, set[int]], ...]) -> int:
    """Return the width of the list's tensors by the first table that knows most of its elements, 0 where none does."""
    listed = signature.inputs[0].tensors or ()
    whole = sum(prod(shape) for shape in listed)
    for table in tables:
        known = [shape for shape in listed if shape in table]
        widths = set().union(*(table[shape] for shape in known))
        if len(widths) == 1 and 2 * sum(prod(shape) for shape in known) >= whole:
            return int(widths.pop())
    return 0
