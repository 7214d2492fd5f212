"""torch.compile put into programs: truly compiled, or not applied. Without code generation: what counts here is what Dynamo sees."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from applied_fixes import applied

torch = pytest.importorskip("torch", reason="torch is not installed")

from gpudiag.errors import InputError  # noqa: E402
from gpudiag.fixes.compile import FuseRegion  # noqa: E402

nn = torch.nn
X = torch.linspace(-1, 1, 32).reshape(4, 8)


pytestmark = pytest.mark.usefixtures("no_code_generation")


def sequential() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))


class Model(nn.Module):
    """A class of the user's."""

    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])
        self.head = nn.Linear(8, 1)
        self.breaks = breaks

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.head(x)


def train(model: Any, steps: int = 3, x: Any = X) -> Any:
    for _ in range(steps):
        loss = model(x).square().mean()
        loss.backward()
    return loss.detach()


@pytest.mark.parametrize("make", [sequential, Model, lambda: sequential()[0]])
def test_each_class_of_root_is_compiled_as_one_graph(make: Any) -> None:
    plain = train(make())
    model = make()
    with applied("compile") as evidence:
        loss = train(model)
        shown = evidence()
    assert shown.found == f"{type(model).__name__}: 1 graph, 0 graph breaks, 0 recompilations"
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(train(model), plain)  # and goes on without the finder
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1


@pytest.mark.slow
def test_breaks_and_recompilations_are_told() -> None:
    model = Model(breaks=True)
    with applied("compile") as evidence:
        train(model)
        train(model, x=X[:2])
        shown = evidence()
    assert shown.found.startswith("Model: 4 graphs, "), shown
    assert "recompilation" in shown.found
    assert ", 0 graph breaks" not in shown.found
    assert ", 0 recompilations" not in shown.found


def _compiled_part() -> Any:
    model = Model()
    model.head = torch.compile(model.head)
    return model


def _compiled_itself() -> Any:
    model = Model()
    model.compile(backend="aot_eager")
    return model


def _compiled_forward() -> Any:
    model = Model()
    model.forward = torch.compile(model.forward)
    return model


@pytest.mark.parametrize(
    ("make", "where"),
    [(lambda: torch.compile(Model()), ""), (_compiled_itself, ""), (_compiled_forward, ""), (_compiled_part, " (at head)")],
)
def test_a_program_that_compiles_is_not_compiled_twice(make: Any, where: str) -> None:
    model = make()
    with applied("compile") as evidence:
        train(model)
        shown = evidence()
    assert (shown.found, shown.reason) == ("", f"the program compiles already{where}")


def test_what_compiles_nothing_is_not_applied() -> None:
    model = Model()
    model.forward = torch.compiler.disable(model.forward)
    with applied("compile") as evidence:
        train(model)
        shown = evidence()
    assert (shown.found, shown.reason) == ("", "torch.compile made no graph of Model")


def test_without_a_root_nothing_is_applied() -> None:
    with applied("compile") as evidence:
        (nn.Parameter(torch.ones(3)) * 2).sum().backward()
        shown = evidence()
    assert shown.found == ""
    assert shown.reason.startswith("no module with weights to train was called")


def test_a_jit_module_is_refused_with_the_reason() -> None:
    traced = torch.jit.trace(sequential(), X)
    with applied("compile") as evidence:
        train(traced)
        shown = evidence()
    assert "torch.jit" in shown.reason


def test_copies_of_a_compiled_model_have_their_own_weights(tmp_path: Any) -> None:
    model = Model()
    with applied("compile"):
        train(model)
        average, stored = copy.deepcopy(model), pickle.dumps(model)
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.zero_()
    assert torch.equal(average(X), torch.zeros(4, 1))  # not those of the model that it was copied from
    assert not torch.equal(model(X), torch.zeros(4, 1))
    torch.testing.assert_close(pickle.loads(stored)(X), model(X))  # noqa: S301 - our own


def test_what_ddp_wraps_is_compiled() -> None:
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    if not distributed.is_available():
        pytest.skip("this torch has no distributed package")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(sequential())
        with applied("compile") as evidence:
            train(model)
            shown = evidence()
        assert shown.found.startswith("Sequential: 1 graph, 0 graph breaks")
        assert "forward" in vars(model.module)
        assert "forward" not in vars(model)
    finally:
        distributed.destroy_process_group()


def test_data_parallel_on_several_devices_is_refused() -> None:
    class DataParallel(nn.Module):  # as torch names it; a real one needs GPUs
        device_ids = (0, 1)

        def __init__(self) -> None:
            super().__init__()
            self.module = sequential()

        def forward(self, x: Any) -> Any:
            return self.module(x)

    with applied("compile") as evidence:
        train(DataParallel())
        shown = evidence()
    assert "replicas" in shown.reason


def test_a_region_is_compiled_by_its_path() -> None:
    plain = train(Model())
    model = Model()
    with applied("fuse-region=layers.*.1") as evidence:
        loss = train(model)
        shown = evidence()
    assert shown.found == "3 x layers.*.1: 1 graph, 0 graph breaks, 0 recompilations"  # equal blocks share it
    assert "forward" not in vars(model)
    torch.testing.assert_close(loss, plain)


def test_a_path_that_is_not_there_is_told_with_the_nearest() -> None:
    with applied("fuse-region=headd") as evidence:
        train(Model())
        shown = evidence()
    assert shown.reason == "the model has no module headd; did you mean 'head'?"
    with pytest.raises(InputError, match="takes the path"):
        FuseRegion(None)


def test_cuda_graphs_need_a_gpu() -> None:
    if torch.cuda.device_count():
        pytest.skip("there is a GPU here: tests/gpu has it")
    for fix in ("compile-reduce-overhead", "cuda-graphs", "cudnn-benchmark"):
        with applied(fix) as evidence:
            train(Model())
            shown = evidence()
        assert (shown.found, shown.reason) == ("", "needs a GPU, and torch sees none here")


def test_max_autotune_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    compile_it = torch.compile

    def noted(model: Any, *, mode: Any = None) -> Any:
        asked.append(mode)
        return compile_it(model)

    monkeypatch.setattr(torch, "compile", noted)
    with applied("compile-max-autotune") as evidence:
        train(sequential())
        shown = evidence()
    assert asked == ["max-autotune"]
    assert shown.found.startswith("Sequential: 1 graph")
    assert shown.found.endswith("0 ops tuned in this process")


@pytest.mark.slow
@pytest.mark.parametrize("fix", ["compile", pytest.param("compile-max-autotune", marks=pytest.mark.long)])
def test_with_code_generation(fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    plain = train(sequential())
    model = sequential()
    with applied(fix) as evidence:
        loss = train(model)
        shown = evidence()
    assert shown.found.startswith("Sequential: 1 graph, 0 graph breaks"), shown
    torch.testing.assert_close(loss, plain)


def test_repeated_blocks_are_compiled_one_by_one() -> None:
    model = Model(breaks=True)
    with applied("compile-blocks") as evidence:
        train(model)
        found = evidence().found or ""  # graphs are shared: two, as the input of the first block needs no gradient; the break lies outside
        assert found.startswith("3 blocks: ")
        assert "0 graph breaks" in found
    with applied("compile-blocks") as evidence:
        train(nn.Linear(8, 1))
        assert evidence().reason == "Linear has no list of equal blocks"
