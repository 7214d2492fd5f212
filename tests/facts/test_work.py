"""Facts about kernels against worked numbers (times in us; A100: fp32 19.5, TF32 156, fp16 312 TFLOP/s, 2.039 TB/s)."""

from __future__ import annotations

import pytest
from factories import A100, CPU, US, Work, analysis, gap, kernel, mark

from gpudiag.facts import Facts
from gpudiag.model.analysis import Analysis
from gpudiag.model.bundle import Manifest, OptimizerSettings, Settings
from gpudiag.model.finding import Missing

BANDWIDTH = 2.039e12


def gemm(m: int, n: int, k: int, start: float, end: float, **changes: object) -> Work:
    item = 4 if changes.get("dtype", "fp32") == "fp32" else 2
    cost = {"flops": 2 * m * n * k, "bytes_moved": item * (m * k + k * n + m * n), "bound": "compute"}
    return kernel("aten::mm", start, end, shapes=[[m, k], [k, n]], **(cost | changes))


def test_fp32_products_by_name_and_by_rate() -> None:
    slow = gemm(4096, 4096, 4096, 0, 8000, name="ampere_sgemm_128x128_tn")  # 137.4 GFLOP in 8 ms: 17.2 TFLOP/s
    facts = Facts(analysis([slow], wall=10_000))
    assert facts.value("slow_matrix_share") == pytest.approx(0.8)
    assert facts.value("tf32_speedup") == pytest.approx(8.0)
    floor_ns = 2 * 4096**3 / (0.75 * 156e12) * 1e9
    assert facts.value("slow_path_saving_ns") == pytest.approx(8_000_000 - floor_ns)
    # the same work in 1.5 ms is 91.6 TFLOP/s: no vector unit does that, whatever the kernel is called
    fast = gemm(4096, 4096, 4096, 0, 1500, name="cutlass_some_new_kernel")
    assert Facts(analysis([fast], wall=10_000)).value("slow_matrix_share") == 0.0


def test_an_unknown_path_is_unknown_unless_the_settings_tell() -> None:
    work = [gemm(4096, 4096, 4096, 0, 8000, name="some_kernel")]
    assert isinstance(Facts(analysis(work, wall=10_000)).value("slow_matrix_share"), Missing)
    off = Manifest(settings=Settings(cuda_matmul_allow_tf32=False))
    assert Facts(analysis(work, wall=10_000, manifest=off)).value("slow_matrix_share") == pytest.approx(0.8)
    allowed = Manifest(settings=Settings(cuda_matmul_allow_tf32=True))
    assert isinstance(Facts(analysis(work, wall=10_000, manifest=allowed)).value("slow_matrix_share"), Missing)


def test_half_precision_saving_and_the_optimizer_left_out() -> None:
    work = [
        gemm(4096, 4096, 4096, 0, 1500, name="tf32"),
        kernel("aten::mul", 1500, 2500, shapes=[[1 << 28]], bytes_moved=2 << 30, flops=1 << 28),
        kernel("aten::_foreach_mul_", 2500, 4500, shapes=[[[1 << 28]]], dtype="fp32", bytes_moved=2 << 30, phase="optimizer"),
    ]
    facts = Facts(analysis(work, wall=5000))
    assert facts.value("fp32_work_share") == pytest.approx(0.5)
    casts = 6 * 4096**2 / (0.85 * BANDWIDTH) * 1e9  # autocast casts the fp32 weights in each forward pass
    matrix = 1_500_000 - 2 * 4096**3 / (0.75 * 312e12) * 1e9 - casts
    assert facts.value("half_precision_saving_ns") == pytest.approx(matrix + 500_000)
    assert facts.value("half_precision_speedup") == pytest.approx(2.0)
    assert Facts(analysis(work, wall=5000, device=CPU)).value("half_precision_speedup") == 1.0


