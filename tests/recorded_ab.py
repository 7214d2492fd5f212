"""The recorded pairs and factorials beside the checkout: what statistics and searches of experiments are judged by."""

from __future__ import annotations

import gzip
import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from realtraces import SHARED

from gpudiag.experiment.design import Design
from gpudiag.experiment.stats import DECIDED, judge_pairs
from gpudiag.model.experiment import Comparison, FixCall, Pair

FOLDER = SHARED / "experiments"
DROPPED = 2
"""First steps of a block, as in the protocol."""
WARM = 15
"""First steps of the processes that ran alone: their warm-up."""
BLOCK = 12

FACTORS = {
    "conv": ("compile", "bf16", "channels-last", "fused-optimizer", "batch-size=x2"),
    "gpt": ("compile", "bf16", "sdpa", "fused-optimizer", "batch-size=x2"),
}


def folder() -> Path:
    """Return the folder of the recordings; skips the test where it is missing."""
    if not (FOLDER / "pools").is_dir():
        pytest.skip(f"no recorded experiments here: {FOLDER} does not exist (not part of the project)")
    return FOLDER


def rows(name: str) -> list[dict]:
    """Return what was recorded, one process or pair of processes an entry."""
    with gzip.open(folder() / "pools" / f"{name}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def _rate(times: Sequence[float]) -> float:
    return len(times) / sum(times)


def token_pairs(name: str) -> list[Pair]:
    """Return the pairs of two live processes that handed over a token, in the order in which they ran."""
    pairs = []
    for row in rows(name):
        rates: dict[int, list[float]] = {0: [], 1: []}
        for arm, times, *_ in row["blocks"]:
            rates[arm].append(_rate(times[DROPPED:]))
        pairs.append(Pair(tuple(rates[0]), tuple(rates[1]), "steps"))
    return pairs


def single_pairs(name: str) -> list[Pair]:
    """Return pairs of processes that ran alone, one right after the other; the arm that starts alternates: ABBA by process."""
    blocks = [tuple(_blocks(row["times"][WARM:])) for row in rows(name)]
    neighbours = list(zip(blocks[::2], blocks[1::2], strict=False))
    return [Pair(*(two if number % 2 == 0 else two[::-1]), "steps") for number, two in enumerate(neighbours)]


def _blocks(times: Sequence[float]) -> Iterator[float]:
    for start in range(0, len(times) - BLOCK + 1, BLOCK):
        yield _rate(times[start : start + BLOCK])


def faster(pairs: Sequence[Pair], factor: float) -> list[Pair]:
    """Return the pairs as if the second arm were `factor` times as fast."""
    return [Pair(pair.first, tuple(rate * factor for rate in pair.second), pair.unit) for pair in pairs]


def groups(pairs: Sequence[Pair], size: int) -> list[list[Pair]]:
    """Return the independent groups: no pair is in two of them."""
    return [list(pairs[start : start + size]) for start in range(0, len(pairs) - size + 1, size)]


def resampled(pairs: Sequence[Pair], size: int, count: int, seed: int = 0) -> Iterator[list[Pair]]:
    """Yield `count` groups of different pairs: better for a rate than the few independent groups, worth no more than those as proof."""
    random = np.random.default_rng(seed)
    for _ in range(count):
        yield [pairs[place] for place in random.choice(len(pairs), size, replace=False)]


def experiment(pairs: Sequence[Pair], design: Design) -> Comparison:
    """Return what an experiment finds that has these pairs one after the other, and ends at the first look that decides."""
    for look in design.looks:
        found = judge_pairs(pairs[:look], design)
        if found.verdict in DECIDED:
            break
    return found


def clopper_pearson(hits: int, of: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the exact interval of a share (Clopper and Pearson 1934, Biometrika 26(4))."""
    from scipy.special import betaincinv

    tail = (1 - confidence) / 2
    low = float(betaincinv(hits, of - hits + 1, tail)) if hits else 0.0
    return low, float(betaincinv(hits + 1, of - hits, 1 - tail)) if hits < of else 1.0


def factorial(workload: str) -> dict[frozenset[FixCall], float]:
    """Return the log throughput ratio against the baseline of every set of five fixes: medians of 14 measurements."""
    seconds = json.loads((folder() / f"e4_{workload}.json").read_text())["sec_per_sample"]
    baseline = statistics.median(seconds["00000"])
    calls = fixes(workload)
    return {
        frozenset(call for call, bit in zip(calls, bits, strict=True) if bit == "1"): math.log(baseline / statistics.median(times))
        for bits, times in seconds.items()
    }


def fixes(workload: str) -> tuple[FixCall, ...]:
    """Return the five fixes of a factorial, in the order of its file."""
    return tuple(FixCall(*name.split("=")) for name in FACTORS[workload])


class CachedMeasure:
    """A measure that measures no set twice, in whatever order its fixes come, and keeps `results`."""

    def __init__(self, measure: Callable[[tuple[FixCall, ...]], float | None]) -> None:
        self._measure = measure
        self.results: dict[frozenset[FixCall], float | None] = {frozenset(): 0.0}

    def __call__(self, calls: tuple[FixCall, ...]) -> float | None:
        key = frozenset(calls)
        if key not in self.results:
            found = self._measure(calls)
            self.results[key] = found if found is not None and math.isfinite(found) else None
        return self.results[key]

    def rank(self, calls: tuple[FixCall, ...]) -> float:
        """Measure a set; one that failed is below all others."""
        found = self(calls)
        return -math.inf if found is None else found
