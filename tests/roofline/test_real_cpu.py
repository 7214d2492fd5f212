"""A real training step on this CPU: every matrix FLOP is counted once, whatever wraps the op that does it."""

from __future__ import annotations

import polars as pl
import pytest
from factories import CPU

from gpudiag.attribution.links import link_kernels
from gpudiag.attribution.steps import find_steps
from gpudiag.model.trace import Trace, build_empty_table
from gpudiag.roofline.attributed_ops import find_attributed_ops
from gpudiag.roofline.kernel_bounds import classify_kernels
from gpudiag.roofline.op_table import build_op_table, measure_coverage
from gpudiag.trace import read_trace

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402


class Net(nn.Module):
    """An embedding, convolutions of one and two dimensions, norms, attention, linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.conv1d, self.linear = nn.Embedding(50, 32), nn.Conv1d(32, 32, 3, padding=1), nn.Linear(32, 64)
        self.norm, self.out, self.conv2d, self.batch_norm = nn.LayerNorm(64), nn.Linear(64, 10), nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)

    def forward(self, words: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.linear(self.conv1d(self.embedding(words).transpose(1, 2)).transpose(1, 2)))
        heads = hidden.view(4, 16, 4, 16).transpose(1, 2)
        hidden = F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(4, 16, 64)
        return self.out(hidden).mean(1) + F.relu(self.batch_norm(self.conv2d(image))).mean()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, pl.DataFrame, int]:
    """Return (trace at stage 'cost', op rows, FLOPs by torch's own counter) of one training step."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    words, image, labels = torch.randint(0, 50, (4, 16)), torch.randn(4, 1, 16, 16), torch.randint(0, 10, (4,))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(words, image), labels).backward()
        optimizer.step()

    with sdpa_kernel(SDPBackend.MATH):  # the counter does not know the CPU's fused attention
        step()
        with FlopCounterMode(display=False) as counter:
            step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
            step()
    path = tmp_path_factory.mktemp("cpu") / "trace.json"
    profiler.export_chrome_trace(str(path))
    trace = read_trace(path)
    steps = find_steps(trace).table
    trace = link_kernels(trace, steps, on_cpu=True)[0]
    trace = classify_kernels(trace, find_attributed_ops(trace, on_cpu=True), build_empty_table("gaps"), CPU)
    return trace, build_op_table(trace, steps), counter.get_total_flops()


_MATRIX = r"^aten::(mm|addmm|bmm|baddbmm|mkldnn_convolution|thnn_conv2d|_slow_conv2d_forward|convolution_backward)$"


def test_matrix_flops_equal_torchs_counter(run: tuple[Trace, pl.DataFrame, int]) -> None:
    trace, rows, expected = run
    costs = find_attributed_ops(trace, on_cpu=True)
    calls = dict(zip(costs.owner.tolist(), costs.call.tolist(), strict=True))
    assert sum(getattr(costs.costs[row], "matrix_flops", 0) for row in calls.values() if row >= 0) == expected
    assert rows.filter(pl.col("name").str.contains(_MATRIX))["flops"].sum() == pytest.approx(expected, rel=1e-12)


def test_no_call_counts_the_work_of_the_call_inside_it_again(run: tuple[Trace, pl.DataFrame, int]) -> None:
    trace, rows, _ = run
    for name in ("aten::linear", "aten::conv1d", "aten::embedding", "aten::clone", "aten::relu", "aten::scaled_dot_product_attention"):
        found = rows.filter(pl.col("name") == name)
        assert found.height, name
        assert (found["flops"].sum(), found["bytes"].sum()) == (0, 0), name
        assert (found["bound"] == "overhead").all(), name
    nodes = trace.kernels.filter(pl.col("name").cast(pl.String).str.contains(r"Backward\d$|AccumulateGrad$"))
    assert nodes.height
    assert (nodes["bound"] == "overhead").all()


def test_all_of_the_time_has_a_cost(run: tuple[Trace, pl.DataFrame, int]) -> None:
    trace, rows, _ = run
    found = measure_coverage(trace)
    assert found.modelled_share is not None
    assert found.modelled_share > 0.9
    assert rows["kernel_ns"].sum() == trace.kernels.drop_nulls("step")["busy_ns"].sum() > 0
