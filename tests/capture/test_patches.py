"""What is replaced in torch looks untouched to those who ask for it, and comes back."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from gpudiag.capture.hooks import Patches
from gpudiag.capture.session import Session

BACKWARD, SAVE = torch.Tensor.backward, torch.save
HANDLED: dict[Any, Callable[..., Any]] = {}


class Table(torch.Tensor):
    """Handles functions by a table, as torch's documentation on extending it shows."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = HANDLED.get(func)
        return handler(*args, **(kwargs or {})) if handler else super().__torch_function__(func, types, args, kwargs or {})


def _doubled(loss: Any, **_: Any) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        torch.autograd.backward(loss.as_subclass(torch.Tensor) * 2)


HANDLED[BACKWARD] = _doubled


class Watching(TorchFunctionMode):
    seen: list[bool]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "backward":
            self.seen.append(func is BACKWARD)
        return func(*args, **(kwargs or {}))


def test_subclasses_and_modes_are_handed_the_method_of_torch(tmp_path: Path) -> None:
    weight = torch.ones(3, requires_grad=True)
    with Session(tmp_path / "run") as prof:
        assert "backward" in vars(torch.Tensor)
        assert torch.Tensor.backward is BACKWARD
        for _ in prof.steps(range(2)):
            weight.sum().as_subclass(Table).backward()
        mode = Watching()
        mode.seen = []
        with mode:
            weight.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [5, 5, 5]
    assert mode.seen == [True]
    assert vars(torch.Tensor)["backward"] is BACKWARD


def test_save_can_be_sent_to_another_process_while_a_session_records(tmp_path: Path) -> None:
    with Session(tmp_path / "run"):
        assert torch.save is not SAVE
        assert b"torch.serialization" in pickle.dumps(torch.save)
        pickle.dumps(torch.Tensor.backward)
    assert torch.save is SAVE
    assert torch.serialization.save is SAVE


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["as put on", "the last one first"])
def test_recordings_that_end_in_any_order_leave_nothing_behind(order: tuple[int, int]) -> None:
    class Loss:
        def backward(self) -> list[str]:
            return []

    def note(word: str) -> Callable[[Any], Any]:
        return lambda original: lambda *given: [word, *original(*given)]

    original, both = Loss.backward, (Patches(), Patches())
    for word, patches in zip("ab", both, strict=True):
        patches.wrap_method(Loss, "backward", note(word))
    assert Loss().backward() == ["b", "a"]
    for number in order:
        both[number].restore()
    assert vars(Loss)["backward"] is original


class Base:
    def name(self) -> str:
        return "base"


class Child(Base):
    pass


def test_a_method_wrapped_twice_calls_both_and_an_inherited_one_is_inherited_again() -> None:
    inner, outer = Patches(), Patches()
    inner.wrap_method(Child, "name", lambda original: lambda self: f"inner {original(self)}")
    outer.wrap_method(Child, "name", lambda original: lambda self: f"outer {original(self)}")
    assert Child().name() == "outer inner base"
    assert Child.name is Base.name
    assert Base().name() == "base"
    outer.restore()
    assert Child().name() == "inner base"
    inner.restore()
    assert "name" not in vars(Child)


def test_what_someone_else_has_put_there_since_stays() -> None:
    patches = Patches()
    patches.wrap_method(Child, "name", lambda original: original)
    Child.name = theirs = lambda _: "theirs"  # type: ignore[method-assign,assignment,misc]
    patches.restore()
    assert Child.name is theirs
    del Child.name
