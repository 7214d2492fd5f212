"""What torch.compile did, joined with the trace by the clock and by the ids of compiled regions (times in us)."""

from __future__ import annotations

from typing import Any

import msgspec
import polars as pl
from factories import A100, CPU, US, analysis, gap, kernel, op

from gpudiag.facts import Facts
from gpudiag.facts.compilations import build_compile_report, list_break_places, list_recompiled_places
from gpudiag.model.analysis import Analysis
from gpudiag.model.compilation import CodePlace, Compilation, CompileLog, CompileReport, FailedGuard, GraphBreak
from gpudiag.model.finding import Missing, Where

BASE = 1_700_000_000 * 10**9
FORWARD = CodePlace("app/train.py", 6, "forward")
READ = GraphBreak(
    reason="Unsupported Tensor.item() call",
    kind="number",
    stack=(CodePlace("app/run.py", 3, "run"), CodePlace("app/train.py", 8, "forward")),
)


def compiled(number: str, start: float, end: float, **more: Any) -> Compilation:
    return Compilation(
        id=number, begun_unix_ns=BASE + round(start * US), duration_ns=round((end - start) * US), **{"place": FORWARD, **more}
    )


def logged(made: Analysis, *compilations: Compilation, breaks: tuple[GraphBreak, ...] = ()) -> Facts:
    meta = msgspec.structs.replace(made.trace.meta, unix_base_ns=BASE)
    ops = made.trace.ops.with_columns(step=pl.lit(0, dtype=made.trace.ops.schema["step"]))
    trace = msgspec.structs.replace(made.trace, meta=meta, ops=ops)
    return Facts(msgspec.structs.replace(made, trace=trace, compile_log=CompileLog(compilations=compilations, breaks=breaks)))


def report(facts: Facts) -> CompileReport:
    found = build_compile_report(facts.window)
    assert found is not None
    return found


def test_a_compilation_costs_the_idle_time_of_the_steps_that_it_lies_in() -> None:
    size = FailedGuard(kind="size", name="x", expected="8", actual="9")
    waits = [gap(100, 600, cause="idle_compile"), gap(700, 800, cause="idle_launch")]
    made = analysis([kernel("aten::mm", 0, 100)], idle=waits, device=A100)
    facts = logged(
        made,
        compiled("0/0", -9_000, -1_000),
        compiled("0/1", 50, 550, guard=size),
        compiled("0/1", 560, 750, place=FORWARD, backward=True),
        compiled("0/2", 5_000, 6_000, guard=size),
    )
    found = report(facts)
    assert (found.compilations, found.functions, found.in_steps) == (4, 1, 2)
    assert found.idle_ns == (450 + 40 + 50) * US
    (row,) = found.recompiles
    assert (row.count, row.in_steps, row.idle_ns) == (2, 1, 540 * US)  # its backward graph is no compilation more, and costs
    assert row.compile_ns == (500 + 190 + 1_000) * US
    assert (row.kind, row.name, row.values, row.cure) == ("size", "x", (("8", "9"),), "dynamic")
    assert facts.value("recompiled_at") == "app/train.py:6 (forward)"
    assert facts.value("recompiled_times") == 2
    assert facts.value("recompile_reason_known") is True
    assert list_recompiled_places(facts.window) == (Where("forward compiled again", "app/train.py", 6, 540 * US),)


def test_on_a_cpu_all_time_of_compiling_is_no_training() -> None:
    facts = logged(analysis([kernel("aten::mm", 0, 900)], device=CPU), compiled("0/0", 100, 300))
    assert report(facts).idle_ns == 200 * US


def test_where_the_clocks_cannot_be_matched_costs_are_not_known_instead_of_0() -> None:
    made = analysis([kernel("aten::mm", 0, 100)], device=A100)
    log = CompileLog(compilations=(compiled("0/1", 0, 50, guard=FailedGuard(kind="value", name="k", expected="1")),))
    found = build_compile_report(Facts(msgspec.structs.replace(made, compile_log=log)).window)
    assert found is not None
    assert (found.idle_ns, found.recompiles[0].idle_ns) == (None, None)


def test_a_break_is_passed_where_the_rest_of_its_function_runs() -> None:
    """Graphs at 10 and 250 us in one region; the second is the rest of `forward` after its line 8, which the log calls frame 2."""
    ops = [op("Torch-Compiled Region: 1/0", 0, 500), op("Torch-Compiled Region: 2/1", 210, 480)]
    ops += [op("CompiledFunction", 10, 200), op("CompiledFunction", 250, 480)]
    rest = compiled("2/1", -500, -400, place=CodePlace("app/train.py", 8, "forward"), resumes_at=8)
    other = GraphBreak(reason="Call to `torch._dynamo.graph_break()`", kind="asked", stack=(CodePlace("app/eval.py", 4, "evaluate"),))
    facts = logged(analysis(ops=ops, device=CPU), compiled("1/0", -900, -600), rest, breaks=(other, READ))
    first, second = report(facts).breaks
    assert (first.place, first.kind, first.crossed, first.between_ns) == (READ.stack[1], "number", 1, 50 * US)
    assert first.function == READ.stack[0]
    assert (second.place, second.kind, second.crossed, second.between_ns) == (other.stack[0], "asked", 0, None)
    assert facts.value("break_at") == "app/train.py:8 (forward)"
    assert facts.value("break_kind") == "number"
    assert list_break_places(facts.window) == (Where("Unsupported Tensor.item() call", "app/train.py", 8, 50 * US),)


def test_what_is_compiled_between_two_graphs_is_no_cost_of_the_break() -> None:
    ops = [op("Torch-Compiled Region: 1/0", 0, 900), op("Torch-Compiled Region: 2/1", 610, 880)]
    ops += [op("CompiledFunction", 10, 200), op("CompiledFunction", 650, 880), op("_compile.compile_inner (dynamo_timed)", 220, 600)]
    rest = compiled("2/1", -500, -400, place=CodePlace("app/train.py", 8, "forward"), resumes_at=8)
    facts = logged(analysis(ops=ops, device=CPU), rest, breaks=(READ,))
    assert report(facts).breaks[0].between_ns == (20 + 50) * US
    assert facts.value("break_ns") == (900 - 380) / 2 * US  # half of what runs in the region: one graph would be entered once


def test_without_regions_in_the_trace_breaks_are_told_without_costs() -> None:
    (row,) = report(logged(analysis(ops=[op("aten::mm", 0, 10)], device=CPU), breaks=(READ,))).breaks
    assert (row.crossed, row.between_ns, row.idle_ns) == (None, None, None)


def test_without_a_log_nothing_is_said() -> None:
    facts = Facts(analysis([kernel("aten::mm", 0, 10)]))
    assert build_compile_report(facts.window) is None
    assert isinstance(facts.value("break_at"), Missing)
    assert isinstance(facts.value("recompiled_at"), Missing)
    assert facts.value("recompile_reason_known") is False
