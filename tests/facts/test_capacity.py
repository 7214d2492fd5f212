"""Facts about memory that is used, free, or held for nothing, and about forward work that is repeated to save it."""

from __future__ import annotations

from typing import Any

import msgspec
import polars as pl
import pytest
from factories import CPU, analysis, kernel

from gpudiag.facts import Facts
from gpudiag.model.finding import Missing
from gpudiag.model.hardware import ColumnRange, Telemetry
from gpudiag.model.memory import MemoryReport

GB = 10**9
REPORT = MemoryReport(
    device="cuda:0", peak_bytes=40 * GB, run_peak_bytes=48 * GB, reserved_peak_bytes=60 * GB, capacity_bytes=80 * GB, ooms=1,
    by_category={"parameters": 8 * GB, "optimizer_state": 16 * GB, "activations": 12 * GB, "unknown": 4 * GB},
)  # fmt: skip
DRIVER = Telemetry(
    source="nvml", interval_ns=1, samples=9, over="all steps", columns={"mem_used_bytes": ColumnRange(1, 60e9, 60e9, 9, "B")},
    limits={"memory_bytes": 80e9},
)  # fmt: skip


def facts(memory: MemoryReport | None = REPORT, telemetry: Telemetry | None = None, **changes: Any) -> Facts:
    return Facts(msgspec.structs.replace(analysis([kernel("aten::mm", 0, 100)], **changes), memory=memory, telemetry=telemetry))


def test_the_figures_of_a_recorded_peak() -> None:
    found = facts()
    expected = {
        "allocated_peak_share": 0.6, "memory_in_use_share": 0.6, "unused_reserve_share": 0.15, "reserved_share": 0.75,
        "out_of_memory_errors": 1,
        # activations and what is not told, 40 % of the peak, grow: (0.92 - 0.6) / (0.6 x 0.4)
        "batch_growth_room": 1 + 0.32 / 0.24,
    }  # fmt: skip
    assert {name: found.value(name) for name in expected} == pytest.approx(expected)
    assert found.value("memory_uses") == "optimizer state 40 %, activations 30 %, parameters 20 %, unknown 10 %"
    assert found.value("largest_memory_use") == "optimizer_state"
    assert found.errors == {}


def test_without_the_allocator_the_driver_tells_what_is_in_use() -> None:
    found = facts(None, DRIVER)
    assert found.value("memory_in_use_share") == 0.75  # an upper bound: context and reserve count
    assert isinstance(found.value("allocated_peak_share"), Missing)
    assert found.value("batch_growth_room") == pytest.approx(1 + 0.17 / 0.75)


def test_a_full_device_has_no_room() -> None:
    assert facts(msgspec.structs.replace(REPORT, run_peak_bytes=79 * GB)).value("batch_growth_room") == 1


def test_unknown_memory_is_not_zero() -> None:
    for name in ("memory_in_use_share", "allocated_peak_share", "batch_growth_room", "unused_reserve_share", "out_of_memory_errors"):
        assert isinstance(facts(None).value(name), Missing), name
    bare = msgspec.structs.replace(REPORT, capacity_bytes=None, reserved_peak_bytes=None, ooms=None)
    for name in ("allocated_peak_share", "unused_reserve_share", "reserved_share", "out_of_memory_errors"):
        assert isinstance(facts(bare).value(name), Missing), name


def test_a_cpu_run_has_no_memory_of_a_device() -> None:
    for name in ("allocated_peak_share", "unused_reserve_share", "reserved_share", "out_of_memory_errors"):
        assert facts(device=CPU).value(name) == Missing("no accelerator: this run used the CPU only"), name


def test_forward_work_that_the_backward_pass_repeats() -> None:
    work = [kernel("aten::mm", 0, 100), kernel("aten::mm", 100, 200, phase="backward"), kernel("aten::mm", 200, 400, phase="backward")]
    made = analysis(work)
    ops = made.trace.ops.with_columns(recompute=pl.col("start_ns") == 100_000)
    found = Facts(msgspec.structs.replace(made, trace=msgspec.structs.replace(made.trace, ops=ops)))
    assert found.value("recompute_share") == pytest.approx(0.1)
    assert found.value("without_recompute_ns") == pytest.approx(100_000)
    assert Facts(made).value("recompute_share") == 0
    assert isinstance(Facts(analysis(work[:1])).value("recompute_share"), Missing)
