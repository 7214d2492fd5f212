"""The loop of a factory: it trains as a plain loop would, and micro-batches train the same as their batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gpudiag.capture import run_script  # noqa: E402
from gpudiag.errors import InputError, UsageError  # noqa: E402
from gpudiag.experiment.task import Loop, Task  # noqa: E402


def _data(rows: int = 26) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 4, generator=generator, dtype=torch.float64)
    return list(zip(x.split(8), x.sum(1, keepdim=True).split(8), strict=True))


def _model() -> Any:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()


def _task(model: Any, loader: Any = None, **more: Any) -> Task:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(batch: Any) -> Any:
        x, y = batch
        return torch.nn.functional.mse_loss(model(x), y)

    return Task(model, optimizer, _data() if loader is None else loader, step, **more)


def _plain_loop(model: Any, steps: int) -> None:
    task, done = _task(model), 0
    while done < steps:
        for batch in task.loader:
            if done == steps:
                break
            task.optimizer.zero_grad()
            task.step(batch).backward()
            task.optimizer.step()
            done += 1


def _weights(model: Any) -> Any:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_it_trains_bit_for_bit_as_a_plain_loop_over_epochs() -> None:
    plain, ours = _model(), _model()
    _plain_loop(plain, 11)  # an epoch has four batches, the last one smaller
    assert Loop(_task(ours)).run(11) == 11
    assert torch.equal(_weights(plain), _weights(ours))


@pytest.mark.parametrize("parts", [2, 3, 8, 100])
def test_micro_batches_train_the_same_as_their_batch(parts: int) -> None:
    """The batches of 8 and of 2 split evenly and unevenly: sum of share x mean is the mean, to the rounding of 64-bit floats."""
    whole, split = _model(), _model()
    Loop(_task(whole)).run(9)
    loop = Loop(_task(split), accumulation=parts)
    loop.run(9)
    assert torch.allclose(_weights(whole), _weights(split), rtol=0, atol=1e-13)
    assert not loop.refused
    assert (loop.parts, loop.samples) == (min(parts, 8), 8)


def test_shares_matter_where_parts_differ_in_size() -> None:
    """A loss divided by the number of parts alone would weigh the samples of small parts more."""
    model = _model()
    (x, y) = _data()[0]
    torch.nn.functional.mse_loss(model(x), y).backward()
    expected = model[0].weight.grad.clone()
    model.zero_grad()
    for part in (slice(0, 2), slice(2, 5), slice(5, 8)):  # as 8 rows are split into three
        (torch.nn.functional.mse_loss(model(x[part]), y[part]) / 3).backward()
    assert not torch.allclose(model[0].weight.grad, expected, rtol=1e-3)


def test_a_batch_that_cannot_be_split_is_trained_whole_and_that_is_said() -> None:
    whole, other = _model(), _model()
    Loop(_task(whole)).run(3)
    task = _task(other)
    weighted = [(x, y, torch.ones(3)) for x, y in task.loader]
    loop = Loop(Task(other, task.optimizer, weighted, lambda batch: task.step(batch[:2])), accumulation=2)
    loop.run(3)
    assert torch.equal(_weights(whole), _weights(other))
    assert "of 8 and of 3 rows" in loop.refused
    assert loop.parts == 1


def test_an_update_of_ones_own_is_called_once_a_step() -> None:
    model, calls = _model(), []
    task = _task(model)

    def update() -> None:
        calls.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-9)))
        task.optimizer.step()
        task.optimizer.zero_grad()

    before = _weights(model)
    Loop(msgspec.structs.replace(task, update=update), accumulation=4).run(3)
    assert len(calls) == 3
    assert torch.allclose(_weights(model), before, atol=1e-8)  # the clipped update, not the plain one, was made


def test_every_step_is_marked_with_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    marked: list[int | None] = []
    monkeypatch.setattr(run_script, "step", marked.append)
    firsts: list[int] = []
    Loop(_task(_model())).run(5, first=lambda: firsts.append(len(marked)))
    assert marked == [8, 8, 8, 2, 8]
    assert firsts == [1]


def test_a_loader_that_can_be_read_once_ends_the_loop() -> None:
    assert Loop(_task(_model(), iter(_data()))).run(None) == 4


def test_a_loader_without_batches_is_one_clear_line() -> None:
    with pytest.raises(InputError, match="gives no batches"):
        Loop(_task(_model(), [])).run(3)


def test_a_step_that_returns_no_loss_is_one_clear_line() -> None:
    with pytest.raises(InputError, match="returned a NoneType"):
        Loop(Task(None, _task(_model()).optimizer, _data(), lambda batch: None)).run(3)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Task(None, None, [], "step"), "step of a Task is a str"),  # type: ignore[arg-type]
        (lambda: Task(None, None, 3, print), "loader of a Task is a int"),
        (lambda: Task(None, None, [], print), "optimizer of a Task is a NoneType"),
    ],
)
def test_what_cannot_be_trained_is_no_task(make: Callable[[], Task], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make()
