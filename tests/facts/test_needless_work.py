"""Work that training could do without, in small real programs: forward ops for a look, rows of tables that no batch looked up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from factories import CPU

from gpudiag.api.analysis import analyse
from gpudiag.api.inputs import resolve_input
from gpudiag.facts import Facts, capacity, memory_bound, optimizer
from gpudiag.facts.window import Window

STEPS = 3


def record(step: Callable[[], None], path: Path) -> Window:
    """Return what was recorded of STEPS steps."""
    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorder:
        for number in range(STEPS):
            with record_function(f"ProfilerStep#{number}"):
                step()
    recorder.export_chrome_trace(str(path))
    return Window(analyse(resolve_input(str(path), None), lambda _: None))


def build_program(extra: str) -> Callable[[], None]:
    """Return a step of two layers with SGD, and `extra` in it."""
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 8))
    codebook = nn.Parameter(torch.randn(16, 32))
    updates = torch.optim.SGD([*model.parameters(), codebook], lr=0.1)
    if extra == "hook":
        model[1].register_forward_hook(lambda module, inputs, output: (output.exp().sum().item(), None)[1])

    def step() -> None:
        x = torch.randn(64, 32)
        h = model[0](x[:, :32])
        if extra == "nearest code":  # what it finds leads the pass on, as an index
            found = (h.detach()[:, None, :32] - codebook[None]).exp().sum(-1).argmin(1)
            h = h + codebook[found].sum()
        loss = model[2](model[1](h)).square().mean()
        updates.zero_grad()
        loss.backward()
        updates.step()
        if extra == "validation":
            model(x).exp().sum()
        if extra == "validation without a graph":
            with torch.no_grad():
                model(x).exp().sum()

    return step


@pytest.mark.needs("torch")
@pytest.mark.parametrize(
    ("extra", "products"),
    [("", 0), ("hook", 0), ("nearest code", 0), ("validation", 2), ("validation without a graph", 0)],
)
def test_what_no_backward_pass_needs_is_told_by_the_numbers_of_autograd(extra: str, products: int, tmp_path: Path) -> None:
    window = record(build_program(extra), tmp_path / "t.json")
    names = capacity.find_unwalked_work(window)["op_name"].to_list()
    # of the last validation nothing is known: no backward pass comes after it
    assert names.count("aten::addmm") == products * (STEPS - 1)
    assert names.count("aten::exp") == {"hook": STEPS, "validation": STEPS - 1}.get(extra, 0)


def build_table(rows: int, lookups: int, **options: Any) -> Callable[[], None]:
    """Return a step of an embedding with Adam; `tied`: its table is the last layer too."""
    import torch
    from torch import nn

    tied = options.pop("tied", False)
    table = nn.Embedding(rows, 16, **options)
    updates = (torch.optim.SparseAdam if options else torch.optim.Adam)(table.parameters())

    def step() -> None:
        updates.zero_grad()
        x = table(torch.randint(rows, (lookups,)))
        (x @ table.weight.T if tied else x).square().mean().backward()
        updates.step()

    return step


@pytest.mark.needs("torch")
@pytest.mark.parametrize(
    ("rows", "lookups", "options", "unused"),
    [(1000, 50, {}, 0.95), (1000, 1000, {}, None), (1000, 50, {"sparse": True}, None), (1000, 50, {"tied": True}, None)],
)
def test_rows_that_no_batch_looked_up(rows: int, lookups: int, options: dict[str, Any], unused: float | None, tmp_path: Path) -> None:
    window = record(build_table(rows, lookups, **options), tmp_path / "t.json")
    found = optimizer.find_unused_row_work(window)
    if unused is None:
        assert not found.height
        return
    assert set(found["phase"]) == {"backward", "optimizer"}
    assert found["unused"].to_list() == pytest.approx([unused] * found.height)
    assert Facts(window.analysis).value("unused_rows_ns") == pytest.approx(unused * found["time_ns"].sum())


@pytest.mark.needs("torch")
@pytest.mark.parametrize(("foreach", "style"), [(True, "foreach"), (False, "for-loop")])
def test_foreach_on_a_cpu_is_no_loop_of_the_program(foreach: bool, style: str, tmp_path: Path) -> None:
    """There an op over lists runs those of its tensors, which are the ops of the loop."""
    import torch

    parameters = [torch.nn.Parameter(torch.randn(100)) for _ in range(20)]
    updates = torch.optim.RMSprop(parameters, foreach=foreach)

    def step() -> None:
        torch.stack([p.square().sum() for p in parameters]).sum().backward()
        updates.step()

    assert optimizer.optimizer_style(record(step, tmp_path / "t.json")) == style


@pytest.mark.needs("torch")
@pytest.mark.parametrize(("width", "dimension", "irregular"), [(16, 0, True), (32, 0, False), (32, 1, True)])
def test_a_cpu_streams_rows_of_two_cache_lines(width: int, dimension: int, irregular: bool, tmp_path: Path) -> None:
    """16 and 32 floats are one line and two; along the second dimension each index takes one element."""
    import torch

    table, found = torch.randn(500, width), torch.randint(16, (100,))
    window = record(lambda: table.index_select(dimension, found), tmp_path / "t.json")
    fast = msgspec.structs.replace(CPU, bandwidth_byte_per_s=1e15)  # so that every call is far below it
    window = Window(msgspec.structs.replace(window.analysis, device=fast))
    assert bool(memory_bound.find_irregular_work(window).height) is irregular
