"""Runs with known steps and ops, for comparisons and gates: `run(walls=[...], ops={OpKey("aten::mm"): [...]})`. Times in ns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpudiag.model.bundle import Machine, Settings
from gpudiag.model.comparison import Measured, OpKey
from gpudiag.model.finding import Ceiling, Finding, RuleOutcome, Severity
from gpudiag.model.report import IdleRow, OpRow, Recorded, ReportData, ReportDevice, Source, StepSummary, Tool, Trust
from gpudiag.model.timeline import Breakdown, BucketsNs

SHARES: dict[str, Any] = {
    "linked_share": 1.0, "modelled_share": 1.0, "generic_share": 0.0, "unknown_share": 0.0, "modelled_share_of_all": 1.0
}  # fmt: skip


def row(key: OpKey, ns: int, count: int, **more: Any) -> OpRow:
    """Return an op row of which only the time is known, and what `more` says."""
    known: dict[str, Any] = {
        "flops": None, "bytes": None, "t_roof_ns": None, "bound": "unknown", "efficiency": None, "provenance": "none",
        "count": count, **more,
    }  # fmt: skip
    return OpRow(name=key.name, phase=key.phase, module=key.module, signature=key.signature, kernel_ns=ns, **known)


def finding(rule: str, severity: Severity = "warning", share: float | None = 0.1, **changes: Any) -> Finding:
    """Return a finding with a ceiling of `share` of the step."""
    ceiling = None if share is None else Ceiling(round(share * 1e6), share, "formula", "it is gone")
    return Finding(
        rule=rule, title=f"title of {rule}", severity=severity, bound="compute", message=f"message of {rule}", ceiling=ceiling, **changes
    )


def recorded(settings: Settings | None = None, **machine: Any) -> Recorded:
    """Return what a run was recorded with."""
    return Recorded(machine=Machine(**{"torch": "2.8.0", "cpu": "a CPU", **machine}), settings=settings or Settings(threads=2))


def run(
    walls: Sequence[int] = (),
    ops: Mapping[OpKey, Sequence[int]] | None = None,
    *,
    plain: Sequence[int] = (),
    samples: Sequence[int | None] | None = None,
    idle: Sequence[int] | None = None,
    findings: Sequence[Finding] = (),
    passed: Sequence[str] = (),
    outcomes: Sequence[RuleOutcome] = (),
    stepwise: bool = True,
    device: str = "a GPU",
    work: Mapping[OpKey, Mapping[str, Any]] | None = None,
    command: tuple[str, ...] = (),
    idle_rows: tuple[IdleRow, ...] = (),
    **report: Any,
) -> Measured:
    """Return a run with the analysed steps `walls` and the unprofiled ones `plain`; not `stepwise`: as a report read from a file.

    `work`: more of the row of an op, such as its flops; what no op has of the busy time belongs to work that was launched before.
    """
    walls, idle = list(walls), list(idle or [0] * len(walls))
    made = ReportData(
        tool=Tool("gpudiag", "0"),
        source=Source("runs/x", "bundle"),
        device=ReportDevice(device, "gpu", None),
        trust=Trust(events=1, kernels=1, **SHARES),
        steps=StepSummary(
            len(walls), "ProfilerStep marks", sum(walls), sorted(walls)[len(walls) // 2] if walls else None, max(walls, default=None)
        ),
        device_time=None,
        breakdown=Breakdown(sum(walls), BucketsNs(compute=sum(walls) - sum(idle), idle_data=sum(idle))),
        ops=tuple(row(key, sum(times), **{"count": len(times), **(work or {}).get(key, {})}) for key, times in (ops or {}).items()),
        idle=idle_rows,
        findings=tuple(findings),
        rules=(
            *(RuleOutcome(one.rule, "fired", one.message) for one in findings),
            *(RuleOutcome(rule, "passed") for rule in passed),
            *outcomes,
        ),
        **{"mfu": None, **report},
    )
    if not stepwise:
        return Measured(report=made)
    return Measured(
        report=made, plain_ns=tuple(plain), plain_samples=tuple(samples if samples is not None else [None] * len(plain)),
        analysed_ns=tuple(walls), idle_ns=tuple(idle), ops={key: tuple(times) for key, times in (ops or {}).items()},
        parts_ns={"compute": tuple(wall - wait for wall, wait in zip(walls, idle, strict=True)), "idle_data": tuple(idle)},
        device_ns={key: tuple(map(float, times)) for key, times in (ops or {}).items()}, command=command,
    )  # fmt: skip
