"""What an experiment found: two ways of training compared by live pairs of processes."""

from __future__ import annotations

from typing import Literal

import msgspec

Verdict = Literal["faster", "slower", "no_difference", "inconclusive", "too_noisy", "unstable", "not_applied", "failed"]
"""`inconclusive`: the interval holds both an effect and none; `too_noisy`: further pairs would not change that; `unstable`: an arm did not
become steady in its warm-up; `not_applied`: the change left no evidence of itself."""

Failure = Literal["", "oom", "crash", "hang", "timeout", "ended", "no_steps"]
"""`ended`: the script was over before its trial was; `no_steps`: it trained, but no step was found."""

Unit = Literal["samples", "steps"]


class Pair(msgspec.Struct, frozen=True):
    """One pair of live processes. An entry of each list stands for one block of the first arm and the block of the second beside it."""

    first: tuple[float, ...]
    """Throughput of the blocks of the first arm, in units a second."""
    second: tuple[float, ...]
    unit: Unit
    first_step_ns: int = 0
    """Median step of the warm-up, once it was steady."""
    second_step_ns: int = 0
    first_start_s: float = 0.0
    """From the start of the process to the end of its warm-up."""
    second_start_s: float = 0.0


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """How much faster the second arm trains than the first. Null: not known."""

    verdict: Verdict
    reason: Failure = ""
    ratio: float | None = None
    """Throughput of the second arm over that of the first."""
    interval: tuple[float, float] | None = None
    over: Literal["pairs", "blocks"] = "pairs"
    """What the interval was computed over. Blocks of a few processes do not tell how much processes differ: it is then too narrow."""
    p: float | None = None
    pairs: int = 0
    unit: Unit = "samples"
    measured: tuple[Pair, ...] = ()
    notes: tuple[str, ...] = ()
