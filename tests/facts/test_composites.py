"""Patterns of single ops, and what fusing them saves, against worked numbers (times in us; A100: 2.039 TB/s)."""

from __future__ import annotations

import msgspec
import polars as pl
import pytest
from factories import CPU, US, analysis, gap, kernel

from gpudiag.facts import Facts
from gpudiag.facts.memory_bound import PatternItem, find_patterns
from gpudiag.model.analysis import Analysis
from gpudiag.model.finding import Missing

BANDWIDTH = 2.039e12
FULL, ROW = 1 << 22, 1 << 12


def names_of(*names: str, numel: int = FULL) -> list[str]:
    items = [PatternItem(row, f"aten::{name}", numel if name not in ("rsqrt", "sqrt") else ROW) for row, name in enumerate(names)]
    return [match.name for match in find_patterns(items)]


@pytest.mark.parametrize(
    ("ops", "found"),
    [
        ("pow mean add rsqrt mul mul", "RMS norm"),
        ("to pow mean add rsqrt mul to mul", "RMS norm"),  # Hugging Face casts to fp32 and back
        ("mean sub pow mean sub add sqrt div mul add", "layer norm"),
        ("mean std sub mul add div add", "layer norm"),
        ("max sub exp sum div", "softmax"),
        ("mul pow mul add mul tanh add mul", "GELU"),
        ("div erf add mul mul", "GELU"),
        ("mul neg cat mul add", "rotary embedding"),
        ("sub pow mean", "mean squared error"),
    ],
)
def test_known_spellings_are_recognised(ops: str, found: str) -> None:
    assert names_of(*ops.split()) == [found]


@pytest.mark.parametrize("ops", ["pow mm mean add rsqrt mul", "mul add mul add", "native_layer_norm mul", "exp mul sum", "tanh mul"])
def test_other_sequences_and_fused_forms_are_none(ops: str) -> None:
    assert names_of(*ops.split()) == []


def test_sizes_that_do_not_fit_are_no_pattern() -> None:
    one_large = [PatternItem(row, f"aten::{name}", FULL if not row else 1) for row, name in enumerate(("exp", "sum", "div"))]
    assert find_patterns(one_large) == []


def rms_norm(device: object = None, **more: object) -> Analysis:
    """Return a forward RMS norm of a 4096 x 1024 fp32 tensor: 100 us for each op of the full size, 10 us for the small ones."""
    shapes = {"mean": [[4096, 1024]], "add": [[4096, 1]], "rsqrt": [[4096, 1]]}
    work, now = [], 0.0
    for name in ("pow", "mean", "add", "rsqrt", "mul", "mul"):
        shape = shapes.get(name, [[4096, 1024]])
        took = 10 if name in ("add", "rsqrt") else 100
        numel = shape[0][0] * shape[0][1]
        work.append(kernel(f"aten::{name}", now, now + took, shapes=shape, bytes_moved=8.0 * numel, flops=1.0))
        now += took
    return analysis([*work, *more.pop("also", [])], **({"device": device} if device else {}), **more)  # type: ignore[arg-type, misc]


def test_an_rms_norm_against_one_pass() -> None:
    facts = Facts(rms_norm())
    assert facts.value("composite_kinds") == "RMS norm"
    assert facts.value("composite_ns") == 420 * US
    assert facts.value("composite_share") == pytest.approx(0.42)
    assert facts.value("composite_passes") == 6
    assert facts.value("composite_phases") == "in the forward pass"
    assert facts.value("composite_saving_ns") == pytest.approx(420 * US - 2 * 4 * FULL / BANDWIDTH * 1e9)
    assert facts.value("unfused_chains") == 0  # its ops are no chain besides


