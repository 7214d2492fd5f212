"""Triton kernels of Inductor in a plain trace: names, arguments, and what they add up to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kept
import polars as pl
import pytest
from realtraces import reference

from gpudiag.model.finding import Missing
from gpudiag.model.ops import Cost, parse_signature
from gpudiag.roofline.costs import estimate_cost, find_kind
from gpudiag.roofline.costs.inductor import MAX_NAME, count_operations, parse_kernel_name, split_ops

BF16 = "c10::BFloat16"


def cost(name: str, shapes: list[list[int]], sizes: list[int], dtypes: list[str] | str = "float", **kwargs: Any) -> Cost | Missing:
    """Return the cost of a call with tensors of `shapes` and the plain integers `sizes` behind them, as torch records it."""
    kinds = [dtypes] * len(shapes) if isinstance(dtypes, str) else dtypes
    return estimate_cost(
        name,
        parse_signature(
            json.dumps(shapes + [[]] * len(sizes)),
            json.dumps(kinds + ["Scalar"] * len(sizes)),
            json.dumps(kwargs["strides"]) if "strides" in kwargs else None,
            json.dumps([""] * len(shapes) + [str(size) for size in sizes]),
        ),
    )


@pytest.mark.parametrize(
    ("name", "category", "ops"),
    [
        ("triton_poi_fused_add_0", "poi", ["add"]),
        ("triton_poi_fused__to_copy_add_12", "poi", ["_to_copy", "add"]),
        (
            "triton_per_fused_native_layer_norm_native_layer_norm_backward_1",
            "per",
            ["native_layer_norm", "native_layer_norm_backward"],
        ),
        ("triton_red_fused__unsafe_view_add_mean_mul_pow_rsqrt_1", "red", ["_unsafe_view", "add", "mean", "mul", "pow", "rsqrt"]),
        ("triton_poi_fused___and___eq_2", "poi", ["__and__", "eq"]),
        ("triton_poi_fused__softmax__softmax_backward_data_3", "poi", ["_softmax", "_softmax_backward_data"]),
        ("triton_poi_fused_max_pool2d_with_indices_relu_1", "poi", ["max_pool2d_with_indices", "relu"]),
        ("triton_tem_fused_mm_1", "tem", ["mm"]),
        ("triton_for_fused_0", "for", []),
        ("triton_fused_add_relu_0", "", ["add", "relu"]),
        ("cpp_fused_gelu_view_2", "", ["gelu", "view"]),
    ],
)
def test_a_name_splits_into_its_ops(name: str, category: str, ops: list[str]) -> None:
    assert parse_kernel_name(name) == (category, tuple(ops))


@pytest.mark.parametrize("name", ["triton_", "triton_mm_3", "my_kernel", "triton_poi_fused_" + "a_" * MAX_NAME])
def test_other_names_say_nothing(name: str) -> None:
    assert parse_kernel_name(name) is None


def test_an_unknown_word_costs_no_more_than_itself() -> None:
    assert split_ops("add_frobnicate_mul") == ("add", "frobnicate", "mul")
    assert split_ops("frobnicate_mul_add") == ("frobnicate", "mul", "add")


def test_operations_by_op() -> None:
    found = {op: count_operations(op) for op in ("view", "_to_copy", "add", "gelu", "native_layer_norm", "mean", "frobnicate")}
    assert found == {"view": 0, "_to_copy": 0, "add": 1, "gelu": 10, "native_layer_norm": 8, "mean": 1, "frobnicate": 1}


def test_out_of_place_counts_each_argument_once() -> None:
    # 2^20 bf16 elements: two read, one written; silu 5 + mul 1
    found = cost("triton_poi_fused_mul_silu_0", [[1024, 1024]] * 3, [1 << 20], BF16)
    assert found == Cost(vector_flops=6 << 20, special=1 << 20, bytes=3 * 2 << 20, provenance="derived")


def test_fp32_has_its_width() -> None:
    assert cost("triton_poi_fused_add_0", [[256]] * 3, [256]) == Cost(vector_flops=256, bytes=3 * 4 * 256, provenance="derived")


def test_a_bias_at_the_end_means_that_the_first_argument_is_updated_in_place() -> None:
    found = cost("triton_poi_fused_addmm_relu_0", [[512, 256], [256]], [512 * 256])
    assert found == Cost(vector_flops=2 * 131072, bytes=4 * (2 * 131072 + 256), provenance="derived")


def test_a_single_tensor_is_read_and_written_unless_it_is_filled() -> None:
    relu, zeros = cost("triton_poi_fused_relu_0", [[4096]], [4096]), cost("triton_poi_fused_zeros_0", [[4096]], [4096])
    assert relu == Cost(vector_flops=4096, bytes=2 * 4 * 4096, provenance="derived")
    assert zeros == Cost(vector_flops=0, bytes=4 * 4096, provenance="derived")


def test_a_reduction_reads_more_than_it_writes() -> None:
    found = cost("triton_red_fused_sum_0", [[1024, 4096], [1024]], [1024, 4096])
    assert found == Cost(vector_flops=1024 * 4096, bytes=4 * (1024 * 4096 + 1024), provenance="derived")


def test_a_split_reduction_is_padded() -> None:
    # 1000 elements in 3 parts of 334
    found = cost("triton_red_fused_sum_0", [[10, 100], [3]], [3, 334])
    assert found == Cost(vector_flops=1002, bytes=4 * 1003, provenance="derived")


def test_a_layer_norm_is_that_of_the_cost_table() -> None:
    # op_costs section 4, ln-bert without the statistics: 8 X FLOP, x and y and two parameter rows
    found = cost("triton_per_fused_native_layer_norm_0", [[8192, 1024], [1024], [1024], [8192, 1024]], [8192, 1024])
    assert found == Cost(vector_flops=67108864, bytes=4 * (2 * 8192 * 1024 + 2 * 1024), provenance="derived")


def test_an_embedding_reads_its_rows_not_its_table() -> None:
    found = cost("triton_poi_fused_embedding_0", [[8, 64], [50304, 768], [8, 64, 768]], [512 * 768], ["long int", "float", "float"])
    assert found == Cost(vector_flops=0, bytes=512 * 8 + 2 * 4 * 512 * 768, provenance="derived")


def test_a_table_that_the_name_does_not_tell_is_bounded_by_the_loops() -> None:
    # a nameless kernel looks 32 rows of 2880 bf16 up: it cannot read the 201,088 rows of the table
    found = cost("triton_poi_fused_0", [[32], [201088, 2880], [32, 2880]], [32 * 2880], ["int", BF16, BF16])
    assert found == Cost(vector_flops=92160, bytes=4 * 32 + 2 * 2 * 92160, provenance="generic")
    part = cost("triton_poi_fused_slice_0", [[50304, 768], [100]], [100])
    assert part == Cost(vector_flops=0, bytes=2 * 4 * 100, provenance="generic")


def test_without_the_sizes_of_the_loops_a_table_has_no_cost() -> None:
    # two kernels in one (config.combo_kernels) are passed no sizes: the rows that the first one reads are not known
    shapes = [[32], [201088, 2880], [131072, 64], [32, 2880], [131072, 64]]
    found = cost("triton_poi_fused_0", shapes, [], ["int", BF16, "float", BF16, BF16])
    assert isinstance(found, Missing)
    assert "larger than its result" in found.reason
    # nothing is larger than the result: the sizes say the traffic, as far as they go
    assert isinstance(cost("triton_poi_fused_add_0", [[64, 8], [8], [64, 8]], []), Cost)


def test_a_pool_reads_more_elements_than_it_has_results() -> None:
    found = cost("triton_poi_fused_avg_pool2d_0", [[8, 64, 32, 32], [8, 64, 16, 16]], [8 * 64 * 256])
    assert isinstance(found, Cost)
    assert (found.bytes, found.provenance) == (4 * 5 * 8 * 64 * 256, "derived")


def test_an_expanded_operand_counts_its_own_elements() -> None:
    strides = [[512, 1], [0, 1], [512, 1], []]
    found = cost("triton_poi_fused_add_0", [[512, 512], [512, 512], [512, 512]], [1 << 18], strides=strides)
    assert isinstance(found, Cost)
    assert found.bytes == 4 * (2 * 512 * 512 + 512)


def test_sizes_that_do_not_fit_give_a_generic_cost() -> None:
    part = cost("triton_poi_fused_mul_slice_0", [[64, 1024], [64, 512]], [64 * 512])
    sizeless = cost("triton_poi_fused_add_0", [[256]] * 3, [])
    nameless = cost("triton_", [[256]] * 3, [256])
    assert all(isinstance(found, Cost) and found.provenance == "generic" for found in (part, sizeless, nameless))


def test_a_template_has_the_flop_of_its_product() -> None:
    found = cost("triton_tem_fused_mm_0", [[512, 256], [256, 128], [512, 128]], [], BF16)
    assert found == Cost(
        matrix_flops=2 * 512 * 128 * 256, bytes=2 * (512 * 256 + 256 * 128 + 512 * 128), dtype="bf16", provenance="derived"
    )
    batched = cost("triton_tem_fused_bmm_0", [[8, 64, 32], [8, 32, 16], [8, 64, 16]], [])
    assert isinstance(batched, Cost)
    assert batched.matrix_flops == 2 * 8 * 64 * 32 * 16
    convolved = cost("triton_tem_fused_convolution_0", [[32, 64, 56, 56], [128, 64, 3, 3], [32, 128, 56, 56]], [], "c10::Half")
    assert isinstance(convolved, Cost)
    assert convolved.matrix_flops == 14797504512  # op_costs section 2, conv3x3


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("triton_tem_fused_flex_attention_0", [[4, 8, 128, 64]] * 4),
        ("triton_tem_fused_mm_0", [[512, 256], [100, 128], [512, 128]]),
        ("triton_tem_fused_0", [[512, 256], [256, 128], [512, 128]]),
        ("triton_poi_fused_add_0", []),
    ],
)
def test_what_the_operands_do_not_tell_is_missing(name: str, shapes: list[list[int]]) -> None:
    assert isinstance(cost(name, shapes, [16]), Missing)


def test_foreach_kernels_count_all_their_tensors() -> None:
    found = cost("triton_for_fused_0", [[100], [200], [100], [200]], [])
    assert found == Cost(vector_flops=600, bytes=2400, provenance="derived")


def test_a_generated_kernel_owns_its_work() -> None:
    assert find_kind("triton_poi_fused_add_0") == "work"


def test_the_real_trace_agrees_with_the_reference(traces: Path) -> None:
    name = "mi300x_torch_compile_triton_micro"
    analysis = kept.analysis(traces / f"{name}.json.gz")
    kernels = analysis.trace.kernels.filter(pl.col("name").cast(pl.String).str.starts_with("triton_"))
    expected = reference(traces, name)["tracelens"]["modelled_totals_by_category"]["triton"]
    assert kernels["bytes_moved"].sum() / 1e9 == pytest.approx(expected["gbyte"], abs=1e-6)
    assert kernels["provenance"].to_list() == ["derived"] * 4
    assert analysis.coverage.modelled_share == 1.0
