"""A machine on which experiments take no time: what each change does to the speed of the program is planted, pairs scatter by a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpudiag.experiment.ab import run_experiment
from gpudiag.experiment.arm import ArmError
from gpudiag.experiment.design import Arm, Design
from gpudiag.experiment.plan import Options
from gpudiag.experiment.result import ExperimentResult
from gpudiag.experiment.stats import DECIDED, judge_pairs
from gpudiag.model.experiment import Baseline, Comparison, Pair, Parity

STEP_NS = 10_000_000
SAMPLES = 32


class Machine:
    """Stands in for runner.compare, probe.probe and parity.check. `ratios`: arm -> how much faster it is; what is not named is unchanged.

    `verdicts`: arm -> a Comparison that is returned as it is; `differs`: arms that train otherwise; `breaks`: raised in the course of the
    pair with that number, counted over all comparisons.
    """

    def __init__(self, ratios: Mapping[str, float] | None = None, *, noise: float = 0.002) -> None:
        self.ratios = dict(ratios or {})
        self.verdicts: dict[str, Comparison] = {}
        self.differs: set[str] = set()
        self.breaks: dict[int, BaseException] = {}
        self.probe_error: ArmError | None = None
        self.probed = 0
        self.compared: list[tuple[str, tuple[int, ...], int]] = []
        """Arm, looks, and pairs that were taken over."""
        self.arms: dict[str, Arm] = {}
        self.checked: list[tuple[str, str]] = []
        self.pairs = 0
        self._noise, self._random = noise, random.Random(0)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("gpudiag.experiment.compare.compare_arms", self.compare)
        monkeypatch.setattr("gpudiag.experiment.probe.probe_program", self.probe)
        monkeypatch.setattr("gpudiag.experiment.parity.check_parity", self.check)

    def probe(self, arm: Arm, design: Design, *, progress: Any = None, **_: Any) -> Baseline:
        self.probed += 1
        if self.probe_error is not None:
            raise self.probe_error
        return Baseline(command=arm.command, step_ns=STEP_NS, samples_per_step=SAMPLES, device="cpu", peak_bytes=10 << 20)

    def compare(
        self,
        first: Arm,
        second: Arm,
        design: Design | None = None,
        *,
        progress: Callable[[str], None] | None = None,
        on_pair: Callable[[Pair], None] | None = None,
        done: Sequence[Pair] = (),
        **_: Any,
    ) -> Comparison:
        design = design or Design()
        self.arms[first.name], self.arms[second.name] = first, second
        self.compared.append((second.name, design.looks, len(done)))
        if second.name in self.verdicts:
            return self.verdicts[second.name]
        pairs = list(done)
        while len(pairs) < design.looks[-1]:
            if len(pairs) in design.looks and len(pairs) > len(done) and judge_pairs(pairs, design).verdict in DECIDED:
                break
            pair = self._pair(second.name)
            self.pairs += 1
            if self.pairs in self.breaks:
                raise self.breaks.pop(self.pairs)
            pairs.append(pair)
            if on_pair is not None:
                on_pair(pair)
        evidence = tuple(f"{call}: seen" for call in second.fixes)
        return msgspec.structs.replace(judge_pairs(pairs, design), evidence=evidence)

    def _pair(self, name: str) -> Pair:
        drift = math.exp(self._random.gauss(0, self._noise))
        rates = [1000.0 * math.exp(self._random.gauss(0, self._noise)) for _ in range(6)]
        faster = [rate * drift * self.ratios.get(name, 1.0) for rate in rates]
        return Pair(tuple(rates), tuple(faster), "samples", STEP_NS, STEP_NS, 2.0, 3.0, 100, 80)

    def check(self, baseline: Arm, changed: Arm, kind: Any, design: Design, scratch: Path, *, progress: Any = None) -> Parity:
        self.checked.append((changed.name, kind))
        if changed.name in self.differs:
            return Parity(kind=kind, verdict="differs", reason="weight decay 0.01 -> 0", steps=12)
        return Parity(kind=kind, verdict="not_comparable" if kind == "semantics" else "same", worst_yardsticks=0.4, steps=12)


FUSED, FOREACH, NONE, PREFETCH = "fused-optimizer", "foreach-optimizer", "zero-grad-none", "loader-prefetch"
COMMAND = ("python", "train.py", "--lr", "1")


def run(
    *fixes: str, tell: Any = None, done: Any = None, warn: Any = None, variants: Sequence[str] = (), auto: bool = False, **options: Any
) -> ExperimentResult:
    options.setdefault("output", "bundle")
    command = () if options.get("resume") else COMMAND
    return run_experiment(command, fixes=fixes, variants=variants, auto=auto, options=Options(**options), tell=tell, done=done, warn=warn)


def verdicts(found: ExperimentResult) -> dict[str, str]:
    return {one.fix or one.variant or "": one.verdict for one in found.data.experiments if not one.screening}
