"""Number formats: what runs slowly because of its type, and what autocast would touch, against worked numbers (times in us)."""

from __future__ import annotations

from pathlib import Path

import msgspec
import polars as pl
import pytest
from factories import A100, CPU, US, Work, analysis, kernel
from msgspec.structs import replace

from gpudiag.diagnosis.engine import judge
from gpudiag.diagnosis.loader import load_rules
from gpudiag.facts import Facts
from gpudiag.facts.precision import find_ops_left_in_fp32
from gpudiag.facts.window import Window
from gpudiag.model.finding import Missing
from gpudiag.model.hardware import HalfGain
from gpudiag.pipeline import open_recording

BANDWIDTH = 2.039e12
GAINS = (HalfGain("gemm", 0.5, 16, 256), HalfGain("gemm", 4.0, 1024, 1024), HalfGain("add", 1.25))
N = 1024


def product(start: float, end: float, dtype: str = "fp32", **changes: object) -> Work:
    cost = {"flops": 2 * N**3, "bytes_moved": 3 * 8 * N**2, "bound": "compute", "name": "ampere_sgemm"}
    return kernel("aten::mm", start, end, shapes=[[N, N], [N, N]], dtype=dtype, **(cost | changes))


def pointwise(op: str, start: float, end: float, dtype: str = "fp32", **changes: object) -> Work:
    return kernel(op, start, end, shapes=[[N, N]], dtype=dtype, bytes_moved=2.0 * N * N, **changes)


def test_fp64_counts_in_ops_of_all_kinds_but_the_optimizer() -> None:
    work = [product(0, 100, "fp64"), pointwise("aten::mul", 100, 400, "fp64"), pointwise("aten::exp", 400, 900)]
    facts = Facts(analysis([*work, pointwise("aten::add_", 900, 1000, "fp64", phase="optimizer")]))
    assert facts.value("fp64_work_share") == pytest.approx(0.4)
    assert facts.value("fp64_matrix_share") == pytest.approx(0.1)
    products_ns = 100 * US - max(2 * N**3 / (0.75 * 156e12), 3 * 8 * N**2 / (0.85 * BANDWIDTH)) * 1e9
    halved_ns = 300 * US - N * N / (0.85 * BANDWIDTH) * 1e9
    assert facts.value("slow_path_saving_ns") == pytest.approx(products_ns + halved_ns)


def test_on_a_cpu_fp64_counts_where_it_is_more_than_dispatched() -> None:
    small = pointwise("aten::mul", 400, 500, "fp64", bound="overhead")
    facts = on_cpu(product(0, 100, "fp64"), pointwise("aten::add_", 100, 400, "fp64", phase="optimizer"), small)
    assert facts.value("fp64_work_share") == pytest.approx(0.4)
    assert facts.value("fp64_matrix_share") == pytest.approx(0.1)
    assert facts.value("fp64_saving_ns") == pytest.approx(200 * US)
    assert [place.time_ns for place in facts.places("fp64_work")] == [300 * US, 100 * US]


def test_convolutions_of_fp64_on_a_cpu_run_without_onednn() -> None:
    """In fp32 they can take as little as their roofline time there, half of that in fp64; and no layout is converted for them."""
    strides = [[64 * 3136, 3136, 56, 1], [576, 9, 3, 1]]
    work = {"shapes": [[8, 64, 56, 56], [64, 64, 3, 3]], "strides": strides, "t_roof": 100, "flops": 1e9, "bytes_moved": 1e6}
    op = "aten::_slow_conv2d_forward"
    wide, single = (on_cpu(kernel(op, 0, 400, dtype=dtype, bound="compute", **work)) for dtype in ("fp64", "fp32"))
    assert wide.value("fp64_convolution_share") == pytest.approx(0.4)
    assert wide.value("fp64_saving_ns") == pytest.approx((400 - 100 / 2) * US)
    assert wide.value("nchw_convolution_share") == 0
    assert single.value("nchw_convolution_share") == pytest.approx(0.4)


V100 = replace(A100, name="V100", peaks={"fp32": 15.7e12, "fp16": 125.6e12})
NAMED = [  # what a recording without shapes holds: names; sgemm of 16-bit inputs is none of fp32
    ("volta_sgemm_128x64_nn", 0, 400), ("volta_fp16_sgemm_fp16_128x64_nn", 400, 500), ("volta_h884gemm_128x128_ldg8_nn", 500, 600),
    ("void at::native::vectorized_elementwise_kernel<4, ...>", 600, 800),
]  # fmt: skip


