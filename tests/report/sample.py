"""Hand-made reports for the renderers' tests: a training step on an H100, and variants where something is missing or hostile."""

from __future__ import annotations

from typing import Any

import msgspec
from noticecodes import recall_codes

from gpudiag.model.finding import Ceiling, Evidence, Finding, RuleOutcome, Where
from gpudiag.model.report import (
    CodeLines,
    CollectiveRow,
    CriticalRow,
    IdleRow,
    KernelRow,
    Mfu,
    MfuReference,
    OpRow,
    ReportData,
    ReportDevice,
    Source,
    StepSummary,
    SyncRow,
    Tool,
    Trust,
)
from gpudiag.model.timeline import Breakdown, BucketsNs, DeviceTime, QueueStats, ReplayedStep, ReplayTrust, WhatIf

MS = 1_000_000
STEPS = 4

HOSTILE = (
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(2)>",
    "\x1b[31mred\x1b[0m",
    "\x1b]0;owned\x07title",
    "abc\u202etxt.exe",
    "a|b`c``d|e",
    "x" * 10_000,
    "[bold red]markup[/bold red]",
    "{{ 7*7 }}{% for %}",
    "line\nbreak\r\n# heading",
    '"quoted" & \u2028 separated',
    "half \ud800 pair",
)

BUCKETS = {
    "compute": 90,
    "memory": 60,
    "overhead": 6,
    "unknown": 9,
    "exposed_communication": 15,
    "exposed_copy": 3,
    "idle_data": 5,
    "idle_launch": 100,
    "idle_sync": 8,
    "idle_dependency": 2,
    "idle_unexplained": 2,
}


def breakdown(milliseconds: dict[str, int]) -> Breakdown:
    """Return a breakdown over all analysed steps with the buckets in ms."""
    made = Breakdown(sum(milliseconds.values()) * MS, BucketsNs(**{name: value * MS for name, value in milliseconds.items()}))
    made.validate()
    return made


def op(name: str, ms: float, **changes: Any) -> OpRow:
    """Return an op row of `ms` milliseconds: a bf16 product at half of the H100's peak unless changed."""
    ns = int(ms * MS)
    row = OpRow(
        name=name,
        signature="[[4096,4096],[4096,4096]]",
        count=48,
        kernel_ns=ns,
        flops=ns * 1e-9 * 494.7e12,
        bytes=ns * 1e-9 * 362e9,
        t_roof_ns=ns / 2,
        bound="compute",
        efficiency=0.5,
        provenance="exact",
        dtype="bf16",
    )
    return msgspec.structs.replace(row, **changes)


def ops() -> tuple[OpRow, ...]:
    """Return op rows of every bound; one carries no cost."""
    memory = {"flops": 2e9, "bytes": 60e9, "t_roof_ns": 18.0 * MS, "bound": "memory", "efficiency": 0.45, "dtype": None}
    unknown = {"flops": None, "bytes": None, "t_roof_ns": None, "bound": "unknown", "efficiency": None, "provenance": "none", "dtype": None}
    return (
        op("aten::mm", 90),
        op("aten::add_", 40, **memory),
        op("NativeLayerNormBackward0", 20, module="model.layers.3.norm", **memory),
        op("aten::mul", 6, **{**memory, "bytes": 1e8, "t_roof_ns": 0.1 * MS, "bound": "overhead", "efficiency": 0.02}),
        op("mylib::custom_kernel", 9, **unknown),
        op("nccl:all_reduce", 20, **{**unknown, "bound": "communication"}),
    )


def finding(**changes: Any) -> Finding:
    """Return the finding of a launch-bound step."""
    made = Finding(
        rule="OVH-01",
        title="The GPU waits for the host",
        severity="critical",
        bound="idle_launch",
        message="Python and the framework issue work more slowly than the GPU finishes it: 25.0 ms of each step is such a wait.",
        why="A kernel that is launched after the device fell idle leaves a gap. Fewer launches, or launches prepared ahead, close it.",
        evidence=(
            Evidence("idle_launch_share", 0.333, "share", "Now breakdown.buckets_ns.idle_launch / wall_ns."),
            Evidence("kernels_per_step", 1840, "kernels"),
        ),
        ceiling=Ceiling(100 * MS, 100 / 300, "formula", "every kernel were launched before the device falls idle"),
        confidence="high",
        fixes=("compile-reduce-overhead", "compile"),
        where=(Where("loss.item()", "train.py", 41, 8 * MS),),
        references=("https://pytorch.org/docs/stable/notes/cuda.html#cuda-graphs", "rules.md OVH-01"),
    )
    return msgspec.structs.replace(made, **changes)


