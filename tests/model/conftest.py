"""A report with every part filled in, as one H100 run could give it."""

from __future__ import annotations

import pytest
from noticecodes import recall_codes

from gpudiag.model.finding import Ceiling, Evidence, Finding, RuleOutcome, Where
from gpudiag.model.notices import NoticeCode, make_notice
from gpudiag.model.report import (
    CollectiveRow,
    IdleRow,
    KernelRow,
    Mfu,
    OpRow,
    ReportData,
    ReportDevice,
    Source,
    StepSummary,
    Tool,
    Trust,
)
from gpudiag.model.timeline import Breakdown, BucketsNs, DeviceTime

H100 = ReportDevice(
    name="NVIDIA H100 80GB HBM3",
    kind="gpu",
    provenance="datasheet",
    peaks={"fp32": 66.9e12, "bf16": 989.4e12},
    bandwidth_byte_per_s=3.35e12,
    sm_count=132,
    notes=("boost clock assumed",),
)
TRUST = Trust(
    events=18_221,
    kernels=1_200,
    linked_share=0.98,
    modelled_share=0.91,
    generic_share=0.06,
    unknown_share=0.03,
    modelled_share_of_all=0.8,
    dropped={"flow arrows": 2_400},
    profiler_slowdown=None,
    warnings=("no unprofiled steps: the profiler's own slow-down is not known",),
    notices=(make_notice(NoticeCode.RECORDED_TEXT, text="no unprofiled steps: the profiler's own slow-down is not known"),),
)
MATMUL = OpRow(
    name="aten::mm",
    phase="forward",
    module="layers.0.mlp",
    signature="bf16[559,1024] x bf16[1024,2816]",
    count=24,
    kernel_ns=300_000,
    flops=77.4e9,
    bytes=2.4e8,
    t_roof_ns=78_000.0,
    bound="compute",
    bound_ns={"compute": 300_000},
    efficiency=0.26,
    provenance="exact",
    dtype="bf16",
    where="model.py(12): forward",
)
LAUNCH_BOUND = Finding(
    rule="OVH-01",
    title="The host cannot issue work fast enough",
    severity="critical",
    bound="idle_launch",
    message="The device waited 4.0 ms of 10.0 ms for launches.",
    why="Small kernels end before the next launch arrives.",
    evidence=(Evidence("idle_launch_share", 0.4, "share"), Evidence("kernels_per_step", 1200, ""), Evidence("compiled", False, "")),
    ceiling=Ceiling(4_000_000, 0.4, "formula", "no launch gaps"),
    confidence="high",
    folded=("OVH-03",),
    fixes=("compile-reduce-overhead",),
    where=(Where("training step", "train.py", 40, 4_000_000),),
    references=("https://pytorch.org/blog/accelerating-pytorch-with-cuda-graphs/",),
)


@pytest.fixture
def report() -> ReportData:
    return recall_codes(
        ReportData(
            tool=Tool("gpudiag", "0.1.0"),
            source=Source("trace.json.gz", "trace", (0,)),
            device=H100,
            trust=TRUST,
            steps=StepSummary(3, "ProfilerStep", 10_000_000, 3_300_000, None, 3),
            device_time=DeviceTime(9_900_000, 6_000_000, 3_900_000, 5_500_000, 400_000, 300_000, 200_000, 200_000),
            breakdown=Breakdown(10_000_000, BucketsNs(compute=3_000_000, memory=2_500_000, exposed_copy=200_000, idle_launch=4_300_000)),
            mfu=Mfu(2.1e12, 0.21, "exact", "bf16", 0.91),
            ops=(MATMUL,),
            kernels=(KernelRow(name="sm90_gemm_bf16", kind="kernel", count=24, kernel_ns=300_000, bound="compute", op="aten::mm"),),
            idle=(IdleRow(cause="idle_launch", count=900, idle_ns=4_300_000, op="aten::add", file="model.py", line=12),),
            collectives=(CollectiveRow(name="allreduce", count=3, kernel_ns=400_000, group="default_pg", size=8, bytes=11_493_280),),
            findings=(LAUNCH_BOUND,),
            rules=(RuleOutcome("OVH-01", "fired"), RuleOutcome("INP-01", "not_applicable", "no loader events; record with prof.steps()")),
        )
    )
