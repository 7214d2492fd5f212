"""Lines that call one op for one row, channel or tensor after another, by worked figures and in a small real program."""

from __future__ import annotations

from pathlib import Path

import msgspec
import polars as pl
import pytest
from factories import CPU, US, analysis, gap, kernel

from gpudiag.analysis import analyse
from gpudiag.facts import Facts, loops
from gpudiag.facts.window import Window
from gpudiag.inputs import resolve_input
from gpudiag.model.analysis import Analysis
from gpudiag.model.finding import Where

CALLS = 40


def build_loop(*, calls: int = CALLS, modules: int = 1, flops: float | None = None, rest: int = 1) -> Analysis:
    """Return a step with `calls` products of 30 us at one line and 20 us of Python after each, a node of 40 us for each and 5 us after it,
    and `rest` lines that are no part of it, of 80 us of waiting and an op of 120 us each."""
    begin, end = 50 * calls, 95 * calls
    forward = [kernel("aten::mm", 50 * i, 50 * i + 30, flops=flops, shapes=[[4, 4], [4, 4]]) for i in range(calls)]
    others = [kernel("aten::mul", end + 200 * i + 80, end + 200 * i + 200) for i in range(rest)]
    nodes = [kernel("MmBackward0", begin + 45 * i, begin + 45 * i + 40, phase="backward") for i in range(calls)]
    waits = [(50 * i + 30, 50 * i + 50) for i in range(calls)] + [(begin + 45 * i + 40, begin + 45 * i + 45) for i in range(calls)]
    waits += [(end + 200 * i, end + 200 * i + 80) for i in range(rest)]
    idle = [gap(*wait, cause="idle_launch") for wait in waits]
    made = analysis([*forward, *nodes, *others], idle=idle, device=CPU, wall=end + 200 * rest)
    numbers = [*range(calls), *reversed(range(calls)), *[None] * rest]
    ops = made.trace.ops.with_columns(
        pl.Series("sequence", numbers, dtype=pl.Int64),
        pl.Series("fwd_thread", [0] * calls + [1] * calls + [0] * rest, dtype=pl.Int64),
        pl.Series("module", [f"Net_0.Part_{i % modules}" for i in range(calls)] + [None] * (calls + rest), dtype=pl.String),
    )
    lines = [*["net.py(20): forward"] * calls, *[None] * calls, *(f"net.py({30 + i}): forward" for i in range(rest))]
    sites = pl.Series(lines, dtype=pl.String)
    return msgspec.structs.replace(made, trace=msgspec.structs.replace(made.trace, ops=ops), sites=sites)


def test_a_loop_is_all_between_its_calls_and_its_backward_pass() -> None:
    facts = Facts(build_loop())
    inside, wall = CALLS * 95 - 5, CALLS * 95 + 200  # to the end of the last node
    assert facts.value("loop_share") == pytest.approx(inside / wall)
    assert facts.value("loop_calls") == CALLS
    assert facts.value("loop_dispatch_part") == 1  # the upper bound is that of the loop, with the work in it
    others = Facts(build_loop(rest=60))  # 60 waits of 80 us elsewhere are more than the loop holds
    assert others.value("loop_dispatch_part") == pytest.approx((CALLS * 25 - 5) / (CALLS * 25 + 60 * 80))
    assert facts.value("without_dispatch_ns") == pytest.approx(inside * US)
    # one product over all rows has their arithmetic: 1 MFLOP each at 100 GFLOP/s
    assert Facts(build_loop(flops=1e6)).value("loop_share") == pytest.approx((inside - CALLS * 10) / wall)


@pytest.mark.parametrize("few", [{"calls": 5}, {"calls": 19, "modules": 2}, {"modules": CALLS}])
def test_few_calls_and_the_layers_of_a_model_are_no_loop(few: dict[str, int]) -> None:
    facts = Facts(build_loop(**few))
    assert (facts.value("loop_share"), facts.value("loop_calls"), facts.value("loop_dispatch_part")) == (0, 0, 0)
    assert facts.value("without_dispatch_ns") == pytest.approx((few.get("calls", CALLS) * 25 + 80) * US)


def test_one_module_again_and_again_with_nothing_between_is_a_loop_sooner() -> None:
    facts = Facts(build_loop(calls=6))  # as the parts of a batch; two modules by turns are a model
    assert facts.value("loop_calls") == 6
    assert facts.value("loop_share") == pytest.approx((6 * 95 - 5) / (6 * 95 + 200))


def test_the_bound_is_that_of_the_loop_or_of_the_rest() -> None:
    facts = Facts(build_loop(calls=20, rest=30))  # 1895 us of a loop, and 2400 us of waiting elsewhere: no one change mends both
    assert facts.value("dispatch_idle_ns") == pytest.approx((20 * 25 + 30 * 80) * US)
    assert facts.value("without_dispatch_ns") == pytest.approx(30 * 80 * US, rel=0.01)


