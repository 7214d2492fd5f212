"""Losses over large vocabularies, casts, irregular access, layouts of convolutions, recurrent loops: worked numbers (times in us)."""

from __future__ import annotations

import msgspec
import polars as pl
import pytest
from factories import A100, CPU, US, analysis, gap, kernel, mark, op

from gpudiag.facts import Facts
from gpudiag.model.bundle import Manifest, Settings
from gpudiag.model.finding import Missing

BANDWIDTH = 2.039e12
ROWS, CLASSES = 512, 32_000


def test_a_loss_over_32000_classes_with_its_casts_and_zeros() -> None:
    logits = [ROWS, CLASSES]
    size = ROWS * CLASSES
    work = [
        kernel("aten::copy_", 0, 100, shapes=[logits, logits], dtypes=["float", "c10::Half"], bytes_moved=6.0 * size),
        kernel("aten::_log_softmax", 100, 300, shapes=[logits, [], []], bytes_moved=8.0 * size),
        kernel("aten::zero_", 300, 350, shapes=[logits], bytes_moved=4.0 * size, phase="backward"),
        kernel("aten::_log_softmax_backward_data", 350, 600, shapes=[logits, logits, [], []], bytes_moved=12.0 * size, phase="backward"),
        kernel("aten::mm", 600, 700, shapes=[[ROWS, 64], [64, CLASSES]], flops=1.0, bytes_moved=1.0),
        kernel("aten::copy_", 700, 750, shapes=[[64], [64]], dtypes=["float", "c10::Half"], bytes_moved=1.0),
    ]
    facts = Facts(analysis(work))
    assert facts.value("vocabulary_loss_share") == pytest.approx(0.6)
    assert facts.value("vocabulary_logits_bytes") == 4 * size
    assert facts.value("vocabulary_saving_ns") == pytest.approx(600 * US - 2 * 2 * size / BANDWIDTH * 1e9)  # in the type before the cast
    assert facts.value("cast_share") == pytest.approx(0.05)  # the cast of the logits belongs to the loss
    assert isinstance(facts.value("vocabulary_memory_share"), Missing)


def test_a_classifier_of_1000_is_no_large_vocabulary() -> None:
    facts = Facts(analysis([kernel("aten::_log_softmax", 0, 300, shapes=[[ROWS, 1000], [], []], bytes_moved=1.0)]))
    assert facts.value("vocabulary_loss_share") == 0
    assert isinstance(facts.value("vocabulary_logits_bytes"), Missing)


def test_casts_are_counted_outside_the_optimizer() -> None:
    both = {"shapes": [[4096], [4096]], "dtypes": ["c10::BFloat16", "float"], "bytes_moved": 6.0 * 4096}
    work = [kernel("aten::copy_", 0, 40, **both), kernel("aten::copy_", 40, 100, phase="optimizer", **both)]
    facts = Facts(analysis(work, steps=2))
    assert facts.value("cast_share") == pytest.approx(0.04)
    assert facts.value("casts_per_step") == pytest.approx(0.5)
    assert facts.value("without_casts_ns") == 40 * US


def test_a_scatter_counts_where_it_reaches_little_of_the_bandwidth() -> None:
    useful = 0.1 * BANDWIDTH * 100e-6
    slow = kernel("aten::index_add_", 0, 100, shapes=[[1000, 16], [], [5000], [5000, 16]], bytes_moved=useful)
    fast = kernel("aten::index_select", 100, 200, shapes=[[1000, 16], [], [5000]], bytes_moved=8 * useful)
    facts = Facts(analysis([slow, fast]))
    assert facts.value("irregular_share") == pytest.approx(0.1)
    assert facts.value("irregular_rate_share") == pytest.approx(0.1)
    assert facts.value("irregular_saving_ns") == pytest.approx((100 - 100 * 0.1 / 0.85) * US)


IMAGE, WEIGHT = [8, 64, 56, 56], [64, 64, 3, 3]
NCHW, NHWC = [64 * 3136, 3136, 56, 1], [64 * 3136, 1, 64 * 56, 64]


