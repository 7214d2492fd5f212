"""Gates: read from TOML, and judged, each limit against its figure with what the figure varies within the run."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, get_args

import msgspec
import numpy as np

from gpudiag.comparison import batch_means
from gpudiag.comparison.batch_means import Estimate, Statistic
from gpudiag.comparison.regressions import UNDISTURBED, Disturbance, decide_outcome, judge_finding_gate, measure_disturbance
from gpudiag.comparison.steps import choose_steps_kind, estimate_step, estimate_step_ratio, estimate_throughput, list_walls
from gpudiag.diagnosis.config import find_line, parse_toml
from gpudiag.errors import InputError, suggest_nearest
from gpudiag.model.comparison import METRICS, FindingGate, Gate, GateOutcome, GateResult, Gates, Measured, StepsKind
from gpudiag.model.finding import Missing, Severity
from gpudiag.model.notices import NoticeCode
from gpudiag.report.labels import find_weak_measurement
from gpudiag.units import format_bytes, format_ns, format_ratio_change, format_share

FINDINGS_TABLE = "findings"
_LIMITS = ("max", "min", "tolerance_share")


class _GatesFile(msgspec.Struct, frozen=True):
    path: str
    text: str
    rules: Collection[str]

    def error(self, message: str, *words: str, hint: str | None = None) -> InputError:
        """Return the error that names the file and the line on which the last of `words` stands."""
        return InputError(f"{self.path}:{find_line(self.text, *words)}: {message}", hint)


def parse_gates(path: str, text: str, rules: Collection[str]) -> Gates:
    """Return the gates of `text`, which stands in `path`; `rules`: the ids that there are.

    Raises InputError with file, line and key for what is wrong, and the nearest right name for one that is unknown.
    """
    file = _GatesFile(path, text, rules)
    values = parse_toml(path, text)
    _check_keys(file, values, (*METRICS, FINDINGS_TABLE), "metric", ())
    gates = tuple(_read_gate(file, name, table) for name, table in values.items() if name != FINDINGS_TABLE)
    findings = None
    if FINDINGS_TABLE in values:
        table = _read_table(file, FINDINGS_TABLE, values[FINDINGS_TABLE], ("fail_at", "new_at", "forbid", "allow", "required", "strict"))
        findings = FindingGate(
            fail_at=_read_severity(file, table, "fail_at"),
            new_at=_read_severity(file, table, "new_at"),
            forbid=_read_rules(file, table, "forbid"),
            allow=_read_rules(file, table, "allow"),
            required=_read_flag(file, FINDINGS_TABLE, table),
            strict=_read_flag(file, FINDINGS_TABLE, table, "strict", default=False),
            line=find_line(file.text, FINDINGS_TABLE),
        )
        if findings.fail_at is None and findings.new_at is None and not findings.forbid:
            raise file.error(f"{FINDINGS_TABLE}: no limit", FINDINGS_TABLE, hint="give one of fail_at, new_at, forbid")
        if both := sorted(set(findings.forbid) & set(findings.allow)):
            raise file.error(f"{FINDINGS_TABLE}: {both[0]} is both forbidden and allowed", FINDINGS_TABLE, both[0])
    if not gates and findings is None:
        raise InputError(f"{path}: no gates in it", "write a table such as [step_median_ms] with max = 12.0")
    return Gates(path=path, gates=gates, findings=findings)


def _check_keys(file: _GatesFile, values: Mapping[str, Any], names: Collection[str], what: str, where: tuple[str, ...]) -> None:
    for key in values:
        if key not in names:
            shown = ".".join((*where, key))
            raise file.error(f"{shown}: unknown {what}{suggest_nearest(key, names)}", *where, key, hint=f"there are {', '.join(names)}")


def _read_table(file: _GatesFile, name: str, found: Any, keys: Collection[str]) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise file.error(f"{name}: a table is needed", name, hint=f"write [{name}], and its limits below")
    _check_keys(file, found, keys, "key", (name,))
    return found


def _read_gate(file: _GatesFile, name: str, found: Any) -> Gate:
    table, limits = _read_table(file, name, found, (*_LIMITS, "required", "strict")), {}
    for key in (key for key in _LIMITS if key in table):
        value, unit = table[key], METRICS[name].unit if key != "tolerance_share" else "share"
        hint = "shares go from 0 to 1: 0.03 is 3 %" if unit == "share" else f"in {unit}"
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise file.error(f"{name}.{key}: a number is needed", name, key, hint=hint)
        try:
            limits[key] = limit = float(value)
        except OverflowError:
            limit = math.inf
        if not math.isfinite(limit):
            raise file.error(f"{name}.{key}: a finite number is needed", name, key)
        if unit == "share" and abs(limit) > 1:
            raise file.error(f"{name}.{key}: {limit:g} is no share", name, key, hint=hint)
    if not limits:
        raise file.error(f"{name}: no limit", name, hint=f"give one of {', '.join(_LIMITS)}")
    if limits.get("tolerance_share", 0.0) < 0:
        raise file.error(f"{name}.tolerance_share: not below 0", name, "tolerance_share", hint="0.03 allows 3 % worse than the baseline")
    if "min" in limits and "max" in limits and limits["min"] > limits["max"]:
        raise file.error(f"{name}: min is above max", name, "min")
    required, strict = _read_flag(file, name, table), _read_flag(file, name, table, "strict", default=False)
    return Gate(metric=name, required=required, strict=strict, line=find_line(file.text, name), **limits)


def _read_flag(file: _GatesFile, name: str, table: Mapping[str, Any], key: str = "required", *, default: bool = True) -> bool:
    value = table.get(key, default)
    if not isinstance(value, bool):
        raise file.error(f"{name}.{key}: true or false is needed", name, key)
    return value


def _read_severity(file: _GatesFile, table: Mapping[str, Any], key: str) -> Severity | None:
    value = table.get(key)
    known = get_args(Severity)
    if value is not None and value not in known:
        guess = suggest_nearest(value, known) if isinstance(value, str) else ""
        raise file.error(f"{FINDINGS_TABLE}.{key}: no severity{guess}", FINDINGS_TABLE, key, hint=f"one of {', '.join(known)}")
    severity: Severity | None = value
    return severity


def _read_rules(file: _GatesFile, table: Mapping[str, Any], key: str) -> tuple[str, ...]:
    values = table.get(key, [])
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise file.error(f"{FINDINGS_TABLE}.{key}: a list of rule ids is needed", FINDINGS_TABLE, key, hint=f'such as {key} = ["SYN-01"]')
    for value in values:
        if value not in file.rules:
            message = f"{FINDINGS_TABLE}.{key}: no rule {value!r}{suggest_nearest(value.upper(), file.rules)}"
            raise file.error(message, FINDINGS_TABLE, key, value, hint="see `gpudiag rules list`")
    return tuple(values)


def format_amount(value: float, unit: str) -> str:
    """Return a figure with its unit: milliseconds and bytes in the unit that fits, shares in percent."""
    if unit == "ms":
        return format_ns(value * 1e6)
    if unit == "GB":
        return format_bytes(value * 1e9)
    if unit == "share":
        return format_share(value, 1)
    return f"{value:,.4g} {unit}"


def format_span(span: tuple[float, float] | None, unit: str) -> str:
    """Return an interval in brackets, '' where there is none."""
    return f" (interval {format_amount(span[0], unit)} to {format_amount(span[1], unit)})" if span else ""


class Figure(msgspec.Struct, frozen=True):
    """A figure in the unit of its metric, and what it is of."""

    estimate: Estimate
    of: str


def measure_figure(metric: str, side: Measured, kind: StepsKind) -> Figure | Missing:
    """Return a metric of model.comparison.METRICS; `kind`: which steps tell the time of a step. Missing says why it is not known."""
    report, found = side.report, None
    if metric in _STEP_STATISTICS:
        found = estimate_step(side, kind, _STEP_STATISTICS[metric])
        count = len(list_walls(side, kind)) or report.steps.count
        of = f"{count} {'profiled' if kind == 'report' else kind} step{'' if count == 1 else 's'}"
        return Figure(found.times(1e-6), of) if found else Missing("no complete step was recorded")
    if metric == "samples_per_s":
        found = estimate_throughput(side)
        missing = Missing("no batch was seen in unprofiled steps: record a bundle, with prof.steps(loader)")
        return Figure(found, f"{len(side.plain_ns)} unprofiled steps") if found else missing
    if metric == "peak_memory_gb":
        if report.memory is None:
            return Missing("no allocation was recorded: record with memory=True (gpudiag run --memory)")
        most, whole = max(report.memory.peak_bytes, report.memory.run_peak_bytes or 0), report.memory.run_peak_bytes
        return Figure(Estimate(most / 1e9), "the whole run" if whole else "the recorded window")
    if metric == "joule_per_step":
        energy = report.energy
        if energy is None or energy.joule_per_step is None:
            return Missing(energy.reason if energy and energy.reason else "no power was sampled: a bundle of a run on a GPU has it")
        return Figure(Estimate(energy.joule_per_step), f"{energy.steps} {energy.of or 'steps'}")
    estimate = _estimate_mfu(side) if metric == "mfu_share" else _estimate_part(side, metric)
    if isinstance(estimate, Missing):
        return estimate
    return Figure(estimate, f"{report.steps.count} profiled step{'' if report.steps.count == 1 else 's'}")


_STEP_STATISTICS: dict[str, Statistic] = {"step_median_ms": np.median, "step_p95_ms": batch_means.compute_p95}


def _estimate_mfu(side: Measured) -> Estimate | Missing:
    """Return the utilisation; the work of a step is the same in all, so that it varies as their times do."""
    mfu = side.report.mfu
    if mfu is None:
        missing = [notice for notice in side.report.trust.notices if notice.code == NoticeCode.NO_MFU]
        return Missing(str(missing[0].params["reason"]) if missing else "the report has none")
    walls = batch_means.estimate_by_batches(side.analysed_ns, np.mean)
    error = None if walls is None or walls.error is None else mfu.share * walls.error / walls.value
    return Estimate(mfu.share, error, walls.batches if walls else 0)


def _estimate_part(side: Measured, metric: str) -> Estimate | Missing:
    breakdown = side.report.breakdown
    if breakdown.wall_ns <= 0:
        return Missing("no complete step was recorded")
    if metric != "idle_share":
        return Estimate(getattr(breakdown.buckets_ns, metric.removesuffix("_share")) / breakdown.wall_ns)
    found = None
    if side.idle_ns and sum(side.analysed_ns) > 0:
        rows = np.column_stack((np.asarray(side.idle_ns, dtype=np.float64), np.asarray(side.analysed_ns, dtype=np.float64)))
        found = batch_means.estimate_by_batches(rows, batch_means.compute_quotient)
    return found or Estimate(breakdown.idle_ns / breakdown.wall_ns)


DEFAULT_TOLERANCE = 0.05
"""Of the gates that hold where a baseline is given alone. Processes of one program differ by a few percent (memory layout, placement)."""

DEFAULT_GATES = Gates(
    gates=(
        Gate(metric="step_median_ms", tolerance_share=DEFAULT_TOLERANCE),
        Gate(metric="peak_memory_gb", tolerance_share=DEFAULT_TOLERANCE, required=False),
    ),
    findings=FindingGate(new_at="warning"),
)


def judge_gates(gates: Gates, run: Measured, baseline: Measured | None = None) -> tuple[GateResult, ...]:
    """Return what was found of each limit, in the order of the file.

    A limit fails where the figure is beyond it and the whole interval of the figure too; where the interval holds the limit the outcome
    is `within_noise`: not decided, which fails a strict gate only. A figure without an interval is judged by itself. Of a figure that is
    not known the outcome is `unknown`.
    """
    results = []
    for gate in gates.gates:
        if gate.max is not None:
            results.append(_judge_limit(gate, "max", gate.max, run))
        if gate.min is not None:
            results.append(_judge_limit(gate, "min", gate.min, run))
        if gate.tolerance_share is not None:
            results.append(_judge_tolerance(gate, gate.tolerance_share, run, baseline))
    if gates.findings is not None:
        before, doubt = (None, "") if baseline is None else (baseline.report, _doubt_new_findings(run, baseline))
        results += judge_finding_gate(gates.findings, run.report, before, doubt)
    return tuple(results)


def judge_against_each(gates: Gates, run: Measured, baselines: Sequence[Measured]) -> tuple[GateResult, ...]:
    """Return what was found of each limit against several recordings of one baseline: it is broken where it is against each of them.

    Two recordings of one program can differ by more than either varies within itself, which one recording does not show.
    """
    if not baselines:
        return judge_gates(gates, run)
    paths = [one.report.source.path for one in baselines]
    judged = zip(*(judge_gates(gates, run, one) for one in baselines), strict=True)
    return tuple(_combine_results(paths, results) for results in judged)


def _combine_results(paths: Sequence[str], results: Sequence[GateResult]) -> GateResult:
    """Return one result of those against each of the baselines at `paths`: the nearest to its limit; undecided where they disagree."""
    by_outcome = {result.outcome: result for result in results}
    if len(by_outcome) == 1:
        path, nearest = min(zip(paths, results, strict=True), key=lambda pair: abs((pair[1].value or 0.0) - (pair[1].limit or 0.0)))
        return (
            nearest if nearest.baseline is None else _hold_against_spread(nearest, path, [one.baseline for one in results if one.baseline])
        )
    if "passed" not in by_outcome or "unknown" in by_outcome:
        return by_outcome.get("unknown") or by_outcome["within_noise"]
    kept = " and ".join(path for path, result in zip(paths, results, strict=True) if result.outcome == "passed")
    broken = by_outcome.get("failed") or by_outcome["within_noise"]
    return msgspec.structs.replace(broken, outcome="within_noise", message=f"{broken.message}; undecided: not so against {kept}")


def _hold_against_spread(nearest: GateResult, path: str, baselines: Sequence[float]) -> GateResult:
    """Return the result against the nearest baseline, at `path`; undecided where it is beyond its limit by less than they differ by."""
    spread = max(baselines) / min(baselines)
    message = f"{nearest.message}; against {path}, the nearest of {len(baselines)} baselines, which differ by {format_ratio_change(spread)}"
    ratio, limit = nearest.value or 1.0, nearest.limit or 1.0
    if nearest.outcome != "failed" or max(ratio / limit, limit / ratio) > spread:
        return msgspec.structs.replace(nearest, message=message)
    return msgspec.structs.replace(nearest, outcome="within_noise", message=f"{message}: undecided, it is beyond its limit by no more")


def _doubt_new_findings(run: Measured, baseline: Measured) -> str:
    """Return why a new finding may be no change of the program: other programs, or a weak measurement while the step is not longer."""
    if disturbed := measure_disturbance(run, baseline).words:
        return disturbed
    ratio = estimate_step_ratio(baseline, run, choose_steps_kind(run, baseline))
    if ratio is not None and ratio.low is not None and ratio.low > 1:
        return ""
    weak = [name for name, side in (("run", run), ("baseline", baseline)) if find_weak_measurement(side.report)]
    return f"the step is not longer for certain, and the measurement of the {' and the '.join(weak)} is weak" if weak else ""


def _judge_limit(gate: Gate, side: str, limit: float, run: Measured) -> GateResult:
    name, unit = f"{gate.metric} {side}", METRICS[gate.metric].unit
    found = measure_figure(gate.metric, run, choose_steps_kind(run))
    if isinstance(found, Missing):
        return _build_unknown_result(gate, name, found.reason, limit)
    value, span = found.estimate.value, batch_means.estimate_interval(found.estimate)
    if span is not None:  # no figure is below 0, no share above 1
        span = max(span[0], 0.0), min(span[1], 1.0) if unit == "share" else span[1]
    disturbed = measure_disturbance(run) if METRICS[gate.metric].unit != "GB" else UNDISTURBED
    outcome, certainty = _decide_outcome(value, span, limit, upper=side == "max", disturbed=disturbed)
    allowed = f"{'at most' if side == 'max' else 'at least'} {format_amount(limit, unit)} allowed"
    return GateResult(
        name=name,
        outcome=outcome,
        message=f"{format_amount(value, unit)}{format_span(span, unit)}, {allowed}{certainty}; {found.of}",
        unit=unit,
        value=value,
        low=span[0] if span else None,
        high=span[1] if span else None,
        limit=limit,
        required=gate.required,
        strict=gate.strict,
        line=gate.line,
    )


def _decide_outcome(
    value: float, span: tuple[float, float] | None, limit: float, *, upper: bool, disturbed: Disturbance
) -> tuple[GateOutcome, str]:
    outcome, doubt = decide_outcome(value, span, limit, disturbed, upper=upper)
    if doubt:
        return outcome, f": beyond it, but {doubt}"
    return outcome, ": its variance is not known, judged by itself" if outcome == "failed" and span is None else ""


def _build_unknown_result(gate: Gate, name: str, reason: str, limit: float | None) -> GateResult:
    return GateResult(
        name=name, outcome="unknown", message=f"not known: {reason}", unit=METRICS[gate.metric].unit, limit=limit, required=gate.required,
        line=gate.line,
    )  # fmt: skip


def _judge_tolerance(gate: Gate, tolerance: float, run: Measured, baseline: Measured | None) -> GateResult:
    name, metric = f"{gate.metric} tolerance", METRICS[gate.metric]
    if baseline is None:
        return _build_unknown_result(gate, name, "no baseline was given: --baseline BUNDLE", None)
    kind: StepsKind = choose_steps_kind(run, baseline)
    found, before = measure_figure(gate.metric, run, kind), measure_figure(gate.metric, baseline, kind)
    if isinstance(found, Missing):
        return _build_unknown_result(gate, name, found.reason, None)
    if isinstance(before, Missing):
        return _build_unknown_result(gate, name, f"of the baseline: {before.reason}", None)
    if before.estimate.value <= 0:
        return _build_unknown_result(
            gate, name, f"the baseline has {format_amount(before.estimate.value, metric.unit)}: set max or min instead", None
        )
    old, new, upper = before.estimate, found.estimate, metric.worse == "higher"
    ratio, limit = new.value / old.value, 1 + tolerance if upper else 1 - tolerance
    span = batch_means.estimate_ratio(old, new)
    disturbed = measure_disturbance(run, baseline) if METRICS[gate.metric].unit != "GB" else UNDISTURBED
    outcome, certainty = _decide_outcome(ratio, span, limit, upper=upper, disturbed=disturbed)
    change = format_ratio_change(ratio)
    if span is not None:
        change += f", interval {(span[0] - 1) * 100:+.1f} to {format_ratio_change(span[1])}"
    allowed = f"{format_share(tolerance, 1)} {'more' if upper else 'less'} allowed{certainty}"
    amounts = f"{format_amount(new.value, metric.unit)} after {format_amount(old.value, metric.unit)}"
    return GateResult(
        name=name,
        outcome=outcome,
        message=f"{amounts} ({change}), {allowed}; {found.of}",
        unit="ratio",
        value=ratio,
        low=span[0] if span else None,
        high=span[1] if span else None,
        limit=limit,
        baseline=old.value,
        required=gate.required,
        strict=gate.strict,
        line=gate.line,
    )
