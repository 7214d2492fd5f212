"""Why B is slower than A: planted causes come first, the parts sum to the difference, and what was set otherwise is joined to its part."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from compared import recorded, run
from hypothesis import given
from hypothesis import strategies as st

from gpudiag.comparison.steps import compare_runs
from gpudiag.model.bundle import LoaderSettings, OptimizerSettings, Program, Settings
from gpudiag.model.comparison import Cause, Explanation, Measured, OpKey
from gpudiag.model.report import KernelRow, ReportDevice
from gpudiag.report.blocks import Table
from gpudiag.report.causes import build_causes_section, format_nothing_set, format_unlike
from gpudiag.report.comparison import format_comparison_headline

MM, ADD, GELU = (OpKey(name, "forward", None, "[8, 8]") for name in ("aten::mm", "aten::add", "aten::gelu"))
WALLS = [10_000_000, 10_100_000, 9_900_000, 10_050_000, 9_950_000, 10_020_000]
MS = 1_000_000


def _times(ms: float) -> list[int]:
    """Return the time of an op in six steps, which varies by a percent."""
    return [round(ms * MS * (1 + 0.01 * (place % 3 - 1))) for place in range(6)]


def _explain(a: Measured, b: Measured) -> Explanation:
    found = compare_runs(a, b).explanation
    assert found is not None
    assert sum(cause.delta_ns for cause in found.causes) == pytest.approx(found.difference_ns, abs=1)
    return found


def _first(a: Measured, b: Measured) -> Cause:
    return _explain(a, b).causes[0]


def _longer(ms: float) -> list[int]:
    return [wall + round(ms * MS) for wall in WALLS]


def test_a_loader_without_workers_is_what_the_step_waits_for() -> None:
    loader = LoaderSettings(num_workers=4, pin_memory=False, persistent_workers=False)
    settings = Settings(threads=2, loader=loader), Settings(threads=2, loader=msgspec.structs.replace(loader, num_workers=0))
    idle = [100_000 + 1_000 * place for place in range(6)]
    a = run(WALLS, {MM: _times(5)}, idle=idle, recorded=recorded(settings[0]))
    b = run(_longer(2.6), {MM: _times(5)}, idle=[ns + 2_600_000 for ns in idle], recorded=recorded(settings[1]))
    cause = _first(a, b)
    assert (cause.kind, cause.settings) == ("idle_data", ("loader.num_workers",))
    assert cause.delta_ns == pytest.approx(2_600_000)
    assert cause.low_ns < 2_600_000 < cause.high_ns
    headline = format_comparison_headline(compare_runs(a, b))
    assert "2.60 ms of it is waiting for the next batch; loader workers went from 4 to 0" in headline
    assert headline.startswith("B takes 2.60 ms (")


CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "more_work": ({"flops": 6e9, "dtype": "fp32"}, {"flops": 12e9, "dtype": "fp32"}),
    "more_calls": ({"flops": 6e9, "count": 6}, {"flops": 12e9, "count": 12}),
    "other_type": ({"flops": 6e9, "dtype": "bf16"}, {"flops": 6e9, "dtype": "fp32"}),
    "slower": ({"flops": 6e9, "dtype": "fp32"}, {"flops": 6e9, "dtype": "fp32"}),
    "recompute": ({}, {"recompute_ns": 24 * MS}),
}


@pytest.mark.parametrize("kind", CALLS)
def test_what_happened_to_an_op_is_told_by_its_work(kind: str) -> None:
    work = CALLS[kind]
    a = run(WALLS, {MM: _times(4), ADD: _times(1)}, work={MM: work[0]})
    b = run(_longer(4), {MM: _times(8), ADD: _times(1)}, work={MM: work[1]})
    cause = _first(a, b)
    assert cause.kind == kind
    assert [part.name for part in cause.parts] == ["aten::mm"]
    assert cause.share == pytest.approx(1.0, abs=0.05)


def test_less_is_told_as_such_where_b_is_faster() -> None:
    a = run(_longer(4), {MM: _times(8)}, work={MM: {"flops": 12e9}})
    cause = _first(a, run(WALLS, {MM: _times(4)}, work={MM: {"flops": 6e9}}))
    assert cause.kind == "less_work"
    assert cause.share == pytest.approx(1.0, abs=0.05)


def test_ops_in_place_of_others_are_one_cause() -> None:
    flash, bmm, softmax = (OpKey(name, "forward") for name in ("aten::flash_attention", "aten::bmm", "aten::softmax"))
    other = OpKey("aten::fill_", "optimizer")
    a = run(WALLS, {flash: _times(2), MM: _times(4)})
    b = run(_longer(3), {bmm: _times(3), softmax: _times(1.5), MM: _times(4), other: _times(0.5)})
    found = _explain(a, b)
    assert [(cause.kind, cause.phase) for cause in found.causes[:2]] == [("replaced", "forward"), ("new", "optimizer")]
    assert found.causes[0].delta_ns == pytest.approx(2.5 * MS)
    assert {part.name for part in found.causes[0].parts} == {"aten::flash_attention", "aten::bmm", "aten::softmax"}


def test_other_kernels_of_the_same_op_are_named_with_the_precision_that_was_switched_off() -> None:
    def side(kernel: str, ms: float, tf32: bool, walls: list[int]) -> Measured:
        kernels = (KernelRow(name=kernel, kind="kernel", count=6, kernel_ns=round(6 * ms * MS), bound="compute", op="aten::mm"),)
        told = recorded(Settings(threads=2, cuda_matmul_allow_tf32=tf32))
        work = {MM: {"flops": 6e9, "dtype": "fp32", "engine": "tf32" if tf32 else "fp32"}}
        return run(walls, {MM: _times(ms), ADD: _times(1)}, kernels=kernels, recorded=told, work=work)

    cause = _first(side("tf32_gemm", 2, True, WALLS), side("ampere_sgemm_128x64", 7, False, _longer(5)))
    assert (cause.kind, cause.settings) == ("other_kernels", ("settings.cuda_matmul_allow_tf32",))
    assert (cause.parts[0].kernel_a, cause.parts[0].kernel_b) == ("tf32_gemm", "ampere_sgemm_128x64")


def test_the_optimizer_s_implementation_explains_its_ops_alone() -> None:
    def side(way: Any, key: OpKey, ms: float, walls: list[int]) -> Measured:
        told = recorded(Settings(threads=2, optimizers=(OptimizerSettings("AdamW", 1_000, 10, implementation=way),)))
        return run(walls, {key: _times(ms), MM: _times(4 if way == "fused" else 4.5)}, recorded=told, work={MM: {"flops": 6e9}})

    fused, loop = OpKey("aten::_fused_adamw_", "optimizer"), OpKey("aten::addcdiv_", "optimizer")
    found = _explain(side("fused", fused, 1, WALLS), side("for-loop", loop, 4, _longer(3.5)))
    told = {cause.kind: cause.settings for cause in found.causes}
    assert told["replaced"] == ("settings.optimizers",)
    assert told["slower"] == ()


def test_parts_that_one_setting_explains_come_first_by_their_sum() -> None:
    fused, loop, more = (OpKey(name, "optimizer") for name in ("aten::_fused_adamw_", "aten::addcdiv_", "aten::add_"))

    def side(way: Any, ops: dict[OpKey, list[int]], calls: int, walls: list[int]) -> Measured:
        told = recorded(Settings(threads=2, optimizers=(OptimizerSettings("AdamW", 1_000, 10, implementation=way),)))
        same = {OpKey("aten::conv2d", "forward"): _times(4)}
        return run(walls, {**ops, **same}, recorded=told, work={MM: {"flops": 6e9}, more: {"count": calls}})

    a = side("fused", {MM: _times(2), fused: _times(1), more: _times(0.5)}, 6, WALLS)
    b = side("for-loop", {MM: _times(4), loop: _times(2.8), more: _times(2)}, 12, _longer(5.3))
    found = _explain(a, b)
    assert [cause.kind for cause in found.causes[:3]] == ["replaced", "more_calls", "slower"], "1.8 and 1.5 ms together, then 2.0 ms"
    headline = format_comparison_headline(compare_runs(a, b))
    assert "3.30 ms of it is other ops in place of those of A (optimizer) and 1 more part below; optimizers went from" in headline


def test_new_ops_of_one_line_are_one_cause_whose_line_is_named() -> None:
    """`losses.append(output[i].item())` after the step: the read is of no pass, the row that it takes has a gradient."""
    select, item, elsewhere = OpKey("aten::select", "forward"), OpKey("aten::item", "other"), OpKey("aten::fill_", "optimizer")
    line = {"where": "project/train.py(31): log"}
    b = run(_longer(4), {MM: _times(4), select: _times(2), item: _times(1.5), elsewhere: _times(0.5)}, work={select: line, item: line})
    a = run(WALLS, {MM: _times(4)})
    first, second = _explain(a, b).causes[:2]
    assert (first.kind, first.phase, {part.line for part in first.parts}) == ("new", None, {31})
    assert first.delta_ns == pytest.approx(3.5 * MS)
    assert (second.kind, second.phase) == ("new", "optimizer")
    assert "3.50 ms of it is ops that A does not have, at project/train.py:31" in format_comparison_headline(compare_runs(a, b))


def test_what_no_setting_reaches_is_joined_with_none_of_them() -> None:
    a = run(WALLS, {MM: _times(4)}, recorded=recorded(Settings(threads=2, allocator={"expandable_segments": "True"})))
    b = run(_longer(4), {MM: _times(8)}, recorded=recorded(Settings(threads=2)))
    assert _first(a, b).settings == ()
    assert [setting.name for setting in _explain(a, b).settings] == ["settings.allocator"]


@pytest.mark.parametrize(("kind", "names"), [("cpu", ("settings.anomaly_detection",)), ("gpu", ())])
def test_anomaly_detection_slows_the_ops_of_a_cpu_and_no_kernel(kind: Any, names: tuple[str, ...]) -> None:
    def side(walls: list[int], ms: float, on: bool) -> Measured:
        told = recorded(Settings(threads=2, anomaly_detection=on))
        made = run(walls, {MM: _times(ms)}, recorded=told, work={MM: {"flops": 6e9}})
        return msgspec.structs.replace(made, report=msgspec.structs.replace(made.report, device=ReportDevice("a device", kind, None)))

    cause = _first(side(WALLS, 4, False), side(_longer(4), 8, True))
    assert (cause.kind, cause.settings) == ("slower", names)


def test_a_changed_command_and_variable_stand_behind_what_is_more_specific() -> None:
    program = [Program(variables={"OMP_NUM_THREADS": value}) for value in ("4", "1")]
    told = [msgspec.structs.replace(recorded(Settings(threads=threads)), program=one) for threads, one in zip((4, 1), program, strict=True)]
    a = run(WALLS, {MM: _times(4)}, recorded=told[0], command=("train.py", "--lr", "0.1"))
    b = run(_longer(4), {MM: _times(8)}, recorded=told[1], command=("train.py", "--lr", "0.2", "--fast"))
    found = _explain(a, b)
    assert found.causes[0].settings == ("settings.threads", "variables.OMP_NUM_THREADS", "command")
    command = next(setting for setting in found.settings if setting.name == "command")
    assert (command.a, command.b) == ("--lr 0.1", "--lr 0.2 --fast")


def test_two_recordings_of_one_program_differ_by_noise_alone() -> None:
    a = run(WALLS, {MM: _times(4), ADD: _times(1)}, recorded=recorded())
    b = run([wall + 3_000 for wall in WALLS[::-1]], {MM: _times(4)[::-1], ADD: _times(1.001)}, recorded=recorded())
    found = compare_runs(a, b)
    assert format_comparison_headline(found).startswith("No difference beyond noise")
    assert found.explanation is not None
    assert {cause.kind for cause in found.explanation.causes} <= {"small", "other_work", "rest"}
    assert found.explanation.same_program is True


@pytest.mark.parametrize(("slower_ms", "shares"), [(2.6, True), (0.0, False)])
def test_a_difference_that_may_be_none_has_no_shares(slower_ms: float, shares: bool) -> None:
    """Beside a difference of 3 us in 10 ms a part of 2.6 ms would be 86,000 % of it."""
    idle = [100_000 + 1_000 * place for place in range(6)]
    b = run([ns + 3_000 for ns in _longer(slower_ms)][::-1], {MM: _times(7.6 - slower_ms)}, idle=[ns + 2_600_000 for ns in idle])
    section = build_causes_section(compare_runs(run(WALLS, {MM: _times(5)}, idle=idle), b))
    assert section is not None
    table = next(block for block in section.blocks if isinstance(block, Table))
    assert ("share" in [column.title for column in table.columns]) is shares
    assert {len(row.cells) for row in table.rows} == {len(table.columns)}


def test_a_certain_difference_without_a_changed_setting_may_be_that_of_two_recordings() -> None:
    a, changed = (run(WALLS, {MM: _times(4)}, recorded=recorded(Settings(threads=threads))) for threads in (2, 4))
    b = run(_longer(2), {MM: _times(4)}, recorded=recorded(Settings(threads=2)))
    assert "how far two recordings of one program differ" in format_nothing_set(compare_runs(a, b))
    new = run(_longer(2), {MM: _times(4), ADD: _times(2)}, recorded=recorded(Settings(threads=2)))
    assert format_nothing_set(compare_runs(a, new)).endswith("otherwise: the code differs, or the data that it works on.")
    for other in (run(_longer(2), {MM: _times(4)}), run(WALLS[::-1], {MM: _times(4)}, recorded=recorded()), changed):
        assert format_nothing_set(compare_runs(a, other)) == ""


def test_many_ops_that_are_each_within_their_noise_are_slower_together() -> None:
    ops = [OpKey(f"aten::op{number}", "forward") for number in range(200)]
    noisy = [[round(50_000 * (1 + 0.2 * ((place * 7 + number) % 5 - 2))) for place in range(6)] for number in range(200)]
    work = {key: {"flops": 6e6} for key in ops}
    a = run([12_000_000] * 6, dict(zip(ops, noisy, strict=True)), work=work)
    b = run([12_800_000] * 6, dict(zip(ops, ([round(1.08 * ns) for ns in one] for one in noisy), strict=True)), work=work)
    cause = _first(a, b)
    assert cause.kind == "slower"
    assert cause.share == pytest.approx(1.0, abs=0.02)


def test_another_program_is_not_explained() -> None:
    a = run(WALLS, {OpKey(f"aten::a{number}", "forward"): _times(0.5) for number in range(10)})
    b = run(_longer(9), {OpKey(f"aten::b{number}", "forward"): _times(1.2) for number in range(12)})
    assert _explain(a, b).same_program is False
    assert "do not look like recordings of the same program" in format_unlike(compare_runs(a, b))


def test_what_the_unprofiled_steps_alone_show_is_named_as_the_rest() -> None:
    plain = [5_000_000 + 1_000 * (place % 4) for place in range(9)]
    found = compare_runs(run(WALLS, {MM: _times(4)}, plain=plain), run(WALLS[::-1], {MM: _times(4)}, plain=[2 * ns for ns in plain]))
    assert found.explanation is not None
    assert found.explanation.causes[-1].kind == "rest"
    assert found.explanation.causes[-1].share == pytest.approx(1.0, abs=0.05)
    assert "the profiled steps do not show most of it" in format_comparison_headline(found)


def test_a_report_from_a_file_has_causes_without_intervals() -> None:
    a = run(WALLS, {MM: _times(4)}, stepwise=False, work={MM: {"flops": 6e9}})
    b = run(_longer(4), {MM: _times(8)}, stepwise=False, work={MM: {"flops": 12e9}})
    cause = _first(a, b)
    assert (cause.kind, cause.low_ns) == ("more_work", None)


TIMES = st.lists(st.integers(0, 10**6), min_size=4, max_size=4)


@given(st.dictionaries(st.sampled_from("abcdef"), TIMES), st.dictionaries(st.sampled_from("abcdef"), TIMES), st.data())
def test_the_parts_sum_to_the_difference_whatever_changed(first: dict[str, list[int]], second: dict[str, list[int]], data: Any) -> None:
    sides = []
    for times in (first, second):
        idle = data.draw(TIMES)
        walls = [1 + wait + 6 * 10**6 for wait in idle]
        plain = data.draw(st.lists(st.integers(1, 10**9), min_size=9, max_size=9))
        sides.append(run(walls, {OpKey(name, "forward"): ns for name, ns in times.items()}, idle=idle, plain=plain))
    found = compare_runs(*sides).explanation
    assert found is not None
    assert sum(cause.delta_ns for cause in found.causes) == pytest.approx(found.difference_ns, abs=1)
    profiled = sum(cause.delta_ns for cause in found.causes if cause.kind != "rest")
    assert profiled == pytest.approx(found.profiled_ns, abs=2)