def device() -> ReportDevice:
    """Return an H100 SXM with the data sheet's dense peaks."""
    return ReportDevice(
        name="NVIDIA H100 80GB HBM3",
        kind="gpu",
        provenance="datasheet",
        peaks={"fp32": 66.9e12, "tf32": 494.7e12, "bf16": 989.4e12, "fp16": 989.4e12, "fp8": 1978.9e12},
        bandwidth_byte_per_s=3.35e12,
        sm_count=132,
        source="NVIDIA H100 data sheet",
    )


def trust(**changes: Any) -> Trust:
    """Return the trust block of a well recorded run with one warning."""
    made = Trust(
        events=216_092,
        kernels=7_360,
        linked_share=0.98,
        modelled_share=0.88,
        generic_share=0.07,
        unknown_share=0.05,
        modelled_share_of_all=0.71,
        without_launch_share=0.02,
        dropped={"flow arrows": 15_012},
        profiler_slowdown=1.07,
        warnings=("Stacks were not recorded: call sites are not known.",),
    )
    return msgspec.structs.replace(made, **changes)


def report(**changes: Any) -> ReportData:
    """Return a whole report; `changes` replaces fields of ReportData."""
    made = ReportData(
        tool=Tool("gpudiag", "0.1.0"),
        source=Source("runs/bert/trace.json.gz", "trace", (0,)),
        device=device(),
        trust=trust(),
        steps=StepSummary(STEPS, "ProfilerStep", 300 * MS, 75 * MS, 78 * MS, 6),
        device_time=DeviceTime(300 * MS, 183 * MS, 117 * MS, 165 * MS, 20 * MS, 15 * MS, 4 * MS, 3 * MS),
        breakdown=breakdown(BUCKETS),
        mfu=Mfu(4.45e13, 0.15, "exact", "bf16", 0.88),
        ops=ops(),
        kernels=(KernelRow(name="sm90_xmma_gemm_bf16bf16", kind="kernel", count=48, kernel_ns=90 * MS, bound="compute", op="aten::mm"),),
        idle=(
            IdleRow(cause="idle_launch", count=640, idle_ns=100 * MS, op="aten::add_", file="model.py", line=12),
            IdleRow(cause="idle_sync", count=4, idle_ns=8 * MS, op="aten::_local_scalar_dense"),
        ),
        collectives=(CollectiveRow(name="allreduce", count=16, kernel_ns=20 * MS, group="default_pg", size=8, bytes=1_600_000_000),),
        findings=(finding(),),
        rules=(
            RuleOutcome("OVH-01", "fired"),
            RuleOutcome("INP-01", "passed"),
            RuleOutcome("MEM-03", "not_applicable", "no attention op was recorded"),
        ),
    )
    return recall_codes(msgspec.structs.replace(made, **changes))


def replayed(**changes: Any) -> ReportData:
    """Return a report whose idle time has causes, and whose steps were replayed."""
    steps = (ReplayedStep("#2", "fastest", 74 * MS, 73 * MS, MS), ReplayedStep("#4", "median, slowest", 76 * MS, 77 * MS, 0))
    fields: dict[str, Any] = {
        "idle": (
            IdleRow(cause="idle_launch", count=640, idle_ns=100 * MS, op="aten::add_", file="exp/model.py", line=12, evidence="sleep()"),
            IdleRow(cause="idle_sync", count=4, idle_ns=8 * MS, op="aten::item", evidence="cudaStreamSynchronize waited for a copy"),
            IdleRow(cause="idle_data", count=4, idle_ns=1 * MS),
        ),
        "syncs": (
            SyncRow(
                api="cudaStreamSynchronize",
                op="aten::item",
                count=4,
                wall_ns=40 * MS,
                waited_ns=32 * MS,
                cost_ns=8 * MS,
                file="train.py",
                line=41,
            ),
        ),
        "queue": QueueStats(1840.0, 1840.0, 3_100_000, 5_000, 9_000_000, 120.0, 480, 0.1, 0.16, (0, 100, 200), (1.0, 3.0, 0.0)),
        "critical_path": (
            CriticalRow(kind="kernel", bound="compute", path_ns=61 * MS, share=0.61),
            CriticalRow(kind="host", bound="launch", path_ns=20 * MS, share=0.20),
            CriticalRow(kind="launch", bound="launch", path_ns=2 * MS, share=0.02),
            CriticalRow(kind="delay", bound="dependency", path_ns=17 * MS, share=0.17),
        ),
        "replay": ReplayTrust(steps, 0.018, 0.004),
        "what_ifs": (
            WhatIf("launch=0", "one CUDA graph issues the step", 75.0 * MS, 50.0 * MS, 1 / 3, short="one CUDA graph launches all work"),
            WhatIf("roof=0.8", "kernels at 80 % of their roof", 75.0 * MS, 60.0 * MS, 0.2, short="all work at 80 % of its roofline"),
        ),
        "trust": trust(replay_error_share=0.018),
    }
    return report(**(fields | changes))