@pytest.mark.parametrize(("strides", "dtype", "share"), [(NCHW, "fp16", 0.4), (NHWC, "fp16", 0.0), (NCHW, "fp32", 0.0)])
def test_nchw_matters_where_matrix_engines_read_nhwc(strides: list[int], dtype: str, share: float) -> None:
    conv = kernel(
        "aten::cudnn_convolution", 0, 400, shapes=[IMAGE, WEIGHT], strides=[strides, [576, 9, 3, 1]], dtype=dtype, t_roof=70, flops=1e9,
        bytes_moved=1e6, bound="compute", name="ampere_sgemm" if dtype == "fp32" else "conv",
    )  # fmt: skip
    facts = Facts(analysis([conv]))
    assert facts.value("nchw_convolution_share") == pytest.approx(share)
    assert facts.value("convolution_layout_saving_ns") == pytest.approx((400 - 100) * US if share else 0)


def test_conversions_are_told_by_name_and_tuning_by_the_settings() -> None:
    conv = {"shapes": [IMAGE, WEIGHT], "strides": [NHWC, [576, 1, 192, 64]], "dtype": "fp16", "t_roof": 70}
    work = [
        kernel("aten::cudnn_convolution", 0, 50, name="void cudnn::ops::nchwToNhwcKernel<...>", **conv),
        kernel("aten::cudnn_convolution", 50, 250, **conv),
        kernel("aten::cudnn_convolution", 250, 450, **conv),
    ]
    settings = {on: Manifest(settings=Settings(cudnn_benchmark=on, deterministic=False)) for on in (True, False)}
    assert Facts(analysis(work, manifest=settings[True])).value("layout_conversion_share") == pytest.approx(0.05)
    assert Facts(analysis(work, manifest=settings[True])).value("untuned_convolution_share") == 0
    assert Facts(analysis(work, manifest=settings[False])).value("untuned_convolution_share") == pytest.approx(0.45)
    assert isinstance(Facts(analysis(work)).value("untuned_convolution_share"), Missing)


def test_strides_that_were_not_recorded_are_unknown() -> None:
    conv = kernel("aten::cudnn_convolution", 0, 400, shapes=[IMAGE, WEIGHT], dtype="fp16")
    assert isinstance(Facts(analysis([conv])).value("nchw_convolution_share"), Missing)


def test_on_a_cpu_the_layout_costs_one_more_pass_over_inputs_and_outputs() -> None:
    weights = 4 * 64 * 64
    moved = 2e6 + weights
    conv = kernel("aten::mkldnn_convolution", 0, 400, shapes=[IMAGE, WEIGHT], strides=[NCHW, [576, 9, 3, 1]], bytes_moved=moved, flops=1e9)
    relu = kernel("aten::clamp_min", 400, 500, shapes=[[1 << 20]], bytes_moved=1e6)  # 10 GB/s
    assert Facts(analysis([conv, relu], device=CPU)).value("convolution_layout_saving_ns") == pytest.approx(400 * US)


def test_copies_that_a_convolution_makes_of_its_own_tensors_go_with_the_layout() -> None:
    copied = {"shapes": [IMAGE, IMAGE], "strides": [NCHW, NHWC], "bytes_moved": 1e6}
    conv = kernel("aten::mkldnn_convolution", 0, 400, shapes=[IMAGE, WEIGHT], strides=[NCHW, [576, 9, 3, 1]], bytes_moved=2e6, flops=1e9)
    work = [conv, kernel("aten::copy_", 400, 500, **copied), kernel("aten::copy_", 500, 600, **copied)]
    work.append(kernel("aten::clamp_min", 600, 700, shapes=[[1 << 20]], bytes_moved=1e6))
    made = analysis(work, device=CPU)
    plain = Facts(made).value("convolution_layout_saving_ns")
    above = pl.DataFrame([op("aten::contiguous", 400, 500) | {"id": 4, "parent": 0}], schema=made.trace.ops.schema)
    parent = pl.when(pl.col("id") == 1).then(4).otherwise("parent").cast(pl.Int64)
    nested = pl.concat([made.trace.ops, above]).with_columns(parent=parent)  # the first copy: convolution > contiguous > copy_
    made = msgspec.structs.replace(made, trace=msgspec.structs.replace(made.trace, ops=nested))
    assert Facts(made).value("convolution_layout_saving_ns") - plain == pytest.approx(100 * US)


