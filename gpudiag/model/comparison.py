"""Two runs set side by side, the JSON of `gpudiag compare`; gates and what `gpudiag check` found of each.

`StepComparison` is not `model.experiment.Comparison`: that one is of many live pairs of processes and can prove that a change helps.
This one is of two recordings, and its intervals hold the variance within them alone. Times are ns a step unless a name says otherwise.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from gpudiag.model.finding import Severity
from gpudiag.model.hardware import DeviceKind
from gpudiag.model.report import ReportData
from gpudiag.model.timeline import BUCKETS

CHECK_SCHEMA_VERSION = 1

GateOutcome = Literal["passed", "within_noise", "failed", "unknown"]
"""`within_noise`: beyond the limit, but no further than the figure varies within the run; `unknown`: the run does not tell."""


class Metric(msgspec.Struct, frozen=True):
    """A figure that a gate can be set on: its unit as gates are written, and which direction is worse."""

    unit: str
    worse: Literal["higher", "lower"]
    doc: str


METRICS: dict[str, Metric] = {
    "step_median_ms": Metric("ms", "higher", "median step"),
    "step_p95_ms": Metric("ms", "higher", "95th percentile of the steps"),
    "samples_per_s": Metric("samples/s", "lower", "samples of the batches over the time of their steps"),
    "mfu_share": Metric("share", "lower", "model FLOPs utilisation"),
    "idle_share": Metric("share", "higher", "share of the step in which the device does nothing"),
    "peak_memory_gb": Metric("GB", "higher", "most memory in use, as recorded"),
    "joule_per_step": Metric("J", "higher", "energy of the device"),
    **{f"{name}_share": Metric("share", "higher", f"part {name} of the step") for name in BUCKETS},
}


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on one metric, in its unit; None: none of that kind."""

    metric: str
    max: float | None = None
    min: float | None = None
    tolerance_share: float | None = None
    """How much worse than the baseline it may be, as a share of the baseline's figure."""
    required: bool = True
    """Whether a figure that is not known fails."""
    strict: bool = False
    """Whether a figure beyond the limit fails also where its interval does not decide it."""
    line: int | None = None
    """Of the file of gates."""


class FindingGate(msgspec.Struct, frozen=True, kw_only=True):
    """What may not be found."""

    fail_at: Severity | None = None
    """Findings of this severity or above fail."""
    new_at: Severity | None = None
    """Of those that the baseline does not have, the ones of this severity or above fail."""
    forbid: tuple[str, ...] = ()
    """Ids of rules that may not fire, whatever their severity."""
    allow: tuple[str, ...] = ()
    """Ids of rules that never fail."""
    required: bool = True
    """Whether a forbidden rule that could not be judged fails."""
    strict: bool = False
    """Whether findings fail also where other programs disturbed a recording."""
    line: int | None = None


class Gates(msgspec.Struct, frozen=True, kw_only=True):
    """What a file of gates says."""

    path: str = ""
    """'' for those that hold where a baseline alone is given."""
    gates: tuple[Gate, ...] = ()
    findings: FindingGate | None = None

    @property
    def needs_baseline(self) -> bool:
        """Return whether any of them compares with a baseline."""
        relative = any(gate.tolerance_share is not None for gate in self.gates)
        return relative or (self.findings is not None and self.findings.new_at is not None)


class GateResult(msgspec.Struct, frozen=True, kw_only=True):
    """What was found of one limit. Figures are in `unit`; null: not known, or not a figure."""

    name: str
    """Metric and kind of limit, such as 'step_median_ms max'; of findings 'findings fail_at'."""
    outcome: GateOutcome
    message: str
    """The decision in one sentence."""
    unit: str = ""
    value: float | None = None
    low: float | None = None
    """Interval of 95 % of the value (of a limit against a baseline: of their ratio), for the variance within the run; null: not known."""
    high: float | None = None
    limit: float | None = None
    baseline: float | None = None
    required: bool = True
    strict: bool = False
    line: int | None = None

    @property
    def fails(self) -> bool:
        """Return whether the whole check fails for it."""
        required = {"failed": True, "unknown": self.required, "within_noise": self.strict}
        return required.get(self.outcome, False)


class CheckData(msgspec.Struct, frozen=True, kw_only=True):
    """All gates of one run: the JSON of `gpudiag check`."""

    schema_version: int = CHECK_SCHEMA_VERSION
    path: str
    budget: str = ""
    baseline: str = ""
    """The first of `baselines`."""
    baselines: tuple[str, ...] = ()
    """Several recordings of one program: a limit is broken where it is against each of them."""
    results: tuple[GateResult, ...] = ()
    warnings: tuple[str, ...] = ()
    """Why run and baseline may not be comparable."""
    passed: bool = True
    """Whether no gate fails."""


COMPARISON_SCHEMA_VERSION = 1

