"""Rates follow from the clock: with a clock of known speed every benchmark returns the rate worked out by hand."""

from __future__ import annotations

import itertools

import pytest

from gpudiag.hardware import benchmarks as bench

torch = pytest.importorskip("torch", reason="torch is not installed")


def fixed(seconds: float) -> bench.Clock:
    def clock(work: bench.Work, _: int) -> float:
        work()
        return seconds

    return clock


def test_the_best_run_counts_and_the_warm_up_does_not() -> None:
    times = itertools.chain([0.001, 5.0, 3.0, 4.0], itertools.repeat(6.0))
    assert bench.measure_best_seconds(lambda: None, lambda _, __: next(times), 0.01) == 3.0


def test_a_warm_up_longer_than_the_budget_is_all_there_is() -> None:
    assert bench.measure_best_seconds(lambda: None, lambda _, __: 7.0, 0.0) == 7.0


def test_gemm_counts_two_flop_a_multiply_add() -> None:
    here = bench.Bench(torch, "cpu", fixed(0.5))
    assert bench.measure_gemm_flop_per_s(here, "float32", (64,), 0.01) == 2 * 64**3 / 0.5


def test_a_size_that_does_not_fit_the_budget_is_not_tried() -> None:
    here = bench.Bench(torch, "cpu", fixed(0.5))
    assert bench.measure_gemm_flop_per_s(here, "float32", (64, 100_000), 0.02) == 2 * 64**3 / 0.5  # 100,000 would need 120 GB


def test_a_type_without_a_kernel_is_none() -> None:
    here = bench.Bench(torch, "cpu", fixed(0.5))
    assert bench.measure_gemm_flop_per_s(here, "bool", (64,), 0.01) is None


@pytest.mark.parametrize("kind", ["int8", "float16"])
def test_products_of_narrow_types_run_on_this_torch(kind: str) -> None:
    here = bench.Bench(torch, "cpu", fixed(0.5))
    for zeros in (False, True):
        assert bench.measure_gemm_flop_per_s(here, kind, (64,), 0.01, zeros=zeros) == 2 * 64**3 / 0.5


def test_a_larger_size_that_fails_leaves_the_smaller_ones_rate() -> None:
    class Small:
        """torch with room for one size alone."""

        def __getattr__(self, name: str) -> object:
            return getattr(torch, name)

        def mm(self, left: object, right: object, *, out: torch.Tensor) -> object:
            if out.shape[0] > 64:
                raise RuntimeError("out of memory")
            return torch.mm(left, right, out=out)

    here = bench.Bench(Small(), "cpu", fixed(0.0001))
    assert bench.measure_gemm_flop_per_s(here, "float32", (64, 128), 0.05) == 2 * 64**3 / 0.0001


def test_streams_count_reads_and_writes() -> None:
    here = bench.Bench(torch, "cpu", fixed(0.5))
    rates = bench.measure_stream_byte_per_s(here, 8 * 1000, 0.005)  # two tensors of 1000 fp32
    assert rates == bench.Streams(copy=16_000, read=8_000, update=24_000)


def test_launch_floor_is_that_of_a_recorded_op() -> None:
    floor = bench.measure_cpu_launch_floor_ns(bench.Bench(torch, "cpu", bench.time_on_cpu))
    assert floor is not None
    assert 20 < floor < 20_000
