"""How well the kernels of a replayed graph fit the launches of a captured one, and which belongs to which. Pure: no tables."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]

ACCEPT_FROM = 0.9
"""Share of the decided pairs that have to agree. A graph of another model reaches about a half (products and element-wise work are in
all of them); the right one, 1.0, less where a library starts helper kernels that its op's name does not tell."""

DECIDED_FROM = 0.25
"""Share of the pairs that names have to decide: below, an agreement says little. Custom ops decide nothing: in a decoding step of
vLLM a third of the ops are PyTorch's own or compiled ones."""

LOOK_AHEAD = 8
"""Nodes that either side may have more than the other at one place: an op starts one to a few kernels."""


class Replayed(NamedTuple):
    """A node of a replayed graph: what ran."""

    kind: str
    name: str
    kernel_class: str | None


class Captured(NamedTuple):
    """A node of a captured graph: what was issued."""

    kind: str
    op: str | None
    kernel: str | None
    """Kernel that the launch itself names (ROCm)."""


class Fit(NamedTuple):
    """Which replayed node belongs to which captured one, and how far names agree."""

    replayed: Rows
    captured: Rows
    score: float
    agreeing: int


# What the kernels of an op may be, by the op's name. Helpers count: a product may reduce its split K and copy its bias, a sort copies.
_KINDS_OF_OPS: tuple[tuple[str, str], ...] = (
    (r"(?i).*(attention|sdpa|flash|fmha)", "attention gemm softmax elementwise reduction copy random"),
    (r"aten::(rand|normal|uniform|bernoulli|exponential|random|multinomial|native_dropout|dropout)", "random elementwise sort"),
    (r"aten::.*conv", "convolution gemm copy elementwise fft norm reduction"),
    (r"aten::.*norm|(?i:.*(rms|layer|group|batch)_?norm)", "norm reduction elementwise copy"),
    (r"aten::_?(mm|addmm|bmm|baddbmm|addbmm|linear|matmul|mv|addmv|dot|inner|scaled_mm|grouped_mm|int_mm|weight_int\w+)", "gemm copy"),
    (r".*(rotary|rope|silu_and_mul|gelu_and_mul|swiglu)", "elementwise copy"),
    (r"aten::.*softmax", "softmax reduction elementwise copy"),
    (r"aten::.*embedding", "embedding index sort reduction copy elementwise"),
    (r"aten::.*(lstm|gru|rnn)", "rnn gemm elementwise copy"),
    (r"aten::.*fft", "fft elementwise copy"),
    (r"aten::(_foreach|_fused|_amp)_", "optimizer elementwise reduction copy"),
    (
        r"aten::(topk|sort|argsort|unique|kthvalue|median|searchsorted|bucketize|nonzero|index|gather|scatter|take|put|masked_select|roll|flip"
        r"|masked_scatter|tril|triu|arange|linspace|one_hot)",
        "sort index reduction copy elementwise",
    ),
    (
        r"aten::(sum|mean|amax|amin|max|min|argmax|argmin|prod|var|std|any|all|cumsum|cumprod|logsumexp|nll_loss|count_nonzero|.*pool)",
        "reduction elementwise copy norm",
    ),
    (
        r"aten::(copy_|clone|contiguous|_to_copy|to|cat|stack|fill_|zero_|zeros|ones|full|repeat|constant_pad_nd|narrow_copy|split_with_sizes)",
        "copy elementwise index",
    ),
    (
        r"aten::(add|sub|rsub|mul|div|pow|neg|abs|exp|log|sqrt|rsqrt|reciprocal|sin|cos|tanh|sigmoid|silu|gelu|relu|clamp|where|eq|ne|lt|le|gt|ge"
        r"|logical_\w+|bitwise_\w+|threshold\w*|masked_fill|lerp|addcmul|addcdiv|maximum|minimum|floor|ceil|round|sign|isnan|isinf|leaky_relu"
        r"|hardtanh|hardswish|mse_loss|l1_loss|smooth_l1_loss|binary_cross_entropy|erf|softplus|elu|glu|mish)",
        "elementwise copy",
    ),
)
_COMPILED = tuple((re.compile(pattern), frozenset(words.split())) for pattern, words in _KINDS_OF_OPS)


@lru_cache(maxsize=4096)
def kinds_of_op(name: str) -> frozenset[str] | None:
    """Return the kernel classes that an op called `name` may start, None where its name does not tell."""
    return next((kinds for pattern, kinds in _COMPILED if pattern.match(name)), None)