def test_kernel_names_tell_fp32_products_that_16_bit_engines_would_take() -> None:
    work = [kernel("aten::op", start, end, name=name, shapes=None) for name, start, end in NAMED]
    work.append(kernel("record_param_comms", 800, 900, name="ncclDevKernel_AllReduce_Sum_f32", collective=True))
    facts = Facts(analysis(work, device=V100))
    assert facts.value("shaped_share") == 0
    assert facts.value("slow_matrix_share") == pytest.approx(0.4)
    assert (facts.value("tf32_speedup"), facts.value("half_precision_speedup")) == (1.0, pytest.approx(8.0))
    assert facts.value("named_half_saving_ns") == pytest.approx((400 * 7 / 8 + 400 / 2) * US)
    found = {finding.rule: finding for finding in judge(analysis(work, device=V100), load_rules()).findings}
    assert (found["CMP-14"].severity, found["CMP-14"].fixes) == ("warning", ("fp16",))
    assert "40 % of a step" in found["CMP-14"].message
    few = [*work, kernel("aten::op", 900, 905, shapes=[[N, N]])]  # a few ops with shapes do not tell the types of the others
    assert Facts(analysis(few, device=V100)).value("slow_matrix_share") == pytest.approx(0.4)
    assert "CMP-14" not in {finding.rule for finding in judge(analysis(work), load_rules()).findings}  # an A100 has TF32


def test_where_the_bandwidth_is_not_known_the_peak_alone_bounds_what_16_bit_gives() -> None:
    device = msgspec.structs.replace(A100, bandwidth_byte_per_s=None)
    facts = Facts(analysis([product(0, 100), pointwise("aten::mul", 100, 400)], device=device))
    assert facts.value("bandwidth_known") is False
    assert facts.value("half_precision_saving_ns") == pytest.approx(100 * US - 2 * N**3 / (0.75 * 312e12) * 1e9)


def test_autocast_leaves_norms_softmax_exponentials_and_foreign_ops_alone_on_a_gpu() -> None:
    names = ("aten::mul", "aten::cudnn_batch_norm", "aten::native_layer_norm", "aten::_softmax", "aten::sum", "fbgemm::lookup", "aten::exp")
    work = [product(0, 100), *(pointwise(name, 100 + 100 * i, 200 + 100 * i) for i, name in enumerate(names))]
    facts = Facts(analysis(work))
    assert facts.value("fp32_work_share") == pytest.approx(0.3)
    assert facts.value("fp32_matrix_share") == pytest.approx(0.1)


@pytest.mark.slow
def test_products_that_torch_keeps_in_fp32_under_autocast_are_not_promised_16_bit(tmp_path: Path) -> None:
    """What torch does is the truth: products within cdist, decompositions and their gradients stay in fp32, those of layers do not."""
    torch = pytest.importorskip("torch")
    x, layer = torch.randn(32, 32, requires_grad=True), torch.nn.Linear(32, 32)
    linalg, path = torch.linalg, str(tmp_path / "trace.json")
    schedule, save = torch.profiler.schedule(wait=0, warmup=1, active=2), lambda profiler: profiler.export_chrome_trace(path)
    with torch.profiler.profile(record_shapes=True, schedule=schedule, on_trace_ready=save) as profiler:
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                kept = [torch.cdist(x, 2 * x), linalg.svd(x)[0], linalg.qr(x)[0], linalg.inv(x), linalg.solve(x, x.T), torch.pinverse(x)]
                cast = [layer(x), x @ x, linalg.matrix_power(x, 3)]
                loss = sum(part.float().sum() for part in kept + cast)
            loss.backward()
            profiler.step()
    window = Window(open_recording(path).analysis)
    work = window.kernels.filter(pl.col("op_name").is_in(["aten::mm", "aten::addmm"]))
    left = find_ops_left_in_fp32(window).gather(work["call"])
    assert 0 < left.sum() < work.height
    wrong = work.filter(left != (work["dtype"] == "fp32"))
    assert not wrong.height, window.name_around(wrong).to_list()


def on_cpu(*work: Work, gains: tuple[HalfGain, ...] = GAINS, wall: float = 1000) -> Facts:
    peaks = {"fp32": 1e11, "bf16": 4e11}
    return Facts(analysis(work, wall=wall, device=replace(CPU, peaks=peaks, half_gains=gains)))


def test_on_a_cpu_only_streams_that_calibration_found_faster_follow() -> None:
    names = ("aten::mul", "aten::gelu", "aten::bernoulli_", "aten::linalg_vector_norm")
    facts = on_cpu(product(0, 100), *(pointwise(name, 100 + 100 * i, 200 + 100 * i) for i, name in enumerate(names)))
    assert facts.value("fp32_work_share") == pytest.approx(0.3)  # the product, mul and gelu
    # the nearest size to 1024^3 is (1024, 1024), 4 times as fast; the others 1.25 times
    assert facts.value("half_precision_speedup") == pytest.approx(4.0)
    assert facts.value("half_precision_saving_ns") == pytest.approx((300 - 100 / 4 - 200 / 1.25) * US)


