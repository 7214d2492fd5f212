"""Gates judged: each limit against its figure, with what the figure varies within the run."""

from __future__ import annotations

import operator
from collections.abc import Iterator

from gpudiag.diagnosis import batches
from gpudiag.diagnosis.batches import Estimate
from gpudiag.diagnosis.compare import steps_kind
from gpudiag.diagnosis.gate_figures import Figure, figure
from gpudiag.diagnosis.gate_findings import finding_results
from gpudiag.diagnosis.gate_text import amount, span_text
from gpudiag.model.compare import StepsKind
from gpudiag.model.finding import Missing
from gpudiag.model.gates import METRICS, FindingGate, Gate, GateOutcome, GateResult, Gates
from gpudiag.model.measured import Measured
from gpudiag.units import format_share

DEFAULT_TOLERANCE = 0.05
"""Of the gates that hold where a baseline is given alone. Processes of one program differ by a few percent (memory layout, placement)."""

WITH_A_BASELINE = Gates(
    gates=(
        Gate(metric="step_median_ms", tolerance_share=DEFAULT_TOLERANCE),
        Gate(metric="peak_memory_gb", tolerance_share=DEFAULT_TOLERANCE, required=False),
    ),
    findings=FindingGate(new_at="warning"),
)
"""What is checked where no file of gates is given."""


def judged(gates: Gates, run: Measured, baseline: Measured | None = None) -> tuple[GateResult, ...]:
    """Return what was found of each limit, in the order of the file.

    A limit fails where the figure is beyond it and the whole interval of the figure too; where the interval holds the limit the outcome
    is `within_noise`. A figure without an interval is judged by itself. Of a figure that is not known the outcome is `unknown`.
    """
    results = [result for gate in gates.gates for result in _results(gate, run, baseline)]
    if gates.findings is not None:
        results += finding_results(gates.findings, run.report, baseline.report if baseline else None)
    return tuple(results)


def _results(gate: Gate, run: Measured, baseline: Measured | None) -> Iterator[GateResult]:
    if gate.max is not None:
        yield _against(gate, "max", gate.max, run)
    if gate.min is not None:
        yield _against(gate, "min", gate.min, run)
    if gate.tolerance_share is not None:
        yield _relative(gate, gate.tolerance_share, run, baseline)


def _against(gate: Gate, side: str, limit: float, run: Measured) -> GateResult:
    """Return the outcome of a limit in the unit of its metric."""
    name, unit = f"{gate.metric} {side}", METRICS[gate.metric].unit
    found = figure(gate.metric, run, steps_kind(run))
    if isinstance(found, Missing):
        return _unknown(gate, name, found.reason, limit)
    value, span = found.estimate.value, _possible(batches.interval(found.estimate), unit)
    outcome = _outcome(value, span, limit, upper=side == "max")
    allowed = f"{'at most' if side == 'max' else 'at least'} {amount(limit, unit)} allowed"
    return GateResult(
        name=name, outcome=outcome, message=f"{amount(value, unit)}{span_text(span, unit)}, {allowed}{_verdict(outcome, span)}; {found.of}",
        unit=unit, value=value, low=span[0] if span else None, high=span[1] if span else None, limit=limit, required=gate.required,
        line=gate.line,
    )  # fmt: skip


def _possible(span: tuple[float, float] | None, unit: str) -> tuple[float, float] | None:
    """Return the part of an interval that a figure can take: none is below 0, no share above 1."""
    if span is None:
        return None
    return max(span[0], 0.0), min(span[1], 1.0) if unit == "share" else span[1]


def _outcome(value: float, span: tuple[float, float] | None, limit: float, *, upper: bool) -> GateOutcome:
    beyond = operator.gt if upper else operator.lt
    if not beyond(value, limit):
        return "passed"
    nearest = value if span is None else span[0] if upper else span[1]
    return "failed" if beyond(nearest, limit) else "within_noise"


def _verdict(outcome: GateOutcome, span: tuple[float, float] | None) -> str:
    if outcome == "within_noise":
        return ": beyond it, but no further than it varies within the run"
    return ": its variance is not known, judged by itself" if outcome == "failed" and span is None else ""


def _unknown(gate: Gate, name: str, reason: str, limit: float | None) -> GateResult:
    return GateResult(
        name=name, outcome="unknown", message=f"not known: {reason}", unit=METRICS[gate.metric].unit, limit=limit, required=gate.required,
        line=gate.line,
    )  # fmt: skip


def _relative(gate: Gate, tolerance: float, run: Measured, baseline: Measured | None) -> GateResult:
    """Return the outcome of a limit against the baseline, by steps of one kind on both sides."""
    name, metric = f"{gate.metric} tolerance", METRICS[gate.metric]
    if baseline is None:
        return _unknown(gate, name, "no baseline was given: --baseline BUNDLE", None)
    kind: StepsKind = steps_kind(run, baseline)
    found, before = figure(gate.metric, run, kind), figure(gate.metric, baseline, kind)
    if isinstance(found, Missing):
        return _unknown(gate, name, found.reason, None)
    if isinstance(before, Missing):
        return _unknown(gate, name, f"of the baseline: {before.reason}", None)
    if before.estimate.value <= 0:
        return _unknown(gate, name, f"the baseline has {amount(before.estimate.value, metric.unit)}: set max or min instead", None)
    return _compared(gate, name, tolerance, found, before)


def _compared(gate: Gate, name: str, tolerance: float, found: Figure, before: Figure) -> GateResult:
    metric = METRICS[gate.metric]
    upper = metric.worse == "higher"
    old, new = before.estimate, found.estimate
    ratio, limit = new.value / old.value, 1 + tolerance if upper else 1 - tolerance
    span = batches.ratio(old, new)
    outcome = _outcome(ratio, span, limit, upper=upper)
    return GateResult(
        name=name, outcome=outcome, message=_compared_text(old, new, metric.unit, tolerance, span, outcome, upper=upper) + f"; {found.of}",
        unit="ratio", value=ratio, low=span[0] if span else None, high=span[1] if span else None, limit=limit, baseline=old.value,
        required=gate.required, line=gate.line,
    )  # fmt: skip


def _compared_text(
    old: Estimate, new: Estimate, unit: str, tolerance: float, span: tuple[float, float] | None, outcome: GateOutcome, *, upper: bool
) -> str:
    change = f"{(new.value / old.value - 1) * 100:+.1f} %"
    if span is not None:
        change += f", interval {(span[0] - 1) * 100:+.1f} to {(span[1] - 1) * 100:+.1f} %"
    worse = f"{format_share(tolerance, 1)} {'more' if upper else 'less'} allowed"
    return f"{amount(new.value, unit)} after {amount(old.value, unit)} ({change}), {worse}{_verdict(outcome, span)}"