@pytest.mark.parametrize(
    ("n", "dtype", "share"),
    [
        (50257, "fp16", 0.5),  # the vocabulary of GPT-2: 50257 x 2 B is no multiple of 16 B
        (50304, "fp16", 0.0),  # padded to a multiple of 64
        (50260, "fp32", 0.0),  # IEEE fp32 does not run on matrix engines
    ],
)
def test_alignment(n: int, dtype: str, share: float) -> None:
    name = "ampere_sgemm" if dtype == "fp32" else "ampere_h16816gemm"
    facts = Facts(analysis([gemm(8192, n, 768, 0, 5000, dtype=dtype, name=name, t_roof=2100)], wall=10_000))
    assert facts.value("misaligned_product_share") == pytest.approx(share)


def test_alignment_saving_is_judged_against_the_padded_size() -> None:
    t_roof = 2.0 * 8192 * 50257 * 768 / 312e12 * 1e6
    facts = Facts(analysis([gemm(8192, 50257, 768, 0, 5000, dtype="fp16", t_roof=t_roof)], wall=10_000))
    floor_us = t_roof * 50264 / 50257 / 0.75  # 50264 is the next multiple of 8
    assert facts.value("alignment_saving_ns") == pytest.approx((5000 - floor_us) * US)


def test_skinny_products_are_forward_rows_and_backward_inner_dimensions() -> None:
    forward = gemm(8, 4096, 4096, 0, 100, dtype="fp16", bound="memory")
    weight_gradient = gemm(4096, 4096, 8, 100, 200, dtype="fp16", bound="memory", phase="backward")
    enough = gemm(4096, 4096, 4096, 200, 700, dtype="fp16")
    facts = Facts(analysis([forward, weight_gradient, enough]))
    assert facts.value("skinny_product_share") == pytest.approx(0.2)
    assert facts.value("skinny_product_rows") == 8
    assert facts.value("skinny_saving_ns") == pytest.approx(2 * 100_000 * (1 - 8 / 128), rel=0.01)  # 16 x more rows, far below the ridge


def elementwise(name: str, start: float, end: float, numel: int = 1 << 26, **changes: object) -> Work:
    return kernel(name, start, end, shapes=[[numel]], bytes_moved=8 * numel, flops=numel, **changes)


def test_a_chain_of_cosines_saves_its_middle_traffic() -> None:
    # x.cos().cos().cos(): 3 kernels move 3 x 2 x 256 MiB; fused 1 x 2 x 256 MiB
    size = 4 << 26
    work = [elementwise("aten::cos", i * 300, (i + 1) * 300) for i in range(3)]
    facts = Facts(analysis(work))
    assert facts.value("unfused_chains") == 1
    assert facts.value("unfused_chain_length") == 3
    assert facts.value("unfused_chain_ns") == 900 * US
    assert facts.value("unfused_chain_saving_ns") == pytest.approx(900 * US - 2 * size / (0.85 * BANDWIDTH) * 1e9)


def test_the_bound_of_a_chain_is_what_its_ends_move_at_the_whole_bandwidth() -> None:
    """KL divergence: target x input, xlogy(target, target), their difference and its sum: 10 tensors moved, 2 by one fused kernel."""
    numel, size = 1 << 26, 4 << 26
    two = {"shapes": [[numel], [numel]], "bytes_moved": 3.0 * size}
    names = ("aten::mul", "aten::xlogy", "aten::sub")
    work = [kernel(name, i * 600, (i + 1) * 600, **two) for i, name in enumerate(names)]
    total = kernel("aten::sum", 1800, 2000, shapes=[[numel]], bytes_moved=1.0 * size)
    facts = Facts(analysis([*work, total], wall=3000))
    assert facts.value("unfused_chain_length") == 4
    # what is not known to be read within counts in what is likely, not in the bound
    assert facts.value("unfused_chain_saving_ns") == pytest.approx(2000 * US - 4 * size / (0.85 * BANDWIDTH) * 1e9)
    assert facts.value("without_chains_ns") == pytest.approx(2000 * US - 2 * size / BANDWIDTH * 1e9)


