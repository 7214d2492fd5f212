"""The outermost modules of a program, found before their first call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from gpudiag.capture.hooks import Patches  # noqa: E402
from gpudiag.experiment.trial.applied_fixes import QUIET_CALLS, RootFinder  # noqa: E402
from gpudiag.fixes.compile import read_dynamo_counts  # noqa: E402

nn = torch.nn
PLAIN = nn.Module.__call__


class Found:
    """What a finder has told, and the finder's own switch."""

    def __init__(self) -> None:
        self.modules: list[Any] = []
        self.change: Callable[[Any], None] = lambda _: None
        self.patches = Patches()
        RootFinder(self._tell).install(self.patches)

    def _tell(self, module: Any) -> None:
        self.modules.append(module)
        self.change(module)


@pytest.fixture
def found() -> Iterator[Found]:
    finding = Found()
    yield finding
    finding.patches.restore()
    assert nn.Module.__call__ is PLAIN


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.during: Callable[[], None] = lambda: None

    def forward(self, x: Any) -> Any:
        self.during()
        return self.inner(x)


X = torch.ones(2, 4)


def test_only_the_outermost_module_is_a_root_and_each_is_told_once(found: Found) -> None:
    net, head = Net(), nn.Linear(4, 1)
    for _ in range(3):
        head(net(X)).sum().backward()
    assert found.modules == [net, head]


def test_what_does_not_train_is_none(found: Found) -> None:
    nn.MSELoss()(X, X)  # no weights
    nn.Dropout()(X)
    frozen = Net().requires_grad_(False)
    frozen(X)
    evaluated = Net().eval()
    evaluated(X)
    unused = Net()
    with torch.no_grad():
        unused(X)
    assert found.modules == []
    unused(X)
    assert found.modules == [unused]


def test_a_lazy_module_is_one_once_it_has_weights(found: Found) -> None:
    net = nn.LazyLinear(2)
    net(X)
    assert found.modules == []
    net(X)
    assert found.modules == [net]


def test_after_many_calls_without_another_one_it_looks_no_more(found: Found) -> None:
    first, second = Net(), Net()
    for _ in range(QUIET_CALLS - 1):
        first(X)
    second(X)
    for _ in range(QUIET_CALLS):
        first(X)
    assert found.modules == [first, second]
    assert nn.Module.__call__ is PLAIN
    Net()(X)
    assert len(found.modules) == 2


def test_the_first_call_is_changed_too(found: Found) -> None:
    net = Net()
    found.change = lambda module: setattr(module, "forward", lambda x: 7 * x)
    assert torch.equal(net(X), 7 * X)


def test_a_root_that_raises_leaves_everything_in_place(found: Found) -> None:
    def fail() -> None:
        raise ValueError("planted")

    broken, later = Net(), Net()
    broken.during = fail
    for _ in range(2):
        with pytest.raises(ValueError, match="planted"):
            broken(X)
    later(X)
    assert found.modules == [broken, later]


def test_modules_see_the_plain_call_while_a_root_runs(found: Found) -> None:
    seen: list[Any] = []
    net = Net()
    net.during = lambda: seen.append(nn.Module.__call__)
    net(X)
    assert seen == [PLAIN]
    assert nn.Module.__call__ is not PLAIN


def test_a_module_that_another_thread_calls_for_a_root_is_none(found: Found) -> None:
    net, replica = Net(), Net()
    alone: list[Any] = []

    def in_thread() -> None:
        thread = threading.Thread(target=lambda: alone.append(replica(X)))
        thread.start()
        thread.join()

    net.during = in_thread
    net(X)
    assert len(alone) == 1
    assert found.modules == [net]


def test_what_checkpointing_calls_again_in_the_backward_pass_is_none(found: Found) -> None:
    first, second = Net(), Net()
    model = nn.ModuleList([first, second])
    x = X.clone().requires_grad_()
    checkpoint(second, checkpoint(first, x, use_reentrant=True), use_reentrant=True).sum().backward()
    assert found.modules == []  # in the forward pass without gradients, in the backward pass not for the first time
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_tracing_is_no_training(found: Found) -> None:
    net = nn.Sequential(nn.Linear(4, 4))
    torch.jit.trace(net, X)
    torch.fx.symbolic_trace(net)
    assert found.modules == []


def test_a_method_that_was_kept_does_nothing_once_it_is_over(found: Found) -> None:
    net = Net()
    kept = net.__call__  # as torch.compile keeps it
    found.patches.restore()
    assert nn.Module.__call__ is PLAIN
    kept(X)
    assert found.modules == []


def test_it_may_end_while_a_root_runs(found: Found) -> None:
    net = Net()
    net.during = found.patches.restore
    net(X)
    assert nn.Module.__call__ is PLAIN


@pytest.fixture
def dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_dynamo_knows_the_plain_call_though_it_was_imported_later(found: Found, dynamo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo import utils
    from torch._dynamo.variables import nn_module

    if not hasattr(utils, "unpatched_nn_module_call"):
        pytest.skip("this torch does not look whether somebody has patched the call of modules")
    monkeypatch.setattr(utils, "unpatched_nn_module_call", nn.Module.__call__)
    monkeypatch.setattr(nn_module, "unpatched_nn_module_call", nn.Module.__call__)
    Net()(X)
    assert utils.unpatched_nn_module_call is nn_module.unpatched_nn_module_call is PLAIN


@pytest.mark.parametrize("compile_it", [lambda net: torch.compile(net, backend="eager"), lambda net: net.compile(backend="eager") or net])
def test_a_program_that_compiles_has_as_many_graphs_and_none_more_at_the_end(found: Found, dynamo: None, compile_it: Any) -> None:
    class Own(Net):
        """Of a class of its own: Dynamo keeps what it knows with the code."""

        def forward(self, x: Any) -> Any:
            return self.inner(x) + 1

    model = compile_it(Own())
    before = read_dynamo_counts()
    model(X).sum().backward()
    model(X).sum().backward()
    assert found.modules == [model]
    assert (read_dynamo_counts() - before)["graph"] == 1
    found.patches.restore()
    model(X).sum().backward()
    assert read_dynamo_counts() - before == {"graph": 1}


def test_a_module_inside_of_a_compiled_function_is_none(found: Found, dynamo: None) -> None:
    net = Net()
    step = torch.compile(lambda x: net.inner(x).sum(), backend="eager")
    before = read_dynamo_counts()
    step(X).backward()
    assert found.modules == []
    assert not (read_dynamo_counts() - before)["graph break"]
