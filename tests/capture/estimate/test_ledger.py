"""Sums over storages that come and go, by hand."""

from __future__ import annotations

from gpudiag.capture.estimate.ledger import ACTIVATION, HOST, Ledger


def _step(block_bytes: int) -> Ledger:
    """A weight of 100; forward: 30 that are freed at once, 40 that stay; backward: a gradient of 100, the 40 go; step: 7 on the host."""
    ledger = Ledger(block_bytes)
    ledger.make(100, "parameters", "", "")
    ledger.begin("forward")
    short = ledger.make(30, ACTIVATION, "layers.0.linear", "aten::mm")
    ledger.make(40, ACTIVATION, "layers.1.linear", "aten::relu")
    ledger.free(short)
    kept = ledger.blocks[-1]
    ledger.begin("backward")
    ledger.make(100, "gradients", "", "aten::t")
    ledger.free(kept)
    ledger.begin("optimizer")
    ledger.make(7, HOST, "", "aten::zeros")
    ledger.closed = True
    ledger.free(ledger.blocks[0])
    return ledger


def test_peaks_of_the_passes() -> None:
    """Forward 100 + 30 + 40; backward 100 + 40 + 100; the step begins with 200, and the host's 7 do not count."""
    assert [peak.bytes for peak in _step(1).peaks()] == [100, 170, 240, 200]


def test_peaks_in_blocks() -> None:
    """In blocks of 64: 128, 128 + 64 + 64, 128 + 64 + 128, 256."""
    assert [peak.bytes for peak in _step(64).peaks()] == [128, 256, 320, 256]


def test_what_is_held_for_what() -> None:
    ledger = _step(1)
    forward, backward = ledger.peaks()[1:3]
    assert ledger.by_purpose(forward.position) == {"parameters": 100, "activations": 40, "temporary": 30}
    assert ledger.by_purpose(backward.position) == {"parameters": 100, "gradients": 100, "activations": 40}
    assert ledger.events[backward.position].op == "aten::t"
    assert ledger.total("activations", ledger.last("forward")) == 40
    assert ledger.total("gradients", ledger.last("backward")) == 100
    assert ledger.total("activations", ledger.last("backward")) == 0


def test_what_is_freed_after_the_steps_does_not_count() -> None:
    ledger = _step(1)
    assert ledger.total("parameters", ledger.position) == 100


def test_layers_of_one_name_stand_together() -> None:
    ledger = Ledger(1)
    ledger.begin("forward")
    for name in ("0", "model.layers.0.up", "model.layers.11.up", "conv1", "net.3 (Conv2d)"):
        ledger.make(10, ACTIVATION, name, "")
    ledger.begin("backward")
    assert {row.module: (row.bytes, row.tensors) for row in ledger.by_module(ledger.last("forward"))} == {
        "model.layers.*.up": (20, 2),
        "*": (10, 1),
        "conv1": (10, 1),
        "net.* (Conv2d)": (10, 1),
    }