Matched = Literal["exact", "shapes", "name", "alone"]
"""How an op was found on the other side: by name, phase, module and signature; with other shapes; by its name alone; not at all."""

Change = Literal["faster", "slower", "unchanged", "new", "gone", "not_known"]
"""`unchanged`: the difference is small, or within what the op varies from step to step; `not_known`: how much it varies is not known."""

StepsKind = Literal["unprofiled", "profiled", "report"]
"""Which steps were compared; `report`: a report was given, which holds their median alone."""


class RunSide(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two runs."""

    path: str
    kind: Literal["trace", "bundle", "folder"]
    device: str
    device_kind: DeviceKind | None
    steps: int
    """Steps whose times were compared."""
    median_ns: int | None
    p95_ns: int | None
    samples_per_s: float | None = None
    """Samples of the unprofiled steps over their wall time; null: batches were not seen."""
    analysed_steps: int
    """Steps that ops and parts are means of."""
    op_ns: float
    """Time of all ops launched in a step: a sum over streams and threads, so that it may exceed the step."""


class StepRatio(msgspec.Struct, frozen=True, kw_only=True):
    """Median step of B over that of A: above 1 where B is slower."""

    value: float
    low: float | None = None
    """Interval of `level`, for the variance within these two runs; another run may differ by more. Null: `reason` says why."""
    high: float | None = None
    level: float = 0.95
    steps: StepsKind
    batches: tuple[int, int] = (0, 0)
    """Batches of consecutive steps that the interval rests on, of A and of B."""
    reason: str = ""


class OpChange(msgspec.Struct, frozen=True, kw_only=True):
    """One op in both runs. Where rows of several shapes or modules stand for it, times are their sums."""

    name: str
    phase: str | None = None
    module: str | None = None
    signature_a: str | None = None
    signature_b: str | None = None
    matched: Matched
    change: Change
    a_ns: float | None
    """Mean kernel time a step; null: the op is not in A."""
    b_ns: float | None
    a_spread_ns: float | None = None
    """Standard deviation of that time from step to step; null: not known (one step, or a report that was read from a file)."""
    b_spread_ns: float | None = None
    delta_ns: float
    """B less A, an op that is not there counting as nothing."""
    low_ns: float | None = None
    """Interval of delta_ns at the level of `StepComparison.op_level`."""
    high_ns: float | None = None
    a_calls: float | None = None
    """Calls a step; null: not there."""
    b_calls: float | None = None
    a_flops: float | None = None
    """FLOP a step; null: not there, or not known."""
    b_flops: float | None = None
    a_bytes: float | None = None
    """Compulsory bytes a step; null: not there, or not known."""
    b_bytes: float | None = None


class PartChange(msgspec.Struct, frozen=True):
    """One part of the step breakdown (model.timeline.BUCKETS) in both runs, mean of the analysed steps."""

    name: str
    a_ns: float
    b_ns: float


class FindingChange(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that fired in one of the runs, or in both."""

    rule: str
    title: str
    change: Literal["came", "went", "stayed"]
    a_severity: Severity | None = None
    b_severity: Severity | None = None
    a_ceiling_share: float | None = None
    """The most that mending it gives, as a share of the step."""
    b_ceiling_share: float | None = None
    reason: str = ""
    """Of the run without it: '' where the rule passed, else why it could not be judged there. A finding that went so is not mended."""


class SettingChange(msgspec.Struct, frozen=True, kw_only=True):
    """Something that was set otherwise in B, or that the recordings saw otherwise."""

    name: str
    """Its place, such as 'loader.num_workers', 'settings.threads', 'packages.numpy', 'variables.OMP_NUM_THREADS', 'command', 'samples'."""
    label: str
    a: str
    b: str


OpCause = Literal[
    "slower", "faster", "more_work", "less_work", "more_calls", "fewer_calls", "other_shapes", "unknown_work", "other_type",
    "other_kernels", "recompute", "data_work", "replaced", "new", "gone",
]  # fmt: skip
"""What happened to ops. slower, faster: the same work takes another time; more_work, less_work: a call has more or less FLOP or bytes;
other_shapes: how much work they have is not known; unknown_work: neither shapes nor work are; other_type, other_kernels: the same calls on
another element type, by other kernels; recompute: forward work repeated in the backward pass; data_work: ops that make batches; replaced:
ops of one phase that are gone, and others that are new there."""

CauseKind = str
"""An OpCause; a part of the step that is no work of ops (model.timeline.BUCKETS); or what is left: 'other_work', work on the device that
was not launched in these steps; 'small', all that changed by no more than it varies, or by next to nothing; 'rest', what of the
difference the profiled steps do not have."""


class CausePart(msgspec.Struct, frozen=True, kw_only=True):
    """An op, or a place of idle time, within a cause. Times are ns a step, work that runs beside other work shared with it."""

    name: str
    phase: str | None = None
    a_ns: float
    b_ns: float
    signature_a: str | None = None
    signature_b: str | None = None
    a_calls: float | None = None
    b_calls: float | None = None
    a_flops: float | None = None
    b_flops: float | None = None
    kernel_a: str | None = None
    """Of other_kernels: the kernel that took most of its time; null: not recorded."""
    kernel_b: str | None = None
    file: str | None = None
    line: int | None = None

    @property
    def delta_ns(self) -> float:
        """Return B less A."""
        return self.b_ns - self.a_ns


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the difference of two steps."""

    kind: CauseKind
    phase: str | None = None
    """Of ops that are new, gone or replaced: the phase in which they are; null: several, or not recorded."""
    a_ns: float
    b_ns: float
    delta_ns: float
    share: float | None = None
    """delta_ns over the difference of the steps; below 0: it works against it. Null: there is no difference."""
    low_ns: float | None = None
    """Interval of 95 % of delta_ns, for the variance from step to step; null: not known."""
    high_ns: float | None = None
    parts: tuple[CausePart, ...] = ()
    """The largest of them."""
    settings: tuple[str, ...] = ()
    """Names of the `settings` that it is consistent with, the most specific first: none is proved to be why."""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """The difference of two steps, taken apart: the deltas of `causes` sum to difference_ns."""

    difference_ns: float
    """Of the steps that StepComparison.ratio compares, B less A."""
    profiled_ns: float
    """Of the means of the analysed steps: what the causes but 'rest' sum to."""
    causes: tuple[Cause, ...] = ()
    """Those in the direction of the difference first, the largest first; then those against it; then small, other_work and rest."""
    settings: tuple[SettingChange, ...] = ()
    work_ratio: float | None = None
    """How much more work calls of the same ops have in B: that of the median time in ops whose FLOP or bytes are known; null: of none."""
    settings_known: bool = True
    """Whether both recordings tell what they were recorded with; False: `settings` are those that both tell."""
    same_program: bool | None = None
    """Whether most ops have their like on the other side; null: no ops to tell it by."""


class StepComparison(msgspec.Struct, frozen=True, kw_only=True):
    """What changed from A to B: the JSON of `gpudiag compare`."""

    schema_version: int = COMPARISON_SCHEMA_VERSION
    a: RunSide
    b: RunSide
    ratio: StepRatio | None
    """Null: one of them has no complete step."""
    verdict: Literal["faster", "slower", "no_difference", "not_known"]
    """Of the median step: `no_difference` where the interval holds 1."""
    same_recording: bool = False
    """Whether both hold the very same steps: one recording read twice."""
    aligned_a_share: float | None = None
    """Share of the op time of A whose op was found in B; null: A has none."""
    aligned_b_share: float | None = None
    op_level: float = 0.99
    """Level of the intervals of single ops: there are many of them, and the more, the more are wrong by chance."""
    ops: tuple[OpChange, ...] = ()
    """Largest difference first."""
    parts: tuple[PartChange, ...] = ()
    findings: tuple[FindingChange, ...] = ()
    explanation: Explanation | None = None
    """Null: one of them has no complete step."""
    warnings: tuple[str, ...] = ()
    """Why the two may not be comparable: other devices, settings, batches, kinds of recordings."""
    gate: GateResult | None = None
    """Of --fail-if-slower; null: not asked for."""


class OpKey(NamedTuple):
    """What tells one row of an op table from another."""

    name: str
    phase: str | None = None
    module: str | None = None
    signature: str | None = None


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One side of a comparison. Empty: not known, as of a report that was read from a file."""

    report: ReportData
    rank: int | None = None
    """The rank that was measured; None: of a recording of one, or not told."""
    plain_ns: tuple[int, ...] = ()
    """Wall time of each step outside windows, in their order, without the first ones of the run. A trace alone has none."""
    plain_samples: tuple[int | None, ...] = ()
    """Samples of each of these steps; null: not seen."""
    analysed_ns: tuple[int, ...] = ()
    """Wall time of each analysed step, in their order: those that the profiler recorded."""
    idle_ns: tuple[int, ...] = ()
    """Idle time of the device in each analysed step."""
    ops: dict[OpKey, tuple[int, ...]] = {}
    """Kernel time of an op in ns, by the analysed step that launched it."""
    parts_ns: dict[str, tuple[int, ...]] = {}
    """Each part of the breakdown (model.timeline.BUCKETS) in each analysed step."""
    device_ns: dict[OpKey, tuple[float, ...]] = {}
    """Time of each analysed step in which an op's work ran on the device: what runs at once shares it, and messages and copies, which
    count where nothing hides them, have none. With these and what is idle it sums to the step."""
    command: tuple[str, ...] = ()
    """The program and its arguments, as `gpudiag run` was given them; (): not known."""
