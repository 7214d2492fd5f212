"""Sizes that only a kernel's grid tells."""

from __future__ import annotations

from pathlib import Path

import kept
import polars as pl
import pytest
from handmade import call, kernel, linked, op, steps

from gpudiag.attribution.links import link_kernels
from gpudiag.attribution.steps import find_steps
from gpudiag.model.finding import Missing
from gpudiag.model.ops import Cost, parse_signature
from gpudiag.roofline.attributed_ops import find_attributed_ops
from gpudiag.roofline.launch_geometry import estimate_costs_by_grid

INDEX = "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<at::native::OpaqueType<8> > >"
GATHER = "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long, long, long, bool)"
RANGE = "void (anonymous namespace)::elementwise_kernel_with_index<int, at::native::arange_cuda_out>"


def costs(name: str, shapes: list[list[int]], kernels: list[tuple[str, int, int]], dtype: str = "float") -> list[Cost | Missing]:
    """Return the cost behind each kernel (name, blocks, threads a block), one call of `name` each."""
    events = []
    for row, (text, grid, block) in enumerate(kernels):
        start = 10 * row
        events += [op(name, start, start + 8, shapes, dtype=dtype), call(start + 2, row + 1)]
        events.append(kernel(1000 + start, 1005 + start, row + 1, text, grid=[grid, 1, 1], block=[block, 1, 1]))
    trace = linked(*steps(0, 2000), *events)
    owners = find_attributed_ops(trace, on_cpu=False)
    estimate_costs_by_grid(trace, owners)
    return [owners.costs[row] for row in owners.call]


def test_masks_selected_by_a_boolean_index() -> None:
    """Segment-anything keeps k of 192 masks of 534 x 800: 112641 blocks of 512 elements hold 135 whole masks, and no other number.

    Read and written: 2 x 135 x 427200 x 8 B = 922752000 B, and 135 indices of 8 B.
    """
    (found,) = costs("aten::index", [[192, 534, 800], []], [(INDEX, 112_641, 128)], "double")
    assert found == Cost(bytes=922_752_000 + 135 * 8, provenance="derived")


def test_calls_of_one_signature_differ_by_their_grid() -> None:
    first, second = costs("aten::index", [[192, 534, 800], []], [(INDEX, 112_641, 128), (INDEX, 141_010, 128)], "double")
    assert isinstance(first, Cost)
    assert isinstance(second, Cost)
    assert second.bytes * 135 == first.bytes * 169  # 169 masks


def test_a_range_without_whole_slices_is_half_a_block_off_at_most() -> None:
    (found,) = costs("aten::index", [[755_000], []], [(INDEX, 1475, 128)])
    assert isinstance(found, Cost)
    elements = found.bytes / (4 + 4 + 8)
    assert 1474 * 512 < elements <= 1475 * 512


def test_rows_gathered_by_index() -> None:
    """A row of 2880 bf16 is 5760 B: two blocks of 256 x 16 B each, so that 64 blocks are 32 rows (vLLM's last hidden states)."""
    (found,) = costs("aten::index", [[32, 2880], []], [(GATHER, 64, 256)], "c10::BFloat16")
    assert found == Cost(bytes=2 * 32 * 5760 + 32 * 8, provenance="derived")


@pytest.mark.parametrize(
    ("text", "grid", "block"),
    [
        ("void at::native::reduce_kernel<512, 1>", 100, 512),  # a grid that says nothing about the size
        (INDEX, 0, 128),
        (INDEX, 5, 64),  # the block is not the one that the name states
        (INDEX.replace("128, 4", "0, 4"), 5, 0),
        (GATHER.replace("16,", "0,"), 5, 256),
        (GATHER, 63, 256),  # no whole number of rows of two blocks
    ],
)
def test_what_says_nothing_stays_unknown(text: str, grid: int, block: int) -> None:
    (found,) = costs("aten::index", [[32, 2880], []], [(text, grid, block)], "c10::BFloat16")
    assert isinstance(found, Missing)


def test_an_empty_or_unknown_source_stays_unknown() -> None:
    for shapes in ([[0, 8], []], [[], []]):
        assert isinstance(costs("aten::index", shapes, [(INDEX, 5, 128)])[0], Missing)


def test_a_range_is_written_once() -> None:
    (found,) = costs("aten::arange", [[], [], [], [0]], [(RANGE, 100, 64)], "long int")
    assert isinstance(found, Cost)
    assert 99 * 64 < found.bytes / 8 <= 100 * 64


def test_helper_kernels_of_the_call_share_its_cost() -> None:
    """Sorting kernels that run under the same aten::index carry the rest of its cost by their time."""
    events = [op("aten::index", 0, 9, [[192, 534, 800], []]), call(2, 1), call(4, 2)]
    kernels = [kernel(100, 105, 1, "void cub::DeviceSelectSweepKernel<>"), kernel(110, 125, 2, INDEX, grid=[112_641, 1, 1])]
    trace = linked(*steps(0, 200), *events, *kernels)
    owners = find_attributed_ops(trace, on_cpu=False)
    estimate_costs_by_grid(trace, owners)
    assert owners.call[0] == owners.call[1]
    assert isinstance(owners.costs[owners.call[0]], Cost)


def test_blocks_follow_the_size_where_it_is_recorded(traces: Path) -> None:
    """The rule behind it, on real calls whose sizes are known: as many blocks of nt * vt elements as the values need, and no more."""
    trace = kept.tables(traces / "a100_dlrm_train_rank3of8.json.gz")
    trace = link_kernels(trace, find_steps(trace).table, on_cpu=False)[0]
    ops = trace.ops.select(pl.col("id").alias("op"), pl.col("name").cast(pl.String).alias("op_name"), "signature")
    frame = trace.kernels.join(ops, on="op").filter(
        (pl.col("op_name") == "aten::index_copy_") & pl.col("name").cast(pl.String).str.contains("index_elementwise_kernel<128, 4")
    )
    assert frame.height > 10
    for grid, row in frame.select("grid", "signature").iter_rows():
        values = parse_signature(trace.signatures["shapes"][row], trace.signatures["dtypes"][row], None, None).inputs[3]
        assert grid == -(-values.numel // 512)
