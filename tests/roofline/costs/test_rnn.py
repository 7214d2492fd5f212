"""Recurrent layers: 2*T*B*g*H*(I+H) a layer and direction, on signatures that torch records and on cuDNN's schema."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torchcalls import record_all

from gpudiag.model.ops import Cost, Signature
from gpudiag.roofline.costs import estimate_cost
from gpudiag.roofline.costs.registry import BACKWARD_FORMULAS

CostOf = Callable[..., Cost]
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def counted(kind: str, steps: int, batch: int, features: int, hidden: int, layers: int, both: bool) -> int:
    """Return the FLOPs of a forward by op_costs section 11."""
    directions = 2 if both else 1
    inputs = [features] + [directions * hidden] * (layers - 1)
    return sum(2 * steps * batch * GATES[kind] * hidden * (size + hidden) * directions for size in inputs)


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize(("layers", "both"), [(1, False), (2, True)])
def test_the_composite_op_has_the_flops_of_its_layers(kind: str, layers: int, both: bool, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    module = getattr(torch.nn, kind)(8, 16, layers, bidirectional=both)
    calls = record_all(lambda: module(torch.randn(5, 3, 8)), tmp_path)
    found = next(estimate_cost(name, signature) for name, signature in calls if name in ("aten::lstm", "aten::gru", "aten::rnn_tanh"))
    assert isinstance(found, Cost), found
    assert found.matrix_flops == counted(kind, 5, 3, 8, 16, layers, both)
    weights = sum(item.numel() for item in module.parameters())
    state = layers * (2 if both else 1) * 3 * 16 * (2 if kind == "LSTM" else 1)
    assert found.bytes == 4 * (5 * 3 * 8 + weights + 5 * 3 * 16 * (2 if both else 1) + 2 * state)


def test_a_packed_sequence_counts_its_own_lengths(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    module = torch.nn.LSTM(8, 16)
    packed = torch.nn.utils.rnn.pack_padded_sequence(torch.randn(5, 3, 8), [5, 3, 1])
    calls = record_all(lambda: module(packed), tmp_path)
    found = next(estimate_cost(name, signature) for name, signature in calls if name == "aten::lstm")
    assert isinstance(found, Cost), found
    assert found.matrix_flops == counted("LSTM", 1, 5 + 3 + 1, 8, 16, 1, both=False)


def test_onednn_layers_add_up_to_the_whole(tmp_path: Path) -> None:
    """One call for each layer and direction; the backward has twice the FLOPs."""
    torch = pytest.importorskip("torch")
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch was built without oneDNN")
    module, x = torch.nn.LSTM(8, 16, 2, bidirectional=True), torch.randn(5, 3, 8, requires_grad=True)
    calls = record_all(lambda: module(x)[0].sum().backward(), tmp_path)
    sums: dict[str, int] = {}
    for name, signature in calls:
        found = estimate_cost(name, signature)
        if "mkldnn_rnn" in name and isinstance(found, Cost):
            sums[name] = sums.get(name, 0) + found.matrix_flops
    if not sums:
        pytest.skip("this CPU runs the LSTM without oneDNN's layer")
    forward = counted("LSTM", 5, 3, 8, 16, 2, both=True)
    assert sums == {"aten::mkldnn_rnn_layer": forward, "aten::mkldnn_rnn_layer_backward": 2 * forward}


def cudnn(dtype: str, steps: int, batch: int, features: int, hidden: int, gates: int) -> list[Any]:
    """Return the arguments of aten::_cudnn_rnn: one layer, one direction, no biases."""
    weights = [(gates * hidden, features), (gates * hidden, hidden)]
    state = (dtype, (1, batch, hidden))
    rest = (2 if gates == 4 else 3, hidden, 0, 1, False, 0.0, True, False, [], None)
    return [(dtype, (steps, batch, features)), weights, 2, None, state, state if gates == 4 else None, *rest]


def test_cudnn_backward_is_twice_the_forward_and_follows_its_mask(cost: CostOf, recorded: Callable[..., Signature]) -> None:
    arguments = cudnn("fp16", 64, 64, 1024, 1024, 4)
    forward = cost("aten::_cudnn_rnn", *arguments)
    assert forward.matrix_flops == 68_719_476_736
    weights, state, output, buffer = arguments[1], arguments[4], ("fp16", (64, 64, 1024)), ("fp16", (8 * 1024 * 1024,))
    head = [arguments[0], weights, 2, buffer, state, state, output, output, None, None, *arguments[6:], ("bool", (10,))]
    both = cost("aten::_cudnn_rnn_backward", *head, [True, False, False, True])
    frozen = cost("aten::_cudnn_rnn_backward", *head, [True, False, False, False])
    assert (both.matrix_flops, frozen.matrix_flops) == (2 * forward.matrix_flops, forward.matrix_flops)
    assert both.bytes - frozen.bytes == 2 * 8 * 1024 * 1024
    paired = BACKWARD_FORMULAS["aten::_cudnn_rnn"](recorded(*arguments))
    assert (paired.matrix_flops, paired.provenance) == (2 * forward.matrix_flops, "derived")


def test_a_projection_shrinks_the_recurrent_matrix(cost: CostOf) -> None:
    arguments = cudnn("fp32", 7, 3, 8, 16, 4)
    arguments[1] = [(64, 8), (64, 4), (4, 16)]
    found = cost("aten::_cudnn_rnn", *arguments)
    assert found.matrix_flops == 2 * 7 * 3 * (64 * 8 + 64 * 4 + 4 * 16)
    assert found.bytes == 4 * (7 * 3 * 8 + 64 * 8 + 64 * 4 + 4 * 16 + 7 * 3 * 4 + 4 * 3 * 16)


def test_fused_cells_move_gates_states_and_workspace(cost: CostOf) -> None:
    gates, state = ("fp32", (6, 64)), ("fp32", (6, 16))
    lstm = cost("aten::_thnn_fused_lstm_cell", gates, gates, state, None, None)
    assert lstm.bytes == 4 * 6 * (64 + 64 + 16 + 16 + 16 + 64)
    back = cost("aten::_thnn_fused_lstm_cell_backward_impl", state, state, state, state, gates, True)
    assert back.bytes == 4 * 6 * (4 * 16 + 64 + 64 + 16)
    gru = cost("aten::_thnn_fused_gru_cell", ("fp32", (6, 48)), ("fp32", (6, 48)), state, None, None)
    assert gru.bytes == 4 * 6 * (48 + 48 + 16 + 16 + 80)
    back = cost("aten::_thnn_fused_gru_cell_backward", state, ("fp32", (6, 80)), True)
    assert back.bytes == 4 * 6 * (16 + 80 + 48 + 48 + 16)
