"""The op table: sums by group, filters, order."""

from __future__ import annotations

import random
from pathlib import Path

import kept
import msgspec
import pytest
import report_sample as sample

from gpudiag import api
from gpudiag.errors import InputError, UsageError
from gpudiag.model.report import KernelRow, OpRow, ReportData
from gpudiag.report.op_table import OpGroup, build_op_table

MS = sample.MS


def row(name: str, ms: float, **changes: object) -> OpRow:
    """Return a row without any cost unless `changes` gives one."""
    nothing = {"flops": None, "bytes": None, "t_roof_ns": None, "efficiency": None, "bound": "unknown", "provenance": "none", "dtype": None}
    return sample.op(name, ms, **{**nothing, **changes})


def table(*rows: OpRow, **options: object) -> list[OpGroup]:
    return list(build_op_table(sample.report(ops=rows), **options).groups)  # type: ignore[arg-type]


def test_a_group_sums_its_rows_and_judges_what_has_a_roof() -> None:
    known = {"flops": 6e9, "bytes": 3e6, "t_roof_ns": 3.0 * MS, "bound": "compute", "provenance": "exact", "dtype": "bf16"}
    (group,) = table(row("aten::mm", 4, **known), row("aten::mm", 2, flops=2e9, bytes=1e6, t_roof_ns=1.5 * MS), row("aten::mm", 6, count=4))
    assert (group.rows, group.calls, group.kernel_ns, group.share) == (3, 48 + 48 + 4, 12 * MS, 1.0)
    assert group.efficiency == 4.5 / 6  # the row without a roof says nothing of it
    assert group.judged_share == 6 / 12
    assert (group.flops.value, group.flops.ns, group.bytes.value) == (8e9, 6 * MS, 4e6)
    assert group.intensity == 2000
    assert (group.bound, group.bound_ns) == ("unknown", {"compute": 4 * MS, "unknown": 8 * MS})
    assert (group.dtype, group.provenance) == (None, None)  # they differ


def test_the_bound_is_the_one_with_most_time_over_all_rows() -> None:
    first = row("aten::copy_", 5, bound="memory", bound_ns={"memory": 3 * MS, "overhead": 2 * MS})
    second = row("aten::copy_", 4, bound="overhead", bound_ns={"overhead": 4 * MS})
    assert table(first, second)[0].bound == "overhead"  # 6 ms against 3 ms


def test_a_row_over_its_roof_lifts_no_efficiency() -> None:
    beaten = row("aten::mm", 2, t_roof_ns=8.0 * MS, over_roof=4.0)
    (group,) = table(beaten, row("aten::mm", 4, t_roof_ns=2.0 * MS, efficiency=0.5))
    assert (group.efficiency, group.over_roof_ns, group.judged_share) == (0.5, 2 * MS, 4 / 6)
    (alone,) = table(beaten)
    assert (alone.efficiency, alone.over_roof_ns) == (None, 2 * MS)


def test_no_efficiency_is_above_what_a_measurement_may_be_off() -> None:
    rng = random.Random(5)
    rows = [
        row(f"op{rng.randrange(4)}", 1 + rng.random(), t_roof_ns=(e := rng.random() * 1.5) * MS, efficiency=e / 1.5) for _ in range(200)
    ]
    rows = [msgspec.structs.replace(r, efficiency=(r.t_roof_ns or 0) / r.kernel_ns) for r in rows]
    assert all(group.efficiency is None or group.efficiency <= 1.03 for group in table(*rows))


@pytest.mark.parametrize("grouping", ["op", "signature", "phase"])
def test_groups_part_the_whole(grouping: str) -> None:
    rng = random.Random(3)
    rows = [
        row(f"op{rng.randrange(5)}", rng.random(), signature=f"[{rng.randrange(3)}]", phase=rng.choice(["forward", "backward", None]))
        for _ in range(300)
    ]
    groups = table(*rows, grouping=grouping)
    assert sum(group.kernel_ns for group in groups) == sum(r.kernel_ns for r in rows)
    assert sum(group.calls for group in groups) == sum(r.count for r in rows)
    assert sum(group.rows for group in groups) == 300
    assert sum(group.share or 0 for group in groups) == pytest.approx(1)


