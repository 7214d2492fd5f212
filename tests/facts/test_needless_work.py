"""Work that training could do without, in small real programs: forward ops for a look, rows of tables that no batch looked up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from factories import CPU

from gpudiag.analysis import analyse
from gpudiag.facts import Facts, capacity, memory_bound, needless_work, optimizer
from gpudiag.facts.window import Window
from gpudiag.inputs import resolve_input

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

    tied, bags = options.pop("tied", False), options.pop("bags", False)
    table = (nn.EmbeddingBag if bags else nn.Embedding)(rows, 16, **options)
    updates = (torch.optim.SparseAdam if options else torch.optim.Adam)(table.parameters())

    def step() -> None:
        updates.zero_grad()
        x = table(torch.randint(rows, (lookups // 5, 5) if bags else (lookups,)))
        (x @ table.weight.T if tied else x).square().mean().backward()
        updates.step()

    return step


@pytest.mark.needs("torch")
@pytest.mark.parametrize(
    ("rows", "lookups", "options", "unused"),
    [
        (1000, 50, {}, 0.95),
        (1000, 1000, {}, None),
        (1000, 50, {"sparse": True}, None),
        (1000, 50, {"tied": True}, None),
        (1000, 50, {"bags": True}, 0.95),
        (1000, 50, {"bags": True, "sparse": True}, None),
    ],
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


def build_training(kind: str) -> Callable[[], None]:
    """Return a step that computes gradients for nobody, or seems to: what `kind` says."""
    import torch
    from torch import nn

    first, second = (nn.Sequential(nn.Linear(24, width), nn.Tanh(), nn.Linear(width, 24)) for width in (40, 56))
    one, two = torch.optim.SGD(first.parameters(), lr=0.1), torch.optim.Adam(second.parameters(), lr=0.1)

    def teach(order: str) -> None:
        x = torch.randn(16, 24)
        wanted, found = (second(x), first(x)) if order == "teacher first" else (first(x), second(x))
        one.zero_grad()
        (wanted - found).square().mean().backward()
        one.step()

    def play(fakes: Callable[[torch.Tensor], torch.Tensor]) -> None:  # `first` judges what `second` makes
        one.zero_grad()
        first(fakes(second(torch.randn(16, 24)))).square().mean().backward()
        one.step()
        two.zero_grad()
        first(second(torch.randn(16, 24))).square().mean().neg().backward()
        two.step()

    def accumulate(read: bool) -> None:
        one.zero_grad()
        for _ in range(3):
            first(torch.randn(16, 24)).square().mean().backward()
            if read:  # per-sample gradients, dropped once they are read
                for parameter in first.parameters():
                    parameter.grad.norm()
                    parameter.grad = None
        if not read:
            one.step()

    def attack() -> None:
        x = torch.randn(16, 24, requires_grad=True)
        first(x).square().mean().backward()
        one.zero_grad()
        first((x + x.grad.sign()).detach()).square().mean().backward()
        one.step()

    steps: dict[str, Callable[[], None]] = {
        "teacher first": lambda: teach("teacher first"),
        "teacher last": lambda: teach("teacher last"),
        "graph of the generator": lambda: play(lambda fakes: fakes),
        "detached": lambda: play(torch.Tensor.detach),
        "micro-batches": lambda: accumulate(read=False),
        "attack": attack,
    }
    return steps[kind]


@pytest.mark.needs("torch")
@pytest.mark.parametrize(
    ("kind", "products"),
    # of two layers three products: the input of the first needs no gradient
    [("teacher first", 3), ("teacher last", 3), ("graph of the generator", 3), ("detached", 0), ("micro-batches", 0), ("attack", 0)],
)
def test_gradients_that_no_optimizer_takes(kind: str, products: int, tmp_path: Path) -> None:
    window = record(build_training(kind), tmp_path / "t.json")
    names = needless_work.find_work_below(window, needless_work.mark_unused_gradients(window))["op_name"].to_list()
    assert names.count("aten::mm") == products * STEPS


@pytest.mark.needs("torch")
def test_backward_passes_that_go_on_into_earlier_steps(tmp_path: Path) -> None:
    import torch

    layer = torch.nn.Linear(24, 24)
    found = {}
    for detached in (False, True):
        hidden = [torch.zeros(16, 24)]

        def step(hidden: list[Any] = hidden, detached: bool = detached) -> None:
            hidden[0] = layer(hidden[0].detach() if detached else hidden[0]).tanh()
            hidden[0].square().mean().backward(retain_graph=True)

        window = record(step, tmp_path / f"{detached}.json")
        names = needless_work.find_work_below(window, needless_work.mark_earlier_graphs(window))["op_name"].to_list()
        found[detached] = names.count("aten::tanh_backward")
    assert found == {False: 2, True: 0}  # the third step walks the graphs of both; one step back alone is let pass


@pytest.mark.needs("torch")
@pytest.mark.parametrize(("kind", "products"), [("words", 2), ("targets", 0)])
def test_products_with_one_hot_rows(kind: str, products: int, tmp_path: Path) -> None:
    import torch
    from torch.nn.functional import one_hot

    table, layer = torch.randn(60, 16, requires_grad=True), torch.nn.Linear(16, 60)
    index = torch.randint(60, (4, 8))

    def step() -> None:
        rows = one_hot(index, 60).float()
        if kind == "words":
            (rows @ table).square().sum().backward()
        else:  # one-hot rows for a loss: the products of the layer have their shape too
            (layer(table[index]).log_softmax(-1) * rows).sum().backward()

    found = needless_work.find_one_hot_products(record(step, tmp_path / "t.json"))
    assert found["op_name"].to_list().count("aten::mm") == products * STEPS


@pytest.mark.parametrize(
    ("parts", "times"),
    [
        (lambda x: x.unbind(1), 0),
        (lambda x: [x[:, t] for t in range(5)], 4),  # the first gradient of a tensor is needed
        (lambda x: [x[:, t : t + 1] for t in range(5)], 4),
        (lambda x: [x[:, [t]] for t in range(5)], 4),
        (lambda x: [x[:, :3], x.sigmoid()], 1),  # added to that of the whole
        (lambda x: [write_parts(x, 5)], 4),
        (lambda x: [x[:, 2]], 0),
    ],
)
def test_gradients_of_the_whole_for_a_part(parts: Callable[[Any], Any], times: int, tmp_path: Path) -> None:
    import torch

    weight = torch.randn(5, 6, requires_grad=True)

    def step() -> None:
        torch.stack([part.sin().sum() for part in parts(torch.randn(4, 5, 6) * weight)]).sum().backward()

    facts = Facts(record(step, tmp_path / "trace.json").analysis)
    assert facts.value("part_gradients_per_step") == times


def write_parts(x: Any, count: int) -> Any:
    """Return x times its sum, written part by part."""
    out = x.new_zeros(x.shape)
    for t in range(count):
        out[:, t] = x.detach()[:, t] * x.sum()
    return out
