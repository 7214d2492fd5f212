"""Calls recorded on this CPU whose own record says too little, or says it in another spelling: what they cost, with the arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from factories import CPU

from gpudiag.attribution.links import link_kernels
from gpudiag.attribution.steps import find_steps
from gpudiag.model.trace import Trace, build_empty_table
from gpudiag.roofline.attributed_ops import find_attributed_ops
from gpudiag.roofline.element_types import resolve_list_types
from gpudiag.roofline.kernel_bounds import classify_kernels
from gpudiag.trace import read_trace

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

Record = Callable[..., Trace]


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """Returns the costed trace of one call of a function."""

    def run(step: Callable[[], Any], **options: Any) -> Trace:
        step()
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, record_shapes=True, **options) as profiler:
            step()
        profiler.export_chrome_trace(str(tmp_path / "trace.json"))
        trace = read_trace(tmp_path / "trace.json")
        trace = link_kernels(trace, find_steps(trace).table, on_cpu=True)[0]
        owners = find_attributed_ops(trace, on_cpu=True)
        resolve_list_types(trace, owners)
        return classify_kernels(trace, owners, build_empty_table("gaps"), CPU)

    return run


def owned(trace: Trace, name: str) -> pl.DataFrame:
    """Return the kernels whose cost is that of calls of `name`."""
    names = trace.ops.select(pl.col("id").alias("owner"), pl.col("name").cast(pl.String).alias("call"))
    return trace.kernels.join(names, on="owner").filter(pl.col("call") == name)


@torch.no_grad()
@pytest.mark.parametrize(
    ("layer", "x", "expected"),
    [
        (nn.ConvTranspose1d(16, 8, 4, 2), (2, 16, 64), 2 * 2 * 16 * 64 * 8 * 4),
        (nn.ConvTranspose2d(16, 8, 2, 2), (2, 16, 16, 16), 2 * 2 * 16 * 256 * 8 * 4),
        (nn.ConvTranspose3d(16, 8, 2, 2), (2, 16, 4, 4, 4), 2 * 2 * 16 * 64 * 8 * 8),
        (nn.ConvTranspose2d(16, 16, 2, 2, groups=4), (2, 16, 16, 16), 2 * 2 * 16 * 256 * 4 * 4),
        (nn.ConvTranspose2d(16, 8, 2, 2).bfloat16(), (2, 16, 16, 16), 2 * 2 * 16 * 256 * 8 * 4),
    ],
)
def test_a_transposed_convolution_counts_once(record: Record, layer: nn.Module, x: tuple[int, ...], expected: int) -> None:
    """torch computes it within aten::_convolution itself, beside an aten::copy_: 2 x input elements x output channels x window."""
    values = torch.randn(x, dtype=next(layer.parameters()).dtype)
    assert record(lambda: layer(values)).kernels["matrix_flops"].sum() == expected


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_product_with_a_sparse_operand_is_not_known(record: Record) -> None:
    dense = torch.randn(64, 32)
    sparse = (torch.rand(64, 64) < 0.05).float()
    for operand in (sparse.to_sparse_csr(), sparse.to_sparse()):
        trace = record(lambda operand=operand: operand @ dense)
        assert trace.kernels["matrix_flops"].sum() == 0
        unknown = trace.kernels.filter(pl.col("provenance") == "none")["name"].cast(pl.String)
        assert unknown.is_in(["aten::mm", "aten::_sparse_mm", "aten::addmm"]).any()


def test_overload_names_change_nothing(record: Record) -> None:
    layer, x = nn.Linear(32, 16), torch.randn(8, 32)
    try:
        config = torch._C._profiler._ExperimentalConfig(capture_overload_names=True)
    except TypeError:
        pytest.skip("this torch records no names of overloads")

    def step() -> None:
        layer(x).pow(2).mean().backward()

    told, plain = record(step, experimental_config=config), record(step)
    assert "aten::sum" in set(told.ops["name"].cast(pl.String))
    for column in ("matrix_flops", "flops", "bytes_moved"):
        assert told.kernels[column].sum() == plain.kernels[column].sum()
    assert (
        told.kernels["provenance"].value_counts().sort("provenance").rows()
        == plain.kernels["provenance"].value_counts().sort("provenance").rows()
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_joins_have_the_width_of_what_takes_their_result(record: Record, dtype: Any) -> None:
    x = torch.randn(4, 32, dtype=dtype)
    layer = nn.Linear(64, 16, dtype=dtype)
    with torch.no_grad():
        trace = record(lambda: layer(torch.cat([x, x], -1)))
    assert owned(trace, "aten::cat")["bytes_moved"].to_list() == [2 * x.element_size() * 2 * x.numel()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_fused_optimizers_have_the_width_of_the_accumulated_gradients(record: Record, dtype: Any) -> None:
    layer, x = nn.Linear(64, 48, bias=False, dtype=dtype), torch.randn(4, 64, dtype=dtype)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)

    def step() -> None:
        optimizer.zero_grad()
        layer(x).sum().backward()
        optimizer.step()

    found = owned(record(step), "aten::_fused_adamw_")
    assert found["bytes_moved"].sum() == 7 * 64 * 48 * x.element_size()
    assert set(found["provenance"]) == {"derived"}


def test_a_list_of_unknown_type_is_generic(record: Record) -> None:
    x = torch.randn(40, 30, dtype=torch.bfloat16)
    assert set(owned(record(lambda: torch.cat([x, x])), "aten::cat")["provenance"]) == {"generic"}


@pytest.mark.filterwarnings("ignore")
def test_a_quantised_linear_layer_has_the_outputs_of_the_tensor_that_it_makes(record: Record) -> None:
    model = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(64, 48)), {nn.Linear}, torch.qint8)
    x = torch.randn(8, 64)
    with torch.no_grad():
        found = owned(record(lambda: model(x)), "quantized::linear_dynamic")
    assert found["matrix_flops"].sum() == 2 * 8 * 64 * 48
    assert found["bytes_moved"].sum() == 4 * 8 * 64 + 64 * 48 + 4 * 8 * 48
    assert set(found["provenance"]) == {"derived"}


def test_indexing_without_autograd(record: Record) -> None:
    """The rows that are read and written; for a mask as many as it holds."""
    table, rows = torch.randn(100, 16), torch.arange(0, 100, 4)
    assert owned(record(lambda: table[rows]), "aten::index")["bytes_moved"].sum() == 2 * 25 * 16 * 4
    mask = torch.zeros(100, dtype=torch.bool)
    mask[:7] = True
    assert owned(record(lambda: table[mask]), "aten::index")["bytes_moved"].sum() == 2 * 7 * 16 * 4


@pytest.mark.parametrize("name", ["rand_like", "randn_like", "randint_like"])
def test_random_numbers_count_once_and_read_nothing(record: Record, name: str) -> None:
    x, more = torch.zeros(1000), [7] if name == "randint_like" else []
    assert record(lambda: getattr(torch, name)(x, *more)).kernels["bytes_moved"].sum() == 4000


@pytest.mark.parametrize(("make", "expected"), [(lambda: torch.arange(1000), 8000), (lambda: torch.linspace(0, 1, 500), 2000)])
def test_sequences_count_once_and_wholly(record: Record, make: Callable[[], Any], expected: int) -> None:
    trace = record(make)
    assert trace.kernels["bytes_moved"].sum() == expected
    assert set(trace.kernels["provenance"]) == {"exact"}


def test_a_custom_function_that_repeats_its_forward(record: Record) -> None:
    first, second, x = nn.Linear(32, 48), nn.Linear(48, 32), torch.randn(8, 32, requires_grad=True)

    class Reversible(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, values: Any) -> Any:
            context.save_for_backward(values)
            return second(first(values))

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            with torch.enable_grad():
                values = context.saved_tensors[0].detach().requires_grad_()
                result = second(first(values))
            torch.autograd.backward(result, gradient)
            return values.grad

    trace = record(lambda: Reversible.apply(x).sum().backward())
    forward = 2 * 2 * 8 * 32 * 48
    assert trace.kernels["matrix_flops"].sum() == 4 * forward
    again = trace.kernels.join(trace.ops.select(pl.col("id").alias("owner"), "recompute"), on="owner")
    assert again.filter("recompute")["matrix_flops"].sum() == forward
