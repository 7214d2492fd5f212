"""What an experiment found: two ways of training compared by live pairs of processes."""

from __future__ import annotations

import math
import statistics
from typing import Literal

import msgspec

Verdict = Literal["faster", "slower", "no_difference", "inconclusive", "too_noisy", "unstable", "not_applied", "failed"]
"""`inconclusive`: the interval holds both an effect and none; `too_noisy`: further pairs would not change that; `unstable`: an arm did not
become steady in its warm-up; `not_applied`: the change left no evidence of itself."""

Failure = Literal["", "oom", "crash", "hang", "timeout", "ended", "no_steps"]
"""`ended`: the script was over before its trial was; `no_steps`: it trained, but no step was found."""

NO_INSTRUCTIONS = "this processor has no instructions for products in"
"""How evidence of a lower precision says, before the type, why it may well be slower."""

ALPHA = 0.05
"""Chance of a claim, or of any of several that are tested together, where there is no effect."""

Unit = Literal["samples", "steps"]

ParityVerdict = Literal["same", "differs", "not_comparable", "not_checked"]
"""`not_comparable`: the change alters what is trained on (its class is semantics), so that steps cannot be set side by side."""


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
    first_peak_bytes: int | None = None
    """Most memory of the device that the arm's tensors held (CPU: most resident memory of its processes)."""
    second_peak_bytes: int | None = None
    first_energy_j: float | None = None
    """Energy of the device per unit, over the blocks; null where the device does not tell."""
    second_energy_j: float | None = None
    first_faults: float | None = None
    """Page faults per step that needed no disk, in the process that trains; null where it does not tell."""
    second_faults: float | None = None
    steady: bool = True
    """Whether both arms were steady at the end of their warm-up."""
    together: bool = True
    """Whether both were alive together; else one ran after the other."""


def compute_log_ratios(pair: Pair) -> list[float]:
    """Return log(throughput of the second / of the first) of each block and the one beside it. Blocks without any steps are left out."""
    beside = zip(pair.first, pair.second, strict=False)  # a file may hold anything; the engine writes as many of both
    return [math.log(second / first) for first, second in beside if first > 0 and 0 < second / first < math.inf]


def compute_pair_log_ratio(pair: Pair) -> float | None:
    """Return the log ratio of a pair, the median of its blocks: a block that was disturbed does not move it. None: it has none."""
    ratios = compute_log_ratios(pair)
    return statistics.median(ratios) if ratios else None


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
    """Over pairs: corrected for the looks at them, so that it is at most 5 % exactly where the interval leaves 1 out."""
    pairs: int = 0
    unit: Unit = "samples"
    measured: tuple[Pair, ...] = ()
    notes: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    """What shows that the change took effect, one for each fix."""
    slow_dtype: str | msgspec.UnsetType = msgspec.UNSET
    """A type that the change computes in and this processor has no instructions for."""
    baseline_failed: bool = False
    """Whether it was the first arm that failed, the program without any change."""


class FixCall(msgspec.Struct, frozen=True):
    """One fix as it is asked for: `--fix ID` or `--fix ID=VALUE`."""

    id: str
    value: str | None = None

    def __str__(self) -> str:
        """Return it as on the command line."""
        return self.id if self.value is None else f"{self.id}={self.value}"


ParityKind = Literal["exact", "rounding", "low_precision", "semantics"]
"""How far the results of a change may differ."""


class Parity(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a change trains the same: losses and gradients of the first steps in units of the noise that its class may make."""

    kind: ParityKind = msgspec.field(name="class")
    verdict: ParityVerdict
    reason: str = ""
    """Why it differs, or was not checked."""
    worst_yardsticks: float | None = None
    """Largest deviation of a loss or gradient in yardsticks: that of the baseline with noise of this class in its weights."""
    settings_changed: tuple[str, ...] = ()
    """What is set otherwise and should not be: learning rate, weight decay, modes of modules, types of parameters, ..."""
    steps: int = 0
    alike: bool | None = None
    """Of a change of semantics: whether both, from one start, have losses and gradients as close as two runs of one program may; null:
    that is not known."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One experiment of a report: a change, how much faster the program trains with it, and whether it trains the same."""

    fix: str
    """Fixes that were applied together, joined by '+'; '' where only a variant was."""
    variant: str | None = None
    verdict: Verdict
    reason: str = ""
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    p: float | None = None
    pairs: int = 0
    unit: Unit = "samples"
    over: Literal["pairs", "blocks"] = "pairs"
    screening: bool = False
    """Measured to rank candidates: it claims nothing."""
    parity: Parity | None = None
    memory_ratio: float | None = None
    energy_ratio: float | None = None
    break_even_steps: float | None = None
    """Steps after which the longer start of the change has paid back, with cold caches."""
    break_even_warm_steps: float | None = None
    ceiling_share: float | None = None
    """What the finding that named the fix promised at most, as a share of the step."""
    evidence: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    measured: tuple[Pair, ...] = ()
    seconds: float | None = None
    slow_dtype: str | msgspec.UnsetType = msgspec.UNSET
    """As of a Comparison."""


def make_outcome(fix: str, found: Comparison, *, screening: bool = False) -> Outcome:
    """Return what a comparison says of `fix` as an experiment of a report; also of one that is not over yet."""
    shared = ("verdict", "reason", "ratio", "interval", "p", "pairs", "unit", "over", "evidence", "notes", "slow_dtype")
    return Outcome(fix=fix, screening=screening, **{name: getattr(found, name) for name in shared})


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """What the probe found of the program as it is."""

    command: tuple[str, ...]
    step_ns: int
    samples_per_step: float | None = None
    steps_marked_by: str = ""
    """How the steps are known: an optimizer, gpudiag.step(), updates of a parameter."""
    warm_steps: int = 0
    start_s: float = 0.0
    peak_bytes: int | None = None
    device: str = ""
    side_effects: tuple[str, ...] = ()
    """What the program writes: kinds of saves, files in its folder."""
    noise_share: float | None = None
    """Standard deviation of the log ratio of a pair of unchanged processes; null: not measured."""
    notes: tuple[str, ...] = ()


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """What was proved to help, all together; empty: the program as it is."""

    fixes: tuple[FixCall, ...] = ()
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    p: float | None = None
    changes: tuple[str, ...] = ()
    """The code change of each fix, as a person would write it."""
    proved: bool = False


class ExperimentData(msgspec.Struct, frozen=True, kw_only=True):
    """All experiments of one `gpudiag ab`: what `--json` writes."""

    schema_version: int = 1
    baseline: Baseline | None = None
    experiments: tuple[Outcome, ...] = ()
    recipe: Recipe = Recipe()
    complete: bool = True
    """Whether everything that was planned was measured; else `gpudiag ab --resume` goes on."""
    seconds: float | None = None
    """All of its time, with that before an interruption, recordings and parity runs; null: it is of an older version."""
    notes: tuple[str, ...] = ()