def judge(ran: Replayed, issued: Captured) -> int:
    """Return 1 where the names say that `ran` was issued by `issued`, -1 where they say that it was not, 0 where they do not tell."""
    if issued.kind != "kernel" or ran.kind != "kernel":
        return 1 if ran.kind == issued.kind or (issued.kind != "kernel" and ran.kernel_class == "copy") else -1
    if issued.kernel is not None and issued.kernel.startswith("_Z") == ran.name.startswith("_Z"):
        return 1 if issued.kernel == ran.name else -1
    if issued.op is None:
        return 0
    if issued.op.startswith("triton_") or (ran.kernel_class or "").startswith("triton_"):
        return 1 if issued.op == ran.name else -1
    kinds = kinds_of_op(issued.op)
    if kinds is None or ran.kernel_class in (None, "other"):
        return 0
    return 1 if ran.kernel_class in kinds else -1


class Judge:
    """Verdicts on pairs of distinct nodes; each pair is judged once."""

    def __init__(self, replayed: list[Replayed], captured: list[Captured]) -> None:
        self._replayed = replayed
        self._captured = captured
        self._known: dict[int, int] = {}

    def one(self, ran: int, issued: int) -> int:
        """Return the verdict on the distinct nodes `ran` and `issued`."""
        key = ran * len(self._captured) + issued
        found = self._known.get(key)
        if found is None:
            self._known[key] = found = judge(self._replayed[ran], self._captured[issued])
        return found

    def many(self, ran: Rows, issued: Rows) -> npt.NDArray[np.int8]:
        """Return the verdict on each pair of two equally long sequences."""
        distinct, inverse = np.unique(ran * len(self._captured) + issued, return_inverse=True)
        verdicts = [self.one(*divmod(int(key), len(self._captured))) for key in distinct]
        return np.array(verdicts, dtype=np.int8)[inverse] if verdicts else np.empty(0, dtype=np.int8)

    def is_kernel(self, ran: Rows, issued: Rows) -> tuple[Rows, Rows]:
        """Return the places of kernels in both sequences (copies and memsets may be left out of a recording)."""
        first = [place for place, code in enumerate(ran.tolist()) if self._replayed[code].kind == "kernel"]
        second = [place for place, code in enumerate(issued.tolist()) if self._captured[code].kind == "kernel"]
        return np.array(first, dtype=np.int64), np.array(second, dtype=np.int64)


def fit(judge: Judge, ran: Rows, issued: Rows) -> Fit | None:
    """Return how the replayed sequence `ran` fits the captured `issued` (both of distinct nodes), None where it does not.

    By place where both have as many nodes, or as many kernels; else by the names, one after the other.
    """
    if len(ran) == len(issued):
        everything = np.arange(len(ran))
        return _accepted(judge, ran, issued, everything, everything)
    kernels, launches = judge.is_kernel(ran, issued)
    if len(kernels) == len(launches):
        return _accepted(judge, ran, issued, kernels, launches)
    if min(len(ran), len(issued)) < ACCEPT_FROM * max(len(ran), len(issued)):
        return None
    return _accepted(judge, ran, issued, *_aligned(judge, ran.tolist(), issued.tolist()), skipped=True)


def _accepted(judge: Judge, ran: Rows, issued: Rows, first: Rows, second: Rows, *, skipped: bool = False) -> Fit | None:
    verdicts = judge.many(ran[first], issued[second])
    agreeing, against = int((verdicts > 0).sum()), int((verdicts < 0).sum())
    if skipped:
        against += len(ran) + len(issued) - 2 * len(first)
    if not agreeing or agreeing + against < DECIDED_FROM * len(first):
        return None
    kept = verdicts >= 0
    score = agreeing / (agreeing + against)
    return Fit(first[kept], second[kept], score, agreeing) if score >= ACCEPT_FROM else None


def _aligned(judge: Judge, ran: list[int], issued: list[int]) -> tuple[Rows, Rows]:
    """Return the places of pairs, found from the front: where names contradict, the nearest later place where they fit again.

    Gives up after as many contradictions as an acceptable fit can have, so that its cost stays proportional to the lengths.
    """
    first, second, here, there, contradictions = [], [], 0, 0, 0
    while here < len(ran) and there < len(issued):
        if judge.one(ran[here], issued[there]) < 0:
            contradictions += 1
            if contradictions > (1 - ACCEPT_FROM) * len(ran) + 1:
                break
            ahead = _resume(judge, ran[here : here + 2 * LOOK_AHEAD], issued[there : there + 2 * LOOK_AHEAD])
            here, there = here + ahead[0], there + ahead[1]
            continue
        first.append(here)
        second.append(there)
        here, there = here + 1, there + 1
    return np.array(first, dtype=np.int64), np.array(second, dtype=np.int64)


def _resume(judge: Judge, ran: list[int], issued: list[int]) -> tuple[int, int]:
    """Return how many nodes to leave out on both sides so that the following ones agree; one on both where there is no such place."""
    for total in range(1, LOOK_AHEAD + 1):
        for here in range(total + 1):
            pairs = list(zip(ran[here : here + 3], issued[total - here : total - here + 3], strict=False))
            if pairs and all(judge.one(*pair) >= 0 for pair in pairs) and any(judge.one(*pair) > 0 for pair in pairs):
                return here, total - here
    return 1, 1