def test_the_line_of_the_loop_stands_first_with_all_of_its_time() -> None:
    made = build_loop()
    whole = (CALLS * 95 - 5) * US  # to the end of the last node
    assert Facts(made).places("late_ops")[0] == Where(f"{CALLS} calls of aten::mm", "net.py", 20, whole)
    asked = Facts(msgspec.structs.replace(made, ask_frames=lambda _: made.sites.str.replace("net.py.20", "train.py(9")))
    assert (asked.places("late_ops")[0].file, asked.places("late_ops")[0].line) == ("train.py", 9)


def test_of_a_function_whose_line_is_not_known_nothing_is_a_loop() -> None:
    made = build_loop()
    assert Facts(msgspec.structs.replace(made, sites=made.sites.str.replace(r"\(20\)", "(?)"))).value("loop_share") == 0


@pytest.mark.parametrize(
    ("tensors", "line", "apart_us", "joined_us"),
    [
        (40, "net.py(21): forward", 100, 200),
        (19, "net.py(21): forward", 0, -20),
        (19, "net.py(20): around", 0, 200),  # the loop is in a list on this line
        (None, "net.py(21): forward", 100, 200),  # torch records no list of more than 30
    ],
)
def test_what_joins_the_rows_of_a_loop_or_takes_them_apart_belongs_to_it(
    tensors: int | None, line: str, apart_us: float, joined_us: float
) -> None:
    """An unbind of 100 us, 40 products of 30 us with 20 us of Python after each, and a stack of 200 us; then something else."""
    rows: list[list[int]] = [[4, 4]] * (tensors or 0)
    apart = kernel("aten::unbind", 0, 100, shapes=[[tensors or CALLS, 4]])
    products = [kernel("aten::mm", 100 + 50 * i, 130 + 50 * i, shapes=[[4, 4], [4, 4]]) for i in range(CALLS)]
    stack = kernel("aten::stack", 100 + 50 * CALLS, 300 + 50 * CALLS, shapes=[rows], dtypes=[""])
    end = 300 + 50 * CALLS
    idle = [gap(130 + 50 * i, 150 + 50 * i, cause="idle_launch") for i in range(CALLS)]
    made = analysis([apart, *products, stack, kernel("aten::mul", end, end + 500)], idle=idle, device=CPU, wall=end + 500)
    sites = pl.Series(["net.py(19): forward", *["net.py(20): forward"] * CALLS, line, "net.py(22): forward"])
    found = Facts(msgspec.structs.replace(made, sites=sites)).value("loop_share")
    assert found == pytest.approx((apart_us + 50 * CALLS + joined_us) / (end + 500))


def test_what_autograd_takes_where_the_passes_turn_is_shared_by_the_nodes() -> None:
    """Three of four nodes are those of a loop: of 650 us before the first of them 250 are any program's, of 1,050 us after the last too."""
    spans = [(0, 100), (700, 800), (1450, 1500), (1500, 1600), (1600, 1700), (1700, 1800), (2850, 3000)]
    names = ["aten::mse_loss", "aten::ones_like", *["MmBackward0"] * 4, "aten::mul"]
    made = Window(analysis([kernel(name, *span) for name, span in zip(names, spans, strict=True)], device=CPU, wall=3000))
    node = pl.Series("node", [False, False, True, True, True, True, False])
    chosen = pl.Series([False, False, True, True, True, False, False])
    found = loops.find_turns(made, loops.find_outermost_ops(made).with_columns(node), chosen) / US
    beyond = [(700, 600 - 250), (1450, 650 - 250), (2850, 1050 - 250)]
    assert found.tolist() == [[end - 0.75 * length, end] for end, length in beyond]


@pytest.mark.slow
@pytest.mark.needs("torch")
def test_a_loop_over_channels_is_found_in_a_real_trace_and_sixty_layers_are_not(tmp_path: Path) -> None:
    import torch
    from torch import nn
    from torch.profiler import ProfilerActivity, profile, record_function

    class Depthwise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(32, 1, 5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([nn.functional.conv1d(x[:, c : c + 1], self.weight[c : c + 1], padding=2) for c in range(32)], dim=1)

    model = nn.Sequential(Depthwise(), nn.Flatten(), nn.Linear(320, 16), *(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(60)))
    updates = torch.optim.SGD(model.parameters(), lr=0.1)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, with_stack=True) as recorder:
        for number in range(3):
            with record_function(f"ProfilerStep#{number}"):
                updates.zero_grad()
                model(torch.randn(4, 32, 10)).square().mean().backward()
                updates.step()
    recorder.export_chrome_trace(str(tmp_path / "t.json"))
    window = Window(analyse(resolve_input(str(tmp_path / "t.json"), None), lambda _: None))
    found = loops.find_loop_ops(window).filter(pl.col("calls").is_not_null())
    counts = dict(found.with_columns(pl.col("name").cast(pl.String)).group_by("name").len().iter_rows())
    assert counts["aten::conv1d"] == 3 * 32
    assert counts["autograd::engine::evaluate_function: ConvolutionBackward0"] == 3 * 32
    assert not {name for name in counts if "tanh" in name.lower() or "linear" in name.lower()}
    assert found["calls"].unique().to_list() == [32]