def test_elementary_functions_follow_products_of_their_phase_on_a_cpu() -> None:
    tanh = pointwise("aten::tanh", 100, 200, bound="compute")
    averaging = pointwise("aten::mul", 200, 400, phase="other")  # of the weights, after the optimizer: its inputs stay fp32
    assert on_cpu(product(0, 100), tanh, averaging).value("fp32_work_share") == pytest.approx(0.2)
    scoring = product(400, 500, phase="other")  # a forward pass without gradients: what follows its products follows their type
    assert on_cpu(product(0, 100), tanh, averaging, scoring).value("fp32_work_share") == pytest.approx(0.5)
    assert Facts(analysis([product(0, 100), tanh])).value("fp32_work_share") == pytest.approx(0.1)  # on a GPU they wait for memory


def test_products_far_below_their_roof_may_gain_more_than_the_peaks_tell() -> None:
    # 2 * 1024^3 FLOP at 75 % of 400 GFLOP/s take 7.2 ms: a product of 40 ms may gain 5.6 times, one of 20 ms the 4 of the peaks
    slow, fast = (on_cpu(product(0, us, bytes_moved=1e6), wall=us).value("half_precision_saving_ns") for us in (40_000, 20_000))
    assert slow == pytest.approx(40e6 - 2 * N**3 / (0.75 * 4e11) * 1e9)
    assert fast == pytest.approx(20e6 * 3 / 4)
    nbytes = 1.1 * 2 * N**3 * 20e9 / 1e11  # few rows, below the ridge of 20 GB/s and 100 GFLOP/s: all weights are read, and cast
    read = on_cpu(product(0, 400_000, bytes_moved=nbytes), wall=400_000)
    assert read.value("half_precision_saving_ns") == pytest.approx(400e6 * 3 / 4)


def test_small_products_lose_what_large_ones_gain() -> None:
    small = kernel("aten::mm", 100, 500, shapes=[[20, 300], [300, 260]], flops=3e6, bytes_moved=4e5, name="mm")
    narrow = kernel("aten::conv2d", 500, 600, shapes=[[8, 3, 32, 32], [16, 3, 3, 3]], flops=3e6, bytes_moved=4e5, name="conv")
    facts = on_cpu(product(0, 100), small)
    assert facts.value("half_precision_speedup") == pytest.approx(500 / (100 / 4 + 400 / 0.5))
    assert facts.value("half_precision_saving_ns") == 0.0
    assert on_cpu(narrow).value("half_precision_saving_ns") == 0.0  # no convolution was measured


def test_attention_loses_or_gains_by_the_length_of_its_sequences() -> None:
    gains = (*GAINS, HalfGain("attention", 0.2, 48, 64), HalfGain("attention", 1.5, 512, 64), HalfGain("attention", 0.5, 512, 8))

    def attend(keys: int, head: int = 64) -> Facts:
        shapes = [[1, 8, keys, head]] * 3
        attention = kernel("aten::_scaled_dot_product_flash_attention_for_cpu", 100, 200, shapes=shapes, dtype="fp32", bound="compute")
        return on_cpu(product(0, 100), attention, gains=gains)

    assert attend(37).value("half_precision_speedup") == pytest.approx(200 / (100 / 4 + 100 / 0.2))
    assert attend(37).value("half_precision_saving_ns") == 0.0
    assert attend(400).value("half_precision_speedup") == pytest.approx(200 / (100 / 4 + 100 / 1.5))
    assert attend(400, 8).value("half_precision_speedup") == pytest.approx(200 / (100 / 4 + 100 / 0.5))


def test_the_bound_is_what_sizes_up_to_eight_times_as_large_gain() -> None:
    """A product of 128 x 1024 is nearest to that of 64 x 1024 here, and may gain what 1024 x 1024 does."""
    near = kernel("aten::mm", 0, 100, shapes=[[128, 1024], [1024, 1024]], flops=3e8, bytes_moved=1e9, name="mm", dtype="fp32")
    measured = (HalfGain("gemm", 1.5, 64, 1024), HalfGain("gemm", 3.0, 1024, 1024), HalfGain("gemm", 3.5, 2048, 2048))
    assert on_cpu(near, gains=measured).value("half_precision_speedup") == pytest.approx(1.5)
    assert on_cpu(near, gains=measured).value("half_precision_saving_ns") == pytest.approx(100 * US * (1 - 1 / 3))


def test_without_a_measurement_nothing_is_promised_on_a_cpu() -> None:
    for name in ("half_precision_speedup", "half_precision_saving_ns"):
        found = on_cpu(product(0, 100), gains=()).value(name)
        assert isinstance(found, Missing)
        assert "gpudiag calibrate" in found.reason