def roofline() -> ReportData:
    """Return a report with recomputed work, published references, an op over its roof and kernels of graph replays."""
    rows = (
        op("aten::mm", 90, phase="backward", recompute_ns=30 * MS, engine="bf16", occupancy=0.42, waves=1.25),
        op("aten::addmm", 10, phase="backward", recompute_ns=10 * MS),
        op("aten::relu", 5, efficiency=None, over_roof=1.31, over_roof_cause="cache", t_roof_ns=6.55 * MS),
    )
    replayed = KernelRow(name="nvjet_tst_128x256", kind="kernel", count=12, kernel_ns=40 * MS, bound="unknown", kernel_class="gemm")
    published = (
        MfuReference("Llama 3.1 8B, FSDP, 8 H100", 0.356, "989 TFLOP/s bf16", "https://example.org/table"),
        MfuReference("Megatron-LM, 3072 A100", 0.524, "312 TFLOP/s bf16", "SC21, table 1"),
    )
    mfu = Mfu(1.0e14, 0.336, "exact", "bf16", 0.97, peak_flop_per_s=989.4e12, recompute_flops=3e13, hfu_share=0.437, references=published)
    return report(ops=rows, kernels=(replayed,), mfu=mfu)


def no_device() -> ReportData:
    """Return a report where the device is not known, so that nothing could be judged against a roof."""
    rows = tuple(msgspec.structs.replace(row, t_roof_ns=None, bound="unknown", efficiency=None) for row in ops())
    warning = "the device is not named in the recording: no roofline"
    buckets = breakdown({"unknown": 180, "idle_launch": 120})
    return report(device=None, mfu=None, ops=rows, breakdown=buckets, trust=trust(warnings=(warning,)))


def hostile() -> ReportData:
    """Return a report where every string that can come from a trace or a rule is hostile."""
    rows = tuple(op(text, 5 + k, module=text, signature=text, where=text) for k, text in enumerate(HOSTILE))
    everything = "".join(HOSTILE[:6]) + HOSTILE[9] + HOSTILE[10]
    return report(
        source=Source(everything, "trace"),
        device=msgspec.structs.replace(device(), name=everything, source=everything, notes=(everything,)),
        trust=trust(warnings=HOSTILE, dropped=dict.fromkeys(HOSTILE, 3)),
        steps=StepSummary(STEPS, everything, 300 * MS, 75 * MS, 78 * MS),
        ops=rows,
        mfu=Mfu(1e13, 0.1, "exact", everything, 0.9, 989e12, 1e12, 0.11, tuple(MfuReference(text, 0.4, text, text) for text in HOSTILE)),
        kernels=tuple(
            KernelRow(name=text, kind=text, count=1, kernel_ns=MS, bound="unknown", op=text, kernel_class=text) for text in HOSTILE
        ),
        idle=tuple(IdleRow(cause=text, count=1, idle_ns=MS * 9, op=text, file=text, line=1, evidence=text) for text in HOSTILE),
        syncs=tuple(SyncRow(api=text, op=text, count=1, wall_ns=9 * MS, waited_ns=0, cost_ns=MS, file=text, line=1) for text in HOSTILE),
        critical_path=tuple(CriticalRow(kind=text, bound=text, path_ns=MS, share=0.08) for text in HOSTILE),
        replay=ReplayTrust(tuple(ReplayedStep(text, text, MS, MS, 0) for text in HOSTILE), 0.1, 0.1),
        what_ifs=tuple(WhatIf(text, text, 2.0 * MS, 1.0 * MS, 0.5) for text in HOSTILE),
        collectives=tuple(CollectiveRow(name=text, count=1, kernel_ns=MS, group=text) for text in HOSTILE),
        findings=tuple(
            finding(
                rule=text,
                title=text,
                message=text,
                why=text,
                evidence=(Evidence(text, text, text, text),),
                ceiling=Ceiling(MS, 0.1, "formula", text),
                folded=(text,),
                fixes=(text,),
                where=(Where(text, text, 3),),
                references=(text, f"javascript:{text}", f'https://example.org/"{text}'),
            )
            for text in HOSTILE
        ),
        rules=tuple(RuleOutcome(text, "not_applicable", text) for text in HOSTILE),
        code=tuple(CodeLines(file=text, line=3, lines=HOSTILE) for text in HOSTILE),
    )


def many_ops(count: int) -> ReportData:
    """Return a report with `count` ops of falling cost."""
    return report(ops=tuple(op(f"aten::op_{k:04d}", 0.01 * (count - k), count=k + 1) for k in range(count)))