def test_a_depthwise_convolution_has_groups_and_little_reuse() -> None:
    shape = [8, 64, 56, 56]
    numel = 8 * 64 * 56 * 56
    depthwise = kernel(
        "aten::cudnn_convolution", 0, 200, shapes=[shape, [64, 1, 3, 3]], dtype="fp16", flops=18.0 * numel, bytes_moved=4.0 * numel
    )
    dense = kernel("aten::mm", 200, 400, shapes=[[4096, 4096], [4096, 4096]], dtype="fp16", flops=2.0 * 4096**3, bytes_moved=1e8)
    facts = Facts(analysis([depthwise, dense]))
    assert facts.value("grouped_convolution_share") == pytest.approx(0.2)
    assert facts.value("grouped_convolution_flop_share") == pytest.approx(18 * numel / (18 * numel + 2 * 4096**3))
    assert facts.value("grouped_convolution_saving_ns") == pytest.approx(200 * US - 4 * numel / (0.85 * BANDWIDTH) * 1e9)


def test_cells_in_a_loop_with_the_gaps_between_them() -> None:
    cells = [kernel("aten::lstm_cell", 100 * i, 100 * i + 60, shapes=[[32, 128]], flops=1e3, bytes_moved=1e3) for i in range(8)]
    idle = [gap(100 * i + 60, 100 * i + 100, cause="idle_launch") for i in range(8)]
    facts = Facts(analysis(cells, idle=idle, buckets={"idle_launch": 320}))
    assert facts.value("recurrent_cells_per_step") == 8
    assert facts.value("recurrent_loop_share") == pytest.approx((8 * 60 + 7 * 40) / 1000)
    assert facts.value("recurrent_host_part") == pytest.approx(7 / 8)
    assert facts.value("recurrent_loop_saving_ns") == pytest.approx(760 * US, rel=1e-3)
    few = Facts(analysis(cells[:3]))
    assert few.value("recurrent_loop_share") == 0


def test_a_recurrent_layer_with_few_sequences() -> None:
    layer = [kernel("aten::_cudnn_rnn", 0, 300, shapes=[[100, batch, 64]]) for batch in (32, 128)]
    assert Facts(analysis(layer[:1])).value("small_recurrent_share") == pytest.approx(0.3)
    assert Facts(analysis(layer[1:])).value("small_recurrent_share") == 0
    assert Facts(analysis(layer[:1], device=CPU)).value("small_recurrent_share") == 0


def test_waits_for_the_host_inside_the_optimizer_count_for_it() -> None:
    n = 1000
    work = [kernel("aten::addcdiv_", start, start + 10, shapes=[[n]] * 3, bytes_moved=16.0 * n, phase="optimizer") for start in (100, 140)]
    marks = [mark("Optimizer.step#AdamW.step", 90, 200)]
    idle = [gap(110, 140, cause="idle_launch"), gap(300, 330, cause="idle_launch")]
    facts = Facts(analysis(work, marks=marks, idle=idle, buckets={"idle_launch": 60}))
    assert facts.value("dispatch_optimizer_part") == pytest.approx(0.5)
    assert facts.value("optimizer_saving_ns") == pytest.approx(50 * US - 28 * 2 * n / BANDWIDTH * 1e9)


def test_the_closure_of_an_optimizer_is_not_the_optimizer() -> None:
    passes = [kernel("aten::mm", 100, 200, phase="forward"), kernel("aten::mm", 260, 400, phase="backward")]
    update = [kernel("aten::add_", start, start + 10, phase="optimizer") for start in (450, 500)]
    idle = [gap(90, 100, cause="idle_launch"), gap(200, 260, cause="idle_launch"), gap(460, 500, cause="idle_launch")]
    closure = Facts(analysis([*passes, *update], marks=[mark("Optimizer.step#SGD.step", 80, 520)], idle=idle, buckets={"idle_launch": 110}))
    assert closure.value("optimizer_waits_ns") == 40 * US  # and not the 110 inside the mark
    assert closure.value("dispatch_optimizer_part") == pytest.approx(40 / 110)
    plain = Facts(analysis([*passes, *update], marks=[mark("Optimizer.step#SGD.step", 420, 520)], idle=idle, buckets={"idle_launch": 110}))
    assert plain.value("optimizer_waits_ns") == closure.value("optimizer_waits_ns")