def test_a_chain_may_begin_with_an_operand_that_is_spread() -> None:
    """All distances of 1024 rows to 512 others: their difference is 512 times as large as what it is made of."""
    rows, size = [1024, 512, 32], 4 * 1024 * 512 * 32
    spread = kernel("aten::sub", 0, 30_000, shapes=[[1024, 1, 32], [1, 512, 32]], bytes_moved=1.0 * size)
    square = kernel("aten::pow", 30_000, 60_000, shapes=[rows], bytes_moved=2.0 * size)
    total = kernel("aten::sum", 60_000, 64_000, shapes=[rows], bytes_moved=1.0 * size)
    facts = Facts(analysis([spread, square, total], wall=80_000))
    assert facts.value("unfused_chain_length") == 3
    assert facts.value("unfused_chain_ns") == 64_000 * US


def test_a_reduction_ends_a_chain() -> None:
    total = kernel("aten::sum", 300, 400, shapes=[[1 << 26]], bytes_moved=4.0 * (1 << 26))
    after = [elementwise("aten::cos", 400, 700)]
    assert Facts(analysis([elementwise("aten::cos", 0, 300), total, *after])).value("unfused_chain_length") == 2
    assert Facts(analysis([total, *after])).value("unfused_chains") == 0


@pytest.mark.parametrize(
    "breaker",
    [
        kernel("aten::mm", 300, 310, shapes=[[64, 64], [64, 64]], flops=1.0, bytes_moved=1.0),
        elementwise("aten::cos", 300, 310, numel=1 << 20),
    ],
)
def test_another_kind_or_size_breaks_a_chain(breaker: Work) -> None:
    work = [elementwise("aten::cos", 0, 300), breaker, elementwise("aten::sin", 310, 610)]
    assert Facts(analysis(work)).value("unfused_chains") == 0


def test_streams_do_not_mix_and_the_optimizer_does_not_count() -> None:
    two_streams = [elementwise("aten::cos", 0, 300, stream=7), elementwise("aten::cos", 300, 600, stream=8)]
    assert Facts(analysis(two_streams)).value("unfused_chains") == 0
    optimizer = [elementwise("aten::mul_", 0, 300, phase="optimizer"), elementwise("aten::add_", 300, 600, phase="optimizer")]
    assert Facts(analysis(optimizer)).value("unfused_chains") == 0


def test_ops_that_make_what_the_next_does_not_read_are_no_chain() -> None:
    """Two casts of parameters of one size: bf16 comes out, fp32 is read. A mask of a comparison is no operand of an exponential."""
    size, half = 1 << 26, "c10::BFloat16"
    casts = [kernel("aten::copy_", at, at + 300, shapes=[[size], [size]], dtypes=[half, "float"], bytes_moved=6 * size) for at in (0, 300)]
    assert Facts(analysis(casts)).value("unfused_chains") == 0
    masked = [elementwise("aten::isnan", 0, 300), elementwise("aten::exp", 300, 600)]
    assert Facts(analysis(masked)).value("unfused_chains") == 0
    scaled = [casts[0], elementwise("aten::exp", 300, 600, dtypes=[half])]
    assert Facts(analysis(scaled)).value("unfused_chains") == 1


def test_savings_of_overlapped_kernels_are_bounded_by_the_time_that_only_they_fill() -> None:
    chain = [elementwise("aten::cos", i * 300, (i + 1) * 300) for i in range(3)]
    alone = Facts(analysis(chain)).value("unfused_chain_saving_ns")
    hidden = Facts(analysis([*chain, gemm(4096, 4096, 4096, 0, 850, stream=9)])).value("unfused_chain_saving_ns")
    assert alone > 200 * US
    assert hidden == 50 * US  # only 850..900 is theirs alone


