"""torch.compile put into programs whose loss is made by functions: over bare parameters, or over layers that no module holds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from applied_fixes import applied

torch = pytest.importorskip("torch", reason="torch is not installed")

F, nn = torch.nn.functional, torch.nn
X, Y = torch.linspace(-1, 1, 32).reshape(4, 8), torch.ones(4, 1)


pytestmark = pytest.mark.usefixtures("no_code_generation")


def make_parameters() -> dict[str, Any]:
    torch.manual_seed(0)
    return {name: torch.randn(rows, 8, requires_grad=True) for name, rows in (("first", 8), ("second", 1))}


def forward(params: dict[str, Any], x: Any, *, slope: float = 0.1) -> Any:
    return F.linear(F.leaky_relu(F.linear(x, params["first"]), slope), params["second"])


def compute_loss(params: dict[str, Any], x: Any, y: Any = Y) -> Any:
    return F.mse_loss(forward(params, x), y)


def train(step: Callable[[], Any], parameters: list[Any], steps: int = 4) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = step()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in parameters:
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
    return losses


def bare() -> tuple[Callable[[], Any], list[Any], str]:
    """A training function over bare parameters that calls another one."""
    params = make_parameters()
    return lambda: compute_loss(params, X), list(params.values()), "<lambda>()"


def closure() -> tuple[Callable[[], Any], list[Any], str]:
    """A function within a function, which holds its parameters by itself."""
    params = make_parameters()

    def step() -> Any:
        return compute_loss(params, X)

    return step, list(params.values()), "step()"


class Net:
    """Layers in a class that is no module."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layers = [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)]

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x

    def parameters(self) -> list[Any]:
        return [parameter for layer in self.layers for parameter in layer.parameters()]


def layers() -> tuple[Callable[[], Any], list[Any], str]:
    net = Net()
    return functools.partial(run_net, net), net.parameters(), "run_net()"


def run_net(net: Net) -> Any:
    return F.mse_loss(net(X), Y)


@pytest.mark.parametrize("make", [bare, closure, layers])
def test_the_function_that_makes_the_loss_is_compiled_as_one_graph(make: Callable[[], tuple[Callable[[], Any], list[Any], str]]) -> None:
    step, parameters, _ = make()
    plain = train(step, parameters)
    step, parameters, name = make()
    with applied("compile") as evidence:
        losses = train(step, parameters)
        shown = evidence()
    assert shown.found == f"{name}: 1 graph, 0 graph breaks, 0 recompilations", shown
    assert losses == pytest.approx(plain, rel=1e-5)
    assert step().item() < losses[-1]  # and is the program's own again


def test_a_function_that_calls_backward_itself_is_no_loss_but_what_it_calls_is() -> None:
    params = make_parameters()

    def train_step() -> None:
        out = forward(params, X, slope=0.2)
        F.mse_loss(out, Y).backward()

    with applied("compile") as evidence:
        for _ in range(4):
            train_step()
        shown = evidence()
    assert shown.found.startswith("forward(): 1 graph, "), shown


def test_gradients_that_are_asked_for_by_torch_autograd_grad_begin_from_a_loss_too() -> None:
    params = make_parameters()

    def compute() -> Any:
        return compute_loss(params, X)

    with applied("compile") as evidence:
        for _ in range(4):
            loss = compute()
            (penalty,) = torch.autograd.grad(loss, [params["first"]], create_graph=True)  # a part of the loss, no pass of its own
            grads = torch.autograd.grad(loss + 0.1 * penalty.square().sum(), list(params.values()))
            with torch.no_grad():
                for parameter, gradient in zip(params.values(), grads, strict=True):
                    parameter -= 0.01 * gradient
        shown = evidence()
    assert shown.found.startswith("compute(): 1 graph, "), shown


def test_functions_of_torch_are_not_the_programs_own() -> None:
    """The loop computes its loss itself, but for the last function, which is torch's: nothing of that is worth compiling alone."""
    weight = torch.ones(1, 8, requires_grad=True)
    with applied("compile") as evidence:
        for _ in range(3):
            F.mse_loss(F.linear(X, weight), Y).backward()
        shown = evidence()
    assert (shown.found, "the loop computes it itself" in shown.reason) == ("", True)


def test_a_loop_that_computes_all_by_itself_is_told_so() -> None:
    weight = torch.ones(3, requires_grad=True)
    with applied("compile") as evidence:
        for _ in range(3):
            (weight * 2).sum().backward()
        shown = evidence()
    assert (shown.found, "the loop computes it itself" in shown.reason) == ("", True)


def test_a_program_that_compiles_its_function_is_not_compiled_twice() -> None:
    params = make_parameters()
    own = torch.compile(compute_loss)
    with applied("compile") as evidence:
        train(lambda: own(params, X), list(params.values()))
        shown = evidence()
    assert (shown.found, shown.reason) == ("", "the program compiles already")


def test_a_module_is_compiled_and_not_the_function_around_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    with applied("compile") as evidence:
        train(lambda: F.mse_loss(model(X), Y), list(model.parameters()))
        shown = evidence()
    assert shown.found == "Sequential: 1 graph, 0 graph breaks, 0 recompilations", shown
