"""Memory that training a model would take, found by running its steps on tensors without data."""

from __future__ import annotations

from typing import Literal

import msgspec

EstimatePhase = Literal["forward", "backward", "optimizer"]

HELD = (
    "parameters",
    "gradients",
    "optimizer_state",
    "buffers",
    "activations",
    "weight_casts",
    "inputs",
    "temporary",
)
"""What memory is held for, in the order of reports. activations: made by the forward pass and not freed by it; weight_casts: copies of
parameters in the type that autocast computes in; temporary: freed by the pass that made it (gradients of activations, recomputed
activations, results that nothing keeps)."""


class PhasePeak(msgspec.Struct, frozen=True):
    """The most memory that is in use in one pass of a training step."""

    phase: EstimatePhase
    bytes: int


class HeldRow(msgspec.Struct, frozen=True):
    """Activations at the end of the forward pass of the modules of one name ('*': the numbers of layers) and class."""

    module: str
    bytes: int
    tensors: int


class ModelEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of training one model on one device in bytes. What no tensor holds is not in it: context, libraries, fragmentation."""

    device: str
    """'cuda' or 'cpu': whose kernels and defaults were assumed."""
    parameter_count: int
    """Elements of all parameters; a tied one counts once."""
    parameters_bytes: int
    buffers_bytes: int
    gradients_bytes: int
    """Of all parameters that got one, when the backward pass has ended."""
    optimizer_bytes: int
    """States of the optimizer after its step, on the device."""
    inputs_bytes: int
    activations_bytes: int
    """Made by the forward pass and held at its end: what the backward pass needs, and the output."""
    weight_casts_bytes: int
    """Copies of parameters for autocast, held at the end of the forward pass."""
    peak_bytes: int
    """The most that tensors hold at any time of a step, in blocks of `block_bytes`."""
    peak_phase: EstimatePhase
    peak_op: str
    """The op whose result reached it."""
    at_peak: dict[str, int]
    """What for -> bytes, in the order of HELD; they sum to `peak_bytes`."""
    phases: tuple[PhasePeak, ...]
    modules: tuple[HeldRow, ...]
    """Largest first; they sum to `activations_bytes`."""
    block_bytes: int
    """Each storage is rounded up to a multiple of this in the peaks (512: the CUDA caching allocator; 1: not rounded)."""
    optimizer: str
    autocast: str
    """'none', or the type: 'bfloat16'."""
    notes: tuple[str, ...] = ()