def attention(s: int, *, fused: bool = False) -> list[Work]:
    heads, d = 16, 64
    q, score = [heads, s, d], [heads, s, s]
    flops = 2 * heads * s * s * d
    if fused:
        return [kernel("aten::_scaled_dot_product_flash_attention", 0, 600, shapes=[[1, heads, s, d]] * 3, dtype="fp16", flops=2 * flops)]
    return [
        kernel("aten::bmm", 0, 200, shapes=[q, [heads, d, s]], dtype="fp16", flops=flops, bytes_moved=1.0),
        kernel("aten::mul", 200, 300, shapes=[[1, *score]], dtype="fp16", flops=1.0, bytes_moved=1.0),
        kernel("aten::_softmax", 300, 400, shapes=[[1, *score], [], []], dtype="fp16", flops=1.0, bytes_moved=1.0),
        kernel("aten::bmm", 400, 600, shapes=[score, q], dtype="fp16", flops=flops, bytes_moved=1.0),
    ]


def test_attention_in_pieces_is_seen_and_bounded_by_a_fused_kernel() -> None:
    s = 2048
    facts = Facts(analysis(attention(s)))
    assert facts.value("unfused_attention_share") == pytest.approx(0.6)
    assert facts.value("unfused_attention_length") == s
    floor_ns = 2 * 2 * 16 * s * s * 64 / (0.6 * 312e12) * 1e9
    assert facts.value("unfused_attention_saving_ns") == pytest.approx(600 * US - floor_ns)


@pytest.mark.parametrize(("drawn", "drops"), [([1, 16, 2048, 2048], True), ([1, 2048, 1024], False)])
def test_dropout_counts_as_that_of_attention_where_it_is_on_the_scores(drawn: list[int], drops: bool) -> None:
    facts = Facts(analysis([*attention(2048), kernel("aten::bernoulli_", 600, 900, shapes=[drawn, [], []])]))
    assert facts.value("attention_drops") is drops
    assert facts.value("random_number_share") == pytest.approx(0.3)
    assert facts.value("random_number_ns") == 300 * US


def test_a_fused_kernel_and_a_classifiers_softmax_are_no_unfused_attention() -> None:
    assert Facts(analysis(attention(2048, fused=True))).value("unfused_attention_share") == 0
    classifier = [gemm(64, 1000, 512, 0, 50), kernel("aten::_softmax", 50, 60, shapes=[[64, 1000], [], []])]
    assert Facts(analysis(classifier)).value("unfused_attention_share") == 0


def test_a_loop_over_parameters_against_one_fused_pass() -> None:
    numel = 100_000_000
    names = ("aten::mul_", "aten::lerp_", "aten::mul_", "aten::addcmul_", "aten::sqrt", "aten::div_", "aten::add_", "aten::addcdiv_")
    work = [elementwise(name, i * 1000, (i + 1) * 1000, numel, phase="optimizer") for i, name in enumerate(names)]
    facts = Facts(analysis(work, wall=10_000, marks=[mark("Optimizer.step#AdamW.step", 0, 8000)]))
    assert facts.value("optimizer_style") == "for-loop"
    assert facts.value("optimizer_share") == pytest.approx(0.8)
    assert facts.value("optimizer_saving_ns") == pytest.approx(8_000_000 - 28 * numel / BANDWIDTH * 1e9)
    known = Manifest(settings=Settings(optimizers=(OptimizerSettings("SGD", numel, 10),)))
    by_settings = Facts(analysis(work, wall=10_000, manifest=known)).value("optimizer_saving_ns")
    assert by_settings == pytest.approx(8_000_000 - 20 * numel / BANDWIDTH * 1e9)


@pytest.mark.parametrize(
    ("name", "style"), [("aten::_fused_adamw_", "fused"), ("aten::_foreach_addcdiv_", "foreach"), ("aten::frobnicate", "custom")]
)
def test_optimizer_styles(name: str, style: str) -> None:
    assert Facts(analysis([kernel(name, 0, 100, phase="optimizer")])).value("optimizer_style") == style


def test_zeros_written_inside_zero_grad_only() -> None:
    n = 1_000_000
    work = [kernel("aten::zero_", 100, 110, shapes=[[n]]), kernel("aten::zero_", 500, 510, shapes=[[n]])]
    facts = Facts(analysis(work, marks=[mark("Optimizer.zero_grad#SGD.zero_grad", 90, 200)]))
    assert facts.value("zero_grad_share") == pytest.approx(0.01)
    assert facts.value("zeroed_gradient_bytes") == 4 * n
    assert facts.value("zero_grad_saving_ns") == 10_000  # the write as measured: more than the floor below


