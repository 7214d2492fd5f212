"""Sparse gradients of embeddings: the rows that they hold are read from the calls inside; recorded on this CPU, and as a GPU records it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from factories import CPU
from handmade import call, kernel, linked, op, steps

from gpudiag.attribution.links import link_kernels
from gpudiag.attribution.steps import find_steps
from gpudiag.model.finding import Missing
from gpudiag.model.ops import Cost
from gpudiag.model.trace import Trace, build_empty_table
from gpudiag.roofline.attributed_ops import find_attributed_ops
from gpudiag.roofline.kernel_bounds import classify_kernels
from gpudiag.trace import read_trace

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

ROWS, WIDTH = 500, 16
Sparse = Callable[..., Trace]


@pytest.fixture
def record(tmp_path: Path) -> Sparse:
    """Returns the costed trace of the last of three training steps of `tables` (index counts) with sparse gradients."""

    def run(optimizer: Callable[..., Any], *counts: int, rows: int = ROWS, after: Callable[[Any], None] | None = None) -> Trace:
        torch.manual_seed(0)
        models = [nn.Embedding(rows, WIDTH, sparse=True) for _ in counts]
        chosen = [torch.randint(rows, (count,)) for count in counts]
        updates = optimizer([model.weight for model in models])

        def step() -> None:
            updates.zero_grad()
            sum(model(rows).pow(2).sum() for model, rows in zip(models, chosen, strict=True)).backward()
            if after:
                after(models[0].weight.grad)
            updates.step()

        step(), step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
            step()
        profiler.export_chrome_trace(str(tmp_path / "trace.json"))
        trace = read_trace(tmp_path / "trace.json")
        trace = link_kernels(trace, find_steps(trace).table, on_cpu=True)[0]
        return classify_kernels(trace, find_attributed_ops(trace, on_cpu=True), build_empty_table("gaps"), CPU)

    return run


def own(trace: Trace, name: str, *, phase: str | None = None) -> pl.DataFrame:
    """Return (flops, bytes_moved, provenance) of each call of `name` that is more than dispatch."""
    names = trace.ops.select(pl.col("id").alias("owner"), pl.col("name").cast(pl.String).alias("call"), "start_ns")
    frame = trace.kernels.drop("start_ns").join(names, on="owner").filter(pl.col("call") == name, pl.col("bytes_moved") != 0)
    return frame.sort("start_ns").select("flops", "bytes_moved", "provenance")


def added(rows: int, table: int = ROWS) -> tuple[float, float]:
    """Return (FLOPs, bytes) of adding `rows` rows to a table of fp32: values and int64 indices read, touched rows read and written."""
    return float(rows * WIDTH), float(rows * (4 * WIDTH + 8) + 2 * min(rows, table) * 4 * WIDTH)


def test_adding_a_sparse_gradient_moves_the_rows_that_were_looked_up(record: Sparse) -> None:
    """Tables of one size with different numbers of look-ups: each update has its own; 700 of 500 rows touch each row once."""
    counts = (40, 90, 700)
    updates = own(record(lambda weights: torch.optim.SGD(weights, lr=0.1), *counts), "aten::add")
    updates = updates.filter(pl.col("provenance") == "derived")
    assert updates.select("flops", "bytes_moved").rows() == [added(count) for count in counts]


def test_as_many_rows_as_the_table_has(record: Sparse) -> None:
    updates = own(record(lambda weights: torch.optim.SGD(weights, lr=0.1), ROWS), "aten::add")
    assert added(ROWS) in updates.select("flops", "bytes_moved").rows()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
        lambda weights: torch.optim.Adagrad(weights, lr=0.1),
        lambda weights: torch.optim.SparseAdam(weights, lr=0.1),
    ],
    ids=["momentum", "adagrad", "sparse adam"],
)
def test_every_call_of_an_optimizer_for_sparse_gradients_is_known(record: Sparse, optimizer: Any) -> None:
    trace = record(optimizer, 300, 200)
    assert trace.kernels.filter(pl.col("provenance") == "none").is_empty()
    time = trace.kernels["busy_ns"].sum()
    assert trace.kernels.filter(pl.col("provenance") == "generic")["busy_ns"].sum() < 0.02 * time


def test_coalescing_writes_each_distinct_row_once(record: Sparse) -> None:
    torch.manual_seed(0)
    grads: list[Any] = []
    trace = record(lambda weights: torch.optim.SGD(weights, lr=0.1), 700, after=lambda grad: grads.append(grad.coalesce()))
    distinct = grads[-1]._nnz()
    assert distinct < ROWS
    assert own(trace, "aten::_coalesce").rows() == [(700.0 * WIDTH, (700.0 + distinct) * (4 * WIDTH + 8), "derived")]


def test_two_sparse_gradients_are_joined(record: Sparse) -> None:
    """Gradients of two backward passes are added up: 700 + 700 rows read and written, with their indices."""
    sums: list[Any] = []
    trace = record(lambda weights: torch.optim.SGD(weights, lr=0.1), 700, after=lambda grad: sums.append(grad + grad))
    joined = [row for row in own(trace, "aten::add").rows() if row[0] == 1400.0 * WIDTH]
    assert joined == [(1400.0 * WIDTH, 2 * 1400.0 * (4 * WIDTH + 8), "derived")]


def test_scaling_a_sparse_gradient_works_on_its_values(record: Sparse) -> None:
    trace = record(lambda weights: torch.optim.SGD(weights, lr=0.1), 40, after=lambda grad: grad.mul_(0.5))
    scaled = own(trace, "aten::mul").filter(pl.col("provenance") == "exact", pl.col("flops") == 40.0 * WIDTH)
    assert scaled["bytes_moved"].is_between(2 * 40.0 * 4 * WIDTH, 2 * 40.0 * 4 * WIDTH + 8).sum() == 3  # backward of pow: two; this: one
    assert trace.kernels.filter(pl.col("provenance") == "none").is_empty()


def sparse(event: dict[str, Any], strides: list[list[int]]) -> dict[str, Any]:
    event["args"]["Input Strides"] = strides
    return event


TABLE, VALUES = [1000, 64], [200, 64]


def on_gpu(*inside: dict[str, Any]) -> Cost | Missing | None:
    """Return the cost of a kernel that aten::add_(table, sparse) launches itself."""
    outer = sparse(op("aten::add_", 0, 100, [TABLE, TABLE, []]), [[64, 1], [], []])
    trace = linked(*steps(0, 10_000), outer, *inside, call(90, 1), kernel(1000, 1100, 1, "sparseElementwiseKernel"))
    found = find_attributed_ops(trace, on_cpu=False)
    row = trace.kernels["name"].cast(pl.String).to_list().index("sparseElementwiseKernel")
    return found.costs[found.call[row]]


def test_a_coalesced_gradient_on_a_gpu() -> None:
    """add_out_dense_sparse_cuda casts both operands, then launches one kernel: 200 rows of 64 fp32 and their indices."""
    casts = [op("aten::to", 10, 20, [TABLE, [], [], []]), op("aten::to", 30, 40, [VALUES, [], [], []])]
    casts = [sparse(event, [[64, 1], [], [], []]) for event in casts]
    assert on_gpu(*casts) == Cost(vector_flops=200 * 64, bytes=200 * (256 + 8) + 2 * 200 * 256, provenance="derived")


def test_rows_that_nothing_inside_tells_are_not_known() -> None:
    assert isinstance(on_gpu(), Missing)
    assert isinstance(on_gpu(op("aten::resize_as_", 10, 20, [TABLE, TABLE])), Missing)
