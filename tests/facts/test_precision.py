"""Number formats: what runs slowly because of its type, and what autocast would touch, against worked numbers (times in us)."""

from __future__ import annotations

import msgspec
import pytest
from factories import A100, CPU, US, Work, analysis, kernel

from gpudiag.facts import Facts

BANDWIDTH = 2.039e12
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


def test_where_the_bandwidth_is_not_known_the_peak_alone_bounds_what_16_bit_gives() -> None:
    device = msgspec.structs.replace(A100, bandwidth_byte_per_s=None)
    facts = Facts(analysis([product(0, 100), pointwise("aten::mul", 100, 400)], device=device))
    assert facts.value("bandwidth_known") is False
    assert facts.value("half_precision_saving_ns") == pytest.approx(100 * US - 2 * N**3 / (0.75 * 312e12) * 1e9)


def test_autocast_leaves_norms_softmax_and_foreign_ops_alone_on_a_gpu() -> None:
    names = ("aten::mul", "aten::cudnn_batch_norm", "aten::native_layer_norm", "aten::_softmax", "aten::sum", "fbgemm::lookup")
    work = [product(0, 100), *(pointwise(name, 100 + 100 * i, 200 + 100 * i) for i, name in enumerate(names))]
    facts = Facts(analysis(work))
    assert facts.value("fp32_work_share") == pytest.approx(0.3)
    assert facts.value("fp32_matrix_share") == pytest.approx(0.1)
    on_cpu = Facts(analysis(work, device=CPU))
    assert on_cpu.value("fp32_work_share") == pytest.approx(0.6)  # there all ops of torch follow