def test_zeros_cost_at_least_their_passes() -> None:
    n = 1_000_000
    facts = Facts(analysis([kernel("aten::zero_", 100, 101, shapes=[[n]])], marks=[mark("Optimizer.zero_grad#SGD.zero_grad", 90, 200)]))
    assert facts.value("zero_grad_saving_ns") == pytest.approx(16 * n / (0.85 * BANDWIDTH) * 1e9)


def test_layout_copies_are_those_that_change_strides() -> None:
    def copy(target: list[int], source: list[int], dtypes: list[str] | None = None) -> Facts:
        one = kernel("aten::copy_", 0, 100, shapes=[[64, 32], [64, 32]], strides=[target, source], dtypes=dtypes)
        return Facts(analysis([one]))

    assert copy([32, 1], [1, 64]).value("layout_copy_share") == pytest.approx(0.1)
    assert copy([32, 1], [32, 1]).value("layout_copy_share") == 0
    assert copy([32, 1], [1, 64], ["c10::Half", "float"]).value("layout_copy_share") == 0  # a cast
    assert isinstance(Facts(analysis([kernel("aten::copy_", 0, 100, shapes=[[64], [64]])])).value("layout_copy_share"), Missing)


def test_pageable_copies_that_nothing_hides() -> None:
    name = "Memcpy HtoD (Pageable -> Device)"
    work = [
        kernel("aten::copy_", 0, 100, kind="memcpy", name=name, copied=1_000_000),
        kernel("aten::copy_", 100, 200, kind="memcpy", name=name, copied=1000),
        gemm(4096, 4096, 4096, 60, 500),
    ]
    facts = Facts(analysis(work))
    assert facts.value("pageable_copy_exposed_ns") == 60 * US
    assert facts.value("pageable_copy_bytes") == 1_000_000
    assert facts.value("pageable_copy_rate") == pytest.approx(10.0)
    rocm = [kernel("aten::copy_", 0, 100, kind="memcpy", name="Memcpy HtoD (Host -> Device)", copied=1_000_000)]
    assert isinstance(Facts(analysis(rocm)).value("pageable_copy_exposed_share"), Missing)


def test_utilisation_counts_only_matrix_flop_against_the_peak_of_its_type() -> None:
    work = [gemm(4096, 4096, 4096, 0, 600, dtype="bf16", t_roof=440), elementwise("aten::mul", 600, 900)]
    facts = Facts(analysis(work))
    assert facts.value("matrix_dtype") == "bf16"
    assert facts.value("mfu") == pytest.approx(2 * 4096**3 / (1e-3 * 312e12))
    unseen = kernel(None, 0, 700, replay=True)
    assert isinstance(Facts(analysis([*work, unseen, unseen])).value("mfu"), Missing)  # 900 of 2300 us: too little to judge by
    assert isinstance(Facts(analysis(work, device=None)).value("mfu"), Missing)


def test_fp32_work_on_the_tf32_path_is_judged_against_tf32() -> None:
    facts = Facts(analysis([gemm(4096, 4096, 4096, 0, 1500)], wall=2000))
    assert facts.value("matrix_dtype") == "tf32"
    assert facts.value("mfu") == pytest.approx(2 * 4096**3 / (2e-3 * A100.peaks["tf32"]))


def test_communication_from_the_breakdown() -> None:
    work = [gemm(64, 64, 64, 0, 500), kernel(None, 400, 800, name="ncclDevKernel_AllReduce", collective=True)]
    facts = Facts(analysis(work, buckets={"exposed_communication": 300}, idle=[gap(800, 1000)]))
    assert facts.value("exposed_communication_share") == pytest.approx(0.3)
    assert facts.value("hidden_communication_share") == pytest.approx(0.25)


def missing(made: Analysis, name: str) -> str:
    value = Facts(made).value(name)
    assert isinstance(value, Missing)
    return value.reason
