"""torch.compile without code generation, for the tests of what Dynamo sees."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest


@pytest.fixture
def no_code_generation(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile with the backend aot_eager, and let Dynamo forget before and after; `monkeypatch.undo()` gives the usual backend back."""
    import torch

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    yield
    torch._dynamo.reset()
