"""Memory and arithmetic of a transformer from its hyper-parameters alone: nothing is run.

The memory formula is the one behind the calculator of the Ultra-Scale Playbook (nanotron), after Korthikanti et al. 2022, "Reducing
Activation Recomputation in Large Transformer Models" (arXiv 2205.05198): an upper model, with dropout everywhere, attention scores
written out, learned positions and as many key as query heads.
"""

from __future__ import annotations

from typing import Literal

import msgspec

FeedForward = Literal["swiglu", "gelu", "relu"]
Recompute = Literal["none", "selective", "full"]

_WIDE_INPUTS: dict[FeedForward, int] = {"relu": 1, "gelu": 2, "swiglu": 4}
"""Tensors of feed-forward width that the backward pass needs: the input of the second product, and those of the activation function."""


class Transformer(msgspec.Struct, frozen=True, kw_only=True):
    """A GPT-style model and how it is trained. Sizes are counts; `batch` is the sequences of one micro-batch on one device."""

    heads: int
    batch: int
    hidden: int
    feed_forward: int
    layers: int
    sequence: int
    vocab: int
    activation: FeedForward = "swiglu"
    mixed_precision: bool = False
    """Activations, weights and gradients in 16 bit, and fp32 master weights beside them."""
    recompute: Recompute = "none"
    """selective: the attention scores; full: all but the input of each layer."""
    optimizer_bytes: int = 8
    """Bytes of optimizer state a parameter: 8 for Adam in fp32."""
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    """Whether norms, dropout and the inputs of the blocks are split over the tensor-parallel group too."""
    data_parallel: int = 1
    zero_stage: Literal[0, 1, 2, 3] = 0
    """What data parallelism shards (ZeRO): 1 optimizer states, 2 also gradients, 3 also weights."""


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one device in bytes."""

    parameters: int
    """Number of parameters of the whole model."""
    weights_bytes: int
    """With the fp32 master weights of mixed precision."""
    gradients_bytes: int
    optimizer_bytes: int
    attention_bytes: int
    """Activations of the attention blocks of all layers; under full recomputation 0, as are the next two."""
    feed_forward_bytes: int
    norms_bytes: int
    layer_inputs_bytes: int
    """Kept in their place under full recomputation."""
    tail_bytes: int
    """Input dropout, final norm, input of the output projection, logits in fp32."""

    @property
    def states_bytes(self) -> int:
        """Return weights, gradients and optimizer states in bytes."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def activations_bytes(self) -> int:
        """Return all activations in bytes."""
        return self.attention_bytes + self.feed_forward_bytes + self.norms_bytes + self.layer_inputs_bytes + self.tail_bytes

    @property
    def total_bytes(self) -> int:
        """Return states and activations in bytes."""
        return self.states_bytes + self.activations_bytes


def estimate_transformer_memory(model: Transformer) -> Estimate:
    """Estimate the memory that training `model` takes on one device.

    Parameters: h (v + s) + L (12 h^2 + 13 h) + 2 h, those of GPT blocks with feed-forward 4 h and learned positions, as the calculator has
    it, whatever `feed_forward` says.
    """
    h = model.hidden
    count = h * (model.vocab + model.sequence) + model.layers * (12 * h * h + 13 * h) + 2 * h
    value = 2 if model.mixed_precision else 4
    whole = model.recompute == "full"
    attention, feed_forward, norms = (0, 0, 0) if whole else _estimate_layer_bytes(model, value)
    tokens = model.sequence * model.batch
    split = model.tensor_parallel
    outside = split if model.sequence_parallel else 1
    tail = tokens * model.hidden // outside + 2 * value * tokens * model.hidden // outside + 4 * tokens * model.vocab // split
    per_value = (value + (4 if model.mixed_precision else 0), value, model.optimizer_bytes)
    weights, gradients, optimizer = (
        count * size // split // (model.data_parallel if model.zero_stage >= stage else 1)
        for size, stage in zip(per_value, (3, 2, 1), strict=True)
    )
    return Estimate(
        parameters=count,
        weights_bytes=weights,
        gradients_bytes=gradients,
        optimizer_bytes=optimizer,
        attention_bytes=model.layers * attention,
        feed_forward_bytes=model.layers * feed_forward,
        norms_bytes=model.layers * norms,
        layer_inputs_bytes=model.layers * value * tokens * model.hidden // outside if whole else 0,
        tail_bytes=tail,
    )


def _estimate_layer_bytes(model: Transformer, value: int) -> tuple[int, int, int]:
    """Estimate the activations of one layer in bytes: attention, feed-forward, norms; `value`: bytes of one.

    Of s b h values: attention keeps its input, q, k, v, the input of its output projection (5 values) and a dropout mask of one byte;
    scores, softmax and its mask are 2 values and a byte for a s^2 b. Tensor parallelism splits what lies between the two products of a
    block; norms, inputs and dropout masks only under sequence parallelism (Korthikanti et al. 2022, equations 2 to 4).
    """
    tokens_h = model.sequence * model.batch * model.hidden
    split = model.tensor_parallel
    outside = split if model.sequence_parallel else 1
    scores = (2 * value + 1) * model.heads * model.sequence**2 * model.batch if model.recompute == "none" else 0
    attention = tokens_h * (value + 1) // outside + (4 * value * tokens_h + scores) // split
    wide = _WIDE_INPUTS[model.activation] * value * model.sequence * model.batch * model.feed_forward
    feed_forward = tokens_h * (value + 1) // outside + wide // split
    return attention, feed_forward, 2 * value * tokens_h // outside


PRESETS: dict[str, Transformer] = {
    "playbook": Transformer(
        heads=32, batch=100, hidden=4096, feed_forward=16384, layers=32, sequence=1024, vocab=32000, optimizer_bytes=2
    ),
    "llama3-8b": Transformer(
        heads=32, batch=32, hidden=4096, feed_forward=16384, layers=32, sequence=256, vocab=30522, mixed_precision=True
    ),
}  # fmt: skip
"""'playbook': the calculator's example of 2.15 TiB. 'llama3-8b': its preset of that name, which is not the published model (feed-forward
14336, 8 key heads, vocabulary 128256, no dropout)."""
