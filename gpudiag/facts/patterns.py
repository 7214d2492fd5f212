"""Normalisations, activations, rotary embeddings and losses written in single ops: recognised by the order of the ops."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from gpudiag.roofline.families import base_name

_LETTERS = {
    "pow": "P", "square": "P", "mul": "M", "mean": "A", "sum": "S", "add": "+", "sub": "-", "rsub": "-", "rsqrt": "R", "sqrt": "Q",
    "div": "/", "true_divide": "/", "var": "V", "var_mean": "V", "std": "D", "std_mean": "D", "tanh": "T", "erf": "F", "exp": "E",
    "max": "X", "amax": "X", "neg": "N", "cat": "K", "stack": "K", "reciprocal": "I", "norm": "O", "linalg_vector_norm": "O", "log": "L",
}  # fmt: skip
"""Operator -> letter; any other op that works breaks a pattern."""

CASTS = ("to", "_to_copy", "copy", "type_as", "float", "contiguous")
"""Casts and copies between the ops of a pattern belong to it: norms are often computed in fp32."""

_PATTERNS = (
    ("RMS norm", r"[PM]A\+(?:RM|Q[/I]M?)M?|OM\+?/M?", 2),
    ("layer norm", r"A(?:[VD]-|-[PM]A|-[VD])-?M?\+?[QR]?-?[/M]M?\+?|V-\+[QR][/M]M?\+?", 3),
    ("GELU", r"M?(?:P|MM)M\+MT\+MM?|M?[/M]F\+MM?", 3),
    ("softmax", r"(?:X-)?ES/", 2),
    ("log-sum-exp", r"X-ESL", 2),
    ("rotary embedding", r"M?NKM\+|MM-MM\+K", 2),
    ("mean squared error", r"-[P]A", 2),
)
"""(name, letters in program order, least number of its ops that handle the full size): Hugging Face's and hand-written forms of RMSNorm
(x * rsqrt(mean(x^2) + eps)), LayerNorm ((x - mean) / sqrt(var + eps)), tanh and erf GELU, exp / sum(exp), rotate_half, (x - y)^2."""

_REGEX = re.compile("|".join(f"(?P<p{index}>{letters})" for index, (_, letters, _) in enumerate(_PATTERNS)))

MOVED = {"rotary embedding": (2, 2), "mean squared error": (2, 3)}
"""Tensors of the full size that a fused kernel reads and writes, forward and backward; (2, 3) for the others: read x, write y; read the
gradient and x (or y), write the gradient (op_costs.md section 4)."""


class Item(NamedTuple):
    """One op of the forward pass, in program order."""

    row: int
    name: str
    numel: int
    place: tuple[int, ...]
    """Thread and step: patterns do not cross them."""


class Match(NamedTuple):
    """A pattern that was found: its name, the rows of its ops and the elements that it handles."""

    name: str
    rows: tuple[int, ...]
    numel: int


def find(items: Sequence[Item]) -> list[Match]:
    """Return the patterns in `items`, none overlapping another."""
    order = _with_breaks(items, [index for index, item in enumerate(items) if base_name(item.name) not in CASTS])
    text = "".join("|" if index < 0 else _LETTERS.get(base_name(items[index].name), ".") for index in order)
    return [match for found in _REGEX.finditer(text) if (match := _match(items, order, found)) is not None]


def _with_breaks(items: Sequence[Item], kept: Sequence[int]) -> list[int]:
    """Return `kept` with -1 wherever thread or step change."""
    found: list[int] = []
    for index in kept:
        if found and items[found[-1]].place != items[index].place:
            found.append(-1)
        found.append(index)
    return found


def _match(items: Sequence[Item], order: Sequence[int], found: re.Match[str]) -> Match | None:
    first, last = order[found.start()], order[found.end() - 1]
    members = items[first : last + 1]
    name, _, least = _PATTERNS[int((found.lastgroup or "p0")[1:])]
    numel = max(item.numel for item in members)
    if sum(item.numel == numel for item in members) < least:
        return None
    return Match(name, tuple(item.row for item in members), numel)