def test_filters_keep_shares_of_the_whole() -> None:
    rows = (row("a", 3, phase="forward", bound="memory"), row("b", 1, phase="backward", bound="memory"), row("c", 4, phase="backward"))
    assert [(g.name, g.share) for g in table(*rows, phase="backward")] == [("c", 0.5), ("b", 0.125)]
    assert [g.name for g in table(*rows, phase="backward", bound="memory")] == ["b"]


def test_a_phase_that_does_not_occur_names_those_that_do() -> None:
    with pytest.raises(InputError, match="no op has the phase 'fwd'") as error:
        table(row("a", 1, phase="forward"), row("b", 1, phase="before the window"), phase="fwd")
    assert "forward, launched before the recording" in str(error.value)


def test_modules_that_were_not_recorded_are_said() -> None:
    with pytest.raises(InputError, match=r"nn\.Module"):
        table(row("a", 1), grouping="module")
    groups = table(row("a", 1, module="Net.layer1"), row("b", 2), grouping="module")
    assert [group.name for group in groups] == ["(unknown)", "Net.layer1"]


@pytest.mark.parametrize(
    ("sorting", "order"),
    [("time", "cab"), ("calls", "bca"), ("flops", "abc"), ("bytes", "bac"), ("efficiency", "bac"), ("ai", "abc")],
)
def test_order_and_the_unknown_last(sorting: str, order: str) -> None:
    rows = (
        row("a", 2, count=1, flops=9e9, bytes=1e6, t_roof_ns=1.0 * MS, efficiency=0.5),
        row("b", 1, count=3, flops=1e9, bytes=2e6, t_roof_ns=0.1 * MS, efficiency=0.1),
        row("c", 5, count=2),
    )
    assert "".join(group.name for group in table(*rows, sorting=sorting)) == order


def _kernels(*kernels: KernelRow) -> ReportData:
    count = sum(kernel.count for kernel in kernels)
    return sample.report(kernels=kernels, trust=sample.trust(kernels=count))


def test_kernels_have_time_alone() -> None:
    gemm = KernelRow(name="gemm", kind="kernel", count=2, kernel_ns=3 * MS, bound="compute", op="aten::mm", kernel_class="gemm")
    again = msgspec.structs.replace(gemm, bound="overhead", kernel_ns=MS, op="aten::addmm")
    report = _kernels(again, gemm, KernelRow(name="copy", kind="memcpy", count=9, kernel_ns=MS, bound="copy"))
    first, second = build_op_table(report, grouping="kernel").groups
    assert (first.name, first.calls, first.share, first.bound, first.op, first.kernel_class) == (
        "gemm",
        4,
        0.8,
        "compute",
        "aten::mm",
        "gemm",
    )
    assert second.kernel_class is None
    assert [group.name for group in build_op_table(report, grouping="kernel", sorting="calls").groups] == ["copy", "gemm"]
    assert build_op_table(report, grouping="kernel").cut == 0
    cut = msgspec.structs.replace(report, trust=sample.trust(kernels=99))
    assert build_op_table(cut, grouping="kernel").cut == 3
    with pytest.raises(UsageError, match="sorted by flops"):
        build_op_table(report, grouping="kernel", sorting="flops")
    with pytest.raises(UsageError, match="phase"):
        build_op_table(report, grouping="kernel", phase="forward")
    with pytest.raises(InputError, match="the device is the CPU"):
        build_op_table(sample.report(kernels=()), grouping="kernel")


@pytest.mark.parametrize("grouping", ["op", "signature", "phase", "module"])
def test_groups_of_a_real_trace_part_its_time(traces: Path, grouping: str) -> None:
    trace = traces / "h100_qwen1.5-0.5b_prefill.json.gz"
    report = api.diagnose(trace, modules=True).data if grouping == "module" else kept.report(trace)
    groups = build_op_table(report, grouping=grouping).groups  # type: ignore[arg-type]
    assert sum(group.kernel_ns for group in groups) == 45_647_300  # the durations of the file's 1,707 device events, added up
    assert all(group.efficiency is None or 0 <= group.efficiency <= 1.03 for group in groups)
    if grouping == "module":
        known = sum(group.share or 0.0 for group in groups if group.module)
        assert known > 0.65  # 30 % were launched before the recording
        assert "Qwen2Model_0.Qwen2DecoderLayer_13.Qwen2Attention_13" in {group.name for group in groups}
