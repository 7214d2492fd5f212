"""Host threads as chains of nodes: what holds where a loader's generator also trains, and where an op is a collective."""

from __future__ import annotations

import numpy as np

from gpudiag.model.graph import NODE_KINDS, encode_node_kind
from gpudiag.timeline.graph_host import Calls, OpPieces, build_chain

COVERED = np.array([[0, 1000]], dtype=np.int64)


def _ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def _calls(*spans: tuple[int, int]) -> Calls:
    start, end = (_ints(*column) for column in (zip(*spans, strict=True) if spans else ((), ())))
    nothing = np.zeros(len(start), dtype=np.int64)
    return Calls(nothing, start, end, start, nothing + encode_node_kind("launch"), np.arange(len(start)), nothing, nothing - 1)


def _told(calls: Calls, pieces: OpPieces) -> list[tuple[str, int, int]]:
    """Return (kind, start, end) of the nodes of a thread whose loader holds it throughout; neighbours of one kind together."""
    nodes = build_chain(0, COVERED, calls, pieces, {(0, "data"): COVERED})
    found: list[tuple[str, int, int]] = []
    for kind, start, end in zip(nodes.kind.tolist(), nodes.start.tolist(), nodes.end.tolist(), strict=True):
        if found and found[-1][0] == NODE_KINDS[kind]:
            found[-1] = (NODE_KINDS[kind], found[-1][1], end)
        else:
            found.append((NODE_KINDS[kind], start, end))
    return found


def test_training_within_the_generator_of_a_loader_is_no_wait_for_data() -> None:
    """On a CPU op 0 is a forward op, op 1 collates a batch, and nothing else is known of the time between."""
    nothing = _ints(0, 0)
    kinds = nothing + encode_node_kind("host")
    pieces = OpPieces(nothing, _ints(100, 400), _ints(300, 500), _ints(0, 1), _ints(0, 1), kinds, _ints(1, 0))
    assert _told(_calls(), pieces) == [("data", 0, 100), ("host", 100, 300), ("data", 300, 1000)]


def test_launches_of_the_training_stay_launches() -> None:
    nothing = _ints(0)
    pieces = OpPieces(nothing, _ints(100), _ints(300), _ints(0), _ints(-1), nothing + encode_node_kind("host"), _ints(1))
    expected = [("data", 0, 100), ("host", 100, 150), ("launch", 150, 160), ("host", 160, 300), ("data", 300, 1000)]
    assert _told(_calls((150, 160)), pieces) == expected


def test_a_collective_that_the_host_runs_is_communication() -> None:
    nothing = _ints(0)
    pieces = OpPieces(nothing, _ints(100), _ints(300), _ints(0), _ints(5), nothing + encode_node_kind("communication"), _ints(0))
    nodes = build_chain(0, COVERED, _calls(), pieces, {})
    assert [NODE_KINDS[kind] for kind in nodes.kind.tolist()] == ["host", "communication", "host"]
    assert nodes.kernel.tolist() == [-1, 5, -1]