def test_a_pattern_ends_where_the_step_or_the_thread_does() -> None:
    made = rms_norm()
    for column in ("step", "thread"):
        ops = made.trace.ops.with_columns((pl.col("id") // 3).alias(column))
        split = msgspec.structs.replace(made, trace=msgspec.structs.replace(made.trace, ops=ops))
        assert Facts(split).value("composite_share") == 0


def test_the_backward_pass_goes_with_its_forward_op() -> None:
    made = rms_norm(also=[kernel("aten::mul", 500, 700, shapes=[[4096, 1024]], bytes_moved=12.0 * FULL, phase="backward")])
    trace = made.trace
    ops = trace.ops.with_columns(
        sequence=pl.when(pl.col("phase") == "forward").then(pl.col("id") + 10), fwd_thread=pl.lit(0, dtype=pl.Int64)
    )
    node = {**ops.row(6, named=True), "id": 7, "name": "autograd::engine::evaluate_function: PowBackward0", "sequence": 10, "fwd_thread": 1}
    node |= {"start_ns": 499 * US, "end_ns": 701 * US, "signature": None, "parent": None}
    ops = pl.concat([ops, pl.DataFrame([node], schema=ops.schema)]).with_columns(parent=pl.when(pl.col("id") == 6).then(7).cast(pl.Int64))
    facts = Facts(msgspec.structs.replace(made, trace=msgspec.structs.replace(trace, ops=ops)))
    assert facts.value("composite_ns") == 620 * US
    assert facts.value("composite_saving_ns") == pytest.approx(620 * US - 5 * 4 * FULL / BANDWIDTH * 1e9)


def test_a_fused_kernel_takes_the_casts_in_and_moves_the_narrower_type() -> None:
    """Hugging Face's norm of bf16: to fp32, back, and the weight; fused it reads and writes 2 bytes an element."""
    types = {"dtypes": ["float", "c10::BFloat16"], "shapes": [[4096, 1024]] * 2, "bytes_moved": 6.0 * FULL}
    within = [("pow", FULL), ("mean", FULL), ("add", ROW), ("rsqrt", ROW), ("mul", FULL)]
    work = [kernel("aten::copy_", 0, 50, **types)]
    for row, (name, numel) in enumerate(within, 1):
        work.append(kernel(f"aten::{name}", 50 * row, 50 * row + 50, shapes=[[numel // 1024, 1024]], bytes_moved=8.0 * numel))
    work.append(kernel("aten::copy_", 300, 350, **types | {"dtypes": ["c10::BFloat16", "float"]}))
    facts = Facts(analysis(work))
    assert facts.value("composite_ns") == 350 * US
    assert facts.value("composite_saving_ns") == pytest.approx(350 * US - 2 * 2 * FULL / BANDWIDTH * 1e9)
    assert facts.value("cast_share") == 0  # they belong to the norm


def test_on_a_cpu_the_fused_pass_runs_at_the_rate_that_the_ops_reach_and_the_gaps_between_them_go() -> None:
    waits = [gap(420, 430, cause="idle_launch")]  # after the pattern: not its own
    facts = Facts(rms_norm(CPU, idle=waits, buckets={"idle_launch": 10}))
    rate = 8 * FULL / 100e-6  # pow, mean and mul alike
    assert facts.value("composite_saving_ns") == pytest.approx(420 * US - 8 * FULL / rate * 1e9)


def test_nothing_recognised_and_nothing_recorded() -> None:
    plain = Facts(analysis([kernel("aten::mm", 0, 100, shapes=[[64, 64], [64, 64]])]))
    assert plain.value("composite_share") == 0
    assert isinstance(plain.value("composite_kinds"), Missing)
    assert isinstance(Facts(analysis([kernel("aten::mm", 0, 100)])).value("composite_share"), Missing)


def test_arithmetic_of_transcendental_ops_stays_on_a_cpu() -> None:
    def save(second: str, args: str) -> float:
        sizes = {"shapes": [[FULL], []], "dtypes": ["float", "Scalar"], "bytes_moved": 8.0 * FULL, "flops": 1.0}
        made = analysis([kernel("aten::neg", 0, 100, **sizes), kernel(second, 100, 400, **sizes)], device=CPU)
        signatures = made.trace.signatures.with_columns(args=pl.lit(args))
        made = msgspec.structs.replace(made, trace=msgspec.structs.replace(made.trace, signatures=signatures))
        return float(Facts(made).value("unfused_chain_saving_ns"))  # type: ignore[arg-type]

    for name, args in (("aten::abs", '["", ""]'), ("aten::pow", '["", "2"]'), ("aten::pow", '["", "-0.5"]')):
        assert save(name, args) == pytest.approx(300 * US)  # 400 us, less one pass at the rate of neg: squares are products
    for name, args in (("aten::cos", '["", ""]'), ("aten::pow", '["", "2.2"]'), ("aten::pow", '["", ""]')):
        assert save(name, args) == pytest.approx(100 * US)  # cos computes for 200 us of its 300