def test_zeros_that_aten_fill_writes_for_aten_zero_are_counted_once() -> None:
    work = [
        kernel("aten::zero_", 100, 101, shapes=[[1000]], bytes_moved=0.0),
        kernel("aten::fill_", 101, 110, shapes=[[1000], []], bytes_moved=4000.0),
    ]
    facts = Facts(analysis(work, marks=[mark("Optimizer.zero_grad#SGD.zero_grad", 90, 200)], device=CPU))
    assert facts.value("zeroed_gradient_bytes") == 4000


def test_large_products_in_fp8() -> None:
    n = 4096
    work = [
        kernel(
            "aten::mm",
            0,
            600,
            shapes=[[n, n], [n, n]],
            dtype="bf16",
            flops=2.0 * n**3,
            bytes_moved=6.0 * n * n,
            t_roof=420,
            bound="compute",
        ),
        kernel("aten::mm", 600, 700, shapes=[[n, 2048], [2048, n]], dtype="bf16", flops=4096.0 * n * n, t_roof=90, bound="compute"),
    ]
    facts = Facts(analysis(work))
    assert facts.value("fp8_speedup") == 1  # an A100 has no fp8
    assert facts.value("large_product_share") == pytest.approx(0.6)
    assert facts.value("large_product_efficiency") == pytest.approx(0.7)
    ada = msgspec.structs.replace(A100, peaks={**A100.peaks, "fp8": 624e12})
    casts_ns = 3 * 2 * n * n * 2 / (0.85 * BANDWIDTH) * 1e9
    assert Facts(analysis(work, device=ada)).value("fp8_saving_ns") == pytest.approx(300 * US - casts_ns)


def test_few_tiles_persistent_kernels_and_slow_products() -> None:
    n = 4096
    big = {"shapes": [[n, n], [n, n]], "dtype": "fp16", "bound": "compute", "flops": 2.0 * n**3, "bytes_moved": 1e8}
    small = {"shapes": [[256, 512], [512, 256]], "dtype": "fp16", "bound": "compute", "flops": 1e8, "bytes_moved": 1e6}
    work = [
        kernel("aten::mm", 0, 50, grid=16, t_roof=5, **small),
        kernel("aten::mm", 50, 150, grid=108, t_roof=40, name="nvjet_hsh_128x256", **big),  # one block an SM by design, but slow
        kernel("aten::mm", 150, 250, grid=1024, t_roof=60, **big),
        kernel("aten::mm", 250, 300, grid=140, t_roof=20, **small),  # 1.3 waves
    ]
    facts = Facts(analysis(work))
    assert facts.value("underfilled_share") == pytest.approx(0.1)
    assert facts.value("slow_product_share") == pytest.approx(0.1)
    assert facts.value("filling_saving_ns") == pytest.approx((50 - 5 / 0.8 + 50 - 20 / 0.8 + 100 - 40 / 0.8) * US)
    assert "no accelerator" in getattr(Facts(analysis(work, device=CPU)).value("underfilled_share"), "reason", "")


def test_the_bias_that_a_product_spreads_is_no_layout_copy() -> None:
    made = analysis(
        [
            kernel("aten::addmm", 0, 100, shapes=[[64], [64, 64], [64, 64]]),
            kernel("aten::copy_", 10, 20, shapes=[[64, 64], [64, 64]], strides=[[64, 1], [0, 1]]),
        ],
        device=CPU,
    )
    assert Facts(made).value("layout_copy_share") == pytest.approx(0.01)
    inside = made.trace.ops.with_columns(parent=pl.when(pl.col("id") == 1).then(0).cast(pl.Int64))
    nested = msgspec.structs.replace(made, trace=msgspec.structs.replace(made.trace, ops=inside))
    assert Facts(nested).value("layout_copy_share") == 0
